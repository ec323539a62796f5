"""The micro-batches of each optimizer step, as a function of the step: a run may begin with a small global batch."""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Accumulation:
    """The number of micro-batches that each process accumulates in each optimizer step.

    Args:
        starts: the first step of each stage, in ascending order from 0.
        micro_batches: of one step and one process, in each stage.
    """

    starts: tuple[int, ...]
    micro_batches: tuple[int, ...]

    def at(self, step: int) -> int:
        """Micro-batches of `step`; the first step is 0."""
        if len(self.starts) == 1:  # most runs, which ask in every step
            return self.micro_batches[0]
        return self.micro_batches[bisect_right(self.starts, step) - 1]

    def before(self, step: int) -> int:
        """Micro-batches of all steps before `step` together."""
        if len(self.starts) == 1:
            return max(step, 0) * self.micro_batches[0]
        stages = zip(self.starts, (*self.starts[1:], step), self.micro_batches, strict=True)
        return sum(max(min(end, step) - start, 0) * number for start, end, number in stages)

    def whole_steps(self, first: int, micro_batches: int) -> int:
        """Number of whole steps, from step `first` on, that `micro_batches` suffice for."""
        limit = self.before(first) + micro_batches
        stage = bisect_right([self.before(start) for start in self.starts], limit) - 1
        start = self.starts[stage]
        return start + (limit - self.before(start)) // self.micro_batches[stage] - first

    def steps_to_end_of_pass(self, done: int, micro_batches: int) -> int:
        """Steps from step `done` to the end of a pass over `micro_batches`; a pass has at least one step, all whole."""
        first = 0  # step of a pass
        while True:
            steps = max(self.whole_steps(first, micro_batches), 1)
            if first >= self.starts[-1]:  # all later passes have equally many
                return steps - (done - first) % steps
            if done < first + steps:
                return first + steps - done
            first += steps

    def steps_of_epoch(self, first: int, micro_batches: int) -> int:
        """Steps of an epoch of `micro_batches` that begins with step `first`; its last step may have fewer of them."""
        steps = self.whole_steps(first, micro_batches)
        return steps + (self.before(first + steps) - self.before(first) < micro_batches)


class MicroBatches(int):
    """A value for `trainer.accumulate_grad_batches` that may change from one step to the next.

    Lightning steps where the number of the epoch's micro-batches is a multiple of this value, and clears the gradients
    at the micro-batch after it. Once the value has changed, multiples are no longer the ends of steps. So here
    `count % value` counts from the first micro-batch of the running step, for Lightning and for everybody who asks in
    this way. (For `a % b`, Python asks `b` first where its class derives from that of `a`.)

    Args:
        number: micro-batches of the running step.
        first: micro-batches of the epoch before it; None where that is not known yet, and no step is open.
        step: `trainer.global_step` before it.
        final: the recipe's value.
    """

    first: int | None
    step: int
    final: int

    def __new__(cls, number: int, first: int | None, step: int, final: int) -> "MicroBatches":
        """An int with three attributes."""
        made = super().__new__(cls, number)
        made.first, made.step, made.final = first, step, final
        return made

    def __rmod__(self, count: int) -> int:
        """`count % self`: 0 after the last micro-batch of the step."""
        return 0 if self.first is None else (int(count) - self.first) % int(self)

    def __reduce__(self) -> Any:
        """Copied and pickled as a plain int."""
        return int, (int(self),)


def accumulation(trainer: Any) -> Accumulation:
    """The micro-batches of each step of a run: those of BatchSizeWarmup, else the recipe's for all steps."""
    for callback in getattr(trainer, "callbacks", ()):
        if isinstance(found := getattr(callback, "accumulation", None), Accumulation):
            return found
    return _constant(int(trainer.accumulate_grad_batches))


@cache
def _constant(micro_batches: int) -> Accumulation:
    return Accumulation((0,), (micro_batches,))


def micro_batches_in_step(trainer: Any, ready: int) -> int:
    """Micro-batches that the unfinished step has begun, under BatchSizeWarmup; the epoch has begun `ready` of them."""
    value = trainer.accumulate_grad_batches
    if not isinstance(value, MicroBatches) or value.first is None or value.step != trainer.global_step:
        return 0
    return ready - value.first
