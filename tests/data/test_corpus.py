"""Where text comes from, and how a bad source is named."""

import gzip
import json
import os
import shutil
import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_tricks._core.errors import UsageError
from lightning_tricks.data import TextData
from lightning_tricks.data.corpus import hugging_face, standard_library, text_files
from lightning_tricks.data.text_files import read_pieces


def documents(*patterns: object, text_field: str = "text") -> list[str]:
    return list(text_files([str(pattern) for pattern in patterns], text_field).documents())


def test_the_standard_library_is_there():
    corpus = standard_library()
    texts = list(corpus.documents())
    assert 8e6 < sum(map(len, texts)) < 16e6
    assert len(set(texts)) == len(texts)
    assert Path(json.__file__).read_text(encoding="utf-8") in texts
    assert f"Python {sys.version_info.major}.{sys.version_info.minor}" in corpus.description


def test_the_standard_library_is_every_source_outside_the_skipped_folders_and_no_more(tmp_path, monkeypatch):
    names = "a.py b/c.py b/test_d.py test/e.py b/tests/f.py site-packages/g.py b/__pycache__/h.py i.txt"
    for number, name in enumerate(names.split()):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"x = {number}\n")
    (tmp_path / "j.py").mkdir()
    (tmp_path / "sitecustomize.py").symlink_to(tmp_path / "removed.py")  # as a distribution may leave it
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    located = standard_library().located
    assert [path.relative_to(tmp_path).as_posix() for path, _ in located()] == ["a.py", "b/c.py", "b/test_d.py"]


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
    (tmp_path / "empty.txt").touch()
    in_folder = ["a.md", "b.txt", "sub/c.py"]
    assert documents(tmp_path) == in_folder
    assert documents(tmp_path / "**/*.py", tmp_path / "b.txt", tmp_path) == in_folder
    assert documents(tmp_path / "sub" / "*") == ["sub/c.py", "sub/d.log"]


def test_a_row_of_jsonl_is_a_document(tmp_path):
    rows = [{"text": "first\n\nstill first"}, {"text": "é \ud83d half"}, {"text": " "}, {"text": None}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert documents(tmp_path / "a.jsonl") == ["first\n\nstill first", "é \ufffd half"]


def test_a_row_of_parquet_is_a_document(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")

    def read(column, name="text", **options):
        pyarrow.parquet.write_table(pyarrow.table({"n": [1, 2, 3], name: column}), tmp_path / "a.PARQUET")
        return documents(tmp_path / "a.PARQUET", **options)

    texts = pyarrow.array(["one", None, "two"])
    for column in (texts, texts.cast("large_string"), texts.dictionary_encode(), texts.cast(pyarrow.string_view())):
        assert read(column, "body", text_field="body") == ["one", "two"]
    with pytest.raises(UsageError, match=r"text_field='text': .*a.PARQUET has n, body"):
        documents(tmp_path / "a.PARQUET")
    for column in ([1, 2, 3], [b"x", None, None], [[1], None, None]):
        with pytest.raises(UsageError, match=r"text_field='text': .*a.PARQUET has .+ there and no text"):
            read(column)
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(UsageError, match=r"b.parquet cannot be read as Parquet \(.+\)$"):
        documents(tmp_path / "b.parquet")


def test_compressed_files_are_read_and_line_ends_are_kept(tmp_path):
    for name, text in (("a.txt.gz", b"one\r\ntwo\rthree\n"), ("b.jsonl.gz", b'{"text": "row"}\n')):
        with gzip.open(tmp_path / name, "wb") as file:
            file.write(text)
    (tmp_path / "c.txt").write_bytes(b"one\r\ntwo\rthree\n")
    assert documents(tmp_path) == ["one\r\ntwo\rthree\n", "row", "one\r\ntwo\rthree\n"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", r"^files: .*a.txt is empty"),
        ("a.txt", b"ok\n\xff\xfe\n", r"^files: .*a.txt is not UTF-8 text \(invalid start byte\); convert it or leave"),
        ("a.txt", "text".encode("utf-16-le"), r"^files: .*a.txt is no UTF-8 text \(it has zero bytes\); convert it"),
        ("a.txt.gz", gzip.compress(b"text", mtime=0)[:20], r"a.txt.gz cannot be read \(Compressed file ended"),
        ("a.jsonl", b'{"text": "good"}\n{"text": ', r"a.jsonl, line 2 is not JSON \(.+\)$"),
        ("a.jsonl", b'{"body": "x", "n": 1}', r"text_field='text': .*a.jsonl, line 1 has body, n; name the key of its"),
        ("a.jsonl", b'{"text": 3}', r"line 1 has 3 there and no text"),
        ("a.jsonl", b"[1]", "line 1 has list"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        documents(tmp_path / name)


@pytest.mark.parametrize("pattern", ["nothing.txt", "no*.txt", "folder"])
def test_a_pattern_that_matches_nothing_is_named(tmp_path, pattern):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "empty.txt").touch()
    with pytest.raises(UsageError, match=rf"^files: '.*{pattern.replace('*', '.')}' matches no file"):
        documents(tmp_path / pattern)


def test_an_identity_changes_with_the_documents_alone(tmp_path):
    texts, cache = tmp_path / "texts", tmp_path / "cache"
    texts.mkdir()

    def identity(text_field="text", folder=texts):
        return text_files([str(folder)], text_field).identity(cache, False)

    def write(name, text):
        (texts / name).write_text(text)

    write("a.txt", "one")
    seen = [identity(), identity("body")]
    write("b.txt", "two")
    seen.append(identity())
    write("a.txt", "ONE and more")
    seen.append(identity())
    write("a.txt", "TWO and more")  # no longer than before
    os.utime(texts / "a.txt", (0, 0))
    seen.append(identity())
    texts.joinpath("b.txt").rename(texts / "0.txt")  # the same texts in another order
    seen.append(identity())
    assert len(set(seen)) == 6
    os.utime(texts / "a.txt", (1, 1))
    texts.joinpath("0.txt").rename(texts / "1.md")
    assert identity() == identity(folder=shutil.copytree(texts, tmp_path / "copied")) == seen[-1]
    texts.joinpath("1.md").rename(texts / "1.jsonl")  # the same bytes, read in another way
    assert identity() not in seen


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
    with pytest.raises(UsageError, match=rf"pip install -e '.\[{extra}\]' in the clone$"):
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
    def install(rows, sha="c0ffee"):
        fake = FakeDatasets(rows)
        monkeypatch.setitem(sys.modules, "datasets", fake)
        hub = SimpleNamespace(HfApi=lambda: SimpleNamespace(dataset_info=lambda *args, **options: fake.info(*args)))
        fake.info = lambda name: SimpleNamespace(sha=sha)
        monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
        return fake

    return install


def test_a_hugging_face_dataset_is_streamed(fake_datasets):
    fake = fake_datasets([{"text": "one"}, {"text": ""}, {"text": None}, {"text": "two"}])
    assert list(hugging_face("owner/name:small", "text").documents()) == ["one", "two"]
    assert fake.asked == (("owner/name", "small"), {"split": "train", "streaming": True})
    list(hugging_face("owner/name", "text").documents())
    assert fake.asked[0] == ("owner/name", None)


def test_a_hugging_face_dataset_that_fails_is_named_in_one_line(fake_datasets):
    fake_datasets(ConnectionError("no route\nto host"))
    with pytest.raises(UsageError, match=r"^hf_dataset='owner/name': cannot be read \(no route\)$"):
        list(hugging_face("owner/name", "text").documents())
    fake_datasets([{"body": "x", "id": 1}])
    with pytest.raises(UsageError, match=r"text_field='text': owner/name has the columns body, id"):
        list(hugging_face("owner/name", "text").documents())


def test_a_dataset_of_the_hub_is_its_revision_and_that_revision_is_read(fake_datasets, tmp_path):
    def folder(revision, name="owner/name", rows=20):
        fake = fake_datasets([{"text": f"{revision} {number} " * 9} for number in range(rows)], revision)
        data = TextData(hf_dataset=name, vocab_size=300, seq_len=8, val_fraction=0.2, cache_dir=str(tmp_path))
        data.setup()
        text = (data.training_text() + data.validation_text()).decode()
        assert all(f"{revision} {number} " * 9 in text for number in range(rows))
        assert data.source_files([0, 5]) == [None, None]
        if fake.asked is not None:
            assert fake.asked[1]["revision"] == revision
        return data.folder, fake.asked is not None

    first, read = folder("aaa")
    assert read
    assert folder("aaa") == (first, False)
    second, read = folder("bbb")
    assert read
    assert folder("aaa") == (first, False)
    assert len({first, second, folder("aaa", "owner/name:config")[0]}) == 3


def test_where_the_hub_does_not_answer_the_last_known_revision_is_served_and_a_line_says_so(
    fake_datasets, tmp_path, capsys
):
    def refuse(name):
        raise ConnectionError("no route\nto host")

    def identity(recorded=False):
        return hugging_face("owner/name", "text").identity(tmp_path, recorded)

    fake = fake_datasets([])
    fake.info = refuse
    with pytest.raises(UsageError, match=r"^hf_dataset='owner/name': cannot be read \(no route\)$"):
        identity()
    fake_datasets([])
    known = identity()
    assert capsys.readouterr().err == ""
    fake = fake_datasets([])
    fake.info = refuse
    assert identity() == known
    assert "the Hub does not answer (no route); its last known revision c0ffee is used" in capsys.readouterr().err
    assert identity(recorded=True) == known  # another process has asked
    assert capsys.readouterr().err == ""


def test_a_local_dataset_folder_is_the_content_of_its_files(fake_datasets, tmp_path):
    fake = fake_datasets([{"text": "row"}])
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.csv").write_text("text\nrow\n")

    def identity(place=folder):
        return hugging_face(str(place), "text").identity(tmp_path / "cache", False)

    first = identity()
    os.utime(folder / "train.csv", (1, 1))
    assert identity() == first == identity(shutil.copytree(folder, tmp_path / "copied"))
    (folder / "train.csv").write_text("text\nROW\n")
    assert identity() != first
    corpus = hugging_face(str(folder), "text")
    corpus.identity(tmp_path / "cache", False)
    assert list(corpus.documents()) == ["row"]
    assert fake.asked == ((str(folder), None), {"split": "train", "streaming": True})


# -- files of other kinds and names


@pytest.mark.parametrize("name", ["a.ndjson", "a.JSONL", "a.jsonl.GZ"])
def test_rows_of_json_are_read_as_rows_whatever_the_case_and_name_of_their_ending(name, tmp_path):
    write = gzip.open if name.lower().endswith("gz") else open
    with write(tmp_path / name, "wt") as file:
        file.write('{"text": "row"}\n{"text": "another"}\n')
    assert documents(tmp_path / name) == documents(tmp_path) == documents(tmp_path / "*") == ["row", "another"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz"])
def test_a_byte_order_mark_of_utf_8_is_no_text(name, tmp_path):
    text = '{"text": "plain letters"}\n'
    with (gzip.open if name.endswith("gz") else open)(tmp_path / name, "wb") as file:
        file.write(text.encode("utf-8-sig"))
    assert documents(tmp_path / name) == ["plain letters" if "jsonl" in name else text]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["text", "a"]), inner),
    max_leaves=8,
)
rows_of_json = json_values.map(lambda value: json.dumps(value).encode())
junk = st.sampled_from([b'{"text": 1' + b"0" * 5000 + b"}", b"[" * 100_000, b'{"text":"a","text":"b"}'])


@given(st.lists(rows_of_json | st.binary(max_size=30) | junk, max_size=3))
def test_whatever_stands_in_a_file_of_rows_is_one_line_or_its_text(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("junk") / "a.jsonl"
    path.write_bytes(b"\n".join([b'{"text": "first"}', *lines]))
    try:
        texts, line = documents(path), ""
    except UsageError as error:
        texts, line = ["first"], str(error)
    assert texts[0] == "first"
    "".join(texts).encode()  # each is a text
    assert not line or str(path) in line
    assert "\n" not in line
    assert len(line) < len(str(path)) + 400


# -- parts, compressed text and text behind URLs


def in_parts(corpus) -> list[list[str]]:
    return [[text for _, text in located()] for _, located in corpus.parts]


@given(
    rows=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30), min_size=1, max_size=30),
    size=st.integers(1, 300),
    end=st.sampled_from(["\n", "\r\n", "\n\n", "\r"]),
    starts_with=st.sampled_from(["", "\ufeff"]),
    ends=st.booleans(),
)
def test_parts_cut_at_any_byte_have_each_row_once(tmp_path_factory, rows, size, end, starts_with, ends):
    path = tmp_path_factory.mktemp("rows") / "a.jsonl"
    lines = end.join(json.dumps({"text": text}, ensure_ascii=False) for text in rows)
    path.write_bytes((starts_with + lines + end * ends).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_tricks.data.corpus._SMALLEST_PART", size)
        patch.setattr("lightning_tricks.data.corpus._LARGEST_PART", size)
        corpus = text_files([str(path)], "text")
    assert list(chain(*in_parts(corpus))) == list(corpus.documents()) == [text for text in rows if text.strip()]
    assert sum(n_bytes for n_bytes, _ in corpus.parts) == path.stat().st_size == corpus.n_bytes


def test_parts_of_parquet_end_with_row_groups_and_small_files_share_a_part(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    texts = [f"row {n} of a table" for n in range(1000)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet", row_group_size=100)
    for n in range(30):
        (tmp_path / f"b{n:02}.txt").write_text(f"file {n}")
    size = (tmp_path / "a.parquet").stat().st_size
    monkeypatch.setattr("lightning_tricks.data.corpus._SMALLEST_PART", size // 5)
    corpus = text_files([str(tmp_path)], "text")
    parts = in_parts(corpus)
    assert list(chain(*parts)) == list(corpus.documents()) == [*texts, *(f"file {n}" for n in range(30))]
    assert len(parts) == 6
    assert all(len(part) % 100 == 0 and len(part) < 500 for part in parts[:5])
    assert len(parts[5]) == 30


def test_zst_and_gz_hold_rows_and_plain_text(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")

    def zst(*parts: bytes) -> bytes:  # a frame for each, as parallel compressors write
        return b"".join(pyarrow.compress(part, codec="zstd", asbytes=True) for part in parts)

    rows = [json.dumps({"text": f"row {n}"}) + "\n" for n in range(100)]
    (tmp_path / "a.jsonl.zst").write_bytes(zst("".join(rows[:40]).encode(), "".join(rows[40:]).encode()))
    (tmp_path / "b.NDJSON.gz").write_bytes(gzip.compress("".join(rows).encode()))
    (tmp_path / "c.txt.zst").write_bytes(zst(b"plain\n"))
    expected = [f"row {n}" for n in range(100)]
    assert documents(tmp_path) == [*expected, *expected, "plain\n"]
    assert text_files([str(tmp_path / "a.jsonl.zst")], "text").identity(tmp_path, False) != (
        text_files([str(tmp_path / "b.NDJSON.gz")], "text").identity(tmp_path, False)
    )
    whole = (tmp_path / "a.jsonl.zst").read_bytes()
    for damaged in (whole[:-5], b"no zstd at all"):
        (tmp_path / "a.jsonl.zst").write_bytes(damaged)
        with pytest.raises(UsageError, match=r"^files: .*a.jsonl.zst cannot be read \(.+\)$"):
            documents(tmp_path / "a.jsonl.zst")


def test_zst_without_its_library_is_refused_with_the_command(tmp_path, monkeypatch):
    (tmp_path / "a.txt.zst").write_bytes(b"x")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"a.txt.zst needs pyarrow: pip install -e '.\[parquet\]' in the clone$"):
        documents(tmp_path / "a.txt.zst")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("a.csv", "convert it to .jsonl or .parquet, of which each row is a document"),
        ("a.JSON", "convert it"),
        ("a.csv.gz", "convert it"),
        ("a.arrow", "convert it"),
        ("a.zip", "unpack it, or compress each file as .gz or .zst"),
        ("a.jsonl.bz2", "unpack it"),
        ("a.bin", "give token files to TokenData"),
        ("a.npy", "give token files to TokenData"),
    ],
)
def test_a_named_file_that_is_no_text_by_its_ending_is_refused(tmp_path, name, remedy):
    (tmp_path / name).write_text("some, text\n")
    for pattern in (tmp_path / name, tmp_path / "*"):
        with pytest.raises(UsageError, match=rf"^files: .*{name} is no text by its ending \.\w+; {remedy}"):
            documents(pattern)
    (tmp_path / "README").write_text("text")  # without an ending, or with one that may be text
    (tmp_path / "a.tex").write_text("text")
    assert documents(tmp_path / "README", tmp_path / "a.tex") == ["text", "text"]


@pytest.fixture
def bucket(monkeypatch):
    """A folder behind a URL."""
    import fsspec

    monkeypatch.setattr("lightning_tricks._host.address.WAITS_SECONDS", (0, 0))
    files = fsspec.filesystem("memory")
    yield files
    files.rm("/corpus", recursive=True)


def test_text_behind_urls_is_read_in_the_parts_of_local_text(bucket, tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    rows = "".join(json.dumps({"text": f"row {n} é"}) + "\n" for n in range(500)).encode()
    (tmp_path / "a.jsonl").write_bytes(rows)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(rows))
    (tmp_path / "c.txt").write_bytes(b"plain text\n")
    table = pyarrow.table({"text": [f"cell {n}" for n in range(100)]})
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet", row_group_size=10)
    for path in tmp_path.iterdir():
        bucket.pipe(f"/corpus/{path.name}", path.read_bytes())
    bucket.pipe("/corpus/e.log", b"no text of a folder")
    monkeypatch.setattr("lightning_tricks.data.corpus._SMALLEST_PART", 1000)
    monkeypatch.setattr("lightning_tricks.data.corpus._LARGEST_PART", 1000)
    here, there = (text_files([where], "text") for where in (str(tmp_path), "memory://corpus"))
    assert in_parts(there) == in_parts(here)
    assert len(in_parts(there)) > 8
    assert list(there.documents()) == list(here.documents())
    assert documents("memory://corpus/*.txt", tmp_path / "c.txt") == ["plain text\n"] * 2


def test_the_identity_of_text_behind_a_url_changes_with_its_file(bucket, tmp_path):
    bucket.pipe("/corpus/a.txt", b"text")

    def identity() -> str:
        return text_files(["memory://corpus/a.txt"], "text").identity(tmp_path, False)

    first = identity()
    assert identity() == first
    bucket.pipe("/corpus/a.txt", b"else")
    assert identity() != first


def test_a_url_without_a_file_or_a_library_is_one_line(bucket):
    bucket.pipe("/corpus/e.log", b"x")
    for url, message in (
        ("memory://corpus/none.txt", r"^memory://corpus/none.txt: it is not there"),
        ("memory://corpus", r"^files: 'memory://corpus' matches no file with text in it"),
        ("memory://corpus/*.md", r"^files: 'memory://corpus/\*.md' matches no file"),
        ("nosuch://corpus/a.txt", r"^nosuch://corpus/a.txt: .*check the URL"),
    ):
        with pytest.raises(UsageError, match=message):
            documents(url)


def test_a_bucket_that_drops_while_text_is_read_is_asked_again(bucket, monkeypatch):
    bucket.pipe("/corpus/a.txt", b"text\n")
    real, drops = type(bucket).cat_file, [2]

    def dropping(self, *args, **options):
        drops[0] -= 1
        if drops[0] >= 0:
            raise TimeoutError("the connection was reset")
        return real(self, *args, **options)

    monkeypatch.setattr(type(bucket), "cat_file", dropping)
    assert documents("memory://corpus/a.txt") == ["text\n"]
    drops[0] = 3
    with pytest.raises(UsageError, match=r"^memory:///corpus/a.txt: not read in 3 tries \(TimeoutError: the conn"):
        documents("memory://corpus/a.txt")
