"""What commands print on their pages, and the pictures of `schedule`, for `fill.py`."""

import os
import re
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from filler import Filler

ROOT = Path(__file__).resolve().parents[2]
SWEEP = ROOT / "docs/samples/sweep"  # logs of real runs of a few seconds


def schedule(_: Any) -> dict[str, str]:
    """The curve and the phases of a recipe, as the command prints them."""
    from lightning_tricks.commands.schedule.terminal import draw_in_terminal

    return {"curve": _block("schedule --config recipes/llama7b_1gpu.yaml", draw_in_terminal([_plan("llama7b_1gpu")]))}


def plan(result: dict[str, Any]) -> dict[str, str]:
    """The plan of a recipe, as the command prints it, and how far plans are from measured peaks."""
    from benchmarks.plan_memory import table
    from lightning_tricks.commands.plan import PlanOptions
    from lightning_tricks.commands.plan.plan import plan_recipe
    from lightning_tricks.commands.plan.report import report

    made = plan_recipe(*_recipe("llama7b"), PlanOptions(gpu="h100", price=2.5))
    command = "plan --config recipes/llama7b.yaml --gpu h100 --price 2.5"
    return {"plan": _block(command, report(made)), "memory": table(result)}


# What a list of checks says of the machine on which it is made, and what the page has in its place.
_MACHINE = {
    r"Python \S+, [\d.,]+ MB": "Python 3.11.7, 12.12 MB",
    r"tokenized in \S+|fit tokenizes it first, or prepare": "fit tokenizes it first, or prepare",
    r"(?<= overlap    ).*": "not known before the text is tokenized, which prepare does",
    r"of [\d.,]+ GiB of this CPU": "of 23.54 GiB of this CPU",
    r"torch \S+, lightning \S+": "torch 2.13.0+cpu, lightning 2.6.6",
    r"CPU of \d+ cores": "CPU of 2 cores",
    r"free [\d.,]+ [MG]iB": "free 75.66 GiB",
}


def check(_: Any) -> dict[str, str]:
    """The list of checks of a recipe, as the command prints it on a machine of 2 cores without fast bf16."""
    from lightning_tricks.commands.check.checks import CHECKS, Checked, run_checks, summary

    lines: list[str] = []
    slow = mock.patch("lightning_tricks.accounting.device_speed.bf16_time_ratio", return_value=2.0)
    with slow, tempfile.TemporaryDirectory() as folder:
        checked, here = Checked(*_recipe("tiny")), os.getcwd()
        os.chdir(folder)  # in which the run's folders are tried
        try:
            results = run_checks(CHECKS, checked, lines.append)
        finally:
            os.chdir(here)
    text = "\n".join([*lines, summary(results)])
    for pattern, instead in _MACHINE.items():
        text = re.sub(pattern, instead, text)
    return {"check": _block("check --config recipes/tiny.yaml", text)}


def plan_foreign(result: dict[str, Any]) -> dict[str, str]:
    """How far plans are from measured peaks for modules of other libraries."""
    from benchmarks.plan_foreign import page_text

    return {"foreign": page_text(result)}


def plan_published(result: dict[str, Any]) -> dict[str, str]:
    """How far plans are from published runs."""
    from benchmarks.plan_published import table

    return {"published": table(result)}


def runs(_: Any) -> dict[str, str]:
    """The table of the runs of a small sweep."""
    from lightning_tricks.commands.runs import Table
    from lightning_tricks.logs.run import find_runs

    return {"table": _block("runs docs/samples/sweep", Table(find_runs(SWEEP)).sorted_by("best_val_loss").text(104))}


def doctor_trials(result: dict[str, Any]) -> dict[str, str]:
    """What `doctor` found in runs with planted faults, and in healthy ones."""
    from benchmarks.doctor_trials import tables
    from lightning_tricks.commands.doctor import Report
    from lightning_tricks.logs.run_log import read_log
    from lightning_tricks.logs.symptoms import findings

    sample = "docs/samples/sweep/tiny/version_4"
    log, unread = read_log(ROOT / sample)
    shown = _block(f"doctor {sample}", Report(sample, log, findings(log), unread).text())
    date, cores = result["machine"]["date"][:10], result["machine"]["cores"]
    texts = tables(result)
    return {
        **texts,
        "doctor": shown,
        "healthy": f"{texts['healthy']}\n\nMeasured {date} on a CPU with {cores} cores, one thread.",
    }


def _plan(recipe: str, *options: str) -> Any:
    """The plan of a recipe, with the name that the command gives it."""
    from lightning_tricks.commands.schedule.plan import planned
    from lightning_tricks.commands.schedule.terminal import NamedPlan

    return NamedPlan(" ".join([recipe, *options[1:]]), planned(*_recipe(recipe, *options)))


def _recipe(name: str, *options: str) -> Any:
    """Module, data and the Trainer's arguments of a recipe, whatever the working folder is."""
    from lightning_tricks.cli import load_recipe

    here = os.getcwd()
    os.chdir(ROOT)
    try:
        return load_recipe("--config", f"recipes/{name}.yaml", *options)
    finally:
        os.chdir(here)


def _block(command: str, output: str) -> str:
    return f"```text\n$ python -m lightning_tricks {command}\n{output}\n```"


FILLERS = {
    "check": Filler("check.md", check, measured=False),
    "doctor-trials": Filler("doctor.md", doctor_trials),
    "plan-foreign": Filler("plan.md", plan_foreign),
    "plan-memory": Filler("plan.md", plan),
    "plan-published": Filler("plan.md", plan_published),
    "runs": Filler("compare.md", runs, measured=False),
    "schedule": Filler("schedules.md", schedule, measured=False),
}
