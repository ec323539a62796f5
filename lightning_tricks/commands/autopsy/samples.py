"""The samples of an optimizer step, by what the checkpoints of its run tell."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_tricks._errors import UsageError
from lightning_tricks.checkpoints.check_checkpoint import TRAINER_STATE
from lightning_tricks.checkpoints.read_file import load_file

Runs = list[tuple[int, int]]


@dataclass(frozen=True)
class Samples:
    """The samples of a step, and the checkpoint that tells them.

    Args:
        runs: first and last position of each unbroken run of samples.
        told_by: a checkpoint that has done the step; None where there is none, and the samples are those of a
            run that goes on from the given checkpoint with the same global batch.
    """

    runs: Runs
    told_by: Path | None


def samples_of_step(data: Any, checkpoint: Mapping[str, Any], path: Path, step: int, max_steps: int) -> Samples:
    """The samples that a step took, of all ranks and micro-batches together.

    A checkpoint from before the step cannot know whether the run went on with another global batch. Then the later ones
    in its folder are asked.

    Args:
        data: TextData or TokenData, set up.
        checkpoint: the content of `path`.
        path: the checkpoint.
        step: as the logs count, from 0.
        max_steps: of the recipe, -1 for no end.

    Raises:
        UsageError: the checkpoint has no state of the data, or of other data; the run has no such step.
    """
    kind = type(data).__qualname__
    state = checkpoint.get(kind)
    if not isinstance(state, dict) or "samples" not in state:
        raise UsageError(
            f"ckpt_path={path}: it holds no state of {kind}, so nothing tells which samples a step took: give a "
            "checkpoint of a run on these data that was saved whole (not save_weights_only)"
        )
    runs = data.samples_of_step(step, state)
    done = int(checkpoint.get("global_step", 0))
    if step < done:
        return Samples(runs, path)
    begun = [span for span in state["history"] if span["step"] <= done]  # without the stages to come of a growing batch
    for other, later in _later_states(path, kind, step):
        if _begins_with(later.get("history", []), begun):
            return Samples(data.samples_of_step(step, later), other)
    if 0 <= max_steps <= step:
        last = max(max_steps, done) - 1
        raise UsageError(f"step={step}: the run ends with step {last}, counted from 0 (trainer.max_steps={max_steps})")
    return Samples(runs, None)


def _later_states(path: Path, kind: str, step: int) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The data's state in each checkpoint of the folder that has done the step."""
    for other in sorted(other for other in path.parent.glob("*.ckpt") if not other.is_symlink()):
        try:
            content = load_file(other / TRAINER_STATE if other.is_dir() else other, weights_only=True)
        except (UsageError, OSError):
            continue  # this one is not the one that was asked for
        state = content.get(kind) if isinstance(content, dict) and content.get("global_step", 0) > step else None
        if isinstance(state, dict):
            yield other, state


def _begins_with(history: list[Any], beginning: list[Any]) -> bool:
    """Whether a run with this history may have gone on from a checkpoint with that one."""
    return bool(beginning) and history[: len(beginning)] == beginning
