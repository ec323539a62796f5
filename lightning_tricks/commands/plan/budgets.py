"""The memory of each budget of activation checkpointing, against the products that it runs again."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, get_args

from lightning_tricks.accounting.flops import training_flops_per_token
from lightning_tricks.accounting.recompute import Mode, modes_of_blocks, recompute_flops_per_token
from lightning_tricks.commands.plan.memory import traced_memory
from lightning_tricks.commands.plan.memory_trace import StepMemory
from lightning_tricks.commands.plan.setup import RunSetup

_TRIES = 3  # budgets that are traced, where the largest one of the curve does not fit after all


class Budget(NamedTuple):
    """What a budget takes.

    Attributes:
        budget: share of the activations' bytes that stay.
        peak: bytes of a device, without its overhead.
        again: FLOPs computed again, as a share of the step's.
    """

    budget: float
    peak: int
    again: float


def budget_curve(setup: RunSetup) -> tuple[Budget, ...]:
    """The budgets 1, 0.99, ... 0 of a LanguageModel. All four modes are traced, and their lines joined.

    Of the modes of a budget's blocks, activations are the mean by the number of blocks, and each other line is the
    largest one. So a peak is about one block too large at most, or too small where the last block keeps least.
    """
    traced = {mode: traced_memory(setup.changed(activation_checkpointing=mode)) for mode in get_args(Mode)}
    config = setup.module.config
    flops, found = training_flops_per_token(config, setup.length, "causal"), []
    for percent in range(100, -1, -1):
        given = {"budget": percent / 100}
        counts = Counter(modes_of_blocks(config, given, config.max_seq_len))
        again = recompute_flops_per_token(config, setup.length, "causal", given) / flops
        found.append(Budget(percent / 100, _peak([(traced[mode], count) for mode, count in counts.items()]), again))
    return tuple(found)


def _peak(parts: Sequence[tuple[StepMemory, int]]) -> int:
    """The peak of blocks of several modes, each with its number."""
    sizes, blocks = [], sum(count for _, count in parts)
    for instant in parts[0][0].instants:
        lines = [(memory.instants.get(instant, {}), count) for memory, count in parts]
        kept = sum(own.get("activations", 0) * count for own, count in lines) // blocks
        others = {name for own, _ in lines for name in own} - {"activations"}
        sizes.append(kept + sum(max(own.get(name, 0) for own, _ in lines) for name in others))
    return max(sizes)


def fitting(curve: Sequence[Budget], room: int) -> list[Budget]:
    """The largest budgets that fit by the curve, the largest first."""
    return [one for one in curve if one.peak <= room][:_TRIES]


def largest_budget(setup: RunSetup, curve: Sequence[Budget], room: int) -> Budget | None:
    """The largest budget whose own trace takes at most `room` bytes, with the peak of this trace."""
    for one in fitting(curve, room):
        peak = traced_memory(setup.changed(activation_checkpointing={"budget": one.budget})).peak
        if peak <= room:
            return one._replace(peak=peak)
    return None
