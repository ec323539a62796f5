"""Save the run where its next start finds it, whichever callback keeps its checkpoints."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_tricks._trainer import last_saved_step, slurm_checkpoint
from lightning_tricks.checkpoints.background_writer import wait_for_write
from lightning_tricks.checkpoints.swap_in import clear_staging, put_in_place

LAST = "last.ckpt"  # what Lightning's `ckpt_path="last"` and ours look for


def save(trainer: Any, barrier: Callable[[], None]) -> str:
    """Save the run as it is now, and return the path of the checkpoint to go on from when all of it is on the disk.

    A callback with a method `save_now(trainer)` does it in its own way; the checkpoint is an older one if that cannot
    save, as on a full disk, and the path empty if there is none. Otherwise `last.ckpt` is written: into the
    folder of the first ModelCheckpoint, or into `default_root_dir` where there is none. It replaces an older one when
    all of it is written. Every rank must call.

    Args:
        trainer: between two optimizer steps.
        barrier: wait for all ranks.
    """
    for callback in trainer.callbacks:
        if hasattr(callback, "save_now"):
            path = callback.save_now(trainer)
            wait_for_write(trainer)
            return str(trainer.strategy.broadcast(str(path or callback.last_model_path or trainer.ckpt_path or "")))
    saver = next((one for one in trainer.checkpoint_callbacks if getattr(one, "dirpath", None)), None)
    if saver is not None and last_saved_step(saver) == trainer.global_step > 0 and saver.save_last:
        wait_for_write(trainer)
        return str(saver.last_model_path)
    folder = str(saver.dirpath if saver is not None else trainer.default_root_dir)
    path = os.path.join(folder, LAST)
    if saver is not None:
        saver.last_model_path = path  # a part of its state: the next run's replaces this file, and writes no last-v1
    if "://" in folder:
        trainer.save_checkpoint(path)  # there is no rename there
        wait_for_write(trainer)
    else:
        _save_and_rename(trainer, Path(path), barrier)
    return path


def _save_and_rename(trainer: Any, path: Path, barrier: Callable[[], None]) -> None:
    staging = str(clear_staging(path)) if trainer.is_global_zero else ""
    staging = trainer.strategy.broadcast(staging)  # also: nobody writes before it is cleared
    trainer.save_checkpoint(staging)
    wait_for_write(trainer)
    barrier()
    if trainer.is_global_zero:
        put_in_place(path)
    barrier()


def link_for_slurm(trainer: Any, checkpoint: str) -> None:
    """Name the checkpoint `hpc_ckpt_N.ckpt` as well: from there Lightning goes on when SLURM runs the job again.

    Only where this run was not started from a checkpoint of the program's own choice: that one would choose again.
    """
    chosen = trainer.ckpt_path is not None and not os.path.basename(str(trainer.ckpt_path)).startswith("hpc_ckpt_")
    if chosen or not checkpoint or "://" in checkpoint or not trainer.is_global_zero:
        return
    link = slurm_checkpoint(trainer)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(os.path.relpath(checkpoint, link.parent))
