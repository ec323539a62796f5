"""End a run when somebody asks for it: its stable part becomes the decay, at the next log step."""

import os
import re
import signal
import threading
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, cast

from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import Module, Trainer, WarnOnce, pl, rank_zero_info, rank_zero_warn
from lightning_tricks._replaced import replaced
from lightning_tricks._trainer import is_accumulating, limits_of_run, slurm_environment
from lightning_tricks.metrics.metric_buffer import MetricBuffer
from lightning_tricks.metrics.row import Row
from lightning_tricks.schedules import ScheduleLR, WarmupStableDecay

FILE = "decay"  # in the run's folder
SIGNAL = getattr(signal, "SIGUSR2", None)  # None on Windows
_CONTENT = re.compile(r"(\d+)(?: from step (\d+))?")
_ASKED = "_decay_steps"  # name in the buffer: length of the decay that is asked for, 0 for none


@dataclass(frozen=True)
class Decay:
    """A decay that was asked for: its first step, counted from 0, and its length in optimizer steps."""

    start: int
    steps: int

    @property
    def end(self) -> int:
        """Optimizer steps in the whole run."""
        return self.start + self.steps


class DecayFile:
    """The file that asks for a decay; when the decay has started, it tells a resume when that was.

    Args:
        folder: of the run; an address of a bucket has no such file.
    """

    def __init__(self, folder: str) -> None:
        self.path = None if "://" in folder else Path(folder) / FILE
        self._was_empty = False
        self._warn_once = WarnOnce()

    def exists(self) -> bool:
        """Whether there is a file."""
        return self.path is not None and self.path.exists()

    def asks(self, default: int) -> int:
        """Length of the decay that the file asks for, `default` if it is empty; 0 without a request.

        An empty file counts when it is empty the second time: it may just be about to be written.
        """
        text = self._text()
        if text is None:
            return 0
        if not text:
            was_empty, self._was_empty = self._was_empty, True
            return default if was_empty else 0
        found = _CONTENT.fullmatch(text)
        if found and found[2] is None and int(found[1]) > 0:
            return int(found[1])
        self._warn_once(
            text,
            f"DecayOnDemand: {self.path} holds {text[:40]!r}: write the length of the decay in optimizer steps, 1 or "
            "more, or leave the file empty",
        )
        return 0

    def started(self) -> Decay | None:
        """The decay that a run in this folder has started; None where the file does not tell of one."""
        found = _CONTENT.fullmatch(self._text() or "")
        return Decay(int(found[2]), int(found[1])) if found and found[2] else None

    def write(self, decay: Decay) -> None:
        """Tell later starts of the run that the decay has started."""
        if self.path is None:
            return
        new = self.path.with_name(f".{FILE}.new")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new.unlink(missing_ok=True)  # of a killed process, or a link that would lead elsewhere
            new.write_text(f"{decay.steps} from step {decay.start}\n", encoding="utf-8")
            new.replace(self.path)
        except OSError as error:
            rank_zero_warn(
                f"DecayOnDemand: {self.path} cannot be written ({error.strerror}): a resume from a checkpoint before "
                f"step {decay.start} will not decay by itself"
            )

    def _text(self) -> str | None:
        """The content without the space around it; None where there is no file that can be read."""
        try:
            there = self.path is not None and self.path.is_file()  # on a pipe, reading would wait for ever
            return self.path.read_text(encoding="utf-8", errors="replace").strip() if self.path and there else None
        except OSError:
            return None


class DecaySignal:
    """Notes SIGUSR2 in the process that installed it; left alone where the program or SLURM uses it."""

    def __init__(self) -> None:
        self.received = False
        self._process = os.getpid()

    def install(self, trainer: Any) -> None:
        """Take the signal over; no effect outside the main thread, where Python allows no handlers."""
        if SIGNAL is None or threading.current_thread() is not threading.main_thread():
            return
        requeues = getattr(slurm_environment(trainer), "requeue_signal", None) == SIGNAL
        if requeues or signal.getsignal(SIGNAL) is not signal.SIG_DFL:
            rank_zero_info("DecayOnDemand: SIGUSR2 is in use already, so only the file asks for the decay")
            return
        signal.signal(SIGNAL, self._note)

    def restore(self) -> None:
        """Give the signal back, unless somebody else has taken it since. Idempotent."""
        main = threading.current_thread() is threading.main_thread()
        if SIGNAL is not None and main and signal.getsignal(SIGNAL) == self._note:
            signal.signal(SIGNAL, signal.SIG_DFL)

    def _note(self, number: int, frame: Any) -> None:
        self.received |= os.getpid() == self._process  # not in a loader's worker, which was forked with the handler


class DecayOnDemand(pl.Callback):
    """Changes the schedule and the length of the run: when it is asked to, the decay of WarmupStableDecay starts.

    It is asked by a file `decay` in the run's folder (that of the first logger, else `default_root_dir`), as by
    `echo 2000 > runs/tiny/version_0/decay`, or by SIGUSR2 to any of its processes. Rank 0 looks for the file at each
    log step. All ranks start the decay after the same log step, with which the request reaches them, and nothing waits
    between log steps: `decay_start` is that step, and `max_steps` the end of the decay, in the schedule and in the
    Trainer, whatever length the run was given. Parameter groups with a WarmupStableDecay of their own start its decay
    then, too. A request in the warmup waits for its end; one in a decay is refused. One line tells it.

    From there on the run is, to the bit, what the command `branch` makes of a checkpoint of that step. Checkpoints
    remember the decay, and so does the file, which then reads `2000 from step 80000`: a resume from an earlier
    checkpoint of the run starts the same decay at the same step. Delete the file to go on without the decay.

    Args:
        decay_steps: length of the decay in optimizer steps for a request without one: SIGUSR2, or an empty file. None
            for the length that the schedule gives the decay of the whole run.

    Raises:
        UsageError: `decay_steps` is below 1; when training starts, another schedule or none, manual optimization,
            `log_every_n_steps=0`, a file `decay` that was there before the run, or one whose decay started before the
            checkpoint.
    """

    def __init__(self, decay_steps: int | None = None) -> None:
        if decay_steps is not None and decay_steps < 1:
            raise UsageError(f"DecayOnDemand.decay_steps={decay_steps}: give 1 or more, or leave it out")
        self.decay_steps = decay_steps
        self._signal, self._limits = DecaySignal(), ExitStack()
        self._decay: Decay | None = None
        self._is_on = False

    def setup(self, trainer: Any, pl_module: Module, stage: str) -> None:
        """Look for the file; all ranks must call."""
        if stage != "fit" or trainer.fast_dev_run:
            return
        self._trainer, self._is_on, self._decay = trainer, True, None
        self._resumes = self._waits = False
        self._file = DecayFile(str(trainer.log_dir or trainer.default_root_dir))  # some loggers have no folder
        found = (self._file.exists(), self._file.started()) if trainer.is_global_zero else None
        self._file_exists, self._started = trainer.strategy.broadcast(found)
        self._signal = DecaySignal()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        """Take the decay of the checkpoint's run, and follow it as soon as there are schedulers."""
        if not self._is_on or trainer.state.fn != "fit":
            return
        self._resumes = True
        saved = checkpoint["callbacks"].get(self.state_key, {}).get("decay")
        self._decay = Decay(*saved) if saved else self._started
        if not saved and self._decay is not None and self._decay.start < checkpoint["global_step"]:
            raise UsageError(
                f"ckpt_path={trainer.ckpt_path}: it is of step {checkpoint['global_step']} and has not decayed, and "
                f"{self._file.path} tells of a decay from step {self._decay.start} on: delete that file, or give an "
                "earlier checkpoint"
            )
        if trainer.lr_scheduler_configs:  # strategies that load late have them by now, the others in `on_fit_start`
            self._follow()

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Refuse a run that cannot decay on demand; find the buffer; go on with a checkpoint's decay."""
        if not self._is_on:
            return
        _check_run(trainer)
        self._buffer = MetricBuffer.of(trainer)
        self._buffer.at_flush(self._judge)
        self._follow()

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Refuse a request that is older than the run; take the signal over."""
        if not self._is_on:
            return
        if self._file_exists and not self._resumes:
            raise UsageError(
                f"DecayOnDemand: {self._file.path} was there before this run: delete it, and write it when the decay "
                "shall start"
            )
        self._signal.install(trainer)  # not before: after an exception Lightning installs what it found before training
        self._follow()  # again: another callback may have set the length when the checkpoint was loaded
        if self._decay is not None:
            rank_zero_info(
                f"DecayOnDemand: the decay of {self._decay.steps:,} steps from step {self._decay.start} goes on: the "
                f"run ends at step {self._decay.end}"
            )

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """At a log step, let the request travel with the values of the interval."""
        if self._is_on and self._decay is None and not is_accumulating(trainer) and self._buffer.is_log_step():
            default = self._default_steps()
            asked = self._file.asks(default) if trainer.is_global_zero else 0
            self._buffer.record(_ASKED, float(asked or default * self._signal.received), over_ranks="max")

    def _default_steps(self) -> int:
        total, start, _ = self._running()
        return self.decay_steps or total - start

    def _running(self) -> tuple[int, int, int]:
        """Length of the run as it is now, the first step of its decay, and its first step after the warmup."""
        schedulers = _schedulers(self._trainer)
        total = cast(int, schedulers[0].total_steps)
        decaying = [c for one in schedulers for c in one.curves if isinstance(c, WarmupStableDecay)]
        starts = [curve.start_of_decay(total) for curve in decaying]
        return total, min(starts), max(curve.warmup_steps for curve in decaying)

    def _judge(self, rows: list[Row]) -> dict[str, float]:
        """Start the decay if any rank was asked to; the step that ends the interval is done."""
        asked = int(max(row.values.get(_ASKED, 0.0) for row in rows))
        if asked and self._decay is None and not self._buffer.failed:
            self._start(Decay(self._trainer.global_step, asked))
        return {}

    def _start(self, decay: Decay) -> None:
        total, begun, warm = self._running()
        if decay.start < warm:
            if not self._waits:
                self._waits = True
                rank_zero_info(f"DecayOnDemand: the decay waits for the end of the warmup, step {warm}")
            return
        if decay.start > begun:
            self._is_on = False
            rank_zero_info(f"DecayOnDemand: the decay has started already, at step {begun}, and stays as it is")
            return
        self._decay = decay
        self._follow()
        if self._trainer.is_global_zero:
            self._file.write(decay)
        rank_zero_info(
            f"DecayOnDemand: step {decay.start}: the decay starts and takes {decay.steps:,} steps: the run ends at "
            f"step {decay.end} in place of {total}"
        )

    def _follow(self) -> None:
        """Let schedule and Trainer end with the decay, where there is one."""
        if self._decay is None:
            return
        start = self._decay.start
        for scheduler in _schedulers(self._trainer):
            scheduler.follow(
                lambda curve: curve.decaying_from(start) if isinstance(curve, WarmupStableDecay) else curve,
                self._decay.end,
            )
        self._limits.close()
        for limit in limits_of_run(self._trainer, self._decay.end):
            self._limits.enter_context(replaced(*limit))

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        """Give the signal back, and the Trainer its own length."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Give the signal back, and the Trainer its own length."""
        self._signal.restore()
        self._limits.close()
        self._is_on = False

    def state_dict(self) -> dict[str, Any]:
        """The decay, if it has started."""
        return {"decay": list(astuple(self._decay))} if self._decay is not None else {}


def _schedulers(trainer: Any) -> list[ScheduleLR]:
    return [config.scheduler for config in trainer.lr_scheduler_configs]


def _check_run(trainer: Any) -> None:
    """Refuse a run whose schedule and length cannot be changed at a log step."""
    if not trainer.log_every_n_steps:
        raise UsageError(
            "trainer.log_every_n_steps=0: DecayOnDemand is asked at log steps; set it to 50, or take it out"
        )
    if not trainer.lightning_module.automatic_optimization:
        raise UsageError(
            "DecayOnDemand: under manual optimization the module steps its schedule itself: take DecayOnDemand out, or "
            "set automatic_optimization"
        )
    for config in trainer.lr_scheduler_configs:
        curves: list[Any] = config.scheduler.curves if isinstance(config.scheduler, ScheduleLR) else [config.scheduler]
        wrong = [c for c in curves if not isinstance(c, WarmupStableDecay) and getattr(c, "needs_total", True)]
        by_step = config.interval == "step" and config.frequency == 1
        if wrong or not by_step or not any(isinstance(curve, WarmupStableDecay) for curve in curves):
            found = type((wrong or curves)[0]).__name__
            raise UsageError(
                f"DecayOnDemand: the schedule is {found}{'' if by_step else ', not stepped at each step'}: it needs "
                "WarmupStableDecay, whose decay can start early"
            )
    if not trainer.lr_scheduler_configs:
        raise UsageError(
            "DecayOnDemand: there is no schedule: set it to WarmupStableDecay, whose decay can start early"
        )
