"""The tables of Lightning's own tests in docs/existing_projects.md are those of the committed measurement."""

import json
import runpy
from pathlib import Path

import pytest

from benchmarks import lightning_suite

ROOT = Path(__file__).resolve().parent.parent
FILL = runpy.run_path(str(ROOT / "docs/fill_lightning.py"))
RESULTS = sorted((ROOT / "benchmarks/results").glob("lightning-suite-*-cpu.json"))


@pytest.fixture(scope="module")
def newest():
    return json.loads(RESULTS[-1].read_text(encoding="utf-8"))


def test_the_tables_are_those_of_the_newest_measurement(newest):
    page = (ROOT / "docs/existing_projects.md").read_text(encoding="utf-8")
    assert FILL["fill"](page, newest) == page
    assert FILL["fill"](page.replace("<!-- lightning -->\n", "<!-- lightning -->\nspoilt\n"), newest) == page


def test_every_difference_has_a_reason_of_the_table(newest):
    known = {why for *_, why in lightning_suite.REASONS}
    for mode, found in newest["modes"].items():
        assert [row for row in found["differences"] if row["reason"] not in known] == [], mode


def test_monitors_change_no_fit_of_lightnings_tests(newest):
    monitors = newest["modes"]["monitors"]
    assert monitors["ends"] == monitors["equal"] > 300
    assert not [row for found in newest["modes"].values() for row in found["differences"] if row["kind"] == "crashed"]
