"""What the runs of the race say: tables of Markdown, from its result file."""

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.race_arms import ARMS, DEPTHS, FINALS, REFERENCE, SCREENED, TUNED, Arm
from lightning_tricks.logs.intervals import pooled_spread, student_t

Run = dict[str, Any]
LEVEL = 0.9


class Change(NamedTuple):
    """The loss of an arm over that of its base, less 1, with the same seeds.

    Args:
        base: mean bits per byte of the base.
        arm: of the arm.
        change: relative, below 0 where the arm is better.
        half_width: of the interval of `change`.
        time: processor time for the loss of the base, over that of the base.
        seeds: that both have.
    """

    base: float
    arm: float
    change: float
    half_width: float
    time: float
    seeds: int


def ends(runs: Sequence[Run], stage: str, name: str, half: bool = False) -> dict[int, float]:
    """Bits per byte by seed, at the end or at half of the steps."""
    return {
        run["seed"]: run["bits_per_byte"][0 if half else -1]
        for run in runs
        if (run["stage"], run["arm"]) == (stage, name)
    }


def differences(runs: Sequence[Run], stage: str, name: str, base: str, half: bool = False) -> list[float]:
    """Logs of an arm's loss over that of its base, by common seeds."""
    mine, theirs = (ends(runs, stage, arm, half) for arm in (name, base))
    return [math.log(mine[seed] / theirs[seed]) for seed in sorted(mine.keys() & theirs.keys())]


def slope(runs: Sequence[Run]) -> float:
    """By how much the log of AdamW's loss falls for each e-fold of steps, from the screening to the finals."""
    short, long = (ends(runs, stage, REFERENCE) for stage in ("screen", "finals"))
    steps = {run["stage"]: run["steps"] for run in runs if run.get("arm") == REFERENCE and "steps" in run}
    means = [statistics.mean(map(math.log, each.values())) for each in (short, long)]
    return (means[0] - means[1]) / math.log(steps["finals"] / steps["screen"])


def spread(runs: Sequence[Run], stage: str, names: Sequence[str], base: str | None = None) -> tuple[float, int]:
    """Standard deviation of such a difference over seeds, of all arms together; NaN where none has two seeds."""
    found = pooled_spread([differences(runs, stage, name, base or ARMS[name].base or REFERENCE) for name in names])
    return found or (math.nan, 1)


def change(runs: Sequence[Run], stage: str, name: str, base: str, sd: tuple[float, int]) -> Change | None:
    """None where a run is missing."""
    found = differences(runs, stage, name, base)
    if not found:
        return None
    mean, count = statistics.mean(found), len(found)
    half = student_t((1 + LEVEL) / 2, sd[1]) * sd[0] / math.sqrt(count)
    mine, theirs = (statistics.mean(ends(runs, stage, arm).values()) for arm in (name, base))
    return Change(theirs, mine, math.expm1(mean), half, math.exp(mean / slope(runs)), count)


def with_interval(value: float, half_width: float, seeds: int = 2) -> str:
    """In percent; one seed is told."""
    interval = "" if math.isnan(half_width) else f" ± {100 * half_width:.1f}"
    return percent(value) + interval + (", one seed" if seeds == 1 or not interval else "")


def percent(value: float) -> str:
    """With its sign."""
    return f"{100 * value:+.1f} %"


def row(cells: Sequence[str]) -> str:
    """Of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def rows(title: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join([row(title), row(["---"] * len(title)), *map(row, lines)])


def _sign(arm: Arm) -> int:
    """Of the worth of its trick, by its loss: -1 where the base has the trick."""
    return -1 if arm.without else 1


def finals_table(runs: Sequence[Run]) -> str:
    """The finals: bits per byte by arm, against AdamW."""
    sd = spread(runs, "finals", [name for name in FINALS if name != REFERENCE], REFERENCE)
    lines = []
    for name, arm in FINALS.items():
        own = [run for run in runs if (run["stage"], run["arm"]) == ("finals", name)]
        if not own:
            lines.append([f"`{name}`", arm.what, "not run", *[""] * 5])
            continue
        seen = change(runs, "finals", name, REFERENCE, sd)
        own.sort(key=lambda run: int(run["seed"]))
        copied = ["?" if (nats := run.get("copied_nats")) is None else f"{abs(nats):.1f}" for run in own]
        lines.append([
            f"`{name}`", arm.what, f"{statistics.mean(ends(runs, 'finals', name).values()):.4f}",
            "" if name == REFERENCE or seen is None else with_interval(seen.change, seen.half_width),
            ", ".join(f"{run['bits_per_byte'][-1]:.3f}" for run in own),
            ", ".join(map(str, sorted({run["steps"] for run in own}))),
            f"{statistics.mean(run['seconds'] for run in own) / 60:.1f}",
            "" if set(copied) == {"?"} else ", ".join(copied),
        ])  # fmt: skip
    return rows(["arm", "", "bits/byte", "against `adamw`", "each seed", "steps", "CPU min", "nats copied"], lines)


def tricks_table(runs: Sequence[Run]) -> str:
    """The screening: what each trick is worth, the best first; where the base has it: what its lack costs."""
    sd = spread(runs, "screen", list(SCREENED))
    found, missing = [], []
    for name, arm in SCREENED.items():
        seen = change(runs, "screen", name, arm.base or REFERENCE, sd)
        if seen is None:
            missing.append(name)
            continue
        worth, time = math.expm1(_sign(arm) * math.log1p(seen.change)), seen.time ** _sign(arm)
        found.append((worth, time, name, arm, seen))
    lines = [
        [
            f"`{name}`", arm.what, f"`{arm.base}`{', which has it' if arm.without else ''}",
            with_interval(worth, seen.half_width, seen.seeds), f"{time:.2f}",
            "yes" if worth + seen.half_width < 0 else "worse" if worth > seen.half_width else "not shown",
        ]
        for worth, time, name, arm, seen in sorted(found, key=lambda each: each[0])
    ]  # fmt: skip
    lines += [[f"`{name}`", SCREENED[name].what, f"`{SCREENED[name].base}`", "not run", "", ""] for name in missing]
    return rows(["arm", "trick", "on top of", "bits/byte", "time for the same loss", "better?"], lines)


def tuning_table(runs: Sequence[Run]) -> str:
    """The learning rates tried, on a seed of their own."""
    lines = []
    for name in (*TUNED, *FINALS):
        found = [ends(runs, stage, name) for stage in ("tune", "tune_long")]
        if any(found):
            cells = [f"{statistics.mean(each.values()):.4f}" if each else "" for each in found]
            lines.append([f"`{name}`", ARMS[name].what, *cells])
    return rows(["arm", "", "600 steps", "2,400 steps"], lines)


def claims_table(runs: Sequence[Run]) -> str:
    """What others have found, and what was found here."""
    return rows(["claim", "here"], [["tuned Muon needs 0.6 to 0.7 of tuned AdamW's steps", _muon_steps(runs)],
        ["tuning the baseline is worth more than any one trick", _tuning(runs)],
        ["rankings at half time are not those of the end", _half_time(runs)],
        ["clipping does nothing under QK-norm", _worth(runs, "clip")],
        ["the largest lever beside Muon is beta2 of its AdamW", _worth(runs, "muon_beta2_0.99", "muon_beta2_0.9")],
        ["gains shrink with depth", _depth(runs)]])  # fmt: skip


def _worth(runs: Sequence[Run], *names: str) -> str:
    sd, found = spread(runs, "screen", list(SCREENED)), []
    for name in names:
        seen = change(runs, "screen", name, ARMS[name].base or REFERENCE, sd)
        if seen:
            found.append(f"{SCREENED[name].what}: {with_interval(seen.change, seen.half_width)}")
    without = "without it: " if SCREENED[names[0]].without else ""
    return f"{without}{'; '.join(found)}" if found else "not run"


def _muon_steps(runs: Sequence[Run]) -> str:
    found = []
    for stage in ("screen", "finals"):
        steps = {name: run["steps"] for run in runs for name in ("muon", REFERENCE)
                 if (run["stage"], run["arm"]) == (stage, name)}  # fmt: skip
        sd = spread(runs, stage, ["muon"])
        seen = change(runs, stage, "muon", REFERENCE, sd)
        if seen:
            share = seen.time * steps["muon"] / steps[REFERENCE]
            found.append(f"{share:.2f} of its steps, {seen.time:.2f} of its time at {steps[REFERENCE]:,} steps")
    return "; ".join(found) or "not run"


def _depth(runs: Sequence[Run]) -> str:
    found = []
    for name in (name for name, arm in DEPTHS.items() if arm.base):
        if differences(runs, "depth", name, ARMS[name].base or ""):
            (log,) = differences(runs, "depth", name, ARMS[name].base or "")
            found.append(f"{percent(math.expm1(log))} with {ARMS[name].what.partition(',')[0]}")
    return f"Muon at equal steps, 300, one seed: {'; '.join(found)}" if found else "not run"


def _tuning(runs: Sequence[Run]) -> str:
    sd = spread(runs, "screen", list(SCREENED))
    rates = [value for name in TUNED if name.startswith("adamw_lr") for value in ends(runs, "tune", name).values()]
    worth = {
        name: math.expm1(_sign(arm) * math.log1p(seen.change)) for name, arm in SCREENED.items()
        if (seen := change(runs, "screen", name, arm.base or REFERENCE, sd))
    }  # fmt: skip
    if not rates or not worth:
        return "not run"
    best = min(worth, key=worth.__getitem__)
    gain = percent(worth[best])
    return (
        f"half or twice the best rate costs {percent(sorted(rates)[1] / min(rates) - 1)} or more, and the worst of "
        f"{len(rates)} {percent(max(rates) / min(rates) - 1)}; the best trick, `{best}`, is worth {gain}"
    )


def _half_time(runs: Sequence[Run]) -> str:
    means = []
    for name, arm in SCREENED.items():
        half, end = (differences(runs, "screen", name, arm.base or REFERENCE, middle) for middle in (True, False))
        if half:
            means.append((_sign(arm) * statistics.mean(half), _sign(arm) * statistics.mean(end)))
    if len(means) < 2:
        return "not run"
    flipped = [half for half, end in means if half * end < 0]
    swapped = sum(
        (a[0] - b[0]) * (a[1] - b[1]) < 0 for index, a in enumerate(means) for b in means[index + 1 :]
    )  # fmt: skip
    total = len(means) * (len(means) - 1) // 2
    return f"{swapped / total:.0%} of pairs of tricks change places; {len(flipped)} of {len(means)} cross their base"
