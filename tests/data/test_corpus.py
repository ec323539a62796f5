"""Where text comes from, and how a bad source is named."""

import gzip
import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_tricks._errors import UsageError
from lightning_tricks.data import TextData
from lightning_tricks.data.corpus import expand, hugging_face, read_pieces, standard_library, text_files


def documents(*patterns: object, text_field: str = "text") -> list[str]:
    return list(text_files([str(pattern) for pattern in patterns], text_field).documents())


def test_the_standard_library_is_there_without_its_tests():
    corpus = standard_library()
    texts = list(corpus.documents())
    assert 8e6 < sum(map(len, texts)) < 16e6
    assert len(set(texts)) == len(texts)
    assert Path(json.__file__).read_text(encoding="utf-8") in texts
    assert not any("site-packages" in str(path) for path in [corpus.description])
    assert f"Python {sys.version_info.major}.{sys.version_info.minor}" in corpus.description
    library = Path(json.__file__).parents[1]  # Debian's has neither of the two
    for tests in (library / "idlelib" / "idle_test", library / "test"):
        for path in list(tests.glob("test_*.py"))[:20]:
            assert path.read_text(encoding="utf-8", errors="replace") not in texts


def test_the_standard_library_is_every_source_outside_the_skipped_folders_and_no_more(tmp_path, monkeypatch):
    names = [
        "a.py",
        "b/c.py",
        "b/test_d.py",
        "test/e.py",
        "b/tests/f.py",
        "site-packages/g.py",
        "b/__pycache__/h.py",
        "i.txt",
    ]
    for number, name in enumerate(names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"x = {number}\n")
    (tmp_path / "j.py").mkdir()
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    located = standard_library().located
    assert located is not None
    assert [path.relative_to(tmp_path).as_posix() for path, _ in located()] == ["a.py", "b/c.py", "b/test_d.py"]


def test_a_link_to_nothing_in_the_standard_library_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "sitecustomize.py").symlink_to(tmp_path / "removed.py")  # as a distribution may leave it
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert list(standard_library().documents()) == ["x = 1\n"]


def test_a_standard_library_without_sources_and_a_source_that_cannot_be_read_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(UsageError, match=rf"^files: no standard library sources under {tmp_path}; give text files of"):
        standard_library()
    (tmp_path / "a.py").write_text("x = 1\n")
    corpus = standard_library()
    (tmp_path / "a.py").unlink()
    with pytest.raises(UsageError, match=rf"^files: {tmp_path}/a\.py cannot be read \(No such file or directory\)$"):
        list(corpus.documents())


@given(st.text(alphabet="ab \n\ré\u2028", max_size=400), st.integers(1, 40))
def test_pieces_joined_are_the_file(tmp_path_factory, text, size):
    path = tmp_path_factory.mktemp("pieces") / "a.txt"
    path.write_bytes(text.encode())
    pieces = list(read_pieces(path, size))
    assert "".join(pieces) == text
    assert all(len(piece) < 3 * size for piece in pieces)


def test_pieces_end_after_blank_lines(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ntwo\n\nthree\n\nfour\n")
    assert list(read_pieces(path, 5)) == ["one\ntwo\n\n", "three\n\n", "four\n"]


def test_one_big_file_becomes_many_documents(story):
    texts = documents(story)
    assert len(texts) > 10
    assert "".join(texts) == story.read_text()
    assert all(text.endswith("\n\n") for text in texts[:-1])


def test_with_a_hundred_files_a_file_is_a_document(tmp_path):
    for n in range(100):
        (tmp_path / f"{n:03}.txt").write_text(f"file {n}\n\n" * 1000)
    assert [len(text) for text in documents(tmp_path)] == [len(f"file {n}\n\n") * 1000 for n in range(100)]
    (tmp_path / "099.txt").unlink()
    assert len(documents(tmp_path)) > 99


def test_an_added_file_changes_no_document_of_the_others(tmp_path):
    for name, lines in (("a.txt", 40_000), ("c.txt", 80_000)):
        (tmp_path / name).write_text("".join(f"{name} {n}\n\n" for n in range(lines)))
    before = documents(tmp_path)
    (tmp_path / "b.txt").write_text("added\n\n" * 80_000)
    after = documents(tmp_path)
    assert [text for text in after if "added" not in text] == before
    sizes = {name: [len(text) for text in before if name in text][:-1] for name in ("a.txt", "c.txt")}
    for name, lengths in sizes.items():  # a two hundredth of its own file, to the end of a paragraph
        size = (tmp_path / name).stat().st_size // 200
        assert set(lengths) <= set(range(size, size + 20)), name


def test_folders_globs_and_lists_give_each_file_once_in_one_order(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    names = ("b.txt", "a.md", "sub/c.py", "sub/d.log", ".hidden/e.txt", "f.png")
    for name in names:
        (tmp_path / name).write_text(name)
    in_folder = ["a.md", "b.txt", "sub/c.py"]
    assert documents(tmp_path) == in_folder
    assert documents(tmp_path / "**/*.py", tmp_path / "b.txt", tmp_path) == in_folder
    assert documents(tmp_path / "sub" / "*") == ["sub/c.py", "sub/d.log"]


def test_a_row_of_jsonl_is_a_document(tmp_path):
    rows = [{"text": "first\n\nstill first"}, {"text": "é \ud83d half"}, {"text": " "}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert documents(tmp_path / "a.jsonl") == ["first\n\nstill first", "é \ufffd half"]


def test_a_row_of_parquet_is_a_document(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"n": [1, 2, 3], "body": ["one", None, "three"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert documents(tmp_path / "a.parquet", text_field="body") == ["one", "three"]
    with pytest.raises(UsageError, match=r"text_field='text': .*a.parquet has n, body"):
        documents(tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(UsageError, match=r"b.parquet cannot be read as Parquet \(.+\)$"):
        documents(tmp_path / "b.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2]}), tmp_path / "c.parquet")
    with pytest.raises(UsageError, match=r"text_field='text': .*c.parquet holds int64"):
        documents(tmp_path / "c.parquet")


def test_compressed_files_are_read(tmp_path):
    for name, text in (("a.txt.gz", "plain"), ("b.jsonl.gz", '{"text": "row"}\n')):
        with gzip.open(tmp_path / name, "wt") as file:
            file.write(text)
    assert documents(tmp_path) == ["plain", "row"]
    (tmp_path / "a.txt.gz").write_bytes((tmp_path / "b.jsonl.gz").read_bytes()[:20])
    with pytest.raises(UsageError, match=r"a.txt.gz cannot be read \(Compressed file ended"):
        documents(tmp_path)


def test_line_ends_are_kept(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\rthree\n")
    with gzip.open(tmp_path / "b.txt.gz", "wb") as file:
        file.write(b"one\r\ntwo\rthree\n")
    assert documents(tmp_path) == ["one\r\ntwo\rthree\n"] * 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"^files: .*a.txt is empty"),
        (b"ok\n\xff\xfe\n", r"^files: .*a.txt is not UTF-8 text \(invalid start byte\); convert it or leave it out$"),
    ],
)
def test_a_bad_text_file_is_named(tmp_path, content, message):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(UsageError, match=message):
        documents(tmp_path / "a.txt")


def test_a_file_that_cannot_be_opened_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UsageError, match=r"^files: .*a.txt cannot be read \(Permission denied\)$"):
        documents(tmp_path / "a.txt")


def test_an_empty_file_among_others_in_a_folder_is_passed_over(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "full.txt").write_text("text")
    assert documents(tmp_path) == ["text"]


@pytest.mark.parametrize("pattern", ["nothing.txt", "no*.txt", "folder"])
def test_a_pattern_that_matches_nothing_is_named(tmp_path, pattern):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "empty.txt").touch()
    with pytest.raises(UsageError, match=rf"^files: '.*{pattern.replace('*', '.')}' matches no file"):
        documents(tmp_path / pattern)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ', r"a.jsonl, line 2 is not JSON \(.+\)$"),
        ('{"body": "x", "n": 1}', r"text_field='text': .*a.jsonl, line 2 has body, n; name the key of its text$"),
        ('{"text": 3}', "line 2 has 3 there and no text"),
        ("[1]", "line 2 has list"),
    ],
)
def test_a_bad_row_is_named_with_its_line(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(UsageError, match=message):
        documents(tmp_path / "a.jsonl")


def test_a_fingerprint_changes_with_what_could_change_the_documents(tmp_path):
    path = tmp_path / "a.txt"

    def fingerprint(text_field="text"):
        return text_files([str(tmp_path)], text_field).fingerprint

    path.write_text("one")
    first = fingerprint()
    assert first == fingerprint()
    assert first != fingerprint("body")
    (tmp_path / "b.txt").write_text("two")
    assert first != (second := fingerprint())
    path.write_text("ONE and more")
    assert second != (third := fingerprint())
    path.write_text("TWO and more")  # no longer than before
    os.utime(path, (0, 0))
    assert third != fingerprint()


@pytest.mark.parametrize(
    ("package", "extra", "make"),
    [
        ("datasets", "datasets", lambda path: list(hugging_face("owner/name", "text").documents())),
        ("pyarrow", "parquet", lambda path: documents(path)),
    ],
)
def test_a_missing_extra_names_its_pip_command(tmp_path, monkeypatch, package, extra, make):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else True)
    with pytest.raises(UsageError, match=rf'pip install "lightning-tricks\[{extra}\]"$'):
        make(tmp_path / "a.parquet")


class FakeDatasets:
    """Stands in for the `datasets` package."""

    def __init__(self, rows):
        self.rows, self.asked = rows, None

    def load_dataset(self, *args, **kwargs):
        self.asked = args, kwargs
        if isinstance(self.rows, Exception):
            raise self.rows
        return iter(self.rows)


@pytest.fixture
def fake_datasets(monkeypatch):
    def install(rows):
        fake = FakeDatasets(rows)
        monkeypatch.setitem(sys.modules, "datasets", fake)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
        return fake

    return install


def test_a_hugging_face_dataset_is_streamed(fake_datasets):
    fake = fake_datasets([{"text": "one"}, {"text": ""}, {"text": None}, {"text": "two"}])
    assert list(hugging_face("owner/name:small", "text").documents()) == ["one", "two"]
    assert fake.asked == (("owner/name", "small"), {"split": "train", "streaming": True})
    list(hugging_face("owner/name", "text").documents())
    assert fake.asked[0] == ("owner/name", None)


def test_documents_of_a_hugging_face_dataset_are_tokenized_and_lie_in_no_file(fake_datasets, tmp_path):
    fake_datasets([{"text": f"document {number} " * 9} for number in range(20)])
    cache = str(tmp_path / "cache")
    data = TextData(hf_dataset="owner/name", vocab_size=300, seq_len=8, val_fraction=0.2, cache_dir=cache)
    data.setup()
    text = (data.training_text() + data.validation_text()).decode()
    assert all(f"document {number} " * 9 in text for number in range(20))
    assert data.source_files([0, 5]) == [None, None]


def test_a_hugging_face_dataset_that_fails_is_named_in_one_line(fake_datasets):
    fake_datasets(ConnectionError("no route\nto host"))
    with pytest.raises(UsageError, match=r"^hf_dataset='owner/name': cannot be read \(no route\)$"):
        list(hugging_face("owner/name", "text").documents())
    fake_datasets([{"body": "x", "id": 1}])
    with pytest.raises(UsageError, match=r"text_field='text': owner/name has the columns body, id"):
        list(hugging_face("owner/name", "text").documents())


def test_a_folder_that_cannot_be_listed_is_an_error_and_not_an_empty_one(tmp_path, monkeypatch):
    (tmp_path / "texts" / "secret").mkdir(parents=True)
    (tmp_path / "texts" / "a.txt").write_text("text")
    real = os.scandir

    def scandir(path):  # a mode would not do: root may list everything
        if str(path).endswith("secret"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(
        UsageError, match=r"^files='.*texts': .*secret cannot be read \(Permission denied\); leave it out"
    ):
        expand([str(tmp_path / "texts")])
