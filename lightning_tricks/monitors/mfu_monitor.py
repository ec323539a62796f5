"""Log how fast training goes, and which fraction of the device's peak that is."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_tricks._core.errors import UsageError, check_choice
from lightning_tricks._core.protocols import KnowsFlops, KnowsPeak
from lightning_tricks._core.tensors import named_tensors_in
from lightning_tricks._trainer.lightning import Module, Trainer, WarnOnce, pl, rank_zero_info, rank_zero_warn
from lightning_tricks._trainer.loop import is_accumulating, logging_step
from lightning_tricks._trainer.run_facts import data_rank, stage_groups
from lightning_tricks.accounting.device_speed import device_peak
from lightning_tricks.accounting.flop_counting import CannotCount, FlopCounter, counting_real_step
from lightning_tricks.accounting.flops import Attention
from lightning_tricks.metrics.metric_buffer import MetricBuffer
from lightning_tricks.metrics.row import Row
from lightning_tricks.monitors._clock import Stopwatch, compilations_timed, fence, saves_timed

__all__ = ["MFUMonitor"]

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_SI = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
Flops = tuple[float, float]  # (the model's, the recomputed); nan where the second is not known
_MOST_TRIES = 100  # micro-batches to wait for a first backward pass
_COUNTS = ("_samples", "_positions", "_flops", "_recompute")


@dataclasses.dataclass
class Contents:
    """Tokens and samples of a micro-batch."""

    tokens: Tensor | float  # without padding; a scalar on the device if a mask marks padding
    positions: float  # with padding; equal to `tokens` if that is a number
    length: int  # T, tokens in a row; 0 where not known
    samples: int  # length of the first dimension of the first tensor that has one


def contents_of(module: Any, batch: Any) -> Contents:
    """Count a micro-batch of any type without reading a device, with the module's own `tokens_in(batch)` if it has one.

    The tokens are the B * T positions of the first tensor that is named `input_ids` or `tokens`, else of the first
    integer tensor (B, T), else of the first float tensor (B, T, D). If there is an integer `attention_mask` (B, T), its
    ones count instead. If the first tensor of the batch is an image, (B, C, H, W), only the names are looked at:
    integers beside an image are labels.
    """
    tensors = list(named_tensors_in(batch))
    rows, length = _token_shape(tensors)
    own = getattr(module, "tokens_in", None)
    masks = [tensor for name, tensor in tensors if name == "attention_mask" and not tensor.is_floating_point()]
    mask = next((mask for mask in masks if rows and mask.shape == (rows, length)), None)
    tokens = own(batch) if callable(own) else rows * length if mask is None else mask.sum()
    positions = rows * length if isinstance(tokens, Tensor) else tokens
    samples = next((tensor.shape[0] for _, tensor in tensors if tensor.dim()), 0)
    return Contents(tokens, positions, length, samples)


def _token_shape(tensors: list[tuple[Any, Tensor]]) -> tuple[int, int]:
    """(B, T) of the batch's tokens; (0, 0) where it has none, as images with their labels."""
    found = [tensor for name, tensor in tensors if name in ("input_ids", "tokens") and tensor.dim() >= 2]
    if not found and tensors and tensors[0][1].dim() <= 3:
        integers = [tensor for _, tensor in tensors if tensor.dim() == 2 and tensor.dtype in _INTEGERS]
        found = integers or [tensor for _, tensor in tensors if tensor.dim() == 3 and tensor.is_floating_point()]
    return (found[0].shape[0], found[0].shape[1]) if found else (0, 0)


@dataclasses.dataclass
class BatchFlops:
    """FLOPs per token or per sample, and where the figure comes from."""

    unit: Literal["token", "sample"]  # a token may be padding
    of_one: Callable[[int], Flops]  # FLOPs of one unit in a row of the given length
    origin: str  # one line for the log
    passes: int = 0  # backward passes of a micro-batch that the figure stands for; 0: however many there are

    def __call__(self, contents: Contents, passes: int) -> Flops:
        """FLOPs of a whole micro-batch with so many backward passes."""
        count = contents.positions if self.unit == "token" else contents.samples
        times = count * (passes / self.passes if self.passes else 1)
        model, recompute = self.of_one(contents.length)
        return times * model, times * recompute


def known_batch_flops(
    module: Any, contents: Contents, per_token: float | None, per_sample: float | None, attention: str
) -> BatchFlops | None:
    """The FLOPs by the options, else by the module's `flops_per_token(seq_len, attention)`; None without either.

    Raises:
        UsageError: `flops_per_token` is given, but the batch has no tokens.
    """
    if per_token is not None:
        if not contents.positions:
            raise UsageError(
                f"flops_per_token={per_token:g}: no tokens were found in the batch; give flops_per_sample, "
                "or the module a method tokens_in(batch)"
            )
        return _constant("token", (per_token, math.nan), "given")
    if per_sample is not None:
        return _constant("sample", (per_sample, math.nan), "given")
    if isinstance(module, KnowsFlops) and callable(module.flops_per_token) and contents.length:
        of_one = functools.cache(lambda length: module.flops_per_token(length, attention))
        return BatchFlops("token", of_one, _line("token", of_one(contents.length)[0], f"{attention} attention"))
    return None


def flops_of_batch(
    counter: FlopCounter, contents: Contents, passes: int, copies: int = 1, pipeline: Any = None
) -> BatchFlops:
    """The FLOPs per token that were counted on one batch, or per sample if it has no tokens, to use for all batches.

    Args:
        counter: after the step.
        contents: of the batch.
        passes: backward passes in that batch; 0 where not known.
        copies: number of ranks that share the work on the batch; each has counted its own part.
        pipeline: process group of ranks with different layers, whose parts are not equal; all must call.

    Raises:
        CannotCount: not everything could be counted, or the batch holds neither tokens nor samples.
    """
    model, recompute = counter.flops if pipeline is None else _mean_over(pipeline, counter)
    count = contents.positions or contents.samples
    if not count:
        raise CannotCount("the batch holds no tensors before the step")
    flops = copies * model / count, copies * recompute / count
    missing = "".join(f", without {name}" for name in counter.uncounted)
    how = f"counted, full attention{missing}"
    return _constant("token" if contents.positions else "sample", flops, how, passes)


def _mean_over(group: Any, counter: FlopCounter) -> tuple[float, float]:
    """The mean of what the ranks of a group have counted; if one could not, none has."""
    own: tuple[float, float] | str
    try:
        own = counter.flops
    except CannotCount as error:
        own = str(error)
    everyones: list[Any] = [None] * group.size()
    dist.all_gather_object(everyones, own, group=group)
    if failed := [each for each in everyones if isinstance(each, str)]:
        raise CannotCount(failed[0])
    model, recompute = (sum(each) / group.size() for each in zip(*everyones, strict=True))
    return model, recompute


def _constant(unit: Literal["token", "sample"], flops: Flops, how: str, passes: int = 0) -> BatchFlops:
    return BatchFlops(unit, lambda length: flops, _line(unit, flops[0], how), passes)


def _line(unit: str, flops: float, how: str) -> str:
    scale, prefix = next(((scale, prefix) for scale, prefix in _SI if flops >= scale), (1.0, ""))
    return f"{flops / scale:.3g} {prefix}FLOP a {unit} ({how})"


def rates(
    steps: Sequence[Mapping[str, float]], seconds: float, devices: int, copies: float, peak: float | None
) -> dict[str, float]:
    """The figures of an interval, without the `throughput/` before their names.

    Args:
        steps: `_samples`, `_positions`, `_tokens`, `_flops` and `_recompute` of each optimizer step, as sums over all
            ranks, of which `copies` see each row; NaN for FLOPs that are not known.
        seconds: of the interval.
        devices: number of ranks.
        copies: see `steps`.
        peak: FLOP/s of one rank's device, None where not known.
    """
    # padding is no work of the model: the share of a step's positions that are tokens
    real = [step["_tokens"] / step["_positions"] if step["_positions"] else 1.0 for step in steps]
    per_second = 1 / copies / seconds
    tokens = sum(step["_tokens"] for step in steps) * per_second
    model = sum(step["_flops"] * part for step, part in zip(steps, real, strict=True)) * per_second / devices
    recompute = sum(step["_recompute"] * part for step, part in zip(steps, real, strict=True)) * per_second / devices
    found = {"step_seconds": seconds / len(steps)}
    found["samples_per_second"] = sum(step["_samples"] for step in steps) * per_second
    if tokens:
        found |= {"tokens_per_second": tokens, "tokens_per_second_per_device": tokens / devices}
    if model > 0:  # NaN where a batch of the interval has unknown FLOPs
        found["model_flops_per_second"] = model
        if peak and not model > peak:  # above the peak, one of the two is wrong
            found |= {"mfu": model / peak}
            if not (math.isnan(recompute) or model + recompute > peak):  # unknown where FLOPs were given
                found["hfu"] = (model + recompute) / peak
    return found


class MFUMonitor(pl.Callback):
    """Record tokens/s, samples/s, seconds per step, MFU and HFU of each logging interval. Never changes training.

    `throughput/tokens_per_second`, `.../samples_per_second` and `.../step_seconds` hold for all devices together;
    `.../tokens_per_second_per_device`, `.../model_flops_per_second`, `.../mfu` and `.../hfu` for one device. MFU is the
    model's FLOP/s over the device's dense peak, a fraction; HFU counts also what activation checkpointing recomputes.
    Ranks that see the same data count once; padding that an `attention_mask` marks is left out.

    The first step, validation, checkpoints and compilations are left out of the rates and reported as
    `throughput/first_step_seconds`, `.../validation_seconds`, `.../checkpoint_seconds` and `.../compile_seconds`. The
    clock is read when the buffer has brought the values to the host, which waits for the device; nothing else waits.

    FLOPs come from the options, or from the module's method `flops_per_token(seq_len, attention)`, which returns the
    model's and the recomputed ones. Otherwise they are counted while the first micro-batch runs, see `count_flops`.
    Each micro-batch counts as many backward passes as it has: an optimizer such as LBFGS has several. If the batch does
    not show the number of its tokens, give the module a method `tokens_in(batch)`, which returns it as a number or as a
    scalar tensor on the device.

    Args:
        flops_per_token: Forward and backward pass, for one token; in manual optimization all of a batch's passes.
            Default: closed form or counted.
        flops_per_sample: The same for one sample, where there are no tokens.
        peak_flops: Of one device, FLOP/s. Default: the datasheet's dense peak for the Trainer's precision; on a CPU
            that of the fastest matrix product. MFU and HFU above 1 are left out, with one warning.
        attention: The definition for a module with `flops_per_token`: `causal` counts what a causal model needs, `full`
            as if no token were masked, for comparison with published figures. Counted modules are always `full`.

    Raises:
        UsageError: an option is out of range, both FLOPs are given, or `flops_per_token` where batches have no tokens.

    Example:
        >>> monitor = MFUMonitor(peak_flops=312e12)  # of an A100 in bf16, which need not be given

    Source: MFU and HFU as in
        https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md.
    """

    def __init__(
        self,
        flops_per_token: float | None = None,
        flops_per_sample: float | None = None,
        peak_flops: float | None = None,
        attention: Attention = "causal",
    ) -> None:
        given = {"flops_per_token": flops_per_token, "flops_per_sample": flops_per_sample, "peak_flops": peak_flops}
        for name, value in given.items():
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"{name}={value}: give a positive number")
        if flops_per_token and flops_per_sample:
            raise UsageError(f"flops_per_sample={flops_per_sample}: leave it out where flops_per_token is given")
        check_choice("attention", attention, Attention)
        self.flops_per_token, self.flops_per_sample = flops_per_token, flops_per_sample
        self.peak_flops, self.attention = peak_flops, attention
        self._tokens: Tensor | float = 0  # in the current step
        self._counts = dict.fromkeys(_COUNTS, 0.0)  # likewise
        self._watch: Stopwatch | None = None  # from the first batch on
        self._batch_flops: BatchFlops | None = None
        self._counter: FlopCounter | None = None  # of a micro-batch whose FLOPs are counted
        self._counting_scope, self._fit_scope = ExitStack(), ExitStack()  # replaced methods of that time

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Find the buffer."""
        self._release()
        self._trainer: Any = trainer
        self._buffer = MetricBuffer.of(trainer)
        self._buffer.at_flush(self._rates)
        self._tries = self._passes = 0  # micro-batches that may still be counted; backward passes of this one
        self._passes_seen, self._warn_once = False, WarnOnce()
        self._clear()

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        """Count the batch now: `training_step` may take it apart."""
        if not trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        if self._watch is not None and self._watch.phase == "first_step":
            self._buffer.flush()  # the first step is over: it is an interval of its own
        self._contents, self._passes = contents_of(pl_module, batch), 0
        if self._watch is None:
            self._begin(pl_module)
        if self._tries:
            self._counter = self._counting_scope.enter_context(counting_real_step(trainer, pl_module))

    def on_before_backward(self, trainer: Trainer, pl_module: Module, loss: Tensor) -> None:
        """Count the backward passes of the micro-batch: an optimizer may ask for several."""
        self._passes += 1
        self._passes_seen = True

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Add the micro-batch, and record the step when it is done."""
        if self._watch is None:
            return
        contents = self._contents
        self._finish_counting()
        model, recompute, positions = math.nan, math.nan, 0.0
        if self._batch_flops is not None:
            model, recompute = self._batch_flops(
                contents, self._passes if self._passes_seen else self._batch_flops.passes
            )
            # FLOPs per sample are not corrected for padding
            positions = contents.positions if self._batch_flops.unit == "token" else 0.0
        self._tokens = self._tokens + contents.tokens
        for name, value in zip(_COUNTS, (contents.samples, positions, model, recompute), strict=True):
            self._counts[name] += value
        if not is_accumulating(trainer):
            self._record()

    def on_validation_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Begin the time of validation, in which training does not go on."""
        if self._watch is not None:
            self._buffer.flush()  # so that the device has done the steps before
            self._watch.enter("validation")

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Go on with the training time."""
        if self._watch is not None:
            self._watch.leave()

    def on_fit_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Report a validation or a checkpoint after the last step."""
        if self._watch is not None:
            late = {f"throughput/{kind}_seconds": seconds for kind, seconds in self._watch.take()[1].items()}
            trainer.callback_metrics.update({name: torch.tensor(value) for name, value in late.items()})
            step = max(logging_step(trainer) - 1, 0)
            for logger in trainer.loggers if late else []:
                logger.log_metrics(late, step)

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        """Give the Trainer its own method back; the broken interval has no rate."""
        self._release()

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Give the Trainer its own method back."""
        self._release()

    def _begin(self, pl_module: Any) -> None:
        """Find FLOPs and peak, log them in a line, and start the clock: the first batch has come."""
        trainer = self._trainer
        device, plugin = trainer.strategy.root_device, trainer.precision_plugin
        dtype = plugin.peak_dtype if isinstance(plugin, KnowsPeak) else None
        self._peak, self._against = device_peak(device, trainer.precision, dtype, self.peak_flops)
        choice = getattr(plugin, "choice", None)  # of AutoPrecision, with its reason
        self._against += f"; {choice}" if choice else ""
        options = (self.flops_per_token, self.flops_per_sample, self.attention)
        known = known_batch_flops(pl_module, self._contents, *options)
        if known is None:
            self._tries = _MOST_TRIES
        else:
            known.passes = int(pl_module.automatic_optimization)
            self._use_flops(known)
        self._fence, self._watch = fence(device), Stopwatch("first_step")
        self._fit_scope.enter_context(saves_timed(trainer, self._watch, before=lambda path: self._buffer.flush()))
        self._fit_scope.enter_context(compilations_timed(self._watch))

    def _finish_counting(self) -> None:
        """Take the FLOPs of this micro-batch, if they were counted; one without a backward pass shows too few."""
        if self._counter is None:
            return
        trainer, counter, self._counter = self._trainer, self._counter, None
        self._counting_scope.close()
        self._tries -= 1
        complete = counter.went_backward or counter.failure
        if not complete and self._tries:
            return
        self._tries = 0
        try:
            if not complete:
                raise CannotCount(f"no backward pass in {_MOST_TRIES} batches")
            copies = trainer.world_size // data_rank(trainer)[1]
            pipeline = groups[1] if (groups := stage_groups(trainer)) else None
            self._use_flops(flops_of_batch(counter, self._contents, self._passes, copies, pipeline))
        except CannotCount as error:
            name = type(trainer.lightning_module).__name__
            rank_zero_warn(
                f"MFUMonitor: no throughput/mfu, for the FLOPs of {name} cannot be counted ({error}); "
                "give flops_per_token or flops_per_sample"
            )

    def _use_flops(self, found: BatchFlops) -> None:
        """Take these FLOPs for all batches, and log where they come from."""
        self._batch_flops = found
        rank_zero_info(f"MFUMonitor: {found.origin}; {self._against}")

    def _record(self) -> None:
        """Record all micro-batches of the step."""
        self._buffer.record("_fence", self._fence)
        if self._trainer.world_size > 1:
            self._buffer.record("_tokens", self._tokens, "sum")
            counts = torch.tensor(list(self._counts.values()), dtype=torch.float64)
            self._buffer.record_all(tuple(self._counts), counts, "sum")
        else:  # numbers need no transfer
            for name, value in {"_tokens": self._tokens, **self._counts}.items():
                self._buffer.record(name, value)
        self._clear()

    def _clear(self) -> None:
        self._tokens, self._counts = 0, dict.fromkeys(_COUNTS, 0.0)

    def _rates(self, rows: list[Row]) -> dict[str, float]:
        """The interval's figures; nothing is in flight on the device now, so the clock is right."""
        steps = [row.values for row in rows if "_samples" in row.values]
        if self._watch is None or not steps:
            return {}
        seconds, others = self._watch.take()
        found = {f"{kind}_seconds": spent for kind, spent in others.items()}
        if self._watch.phase == "first_step":
            self._watch.phase = "training"
            found["first_step_seconds"] = seconds
        elif seconds > 0:
            copies = self._trainer.world_size / data_rank(self._trainer)[1]
            found |= rates(steps, seconds, self._trainer.world_size, copies, self._peak)
            self._check_peak(found.get("model_flops_per_second", 0.0))
        return {f"throughput/{name}": value for name, value in found.items()}

    def _check_peak(self, reached: float) -> None:
        if self._peak and reached > self._peak:
            self._warn_once(
                "peak",
                f"MFUMonitor: throughput/mfu is left out while it is above 1: training reaches {reached / 1e12:.3g} "
                f"TFLOP/s, the peak is taken to be {self._peak / 1e12:.3g} (a CPU that was busy when it was measured, "
                "a wrong peak_flops, or wrong FLOPs); give peak_flops",
            )

    def _release(self) -> None:
        """Stop the clock, end all replacements, and forget what cannot be pickled."""
        self._watch = self._counter = self._batch_flops = None
        self._counting_scope.close()
        self._fit_scope.close()
