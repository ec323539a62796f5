"""Compare the memory that `plan` foretells for modules of other libraries with that of their real steps on this CPU.

Each module (`plan_foreign_models.py`) is planned with the batch of its own data loader, and trained for four steps by
Lightning's Trainer; the last three are measured as `plan_memory` measures. A module whose step needs values gets a line
in place of a figure. `python -m benchmarks.plan_foreign` takes a few minutes on two cores and needs transformers;
diffusers is used where it is installed.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import machine
from benchmarks.plan_foreign_models import LINES, MODELS, installed
from benchmarks.plan_memory import KINDS, Watch
from benchmarks.stage_file import write
from lightning_tricks._trainer.lightning import pl
from lightning_tricks.commands.plan.plan import plan_recipe

BOUND = 0.15  # of the largest instant


class WatchEachStep(Watch):
    """Measures every step of one micro-batch, after the first one."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx:
            super().on_train_batch_start(trainer, pl_module, batch, 3)


def planned(name: str) -> dict[str, Any]:
    """Bytes by kind as the plan says, or its line."""
    torch.manual_seed(0)
    plan = plan_recipe(MODELS[name](), None, {"max_steps": 10, "accelerator": "cpu"}, suggest=False)
    if plan.memory is None:
        return {"line": plan.why_no_memory}
    instants = plan.memory.instants
    step = instants["optimizer step"]
    kept = max(lines.get("activations", 0) + lines.get("head and loss", 0) for lines in instants.values())
    return {
        **{kind: step.get(kind, 0) for kind in ("weights", "gradients", "optimizer state")},
        "activations": kept, "largest instant": plan.memory.peak, "instant": plan.memory.largest,
    }  # fmt: skip


def measured(name: str) -> dict[str, int]:
    """The same of real steps: the median of three."""
    torch.manual_seed(0)
    watch = WatchEachStep()
    trainer = pl.Trainer(
        max_steps=4, accelerator="cpu", callbacks=[watch], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(MODELS[name]())
    return {kind: int(median(step[kind] for step in watch.steps)) for kind in KINDS}


def row(name: str) -> dict[str, Any]:
    """All that is known of one module; a module that must get a line is not measured."""
    plan = planned(name)
    if "line" in plan:
        return {"model": name, "planned": plan, "measured": {}, "relative_error": {}}
    real = measured(name)
    errors = {kind: plan[kind] / real[kind] - 1 for kind in KINDS if real[kind]}
    return {"model": name, "planned": plan, "measured": real, "relative_error": errors}


def is_as_promised(found: dict[str, Any]) -> bool:
    """Whether a module has a figure close to the measured one, or the line that it must have."""
    if found["model"] in LINES:
        return "line" in found["planned"]
    return abs(found["relative_error"].get("largest instant", float("nan"))) <= BOUND


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| module | planned | measured | peak | activations | gradients, state |",
        "|---|---|---|---|---|---|",
    ]
    for found in rows:
        plan, real, errors = found["planned"], found["measured"], found["relative_error"]
        if "line" in plan:
            cells = ["not known", "", f"a line: {plan['line'].partition('(')[2].rstrip(')') or plan['line']}", "", ""]
        else:
            state = max((errors.get(kind, 0.0) for kind in ("gradients", "optimizer state")), key=abs)
            mib = [f"{one['largest instant'] / 2**20:.1f} MiB" for one in (plan, real)]
            cells = [*mib, *(f"{error:+.1%}" for error in (errors["largest instant"], errors["activations"], state))]
        lines.append(f"| {' | '.join([found['model'], *cells])} |")
    return "\n".join(lines)


def page_text(result: dict[str, Any]) -> str:
    """The table with its machine, for the docs."""
    described = result["machine"]
    packages = ", ".join(f"{name} {described['versions'][name]}" for name in result["packages"])
    cores = described["cores"]
    return f"{table(result['rows'])}\n\nMeasured {described['date'][:10]} on a CPU with {cores} cores: {packages}."


def main(given: Sequence[str] | None = None) -> int:
    """Command line; see --help. 1 where a module has neither a close figure nor its line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_foreign", description=__doc__)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(map(repr, MODELS))}; default: all")
    parser.add_argument("--out", type=Path, help="JSON file; default: benchmarks/results, if all are tried")
    options = parser.parse_args(given)
    if unknown := [name for name in options.models if name not in MODELS]:
        parser.exit(2, f"unknown model {', '.join(unknown)}: give some of {', '.join(MODELS)}\n")
    torch.set_num_threads(1)
    names = options.models or list(MODELS)
    left_out = [name for name in names if not installed(name)]
    rows = []
    for name in names:
        if name in left_out:
            print(f"{name:28} left out: not installed", flush=True)
            continue
        with machine.quiet():
            rows.append(row(name))
        said = "  ".join(f"{kind} {error:+.1%}" for kind, error in rows[-1]["relative_error"].items())
        print(f"{name:28} {said or json.dumps(rows[-1]['planned'])}", flush=True)
    out = options.out
    if out is None and not options.models:
        out = Path(__file__).parent / "results" / f"plan-foreign-{machine.today()}-cpu.json"
    if out is not None:
        where, packages = machine.describe(), ["torch", "lightning"]
        for package in ("transformers", "diffusers"):
            try:
                where["versions"][package] = version(package)
                packages.append(package)
            except PackageNotFoundError:
                continue
        write(out, {"machine": where, "packages": packages, "bound": BOUND, "rows": rows, "left_out": left_out})
    close = sum(map(is_as_promised, rows))
    print(f"{close} of {len(rows)}: a figure within {BOUND:.0%}, or a line")
    return int(close < len(rows))


if __name__ == "__main__":
    sys.exit(main())
