"""Whether the loss stays out of bounds: the steps in a row at which it does, decided on the host."""

import math
from collections import deque
from typing import Any

import torch

from lightning_tricks.guards.outlier_window import OutlierWindow


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
