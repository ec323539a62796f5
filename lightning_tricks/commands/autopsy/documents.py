"""The samples that an optimizer step took, by what the checkpoints of its run tell, and the documents in their rows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_tricks._core.errors import UsageError
from lightning_tricks.checkpoints.open_checkpoint import open_checkpoint
from lightning_tricks.data.batches import Batch, TrainBatches, document_ids

Runs = list[tuple[int, int]]  # first and last position of each unbroken run of samples


@dataclass(frozen=True)
class Samples:
    """The samples of a step, and a checkpoint that has done the step and so tells them.

    Without one, they are those of a run that goes on from the given checkpoint with the same global batch.
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
            content = open_checkpoint(other, parts=(), weights_only=True, verify=False)
        except (UsageError, OSError):
            continue  # this one is not the one that was asked for
        state = content.get(kind) if isinstance(content, dict) and content.get("global_step", 0) > step else None
        if isinstance(state, dict):
            yield other, state


def _begins_with(history: list[Any], beginning: list[Any]) -> bool:
    """Whether a run with this history may have gone on from a checkpoint with that one."""
    return bool(beginning) and history[: len(beginning)] == beginning


@dataclass(frozen=True, eq=False)
class Document:
    """Tokens of a row that belong together: those up to an end-of-text token, or between two.

    A row's first token has no loss and belongs to none, as nothing comes before it. The end-of-text token belongs to
    the document that it ends.
    """

    row: int  # index of its row in the batch
    sample: int  # sample position of the row
    first: int  # index of its first token among the row's labels
    stop: int  # index after its last one
    token: int  # position of its first token in the training stream
    ids: NDArray[np.int64]  # its tokens, (stop - first,)

    @property
    def tokens(self) -> int:
        """Number of its tokens, each of which has a loss."""
        return self.stop - self.first


def rows_of(rows: TrainBatches, runs: Runs) -> tuple[list[int], list[Batch]]:
    """The sample positions of a step, by their unbroken runs, and their rows, each a batch of one row."""
    samples = [sample for first, last in runs for sample in range(first, last + 1)]
    return samples, [rows[sample] for sample in samples]


def documents_of(
    rows: TrainBatches, samples: Sequence[int], batches: Sequence[Batch], eot: int | None
) -> list[Document]:
    """The documents of a batch, row by row; without an end-of-text token `eot` each row is one."""
    found = []
    for row, (sample, batch) in enumerate(zip(samples, batches, strict=True)):
        labels, start = batch["labels"].numpy(), int(rows.starts(sample)[0])
        for first, stop in _spans(labels, eot):
            found.append(Document(row, sample, first, stop, start + 1 + first, labels[0, first:stop]))
    return found


def _spans(labels: NDArray[np.int64], eot: int | None) -> list[tuple[int, int]]:
    """First index of each document in the labels (1, T), and the index after its last."""
    if eot is None:
        return [(0, labels.shape[1])]
    (cuts,) = np.nonzero(np.diff(document_ids(labels, eot)[0]))
    edges = [0, *(cuts + 1).tolist(), labels.shape[1]]
    return list(pairwise(edges))


def joined(batches: Sequence[Batch], device: torch.device) -> Batch:
    """Rows as one batch on a device."""
    names: dict[str, list[Tensor]] = {name: [batch[name] for batch in batches] for name in batches[0]}
    return {name: torch.cat(values).to(device) for name, values in names.items()}
