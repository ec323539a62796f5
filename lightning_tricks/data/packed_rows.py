"""Rows of packed documents: a plan of `packing`, stored in the cache once, and the tokens of each of its rows.

The folder of a plan has `pieces.bin` (all pieces, in the order of the rows) and `firsts.bin` (the index of each row's
first piece, and the number of pieces), both arrays of 8-byte integers, and meta.json: 11 bytes a document of 600 tokens
in rows of 2,048, 0.018 bytes a token. They are mapped into memory, and any row is found at once.
"""

import hashlib
import json
import os
import sys
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.quote import say
from lightning_tricks.data.content import build_once
from lightning_tricks.data.order import derive_key
from lightning_tricks.data.packing import (
    BLOCK_TOKENS,
    MAX_SEQ_LEN,
    SLACK,
    decode,
    documents_of_block,
    number_of_blocks,
    plan_block,
)
from lightning_tricks.data.shards import TokenStream

FORMAT_VERSION = 1  # part of the folder's name: raise it when the same input gives another plan
IGNORED = -100  # the ignore_index of torch's cross_entropy
_CHUNK = 1 << 22  # tokens searched at once


class PackedRows:
    """The rows of a pass over a stream, packed by best fit. The plan is made if the cache has none.

    Each token of the stream is a label in exactly one row. Its input is the token before it, but the end-of-text token
    where it begins a document. A row is filled up with labels of -100.

    It is pickled as paths, so that loader workers map the files themselves.

    Args:
        cache_dir: folder of the plan's folder.
        stream: tokens.
        eot_id: the end-of-text token.
        seq_len: T, tokens in a row.
        seed: of the order in which documents are packed, any integer.
        fingerprint: of the stream and its documents.
        ends: (start, stop) -> the ends of documents above offset `start` and up to `stop`, ascending: offsets after
            their last tokens. None: a document ends with each end-of-text token.

    Raises:
        UsageError: no end-of-text token, rows that are too long, a cache that cannot be written, a damaged plan.
    """

    def __init__(
        self,
        cache_dir: Path,
        stream: TokenStream,
        eot_id: int | None,
        seq_len: int,
        seed: int,
        fingerprint: str,
        ends: Callable[[int, int], NDArray[np.int64]] | None = None,
    ) -> None:
        if eot_id is None:
            raise UsageError("packing=best_fit: documents begin after the end-of-text token; give eot_id or tokenizer")
        if seq_len > MAX_SEQ_LEN:
            raise UsageError(
                f"packing=best_fit: seq_len={seq_len} is above {MAX_SEQ_LEN}; shorten it or set packing: cut"
            )
        self.stream, self.eot_id, self.seq_len, self.seed = stream, eot_id, seq_len, seed
        self._settings = {
            "format_version": FORMAT_VERSION,
            "data": fingerprint,
            "tokens": len(stream),
            "eot_id": eot_id,
            "seq_len": seq_len,
            "seed": seed,
            "slack": SLACK,
            "block_tokens": BLOCK_TOKENS,
        }
        self.folder = cache_dir / f"packing-{hashlib.sha256(repr(self._settings).encode()).hexdigest()[:16]}"
        build_once(self.folder, lambda folder: self._plan(folder, ends or self._ends_of_text))
        self._open()

    def _plan(self, folder: Path, find: Callable[[int, int], NDArray[np.int64]]) -> None:
        """Write the plan into an empty folder, block by block."""
        tokens, key = len(self.stream), derive_key(self.seed, -1)
        say(f"Packing {tokens:,} tokens into rows of {self.seq_len}", file=sys.stderr)
        ends = write_ends(folder / "ends.bin", tokens, find)
        blocks, pieces, counts = number_of_blocks(tokens, len(ends), self.seq_len), 0, np.zeros(4, dtype=np.int64)
        padding = max(int(SLACK * tokens / blocks) - self.seq_len + 1, 0)
        with (folder / "pieces.bin").open("wb") as pieces_file, (folder / "firsts.bin").open("wb") as firsts_file:
            for number in range(blocks):
                block = plan_block(*documents_of_block(ends, number, blocks, key), self.seq_len, padding)
                pieces_file.write(block.pieces.astype("<u8").tobytes())
                firsts_file.write((block.firsts + pieces).astype("<u8").tobytes())
                pieces += len(block.pieces)
                counts += len(block.firsts), block.documents, block.short, block.short_cut
            firsts_file.write(np.array([pieces], dtype="<u8").tobytes())
            for file in (pieces_file, firsts_file):
                file.flush()
                os.fsync(file.fileno())
        del ends  # not every system removes a mapped file
        (folder / "ends.bin").unlink()  # written above
        names = ("rows", "documents", "short_documents", "short_documents_cut")
        meta = self._settings | {"pieces": pieces} | dict(zip(names, counts.tolist(), strict=True))
        (folder / "meta.json").write_text(json.dumps(meta, indent=2), encoding="utf-8")

    def _ends_of_text(self, start: int, stop: int) -> NDArray[np.int64]:
        return np.flatnonzero(self.stream.view(start, stop - start) == self.eot_id) + start + 1

    def _open(self) -> None:
        try:
            self.meta: dict[str, Any] = json.loads((self.folder / "meta.json").read_text(encoding="utf-8"))
            # plain arrays over the mapped files: a slice of a np.memmap takes ten times as long
            self._pieces, self._firsts = (
                np.asarray(np.memmap(self.folder / name, dtype="<u8", mode="r"))
                for name in ("pieces.bin", "firsts.bin")
            )
            if {name: self.meta.get(name) for name in self._settings} != self._settings:
                raise ValueError("it was made for other data")
            sizes = len(self._pieces), len(self._firsts) - 1, self._firsts[-1]
            if sizes != (self.meta["pieces"], self.meta["rows"], self.meta["pieces"]):
                raise ValueError("its files are not those of meta.json")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._damaged(error) from error

    def _damaged(self, error: object) -> UsageError:
        return UsageError(f"cache_dir: {self.folder} is damaged ({error}); delete that folder")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_pieces", "_firsts", "meta")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def _pieces_of(self, row: int) -> list[tuple[int, int, int, int]]:
        """Position in the row, offset of the first token, length, and 1 if it begins a document, of each piece."""
        found, at = [], 0
        for piece in self._pieces[self._firsts[row] : self._firsts[row + 1]].tolist():
            start, length, begins = decode(piece)
            found.append((at, start, length, begins))
            at += length
        if at > self.seq_len:
            raise self._damaged(f"row {row} does not fit")
        return found

    def fill(self, row: int, input_ids: NDArray[np.int64], labels: NDArray[np.int64]) -> None:
        """Write a row's tokens, (T,) both. Behind its pieces, labels are -100 and inputs the end-of-text token.

        Raises:
            UsageError: the plan is damaged.
        """
        at, firsts = 0, []
        for begin, start, length, begins in self._pieces_of(row):
            at = begin + length
            tokens = self.stream.view(start + begins - 1, length + 1 - begins)
            if len(tokens) != length + 1 - begins:
                raise self._damaged(f"row {row} does not fit")
            labels[begin:at] = tokens[1 - begins :]
            firsts.append((begin, self.eot_id if begins else tokens[0]))
        labels[at:] = IGNORED
        input_ids[1:] = labels[:-1]
        input_ids[at:] = self.eot_id
        for begin, token in firsts:
            input_ids[begin] = token

    def begins(self, row: int, input_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether a piece begins at each token of a row, (T,). What a row is filled up with belongs to the last one."""
        begins = np.zeros(self.seq_len, dtype=bool)
        begins[[begin for begin, *_ in self._pieces_of(row)]] = True
        return begins

    def offset(self, row: int, label: int) -> int:
        """The offset in the stream of a label of the row; of the nearest one where there is none."""
        pieces = self._pieces_of(row)
        begin, start, length, _ = pieces[max(bisect_right(pieces, label, key=lambda piece: piece[0]) - 1, 0)]
        return start + min(max(label - begin, 0), length - 1)

    def summary(self) -> str:
        """Shares of padding and of documents that are cut, for the line on the data."""
        tokens, documents, short, cut = (
            self.meta[name] for name in ("tokens", "documents", "short_documents", "short_documents_cut")
        )
        padding = 1 - tokens / (len(self) * self.seq_len)
        shares = f"{(documents - short + cut) / documents:.1%} of {documents:,} documents cut"
        return f"packed by best fit: {padding:.2%} padding, {shares}, {cut / max(short, 1):.1%} of those that fit a row"


def write_ends(path: Path, tokens: int, find: Callable[[int, int], NDArray[np.int64]]) -> NDArray[np.int64]:
    """The ends of all documents, and of the stream, as a mapped file.

    Args:
        path: of the file.
        tokens: in the stream.
        find: see `PackedRows.ends`.
    """
    last = 0
    with path.open("wb") as file:
        for start in range(0, tokens, _CHUNK):
            ends = find(start, min(start + _CHUNK, tokens))
            file.write(ends.astype("<i8").tobytes())
            last = int(ends[-1]) if len(ends) else last
        if last < tokens:
            file.write(np.array([tokens], dtype="<i8").tobytes())
    return np.memmap(path, dtype="<i8", mode="r")
