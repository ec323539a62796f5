"""What forecasts were worth: of larger runs in docs/ladder.md, of decays in docs/branch.md; for `fill.py`."""

from collections.abc import Sequence
from typing import Any

from filler import Filler


def table(rows: Sequence[Sequence[str]]) -> str:
    """Of Markdown; the first row has the names of its columns."""
    head, *rest = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rest))


def held_out(result: dict[str, Any]) -> dict[str, str]:
    """A row for each run that was held out."""
    rows = [["width", "times the largest rung", "forecast", "90 % interval", "got", "miss", ""]]
    for run in result["held_out"]:
        said = run["forecast"]
        told = "refused" if said["refusal"] else "inside" if run["is_inside"] else "outside"
        rows.append([
            str(run["width"]), f"{said['distance']:.2g}", f"{said['loss']:.3f}", f"{said['low']:.3f} to "
            f"{said['high']:.3f}", f"{run['loss']:.3f}", f"{100 * run['miss']:+.1f} %", told,
        ])  # fmt: skip
    return {"ladder family": table(rows)}


def decays(result: dict[str, Any]) -> dict[str, str]:
    """A row for each decay that had a forecast."""
    rows = [["steps", "of decay", "forecast", "interval", "got", "off by, of the gain"]]
    for branch in result["branches"]:
        found, loss = branch["forecast"], branch["loss"]
        refused = [f"none: {branch['line'].partition(': ')[2].partition(':')[0]}", ""]
        cells = [f"{found:.3f}", f"{branch['low']:.3f} to {branch['high']:.3f}"] if found else refused
        off = f"{100 * (loss - found) / branch['gain']:+.0f} %" if found else ""
        rows.append([f"{branch['start']:,}", str(branch["steps"]), *cells, f"{loss:.3f}", off])
    return {"branch forecast": table(rows)}


FILLERS = {
    "ladder-family": Filler("ladder.md", held_out),
    "branch-forecast": Filler("branch.md", decays),
}
