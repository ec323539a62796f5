"""How often is a forecast from a ladder refused, and how often does its interval hold the loss, where that is known?

    python -m benchmarks.ladder_laws                # 2 minutes on one core; nothing is trained
    python -m benchmarks.ladder_laws --draws 20

Ladders are drawn from a law of two terms, one of parameters and one of tokens, with the noise of seeds and with what
goes wrong in real ladders. The forecast fits one term. The thresholds in `logs/scaling_law.py` were chosen by ladders
of other seeds than those of the committed file.
"""

import argparse
import json
import math
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine
from lightning_tricks.logs.scaling_law import Rung, SeededLosses, forecast, speedup

TOP = 1e17  # FLOPs of the largest rung


Law = Callable[[float], float]  # the loss, by the log of the compute over that of the largest rung


def two_terms(rng: np.random.Generator) -> Law:
    """Loss 3 at the largest rung, of which the floor is 35 to 75 %; the exponents are 0.25 to 0.45 in parameters and in
    tokens, each of which grow with the root of the compute.
    """
    floor, share = 3 * rng.uniform(0.35, 0.75), rng.uniform(0.3, 0.7)
    first, second = rng.uniform(0.25, 0.45, 2) / 2
    return lambda x: floor + (3 - floor) * (share * math.exp(-first * x) + (1 - share) * math.exp(-second * x))


def power_law(rng: np.random.Generator) -> Law:
    """Loss 3 at the largest rung, and no floor."""
    rate = rng.uniform(0.05, 0.12)
    return lambda x: 3 * math.exp(-rate * x)


def bending(rng: np.random.Generator) -> Law:
    """No floor, and a slope in log-log that goes from 0.070 to 0.085 over two decades, and on."""
    span = 2 * math.log(10)
    return lambda x: 3 * math.exp(-(0.085 * x + 0.0075 * x**2 / span))


@dataclass(frozen=True)
class Ladder:
    """How a ladder is drawn.

    Args:
        what: in words.
        law: of its losses.
        noise: standard deviation of the log of a loss over seeds.
        rungs: in number.
        decades: of compute.
        twice: rungs with two seeds, from the smallest on.
        smallest: relative excess of the smallest rung's loss.
        drift: standard deviation of the excess of the largest rung, from a learning rate that fits worse and worse.
    """

    what: str
    law: Callable[[np.random.Generator], Law] = two_terms
    noise: float = 0.003
    rungs: int = 5
    decades: float = 2.0
    twice: int = 3
    smallest: float = 0.0
    drift: float = 0.0

    def draw(self, rng: np.random.Generator) -> tuple[Law, list[Rung]]:
        """The true law and a ladder."""
        span = self.decades * math.log(10)
        law, excess = self.law(rng), abs(self.drift * rng.standard_normal())

        def truth(x: float) -> float:
            return law(x) * math.exp(excess * (1 + x / span) ** 2)

        rungs = []
        for number, x in enumerate(np.linspace(-span, 0, self.rungs).tolist()):
            losses = seen(truth(x) * (1 + self.smallest * (number == 0)), self.noise, 1 + (number < self.twice), rng)
            rungs.append(Rung(TOP * math.exp(x), losses))
        return truth, rungs


def seen(loss: float, noise: float, seeds: int, rng: np.random.Generator) -> tuple[float, ...]:
    """Losses of runs with different seeds."""
    return tuple((loss * np.exp(noise * rng.standard_normal(seeds))).tolist())


SOUND = Ladder("the law holds")
LADDERS = (
    SOUND,
    Ladder("no rung with two seeds", twice=0),
    Ladder("noise of 1 %", noise=0.01),
    Ladder("4 rungs over 1.5 decades", rungs=4, decades=1.5),
    Ladder("6 rungs over 2.5 decades", rungs=6, decades=2.5),
    Ladder("smallest rung 2 % too high", smallest=0.02),
    Ladder("smallest rung 2 % too low", smallest=-0.02),
    Ladder("smallest rung 5 % too high", smallest=0.05),
    Ladder("smallest rung 5 % too low", smallest=-0.05),
    Ladder("learning rate drifts, 1 % at the top", drift=0.01),
    Ladder("learning rate drifts, 3 % at the top", drift=0.03),
    Ladder("power law without a floor", power_law),
    Ladder("curve that keeps bending down", bending),
)
DISTANCES = (4.0, 10.0)
FEW = 30  # answers, of which no percentage is given
REASONS = {  # a few words of each refusal
    "span 100 times": "too far",
    "span 31.6 times": "too far",
    "no floor tell": "too far without a floor",
    "without the smallest rung": "the smallest rung decides",
    "the interval is": "interval too wide",
}


def judge_forecasts(ladder: Ladder, distance: float, draws: int, seed: int) -> dict[str, Any]:
    """Ladders of one kind: the share refused, and the coverage, width and error of the others."""
    rng = np.random.default_rng([seed, draws])
    refusals, rows = Counter[str](), []
    for _ in range(draws):
        truth, rungs = ladder.draw(rng)
        (loss,) = seen(truth(math.log(distance)), ladder.noise, 1, rng)
        found = forecast(rungs, TOP * distance)
        width, error = (found.high - found.low) / found.loss, abs(found.loss / loss - 1)
        rows.append((found.refusal is None, found.low <= loss <= found.high, width, error))
        if found.refusal is not None:
            refusals[next(reason for words, reason in REASONS.items() if words in found.refusal)] += 1
    return {"ladder": ladder.what, "distance": distance, "refusals": dict(refusals), **summary(rows)}


def summary(rows: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Of rows that begin with: whether it was answered, and whether the interval held the truth."""
    answered = [row for row in rows if row[0]]
    means = {
        "answered": len(answered),
        "refused": 1 - len(answered) / len(rows),
        "coverage": float(np.mean([row[1] for row in answered])) if answered else None,
        "coverage_with_refused": float(np.mean([row[1] for row in rows])),
    }
    columns = list(zip(*answered, strict=True))[2:]
    return means | {name: float(np.median(each)) for name, each in zip(("width", "error"), columns, strict=False)}


@dataclass(frozen=True)
class Pair:
    """Two recipes, and how their runs are drawn.

    Args:
        difference: by which the loss of the second is lower, as a fraction.
        distance: their compute over that of the largest rung.
        seeds: of each.
        common: share of the variance of the noise that runs with one seed have in common.
        ladder: of which the runs are.
    """

    difference: float
    distance: float
    seeds: int
    common: float = 0.0
    ladder: Ladder = SOUND


DIFFERENCES = (0.0, 0.01, 0.03)
PAIRS = (
    *(Pair(each, distance, seeds) for distance in (1, 10) for seeds in (1, 3) for each in DIFFERENCES),
    *(Pair(each, 1, 3, common=0.5) for each in DIFFERENCES),
    *(Pair(each, 1 / 3, 3, ladder=Ladder("power law without a floor", power_law)) for each in DIFFERENCES),
)


def judge_speedups(pair: Pair, draws: int, seed: int) -> dict[str, Any]:
    """Pairs of one kind: the share refused, the coverage of the others, and the upper end over the lower end."""
    rng = np.random.default_rng([seed, draws, 1])
    rows = []
    for _ in range(draws):
        truth, rungs = pair.ladder.draw(rng)
        x = math.log(pair.distance)
        ends = truth(x), truth(x) * (1 - pair.difference)
        noise = rng.standard_normal((3, pair.seeds)) * pair.ladder.noise
        noise = math.sqrt(pair.common) * noise[0] + math.sqrt(1 - pair.common) * noise[1:]
        runs = [
            SeededLosses(TOP * pair.distance, {str(number): loss for number, loss in enumerate(end * np.exp(each))})
            for end, each in zip(ends, noise, strict=True)
        ]
        found = speedup(rungs, *runs)
        real = math.exp(compute_of(truth, ends[1]) - x)
        rows.append((found.refusal is None, found.low <= real <= found.high, found.high / found.low))
    return {**asdict(pair), "ladder": pair.ladder.what, **summary(rows)}


def compute_of(law: Law, loss: float) -> float:
    """The log compute at which a law has a loss, by bisection."""
    low, high = -40.0, 40.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if law(middle) > loss else (low, middle)
    return low


def table(result: dict[str, Any]) -> str:
    """Both tables in Markdown, and how they came about."""
    lines = ["| ladder | distance | refused | of answers, the interval holds the loss | median width | median error |"]
    lines.append("|---|---|---|---|---|---|")
    for row in result["forecasts"]:
        refused, coverage, width, error = _shown(row, "refused", "coverage", "width", "error")
        if 0 < row["answered"] < FEW:
            coverage = f"{round(row['coverage'] * row['answered'])} of {row['answered']}"
        lines.append(f"| {row['ladder']} | {row['distance']:g}x | {refused} | {coverage} | {width} | {error} |")
    lines += ["", "| ladder | second loss lower by | at | seeds | refused | interval holds the speedup | width |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in result["speedups"]:
        seeds = f"{row['seeds']}{', in pairs' * bool(row['common'])}"
        # of equal recipes the ones not refused are those that seeds have made different: all count there
        figures = _shown(row, "refused", "coverage" if row["difference"] else "coverage_with_refused")
        place = f"{row['difference']:.0%} | {row['distance']:.2g}x | {seeds}"
        width = f"{row['width']:.2f}x" if "width" in row else "-"
        lines.append(f"| {row['ladder']} | {place} | {' | '.join(figures)} | {width} |")
    described = result["machine"]
    said = (
        f"{result['draws']} draws a row; noise of 0.3 % and 5 rungs over 2 decades where nothing else is said, two "
        f"seeds on the smallest three. Computed {described['date'][:10]} by `python -m benchmarks.ladder_laws`, numpy "
        f"{result['numpy']}."
    )
    return "\n".join([*lines, "", textwrap.fill(said, 120, break_on_hyphens=False)])


def _shown(row: dict[str, Any], *names: str) -> list[str]:
    return ["-" if row.get(name) is None else f"{100 * row[name]:.3g} %" for name in names]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=300, help="ladders of each kind")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--out", type=Path, help="JSON file; default benchmarks/results/ladder-laws-DATE-cpu.json")
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {
        "benchmark": "ladder_laws",
        "machine": machine.describe(),
        "numpy": np.__version__,
        "draws": options.draws,
        "seed": options.seed,
    }
    result["forecasts"] = [
        judge_forecasts(ladder, distance, options.draws, options.seed) for ladder in LADDERS for distance in DISTANCES
    ]
    result["speedups"] = [judge_speedups(pair, options.draws, options.seed) for pair in PAIRS]
    out = options.out or Path(__file__).absolute().parent / "results" / f"ladder-laws-{machine.today()}-cpu.json"
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result), str(out), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
