"""What EMA and TailAverage share: when an average moves, when it takes the weights' place, how it is saved."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import Module, Trainer, pl, rank_zero_info, rank_zero_warn
from lightning_tricks._on_exception import only_warn
from lightning_tricks._replaced import replaced
from lightning_tricks._trainer import is_a
from lightning_tricks.checkpoints.averages import AVERAGES, RAW
from lightning_tricks.guards.averages.averaged_weights import AveragedWeights
from lightning_tricks.guards.averages.swap import Swap, drop_gathered


class WeightAverage(pl.Callback):
    """Base of the callbacks that average the weights; a subclass says how, by `begin` and `advance`.

    Attributes:
        NAME: of the average in checkpoints and metrics.
        weights: what is averaged; None before a run.
        terms: averages by name, each with a tensor for each of `weights.tensors`.
        parts: how much of each term makes up the average; together 1.
        step: `trainer.global_step` when the average last moved.
    """

    NAME: ClassVar[str]

    def __init__(self, blend: float, validate: bool) -> None:
        if not 0 < blend <= 1:
            raise UsageError(f"{type(self).__name__}: blend={blend}: give a share of the average, above 0, up to 1")
        self.blend, self.validate = blend, validate
        self._swapped = ExitStack()
        self._trainer: Any = None
        self._forget()

    def _forget(self) -> None:
        self.weights: AveragedWeights | None = None
        self.terms: dict[str, list[Tensor]] = {}
        self.parts: dict[str, float] = {}
        self.step = 0
        self._loaded: dict[str, Any] | None = None

    # ---- for subclasses

    @abstractmethod
    def begin(self) -> None:
        """Set `terms` and `parts` for a run that begins."""

    @abstractmethod
    def advance(self, trainer: Any) -> None:
        """Take in the weights as they are after `trainer.global_step`; `step` is still that of the last time."""

    def progress(self) -> dict[str, Any]:
        """The counters that a resume needs, in a checkpoint."""
        return {"step": self.step}

    def load_progress(self, progress: Mapping[str, Any]) -> None:
        """Go on with the counters of a checkpoint."""
        self.step = progress["step"]

    # ---- the average along the run

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Refuse strategies and callbacks with which wrong weights would be averaged or validated."""
        self._refuse(trainer)
        if stage == "fit":
            self._forget()

    def _refuse(self, trainer: Any) -> None:
        name, strategy = type(self).__name__, trainer.strategy
        # FSDP2Strategy, a ModelParallelStrategy too, saves averages in shards
        ours = hasattr(strategy, "shards_modules")
        if not ours and is_a(strategy, "DeepSpeedStrategy", "FSDPStrategy", "ModelParallelStrategy"):
            raise UsageError(
                f"{name}: {type(strategy).__name__} keeps weights in a form that cannot be averaged and saved: train "
                "on one device, with ddp or with FSDP2Strategy"
            )
        others = [other for other in trainer.callbacks if isinstance(other, WeightAverage) and other is not self]
        for other in others:
            if other.NAME == self.NAME:
                raise UsageError(f"{name}: the Trainer has two, whose averages would have one name: remove one")
            if self.validate and other.validate:
                raise UsageError(
                    f"{name}: validate=True, and {type(other).__name__} would validate with its average too: set "
                    "validate of one of them to False"
                )

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        """Keep the average until the weights have their device and dtype."""
        self._loaded = (checkpoint.get(AVERAGES) or {}).get(self.NAME)
        if self._loaded is None:
            begins = "it begins with the weights" if trainer.state.fn == "fit" else "the weights are taken as they are"
            rank_zero_warn(f"{type(self).__name__}: the checkpoint {trainer.ckpt_path} holds no average: {begins}")

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Begin the average, or go on with the one of the checkpoint."""
        self._trainer = trainer
        saved, self._loaded = self._loaded, None
        if lazy := next((key for key, param in pl_module.named_parameters() if is_lazy(param)), None):
            raise UsageError(
                f"{type(self).__name__}: {lazy} has no size yet (a lazy module): send one batch through the module in "
                "its constructor or in configure_model"
            )
        if saved is not None:
            self._restore(trainer, pl_module, saved)
        else:
            drop_gathered(pl_module)  # a sanity check may have left parameters gathered
            self.weights, self.step = AveragedWeights(pl_module), trainer.global_step
            self.begin()
        rank_zero_info(self._summary())

    def _restore(self, trainer: Any, module: Module, saved: Mapping[str, Any]) -> None:
        drop_gathered(module)
        self.weights = AveragedWeights(module)
        self.terms = {term: self.weights.load(value, trainer.ckpt_path) for term, value in saved["weights"].items()}
        self.parts = dict(saved["parts"])
        self.load_progress(saved["progress"])

    def _summary(self) -> str:
        assert self.weights is not None
        used = "validation, test and predict take it in place of the weights" if self.validate else "it is only saved"
        return (
            f"{type(self).__name__}: averages {len(self.weights.tensors):,} weights, in {len(self.terms)} x "
            f"{self.weights.nbytes / 2**30:.3f} GiB a process; {used}"
        )

    def after_rollback(self) -> None:
        """Begin anew with the weights that SpikeRollback brought back: the average is of those that were given up."""
        if self.weights is not None:
            self.step = self._trainer.global_step  # this step's weights are in it, wherever the two callbacks stand
            self.begin()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Take in the weights, if an optimizer has stepped in this batch."""
        self._catch_up(trainer)

    def _catch_up(self, trainer: Any) -> None:
        if self.weights is not None and trainer.global_step != self.step:
            self.advance(trainer)
            self.step = trainer.global_step

    # ---- in a checkpoint

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        """Add the average, beside the weights that are trained."""
        if self.weights is None:
            if self._loaded is not None:  # of a run that has nothing left to train
                checkpoint.setdefault(AVERAGES, {})[self.NAME] = self._loaded
            return
        if trainer.state.fn == "fit":
            self._catch_up(trainer)  # a callback in front of this one may save
        checkpoint.setdefault(AVERAGES, {})[self.NAME] = {
            "weights": {term: self.weights.by_name(average) for term, average in self.terms.items()},
            "shares": self._shares(),
            "parts": dict(self.parts),
            "progress": self.progress(),
        }

    def _shares(self) -> dict[str, float]:
        """Shares of the weights and of the terms in what takes the weights' place."""
        return {RAW: 1 - self.blend, **{term: self.blend * part for term, part in self.parts.items()}}

    # ---- in the place of the weights

    def _enter(self, trainer: Any, module: Module) -> None:
        if not self.validate or trainer.sanity_checking:
            return
        if self._loaded is not None and trainer.state.fn != "fit":
            saved, self._loaded = self._loaded, None
            self._restore(trainer, module, saved)
        if self.weights is not None and self.weights.module is module:
            self._swapped.enter_context(self._in_place(trainer, self.weights))

    @contextmanager
    def _in_place(self, trainer: Any, weights: AveragedWeights) -> Iterator[None]:
        """Have the average in the place of the weights, except while a checkpoint is saved."""
        swap, save = Swap(weights, self.terms, self._shares()), trainer.save_checkpoint

        def save_weights(*args: Any, **kwargs: Any) -> Any:
            swap.leave()
            try:
                return save(*args, **kwargs)
            finally:
                swap.enter()

        try:
            swap.enter()
            with replaced(trainer, "save_checkpoint", save_weights):
                yield
        finally:
            swap.leave()

    def on_validation_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Put the average in the place of the weights."""
        self._enter(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Log which weights were validated."""
        self._tell(trainer, pl_module, "val")

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Put the weights back."""
        self._swapped.close()

    def on_test_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Put the average in the place of the weights."""
        self._enter(trainer, pl_module)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Log which weights were tested."""
        self._tell(trainer, pl_module, "test")

    def on_test_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Put the weights back."""
        self._swapped.close()

    def on_predict_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Put the average in the place of the weights."""
        self._enter(trainer, pl_module)

    def on_predict_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Put the weights back."""
        self._swapped.close()

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        """Put the weights back."""
        with only_warn(f"{type(self).__name__}: the weights were not put back"):
            self._swapped.close()

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Put the weights back."""
        self._swapped.close()

    def _tell(self, trainer: Any, module: Module, stage: str) -> None:
        if not trainer.sanity_checking and self.validate:
            in_place = self.weights is not None and self.weights.module is module
            module.log(f"{stage}/{self.NAME}_share", self.blend if in_place else 0.0, sync_dist=True)
