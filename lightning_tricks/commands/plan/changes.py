"""Changes to a recipe that make its step fit into a device's memory, the cheapest first; each is traced before."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from lightning_tricks._core.errors import UsageError
from lightning_tricks.accounting.flops import recompute_flops_per_token, training_flops_per_token
from lightning_tricks.commands.plan.memory import traced_memory
from lightning_tricks.commands.plan.memory_trace import STEP, StepMemory
from lightning_tricks.commands.plan.setup import RunSetup
from lightning_tricks.optim.build_optimizer import check_settings
from lightning_tricks.precision import BF16True
from lightning_tricks.strategies import FSDP2Strategy

NAMED = 3  # changes that are looked for
_MOST_NODES = 1024
_STATE = ("weights", "averages", "gradients", "optimizer state")


@dataclass(frozen=True)
class Change:
    """Options of the command line under which a recipe fits.

    Attributes:
        options: as typed.
        why: what it costs.
        peak: bytes of the largest instant with it.
    """

    options: tuple[str, ...]
    why: str
    peak: int


@dataclass(frozen=True)
class _Candidate:
    options: tuple[str, ...]
    why: str
    setup: RunSetup

    @property
    def kind(self) -> str:
        """The first option's name."""
        return self.options[0].split()[0]


def changes_that_fit(setup: RunSetup, memory: StepMemory, room: int, most: int = NAMED) -> tuple[Change, ...]:
    """At most `most` changes, each of another kind, with which the largest instant takes at most `room` bytes.

    First those that need no more devices, then more devices, then both, then tensor ranks.
    """
    state = max(sum(lines.get(line, 0) for line in _STATE) for lines in memory.instants.values())
    found: list[Change] = []
    kinds: set[str] = set()
    for candidate in _candidates(setup, memory, state, room):
        if candidate.kind in kinds:
            continue  # a smaller one of that kind fits, and costs less
        try:
            traced = traced_memory(candidate.setup)
        except (UsageError, RuntimeError):
            continue
        if traced.peak <= room:
            there = candidate.setup.devices * sum(traced.host.values())
            on_host = f" {there / 2**30:,.0f} GiB of each host's memory" if there else ""
            found.append(Change(candidate.options, candidate.why + on_host, traced.peak))
            kinds.add(candidate.kind)
        if len(found) == most:
            break
    return tuple(found)


def _candidates(setup: RunSetup, memory: StepMemory, state: int, room: int) -> Iterator[_Candidate]:
    small: RunSetup = setup  # with all that saves activations
    if state < room:  # else nothing that saves activations alone can help
        yield from _smaller_micro_batches(setup)
        yield from _checkpointing(setup)
    if setup.is_ours and setup.weights_dtype.itemsize > 2:
        yield _Candidate(
            ("--trainer.plugins '[BF16True]'",),
            "12 bytes a parameter: weights and gradients in bf16, rounded stochastically",
            setup.changed(plugins=[BF16True()]),
        )
    averages = memory.instants[STEP].get("optimizer state", 0) if STEP in memory.instants else 0
    if state - 3 * averages // 4 < room:
        yield from _eight_bit_averages(setup)
    if setup.kind == "fsdp2" and not setup.strategy.reshard_after_forward:
        yield _Candidate(
            ("--trainer.strategy.init_args.reshard_after_forward true",),
            "weights are gathered twice a micro-batch",
            setup.changed(reshard_after_forward=True),
        )
    if setup.kind == "fsdp2" and setup.on_gpu and not setup.offloads:
        yield _Candidate(
            ("--trainer.strategy.init_args.cpu_offload true",),
            "slow: the host steps, and sends the weights in each micro-batch; shards and optimizer take",
            setup.changed(cpu_offload=True),
        )
    if setup.kind != "fsdp2":
        yield from _one_host_sharded(setup)
        return
    options: tuple[str, ...] = ()
    if setup.is_ours:
        if setup.module.activation_checkpointing != "full":
            small, options = small.changed(activation_checkpointing="full"), ("--model.activation_checkpointing full",)
        if setup.rows > 1:
            rows = setup.rows * setup.micro_batches
            small = small.changed(micro_batch_size=1, accumulate_grad_batches=rows)
            options += ("--data.micro_batch_size 1", f"--trainer.accumulate_grad_batches {rows}")
        if options and state < room:
            yield _Candidate(options, f"{_again(setup, 'full')}, and small ones", small)
    rest, most = memory.peak - state, _MOST_NODES
    for base, more in ((setup, ()), (small, options)) if options else ((setup, ()),):
        for nodes in _doubled(setup.nodes, most):
            if state * setup.nodes / nodes + (rest if base is setup else 0) > room:
                continue
            with suppress(UsageError):  # a mesh that does not fit so many
                yield _on_nodes(base, nodes, more)
                most = nodes // 2  # with more changes only for fewer hosts
                break
    yield from _tensor_ranks(small, options)


def _eight_bit_averages(setup: RunSetup) -> Iterator[_Candidate]:
    """The AdamW of torchao for that of torch, with the same settings, where torchao is installed."""
    own = check_settings(setup.module.optimizer) if setup.is_ours else None
    if type(own) is not torch.optim.AdamW or find_spec("torchao") is None:
        return

    def factory(groups: Any) -> torch.optim.Optimizer:
        settings = {name: own.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}
        return import_module("torchao.optim").AdamW8bit(groups, **settings)

    yield _Candidate(
        ("--model.optimizer torchao.optim.AdamW8bit",),
        "AdamW's averages in 8 bits, quantized in pieces of 256",
        setup.changed(optimizer=factory),
    )


def _doubled(nodes: int, most: int) -> Iterator[int]:
    while (nodes := 2 * nodes) <= most:
        yield nodes


def _one_host_sharded(setup: RunSetup) -> Iterator[_Candidate]:
    """Shards over the devices that are there, or over those of one host."""
    if setup.kind == "ddp":
        yield _Candidate(
            ("--trainer.strategy FSDP2Strategy",),
            "weights are gathered before use: more is sent",
            setup.changed(strategy=FSDP2Strategy()),
        )
    elif setup.kind == "one" and setup.on_gpu:
        for devices in (2, 4, 8):
            yield _Candidate(
                (f"--trainer.devices {devices}", "--trainer.strategy FSDP2Strategy"),
                f"{devices} times the devices and the rows of a step",
                setup.changed(devices=devices, strategy=FSDP2Strategy()),
            )


def _smaller_micro_batches(setup: RunSetup) -> Iterator[_Candidate]:
    rows = setup.rows
    while setup.is_ours and rows > 1 and rows % 2 == 0:
        rows //= 2
        several = setup.micro_batches * setup.rows // rows
        yield _Candidate(
            (f"--data.micro_batch_size {rows}", f"--trainer.accumulate_grad_batches {several}"),
            "the same rows a step, in smaller products",
            setup.changed(micro_batch_size=rows, accumulate_grad_batches=several),
        )


def _checkpointing(setup: RunSetup) -> Iterator[_Candidate]:
    modes = ("none", "cheap", "selective", "full")
    if not setup.is_ours:
        return
    for mode in modes[modes.index(setup.module.activation_checkpointing) + 1 :]:
        yield _Candidate(
            (f"--model.activation_checkpointing {mode}",),
            _again(setup, mode),
            setup.changed(activation_checkpointing=mode),
        )


def _again(setup: RunSetup, mode: Any) -> str:
    """What checkpointing computes twice, as a share of the products."""
    if mode == "cheap":
        return "norms and activations run again, no product does"
    config, length = setup.module.config, setup.length
    again = recompute_flops_per_token(config, length, "causal", mode)
    return f"{again / training_flops_per_token(config, length, 'causal'):.0%} more products"


def _on_nodes(setup: RunSetup, nodes: int, more: tuple[str, ...]) -> _Candidate:
    times = nodes // setup.nodes
    several = setup.micro_batches
    options: tuple[str, ...] = (f"--trainer.num_nodes {nodes}",)
    note = "the same rows a step"
    changed = {"nodes": nodes}
    if several % times == 0 and several >= times:
        changed["accumulate_grad_batches"] = several // times
        options += (f"--trainer.accumulate_grad_batches {several // times}",)
        more = tuple(one for one in more if "accumulate" not in one)
    else:
        note = f"{times} times the rows of a step"
    return _Candidate((*more, *options), f"{times} times the devices, {note}", setup.changed(**changed))


def _tensor_ranks(setup: RunSetup, more: tuple[str, ...]) -> Iterator[_Candidate]:
    if not setup.is_ours or setup.dims.tensor > 1:
        return
    for tensor in (2, 4, 8):
        if setup.devices % tensor:
            continue
        mesh = replace(setup.dims, tensor=tensor, replicate=1, shard=-1)
        several = setup.micro_batches * tensor
        yield _Candidate(
            (*(one for one in more if "accumulate" not in one),
             f"--trainer.strategy.init_args.mesh '{{tensor: {tensor}}}'",
             f"--trainer.accumulate_grad_batches {several}"),
            f"{tensor} devices share each matrix, and wait for each other within a block",
            setup.changed(mesh=mesh, accumulate_grad_batches=several),
        )  # fmt: skip
