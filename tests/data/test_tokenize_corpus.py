"""Text becomes shards part by part: the same ones for each number of processes, and after kills."""

import hashlib
import json
import os
import random
import signal
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from lightning_tricks._core.errors import UsageError
from lightning_tricks.commands import prepare
from lightning_tricks.data import ShardWriter, TextData, open_shard, tokenize_corpus
from lightning_tricks.data.corpus import text_files
from lightning_tricks.data.text_encoder import TextEncoder
from lightning_tricks.data.tokenize_corpus import TokenizedCorpus

WORDS = ("the", "a", "cat", "sat", "on", "mat", "looked", "at", "moon", "while", "rain", "fell", "naïve", "漢字", "12")


def write_rows(path: Path, seed: int, number: int) -> Path:
    draw = random.Random(seed)
    texts = [" ".join(draw.choices(WORDS, k=draw.randrange(1, 60))) for _ in range(number)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """Three files of rows, in 10 parts of about 5 KB."""
    monkeypatch.setattr("lightning_tricks.data.corpus._SMALLEST_PART", 5_000)
    monkeypatch.setattr("lightning_tricks.data.corpus._LARGEST_PART", 5_000)
    (tmp_path / "rows").mkdir()
    for number, name in enumerate(("a.jsonl", "b.ndjson", "c.jsonl")):
        write_rows(tmp_path / "rows" / name, number, 30 if number == 1 else 150)
    return tmp_path / "rows"


def make(files: object, cache: Path, **options) -> TextData:
    options = {"vocab_size": 300, "seq_len": 16, "val_fraction": 0.2} | options
    return TextData(str(files), cache_dir=str(cache), **options)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def on_cores(monkeypatch, cores: int) -> None:
    monkeypatch.setattr(tokenize_corpus, "available_cores", lambda: cores)


@pytest.fixture
def unbroken(rows, tmp_path, monkeypatch):
    """The folder that one process makes."""
    on_cores(monkeypatch, 1)
    data = make(rows, tmp_path / "unbroken")
    data.setup()
    return data.folder


def test_parts_give_the_stream_that_the_whole_gives(rows, unbroken, tmp_path):
    corpus = text_files([str(rows)], "text")
    assert len(corpus.parts) >= 10
    object.__setattr__(corpus, "parts", ())
    TokenizedCorpus(corpus, tmp_path / "whole", None, 300, 0.2).build()
    assert names(tmp_path / "whole") == [
        *("meta.json", "tokenizer.json", "train_000000.bin", "val_000000.bin", "val_byte_corrections.npy")
    ]
    for split in ("train", "val"):
        shards = [open_shard(path) for path in sorted(unbroken.glob(f"{split}_*.bin"))]
        assert len(shards) == len(text_files([str(rows)], "text").parts)
        assert np.concatenate(shards).tolist() == open_shard(tmp_path / "whole" / f"{split}_000000.bin").tolist()
    meta, whole = (json.loads((folder / "meta.json").read_text()) for folder in (unbroken, tmp_path / "whole"))
    for split in ("train", "val"):
        assert {k: v for k, v in meta[split].items() if k != "sha256"} == {
            k: v for k, v in whole[split].items() if k != "sha256"
        }


def test_a_part_of_several_shards_and_one_without_a_split_are_numbered_through(rows, unbroken, tmp_path, monkeypatch):
    on_cores(monkeypatch, 1)
    monkeypatch.setattr(tokenize_corpus, "ShardWriter", partial(ShardWriter, shard_tokens=700))
    data = make(rows, tmp_path / "cache", val_fraction=0.004)
    data.setup()
    meta = data.meta
    shards = {split: [name for name in meta["shards"] if name.startswith(split)] for split in ("train", "val")}
    assert len(shards["train"]) > 2 * len(data.corpus.parts) > 2 * len(shards["val"])
    for split, found in shards.items():
        assert found == [f"{split}_{number:06d}.bin" for number in range(len(found))]
    threshold = tokenize_corpus.validation_threshold(data.corpus.documents(), 0.004)
    training = [one for one in data.corpus.documents() if tokenize_corpus.document_hash(one) >= threshold]
    assert data.training_text() == "".join(training).encode()


def test_the_record_has_the_hash_of_each_shard(unbroken):
    meta = json.loads((unbroken / "meta.json").read_text())
    assert meta["shards"] == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in unbroken.glob("*.bin")
    }


def test_where_the_tokenizer_changes_validation_text_its_offsets_follow_the_parts(rows, tmp_path, monkeypatch):
    on_cores(monkeypatch, 1)
    make(rows, tmp_path / "first").prepare_data()
    spec = json.loads(next((tmp_path / "first").glob("text-*/tokenizer.json")).read_text())
    spec["normalizer"] = {"type": "Replace", "pattern": {"String": "naïve"}, "content": "naive"}
    (tmp_path / "other.json").write_text(json.dumps(spec))
    data = make(rows, tmp_path / "cache", tokenizer=str(tmp_path / "other.json"))
    data.setup()
    corrections = np.load(data.folder / "val_byte_corrections.npy")
    ids = data.streams["val"].read(0, len(data.streams["val"]))
    ends = np.flatnonzero(ids == data.eot_id)
    threshold = tokenize_corpus.validation_threshold(data.corpus.documents(), 0.2)
    held_out = [text for text in data.corpus.documents() if tokenize_corpus.document_hash(text) < threshold]
    expected = [[int(end), text.count("ï")] for end, text in zip(ends, held_out, strict=True) if "ï" in text]
    assert corrections.tolist() == expected
    assert len(expected) > 20


@pytest.mark.long
def test_processes_and_ranks_in_any_order_make_the_same_bytes_as_one_process(rows, unbroken, tmp_path, monkeypatch):
    on_cores(monkeypatch, 3)
    data = make(rows, tmp_path / "processes")
    data.setup()
    assert content(data.folder) == content(unbroken)
    assert names(data.cache_dir) == ["known_content.json", data.folder.name]
    on_cores(monkeypatch, 1)
    for world in (2, 5, 40):
        data = make(rows, tmp_path / f"world_{world}")
        order = random.Random(world).sample(range(world), world)
        missing = [data.prepare_share(rank, world) for rank in order]
        assert missing == sorted(missing, reverse=True)
        assert missing[-1] == 0
        assert content(data.folder) == content(unbroken)
        assert names(data.cache_dir) == ["known_content.json", data.folder.name]


@pytest.mark.long
def test_prepares_at_the_same_time_are_safe_and_make_the_same_bytes(rows, unbroken, tmp_path):
    cache = tmp_path / "cache"
    children = []
    for _ in range(4):
        if (child := os.fork()) == 0:
            code = 1
            try:
                tokenize_corpus.available_cores = lambda: 2
                make(rows, cache).setup()
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    (folder,) = cache.glob("text-*")
    assert content(folder) == content(unbroken)
    assert names(cache) == ["known_content.json", folder.name]


def killed_at(document: int, started: Path, data: TextData, cores: int, link: int = -1) -> int:
    """Prepare in a process that is killed where it comes to a document, or to a link of its last step; its status.

    With several cores, a process that encodes kills the one that prepares.
    """
    if (child := os.fork()) == 0:
        os.setsid()
        seen, links = Counter[str](), Counter[str]()
        real_encode, real_write, real_link = TextEncoder.encode_all, TokenizedCorpus._write_part, os.link
        preparing = os.getpid()

        def encode_all(self, documents, threads):
            for one in real_encode(self, documents, threads):
                seen["documents"] += 1
                if seen["documents"] == document:
                    os.kill(preparing, signal.SIGKILL)
                    signal.pause()  # a copy ends without its own doing
                yield one

        def write_part(self, number, *rest):
            with started.open("a") as file:
                file.write(f"{number}\n")
            real_write(self, number, *rest)

        def counted_link(*paths):
            links["links"] += 1
            if links["links"] == link:
                os.kill(preparing, signal.SIGKILL)
            real_link(*paths)

        TextEncoder.encode_all, TokenizedCorpus._write_part, os.link = encode_all, write_part, counted_link
        TextEncoder.compare = lambda self, documents: None
        tokenize_corpus.available_cores = lambda: cores
        code = 1
        try:
            data.prepare_data()
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    with suppress(ProcessLookupError):
        while True:  # the copies of a killed process end with it
            os.killpg(child, 0)
    return status


@pytest.mark.long
@pytest.mark.parametrize("cores", [1, 2])
def test_twenty_kills_cost_at_most_the_part_in_work_and_end_with_the_same_bytes(rows, unbroken, tmp_path, cores):
    data, started = make(rows, tmp_path / "cache"), tmp_path / "started"
    started.touch()
    draw = random.Random(cores)
    moments = [draw.randrange(1, 40 // cores) for _ in range(18)]  # some before a part ends, and some after
    statuses = [killed_at(document, started, data, cores) for document in moments]
    statuses += [killed_at(10**9, started, data, cores, link) for link in (7, 3)]
    if cores == 1:  # else the other copy may have made the last part before it was ended
        assert statuses == [signal.SIGKILL] * 20
        assert not data.folder.exists()
        learned = data.cache_dir / f".{data.folder.name}.unfinished" / "tokenizer" / "tokenizer.json"
        assert learned.read_bytes() == (unbroken / "tokenizer.json").read_bytes()
    assert statuses[0] == signal.SIGKILL
    assert killed_at(10**9, started, data, cores) == 0
    assert content(data.folder) == content(unbroken)
    assert names(data.cache_dir) == ["known_content.json", data.folder.name]
    parts = len(data.corpus.parts)
    assert len(set(started.read_text().split())) == parts
    assert len(started.read_text().split()) - parts <= 20 * cores


@pytest.mark.long
def test_a_killed_process_of_several_is_one_line_and_what_is_finished_is_kept(rows, unbroken, tmp_path, monkeypatch):
    on_cores(monkeypatch, 2)
    real = TokenizedCorpus._write_part

    def killed(self, number, *rest):
        if number == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        real(self, number, *rest)

    data = make(rows, tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(TokenizedCorpus, "_write_part", killed)
        with pytest.raises(UsageError, match=r"^prepare: a process that encodes was killed.*; start again"):
            data.prepare_data()
    unfinished = data.cache_dir / f".{data.folder.name}.unfinished"
    assert any(name.startswith("part_") for name in names(unfinished))
    make(rows, tmp_path / "cache").prepare_data()
    assert content(data.folder) == content(unbroken)


@pytest.mark.long
def test_what_a_part_refuses_is_said_by_the_process_that_prepares(rows, unbroken, tmp_path, monkeypatch):
    on_cores(monkeypatch, 2)
    monkeypatch.setattr(TextEncoder, "compare", lambda self, documents: None)  # which reads some text too
    with (rows / "c.jsonl").open("a") as file:
        file.write("no row\n")
    with pytest.raises(UsageError, match=r"c.jsonl, line \d+ after byte [\d,]+ is not JSON"):
        make(rows, tmp_path / "cache", tokenizer=str(unbroken / "tokenizer.json")).prepare_data()


def test_all_held_out_text_begins_with_one_end_of_text_however_many_parts(rows, unbroken, tmp_path, monkeypatch):
    on_cores(monkeypatch, 1)
    data = TextData.held_out(str(rows), str(unbroken / "tokenizer.json"), seq_len=16, cache_dir=str(tmp_path / "c"))
    data.setup()
    stream = data.streams["val"].read(0, len(data.streams["val"]))
    assert stream[0] == data.eot_id
    documents = len(list(data.corpus.documents()))
    assert (stream == data.eot_id).sum() == documents + 1
    assert sum(int(batch["n_bytes"].sum()) for batch in data.val_dataloader()) == data.meta["val"]["bytes"]


# -- progress


def test_a_log_gets_a_line_of_progress_now_and_then(rows, tmp_path, monkeypatch, capsys):
    on_cores(monkeypatch, 1)
    monkeypatch.setattr(tokenize_corpus, "_LINE_SECONDS", 0)
    data = make(rows, tmp_path / "cache")
    data.prepare_data()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("Tokenizing: ")]
    assert len(said) > 5
    assert all("B/s, " in line and line.endswith(" left") for line in said)


# -- the command


class Shares:
    """Data with a share of text for each rank; others make the last two parts."""

    def __init__(self) -> None:
        self.calls = []

    def prepare_share(self, rank: int, world: int) -> int:
        self.calls.append((rank, world))
        return 2 if rank < world - 1 else 0

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(stage)


def test_prepare_makes_a_share_and_sets_up_only_what_is_whole(capsys):
    data = Shares()
    prepare.run(None, data, None, rank=0, world=3)
    assert data.calls == [(0, 3)]
    assert capsys.readouterr().out == "The share of rank 0 of 3 is tokenized; 2 parts of other ranks are missing\n"
    prepare.run(None, data, None, rank=2, world=3)
    prepare.run(None, data, None)
    assert data.calls[1:] == [(2, 3), "prepare_data", "fit", "prepare_data", "fit"]


@pytest.mark.parametrize(
    ("data", "rank", "world", "message"),
    [
        (Shares(), 3, 3, "^rank=3, world=3: ranks count from 0 to world - 1"),
        (Shares(), -1, 3, "^rank=-1, world=3: "),
        (Shares(), 0, 0, "^rank=0, world=0: "),
        (object(), 0, 2, "^world=2: object has no shares of text; leave it out$"),
        (None, 0, 1, "^prepare: the recipe has no data$"),
    ],
)
def test_ranks_that_cannot_be_are_refused(data, rank, world, message):
    with pytest.raises(UsageError, match=message):
        prepare.run(None, data, None, rank=rank, world=world)
