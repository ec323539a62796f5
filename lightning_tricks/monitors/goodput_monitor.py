"""Log which share of a run's wall time made progress, and where the rest went, over restarts too."""

import json
import math
import os
import sys
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning_tricks._core.foreign_files import is_inside, parse_json, read_text
from lightning_tricks._host.process import process_age
from lightning_tricks._trainer.lightning import Module, Trainer, WarnOnce, only_warn, pl, rank_zero_info
from lightning_tricks._trainer.loop import is_accumulating
from lightning_tricks.metrics.metric_buffer import MetricBuffer
from lightning_tricks.metrics.row import Row
from lightning_tricks.monitors._clock import (
    DeviceWait,
    Stopwatch,
    compilations_timed,
    device_wait_on,
    fence,
    fetches_timed,
    saves_timed,
)

__all__ = ["GoodputMonitor"]

FILE = "goodput.json"
WRITE_SECONDS = 10.0  # at least, between two writes of the file at log steps
SKIPPED = "guard/skipped_steps"  # number of steps so far that changed nothing, in each row or in the last row only
_SAVES = 8  # number of saves in the file: a run resumes from one of its newest checkpoints

Interval = tuple[float, float]  # times of day, first and last, in seconds since 1970

# The parts of a run's wall time, with their names in `breakdown`; `other` is the rest.
PARTS = {
    "steps": "steps",
    "validation": "validation",
    "checkpoint": "checkpoints",
    "data": "data wait",
    "compile": "compilation",
    "setup": "set-up",
    "skipped": "skipped steps",
    "lost": "lost work",
    "down": "down time",
    "other": "other",
}

wall_clock = time.time
_has_fitted = False


def fit_start() -> float:
    """Seconds since 1970: the start of the process for its first fit; now for a later fit, and in a notebook."""
    global _has_fitted
    is_first, _has_fitted = not _has_fitted, True
    if not is_first or hasattr(sys, "ps1"):  # a notebook may have been open for hours
        return wall_clock()
    return wall_clock() - process_age()


def covered(intervals: Iterable[Interval], first: float, last: float) -> float:
    """Seconds between `first` and `last` that lie in at least one of `intervals`."""
    seconds = 0.0
    for begin, end in sorted(intervals):
        begin, end = max(begin, first), min(end, last)
        if end > begin:
            seconds += end - begin
            first = end  # seconds before it are counted already
    return seconds


def lost_to_restart(
    saved_at: float, started_at: float, processes: Iterable[Interval], saves: Iterable[Interval]
) -> dict[str, float]:
    """Seconds between the save of a checkpoint and the start of the process that resumes it, by part.

    The rest of the save itself counts as `checkpoint`. All other time in which a process ran after `saved_at` is
    `lost`, and time in which no process ran is `down`. The three add up to `started_at - saved_at`, or to 0 if that is
    negative.

    Args:
        saved_at: time of day at which the state in the checkpoint was read.
        started_at: time of day at which the resuming process started.
        processes: intervals in which earlier processes of the run ran, as far as known; they may overlap.
        saves: intervals in which those waited for saves, as far as known.
    """
    ran = covered(processes, saved_at, started_at)
    own_save = [save for save in saves if save[0] <= saved_at <= save[1]]
    saving = min(covered(own_save, saved_at, started_at), ran)
    return {"checkpoint": saving, "lost": ran - saving, "down": max(started_at - saved_at, 0.0) - ran}


def fractions(seconds: Mapping[str, float]) -> dict[str, float]:
    """Each part as a fraction of all parts together; 0 where there is no time at all."""
    wall = math.fsum(seconds.values())
    return {part: spent / wall if wall else 0.0 for part, spent in seconds.items()}


def tenths_of_percent(seconds: Mapping[str, float]) -> dict[str, int]:
    """Each part in units of 0.1 %, rounded so that all together are 1000.

    All are rounded down; then the parts with the largest remainders get one more (largest remainder method).
    """
    exact = {part: 1000 * fraction for part, fraction in fractions(seconds).items()}
    found = {part: math.floor(value) for part, value in exact.items()}
    missing = 1000 - sum(found.values()) if any(exact.values()) else 0
    for part in sorted(exact, key=lambda part: found[part] - exact[part])[:missing]:
        found[part] += 1
    return found


def duration(seconds: float) -> str:
    """A time in its two largest units, such as `3 h 12 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if round(seconds) < 3600:
        return "{} min {} s".format(*divmod(round(seconds), 60))
    if round(seconds / 60) < 24 * 60:
        return "{} h {} min".format(*divmod(round(seconds / 60), 60))
    return "{} d {} h".format(*divmod(round(seconds / 3600), 24))


def breakdown(seconds: Mapping[str, float]) -> str:
    """The parts in one line, in percent that add up to 100.0. Parts of 0.0 % are left out, except steps and other.

    Args:
        seconds: of each part in `PARTS`.
    """
    found = tenths_of_percent(seconds)
    shown = [part for part in PARTS if found[part] or part in ("steps", "other")]
    lines = " + ".join(f"{PARTS[part]} {found[part] / 10:.1f} %" for part in shown)
    return f"wall {duration(math.fsum(seconds.values()))} = {lines}"


def newly_skipped(counts: list[float], before: float) -> tuple[int, float]:
    """By how much a running count has grown since `before`, and its last value; a count that falls restarted at 0."""
    found = 0.0
    for count in counts:
        found += count - before if count >= before else count
        before = count
    return round(found), before


class RunTime:
    """Counts every second since the start of the run, over this process and those before it, to one of `PARTS`.

    Args:
        started_at: time of day from which this process counts. The time since then is set-up.
    """

    def __init__(self, started_at: float) -> None:
        self.run = uuid.uuid4().hex  # from the system's randomness: no random state changes
        self.watch = Stopwatch("setup")
        self.started_at = started_at
        self._before_watch = max(wall_clock() - started_at, 0.0)  # seconds before the stopwatch
        self._corrections = dict.fromkeys(PARTS, 0.0)  # added to the stopwatch's seconds of each part
        self._corrections["setup"] = self._before_watch
        self._steps_before = 0.0  # seconds of steps when the last interval ended
        self._end: tuple[dict[str, float], float] | None = None

    def seconds(self) -> dict[str, float]:
        """Seconds of each part so far."""
        if self._end is not None:
            return dict(self._end[0])
        watched = self.watch.read()
        return {part: correction + watched.get(part, 0.0) for part, correction in self._corrections.items()}

    def now(self) -> float:
        """The time of day, or that of `end`. It advances by the steady clock, which nobody can set back."""
        if self._end is not None:
            return self._end[1]
        return self.started_at + self._before_watch + math.fsum(self.watch.read().values())

    def end(self) -> None:
        """Count no longer."""
        self._end = self._end or (self.seconds(), self.now())

    @property
    def has_ended(self) -> bool:
        """Whether `end` was called."""
        return self._end is not None

    def resume(self, state: Mapping[str, Any], processes: Iterable[Interval], saves: Iterable[Interval]) -> None:
        """Take over a checkpoint's `state` of the run, and count the time that was lost since it was saved.

        Args:
            processes: when earlier processes ran.
            saves: when they waited for saves.
        """
        saved_at: float = state["saved_at"]
        # This process may have started before the save: its time until then is in the checkpoint already.
        overlap = min(max(saved_at - self.started_at, 0.0), self._before_watch)
        self.started_at, self._before_watch = self.started_at + overlap, self._before_watch - overlap
        self._corrections["setup"] -= overlap
        lost = lost_to_restart(saved_at, self.started_at, processes, saves)
        for part in PARTS:
            self._corrections[part] += state["seconds"].get(part, 0.0) + lost.get(part, 0.0)
        self.run = state["run"]
        self._steps_before = self.seconds()["steps"]

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint: numbers and text only."""
        return {"run": self.run, "seconds": self.seconds(), "saved_at": self.now()}

    def end_interval(self, steps: int, skipped: int, data: float) -> None:
        """End a logging interval: take waits for data and skipped steps out of the time of its `steps`.

        Args:
            skipped: number of steps that changed nothing; each is taken to have the mean step's time.
            data: seconds of the steps in which the device waited for data.
        """
        seconds = self.seconds()["steps"] - self._steps_before
        data = min(data, seconds)
        wasted = (seconds - data) * min(skipped / steps, 1.0) if steps else 0.0
        for part, spent in (("data", data), ("skipped", wasted)):
            self._corrections["steps"] -= spent
            self._corrections[part] += spent
        self._steps_before = self.seconds()["steps"]


def file_for(checkpoint: Any) -> Path:
    """The file of the run of a checkpoint: beside the folder `checkpoints`, else beside the checkpoint."""
    folder = Path(checkpoint).absolute().parent
    return (folder.parent if folder.name == "checkpoints" else folder) / FILE


def _interval(start: float, end: float) -> Interval:
    if not (math.isfinite(start) and math.isfinite(end)):
        raise ValueError("no times")
    return start, end


def read_history(path: Path, run: str) -> tuple[list[Interval], list[Interval]] | None:
    """When the processes of a run ran and its saves took place, by a file; None if that has nothing of this run."""
    try:
        found: dict[str, Any] = parse_json(read_text(path))
        processes, saves = ([_interval(*pair) for pair in found[name]] for name in ("processes", "saves"))
        return (processes, saves) if found["run"] == run else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # missing, of another program, or cut off: then lost work counts as down time


class History:
    """When the processes of a run ran and when they waited for saves: a small file, read after a kill.

    Args:
        run: identifier of the run, so that another run's file is not taken for its own.
        places: where the file may lie; the first that has this run is read.
    """

    def __init__(self, run: str, places: Iterable[Path] = ()) -> None:
        self.run = run
        self.path: Path | None = None  # of the file; None until the first save
        self.earlier: Sequence[Interval] = ()  # of the processes before this one
        self.saves: list[Interval] = []
        self._warn_once = WarnOnce()
        for path in places:
            if (found := read_history(path, run)) is not None:
                (self.earlier, self.saves), self.path = found, path
                return

    def place_by(self, checkpoint: Any) -> None:
        """Choose the file's place by a checkpoint, unless it has one already or the checkpoint is not local."""
        if self.path is None and "://" not in str(checkpoint):
            self.path = file_for(checkpoint)

    def add_save(self, save: Interval) -> None:
        """Note a save."""
        self.saves = [*self.saves, save][-_SAVES:]

    def write(self, process: Interval) -> None:
        """Replace the file, with this process in it. A kill leaves the old file; a full disk gives one warning."""
        if self.path is None or not self.path.parent.is_dir():
            return
        content = {"run": self.run, "processes": [*self.earlier, process], "saves": self.saves}
        part = self.path.with_name(f".{FILE}.part")
        try:
            part.unlink(missing_ok=True)  # of a killed process, or a link that would lead elsewhere
            part.write_text(json.dumps(content))
            os.replace(part, self.path)
        except OSError as error:
            part.unlink(missing_ok=True)  # written above
            self._warn_once("file", f"GoodputMonitor: {self.path} cannot be written: {error.strerror}")


class GoodputMonitor(pl.Callback):
    """Record where the wall time of a run went since its very first start. Never changes training.

    On log steps, fractions of that time: `goodput/steps`, the part that made progress; `goodput/validation`;
    `goodput/checkpoint`, in which training waited for a save; `goodput/data`, in which it waited for a batch;
    `goodput/compile`, by torch.compile; `goodput/setup`, from the start of a process to the end of its first step;
    `goodput/skipped`, steps that a guard has skipped; `goodput/lost`, work that was done after a checkpoint and is gone
    because the run went on from there; `goodput/down`, in which no process ran; and `goodput/other`. They add up to 1;
    `goodput/wall_seconds` is the time itself. When `fit` ends, by an exception too, one line is printed:

        GoodputMonitor: wall 3 h 12 min = steps 91.2 % + validation 3.1 % + checkpoints 1.3 % + ... + other 0.2 %

    It promises that each second is counted once, and that a kill loses none: the checkpoint holds the parts and the
    time of day at which it was saved, so everything up to the start of the process that resumes it is lost work or down
    time. A small file in the run's folder, `goodput.json`, tells them apart: it says when each process ran. It is
    written with each save, on log steps 10 seconds or more apart, and at the end; without it, all of that time counts
    as down time. A new run in the folder of another one writes its own in its place.

    Times are those of rank 0: if it waits for another rank, that is time of steps. The host's clock is read when the
    buffer has brought an interval's values, which waits for the device; nothing else waits. On a CUDA device, events
    measure how long the device was idle because it had no data; elsewhere it is the time that the host waited.

    A `fit` without a checkpoint begins a new run. A sanity check counts as set-up. What other callbacks do at the end
    of a validation counts as validation. Steps that StepGuard has skipped (`guard/skipped_steps` in the buffer
    rises) are taken to have a mean step's time.

    Source: the parts follow Google's ML Goodput Measurement,
        https://github.com/AI-Hypercomputer/ml-goodput-measurement/blob/main/README.md. It counts a mean step of the
        first one as productive; here all of the first step is set-up.
    """

    _time: RunTime  # of the current fit or the last one; missing before the first `setup`

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}
        self._device_wait: DeviceWait | None = None
        self._fit_scope = ExitStack()  # the replaced methods; closed when the fit ends

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each part since the start of the run, also after the fit; empty before the first fit."""
        return self._time.seconds() if hasattr(self, "_time") else {}

    # ---- start and end

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Begin to count, from the start of the process on."""
        if stage != "fit":
            return
        self._fit_scope.close()
        self._trainer: Any = trainer
        self._time, self._loaded, self._device_wait = RunTime(fit_start()), {}, None
        self._history = History(self._time.run)
        self._written, self._steps, self._skipped = 0.0, 0, 0.0
        self._buffer = MetricBuffer.of(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Time saves, waits for data and compilations from now on."""
        device, watch = trainer.strategy.root_device, self._time.watch
        self._fence, self._device_wait = fence(device), device_wait_on(device)
        self._fit_scope.enter_context(fetches_timed(trainer, watch, self._device_wait))
        self._fit_scope.enter_context(saves_timed(trainer, watch, self._before_save, self._after_save))
        self._fit_scope.enter_context(compilations_timed(watch))

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Resume the run of the checkpoint, which some strategies read only after `on_fit_start`."""
        self._resume()
        self._buffer.at_flush(self._flushed)  # after StepGuard's, which counts the skipped steps

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Training is over; callbacks may save or wait now."""
        self._begin_phase("other")

    def on_fit_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Say where the time went."""
        self._finish(self._waited())

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        """Say where the time went; Lightning calls no `teardown` after an exception."""
        waited = 0.0
        with only_warn("GoodputMonitor: waits for data since the last logged step count as steps"):
            waited = self._waited()
        self._finish(waited)

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Give the objects their own methods back."""
        self._fit_scope.close()

    def _waited(self) -> float:
        """Seconds that a device has waited for data since the last call."""
        return self._device_wait.take() if self._device_wait else 0.0

    def _finish(self, waited: float) -> None:
        self._fit_scope.close()
        if not hasattr(self, "_time") or self._time.has_ended:
            return
        self._resume()  # where it failed before training began
        self._end_interval(0, waited)
        self._time.end()
        self._write()
        rank_zero_info(f"GoodputMonitor: {breakdown(self._time.seconds())}")

    # ---- state in the checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Where the time went until now, the time of day, and the place of the file."""
        if not hasattr(self, "_time"):
            return {}
        return {**self._time.state(), "skipped_steps": self._skipped, "file": str(self._history.path or "")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep it for the start of training."""
        self._loaded = state_dict

    def _resume(self) -> None:
        state, self._loaded = self._loaded, {}
        if not state:
            return
        places = [file_for(self._trainer.ckpt_path)]  # first, because the folder may have been moved
        file = Path(str(state["file"]))
        loggers = self._trainer.loggers
        roots = [self._trainer.default_root_dir, *(logger.save_dir for logger in loggers if logger.save_dir)]
        if file.name == FILE and any(is_inside(Path(root), file) for root in roots):
            places.append(file)  # a checkpoint of somebody else may name any
        self._history = History(state["run"], places if self._trainer.is_global_zero else [])
        self._time.resume(state, self._history.earlier, self._history.saves)
        self._skipped = state["skipped_steps"]
        self._write()

    # ---- phases of training

    def _begin_phase(self, phase: str) -> None:
        """Count to `phase` from now on. If the buffer holds values, this waits until the device has done its steps."""
        if self._time.watch.phase != "setup":
            self._buffer.flush()
            self._time.watch.switch(phase)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Wait for the first batch, for which the loaders may start their workers."""
        self._begin_phase("data")

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        """Begin a micro-batch; those of the first step are part of the set-up."""
        if self._time.watch.phase not in ("setup", "steps"):
            self._time.watch.switch("steps")

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the step, and record something that is read when the step is done."""
        if is_accumulating(trainer):
            return
        self._buffer.record("_goodput", self._fence)
        if self._time.watch.phase == "setup":
            self._time.watch.switch("steps")
        else:
            self._steps += 1

    def on_validation_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Begin a validation, which lasts until training goes on; a sanity check is part of the set-up."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._begin_phase("validation")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        """End the epoch's last step or validation."""
        self._begin_phase("other")

    def _before_save(self, path: Any) -> None:
        self._buffer.flush()  # so that the device has done the steps before
        self._history.place_by(path)
        self._save_began = self._time.now()

    def _after_save(self) -> None:
        self._history.add_save((self._save_began, self._time.now()))
        self._write()

    # ---- what is written

    def _flushed(self, rows: list[Row]) -> dict[str, float]:
        """The fractions so far; nothing is in flight on the device now, so the clock is right."""
        counts = [row.values[SKIPPED] for row in rows if SKIPPED in row.values]
        skipped, self._skipped = newly_skipped(counts, self._skipped)
        self._end_interval(skipped, self._waited())
        if self._time.now() - self._written >= WRITE_SECONDS:
            self._write()
        seconds = self._time.seconds()
        found = {f"goodput/{part}": fraction for part, fraction in fractions(seconds).items()}
        return {**found, "goodput/wall_seconds": sum(seconds.values())}

    def _end_interval(self, skipped: int, waited: float) -> None:
        if not self._time.has_ended:
            self._time.end_interval(self._steps, skipped, waited)
            self._steps = 0

    def _write(self) -> None:
        self._written = self._time.now()
        if self._trainer.is_global_zero:
            self._history.write((self._time.started_at, self._written))
