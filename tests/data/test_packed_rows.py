"""Packed rows from a stored plan: what is in them, and what is said of a plan that is damaged."""

import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_tricks._core.errors import UsageError
from lightning_tricks.data import ShardWriter, packing, shards
from lightning_tricks.data.packed_rows import PackedRows
from lightning_tricks.data.shards import TokenStream

EOT = 0


def write(folder, ids, shard_tokens=50):
    with ShardWriter(folder, "train", 70_000, shard_tokens) as writer:
        writer.append(np.asarray(ids))
    return TokenStream(sorted(folder.glob("train_*.bin")))


def pack(folder, stream, seq_len=8, **options):
    return PackedRows(
        folder, stream, **({"eot_id": EOT, "seq_len": seq_len, "seed": 0, "fingerprint": "data"} | options)
    )


def filled(rows, row):
    input_ids, labels = np.full((2, rows.seq_len), -1, dtype=np.int64)
    rows.fill(row, input_ids, labels)
    return input_ids.tolist(), labels.tolist(), np.flatnonzero(rows.begins(row, input_ids)).tolist()


def all_rows(rows):
    return [filled(rows, row) for row in range(len(rows))]


@pytest.mark.parametrize("index", [False, True])
@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    seq_len=st.integers(1, 16),
    block_tokens=st.integers(1, 200),
    last_ends=st.booleans(),
)
def test_each_token_is_a_label_once_after_the_token_before_it(lengths, seq_len, block_tokens, last_ends, index):
    ends = np.cumsum(lengths)
    ids = np.arange(1, ends[-1] + 1)
    if not index:
        ids[(ends if last_ends else ends[:-1]) - 1] = EOT
    before = np.append(EOT, ids[:-1])
    before[ends[:-1]] = EOT  # where a document begins, whatever the token before it
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "SLACK", 0.2)
        patch.setattr(packing, "BLOCK_TOKENS", block_tokens)
        if index:
            by_index = lambda self, start, stop, eot_id: ends[(ends > start) & (ends <= stop)]  # noqa: E731
            patch.setattr(TokenStream, "document_ends", by_index)
        rows = pack(Path(name), write(Path(name), ids), seq_len)
        found = []
        for row, (input_ids, labels, begin) in enumerate(all_rows(rows)):
            used = seq_len - labels.count(-100)
            assert labels[used:] == [-100] * (seq_len - used)
            assert input_ids[used:] == [EOT] * (seq_len - used)
            assert begin[0] == 0
            assert ids[[rows.offset(row, label) for label in range(used)]].tolist() == labels[:used]
            found += zip(labels[:used], input_ids[:used], strict=True)
        assert sorted(found) == sorted(zip(ids.tolist(), before.tolist(), strict=True))
        assert len(rows) * seq_len - len(ids) <= max(0.2 * len(ids), seq_len - 1)
        assert list(Path(name).glob("*/ends.bin")) == []


def test_a_row_by_hand(tmp_path):
    rows = pack(tmp_path, write(tmp_path, [5, 6, EOT, 7, 8, 9, 10, 11, 12, EOT, EOT]))
    # documents of 3, 7 and 1 tokens; the order in a row is that of a shuffle
    one, two = sorted(all_rows(rows), key=lambda row: 5 not in row[1])
    assert two[1] in ([7, 8, 9, 10, 11, 12, EOT, EOT], [EOT, 7, 8, 9, 10, 11, 12, EOT])
    assert one == ([EOT, 5, 6, EOT, EOT, EOT, EOT, EOT], [5, 6, EOT, -100, -100, -100, -100, -100], [0])
    begin = two[2][1]
    assert begin == (7 if two[1][0] == 7 else 1)
    assert [two[0][0], two[0][begin]] == [EOT, EOT]
    assert rows.summary() == (
        "packed by best fit with 31.25% padding, 0.0% of 3 documents cut and 0.0% of those that fit a row"
    )


def test_a_piece_in_the_middle_of_a_document_has_the_token_before_it_as_input(tmp_path):
    rows = pack(tmp_path, write(tmp_path, [*range(1, 12), EOT]), seq_len=5)
    assert sorted(all_rows(rows), key=lambda row: row[0][1]) == [
        ([EOT, 1, 2, 3, 4], [1, 2, 3, 4, 5], [0]),
        ([5, 6, 7, 8, 9], [6, 7, 8, 9, 10], [0]),
        ([10, 11, EOT, EOT, EOT], [11, EOT, -100, -100, -100], [0]),
    ]
    assert "100.0% of 1 documents cut" in rows.summary()


def documents(count=300):
    lengths = np.random.default_rng(0).integers(1, 30, count)
    ids = np.random.default_rng(1).integers(1, 99, lengths.sum())
    ids[np.cumsum(lengths) - 1] = EOT
    return ids


def test_a_plan_is_made_once_and_is_another_for_other_settings(tmp_path, capsys):
    stream = write(tmp_path, documents(), shard_tokens=1000)
    first = pack(tmp_path, stream)
    assert "Packing" in capsys.readouterr().err
    again = pack(tmp_path, stream)
    assert capsys.readouterr().err == ""
    assert all_rows(again) == all_rows(first)
    for other in ({"seed": 1}, {"seq_len": 9}, {"fingerprint": "else"}, {"eot_id": 7}):
        assert pack(tmp_path, stream, **other).folder != first.folder
    assert all_rows(pack(tmp_path, stream, seed=1)) != all_rows(first)


def test_a_pickle_holds_paths_and_gives_the_same_rows(tmp_path):
    rows = pack(tmp_path, write(tmp_path, documents(), shard_tokens=1000))
    assert len(pickle.dumps(rows)) < 2000
    assert all_rows(pickle.loads(pickle.dumps(rows))) == all_rows(rows)


def test_rows_that_are_too_long_are_refused(tmp_path):
    stream = write(tmp_path, documents())
    with pytest.raises(UsageError, match=r"^packing=best_fit: seq_len=524289 is above 524288; lower it, or set cut$"):
        pack(tmp_path, stream, seq_len=2**19 + 1)


def cut_short(folder):
    with (folder / "firsts.bin").open("r+b") as file:
        file.truncate((folder / "firsts.bin").stat().st_size - 8)


DAMAGES = {
    "a file is missing": lambda folder: (folder / "pieces.bin").unlink(),
    "a file is empty": lambda folder: (folder / "pieces.bin").write_bytes(b""),
    "a file is cut": cut_short,
    "half a number": lambda folder: (folder / "pieces.bin").open("ab").write(b"abc"),
    "no record": lambda folder: (folder / "meta.json").unlink(),
    "another record": lambda folder: (folder / "meta.json").write_text("[1]"),
    "another plan": lambda folder: (folder / "meta.json").write_text(
        (folder / "meta.json").read_text().replace('"settings": "(1', '"settings": "(2')
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_plan_is_named_with_its_folder(tmp_path, damage):
    stream = write(tmp_path, documents())
    folder = pack(tmp_path, stream).folder
    DAMAGES[damage](folder)
    with pytest.raises(UsageError, match=rf"^cache_dir: {folder} is damaged \(.*\); delete that folder$"):
        pack(tmp_path, stream)


@pytest.mark.parametrize("piece", [2**64 - 1, 2**45 * 99, 7 << 20 | 8])
def test_a_row_that_does_not_fit_is_refused(tmp_path, piece):
    stream = write(tmp_path, documents())
    folder = pack(tmp_path, stream).folder
    pieces = np.fromfile(folder / "pieces.bin", dtype="<u8")
    pieces[0] = piece  # too long, or beyond the stream
    pieces.tofile(folder / "pieces.bin")
    with pytest.raises(UsageError, match=r"is damaged \(row 0 is .*\); delete that folder$"):
        filled(pack(tmp_path, stream), 0)


def test_ends_are_found_over_the_borders_of_what_is_searched_at_once(tmp_path, monkeypatch):
    stream = write(tmp_path, documents())
    at_once = pack(tmp_path / "one", stream)
    monkeypatch.setattr(shards, "_CHUNK", 7)
    assert all_rows(pack(tmp_path / "two", stream)) == all_rows(at_once)


def test_padding_has_the_offset_of_the_last_label(tmp_path):
    rows = pack(tmp_path, write(tmp_path, [5, 6, EOT]))
    assert [rows.offset(0, label) for label in (0, 2, 3, 7)] == [0, 2, 2, 2]


def test_padding_is_within_the_slack_with_that_of_the_last_row(tmp_path):
    ids = np.tile([1] * 10 + [EOT], 1000)  # two do not fit a row of 16
    rows = pack(tmp_path, write(tmp_path, ids, shard_tokens=20_000), seq_len=16)
    assert 0 < len(rows) * 16 - 11_000 <= 55
