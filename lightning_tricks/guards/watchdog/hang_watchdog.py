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
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lightning_tricks._errors import UsageError
from lightning_tricks._exit import Deadline, end_now
from lightning_tricks._lightning import Module, Trainer, pl
from lightning_tricks._process import Process, this_process
from lightning_tricks._trainer import (
    RunningCall,
    batch_progress,
    describe_loader,
    dismiss_process_observer,
    evaluation_progress,
    is_compiling,
    is_evaluating,
    launched_processes,
    line_of,
    running_place,
    stacks_of_threads,
)
from lightning_tricks.guards.watchdog.channel import VERDICT_SECONDS, Connection, connect, first_line, say

LOOK_SECONDS = 2.0  # between two looks, at most
TIMER_SECONDS = 6.0  # beyond the limit: the others have named this rank then
SILENT_SECONDS = 5.0  # after the answers: for the timer of a rank that gives none
MISSES = 3  # looks in a row that fail before the watch ends
SHOWN_RANKS = 8  # in one line
HOOK_LIMITS = 10.0  # the limit of a hook, in those of a batch
ENDED, FAILED = "ended", "failed"  # parts of a rank that has left its fit
_DISPATCHER = ("torch._ops", "torch._library")  # what torch calls a functional collective's kernel through
_ORDER = (  # within a micro-batch
    "batch_start", "forward", "on_before_zero_grad", "on_before_backward", "backward", "on_after_backward",
    "on_before_optimizer_step", "optimizer", "", "hook", "checkpoint", "validation", "loader",
)  # fmt: skip


@dataclass(frozen=True)
class Place:
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
        in_collective: whether that line is in torch.distributed.
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
    in_collective: bool = False
    seconds: float = 0.0
    left: float = 0.0

    @property
    def order(self) -> tuple[int, ...]:
        """How far the rank has come: compared with that of another one."""
        batches = self.validation_batches if self.evaluating else 0
        part, hook = self.part, self.where.rpartition(".")[2]
        if part == "hook":
            part = "batch_start" if hook.endswith("batch_start") else hook if hook in _ORDER else part
        late = part not in _ORDER or (self.evaluating and part == "hook")  # also after the last validation batch
        return (
            self.micro_batches,
            self.validations,
            self.evaluating,
            batches,
            len(_ORDER) if late else _ORDER.index(part),
        )

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


def read_place(process: Process, trainer: Any, stack: Sequence[FrameType], validations: int) -> Place:
    """The place of this process, from the stack of the thread that trains, the innermost frame first."""
    part, where = running_place(stack)
    innermost = next((frame for frame in stack if not _module(frame).startswith(_DISPATCHER)), stack[0])
    return Place(
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
        in_collective=_module(innermost).startswith("torch.distributed"),
    )


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


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
    known = {rank: Place(processes[rank], **places[rank]) for rank in sorted(places)}
    ranks = [place for rank, place in known.items() if rank not in silent]
    failed = [place for place in ranks if place.part == FAILED][:SHOWN_RANKS]
    if failed:
        lines = [f"{each.process.name} has left its run after step {each.step}: {each.detail}" for each in failed]
        return "; ".join(lines), ()
    if silent:
        world = next(process.world for process in processes.values())
        names = {rank: processes[rank].name if rank in processes else f"rank {rank} of {world}" for rank in silent}
        lines = [_silent(names[rank], known.get(rank)) for rank in sorted(silent)[:SHOWN_RANKS]]
        more = f"; and {len(silent) - SHOWN_RANKS} more ranks" if len(silent) > SHOWN_RANKS else ""
        return "; ".join(lines) + more, silent
    ended = [place for place in ranks if place.part == ENDED]
    if ended and len(ended) < ended[0].process.world:
        return f"{_names(ended)} {ended[0].text}: the others have more steps or batches", ()
    return _uneven_validation(ranks) or _behind(ranks)


def _uneven_validation(places: Sequence[Place]) -> tuple[str, Collection[int]] | None:
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


def _behind(places: Sequence[Place]) -> tuple[str, Collection[int]]:
    last = _last(places)
    line = f"no rank is behind the others: {places[0].text}" if len(places) > 1 else ""
    if len(last) < len(places):
        text = last[0].text + (f" for {_seconds(last[0].seconds)}" if last[0].seconds else "")
        line = f"{_names(last)} behind: {': '.join(filter(None, [text, last[0].detail]))}"
    return line, [place.process.rank for place in last]


def _last(places: Sequence[Place]) -> Sequence[Place]:
    """The ranks that have begun the fewest collectives; where that is equal, by their places; by their stacks."""
    orders = [place.order for place in places]
    behind = _fewest_collectives(places) or places
    if len(behind) == len(places):
        behind = [place for place in places if place.order == min(orders)]
    if len(behind) == len(places):
        behind = [place for place in places if not place.in_collective]
    return behind or places


def _fewest_collectives(places: Sequence[Place]) -> Sequence[Place]:
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


def _seconds(number: float) -> str:
    return f"{number:.3g} s" if number < 999.5 else f"{number:.0f} s"


def _silent(name: str, place: Place | None) -> str:
    seen = f", last seen {place.text}" if place else ""
    return f"{name} gives no sign of life{seen}: stopped, gone, or in C code that holds Python's lock"


def _names(places: Sequence[Place], verb: str = "is") -> str:
    if len(places) == 1:
        return f"{places[0].process.name} {verb}".rstrip()
    more = ", ..." if len(places) > SHOWN_RANKS else ""
    ranks = ", ".join(str(place.process.rank) for place in places[:SHOWN_RANKS])
    return f"ranks {ranks}{more} {'are' if verb else ''}".rstrip()


def communicates(model: nn.Module) -> bool:
    """Whether the forward of a model needs all ranks.

    FSDP2, tensor parallelism, FSDP1 and DeepSpeed's stage 3 gather weights; DDP broadcasts buffers, if there are any.
    """
    if any(isinstance(parameter, DTensor) or hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return True
    if isinstance(model, DistributedDataParallel):
        return bool(model.will_sync_module_buffers())
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def uneven(lengths: Sequence[Sequence[float]]) -> str | None:
    """The error where ranks have different numbers of validation batches; None where they are equal.

    Args:
        lengths: of each rank, the number of batches of each loader; infinite where a loader has no length.
    """
    if all(own == lengths[0] for own in lengths):
        return None
    numbers = [", ".join("unknown" if n == float("inf") else str(n) for n in own) for own in lengths]
    common = max(numbers, key=numbers.count)
    first = numbers.index(common)
    others = [f"rank {rank}: {text}" for rank, text in enumerate(numbers) if text != common]
    shown = ", ".join([f"rank {first}: {common}", *others[: SHOWN_RANKS - 1]])
    smallest = int(min(min(own, default=0) for own in lengths))
    return (
        f"val_dataloaders: the ranks have different numbers of validation batches ({shown}), and the validation would "
        "hang, because the model's forward needs all ranks: give every rank the same number, such as by "
        f"Trainer.limit_val_batches={smallest}"
    )


class HangWatchdog(pl.Callback):
    """Report a run that stands still; with `abort`, end it. Refuses an uneven validation. Never changes training.

    When a rank stays at one place longer than its limit, every rank prints the place and the stacks of all threads:
    waiting for the training or validation loader (which one, its dataset, its workers), in the forward, in the
    backward, in the optimizer, in a checkpoint, in the validation, or between steps. One line names the rank that the
    others wait for, also one that is stopped or gone. A run that goes on later says so.

    With `abort` all processes of the run end after that with exit code 1: every rank by itself, with its data workers,
    and with the processes that Lightning's launcher has started.

    Where the forward needs all ranks (FSDP, tensor parallelism, DeepSpeed's stage 3, DDP with buffers), ranks with
    different numbers of validation batches hang. Where the loaders have lengths, they are compared before the first
    validation.

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
        UsageError: a limit is not positive, `first_step_seconds` is below `limit_seconds`; in a fit or a validation:
            the ranks have different numbers of validation batches.
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
        options = {
            "limit_seconds": limit_seconds,
            "checkpoint_seconds": checkpoint_seconds,
            "hook_seconds": hook_seconds,
        }
        for name, value in options.items():
            if not value > 0:
                raise UsageError(f"HangWatchdog.{name}={value}: give more than 0 seconds")
        if not first_step_seconds >= limit_seconds:
            raise UsageError(
                f"HangWatchdog.first_step_seconds={first_step_seconds}: give at least limit_seconds={limit_seconds}"
            )
        self.limit_seconds, self.first_step_seconds = limit_seconds, first_step_seconds
        self.checkpoint_seconds, self.hook_seconds, self.abort = checkpoint_seconds, hook_seconds, abort
        self._watch: _Watch | None = None
        self._lengths_agree = False

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Begin to watch; all ranks must call."""
        self._stop()
        self._lengths_agree = False
        if stage in ("fit", "validate") and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._watch = _Watch(trainer, self, connect(trainer, "HangWatchdog"))
            self._watch.start()

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Know which step is the first: a resumed run counts on."""
        if self._watch is not None:
            self._watch.first_step = trainer.global_step

    def on_validation_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Compare the numbers of batches, once for each set of loaders."""
        reloaded = trainer.reload_dataloaders_every_n_epochs and not trainer.sanity_checking  # type: ignore
        if self._watch is None or (self._lengths_agree and not reloaded):
            return
        self._lengths_agree = True
        if trainer.world_size > 1 and communicates(trainer.strategy.model or trainer.lightning_module):
            lengths: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(lengths, list(trainer.num_val_batches))
            if (line := uneven(lengths)) is not None:
                raise UsageError(line)

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
        self._place = self._published = Place(this_process(trainer.global_rank, trainer.world_size))
        self._deadline = Deadline(ends=options.abort)
        self._since = time.monotonic()
        self._waits_until = 0.0  # for a rank that may stay longer where it is
        self._answered = 0  # number of the last question that this rank has answered
        self._reported = False  # this place
        self.validations = 0
        self.first_step = sys.maxsize  # training has not begun
        if connection is not None and connection.hub is not None:
            connection.hub.judge = judge

    def close(self, error: BaseException | None = None) -> None:
        """From the training thread: end the watch, and tell the other ranks why. Idempotent."""
        self._closed.set()
        self.join(10.0)
        detail = first_line(error) if error else ""
        self._leave(replace(self._place, part=FAILED if error else ENDED, evaluating=False, detail=detail))

    def _leave(self, place: Place) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.publish(place.to_dict(), last=True)
            connection.leave()

    def run(self) -> None:
        """Look at the place at least ten times within the limit."""
        self._deadline.set(self._options.first_step_seconds + TIMER_SECONDS)
        every = pause = min(LOOK_SECONDS, self._options.limit_seconds / 10)
        misses, error = 0, ""
        while misses < MISSES and not self._closed.wait(pause):
            try:  # what it reads may change under it: the next look finds it whole
                left = self._look()
                misses, error = misses + 1 if left is None else 0, ""
            except Exception as raised:
                left, misses, error = None, misses + 1, first_line(raised)
            pause = every if left is None else max(0.01, min(every, left))
        self._deadline.cancel()
        if misses == MISSES:  # another callback's error may have kept `on_exception` from us
            if error:
                say(f"HangWatchdog: {self._place.process.name} is not watched now: {error}")
            self._leave(replace(self._place, part=FAILED, detail=error))

    def _look(self) -> float | None:
        """Look once; returns the seconds until the limit, None where the Trainer's call is not found."""
        stack = self._call.stack()
        if not stack:
            return None
        place = read_place(self._place.process, self._trainer, stack, self.validations)
        if place.progress != self._place.progress:
            self._go_on(place)
        limit, option = max((getattr(self._options, each), each) for each in place.limits(self.first_step))
        seconds, connection = time.monotonic() - self._since, self._connection
        self._place = place = replace(place, seconds=seconds, left=limit - seconds)
        left = max(place.left, self._waits_until - time.monotonic())
        asked = connection.asked if connection is not None else 0
        if self._reported:
            if connection is not None and asked > self._answered:  # by a rank that has gone on and stands still again
                self._answered = asked
                connection.answer(place.to_dict(), asked)
            return float(self._options.limit_seconds)
        if left <= 0 or asked > self._answered:
            self._deadline.set(VERDICT_SECONDS + TIMER_SECONDS)
            line, silent, wait = self._ask_who_is_behind()
            if wait <= 0:
                self._report(f"{option}={limit:g}" if place.left <= 0 else "another rank asks", line, silent)
            self._waits_until = time.monotonic() + min(wait, self._options.limit_seconds)  # then it asks again
        else:
            self._deadline.set(left + TIMER_SECONDS)
            if connection is not None and place.progress != self._published.progress:
                self._published = place if connection.publish(place.to_dict()) else self._published
        return max(left, 0.0)

    def _go_on(self, place: Place) -> None:
        if self._reported:
            say(f"HangWatchdog: {place.process.name} goes on, after {_seconds(time.monotonic() - self._since)}")
        self._since, self._waits_until, self._reported = time.monotonic(), 0.0, False

    def _report(self, why: str, line: str, silent: Sequence[Process]) -> None:
        """Say where this rank is, and who is behind; end the process if that is asked for, and the silent ones."""
        self._reported = True
        place, name = self._place, self._place.process.name
        self._deadline.cancel()
        if self._options.abort:
            dismiss_process_observer()  # it would kill this process as soon as another one has ended
        detail, stacks = f": {place.detail}" if place.detail else "", stacks_of_threads()
        say(f"HangWatchdog: {name} has been {place.text} for {_seconds(place.seconds)} ({why}){detail}\n{stacks}")
        if line:
            say(f"HangWatchdog: {line}")
        if self._options.abort and not self._closed.is_set():
            say(f"HangWatchdog: {name} is ended, with exit code 1")
            time.sleep(SILENT_SECONDS if silent else 1.0)  # a launcher ends all ranks when one has ended
            for process in silent:  # a stopped one would be left over
                process.kill()
            end_now(1, launched_processes(self._trainer))

    def _ask_who_is_behind(self) -> tuple[str, Sequence[Process], float]:
        """The line on the rank behind, this host's silent processes, and how long that rank may stay where it is."""
        connection = self._connection
        if connection is None or not connection.was_open:
            return "", (), 0.0
        number = connection.asked if connection.asked > self._answered else 0
        verdict = connection.ask_all(self._place.to_dict(), number)
        self._answered = max(self._answered, verdict.number if verdict else connection.asked)
        if verdict is not None:
            return verdict.line, verdict.silent, verdict.wait
        if connection.last_words is None and not self._closed.is_set():
            return _silent(connection.rank_0.name, None), (connection.rank_0,), 0.0
        return connection.last_words or "", (), 0.0
