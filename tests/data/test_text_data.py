"""TextData: from text to batches that stand for exactly that text."""

import errno
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from harness.models import Small
from harness.runs import trainer_with
from hypothesis import given
from hypothesis import strategies as st

from lightning_tricks._core.errors import UsageError
from lightning_tricks._host.process import process_tag
from lightning_tricks.data import TextData, open_shard
from lightning_tricks.data.content import build_once
from lightning_tricks.data.corpus import Corpus, standard_library
from lightning_tricks.data.tokenize_corpus import document_hash, validation_threshold
from lightning_tricks.data.tokenizer import END_OF_TEXT, train_bpe


@pytest.fixture
def make(story, tmp_path):
    """TextData on the story, small and with its own cache."""

    def build(**options) -> TextData:
        options = {"files": str(story), "vocab_size": 400, "seq_len": 16, "val_fraction": 0.2} | options
        return TextData(cache_dir=str(tmp_path / "cache"), **options)

    return build


def first_rows(data: TextData, batches: int = 3) -> list:
    loader = iter(data.train_dataloader())
    return [next(loader)["input_ids"].tolist() for _ in range(batches)]


def test_the_shards_hold_exactly_the_text(make, story):
    data = make()
    data.setup()
    train, val = data.training_text(), data.validation_text()
    assert sorted(train + val) == sorted(story.read_bytes())
    assert 0.05 < len(val) / len(train + val) < 0.4
    pieces = list(data.corpus.documents())
    assert all((piece.encode() in train) != (piece.encode() in val) for piece in pieces)


def test_the_record_says_what_was_tokenized(make, story):
    data = make()
    data.prepare_data()
    data.setup()
    meta = json.loads((data.folder / "meta.json").read_text())
    for split, text in (("train", data.training_text()), ("val", data.validation_text())):
        assert meta[split]["sha256"] == hashlib.sha256(text).hexdigest()
        assert meta[split]["bytes"] == len(text)
        assert meta[split]["tokens"] == len(open_shard(data.folder / f"{split}_000000.bin"))
        ids = open_shard(data.folder / f"{split}_000000.bin")
        assert meta[split]["documents"] == (ids == data.eot_id).sum()
        assert ids[-1] == data.eot_id
    assert meta["python"] == ".".join(map(str, sys.version_info[:3]))
    assert (meta["vocab_size"], meta["dtype"]) == (400, "uint16")
    assert str(story) in meta["source"]
    assert data.vocab_size == 400


def test_validation_counts_each_byte_of_the_text_but_those_of_the_first_token(make):
    data = make(micro_batch_size=3)
    data.setup()
    batches = list(data.val_dataloader())
    assert len(batches) == len(data.val_dataloader())
    counted = torch.cat([batch["labels"].flatten() for batch in batches])
    ids = open_shard(data.folder / "val_000000.bin")
    assert counted[counted != -100].tolist() == [i for i in ids[1:].tolist() if i != data.eot_id]
    total = sum(int(batch["n_bytes"].sum()) for batch in batches)
    assert total == len(data.validation_text()) - len(data.token_texts[ids[0]])


def test_training_batches_are_dense_rows_of_the_training_text(make):
    data = make(micro_batch_size=5)
    data.setup()
    text = data.training_text()
    loader = iter(data.train_dataloader())
    for _ in range(10):
        batch = next(loader)
        assert batch["input_ids"].shape == batch["labels"].shape == (5, 16)
        assert (batch["labels"] >= 0).all()
        for row in batch["input_ids"].tolist():
            assert b"".join(data.token_texts[i] for i in row) in text


def test_a_second_run_finds_the_shards(make, capsys):
    make().prepare_data()
    said = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in said] == ["Learning", "Tokenizing"]
    data = make()
    data.prepare_data()
    data.setup()
    assert capsys.readouterr().err == ""
    assert names(data.cache_dir) == ["known_content.json", data.folder.name]
    assert data.folder.stat().st_mode & 0o777 == 0o755  # others may read a shared cache


@pytest.mark.parametrize(
    "change", [{"vocab_size": 300}, {"val_fraction": 0.3}, {"files": __file__}, {"text_field": "body"}]
)
def test_another_text_tokenizer_or_split_has_its_own_shards(make, change):
    assert make(seq_len=8, micro_batch_size=1, seed=9, num_workers=1, document_ids=True).folder == make().folder
    assert make(**change).folder != make().folder


@pytest.mark.long
def test_loading_draws_nothing_from_the_run_s_random_numbers(make):
    data = make(num_workers=1)
    data.setup()
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    first_rows(data)
    list(data.val_dataloader())
    assert torch.rand(1) == expected


def test_a_document_cannot_inject_an_end_of_text(tmp_path):
    rows = [{"text": f"{n} says {END_OF_TEXT} and goes on"} for n in range(50)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = TextData(str(tmp_path / "a.jsonl"), vocab_size=300, seq_len=8, cache_dir=str(tmp_path / "cache"))
    data.setup()
    ids = np.concatenate([open_shard(path) for path in data.folder.glob("*.bin")])
    assert (ids == data.eot_id).sum() == 50
    assert (data.training_text() + data.validation_text()).count(END_OF_TEXT.encode()) == 50


def test_the_tokenizer_is_learned_from_training_documents_only(make):
    data = make()
    data.setup()
    training = data.training_text().decode()
    learned = train_bpe([text for text in data.corpus.documents() if text in training], 400)
    assert json.loads((data.folder / "tokenizer.json").read_text()) == json.loads(learned.to_str())
    everything = train_bpe(data.corpus.documents(), 400)
    assert everything.to_str() != learned.to_str()


def test_a_tokenizer_is_learned_from_no_more_text_than_needed(make, monkeypatch):
    monkeypatch.setattr("lightning_tricks.data.tokenize_corpus.BPE_BYTES", 1000)
    data = make()
    data.setup()
    first = next(text for text in data.corpus.documents() if text in data.training_text().decode())
    assert len(first) > 1000
    assert json.loads((data.folder / "tokenizer.json").read_text()) == json.loads(train_bpe([first], 400).to_str())


def test_a_given_tokenizer_is_used_and_sets_the_vocabulary(make, tmp_path):
    given = train_bpe(["another text, another tokenizer"] * 5, 270)
    given.save(str(tmp_path / "given.json"))
    data = make(tokenizer=str(tmp_path / "given.json"))
    assert data.vocab_size == 270
    data.setup()
    assert data.vocab_size == data.meta["vocab_size"] == len(data.token_texts) == 270
    assert json.loads((data.folder / "tokenizer.json").read_text()) == json.loads(given.to_str())


def test_a_tokenizer_over_65536_tokens_gets_uint32_shards(make, tmp_path):
    spec = json.loads(train_bpe(["a text"], 300).to_str())
    del spec["model"]["vocab"][END_OF_TEXT]
    spec["model"]["vocab"]["</s>"] = 70_000
    spec["added_tokens"][0] |= {"id": 70_000, "content": "</s>"}
    (tmp_path / "large.json").write_text(json.dumps(spec))
    data = make(tokenizer=str(tmp_path / "large.json"))
    data.setup()
    assert (data.vocab_size, data.eot_id) == (70_001, 70_000)
    assert open_shard(data.folder / "train_000000.bin").dtype == np.uint32
    assert int(open_shard(data.folder / "train_000000.bin")[-1]) == 70_000
    assert data.meta["dtype"] == "uint32"


def test_the_summary_is_one_line_with_the_figures(make, story):
    data = make()
    data.setup()
    line = data.data_summary()
    documents = data.meta["train"]["documents"] + data.meta["val"]["documents"]
    assert "\n" not in line
    assert str(data) == line
    assert str(make()) == "TextData"
    ratio = data.meta["train"]["bytes"] / data.meta["train"]["tokens"]
    for part in (str(story), f"{documents} documents", "0.02 MB", f" {ratio:.2f} bytes a token", str(data.folder)):
        assert part in line


def test_it_tokenizes_the_standard_library_with_no_arguments(tmp_path, monkeypatch):
    # the real corpus, cut down: the whole takes some seconds
    corpus = standard_library()
    few = [text for _, text in zip(range(40), corpus.documents(), strict=False)]
    monkeypatch.setattr(
        "lightning_tricks.data.text_data.standard_library",
        lambda: Corpus(corpus.description, corpus.identity, None, lambda: ((None, text) for text in few)),
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data = TextData()
    data.setup()
    assert data.folder.parent == tmp_path / "lightning_tricks"
    assert "the standard library of Python" in data.data_summary()
    assert next(iter(data.train_dataloader()))["input_ids"].shape == (8, 256)


# -- bad input


def test_a_full_disk_names_the_folder_and_leaves_only_the_tokenizer_that_was_learned(make, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("lightning_tricks.data.shards.write_header", full)
    data = make()
    with pytest.raises(UsageError, match=r"^cache_dir: cannot write to .*cache.* \(No space left on device\)"):
        data.prepare_data()
    assert names(data.cache_dir) == [f".{data.folder.name}.unfinished", "known_content.json"]
    assert names(data.cache_dir / f".{data.folder.name}.unfinished") == ["tokenizer"]


def test_a_damaged_cache_is_named_with_the_remedy(make):
    data = make()
    data.prepare_data()
    shard = data.folder / "train_000000.bin"
    raw = shard.read_bytes()
    meta = data.folder / "meta.json"
    other = train_bpe(["something else"], 300)
    for damage in (
        lambda: shard.write_bytes(raw[:-2]),
        shard.unlink,
        lambda: other.save(str(data.folder / "tokenizer.json")),
        lambda: meta.write_text("[]"),
        meta.unlink,
    ):
        shard.write_bytes(raw)
        damage()
        with pytest.raises(UsageError, match=rf"^cache_dir: {data.folder} is damaged \(.+\); delete that folder$"):
            make().setup()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 0}, "^seq_len=0: it must be a whole number of at least 1$"),
        ({"micro_batch_size": 0}, "^micro_batch_size=0: it must be a whole number of at least 1$"),
        ({"seq_len": None}, "^seq_len=None: it must be a whole number of at least 1$"),
        ({"num_workers": -1}, "^num_workers=-1: it must be a whole number of at least 0$"),
        ({"val_fraction": 0.0}, "^val_fraction=0.0: it must lie between 0 and 1$"),
        ({"val_fraction": 1.0}, "^val_fraction=1.0"),
        ({"vocab_size": 256}, "^vocab_size=256: 256 bytes and end-of-text need at least 257$"),
        ({"hf_dataset": "a/b"}, "^files='.*' and hf_dataset='a/b': give one of them$"),
        ({"files": []}, r"^files=\[\]: name at least one"),
        ({"tokenizer": "none.json"}, r"^tokenizer='none.json': cannot be read"),
    ],
)
def test_bad_options_are_refused_at_once(make, options, message):
    with pytest.raises(UsageError, match=message):
        make(**options)


# -- under Lightning


class Loss(Small):
    """A module that knows nothing of ours."""

    def __init__(self):
        super().__init__(net=torch.nn.Embedding(400, 400), act=Loss.see)
        self.seen = []

    def see(self, batch):
        self.seen.append(batch["input_ids"].tolist())

    def loss_of(self, batch):
        return torch.nn.functional.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def saved_at_2(data: TextData, folder: Path) -> None:
    loop = trainer_with(max_steps=2)
    loop.fit(Loss(), data)
    loop.save_checkpoint(folder / "a.ckpt")


def set_up(data: TextData) -> TextData:
    data.setup()
    return data


@pytest.mark.filterwarnings("ignore")
def test_another_seed_on_resume_is_told_of_and_the_recipe_wins(make, tmp_path):
    first = make(seed=0)
    saved_at_2(first, tmp_path)
    module = Loss()
    with pytest.warns(UserWarning, match=r"other data settings \(seed 0 -> 1\); the recipe's are used"):
        trainer_with(max_steps=4).fit(module, make(seed=1), ckpt_path=tmp_path / "a.ckpt")
    rows = [first_rows(set_up(make(seed=seed)), 4) for seed in (0, 1)]
    assert module.seen == rows[1][2:] != rows[0][2:]
    other = make(val_fraction=0.4, tokenizer=str(first.folder / "tokenizer.json"))  # learned anew, it would be another
    with pytest.warns(UserWarning, match=rf"\(data {first.folder.name} -> {other.folder.name}\)"):
        trainer_with(max_steps=4).fit(Loss(), other, ckpt_path=tmp_path / "a.ckpt")


def test_outside_of_a_run_there_is_no_position_to_save_and_no_tokens_lie_in_no_file(make):
    data = set_up(make())
    assert data.state_dict() == {}
    assert data.source_files([]) == []


def write_two(folder: Path) -> None:
    (folder / "a").write_text("a")
    (folder / "b").write_text("b")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def killed_build(folder: Path) -> Path:
    """What a build in a process of its own leaves that is killed in the middle of it."""
    before = set(folder.parent.iterdir())
    if (child := os.fork()) == 0:
        build_once(folder, lambda staging: (write_two(staging), os.kill(os.getpid(), signal.SIGKILL)))
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    (left,) = set(folder.parent.iterdir()) - before
    return left


@pytest.mark.long
@pytest.mark.parametrize("later", ["other", "there already"])
def test_what_a_killed_build_left_is_removed_by_the_next_build_of_any_folder(tmp_path, later):
    if later == "there already":
        build_once(tmp_path / later, write_two)
    left = killed_build(tmp_path / "set")
    assert not (tmp_path / "set").exists()
    assert names(left) == ["a", "b"]
    build_once(tmp_path / later, write_two)
    assert names(tmp_path) == [later]
    assert names(tmp_path / later) == ["a", "b"]


@pytest.mark.long
def test_a_staging_folder_of_a_live_process_another_host_or_an_unknown_name_stays(tmp_path):
    tag = process_tag()
    assert tag is not None
    system, process, started = tag.split("-")
    dead = killed_build(tmp_path / "set").name.split(".")[2].split("-")[1]
    kept = [
        f".set.{tag}.abc",
        f".set.{'0' * len(system)}-{dead}-1.abc",  # of another host
        f".set.{system}-{os.getppid()}-0.abc",  # where a system does not tell when processes started
        ".set.abc",
        f"set.{system}-{dead}-1.abc",
    ]
    swept = [f".set.{system}-{dead}-1.abc", f".text-12.{system}-{process}-{int(started) + 1}.abc"]
    long_ago = time.time() - 30 * 24 * 3600
    for name in kept + swept:
        (tmp_path / name).mkdir()
        (tmp_path / name / "train_000000.bin").touch()
        os.utime(tmp_path / name, (long_ago, long_ago))
    (tmp_path / f".known_content.json.{system}-{dead}-1.abc").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f".link.{system}-{dead}-1.abc").symlink_to(tmp_path / "elsewhere")
    build_once(tmp_path / "set", write_two)
    found = [name for name in names(tmp_path) if not name.startswith(".link")]
    assert found == sorted([*kept, "set", "elsewhere"])


def test_of_two_builds_at_once_the_first_to_finish_wins(tmp_path):
    def build(folder: Path) -> None:
        write_two(folder)
        build_once(tmp_path / "set", lambda other: (other / "winner").touch())

    build_once(tmp_path / "set", build)
    assert names(tmp_path) == ["set"]
    assert names(tmp_path / "set") == ["winner"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"^cache_dir: cannot write to .*file/cache \(Not a directory\); set"):
        build_once(tmp_path / "file" / "cache" / "set", write_two)


def held_out(documents, val_fraction):
    threshold = validation_threshold(documents, val_fraction)
    return {document for document in documents if document_hash(document) < threshold}


def test_about_the_asked_share_is_held_out():
    documents = [f"document {n}" for n in range(4000)]
    assert len(held_out(documents, 0.1)) == pytest.approx(400, rel=0.15)


@given(st.lists(st.text(), min_size=30, max_size=60, unique=True), st.randoms())
def test_order_does_not_matter(documents, random):
    shuffled = documents.copy()
    random.shuffle(shuffled)
    assert held_out(documents, 0.2) == held_out(shuffled, 0.2)


@given(st.sets(st.text(), min_size=2, max_size=20), st.floats(0.001, 0.999))
def test_both_sides_get_a_document(documents, val_fraction):
    assert 0 < len(held_out(sorted(documents), val_fraction)) < len(documents)


def test_reading_stops_once_both_sides_have_a_document():
    read = []
    validation_threshold((read.append(n) or f"document {n}" for n in range(100_000)), 0.1)
    assert len(read) < 200


@pytest.mark.parametrize(("documents", "found"), [([], "no text"), (["one"], "one document"), (["a", "a"], "one doc")])
def test_fewer_than_two_documents_cannot_be_split(documents, found):
    with pytest.raises(UsageError, match=f"^files: {found}"):
        validation_threshold(documents, 0.1)


# -- a text is its content


def test_a_file_is_read_for_its_hash_again_only_after_a_change_of_its_times(make, story, monkeypatch):
    make().cache_dir.mkdir()  # as `prepare` does
    read = []
    real = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, name: read.append(file.name) or real(file, name))
    folders = {make().folder for _ in range(3)}
    assert read == [str(story)]
    os.utime(story, (1, 1))
    folders |= {make().folder for _ in range(3)}
    assert read == [str(story)] * 2
    added = story.with_name("added.txt")
    added.write_text("more")
    _ = make(files=[str(story), str(added)]).folder
    assert read[2:] == [str(added)]
    assert len(folders) == 1


@pytest.mark.parametrize(
    "junk", [b"", b"[", b"[]", b'{"files": 3}', b'{"files": {"%s": [1]}}', b"\xff", b"[" * 100_000]
)
def test_a_damaged_record_of_hashes_costs_only_time(make, story, junk):
    first = make()
    first.cache_dir.mkdir()
    expected = first.folder
    (first.cache_dir / "known_content.json").write_bytes(junk.replace(b"%s", str(story).encode()))
    assert make().folder == expected


def test_a_cache_that_cannot_be_written_leaves_no_record_and_the_same_identity(make, monkeypatch):
    make().cache_dir.mkdir()
    expected = make().folder

    def refuse(*args, **options):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    (expected.parent / "known_content.json").unlink()
    assert make().folder == expected
    assert not (expected.parent / "known_content.json").exists()


@pytest.mark.filterwarnings("ignore", "error:The checkpoint's batches")
def test_a_resume_on_touched_text_warns_of_nothing_and_keeps_the_history_of_batches(make, story, tmp_path):
    saved_at_2(make(), tmp_path)
    os.utime(story, (1, 1))
    data = make()
    module = Loss()
    trainer_with(max_steps=4).fit(module, data, ckpt_path=tmp_path / "a.ckpt")
    assert module.seen == first_rows(set_up(make()), 4)[2:]
    (span,) = data.state_dict()["history"]
    assert (span["step"], span["sample"], span["rows"]) == (0, 0, 8)
