"""Token files: what is written is what llm.c reads, and what is broken is named."""

import numpy as np
import pytest

from lightning_tricks._core.errors import UsageError
from lightning_tricks.data import ShardWriter, open_shard
from lightning_tricks.data.shards import BLOCK_BYTES, SAMPLED_BLOCKS, TokenStream, fingerprint


def test_a_shard_is_llm_c_s_header_then_uint16(write_shard):
    raw = write_shard([5, 6, 7]).read_bytes()
    assert np.frombuffer(raw[:1024], "<i4").tolist() == [20240520, 1, 3] + [0] * 253
    assert np.frombuffer(raw[1024:], "<u2").tolist() == [5, 6, 7]


def test_a_vocabulary_over_65536_gets_llama_3_s_uint32_header(write_shard):
    path = write_shard([5, 100_000], vocab_size=65_537)
    assert np.fromfile(path, "<i4", count=3).tolist() == [20240801, 7, 2]
    assert open_shard(path).tolist() == [5, 100_000]
    assert open_shard(write_shard([65_535], vocab_size=65_536)).dtype == np.uint16


def test_shards_are_cut_at_shard_tokens_and_read_as_one_stream(tmp_path):
    with ShardWriter(tmp_path, "train", 256, shard_tokens=4) as writer:
        writer.append(np.arange(3))
        writer.append(np.arange(3, 10))
    paths = sorted(tmp_path.glob("train_*.bin"))
    assert [len(open_shard(path)) for path in paths] == [4, 4, 2]
    stream = TokenStream(paths)
    assert len(stream) == writer.tokens == 10
    assert stream.read(0, 10).tolist() == list(range(10))
    assert stream.read(3, 6).tolist() == [3, 4, 5, 6, 7, 8]
    assert stream.read(8, 5).tolist() == [8, 9]
    assert stream.describe(5).endswith("train_000001.bin, token 1")


def test_a_stream_pickles_as_paths_and_not_as_tokens(write_shard):
    import pickle

    pickled = pickle.dumps(TokenStream([write_shard(np.zeros(100_000, dtype=int))]))
    assert len(pickled) < 2000
    assert len(pickle.loads(pickled)) == 100_000


def test_the_first_id_too_large_is_found_wherever_it_is(tmp_path, write_shard):
    ids = np.zeros(50, dtype=int)
    ids[[31, 40]] = 200, 201
    stream = TokenStream([write_shard(np.zeros(20, dtype=int), "a"), write_shard(ids, "b")])
    assert stream.first_at_least(200, len(stream)) == 51
    assert stream.first_at_least(201, len(stream)) == 60
    assert stream.first_at_least(202, len(stream)) is None
    assert stream.first_at_least(200, limit=20) is None


def test_nanogpt_s_headerless_file_is_read_when_told_so(tmp_path):
    path = tmp_path / "train.bin"
    np.arange(600, dtype=np.uint16).tofile(path)
    assert open_shard(path, "nanogpt").tolist() == list(range(600))
    with pytest.raises(UsageError, match=r"train.bin: wrong magic 65536 .*shard_format: nanogpt"):
        open_shard(path)
    path.write_bytes(b"abc")
    with pytest.raises(UsageError, match="3 bytes"):
        open_shard(path, "nanogpt")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw[:-20], r"train_000000.bin: cut short, 90 tokens where its header says 100"),
        (lambda raw: raw[:40], "wrong magic"),
        (lambda raw: raw[:4] + b"\x09" + raw[5:], "version 9"),
        (lambda raw: b"", "wrong magic None"),
    ],
)
def test_a_shard_that_is_not_whole_is_named(write_shard, change, message):
    path = write_shard(np.arange(100))
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UsageError, match=message):
        open_shard(path)


def test_a_shard_whose_writer_was_interrupted_or_that_is_missing_is_refused(tmp_path):
    def interrupted():
        with ShardWriter(tmp_path, "train", 256) as writer:
            writer.append(np.arange(100))
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    with pytest.raises(UsageError, match="100 tokens where its header says 0"):
        open_shard(tmp_path / "train_000000.bin")
    with pytest.raises(UsageError, match=r"shard .*none.bin: cannot be read \(No such file"):
        open_shard(tmp_path / "none.bin")


def test_a_fingerprint_depends_on_sizes_and_sampled_blocks_and_on_no_name(tmp_path):
    content = bytearray(np.random.default_rng(0).bytes(100 * BLOCK_BYTES))

    def of(content, name="a.bin", files=1):
        (tmp_path / name).write_bytes(content)
        return fingerprint([tmp_path / name] * files)

    def changed(place):
        other = bytearray(content)
        other[place] ^= 1
        return bytes(other)

    first = of(content)
    assert of(content, "b.bin") == first
    assert of(content + b"x") != first
    assert of(changed(0)) != first
    assert of(changed(-1)) != first
    # 64 blocks of 100, equally far apart
    noticed = sum(of(changed(block * BLOCK_BYTES + 5)) != first for block in range(100))
    assert 60 <= noticed <= 68
    # one block of each of many files, its middle
    many = of(content, files=SAMPLED_BLOCKS + 1)
    assert of(changed(50 * BLOCK_BYTES), files=SAMPLED_BLOCKS + 1) != many
    assert of(changed(0), files=SAMPLED_BLOCKS + 1) == many
    assert len(of(b"")) == 16


def test_a_view_holds_the_tokens_of_a_read_also_over_the_border_of_shards(tmp_path):
    with ShardWriter(tmp_path, "train", 256, shard_tokens=10) as writer:
        writer.append(np.arange(25))
    stream = TokenStream(sorted(tmp_path.glob("*.bin")))
    for start in range(26):
        for count in range(1, 12):
            assert stream.view(start, count).tolist() == stream.read(start, count).tolist()
    assert stream.view(12, 8).dtype == np.uint16
    assert stream.view(12, 9).dtype == np.int64
