"""A run that stands still says on every rank where it stands, and names the rank that the others wait for."""

import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch.distributed as dist

from lightning_tricks._core.errors import UsageError
from lightning_tricks._host.exit import Deadline
from lightning_tricks._host.process import Process, this_process
from lightning_tricks._trainer.lightning import Module, Trainer, pl
from lightning_tricks._trainer.loop import batch_progress
from lightning_tricks._trainer.processes import dismiss_process_observer, launched_processes
from lightning_tricks._trainer.running import (
    RunningCall,
    describe_loader,
    evaluation_progress,
    is_compiling,
    is_evaluating,
    line_of,
    running_place,
    stacks_of_threads,
)
from lightning_tricks.guards.watchdog.channel import Connection, answer_seconds, connect, end_process, first_line, say

__all__ = ["HangWatchdog"]

LOOK_SECONDS = 2.0  # between two looks, at most
MISSES = 3  # looks in a row that fail before the watch ends
SHOWN_RANKS = 8  # in one line
HOOK_LIMITS = 10.0  # the limit of a hook, in those of a batch
ENDED, FAILED = "ended", "failed"  # parts of a rank that has left its fit
_DISPATCHER = ("torch._ops", "torch._library")  # what torch calls a functional collective's kernel through


@dataclass(frozen=True)
class RunPosition:
    """The place of a rank in its run.

    Attributes:
        part: one of `running_place`; `ENDED` or `FAILED` for a rank that has left its fit.
        where: the hook, such as "LMEval.on_validation_epoch_end", or the checkpoint.
        compiling: whether it is in torch.compile.
        evaluating: whether it is in a validation.
        step: optimizer steps done.
        micro_batches: training micro-batches fetched.
        validations: validations that have ended, with the sanity check.
        validation_batches: batches fetched in the running validation, or in the last one.
        collectives: number of collectives that this rank has begun, by the process group's key, which all of its ranks
            share; without groups that do not count.
        detail: the loader that it waits for, its error, or the innermost line of Python outside torch's dispatcher.
        seconds: how long it has been there.
        left: how many seconds it may still stay there.
    """

    process: Process
    part: str = ""
    where: str = ""
    compiling: bool = False
    evaluating: bool = False
    step: int = 0
    micro_batches: int = 0
    validations: int = 0
    validation_batches: int = 0
    collectives: dict[str, int] = field(default_factory=dict)
    detail: str = ""
    seconds: float = 0.0
    left: float = 0.0

    @property
    def order(self) -> tuple[int, ...]:
        """How many batches the rank has fetched: compared with those of another one."""
        batches = self.validation_batches if self.evaluating else 0
        return self.micro_batches, self.validations, self.evaluating, batches

    @property
    def progress(self) -> tuple[Any, ...]:
        """What changes while a run goes on."""
        counts = (self.step, self.micro_batches, self.validations, self.validation_batches)
        return self.part, self.where, self.compiling, *counts

    @property
    def text(self) -> str:
        """The place in words."""
        after = f"after step {self.step}" if self.step else "before the first step"
        if self.part == "loader" and self.evaluating:
            return f"waiting for the validation loader, batch {self.validation_batches + 1}, {after}"
        return {
            "loader": f"waiting for the training loader before step {self.step + 1}",
            "forward": f"in the forward of step {self.step + 1}",
            "backward": f"in the backward of step {self.step + 1}",
            "optimizer": f"in the optimizer of step {self.step + 1}",
            "checkpoint": f"in the checkpoint {after}",
            "validation": f"in the validation {after}, batch {self.validation_batches}",
            "hook": f"in {self.where}, {after}",
            ENDED: f"at the end of its run, {after}",
        }.get(self.part, f"between steps, {after}")

    def limits(self, first_step: int) -> set[str]:
        """The options of which the largest says how long a rank may stay here.

        Args:
            first_step: steps done when the fit began.
        """
        if self.part == "checkpoint":
            return {"checkpoint_seconds"}
        first_batch = self.part == "validation" and not self.validations and self.validation_batches <= 1
        is_first = self.compiling or (first_batch if self.evaluating else self.step <= first_step)
        limit = "hook_seconds" if self.part == "hook" else "limit_seconds"
        return {limit, "first_step_seconds"} if is_first else {limit}

    def to_dict(self) -> dict[str, Any]:
        """In plain types, for another rank; without the process, which it knows."""
        return {name: value for name, value in vars(self).items() if name != "process"}


def read_place(process: Process, trainer: Any, stack: Sequence[FrameType], validations: int) -> RunPosition:
    """The place of this process, from the stack of the thread that trains, the innermost frame first."""
    part, where = running_place(stack)
    is_torchs = lambda frame: str(frame.f_globals.get("__name__", "")).startswith(_DISPATCHER)  # noqa: E731
    innermost = next((frame for frame in stack if not is_torchs(frame)), stack[0])
    return RunPosition(
        process,
        part=part,
        where=where,
        compiling=is_compiling(stack),
        evaluating=is_evaluating(stack),
        step=trainer.global_step,
        micro_batches=batch_progress(trainer).total.ready,
        validations=validations,
        validation_batches=evaluation_progress(trainer).current.ready,
        collectives=_collectives(),
        detail=describe_loader(stack) if part == "loader" else line_of(innermost),
    )


def _collectives() -> dict[str, int]:
    """Number of collectives begun, by group; disjoint groups may have one name, so the first rank is in the key."""
    found: dict[str, int] = {}
    if not (dist.is_available() and dist.is_initialized()):
        return found
    with suppress(Exception):  # torch's own table of groups, read from distributed_c10d.py of torch 2.13
        for group, name in list(dist.distributed_c10d._world.pg_names.items()):
            with suppress(Exception):  # a backend that does not count
                key = f"{name} from rank {min(dist.get_process_group_ranks(group))}"
                found[key] = int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    return found


def judge(
    processes: Mapping[int, Process], places: Mapping[int, dict[str, Any]], silent: Collection[int]
) -> tuple[str, Collection[int]]:
    """One line: which rank is behind, and where it is, by the places that the ranks told last; some are silent.

    Returns:
        The line, and the ranks that may still go on by themselves, for which the others wait.
    """
    known = {rank: RunPosition(processes[rank], **places[rank]) for rank in sorted(places)}
    ranks = [place for rank, place in known.items() if rank not in silent]
    failed = [place for place in ranks if place.part == FAILED]
    if failed:
        left = [f"{each.process.name} has left its run after step {each.step}: {each.detail}" for each in failed]
        return _listed(left), ()
    if silent:
        world = next(process.world for process in processes.values())
        names = {rank: processes[rank].name if rank in processes else f"rank {rank} of {world}" for rank in silent}
        return _listed([_silent(names[rank], known.get(rank)) for rank in sorted(silent)]), silent
    ended = [place for place in ranks if place.part == ENDED]
    if ended and len(ended) < ended[0].process.world:
        return f"{_names(ended)} {ended[0].text}: the others have more steps or batches", ()
    return _uneven_validation(ranks) or _behind(ranks)


def _listed(lines: Sequence[str]) -> str:
    """Some of the lines in one, and how many more there are."""
    more = [f"and {len(lines) - SHOWN_RANKS} more ranks"] if len(lines) > SHOWN_RANKS else []
    return "; ".join([*lines[:SHOWN_RANKS], *more])


def _uneven_validation(places: Sequence[RunPosition]) -> tuple[str, Collection[int]] | None:
    """The line on a validation that some ranks have ended, of which others run a later batch; None where not so."""
    most = max(place.validations for place in places)
    done = [place for place in places if place.validations == most]
    inside = [place for place in places if place.evaluating and place.validations < most]
    longer = [place for place in inside if place.validation_batches > done[0].validation_batches]
    if not longer:
        return None
    line = (
        f"uneven validation: {_names(done, '')} had {done[0].validation_batches} batches, {_names(longer)} "
        f"at batch {longer[0].validation_batches}: give every rank the same number, such as by "
        "Trainer.limit_val_batches"
    )
    return line, [place.process.rank for place in longer]


def _behind(places: Sequence[RunPosition]) -> tuple[str, Collection[int]]:
    """The line on the ranks with the fewest collectives begun or, where that is equal, the fewest batches fetched."""
    least = min(place.order for place in places)
    last = _fewest_collectives(places) or [place for place in places if place.order == least]
    line = f"no rank is behind the others: {places[0].text}" if len(places) > 1 else ""
    if len(last) < len(places):
        text = last[0].text + (f" for {last[0].seconds:.0f} s" if last[0].seconds else "")
        line = f"{_names(last)} behind: {': '.join(filter(None, [text, last[0].detail]))}"
    return line, [place.process.rank for place in last]


def _fewest_collectives(places: Sequence[RunPosition]) -> Sequence[RunPosition]:
    """The ranks that have begun the fewest collectives in each of their groups, and in one of them fewer than another.

    All ranks begin the same collectives in the same order. On a mesh a rank that stands still holds up its neighbours,
    and these hold up the rank that has no group with it: that one is behind as well, but its neighbours have begun
    less in their common group.
    """
    counts: dict[str, list[int]] = {}
    for place in places:
        for group, count in place.collectives.items():
            counts.setdefault(group, []).append(count)
    least = {group: min(begun) for group, begun in counts.items()}
    most = {group: max(begun) for group, begun in counts.items()}
    return [
        place
        for place in places
        if all(count == least[group] for group, count in place.collectives.items())
        and any(count < most[group] for group, count in place.collectives.items())
    ]


def _silent(name: str, place: RunPosition | None) -> str:
    seen = f", last seen {place.text}" if place else ""
    return f"{name} gives no sign of life{seen}: stopped, gone, or in C code that holds Python's lock"


def _names(places: Sequence[RunPosition], verb: str = "is") -> str:
    if len(places) == 1:
        return f"{places[0].process.name} {verb}".rstrip()
    more = ", ..." if len(places) > SHOWN_RANKS else ""
    ranks = ", ".join(str(place.process.rank) for place in places[:SHOWN_RANKS])
    return f"ranks {ranks}{more} {'are' if verb else ''}".rstrip()


class HangWatchdog(pl.Callback):
    """Report a run that stands still; with `abort`, end it. Never changes training.

    When a rank stays at one place longer than its limit, every rank prints the place and the stacks of all threads:
    waiting for the training or validation loader (which one, its dataset, its workers), in the forward, in the
    backward, in the optimizer, in a checkpoint, in the validation, or between steps. One line names the rank that the
    others wait for, also one that is stopped or gone. A run that goes on later says so.

    With `abort` all processes of the run end after that with exit code 1: every rank by itself, with its data workers,
    and with the processes that Lightning's launcher has started.

    The watch runs in `fit` and in `validate`, from the start of the fit to its end. Nothing is done in a step.

    Args:
        limit_seconds: how long one place may last: a part of a training micro-batch, a validation batch, or all that
            lies between two of them. 300 is half of the 10 minutes after which NCCL gives up, without a stack.
        first_step_seconds: the same until the first step is done, and for the first validation batch, in which a model
            is compiled; also wherever torch.compile is at work later.
        checkpoint_seconds: how long the save of a checkpoint may take.
        abort: end the processes of the run after the report.
        hook_seconds: how long one hook of a callback, the module, the data module or the strategy may take, a logger
            or a metric at the end of an epoch; ten times `limit_seconds` if None. `first_step_seconds` if that is more,
            until the first step is done.

    Raises:
        UsageError: a limit is not positive, or `first_step_seconds` is below `limit_seconds`.
    """

    def __init__(
        self,
        limit_seconds: float = 300.0,
        first_step_seconds: float = 1800.0,
        checkpoint_seconds: float = 1800.0,
        abort: bool = False,
        hook_seconds: float | None = None,
    ) -> None:
        hook_seconds = HOOK_LIMITS * limit_seconds if hook_seconds is None else hook_seconds
        for name, value in (("limit", limit_seconds), ("checkpoint", checkpoint_seconds), ("hook", hook_seconds)):
            if not value > 0:
                raise UsageError(f"HangWatchdog.{name}_seconds={value}: give more than 0 seconds")
        if not first_step_seconds >= limit_seconds:
            raise UsageError(
                f"HangWatchdog.first_step_seconds={first_step_seconds}: give at least limit_seconds={limit_seconds}"
            )
        self.limit_seconds, self.first_step_seconds = limit_seconds, first_step_seconds
        self.checkpoint_seconds, self.hook_seconds, self.abort = checkpoint_seconds, hook_seconds, abort
        self._watch: _Watch | None = None

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Begin to watch; all ranks must call."""
        self._stop()
        if stage in ("fit", "validate") and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._watch = _Watch(trainer, self, connect(trainer))
            self._watch.start()

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Know which step is the first: a resumed run counts on."""
        if self._watch is not None:
            self._watch.first_step = trainer.global_step

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Count it."""
        if self._watch is not None:
            self._watch.validations += 1

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        """End the watch, and tell the other ranks the reason."""
        self._stop(exception)

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """End the watch."""
        self._stop()

    def _stop(self, error: BaseException | None = None) -> None:
        if self._watch is not None:
            self._watch.close(error)
        self._watch = None


class _Watch(threading.Thread):
    """Watches the thread that makes it, from `start` to `close`; ends by itself when the Trainer's call is over.

    It moves its deadline in each look, a little beyond the limit: that needs no lock of Python's, and so it also holds
    where C code holds that lock and this thread stands still.
    """

    def __init__(self, trainer: Any, options: HangWatchdog, connection: Connection | None) -> None:
        super().__init__(daemon=True, name="hang-watchdog")
        self._trainer, self._options, self._connection = trainer, options, connection
        self._call, self._closed = RunningCall(), threading.Event()
        self._place = self._published = RunPosition(this_process(trainer.global_rank, trainer.world_size))
        self._deadline = Deadline(ends=options.abort)
        self._timer_seconds = answer_seconds(trainer.world_size) + 1.0  # the others have named this rank then
        self._since = time.monotonic()
        self._waits_until = 0.0  # for a rank that may stay longer where it is
        self._verdict = None if connection is None else connection.verdict  # the last one that was heard
        self._reported = False  # this place
        self.validations = 0
        self.first_step = sys.maxsize  # training has not begun
        if connection is not None and connection.hub is not None:
            connection.hub.judge = judge

    def close(self, error: BaseException | None = None) -> None:
        """From the training thread: end the watch, and tell the other ranks why. Idempotent."""
        self._closed.set()
        self.join(10.0)
        self._leave(FAILED if error else ENDED, first_line(error) if error else "")

    def _leave(self, part: str, detail: str) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            place = replace(self._place, part=part, evaluating=False, detail=detail)
            connection.publish(place.to_dict(), last=True)
            connection.leave()

    def run(self) -> None:
        """Look at the place at least ten times within the limit."""
        self._deadline.set(self._options.first_step_seconds + self._timer_seconds)
        misses, error = 0, ""
        while misses < MISSES and not self._closed.wait(min(LOOK_SECONDS, self._options.limit_seconds / 10)):
            try:  # what it reads may change under it: the next look finds it whole
                misses, error = 0 if self._look() else misses + 1, ""
            except Exception as raised:
                misses, error = misses + 1, first_line(raised)
        self._deadline.cancel()
        if misses == MISSES:  # another callback's error may have kept `on_exception` from us
            if error:
                say(f"HangWatchdog: {self._place.process.name} is not watched now: {error}")
            self._leave(FAILED, error)

    def _look(self) -> bool:
        """Look once; returns whether the Trainer's call still runs."""
        stack, now, connection = self._call.stack(), time.monotonic(), self._connection
        if not stack:
            return False
        place = read_place(self._place.process, self._trainer, stack, self.validations)
        if place.progress != self._place.progress:
            if self._reported:
                say(f"HangWatchdog: {place.process.name} goes on, after {now - self._since:.0f} s")
            self._since, self._waits_until, self._reported = now, 0.0, False
        limit, option = max((getattr(self._options, each), each) for each in place.limits(self.first_step))
        seconds = now - self._since
        self._place = place = replace(place, seconds=seconds, left=limit - seconds)
        left = max(place.left, self._waits_until - now)
        overdue = left <= 0 and not self._reported
        if connection is not None and connection.publish(place.to_dict(), overdue):
            self._published = place
        verdict, heard = self._verdict, connection.verdict if connection is not None else None
        self._verdict = heard
        if self._reported:
            return True
        self._deadline.set(max(left, 0.0) + self._timer_seconds)
        why = f"{option}={limit:g}" if place.left <= 0 else "another rank asks"
        if heard is not None and heard is not verdict:
            if heard.wait <= 0:
                self._report(why, heard.line, heard.silent)
            self._waits_until = now + min(heard.wait, self._options.limit_seconds)  # then it asks again
        elif overdue and (connection is None or not connection.was_open):
            self._report(why, "", ())
        elif overdue and connection is not None and connection.rank_0_left:
            self._report(why, f"{connection.rank_0.name} has ended its run: the others have more steps or batches", ())
        elif connection is not None and left <= (-self._timer_seconds - 2.0 if connection.is_open else 0.0):
            self._report(why, _silent(connection.rank_0.name, None), (connection.rank_0,))
        return True

    def _report(self, why: str, line: str, silent: Sequence[Process]) -> None:
        """Say where this rank is, and who is behind; end the process if that is asked for, and the silent ones."""
        self._reported = True
        place, name = self._place, self._place.process.name
        self._deadline.cancel()
        if self._options.abort:
            dismiss_process_observer()  # it would kill this process as soon as another one has ended
        detail, stacks = f": {place.detail}" if place.detail else "", stacks_of_threads()
        say(f"HangWatchdog: {name} has been {place.text} for {place.seconds:.0f} s ({why}){detail}\n{stacks}")
        if line:
            say(f"HangWatchdog: {line}")
        if self._options.abort and not self._closed.is_set():
            say(f"HangWatchdog: {name} is ended, with exit code 1")
            time.sleep(self._timer_seconds if silent else 1.0)  # a launcher ends all ranks when one has ended
            for process in silent:  # a stopped one would be left over
                process.kill()
            end_process(launched_processes(self._trainer))
