"""The tables of docs/optimizers.md are those of the committed measurement, which holds what is promised."""

import copy
import json
import runpy
from pathlib import Path

import pytest

from benchmarks.optimizer_rows import ROWS
from lightning_tricks.optim.limits import LIMITS

ROOT = Path(__file__).resolve().parent.parent
PAGE = runpy.run_path(str(ROOT / "docs/fill_optimizers.py"))
NOT_BITWISE = ("SophiaH", "SOAP (heavyball)")  # the page says why
RESULTS = sorted((ROOT / "benchmarks/results").glob("optimizers-*-cpu.json"))


@pytest.fixture(scope="module")
def newest():
    return json.loads(RESULTS[-1].read_text(encoding="utf-8"))


def test_the_tables_are_those_of_the_newest_measurement(newest):
    page = (ROOT / "docs/optimizers.md").read_text(encoding="utf-8")
    assert PAGE["fill"](page, newest) == page
    assert RESULTS[-1].name in page
    for name in (*PAGE["HEADS"], "refusals"):
        begin = page.index(f"<!-- {name} -->\n") + len(f"<!-- {name} -->\n")
        assert PAGE["fill"](page[:begin] + "spoilt\n" + page[begin:], newest) == page, f"{name} is not filled"


def test_every_optimizer_was_tried_and_works_or_is_refused_where_it_would_not(newest):
    assert sorted([*newest["rows"], *newest["left_out"]]) == sorted(ROWS)
    for name, row in newest["rows"].items():
        (*others, last) = ["", *PAGE["misses"](row)]
        assert not any(others), name
        assert not last or (name in NOT_BITWISE and last.startswith("resume: differs by ")), last
    for name, row in newest["rows"].items():
        assert row["optimizer"] == ROWS[name].optimizer


def test_the_state_has_the_bytes_that_follow_from_the_algorithms(newest):
    held = {name: row.get("costs", {}).get("state_bytes_per_parameter") for name, row in newest["rows"].items()}
    assert held["AdamW"] == pytest.approx(8, rel=1e-3)
    assert held["SGD"] == held["Lion"] == pytest.approx(4, rel=1e-3)
    assert held["Adafactor"] < 0.1
    assert held["MuonAdamW"] == pytest.approx(4, rel=0.05)  # and 8 for embedding and head, 4 % of the parameters


SPOILT = {
    "differs in shards": lambda row: row["tried"]["said"]["fsdp2"]["loss"].__setitem__(5, 9.0),
    "fails": lambda row: row["tried"]["said"].update(bf16_true={"failed": "RuntimeError: no"}),
    "grows": lambda row: row["tried"]["said"]["bf16_true"].update(grows=True),
    "another compiled step": lambda row: row["tried"]["said"]["compile"].update(gap=0.1),
    "resume in shards": lambda row: row["tried"]["said"]["fsdp2"].update(resume="failed: KeyError"),
    "resume": lambda row: row["tried"]["said"]["one"].update(resume="failed: KeyError"),
    "learns nothing": lambda row: row["learns"].update(last_loss=9.0),
    "refused though it works": lambda row: row["tried"].update(
        said={**row["tried"]["said"], "fsdp2": {"refused": "no"}}, tried={"fsdp2": row["tried"]["said"]["fsdp2"]}
    ),
}


@pytest.mark.parametrize("spoil", SPOILT)
def test_a_row_that_breaks_one_promise_is_told(newest, spoil):
    row = copy.deepcopy(newest["rows"]["AdamW"])
    SPOILT[spoil](row)
    assert len(PAGE["misses"](row)) == 1


def test_every_refusal_in_the_table_of_limits_says_what_to_do():
    for limit in LIMITS:
        assert limit.optimizers
        assert "\n" not in limit.why + limit.remedy
