"""A small file in the run's folder that says when each process of a run ran, also after its last checkpoint."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning_tricks._lightning import rank_zero_warn
from lightning_tricks.accounting.goodput import Interval

FILE = "goodput.json"
_SAVES = 8  # number of saves that are kept: a run resumes from one of its newest checkpoints


def places_for(checkpoint: Any) -> list[Path]:
    """Where the file of a run lies, by the path of a checkpoint: the place of today, then that of earlier versions.

    It is the run's folder where the checkpoint is in `checkpoints`, its folder there, else the checkpoint's own folder.
    """
    folder = Path(checkpoint).absolute().parent
    return [folder.parent / FILE, folder / FILE] if folder.name == "checkpoints" else [folder / FILE]


class History:
    """When the processes of a run ran and when they waited for saves, as (first, last) times of day.

    Args:
        run: identifier of the run, so that another run's file is not taken for its own.
        path: of the file; None until the first save.
    """

    def __init__(self, run: str, path: Path | None = None) -> None:
        self.run, self.path = run, path
        self.earlier: Sequence[Interval] = ()  # of the processes before this one
        self.saves: list[Interval] = []
        self._has_warned = False

    @classmethod
    def read(cls, run: str, paths: Iterable[Path]) -> "History":
        """The history in the first of `paths` that belongs to this run; an empty one if there is none."""
        for path in paths:
            try:
                found: dict[str, Any] = json.loads(path.read_text())
                if found["run"] == run:
                    history = cls(run, places_for(path)[0])  # the file of an earlier version moves
                    history.earlier = [(first, last) for first, last in found["processes"]]
                    history.saves = [(first, last) for first, last in found["saves"]]
                    return history
            except (OSError, ValueError, KeyError, TypeError):
                continue  # missing, of another program, or cut off: then lost work counts as down time
        return cls(run)

    def place_by(self, checkpoint: Any) -> None:
        """Choose the file's place by a checkpoint, unless it has one already or the checkpoint is not local."""
        if self.path is None and "://" not in str(checkpoint):
            self.path = places_for(checkpoint)[0]

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
            part.write_text(json.dumps(content))
            os.replace(part, self.path)
        except OSError as error:
            part.unlink(missing_ok=True)
            if not self._has_warned:
                self._has_warned = True
                rank_zero_warn(f"GoodputMonitor: {self.path} cannot be written: {error.strerror}")
