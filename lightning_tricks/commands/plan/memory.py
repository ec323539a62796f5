"""The memory of a recipe's step, traced on tensors without data."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.find_modules import repeated_blocks
from lightning_tricks._core.replaced import replaced
from lightning_tricks._core.tensors import local
from lightning_tricks._host.machine import listed
from lightning_tricks._trainer.objects import is_a
from lightning_tricks.commands.plan.fake_cluster import at_once, fake_world
from lightning_tricks.commands.plan.memory_trace import (
    LINES,
    STEP,
    Lines,
    StepMemory,
    TraceOptions,
    nothing_compiled,
    trace_step,
)
from lightning_tricks.commands.plan.setup import RunSetup
from lightning_tricks.commands.plan.stages import (
    layers_held,
    loss_of_stages,
    of_fullest,
    ranks_of_stages,
    timeline_of,
)
from lightning_tricks.data.batches import TOKENS_A_START
from lightning_tricks.models import attention, documents
from lightning_tricks.optim import Muon, muon, schedule_free_parts
from lightning_tricks.optim.bf16_step import BF16Step
from lightning_tricks.optim.keep_settings_on_load import parts_of
from lightning_tricks.parallel.dims import Mesh
from lightning_tricks.parallel.parallelize import Parallelized, Traffic, parallelize, traffic
from lightning_tricks.parallel.pipeline import Cut
from lightning_tricks.parallel.shard import local_bytes, to_meta
from lightning_tricks.parallel.stage_timeline import waiting

DEPTHS = (4, 5)  # blocks of the models that are traced; each block more adds the same
AVERAGES = ("EMA", "TailAverage")
LIGHTNINGS_AVERAGES = ("WeightAveraging", "StochasticWeightAveraging")
AS_EAGER = "blocks are compiled, and counted as eager: an upper bound"
_NO_LENGTHS = (documents, "BY_DOCUMENTS_FROM", sys.maxsize)  # tensors without data do not tell those of documents
UNTRACEABLE = "memory is not known:"  # begins the message for a module whose own code needs values


@dataclass(frozen=True)
class WholeModel:
    """What a rank has of the model at its whole depth.

    Attributes:
        weights: bytes of this rank's parameters.
        traffic: what it sends in each micro-batch.
        waits: share of the time in which pipeline ranks wait for each other.
    """

    weights: int
    traffic: tuple[Traffic, ...]
    waits: float = 0.0


def whole_model(setup: RunSetup) -> WholeModel:
    """The model at its whole depth as rank 0 has it; nothing runs. In a forked process: it builds the module.

    With pipeline ranks as one in the middle has it: the first one may have no experts.
    """
    module = setup.build()
    if setup.kind != "fsdp2":
        setup.convert(module)
        return WholeModel(local_bytes(module), _gradients_of_replicas(setup, module))
    rank = setup.dims.pipeline // 2 * setup.dims.stride("pipeline")
    with fake_world(rank, setup.dims.world):
        made, cut = _divided(setup, module, rank)
        stages = 1 if cut is None else len(cut.stages)
        sends = traffic(setup.dims, made.plan, setup.parallel_options(), module, stages)
        waits = 0.0 if cut is None else waiting(timeline_of(setup))
        return WholeModel(local_bytes(module), tuple(sends), waits)


def _divided(setup: RunSetup, module: nn.Module, rank: int = 0) -> tuple[Parallelized, Cut | None]:
    """A rank's part of a module, in place."""
    cut = setup.strategy.cut_stages(module, setup.dims, rank)
    roots = None if cut is None else list(cut.stages.values())
    return parallelize(module, Mesh.of(setup.dims, "cpu"), setup.parallel_options(), roots), cut


def _gradients_of_replicas(setup: RunSetup, module: nn.Module) -> tuple[Traffic, ...]:
    """DDP's sum of gradients, a ring in which each part is sent twice."""
    if setup.kind != "ddp":
        return ()
    size = sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
    return (Traffic("replicate", setup.world, size, size),)


def traced_memory(setup: RunSetup) -> StepMemory:
    """The memory of a step on rank 0, which has the largest shards.

    A LanguageModel is traced with four and with five blocks, beside each other, and extended to its depth.

    Raises:
        UsageError: the module's step cannot run without data.
    """
    return at_full_depth(setup, at_once(traces_of(setup)))


def traces_of(setup: RunSetup) -> list[Callable[[], Any]]:
    """The calls, each for a forked process, whose results `at_full_depth` takes."""
    if setup.dims.pipeline > 1:
        ranks = ranks_of_stages(setup).values()
        return [
            one
            for rank in ranks
            for one in (partial(layers_held, setup, rank), partial(_trace_or_refuse, setup, None, rank))
        ]
    deep = setup.is_ours and setup.blocks_alike and setup.module.config.n_layers > DEPTHS[1]
    deep = deep and isinstance(setup.module.activation_checkpointing, str)  # a budget has several modes
    deep = deep and getattr(setup.module.config, "dense_layers", 0) < DEPTHS[0]  # so that a mixture is added
    return [partial(_trace_or_refuse, setup, depth) for depth in (DEPTHS if deep else (None,))]


def at_full_depth(setup: RunSetup, traces: Sequence[Any]) -> StepMemory:
    """The memory at the module's own depth; with pipeline ranks that of the rank that takes most."""
    if setup.dims.pipeline > 1:
        return of_fullest(setup, traces)
    first, *others = traces
    if not others:
        return first
    found = first.at_depth(others[0], DEPTHS, setup.module.config.n_layers)
    return found or at_once([partial(_trace_or_refuse, setup, None)])[0]


def _trace_or_refuse(setup: RunSetup, depth: int | None, rank: int = 0) -> StepMemory:
    try:
        return _trace(setup, depth, rank)
    except UsageError:
        raise
    except Exception as error:
        said = str(error).strip().splitlines() or [""]
        raise UsageError(
            f"{UNTRACEABLE} {type(setup.module).__name__}: its step cannot run without data "
            f"({type(error).__name__}: {said[0][:150]})"
        ) from error


def _trace(setup: RunSetup, depth: int | None, rank: int) -> StepMemory:
    """In a forked process: the module is changed."""
    if setup.dims.pipeline > 1 and not setup.is_ours:
        raise UsageError(f"{UNTRACEABLE} {type(setup.module).__name__}: stages of other models are not traced")
    compiles, kernels = setup.compiles, kernels_of_a_gpu(setup.compiles_loss) if setup.on_gpu else []
    module: Any = setup.build(depth)
    compiles |= _take_out_compiled(module)
    _fill_tables(setup)
    wait = getattr(setup.strategy, "reduce_gradients", "micro_batch") == "step"
    options = TraceOptions(
        loss=loss_of_step(setup, module),
        optimizer=partial(_optimizer, setup),
        micro_batches=setup.micro_batches,
        gradients_wait=wait,
        context=setup.forward_context,
        on_gpu=setup.on_gpu,
        offloads=setup.offloads,
        replaced=[*kernels, _no_copy_of_settings()],
    )
    if setup.kind != "fsdp2":
        setup.convert(module)
        with fake_world(0, setup.world) if setup.kind == "ddp" else nullcontext():
            memory = trace_step(to_meta(module), repeated_blocks(module), options)
    else:
        with fake_world(rank, setup.dims.world):
            made, cut = _divided(setup, to_meta(module), rank)
            if cut is not None:  # gradients of the micro-batches before are there
                options = replace(options, loss=partial(loss_of_stages, setup, cut), micro_batches=2)
            for name in ("training_step", "token_sums"):
                if hasattr(module, name):
                    fsdp.register_fsdp_forward_method(module, name)
            memory = trace_step(module, made.blocks, options)
    if compiles:
        memory = replace(memory, notes=(*memory.notes, AS_EAGER))
    if setup.fp8 is not None and not setup.traces_fp8:
        note = "mxfp8's layers are counted as in bf16: its kernels run on Blackwell alone, and not without data"
        memory = replace(memory, notes=(*memory.notes, note))
    if setup.fp8 is not None and setup.fp8.keep_fp8_weights:
        note = "keep_fp8_weights: its 2 bytes for each parameter of a converted layer are not counted"
        memory = replace(memory, notes=(*memory.notes, note))
    if setup.offloads:
        note = "cpu_offload: the time of copies to and from the host, and of the optimizer's step there, is not counted"
        memory = replace(memory, notes=(*memory.notes, note))
    return _with_others(setup, memory, module)


def _fill_tables(setup: RunSetup) -> None:
    """Step the optimizer once with data: some build a table from values then, and keep it, as torchao's do."""
    factory = getattr(setup.module, "optimizer", None)
    if not callable(factory):
        return
    weight = nn.Parameter(torch.zeros(64, 64))
    weight.grad = torch.zeros_like(weight)
    with nothing_compiled(), suppress(Exception):  # it may want groups, or other shapes
        factory([weight]).step()


def _take_out_compiled(module: nn.Module) -> bool:
    """Leave the blocks as they are before compilation; whether some were to be compiled."""
    found = False
    for part in module.modules():
        if part._compiled_call_impl is not None:
            part._compiled_call_impl, found = None, True
    return found


def kernels_of_a_gpu(compiles_loss: bool = False) -> list[tuple[Any, str, Any]]:
    """What we do otherwise on a GPU: fused norms and attention, longer slices of the head, Muon's batches.

    Args:
        compiles_loss: whether the loss of the head is compiled, which stores nothing of the logits' size but their
            gradient. Not where tensor ranks share the head.
    """
    head: Any = import_module("lightning_tricks.models.linear_cross_entropy")  # the package has the function's name
    eager = head.nats_and_gradient

    def compiled(logits: Tensor, labels: Tensor, ignore_index: int, group: Any, *more: Any) -> tuple[Tensor, Tensor]:
        if group is not None:
            return eager(logits, labels, ignore_index, group, *more)
        return logits.new_empty((), dtype=torch.float32), torch.empty_like(logits)

    varlen = (documents, "varlen_serves", lambda _, dtype, head_dim: documents.fits_varlen(dtype, head_dim))
    kernels = [(attention, "PRODUCTS_MAX_LENGTH", 0), (attention, "OWN_NORM_FROM", sys.maxsize), varlen,
               (head, "ROWS_ON_CPU", head.ROWS), (muon, "BATCH_BYTES_ON_CPU", muon.BATCH_BYTES)]  # fmt: skip
    return [*kernels, (head, "nats_and_gradient", compiled)] if compiles_loss else kernels


def _no_copy_of_settings() -> tuple[Any, str, Any]:
    """An optimizer's learning rate may be a tensor, which cannot be copied without data, and nothing is loaded."""
    owner = import_module("lightning_tricks.optim.build_optimizer")
    return owner, "keep_settings_on_load", lambda optimizer: optimizer


def loss_of_step(setup: RunSetup, module: Any) -> Callable[[Any], Tensor]:
    """The loss of a micro-batch of zeros for a LanguageModel; for other modules, of the first batch of their data."""
    if setup.is_ours:
        rows, length = setup.rows, setup.length
        if not rows or not length:
            kind = type(setup.datamodule).__name__
            raise UsageError(f"plan: data={kind}: the plan needs its micro_batch_size and seq_len")

        def loss(_: Any) -> Tensor:
            ids = torch.zeros(rows, length, dtype=torch.long)
            batch = {"input_ids": ids, "labels": ids.clone()}
            if getattr(setup.datamodule, "document_ids", False):
                batch["document_ids"] = torch.zeros(rows, length, dtype=torch.int32)
                batch["document_starts"] = torch.zeros(rows, length // TOKENS_A_START, dtype=torch.int32)
            with replaced(*_NO_LENGTHS):
                nats, _tokens = module.token_sums(batch)
            return nats / ids.numel()

        return loss
    if not getattr(module, "automatic_optimization", True):
        raise UsageError(f"{UNTRACEABLE} {type(module).__name__} optimizes manually, and only a run tells its steps")
    batch = _first_batch(setup)

    def own(_: Any) -> Tensor:
        with replaced(*_NO_LENGTHS):
            result = module.training_step(batch, 0)
        found = result.get("loss") if isinstance(result, Mapping) else result
        if not isinstance(found, Tensor):
            raise UsageError(f"plan: training_step of {type(module).__name__} returns no loss: memory is not known")
        return found

    return own


def _first_batch(setup: RunSetup) -> Any:
    """A batch of the recipe's own data, for a module that we do not know."""
    data = setup.datamodule
    source = data if data is not None else setup.module
    if data is not None:
        data.prepare_data()
        data.setup("fit")
    loader = source.train_dataloader()
    return next(iter(loader))


def _optimizer(setup: RunSetup, module: Any) -> torch.optim.Optimizer:
    if hasattr(module, "make_optimizer"):
        optimizer = module.make_optimizer()
    else:
        optimizer = _found_in(module.configure_optimizers())
    for part in schedule_free_parts(optimizer):
        part.train()  # as the callback ScheduleFree does when training starts
    for part in parts_of(optimizer):
        if isinstance(part, Muon) and setup.kind == "ddp":
            part.replicas = dist.group.WORLD  # as OptimizerMixin does
    if is_a(setup.plugin, "BF16True"):
        BF16Step(optimizer)
    return optimizer


def _found_in(configured: Any) -> torch.optim.Optimizer:
    """The first optimizer of what `configure_optimizers` returns."""
    if isinstance(configured, torch.optim.Optimizer):
        return configured
    if isinstance(configured, Mapping) and "optimizer" in configured:
        return configured["optimizer"]
    if isinstance(configured, list | tuple) and configured:
        return _found_in(configured[0])
    raise UsageError("plan: configure_optimizers returns no optimizer: the plan cannot count its state")


def _with_others(setup: RunSetup, memory: StepMemory, module: nn.Module) -> StepMemory:
    """Add what lies beside the step: averages of the weights, copies to go back to, and DDP's buckets."""
    more: dict[str, int] = {}
    callbacks = listed(setup.trainer, "callbacks")
    averages = sum(is_a(one, *AVERAGES) for one in callbacks)
    trained = [local(parameter) for parameter in module.parameters() if parameter.requires_grad]
    if averages:
        more["averages"] = averages * sum(max(4, part.itemsize) * part.numel() for part in trained)
    if copied := sum(is_a(one, *LIGHTNINGS_AVERAGES) for one in callbacks):  # they copy the module as it is
        tensors = [local(tensor) for tensor in (*module.parameters(), *module.buffers())]
        more["averages"] = more.get("averages", 0) + copied * sum(tensor.nbytes for tensor in tensors)
    if setup.kind == "ddp":
        more["communication"] = sum(part.nbytes for part in trained)
    if setup.kind == "zero":
        memory = _of_deepspeed(setup, memory, sum(part.numel() for part in trained))
    if number := sum(one.keep_snapshots for one in callbacks if is_a(one, "SpikeRollback")):
        lines = {**memory.instants[STEP], **memory.host}
        size = lines.get("weights", 0) + lines.get("optimizer state", 0) + more.get("averages", 0)
        if setup.on_gpu:
            memory = replace(memory, host={**memory.host, "snapshots": number * size})
        else:
            more["snapshots"] = number * size
    if not more:
        return memory

    def added(_: str, lines: Lines) -> Lines:
        return {line: {**lines, **more}[line] for line in LINES if line in lines or line in more}

    return memory.changed(added, on_host=setup.offloads)  # averages lie where the weights do


def _of_deepspeed(setup: RunSetup, memory: StepMemory, count: int) -> StepMemory:
    """The lines of weights, gradients and state as DeepSpeed's stages hold them; the rest as traced on one device.

    Source: docs/deepspeed.md: weights in the precision's type, an fp32 copy of each shard in the optimizer, gradients
    added up in fp32 at stages 2 and 3.
    """
    stage, world = setup.strategy.stage, setup.world
    item = 2 if setup.product_dtype is not None else 4
    state = max(lines.get("optimizer state", 0) for lines in memory.instants.values())
    own = {
        "weights": item * count // (world if stage == 3 else 1),
        "gradients": item * count if stage == 1 else 4 * count // world,
        "optimizer state": (state + 4 * count) // world,
    }

    def by_formula(_: str, lines: Lines) -> Lines:
        return {line: own.get(line, lines.get(line, 0)) for line in LINES if line in own or line in lines}

    note = "DeepSpeed's weights, gradients and state are by formula; its buffers are not counted"
    return replace(memory.changed(by_formula), notes=(*memory.notes, note))
