"""Keep an exponential moving average of the weights, and validate with it."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from lightning_tricks._core.errors import UsageError
from lightning_tricks.checkpoints.open_checkpoint import MEAN
from lightning_tricks.guards.averages.weight_average import WeightAverage

__all__ = ["EMA"]

DECAY = 0.999


def decay_at(update: int, decay: float, warmup: bool) -> float:
    """The decay of update number `update`, counted from 0.

    With `warmup` it is min(decay, (1 + update) / (10 + update)): 0.1 at the first update, `decay` from update
    (10 * decay - 1) / (1 - decay) on, which is 8,990 for 0.999.

    Source: `num_updates` of https://www.tensorflow.org/api_docs/python/tf/train/ExponentialMovingAverage
    """
    return min(decay, (1 + update) / (10 + update)) if warmup else decay


class EMA(WeightAverage):
    """Keeps an exponential moving average of the weights, and has validation, test and predict use it; training itself
    stays as it is to the bit.

    After each optimizer step: average = decay * average + (1 - decay) * weights. The average begins as the weights
    before the first step. Where the weights are in shards (`FSDP2Strategy`), each process averages its own; nothing is
    gathered. Averages of bf16 weights are in fp32. Weights that a finetuning unfreezes at the start of an epoch, as
    BackboneFinetuning does, are averaged from then on. A step that a guard has skipped leaves the weights unchanged;
    the average takes in the same weights once more, which does no harm.

    At the start of a validation the average and the weights change places, in the same memory, and at its end, or after
    an exception, they change back. `val/ema_share` tells that the other metrics of this validation are of the average:
    it is 1, and 0 where there was no average.

    Checkpoints hold the weights that are trained as `state_dict`, whenever they are saved, and the average beside them
    as `averages`. A resumed run goes on with it to the bit, also in folders of shards and with another number of
    processes. `generate --average ema`, `load_weights(..., average="ema")`, `InitFrom` and
    `LanguageModel.load_from_checkpoint` take it in place of the weights. A checkpoint of weights alone lacks it.

    Args:
        decay: share of the average that stays at each step. 0.999, as in Lightning's EMAWeightAveraging and in torch.
        horizon_steps: another way to give the decay: 1 - 1 / horizon_steps. An old step has lost half of its share
            after 0.69 * horizon_steps steps.
        warmup: begin with a small decay, so that the first weights are soon forgotten, see `decay_at`.
        validate: whether validation, test and predict use the average; if not, it is kept and saved only.

    Raises:
        UsageError: an option out of range; both `decay` and `horizon_steps`; DeepSpeed, FSDP1 or Lightning's
            ModelParallelStrategy; two of them in one Trainer, or beside a TailAverage if both validate; at a resume,
            an average of other weights.

    Source: Polyak and Juditsky 1992, https://doi.org/10.1137/0330046; `horizon_steps` is TAU in
        https://github.com/KellerJordan/modded-nanogpt/pull/325.
    """

    NAME: ClassVar[str] = "ema"

    def __init__(
        self,
        decay: float = DECAY,
        horizon_steps: float | None = None,
        warmup: bool = True,
        validate: bool = True,
    ) -> None:
        if not 0 < decay < 1:
            raise UsageError(f"EMA: decay={decay}: give a number between 0 and 1, such as 0.999")
        if horizon_steps is not None and not 1 < horizon_steps < math.inf:
            raise UsageError(f"EMA: horizon_steps={horizon_steps}: give a finite number above 1")
        if horizon_steps is not None and decay != DECAY:
            raise UsageError(f"EMA: decay={decay} and horizon_steps={horizon_steps} say the same: give one of them")
        super().__init__(validate)
        self.decay = decay if horizon_steps is None else 1 - 1 / horizon_steps
        self.horizon_steps, self.warmup = horizon_steps, warmup
        self._updates = 0  # of the average

    def begin(self) -> None:
        """Begin with the weights as they are."""
        assert self.weights is not None
        self.terms, self._updates = {MEAN: self.weights.copies()}, 0

    def advance(self, trainer: Any) -> None:
        """Move towards the weights."""
        assert self.weights is not None
        self.weights.move(self.terms[MEAN], 1 - decay_at(self._updates, self.decay, self.warmup))
        self._updates += 1

    def progress(self) -> dict[str, Any]:
        """The steps and updates so far."""
        return {**super().progress(), "updates": self._updates}

    def load_progress(self, progress: Mapping[str, Any]) -> None:
        """Go on counting."""
        super().load_progress(progress)
        self._updates = progress["updates"]
