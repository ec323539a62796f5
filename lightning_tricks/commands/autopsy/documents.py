"""The documents in the rows of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_tricks.data.batches import IGNORED, Batch, TrainBatches, document_ids


@dataclass(frozen=True, eq=False)
class Document:
    """Tokens of a row that belong together: those up to an end-of-text token, or between two.

    A row's first token has no loss and belongs to none, as nothing comes before it. The end-of-text token belongs to
    the document that it ends.

    Args:
        row: index of its row in the batch.
        sample: sample position of the row.
        first: index of its first token among the row's labels.
        stop: index after its last one.
        token: position of its first token in the training stream.
        ids: its tokens, (stop - first,) int64.
    """

    row: int
    sample: int
    first: int
    stop: int
    token: int
    ids: NDArray[np.int64]

    @property
    def tokens(self) -> int:
        """Number of its tokens, each of which has a loss."""
        return self.stop - self.first

    def alone(self, row: Batch) -> Batch:
        """Its row of the batch up to its end, with the labels of the other documents ignored: all (1, stop)."""
        batch = {name: values[:, : self.stop] for name, values in row.items()}
        labels = torch.full_like(batch["labels"], IGNORED)
        labels[:, self.first :] = batch["labels"][:, self.first :]
        return {**batch, "labels": labels}


def rows_of(rows: TrainBatches, runs: Sequence[tuple[int, int]]) -> tuple[list[int], list[Batch]]:
    """The sample positions of a step and their rows, each a batch of one row.

    Args:
        rows: the training rows by sample position.
        runs: first and last position of each unbroken run of samples.
    """
    samples = [sample for first, last in runs for sample in range(first, last + 1)]
    return samples, [rows[sample] for sample in samples]


def documents_of(
    rows: TrainBatches, samples: Sequence[int], batches: Sequence[Batch], eot: int | None
) -> list[Document]:
    """The documents of a batch, row by row; without an end-of-text token each row is one.

    Args:
        rows: as for `rows_of`.
        samples: of `rows_of`.
        batches: of `rows_of`.
        eot: the end-of-text token.
    """
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
