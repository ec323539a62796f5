"""Batches: rows of tokens, the token after each one as its label, and the number of bytes behind the labels.

Two map-style datasets: training rows addressed by sample position, validation windows in their order.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lightning_tricks.data.order import WindowOrder
from lightning_tricks.data.shards import TokenStream

ROWS_AHEAD = 256  # of which the starts are computed at once
TOKENS_A_START = 64  # a row has room for the starts of one document in so many tokens
IGNORED = -100  # the ignore_index of torch's cross_entropy
Batch = dict[str, Tensor]


def document_ids(input_ids: NDArray[np.int64], eot_id: int) -> NDArray[np.int32]:
    """Number of end-of-text tokens before each token of its row: equal within a document.

    Args:
        input_ids: (B, T).
        eot_id: the end-of-text token, which belongs to the document that it ends.

    Returns:
        (B, T) int32, 0 at the first token of each row.
    """
    ends = input_ids == eot_id
    return (np.cumsum(ends, axis=1) - ends).astype(np.int32)


def with_documents(input_ids: NDArray[np.int64], eot_id: int) -> dict[str, NDArray[np.int32]]:
    """`document_ids`, and `document_starts` (B, T // 64) int32, by which attention needs no dense mask.

    A row of the starts has the positions at which its documents begin, then T. Their number is fixed, so that a GPU
    runs the same kernels for each batch; where a row has more documents, there are no starts.
    """
    ids = document_ids(input_ids, eot_id)
    rows, length = ids.shape
    starts = np.full((rows, length // TOKENS_A_START), length, dtype=np.int32)
    if ids[:, -1].max() >= starts.shape[1]:
        return {"document_ids": ids}
    row, last = np.nonzero(np.diff(ids, axis=1))
    starts[:, 0] = 0
    starts[row, ids[row, last + 1]] = last + 1  # ids count the documents of a row
    return {"document_ids": ids, "document_starts": starts}


class TrainBatches(Dataset[Batch]):
    """Micro-batches by their first row: micro-batch r has rows r..r+micro_batch_size-1 of the order.

    Each is `input_ids` (B, T) and `labels` (B, T), int64; `labels[:, t]` is the token after `input_ids[:, t]`. With
    `eot_id`, also what `with_documents` gives.
    """

    def __init__(self, stream: TokenStream, order: WindowOrder, micro_batch_size: int, eot_id: int | None) -> None:
        self.stream, self.order, self.micro_batch_size, self.eot_id = stream, order, micro_batch_size, eot_id
        self._last = self._stride = 0
        self._ahead: dict[int, NDArray[np.int64]] = {}  # starts of the rows of the next micro-batches, by first row

    def starts(self, first_row: int) -> NDArray[np.int64]:
        """Offsets in the stream at which the rows of the micro-batch with this first row start, (B,).

        NumPy takes as long for a few rows as for a hundred. So once two micro-batches came at the same distance, those
        of the next micro-batches at that distance are computed as well.
        """
        stride, self._last = first_row - self._last, first_row
        repeated, self._stride = stride == self._stride, stride
        if (known := self._ahead.pop(first_row, None)) is not None:
            return known
        number = max(ROWS_AHEAD // self.micro_batch_size, 1) if repeated and stride > 0 else 1
        firsts = first_row + stride * np.arange(number)
        rows = firsts[:, None] + np.arange(self.micro_batch_size)
        starts = self.order.starts(rows.ravel()).reshape(rows.shape)
        self._ahead = dict(zip(firsts[1:].tolist(), starts[1:], strict=True))
        return starts[0]

    def __getitem__(self, first_row: int) -> Batch:
        shape = (self.micro_batch_size, self.order.seq_len)
        input_ids, labels = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
        for row, start in enumerate(self.starts(first_row).tolist()):
            tokens = self.stream.view(start, self.order.seq_len + 1)
            input_ids[row], labels[row] = tokens[:-1], tokens[1:]
        batch = {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}
        if self.eot_id is not None:
            found = with_documents(input_ids, self.eot_id)
            batch |= {name: torch.from_numpy(array) for name, array in found.items()}
        return batch


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
        with_document_ids: add what `with_documents` gives; needs `eot_id`.
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
        if self.with_document_ids and self.eot_id is not None:
            batch |= with_documents(input_ids, self.eot_id)
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    def _corrections(self, index: int) -> NDArray[np.int64]:
        """Bytes to add to the rows of batch `index`, (B,); the labels of a row are one token after its inputs."""
        starts = self.starts(index)
        if self.byte_corrections is None:
            return np.zeros_like(starts)
        offsets, added = self.byte_corrections.T
        sums = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(added)))
        first, end = np.searchsorted(offsets, np.stack([starts + 1, starts + self.seq_len + 1]))
        return sums[end] - sums[first]
