"""What EMA and TailAverage share: the arithmetic, the exchange with the weights, and when an average does what."""

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parameter import is_lazy

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.find_modules import clean_name
from lightning_tricks._core.tensors import local, sharded_like
from lightning_tricks._trainer import around_saves
from lightning_tricks._trainer.lightning import Module, Trainer, only_warn, pl, rank_zero_info, rank_zero_warn
from lightning_tricks._trainer.refusals import refuse
from lightning_tricks.checkpoints.averages import AVERAGES, MEAN
from lightning_tricks.parallel.shard import drop_gathered

_RUNNING_STATISTICS = ("running_mean", "running_var")  # of batch norm: they belong to the weights
_BUCKET_BYTES = 256 << 20  # bound of the fp32 copies of weights of another dtype
_CHUNK = 16 << 20  # elements that are exchanged at a time


class AveragedWeights:
    """A module's trained weights, and what averages of them need.

    The weights are the parameters that are trained, and the running statistics of batch norm. An average is a list of
    tensors, one for each weight: of a weight in shards, this process's shard. All arithmetic is element by element, so
    no process waits for another. Averages of bf16 and fp16 weights are in fp32: with a decay of 0.999 an update is
    smaller than half the spacing of bf16, and would be rounded away. Those of complex weights are of real and imaginary
    parts, one dimension more; in a checkpoint they are complex.

    Args:
        module: with its weights where they are trained; a module that FSDP2 has sharded must not be gathered.
        averaged: names of parameters that an average has already, though they may be frozen now.

    Attributes:
        module: the module.
        tensors: its weights.
        names: all names of each weight, without the prefixes of wrappers; tied weights have several.
    """

    def __init__(self, module: nn.Module, averaged: Collection[str] = ()) -> None:
        self.module = module
        self.names: list[list[str]] = []
        self.tensors: list[Tensor] = []
        self.find(averaged)

    def find(self, averaged: Collection[str] = ()) -> int:
        """Add the weights that are trained now and were not before, behind the others; returns their number."""
        known, known_names = set(self.tensors), {name for own in self.names for name in own}
        parameters = self.module.named_parameters(remove_duplicate=False)
        buffers = self.module.named_buffers(remove_duplicate=False)
        trained = [(name, one) for name, one in parameters if one.requires_grad or clean_name(name) in averaged]
        statistics = [(name, buffer) for name, buffer in buffers if name.endswith(_RUNNING_STATISTICS)]
        names: dict[Tensor, list[str]] = {}
        for full_name, tensor in [*trained, *statistics]:
            name, has_mean = clean_name(full_name), tensor.is_floating_point() or tensor.is_complex()
            if has_mean and tensor not in known and name not in known_names:
                names.setdefault(tensor, []).append(name)
        self.names += names.values()
        self.tensors += names
        self._buckets = list(_buckets(self.tensors))
        return len(names)

    @property
    def nbytes(self) -> int:
        """Bytes of one average on this process."""
        return sum(values(tensor).numel() * _wide(tensor.dtype).itemsize for tensor in self.tensors)

    @torch.no_grad()
    def copies(self, number: int = 0) -> list[Tensor]:
        """A first average: the weights as they are; of the last `number` of them, 0 for all."""
        return [values(tensor).to(_wide(tensor.dtype), copy=True) for tensor in self.tensors[-number:]]

    @torch.no_grad()
    def move(self, average: Sequence[Tensor], weight: float) -> None:
        """Set `average` to (1 - weight) * average + weight * weights. Does not wait for the device."""
        for bucket in self._buckets:
            own = [average[index] for index in bucket]
            current = [values(self.tensors[index]).to(own[0].dtype) for index in bucket]  # no copy of the same dtype
            if weight == 1:
                torch._foreach_copy_(own, current)  # also over NaN
            else:
                torch._foreach_lerp_(own, current, weight)

    @torch.no_grad()
    def by_name(self, average: Sequence[Tensor]) -> dict[str, Tensor]:
        """An average as a checkpoint holds it: under each name of the weight, in shards where the weight is."""
        triples = zip(self.names, self.tensors, average, strict=True)
        return {
            name: sharded_like(tensor, torch.view_as_complex(own) if tensor.is_complex() else own)
            for names, tensor, own in triples
            for name in names
        }

    @torch.no_grad()
    def load(self, saved: Mapping[str, Tensor], path: Any) -> list[Tensor]:
        """An average of a checkpoint, of which each process takes its shards.

        Raises:
            UsageError: the first weight of which the checkpoint has no average, or one of another shape.
        """
        average = []
        for (name, *_), tensor in zip(self.names, self.tensors, strict=True):
            value = saved.get(name)
            if value is None or value.shape != tensor.shape:
                there = "none" if value is None else f"one of shape {tuple(value.shape)}"
                raise UsageError(
                    f"ckpt_path={path}: it should have an average of '{name}' {tuple(tensor.shape)}, which is trained "
                    f"here, and has {there}: resume with the module that was saved, or start anew with --init_from"
                )
            if isinstance(tensor, DTensor) and not isinstance(value, DTensor):  # every rank has read the whole
                value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
            own = torch.empty_like(values(tensor), dtype=_wide(tensor.dtype), requires_grad=False)
            average.append(own.copy_(values(value)))
        return average


def values(tensor: Tensor) -> Tensor:
    """This process's numbers of a weight as a plain tensor, in the same memory. Call it without gradients."""
    part = local(tensor)
    if hasattr(part, "__tensor_flatten__"):  # torchao's wrapper of a weight that is gathered in fp8
        names, _ = part.__tensor_flatten__()
        if len(names) == 1:
            return getattr(part, names[0])
    return torch.view_as_real(part) if part.is_complex() else part


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Indices of weights of one device and dtype; where they are copied to fp32, no more than fit in the bound."""
    groups: dict[Any, list[int]] = {}
    sizes: dict[Any, int] = {}
    for index, tensor in enumerate(tensors):
        part, key = local(tensor), (local(tensor).device, tensor.dtype)
        size = 4 * part.numel() if tensor.dtype != _wide(tensor.dtype) else 0
        if groups.get(key) and sizes[key] + size > _BUCKET_BYTES:
            yield groups.pop(key)
            sizes[key] = 0
        groups.setdefault(key, []).append(index)
        sizes[key] = sizes.get(key, 0) + size
    yield from groups.values()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


class Swap:
    """Writes an average into the memory of the weights, and the weights back, to the bit.

    Where both have one dtype, the two exchange their contents, and no third copy is made. bf16 weights are copied for
    as long as the average is in place.

    Args:
        weights: what is averaged.
        average: of them.
    """

    def __init__(self, weights: AveragedWeights, average: Sequence[Tensor]) -> None:
        self._owner, self._average = weights, average
        self._weights: list[Tensor] = []
        self._copies: list[Tensor] = []  # of the weights
        self._exchanged = 0  # number of weights that have changed places with their average

    @torch.no_grad()
    def enter(self) -> None:
        """Put the average in place."""
        drop_gathered(self._owner.module)
        self._weights = [values(tensor) for tensor in self._owner.tensors]
        if all(one.dtype == other.dtype for one, other in zip(self._weights, self._average, strict=True)):
            for index in range(self._exchanged, len(self._average)):
                _exchange(self._weights[index], self._average[index])
                self._exchanged += 1
            return
        with torch.inference_mode(False):  # the copies outlive a validation that ends with an exception
            self._copies = [weight.clone() for weight in self._weights]
        for weight, mean in zip(self._weights, self._average, strict=True):
            weight.copy_(mean)

    @torch.no_grad()
    def leave(self) -> None:
        """Put the weights back, as far as they are not in their place."""
        drop_gathered(self._owner.module)
        while self._exchanged:
            self._exchanged -= 1
            _exchange(self._weights[self._exchanged], self._average[self._exchanged])
        for weight, copy in zip(self._weights, self._copies, strict=False):
            weight.copy_(copy)
        self._copies = []


def _exchange(one: Tensor, other: Tensor) -> None:
    """Let two tensors of one dtype change their contents."""
    whole = not (one.is_contiguous() and other.is_contiguous())
    parts = [(one, other)] if whole else zip(one.view(-1).split(_CHUNK), other.view(-1).split(_CHUNK), strict=True)
    for here, there in parts:
        copy = here.clone()
        here.copy_(there)
        there.copy_(copy)


class WeightAverage(pl.Callback):
    """Base of the callbacks that average the weights; a subclass says how, by `begin` and `advance`.

    Attributes:
        NAME: of the average in checkpoints and metrics.
        weights: what is averaged; None before a run.
        terms: averages by kind, each with a tensor for each of `weights.tensors`; MEAN takes the weights' place.
        step: `trainer.global_step` when the average last moved.
    """

    NAME: ClassVar[str]

    def __init__(self, validate: bool) -> None:
        self.validate = validate
        self._swapped = ExitStack()
        self._trainer: Any = None
        self._reset()

    def _reset(self) -> None:
        self.weights: AveragedWeights | None = None
        self.terms: dict[str, list[Tensor]] = {}
        self.step = 0
        self._loaded: dict[str, Any] | None = None
        self._was_rolled_back = False  # from a copy in memory

    # ---- for subclasses

    @abstractmethod
    def begin(self) -> None:
        """Set `terms` for a run that begins."""

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

    def check_run(self, trainer: Any, datamodule: Any, stage: str) -> None:
        """Refuse strategies and callbacks with which wrong weights would be averaged or validated.

        The command line calls it before any process is started.
        """
        name, callbacks = type(self).__name__, trainer.callbacks
        refuse("EMA, TailAverage", trainer.strategy, f"{name}:")
        for other in [other for other in callbacks if isinstance(other, WeightAverage) and other is not self]:
            if other.NAME == self.NAME:
                raise UsageError(f"{name}: the Trainer has two, whose averages would have one name: remove one")
            if self.validate and other.validate:
                raise UsageError(
                    f"{name}: validate=True, and {type(other).__name__} would validate with its average too: set "
                    "validate of one of them to False"
                )

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Refuse the same where no command has; begin anew."""
        self.check_run(trainer, None, stage)
        if stage == "fit":
            self._reset()

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

    def _restore(self, trainer: Any, module: nn.Module, saved: Mapping[str, Any]) -> None:
        drop_gathered(module)
        self.weights = AveragedWeights(module, {name for term in saved["weights"].values() for name in term})
        self.terms = {term: self.weights.load(value, trainer.ckpt_path) for term, value in saved["weights"].items()}
        self.load_progress(saved["progress"])

    def _summary(self) -> str:
        assert self.weights is not None
        used = "validation, test and predict take it in place of the weights" if self.validate else "it is only saved"
        return (
            f"{type(self).__name__}: averages {len(self.weights.tensors):,} weights, in {len(self.terms)} x "
            f"{self.weights.nbytes / 2**30:.3f} GiB a process; {used}"
        )

    def rollback_state(self) -> dict[str, Any] | None:
        """The average beside the weights as they are, for SpikeRollback's copy."""
        if self.weights is None:
            return None
        self._catch_up(self._trainer)
        return {"terms": self.terms, "progress": self.progress()}

    @torch.no_grad()
    def load_rollback_state(self, state: dict[str, Any] | None) -> None:
        """Bring the average back that stood beside the weights that came back."""
        if self.weights is None or state is None:
            return
        for name, average in self.terms.items():
            copied = state["terms"][name]
            if number := len(average) - len(copied):  # unfrozen since then: until then each was its own average
                copied = [*copied, *self.weights.copies(number)]
            torch._foreach_copy_(average, copied)
        self.load_progress(state["progress"])
        self._was_rolled_back = True

    def load_rollback_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the average of a checkpoint to which SpikeRollback goes back."""
        self._loaded = (checkpoint.get(AVERAGES) or {}).get(self.NAME)

    def after_rollback(self) -> None:
        """Go on from now with the average that came back, or anew with the weights where none was kept.

        The steps since then are in no average: they are undone, and one NaN among them would stay in it for ever.
        """
        if self.weights is None:
            return
        saved, self._loaded = self._loaded, None
        now = self.step = self._trainer.global_step  # this step's weights are in it, wherever the two callbacks stand
        if saved is not None:
            self._restore(self._trainer, self._trainer.lightning_module, saved)
        elif not self._was_rolled_back:
            self.begin()
        self.step, self._was_rolled_back = now, False

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        """Average weights as well that a finetuning has unfrozen at the start of this epoch."""
        if self.weights is None or batch_idx:
            return
        drop_gathered(pl_module)  # a validation may have left parameters gathered
        if number := self.weights.find():
            for average in self.terms.values():
                average += self.weights.copies(number)  # as long as they were frozen, their average was what they are

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
            "progress": self.progress(),
        }

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
        swap = Swap(weights, self.terms[MEAN])

        @contextmanager
        def weights_back() -> Iterator[None]:
            swap.leave()
            try:
                yield
            finally:
                swap.enter()

        try:
            swap.enter()
            with around_saves(trainer, during_save=weights_back):
                yield
        finally:
            swap.leave()

    def on_validation_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Put the average in the place of the weights."""
        self._enter(trainer, pl_module)

    on_test_start = on_predict_start = on_validation_start

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Log which weights were validated."""
        self._tell(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Log which weights were tested."""
        self._tell(trainer, pl_module, "test")

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Put the weights back."""
        self._swapped.close()

    on_test_end = on_predict_end = on_validation_end

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
            module.log(f"{stage}/{self.NAME}_share", 1.0 if in_place else 0.0, sync_dist=True)
