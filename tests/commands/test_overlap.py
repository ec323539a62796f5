"""The check of validation documents that stand in the training data: planted ones are found, and no others."""

from pathlib import Path

import numpy as np
import pytest

from lightning_tricks import LanguageModel, Llama, TextData, TokenData
from lightning_tricks.commands.check import overlap
from lightning_tricks.commands.check.checks import Checked, run_checks
from lightning_tricks.commands.check.checks import overlap as check
from lightning_tricks.commands.check.overlap import Overlap, find_overlap, window_hashes
from lightning_tricks.data import ShardWriter
from lightning_tricks.data.shards import TokenStream

EOT, VOCABULARY = 0, 50_000


def documents(number: int, length: int, seed: int) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [np.append(draw.integers(1, VOCABULARY, length), EOT) for _ in range(number)]


def stream(folder: Path, name: str, parts: list[np.ndarray]) -> TokenStream:
    with ShardWriter(folder, name, VOCABULARY) as writer:
        writer.append(np.concatenate(parts))
    return TokenStream(sorted(folder.glob(f"{name}_*.bin")))


def test_two_windows_have_one_hash_if_and_only_if_they_are_equal():
    tokens = np.random.default_rng(0).integers(0, 3, 40_000)  # of 1.6 million windows of three tokens, some are equal
    windows = np.lib.stride_tricks.sliding_window_view(tokens, overlap.WINDOW)
    hashes = window_hashes(tokens)
    assert len(hashes) == len(windows)
    numbers = np.unique(windows, axis=0, return_inverse=True)[1].ravel()
    pairs = {*zip(hashes.tolist(), numbers.tolist(), strict=True)}
    assert len({*hashes.tolist()}) == len({*numbers.tolist()}) == len(pairs) < len(windows)


def test_planted_documents_are_counted_and_a_short_quotation_is_not(tmp_path):
    train, val = documents(300, 400, 1), documents(50, 300, 2)
    copies = [train[7], train[291], np.concatenate((val[0][:30], train[5]))]  # the last: 93 % of it
    quoting = [np.concatenate((train[9][:100], document)) for document in val[1:3]]  # 22 % of their windows
    short = [np.array([5, 6, 7, EOT])]
    all_val = stream(tmp_path, "val", [*val[3:], *copies, *quoting, *short])
    found = find_overlap([stream(tmp_path, "train", train)], [all_val], EOT)
    assert (found.documents, found.found) == (47 + 3 + 2, 3)
    windows = sum(len(one) - 12 for one in (*val[3:], *copies, *quoting))
    known = 2 * (401 - 12) + (401 - 12) + 2 * (100 - 12)
    assert found.windows == pytest.approx(known / windows, abs=1e-9)
    assert find_overlap([stream(tmp_path, "train", train)], [stream(tmp_path, "other", val)], EOT) == Overlap(
        50, 0, 0.0
    )


def test_without_an_end_token_windows_are_counted_alone(tmp_path):
    train = documents(40, 100, 1)
    found = find_overlap([stream(tmp_path, "train", train)], [stream(tmp_path, "val", train[3:8])], None)
    assert (found.documents, found.windows, found.share) == (0, 1.0, 1.0)
    assert (
        find_overlap([stream(tmp_path, "train", train)], [stream(tmp_path, "short", [train[0][:5]])], None).windows == 0
    )


def test_of_long_streams_blocks_over_the_whole_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(overlap, "SAMPLE", {"train": 4000, "val": 2000})
    monkeypatch.setattr(overlap, "_BLOCK", {"train": 1000, "val": 1000})
    train = documents(100, 199, 1)  # 20,000 tokens, of which blocks are read from 0, 6,333, 12,666 and 18,999 on
    whole = stream(tmp_path, "train", train)
    for name, first, last, share in (("a", 0, 5, 1.0), ("b", 40, 45, 0.0), ("c", 64, 67, 1.0), ("d", 96, 99, 1.0)):
        assert find_overlap([whole], [stream(tmp_path, name, train[first:last])], None).windows == share


def line_of(data):
    model = LanguageModel(Llama(vocab_size=VOCABULARY, d_model=32, n_layers=1, n_heads=2))
    (result,) = run_checks([check], Checked(model, data, {"accelerator": "cpu"}), lambda line: None)
    return result.mark, result.line


def test_the_list_says_it_in_one_line(tmp_path, text_file):
    train, val = documents(30, 60, 1), documents(30, 60, 2)
    for name, parts in (("train", train), ("clean", val), ("dirty", [*val[:28], *train[:2]])):
        stream(tmp_path, name, parts)

    def data(val):
        given = None if val is None else str(tmp_path / f"{val}_*.bin")
        return TokenData(str(tmp_path / "train_*.bin"), given, seq_len=8, eot_id=EOT)

    clean, dirty = data("clean"), data("dirty")
    rest = "validation windows of 13 tokens stand in the training data too"
    assert line_of(clean) == ("ok", f"0 of 30 validation documents and 0.0% of the {rest}")
    assert clean.streams == {}  # as it was
    line = f"2 of 30 validation documents and 6.7% of the {rest}: their loss says little of new text"
    assert line_of(dirty) == ("--", line)
    assert line_of(data(None)) == ("--", "no validation data")
    text = TextData(str(text_file), vocab_size=300, cache_dir=str(tmp_path / "cache"))
    assert line_of(text) == ("--", "not known before the text is tokenized, which prepare does")
    assert not (tmp_path / "cache").exists()
    assert line_of(object()) == ("--", "only TextData and TokenData are compared")
