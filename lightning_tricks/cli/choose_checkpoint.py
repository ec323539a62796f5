"""The checkpoint that a command starts from: a file, `last`, or on request none. Refused if it cannot be opened."""

import os
import re
from pathlib import Path
from typing import Any

import fsspec

from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import rank_zero_info
from lightning_tricks._trainer import chosen_version, is_a
from lightning_tricks.checkpoints import AtomicCheckpointIO, check_checkpoint


def choose_checkpoint(command: str, given: Any, trainer: Any) -> str | None:
    """The checkpoint that a command starts from, None for the weights that the module starts with.

    A checkpoint that cannot be opened is refused here: later the ranks of a distributed run would be up and waiting.

    Args:
        command: `fit`, `validate`, `test` or `predict`.
        given: value of `--ckpt_path`: None, `none`, `last`, or anything else, which is returned as it is.
        trainer: its first logger and its `ModelCheckpoint` callbacks say where checkpoints are.

    Raises:
        UsageError: an evaluation names no checkpoint; there is none for `last`; the value is empty, `best`, an
            incomplete checkpoint, or an address without one.
    """
    if given is None and command != "fit":
        raise UsageError(
            f"{command} needs a checkpoint: give --ckpt_path FILE, --ckpt_path last for the newest checkpoint of this "
            "recipe, or --ckpt_path none for the weights that the module starts with"
        )
    if given is None or str(given) == "none":
        return None
    path = str(given)
    if path == "last" and not is_remote(_folder_of_runs(trainer)):
        path = _last_checkpoint(command, trainer)
    _check(path, trainer, resumes=command == "fit")
    return path


def newest_checkpoint(folder: Any) -> Path | None:
    """The checkpoint in a folder, file or folder of shards, that was written last; None where there is none."""
    found = [path for path in Path(folder).glob("*.ckpt") if path.exists()]  # a link may lead nowhere
    return max(found, key=lambda path: (path.stat().st_mtime_ns, path.name.startswith("last")), default=None)


def is_remote(place: str) -> bool:
    """Whether a path is a URL, such as that of a bucket."""
    return "://" in place


def folder_name(version: Any) -> str:
    """Name of the folder of a logger's version, a number or a name."""
    return version if isinstance(version, str) else f"version_{version}"


def number(folder: Path) -> int:
    """Number of a folder `version_N`; -1 for any other folder."""
    match = re.fullmatch(r"version_(\d+)", folder.name)
    return int(match[1]) if match else -1


def short(path: Any) -> str:
    """The path from the working folder, where it lies below that."""
    return str(path).removeprefix(os.getcwd() + os.sep)


def _last_checkpoint(command: str, trainer: Any) -> str:
    """The checkpoint that `last` means."""
    given = [saver.dirpath for saver in trainer.checkpoint_callbacks if getattr(saver, "dirpath", None)]
    found = [newest_checkpoint(folder) for folder in given]
    searched = [short(folder) for folder in given]
    if len(given) < len(trainer.checkpoint_callbacks) or not given:
        in_runs = (newest_checkpoint(folder / "checkpoints") for folder in _run_folders(trainer))
        found.append(next((path for path in in_runs if path), None))  # of the newest run that has one
        searched.append(short(_folder_of_runs(trainer)))
    newest = max((path for path in found if path), key=lambda path: path.stat().st_mtime_ns, default=None)
    where = " or ".join(searched)
    if newest is None:
        instead = "start without --ckpt_path" if command == "fit" else "give the path of a checkpoint"
        raise UsageError(f"ckpt_path=last: there is no checkpoint in {where}: {instead}")
    rank_zero_info(f"ckpt_path=last: {short(newest)}, the newest checkpoint in {where}")
    return str(newest)


def _folder_of_runs(trainer: Any) -> str:
    """The folder in which each run of the recipe has its own."""
    logger = trainer.logger
    if logger is None:
        return str(trainer.default_root_dir)
    return os.path.join(str(logger.save_dir or trainer.default_root_dir), str(logger.name))


def _run_folders(trainer: Any) -> list[Path]:
    """The folders of the recipe's runs, the newest first: one, where the logger has a fixed version or is missing."""
    root, logger = Path(_folder_of_runs(trainer)), trainer.logger
    if logger is None:
        return [root]
    if (fixed := chosen_version(logger)) is not None:
        return [root / folder_name(fixed)]
    folders = [path.parent for path in root.glob("*/checkpoints")]
    return sorted(folders, key=lambda path: (number(path), path.stat().st_mtime_ns), reverse=True)


def _check(path: str, trainer: Any, resumes: bool) -> None:
    """Refuse a checkpoint that cannot be opened."""
    if path in ("last", "hpc") or path.startswith("registry"):
        return
    if not path:
        raise UsageError("ckpt_path='': give a checkpoint's file or folder, or last, or leave the option out")
    if path == "best":
        raise UsageError(
            "ckpt_path=best: only the process that trained knows its best checkpoint: give that file, which lies in "
            "ModelCheckpoint's dirpath"
        )
    if is_remote(path):
        _check_address(path)
    ours = isinstance(trainer.strategy.checkpoint_io, AtomicCheckpointIO)
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
