"""Batches: rows of tokens, the token after each one as its label, and the number of bytes behind the labels.

Map-style datasets: training rows addressed by sample position, validation windows in their order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lightning_tricks.data.order import RowOrder
from lightning_tricks.data.shards import TokenStream

ROWS_AHEAD = 4096  # of which the places are computed at once
TOKENS_A_START = 64  # a row has room for the starts of one document in so many tokens
IGNORED = -100  # the ignore_index of torch's cross_entropy
Batch = dict[str, Tensor]


def begins_after(input_ids: NDArray[np.int64], eot_id: int) -> NDArray[np.bool_]:
    """Whether a document begins at each token, (..., T): after an end-of-text token."""
    begins = np.zeros(input_ids.shape, dtype=bool)
    begins[..., 1:] = input_ids[..., :-1] == eot_id
    return begins


def with_documents(begins: NDArray[np.bool_]) -> dict[str, NDArray[np.int32]]:
    """`document_ids` (B, T), and `document_starts` (B, T // 64) int32, by which attention needs no dense mask.

    A row of the starts has the positions at which its documents begin, then T. Their number is fixed, so that a GPU
    runs the same kernels for each batch; where a row has more documents, there are no starts.

    Args:
        begins: (B, T), whether a document begins at each token; the first token of a row always belongs to its first.
    """
    begins[:, 0] = False
    ids = np.cumsum(begins, axis=1, dtype=np.int32)
    rows, length = ids.shape
    starts = np.full((rows, length // TOKENS_A_START), length, dtype=np.int32)
    if ids[:, -1].max() >= starts.shape[1]:
        return {"document_ids": ids}
    row, column = np.nonzero(begins)
    starts[:, 0] = 0
    starts[row, ids[row, column]] = column  # ids count the documents of a row
    return {"document_ids": ids, "document_starts": starts}


def document_begins(
    stream: TokenStream, start: int, input_ids: NDArray[np.int64], eot_id: int | None
) -> NDArray[np.bool_]:
    """Whether a document begins at each of the stream's tokens from `start` on, (T,), whose ids are given."""
    if not stream.knows_documents:
        assert eot_id is not None  # checked where documents are asked for
        return begins_after(input_ids, eot_id)
    begins = np.zeros(len(input_ids), dtype=bool)
    begins[stream.document_ends(start, min(start + len(begins) - 1, len(stream)), None) - start] = True
    return begins


class SourceRows(Protocol):
    """The training rows of one source by their address, see `order.Pass`."""

    stream: TokenStream

    def fill(self, address: int, input_ids: NDArray[np.int64], labels: NDArray[np.int64]) -> None:
        """Write a row's tokens, (T,) both."""

    def begins(self, address: int, input_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether a document begins at each token of a row, (T,)."""

    def offset(self, address: int, label: int, before: int = 0) -> int:
        """The offset in the stream of a label, or of the token so many before it; near it where a row is filled up."""


@dataclass(eq=False)
class WindowRows:
    """Rows that are windows of the stream; the address is that of the first token."""

    stream: TokenStream
    eot_id: int | None  # ends a document

    def fill(self, address: int, input_ids: NDArray[np.int64], labels: NDArray[np.int64]) -> None:
        """See `SourceRows`."""
        tokens = self.stream.view(address, len(labels) + 1)
        input_ids[:], labels[:] = tokens[:-1], tokens[1:]

    def begins(self, address: int, input_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """See `SourceRows`."""
        return document_begins(self.stream, address, input_ids, self.eot_id)

    def offset(self, address: int, label: int, before: int = 0) -> int:
        """See `SourceRows`."""
        return address + 1 + label - before


class TrainBatches(Dataset[Batch]):
    """Micro-batches by their first row: micro-batch r has rows r..r+micro_batch_size-1 of the order.

    Each is `input_ids` (B, T) and `labels` (B, T), int64; `labels[:, t]` is the token after `input_ids[:, t]`. With
    several sources also `source` (B,) int64, the number of each row's.

    Args:
        rows: of each source.
        order: which of them comes at a position.
        seq_len: T, tokens in a row.
        micro_batch_size: B, rows in a micro-batch.
        documents: add what `with_documents` gives.
    """

    def __init__(
        self, rows: Sequence[SourceRows], order: RowOrder, seq_len: int, micro_batch_size: int, documents: bool
    ) -> None:
        self.rows, self.order, self.documents = rows, order, documents
        self.seq_len, self.micro_batch_size = seq_len, micro_batch_size
        self._last = self._stride = 0
        self._ahead: dict[int, NDArray[np.int64]] = {}  # places of the rows of the next micro-batches, by first row

    def places(self, first_row: int) -> list[list[int]]:
        """Source and address of each row of the micro-batch with this first row, (B, 2).

        NumPy takes as long for a few rows as for a hundred. So once two micro-batches came at the same distance, those
        of the next micro-batches at that distance are computed as well.
        """
        stride, self._last = first_row - self._last, first_row
        repeated, self._stride = stride == self._stride, stride
        if (known := self._ahead.pop(first_row, None)) is not None:
            return known.tolist()
        number = max(ROWS_AHEAD // self.micro_batch_size, 1) if repeated and stride > 0 else 1
        firsts = first_row + stride * np.arange(number)
        rows = firsts[:, None] + np.arange(self.micro_batch_size)
        places = np.stack(self.order.places(rows.ravel()), axis=1).reshape(*rows.shape, 2)
        self._ahead = dict(zip(firsts[1:].tolist(), places[1:], strict=True))
        return places[0].tolist()

    def offset(self, first_row: int, row: int, label: int) -> tuple[int, int]:
        """Source of a row of a micro-batch, and the offset of its label in the stream; see `SourceRows.offset`."""
        source, address = self.places(first_row)[row]
        return source, self.rows[source].offset(address, label)

    def begins(self, first_row: int, row: int, input_ids: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Whether a document begins at each token of a row, (T,), by an index; None without one."""
        source, address = self.places(first_row)[row]
        rows = self.rows[source]
        return rows.begins(address, input_ids) if rows.stream.knows_documents else None

    def describe(self, first_row: int, row: int, label: int, before: int = 0) -> str:
        """Name the shard of a label, or of a token so many `before` it, for messages."""
        source, address = self.places(first_row)[row]
        rows = self.rows[source]
        return rows.stream.describe(rows.offset(address, label, before))

    def __getitem__(self, first_row: int) -> Batch:
        shape = (self.micro_batch_size, self.seq_len)
        input_ids, labels = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
        begins, places = np.zeros(shape, dtype=bool), self.places(first_row)
        for row, (source, address) in enumerate(places):
            rows = self.rows[source]
            rows.fill(address, input_ids[row], labels[row])
            if self.documents:
                begins[row] = rows.begins(address, input_ids[row])
        batch: dict[str, NDArray] = {"input_ids": input_ids, "labels": labels}
        if self.documents:
            batch |= with_documents(begins)
        if len(self.rows) > 1:
            batch["source"] = np.array([source for source, _ in places])
        return {name: torch.from_numpy(array) for name, array in batch.items()}


@dataclass(eq=False)
class ValidationBatches(Dataset[Batch]):
    """Batches of the validation stream's windows, side by side: every token but the first is a label once.

    Rank r of W gets windows r, r + W, ... All ranks have the same number of batches, of the same shape: missing rows
    are filled with labels of -100. Labels of special tokens are -100 too. `n_bytes` (B,) int64 is the number of UTF-8
    bytes behind the row's other labels; it needs `token_bytes`. Where the tokenizer changed a document, the difference
    to the bytes of the document itself counts where it ends.

    Args:
        stream: the validation tokens.
        seq_len: T, tokens in a window; the last window is filled up with -100.
        micro_batch_size: B, rows in a batch.
        token_bytes: (vocab_size,) int64, bytes of each token, 0 for special ones; None when not known.
        eot_id: the end-of-text token, None when not known.
        with_document_ids: add what `with_documents` gives; needs `eot_id`, or a stream that knows its documents.
        rank: this process among those that share the windows.
        world: number of processes that share them.
        byte_corrections: (n, 2) int64, offsets in the stream in their order, and the bytes to add there; None: none.

    Source: bits per byte without special tokens as nanochat counts it,
    https://github.com/karpathy/nanochat/blob/master/nanochat/loss_eval.py.
    """

    stream: TokenStream
    seq_len: int
    micro_batch_size: int
    token_bytes: NDArray[np.int64] | None = None
    eot_id: int | None = None
    with_document_ids: bool = False
    rank: int = 0
    world: int = 1
    byte_corrections: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        windows = -(-max(len(self.stream) - 1, 0) // self.seq_len)
        return -(-windows // (self.world * self.micro_batch_size))

    def starts(self, index: int) -> NDArray[np.int64]:
        """Offsets in the stream at which the rows of batch `index` start, (B,); past its end for rows of padding."""
        rows = np.arange(index * self.micro_batch_size, (index + 1) * self.micro_batch_size)
        return (rows * self.world + self.rank) * self.seq_len

    def __getitem__(self, index: int) -> Batch:
        shape = (self.micro_batch_size, self.seq_len)
        input_ids, labels = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORED, dtype=np.int64)
        for row, start in enumerate(self.starts(index).tolist()):
            tokens = self.stream.read(start, self.seq_len + 1)
            if len(tokens) > 1:
                input_ids[row, : len(tokens) - 1] = tokens[:-1]
                labels[row, : len(tokens) - 1] = tokens[1:]
        batch: dict[str, NDArray] = {"input_ids": input_ids, "labels": labels}
        if self.token_bytes is not None:
            counted = labels != IGNORED
            lengths = np.zeros(shape, dtype=np.int64)
            lengths[counted] = self.token_bytes[labels[counted]]
            batch["n_bytes"] = lengths.sum(axis=1) + self._corrections(index)
            labels[lengths == 0] = IGNORED
        elif self.eot_id is not None:
            labels[labels == self.eot_id] = IGNORED
        if self.with_document_ids:
            begins = [
                document_begins(self.stream, start, row, self.eot_id)
                for start, row in zip(self.starts(index).tolist(), input_ids, strict=True)
            ]
            batch |= with_documents(np.stack(begins))
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    def describe(self, index: int, row: int, label: int, before: int = 0) -> str:
        """See `TrainBatches.describe`."""
        return self.stream.describe(int(self.starts(index)[row]) + 1 + label - before)

    def _corrections(self, index: int) -> NDArray[np.int64]:
        """Bytes to add to the rows of batch `index`, (B,); the labels of a row are one token after its inputs."""
        starts = self.starts(index)
        if self.byte_corrections is None:
            return np.zeros_like(starts)
        offsets, added = self.byte_corrections.T
        sums = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(added)))
        first, end = np.searchsorted(offsets, np.stack([starts + 1, starts + self.seq_len + 1]))
        return sums[end] - sums[first]


class JoinedBatches(Dataset[Batch]):
    """The validation batches of several sources; `source` (B,) int64 is the number of a batch's.

    The first batch of each source comes first, then the second ones: so `limit_val_batches` leaves none out.

    Args:
        parts: batches by the number of their source.
    """

    def __init__(self, parts: Mapping[int, ValidationBatches]) -> None:
        self.parts = dict(parts)
        self._order = sorted((inside, source) for source, part in parts.items() for inside in range(len(part)))

    def __len__(self) -> int:
        return len(self._order)

    def source(self, index: int) -> int:
        """The number of the source of a batch."""
        return self._order[index][1]

    def describe(self, index: int, row: int, label: int, before: int = 0) -> str:
        """See `TrainBatches.describe`."""
        inside, source = self._order[index]
        return self.parts[source].describe(inside, row, label, before)

    def __getitem__(self, index: int) -> Batch:
        inside, source = self._order[index]
        batches = self.parts[source]
        return {**batches[inside], "source": torch.full((batches.micro_batch_size,), source)}
