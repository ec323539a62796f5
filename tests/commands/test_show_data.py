"""show-data: the rows are those of the run, each token once, and their documents end where they end."""

import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from cli.parsers import one_parser  # noqa: F401, a fixture

from lightning_tricks import MixtureData, MixtureSource, TextData, TokenData
from lightning_tricks import __main__ as door
from lightning_tricks._core.errors import UsageError
from lightning_tricks.commands.show_data import run
from lightning_tricks.data import ShardWriter

WORDS = [f"word{number} and more of it" for number in range(9)]


@pytest.fixture
def text_data(tmp_path):
    (tmp_path / "text").mkdir()
    for number, words in enumerate(WORDS):
        (tmp_path / "text" / f"{number}.txt").write_text(words * 4)
    return TextData(
        str(tmp_path / "text"), vocab_size=300, seq_len=64, val_fraction=0.2, cache_dir=str(tmp_path / "cache")
    )


def lines(capsys, data, **options):
    run(None, data, {}, **options)
    return capsys.readouterr().out.splitlines()


def test_rows_are_decoded_with_file_shard_and_the_ends_of_documents(text_data, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "4000")
    printed = lines(capsys, text_data, rows=3, first=2)
    assert printed[0] == text_data.data_summary()
    rows = text_data.training_rows()
    headings = [line for line in printed if line.startswith("sample")]
    assert [line.split(",")[0] for line in headings] == ["sample 2", "sample 3", "sample 4"]
    for sample, heading in zip((2, 3, 4), headings, strict=True):
        ids, (_, start) = rows[sample]["input_ids"][0], rows.offset(sample, 0, 0)
        below = printed[printed.index(heading) + 1 :]
        documents = below[: below.index("")]
        ends = int((ids[:-1] == text_data.eot_id).sum())
        assert f" of {ends + 1} document" in heading
        assert re.search(rf"text/\d\.txt, shard .*train_000000\.bin, token {start}$", heading)
        assert len(documents) == ends + 1
        assert sum(int(line.split()[0]) for line in documents) == 64
        assert "".join(line[8:] for line in documents) == text_data.tokenizer.decode(
            ids.tolist(), skip_special_tokens=False
        )
        assert all(line.endswith("<|endoftext|>") for line in documents[:-1])
    assert printed[-1].startswith("3 rows: 192 tokens of ")
    assert printed[-1].endswith("padding 0.0%")


def test_a_long_text_has_its_beginning_its_end_and_the_number_of_characters_between(text_data, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    text = [line for line in lines(capsys, text_data, rows=4) if re.match(" +[0-9]+  ", line)]
    shortened = [re.fullmatch(r" +\d+  (.*) \[(\d+) characters\] (.*)", line) for line in text]
    assert any(shortened)
    assert all(len(line) <= 70 for line in text)
    whole = "".join(text_data.tokenizer.decode(row.tolist(), skip_special_tokens=False) for row in
                    [text_data.training_rows()[n]["input_ids"][0] for n in range(4)])  # fmt: skip
    for found in filter(None, shortened):
        begin, left_out, end = found.groups()
        assert re.search(re.escape(begin) + ".{" + left_out + "}" + re.escape(end), whole, re.S)


def test_without_a_tokenizer_ids_are_printed_and_a_row_is_one_document(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with ShardWriter(tmp_path, "train", 100) as writer:
        writer.append(np.arange(9))
    printed = lines(capsys, TokenData(str(tmp_path / "train_*.bin"), seq_len=8), rows=1)
    assert "sample 0, 8 tokens of 1 document, shard" in printed[2]
    assert printed[3] == "     8  token ids 0 1 2 3 4 5 6 7"


def test_a_mixture_names_the_source_of_each_row_and_their_shares(tmp_path, capsys):
    for name, first in (("web", 0), ("code", 50)):
        (tmp_path / name).mkdir()
        with ShardWriter(tmp_path / name, "train", 100) as writer:
            writer.append(np.arange(first, first + 40))
    sources = [
        MixtureSource(str(tmp_path / name / "train_*.bin"), weight) for name, weight in (("web", 3), ("code", 1))
    ]
    printed = lines(capsys, MixtureData(sources, seq_len=4), rows=8, first=1)
    assert printed[0].startswith("Mixture: web 75.00%")
    headings = [(line.split(", ")[1], printed[n + 1]) for n, line in enumerate(printed) if line.startswith("sample")]
    assert [name for name, _ in headings].count("web") == 6
    assert all(f"{name}/train_000000.bin, token " in "".join(printed) for name in ("web", "code"))
    assert all((int(ids.split()[3]) >= 50) == (name == "code") for name, ids in headings)
    assert printed[-1] == "8 rows: 32 tokens of 8 documents, padding 0.0%; web 75.0%; code 25.0%"


@pytest.mark.parametrize(
    ("data", "options", "line"),
    [(None, {}, "show-data: data=none: its rows have no positions"),
     (SimpleNamespace(), {}, "show-data: data=SimpleNamespace: its rows"),
     (None, {"rows": 0}, "show-data: rows=0: give a whole number of at least 1"),
     (None, {"first": -1}, "show-data: first=-1: give a whole number of at least 0")],
)  # fmt: skip
def test_what_has_no_rows_is_refused_in_one_line(data, options, line):
    with pytest.raises(UsageError, match=line) as error:
        run(None, data, {}, **options)
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("one_parser")
def test_the_command_prints_ten_rows(text_data, tmp_path, capsys, monkeypatch):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"""
model: {{class_path: LanguageModel, init_args: {{decoder: Llama}}}}
data: {{class_path: TextData, init_args: {{files: {tmp_path / "text"}, vocab_size: 300, seq_len: 16,
  val_fraction: 0.2, cache_dir: {tmp_path / "cache"}}}}}
""")
    monkeypatch.setattr(sys, "argv", ["lightning_tricks", "show-data", "--config", str(recipe)])
    door.main()
    assert capsys.readouterr().out.count("\nsample ") == 10
