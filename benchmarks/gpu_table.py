"""Markdown of the results that gpu.py wrote, of one call or of several."""

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_tricks.accounting import peak_flops

BASELINES = ("bare", "lightning_bf16", "one_device")
# Column: heading, and how its values are written.
COLUMNS = {
    "size": ("size", "{}"), "contender": ("contender", "{}"), "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "spread": ("spread", "{:.1%}"), "micro_batch_ms": ("ms", "{:.1f}"), "peak_allocated_gib": ("peak GiB", "{:.1f}"),
    "mfu_causal": ("MFU causal", "{:.1%}"), "mfu_full": ("MFU full", "{:.1%}"),
    "of_yardstick_causal": ("of yardstick", "{:.1%}"), "of_sustained_causal": ("of sustained", "{:.1%}"),
    "against_base": ("against base", "{}"), "rounds": ("rounds", "{}"), "sm_clock_mhz": ("SM MHz", "{:.0f}"),
    "power_watts": ("W", "{:.0f}"), "attention": ("attention", "{}"),
}  # fmt: skip


def rows(
    result: dict[str, Any], peaks: dict[str, float | None], yardstick: float | None, sustained: float | None = None
) -> list[dict[str, Any]]:
    """One row for each contender of a training stage: medians over its rounds, MFU in both definitions.

    Args:
        result: the stage's JSON.
        peaks: FLOP/s of the device by its datasheet, by the type that products run in; None where not known.
        yardstick: FLOP/s that a bf16 matrix product reached, None where not measured.
        sustained: the same over several seconds without a pause.
    """
    table = []
    base = {run["round"]: run["tokens_per_second"] for run in result["runs"] if run["contender"] in BASELINES}
    for contender in dict.fromkeys(run["contender"] for run in result["runs"]):
        runs = [run for run in result["runs"] if run["contender"] == contender]
        rates = [run["tokens_per_second"] for run in runs]
        rate = statistics.median(rates)
        row: dict[str, Any] = {"size": result["stage"], "contender": contender, "tokens_per_second": rate}
        row["spread"] = (max(rates) - min(rates)) / rate if len(rates) > 1 else None
        row["micro_batch_ms"] = statistics.median(run["micro_batch_ms"] for run in runs)
        row["peak_allocated_gib"] = max((run["peak_allocated_gib"] or 0.0) for run in runs) or None
        peak = peaks.get(runs[0].get("peak_dtype", "bf16"))
        for kind, flops in runs[0]["flops_per_token"].items():
            row[f"mfu_{kind}"] = rate * flops / peak if peak else None
            row[f"of_yardstick_{kind}"] = rate * flops / yardstick if yardstick else None
            row[f"of_sustained_{kind}"] = rate * flops / sustained if sustained else None
        pairs = [run["tokens_per_second"] / base[run["round"]] for run in runs if run["round"] in base]
        row["speed_against_base"] = statistics.median(pairs) if pairs else None
        row["against_base"] = ratio(pairs)
        row["rounds"] = len(runs)
        for name in ("sm_clock_mhz", "power_watts"):
            values = [run[name] for run in runs if run.get(name) is not None]
            row[name] = statistics.median(values) if values else None
        row["attention"] = (runs[0].get("attention") or "").removesuffix("_ATTENTION").lower() or None
        table.append(row)
    return table


def ratio(pairs: Sequence[float]) -> str | None:
    """Median of the rounds' ratios with the smallest and the largest; None without a round."""
    if not pairs:
        return None
    middle = f"{statistics.median(pairs):.3f}"
    return middle if len(pairs) == 1 else f"{middle} ({min(pairs):.3f} to {max(pairs):.3f})"


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """Every stage's JSON in a folder, by the stage's name."""
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    return {name: result for name, result in results.items() if isinstance(result, dict)}


def summary(folders: Sequence[Path], peak: float | None) -> str:
    """Markdown of all that the folders hold, each measured against its own yardstick.

    Args:
        folders: results of one call each; a stage that several hold has its rows from each.
        peak: dense bf16 FLOP/s of the GPU; None for that of a known GPU.
    """
    calls = [load(Path(folder)) for folder in folders]
    machines = [result["machine"] for call in calls for result in call.values() if "machine" in result]
    # an unknown GPU gets no MFU against the peak, only against the yardstick, unless --peak_flops gives one
    names = {machine["gpu"] for machine in machines} - {None}
    peaks = {dtype: next((f for name in names if (f := peak_flops(name, dtype))), None) for dtype in ("bf16", "fp8")}
    peaks["bf16"] = peak or peaks["bf16"]
    lines: list[str] = []
    for call in calls:
        lines += heading(call, peaks["bf16"])
    table = ["", f"| {' | '.join(title for title, _ in COLUMNS.values())} |", "|---|---|" + "--:|" * (len(COLUMNS) - 2)]
    for call in calls:
        yard = call.get("yardstick", {})
        limits = [1e12 * yard[name] if name in yard else None for name in ("tflops_median", "tflops_sustained")]
        for result in training(call):
            for row in rows(result, peaks, *limits):
                cells = ["-" if row.get(key) is None else text.format(row[key]) for key, (_, text) in COLUMNS.items()]
                table.append(f"| {' | '.join(cells)} |")
    lines += table
    for call in calls:
        lines += [*proof(call), *ends(call)]
    found = [line for call in calls for line in problems(call)]
    return "\n".join([*lines, *(["", "To look at:", *found] if found else [])])


def training(call: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of the stages that time training."""
    return [result for result in call.values() if "stage" in result and "runs" in result]


def heading(call: dict[str, dict[str, Any]], peak: float | None) -> list[str]:
    """One line each for machine, yardstick, checks and tests, as far as the call has them."""
    lines = []
    if where := next((result["machine"] for result in call.values() if "machine" in result), None):
        parts = [where["gpu"] or where["cpu"], where["date"], *(" ".join(v) for v in where["versions"].items())]
        parts += [f"{name} {where[name]}" for name in ("cuda", "cudnn", "nccl") if where.get(name)]
        lines.append(", ".join([*parts, *(f"{name} {value}" for name, value in where.get("nvidia_smi", {}).items())]))
    if "yardstick" in call:
        yard = call["yardstick"]
        of_peak = (
            f", {1e12 * yard['tflops_median'] / peak:.1%} of its peak {peak / 1e12:.1f}" if peak else ", peak not known"
        )
        text = f"bf16 product of {yard['size']} cubed: {yard['tflops_median']:.3g} TFLOP/s{of_peak}"
        if "tflops_sustained" in yard:
            text += f"; for {yard['sustained_seconds']:g} s without a pause: {yard['tflops_sustained']:.3g} TFLOP/s"
        if "copy_tb_per_second" in yard:
            text += f"; copy on the device: {yard['copy_tb_per_second']:.3g} TB/s read and written"
        lines.append(text)
    if "smoke" in call:
        checks = call["smoke"]["checks"]
        lines.append(f"correctness: {sum(check['ok'] for check in checks)} of {len(checks)} checks passed")
    if "tests" in call:
        outcomes = [test["outcome"] for test in call["tests"]["tests"].values()]
        counts = ", ".join(f"{outcomes.count(kind)} {kind}" for kind in ("passed", "failed", "skipped"))
        lines.append(f"tests marked gpu: {counts}, {(call['tests']['collected'] or 0) - len(outcomes)} not reached")
    return lines


def problems(call: dict[str, dict[str, Any]]) -> Iterator[str]:
    """A line for all that failed, and for each run whose figures are not sound."""
    for check in call.get("smoke", {}).get("checks", []):
        if not check["ok"]:
            yield f"- smoke: {check['check']}: {first_line(check['error'])}"
    for name, test in call.get("tests", {}).get("tests", {}).items():
        if test["outcome"] == "failed":
            yield f"- {name}"
    for result in call.values():
        if at := result.get("running"):
            yield f"- {result['stage']}: stopped in {at if isinstance(at, str) else ' '.join(map(str, at.values()))}"
    for result in training(call):
        stage = result["stage"]
        for failure in result.get("failures", []):
            yield f"- {stage}, {failure['contender']}: {first_line(failure['error'])}"
        compiled = sum(run.get("graphs_compiled_in_warmup", 1) for run in result["runs"])
        if result["runs"] and result["runs"][0].get("compile_blocks") and not compiled:
            yield f"- {stage}: compile_blocks is set and nothing was compiled"
        for run in result["runs"]:
            if run.get("graphs_compiled_while_timed") or run.get("graph_breaks"):
                yield (
                    f"- {stage}, {run['contender']}, round {run['round']}: {run['graphs_compiled_while_timed']} graphs "
                    f"compiled while timed, {run['graph_breaks']} graph breaks"
                )


def first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")[:200]


def proof(call: dict[str, dict[str, Any]]) -> list[str]:
    """Markdown of the quality of each format; empty where it was not run."""
    if "precision_proof" not in call:
        return []
    cells = [f"| {run['format']} | {run['bits_per_byte']:.4f} |" for run in call["precision_proof"]["runs"]]
    return ["", "| format | validation, bits/byte |", "|---|--:|", *cells]


def ends(call: dict[str, dict[str, Any]]) -> list[str]:
    """Markdown of where the runs with and without FSDP2 ended, which should be the same; empty without such runs."""
    compared = [
        f"| {result['stage']} | {run['contender']} | {run['round']} | {run['last_loss']:.6f} |"
        f" {run['last_grad_norm']:.6f} |"
        for result in training(call)
        for run in result["runs"]
        if run["contender"].removesuffix("_again") in ("one_device", "fsdp2")
    ]
    head = ["", "| size | contender | round | last loss | last norm |", "|---|---|--:|--:|--:|"]
    return [*head, *compared] if compared else []
