"""Refuse what cannot run before anything is tokenized, trained or waited for, from the recipe and its folders alone."""

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec

from lightning_tricks._errors import UsageError
from lightning_tricks._trainer import is_a
from lightning_tricks.checkpoints import FolderCheckpointIO, check_checkpoint

_LARGEST_SEED = 2**32 - 1  # numpy's


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse values of the Trainer's options that Lightning accepts and fails on later.

    Args:
        options: of one command, as parsed.

    Raises:
        UsageError: a seed that no generator takes; an interval of 0.
    """
    seed = options.get("seed_everything")
    if not isinstance(seed, bool | None) and not 0 <= seed <= _LARGEST_SEED:
        raise UsageError(f"seed_everything={seed}: give a whole number from 0 to {_LARGEST_SEED}")
    trainer = options.get("trainer") or {}
    for option, remedy in (
        ("accumulate_grad_batches", "the micro-batches of one optimizer step, 1 or more"),
        ("val_check_interval", "a number above 0, or limit_val_batches: 0 for no validation"),
        ("check_val_every_n_epoch", "1 or more, or null to count batches only"),
    ):
        value = trainer.get(option)
        if isinstance(value, int | float) and (math.isnan(value) or value <= 0):
            raise UsageError(f"trainer.{option}={value}: give {remedy}")


def check_folders(trainer: Any) -> None:
    """Refuse folders that the run could not write its logs and checkpoints to.

    Raises:
        UsageError: one is a file, may not be written to, or lies on a full disk.
    """
    places = [("trainer.logger: save_dir", logger.save_dir) for logger in trainer.loggers]
    places += [("ModelCheckpoint.dirpath", getattr(saver, "dirpath", None)) for saver in trainer.checkpoint_callbacks]
    if trainer.checkpoint_callbacks and not trainer.loggers:
        places.append(("trainer.default_root_dir", trainer.default_root_dir))
    for option, folder in places if trainer.is_global_zero else []:
        if folder and "://" not in str(folder):
            _check_folder(option, Path(folder).expanduser())


def _check_folder(option: str, folder: Path) -> None:
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not there.is_dir():
            raise UsageError(f"{option}={folder}: {there} is a file: name another folder, or rename the file")
        with tempfile.TemporaryFile(dir=there) as file:  # a permission bit alone does not tell of a full disk
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(
            f"{option}={folder}: cannot be written ({reason}): make room, or name another folder"
        ) from error


def check_ckpt_path(path: str | None, trainer: Any, resumes: bool) -> None:
    """Refuse a checkpoint that cannot be opened; later the ranks of a distributed run would be up and waiting.

    Args:
        path: what `--ckpt_path` was given.
        trainer: which would open it.
        resumes: whether training shall go on from it.

    Raises:
        UsageError: it is empty, `best`, no whole checkpoint, or an address at which nothing is.
    """
    if path is None or path in ("last", "hpc") or path.startswith("registry"):
        return
    if not path:
        raise UsageError("ckpt_path='': give a checkpoint's file or folder, or last, or leave the option out")
    if path == "best":
        raise UsageError(
            "ckpt_path=best: only the process that trained knows its best checkpoint: give that file, which lies in "
            "ModelCheckpoint's dirpath"
        )
    if "://" in path:
        _check_address(path)
    ours = isinstance(trainer.strategy.checkpoint_io, FolderCheckpointIO)
    if ours and not is_a(trainer.strategy, "DeepSpeedStrategy"):
        check_checkpoint(path, resumes)


def _check_address(address: str) -> None:
    remedy = "download the checkpoint and give its path"
    try:
        system, place = fsspec.core.url_to_fs(address)
        there = system.exists(place)
    except Exception as error:  # each file system fails in its own way: no library for it, no network, no rights
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UsageError(f"ckpt_path={address}: cannot be opened ({reason}); {remedy}") from error
    if not there:
        raise UsageError(f"ckpt_path={address}: nothing is there, or it cannot be reached; check it, or {remedy}")
