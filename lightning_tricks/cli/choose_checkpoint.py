"""The checkpoint that a command starts from: a file, `last`, or on request none; where a recipe's runs keep theirs."""

import os
import re
from pathlib import Path
from typing import Any

from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import pl_import
from lightning_tricks._trainer import chosen_version
from lightning_tricks.cli.program import short

rank_zero_info = pl_import("utilities.rank_zero").rank_zero_info


def newest_checkpoint(folder: Any) -> Path | None:
    """The checkpoint in a folder, file or folder of shards, that was written last; None where there is none."""
    found = [path for path in Path(folder).glob("*.ckpt") if path.exists()]  # a link may lead nowhere
    return max(found, key=lambda path: (path.stat().st_mtime_ns, path.name.startswith("last")), default=None)


def choose_checkpoint(command: str, given: Any, trainer: Any) -> str | None:
    """The checkpoint that a command starts from, None for the weights that the module starts with.

    Args:
        command: `fit`, `validate`, `test` or `predict`.
        given: value of `--ckpt_path`: None, `none`, `last`, or anything else, which is returned as it is.
        trainer: its first logger and its `ModelCheckpoint` callbacks say where checkpoints are.

    Raises:
        UsageError: an evaluation names no checkpoint, or there is none for `last`.
    """
    if given is None and command != "fit":
        raise UsageError(
            f"{command} needs a checkpoint: give --ckpt_path FILE, --ckpt_path last for the newest checkpoint of this "
            "recipe, or --ckpt_path none for the weights that the module starts with"
        )
    if given is None or str(given) == "none":
        return None
    if given != "last" or is_remote(_runs_of(trainer)):
        return str(given)
    found, where = _last_checkpoint(trainer)
    if found is None:
        instead = "start without --ckpt_path" if command == "fit" else "give the path of a checkpoint"
        raise UsageError(f"ckpt_path=last: there is no checkpoint in {where}: {instead}")
    rank_zero_info(f"ckpt_path=last: {short(found)}, the newest checkpoint in {where}")
    return str(found)


def is_remote(place: str) -> bool:
    """Whether a path is a URL, such as that of a bucket."""
    return "://" in place


def _runs_of(trainer: Any) -> str:
    """The folder in which each run of the recipe has its own."""
    logger = trainer.loggers[0] if trainer.loggers else None
    if logger is None:
        return str(trainer.default_root_dir)
    return os.path.join(str(logger.save_dir or trainer.default_root_dir), str(logger.name))


def _run_folders(trainer: Any) -> list[Path]:
    """The folders of the recipe's runs, the newest first: one, where the logger has a fixed version or is missing."""
    root = Path(_runs_of(trainer))
    logger = trainer.loggers[0] if trainer.loggers else None
    fixed = chosen_version(logger)
    if logger is None or fixed is not None:
        return [root if logger is None else root / folder_name(fixed)]
    folders = [path.parent for path in root.glob("*/checkpoints")]
    return sorted(folders, key=lambda path: (number(path), path.stat().st_mtime_ns), reverse=True)


def folder_name(version: Any) -> str:
    """Name of the folder of a logger's version, a number or a name."""
    return version if isinstance(version, str) else f"version_{version}"


def number(folder: Path) -> int:
    """Number of a folder `version_N`; -1 for any other folder."""
    match = re.fullmatch(r"version_(\d+)", folder.name)
    return int(match[1]) if match else -1


def _last_checkpoint(trainer: Any) -> tuple[Path | None, str]:
    """The checkpoint that `last` means, and the folders that were searched, in words."""
    given = [saver.dirpath for saver in trainer.checkpoint_callbacks if getattr(saver, "dirpath", None)]
    found = [newest_checkpoint(folder) for folder in given]
    searched = [short(folder) for folder in given]
    if len(given) < len(trainer.checkpoint_callbacks) or not given:
        in_runs = (newest_checkpoint(folder / "checkpoints") for folder in _run_folders(trainer))
        found.append(next((path for path in in_runs if path), None))  # of the newest run that has one
        searched.append(short(_runs_of(trainer)))
    newest = max((path for path in found if path), key=lambda path: path.stat().st_mtime_ns, default=None)
    return newest, " or ".join(searched)
