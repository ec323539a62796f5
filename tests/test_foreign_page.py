"""The table of foreign models in docs/existing_projects.md is that of the committed measurement."""

import json
import runpy
from pathlib import Path

import pytest

from benchmarks import foreign
from benchmarks.foreign_models import MODELS

ROOT = Path(__file__).resolve().parent.parent
FILL = runpy.run_path(str(ROOT / "docs/fill_foreign.py"))
RESULTS = sorted((ROOT / "benchmarks/results").glob("foreign-*-cpu.json"))


@pytest.fixture(scope="module")
def newest():
    return json.loads(RESULTS[-1].read_text(encoding="utf-8"))


def test_the_table_is_that_of_the_newest_measurement(newest):
    page = (ROOT / "docs/existing_projects.md").read_text(encoding="utf-8")
    assert FILL["fill"](page, newest) == page
    assert FILL["fill"](page.replace("<!-- foreign -->\n", "<!-- foreign -->\nspoilt\n"), newest) == page


def test_every_model_was_tried_and_none_failed(newest):
    assert [row["model"] for row in newest["rows"]] == list(MODELS)
    for row in newest["rows"]:
        assert row["norm"] <= foreign.BOUNDS["norm"], row["model"]
        assert "failed" not in row, row["model"]
        assert not str(row["fsdp2"]).startswith("failed"), row["model"]


def test_verdicts_by_hand():
    assert foreign.verdict(1e-7, 1e-6) == "equal"
    assert foreign.verdict(float("nan"), 1e-6) == "differs by nan"
    assert foreign.verdict(2e-5, 1e-6) == "differs by 2e-05"
    assert foreign.verdict("refused: a line", 1e-6) == "refused: a line"
