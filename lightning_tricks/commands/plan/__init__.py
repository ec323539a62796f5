"""`plan`: whether a recipe fits, how long it takes and what it costs, on a laptop and in seconds. Trains nothing.

In the order of reading: `setup` (the recipe's own settings), `memory` (the step, traced), `changes` (what to
do), `plan` (all of it, for a notebook), `report` (in words).
"""

import math
import sys
from dataclasses import dataclass
from typing import Any

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.quote import printable_lines
from lightning_tricks._core.terminal import colored, terminal_columns, wrapped
from lightning_tricks.accounting.gpus import NETWORK_GBITS
from lightning_tricks.commands.answers import check_json, write_json


@dataclass(frozen=True)
class PlanOptions:
    """The devices of a plan, and what is assumed of them.

    Args:
        gpu: such as a100, h100, h200, b200; null: a CPU where the recipe asks for one, else the GPU here, else h100.
        devices: of each host; null: the recipe's.
        nodes: hosts; null: the recipe's.
        mfu: share of the peak that the run will reach, full attention counted; 0.4 is that of tuned runs on large
            clusters.
        price: of a GPU hour, in any currency.
        network_gbits: Gbit/s of a GPU to other hosts.
        gpu_memory_gb: 10^9 bytes of a device, in place of the table's.
        peak_tflops: dense, in the run's precision, in place of the table's.
        link_gb: GB/s of a GPU to the others of its host, one direction, in place of the table's.
        budgets: trace a LanguageModel with every mode of activation checkpointing too, and show what budgets take.

    Raises:
        UsageError: a number out of its range.
    """

    gpu: str | None = None
    devices: int | None = None
    nodes: int | None = None
    mfu: float = 0.4
    price: float | None = None
    network_gbits: float = NETWORK_GBITS
    gpu_memory_gb: float | None = None
    peak_tflops: float | None = None
    link_gb: float | None = None
    budgets: bool = False

    def __post_init__(self) -> None:
        for name in ("devices", "nodes", "network_gbits", "gpu_memory_gb", "peak_tflops", "link_gb"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"plan: {name}={value:g}: give a number above 0")
        if not 0 < self.mfu <= 1:
            raise UsageError(f"plan: mfu={self.mfu:g}: give a share of the peak above 0 and up to 1, such as 0.4")
        if self.price is not None and not 0 <= self.price < math.inf:
            raise UsageError(f"plan: price={self.price:g}: give the price of a GPU hour, 0 or more")


def run(model: Any, datamodule: Any, trainer: Any, *, json: str | None = None, **options: Any) -> None:
    """Plan a recipe: parameters, memory of a device at each instant of a step, time, cost, and what is sent.

    Exits with 1 if it does not fit.

    Args:
        model: of the recipe.
        datamodule: of the recipe.
        trainer: of the recipe.
        json: file for all figures, - for standard output.
        **options: see `PlanOptions`.

    Raises:
        UsageError: a number out of its range, an unknown GPU, a mesh that does not fit the devices.
    """
    chosen = PlanOptions(**options)
    check_json("plan", json)

    from lightning_tricks.commands.plan.plan import plan_recipe
    from lightning_tricks.commands.plan.report import report

    plan = plan_recipe(model, datamodule, trainer, chosen)
    if json != "-":
        for line in wrapped(printable_lines(report(plan)), terminal_columns(sys.maxsize), 22).split("\n"):
            line = line.replace("DOES NOT FIT", colored("DOES NOT FIT", "red"))
            print(colored(line, None if line.startswith(" ") else "bold"))
    write_json(json, plan.as_dict())
    sys.exit(1 if plan.fits is False else 0)
