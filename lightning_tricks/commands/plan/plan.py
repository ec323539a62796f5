"""Plan a recipe: parameters, memory of a device, time and cost, what is sent, what to change. Trains nothing."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lightning_tricks._core.errors import UsageError
from lightning_tricks._host.machine import host_bytes
from lightning_tricks.accounting.device_speed import measure_peak_flops
from lightning_tricks.accounting.flops import matmul_parameters, training_flops_per_token
from lightning_tricks.accounting.gpus import GPU, GPUS, NETWORK_GBITS, find_gpu, link_of
from lightning_tricks.accounting.memory import training_memory
from lightning_tricks.commands.plan import DEFAULT_MFU
from lightning_tricks.commands.plan.changes import Change, changes_that_fit
from lightning_tricks.commands.plan.fake_cluster import at_once
from lightning_tricks.commands.plan.memory import (
    UNTRACEABLE,
    WholeModel,
    at_full_depth,
    closed_form_activations,
    traces_of,
    whole_model,
)
from lightning_tricks.commands.plan.memory_trace import StepMemory
from lightning_tricks.commands.plan.scaling import Links, StepTime, step_time
from lightning_tricks.commands.plan.setup import RunSetup, read_setup
from lightning_tricks.commands.plan.warnings import warnings_of
from lightning_tricks.commands.schedule.plan import planned_tokens
from lightning_tricks.optim.param_roles import param_roles
from lightning_tricks.parallel.dims import ParallelDims
from lightning_tricks.parallel.layout import Traffic

# What a process takes on a GPU beside its tensors: CUDA's context, cuBLAS' workspaces, NCCL's buffers. Assumed.
GPU_OVERHEAD = int(1.5 * 2**30)
SCALES = (8, 16, 32, 64, 128, 256, 512, 1024)


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
class Plan:
    """What a run will take. Bytes are those of rank 0, which has the largest shards.

    Attributes:
        setup: the recipe on its devices.
        device: one of them.
        parameters: elements by role, those that are not trained as `frozen`; what is tied counts once.
        active: parameters that each token is multiplied with; None for modules that we do not know.
        memory: of each instant of a step, without the device's overhead; None where it is not known.
        why_no_memory: the reason then.
        whole: what a rank has of the model.
        activations_by_formula: bytes; None where there is no formula.
        tokens: of the whole run; None where the data do not tell.
        tokens_a_step: of all ranks.
        flops_per_token: full attention, without recomputation; None where they are not known.
        mfu: as stated.
        price: of a GPU hour; None: none given.
        links: between devices.
        warnings: lines on settings that look wrong.
        changes: that make it fit, cheapest first; empty where it fits.
    """

    setup: RunSetup
    device: Device
    parameters: Mapping[str, int]
    active: int | None
    memory: StepMemory | None
    why_no_memory: str | None
    whole: WholeModel
    activations_by_formula: int | None
    tokens: int | None
    tokens_a_step: int | None
    flops_per_token: int | None
    mfu: float
    price: float | None
    links: Links
    warnings: Sequence[str]
    changes: Sequence[Change]

    @property
    def peak_bytes(self) -> int | None:
        """Bytes of the largest instant, with the device's overhead."""
        return None if self.memory is None else self.memory.peak + self.device.overhead

    @property
    def host_bytes(self) -> int:
        """Bytes that all processes of a host keep in its memory in place of the devices'."""
        return 0 if self.memory is None else self.setup.devices * sum(self.memory.host.values())

    @property
    def fits(self) -> bool | None:
        """Whether the largest instant fits on a device; None where it is not known."""
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

    def step_time(self) -> StepTime | None:
        """The model on paper of `scaling`, for this mesh."""
        return self.scaled(self.setup.nodes)

    def scaled(self, nodes: int) -> StepTime | None:
        """The same with another number of hosts: more shards, the same rows on each, so a larger global batch."""
        setup = self.setup
        if self.flops_per_token is None or self.device.peak is None or not setup.length:
            return None
        dims = setup.dims if nodes == setup.nodes else setup.changed(nodes=nodes).dims
        tokens = setup.rows * setup.length // dims.context
        compute = tokens * self.flops_per_token / (self.mfu * self.device.peak)
        compute /= dims.tensor
        sends = [_on_other_mesh(one, setup.dims, dims) for one in self.whole.traffic]
        return step_time(compute, setup.micro_batches, tokens, dims, sends, self.links)

    def as_dict(self) -> dict[str, Any]:
        """All figures in plain types, for JSON."""
        instants = {} if self.memory is None else {name: dict(lines) for name, lines in self.memory.instants.items()}
        return {
            "device": dataclasses.asdict(self.device),
            "nodes": self.setup.nodes,
            "devices": self.setup.devices,
            "mesh": str(self.setup.dims),
            "parameters": dict(self.parameters),
            "active_parameters": self.active,
            "memory_bytes": instants,
            "peak_bytes": self.peak_bytes,
            "host_bytes": self.host_bytes,
            "fits": self.fits,
            "activations_by_formula_bytes": self.activations_by_formula,
            "tokens": self.tokens,
            "tokens_a_step": self.tokens_a_step,
            "flops_per_token": self.flops_per_token,
            "mfu": self.mfu,
            "tokens_per_second": self.tokens_per_second,
            "hours": self.hours,
            "gpu_hours": self.gpu_hours,
            "cost": self.cost,
            "warnings": list(self.warnings),
            "changes": [{"options": list(one.options), "why": one.why, "peak_bytes": one.peak} for one in self.changes],
        }


def _on_other_mesh(one: Traffic, before: ParallelDims, after: ParallelDims) -> Traffic:
    """What an axis sends when the mesh has other sizes; replicas of smaller shards send less."""
    ranks = {"shard": after.shard * after.context, "replicate": after.replicate, "tensor": after.tensor}
    share = before.shard / after.shard if one.axis == "replicate" else 1.0
    return dataclasses.replace(
        one,
        ranks=ranks.get(one.axis, after.context),
        gathered=round(one.gathered * share),
        reduced=round(one.reduced * share),
    )


def plan_recipe(
    module: Any,
    datamodule: Any,
    trainer: Mapping[str, Any],
    *,
    gpu: str | None = None,
    devices: int | None = None,
    nodes: int | None = None,
    mfu: float = DEFAULT_MFU,
    price: float | None = None,
    network_gbits: float = NETWORK_GBITS,
    gpu_memory_gb: float | None = None,
    peak_tflops: float | None = None,
    link_gb: float | None = None,
    suggest: bool = True,
) -> Plan:
    """Plan a run from a recipe's objects, as `load_recipe` returns them; the devices need not exist here.

    Args:
        module: not built yet.
        datamodule: or None.
        trainer: the Trainer's arguments, with classes as objects.
        gpu: a word of `GPUS`; None: a CPU where the recipe asks for one, else this machine's GPU, else an H100.
        devices: of a host; None: the recipe's.
        nodes: hosts; None: the recipe's.
        mfu: share of the peak that the run will reach, with full attention counted.
        price: of a GPU hour, in any currency.
        network_gbits: Gbit/s of a GPU to other hosts.
        gpu_memory_gb: 10^9 bytes of a device, in place of the table's.
        peak_tflops: dense, in the run's precision, in place of the table's.
        link_gb: GB/s of a GPU to the others of its host, one direction, in place of the table's.
        suggest: look for changes where it does not fit.

    Raises:
        UsageError: a number out of its range; an unknown GPU; a mesh that does not fit the devices.
    """
    given = {"gpu_memory_gb": gpu_memory_gb, "peak_tflops": peak_tflops, "link_gb": link_gb}
    _check_numbers(mfu, price, network_gbits=network_gbits, **given)
    card = _card(gpu, trainer, tuple(given.values()))
    setup = read_setup(module, datamodule, trainer, nodes, devices, on_gpu=card is not None)
    dims = setup.dims  # refuses a mesh that does not fit
    device = _device(card, setup, tuple(given.values()))
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
    plan = Plan(
        setup=setup,
        device=device,
        parameters=parameters,
        active=matmul_parameters(module.config) if setup.is_ours else None,
        memory=memory,
        why_no_memory=why,
        whole=whole,
        activations_by_formula=closed_form_activations(setup),
        tokens=planned_tokens(datamodule, {**trainer, "num_nodes": setup.nodes, "devices": setup.devices}),
        tokens_a_step=tokens_a_step,
        flops_per_token=training_flops_per_token(module.config, setup.length, "full") if setup.is_ours else None,
        mfu=mfu,
        price=price,
        links=Links(device.link_gb, network_gbits / 8, setup.devices),
        warnings=(),
        changes=(),
    )
    room = device.bytes - device.overhead
    changes: tuple[Change, ...] = ()
    if suggest and memory is not None and not plan.fits and room > 0:  # else nothing fits beside the overhead
        changes = changes_that_fit(setup, memory, room)
    return dataclasses.replace(plan, warnings=warnings_of(plan), changes=changes)


def _check_numbers(mfu: float, price: float | None, **positive: float | None) -> None:
    for name, value in positive.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UsageError(f"plan: {name}={value:g}: give a number above 0")
    if not 0 < mfu <= 1:
        raise UsageError(f"plan: mfu={mfu:g}: give a share of the peak above 0 and up to 1, such as {DEFAULT_MFU}")
    if price is not None and not (price >= 0 and math.isfinite(price)):
        raise UsageError(f"plan: price={price:g}: give the price of a GPU hour, 0 or more")


def _whole_and_parameters(setup: RunSetup) -> tuple[WholeModel, dict[str, int]]:
    """The model as a rank has it, and its elements by role. In a forked process: it builds the module."""
    parameters: dict[str, int] = {}
    module = setup.build()
    for one in param_roles(module):
        parameters[one.role] = parameters.get(one.role, 0) + one.param.numel()
    if frozen := sum(part.numel() for part in module.parameters() if not part.requires_grad):
        parameters["frozen"] = frozen
    return whole_model(setup), parameters


def _card(gpu: str | None, trainer: Mapping[str, Any], given: Sequence[float | None]) -> GPU | None:
    """The GPU of the plan; None for a CPU."""
    if gpu is not None:
        try:
            return find_gpu(gpu)
        except UsageError:
            if all(value is not None for value in given):
                return GPU(gpu, given[0] or 0.0, given[2] or 0.0)
            raise
    if trainer.get("accelerator") == "cpu":
        return None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        name = torch.cuda.get_device_name(0).removeprefix("NVIDIA ")
        return GPU(name, properties.total_memory / 1e9, link_of(name))
    return GPUS["h100"]


def _device(card: GPU | None, setup: RunSetup, given: Sequence[float | None]) -> Device:
    memory, peak, link = given
    if card is None:
        measured = measure_peak_flops("cpu", setup.peak_dtype)
        here = int(memory * 1e9) if memory else host_bytes()
        return Device("this CPU", here, peak * 1e12 if peak else measured, link or 10.0, 0, None)
    return Device(
        card.name,
        int(memory * 1e9) if memory else card.bytes,
        peak * 1e12 if peak else card.peak(setup.peak_dtype),
        link or card.link_gb,
        GPU_OVERHEAD,
        card.source,
    )


def rule_of_thumb(plan: Plan) -> int | None:
    """`training_memory` for one device that has all of it, in bytes; None for modules that we do not know."""
    setup = plan.setup
    if not setup.is_ours or not setup.rows:
        return None
    config = setup.module.config
    mode = setup.module.activation_checkpointing
    sizes = (sum(plan.parameters.values()), setup.rows, setup.length, config.n_layers, config.d_model)
    return training_memory(*sizes, "full" if mode == "full" else "none").total
