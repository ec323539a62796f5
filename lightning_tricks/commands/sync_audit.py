"""`sync-audit`: each place of a training step at which the host waits for the device.

First the report; then a callback that watches a fit; then `sync_audit`, for any module, and the command, for a recipe.
"""

import collections
import dataclasses
import json
import os
import pkgutil
import sys
import tempfile
import threading
from collections.abc import Mapping, Set
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from lightning_tricks._device_waits import watching_waits
from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import Module, Trainer, pl
from lightning_tricks._trainer import (
    end_after_this_batch,
    is_a,
    is_evaluating,
    is_in_batch,
    logging_step,
    outwards,
    running_hook,
    running_part,
    trains_in_copies,
)
from lightning_tricks._writable import check_file
from lightning_tricks.commands import CommandParser

DEFAULT_STEPS = 20
LEAST_STEPS = 2  # the first one is not counted
_HOST_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "batch_to_device")  # before a batch's first hook
_FILE_LOGGERS = ("TensorBoardLogger", "CSVLogger")  # that write to a folder and nowhere else
_LIGHTNING = ("lightning.pytorch.", "pytorch_lightning.")
_LIGHTNINGS_OWN = (*_LIGHTNING, "lightning.fabric.", "lightning_fabric.", "lightning_utilities.")
_HOOK_CALLERS = (*(f"{package}trainer.call" for package in _LIGHTNING), "lightning_tricks.guards.lean_loop")
_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Wait:
    """One place at which the host waits for the device.

    Args:
        call: that waits, such as `.item()`; of a GPU also the name of torch's function that does.
        hook: in which it happens, with the class that it is of: `MyCallback.on_train_batch_end`.
        file: of the innermost line outside torch and Python's library.
        line: in the file.
        during: "step", "validation", or "epoch" for what comes before and after the batches of an epoch.
        thread: its name, where it is no thread of the training: it does not hold up a step.
        steps: how often in each optimizer step, from 1.
    """

    call: str
    hook: str
    file: str
    line: int
    during: str
    thread: str
    steps: Mapping[int, int] = field(compare=False)


@dataclass(frozen=True)
class SyncReport:
    """The answer of `sync_audit`.

    Args:
        device: type of the device, such as "cuda".
        steps: number of each optimizer step that was watched.
        log_steps: those of them that end a logging interval.
        log_every_n_steps: of the Trainer.
        waits: in the order in which they were met first.
    """

    device: str
    steps: tuple[int, ...]
    log_steps: frozenset[int]
    log_every_n_steps: int
    waits: tuple[Wait, ...]

    @property
    def steps_between(self) -> frozenset[int]:
        """The steps between log steps, without the first of the run, which compiles and allocates."""
        return frozenset(self.steps[1:]) - self.log_steps

    def between(self, wait: Wait) -> int:
        """How often a wait held up a step between log steps; 0 for other threads, validations and ends of epochs."""
        if wait.during != "step" or wait.thread or self._only_after(wait, self.log_steps | {self.steps[0]}):
            return 0
        return sum(count for step, count in wait.steps.items() if step in self.steps_between)

    @property
    def between_log_steps(self) -> int:
        """The number of waits between log steps, of all places."""
        return sum(map(self.between, self.waits))

    def _only_after(self, wait: Wait, steps: Set[int]) -> bool:
        """Whether a wait happens in `steps` only, or when the batch after one of them starts, as a log line may."""
        starts = {step + 1 for step in steps} if wait.hook.endswith(".on_train_batch_start") else set()
        return set(wait.steps) <= steps | starts

    def how_often(self, wait: Wait) -> str:
        """In words: `each step`, `3 x log steps`, `step 1`, `4 of 20 steps`, `validation`; the most in one step."""
        steps, times = set(wait.steps), max(wait.steps.values())
        if wait.during != "step":
            times, where = sum(wait.steps.values()), wait.during
        elif steps >= set(self.steps):
            where = "each step"
        elif self._only_after(wait, self.log_steps):
            where = "log steps"
        elif len(steps) == 1:
            where = f"step {min(steps)}"
        elif steps >= self.steps_between:
            where = "each step but log steps"
        else:
            where = f"{len(steps)} of {len(self.steps)} steps"
        return f"{times} x {where}" if times > 1 else where

    def __str__(self) -> str:
        """A table, the waits between log steps first, and a verdict."""
        ordered = sorted(self.waits, key=lambda wait: -self.between(wait))
        rows = [("how often", "call", "in", "at")] if ordered else []
        for wait in ordered:
            hook = f"{wait.hook}, thread {wait.thread}" if wait.thread else wait.hook
            rows.append((self.how_often(wait), wait.call, hook, f"{wait.file}:{wait.line}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1] if rows else []
        lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]]) for row in rows]
        return "\n".join([*lines, *self._verdict()])

    def _verdict(self) -> list[str]:
        found, steps_between, first, last = self.between_log_steps, self.steps_between, self.steps[0], self.steps[-1]
        watched = f"steps {first} to {last} on {self.device}, log_every_n_steps={self.log_every_n_steps}"
        if not steps_between:
            return [f"sync-audit: nothing to count: each of {watched} is the first or a log step"]
        waiting = {step for wait in self.waits if self.between(wait) for step in wait.steps} & steps_between
        words = f"{found} synchronization{'' if found == 1 else 's'} between log steps"
        verdict = f"{words}, in {len(waiting)} of {len(steps_between)} steps" if found else words
        line = f"sync-audit: {verdict} ({watched})"
        other = f"on {self.device}, reads of tensors stand for waits: CUDA names more"
        return [line] if self.device == "cuda" else [line, other]

    def as_json(self) -> str:
        """All of it as JSON, for a script."""
        waits = [{**asdict(wait), "between_log_steps": self.between(wait)} for wait in self.waits]
        head: dict[str, Any] = {"device": self.device, "steps": self.steps, "log_steps": sorted(self.log_steps)}
        head |= {"log_every_n_steps": self.log_every_n_steps, "between_log_steps": self.between_log_steps}
        return json.dumps({**head, "waits": waits}, indent=1) + "\n"


class _WaitRecorder(pl.Callback):
    """Notes the waits of the first steps of a fit, then ends it. To be the first of the callbacks."""

    def __init__(self, steps: int) -> None:
        self._steps, self._ended, self._watching = steps, False, ExitStack()
        self._counts: dict[Wait, collections.Counter[int]] = {}
        self._seen: list[int] = []
        self._log_steps: set[int] = set()
        self._every, self._device, self._thread = 0, "cpu", 0
        self._lock = threading.Lock()

    def on_train_start(self, trainer: Any, pl_module: Module) -> None:
        """Watch from here on."""
        device = trainer.strategy.root_device
        self._every, self._device, self._thread = trainer.log_every_n_steps, device.type, threading.get_ident()
        self._watching.enter_context(watching_waits(self._note, device))

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        """Count the step; end the fit with the batch after the last one to watch, which so ends as any other does."""
        step = logging_step(trainer) + 1
        if step in self._seen:  # another micro-batch of it
            return
        if len(self._seen) == self._steps:
            self._watching.close()
            self._ended = True
            end_after_this_batch(trainer)
            return
        self._seen.append(step)
        if self._every and step % self._every == 0:
            self._log_steps.add(step)

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Stop watching, where the run has ended before: its last step is a log step for all callbacks."""
        self._watching.close()
        if not self._ended:
            self._log_steps.update(self._seen[-1:])

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        """Stop watching."""
        self._watching.close()

    def _note(self, call: str, frame: FrameType) -> None:
        own = threading.get_ident() == self._thread
        name = "" if own else threading.current_thread().name
        if not own and name.startswith("Dummy"):  # of autograd: the training waits for it
            own, name = True, ""
        stack = list(outwards(sys._current_frames()[self._thread] if own else frame))
        during = "validation" if is_evaluating(stack) else "step" if is_in_batch(stack) or not own else "epoch"
        hook = running_hook(stack)
        name_of_hook = "" if hook is None else hook[1]
        on_host = running_part(stack) == "loader" or name_of_hook in _HOST_HOOKS
        if on_host and self._device == "cpu":
            return  # of data on their way to the device, which lie on the host in any run
        of_next = during == "step" and (on_host or name_of_hook == "on_after_batch_transfer")
        with self._lock:
            step = (self._seen or [0])[-1] + of_next
            at = _line_to_show(frame)
            wait = Wait(call, _hook_in_words(hook, stack), _short(at), at.f_lineno, during, name, {})
            self._counts.setdefault(wait, collections.Counter())[step] += 1

    def report(self) -> SyncReport:
        """All that was noted."""
        if not self._seen:
            raise UsageError("sync-audit: the run ended before its first step: give it data, and 2 steps or more")
        waits = []
        for wait, counts in self._counts.items():
            steps = {step: count for step, count in sorted(counts.items()) if step <= self._seen[-1]}
            if steps:  # not only the fetch of the batch after the last one
                waits.append(dataclasses.replace(wait, steps=steps))
        return SyncReport(self._device, tuple(self._seen), frozenset(self._log_steps), self._every, tuple(waits))


def _hook_in_words(hook: tuple[Any, str] | None, stack: list[FrameType]) -> str:
    """The class and the hook; outside hooks, the function of Lightning."""
    if hook is not None:
        return f"{type(hook[0]).__name__}.{hook[1]}"
    frame = next(filter(_is_lightnings, stack), None)
    return f"Lightning, {frame.f_code.co_name}" if frame else stack[0].f_code.co_qualname


def _line_to_show(innermost: FrameType) -> FrameType:
    """The line that is shown: of a read by Lightning that of the hook which asked for it, or Lightning's own."""
    if not _is(innermost, _LIGHTNINGS_OWN):
        return innermost
    frames = list(outwards(innermost))
    hook = next((number for number, frame in enumerate(frames) if _is(frame, _HOOK_CALLERS)), 0)
    own = (frame for frame in frames[:hook] if not _is(frame, _LIGHTNINGS_OWN))
    return next(own, None) or next(filter(_is_lightnings, frames), innermost)


def _is_lightnings(frame: FrameType) -> bool:
    return _is(frame, _LIGHTNING) and ".utilities." not in frame.f_globals["__name__"]


def _is(frame: FrameType, modules: tuple[str, ...]) -> bool:
    return frame.f_globals.get("__name__", "").startswith(modules)


def _short(frame: FrameType) -> str:
    """The file of a frame, below the folder of installed packages, of this package or of the process."""
    file = Path(frame.f_code.co_filename)
    installed = [folder for folder in file.parents if folder.name in ("site-packages", "dist-packages")]
    for folder in (*installed, _PACKAGE.parent, Path.cwd()):
        if folder in file.parents:
            return str(file.relative_to(folder))
    return str(file)


def sync_audit(
    module: Module, data: Any = None, trainer: Mapping[str, Any] | None = None, steps: int = DEFAULT_STEPS
) -> SyncReport:
    """Train some steps, and list each place at which the host waits for the device.

    Works on any LightningModule and any data. Training is real: the weights of `module` change. Nothing is written but
    to a temporary folder, and no checkpoint.

    Args:
        module: to train, freshly made.
        data: a loader or a LightningDataModule; None where the module has loaders of its own.
        trainer: arguments of the Trainer. Loggers are replaced by Lightning's default one (`logger: False` stays), and
            callbacks that save are left out.
        steps: optimizer steps, at least 2. The first is not counted: it compiles and allocates.

    Returns:
        The waits of this process; `print` shows a table and a verdict.

    Raises:
        UsageError: `steps` is below 2; a strategy that trains in copies of this process; `fast_dev_run`; no step.

    Source: `torch.cuda.set_sync_debug_mode`, https://docs.pytorch.org/docs/stable/generated/torch.cuda.set_sync_debug_mode.html.
    """
    watch, given = _recorder(steps), dict(trainer or {})
    callbacks = given.get("callbacks") or []
    given["callbacks"] = callbacks if isinstance(callbacks, list) else [callbacks]
    given["logger"] = given.get("logger") is not False
    with tempfile.TemporaryDirectory(prefix="sync-audit-", ignore_cleanup_errors=True) as folder:
        made: Any = pl.Trainer(**{**given, "default_root_dir": folder})
        _enter(watch, made)
        loaders = {"datamodule": data} if is_a(data, "LightningDataModule") else {"train_dataloaders": data}
        made.fit(module, **loaders)
    return watch.report()


def _recorder(steps: int) -> _WaitRecorder:
    if steps < LEAST_STEPS:
        raise UsageError(f"sync-audit: steps={steps}: give at least {LEAST_STEPS}, as the first one is not counted")
    return _WaitRecorder(steps)


def _enter(watch: _WaitRecorder, trainer: Any) -> None:
    """Put the watch before a Trainer's callbacks, and take out those that save."""
    if trains_in_copies(trainer):
        raise UsageError(
            "sync-audit: trainer.strategy trains in copies of this process, which tell nothing: give ddp, or one device"
        )
    if trainer.fast_dev_run:
        raise UsageError(
            f"sync-audit: trainer.fast_dev_run={trainer.fast_dev_run}: each of its steps is a log step: leave it out"
        )
    others = [callback for callback in trainer.callbacks if not isinstance(callback, pl.callbacks.Checkpoint)]
    trainer.callbacks = [watch, *others]


class SyncAudit:
    """The change of `fit` into an audit: the recipe's own run, in a temporary folder, with an end after some steps."""

    def __init__(self, steps: int, file: str | None) -> None:
        self._watch, self._file = _recorder(steps), file
        self._folder = tempfile.TemporaryDirectory(prefix="sync-audit-", ignore_cleanup_errors=True)

    def change(self, config: Any) -> None:
        """Begin a run anew; lead loggers and its folder elsewhere; leave out loggers that write to a service."""
        if not config.get("elastic"):  # which needs it
            config.resume = "none"  # a run that has ended, in the folder of a saver, has no step to watch
        trainer = config.trainer
        trainer.default_root_dir = self._folder.name
        if isinstance(trainer.get("logger"), bool | None):
            return
        given = trainer.logger if isinstance(trainer.logger, list) else [trainer.logger]
        kept = [logger for logger in given if _writes_files_only(logger)]
        for logger in kept:
            logger.init_args.save_dir = self._folder.name
        trainer.logger = kept or False

    def check(self, trainer: Any) -> None:
        """Put the watch into the Trainer."""
        _enter(self._watch, trainer)

    def options(self) -> list[str]:
        """None: there is no run to go on with."""
        return []

    def after_fit(self, trainer: Any) -> bool:
        """Print the report, and exit with 1 where steps between log steps wait."""
        report = self._watch.report()
        if trainer.is_global_zero:
            print("", report, sep="\n")
            if self._file is not None:
                Path(self._file).write_text(report.as_json(), encoding="utf-8")
        self._folder.cleanup()
        if trainer.is_global_zero and report.between_log_steps:
            sys.exit(1)
        return True


def _writes_files_only(logger: Any) -> bool:
    cls = pkgutil.resolve_name(logger["class_path"])
    return any(base.__name__ in _FILE_LOGGERS for base in cls.__mro__)


def run(args: list[str]) -> tuple[list[str], SyncAudit]:
    """The `fit` that an audit is, in words and as a change of its recipe.

    Raises:
        UsageError: see `sync_audit`; a file that cannot be written.
    """
    parser = CommandParser(
        "lightning-tricks sync-audit",
        description="Train some steps of a recipe and list each place at which the host waits for the device: how "
        "often, by which call, in which hook of which callback or module, in which line. Exits with 1 if a step "
        "between log steps waits. Leaves no folder and no checkpoint. Other options are those of fit.",
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help="optimizer steps; default %(default)s")
    parser.add_argument("--json", metavar="FILE", help="file for the whole report")
    options, recipe = parser.parse_known_args(args)
    if options.json is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        check_file("sync-audit: json", options.json)
    return recipe, SyncAudit(options.steps, options.json)
