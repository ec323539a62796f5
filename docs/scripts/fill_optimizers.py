"""The tables of docs/optimizers.md, for `fill.py`, from what `python -m benchmarks.optimizers` measured."""

from typing import Any

from filler import Filler

PLACES = ("fsdp2", "deepspeed", "compile", "bf16_true", "tensor lr")
# Largest differences that count as the same: of a loss in the small runs, of a weight after compiled steps.
LOSS_BOUND, BF16_BOUND, WEIGHT_BOUND = 2e-3, 0.1, 1e-4
HEADS = {
    "cost": "optimizer|in a recipe|state, bytes a parameter|step, times AdamW's|bits/byte after 200 steps",
    "places": "optimizer|FSDP2|DeepSpeed|`torch.compile(step)`|BF16True|Tensor lr|resume",
}


def fits(found: dict[str, Any], one: dict[str, Any], place: str) -> bool:
    """Whether an optimizer does in a place what it does in one plain process."""
    if "gap" in found:
        return bool(found["gap"] <= WEIGHT_BOUND)
    if "loss" not in found or len(found["loss"]) != len(one["loss"]):
        return False
    bound = BF16_BOUND if place == "bf16_true" else LOSS_BOUND
    gap = max(abs(a - b) for a, b in zip(found["loss"], one["loss"], strict=True))
    return gap <= bound and not found.get("grows")


def cell(tried: dict[str, Any], place: str) -> str:
    """What a user meets in a place: `yes`, `refused`, or what is wrong."""
    said = tried["said"].get(place)
    if said is None:
        return "not tried"
    if "refused" in said:
        return "refused"
    if "one" not in tried["said"] or not fits(said, tried["said"]["one"], place):
        return "**no**"
    resume = said.get("resume", "bitwise")
    return "yes" if resume == "bitwise" else f"yes; its resume {resume}"


def misses(row: dict[str, Any]) -> list[str]:
    """What of a row is not as promised: it neither works in a place nor is refused, or is refused though it works."""
    tried, found = row["tried"], []
    for place in PLACES:
        shown = cell(tried, place)
        if shown == "**no**":
            found.append(f"{place}: {tried['said'][place]}")
        if "resume failed" in shown or "resume refused" in shown:
            found.append(f"{place}: {shown}")
        without = tried["tried"].get(place, {})
        exact = without.get("resume", "bitwise") == "bitwise"
        if shown == "refused" and exact and fits(without, tried["said"]["one"], place):
            found.append(f"{place}: refused, and works")
    resume = tried["said"].get("one", {}).get("resume", "not tried")
    if resume != "bitwise":
        found.append(f"resume: {resume}")
    if "learns" in row and not row["learns"]["last_loss"] < row["learns"]["first_loss"] - 1:
        found.append(f"learns: {row['learns']}")
    return found


def in_recipe(optimizer: dict[str, Any]) -> str:
    """The class path, with that of the matrices in brackets."""
    inner = optimizer["init_args"].get("matrices")
    return f"`{optimizer['class_path']}`" + (f" of `{inner['class_path']}`" if inner else "")


def tables(result: dict[str, Any]) -> dict[str, str]:
    """Markdown by the name of its place in the page."""
    cost, places = [], []
    for name, row in result["rows"].items():
        costs, learns, tried = row.get("costs", {}), row.get("learns", {}), row["tried"]
        resume = tried["said"].get("one", {}).get("resume", "not tried")
        cost.append([
            name, in_recipe(row["optimizer"]), shown(costs, "state_bytes_per_parameter", ".2f"),
            shown(costs, "ratio", ".2g"), shown(learns, "bits_per_byte", ".3f"),
        ])  # fmt: skip
        places.append([name, *(cell(tried, place) for place in PLACES), resume])
    rows = {"cost": cost, "places": places}
    return {name: table(head.split("|"), rows[name]) for name, head in HEADS.items()}


def shown(figures: dict[str, Any], name: str, digits: str) -> str:
    """A figure, or that it is not there."""
    if name not in figures:
        return "not measured"
    return format(figures[name], digits if figures[name] < 100 else ".0f")


def table(head: list[str], rows: list[list[str]]) -> str:
    """A markdown table, its first column to the left."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def refusals(result: dict[str, Any]) -> dict[str, str]:
    """The lines that users get, each once."""
    said = [found["refused"] for row in result["rows"].values() for found in row["tried"]["said"].values()
            if isinstance(found, dict) and "refused" in found]  # fmt: skip
    return {"refusals": "```text\n" + "\n".join(dict.fromkeys(said)) + "\n```"}


def texts(result: dict[str, Any]) -> dict[str, str]:
    """Tables and lines by the name of their place in the page."""
    return tables(result) | refusals(result)


FILLERS = {
    "optimizers": Filler("optimizers.md", texts),
}
