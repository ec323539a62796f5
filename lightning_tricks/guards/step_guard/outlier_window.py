"""The last accepted values of some signals, and the limit above which a new value is an outlier: all on the device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class OutlierWindow:
    """Mean and standard deviation of the last accepted values of each signal, such as loss and gradient norm.

    Rejected values never enter: with a rule that lets them in, one NaN in the window makes every limit NaN until it
    leaves, and one spike widens the limits for as long. Each step has a place in the window, and a rejected one leaves
    the value there that an earlier step has written.

    Nothing is read on the host. The values of several steps, an eighth of the window, are taken in together, and the
    limits computed anew: so a step costs few operations on the device.

    Args:
        ratios: of each signal: so many times the window's largest value must an outlier exceed as well; 0 for none.
        size: steps in the window.
        active_after: accepted steps before finite values can be outliers.
        sigmas: standard deviations above the mean at which an outlier begins.
        device: of the values.

    Attributes:
        limits: the largest value of each signal that is no outlier, (signals,); the largest number until the window is
            active. Always finite, and in float64, in which no square overflows (float32 on mps).
        known_full: whether the host has heard that no value is missing, so that the shorter formula holds.

    Source: the limit is that of `SkipStepOptimizer` in OLMo-core,
        https://github.com/allenai/OLMo-core/blob/main/src/olmo_core/optim/skip_step_optimizer.py, whose window also
        takes the rejected values.
    """

    def __init__(self, ratios: Sequence[float], size: int, active_after: int, sigmas: float, device: Any) -> None:
        dtype = torch.float32 if torch.device(device).type == "mps" else torch.float64  # mps has no float64
        self.active_after, self.sigmas, self.known_full = active_after, sigmas, False
        self._ratios = torch.tensor(ratios, dtype=dtype, device=device)
        self._values = torch.zeros(len(ratios), size, dtype=dtype, device=device)
        self._filled = torch.zeros(size, dtype=dtype, device=device)  # 1 where an accepted step has written
        self._steps = 0  # judged ones
        self._waiting: list[tuple[Tensor, Tensor]] = []  # values of the last steps, and whether they are accepted
        self._every = max(steps for steps in range(1, max(size // 8, 1) + 1) if size % steps == 0)
        self.limits = self._limits()

    def accept(self, values: Tensor, accepted: Tensor) -> bool:
        """Take a step's values, (signals,), into the window if `accepted`, a 0-dim bool; whether limits are new."""
        self._waiting.append((values, accepted))
        self._steps += 1
        if self._steps % self._every:
            return False
        self._take_in()
        self.limits = self._limits()
        return True

    def _take_in(self) -> None:
        number = len(self._waiting)
        first = (self._steps - number) % self._values.shape[1]
        values, accepted = (torch.stack(own, -1) for own in zip(*self._waiting, strict=True))
        place = self._values[:, first : first + number]
        torch.where(accepted, values, place, out=place)
        if not self.known_full:
            place = self._filled[first : first + number]
            torch.maximum(place, accepted.to(place), out=place)
        self._waiting = []

    def _limits(self) -> Tensor:
        if self.known_full:
            deviation, mean = torch.std_mean(self._values, 1)
        else:
            number = self._filled.sum()
            mean = self._values.mv(self._filled) / number
            deviation = ((self._values - mean.unsqueeze(1)).square().mv(self._filled) / (number - 1)).sqrt()
        deviation = deviation.hypot(1e-5 * mean)  # equal values have no deviation, and a mean that is rounded
        limits = mean.add(deviation, alpha=self.sigmas).maximum(self._ratios * self._values.amax(1))
        largest = torch.finfo(limits.dtype).max
        if limits.dtype == torch.float32:
            limits = limits.clamp(max=largest)
        return limits if self.known_full else torch.where(number < self.active_after, largest, limits)

    def missing(self) -> Tensor:
        """Accepted steps until the window is full, as of the last limits, 0-dim."""
        return len(self._filled) - self._filled.sum()

    def state_dict(self) -> dict[str, Any]:
        """The accepted values, on the host."""
        waiting = [(values.cpu(), bool(accepted)) for values, accepted in self._waiting]
        own = {"steps": self._steps, "waiting": waiting, "known_full": self.known_full}
        return {"values": self._values.cpu(), "filled": self._filled.cpu(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the values of a run whose window was as large; keep an empty window otherwise."""
        if state["values"].shape != self._values.shape:
            return
        device = self._values.device
        filled = state.get("filled")
        if filled is None:  # of a release in which rejected steps had no place
            filled = torch.arange(len(self._filled)) < state["accepted"]
        self._values.copy_(state["values"])
        self._filled.copy_(filled)
        self._steps = state["steps"] if "steps" in state else state["accepted"]
        self._waiting = [
            (values.to(device), torch.tensor(ok, device=device)) for values, ok in state.get("waiting", [])
        ]
        self.known_full = state["known_full"]
        self.limits = self._limits()
