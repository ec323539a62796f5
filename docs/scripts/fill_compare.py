"""What `compare` prints on its page, of committed logs, and what it said in its trials, for `fill.py`."""

import contextlib
from pathlib import Path
from typing import Any

from filler import Filler

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = "docs/samples/compare"  # logs of six real runs, of benchmarks/compare_trials.py
_COLUMNS = 100


def compare(result: dict[str, Any]) -> dict[str, str]:
    """A learning rate three times as high, with three seeds each, one seed each, and two seeds of one recipe."""
    from benchmarks.compare_trials import table

    return {
        "compare": _block(["base", "lr3"], curves=True),
        "single": _block(["base/seed_0", "lr3/seed_0"]),
        "seeds": _block(["base/seed_0", "base/seed_1"]),
        "trials": table(result),
    }


def draw(_: Any, file: Path) -> None:
    """The curves of the sample, as the option writes them, light and dark."""
    from lightning_tricks.logs.compare.curves import draw_picture

    found = _compared(["base", "lr3"])
    draw_picture(found, file)
    draw_picture(found, file.with_stem(f"{file.stem}_dark"), dark=True)


def _block(folders: list[str], curves: bool = False) -> str:
    from lightning_tricks.logs.compare.curves import draw_in_terminal
    from lightning_tricks.logs.compare.report import text

    found = _compared(folders)
    drawn = draw_in_terminal(found, columns=_COLUMNS, unicode=True) if curves else []
    shown = text(found, [], drawn)
    command = " ".join(["compare", *(f"{SAMPLE}/{folder}" for folder in folders)])
    return f"```text\n$ python -m lightning_tricks {command}\n{shown}\n```"


def _compared(folders: list[str]) -> Any:
    """The comparison, whatever the working folder is."""
    from lightning_tricks.logs.compare.compared_run import read_runs
    from lightning_tricks.logs.compare.comparison import compare_runs

    with contextlib.chdir(ROOT):
        runs, _ = read_runs([f"{SAMPLE}/{folder}" for folder in folders], {})
    return compare_runs(runs)


FILLERS = {"compare-trials": Filler("compare.md", compare, draw)}
