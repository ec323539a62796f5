"""Files that somebody else may have written, in YAML, JSON or CSV: their values, or one line on what is wrong.

No file runs code, and the time to read one grows with its size. What is wrong is an OSError or a ValueError, of which
`why` makes a line. And files that a folder of others names, by an index, a record or a link: they must lie in it.
Imports no torch.
"""

import csv
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from lightning_tricks._core.errors import UsageError

MOST_BYTES = 1 << 20  # of a file of settings, whose reading takes about two seconds per MiB
MOST_DEPTH = 50  # of mappings and lists in each other; a recipe of ours has about 12
LARGEST_STEP = 1 << 53  # up to which a float holds each whole number
_LONGEST_NUMBER = 100  # characters: the time to read a number of base 10 or 60 grows with the square of its length
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


def why(error: Exception) -> str:
    """What is wrong with a file, on one line."""
    return " ".join(str(getattr(error, "strerror", None) or error).split())


def check_regular(file: Path) -> None:
    """Refuse what is no regular file, such as a pipe in a stranger's folder, on which reading would wait for ever.

    Nor is a link read that leads out of the file's folder: any file of this machine would be told as a run's.

    Raises:
        OSError: there is no such file.
        ValueError: it is another kind of file, or such a link.
    """
    if not stat.S_ISREG(file.stat().st_mode):
        raise ValueError("no regular file")
    if file.is_symlink() and not is_inside(file.parent, file):
        raise ValueError(f"a link to {os.path.realpath(file)}, which is outside of its folder")


def read_text(file: Path, most_bytes: int | None = None) -> str:
    """The text of a file, in UTF-8 or with the mark of UTF-16; bytes that are none stand as U+FFFD.

    Raises:
        OSError: it cannot be read.
        ValueError: see `check_regular`; it is larger than `most_bytes`.
    """
    check_regular(file)
    if most_bytes is not None and file.stat().st_size > most_bytes:
        raise ValueError(f"larger than {most_bytes:,} bytes")
    data = file.read_bytes()
    return data.decode("utf-16" if data.startswith(_UTF_16) else "utf-8-sig", errors="replace")


# ---- YAML


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """PyYAML's safe loader, for which whatever JSON does not have is its text: dates, bytes, objects of Python."""


def _as_text(loader: Any, suffix: str, node: Any) -> str:
    own = isinstance(node, yaml.ScalarNode) and node.value
    return str(node.value) if own else suffix.rpartition(":")[2]


def _or_text(construct: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A constructor of PyYAML, for which a scalar that it cannot read is a text: `!!int x`, a number without end."""

    def value(loader: Any, node: Any) -> Any:
        text = loader.construct_scalar(node)
        try:
            return construct(loader, node) if len(text) <= _LONGEST_NUMBER else text
        except (ValueError, KeyError, IndexError, OverflowError):
            return text

    return value


for _tag in ("int", "float", "bool"):
    _name = f"tag:yaml.org,2002:{_tag}"
    _Loader.add_constructor(_name, _or_text(yaml.SafeLoader.yaml_constructors[_name]))
for _tag, _like in (("timestamp", "str"), ("binary", "str"), ("set", "map"), ("omap", "seq"), ("pairs", "seq")):
    _like_name = f"tag:yaml.org,2002:{_like}"
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", yaml.SafeLoader.yaml_constructors[_like_name])
for _prefix in ("!", ""):  # whatever other tag
    _Loader.add_multi_constructor(_prefix, _as_text)


def read_settings(file: Path) -> dict[str, Any]:
    """The mapping in a YAML file, of values that JSON has too; {} for a file without any value.

    An alias (`*name`) is refused: a few lines of them stand for more values than memory holds, or for one that holds
    itself.

    Raises:
        OSError, ValueError: it cannot be read, is too large or too deep, has an alias, or is no mapping.
    """
    text = read_text(file, MOST_BYTES)
    try:
        _check_yaml(text)
        found = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"no valid YAML: {error}".replace('in "<unicode string>", ', "")) from error
    if found is not None and not isinstance(found, dict):
        raise ValueError("no settings: it holds no mapping")
    return found or {}


def _check_yaml(text: str) -> None:
    if re.search("^%TAG", text, re.MULTILINE):
        raise ValueError("a %TAG directive, which no settings need")
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        line = event.start_mark.line + 1  # type: ignore[union-attr]
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"line {line}: the alias *{event.anchor}: write its values out")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_DEPTH:
            raise ValueError(f"line {line}: more than {MOST_DEPTH} lists or mappings in each other")


# ---- JSON


def parse_json(text: str) -> Any:
    """The value of a JSON text. A whole number of more than 18 digits is a float, so that no sum of it can fail.

    Raises:
        ValueError: it is no JSON, or has too many lists or objects in each other.
    """
    try:
        return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 19 else float(digits))
    except RecursionError:
        raise ValueError("too many lists or objects in each other") from None


# ---- CSV


@contextmanager
def open_csv(file: Path) -> Iterator["CsvRows"]:
    """The rows of a CSV file, which is read while they are asked for.

    Raises:
        OSError, ValueError: it cannot be read, or has no header.
    """
    check_regular(file)
    with file.open("rb") as raw:
        encoding = "utf-16" if raw.read(2) in _UTF_16 else "utf-8-sig"
    with file.open(encoding=encoding, errors="replace", newline="") as lines:
        yield CsvRows(lines)


class CsvRows:
    """The rows of a table with a column `step`; a last line that was cut short is none.

    Args:
        lines: of the file, with their ends.

    Raises:
        ValueError: its first line is no header.
    """

    def __init__(self, lines: Iterator[str]) -> None:
        self._reader = csv.reader(line for line in lines if line.endswith(("\n", "\r")))
        try:
            header = next(self._reader, [])
        except csv.Error as error:
            raise ValueError(f"no header: {error}") from error
        self._width = len(header)
        self.columns: dict[str, int] = {}  # places by name, the first of equal ones
        for place, name in enumerate(header):
            self.columns.setdefault(name, place)
        self._left_out, self._first = 0, 0

    def __iter__(self) -> Iterator[tuple[int, list[str]]]:
        """The step and the cells of each row that has a step; others are counted, unless they are empty there."""
        if (step_at := self.columns.get("step")) is None:
            return
        while True:
            try:
                row = next(self._reader, None)
            except csv.Error:  # a cell without end; the next line is a row again
                row = [""]
            if row is None:
                return
            if len(row) == self._width and (step := step_of(row[step_at])) is not None:
                yield step, row
            elif row and not (len(row) == self._width > 1 and not row[step_at]):
                self._left_out += 1
                self._first = self._first or self._reader.line_num

    def problem(self) -> str | None:
        """One line on what was left out of the table, once it has been read; None if nothing was."""
        if self._width and "step" not in self.columns:
            names = ", ".join(list(self.columns)[:4])
            return f"no column `step` in its first line: {names[:100]!r}"
        if not self._left_out:
            return None
        rows = f"{self._left_out:,} row{'s' * (self._left_out > 1)}"
        return f"{rows} left out, without a step or with other columns than the header; the first: line {self._first}"


def number_of(text: str) -> float | None:
    """The number that a text is; None where it is none."""
    try:
        return float(text)
    except ValueError:
        return None


def step_of(text: str) -> int | None:
    """The step that a text is; None where it is no number from 0 on that a float holds exactly."""
    value = number_of(text)
    return int(value) if value is not None and math.isfinite(value) and 0 <= value <= LARGEST_STEP else None


# ---- a folder of others
#
# A link in such a folder may lead to any file of this machine, whose content would then be loaded, written elsewhere or
# told in an error.


def is_inside(folder: Path, file: Path) -> bool:
    """Whether a file lies in a folder, or in the Hugging Face cache that the folder belongs to; links are followed.

    That cache keeps `models--X/snapshots/REVISION/FILE` as links to `models--X/blobs/HASH`.
    """
    root, place = Path(os.path.realpath(folder)), Path(os.path.realpath(file))
    snapshots = next((each for each in (root, *root.parents) if each.parent.name == "snapshots"), root).parent
    blobs = [snapshots.parent / "blobs"] if snapshots.parent.name.startswith("models--") else []
    return any(place.is_relative_to(each) for each in (root, *blobs))


def inside(folder: Path, file: Path) -> Path:
    """The file, there or not.

    Raises:
        UsageError: it lies outside of the folder, see `is_inside`.
    """
    if not is_inside(folder, file):
        raise UsageError(
            f"{folder}: {file.name} is {os.path.realpath(file)}, which is outside of it: take a folder that you trust, "
            "or copy the file into this one"
        )
    return file


def check_run_folder(root: Path, folder: Path) -> None:
    """Refuse a folder below `root` that leads out of it by a link.

    Raises:
        UsageError: it does, and is no place to look for a checkpoint that nobody has named.
    """
    if not is_inside(root, folder):
        raise UsageError(
            f"{folder}: this leads to {os.path.realpath(folder)}, which is outside of {root}: give the path of its "
            "checkpoint by --ckpt_path, if you trust it"
        )


def check_links(folder: Path) -> None:
    """Refuse a folder to write to in which a link leads out of it: what is written would change a file elsewhere."""
    for place in (folder, folder / "checkpoints"):
        for file in place.iterdir() if place.is_dir() else ():
            if file.is_symlink():
                inside(folder, file)
