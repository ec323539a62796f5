"""Tricks, precisions, strategies, optimizers: each three of them meet in a run that is killed and goes on."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from harness import processes
from harness.token_files import write_token_files
from pairs.covering import combinations_to_cover, covering_array
from pairs.run_pair import fit, run_row

from lightning_tricks._errors import UsageError

TRICKS = (
    "StepGuard", "SpikeRollback", "EMA", "TailAverage", "ScheduleFree", "BatchSizeWarmup", "TotalTokens",
    "DecayOnDemand", "SafeCheckpoint", "ExactResume", "Preemption", "RunLedger", "MFUMonitor", "GradNormMonitor",
)  # fmt: skip
OTHERS: dict[str, tuple[Any, ...]] = {
    "precision": ("fp32", "BF16True", "FP16Mixed"),
    "optimizer": ("AdamW", "MuonAdamW", "SGD"),
    "accumulation": (1, 2),
    "killed": (3, 6, 8),
    **dict.fromkeys(TRICKS, (False, True)),
}
FACTORS = {"processes": (1, 2), **OTHERS}


def in_words(row: dict[str, Any]) -> str:
    """The settings of a row, without the tricks that are off."""
    return " ".join(name if level is True else f"{name}={level}" for name, level in row.items() if level is not False)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"ScheduleFree": True, "EMA": True}, r"EMA: a schedule-free optimizer averages the weights already: remove EMA"),
    (
        {"ScheduleFree": True, "TailAverage": True},
        r"TailAverage: a schedule-free optimizer averages the weights",
    ),
    ({"ScheduleFree": True, "DecayOnDemand": True}, r"AdamWScheduleFree wants a constant learning rate"),
    ({"ScheduleFree": True, "precision": "BF16True"}, r"bfloat16, in which an average over many steps stands still"),
    ({"ScheduleFree": True, "optimizer": "MuonAdamW"}, r"ScheduleFree: the optimizer is MuonAdamW"),
]
ALONE = {"precision": "fp32", "processes": 1, "optimizer": "AdamW", "accumulation": 1, "killed": 6,
         **dict.fromkeys(TRICKS, False)}  # fmt: skip
FORBIDDEN = [combination for combination, _ in REFUSED]
# two processes take four times as long as one: there all pairs of the other settings meet, the other threes in one
IN_TWO = [{"processes": 2, **row} for row in covering_array(OTHERS, FORBIDDEN, strength=2)]
IN_ONE = covering_array({**FACTORS, "processes": (1,)}, FORBIDDEN, given=IN_TWO)
PARTS = 3  # for as many workers


def report(rows: list[dict[str, Any]], folder: Path, tokens: Path) -> list[str]:
    """A line for each row that did not end as it should, with the first differences."""
    lines = []
    for number, row in enumerate(rows):
        if found := run_row(row, folder / str(number), tokens):
            lines.append("\n    ".join([in_words(row), *found[:5]]))
    return lines


def test_each_three_settings_meet_in_one_row():
    rows = [*IN_ONE, *IN_TWO]
    held = {frozenset(three) for row in rows for three in combinations(row.items(), 3)}
    assert held == combinations_to_cover(FACTORS, FORBIDDEN, 3)
    assert len(rows) < 60


@pytest.mark.parametrize("part", range(PARTS))
def test_in_one_process_a_killed_run_goes_on_to_the_bit(part, tmp_path):
    lines = report(IN_ONE[part::PARTS], tmp_path, write_token_files(tmp_path / "tokens"))
    assert not lines, "\n".join(lines)


def in_two(rank: int, rows: list[dict[str, Any]], folder: Path) -> None:
    lines = report(rows, folder, folder / "tokens")
    assert not lines, f"rank {rank}:\n" + "\n".join(lines)


@pytest.mark.parametrize("part", range(PARTS))
def test_in_shards_on_two_processes_a_killed_run_goes_on_to_the_bit(part, tmp_path):
    write_token_files(tmp_path / "tokens")
    processes.run(in_two, IN_TWO[part::PARTS], tmp_path)


@pytest.mark.parametrize(
    ("combination", "line"), REFUSED, ids=lambda value: in_words(value) if isinstance(value, dict) else ""
)
def test_what_cannot_be_combined_is_refused_in_one_line(combination, line, tmp_path):
    tokens = write_token_files(tmp_path / "tokens")
    with pytest.raises(UsageError, match=line) as error:
        fit({**ALONE, **combination}, tmp_path, tokens)
    assert "\n" not in str(error.value)
