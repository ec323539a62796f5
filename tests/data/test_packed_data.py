"""TextData, TokenData and MixtureData with packed rows: in batches, over resumes, for a model, and in what they say."""

from collections import Counter

import numpy as np
import pytest
import torch
from harness.models import Small
from harness.runs import trainer_with

from lightning_tricks import GPT2, LanguageModel, Llama
from lightning_tricks._core.errors import UsageError
from lightning_tricks.data import MixtureData, MixtureSource, ShardWriter, TextData, TokenData
from lightning_tricks.data.base import TokenIdCheck

T, EOT = 16, 0


@pytest.fixture
def tokens(tmp_path):
    """Documents of 2 to 40 tokens; each token but the last of a document tells its own offset."""
    ids = np.arange(1, 3001)
    ends = np.cumsum(np.random.default_rng(0).integers(2, 40, 200))
    ids[ends[ends < 3000] - 1] = EOT
    with ShardWriter(tmp_path, "train", 4000, shard_tokens=700) as writer:
        writer.append(ids)
    return ids


def packed(folder, **options):
    options = {"seq_len": T, "micro_batch_size": 1, "eot_id": EOT, "packing": "best_fit"} | options
    return TokenData(str(folder / "train_*.bin"), cache_dir=str(folder / "cache"), **options)


def set_up(data):
    data.setup()
    return data


def test_a_pass_has_each_token_as_a_label_once_and_the_next_one_has_the_same_rows_in_another_order(tmp_path, tokens):
    data = set_up(packed(tmp_path))
    rows, count = data.training_rows(), data._order().rows_in_pass
    passes = [
        [tuple(rows[number + epoch * count]["labels"][0].tolist()) for number in range(count)] for epoch in (0, 1)
    ]
    assert passes[0] != passes[1]
    assert sorted(passes[0]) == sorted(passes[1])
    labels = [label for row in passes[0] for label in row if label != -100]
    assert Counter(labels) == Counter(tokens.tolist())


def test_text_data_packs_the_documents_of_its_text_and_its_line_says_so(story, tmp_path, capsys):
    options = {"vocab_size": 300, "seq_len": 96, "cache_dir": str(tmp_path / "cache"), "micro_batch_size": 4}
    data = TextData(str(story), packing="best_fit", **options)
    data.prepare_data()
    assert "Packing" in capsys.readouterr().err
    data.setup()
    assert capsys.readouterr().err == ""  # the plan is there
    assert f"a token; {data.sources[0].planned.summary()}; {data.folder}" in data.data_summary()
    stream, rows = data.streams["train"], data.training_rows()
    labels = torch.cat([rows[number]["labels"] for number in range(len(data.sources[0].planned))]).flatten().tolist()
    assert Counter(label for label in labels if label != -100) == Counter(stream.read(0, len(stream)).tolist())
    assert next(iter(data.train_dataloader()))["input_ids"].shape == (4, 96)
    assert "packed" not in set_up(TextData(str(story), **options)).data_summary()


@pytest.mark.parametrize("family", [Llama, GPT2])
def test_a_model_gives_each_piece_the_loss_that_it_has_alone(tmp_path, tokens, family):
    torch.manual_seed(0)
    model = LanguageModel(family(vocab_size=4000, d_model=16, n_layers=2, n_heads=2, max_seq_len=T))
    model.configure_model()
    data = set_up(packed(tmp_path, document_ids=True))
    rows = data.training_rows()
    batch = next(batch for batch in map(rows.__getitem__, range(99)) if batch["document_ids"].max() == 2)
    together = model.predict_step(batch, 0)
    for piece in range(3):
        alone = batch["document_ids"] == piece
        by_itself = {name: batch[name][alone][None] for name in ("input_ids", "labels")}
        torch.testing.assert_close(together[alone][None], model.predict_step(by_itself, 0), equal_nan=True)


def test_document_ids_count_pieces_also_one_that_goes_on_with_a_document(tmp_path):
    # 40 tokens are two rows and 8 tokens, which stand with the other document
    ids = [*range(1, 40), EOT, *range(50, 55), EOT]
    with ShardWriter(tmp_path, "train", 64) as writer:
        writer.append(np.array(ids))
    rows = set_up(packed(tmp_path, document_ids=True)).training_rows()
    found = [rows[number] for number in range(3)]
    (last,) = [batch for batch in found if 33 in batch["labels"]]
    goes_on, other = [32, 33, 34, 35, 36, 37, 38, 39], [EOT, 50, 51, 52, 53, 54]
    first = goes_on if last["input_ids"][0, 0] == 32 else other
    second = other if first is goes_on else goes_on
    assert last["input_ids"].tolist() == [[*first, *second, EOT, EOT]]
    assert last["document_ids"].tolist() == [[0] * len(first) + [1] * (T - len(first))]
    assert all(not batch["document_ids"].any() for batch in found if batch is not last)


def rows_taken(data, folder, steps, ckpt_path=None, **options):
    """The labels of each step; the run's end is saved."""
    taken = []
    module = Small(
        net=torch.nn.Embedding(4000, 1),
        loss=lambda module, batch: module(batch["input_ids"]).mean(),
        act=lambda module, batch: taken.append(batch["labels"].tolist()),
    )
    trainer = trainer_with(max_steps=steps, logger=False, **options)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    trainer.save_checkpoint(folder / f"{steps}.ckpt")
    return taken


def test_a_run_goes_on_with_the_next_row_also_in_larger_micro_batches(tmp_path, tokens):
    whole = rows_taken(packed(tmp_path), tmp_path, 24)
    first = rows_taken(packed(tmp_path), tmp_path, 8)
    then = rows_taken(packed(tmp_path, micro_batch_size=4), tmp_path, 12, tmp_path / "8.ckpt")
    assert first == whole[:8]
    assert [[row] for batch in then for row in batch] == whole[8:]


def test_a_run_that_goes_on_with_rows_of_the_other_kind_says_so(tmp_path, tokens):
    for kinds in (("best_fit", "cut"), ("cut", "best_fit")):
        rows_taken(packed(tmp_path, packing=kinds[0]), tmp_path, 2)
        with pytest.warns(UserWarning, match=r"from other data settings \(data \w+( packed)? -> \w+( packed)?\)"):
            rows_taken(packed(tmp_path, packing=kinds[1]), tmp_path, 3, tmp_path / "2.ckpt")


@pytest.mark.long
def test_workers_give_the_same_batches(tmp_path, tokens):
    alone, by_workers = (
        [batch for batch, _ in zip(data.train_dataloader(), range(30), strict=False)]
        for data in (set_up(packed(tmp_path, num_workers=number, document_ids=True)) for number in (0, 2))
    )
    assert all(
        torch.equal(one[name], other[name]) for one, other in zip(alone, by_workers, strict=True) for name in one
    )


def test_what_cannot_be_packed_is_refused_in_one_line(tmp_path, tokens):
    with pytest.raises(UsageError, match=r"^packing=best_fit: .*; give eot_id or tokenizer$"):
        packed(tmp_path, eot_id=None).prepare_data()
    with pytest.raises(UsageError, match=r"^packing='bestfit': give one of cut, best_fit$"):
        packed(tmp_path, packing="bestfit").setup()
    with pytest.raises(UsageError, match=r"^seq_len=4000: the training data has 3000 tokens"):
        packed(tmp_path, seq_len=4000).prepare_data()


def test_an_id_that_is_too_large_is_named_where_it_is_only_an_input(tmp_path):
    # the token before the second piece of the first document is a label in another row
    ids = [*range(1, 16), 99, *range(1, 8), EOT, *range(1, 6), EOT]
    with ShardWriter(tmp_path, "train", 100) as writer:
        writer.append(np.array(ids))
    rows, check = set_up(packed(tmp_path)).training_rows(), TokenIdCheck()
    check.bound, check.whose = 64, "the model"
    (key,) = [number for number in range(2) if 99 not in rows[number]["labels"]]
    assert 99 in rows[key]["input_ids"]
    with pytest.raises(UsageError, match=r"train_000000.bin, token 15: id 99 does not fit the model"):
        check.check(rows, key, rows[key])


def test_a_mixture_takes_packed_rows_of_one_source_beside_windows_of_another(tmp_path, tokens):
    with ShardWriter(tmp_path, "other", 4000) as writer:
        writer.append(np.arange(3100, 3900))
    sources = [
        MixtureSource(packed(tmp_path, seq_len=1024), 1, "packed"),
        MixtureSource(TokenData(str(tmp_path / "other_*.bin")), 1, "cut"),
    ]
    data = MixtureData(sources, seq_len=T, micro_batch_size=1, cache_dir=str(tmp_path / "cache"), document_ids=True)
    data.prepare_data()
    data.setup()
    assert "packed by best fit" in data.data_summary()
    batches = [data.training_rows()[number] for number in range(2 * len(data.sources[0].planned))]
    labels = [batch["labels"] for batch in batches if batch["source"] == 0]
    found = Counter(torch.cat(labels).flatten().tolist())
    assert len(labels) == len(data.sources[0].planned)
    assert found[-100] == T * len(labels) - len(tokens)
    assert {token: count for token, count in found.items() if token != -100} == Counter(tokens.tolist())
    assert all((batch["labels"] >= 3100).all() for batch in batches if batch["source"] == 1)
