"""The rollbacks of a run: the steps that each one undid, and the file beside the checkpoints that lists them."""

import json
import os
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from lightning_tricks._errors import UsageError
from lightning_tricks._samples import in_words as samples_in_words
from lightning_tricks.checkpoints.swap_in import fsync_path, staging_path

FILE = "rollbacks.json"  # beside the checkpoints
T = TypeVar("T")


@dataclass(frozen=True)
class Rollback:
    """One return to earlier weights. Steps are `trainer.global_step` before the step is made.

    Args:
        first_step: the first step that is undone: weights and optimizer are again as they were before it.
        spike_step: the first step whose loss was out of bounds.
        end_step: the step with which the run went on.
        source: where the state came from, `memory` or the path of a checkpoint.
        samples: first and last sample position of the undone steps; None for data without positions.
    """

    first_step: int
    spike_step: int
    end_step: int
    source: str
    samples: list[int] | None = None

    def undoes(self, step: int) -> bool:
        """Whether a step is among the undone ones."""
        return self.first_step <= step < self.end_step

    def passes_over(self, step: int, samples: Sequence[tuple[int, int]] | None) -> bool:
        """Whether a step has data of the undone steps: by its sample positions, else by its number."""
        if self.samples is None or samples is None:
            return self.undoes(step)
        return any(first <= self.samples[1] and self.samples[0] <= last for first, last in samples)

    def in_words(self) -> str:
        """For a message: the undone steps, and their data."""
        data = f", samples {samples_in_words([(self.samples[0], self.samples[1])])}" if self.samples else ""
        return f"steps {self.first_step} to {self.end_step - 1}{data}"


def is_good(step: int, spike_step: int, rollbacks: Iterable[Rollback]) -> bool:
    """Whether the state before a step may be gone back to when the loss is out of bounds since `spike_step`.

    The loss that was computed with these weights must have been accepted, so the state before `spike_step` itself is
    none. States that an earlier rollback undid are none either, with the one that it restored: each repeat goes back
    further.
    """
    return step < spike_step and not any(rollback.undoes(step) for rollback in rollbacks)


def in_words(rollbacks: Iterable[Rollback]) -> str:
    """For a message: the undone steps of several rollbacks, and their data."""
    return "; ".join(rollback.in_words() for rollback in rollbacks)


def remembered(trainer: Any, state: dict[str, Any]) -> tuple[str, list[Rollback], list[Rollback]]:
    """The rollbacks of the run that goes on from a checkpoint, or of a new one; every rank must call.

    Args:
        trainer: when training starts.
        state: of the callback, from the checkpoint; empty where it has none.

    Returns:
        The name of the run, by which a folder tells its rollbacks from those of others; all that are known, from the
        checkpoint and from the file beside it; those of them that the checkpoint does not know.
    """
    path = str(trainer.ckpt_path or "")
    name = f"from {Path(path).resolve().name}" if path else uuid.uuid4().hex
    run: str = trainer.strategy.broadcast(state.get("run", name))
    known = [Rollback(**entry) for entry in state.get("rollbacks", [])]
    listed = _on_rank_0(trainer, lambda: read_rollbacks(Path(path).parent, run) if path else [])
    unknown = [rollback for rollback in listed if rollback not in known]
    return run, known + unknown, unknown


def read_rollbacks(folder: Path, run: str) -> list[Rollback]:
    """The rollbacks of a run that the file of a folder lists; none where there is no file.

    Raises:
        UsageError: the file holds something else.
    """
    return [Rollback(**entry) for entry in _entries(folder) if entry.pop("run") == run]


def write_rollbacks(folder: Path, run: str, rollbacks: Iterable[Rollback]) -> None:
    """Put the rollbacks of a run into the file of a folder, in place of those that it lists of this run."""
    entries = [entry for entry in _entries(folder) if entry["run"] != run]
    entries += [{"run": run, **asdict(rollback)} for rollback in rollbacks]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    new = staging_path(path)
    with new.open("w", encoding="utf-8") as file:
        json.dump({"rollbacks": entries}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    fsync_path(folder)


def write_from_rank_0(trainer: Any, folders: Iterable[Path], run: str, rollbacks: Sequence[Rollback]) -> None:
    """Let rank 0 put the rollbacks of a run into the files of folders; every rank must call."""

    def write() -> None:
        for folder in folders:
            write_rollbacks(folder, run, rollbacks)

    _on_rank_0(trainer, write)


def _on_rank_0(trainer: Any, act: Callable[[], T]) -> T:
    """The result of `act` on rank 0; an error of a file is raised by every rank, so that none waits for rank 0."""
    result: Any = None
    error: Exception | None = None
    if trainer.is_global_zero:
        try:
            result = act()
        except (UsageError, OSError) as failed:
            error = failed
    result, error = trainer.strategy.broadcast((result, error))
    if error is not None:
        raise error
    return result


def _entries(folder: Path) -> list[dict[str, Any]]:
    path = folder / FILE
    try:
        entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rollbacks"]
        for entry in entries:
            Rollback(**{key: value for key, value in entry.items() if key != "run"})
            entry["run"]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            f"{path} is no list of rollbacks: restore it from a copy, or delete it if the run may train on the data "
            "that its rollbacks passed over"
        ) from None
    return entries
