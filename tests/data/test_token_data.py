"""TokenData: shards that somebody wrote, and what is wrong with them if anything is."""

import re
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness.models import Small
from harness.runs import fit, trainer_with
from harness.windows import train_batches

from lightning_tricks._core.errors import UsageError
from lightning_tricks.data import ShardWriter, TextData, TokenData
from lightning_tricks.data.base import Loader, TokenIdCheck
from lightning_tricks.data.cursor import FirstRows
from lightning_tricks.data.shards import TokenStream
from lightning_tricks.data.tokenizer import train_bpe


@pytest.fixture
def text_data(story, tmp_path):
    data = TextData(str(story), vocab_size=400, seq_len=16, val_fraction=0.2, cache_dir=str(tmp_path / "cache"))
    data.setup()
    return data


def test_text_data_s_shards_give_text_data_s_batches(text_data):
    folder = text_data.folder
    data = TokenData(
        train=str(folder / "train_*.bin"),
        val=str(folder / "val_*.bin"),
        tokenizer=str(folder / "tokenizer.json"),
        seq_len=16,
    )
    data.setup()
    for loader in ("train_dataloader", "val_dataloader"):
        ours, theirs = (next(iter(getattr(d, loader)())) for d in (data, text_data))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (data.vocab_size, data.eot_id) == (400, text_data.eot_id)
    assert data.validation_text() == text_data.validation_text()


def test_several_shards_are_one_stream_in_sorted_order(tmp_path):
    with ShardWriter(tmp_path, "train", 2000, shard_tokens=300) as writer:
        writer.append(np.arange(1000))
    data = TokenData(train=str(tmp_path / "train_*.bin"), seq_len=9, micro_batch_size=4, vocab_size=1000)
    data.setup()
    rows = torch.cat([batch["input_ids"] for batch, _ in zip(data.train_dataloader(), range(27), strict=False)])
    assert torch.equal(rows - rows[:, :1], torch.arange(9).expand_as(rows))  # also across the seams
    assert len(set(rows[:, 0].tolist())) == 108
    assert data.data_summary() == f"1,000 train tokens in 4 shard(s); {tmp_path}"


def test_a_file_is_found_by_its_own_name_whatever_a_pattern_would_make_of_it(tmp_path):
    with ShardWriter(tmp_path, "run [1]", 64) as writer:
        writer.append(np.arange(64))
    data = TokenData(train=tmp_path / "run [1]_000000.bin", seq_len=9, vocab_size=64)
    data.setup()
    assert data.data_summary() == f"64 train tokens in 1 shard(s); {tmp_path}"


@pytest.mark.filterwarnings("ignore")
def test_other_tokens_in_files_of_the_same_names_and_sizes_are_told_of_on_resume(write_shard, tmp_path):
    def run(steps, ckpt_path=None):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            data = TokenData(train=str(tmp_path / "train_000000.bin"), seq_len=8, micro_batch_size=2)
            done = fit(Small(loss=lambda module, batch: module.net[0].weight.sum()), data=data, ckpt_path=ckpt_path,
                       max_steps=steps)  # fmt: skip
        return done.trainer, [str(one.message) for one in caught if "other data settings" in str(one.message)]

    write_shard(range(100))
    run(2)[0].save_checkpoint(tmp_path / "two.ckpt")
    assert run(4, tmp_path / "two.ckpt")[1] == []
    write_shard([*range(99), 7])
    (line,) = run(4, tmp_path / "two.ckpt")[1]
    assert re.search(r"other data settings \(content \w{16} -> \w{16}\); the recipe's are used", line)


def test_without_validation_shards_there_is_no_validation(write_shard):
    data = TokenData(train=str(write_shard(range(100))), seq_len=8)
    data.setup()
    assert data.val_dataloader() == []
    data.token_texts = [b"x"] * 256
    with pytest.raises(UsageError, match=r"^val=None: there is no validation text; give the validation shards$"):
        data.validation_text()


def test_without_a_tokenizer_there_are_no_byte_counts_and_no_text(write_shard):
    data = TokenData(train=str(write_shard(range(100))), val=str(write_shard(range(50), "val")), seq_len=8)
    data.setup()
    assert data.vocab_size is None
    assert set(next(iter(data.val_dataloader()))) == {"input_ids", "labels"}
    with pytest.raises(UsageError, match=r"^tokenizer: the text behind the tokens needs a byte-level tokenizer"):
        data.validation_text()


def test_eot_id_stands_in_for_the_tokenizer(write_shard):
    path = str(write_shard([5, 6, 0, 7] * 20))
    data = TokenData(train=path, val=path, seq_len=4, micro_batch_size=1, document_ids=True, eot_id=0)
    data.setup()
    batch = next(iter(data.val_dataloader()))
    assert batch["labels"].tolist() == [[6, -100, 7, 5]]
    assert batch["document_ids"].tolist() == [[0, 0, 0, 1]]


def test_the_declared_vocabulary_bounds_the_tokenizer_s(text_data, tmp_path):
    shards = {"train": str(text_data.folder / "train_*.bin"), "tokenizer": str(text_data.folder / "tokenizer.json")}
    assert TokenData(**shards, vocab_size=50_304).vocab_size == 400
    assert TokenData(**shards, vocab_size=390).vocab_size == 390


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("offset", [0, 4])  # of the only row: its first column and its last label
def test_an_id_that_the_scan_did_not_reach_is_named_at_its_batch(write_shard, monkeypatch, offset, num_workers):
    monkeypatch.setattr("lightning_tricks.data.base.SCANNED_TOKENS", 0)
    ids = np.zeros(5, dtype=int)
    ids[offset] = 200
    path = write_shard(ids)
    data = TokenData(train=str(path), seq_len=4, micro_batch_size=1, vocab_size=200, num_workers=num_workers)
    data.setup()
    data.check_ids(300, "the model")  # of two vocabularies the smaller one counts
    with pytest.raises(UsageError, match=rf"^shard {path}, token {offset}: id 200 does not fit vocab_size"):
        next(iter(data.train_dataloader()))


def test_an_id_beyond_the_vocabulary_is_named_before_training(write_shard, tmp_path):
    path = write_shard([1, 2, 299, 3] * 10, vocab_size=400)
    train_bpe(["some text"], 260).save(str(tmp_path / "small.json"))
    for options, whose in (
        ({"vocab_size": 299}, "vocab_size, which has 299 tokens; raise vocab_size"),
        ({"tokenizer": str(tmp_path / "small.json")}, "the tokenizer, which has 260 tokens"),
    ):
        data = TokenData(train=str(path), seq_len=8, **options)
        with pytest.raises(UsageError, match=rf"^shard {path}, token 2: id 299 does not fit {whose}"):
            data.setup()
        with pytest.raises(UsageError, match=rf"^shard {path}, token 2: id 299 does not fit"):
            data.check_sample(None)


def test_a_tokenizer_that_did_not_write_text_data_s_shards_is_found_out(text_data, tmp_path):
    train_bpe(["some other text"] * 9, 400).save(str(tmp_path / "other.json"))
    data = TokenData(train=str(text_data.folder / "train_*.bin"), tokenizer=str(tmp_path / "other.json"), seq_len=16)
    message = rf"^tokenizer='{tmp_path}/other.json': it did not write the shards in {text_data.folder}; use .*json$"
    with pytest.raises(UsageError, match=message):
        data.setup()


@pytest.mark.parametrize("content", ["[]", '{"tokenizer_sha256": '])
def test_a_record_beside_the_shards_that_is_none_of_text_data_s_is_named(text_data, content):
    folder = text_data.folder
    (folder / "meta.json").write_text(content)
    data = TokenData(train=str(folder / "train_*.bin"), tokenizer=str(folder / "tokenizer.json"), seq_len=16)
    message = rf"^tokenizer='.+': {folder}/meta.json cannot be read as the record .* \(.+\); repair it or move it away$"
    with pytest.raises(UsageError, match=message):
        data.setup()


@pytest.mark.parametrize("option", ["train", "val"])
def test_a_pattern_without_files_is_named(write_shard, tmp_path, option):
    good = str(write_shard(range(100)))
    options = {"train": good, "val": good} | {option: [good, f"{tmp_path}/none_*.bin"]}
    with pytest.raises(UsageError, match=rf"^{option}='{tmp_path}/none_\*.bin': matches no file; check the path$"):
        TokenData(**options, seq_len=8).setup()


def test_document_ids_need_to_know_where_documents_end(write_shard):
    with pytest.raises(UsageError, match=r"^document_ids=True: .*; give eot_id or tokenizer$"):
        TokenData(train=str(write_shard(range(100))), seq_len=8, document_ids=True).setup()


@pytest.mark.filterwarnings("ignore")
def test_a_module_that_optimizes_by_hand_resumes_at_its_next_batch(write_shard, tmp_path):
    """It steps twice a batch."""
    path = str(write_shard(np.arange(2000), vocab_size=2000))

    def run(max_steps, **resume):
        seen = []

        def step_twice(module, batch):
            seen.append(batch["input_ids"][0, 0].item())
            module.optimizers().step()

        model = Small(manual=True, act=step_twice, loss=lambda module, batch: module.net[0].weight.sum())
        data = TokenData(train=path, seq_len=8, micro_batch_size=2)
        return fit(model, data=data, max_steps=max_steps, **resume).trainer, seen

    _, whole = run(20)
    trainer, first = run(8)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    _, second = run(20, ckpt_path=tmp_path / "a.ckpt")
    assert (len(first), len(second)) == (4, 6)
    assert first + second == whole


def test_a_fit_after_a_validation_of_a_checkpoint_starts_at_row_0(write_shard, tmp_path):
    path, seen = str(write_shard(np.arange(200))), []
    data = TokenData(train=path, val=path, seq_len=8, micro_batch_size=2)
    first_id = lambda module, batch: seen.append(batch["input_ids"][0, 0].item())  # noqa: E731
    model = Small(act=first_id, loss=lambda module, batch: module.net[0].weight.sum())
    fit(model, data=data, max_steps=2).trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer_with().validate(model, data, ckpt_path=tmp_path / "a.ckpt", verbose=False)
    fit(model, data=data, max_steps=2)
    assert len(seen) == 4
    assert seen[2:] == seen[:2]


@pytest.mark.long
@pytest.mark.parametrize("end_later", [10, 5, 2])  # the first is beyond all that workers have fetched by then
def test_the_batches_are_the_same_for_any_number_of_workers_where_the_end_moves(write_shard, end_later):
    stream = TokenStream([write_shard(np.arange(200))])
    batches = train_batches(stream, len(stream), 8, 1)
    rows = []
    for num_workers in (0, 2):
        end, served = 4, []
        loader = Loader(batches, lambda: FirstRows(lambda: range(2, 2 + end)), num_workers, TokenIdCheck())  # noqa: B023
        for batch in loader:
            served.append(batch["input_ids"].tolist())
            if len(served) == 2:
                end = end_later
        rows.append(served)
    assert rows[0] == rows[1] == [batches[2 + n]["input_ids"].tolist() for n in range(end_later)]


@pytest.mark.parametrize(("device", "pins"), [("cpu", False), ("cuda:0", True), (None, True)])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_where_there_is_cuda_batches_are_pinned_unless_the_trainer_has_another_device(
    write_shard, monkeypatch, device, pins, num_workers
):
    pinned = []

    def plain_loader(dataset, sampler, pin_memory, **_):
        pinned.append(pin_memory)
        return map(dataset.__getitem__, sampler)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(True) or tensor)
    monkeypatch.setattr("lightning_tricks.data.base.DataLoader", plain_loader)
    stream = TokenStream([write_shard(np.arange(200))])
    batches = train_batches(stream, len(stream), 8, 1)
    trainer = device and SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(device)))
    assert len(list(Loader(batches, lambda: range(3), num_workers, TokenIdCheck(), trainer))) == 3
    assert any(pinned) == pins
