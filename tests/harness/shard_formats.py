"""The same documents in each format of token files, by its layout, written with numpy and struct alone."""

import json
import struct
from pathlib import Path

import numpy as np

from lightning_tricks.data import ShardWriter

DOCUMENTS = [np.arange(n) + 100 * n for n in (5, 1, 700, 33, 2048, 9, 301)]  # ids up to 206,847, so 4 bytes
SMALL = [document % 50_000 for document in DOCUMENTS]  # ids of 2 bytes
ENDS = np.cumsum([len(document) for document in DOCUMENTS]).tolist()


def llm_c(folder: Path, documents, vocab_size=1 << 18) -> Path:
    with ShardWriter(folder, "c", vocab_size) as writer:
        writer.append(np.concatenate(documents))
    return folder / "c_000000.bin"


def bare(path: Path, documents, dtype="<u2") -> Path:
    np.concatenate(documents).astype(dtype).tofile(path)
    return path


def megatron(folder: Path, documents, code=4, dtype="<i4", joined=(), multimodal=False, name="m") -> Path:
    """`joined`: documents without an end of their own, which are the first sequence of the next."""
    path = bare(folder / f"{name}.bin", documents, dtype)
    lengths = np.array([len(document) for document in documents], dtype="<i4")
    starts = (np.cumsum(lengths) - lengths).astype("<i8") * np.dtype(dtype).itemsize
    bounds = np.array([0] + [n + 1 for n in range(len(documents)) if n not in joined], dtype="<i8")
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(bounds))
    modes = bytes(len(lengths)) if multimodal else b""
    path.with_suffix(".idx").write_bytes(head + lengths.tobytes() + starts.tobytes() + bounds.tobytes() + modes)
    return path


def datatrove(folder: Path, documents, dtype="<u4", name="000.ds") -> Path:
    path = bare(folder / name, documents, dtype)
    Path(f"{path}.index").write_bytes(np.cumsum([len(document) for document in documents]).astype("<u8").tobytes())
    return path


def _with_table(items: list[bytes], config: bytes = b"") -> bytes:
    """N, N + 1 offsets from the start of the file, a text, the items: the frame of litdata and of MDS."""
    offsets = 4 * (len(items) + 2) + len(config) + np.cumsum([0, *map(len, items)])
    return struct.pack("<I", len(items)) + offsets.astype("<u4").tobytes() + config + b"".join(items)


def litdata(folder: Path, documents, data_format="no_header_tensor:16", dtype="<i4", per_chunk=3, **config) -> Path:
    folder.mkdir(exist_ok=True)
    chunks = []
    for first in range(0, len(documents), per_chunk):
        part = documents[first : first + per_chunk]
        name = f"chunk-0-{first // per_chunk}.bin"
        (folder / name).write_bytes(_with_table([document.astype(dtype).tobytes() for document in part]))
        dim = sum(map(len, part))
        chunks.append({"filename": name, "chunk_size": len(part), "dim": dim, "chunk_bytes": 4 * dim})
    config = {"data_format": [data_format], "compression": None, "item_loader": "TokensLoader", **config}
    (folder / "index.json").write_text(json.dumps({"chunks": chunks, "config": config}))
    return folder


def _mds_sample(document, encoding: str, dtype: str) -> bytes:
    raw = document.astype(dtype).tobytes()
    if encoding.count(":") == 2:
        return raw
    if encoding != "bytes":
        kind = next(n for n, size in enumerate((1 << 8, 1 << 16, 1 << 32)) if len(document) < size)
        raw = bytes([1 << 2 | kind]) + len(document).to_bytes(1 << kind, "little") + raw
    return struct.pack("<I", len(raw)) + raw


def mds(folder: Path, documents, encoding="ndarray:uint32", dtype="<u4", per_shard=3, **changes) -> Path:
    folder.mkdir(exist_ok=True)
    shards = []
    for first in range(0, len(documents), per_shard):
        part = documents[first : first + per_shard]
        fixed = np.dtype(dtype).itemsize * len(part[0]) if encoding.count(":") == 2 else None
        about = {"column_names": ["tokens"], "column_encodings": [encoding], "column_sizes": [fixed], "format": "mds"}
        about |= {"compression": None, **changes}
        name = f"shard.{first // per_shard:05d}.mds"
        text = json.dumps(about).encode()
        (folder / name).write_bytes(_with_table([_mds_sample(document, encoding, dtype) for document in part], text))
        size = (folder / name).stat().st_size
        shards.append({**about, "samples": len(part), "raw_data": {"basename": name, "bytes": size}, "version": 2})
    (folder / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))
    return folder


def document_ends(stream, start=0, count=None) -> np.ndarray:
    """Where documents end by the index, among `count` tokens from `start` on."""
    stop = len(stream) if count is None else min(start + count, len(stream))
    return stream.document_ends(start, stop, eot_id=None)
