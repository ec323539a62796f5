"""Where a decay may branch off: the step of a checkpoint, and whether it lies in the stable part of its run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_tricks._errors import UsageError
from lightning_tricks.checkpoints.check_checkpoint import (
    TRAINER_STATE,
    check_checkpoint,
    check_training_state,
    is_of_deepspeed,
)
from lightning_tricks.checkpoints.read_file import load_file
from lightning_tricks.checkpoints.record import read_record
from lightning_tricks.mixins._plain_settings import from_plain
from lightning_tricks.mixins.optimizer_mixin import SCHEDULE_KEY
from lightning_tricks.schedules import Schedule, WarmupConstant, WarmupStableDecay


@dataclass(frozen=True)
class Trunk:
    """The checkpoint that a decay branches off.

    Args:
        path: of the checkpoint; links are followed, because `last.ckpt` soon leads to another one.
        step: optimizer steps done.
        schedule: that its run followed, None where the checkpoint does not say.
        total_steps: length of its run, None where the checkpoint does not say, or the run has no end.
    """

    path: str
    step: int
    schedule: Schedule | None = None
    total_steps: int | None = None

    def check(self, schedule: Any, total_steps: int | None) -> None:
        """Refuse a checkpoint in the warmup, or inside the decay of its run.

        Args:
            schedule: of the recipe, which stands for that of the checkpoint's run where the checkpoint does not say.
            total_steps: length of the run in the recipe, likewise.

        Raises:
            UsageError: the recipe's schedule is no WarmupStableDecay, or the checkpoint's was another kind of curve;
                the checkpoint lies in a warmup or in a decay.
        """
        if not isinstance(schedule, WarmupStableDecay):
            raise UsageError(
                f"model.schedule={_name(schedule)}: branch starts the decay of a WarmupStableDecay: give "
                "--model.schedule WarmupStableDecay, with its warmup_steps"
            )
        if self.step < schedule.warmup_steps:
            raise UsageError(
                f"ckpt_path={self.path}: step {self.step} lies in the warmup (warmup_steps={schedule.warmup_steps}): "
                "branch off a later checkpoint"
            )
        own, total = (schedule, total_steps) if self.schedule is None else (self.schedule, self.total_steps)
        if isinstance(own, WarmupConstant | WarmupStableDecay) and self.step < own.warmup_steps:
            raise UsageError(
                f"ckpt_path={self.path}: step {self.step} lies in the warmup of its run (warmup_steps="
                f"{own.warmup_steps}): branch off a later checkpoint"
            )
        if isinstance(own, WarmupConstant):
            return
        if not isinstance(own, WarmupStableDecay):
            raise UsageError(
                f"ckpt_path={self.path}: its run followed {_name(own)}, which has no stable part: branch off a run "
                "with WarmupStableDecay or WarmupConstant"
            )
        if total is not None and total > 0 and self.step > (start := own.start_of_decay(total)):
            raise UsageError(
                f"ckpt_path={self.path}: step {self.step} lies inside the decay of its run, which started at step "
                f"{start}: branch off a checkpoint from step {own.warmup_steps} to {start}"
            )


def _name(schedule: Any) -> str:
    return "null" if schedule is None else type(schedule).__name__


def check_branch_options(ckpt_path: str | None, decay_steps: int | None) -> None:
    """Refuse a branch that does not name one checkpoint, or has no length.

    Raises:
        UsageError: see above.
    """
    if not ckpt_path or ckpt_path in ("none", "last", "best", "hpc"):
        given = f"ckpt_path={ckpt_path}: " if ckpt_path else ""
        raise UsageError(
            f"branch: {given}name the checkpoint of the stable part from which the decay shall start: --ckpt_path FILE"
        )
    if decay_steps is None:
        raise UsageError("branch: give the length of the decay in optimizer steps: --decay_steps N")
    if decay_steps < 1:
        raise UsageError(f"branch: decay_steps={decay_steps}: give the optimizer steps of the decay, 1 or more")


def read_trunk(ckpt_path: str, weights_only: bool | None = None) -> Trunk:
    """The step of a checkpoint and the schedule of its run; of a folder no tensor is read.

    A checkpoint of DeepSpeed holds only its step.

    Args:
        ckpt_path: file, or folder of shards.
        weights_only: as in `torch.load`.

    Raises:
        UsageError: it is an address, is not whole, or holds weights only.
    """
    if "://" in ckpt_path:
        raise UsageError(f"branch: ckpt_path={ckpt_path}: download the checkpoint and give its path")
    path = Path(ckpt_path)
    if path.is_dir() and is_of_deepspeed(path):
        if (record := read_record(path)) is None:
            raise UsageError(
                f"branch: ckpt_path={path}: this checkpoint of DeepSpeed has no record of its step: resume it by fit, "
                "with decay_start of the schedule at its step, and trainer.max_steps at the end of the decay"
            )
        return Trunk(str(path.resolve()), record.step)
    check_checkpoint(path, resumes=True)
    state: Mapping[str, Any] = load_file(path / TRAINER_STATE if path.is_dir() else path, weights_only)
    check_training_state(dict(state), path)
    followed = dict(state.get(SCHEDULE_KEY) or {})
    total_steps = followed.pop("total_steps", None)
    schedule = from_plain(followed, Schedule, f"ckpt_path={path}: schedule") if followed else None
    return Trunk(str(path.resolve()), int(state["global_step"]), schedule, total_steps)
