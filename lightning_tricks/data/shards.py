"""Shards of tokens: write those of llm.c, and read many, of any of the formats, as one array.

A shard is an array of token ids in a file. It is memory-mapped, so a terabyte of it costs no memory.
"""

import hashlib
import os
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from lightning_tricks.data.remote import RemoteFile, each
from lightning_tricks.data.token_formats import FORMATS, HEADER_INTS, File, ShardFormat, TokenDtype, open_parts

SHARD_TOKENS = 100_000_000  # 200 MB a file, as llm.c cuts FineWeb
BLOCK_BYTES, SAMPLED_BLOCKS = 4096, 256  # of all files together, for a fingerprint


def token_dtype(vocab_size: int) -> type[np.unsignedinteger]:
    """Smallest dtype of the format that holds every id below `vocab_size`: uint16 up to 65536, then uint32."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def write_header(file: BinaryIO, dtype: type[np.unsignedinteger], tokens: int) -> None:
    """Write the 1024-byte header of llm.c at the start of `file`."""
    magic, version = next((magic, version) for magic, (version, known) in FORMATS.items() if known is dtype)
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = magic, version, tokens
    file.seek(0)
    file.write(header.tobytes())


def open_shard(path: Path, shard_format: ShardFormat = "auto") -> NDArray[np.integer]:
    """Memory-map the tokens of one shard, read-only: (tokens,), of an unsigned type.

    Args:
        path: the file.
        shard_format: as in `TokenData`.

    Raises:
        UsageError: a file cannot be read, is cut, empty or compressed, or is not what its header says.
    """
    (part,) = open_parts(path, shard_format)
    return part.tokens[:]


def fingerprint(paths: Sequence[File]) -> str:
    """16 hexadecimal digits that depend on the contents of files, in their order, and not on their names.

    Read are the sizes and blocks of 4 KiB at equal distances, the first and the last of a file among them: 256 blocks
    of all files together, at least one (then its middle) and at most 64 of each, so a terabyte costs as many reads as
    it has files. A change that leaves the sizes and these blocks as they were, such as of a few tokens between them, is
    not noticed. A remote file is known by its size and version, and not read.
    """
    digest = hashlib.sha256()
    number = min(max(SAMPLED_BLOCKS // max(len(paths), 1), 1), 64)
    for path in paths:
        if isinstance(path, RemoteFile):
            digest.update(f"{path.size} {path.version}".encode())
            continue
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            last = max(size - BLOCK_BYTES, 0)
            digest.update(size.to_bytes(8, "big"))
            for block in range(number):
                file.seek(last * block // (number - 1) if number > 1 else last // 2)
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()[:16]


class ShardWriter:
    """Write a stream of token ids as `<name>_000000.bin`, `<name>_000001.bin`, ...

    Use it as a context manager. A header says 0 tokens until its shard is complete, so `open_shard` refuses a file
    that a crash cut short.

    Args:
        folder: existing folder for the shards.
        name: first part of the file names, such as `train`.
        vocab_size: decides between uint16 and uint32.
        shard_tokens: tokens in a full shard, at most 2**31 - 1, the largest number in the header's int32.
    """

    def __init__(self, folder: Path, name: str, vocab_size: int, shard_tokens: int = SHARD_TOKENS) -> None:
        self.folder, self.name, self.dtype, self.shard_tokens = folder, name, token_dtype(vocab_size), shard_tokens
        self.tokens = 0
        self._file: BinaryIO | None = None

    def append(self, ids: NDArray[np.integer]) -> None:
        """Write ids, shape (n,), each below `vocab_size`."""
        while len(ids):
            room = self.shard_tokens - self.tokens % self.shard_tokens
            if self._file is None:
                self._file = (self.folder / f"{self.name}_{self.tokens // self.shard_tokens:06d}.bin").open("wb")
                write_header(self._file, self.dtype, 0)
            part, ids = ids[:room], ids[room:]
            self._file.write(part.astype(self.dtype).tobytes())
            self.tokens += len(part)
            if self.tokens % self.shard_tokens == 0:
                self._finish(self.shard_tokens)

    def _finish(self, tokens: int) -> None:
        assert self._file is not None
        with self._file as file:
            write_header(file, self.dtype, tokens)
            file.flush()
            os.fsync(file.fileno())
        self._file = None

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, error: type[BaseException] | None, *rest: object) -> None:
        if self._file is None:
            return
        if error is None:
            self._finish(self.tokens % self.shard_tokens)
        else:
            self._file.close()


class ByteCorrections:
    """Where validation tokens stand for other bytes than those of the text, because the tokenizer changed it.

    They are written beside the shards, for `ValidationBatches`.

    Args:
        folder: of the shards.
        token_texts: the bytes of each token; None when not known, and then nothing is written.
    """

    FILE = "val_byte_corrections.npy"

    def __init__(self, folder: Path, token_texts: Sequence[bytes] | None) -> None:
        self._folder, self._found = folder, list[tuple[int, int]]()
        self._known = token_texts is not None
        self._lengths = np.array([len(text) for text in token_texts or ()], dtype=np.int64)

    def add(self, ids: NDArray[np.integer], n_bytes: int, offset: int) -> None:
        """Compare the ids of a text with the number of its bytes; a difference counts at `offset`, its last token."""
        if not self._known:
            return
        lengths = self._lengths[ids]
        self._known = bool(lengths.all())  # a token without bytes is no label, so the text's bits would be too few
        if difference := n_bytes - int(lengths.sum()):
            self._found.append((offset, difference))

    def save(self) -> None:
        """Write the file, if the number of bytes is known."""
        if self._known:
            np.save(self._folder / self.FILE, np.array(self._found, dtype=np.int64).reshape(-1, 2))

    @classmethod
    def load(cls, folder: Path) -> NDArray[np.int64] | None:
        """(n, 2) int64, offsets and differences; None where the number of bytes is not known.

        Raises:
            ValueError: the file holds something else.
        """
        if not (folder / cls.FILE).is_file():
            return None
        found: NDArray[np.int64] = np.load(folder / cls.FILE, allow_pickle=False)
        if found.dtype != np.int64 or found.shape[1:] != (2,):
            raise ValueError(f"{cls.FILE} holds something else")
        return found


_CHUNK = 1 << 22  # tokens compared at once in a scan


def extents(ends: NDArray[np.integer], documents: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Offset of the first token, and number of tokens, of documents by their number, (n,) both.

    Args:
        ends: offset after the last token of each document of a stream, ascending; it may be a mapped file.
        documents: (n,) their numbers.
    """
    starts = np.where(documents > 0, ends[documents - 1], 0).astype(np.int64)
    return starts, ends[documents].astype(np.int64) - starts


class TokenStream:
    """The tokens of several shards, in the order of `sources`; see `open_parts` for their formats and errors.

    A token is known by its offset, counted from 0 over all shards.

    It is pickled as its arguments, so that loader workers map the files themselves instead of receiving a copy.

    Args:
        sources: files, local or remote; of a folder of litdata or MDS, its `index.json`.
        shard_format: as in `TokenData`.
        token_dtype: likewise.
    """

    def __init__(
        self, sources: Sequence[File], shard_format: ShardFormat = "auto", token_dtype: TokenDtype | None = None
    ) -> None:
        self._arguments = {"sources": sources, "shard_format": shard_format, "token_dtype": token_dtype}
        opened = each(lambda file: open_parts(file, shard_format, token_dtype), sources)
        self._parts = [part for parts in opened for part in parts]
        self.paths = [part.file for part in self._parts]
        self._shards = [part.tokens for part in self._parts]
        self._ends = [*accumulate(map(len, self._shards))]
        self._maxima: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getstate__(self) -> dict[str, Any]:
        return self._arguments

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def _locate(self, offset: int) -> tuple[int, int]:
        shard = bisect_right(self._ends, offset)
        return shard, offset - (self._ends[shard - 1] if shard else 0)

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """Tokens start..start+count-1, shape (count,); fewer where the stream ends."""
        stop = min(start + count, len(self))
        out = np.empty(max(stop - start, 0), dtype=np.int64)
        done = 0
        while done < len(out):
            shard, index = self._locate(start + done)
            part = self._shards[shard][index : index + len(out) - done]
            out[done : done + len(part)] = part
            done += len(part)
        return out

    def view(self, start: int, count: int) -> NDArray[np.integer]:
        """As `read`, but in the dtype of the file and without a copy where one shard holds all of them."""
        shard, index = self._locate(start)
        if shard < len(self._shards) and index + count <= len(self._shards[shard]):
            return self._shards[shard][index : index + count]
        return self.read(start, count)

    @property
    def knows_documents(self) -> bool:
        """Whether each shard has an index of its documents; else they end at the end-of-text token."""
        return all(part.ends is not None for part in self._parts)

    def document_ends(self, start: int, stop: int, eot_id: int | None) -> NDArray[np.int64]:
        """Offsets after the last tokens of documents, above `start` and up to `stop`, ascending.

        They are those of the indexes beside or in the shards, which only the first question reads.

        Args:
            start: offset of a token.
            stop: offset after the last one, at most the length of the stream.
            eot_id: the end-of-text token, by which documents end where a shard's format has no index of them.

        Raises:
            UsageError: an index contradicts itself or its shard.
        """
        if not self.knows_documents:
            return np.flatnonzero(self.view(start, stop - start) == eot_id) + start + 1
        found = [np.empty(0, dtype=np.int64)]
        for number in range(self._locate(start)[0], self._locate(stop - 1)[0] + 1 if stop > start else 0):
            before = self._ends[number] - len(self._shards[number])
            ends = self._parts[number].ends_between(max(start - before, 0), min(stop, self._ends[number]) - before)
            assert ends is not None
            found.append(ends + before)
        return np.concatenate(found)

    def write_document_ends(self, path: Path, eot_id: int | None) -> None:
        """Write all of `document_ends`, and the end of the stream, as 8-byte integers; memory need not hold them."""
        with path.open("wb") as file:
            for start in range(0, len(self), _CHUNK):
                ends = self.document_ends(start, stop := min(start + _CHUNK, len(self)), eot_id)
                if stop == len(self) and stop not in ends[-1:]:
                    ends = np.append(ends, stop)
                file.write(ends.astype("<i8").tobytes())

    def place(self, offset: int) -> tuple[File, int]:
        """The shard that holds `offset`, and the token's index in it."""
        shard, index = self._locate(offset)
        return self.paths[shard], index

    def describe(self, offset: int) -> str:
        """Name the shard that holds `offset` and the token's index in it, for messages."""
        path, index = self.place(offset)
        return f"shard {path}, token {index}"

    def count_before(self, token: int, offsets: Sequence[int]) -> list[int]:
        """Number of times that a token occurs before each of the offsets; reads up to the last of them."""
        counts, seen, start = {}, 0, 0
        for offset in sorted(offsets):
            while start < offset:
                part = self.read(start, min(offset - start, _CHUNK))
                seen, start = seen + int(np.count_nonzero(part == token)), start + len(part)
            counts[offset] = seen
        return [counts[offset] for offset in offsets]

    def first_at_least(self, bound: int, limit: int) -> int | None:
        """Offset of the first id >= `bound` among the first `limit` tokens, None when there is none.

        The largest id of what was read of each shard is remembered, so a second question is answered without reading.
        Remote shards are passed over: their ids are checked in each batch.
        """
        for number, (shard, end) in enumerate(zip(self._shards, self._ends, strict=True)):
            before = end - len(shard)
            if before >= limit:
                break
            if isinstance(self.paths[number], RemoteFile):
                continue
            stop = min(len(shard), limit - before)
            chunks = [slice(i, min(i + _CHUNK, stop)) for i in range(0, stop, _CHUNK)]
            if (number, stop) not in self._maxima:
                self._maxima[number, stop] = max(int(shard.read(chunk).max()) for chunk in chunks)
            if self._maxima[number, stop] >= bound:
                chunk = next(chunk for chunk in chunks if shard.read(chunk).max() >= bound)
                return before + chunk.start + int(np.argmax(shard.read(chunk) >= bound))
        return None
