"""Rows of documents that each epoch puts into a new order, against the documents joined and cut by hand."""

import pickle
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import processes, shard_formats
from harness.models import Small
from harness.runs import trainer_with
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_tricks._core.errors import UsageError
from lightning_tricks.commands import show_data
from lightning_tricks.commands.autopsy import documents_of
from lightning_tricks.data import MixtureData, MixtureSource, ShardWriter, TextData, TokenData, shuffled_documents
from lightning_tricks.data.base import TokenIdCheck
from lightning_tricks.data.order import derive_key, permute
from lightning_tricks.data.shards import TokenStream
from lightning_tricks.data.shuffled_documents import ShuffledDocuments

T, EOT = 16, 0


def write(folder, ids, shard_tokens=50):
    with ShardWriter(folder, "train", 70_000, shard_tokens) as writer:
        writer.append(np.asarray(ids))
    return TokenStream(sorted(folder.glob("train_*.bin")))


def joined(documents, epoch, seed):
    """All tokens of an epoch: the documents in their new order."""
    order = permute(np.arange(len(documents)), len(documents), derive_key(seed, epoch, 2))
    return np.concatenate([documents[number] for number in order])


@pytest.mark.parametrize("index", [False, True])
@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    seq_len=st.integers(1, 16),
    group=st.integers(1, 5),
    last_ends=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_rows_are_those_of_the_documents_joined_in_their_new_order_and_cut(
    lengths, seq_len, group, last_ends, epoch, index
):
    lengths[0] += seq_len
    ends = np.cumsum(lengths)
    ids = np.arange(1, ends[-1] + 1)
    if not index:
        ids[(ends if last_ends else ends[:-1]) - 1] = EOT
    documents = np.split(ids, ends[:-1])
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffled_documents, "_GROUP", group)
        patch.setattr(shuffled_documents, "_AT_ONCE", 2 * group)
        if index:
            by_index = lambda self, start, stop, eot_id: ends[(ends > start) & (ends <= stop)]  # noqa: E731
            patch.setattr(TokenStream, "document_ends", by_index)
            patch.setattr(TokenStream, "knows_documents", True)
        stream = write(Path(name), ids)
        rows = ShuffledDocuments(Path(name), stream, None if index else EOT, seq_len, 7, "data")
        expected = joined(documents, epoch, 7)
        order = permute(np.arange(len(documents)), len(documents), derive_key(7, epoch, 2))
        begin = np.cumsum([0, *(len(documents[number]) for number in order)])
        each = rows.in_epochs(7)
        assert 0 <= len(ids) - 1 - each.rows * seq_len < seq_len  # labels that no row has
        for row in range(each.rows):
            address, first = row * each.step + epoch * each.per_epoch, row * seq_len
            input_ids, labels = np.full((2, seq_len), -1, dtype=np.int64)
            rows.fill(address, input_ids, labels)
            assert input_ids.tolist() == expected[first : first + seq_len].tolist()
            assert labels.tolist() == expected[first + 1 : first + seq_len + 1].tolist()
            places = [rows.offset(address, label, before) for label in range(seq_len) for before in (0, 1)]
            assert stream.read(0, len(ids))[places].reshape(-1, 2).tolist() == np.stack([labels, input_ids], 1).tolist()
            found = set(np.flatnonzero(rows.begins(address, input_ids)).tolist())
            assert found - {0} == set((begin - first).tolist()) & set(range(1, seq_len))


@pytest.fixture
def documents(tmp_path):
    """Documents of 2 to 40 tokens in shards; each token but the last of a document tells its own offset."""
    ids = np.arange(1, 3001)
    ends = np.cumsum(np.random.default_rng(0).integers(2, 40, 200))
    ends = np.append(ends[ends < 3000], 3000)
    ids[ends - 1] = EOT
    write(tmp_path, ids, shard_tokens=700)
    return np.split(ids, ends[:-1])


def shuffled(folder, **options):
    options = {"seq_len": T, "micro_batch_size": 1, "eot_id": EOT, "shuffle": "documents"} | options
    return TokenData(str(folder / "train_*.bin"), cache_dir=str(folder / "cache"), **options)


def set_up(data):
    data.setup()
    return data


def test_an_epoch_has_each_token_as_a_label_once_and_the_next_one_other_neighbours(tmp_path, documents):
    data = set_up(shuffled(tmp_path))
    rows, count = data.training_rows(), data._order().rows_in_pass
    assert count == 2999 // T
    neighbours = []
    for epoch in (0, 1):
        found = [rows[number + epoch * count]["labels"][0].tolist() for number in range(count)]
        stream = joined(documents, epoch, 0).tolist()
        assert sorted(found) == sorted(stream[1 + row * T : 1 + (row + 1) * T] for row in range(count))
        assert found != sorted(found, key=lambda row: stream.index(max(row)))  # nor are the rows in their order
        every, missing = Counter(stream), Counter(label for row in found for label in row)
        assert (every - missing).total() <= T
        assert not missing - every
        inside = {(a, c) for row in found for a, b, c in zip(row, row[1:], row[2:], strict=False) if b == EOT}
        neighbours.append(inside)
    assert len(neighbours[0] & neighbours[1]) < 0.1 * len(neighbours[0])


def rows_taken(data, folder, steps, ckpt_path=None, **options):
    """The labels of each step; the run's end is saved."""
    taken = []
    torch.manual_seed(0)
    module = Small(
        net=torch.nn.Embedding(4000, 1),
        loss=lambda module, batch: module(batch["input_ids"]).mean(),
        act=lambda module, batch: taken.extend(batch["labels"].tolist()),
    )
    trainer = trainer_with(max_steps=steps, logger=False, **options)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    trainer.save_checkpoint(folder / f"{steps}.ckpt")
    return taken, [p.detach().clone() for p in module.parameters()]


def test_a_run_goes_on_in_mid_epoch_to_the_bit_and_in_larger_micro_batches_and_over_the_end_of_an_epoch(
    tmp_path, documents
):
    long = {"seq_len": 100}  # 29 rows an epoch
    whole, weights = rows_taken(shuffled(tmp_path, **long), tmp_path, 48)
    first, _ = rows_taken(shuffled(tmp_path, **long), tmp_path, 20)
    then, resumed = rows_taken(shuffled(tmp_path, **long), tmp_path, 48, tmp_path / "20.ckpt")
    assert first + then == whole
    assert all(torch.equal(a, b) for a, b in zip(weights, resumed, strict=True))
    larger, _ = rows_taken(shuffled(tmp_path, **long, micro_batch_size=4), tmp_path, 27, tmp_path / "20.ckpt")
    assert larger == whole[20:]
    second = joined(documents, 1, 0).tolist()
    assert all(row in [second[1 + n * 100 : 101 + n * 100] for n in range(29)] for row in whole[29:])


def of_a_rank(rank, folder):
    return rows_taken(shuffled(folder), folder / str(rank), 6, devices=2, strategy="ddp")[0]


@pytest.mark.long
def test_two_ranks_and_workers_take_the_same_rows(tmp_path, documents):
    whole, _ = rows_taken(shuffled(tmp_path), tmp_path, 12)
    two = processes.run(of_a_rank, tmp_path)
    assert [row for pair in zip(*two, strict=True) for row in pair] == whole
    assert rows_taken(shuffled(tmp_path, num_workers=2), tmp_path, 12)[0] == whole


def test_skipped_samples_are_left_out_and_the_rest_moves_up(tmp_path, documents):
    whole, _ = rows_taken(shuffled(tmp_path), tmp_path, 9)
    assert rows_taken(shuffled(tmp_path, skip_samples=[[2, 4]]), tmp_path, 6)[0] == whole[:2] + whole[5:]


def test_a_run_that_goes_on_with_rows_of_the_other_kind_says_so(tmp_path, documents):
    for kinds in (("rows", "documents"), ("documents", "rows")):
        rows_taken(shuffled(tmp_path, shuffle=kinds[0]), tmp_path, 2)
        with pytest.warns(UserWarning, match=r"from other data settings \(data \w+( shuffled)? -> \w+( shuffled)?\)"):
            rows_taken(shuffled(tmp_path, shuffle=kinds[1]), tmp_path, 3, tmp_path / "2.ckpt")


def test_text_data_shuffles_its_training_documents_alone_and_names_the_file_of_a_row(tmp_path, capsys):
    for number in range(120):  # each a document
        (tmp_path / f"{number}.txt").write_text(f"<{number}> " * 30)
    options = {"vocab_size": 300, "seq_len": 32, "cache_dir": str(tmp_path / "cache"), "micro_batch_size": 4}
    data = TextData(str(tmp_path / "*.txt"), shuffle="documents", **options)
    data.prepare_data()
    assert "Looking for the documents in" in capsys.readouterr().err
    data.setup()
    assert capsys.readouterr().err == ""
    assert f"; {data.meta['train']['documents']} documents, shuffled in each epoch; " in data.data_summary()
    rows = data.training_rows()
    for number in range(5):
        _, offset = rows.offset(number, 0, 20)
        (file,) = data.source_files([offset])
        start = max(offset - 15, 0)
        assert f"<{file.stem}>" in data.tokenizer.decode(data.streams["train"].read(start, 30).tolist())
    plain = set_up(TextData(str(tmp_path / "*.txt"), **options))
    assert "documents, shuffled" not in plain.data_summary()
    for one, other in zip(data.val_dataloader(), plain.val_dataloader(), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)


def test_documents_of_an_index_are_told_apart_by_the_commands(tmp_path):
    written = [np.arange(10 * n, 10 * n + 3 + n % 7) + 1 for n in range(90)]
    shard_formats.datatrove(tmp_path, written)
    data = TokenData(str(tmp_path / "*.ds"), seq_len=T, micro_batch_size=1, shuffle="documents",
                     vocab_size=1000, cache_dir=str(tmp_path / "cache"))  # fmt: skip
    data.setup()
    rows = data.training_rows()
    batches = [rows[sample] for sample in range(8)]
    for document in documents_of(rows, list(range(8)), batches, None):
        ids = document.ids[:-1] if document.stop == T else document.ids  # the last one may begin the next document
        assert ids.tolist() == data.streams["train"].read(document.token, len(ids)).tolist()
        assert len({number // 10 for number in (ids - 1).tolist()}) <= 1
    data.document_ids |= data.knows_documents
    lines = list(show_data.lines_of_rows(data, range(4)))
    assert lines[1].startswith(f"sample 0, {T} tokens of {len(lines[2 : lines.index('', 1)])} documents, shard ")


def test_an_id_that_is_too_large_is_named_where_it_is_only_the_first_input(tmp_path, documents):
    data = set_up(shuffled(tmp_path))
    rows, check = data.training_rows(), TokenIdCheck()
    key = next(key for key in range(187) if rows[key]["input_ids"][0, 0] > rows[key]["labels"].max())
    wrong = int(rows[key]["input_ids"][0, 0])
    check.bound, check.whose = wrong, "the model"
    file, index = divmod(wrong - 1, 700)
    with pytest.raises(UsageError, match=rf"train_00000{file}.bin, token {index}: id {wrong} does not fit the model"):
        check.check(rows, key, rows[key])


def test_a_mixture_takes_shuffled_documents_of_one_source_beside_windows_of_another(tmp_path, documents):
    with ShardWriter(tmp_path, "other", 4000) as writer:
        writer.append(np.arange(3100, 3900))
    sources = [
        MixtureSource(shuffled(tmp_path, seq_len=1024), 1, "shuffled"),
        MixtureSource(TokenData(str(tmp_path / "other_*.bin")), 1, "cut"),
    ]
    data = MixtureData(sources, seq_len=T, micro_batch_size=1, cache_dir=str(tmp_path / "cache"))
    data.prepare_data()
    data.setup()
    assert "documents, shuffled in each epoch" in data.data_summary()
    count = 2999 // T
    batches = [data.training_rows()[number] for number in range(4 * count)]
    taken = [batch["labels"][0].tolist() for batch in batches if batch["source"] == 0]
    for epoch in (0, 1):
        stream = joined(documents, epoch, data.sources[0].seed).tolist()
        expected = sorted(stream[1 + row * T : 1 + (row + 1) * T] for row in range(count))
        assert sorted(taken[epoch * count : (epoch + 1) * count]) == expected
    assert all((batch["labels"] >= 3100).all() for batch in batches if batch["source"] == 1)


def test_what_does_not_fit_is_refused_in_one_line(tmp_path, documents):
    with pytest.raises(UsageError, match=r"^shuffle=documents: .* packing=best_fit .*; set shuffle: rows or packing"):
        shuffled(tmp_path, packing="best_fit")
    with pytest.raises(UsageError, match=r"^shuffle=documents: .*; give eot_id or tokenizer$"):
        shuffled(tmp_path, eot_id=None).prepare_data()
    with pytest.raises(UsageError, match=r"^shuffle='files': give one of rows, documents$"):
        shuffled(tmp_path, shuffle="files")
    with pytest.raises(UsageError, match=r"^seq_len=4000: the training data has 3000 tokens"):
        shuffled(tmp_path, seq_len=4000).prepare_data()


def test_the_ends_of_documents_are_looked_for_once_and_a_damaged_file_is_named(tmp_path, documents, capsys):
    rows = set_up(shuffled(tmp_path)).sources[0].planned
    assert (rows.folder / "ends.bin").stat().st_size == 8 * len(documents)
    assert "Looking" in capsys.readouterr().err
    set_up(shuffled(tmp_path, seed=1, seq_len=8))
    assert capsys.readouterr().err == ""
    assert len(pickle.dumps(rows)) < 2000
    assert pickle.loads(pickle.dumps(rows)).offset(160, 3) == rows.offset(160, 3)
    for content in ((rows.folder / "ends.bin").read_bytes()[:-8], b"", b"abc"):
        (rows.folder / "ends.bin").write_bytes(content)
        with pytest.raises(UsageError, match=rf"^cache_dir: {rows.folder} is damaged \(.*\); delete that folder$"):
            set_up(shuffled(tmp_path))
