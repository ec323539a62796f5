"""A learning rate for a reference batch, scaled to the global batch that a run really has."""

from typing import Any, Literal

from lightning_tricks._core.errors import UsageError, check_choice
from lightning_tricks._trainer.lightning import Module, Trainer, pl, rank_zero_info
from lightning_tricks._trainer.run_facts import data_rank, micro_batch
from lightning_tricks.guards.batch_size_warmup import LearningRates, lr_factor, refuse_accumulation_of_others

__all__ = ["LRScalingRule"]

Rule = Literal["linear", "sqrt"]


class LRScalingRule(pl.Callback):
    """Changes training: multiplies the learning rates by (global batch / reference batch), or by its square root.

    The recipe's `lr` is then the one for the reference batch, and holds on any number of devices: the global batch is
    processes x `accumulate_grad_batches` x micro-batch. The factor is the same for all groups and all steps, multiplies
    the schedule's values, and is printed in one line at start. A resume follows the recipe and not the checkpoint.
    Under BatchSizeWarmup the global batch is that of the last stage, and both factors multiply.

    Args:
        reference_batch_tokens: tokens of the step for which the recipe's `lr` is meant. It needs a data module with
            `micro_batch_size` and `seq_len`, as TextData and TokenData have them.
        reference_batch_samples: the same in samples (rows, images), for any DataLoader. Give one of the two.
        rule: `linear` is for SGD (Goyal et al.), `sqrt` for Adam and its kin (Malladi et al.), which this collection
            trains with by default.

    Raises:
        UsageError: none or both of the references, or one out of range; data that do not tell their batch; a scheduler
            that is no ScheduleLR; a GradientAccumulationScheduler, under which the global batch changes.

    Source: Goyal et al. 2017, https://arxiv.org/abs/1706.02677 (linear); Malladi et al. 2022,
        https://arxiv.org/abs/2205.10287 (square root).
    """

    def __init__(
        self,
        reference_batch_tokens: int | None = None,
        reference_batch_samples: int | None = None,
        rule: Rule = "sqrt",
    ) -> None:
        if (reference_batch_tokens is None) == (reference_batch_samples is None):
            raise UsageError(
                f"LRScalingRule: reference_batch_tokens={reference_batch_tokens}, reference_batch_samples="
                f"{reference_batch_samples}: give one of the two"
            )
        self._name = "reference_batch_samples" if reference_batch_tokens is None else "reference_batch_tokens"
        self._reference = reference_batch_tokens if reference_batch_samples is None else reference_batch_samples
        if self._reference is None or self._reference < 1:
            raise UsageError(f"LRScalingRule.{self._name}={self._reference}: give 1 or more")
        check_choice("LRScalingRule.rule", rule, Rule)
        self.reference_batch_tokens, self.reference_batch_samples = reference_batch_tokens, reference_batch_samples
        self.rule = rule
        self._factor = 1.0

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Put the factor over the run's schedule, before a checkpoint is loaded."""
        remedy = "take BatchSizeWarmup, or leave LRScalingRule out"
        refuse_accumulation_of_others(trainer, "LRScalingRule", remedy)
        self._factor = 1.0
        self._accumulated: int = trainer.accumulate_grad_batches  # the recipe's: BatchSizeWarmup sets its own later
        self._rates = LearningRates(trainer, "LRScalingRule", self._factor_at)

    def _factor_at(self, step: int) -> float:
        """The same at each step; a method, so that a copy of the callback can be pickled."""
        return self._factor

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Set the factor: the loaders exist now, and tell their batch."""
        ranks, loader = data_rank(trainer)[1], trainer.train_dataloader
        batch, self._factor = self.planned(trainer.datamodule, ranks * self._accumulated, loader)  # type: ignore[attr-defined]
        self._rates.refresh()
        unit = self._name.rpartition("_")[2]
        rank_zero_info(
            f"LRScalingRule: the recipe's lr is for {self._reference:,} {unit} a step, a step of this run takes "
            f"{batch:,}: lr x {self._factor:.6g} ({self.rule})"
        )

    def planned(self, data: Any, micro_batches: int, loader: Any = None) -> tuple[int, float]:
        """Tokens or samples of a step that all processes together do in so many micro-batches, and the factor for it.

        Raises:
            UsageError: see the class.
        """
        assert self._reference is not None
        batch = self._micro_batch(data, loader) * micro_batches
        return batch, lr_factor(batch, self._reference, self.rule)

    def _micro_batch(self, data: Any, loader: Any) -> int:
        """Tokens or samples of one micro-batch of one process."""
        samples, tokens = micro_batch(data, loader)
        size = tokens if self.reference_batch_tokens else samples
        if size is None:
            needs = "seq_len and micro_batch_size" if self.reference_batch_tokens else "micro_batch_size or batch_size"
            raise UsageError(
                f"LRScalingRule.{self._name}={self._reference}: neither data module nor loader tells the micro-batch "
                f"({needs}): give the data module such attributes"
            )
        return size
