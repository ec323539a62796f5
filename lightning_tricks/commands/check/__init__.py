"""`check`: whether a recipe would start and end well here, as a list, before any GPU is held. Leaves nothing behind.

`checks` has the list.
"""

import sys
from typing import Any

from lightning_tricks._core.quote import printable
from lightning_tricks._core.terminal import colored, terminal_columns, wrapped
from lightning_tricks.commands.answers import check_json, write_json


def run(model: Any, datamodule: Any, trainer: Any, *, gpu: str | None = None, json: str | None = None) -> None:
    """Check a recipe before its launch: what it builds, its data, its layout on the whole cluster, this machine.

    Exits with 1 if a check fails.

    Args:
        model: of the recipe.
        datamodule: of the recipe.
        trainer: of the recipe.
        gpu: such as a100, h100, h200, b200; null: a CPU where the recipe asks for one, else the GPU here, else h100.
        json: file for the list, - for standard output.

    Raises:
        UsageError: an unknown GPU; a file that cannot be written.
    """
    from lightning_tricks.accounting.gpus import find_gpu
    from lightning_tricks.commands.check.checks import CHECKS, Checked, run_checks, summary

    check_json("check", json)
    if gpu is not None:
        find_gpu(gpu)

    def show(line: str) -> None:
        if json != "-":
            sign, blank, text = wrapped(printable(line), terminal_columns(sys.maxsize), 13).partition(" ")
            style = {"✓": "green", "ok": "green", "✗": "red", "!!": "red"}.get(sign)
            print(colored(sign, style) + blank + text, flush=True)

    results = run_checks(CHECKS, Checked(model, datamodule, trainer, gpu), show)
    show(summary(results))
    failed = any(result.failed for result in results)
    write_json(json, {"passed": not failed, "checks": [result._asdict() for result in results]})
    sys.exit(1 if failed else 0)
