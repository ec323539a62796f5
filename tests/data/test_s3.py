"""Token files in a bucket of moto's S3 server on this machine, through s3fs as users have it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from harness import shard_formats as written
from harness.s3_server import fsspec, prepare
from harness.shard_formats import DOCUMENTS, ENDS, document_ends

from lightning_tricks._core.errors import UsageError
from lightning_tricks.data import TokenData
from lightning_tricks.data.remote import BLOCK_BYTES, BlockCache, find_remote


@pytest.fixture
def server(s3_server, monkeypatch, tmp_path):
    return prepare(s3_server, monkeypatch, tmp_path, "tokens")


def upload(folder: Path) -> None:
    fsspec.filesystem("s3").put(str(folder), "tokens/", recursive=True)


def opened(tmp_path, train, **options) -> TokenData:
    data = TokenData(train=train, seq_len=8, cache_dir=str(tmp_path / "cache"), **options)
    data.setup()
    return data


def test_a_bucket_gives_the_tokens_and_documents_of_each_format(server, tmp_path):
    folder = tmp_path / "local"
    folder.mkdir()
    written.megatron(folder, DOCUMENTS)
    written.datatrove(folder, DOCUMENTS)
    written.litdata(folder / "l", DOCUMENTS)
    written.mds(folder / "s", DOCUMENTS)
    upload(folder)
    for url, times in {"m.bin": 1, "*.ds": 1, "l": 1, "s/": 1, "": 2}.items():
        stream = opened(tmp_path, f"s3://tokens/local/{url}").streams["train"]
        assert stream.read(0, len(stream)).tolist() == np.concatenate(DOCUMENTS * times).tolist(), url
        assert document_ends(stream)[: len(ENDS)].tolist() == ENDS


def test_a_file_has_the_same_version_by_its_name_and_by_a_glob(server, tmp_path):
    (tmp_path / "local").mkdir()
    written.datatrove(tmp_path / "local", DOCUMENTS)
    upload(tmp_path / "local")
    cache = BlockCache(tmp_path / "cache", 1)
    (alone,), (found,) = (find_remote(f"s3://tokens/local/{name}", cache, list) for name in ("000.ds", "*.ds"))
    assert alone == found
    assert alone.version
    assert alone.beside("000.ds.index").size == 8 * len(DOCUMENTS)
    assert alone.beside("001.ds.index") is None


def test_connections_that_drop_in_mid_read_lose_nothing(server, tmp_path):
    (tmp_path / "local").mkdir()
    tokens = np.arange(5 * BLOCK_BYTES // 8)
    written.datatrove(tmp_path / "local", [tokens])
    upload(tmp_path / "local")
    stream = opened(tmp_path, "s3://tokens/local/*.ds").streams["train"]
    server.drops = 3
    assert stream.read(0, len(tokens)).tolist() == tokens.tolist()
    assert server.dropped == 3


def test_connections_that_always_drop_are_one_line(server, tmp_path):
    (tmp_path / "local").mkdir()
    written.datatrove(tmp_path / "local", DOCUMENTS)
    upload(tmp_path / "local")
    stream = opened(tmp_path, "s3://tokens/local/*.ds").streams["train"]
    server.drops = 1000
    with pytest.raises(UsageError, match=r"^s3://tokens/local/000.ds: not read in 4 tries \(.+\); go on") as raised:
        stream.read(0, 10)
    assert "\n" not in str(raised.value)


def test_a_bucket_that_refuses_or_is_not_there_is_one_line(server, tmp_path):
    (tmp_path / "local").mkdir()
    written.datatrove(tmp_path / "local", DOCUMENTS)
    upload(tmp_path / "local")
    stream = opened(tmp_path, "s3://tokens/local/*.ds").streams["train"]
    with pytest.raises(
        UsageError, match=r"^(train='s3://none/x.bin': matches no file|s3://none/x.bin: it is not there)"
    ):
        opened(tmp_path, "s3://none/x.bin")
    with server.asking_for_rights():
        for url in ("s3://tokens/local/000.ds", "s3://tokens/local/*.ds", "s3://tokens/local"):
            with pytest.raises(
                UsageError, match=r"^s3://tokens/local.*: access is refused \(.+\); check the credentials"
            ):
                opened(tmp_path, url)
        with pytest.raises(
            UsageError, match=r"^s3://tokens/local/000.ds: access is refused \(.+\); check the credentials"
        ):
            stream.read(0, 10)


@pytest.mark.long
def test_workers_that_are_forked_from_a_process_with_connections_give_the_same_batches(server, tmp_path):
    (tmp_path / "local").mkdir()
    written.datatrove(tmp_path / "local", [np.arange(5 * BLOCK_BYTES // 8)])
    upload(tmp_path / "local")

    def batches(**options):
        data = opened(tmp_path, "s3://tokens/local/*.ds", micro_batch_size=4, **options)
        return [batch["input_ids"] for batch, _ in zip(data.train_dataloader(), range(12), strict=False)]

    assert all(map(torch.equal, batches(num_workers=2, cache_gib=2**-9), batches()))
