"""The page on faults: each row names a test that is there."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs/what_survives.md"


def rows() -> list[list[str]]:
    """The cells of each row of the tables, without their heads."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return [row for row in cells if row[0] not in ("fault", "change")]


def test_each_row_names_what_is_lost_and_a_test_that_exists():
    assert len(rows()) >= 20
    for fault, lost, named in rows():
        file, test = re.fullmatch(r"`(test_\w+\.py)::(test_\w+)`", named).groups()
        (path,) = TESTS.rglob(file)
        functions = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
        assert test in functions, (fault, lost, named)
