"""The present step of a run: that of a checkpoint, of the newest in a folder, or of the last line of its log."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_tricks._errors import UsageError
from lightning_tricks.checkpoints.find_checkpoint import candidates
from lightning_tricks.checkpoints.open_checkpoint import open_checkpoint
from lightning_tricks.checkpoints.record import RECORD_FILE, read_record
from lightning_tricks.logs.run import read_run


def present_step(place: str, trainer: Mapping[str, Any]) -> int:
    """The number of optimizer steps that a run has done.

    Args:
        place: a checkpoint, the folder of a run, or `last` for the recipe's newest run.
        trainer: settings of the recipe, whose loggers say where its runs are.

    Raises:
        UsageError: there is no such file; the folder has neither checkpoints nor steps in a log.
    """
    if place == "last":
        return _of_folder(_newest_folder(trainer), place)
    path = Path(place)
    if not path.exists():
        raise UsageError(f"schedule: ckpt_path={place}: no such file: give a checkpoint, the folder of a run, or last")
    is_folder_of_run = path.is_dir() and path.suffix != ".ckpt" and not (path / RECORD_FILE).is_file()
    return _of_folder(path, place) if is_folder_of_run else _of_checkpoint(path)


def _of_checkpoint(path: Path) -> int:
    record = read_record(path)
    return record.step if record is not None else int(open_checkpoint(path).get("global_step", 0))


def _of_folder(folder: Path, place: str) -> int:
    """The larger one of the newest checkpoint's step and that of the log: a run may be ahead of its last save."""
    found = [each for each in candidates(folder / "checkpoints") if each.problem is None]
    steps = [_of_checkpoint(found[-1].place)] if found else []
    if (logged := read_run(folder).steps) is not None:
        steps.append(logged)
    if not steps:
        raise UsageError(f"schedule: ckpt_path={place}: {folder} has neither checkpoints nor steps in a log")
    return max(steps)


def _newest_folder(trainer: Mapping[str, Any]) -> Path:
    roots = list(_roots(trainer))
    folders = [folder for root in roots for folder in root.glob("*") if (folder / "checkpoints").is_dir()]
    if not folders:
        where = ", ".join(map(str, roots)) or "the recipe, which names no logger"
        raise UsageError(f"schedule: ckpt_path=last: there is no run with checkpoints in {where}: give a file")
    return max(folders, key=lambda folder: (folder / "checkpoints").stat().st_mtime)


def _roots(trainer: Mapping[str, Any]) -> Iterator[Path]:
    loggers = trainer.get("logger")
    for logger in loggers if isinstance(loggers, list) else [loggers]:
        root = getattr(logger, "root_dir", None)
        if root and "://" not in str(root) and Path(root).is_dir():
            yield Path(root)
