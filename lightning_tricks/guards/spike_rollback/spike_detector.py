"""Whether the loss stays out of bounds: the steps in a row at which it does, decided on the host."""

import math
from collections import deque
from typing import Any

import torch

from lightning_tricks.guards.step_guard.outlier_window import OutlierWindow

_YES = torch.tensor(True)


class SpikeDetector:
    """Judges one loss after the other. Losses that are out of bounds never enter the mean, see `OutlierWindow`.

    The bound is the lowest of the limits at the last `window_steps` accepted steps: a loss that rises slowly would
    otherwise lift its own limit.

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
        self.patience_steps = patience_steps
        self._window = OutlierWindow(1, window_steps, window_steps // 2, sigmas, "cpu")
        self._limits: deque[float] = deque([math.inf], maxlen=window_steps)
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
            self._window.accept(torch.tensor([loss], dtype=torch.float32), _YES)
            self._limits.append(float(self._window.limits()))
            self.limit = min(self._limits)
            return
        if self.in_a_row == 0:
            self.first_step = step
        self.in_a_row += 1

    def state_dict(self) -> dict[str, Any]:
        """The accepted losses, and the steps in a row; a copy."""
        window = self._window.state_dict()
        counts = {"in_a_row": self.in_a_row, "first_step": self.first_step}
        return {"window": {**window, "values": window["values"].clone()}, "limits": list(self._limits), **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; with an empty window where its size was another one."""
        if state["window"]["values"].shape == self._window.values.shape:
            self._window.load_state_dict(state["window"])
            self._limits.clear()
            self._limits.extend(state["limits"])
            self.limit = min(self._limits)
        self.in_a_row, self.first_step = state["in_a_row"], state["first_step"]
