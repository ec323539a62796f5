"""The last accepted values of some signals, and the limit above which a new value is an outlier: all on the device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class OutlierWindow:
    """Mean and standard deviation of the last accepted values of each signal, such as loss and gradient norm.

    Rejected values never enter: with a rule that lets them in, one NaN in the window makes every limit NaN until it
    leaves, and one spike widens the limits for as long. Nothing is read on the host, and all signals lie in one tensor:
    a step costs a dozen operations on a few hundred numbers.

    Args:
        ratios: of each signal: so many times the window's largest value must an outlier exceed as well; 0 for none.
        size: steps in the window.
        active_after: accepted steps before finite values can be outliers.
        sigmas: standard deviations above the mean at which an outlier begins.
        device: of the values.

    Attributes:
        values: (signals, size), the newest last, in float64, in which no square overflows; float32 on mps.
        known_full: whether the host has heard that no value is missing, so that the shorter formula holds.

    Source: the limit is that of `SkipStepOptimizer` in OLMo-core,
        https://github.com/allenai/OLMo-core/blob/main/src/olmo_core/optim/skip_step_optimizer.py, whose window also
        takes the rejected values.
    """

    def __init__(self, ratios: Sequence[float], size: int, active_after: int, sigmas: float, device: Any) -> None:
        dtype = torch.float32 if torch.device(device).type == "mps" else torch.float64  # mps has no float64
        self.active_after, self.sigmas, self.known_full = active_after, sigmas, False
        self.ratios = torch.tensor(ratios, dtype=dtype, device=device)
        self.values = torch.zeros(len(ratios), size, dtype=dtype, device=device)
        self._steps = 0  # judged ones
        self._rejected = torch.zeros((), device=device)  # of these
        self._ages = torch.arange(size, 0, -1, device=device)  # of the values: 1 for the newest
        self._largest = torch.finfo(dtype).max  # a limit for what is finite

    def limits(self) -> Tensor:
        """The largest value of each signal that is no outlier: (signals,), the largest number until it is active.

        Always finite, so that whatever is above is an outlier.
        """
        if self.known_full:
            deviation, mean = torch.std_mean(self.values, 1)
        else:
            number = (self._steps - self._rejected).clamp(max=self.values.shape[1])
            counted = (self._ages <= number).to(self.values.dtype)
            mean = self.values.mv(counted) / number
            deviation = ((self.values - mean.unsqueeze(1)).square().mv(counted) / (number - 1)).sqrt()
        deviation = deviation.hypot(1e-5 * mean)  # equal values have no deviation, and a mean that is rounded
        limits = mean.add(deviation, alpha=self.sigmas).maximum(self.ratios * self.values.amax(1))
        if self.values.dtype == torch.float32:
            limits = limits.clamp(max=self._largest)
        return limits if self.known_full else torch.where(number < self.active_after, self._largest, limits)

    def accept(self, values: Tensor, rejected: Tensor) -> None:
        """Take a step's values, (signals,), into the window unless `rejected`, a 0-dim bool tensor."""
        moved = torch.cat([self.values[:, 1:], values.unsqueeze(1)], 1)
        self.values = torch.where(rejected, self.values, moved)
        self._rejected.add_(rejected)
        self._steps += 1

    def missing(self) -> Tensor:
        """Accepted steps until the window is full, 0-dim; 0 or less when it is."""
        return self._rejected + (self.values.shape[1] - self._steps)

    def state_dict(self) -> dict[str, Any]:
        """The accepted values, on the host."""
        accepted = self._steps - int(self._rejected)
        return {"values": self.values.cpu(), "accepted": accepted, "known_full": self.known_full, "newest_last": True}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the values of a run whose window was as large; keep an empty window otherwise."""
        values, size = state["values"], self.values.shape[1]
        if values.shape != self.values.shape:
            return
        if not state.get("newest_last"):  # release 0.1.0 wrote a ring, whose next slot is `accepted % size`
            values = values.roll(-(state["accepted"] % size), 1)
        self.values = values.to(self.values)
        self._steps = state["accepted"]
        self._rejected.zero_()
        self.known_full = state["known_full"]
