"""Compare each block's gradient with the one that plain fp32 gives for the same micro-batch, and name what differs.

The order of the file: figures of two gradients, their verdict, then the callback that obtains both.
"""

import copy
import inspect
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import Module, Trainer, WarnOnce, pl, rank_zero_info, rank_zero_warn
from lightning_tricks._refusals import refuse
from lightning_tricks._replaced import replaced
from lightning_tricks._trainer import is_accumulating, logging_step, run_facts
from lightning_tricks.metrics.metric_buffer import MetricBuffer
from lightning_tricks.metrics.row import Row
from lightning_tricks.monitors.grad_norm_monitor import parameters_by_block
from lightning_tricks.monitors.shadow_gradient.kept_state import KeptState
from lightning_tricks.monitors.shadow_gradient.plain_run import (
    OwnBackward,
    fp32_copy,
    functions_behind,
    plain_run,
    step_of,
    to_fp32,
)
from lightning_tricks.optim.grad_scaler import loss_scale

COSINE, NORM_RATIO = "shadow/cosine", "shadow/norm_ratio"
_FLOOR = 1e-6  # of the norm of all gradients: below it a block's gradient is rounding of zero in either run
_NONE = -math.inf  # a value that the buffer does not log


def products(run: Tensor | None, shadow: Tensor | None, like: Tensor) -> Tensor:
    """The sums by which two gradients of one parameter are compared, in fp64 where the device has it.

    Args:
        run: the gradient of the run, any dtype and layout; None is zero.
        shadow: the other one.
        like: a tensor on the device of the result.

    Returns:
        (3,) tensor: inner product, squared norm of `run`, squared norm of `shadow`.
    """
    dtype = torch.float32 if like.device.type == "mps" else torch.float64
    zero = torch.zeros((), dtype=dtype, device=like.device)
    flat = [None if grad is None else _flat(grad, like.device) for grad in (run, shadow)]
    squares = [zero if x is None else torch.linalg.vector_norm(x, dtype=dtype).square() for x in flat]
    inner = zero if flat[0] is None or flat[1] is None else (flat[0] * flat[1]).sum(dtype=dtype)
    return torch.stack([inner, *squares])


def _flat(grad: Tensor, device: torch.device) -> Tensor:
    grad = grad.detach().to(device)
    grad = grad.to_dense() if grad.layout != torch.strided else grad
    grad = torch.view_as_real(grad) if grad.is_complex() else grad
    return grad.flatten().to(torch.promote_types(grad.dtype, torch.float32))


def compare(sums: Tensor, scale: Tensor | float = 1.0, may_overflow: bool = False) -> tuple[Tensor, Tensor]:
    """Cosine and ratio of the norms of each block's gradients.

    Args:
        sums: (blocks, 3), of `products`, summed over the parameters of each block.
        scale: by which the run's gradients are too large.
        may_overflow: an infinite or NaN gradient of the run is no fault, as the scaler skips its step.

    Returns:
        Two (blocks,) tensors: cosines from -1 to 1, and norm of the run's gradient / norm of the other. Two gradients
        of zero are equal. -inf stands for no answer: gradients below 1e-6 of the norm of all, those that are not finite
        in either run, and a ratio to zero. A gradient that is not finite in the run alone has a cosine of 0.
    """
    inner, run, shadow = sums.unbind(1)
    run_norm, shadow_norm = run.sqrt() / scale, shadow.sqrt()
    cosine = (inner / (run.sqrt() * shadow_norm)).clamp(-1, 1)
    ratio = run_norm / shadow_norm
    none = torch.full_like(cosine, _NONE)
    one, zero = torch.ones_like(cosine), torch.zeros_like(cosine)
    lacks_one = (run == 0) != (shadow == 0)
    cosine = torch.where(lacks_one, zero, cosine)
    ratio = torch.where(shadow == 0, none, ratio)
    floor = _FLOOR * shadow_norm.nan_to_num(0.0, 0.0, 0.0).square().sum().sqrt()
    tiny = (shadow_norm <= floor) & (run_norm <= floor)
    cosine, ratio = torch.where(tiny, none, cosine), torch.where(tiny, none, ratio)
    both_zero = (run == 0) & (shadow == 0)
    cosine, ratio = torch.where(both_zero, one, cosine), torch.where(both_zero, one, ratio)
    broken = ~run.isfinite()
    cosine, ratio = torch.where(broken, none if may_overflow else zero, cosine), torch.where(broken, none, ratio)
    unknown = ~shadow.isfinite()
    return torch.where(unknown, none, cosine), torch.where(unknown, none, ratio)


def differing(
    cosines: Mapping[str, float], ratios: Mapping[str, float], min_cosine: float, max_norm_ratio: float
) -> list[str]:
    """The blocks whose gradients differ, the smallest cosine first."""
    far = {
        name for name, ratio in ratios.items() if not 1 / max_norm_ratio <= ratio <= max_norm_ratio and name in cosines
    }
    far |= {name for name, cosine in cosines.items() if cosine < min_cosine}
    return sorted(far, key=lambda name: (cosines[name], name))


def warning(
    step: int, blocks: Sequence[str], cosines: Mapping[str, float], ratios: Mapping[str, float], fp8: Sequence[str]
) -> str:
    """The line about blocks that differ, the worst first: where, by how much, and what to do.

    Args:
        step: at which they were compared.
        blocks: the names that are new.
        cosines: of all blocks.
        ratios: of all blocks that have one.
        fp8: names of layers in fp8.
    """
    worst, in_fp8 = blocks[0], [name for name in fp8 if f"{name}.".startswith(f"{blocks[0]}.")]
    ratio = f", norm x {ratios[worst]:.3g}" if worst in ratios else ""
    others = f"; so do {', '.join(blocks[1:4])}" if len(blocks) > 1 else ""
    others += f" and {len(blocks) - 4} more" if len(blocks) > 4 else ""
    if len(blocks) > 2 and len(blocks) == len(cosines):
        cause = "all blocks do: look at the loss, at the sums over ranks, at the precision"
    elif in_fp8:
        cause = (
            f"leave it out of fp8, Float8.exclude: ['{re.escape(worst)}'], and see whether the next comparison agrees"
        )
    else:
        cause = "run it without torch.compile, and without kernels of its own, and see which of them differs"
    return (
        f"ShadowGradient, step {step}: the gradient of {worst} differs from that in fp32 (cosine {cosines[worst]:.4f}"
        f"{ratio}){others}: {cause}"
    )


@dataclass
class _MicroBatch:
    """The micro-batch that will be compared: what its step was called with, and the state from before it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    before: KeptState
    gradients: dict[int, Tensor]  # that parameters had before the backward pass, by `id`


class ShadowGradient(pl.Callback):
    """Run one micro-batch again in plain fp32 now and then, and compare gradients block by block. Changes no training.

    On the first log step, and then on each log step that is `every_n_steps` or more after the last comparison, the
    first micro-batch of the step runs a second time: forward and backward, in fp32, without autocast, fp8,
    `torch.compile`, activation checkpointing, TF32 and FSDP2's or DDP's hooks, on copies of the weights and buffers,
    with the random numbers of the first time. Recorded are

    - `shadow/cosine/<block>`: cosine between the two gradients of the block, and the smallest, `shadow/worst_cosine`;
    - `shadow/norm_ratio/<block>`: norm of the run's gradient over that of the other, and the one farthest from 1,
      `shadow/worst_norm_ratio`.

    A block whose figures pass a limit is named in a warning, once a fit, with what to do.

    This is the one monitor that runs `training_step` twice. Random states, gradients, buffers, the attributes of the
    module and of all that it holds, its classes and the global variables of their files are afterwards what they were;
    `self.log` and loggers take nothing from the second run. What it does outside of the process, such as in a file,
    happens twice.

    Args:
        every_n_steps: optimizer steps between two comparisons, at least. Each takes a forward and a backward pass in
            fp32, and memory for a copy of the weights in fp32 and for the activations of one micro-batch in fp32;
            with several ranks also for its gradients.
        min_cosine: a block with a smaller cosine is named.
        max_norm_ratio: so is one whose gradient is longer or shorter than the other by more than this factor.
        differentiate: regular expressions for names of classes of `torch.autograd.Function` (`Name` or `module.Name`).
            Their own `backward` also belongs to the second run, unless a pattern names it: then autograd differentiates
            what their `forward` does.

    Raises:
        UsageError: an option that is out of its range; a pattern that is no regular expression; DeepSpeed, FSDP1 and
            ModelParallelStrategy; ranks that share rows (`mesh.tensor`, `mesh.context`); a `training_step` that takes
            `dataloader_iter`.

    Source: torch's own files say what the second run has to leave out,
        https://github.com/pytorch/pytorch/blob/main/torch/utils/checkpoint.py and, for `differentiate`, torch/autograd/
        function.py (`BackwardCFunction.apply` looks up the class's `backward`). The limits are measured, see the card.
    """

    def __init__(
        self,
        every_n_steps: int = 1000,
        min_cosine: float = 0.9,
        max_norm_ratio: float = 1.5,
        differentiate: Sequence[str] = (),
    ) -> None:
        if every_n_steps < 1:
            raise UsageError(f"ShadowGradient.every_n_steps={every_n_steps}: give 1 or more")
        if not -1 <= min_cosine <= 1:
            raise UsageError(f"ShadowGradient.min_cosine={min_cosine}: give a number from -1 to 1")
        if not max_norm_ratio > 1:
            raise UsageError(f"ShadowGradient.max_norm_ratio={max_norm_ratio}: give a factor above 1")
        if isinstance(differentiate, str):
            raise UsageError(f"ShadowGradient.differentiate={differentiate!r}: give a list of patterns")
        for pattern in differentiate:
            try:
                re.compile(pattern)
            except re.error as error:
                raise UsageError(
                    f"ShadowGradient.differentiate: {pattern!r} is no regular expression: {error}"
                ) from None
        self.every_n_steps, self.min_cosine, self.max_norm_ratio = every_n_steps, min_cosine, max_norm_ratio
        self.differentiate = tuple(differentiate)
        self._reset()

    def _reset(self) -> None:
        """Reset the state of one fit."""
        self._until_batch_end = ExitStack()  # closed when a micro-batch ends
        self._micro_batch: _MicroBatch | None = None
        self._is_enabled, self._step_begins = False, True
        self._last: int | None = None  # step of the last comparison
        self._named: set[str] = set()
        self._functions_reported = False
        self._fp8: list[str] = []
        self._warn_once = WarnOnce()

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Refuse what gives no gradient of one micro-batch; find the buffer."""
        self._reset()
        refuse("ShadowGradient", trainer.strategy, "ShadowGradient:")
        facts = run_facts(trainer)
        if facts.data_ranks < facts.world:
            raise UsageError(
                "ShadowGradient: mesh.tensor and mesh.context let ranks share rows, which one rank cannot compute "
                "alone: leave it out, or shard and replicate only"
            )
        if "dataloader_iter" in inspect.signature(step_of(pl_module)).parameters:
            raise UsageError(
                "ShadowGradient: training_step takes dataloader_iter, so the batch cannot be given to it once more: "
                "take batch, or leave it out"
            )
        self._buffer = MetricBuffer.of(trainer)
        self._buffer.at_flush(self._warn_of_differences)
        self._is_enabled = pl_module.automatic_optimization
        if not self._is_enabled:
            rank_zero_warn(
                "ShadowGradient records nothing: under manual optimization a training_step cannot run again without "
                "its optimizer steps"
            )
        self._sharded, self._ranks, self._scaler = facts.is_sharded, facts.loss_ranks, facts.scaler
        self._fp8 = list(getattr(trainer.precision_plugin, "fp8_layers", {}))

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        """Keep what the micro-batch begins with, if it will be compared."""
        begins, self._step_begins = self._step_begins, False
        if not (self._is_enabled and begins and self._is_due(trainer)):
            return
        step = trainer.strategy.training_step

        def keep_and_run(*args: Any, **kwargs: Any) -> Any:
            if self._micro_batch is None:  # else a closure that asks again
                try:
                    given = copy.deepcopy((args, kwargs))
                    self._micro_batch = _MicroBatch(*given, KeptState(pl_module, copies=True), {})
                except Exception as error:
                    self._give_up("the batch or the module's state cannot be copied", error)
            return step(*args, **kwargs)

        self._until_batch_end.enter_context(replaced(trainer.strategy, "training_step", keep_and_run))

    def _is_due(self, trainer: Any) -> bool:
        step = logging_step(trainer)
        return self._buffer.is_log_step() and (self._last is None or step - self._last >= self.every_n_steps)

    def on_before_backward(self, trainer: Trainer, pl_module: Module, loss: Tensor) -> None:
        """Keep gradients that are there already: zeros, unless the module clears them in its own way."""
        if self._micro_batch is not None and not self._micro_batch.gradients:
            self._micro_batch.gradients = {
                id(p): p.grad.detach().clone() for p in pl_module.parameters() if p.grad is not None
            }

    def on_after_backward(self, trainer: Trainer, pl_module: Module) -> None:
        """Run the micro-batch again, and record how the gradients differ."""
        micro_batch, self._micro_batch = self._micro_batch, None
        self._until_batch_end.close()
        if micro_batch is None:
            return
        self._last = logging_step(trainer)
        parts = parameters_by_block(pl_module, [p for p in pl_module.parameters() if p.requires_grad])
        if not any(p.grad is not None for part in parts.values() for p in part):
            self._give_up("no parameter has its gradient after the first backward pass of a step")
            return
        second = _SecondRun(trainer, pl_module, micro_batch, OwnBackward(self.differentiate))
        averages = self._ranks > 1 and (self._sharded or not is_accumulating(trainer))
        with self._buffer.discarding():
            sums = second.sums(parts, self._sharded, averages, one_by_one=self._ranks == 1 and not self._sharded)
        if sums is None:
            self._give_up("training_step does not run again in fp32", second.error)
            return
        if self._ranks > 1 and not averages:  # each rank has compared its own micro-batch
            sums = trainer.strategy.reduce(sums, reduce_op="sum")
        scale = loss_scale(self._scaler) if self._scaler is not None else None
        cosine, ratio = compare(sums, 1.0 if scale is None else scale.to(sums), may_overflow=self._scaler is not None)
        self._record(list(parts), cosine, ratio)
        self._report_functions(second)

    def _record(self, blocks: list[str], cosine: Tensor, ratio: Tensor) -> None:
        known = cosine > _NONE
        worst = torch.where(known, cosine, 2.0).amin()
        farthest = torch.where(ratio > _NONE, ratio, 1.0).log().abs().argmax()
        values = {f"{COSINE}/{name}": value for name, value in zip(blocks, cosine, strict=True)}
        values |= {f"{NORM_RATIO}/{name}": value for name, value in zip(blocks, ratio, strict=True)}
        values["shadow/worst_cosine"] = torch.where(known.any(), worst, _NONE)
        values["shadow/worst_norm_ratio"] = ratio[farthest]
        self._buffer.record_largest(list(values), values)  # equal on all ranks; -inf is not logged

    def _warn_of_differences(self, rows: list[Row]) -> dict[str, float]:
        """Name the blocks that differ, each once."""
        for row in rows:
            cosines, ratios = _by_block(row, COSINE), _by_block(row, NORM_RATIO)
            found = differing(cosines, ratios, self.min_cosine, self.max_norm_ratio)
            new = [name for name in found if name not in self._named]
            self._named.update(new)
            if new:
                rank_zero_warn(warning(row.step, new, cosines, ratios, self._fp8))
        return {}

    def _report_functions(self, second: "_SecondRun") -> None:
        """After the first comparison: which backward passes the second run had in common with the first."""
        if self._functions_reported:
            return
        self._functions_reported = True
        for pattern in self.differentiate:
            names = second.own.used | second.own.opaque
            if not any(re.fullmatch(pattern, name) or re.fullmatch(pattern, name.rpartition(".")[2]) for name in names):
                known = ", ".join(sorted(second.functions)) or "none"
                rank_zero_warn(
                    f"ShadowGradient.differentiate: {pattern!r} names no function behind the loss, which are: {known}"
                )
        if second.own.opaque:
            rank_zero_warn(
                f"ShadowGradient.differentiate: autograd cannot see into the forward of "
                f"{', '.join(sorted(second.own.opaque))}, so its own backward ran: no fault of it will be seen"
            )
        if common := sorted(second.functions - second.own.used):
            rank_zero_info(
                f"ShadowGradient: both runs have the backward passes of {', '.join(common)}; `differentiate` compares "
                "them with autograd, where their forward is made of torch's operations"
            )

    def _give_up(self, what: str, error: Exception | None = None) -> None:
        self._is_enabled, self._micro_batch = False, None
        line = f" ({type(error).__name__}: {error})".partition("\n")[0] if error is not None else ""
        self._warn_once("", f"ShadowGradient compares nothing any more: {what}{line}")

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Drop a micro-batch without a backward pass."""
        self._until_batch_end.close()
        self._micro_batch = None
        self._step_begins = not is_accumulating(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Leave the strategy as it was."""
        self._until_batch_end.close()
        self._micro_batch = None

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        """Leave the strategy as it was."""
        self.on_fit_end(trainer, pl_module)


def _by_block(row: Row, prefix: str) -> dict[str, float]:
    found = {name[len(prefix) + 1 :]: x for name, x in row.values.items() if name.startswith(f"{prefix}/")}
    return {name: value for name, value in found.items() if value > _NONE}


class _SecondRun:
    """The second run of a micro-batch.

    Attributes:
        functions: names of the Python classes of `torch.autograd.Function` behind the loss.
        error: why it did not run, if it raised.
        own: see `OwnBackward`.
    """

    def __init__(self, trainer: Any, module: Any, micro_batch: _MicroBatch, own: OwnBackward) -> None:
        self._trainer, self._module, self._micro_batch = trainer, module, micro_batch
        self.own = own
        self.error: Exception | None = None
        self.functions: set[str] = set()

    def sums(
        self, parts: Mapping[str, Sequence[Any]], sharded: bool, averages: bool, one_by_one: bool
    ) -> Tensor | None:
        """(blocks, 3), see `products`; None if the step raised on any rank. Every rank must call.

        Args:
            parts: the parameters of each block.
            sharded: gather the run's gradients.
            averages: average the shadow's gradients over the ranks, as the strategy has averaged the run's.
            one_by_one: compare and drop each gradient as soon as it is there.
        """
        device = self._trainer.strategy.root_device
        copies = {id(p): (p, fp32_copy(p, device)) for p in self._module.parameters()}
        sums = {name: torch.zeros_like(products(None, None, torch.zeros((), device=device))) for name in parts}

        def take(name: str, parameter: Any, leaf: Tensor) -> None:
            run, grad = self._run_gradient(parameter, sharded), leaf.grad
            leaf.grad = None
            if averages:
                grad = torch.zeros_like(leaf) if grad is None else grad.to_dense() if grad.is_sparse else grad
                grad = self._trainer.strategy.reduce(grad, reduce_op="mean")
            sums[name] += products(run, grad, sums[name])

        left = {id(p): (name, p) for name, part in parts.items() for p in part}
        if one_by_one:
            for key, (name, parameter) in left.items():
                leaf = copies[key][1]
                leaf.register_post_accumulate_grad_hook(
                    lambda leaf, name=name, parameter=parameter: take(*left.pop(id(parameter)), leaf)
                )
        try:
            self._run({key: leaf for key, (_, leaf) in copies.items()})
        except Exception as error:  # a watcher must not end a run that would train
            self.error = error
        if self._trainer.world_size > 1 and not self._trainer.strategy.reduce_boolean_decision(self.error is None):
            return None
        if self.error is not None:
            return None
        with torch.no_grad():
            for key, (name, parameter) in list(left.items()):
                take(name, parameter, copies[key][1])
        return torch.stack(list(sums.values()))

    def _run_gradient(self, parameter: Any, sharded: bool) -> Tensor | None:
        grad, before = parameter.grad, self._micro_batch.gradients.get(id(parameter))
        if grad is not None and before is not None:
            grad = grad - before
        return grad.full_tensor() if sharded and grad is not None and hasattr(grad, "full_tensor") else grad

    def _run(self, leaves: dict[int, Tensor]) -> None:
        """Forward and backward pass on copies; the gradients are then those of `leaves`."""
        module, trainer = self._module, self._trainer
        step, args, kwargs = step_of(module), self._micro_batch.args, self._micro_batch.kwargs
        after = KeptState(module, copies=False)
        loggers, fp8 = trainer.loggers, getattr(trainer.precision_plugin, "fp8_layers", {})
        with ExitStack() as scope:
            scope.callback(after.put_back)
            self._micro_batch.before.put_back(on_copies=True, instead=leaves)
            for buffers in (part._buffers for part in module.modules()):
                buffers.update({name: to_fp32(buffer) for name, buffer in buffers.items()})
            scope.enter_context(plain_run(module, list(fp8.values())))
            scope.enter_context(self.own.replaced_by_autograd())
            for part in module.modules():
                if isinstance(part, pl.LightningModule):
                    for name in ("log", "log_dict", "print"):
                        scope.enter_context(replaced(part, name, _nothing))
            trainer.loggers = [pl.loggers.logger.DummyLogger() for _ in loggers]
            scope.callback(setattr, trainer, "loggers", loggers)
            scope.enter_context(torch.enable_grad())
            output = step(*tree_map(to_fp32, args), **tree_map(to_fp32, kwargs))
            loss = output["loss"] if isinstance(output, Mapping) else output
            if loss is None or loss.grad_fn is None:
                raise ValueError("it returned no loss the second time")
            self.functions = {f"{cls.__module__}.{cls.__qualname__}" for cls in functions_behind(loss)}
            wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
            torch.autograd.backward(loss / trainer.accumulate_grad_batches, inputs=wanted)


def _nothing(*_: Any, **__: Any) -> None:
    pass
