"""The last accepted values of some signals, and the limit above which a new value is an outlier: all on the device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class OutlierWindow:
    """Mean and standard deviation of the last accepted values of each signal, such as loss and gradient norm.

    Rejected values never enter: with a rule that lets them in, one NaN in the window makes every limit NaN until it
    leaves, and one spike widens the limits for as long. Nothing is read on the host.

    Args:
        ratios: of each signal: so many times the window's largest value must an outlier exceed as well; 0 for none.
        size: steps in the window.
        active_after: accepted steps before finite values can be outliers.
        sigmas: standard deviations above the mean at which an outlier begins.
        device: of the values.

    Source: the limit is that of `SkipStepOptimizer` in OLMo-core,
        https://github.com/allenai/OLMo-core/blob/main/src/olmo_core/optim/skip_step_optimizer.py, whose window also
        takes the rejected values.
    """

    def __init__(self, ratios: Sequence[float], size: int, active_after: int, sigmas: float, device: Any) -> None:
        self.active_after, self.sigmas = active_after, sigmas
        self.ratios = torch.tensor(ratios, dtype=torch.float32, device=device)
        self.values = torch.zeros(len(ratios), size, device=device)
        self.accepted = torch.zeros((), dtype=torch.int64, device=device)
        self.known_full = False  # the host has heard that none are missing, and the shorter formula holds
        self._slots = torch.arange(size, device=device)

    def limits(self) -> Tensor:
        """The largest value of each signal that is no outlier: (signals,) fp32, infinite until the window is active."""
        if self.known_full:
            deviation, mean = torch.std_mean(self.values, 1)
        else:
            number = self.accepted.clamp(max=self.values.shape[1])
            counted = (self._slots < number).float()
            mean = self.values.mv(counted) / number
            deviation = ((self.values - mean.unsqueeze(1)).square().mv(counted) / (number - 1)).sqrt()
        deviation = deviation.maximum(1e-5 * mean.abs())  # equal values have no deviation, and a mean that is rounded
        limits = mean.add(deviation, alpha=self.sigmas).maximum(self.ratios * self.values.amax(1))
        return limits if self.known_full else torch.where(self.accepted < self.active_after, torch.inf, limits)

    def accept(self, values: Tensor, accepted: Tensor) -> None:
        """Take a step's values, (signals,), into the window if `accepted`, a 0-dim bool tensor."""
        slot = (self.accepted % self.values.shape[1]).unsqueeze(0)
        kept = self.values.index_select(1, slot)
        self.values.index_copy_(1, slot, torch.where(accepted, values.unsqueeze(1), kept))
        self.accepted += accepted

    def missing(self) -> Tensor:
        """Accepted steps until the window is full, 0-dim; 0 or less when it is."""
        return self.values.shape[1] - self.accepted

    def state_dict(self) -> dict[str, Any]:
        """The accepted values, on the host."""
        return {"values": self.values.cpu(), "accepted": int(self.accepted), "known_full": self.known_full}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the values of a run whose window was as large; keep an empty window otherwise."""
        if state["values"].shape == self.values.shape:
            self.values.copy_(state["values"])
            self.accepted.fill_(state["accepted"])
            self.known_full = state["known_full"]
