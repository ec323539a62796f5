"""The README's badges and proofs, for `fill.py`: each figure out of pyproject.toml, a committed result or a page."""

import json
import re
import statistics
import textwrap
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from filler import Filler

ROOT = Path(__file__).resolve().parents[2]
PEERS = {
    "bare_hand": "a loop written by hand, in the manner of nanoGPT",
    "ours": "**a recipe of ours**",
    "ours_watched": "**the same with dashboard, monitors and `StepGuard` of `tiny.yaml`**",
    "litgpt": "litgpt",
    "hf_trainer": "transformers' Trainer",
    "lightning_hf": "transformers' model under Lightning",
}
FORMATS = {
    "bf16_mixed": "`BF16Mixed`", "bf16_true_stochastic": "`BF16True`", "fp8_tensorwise": "`Float8`", "mxfp8": "MXFP8",
}  # fmt: skip


def texts(_: Any) -> dict[str, str]:
    """Badges, and one text a proof, by the name of the place in the README."""
    return {"badges": badges(), "speed": speed(), "proofs": proofs()}


def badges() -> str:
    """The versions that pyproject.toml asks for, as badges."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pythons = [c.rpartition(" ")[2] for c in project["classifiers"] if re.search(r"Python :: 3\.\d+$", c)]
    needs = {re.match(r"[\w-]+", spec)[0]: spec for spec in project["dependencies"]}  # type: ignore[index]
    least = {name: re.search(r">=([\d.]+)", needs[name])[1] for name in ("torch", "lightning")}  # type: ignore[index]
    shown = {
        "python": " | ".join(pythons),
        **{name: f"≥ {version}" for name, version in least.items()},
        "license": project["license"],
    }
    return " ".join(
        f"![{name} {value}](https://img.shields.io/badge/{_escaped(name)}-{_escaped(value)}-blue)"
        for name, value in shown.items()
    )


def _escaped(text: str) -> str:
    return quote(text.replace("-", "--").replace("_", "__"), safe="")


def speed() -> str:
    """CPU time of a step of each peer over that of the loop written by hand: eager and compiled."""
    result = _newest("peers")
    runs = {_mode(run): run for run in result["runs"] if (run["size"], run["bf16"]) == ("5M", False)}
    lines = [f"| 5M Llama, fp32, one thread | {' | '.join(runs)} |", f"|---|{'--:|' * len(runs)}"]
    for name, what in PEERS.items():
        cells = [_median(run["peers"].get(name)) for run in runs.values()]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _mode(run: dict[str, Any]) -> str:
    return "compiled" if run["compiled"] else "eager"


def _median(peer: dict[str, Any] | None) -> str:
    if peer is None:
        return "-"
    rounds = peer["cpu_ratio"]["rounds"]
    return f"{statistics.median(rounds):.2f} ({min(rounds):.2f} to {max(rounds):.2f})"


def proofs() -> str:
    """A list: Lightning's tests, formats, strategies, faults of a run, faults that a run outlives."""
    points = [_lightning(), _formats(), _strategies(), _doctor(), _faults()]
    return "\n".join(textwrap.fill(point, 120, subsequent_indent="  ", break_on_hyphens=False) for point in points)


def _lightning() -> str:
    monitors = _newest("lightning-suite")["modes"]["monitors"]
    return (
        f"- **Lightning's own tests**, {monitors['tests']:,} of them with all our monitors in each Trainer: "
        f"{monitors['passed']:,} pass, the others have a reason each, and {monitors['equal']:,} of "
        f"{monitors['ends']:,} runs are equal to the bit to those without them ([table](docs/existing_projects.md"
        "#see-how-it-does-under-lightnings-own-tests))."
    )


def _formats() -> str:
    runs = _newest("precision")["runs"]
    at_one_rate = [run for run in runs if run["lr"] == runs[0]["lr"] and run["steps"] == runs[0]["steps"]]
    bits = {run["format"]: run["bits_per_byte"] for run in at_one_rate}
    base = bits["fp32"]
    seed = abs(bits["fp32_another_seed"] / base - 1)
    shown = ", ".join(f"{name} {bits[key] / base - 1:+.2%}" for key, name in FORMATS.items())
    return (
        f"- **Formats**, bits/byte after {runs[0]['steps']:,} steps against fp32: {shown}; another seed makes "
        f"{seed:.2%} ([table](docs/precision.md#compare-the-formats))."
    )


def _strategies() -> str:
    rows = _newest("strategies")["rows"][1:]
    loss = max(trial["loss"] for row in rows for trial in row["trials"].values())
    resumed = [row for row in rows if row.get("resume")]
    equal = sum(not row["resume"]["differing_tensors"] for row in resumed)
    return (
        f"- **Strategies**, {len(rows)} layouts over up to {max(row['processes'] for row in rows)} processes: losses "
        f"of ten steps differ from one process by at most {loss:.0e}, and {equal} of {len(resumed)} resume to the bit "
        "([table](docs/strategies.md#compare-the-training))."
    )


def _doctor() -> str:
    result = _newest("doctor-trials")
    faults, healthy = result["faults"], result["healthy"]
    return (
        f"- **Faults of a run**: of {len(faults)} that were planted in real runs, [`doctor`](docs/doctor.md) names "
        f"{sum(row['right'] for row in faults)} first, by the log alone; {sum(not row['right'] for row in healthy)} of "
        f"{len(healthy)} healthy runs get a warning ([pictures](docs/playbook.md))."
    )


def _faults() -> str:
    page = (ROOT / "docs/what_survives.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|.*\| \[\d+\]\(#tests\) \|$", page, re.M)
    return (
        "- **Faults that a run outlives**: kills, signals, full disks, flipped bits, lost hosts, NaN. "
        f"{len(rows)} faults, each caused for real by a test, with what is lost ([table](docs/what_survives.md))."
    )


def _newest(name: str) -> Any:
    files: Iterable[Path] = (ROOT / "benchmarks/results").glob(f"{name}-*-cpu.json")
    return json.loads(max(files).read_text(encoding="utf-8"))


FILLERS = {
    "readme": Filler("../README.md", texts, measured=False),
}
