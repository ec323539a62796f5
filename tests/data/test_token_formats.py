"""Token files of other programs: the tokens and documents that were written, and what can be wrong with them."""

import importlib.machinery
import json
import pickle
import struct
import sys
import tracemalloc
import types
from pathlib import Path

import numpy as np
import pytest
from harness import shard_formats as written
from harness.shard_formats import DOCUMENTS, ENDS, SMALL, document_ends

from lightning_tricks._core.errors import UsageError
from lightning_tricks.data import TokenData, token_formats
from lightning_tricks.data.shards import TokenStream, fingerprint

MULTIMODAL = {"multimodal": True}
BLOCKS = [np.arange(64) + 100 * n for n in range(20)]  # of one size, as llm-foundry cuts joined text
FORMATS = {  # name: (write into a folder, options of TokenData, documents, ends)
    "llm.c uint32": (written.llm_c, {}, DOCUMENTS, None),
    "llm.c uint16": (lambda folder, docs: written.llm_c(folder, docs, 1 << 16), {}, SMALL, None),
    "nanogpt": (lambda folder, docs: written.bare(folder / "n.bin", docs), {"shard_format": "nanogpt"}, SMALL, None),
    "olmo uint16": (
        lambda folder, docs: written.bare(folder / "o.npy", docs),
        {"shard_format": "olmo", "token_dtype": "uint16"},
        SMALL,
        None,
    ),
    "olmo uint32": (
        lambda folder, docs: written.bare(folder / "o.npy", docs, "<u4"),
        {"shard_format": "olmo", "token_dtype": "uint32"},
        DOCUMENTS,
        None,
    ),
    "megatron int32": (written.megatron, {}, DOCUMENTS, ENDS),
    "megatron uint16": (lambda folder, docs: written.megatron(folder, docs, 8, "<u2"), {}, SMALL, ENDS),
    "megatron int64": (lambda folder, docs: written.megatron(folder, docs, 5, "<i8"), {}, DOCUMENTS, ENDS),
    "megatron multimodal": (lambda folder, docs: written.megatron(folder, docs, **MULTIMODAL), {}, DOCUMENTS, ENDS),
    "megatron, documents of several sequences": (
        lambda folder, docs: written.megatron(folder, docs, joined=(0, 2, 3)),
        {},
        DOCUMENTS,
        [ENDS[1], *ENDS[4:]],
    ),
    "datatrove uint16": (lambda folder, docs: written.datatrove(folder, docs, "<u2"), {}, SMALL, ENDS),
    "datatrove uint32": (written.datatrove, {}, DOCUMENTS, ENDS),
    "litdata torch int32": (lambda folder, docs: written.litdata(folder / "l", docs), {}, DOCUMENTS, ENDS),
    "litdata NumPy uint16": (
        lambda folder, docs: written.litdata(folder / "l", docs, "no_header_numpy:5", "<u2"),
        {},
        SMALL,
        ENDS,
    ),
    "mds arrays": (lambda folder, docs: written.mds(folder / "s", docs), {}, DOCUMENTS, ENDS),
    "mds bytes": (
        lambda folder, docs: written.mds(folder / "s", docs, "bytes", "<i8"),
        {"token_dtype": "int64"},
        DOCUMENTS,
        ENDS,
    ),
    "mds arrays of one size": (
        lambda folder, docs: written.mds(folder / "s", docs, "ndarray:int32:64", "<i4"),
        {},
        BLOCKS,
        None,
    ),
    "mds bytes of one size": (
        lambda folder, docs: written.mds(folder / "s", docs, "bytes", "<i8"),
        {"token_dtype": "int64"},
        BLOCKS,
        None,
    ),
}


def opened(source, **options) -> TokenStream:
    """The training stream of TokenData."""
    data = TokenData(train=str(source), seq_len=8, **options)
    data.setup()
    return data.streams["train"]


@pytest.mark.parametrize(("write", "options", "documents", "ends"), FORMATS.values(), ids=FORMATS)
def test_each_format_gives_the_tokens_and_documents_that_were_written(tmp_path, write, options, documents, ends):
    stream = opened(write(tmp_path, documents), **options)
    expected = np.concatenate(documents).tolist()
    assert len(stream) == len(expected)
    assert stream.read(0, len(stream)).tolist() == expected
    for start in (0, 4, 5, 6, 700, 705, 706, 1100, len(expected) - 2):
        for count in (1, 2, 8, 600):
            assert stream.read(start, count).tolist() == stream.view(start, count).tolist()
            assert stream.read(start, count).tolist() == expected[start : start + count]
    assert (document_ends(stream).tolist() if stream.knows_documents else None) == ends
    again = pickle.loads(pickle.dumps(stream))
    assert again.read(3, 900).tolist() == expected[3:903]
    assert len(fingerprint(stream.paths)) == 16


@pytest.mark.parametrize("write", [written.megatron, written.datatrove, FORMATS["mds arrays"][0]])
def test_the_ends_of_neighbouring_ranges_join_to_those_of_both_also_over_files(tmp_path, write):
    sources = []
    for name in "ab":
        (tmp_path / name).mkdir()
        sources.append(str(write(tmp_path / name, DOCUMENTS)))
    data = TokenData(train=sources, seq_len=8)
    data.setup()
    stream = data.streams["train"]
    ends = [*ENDS, *(ENDS[-1] + end for end in ENDS)]
    assert document_ends(stream).tolist() == ends
    for start in (0, 4, 5, 6, ENDS[-2], ENDS[-1] - 1, ENDS[-1], ENDS[-1] + 1):
        for count in (0, 1, 2, 700, 5000, 1 << 40):
            expected = [end for end in ends if start < end <= start + count]
            assert document_ends(stream, start, count).tolist() == expected, (start, count)


def test_documents_without_tokens_add_no_end(tmp_path):
    nothing = DOCUMENTS[0][:0]
    path = written.datatrove(tmp_path, [DOCUMENTS[0], nothing, nothing, DOCUMENTS[5]])
    assert document_ends(opened(path)).tolist() == [5, 14]
    assert document_ends(opened(path), 5, 9).tolist() == [14]


@pytest.mark.parametrize("count", [255, 256, 65_535, 65_536])
def test_the_shape_of_an_mds_sample_takes_as_many_bytes_as_its_length_needs(tmp_path, count):
    documents = [np.arange(count), np.arange(7)]
    stream = opened(written.mds(tmp_path / "s", documents))
    assert stream.read(0, len(stream)).tolist() == np.concatenate(documents).tolist()
    assert document_ends(stream).tolist() == [count, count + 7]


def test_sources_are_files_folders_and_globs(tmp_path):
    for name in ("b", "a"):
        written.litdata(tmp_path / name, SMALL)
        written.datatrove(tmp_path, SMALL, name=f"{name}.ds")
    (tmp_path / "README.md").write_text("no tokens")
    (tmp_path / "empty").mkdir()
    one = sum(map(len, SMALL))
    assert len(opened(tmp_path)) == len(opened(tmp_path / "*.ds")) == len(opened(tmp_path / "[ab]")) == 2 * one
    assert [path.name for path in opened(tmp_path).paths] == ["a.ds", "b.ds"]
    assert (
        len(opened(tmp_path / "a")) == len(opened(tmp_path / "a.ds")) == len(opened(tmp_path / "a/index.json")) == one
    )
    with pytest.raises(UsageError, match=r"^train='.*empty': matches no file; check the path$"):
        opened(tmp_path / "empty")
    written.bare(tmp_path / "a" / "x.bin", SMALL)  # no chunk of the index
    assert len(opened(tmp_path / "a")) == one


def test_a_folder_with_training_and_validation_shards_is_refused(tmp_path):
    for name in ("train", "val"):
        written.bare(tmp_path / f"{name}.bin", SMALL)
    with pytest.raises(UsageError, match=rf"^{tmp_path}: it has shards for training and validation; .* glob"):
        opened(tmp_path, shard_format="nanogpt")


def cut(name: str, count: int = 20):
    """Take the last bytes of a file."""

    def spoil(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:-count])

    return spoil


def removed(name: str):
    return lambda folder: (folder / name).unlink()


def replaced(name: str, place: int, raw: bytes):
    """Overwrite bytes of a file."""

    def spoil(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[place : place + len(raw)] = raw
        (folder / name).write_bytes(content)

    return spoil


def edited(name: str, change):
    """Change the JSON of a file."""

    def spoil(folder: Path) -> None:
        change(content := json.loads((folder / name).read_text()))
        (folder / name).write_text(json.dumps(content))

    return spoil


def chunks(documents=DOCUMENTS, **config):
    return lambda folder, _: written.litdata(folder / "l", documents, **config)


def samples(documents=DOCUMENTS, encoding="ndarray:uint32", dtype="<u4", **changes):
    return lambda folder, _: written.mds(folder / "s", documents, encoding, dtype, **changes)


def ids(name: str):
    return lambda folder, documents: written.bare(folder / name, documents)


def nothing(write):
    return lambda folder, documents: write(folder, [documents[0][:0]])


def unequal(folder, documents):
    """A Megatron index of another file."""
    written.megatron(folder, documents)
    return written.bare(folder / "m.bin", documents[:5], "<i4")


def numpy_s(folder, documents):
    np.save(folder / "o.npy", documents[0])
    return folder / "o.npy"


def refused(write, message, spoil=lambda folder: None, **options):
    return write, message, spoil, options


TWO_BYTES = {"shard_format": "olmo", "token_dtype": "uint16"}
REFUSED = [
    refused(written.megatron, r"m.bin: 12368 bytes where m.idx says 12388; copy both", cut("m.bin")),
    refused(written.megatron, "m.bin: m.idx is cut short; copy both", cut("m.idx")),
    refused(unequal, "m.bin: 11148 bytes where m.idx says 12388"),
    refused(written.megatron, "no index of Megatron", replaced("m.idx", 9, b"\2"), shard_format="megatron"),
    refused(written.megatron, "type 7 in m.idx is none of token ids", replaced("m.idx", 17, b"\7")),
    refused(written.megatron, "where m.idx says 12388; copy both", replaced("m.idx", 34 + 12 * 7 + 8 * 7, b"\6")),
    refused(written.megatron, "m.idx beside it is missing", removed("m.idx"), shard_format="megatron"),
    refused(written.megatron, "wrong magic 500 .* name the format of bare ids", removed("m.idx")),
    refused(nothing(written.megatron), "m.bin: it holds no tokens; leave it out"),
    refused(written.datatrove, "000.ds: 12368 bytes where 000.ds.index says 3097 tokens", cut("000.ds")),
    refused(written.datatrove, "12388 bytes where 000.ds.index says 2796 tokens", cut("000.ds.index", 8)),
    refused(written.datatrove, "index beside it is missing", removed("000.ds.index"), shard_format="datatrove"),
    refused(nothing(written.datatrove), "000.ds: it holds no tokens; leave it out"),
    refused(chunks(), "index.json: chunk-0-1.bin has 8360 bytes where 8380 bytes should", cut("l/chunk-0-1.bin")),
    refused(chunks(), "index.json: chunk-0-0.bin is missing where", removed("l/chunk-0-0.bin")),
    refused(chunks(compression="zstd"), r"index.json: its chunks are packed \(zstd\).* write them plain"),
    refused(chunks(encryption={"algorithm": "fernet"}), "its chunks are packed .*fernet"),
    refused(chunks(data_format="jpeg"), r"\['jpeg'\] is no single column of tokens; write it with TokensLoader"),
    refused(chunks(data_format="no_header_tensor:1"), "is no single column of tokens"),
    refused(chunks(item_loader="PyTreeLoader"), "is no single column of tokens"),
    refused(chunks([]), "index.json: it is no index.json that names files of litdata or MDS"),
    refused(chunks(), "it is no index.json that names files", replaced("l/index.json", 0, b"}")),
    refused(
        chunks(), r"not understood \(KeyError\('config'\)\); copy", edited("l/index.json", lambda c: c.pop("config"))
    ),
    refused(written.megatron, "m.bin: it is no index.json .*; give such a folder", shard_format="mds"),
    refused(samples(column_names=["id", "text"]), "its columns are id, text; .*write tokens as the only one"),
    refused(samples(compression="zstd:7"), r"its shards are packed \(zstd:7\).* write them plain"),
    refused(samples(encoding="bytes"), "'bytes' does not say the type of token ids; give token_dtype"),
    refused(samples(encoding="bytes", dtype="<u2"), "no rows of 8-byte tokens, or it is cut", token_dtype="int64"),
    refused(samples(encoding="ndarray:float32"), "'ndarray:float32' does not say the type of token ids"),
    refused(samples(encoding="str"), "'str' does not say the type of token ids"),
    refused(samples(), r"shard.00001.mds has \d+ bytes where \d+ bytes should be", cut("s/shard.00001.mds")),
    refused(
        samples(BLOCKS, "ndarray:int32:64", "<i4"),
        "it does not have the 2 samples of index.json",
        edited("s/index.json", lambda c: c["shards"][0].update(samples=2)),
    ),
    refused(ids("o.npy"), "^token_dtype=None: shard .*o.npy does not say its own; give uint16", shard_format="olmo"),
    refused(ids("o.npy"), "6193 bytes are no row of 2-byte tokens; write", cut("o.npy", 1), **TWO_BYTES),
    refused(numpy_s, "o.npy: it begins with a header .*NUMPY.*; write bare ids", **TWO_BYTES),
    refused(written.llm_c, "it begins with a header .*; write bare ids", shard_format="nanogpt"),
    refused(written.megatron, "^token_dtype='uint16': shard .*m.bin holds int32; leave", token_dtype="uint16"),
    refused(ids("x.bin.zst"), "x.bin.zst: it is compressed, .*; decompress it", shard_format="nanogpt"),
    refused(written.llm_c, "^shard_format='parquet': give one of auto, llm.c, ", shard_format="parquet"),
]


@pytest.mark.parametrize(("write", "message", "spoil", "options"), REFUSED, ids=[case[1] for case in REFUSED])
def test_what_would_give_wrong_tokens_is_refused_in_one_line(tmp_path, write, spoil, options, message):
    source = write(tmp_path, DOCUMENTS)
    spoil(tmp_path)
    with pytest.raises(UsageError, match=message) as raised:
        opened(source, **options)
    assert "\n" not in str(raised.value)
    assert str(tmp_path) in str(raised.value) or "shard_format=" in str(raised.value)


@pytest.mark.parametrize("place", [8 * 3, 8 * 6])  # an end in the middle, the last but one
def test_an_index_that_contradicts_itself_is_refused_when_it_is_asked(tmp_path, place):
    path = written.datatrove(tmp_path, DOCUMENTS)
    replaced("000.ds.index", place - 8, struct.pack("<Q", 1 << 50))(tmp_path)
    with pytest.raises(UsageError, match=r"000.ds: its index of documents does not match it; write both again$"):
        document_ends(opened(path))


def test_a_negative_id_is_found_as_too_large(tmp_path):
    path = written.megatron(tmp_path, [np.array([1, 2, -100, 3] * 5)])
    with pytest.raises(UsageError, match=r"m.bin, token 2: id \d+ does not fit vocab_size"):
        opened(path, vocab_size=100)


def test_more_files_than_may_be_mapped_are_read_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(token_formats, "_maps", set())
    monkeypatch.setattr(token_formats, "MAPPED_FILES", 3)
    sources = [written.datatrove(tmp_path, DOCUMENTS, name=f"{n}.ds") for n in range(4)]
    stream = TokenStream(sources)
    expected = np.concatenate(DOCUMENTS * 4)
    assert len(token_formats._maps) == 0  # nothing is mapped before it is read
    assert (stream.read(0, len(stream)) == expected).all()
    assert len(document_ends(stream)) == 4 * len(ENDS)
    assert len(token_formats._maps) == 3


def sparse(path: Path, size: int) -> None:
    with path.open("r+b" if path.exists() else "wb") as file:
        file.truncate(size)


@pytest.mark.parametrize("name", ["llm.c", "megatron", "datatrove"])
def test_a_trillion_tokens_are_opened_by_their_heads_alone(tmp_path, name):
    files, each = 1000, 10**9
    for number in range(files):
        path = tmp_path / f"{number:04d}.bin"
        if name == "llm.c":
            path.write_bytes(struct.pack("<3i", 20240520, 1, each) + bytes(1012))
            sparse(path, 1024 + 2 * each)
            continue
        sparse(path, 2 * each)
        if name == "datatrove":
            index = Path(f"{path}.index")
            sparse(index, 8 * 10**6)
            with index.open("r+b") as file:
                file.seek(-8, 2)
                file.write(struct.pack("<Q", each))
            continue
        count = 10**6  # sequences, a document each; only the last one is written down
        index = path.with_suffix(".idx")
        index.write_bytes(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, count, count + 1))
        sparse(index, 34 + 12 * count + 8 * (count + 1))
        with index.open("r+b") as file:
            file.seek(34 + 4 * (count - 1))
            file.write(struct.pack("<i", 7))
            file.seek(34 + 12 * count - 8)
            file.write(struct.pack("<q", 2 * (each - 7)))
            file.seek(-8, 2)
            file.write(struct.pack("<q", count))
    tracemalloc.start()
    stream = TokenStream(sorted(tmp_path.glob("*.bin")))
    fingerprint(stream.paths)
    assert len(stream) == 10**12
    assert stream.read(10**12 - 3, 9).tolist() == [0, 0, 0]
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert used < 5 * 2**20


def same(stream: TokenStream, documents) -> None:
    assert stream.read(0, len(stream)).tolist() == np.concatenate(documents).tolist()
    assert document_ends(stream).tolist() == np.cumsum([len(document) for document in documents]).tolist()


@pytest.mark.parametrize(
    ("kind", "dtype"), [("torch", "int32"), ("torch", "uint16"), ("numpy", "uint16"), ("numpy", "int64")]
)
def test_what_litdata_itself_wrote(tmp_path, kind, dtype):
    torch = pytest.importorskip("torch")
    writer = pytest.importorskip("litdata.streaming.writer")
    loader = pytest.importorskip("litdata.streaming.item_loader")
    chunks = writer.BinaryWriter(str(tmp_path), chunk_size=2000, item_loader=loader.TokensLoader())
    for number, document in enumerate(SMALL):
        array = document.astype(dtype)
        chunks.add_item(number, array if kind == "numpy" else torch.from_numpy(array))
    chunks.done()
    chunks.merge()
    same(opened(tmp_path), SMALL)


@pytest.fixture
def mds_writer(monkeypatch):
    """MDSWriter; streaming imports torchvision, of which its formats of tokens use nothing."""
    pytest.importorskip("numpy")
    if importlib.util.find_spec("streaming") is None:
        pytest.skip("mosaicml-streaming is not installed")
    try:
        import torchvision  # noqa: F401
    except ImportError:
        for name in ("", ".transforms", ".transforms.functional", ".datasets", ".datasets.folder"):
            stub = types.ModuleType(f"torchvision{name}")
            stub.__getattr__ = lambda name: type(name, (), {})
            stub.__path__, stub.__spec__ = [], importlib.machinery.ModuleSpec(stub.__name__, None)
            monkeypatch.setitem(sys.modules, stub.__name__, stub)
    return pytest.importorskip("streaming").MDSWriter


@pytest.mark.parametrize(
    ("encoding", "dtype"), [("ndarray:uint16", None), ("ndarray:int64", None), ("bytes", "int64"), ("bytes", "uint16")]
)
def test_what_streaming_itself_wrote(tmp_path, mds_writer, encoding, dtype):
    kind = dtype or encoding.partition(":")[2]
    with mds_writer(out=str(tmp_path / "s"), columns={"tokens": encoding}, size_limit=4096) as shards:
        for document in SMALL:
            array = document.astype(kind)
            shards.write({"tokens": array.tobytes() if encoding == "bytes" else array})
    same(opened(tmp_path / "s", token_dtype=dtype), SMALL)


def test_what_streaming_wrote_as_blocks_of_one_size(tmp_path, mds_writer):
    with mds_writer(out=str(tmp_path / "s"), columns={"tokens": "ndarray:int32:64"}, size_limit=4096) as shards:
        for block in BLOCKS:
            shards.write({"tokens": block.astype("int32")})
    stream = opened(tmp_path / "s")
    assert stream.read(0, len(stream)).tolist() == np.concatenate(BLOCKS).tolist()
    assert not stream.knows_documents


@pytest.mark.parametrize("size", [2, 4])
def test_what_datatrove_itself_wrote(tmp_path, size):
    tokenizer = pytest.importorskip("datatrove.pipeline.tokens.tokenizer")
    file = tokenizer.TokenizedFile(str(tmp_path), "a.ds", token_size=size)
    for document in SMALL:
        file.write(document.tolist(), None)
    file.close()
    same(opened(tmp_path / "a.ds"), SMALL)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_what_megatron_itself_wrote(tmp_path, dtype):
    torch = pytest.importorskip("torch")
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    builder = indexed.IndexedDatasetBuilder(str(tmp_path / "m.bin"), dtype=dtype)
    for document in SMALL:
        builder.add_item(torch.from_numpy(document))
        builder.end_document()
    builder.finalize(str(tmp_path / "m.idx"))
    same(opened(tmp_path / "m.bin"), SMALL)
