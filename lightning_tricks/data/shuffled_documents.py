"""Rows of a stream whose documents each epoch puts into a new random order, before the stream is cut into rows.

The order is a keyed permutation (see `order.py`), so nothing of an epoch is stored. The cache has the end of each
document, 8 bytes, in a file that is mapped into memory. A process holds the order of each of the last two epochs that
it has read, and where every 16th document begins: 4.5 bytes a document and epoch.
"""

import hashlib
import sys
from bisect import bisect_right
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.quote import say
from lightning_tricks.data.content import build_once
from lightning_tricks.data.order import Pass, derive_key, permute
from lightning_tricks.data.shards import TokenStream, extents

Shuffle = Literal["rows", "documents"]
FORMAT_VERSION = 1  # part of the folder's name: raise it when the same input gives other ends
_GROUP = 16  # documents of which one begin is kept
_AT_ONCE = _GROUP << 14  # documents permuted at once


class ShuffledDocuments:
    """The rows of each epoch of a stream with shuffled documents, see `SourceRows`.

    A row's address is the offset of its first token in the reordered stream, plus the epoch times the length of the
    stream. In an epoch each token is a label once, but for the first one and those after the last whole row, which are
    at most `seq_len` tokens, of other documents in each epoch.

    It is pickled without the ends of documents, so that loader workers map the file themselves.

    Args:
        cache_dir: folder of the folder with the ends of documents.
        stream: tokens, more than `seq_len`.
        eot_id: the end-of-text token, which ends a document where the stream has no index of documents.
        seq_len: T, tokens in a row.
        seed: of the order of the documents, any integer.
        fingerprint: of the stream and its documents.

    Raises:
        UsageError: documents that are not known, a cache that cannot be written, a damaged file in it.
    """

    mark = "shuffled"  # in the fingerprint of the data

    def __init__(
        self, cache_dir: Path, stream: TokenStream, eot_id: int | None, seq_len: int, seed: int, fingerprint: str
    ) -> None:
        if stream.knows_documents:
            eot_id = None
        elif eot_id is None:
            raise UsageError("shuffle=documents: documents end at the end-of-text token; give eot_id or tokenizer")
        self.stream, self.seq_len, self.seed = stream, seq_len, seed
        known_by = repr((FORMAT_VERSION, fingerprint, len(stream), eot_id))
        self.folder = cache_dir / f"documents-{hashlib.sha256(known_by.encode()).hexdigest()[:16]}"

        def build(folder: Path) -> None:
            say(f"Looking for the documents in {len(stream):,} tokens", file=sys.stderr)
            stream.write_document_ends(folder / "ends.bin", eot_id)

        build_once(self.folder, build)
        self._open()

    def _open(self) -> None:
        """Map the ends of documents into memory."""
        try:
            # a plain array over the mapped file: a slice of a np.memmap takes ten times as long
            self._ends = np.asarray(np.memmap(self.folder / "ends.bin", dtype="<i8", mode="r"))
            if self._ends[-1] != len(self.stream):
                raise ValueError("its file is not whole")
        except (OSError, ValueError) as error:
            raise UsageError(f"cache_dir: {self.folder} is damaged ({error}); delete that folder") from error
        self._index_of = lru_cache(maxsize=2)(self._index)  # by epoch
        self._pieces = lru_cache(maxsize=1)(self._find_pieces)  # of one row, which is asked for several times

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_ends", "_index_of", "_pieces")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def in_epochs(self, seed: int) -> Pass:
        """These rows, in another order in each epoch: a document of many rows is not in one batch."""
        tokens = len(self.stream)
        return Pass((tokens - 1) // self.seq_len, self.seq_len, 1, seed, per_epoch=tokens)

    def _index(self, epoch: int) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Numbers of the documents in their order, and where each `_GROUP` of them begins in the reordered stream."""
        count, key = len(self._ends), derive_key(self.seed, epoch, 2)
        order, sums = np.empty(count, dtype=np.uint32), [np.zeros(1, dtype=np.int64)]
        for first in range(0, count, _AT_ONCE):
            chosen = permute(np.arange(first, min(first + _AT_ONCE, count)), count, key)
            order[first : first + _AT_ONCE] = chosen
            sums.append(np.add.reduceat(extents(self._ends, chosen)[1], np.arange(0, len(chosen), _GROUP)))
        return order, np.cumsum(np.concatenate(sums))

    def _find_pieces(self, address: int) -> list[tuple[int, int, int]]:
        """Position in the row's T + 1 tokens, offset in the stream, and length, of each piece of a document."""
        epoch, first = divmod(address, len(self.stream))
        (order, begins), stop = self._index_of(epoch), self.seq_len + 1
        group = bisect_right(begins, first) - 1
        at = int(begins[group]) - first  # of the next document, also before the row
        found = list[tuple[int, int, int]]()
        while at < stop:
            starts, lengths = extents(self._ends, order[group * _GROUP : (group + 1) * _GROUP].astype(np.int64))
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
                before = max(-at, 0)  # its tokens in the row before
                if before < length and at < stop:
                    found.append((at + before, start + before, min(length - before, stop - at - before)))
                at += length
            group += 1
        return found

    def fill(self, address: int, input_ids: NDArray[np.int64], labels: NDArray[np.int64]) -> None:
        """See `SourceRows`."""
        tokens = np.empty(self.seq_len + 1, dtype=np.int64)
        for at, start, length in self._pieces(address):
            tokens[at : at + length] = self.stream.view(start, length)
        input_ids[:], labels[:] = tokens[:-1], tokens[1:]

    def begins(self, address: int, input_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """See `SourceRows`; also where the row begins."""
        begins = np.zeros(self.seq_len, dtype=bool)
        begins[[at for at, *_ in self._pieces(address) if at < self.seq_len]] = True
        return begins

    def offset(self, address: int, label: int, before: int = 0) -> int:
        """See `SourceRows`."""
        place, pieces = label + 1 - before, self._pieces(address)
        at, start, _ = pieces[bisect_right(pieces, place, key=lambda piece: piece[0]) - 1]
        return start + place - at

    def summary(self) -> str:
        """Number of documents, for the line on the data."""
        return f"{len(self._ends):,} documents, shuffled in each epoch"
