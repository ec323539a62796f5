"""The place of a rank in its run, as one line of text, and the stacks of its threads."""

import os
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from lightning_tricks._process_age import start_ticks
from lightning_tricks._trainer import (
    awaited_loader,
    batch_progress,
    evaluation_progress,
    is_evaluating,
    running_part,
)

ENDED, FAILED = "ended", "failed"  # parts of a rank that has left its fit
_ORDER = ("forward", "backward", "optimizer", "", "checkpoint", "validation", "loader")  # within a micro-batch


@dataclass(frozen=True)
class Place:
    """The place of a rank in its run.

    Attributes:
        part: one of `running_part`; `ENDED` or `FAILED` for a rank that has left its fit.
        evaluating: whether it is in a validation.
        step: optimizer steps done.
        micro_batches: training micro-batches fetched.
        validations: validations that have ended, with the sanity check.
        validation_batches: batches fetched in the running validation, or in the last one.
        collectives: number of collectives that this rank has begun on the default process group, if that is known.
        detail: the loader that it waits for, its error, or the innermost line of Python.
        in_collective: whether that line is in torch.distributed.
        pid, started: the process, and the time of its start in ticks, by which it is told from a later one.
    """

    rank: int
    world: int
    host: str
    pid: int
    started: str = ""
    part: str = ""
    evaluating: bool = False
    step: int = 0
    micro_batches: int = 0
    validations: int = 0
    validation_batches: int = 0
    collectives: int | None = None
    detail: str = ""
    in_collective: bool = False

    @property
    def name(self) -> str:
        """The rank, for a line."""
        return f"rank {self.rank} of {self.world} on {self.host}"

    @property
    def order(self) -> tuple[int, ...]:
        """How far the rank has come: compared with that of another one."""
        batches = self.validation_batches if self.evaluating else 0
        part = _ORDER.index(self.part) if self.part in _ORDER else len(_ORDER)
        return self.micro_batches, self.validations, self.evaluating, batches, part

    def progress(self) -> tuple[Any, ...]:
        """What changes while a run goes on."""
        return self.part, self.step, self.micro_batches, self.validations, self.validation_batches

    def text(self) -> str:
        """The place in words."""
        after = f"after step {self.step}" if self.step else "before the first step"
        if self.part == "loader":
            kind, when = ("validation", f", batch {self.validation_batches + 1}, {after}") if self.evaluating else (
                "training", f" before step {self.step + 1}"
            )  # fmt: skip
            return f"waiting for the {kind} loader{when}"
        return {
            "forward": f"in the forward of step {self.step + 1}",
            "backward": f"in the backward of step {self.step + 1}",
            "optimizer": f"in the optimizer of step {self.step + 1}",
            "checkpoint": f"in the checkpoint {after}",
            "validation": f"in the validation {after}, batch {self.validation_batches}",
            ENDED: f"at the end of its run, {after}",
        }.get(self.part, f"between steps, {after}")

    def to_dict(self) -> dict[str, Any]:
        """For another rank."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Place":
        """From another rank."""
        return cls(**{field.name: values[field.name] for field in fields(cls)})


def this_process(rank: int, world: int) -> Place:
    """This process, before it is anywhere."""
    return Place(rank, world, socket.gethostname(), os.getpid(), started_at(os.getpid()))


def started_at(pid: int) -> str:
    """The time of a process's start, in ticks since the system's; empty where the system does not tell."""
    return str(start_ticks(pid) or "")


def read(process: Place, trainer: Any, stack: Sequence[FrameType], validations: int) -> Place:
    """The place of this process.

    Args:
        process: as `this_process` gives it.
        trainer: read only.
        stack: of the thread that trains, the innermost frame first.
        validations: that have ended.
    """
    part = running_part(stack)
    innermost = stack[0] if stack else None
    return Place(
        process.rank, process.world, process.host, process.pid, process.started,
        part=part,
        evaluating=is_evaluating(stack),
        step=trainer.global_step,
        micro_batches=batch_progress(trainer).total.ready,
        validations=validations,
        validation_batches=evaluation_progress(trainer).current.ready,
        collectives=_collectives(),
        detail=describe_loader(stack) if part == "loader" else _line(innermost),
        in_collective=_module(innermost).startswith("torch.distributed"),
    )  # fmt: skip


def _collectives() -> int | None:
    if not (dist.is_available() and dist.is_initialized()):
        return None
    with suppress(Exception):  # a backend that does not count
        return int(dist.group.WORLD._get_sequence_number_for_group())  # type: ignore[union-attr]
    return None


def describe_loader(stack: Sequence[FrameType]) -> str:
    """The loader that a thread waits for: its class, its dataset, its workers and who of them owes the next batch."""
    found = awaited_loader(stack)
    text = type(found[0]).__name__ if found else "a loader"
    if found and found[2] > 1:
        text += f" (number {found[1]} of {found[2]}, from 0)"
    holders = (frame.f_locals.get("self") for frame in stack)
    iterator = next((holder for holder in holders if hasattr(holder, "_num_workers")), None)  # torch's, torchdata's
    dataset = getattr(iterator if iterator is not None else found and found[0], "_dataset", None)
    dataset = getattr(found[0], "dataset", None) if dataset is None and found else dataset
    if dataset is not None:
        text += f" over {type(dataset).__name__}"
    workers = list(getattr(iterator, "_workers", ()))
    if not workers:
        return f"{text}, no workers: {_line(stack[0])}" if stack else text
    alive = sum(worker.is_alive() for worker in workers)
    return f"{text}, {len(workers)} workers, {alive} alive{_owing_worker(iterator, workers)}"


def _owing_worker(iterator: Any, workers: list[Any]) -> str:
    """The worker from which torch's iterator expects the next batch (`_rcvd_idx` of `_task_info`)."""
    with suppress(AttributeError, KeyError, IndexError, TypeError):
        worker = workers[number := iterator._task_info[iterator._rcvd_idx][0]]
        gone = "" if worker.is_alive() else ", which is gone"
        return f"; worker {number} (process {worker.pid}{gone}) has the next batch to give"
    return ""


def stack_of(thread: int) -> list[FrameType]:
    """The stack of a thread, the innermost frame first; empty for one that has ended."""
    return list(_outwards(sys._current_frames().get(thread)))


def stacks() -> str:
    """The stacks of all threads of this process but the one that asks, in Python's words.

    No source file is read for them: a file system that does not answer may be the reason of the hang.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    blocks = []
    for ident, innermost in sys._current_frames().items():
        if ident != threading.get_ident():
            lines = [f'  File "{f.f_code.co_filename}", line {f.f_lineno}, in {_name(f)}' for f in _outwards(innermost)]
            blocks.append("\n".join([f"Thread {names.get(ident, ident)} (most recent call last):", *reversed(lines)]))
    return "\n".join(blocks)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _line(frame: FrameType | None) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {_name(frame)}" if frame else ""


def _name(frame: FrameType) -> str:
    return frame.f_code.co_qualname


def _module(frame: FrameType | None) -> str:
    return str(frame.f_globals.get("__name__", "")) if frame else ""
