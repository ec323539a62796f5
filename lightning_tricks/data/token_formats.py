"""Token files of seven formats, read in place: where the tokens of a file lie, and where its documents end.

Opening reads the heads of files and indexes, whatever the number of tokens, and refuses what would give wrong ones.

Source, each layout from the code that writes it: https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py
(GPT-2: magic 20240520, version 1, uint16; Llama 3: 20240801, version 7, uint32),
https://github.com/karpathy/nanoGPT/blob/master/data/openwebtext/prepare.py (bare uint16),
https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/datasets/indexed_dataset.py,
https://github.com/huggingface/datatrove/blob/main/src/datatrove/pipeline/tokens/tokenizer.py,
https://github.com/Lightning-AI/litData/blob/main/src/litdata/streaming/writer.py (`TokensLoader`),
https://github.com/mosaicml/streaming/tree/main/streaming/base/format/mds and
https://github.com/allenai/OLMo-core/blob/main/src/olmo_core/data/utils.py (bare, whatever its .npy says).
"""

import json
import mmap
import struct
import weakref
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_tricks._core.errors import UsageError
from lightning_tricks.data.remote import RemoteFile, each, file_size

ShardFormat = Literal["auto", "llm.c", "nanogpt", "megatron", "datatrove", "litdata", "mds", "olmo"]
TokenDtype = Literal["uint16", "int32", "uint32", "int64"]
File = Path | RemoteFile
HEADER_INTS = 256  # int32 values of llm.c's header: magic, version, number of tokens, zeros
FORMATS = {20240520: (1, np.uint16), 20240801: (7, np.uint32)}  # magic: (version, dtype)
MEGATRON_HEAD = b"MMIDIDX\0\0" + struct.pack("<Q", 1)
MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}
LITDATA_DTYPES = {
    "no_header_numpy": dict(enumerate(("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"))),
    "no_header_tensor": {11: "u1", 12: "i1", 13: "i2", 14: "i2", 15: "i4", 16: "i4", 17: "i8", 18: "i8", 20: "u2"},
}
INTEGERS = {np.dtype(kind).name for kind in LITDATA_DTYPES["no_header_numpy"].values()}
COMPRESSED = (".gz", ".zst", ".zstd", ".xz", ".bz2")
MAPPED_FILES = 512  # Python keeps each mapped file open, and a process often may have 1024; more are read by slices
_maps: "weakref.WeakSet[mmap.mmap]" = weakref.WeakSet()


def _head(file: File, start: int, count: int) -> bytes:
    """Bytes start..start+count-1, fewer where the file ends."""
    if isinstance(file, RemoteFile):
        return file.head(start, count)
    with file.open("rb", buffering=0) as opened:
        opened.seek(start)
        return opened.read(count)


def _number(file: File, kind: str, start: int) -> int:
    return int(np.frombuffer(_head(file, start, np.dtype(kind).itemsize), kind)[0])


def _beside(file: File, name: str) -> File | None:
    """Another file of its folder; None if it is not there."""
    if isinstance(file, RemoteFile):
        return file.beside(name)
    return path if (path := file.parent / name).is_file() else None


class FileArray:
    """Numbers of one type that lie side by side in a file, sliced like a NumPy array (n,).

    A local file is mapped at its first slice, unless the process has mapped many; else each slice is read.

    Args:
        file: that holds them.
        dtype: theirs.
        offset: bytes before the first one.
        count: of the numbers; None: up to the end of the file.
        convert: a function of each slice; None: slices are what the file holds.
    """

    def __init__(
        self,
        file: File,
        dtype: Any,
        offset: int = 0,
        count: int | None = None,
        convert: Callable[[NDArray[Any]], NDArray[Any]] | None = None,
    ) -> None:
        self.file, self.dtype, self.offset, self._convert = file, np.dtype(dtype), offset, convert
        self._count = (file_size(file) - offset) // self.dtype.itemsize if count is None else count
        self._mapped: NDArray[Any] | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: slice) -> NDArray[Any]:
        if self._mapped is None and isinstance(self.file, Path) and len(_maps) < MAPPED_FILES:
            with self.file.open("rb") as opened:
                mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            _maps.add(mapped)
            self._mapped = np.frombuffer(mapped, self.dtype, self._count, self.offset)
        found = self.read(part) if self._mapped is None else self._mapped[part]
        return found if self._convert is None else self._convert(found)

    def read(self, part: slice) -> NDArray[Any]:
        """A slice of what the file holds, which is not mapped for it: pages of a scan are not kept in memory."""
        start, stop, _ = part.indices(self._count)
        place = self.offset + start * self.dtype.itemsize, max(stop - start, 0) * self.dtype.itemsize
        raw = self.file.read(*place) if isinstance(self.file, RemoteFile) else _head(self.file, *place)
        return np.frombuffer(raw, self.dtype)


@dataclass(frozen=True)
class TokenPart:
    """The tokens of one file, and where its documents end.

    Args:
        file: of the tokens.
        tokens: their array.
        ends: for each document the offset in the file after its last token, ascending, from an index that is read when
            it is sliced; None where the format has no index.
    """

    file: File
    tokens: "FileArray | SampleArray"
    ends: FileArray | NDArray[np.integer] | None = None

    def ends_between(self, start: int, stop: int) -> NDArray[np.int64]:
        """The ends above `start` and up to `stop`, each once: a document without tokens adds none.

        Only where there are `ends`.

        Raises:
            UsageError: the index contradicts itself or the file.
        """
        ends = self.ends
        assert ends is not None
        documents = range(len(ends))
        first, last = (bisect_right(documents, offset, key=lambda n: ends[n : n + 1][0]) for offset in (start, stop))
        found = ends[first:last].astype(np.int64) if last > first else np.empty(0, dtype=np.int64)
        steps = np.diff(found, prepend=start)
        if (steps < 0).any() or (stop == len(self.tokens) and start + steps.sum() < stop):
            raise _refused(self.file, "its index of documents does not match it; write both again")
        return found[steps > 0]


def open_parts(
    file: File, shard_format: ShardFormat = "auto", token_dtype: TokenDtype | None = None
) -> list[TokenPart]:
    """Open one file of tokens, or those of a folder in the order of its `index.json`.

    Args:
        file: of tokens; for a folder of litdata or MDS, its `index.json`.
        shard_format: `auto` goes by an `index.json`, llm.c's magic, an index of Megatron or datatrove beside the file.
        token_dtype: of `olmo`, of MDS's `bytes`, of `nanogpt` unless it is uint16; other files say their own.

    Raises:
        UsageError: a file cannot be read, is cut, empty or compressed, or is not what its header or index says.
    """
    try:
        if file.name.endswith(COMPRESSED):
            raise _refused(file, "it is compressed, and tokens are read in place; decompress it")
        parts = _READERS[_recognized(file) if shard_format == "auto" else shard_format](file, token_dtype)
    except (KeyError, TypeError) as error:
        raise _refused(file, f"it is not understood ({error!r}); copy or write it again") from error
    except OSError as error:
        raise UsageError(f"shard {file}: cannot be read ({error.strerror or error}); check the path") from error
    for part in parts:
        if not len(part.tokens):
            raise _refused(part.file, "it holds no tokens; leave it out")
    return parts


def _recognized(file: File) -> str:
    """The format by what the file, or an index beside it, says; llm.c for any other, whose reader refuses it."""
    if file.name == "index.json":
        return "mds" if "shards" in _index(file) else "litdata"
    if int.from_bytes(_head(file, 0, 4), "little") not in FORMATS:
        if (index := _beside(file, f"{file.name.rpartition('.')[0]}.idx")) and _head(index, 0, 17) == MEGATRON_HEAD:
            return "megatron"
        if _beside(file, f"{file.name}.index"):
            return "datatrove"
    return "llm.c"


def _refused(file: File, reason: str) -> UsageError:
    return UsageError(f"shard {file}: {reason}")


def _unsigned(file: File, kind: Any, given: str | None = None) -> np.dtype[Any]:
    """The type by which ids are read: unsigned, so that a negative one is too large for every vocabulary."""
    dtype = np.dtype(kind)
    if given is not None and np.dtype(given) != dtype:
        raise UsageError(f"token_dtype={given!r}: shard {file} holds {dtype}; leave token_dtype out")
    return np.dtype(f"<u{dtype.itemsize}")


def _llm_c(file: File, token_dtype: str | None) -> list[TokenPart]:
    raw = _head(file, 0, 4 * HEADER_INTS)
    header = np.frombuffer(raw[: len(raw) // 4 * 4], "<i4")
    magic = int(header[0]) if len(header) else None
    if len(header) < HEADER_INTS or magic not in FORMATS:
        known = ", ".join(map(str, FORMATS))
        reason = f"wrong magic {magic} (llm.c's are {known}) and no index beside it"
        raise _refused(file, f"{reason}; name the format of bare ids, such as shard_format: nanogpt")
    version, dtype = FORMATS[magic]
    if header[1] != version:
        raise _refused(file, f"version {header[1]} of magic {magic}, expected {version}; write it again")
    tokens, present = int(header[2]), (file_size(file) - 4 * HEADER_INTS) // np.dtype(dtype).itemsize
    if tokens < 1 or present < tokens:
        raise _refused(file, f"cut short, {present} tokens where its header says {tokens}; copy it again")
    return [TokenPart(file, FileArray(file, _unsigned(file, dtype, token_dtype), 4 * HEADER_INTS, tokens))]


def _nanogpt(file: File, token_dtype: str | None) -> list[TokenPart]:
    head, size, dtype = _head(file, 0, 6), file_size(file), _unsigned(file, token_dtype or "u2")
    if head == b"\x93NUMPY" or int.from_bytes(head[:4], "little") in FORMATS:
        raise _refused(file, f"it begins with a header ({head!r}); write bare ids, or leave shard_format out")
    if size == 0 or size % dtype.itemsize:
        raise _refused(file, f"{size} bytes are no row of {dtype.itemsize}-byte tokens; write the file again")
    return [TokenPart(file, FileArray(file, dtype))]


def _olmo(file: File, token_dtype: str | None) -> list[TokenPart]:
    if token_dtype is None:
        raise UsageError(f"token_dtype=None: shard {file} does not say its own; give uint16 or uint32")
    return _nanogpt(file, token_dtype)


def _megatron(file: File, token_dtype: str | None) -> list[TokenPart]:
    index = _beside(file, name := f"{file.name.rpartition('.')[0]}.idx")
    if index is None or len(head := _head(index, 0, 34)) < 34 or head[:17] != MEGATRON_HEAD:
        raise _refused(file, f"{name} beside it is missing or no index of Megatron; copy both files again")
    code, sequences, bounds = struct.unpack("<BQQ", head[17:])
    if code not in MEGATRON_DTYPES:
        raise _refused(file, f"type {code} in {name} is none of token ids; tokenize again")
    tokens = FileArray(file, _unsigned(file, MEGATRON_DTYPES[code], token_dtype))
    starts_at, bounds_at = 34 + 4 * sequences, 34 + 12 * sequences
    whole, itemsize, total = bounds_at + 8 * bounds, tokens.dtype.itemsize, 0
    if file_size(index) not in (whole, whole + sequences):  # multimodal data have one more byte a sequence
        raise _refused(file, f"{name} is cut short; copy both files again")
    if sequences:
        total = _number(index, "<i8", bounds_at - 8) + _number(index, "<i4", starts_at - 4) * itemsize
    if total != file_size(file) or _number(index, "<i8", whole - 8) != sequences:
        raise _refused(file, f"{file_size(file)} bytes where {name} says {total}; copy both files again")
    starts = FileArray(index, "<i8", starts_at, sequences)

    def begin(sequence: NDArray[np.int64]) -> NDArray[np.int64]:
        """The offsets at which ascending sequences begin; the one after the last begins at the end of the file."""
        offsets = np.append(starts[sequence[0] : sequence[-1] + 1] // itemsize, len(tokens))
        return offsets.take(sequence - sequence[0], mode="clip")

    # the index has the first sequence of each document, which begins where the document before it ends
    return [TokenPart(file, tokens, FileArray(index, "<i8", bounds_at + 8, bounds - 1, begin))]


def _datatrove(file: File, token_dtype: str | None) -> list[TokenPart]:
    index = _beside(file, name := f"{file.name}.index")
    if index is None or file_size(index) < 8:
        raise _refused(file, f"{name} beside it is missing or empty; without it, the file is shard_format: olmo")
    total = _number(index, "<i8", file_size(index) - 8)
    itemsize = file_size(file) // max(total, 1)
    if itemsize * total != file_size(file) or (total and itemsize not in (2, 4)):
        raise _refused(file, f"{file_size(file)} bytes where {name} says {total} tokens; copy both files again")
    tokens = FileArray(file, _unsigned(file, f"u{itemsize or 2}", token_dtype))
    return [TokenPart(file, tokens, FileArray(index, "<i8"))]


def _index(file: File) -> dict[str, Any]:
    try:
        found = json.loads(_head(file, 0, file_size(file))) if file.name == "index.json" else None
    except ValueError:
        found = None
    if not isinstance(found, dict) or not (found.get("chunks") or found.get("shards")):
        raise _refused(file, "it is no index.json that names files of litdata or MDS; give such a folder")
    return found


def _named_files(index: File, sizes: dict[str, int]) -> list[File]:
    """The files that an `index.json` names, each of the size that follows from it."""
    files = list[File]()
    for name, size in sizes.items():
        if (file := _beside(index, name)) is None or file_size(file) != size:
            found = "is missing" if file is None else f"has {file_size(file)} bytes"
            raise _refused(index, f"{name} {found} where {size} bytes should be; copy the folder again")
        files.append(file)
    return files


def _litdata(index: File, token_dtype: str | None) -> list[TokenPart]:
    config, chunks = (content := _index(index))["config"], content["chunks"]
    if packed := config.get("compression") or config.get("encryption"):
        raise _refused(index, f"its chunks are packed ({packed}), and tokens are read in place; write them plain")
    kind, _, number = ",".join(config["data_format"]).partition(":")
    dtype = LITDATA_DTYPES.get(kind, {}).get(int(number) if number.isdecimal() else -1)
    if dtype is None or config.get("item_loader") not in (None, "TokensLoader"):
        raise _refused(index, f"{config['data_format']} is no single column of tokens; write it with TokensLoader")
    unsigned = _unsigned(index, dtype, token_dtype)
    heads = {chunk["filename"]: 4 * (chunk["chunk_size"] + 2) for chunk in chunks}
    sizes = {chunk["filename"]: heads[chunk["filename"]] + chunk["dim"] * unsigned.itemsize for chunk in chunks}

    def part(file: File, head: int) -> TokenPart:
        to_tokens = lambda place: (place.astype(np.int64) - head) // unsigned.itemsize  # noqa: E731
        return TokenPart(file, FileArray(file, unsigned, head), FileArray(file, "<u4", 8, head // 4 - 2, to_tokens))

    return list(map(part, _named_files(index, sizes), heads.values()))


class SampleArray:
    """Tokens of an MDS shard whose samples have other bytes between them, sliced like an array (n,).

    Args:
        file: the shard.
        dtype: of its tokens.
        with_shape: whether a sample's shape, and not its size alone, stands before its tokens.

    Raises:
        UsageError: the shard is cut, or holds something else.
    """

    def __init__(self, file: File, dtype: np.dtype[Any], with_shape: bool) -> None:
        number, size = _number(file, "<u4", 0), dtype.itemsize
        places = np.frombuffer(_head(file, 4, 4 * (number + 1)), "<u4").astype(np.int64)
        spaces = np.diff(places)
        heads = np.full(len(spaces), 4)  # bytes of the size, and of the shape: a byte, then the length in 1, 2 or 4
        if with_shape:
            heads = np.select([spaces < 6 + 256 * size, spaces < 7 + 65536 * size], [6, 7], 9)
        counts, rest = np.divmod(spaces - heads, size)
        if not number or places[-1] != file_size(file) or rest.any() or (counts < 0).any():
            raise _refused(file, f"its samples are no rows of {size}-byte tokens, or it is cut; copy it again")
        self.dtype, self._bytes = dtype, FileArray(file, "u1")
        # places in a shard fit 4 bytes: 8 bytes a sample in memory
        self.ends, self._places = np.cumsum(counts).astype(np.uint32), (places[:-1] + heads).astype(np.uint32)
        # text that was joined and cut has samples of one size, which are no documents
        self.has_documents = number == 1 or counts.min() < counts.max()

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, part: slice) -> NDArray[np.integer]:
        start, stop, _ = part.indices(len(self))
        size, parts = self.dtype.itemsize, [np.empty(0, dtype=self.dtype)]
        while start < stop:
            sample = bisect_right(self.ends, start)
            count = min(stop, int(self.ends[sample])) - start
            first = int(self._places[sample]) + (start - (int(self.ends[sample - 1]) if sample else 0)) * size
            parts.append(self._bytes[first : first + count * size].view(self.dtype))
            start += count
        return np.concatenate(parts)

    read = __getitem__


def _mds(index: File, token_dtype: str | None) -> list[TokenPart]:
    shards = _index(index)["shards"]
    for shard in shards:
        if shard["column_names"] != ["tokens"]:
            columns = ", ".join(shard["column_names"])
            raise _refused(index, f"its columns are {columns}; to be read in place, write tokens as the only one")
        if packed := shard["compression"] or (shard["format"] != "mds" and shard["format"]):
            raise _refused(index, f"its shards are packed ({packed}), and tokens are read in place; write them plain")
    files = _named_files(index, {shard["raw_data"]["basename"]: shard["raw_data"]["bytes"] for shard in shards})

    def part(file: File, shard: dict[str, Any]) -> TokenPart:
        (encoding,), (fixed,) = shard["column_encodings"], shard["column_sizes"]
        kind, dtype, *_ = f"{encoding}:{token_dtype if encoding == 'bytes' else ''}:".split(":")
        if kind not in ("bytes", "ndarray") or dtype not in INTEGERS:
            raise _refused(index, f"its encoding {encoding!r} does not say the type of token ids; give token_dtype")
        unsigned = _unsigned(file, dtype, token_dtype)
        if fixed is not None:
            data = fixed * shard["samples"]
            if _number(file, "<u4", 4) + data != file_size(file):
                raise _refused(file, f"it does not have the {shard['samples']} samples of index.json; copy it again")
            return TokenPart(file, FileArray(file, unsigned, file_size(file) - data))
        samples = SampleArray(file, unsigned, kind == "ndarray")
        return TokenPart(file, samples, samples.ends if samples.has_documents else None)

    return each(part, files, shards)


_READERS: dict[str, Callable[[File, Any], list[TokenPart]]] = {
    "llm.c": _llm_c,
    "nanogpt": _nanogpt,
    "megatron": _megatron,
    "datatrove": _datatrove,
    "litdata": _litdata,
    "mds": _mds,
    "olmo": _olmo,
}
