"""Changes to a recipe that make its step fit into a device's memory, the cheapest first; each is traced before."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, get_args

from lightning_tricks._core.errors import UsageError
from lightning_tricks.accounting.flops import training_flops_per_token
from lightning_tricks.accounting.recompute import Mode, modes_of_blocks, recompute_flops_per_token
from lightning_tricks.commands.plan.memory import traced_memory
from lightning_tricks.commands.plan.memory_trace import StepMemory
from lightning_tricks.commands.plan.setup import RunSetup
from lightning_tricks.precision import BF16True
from lightning_tricks.strategies import FSDP2Strategy

NAMED = 3  # changes that are looked for
_MOST_NODES = 1024
_TRIES = 3  # budgets that are traced, where the largest one of the curve does not fit after all
_STATE = ("weights", "averages", "gradients", "optimizer state")


@dataclass(frozen=True)
class Change:
    """Options of the command line under which a recipe fits.

    Attributes:
        options: as typed.
        why: what it costs.
        peak: bytes of the peak with it.
    """

    options: tuple[str, ...]
    why: str
    peak: int


class Budget(NamedTuple):
    """What a budget of activation checkpointing takes: bytes of a device, and FLOPs as a share of the step's."""

    budget: float
    peak_bytes: int
    recomputed_fraction: float


class _Candidate(NamedTuple):
    options: tuple[str, ...]
    why: str
    setup: RunSetup

    @property
    def kind(self) -> str:
        """The first option's name."""
        return self.options[0].split()[0]


def changes_that_fit(
    setup: RunSetup, memory: StepMemory, room: int, most: int = NAMED, curve: Sequence[Budget] = ()
) -> tuple[Change, ...]:
    """At most `most` changes, each of another kind, with which the peak takes at most `room` bytes.

    First those that need no more devices, then more devices, if need be with all that saves activations. `curve` is
    that of the setup's budgets, if it is known.
    """
    state = max(sum(lines.get(line, 0) for line in _STATE) for lines in memory.instants.values())
    found: list[Change] = []
    kinds: set[str] = set()
    for candidate in _candidates(setup, memory, state, room, curve):
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


def _candidates(
    setup: RunSetup, memory: StepMemory, state: int, room: int, curve: Sequence[Budget]
) -> Iterator[_Candidate]:
    if state < room:  # else nothing that saves activations alone can help
        yield from _smaller_micro_batches(setup)
        yield from _checkpointing(setup, curve, room)
    if setup.is_ours and setup.weights_dtype.itemsize > 2:
        yield _Candidate(
            ("--trainer.plugins '[BF16True]'",),
            "12 bytes a parameter: weights and gradients in bf16, rounded stochastically",
            setup.changed(plugins=[BF16True()]),
        )
    if setup.kind == "ddp":
        yield _Candidate(
            ("--trainer.strategy FSDP2Strategy",),
            "weights are gathered before use: more is sent",
            setup.changed(strategy=FSDP2Strategy()),
        )
    if setup.kind == "one" and setup.on_gpu:
        for devices in (2, 4, 8):
            yield _Candidate(
                (f"--trainer.devices {devices}", "--trainer.strategy FSDP2Strategy"),
                f"{devices} times the devices and the rows of a step",
                setup.changed(devices=devices, strategy=FSDP2Strategy()),
            )
    if setup.kind == "fsdp2" and setup.on_gpu and not setup.offloads:
        yield _Candidate(
            ("--trainer.strategy.init_args.cpu_offload true",),
            "slow: the host steps, and sends the weights in each micro-batch; shards and optimizer take",
            setup.changed(cpu_offload=True),
        )
    if setup.kind == "fsdp2":
        yield from _more_hosts(setup, state, memory.peak - state, room)


def _more_hosts(setup: RunSetup, state: int, rest: int, room: int) -> Iterator[_Candidate]:
    """The fewest hosts over which the state fits, with all that saves activations where these alone are too large."""
    base, options = setup, list[str]()
    if rest >= room and setup.is_ours:
        rows = setup.rows * setup.micro_batches
        base = setup.changed(activation_checkpointing="full", micro_batch_size=1, accumulate_grad_batches=rows)
        options = ["--model.activation_checkpointing full", "--data.micro_batch_size 1"]
        rest = 0
    for times in (2**power for power in range(1, _MOST_NODES.bit_length())):
        nodes = times * setup.nodes
        if state / times + rest > room or nodes > _MOST_NODES:
            continue
        several, left = divmod(base.micro_batches, times)
        several = base.micro_batches if left else several
        options.append(f"--trainer.num_nodes {nodes}")
        if several != setup.micro_batches:
            options.append(f"--trainer.accumulate_grad_batches {several}")
        why = f"{times} times the devices, " + (f"{times} times the rows of a step" if left else "the same rows a step")
        with suppress(UsageError):  # a mesh that does not fit so many
            yield _Candidate(tuple(options), why, base.changed(nodes=nodes, accumulate_grad_batches=several))
        return


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


def _checkpointing(setup: RunSetup, curve: Sequence[Budget], room: int) -> Iterator[_Candidate]:
    if not setup.is_ours or setup.module.activation_checkpointing == "full":
        return
    for one in [one for one in curve or budget_curve(setup) if one.peak_bytes <= room][:_TRIES]:
        again = one.recomputed_fraction
        yield _Candidate(
            (f"--model.activation_checkpointing.budget {one.budget:g}",),
            f"{again:.0%} more products" if again else "norms and activations run again, no product does",
            setup.changed(activation_checkpointing={"budget": one.budget}),
        )


def budget_curve(setup: RunSetup) -> tuple[Budget, ...]:
    """The budgets 1, 0.99, ... 0 of a LanguageModel. All four modes are traced, and their lines joined.

    Of the modes of a budget's blocks, activations are the mean by the number of blocks, and each other line is the
    largest one. So a peak is about one block too large at most, or too small where the last block keeps least.
    """
    traced = {mode: traced_memory(setup.changed(activation_checkpointing=mode)) for mode in get_args(Mode)}
    config, length, found = setup.module.config, setup.length, list[Budget]()
    fused = setup.module.fused_projections
    for budget in (percent / 100 for percent in range(100, -1, -1)):
        counts = Counter(modes_of_blocks(config, {"budget": budget}, config.max_seq_len, fused))
        again = recompute_flops_per_token(config, length, "causal", {"budget": budget}, fused)
        peak = _peak({mode: traced[mode] for mode in counts}, counts)
        found.append(Budget(budget, peak, again / training_flops_per_token(config, length, "causal")))
    return tuple(found)


def _peak(traced: Mapping[Mode, StepMemory], counts: Mapping[Mode, int]) -> int:
    """The peak of blocks of several modes."""
    sizes, blocks = [], sum(counts.values())
    for instant in next(iter(traced.values())).instants:
        lines = {mode: memory.instants.get(instant, {}) for mode, memory in traced.items()}
        kept = sum(own.get("activations", 0) * counts[mode] for mode, own in lines.items()) // blocks
        others = set().union(*lines.values()) - {"activations"}
        sizes.append(kept + sum(max(own.get(name, 0) for own in lines.values()) for name in others))
    return max(sizes)


def largest_budget(setup: RunSetup, curve: Sequence[Budget], room: int) -> Budget | None:
    """The largest budget whose own trace takes at most `room` bytes, with the peak of this trace."""
    for one in [one for one in curve if one.peak_bytes <= room][:_TRIES]:
        peak = traced_memory(setup.changed(activation_checkpointing={"budget": one.budget})).peak
        if peak <= room:
            return one._replace(peak_bytes=peak)
    return None
