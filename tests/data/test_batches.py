"""What is in a batch, worked out by hand."""

import numpy as np
import pytest
import torch
from harness.windows import WindowOrder, train_batches
from hypothesis import given
from hypothesis import strategies as st

from lightning_tricks.data.batches import ValidationBatches, begins_after, with_documents
from lightning_tricks.data.shards import TokenStream


class Tokens(TokenStream):
    """A stream from a list, without files."""

    knows_documents = False

    def __init__(self, ids):
        self.paths, self._shards, self._ends = [], [np.array(ids)], [len(ids)]


def test_a_label_is_the_token_after_its_input():
    stream = Tokens(range(100))
    batch = train_batches(stream, 100, 7, 3)[6]
    assert {name: (tuple(t.shape), str(t.dtype)) for name, t in batch.items()} == {
        "input_ids": ((3, 7), "torch.int64"),
        "labels": ((3, 7), "torch.int64"),
    }
    assert (batch["labels"] == batch["input_ids"] + 1).all()
    assert batch["input_ids"][:, 0].tolist() == WindowOrder(100, 7, seed=0).starts(np.arange(6, 9)).tolist()


def test_input_and_labels_do_not_share_memory():
    batch = train_batches(Tokens(range(100)), 100, 7, 2)[0]
    before = batch["labels"].clone()
    batch["input_ids"].zero_()
    assert torch.equal(batch["labels"], before)


def test_document_ids_count_the_ends_before_a_token():
    rows = np.array([[5, 0, 6, 7, 0, 0, 8], [0, 1, 2, 3, 4, 5, 6]])
    found = with_documents(begins_after(rows, eot_id=0))["document_ids"]
    assert found.tolist() == [[0, 0, 1, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1]]
    assert found.dtype == np.int32
    batch = train_batches(Tokens([3, 0] * 20), 40, 4, 1, eot_id=0)[0]
    assert batch["document_ids"].tolist() in ([[0, 0, 1, 1]], [[0, 1, 1, 2]])


def test_both_kinds_of_batches_say_where_documents_begin():
    stream = Tokens(([1] * 149 + [0]) * 3)  # documents begin at 0, 150 and 300
    order = WindowOrder(450, 128, seed=0)
    train = train_batches(stream, 450, 128, 2, eot_id=0)[0]
    second = [min(150 - begin % 150, 128) for begin in order.starts(np.arange(2)).tolist()]
    assert train["document_starts"].tolist() == [[0, begin] for begin in second]
    val = ValidationBatches(stream, 128, 3, eot_id=0, with_document_ids=True)[0]
    assert val["document_starts"].tolist() == [[0, 128], [0, 22], [0, 44]]
    assert val["document_starts"].dtype == torch.int32


def test_validation_by_hand():
    # bytes: token 0 is special, token n has n bytes
    batches = ValidationBatches(Tokens([4, 1, 2, 0, 3, 1, 2]), 4, 2, token_bytes=np.arange(5), eot_id=0)
    (batch,) = [batches[i] for i in range(len(batches))]
    assert batch["input_ids"].tolist() == [[4, 1, 2, 0], [3, 1, 0, 0]]
    assert batch["labels"].tolist() == [[1, 2, -100, 3], [1, 2, -100, -100]]
    assert batch["n_bytes"].tolist() == [6, 3]


def test_without_a_tokenizer_the_end_of_text_is_still_not_counted():
    batches = ValidationBatches(Tokens([4, 1, 2, 0, 3]), 4, 1, eot_id=0, with_document_ids=True)
    assert set(batches[0]) == {"input_ids", "labels", "document_ids"}
    assert batches[0]["labels"].tolist() == [[1, 2, -100, 3]]
    assert batches[0]["document_ids"].tolist() == [[0, 0, 0, 0]]


@given(st.integers(1, 200), st.integers(1, 12), st.integers(1, 4), st.integers(1, 4))
def test_every_token_but_the_first_is_a_label_once_over_all_ranks(tokens, seq_len, micro_batch_size, world):
    stream = Tokens(range(tokens))
    ranks = [
        ValidationBatches(stream, seq_len, micro_batch_size, np.ones(tokens, dtype=int), rank=rank, world=world)
        for rank in range(world)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    seen: list[int] = []
    for batches in ranks:
        for index in range(len(batches)):
            batch = batches[index]
            assert batch["labels"].shape == (micro_batch_size, seq_len)
            counted = batch["labels"] != -100
            assert (batch["input_ids"][counted] + 1 == batch["labels"][counted]).all()
            assert batch["n_bytes"].tolist() == counted.sum(1).tolist()
            seen += batch["labels"][counted].tolist()
    assert sorted(seen) == list(range(1, tokens))


def test_the_rows_that_fill_up_a_rank_count_nothing():
    # 5 windows on 2 ranks, 2 rows a batch: rank 1 has windows 1 and 3, then two rows of filling
    batches = ValidationBatches(Tokens(range(11)), 2, 2, token_bytes=np.ones(11, dtype=int), rank=1, world=2)
    assert len(batches) == 2
    assert batches[0]["input_ids"].tolist() == [[2, 3], [6, 7]]
    assert batches[1]["labels"].tolist() == [[-100, -100], [-100, -100]]
    assert batches[1]["n_bytes"].tolist() == [0, 0]


def test_one_validation_token_is_no_batch():
    assert len(ValidationBatches(Tokens([1]), 4, 2)) == 0


def test_batches_say_where_their_rows_start():
    stream = Tokens(range(100))
    train, val = train_batches(stream, 100, 7, 3), ValidationBatches(stream, 7, 3, rank=1, world=2)
    assert [train.offset(1, row, 2) for row in range(3)] == [(0, label) for label in train[1]["labels"][:, 2].tolist()]
    assert val.starts(1).tolist() == val[1]["input_ids"][:, 0].tolist()


@pytest.mark.parametrize(
    "first_rows",
    [range(0, 3000, 3), range(5, 9000, 12), [7, 7, 4, 1, 100, 93, 86, 79], [0, 3, 6, 9, 12, 40, 43, 46, 3, 0]],
)
def test_a_micro_batch_has_its_own_rows_whatever_was_asked_for_before(first_rows):
    order = WindowOrder(1000, 7, seed=0)
    batches, ahead = train_batches(Tokens(range(1000)), 1000, 7, 3), 0
    for first_row in first_rows:
        expected = order.starts(np.arange(first_row, first_row + 3))
        # asked once: twice would end the equal distances at which the next ones are computed ahead
        assert batches[first_row]["input_ids"][:, 0].tolist() == expected.tolist()
        ahead = max(ahead, len(batches._ahead))
    assert (ahead > 0) == (len(first_rows) > 8)
