"""Plan a recipe: parameters, memory of a device, time and cost, what is sent, what to change. Trains nothing."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lightning_tricks._core.errors import UsageError
from lightning_tricks._host.machine import host_bytes, named_devices
from lightning_tricks.accounting.device_speed import measure_peak_flops
from lightning_tricks.accounting.flops import matmul_parameters, training_flops_per_token
from lightning_tricks.accounting.gpus import GPU, GPUS, find_gpu, link_of
from lightning_tricks.commands.plan import PlanOptions
from lightning_tricks.commands.plan.changes import Budget, Change, budget_curve, changes_that_fit, largest_budget
from lightning_tricks.commands.plan.fake_cluster import at_once
from lightning_tricks.commands.plan.memory import UNTRACEABLE, WholeModel, at_full_depth, traces_of, whole_model
from lightning_tricks.commands.plan.memory_trace import StepMemory
from lightning_tricks.commands.plan.setup import RunSetup, read_setup
from lightning_tricks.commands.schedule.plan import planned_tokens
from lightning_tricks.optim.param_roles import param_roles
from lightning_tricks.parallel.dims import ParallelDims
from lightning_tricks.parallel.parallelize import Traffic

# What a process takes on a GPU beside its tensors: CUDA's context, cuBLAS' workspaces, NCCL's buffers. Assumed.
GPU_OVERHEAD = int(1.5 * 2**30)
_DEFAULT = PlanOptions()
_KEYS = {"peak": "peak_flops_per_second", "link_gb": "link_gb_per_second", "overhead": "overhead_bytes"}  # in JSON
# Of warnings:
DENSE_MASK_TOKENS = 8192  # a dense mask of so many tokens takes 64 MiB a row
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, https://arxiv.org/abs/2203.15556


@dataclass(frozen=True)
class Device:
    """The device of a plan.

    Attributes:
        name: for the table.
        bytes: of its memory.
        peak: FLOP/s; None where it is not known.
        link_gb: GB/s to the devices of its host.
        overhead: bytes that its tensors do not have.
        source: address of its figures.
    """

    name: str
    bytes: int
    peak: float | None
    link_gb: float
    overhead: int
    source: str | None


@dataclass(frozen=True)
class MemoryPlan:
    """What a run will take. Bytes are those of rank 0, which has the largest shards.

    Attributes:
        setup: the recipe on its devices.
        device: one of them.
        parameters: elements by role, those that are not trained as `frozen`; what is tied counts once.
        active: parameters that each token is multiplied with; None for modules that we do not know.
        memory: of each instant of a step, without the device's overhead; None where it is not known.
        why_no_memory: the reason then.
        whole: what a rank has of the model.
        tokens: of the whole run; None where the data do not tell.
        tokens_a_step: of all ranks.
        flops_per_token: full attention, without recomputation; None where they are not known.
        mfu: as stated.
        price: of a GPU hour; None: none given.
        links: between devices.
        warnings: lines on settings that look wrong.
        changes: that make it fit, cheapest first; empty where it fits.
        budgets: of activation checkpointing, from 1 to 0, where they were asked for.
        largest_budget: that fits; None: none does, or none was asked for.
    """

    setup: RunSetup
    device: Device
    parameters: Mapping[str, int]
    active: int | None
    memory: StepMemory | None
    why_no_memory: str | None
    whole: WholeModel
    tokens: int | None
    tokens_a_step: int | None
    flops_per_token: int | None
    mfu: float
    price: float | None
    links: "Links"
    warnings: Sequence[str]
    changes: Sequence[Change]
    budgets: Sequence[Budget] = ()
    largest_budget: Budget | None = None

    @property
    def peak_bytes(self) -> int | None:
        """Bytes of the peak, with the device's overhead."""
        return None if self.memory is None else self.memory.peak + self.device.overhead

    @property
    def host_bytes(self) -> int:
        """Bytes that all processes of a host keep in its memory in place of the devices'."""
        return 0 if self.memory is None else self.setup.devices * sum(self.memory.host.values())

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits on a device; None where it is not known."""
        return None if self.peak_bytes is None else self.peak_bytes <= self.device.bytes

    @property
    def tokens_per_second(self) -> float | None:
        """Of all devices, at the stated MFU."""
        if self.flops_per_token is None or self.device.peak is None:
            return None
        return self.mfu * self.device.peak * self.setup.world / self.flops_per_token

    @property
    def hours(self) -> float | None:
        """Of the whole run."""
        rate = self.tokens_per_second
        return None if rate is None or self.tokens is None else self.tokens / rate / 3600

    @property
    def gpu_hours(self) -> float | None:
        """Hours of all devices together."""
        return None if self.hours is None else self.hours * self.setup.world

    @property
    def cost(self) -> float | None:
        """`gpu_hours` times the price."""
        return None if self.gpu_hours is None or self.price is None else self.gpu_hours * self.price

    def step_time(self) -> "StepTime | None":
        """Estimated time of a step, on this mesh."""
        setup, dims = self.setup, self.setup.dims
        if self.flops_per_token is None or self.device.peak is None or not setup.length:
            return None
        tokens = setup.tokens
        compute = tokens * self.flops_per_token / (self.mfu * self.device.peak)
        compute /= dims.world / dims.loss_ranks  # ranks that have the same tokens share the work
        compute /= 1 - self.whole.waits
        return step_time(compute, setup.micro_batches, tokens, dims, self.whole.traffic, self.links)

    def as_dict(self) -> dict[str, Any]:
        """All figures in plain types, for JSON."""
        figures = (
            "peak_bytes", "host_bytes", "fits", "tokens", "tokens_a_step", "flops_per_token", "mfu",
            "tokens_per_second", "hours", "gpu_hours", "cost",
        )  # fmt: skip
        own = self.device.overhead
        instants = {} if self.memory is None else {name: dict(lines) for name, lines in self.memory.instants.items()}
        return {
            "device": {_KEYS.get(key, key): value for key, value in dataclasses.asdict(self.device).items()},
            "nodes": self.setup.nodes,
            "devices": self.setup.devices,
            "mesh": str(self.setup.dims),
            "parameters": dict(self.parameters),
            "active_parameters": self.active,
            "memory_bytes": instants,
            "pipeline_rank_bytes": {} if self.memory is None else dict(self.memory.ranks),
            "pipeline_waits": self.whole.waits,
            **{name: getattr(self, name) for name in figures},
            "warnings": list(self.warnings),
            "changes": [{"options": list(c.options), "why": c.why, "peak_bytes": c.peak + own} for c in self.changes],
            "budgets": [one._replace(peak_bytes=one.peak_bytes + own)._asdict() for one in self.budgets],
            "largest_budget": self.largest_budget and self.largest_budget.budget,
        }


def plan_recipe(
    module: Any, datamodule: Any, trainer: Mapping[str, Any], options: PlanOptions = _DEFAULT, *, suggest: bool = True
) -> MemoryPlan:
    """Plan a run from a recipe's objects, as `load_recipe` returns them; the devices need not exist here.

    Args:
        module: not built yet.
        datamodule: or None.
        trainer: the Trainer's arguments, with classes as objects.
        options: the devices, and what is assumed of them.
        suggest: look for changes where it does not fit.

    Raises:
        UsageError: an unknown GPU; a mesh that does not fit the devices.
    """
    card = _card(options, trainer)
    setup = read_setup(module, datamodule, trainer, options.nodes, options.devices, on_gpu=card is not None)
    dims = setup.dims  # refuses a mesh that does not fit
    device = _device(card, setup, options)
    jobs: list[Any] = [partial(_whole_and_parameters, setup), *traces_of(setup)]
    memory, why = None, None
    try:
        (whole, parameters), *traces = at_once(jobs)
        memory = at_full_depth(setup, traces)
    except UsageError as error:
        if not str(error).startswith(UNTRACEABLE):
            raise
        why = str(error).removeprefix(UNTRACEABLE).strip()
        ((whole, parameters),) = at_once(jobs[:1])
    tokens_a_step = setup.rows * setup.length * dims.data_ranks * setup.micro_batches or None
    plan = MemoryPlan(
        setup=setup,
        device=device,
        parameters=parameters,
        active=matmul_parameters(module.config) if setup.is_ours else None,
        memory=memory,
        why_no_memory=why,
        whole=whole,
        tokens=planned_tokens(datamodule, {**trainer, "num_nodes": setup.nodes, "devices": setup.devices}),
        tokens_a_step=tokens_a_step,
        flops_per_token=training_flops_per_token(module.config, setup.length, "full") if setup.is_ours else None,
        mfu=options.mfu,
        price=options.price,
        links=Links(device.link_gb, options.network_gbits / 8, setup.devices),
        warnings=(),
        changes=(),
    )
    room = device.bytes - device.overhead
    curve = budget_curve(setup) if options.budgets and memory is not None and setup.is_ours else ()
    largest = largest_budget(setup, curve, room)
    changes: tuple[Change, ...] = ()
    if suggest and memory is not None and not plan.fits and room > 0:  # else nothing fits beside the overhead
        changes = changes_that_fit(setup, memory, room, curve=curve)
    warnings = warnings_of(plan)
    return dataclasses.replace(plan, warnings=warnings, changes=changes, budgets=curve, largest_budget=largest)


def _whole_and_parameters(setup: RunSetup) -> tuple[WholeModel, dict[str, int]]:
    """The model as a rank has it, and its elements by role. In a forked process: it builds the module."""
    parameters: dict[str, int] = {}
    module = setup.build()
    for one in param_roles(module):
        parameters[one.role] = parameters.get(one.role, 0) + one.param.numel()
    if frozen := sum(part.numel() for part in module.parameters() if not part.requires_grad):
        parameters["frozen"] = frozen
    return whole_model(setup), parameters


def _card(options: PlanOptions, trainer: Mapping[str, Any]) -> GPU | None:
    """The GPU of the plan; None for a CPU."""
    if options.gpu is not None:
        given = (options.gpu_memory_gb, options.link_gb)
        if None not in (*given, options.peak_tflops):  # one that the table need not have
            return GPU(options.gpu, *(value or 0.0 for value in given))
        return find_gpu(options.gpu)
    if trainer.get("accelerator") == "cpu":
        return None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        name = torch.cuda.get_device_name(0).removeprefix("NVIDIA ")
        return GPU(name, properties.total_memory / 1e9, link_of(name))
    return GPUS["h100"]


def _device(card: GPU | None, setup: RunSetup, options: PlanOptions) -> Device:
    own = int(options.gpu_memory_gb * 1e9) if options.gpu_memory_gb else None
    peak = options.peak_tflops * 1e12 if options.peak_tflops else None
    if card is None:
        peak = peak or measure_peak_flops("cpu", setup.peak_dtype)
        return Device("this CPU", own or host_bytes(), peak, options.link_gb or 10.0, 0, None)
    peak, link = peak or card.peak(setup.peak_dtype), options.link_gb or card.link_gb
    return Device(card.name, own or card.bytes, peak, link, GPU_OVERHEAD, card.source)


def warnings_of(plan: MemoryPlan) -> tuple[str, ...]:
    """Settings of the recipe that look wrong, each a line that names the option."""
    setup, total, lines = plan.setup, sum(plan.parameters.values()), []
    vocabulary = setup.module.config.vocab_size if setup.is_ours else 0
    if setup.on_gpu and vocabulary % 64:
        padded = -(-vocabulary // 64) * 64
        lines.append(f"model.decoder.vocab_size={vocabulary} is no multiple of 64: {padded} is faster")
    without_mask = setup.on_gpu and setup.peak_dtype in ("bf16", "fp16", "fp8") and setup.dims.context == 1
    if getattr(setup.datamodule, "document_ids", False) and setup.length >= DENSE_MASK_TOKENS and not without_mask:
        size = f"{'' if setup.on_gpu else 'up to '}{setup.rows * setup.length**2 / 2**30:.2g}"
        lines.append(
            f"data.document_ids with rows of {setup.length} tokens: the mask is dense and takes {size} GiB a "
            "micro-batch"
        )
    if plan.tokens and total and plan.tokens / total < TOKENS_PER_PARAMETER / 4 and plan.tokens > 1e8:
        lines.append(
            f"{plan.tokens / total:.1f} tokens a parameter: about {TOKENS_PER_PARAMETER} make the best of the same "
            "FLOPs, in a smaller model"
        )
    recipes = (named_devices(setup.trainer) or setup.devices) * int(setup.trainer.get("num_nodes") or 1)
    if setup.world != recipes:
        batches, rest = divmod(setup.micro_batches * recipes, setup.world)
        same = f"devices {setup.devices} --trainer.num_nodes {setup.nodes} --trainer.accumulate_grad_batches {batches}"
        rows = (
            f"{setup.world / recipes:g} times the recipe's rows a step, on {setup.world} devices in place of {recipes}"
        )
        lines.append(rows if rest else f"{rows}: --trainer.{same} keep them")
    return tuple(lines)


# ---- a model on paper of a step's time: computation, traffic over each link, and the part that computation hides. It
# is a model, no measurement: benchmarks/plan_published.py compares it with published rows and states its error.

EFFICIENCY = 0.8  # of a link's datasheet figure that large collectives reach, as measured with NCCL on A100 (300 GB/s):
# https://github.com/stas00/ml-engineering/blob/master/network/README.md


@dataclass(frozen=True)
class Links:
    """Speeds between GPUs.

    Attributes:
        host_gb: GB/s of a GPU to the others of its host, one direction.
        network_gb: GB/s of a GPU to those of other hosts, one direction.
        devices: GPUs of a host.
    """

    host_gb: float
    network_gb: float
    devices: int

    def is_on_network(self, dims: ParallelDims, axis: str) -> bool:
        """Whether the ranks of an axis lie on several hosts. Tensor ranks are neighbours, replicas farthest apart."""
        ranks, stride = dims.group(axis)
        return ranks > 1 and stride * ranks > self.devices

    def speed(self, dims: ParallelDims, axis: str) -> float:
        """GB/s at which a GPU gets what an axis sends.

        A ring passes through all GPUs of a host and crosses its border once. NCCL builds as many rings as the group has
        GPUs, and so network cards, in a host, each with its part of the bytes: a host gets these bytes once, over all
        of these cards, and its GPUs pass them on over the links within it. The slower one of both counts.

        Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md (bus bandwidth).
        """
        if not self.is_on_network(dims, axis):
            return self.host_gb
        _, stride = dims.group(axis)
        return min(self.host_gb, max(1, self.devices // stride) * self.network_gb)

    def seconds(self, dims: ParallelDims, one: Traffic, tokens: int) -> float:
        """Time of what an axis sends in a micro-batch, if nothing else ran."""
        return one.bytes(tokens) / (EFFICIENCY * self.speed(dims, one.axis) * 1e9)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        compute: of all micro-batches.
        sends: of each axis, if nothing else ran.
        total: with what computation hides taken off.
    """

    compute: float
    sends: dict[str, float]
    total: float


def step_time(
    compute: float, micro_batches: int, tokens: int, dims: ParallelDims, sends: Sequence[Traffic], links: Links
) -> StepTime:
    """Time of a step on a mesh.

    Weights and gradients are sent while the next or last block computes: only what takes longer than the computation
    shows. Ranks wait for activations in the middle of a block, so their time is added. Replicas send in each
    micro-batch unless gradients wait.

    Args:
        compute: seconds of computation in a micro-batch on one GPU.
        micro_batches: of a step.
        tokens: of a micro-batch on one rank.
        dims: sizes of the mesh.
        sends: of a micro-batch.
        links: their speeds.
    """
    times = {one.axis: links.seconds(dims, one, tokens) for one in sends}
    waits = sum(times[one.axis] for one in sends if one.per_token)
    hidden = sum(times.values()) - waits
    micro_batch = waits + max(compute, hidden)
    return StepTime(
        micro_batches * compute, {axis: micro_batches * t for axis, t in times.items()}, micro_batches * micro_batch
    )
