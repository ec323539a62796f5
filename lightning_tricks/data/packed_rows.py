"""Rows of packed documents: a plan of `packing`, stored in the cache once, and the tokens of each of its rows.

The folder of a plan has `pieces.bin` (all pieces, in the order of the rows) and `firsts.bin` (the index of each row's
first piece, and the number of pieces), both arrays of 8-byte integers, and meta.json. Documents of 600 tokens in the
mean, in rows of 2,048, take 11 bytes each. The files are mapped into memory, and any row is found at once.
"""

import hashlib
import json
import sys
from bisect import bisect_right
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.quote import say
from lightning_tricks.data import packing
from lightning_tricks.data.batches import IGNORED
from lightning_tricks.data.content import build_once
from lightning_tricks.data.order import Pass, derive_key
from lightning_tricks.data.shards import TokenStream

Packing = Literal["cut", "best_fit"]
FORMAT_VERSION = 1  # part of the folder's name: raise it when the same input gives another plan


class PackedRows:
    """The rows of an epoch of a stream, packed by best fit, see `SourceRows`. The plan is made if the cache has none.

    Each token of the stream is a label in exactly one row. Its input is the token before it, or the end-of-text token
    where a document begins. A row is filled up with labels of -100 and inputs of the end-of-text token.

    It is pickled as paths, so that loader workers map the files themselves.

    Args:
        cache_dir: folder of the plan's folder.
        stream: tokens.
        eot_id: the end-of-text token.
        seq_len: T, tokens in a row.
        seed: of the order in which documents are packed, any integer.
        fingerprint: of the stream and its documents.

    Raises:
        UsageError: no end-of-text token, rows that are too long, a cache that cannot be written, a damaged plan.
    """

    mark = "packed"  # in the fingerprint of the data

    def __init__(
        self, cache_dir: Path, stream: TokenStream, eot_id: int | None, seq_len: int, seed: int, fingerprint: str
    ) -> None:
        if eot_id is None:
            raise UsageError("packing=best_fit: documents end at the end-of-text token; give eot_id or tokenizer")
        if seq_len > packing.MAX_SEQ_LEN:
            raise UsageError(
                f"packing=best_fit: seq_len={seq_len} is above {packing.MAX_SEQ_LEN}; lower it, or set cut"
            )
        self.stream, self.eot_id, self.seq_len = stream, eot_id, seq_len
        slack, block = packing.SLACK, packing.BLOCK_TOKENS
        known_by = fingerprint, len(stream), stream.knows_documents, eot_id
        self._settings = repr((FORMAT_VERSION, *known_by, seq_len, seed, slack, block))
        self.folder = cache_dir / f"packing-{hashlib.sha256(self._settings.encode()).hexdigest()[:16]}"
        build_once(self.folder, lambda folder: self._plan(folder, seed))
        self._open()

    def _plan(self, folder: Path, seed: int) -> None:
        """Write the plan into an empty folder, block by block."""
        tokens, key = len(self.stream), derive_key(seed, -1)
        say(f"Packing {tokens:,} tokens into rows of {self.seq_len}", file=sys.stderr)
        self.stream.write_document_ends(folder / "ends.bin", self.eot_id)
        ends = np.memmap(folder / "ends.bin", dtype="<i8", mode="r")
        blocks = packing.number_of_blocks(tokens, len(ends), self.seq_len)
        padding = max(int(packing.SLACK * tokens / blocks) - self.seq_len + 1, 0)
        pieces, counts = 0, np.zeros(4, dtype=np.int64)
        with (folder / "pieces.bin").open("wb") as pieces_file, (folder / "firsts.bin").open("wb") as firsts_file:
            for number in range(blocks):
                documents = packing.documents_of_block(ends, number, blocks, key)
                block = packing.plan_block(*documents, self.seq_len, padding)
                pieces_file.write(block.pieces.astype("<u8").tobytes())
                firsts_file.write((block.firsts + pieces).astype("<u8").tobytes())
                pieces += len(block.pieces)
                counts += len(block.firsts), block.documents, block.short, block.short_cut
            firsts_file.write(np.array([pieces], dtype="<u8").tobytes())
        del ends  # not every system removes a mapped file
        (folder / "ends.bin").unlink()  # written above
        names = ("rows", "documents", "short_documents", "short_documents_cut")
        meta = {"settings": self._settings, "tokens": tokens, "pieces": pieces}
        meta |= dict(zip(names, counts.tolist(), strict=True))
        (folder / "meta.json").write_text(json.dumps(meta, indent=2), encoding="utf-8")

    def _open(self) -> None:
        """Map the plan into memory."""
        try:
            self.meta = json.loads((self.folder / "meta.json").read_text(encoding="utf-8"))
            # plain arrays over the mapped files: a slice of a np.memmap takes ten times as long
            files = [np.memmap(self.folder / f"{name}.bin", dtype="<u8", mode="r") for name in ("pieces", "firsts")]
            self._pieces, self._firsts = map(np.asarray, files)
            found = self.meta["settings"], len(self._pieces), len(self), self._firsts[-1]
            if found != (self._settings, self.meta["pieces"], self.meta["rows"], self.meta["pieces"]):
                raise ValueError("its files are not of one plan of these data")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._damaged(error) from error

    def _damaged(self, reason: object) -> UsageError:
        return UsageError(f"cache_dir: {self.folder} is damaged ({reason}); delete that folder")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_pieces", "_firsts")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def in_epochs(self, seed: int) -> Pass:
        """These rows, in another order in each epoch."""
        return Pass(len(self), 1, 1, seed)

    def _pieces_of(self, row: int) -> list[tuple[int, int, int, int]]:
        """Position in the row, offset of the first token, length, and 1 if it begins a document, of each piece."""
        found, at = [], 0
        for piece in self._pieces[self._firsts[row] : self._firsts[row + 1]].tolist():
            start, length, begins = packing.decode(piece)
            found.append((at, start, length, begins))
            at += length
        if at > self.seq_len:
            raise self._damaged(f"row {row} is too long")
        return found

    def fill(self, address: int, input_ids: NDArray[np.int64], labels: NDArray[np.int64]) -> None:
        """See `SourceRows`; the address is the number of the row in the plan.

        Raises:
            UsageError: the plan is damaged.
        """
        stop, firsts = 0, []
        for at, start, length, begins in self._pieces_of(address):
            tokens = self.stream.view(start - (1 - begins), length + (1 - begins))
            if len(tokens) != length + (1 - begins):
                raise self._damaged(f"row {address} is not within the stream")
            stop = at + length
            labels[at:stop] = tokens[1 - begins :]
            firsts.append((at, self.eot_id if begins else tokens[0]))
        labels[stop:] = IGNORED
        input_ids[1:] = labels[:-1]
        input_ids[stop:] = self.eot_id
        for at, token in firsts:
            input_ids[at] = token

    def begins(self, address: int, input_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether a piece begins at each token of a row, (T,), also one that goes on with a document."""
        begins = np.zeros(self.seq_len, dtype=bool)
        begins[[at for at, *_ in self._pieces_of(address)]] = True
        return begins

    def offset(self, address: int, label: int, before: int = 0) -> int:
        """See `SourceRows`."""
        pieces = self._pieces_of(address)
        at, start, length, _ = pieces[bisect_right(pieces, label, key=lambda piece: piece[0]) - 1]
        return max(start + min(label - at, length - 1) - before, 0)

    def summary(self) -> str:
        """Shares of padding and of documents that are cut, for the line on the data."""
        documents, short, cut = (self.meta[n] for n in ("documents", "short_documents", "short_documents_cut"))
        padding = 1 - self.meta["tokens"] / (len(self) * self.seq_len)
        return (
            f"packed by best fit with {padding:.2%} padding, {(documents - short + cut) / documents:.1%} of "
            f"{documents:,} documents cut and {cut / max(short, 1):.1%} of those that fit a row"
        )
