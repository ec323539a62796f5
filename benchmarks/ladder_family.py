"""Does a ladder foretell real runs? Its rungs train, forecasts of larger sizes are written, and then these train.

    python -m benchmarks.ladder_family          # tiny.yaml at four times its length: about 40 minutes of one core

The sizes that are held out lie nearest to the given distances beyond the largest rung. The same command goes on after
a kill: finished runs are kept, and a forecast that is on file is not made again.
"""

import argparse
import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks import machine
from benchmarks.stage_file import write
from lightning_tricks import __main__ as program
from lightning_tricks.commands import ladder as command
from lightning_tricks.commands.ladder.rungs import Ladder, RungRun
from lightning_tricks.commands.ladder.sizes import Size, sizes_below
from lightning_tricks.logs import forecast_file
from lightning_tricks.logs.scaling_law import forecast

RECIPE = [  # a budget for small rungs, so that the recipe lies far beyond the largest
    "--config", str(Path(__file__).parents[1] / "recipes/tiny.yaml"), "--trainer.max_steps", "1600",
    "--model.schedule.init_args.warmup_steps", "160", "--budget", "8m",
]  # fmt: skip
DISTANCES = (4.0, 5.5, 7.5)  # FLOPs of those that are held out over those of the largest rung


def held_out(ladder: Ladder, top: float, distances: Sequence[float]) -> list[Size]:
    """The sizes nearest to so many times the FLOPs of the largest rung, each once; the recipe is one of them."""
    sizes = [*sizes_below(ladder.recipe, ladder.mup, ladder.validations), ladder.recipe]
    nearest = [min(sizes, key=lambda size: abs(math.log(size.flops / top / each))) for each in distances]
    return [size for number, size in enumerate(nearest) if size not in nearest[:number]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/ladder_family"), help="of the runs")
    parser.add_argument("--out", type=Path, help="default benchmarks/results/ladder-family-DATE-cpu.json")
    options, recipe = parser.parse_known_args(arguments)
    out = options.out or Path(__file__).parent / f"results/ladder-family-{machine.today()}-cpu.json"
    built: list[Ladder] = []
    train = command._train

    def keep(ladder: Ladder, *rest: Any) -> dict[str, float]:
        built.append(ladder)
        return train(ladder, *rest)

    # the recipe's own forecast may be refused
    with patch.object(command, "_train", keep), contextlib.suppress(SystemExit):
        program.run(["ladder", *(recipe or RECIPE), "--out", str(options.folder)])
    (ladder,) = built
    record = forecast_file.read_forecast("folder", str(options.folder))
    rungs = forecast_file.rungs_of(record)
    if not out.exists():
        sizes = held_out(ladder, rungs[-1].flops, DISTANCES)
        runs = [command._facts(size) | {"forecast": asdict(forecast(rungs, size.flops))} for size in sizes]
        write(out, {"benchmark": "ladder_family", "machine": machine.describe(), "recipe": recipe or RECIPE[2:],
                    "rungs": record["rungs"], "other_learning_rates": record["other_learning_rates"],
                    "held_out": runs})  # fmt: skip
    result = json.loads(out.read_text(encoding="utf-8"))
    sizes = [*sizes_below(ladder.recipe, ladder.mup, ladder.validations), ladder.recipe]
    for number, run in enumerate(result["held_out"], len(rungs) + 1):
        (size,) = (each for each in sizes if each.config.d_model == run["width"])
        rung, said = RungRun(number, size), run["forecast"]
        found = ladder.loss(rung) or ladder.train(rung, 0)
        run |= {"loss": found, "miss": found / said["loss"] - 1, "is_inside": said["low"] <= found <= said["high"]}
        write(out, result)
        interval = f"{said['low']:.4f} to {said['high']:.4f}"
        print(f"{said['distance']:.3g} x: {found:.4f}, forecast {said['loss']:.4f} ({interval}), {run['miss']:+.2%}")
        print(said["refusal"] or "not refused", flush=True)


if __name__ == "__main__":
    main()
