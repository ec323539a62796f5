"""Markdown of the results that gpu.py wrote, of one call or of several: goals, figures, and what is not sound."""

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_tricks.accounting import peak_flops

Call = dict[str, dict[str, Any]]  # the JSON of each stage of a call, by the stage's name
# What a contender is measured against, in the same round, where it is neither a loop by hand nor ours.
BASES = {"fsdp2": "one_device", "one_device": "one_device", "documents": "documents_dense"}
BARE = "bare"
COPY_TB_PER_SECOND = {"H200": 4.8, "H100": 3.35}  # of the datasheets, by a word of the GPU's name
LEAST_SECONDS = 10.0  # of a window: before, the clock has not settled
MOST_LEFT_GIB = 1.0  # that a contender may leave on the device
# Column: heading, and how its values are written.
COLUMNS = {
    "size": ("size", "{}"), "contender": ("contender", "{}"), "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "spread": ("spread", "{:.1%}"), "micro_batch_ms": ("ms", "{:.1f}"), "peak_allocated_gib": ("peak GiB", "{:.1f}"),
    "fp8_share": ("fp8 share", "{:.1%}"), "mfu_causal": ("MFU causal", "{:.1%}"), "mfu_full": ("MFU full", "{:.1%}"),
    "of_yardstick_causal": ("of yardstick", "{:.1%}"), "of_sustained_causal": ("of sustained", "{:.1%}"),
    "against_base": ("against base", "{}"), "at_equal_loss": ("at equal loss", "{:.3f}"), "rounds": ("rounds", "{}"),
    "sm_clock_mhz": ("SM MHz", "{:.0f}"), "power_watts": ("W", "{:.0f}"), "attention": ("attention", "{}"),
}  # fmt: skip


class Limits(NamedTuple):
    """FLOP/s that a product in bf16 and in fp8 reaches, None where not known."""

    bf16: float | None
    fp8: float | None = None

    def mixed(self, fp8_share: float) -> float | None:
        """FLOP/s of work of which this share is in fp8 and the rest in bf16."""
        if not fp8_share:
            return self.bf16
        return 1 / (fp8_share / self.fp8 + (1 - fp8_share) / self.bf16) if self.fp8 and self.bf16 else None


UNKNOWN = Limits(None)


def plain(contender: str) -> str:
    """A contender's name without `_again`."""
    return contender.removesuffix("_again")


def base_of(result: dict[str, Any], contender: str) -> str:
    """What a contender of this stage is measured against: fp8 against ours, others against the bare loop if it ran."""
    ran = {plain(run["contender"]) for run in result["runs"]}
    no_bare = contender.startswith("fp8") or BARE not in ran
    return BASES.get(plain(contender), "ours" if no_bare else BARE)


def rates(result: dict[str, Any], contender: str) -> dict[int, list[float]]:
    """Tokens/s of a contender by round, also of its second run in a round."""
    found: dict[int, list[float]] = {}
    for run in result["runs"]:
        if plain(run["contender"]) == contender:
            found.setdefault(run["round"], []).append(run["tokens_per_second"])
    return found


def rows(
    result: dict[str, Any],
    peaks: Limits,
    yardstick: Limits,
    sustained: Limits = UNKNOWN,
    equal_loss: dict[str, float] | None = None,
) -> list[dict[str, Any]]:
    """One row for each contender of a training stage: medians over its rounds, MFU in both definitions.

    Args:
        result: the stage's JSON.
        peaks: of the device by its datasheet.
        yardstick: of the products that were measured, in short bursts.
        sustained: the same over several seconds without a pause.
        equal_loss: of formats, see `at_equal_loss`.
    """
    table = []
    for contender in dict.fromkeys(run["contender"] for run in result["runs"]):
        runs = [run for run in result["runs"] if run["contender"] == contender]
        speeds = [run["tokens_per_second"] for run in runs]
        rate = statistics.median(speeds)
        row: dict[str, Any] = {"size": result["stage"], "contender": contender, "tokens_per_second": rate}
        row["spread"] = (max(speeds) - min(speeds)) / rate if len(speeds) > 1 else None
        row["micro_batch_ms"] = statistics.median(run["micro_batch_ms"] for run in runs)
        row["peak_allocated_gib"] = max((run["peak_allocated_gib"] or 0.0) for run in runs) or None
        shares = runs[0].get("fp8_share", {})
        row["fp8_share"] = shares.get("causal") or None
        for kind, flops in runs[0]["flops_per_token"].items():
            for name, limits in (("mfu", peaks), ("of_yardstick", yardstick), ("of_sustained", sustained)):
                limit = limits.mixed(shares.get(kind, 0.0))
                row[f"{name}_{kind}"] = rate * flops / limit if limit else None
        base = rates(result, base_of(result, contender))
        pairs = [run["tokens_per_second"] / statistics.mean(base[run["round"]]) for run in runs if run["round"] in base]
        row["speed_against_base"] = statistics.median(pairs) if pairs else None
        row["against_base"] = ratio(pairs)
        share = (equal_loss or {}).get(number_format(contender))
        if pairs and share is not None:
            row["at_equal_loss"] = row["speed_against_base"] * share
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


def at_equal_loss(run: dict[str, Any], base: dict[str, Any]) -> float:
    """The share of `run`'s steps that take `base` to the loss of `run`, at most 1.

    Both had the same batches, so the mean distance of their losses in the last third is hardly noise; divided by what
    a step of `base` gained there, it is the number of steps that `run` is behind.

    Args:
        run: of `benchmarks.precision`, with the means of the loss over equal parts of the run.
        base: the same in another format.
    """
    last = max(len(base["loss"]) // 3, 2)
    tail = base["loss"][-last:]
    behind = statistics.mean(here - there for here, there in zip(run["loss"][-last:], tail, strict=True))
    half = last // 2
    gained = (statistics.mean(tail[:half]) - statistics.mean(tail[-half:])) / (last - half)
    if behind <= 0:
        return 1.0
    return max(1 - behind / gained / len(base["loss"]), 0.0) if gained > 0 else 0.0


def number_format(contender: str) -> str:
    """A contender's format in `precision_proof`: with kept weights and fused projections (nearly) that without them."""
    return plain(contender).removesuffix("_fused").removesuffix("_kept")


def equal_losses(calls: Sequence[Call]) -> dict[str, float]:
    """`at_equal_loss` of each fp8 format that `precision_proof` has trained, against bf16_mixed."""
    found: dict[str, float] = {}
    for call in calls:
        runs = {run["format"]: run for run in call.get("precision_proof", {}).get("runs", [])}
        if base := runs.get("bf16_mixed"):
            found |= {name: at_equal_loss(run, base) for name, run in runs.items() if name.startswith("fp8")}
    return found


class Goal(NamedTuple):
    """A goal and what was measured.

    Attributes:
        what: in words.
        bound: of the figure.
        figure: None if it was not measured.
        at_least: whether the bound is a lower one.
    """

    what: str
    bound: float
    figure: float | None
    at_least: bool = True

    def cells(self) -> list[str]:
        """Goal, figure, and whether it was reached."""
        words = f"{self.what} {'at least' if self.at_least else 'at most'} {self.bound:g}"
        if self.figure is None:
            return [words, "not measured", "-"]
        reached = self.figure >= self.bound if self.at_least else self.figure <= self.bound
        return [words, f"{self.figure:.4g}", "yes" if reached else f"missed by {abs(self.figure - self.bound):.2g}"]


SPEED_GOALS = {"llama7b": 0.82, "llama1b": 0.75, "gpt2_124m": 0.70}
FP8_SIZES, BARE_SIZES = ("llama7b", "fp8_7b", "llama7b_16k"), ("gpt2_124m", "llama1b", "llama7b")


def goals(calls: Sequence[Call]) -> list[Goal]:
    """The project's goals on one H200, each with the figure of the last call that has it."""
    by_stage: dict[str, list[dict[str, Any]]] = {}
    equal_loss = equal_losses(calls)
    for call in calls:
        for result in training(call):
            if result["runs"]:
                by_stage[result["stage"]] = rows(result, UNKNOWN, limits_of(call)[0], equal_loss=equal_loss)

    def figure(stage: str, contender: str, name: str) -> float | None:
        return next((row.get(name) for row in by_stage.get(stage, []) if row["contender"] == contender), None)

    found = [
        Goal(f"{stage}: model FLOP/s over P,", bound, figure(stage, "ours", "of_yardstick_causal"))
        for stage, bound in SPEED_GOALS.items()
    ]
    for stage in FP8_SIZES:
        best = max((row.get("at_equal_loss") or 0.0 for row in by_stage.get(stage, [])), default=0.0)
        found.append(Goal(f"{stage}: the best fp8 over bf16 at equal loss, tokens/s,", 1.3, best or None))
    results = {result["stage"]: result for call in calls for result in training(call)}
    for stage in BARE_SIZES:
        found.append(
            Goal(f"{stage}: step over that of the bare loop", 1.005, step_over_bare(results.get(stage)), False)
        )
    memory = {
        plain(run["contender"]): max(run["peak_allocated_gib"] or 0.0, run.get("peak_warmup_gib") or 0.0)
        for run in results.get("memory_7b", {}).get("runs", [])
    }
    stock = memory.get("stock_hand")
    ours = min((peak for name, peak in memory.items() if name.startswith("ours")), default=None)
    what = "memory_7b: the least peak of ours over that of stock Lightning with fused AdamW"
    return [*found, Goal(what, 0.5, ours / stock if ours and stock else None, False)]


def step_over_bare(result: dict[str, Any] | None) -> float | None:
    """Time of a step over that of the bare loop, the median over the rounds; None if not measured."""
    if result is None:
        return None
    ours, bare = rates(result, "ours"), rates(result, BARE)
    both = [statistics.mean(bare[turn]) / statistics.mean(ours[turn]) for turn in ours if turn in bare]
    return statistics.median(both) if both else None


def load(folder: Path) -> Call:
    """Every stage's JSON in a folder, by the stage's name."""
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    return {name: result for name, result in results.items() if isinstance(result, dict)}


def limits_of(call: Call) -> tuple[Limits, Limits]:
    """FLOP/s of the products of this very call: in bursts, and sustained."""
    yard = call.get("yardstick", {})
    found = []
    for name in ("tflops_median", "tflops_sustained"):
        values = [yard.get(prefix + name) for prefix in ("", "fp8_")]
        found.append(Limits(*(1e12 * value if value else None for value in values)))
    return found[0], found[1]


def markdown(headings: Sequence[str], align: str, lines: Sequence[Sequence[str]]) -> list[str]:
    """A table, after an empty line; nothing without lines."""
    if not lines:
        return []
    return ["", f"| {' | '.join(headings)} |", align, *(f"| {' | '.join(cells)} |" for cells in lines)]


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
    known = {dtype: next((f for name in names if (f := peak_flops(name, dtype))), None) for dtype in ("bf16", "fp8")}
    peaks = Limits(peak or known["bf16"], known["fp8"])
    equal_loss = equal_losses(calls)
    lines = [line for call in calls for line in heading(call, peaks.bf16)]
    lines += markdown(("goal", "figure", "reached"), "|---|--:|---|", [goal.cells() for goal in goals(calls)])
    figures = [
        ["-" if row.get(key) is None else text.format(row[key]) for key, (_, text) in COLUMNS.items()]
        for call in calls
        for result in training(call)
        for row in rows(result, peaks, *limits_of(call), equal_loss)
    ]
    lines += markdown([title for title, _ in COLUMNS.values()], "|---|---|" + "--:|" * (len(COLUMNS) - 2), figures)
    for call in calls:
        lines += [*proof(call, equal_loss), *profile(call), *ends(call)]
    found = [line for call in calls for line in problems(call)]
    return "\n".join([*lines, *(["", "To look at:", *found] if found else [])])


def training(call: Call) -> list[dict[str, Any]]:
    """The results of the stages that time training."""
    return [result for result in call.values() if "untimed" in result]


def heading(call: Call, peak: float | None) -> list[str]:
    """One line each for machine, yardstick, checks and tests, as far as the call has them."""
    lines = []
    where = next((result["machine"] for result in call.values() if "machine" in result), None)
    if where:
        parts = [where["gpu"] or where["cpu"], where["date"], *(" ".join(v) for v in where["versions"].items())]
        parts += [f"{name} {where[name]}" for name in ("cuda", "cudnn", "nccl") if where.get(name)]
        lines.append(", ".join([*parts, *(f"{name} {value}" for name, value in where.get("nvidia_smi", {}).items())]))
    if "yardstick" in call:
        yard = call["yardstick"]
        text = f"P, the bf16 product of {yard['size']} cubed: {yard['tflops_median']:.3g} TFLOP/s"
        text += f", {1e12 * yard['tflops_median'] / peak:.1%} of {peak / 1e12:.1f}" if peak else ", peak not known"
        if "tflops_sustained" in yard:
            text += f"; for {yard['sustained_seconds']:g} s without a pause: {yard['tflops_sustained']:.3g} TFLOP/s"
        if "fp8_tflops_median" in yard:
            text += f"; in fp8 {yard['fp8_tflops_median']:.4g}, sustained {yard.get('fp8_tflops_sustained', 0):.4g}"
        if "copy_tb_per_second" in yard:
            text += f"; copy on the device: {yard['copy_tb_per_second']:.3g} TB/s read and written"
            words = str(where["gpu"]).split() if where else []
            text += "".join(f" of {rate} TB/s" for name, rate in COPY_TB_PER_SECOND.items() if name in words)
        lines.append(text)
    if "smoke" in call:
        checks = call["smoke"]["checks"]
        lines.append(f"correctness: {sum(check['ok'] for check in checks)} of {len(checks)} checks passed")
    if "tests" in call:
        outcomes = [test["outcome"] for test in call["tests"]["tests"].values()]
        counts = ", ".join(f"{outcomes.count(kind)} {kind}" for kind in ("passed", "failed", "skipped"))
        lines.append(f"tests marked gpu: {counts}, {(call['tests']['collected'] or 0) - len(outcomes)} not reached")
    return lines


def problems(call: Call) -> Iterator[str]:
    """A line for all that failed, and for each run whose figures are not sound."""
    for check in call.get("smoke", {}).get("checks", []):
        if not check["ok"]:
            yield f"- smoke: {check['check']}: {first_line(check['error'])}"
    for name, test in call.get("tests", {}).get("tests", {}).items():
        if test["outcome"] == "failed":
            why = [line[1:].strip() for line in (test.get("why") or "").splitlines() if line.startswith("E ")]
            yield f"- {name}" + (f": {why[0][:200]}" if why else "")
    for result in call.values():
        if at := result.get("running"):
            where = at if isinstance(at, str) else " ".join("untimed" if v is None else str(v) for v in at.values())
            since = result.get("under_way_seconds")
            yield f"- {result['stage']}: stopped in {where}" + (f" after {since} s" if since is not None else "")
    if any(result.get("machine", {}).get("nvml") is False for result in call.values()):
        yield "- MHz and W are missing: torch reads them by the package nvidia-ml-py, which is not installed"
    for name, each in call.get("profile", {}).get("profiles", {}).items():
        if not each["kernels"]:
            yield f"- profile, {name}: the profiler saw no kernel"
    for run in call.get("precision_proof", {}).get("runs", []):
        if call["precision_proof"]["machine"].get("gpu") and not run.get("graphs", 1):
            yield f"- precision_proof, {run['format']}: nothing was compiled"
    for result in training(call):
        yield from unsound(result)


def unsound(result: dict[str, Any]) -> Iterator[str]:
    """A line for each failure of a training stage, and for each run whose figures are not sound."""
    stage, where = result["stage"], result["machine"]
    for failure in result["failures"]:
        yield f"- {stage}, {failure['contender']}: {first_line(failure['error'])}"
    if result.get("left_out"):
        yield f"- {stage}: no time to compile {' '.join(result['left_out'])}"
    for run in [*result["untimed"], *result["runs"]]:
        if run.get("left_gib", 0.0) > MOST_LEFT_GIB:
            yield f"- {stage}, {run['contender']}: left {run['left_gib']:.1f} GiB on the device"
    compiled = sum(run.get("graphs", 0) for run in result["untimed"])
    if result["untimed"] and any(run.get("compile_blocks") for run in result["runs"]) and not compiled:
        yield f"- {stage}: compile_blocks is set and nothing was compiled"
    for run in result["runs"]:
        at = f"- {stage}, {run['contender']}, round {run['round']}:"
        if run.get("graphs_compiled_while_timed") or run.get("graph_breaks"):
            yield (
                f"{at} {run['graphs_compiled_while_timed']} graphs compiled while timed, {run['graph_breaks']} "
                "graph breaks"
            )
        if where.get("gpu") and not result.get("dry") and stage != "memory_7b":
            if run.get("timed_seconds", LEAST_SECONDS) < LEAST_SECONDS:
                yield f"{at} the clock ran for {run['timed_seconds']:.1f} s only"
            hopper = any(word in where["gpu"] for word in ("H100", "H200"))
            if hopper and run.get("attention") not in (None, "CUDNN_ATTENTION"):
                yield f"{at} attention by {run['attention']}, not by cuDNN"


def first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")[:200]


def proof(call: Call, equal_loss: dict[str, float]) -> list[str]:
    """Markdown of the quality of each format; empty where it was not run."""
    runs = call.get("precision_proof", {}).get("runs", [])
    cells = [
        [run["format"], f"{run['bits_per_byte']:.4f}", str(run.get("graphs", "-")),
         f"{equal_loss[run['format']]:.1%}" if run["format"] in equal_loss else "-"]
        for run in runs
    ]  # fmt: skip
    headings = ("format", "validation, bits/byte", "graphs", "steps of bf16_mixed to its loss")
    return markdown(headings, "|---|--:|--:|--:|", cells)


def profile(call: Call) -> list[str]:
    """Markdown of where the time of a micro-batch goes, and of the head's time; empty where it was not run."""
    found = call.get("profile", {})
    profiles = found.get("profiles", {})
    names = next((list(each["kinds"]) for each in profiles.values()), [])
    kinds = [
        [name, f"{each['ms']:.1f}", *(f"{ms:.1f} ({ms / each['ms']:.0%})" for ms in each["kinds"].values()),
         f"{each['ms'] - sum(each['kinds'].values()):.1f}"]
        for name, each in profiles.items()
    ]  # fmt: skip
    lines = [
        [name, kernel["name"], f"{kernel['ms']:.2f}", f"{kernel['calls']:g}"]
        for name, each in profiles.items()
        for kernel in each["kernels"][:12]
    ]
    heads = [
        [name, " x ".join(map(str, head["shape"])), *(f"{head[f'{kind}_ms']:.2f}" for kind in _HEAD_KINDS)]
        for name, head in found.get("head", {}).items()
    ]
    return [
        *markdown(("micro-batch of", "ms", *names, "no kernel"), "|---|" + "--:|" * (len(names) + 2), kinds),
        *markdown(("micro-batch of", "kernel", "ms", "calls"), "|---|---|--:|--:|", lines),
        *markdown(("head and loss", "tokens, width, vocabulary", *(f"{k}, ms" for k in _HEAD_KINDS)),
                  "|---|---|--:|--:|--:|", heads),
    ]  # fmt: skip


_HEAD_KINDS = ("eager", "compiled", "products")


def ends(call: Call) -> list[str]:
    """Markdown of where the runs with and without FSDP2 ended, which should be the same; empty without such runs."""
    compared = [
        [
            result["stage"],
            run["contender"],
            str(run["round"]),
            f"{run['last_loss']:.6f}",
            f"{run['last_grad_norm']:.6f}",
        ]
        for result in training(call)
        for run in result["runs"]
        if plain(run["contender"]) in ("one_device", "fsdp2") and run.get("last_loss") is not None
    ]
    return markdown(("size", "contender", "round", "last loss", "last norm"), "|---|---|--:|--:|--:|", compared)
