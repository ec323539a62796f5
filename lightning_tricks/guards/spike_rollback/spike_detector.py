"""Whether the loss stays out of bounds: the steps in a row at which it does, decided on the host."""

import math
from collections import deque
from typing import Any


class SpikeDetector:
    """Judges one loss after the other, by the rule of `OutlierWindow`: losses that are out of bounds never enter.

    The bound is the lowest of the limits at the last `window_steps` accepted steps: a loss that rises slowly would
    otherwise lift its own limit. Plain numbers, as they come from the host: tensors would take seven times as long.

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
        self.patience_steps, self.sigmas, self.window_steps = patience_steps, sigmas, window_steps
        self._accepted: deque[float] = deque(maxlen=window_steps)
        self._limits: deque[float] = deque(maxlen=window_steps)
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
            self._accepted.append(loss)
            if len(self._accepted) >= self.window_steps // 2:
                self._limits.append(limit_of(self._accepted, self.sigmas))
                self.limit = min(self._limits)
            return
        if self.in_a_row == 0:
            self.first_step = step
        self.in_a_row += 1

    def state_dict(self) -> dict[str, Any]:
        """The accepted losses and their limits, and the steps in a row."""
        counts = {"in_a_row": self.in_a_row, "first_step": self.first_step}
        return {"window": self.window_steps, "accepted": list(self._accepted), "limits": list(self._limits), **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; with an empty window where its size was another one."""
        same = state["window"] == self.window_steps
        self._accepted = deque(state["accepted"] if same else (), maxlen=self.window_steps)
        self._limits = deque(state["limits"] if same else (), maxlen=self.window_steps)
        self.limit = min(self._limits, default=math.inf)
        self.in_a_row, self.first_step = state["in_a_row"], state["first_step"]


def limit_of(values: deque[float], sigmas: float) -> float:
    """The mean of two or more values, and `sigmas` of their standard deviations above it."""
    mean = sum(values) / len(values)
    deviation = math.sqrt(sum([(value - mean) ** 2 for value in values]) / (len(values) - 1))
    return mean + sigmas * max(deviation, 1e-5 * abs(mean))  # equal values have no deviation, and a rounded mean
