"""Who computes what when under a pipeline schedule, on paper: the time that ranks wait, and what they hold meanwhile.

A forward pass of a stage takes one unit of time, a backward pass two, of which a split one takes one for the gradients
of inputs and one for those of weights; sending takes none.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from lightning_tricks._core.errors import UsageError
from lightning_tricks.parallel.pipeline import PipelineSchedule, stages_of_ranks

_UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}


class Act(NamedTuple):
    """What a rank does for some units of time.

    Attributes:
        kind: `F` forward, `B` backward; `I` and `W` are the two halves of a split backward pass, the gradients of
            inputs and of weights.
        stage: number of the stage.
        micro_batch: of the call.
        begin: in units of time.
        end: in units of time, after `begin`.
    """

    kind: str
    stage: int
    micro_batch: int
    begin: int
    end: int


def timeline(schedule: PipelineSchedule, ranks: int, micro_batches: int) -> list[list[Act]]:
    """The acts of each rank, in their order.

    Source: the orders of torch.distributed.pipelining.
    """
    orders = [_order(schedule, ranks, rank, micro_batches) for rank in range(ranks)]
    last, found, ends = max(map(max, stages_of_ranks(schedule, ranks))), [list[Act]() for _ in orders], dict[Any, int]()
    left = sum(map(len, orders))
    while left:
        for order, acts in zip(orders, found, strict=True):
            while len(acts) < len(order):
                kind, stage, number = order[len(acts)]
                waits = [("F", stage - 1, number)] if kind == "F" and stage else []
                if kind in "BI":
                    waits = [("F", stage, number), *([("B", stage + 1, number)] if stage < last else [])]
                if not all(one in ends for one in waits):
                    break
                begin = max([acts[-1].end if acts else 0, *(ends[one] for one in waits)])
                acts.append(Act(kind, stage, number, begin, begin + _UNITS[kind]))
                ends["B" if kind == "I" else kind, stage, number] = acts[-1].end
                left -= 1
    return found


def _order(schedule: PipelineSchedule, ranks: int, rank: int, micro_batches: int) -> list[tuple[str, int, int]]:
    """Kind, stage and micro-batch of what a rank does."""
    kind: Any = get_schedule_class(schedule)
    if issubclass(kind, PipelineScheduleSingle):
        if micro_batches < ranks and schedule == "1F1B":
            raise ValueError("give at least one for each rank")
        ahead = micro_batches if schedule == "GPipe" else min(micro_batches, ranks - rank)
        order = [("F", rank, number) for number in range(ahead)]
        for number in range(micro_batches):
            order += [("B", rank, number), *([("F", rank, number + ahead)] if number + ahead < micro_batches else [])]
        return order
    places = stages_of_ranks(schedule, ranks)
    group = {"num_stages": 2 * ranks, "group_size": ranks, "group_rank": rank, "has_backward": True, "submod": None}
    own = {"is_first": False, "is_last": False, "device": "cpu", **group}  # all that a schedule asks a stage here
    stages = [SimpleNamespace(stage_index=number, **own) for number in places[rank]]
    acts = kind(stages, micro_batches, loss_fn=max).pipeline_order[rank]
    return [
        (part.computation_type.value, part.stage_index, part.microbatch_index)
        for act in acts
        if act is not None
        for part in act.sub_actions or (act,)
    ]


def check_order(schedule: PipelineSchedule, ranks: int, micro_batches: int) -> None:
    """Refuse what torch's schedule does not take.

    Raises:
        UsageError: a number of micro-batches that is too small, or does not divide.
    """
    try:
        _order(schedule, ranks, 0, micro_batches)
    except ValueError as error:
        raise UsageError(
            f"pipeline_micro_batches={micro_batches}: {schedule} on {ranks} pipeline ranks does not take it: {error}"
        ) from error


def waiting(acts: Sequence[Sequence[Act]]) -> float:
    """The share of the time in which ranks have nothing to do (the bubble)."""
    length = max(own[-1].end for own in acts)
    return 1 - sum(act.end - act.begin for own in acts for act in own) / (length * len(acts))


def most_held(acts: Sequence[Act], layers: Mapping[int, int]) -> int:
    """The most layers of which a rank holds activations at a time, each micro-batch counted.

    Args:
        acts: of the rank.
        layers: number of layers of each of its stages.
    """
    return max(sum(count * layers[stage] for stage, count in held.items()) for held in _held(acts))


def _held(acts: Sequence[Act]) -> Iterator[Counter[int]]:
    """After each act: number of micro-batches whose activations the rank holds, by stage."""
    held = Counter[int]()
    for act in acts:
        held[act.stage] += {"F": 1, "I": 0}.get(act.kind, -1)
        yield held


def drawn(acts: Sequence[Sequence[Act]], columns: int) -> str:
    """A line for each rank and a column for each unit of time, or for several where there are too few columns.

    A last line tells of how many. They are no multiple of three, which would show one half of the acts alone.

    A forward pass is the last digit of its micro-batch; `b` is a backward pass, `i` and `w` its halves, `.` waiting.
    """
    length, label = max(own[-1].end for own in acts), len(f"rank {len(acts) - 1} ")
    units = -(-length // max(1, columns - label))
    units += units % 3 == 0
    lines = []
    for rank, own in enumerate(acts):
        row = ["."] * length
        for act in own:
            mark = str(act.micro_batch % 10) if act.kind == "F" else act.kind.lower()
            row[act.begin : act.end] = mark * (act.end - act.begin)
        lines.append(f"rank {rank}".ljust(label) + "".join(row[::units]))
    if units > 1:
        lines.append(f"a column stands for {units} units of time; a forward pass takes one")
    return "\n".join(lines)
