"""SECURITY.md promises what a test holds."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def named_tests() -> list[tuple[str, str]]:
    """(file, function) of each test in the table; a function without a file is of the file before it."""
    found, file = [], ""
    for path, name in re.findall(r"`(tests/[\w/]+\.py)?(?:::(\w+))?`", (ROOT / "SECURITY.md").read_text("utf-8")):
        file = path or file
        if path or name:
            found.append((file, name))
    return found


@pytest.mark.parametrize(("file", "name"), named_tests())
def test_each_promise_names_a_test_that_is_there(file, name):
    assert f"def {name}" in (ROOT / file).read_text("utf-8")


def test_each_promise_has_a_test():
    rows = [line for line in (ROOT / "SECURITY.md").read_text("utf-8").splitlines() if line.startswith("| ")]
    promises = rows[rows.index("| promise | test |") + 1 :]
    assert len(promises) == 11
    assert all(re.search(r"\| `tests/[^|]*\|$", row) for row in promises)
