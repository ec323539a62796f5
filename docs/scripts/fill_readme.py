"""The README's badges and proofs, for `fill.py`: each figure out of pyproject.toml, a committed result or a page."""

import json
import re
import statistics
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from filler import Filler

ROOT = Path(__file__).resolve().parents[2]


def texts(_: Any) -> dict[str, str]:
    """The badges and the table of proofs, by the name of the place in the README."""
    return {"badges": badges(), "proofs": proofs()}


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


def proofs() -> str:
    """A table of four figures: speed, Lightning's tests, strategies, faults that a run outlives."""
    head = ["| figure | what was measured | |", "|--:|---|---|"]
    return "\n".join([*head, _speed(), _lightning(), _strategies(), _faults()])


def figures(_: Any) -> dict[str, str]:
    """Three of the proofs for the home page: each figure with a link to what was measured, and a few words."""
    found = re.findall(r"\| \*\*(.+?)\*\* \|.*\(docs/(\S+)\) \|", proofs())
    said = (
        "times the CPU time of a training step in a hand-written loop.",
        "training runs of Lightning's own tests are bitwise equal with and without our monitors.",
        "faults, such as kills, full disks and lost hosts, each caused for real by a test.",
    )
    shown = zip((*found[:2], found[3]), said, strict=True)
    return {"figures": "\n".join(f"- [**{figure}**]({link}) {words}" for (figure, link), words in shown)}


def _speed() -> str:
    run = next(r for r in _newest("peers")["runs"] if (r["size"], r["bf16"], r["compiled"]) == ("5M", False, False))
    rounds = run["peers"]["ours"]["cpu_ratio"]["rounds"]
    return (
        f"| **{statistics.median(rounds):.2f}** | CPU time of a training step over that of a hand-written loop: "
        f"{run['size']} Llama, fp32, median of {len(rounds)} rounds from {min(rounds):.2f} to {max(rounds):.2f} "
        "| [other libraries](docs/speed.md) |"
    )


def _lightning() -> str:
    monitors = _newest("lightning-suite")["modes"]["monitors"]
    return (
        f"| **{monitors['equal']:,} of {monitors['ends']:,}** | training runs in Lightning's own tests that are "
        "bitwise equal with and without our monitors "
        "| [table](docs/compatibility.md#lightnings-own-tests) |"
    )


def _strategies() -> str:
    rows = _newest("strategies")["rows"][1:]
    loss = max(trial["loss"] for row in rows for trial in row["trials"].values())
    resumed = [row for row in rows if row.get("resume")]
    equal = sum(not row["resume"]["differing_tensors"] for row in resumed)
    return (
        f"| **{equal} of {len(resumed)}** | layouts over up to {max(row['processes'] for row in rows)} processes that "
        f"resume bitwise; losses of ten steps are within {loss:.0e} of one process "
        "| [table](docs/strategies.md#compare-the-training) |"
    )


def _faults() -> str:
    page = (ROOT / "docs/what_survives.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|.*\| \[\d+\]\(#tests\) \|$", page, re.M)
    return (
        f"| **{len(rows)}** | faults, such as kills, full disks and lost hosts, each caused for real by a test "
        "| [list](docs/what_survives.md) |"
    )


def _newest(name: str) -> Any:
    files: Iterable[Path] = (ROOT / "benchmarks/results").glob(f"{name}-*-cpu.json")
    return json.loads(max(files).read_text(encoding="utf-8"))


FILLERS = {
    "home": Filler("README.md", figures, measured=False),
    "readme": Filler("../README.md", texts, measured=False),
}
