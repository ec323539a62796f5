"""The tables of docs/strategies.md and docs/pipeline.md, for `fill.py`, from `python -m benchmarks.strategies`."""

import re
from typing import Any

from filler import Filler

TITLES = {
    "one": "one process",
    "ddp": '`"ddp"`',
    "fsdp2": "`FSDP2Strategy()`",
    "fsdp2_compiled": "`FSDP2Strategy(compile_blocks=True)`",
    "hsdp": "`mesh: {replicate: 2}`",
    "tensor": "`mesh: {tensor: 2}`, `sequence_parallel: false`",
    "tensor_sequence": "`mesh: {tensor: 2}`",
    "tensor_compiled": "`mesh: {tensor: 2}`, `compile_blocks: true`",
    "context_gather": "`mesh: {context: 2}`",
    "context_ulysses": "`mesh: {context: 2}`, `ulysses`",
    "fsdp2_tensor": "`mesh: {shard: 2, tensor: 2}`",
    "fsdp2_context": "`mesh: {shard: 2, context: 2}`",
    "tensor_context": "`mesh: {tensor: 2, context: 2}`",
    "hsdp_tensor": "`mesh: {replicate: 2, shard: 2, tensor: 2}`",
    "pipeline_gpipe": "`mesh: {pipeline: 2}`, `GPipe`",
    "pipeline_1f1b": "`mesh: {pipeline: 2}`",
    "pipeline_interleaved": "`mesh: {pipeline: 2}`, `Interleaved1F1B`",
    "pipeline_zbv": "`mesh: {pipeline: 2}`, `ZBVZeroBubble`",
    "pipeline_tied": "`mesh: {pipeline: 2}`, tied head",
    "pipeline_tensor_fsdp2": "`mesh: {pipeline: 2, shard: 2, tensor: 2}`",
    "expert": "`mesh: {expert: 2}`, experts",
    "fsdp2_expert": "`mesh: {shard: 4, expert: 2}`, experts",
    "zero1": "`DeepSpeedZeROStrategy(stage=1)`",
    "zero2": "`DeepSpeedZeROStrategy(stage=2)`",
    "zero3": "`DeepSpeedZeROStrategy(stage=3)`",
}


HEADS = {
    "same training": "strategy|processes|loss, AdamW|loss, SGD|norm, SGD|loss, foreign|norm, foreign|gradient",
    "monitors": "strategy|decay groups|lr|norm, AdamW: first, all|tokens|FLOPs|FLOPs, foreign",
    "memory": "strategy|weights|gradients|optimizer|other|together|of one process",
    "checkpoints": "strategy|its own resume|in one process|in `FSDP2Strategy()` on 2",
}


def tables(result: dict[str, Any]) -> dict[str, str]:
    """Markdown by the name of its place in the page."""
    rows, parameters = result["rows"], result["parameters"]
    others = [row for row in rows if row["row"] != "one"]
    lines = {
        "same training": [[title(row), str(row["processes"]), *training(row["trials"])] for row in others],
        "monitors": [[title(row), *monitors(row)] for row in others],
        "memory": [[title(row), *memory(row, parameters)] for row in rows],
        "checkpoints": [[title(row), *checkpoints(row)] for row in rows],
    }
    return {name: table(head.split("|"), lines[name]) for name, head in HEADS.items()}


def title(row: dict[str, Any]) -> str:
    """How a user writes the strategy."""
    return TITLES[row["row"]]


def table(head: list[str], rows: list[list[str]]) -> str:
    """A markdown table, its first column to the left."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def gap(value: float) -> str:
    """A difference, to one digit."""
    return "0" if value == 0 else f"{value:.0e}"


def training(trials: dict[str, Any]) -> list[str]:
    """Largest differences from one process."""
    adamw, foreign = next(iter(trials.values())), foreign_of(trials)
    sgd = next(trial for name, trial in trials.items() if name.endswith("sgd"))
    gradients = max(trial["gradient"] for trial in trials.values())
    not_ours = [gap(foreign["loss"]), gap(foreign["norm"])] if foreign else ["-", "-"]
    return [gap(adamw["loss"]), gap(sgd["loss"]), gap(sgd["norm"]), *not_ours, gap(gradients)]


def foreign_of(trials: dict[str, Any]) -> dict[str, Any] | None:
    """The trial of a module that is not ours: torch's encoder, with tensor ranks a model of transformers."""
    return trials.get("foreign") or trials.get("hugging_face")


def monitors(row: dict[str, Any]) -> list[str]:
    """Whether the monitors say what they say in one process."""
    adamw, foreign = next(iter(row["trials"].values())), foreign_of(row["trials"])
    same = {True: "same", False: "differ", None: "not counted"}
    norms = f"{gap(adamw['first_norm'])}, {gap(adamw['norm'])}"
    counted = [same[adamw["same_tokens"]], same[adamw["same_flops"]]]
    counted.append(same[foreign["same_flops"]] if foreign else "-")
    groups = same.get(row["groups"], "refused")
    return [groups, "same" if adamw["lr"] == 0 else gap(adamw["lr"]), norms, *counted]


def memory(row: dict[str, Any], parameters: int) -> list[str]:
    """Bytes a parameter on the rank that holds most."""
    parts = ("weights", "gradients", "optimizer", "other", "total")
    return [*(f"{row['bytes'][part] / parameters:.2f}" for part in parts), f"{row['share']:.2f}"]


def checkpoints(row: dict[str, Any]) -> list[str]:
    """What became of the checkpoint in the middle."""
    resume = row["resume"]
    exact = "exact" if resume.get("loss") == resume.get("differing_tensors") == 0 else str(resume)
    into = row["into"]
    return [exact, into_layout(into, "one"), into_layout(into, "fsdp2")]


def into_layout(into: dict[str, Any], layout: str) -> str:
    """The largest difference of the losses that follow, or what is refused."""
    if layout not in into:
        return "its own"
    weights = into.get(f"{layout}, weights")
    if isinstance(into[layout], str):
        return into[layout].split(":")[0] + (f"; its weights {gap(weights)}" if weights is not None else "")
    return gap(into[layout])


def refusals(result: dict[str, Any]) -> dict[str, str]:
    """The lines that users get in the place of a figure, each once."""
    groups = [row["groups"] for row in result["rows"] if isinstance(row["groups"], str)]
    into = [said for row in result["rows"] for said in row["into"].values() if isinstance(said, str)]
    said = [re.sub(r"\w+/step=\d+\.ckpt", "FOLDER", line.removeprefix("refused: ")) for line in groups + into]
    return {"refusals": "```text\n" + "\n".join(dict.fromkeys(said)) + "\n```"}


def texts(result: dict[str, Any]) -> dict[str, str]:
    """Tables and lines by the name of their place in the page."""
    return tables(result) | refusals(result)


def of_stages(result: dict[str, Any]) -> dict[str, str]:
    """The rows of stages and experts, each line with what the page says of them."""
    head = "strategy|processes|loss|norm|gradient|of one process's bytes|its own resume|in one process|in two shards"
    rows = [row for row in result["rows"] if row["row"] != "one"]
    lines = []
    for row in rows:
        trials = row["trials"]
        sgd = next(trial for name, trial in trials.items() if name.endswith("sgd"))
        worst = {kind: max(trial[kind] for trial in trials.values()) for kind in ("loss", "gradient")}
        gaps = [gap(worst["loss"]), gap(sgd["norm"]), f"{worst['gradient']:.1e}"]
        lines.append([title(row), str(row["processes"]), *gaps, f"{row['share']:.2f}", *checkpoints(row)])
    return {"stages": table(head.split("|"), lines)}


FILLERS = {
    "strategies": Filler("strategies.md", texts),
    "stages": Filler("pipeline.md", of_stages),
}
