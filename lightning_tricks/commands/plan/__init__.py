"""`plan`: whether a recipe fits, how long it takes and what it costs, on a laptop and in seconds. Trains nothing.

In the order of reading: `setup` (what the recipe says), `memory` (the step, traced), `scaling` (time on paper),
`changes` and `warnings` (what to do), `plan` (all of it, for a notebook), `report` (in words).
"""

import sys
from typing import Any

from lightning_tricks._core.quote import say
from lightning_tricks._host.writable import check_file
from lightning_tricks.accounting.gpus import NETWORK_GBITS

DEFAULT_MFU = 0.4  # of tuned runs on large clusters


def run(
    model: Any,
    datamodule: Any,
    trainer: Any,
    *,
    gpu: str | None = None,
    devices: int | None = None,
    nodes: int | None = None,
    mfu: float = DEFAULT_MFU,
    price: float | None = None,
    network_gbits: float = NETWORK_GBITS,
    gpu_memory_gb: float | None = None,
    peak_tflops: float | None = None,
    link_gb: float | None = None,
    scaling: bool = False,
    json: str | None = None,
) -> None:
    """Plan a recipe: parameters, memory of a device at each instant of a step, time, cost, and what is sent.

    Exits with 1 if it does not fit.

    Args:
        model: of the recipe.
        datamodule: of the recipe.
        trainer: of the recipe.
        gpu: such as a100, h100, h200, b200; null: a CPU where the recipe asks for one, else the GPU here, else h100.
        devices: of each host; null: the recipe's.
        nodes: hosts; null: the recipe's.
        mfu: share of the peak that the run will reach, full attention counted.
        price: of a GPU hour, in any currency.
        network_gbits: Gbit/s of a GPU to other hosts.
        gpu_memory_gb: 10^9 bytes of a device, in place of the table's.
        peak_tflops: dense, in the run's precision, in place of the table's.
        link_gb: GB/s of a GPU to the others of its host, one direction, in place of the table's.
        scaling: also tokens/s on 8 to 1,024 devices, on paper.
        json: file for all figures.

    Raises:
        UsageError: a number out of its range, an unknown GPU, a mesh that does not fit the devices.
    """
    from lightning_tricks.commands.plan.plan import plan_recipe
    from lightning_tricks.commands.plan.report import report

    if json is not None:
        check_file("plan: json", json)
    plan = plan_recipe(
        model, datamodule, trainer, gpu=gpu, devices=devices, nodes=nodes, mfu=mfu, price=price,
        network_gbits=network_gbits, gpu_memory_gb=gpu_memory_gb, peak_tflops=peak_tflops, link_gb=link_gb,
    )  # fmt: skip
    say(*report(plan, scaling).split("\n"))
    if json is not None:
        from json import dumps
        from pathlib import Path

        Path(json).write_text(dumps(plan.as_dict(), indent=1) + "\n", encoding="utf-8")
    sys.exit(1 if plan.fits is False else 0)
