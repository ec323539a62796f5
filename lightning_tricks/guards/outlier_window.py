"""The rule by which a loss or a gradient norm is out of bounds: far above the accepted ones of the last steps.

`OutlierWindow` judges on the device, for StepGuard; `SpikeDetector` counts on the host, for SpikeRollback.
"""

import math
from collections import deque
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


class SpikeDetector:
    """Judges one loss after the other, by the rule of `OutlierWindow`: losses that are out of bounds never enter.

    The bound is the lowest of the window's limits over the last `window_steps` accepted steps: a loss that rises slowly
    would otherwise lift its own limit.

    Args:
        patience_steps: so many steps in a row out of bounds are a spike.
        sigmas: standard deviations above the mean at which a loss is out of bounds. One that is not finite always is.
        window_steps: accepted steps over which mean and deviation are taken; bounds hold from half of them on.

    Attributes:
        in_a_row: steps out of bounds since the last accepted one.
        first_step: the first of them.
        loss, limit: of the last step.
    """

    def __init__(self, patience_steps: int, sigmas: float, window_steps: int) -> None:
        self.patience_steps, self.window_steps = patience_steps, window_steps
        self._window = OutlierWindow([0.0], window_steps, max(window_steps // 2, 2), sigmas, "cpu")
        self._limits: deque[float] = deque(maxlen=self._window.limits_in_window)
        self.limit, self.loss = math.inf, math.nan
        self.in_a_row = self.first_step = 0

    @property
    def spiking(self) -> bool:
        """Whether the loss has been out of bounds for as many steps as the patience lasts, up to the last one."""
        return self.in_a_row >= self.patience_steps

    def take(self, step: int, loss: float) -> None:
        """Judge the loss of a step."""
        self.loss = loss
        if math.isfinite(loss) and loss <= self.limit:
            self.in_a_row = 0
            if self._window.accept(torch.tensor([loss], dtype=torch.float64), torch.tensor(True)):
                self._limits.append(self._window.limits.item())
                self.limit = min(self._limits)
            return
        if self.in_a_row == 0:
            self.first_step = step
        self.in_a_row += 1

    def state_dict(self) -> dict[str, Any]:
        """The accepted losses and their limits, and the steps in a row."""
        counts = {"in_a_row": self.in_a_row, "first_step": self.first_step}
        return {"window": self._window.state_dict(), "limits": list(self._limits), **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; with an empty window where its size was another one."""
        if self._window.load_state_dict(state["window"]):
            self._limits.clear()
            self._limits.extend(state["limits"])
            self.limit = min(self._limits, default=math.inf)
        self.in_a_row, self.first_step = state["in_a_row"], state["first_step"]
