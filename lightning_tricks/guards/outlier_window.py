"""The rule by which a loss or a gradient norm is out of bounds: far above the accepted ones of the last steps."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class OutlierWindow:
    """Mean and standard deviation of the last accepted values of each signal, such as a loss and a gradient norm.

    Rejected values never enter: with a rule that lets them in, one NaN in the window makes every limit NaN until it
    leaves, and one spike widens the limits for as long. Each step has a place in the window, and a rejected one leaves
    the value there that an earlier step has written.

    Nothing is read on the host. The limits are computed anew after each eighth of the window, so a step costs few
    operations on the device.

    Args:
        ratios: of each signal: an outlier also exceeds this multiple of the window's largest value; 0 for none.
        size: steps in the window.
        active_after: accepted steps before finite values can be outliers.
        sigmas: standard deviations above the mean at which an outlier begins.
        device: of the values.

    Attributes:
        limits: the largest value of each signal that is no outlier, (signals,); the largest number until the window is
            active. Always finite, and in float64, in which no square overflows (float32 on mps).
        limits_in_window: how often the limits are computed while the window is filled once.

    Source: the limit is that of `SkipStepOptimizer` in OLMo-core,
        https://github.com/allenai/OLMo-core/blob/main/src/olmo_core/optim/skip_step_optimizer.py, whose window also
        takes the rejected values.
    """

    def __init__(self, ratios: Sequence[float], size: int, active_after: int, sigmas: float, device: Any) -> None:
        dtype = torch.float32 if torch.device(device).type == "mps" else torch.float64  # mps has no float64
        self.active_after, self.sigmas = active_after, sigmas
        self._ratios = torch.tensor(ratios, dtype=dtype, device=device)
        self._values = torch.zeros(len(ratios), size, dtype=dtype, device=device)
        self._filled = torch.zeros(size, dtype=dtype, device=device)  # 1 where an accepted step has written
        self._steps = 0  # judged ones
        self._every = max(steps for steps in range(1, max(size // 8, 1) + 1) if size % steps == 0)
        self.limits_in_window = size // self._every
        self.limits = self._limits()

    def accept(self, values: Tensor, accepted: Tensor) -> bool:
        """Take a step's values, (signals,), into the window if `accepted`, a 0-dim bool; whether limits are new."""
        place = self._steps % len(self._filled)
        for kept, new in ((self._values[:, place], values), (self._filled[place], torch.ones_like(self._filled[0]))):
            torch.where(accepted, new, kept, out=kept)
        self._steps += 1
        if self._steps % self._every:
            return False
        self.limits = self._limits()
        return True

    def _limits(self) -> Tensor:
        number = self._filled.sum()
        mean = self._values.mv(self._filled) / number
        deviation = ((self._values - mean.unsqueeze(1)).square().mv(self._filled) / (number - 1)).sqrt()
        deviation = deviation.hypot(1e-5 * mean)  # equal values have no deviation, and a mean that is rounded
        limits = mean.add(deviation, alpha=self.sigmas).maximum(self._ratios * self._values.amax(1))
        largest = torch.finfo(limits.dtype).max
        return torch.where(number < self.active_after, largest, limits.clamp(max=largest))

    def state_dict(self) -> dict[str, Any]:
        """The accepted values and the limits, on the host."""
        values = {"values": self._values, "filled": self._filled, "limits": self.limits}
        return {"steps": self._steps, **{name: tensor.cpu().clone() for name, tensor in values.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Go on with the values of a run whose window was as large; else keep the own ones, and return False."""
        if state["values"].shape != self._values.shape:
            return False
        self._values.copy_(state["values"])
        self._filled.copy_(state["filled"])
        self._steps = state["steps"]
        self.limits = state["limits"].to(self._values)
        return True
