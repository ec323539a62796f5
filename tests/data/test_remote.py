"""Token files behind URLs: what a local file gives, blocks within their bound, connections that drop or refuse."""

import os
import threading
import time
from collections import Counter
from pathlib import Path

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from harness import shard_formats as written
from harness.shard_formats import DOCUMENTS, ENDS, document_ends

from lightning_tricks._core.errors import UsageError
from lightning_tricks._host import address
from lightning_tricks.data import ShardWriter, TokenData
from lightning_tricks.data.remote import BLOCK_BYTES, BlockCache, find_remote
from lightning_tricks.data.shards import fingerprint


class Bucket(MemoryFileSystem):
    """Files in memory behind faulty://, with the errors that a network has."""

    protocol = "faulty"
    store, pseudo_dirs = {}, [""]
    faults = []  # for the next reads of contents, one each: raised, or called with the bytes
    reads = Counter()  # by name

    def cat_file(self, path, start=None, end=None, **options):
        type(self).reads[path.rpartition("/")[2]] += 1
        data = super().cat_file(path, start, end)
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, Exception):
            raise fault
        return fault(data) if fault else data


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    """Put local files under faulty://tokens; returns the class."""
    fsspec.register_implementation("faulty", Bucket, clobber=True)
    monkeypatch.setattr(address, "WAITS_SECONDS", (0, 0, 0))
    Bucket.store.clear(), Bucket.reads.clear(), Bucket.faults.clear()
    return Bucket


def upload(folder: Path, url: str = "faulty://tokens") -> None:
    fs, target = fsspec.core.url_to_fs(url)
    for path in folder.rglob("*"):
        if path.is_file():
            fs.pipe_file(f"{target}/{path.relative_to(folder)}", path.read_bytes())


def opened(tmp_path, train="faulty://tokens/*.ds", cache_gib=1, **options):
    data = TokenData(train=train, seq_len=8, cache_dir=str(tmp_path / "cache"), cache_gib=cache_gib, **options)
    data.setup()
    return data


def blocks(tmp_path) -> list[Path]:
    return sorted((tmp_path / "cache" / "remote").iterdir())


@pytest.mark.parametrize(
    ("write", "train"),
    [
        (written.llm_c, "faulty://tokens/c_*.bin"),
        (written.megatron, "faulty://tokens/m.bin"),
        (written.datatrove, "faulty://tokens"),
        (lambda folder, docs: written.litdata(folder / "l", docs), "faulty://tokens/l/"),
        (lambda folder, docs: written.mds(folder / "s", docs), "faulty://tokens/s/index.json"),
    ],
)
def test_a_bucket_gives_the_tokens_and_documents_of_a_local_folder(bucket, tmp_path, write, train):
    local = write(tmp_path / "local", DOCUMENTS) if (tmp_path / "local").mkdir() is None else None
    upload(tmp_path / "local")
    data, same = opened(tmp_path, train), opened(tmp_path, str(local))
    for start in (0, 5, 700, len(same.streams["train"]) - 8):
        found, expected = (one.streams["train"].read(start, 1000) for one in (data, same))
        assert found.tolist() == expected.tolist()
    ends = document_ends(data.streams["train"])
    assert ends.tolist() == ([] if write is written.llm_c else ENDS)
    assert "faulty://tokens" in data.data_summary()
    assert next(iter(data.train_dataloader()))["input_ids"].shape == (8, 8)


def test_what_was_read_once_is_read_from_the_disk_by_any_process(bucket, tmp_path):
    (tmp_path / "local").mkdir()
    written.datatrove(tmp_path / "local", [np.arange(3 * BLOCK_BYTES // 4)])
    upload(tmp_path / "local")
    stream = opened(tmp_path).streams["train"]
    stream.read(BLOCK_BYTES // 4 - 2, 4)
    assert [path.stat().st_size for path in blocks(tmp_path)] == [BLOCK_BYTES] * 2
    before = bucket.reads["000.ds"]
    again = opened(tmp_path).streams["train"]
    at_start = bucket.reads["000.ds"]
    assert again.read(0, 2 * BLOCK_BYTES // 4).tolist() == list(range(2 * BLOCK_BYTES // 4))
    assert bucket.reads["000.ds"] == at_start
    assert again.read(3 * BLOCK_BYTES // 4 - 2, 9).tolist() == [3 * BLOCK_BYTES // 4 - 2, 3 * BLOCK_BYTES // 4 - 1]
    assert bucket.reads["000.ds"] == at_start + 1
    assert at_start - before <= 2  # heads alone


def test_blocks_of_a_replaced_file_are_not_taken_for_its(bucket, tmp_path):
    (tmp_path / "local").mkdir()
    data = None
    for first in (0, 1):
        written.datatrove(tmp_path / "local", [np.arange(100) + first] * (first + 1))  # and another size of the index
        upload(tmp_path / "local")
        data = data or opened(tmp_path)
        data.setup()
        assert data.streams["train"].read(0, 3).tolist() == [first, first + 1, first + 2]
        assert len(document_ends(data.streams["train"])) == first + 1


def test_the_fingerprint_of_a_remote_file_is_that_of_its_size_and_version_and_reads_nothing(bucket, tmp_path):
    (tmp_path / "local").mkdir()
    written.datatrove(tmp_path / "local", DOCUMENTS)
    upload(tmp_path / "local")
    cache = BlockCache(tmp_path, 1)
    of = lambda: fingerprint(find_remote("faulty://tokens/*.ds", cache, list))  # noqa: E731
    first = of()
    assert of() == first
    upload(tmp_path / "local")  # a new version of the same bytes
    assert of() != first
    assert not bucket.reads


def test_the_cache_stays_within_its_bound_and_drops_what_was_not_read_for_longest(tmp_path):
    cache = BlockCache(tmp_path / "remote", limit_gib=16 * BLOCK_BYTES / 2**30)
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote" / "notes.txt").write_bytes(bytes(BLOCK_BYTES))
    (tmp_path / "remote" / "killed-0.block.x").write_bytes(bytes(BLOCK_BYTES))  # of a process that was killed
    os.utime(tmp_path / "remote" / "killed-0.block.x", (0, 0))
    for number in range(40):
        cache.write(f"a-{number}.block", bytes(BLOCK_BYTES))
        os.utime(tmp_path / "remote" / f"a-{number}.block", (1000 + number,) * 2)
        assert cache.read("a-3.block", 5, 7) == bytes(7) or number < 3  # sets its time to now
        assert len(list((tmp_path / "remote").glob("*.block*"))) <= 16
    kept = {path.name for path in (tmp_path / "remote").iterdir()}
    assert kept == {"notes.txt", "a-3.block", *(f"a-{number}.block" for number in range(26, 40))}


def test_a_block_that_is_not_whole_or_cannot_be_kept_is_fetched_again(bucket, tmp_path):
    (tmp_path / "local").mkdir()
    written.datatrove(tmp_path / "local", DOCUMENTS)
    upload(tmp_path / "local")
    stream = opened(tmp_path).streams["train"]
    expected = stream.read(0, 3000).tolist()
    (block,) = blocks(tmp_path)
    block.write_bytes(block.read_bytes()[:100])
    assert stream.read(0, 3000).tolist() == expected
    block.unlink()
    block.parent.rmdir()
    block.parent.write_text("a file in place of the folder")
    assert stream.read(0, 3000).tolist() == expected


def test_threads_and_streams_share_a_small_cache(bucket, tmp_path):
    (tmp_path / "local").mkdir()
    tokens = np.arange(8 * BLOCK_BYTES // 4, dtype="<u4")
    written.datatrove(tmp_path / "local", [tokens])
    upload(tmp_path / "local")
    wrong = []

    def read(seed):
        stream = opened(tmp_path, cache_gib=3 * BLOCK_BYTES / 2**30).streams["train"]
        for start in np.random.default_rng(seed).integers(0, len(tokens) - 500, 60).tolist():
            if stream.read(start, 500).tolist() != list(range(start, start + 500)):
                wrong.append(start)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(blocks(tmp_path)) <= 3


@pytest.mark.parametrize(
    "faults",
    [
        [ConnectionResetError("reset by peer")] * 3,
        [lambda data: data[: len(data) // 2]] * 3,
        [TimeoutError("slow"), lambda data: b"", RuntimeError("of the library's own class")],
    ],
)
def test_a_connection_that_drops_is_tried_again_and_nothing_is_lost(bucket, tmp_path, faults):
    (tmp_path / "local").mkdir()
    written.datatrove(tmp_path / "local", DOCUMENTS)
    upload(tmp_path / "local")
    stream = opened(tmp_path).streams["train"]
    bucket.faults.extend(faults)
    assert stream.read(0, 4000).tolist() == np.concatenate(DOCUMENTS).tolist()
    assert bucket.faults == []


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            ConnectionResetError("reset\nby peer"),
            r"not read in 4 tries \(ConnectionResetError: reset by peer\); go on when",
        ),
        (lambda data: data[:7], r"not read in 4 tries \(OSError: 7 of 12388 bytes came\)"),
        (PermissionError("Forbidden"), r"access is refused \(Forbidden\); check the credentials and the path"),
        (FileNotFoundError("gone"), r"it is not there; check the path"),
    ],
)
def test_what_stays_wrong_in_mid_read_is_one_line_that_names_the_file(bucket, tmp_path, fault, message):
    (tmp_path / "local").mkdir()
    written.datatrove(tmp_path / "local", DOCUMENTS)
    upload(tmp_path / "local")
    stream = opened(tmp_path).streams["train"]
    bucket.faults.extend([fault] * 4)
    with pytest.raises(UsageError, match=rf"^faulty://tokens/000.ds: {message}") as raised:
        stream.read(0, 10)
    assert "\n" not in str(raised.value)
    bucket.faults.clear()
    assert stream.read(0, 6).tolist() == np.concatenate(DOCUMENTS)[:6].tolist()  # the run may go on


def test_waits_between_tries_grow(bucket, tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(address, "WAITS_SECONDS", (0.5, 1, 2))
    monkeypatch.setattr(time, "sleep", waits.append)
    (tmp_path / "local").mkdir()
    written.datatrove(tmp_path / "local", DOCUMENTS)
    upload(tmp_path / "local")
    bucket.faults.extend([OSError("busy")] * 3)
    opened(tmp_path)
    assert waits == [0.5, 1, 2]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("faulty://tokens/none_*.bin", r"^train='faulty://tokens/none_\*.bin': matches no file; check the path$"),
        ("faulty://tokens/none.bin", r"^faulty://tokens/none.bin: it is not there; check the path$"),
        ("nowhere://tokens/x.bin", r"^nowhere://tokens/x.bin: .*[Pp]rotocol not known.*; check the URL$"),
    ],
)
def test_a_url_without_files_is_named(bucket, tmp_path, url, message):
    with pytest.raises(UsageError, match=message):
        opened(tmp_path, url)


@pytest.mark.parametrize(("protocol", "extra"), [("s3", "s3"), ("gs", "gcs"), ("hf", "hf")])
def test_a_missing_library_is_one_line_with_the_command(tmp_path, monkeypatch, protocol, extra):
    def missing(url):
        raise ImportError(f"Install the library of {protocol}")

    monkeypatch.setattr(address, "url_to_fs", missing)
    with pytest.raises(
        UsageError, match=rf"^{protocol}://b/x.bin: Install .*; pip install -e '.\[{extra}\]' in the clone$"
    ):
        opened(tmp_path, f"{protocol}://b/x.bin")


def test_remote_shards_are_not_read_for_ids_that_are_too_large_before_the_run_but_their_batches_are(bucket, tmp_path):
    (tmp_path / "local").mkdir()
    with ShardWriter(tmp_path / "local", "train", 1 << 17) as writer:
        writer.append(np.full(9, 70_000))
    upload(tmp_path / "local")
    data = opened(tmp_path, "faulty://tokens/*.bin", vocab_size=60_000, micro_batch_size=1)
    with pytest.raises(UsageError, match=r"^shard faulty://tokens/train_000000.bin, token \d: id 70000 does not fit"):
        next(iter(data.train_dataloader()))
