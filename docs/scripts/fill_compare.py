"""What `compare` prints on its page, of committed logs, and what it said in its trials, for `fill.py`."""

import contextlib
from pathlib import Path
from typing import Any

from filler import Filler

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = "docs/samples/compare"  # logs of six real runs, of benchmarks/compare_trials.py


def compare(result: dict[str, Any]) -> dict[str, str]:
    """A learning rate three times as high, with three seeds each, one seed each, and two seeds of one recipe."""
    from benchmarks.compare_trials import table

    return {
        "compare": _block("base", "lr3", columns=84),
        "single": _block("base/seed_0", "lr3/seed_0"),
        "seeds": _block("base/seed_0", "base/seed_1"),
        "trials": table(result),
    }


def _block(*names: str, columns: int = 0) -> str:
    """The command and its answer, with curves of so many columns if any."""
    from lightning_tricks.commands.compare import draw_in_terminal, text
    from lightning_tricks.logs.compared_run import read_runs
    from lightning_tricks.logs.comparison import compare_runs

    folders = [f"{SAMPLE}/{name}" for name in names]
    with contextlib.chdir(ROOT):  # whatever the working folder is
        runs, _ = read_runs(folders, {})
    found = compare_runs(runs)
    shown = text(found, [], draw_in_terminal(found, columns, unicode=True) if columns else [])
    return f"```text\n$ python -m lightning_tricks {' '.join(['compare', *folders])}\n{shown}\n```"


FILLERS = {"compare-trials": Filler("compare.md", compare)}
