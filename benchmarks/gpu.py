"""Everything that needs a GPU, in stages that fail alone: start it with benchmarks/gpu.sh.

Each stage runs in processes of its own with a limit of its own; a crash or a hang costs that stage and no other. JSON
of each stage, a log and the table go into one folder.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from lightning_tricks.accounting import peak_flops

# Stage: its processes, each with the contenders that it measures in turns, and its limit in seconds. Expected on an
# H200: yardstick 15, tests 200, gpt2_124m 120, llama1b 130; 8 minutes in all. The formats: 124m 120, 1b 130, 7b 200,
# proof 100; 9 minutes. llama7b_1gpu 2 x 70, FSDP2 124m 80, 1b 120; 6 minutes.
STAGES: dict[str, list[tuple[str, int]]] = {
    "yardstick": [("", 60)],
    "tests": [("", 280)],
    "gpt2_124m": [("ours,ours_watched,bare,stock", 170)],
    "llama1b": [("ours,bare,stock", 170)],
    "llama7b_1gpu": [("ours", 120), ("bare", 110)],
    "precision_7b": [("lightning_bf16,fp8_tensorwise,bf16_mixed,fp8_rowwise", 230)],
    "precision_124m": [("lightning_bf16,fp8_tensorwise,bf16_mixed,bf16_true", 120)],
    "precision_1b": [("lightning_bf16,fp8_tensorwise,bf16_mixed,bf16_true", 140)],
    "precision_proof": [("", 110)],
    "fsdp2_124m": [("one_device,fsdp2", 130)],
    "fsdp2_1b": [("one_device,fsdp2", 170)],
}
# What one call of at most ten minutes runs.
GROUPS = {
    "framework": ["yardstick", "tests", "gpt2_124m", "llama1b"],
    "precision": ["yardstick", "precision_7b", "precision_124m", "precision_1b", "precision_proof"],
    "sharding": ["yardstick", "llama7b_1gpu", "fsdp2_124m", "fsdp2_1b"],
}
BASELINES = ("bare", "lightning_bf16", "one_device")


def run_stage(name: str, out: Path, dry: bool, end: float) -> bool:
    """Run the processes of one stage, output to the log; whether all went well."""
    result, log, fine = out / f"{name}.json", out / "gpu.log", True
    result.unlink(missing_ok=True)
    for contenders, limit in STAGES[name]:
        seconds = min(limit, end - time.monotonic())
        label = f"{name} ({contenders})" if contenders else name
        if seconds < 5:
            print(f"{label}: left out, the time is used up", flush=True)
            return False
        module = "benchmarks.gpu_train" if contenders else "benchmarks.gpu_checks"
        command = [sys.executable, "-m", module, name, "--out", str(result), *["--dry"] * dry]
        command += ["--contenders", contenders, "--seconds", f"{seconds - 5:.0f}"] if contenders else []
        start = time.monotonic()
        with log.open("a", encoding="utf-8") as file:
            print(f"\n##### {label}", file=file, flush=True)
            code = run_limited(command, file, seconds)
        said = {0: "done", None: f"stopped at its limit of {seconds:.0f} s"}.get(code, f"FAILED, exit code {code}")
        print(f"{label}: {said} after {time.monotonic() - start:.0f} s", flush=True)
        if code != 0:
            fine = False
            print("\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]), flush=True)
    return fine


def run_limited(command: list[str], output: Any, seconds: float) -> int | None:
    """The exit code, or None where the command and all that it started had to be killed after `seconds`."""
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # data workers, too
            process.wait()


def rows(result: dict[str, Any], peaks: dict[str, float | None], yardstick: float | None) -> list[dict[str, Any]]:
    """One row a contender of a training stage: medians over its rounds, MFU in both definitions.

    Args:
        result: the stage's JSON.
        peaks: FLOP/s of the device by its datasheet, by the type that products run in; None where not known.
        yardstick: FLOP/s that a bf16 matrix product reached, None where not measured.
    """
    table = []
    for contender in dict.fromkeys(run["contender"] for run in result["runs"]):
        runs = [run for run in result["runs"] if run["contender"] == contender]
        rate = statistics.median(run["tokens_per_second"] for run in runs)
        row: dict[str, Any] = {"size": result["stage"], "contender": contender, "tokens_per_second": rate}
        row["micro_batch_ms"] = statistics.median(run["micro_batch_ms"] for run in runs)
        row["peak_allocated_gib"] = max((run["peak_allocated_gib"] or 0.0) for run in runs) or None
        peak = peaks.get(runs[0].get("peak_dtype", "bf16"))
        for kind, flops in runs[0]["flops_per_token"].items():
            row[f"mfu_{kind}"] = rate * flops / peak if peak else None
            row[f"of_yardstick_{kind}"] = rate * flops / yardstick if yardstick else None
        base = {run["round"]: run["tokens_per_second"] for run in result["runs"] if run["contender"] in BASELINES}
        pairs = [run["tokens_per_second"] / base[run["round"]] for run in runs if run["round"] in base]
        row["speed_against_base"] = statistics.median(pairs) if pairs else None
        row["rounds"] = len(runs)
        table.append(row)
    return table


COLUMNS = {
    "size": "{}", "contender": "{}", "tokens_per_second": "{:,.0f}", "micro_batch_ms": "{:.1f}",
    "peak_allocated_gib": "{:.1f}", "mfu_causal": "{:.1%}", "mfu_full": "{:.1%}", "of_yardstick_causal": "{:.1%}",
    "of_yardstick_full": "{:.1%}", "speed_against_base": "{:.3f}", "rounds": "{}",
}  # fmt: skip


def summary(out: Path, peak: float | None) -> str:
    """Markdown of all that the folder's JSON files hold; `peak` in FLOP/s, None for that of a known GPU."""
    results = {
        name: json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
        for name in STAGES
        if (out / f"{name}.json").exists()
    }
    lines, yardstick = [], None
    gpus = {result["machine"]["gpu"] for result in results.values() if "machine" in result}
    # an unknown GPU gets no MFU against the peak, only against the yardstick, unless --peak_flops gives one
    peaks = {
        dtype: next((f for gpu in gpus if gpu and (f := peak_flops(gpu, dtype))), None) for dtype in ("bf16", "fp8")
    }
    peak = peaks["bf16"] = peak or peaks["bf16"]
    if "yardstick" in results:
        yard = results["yardstick"]
        yardstick = yard["tflops_median"] * 1e12
        of_peak = f", {yardstick / peak:.1%} of its peak {peak / 1e12:.1f}" if peak else ", peak not known"
        where, versions = yard["machine"], ", ".join(" ".join(v) for v in yard["machine"]["versions"].items())
        lines.append(f"{where['gpu'] or where['cpu']}, {where['date']}, {versions}")
        lines.append(f"bf16 product of {yard['size']} cubed: {yard['tflops_median']:.3g} TFLOP/s{of_peak}")
    if "tests" in results:
        counts = results["tests"]
        lines.append("tests marked gpu: {passed} passed, {failed} failed, {skipped} skipped".format(**counts))
    lines += ["", f"| {' | '.join(COLUMNS)} |", "|---|---|" + "--:|" * (len(COLUMNS) - 2)]
    for result in results.values():
        for row in rows(result, peaks, yardstick) if "stage" in result and "runs" in result else []:
            cells = ["-" if row[key] is None else text.format(row[key]) for key, text in COLUMNS.items()]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ends(results.values())
    if "precision_proof" in results:
        lines += ["", "| format | validation, bits/byte |", "|---|--:|"]
        lines += [f"| {run['format']} | {run['bits_per_byte']:.4f} |" for run in results["precision_proof"]["runs"]]
    return "\n".join(lines)


def ends(results: Iterable[dict[str, Any]]) -> list[str]:
    """Markdown of where the runs with and without FSDP2 ended, which should be the same; empty without such runs."""
    compared = [
        (result["stage"], run)
        for result in results
        for run in result.get("runs", [])
        if run.get("contender") in ("one_device", "fsdp2")
    ]
    head = ["", "| size | contender | round | last loss | last norm |", "|---|---|--:|--:|--:|"]
    rows = [
        f"| {stage} | {run['contender']} | {run['round']} | {run['last_loss']:.6f} | {run['last_grad_norm']:.6f} |"
        for stage, run in compared
    ]
    return [*head, *rows] if rows else []


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see --help. Exit code 1 if a stage failed."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.sh", description=__doc__)
    groups = "; ".join(f"{name}: {' '.join(stages)}" for name, stages in GROUPS.items())
    parser.add_argument("stages", nargs="*", metavar="STAGE", default=["framework"], help=f"or a group ({groups})")
    parser.add_argument("--dry", action="store_true", help="toy sizes on a CPU: does everything still run?")
    parser.add_argument("--out", type=Path, help="folder; default $OUT, else benchmarks/results/gpu-DATE")
    parser.add_argument("--limit", type=float, default=570, help="seconds for everything; default %(default)s")
    parser.add_argument("--peak_flops", type=float, help="dense bf16 FLOP/s of the GPU, if it is not a known one")
    options = parser.parse_args(arguments)
    stages = list(dict.fromkeys(stage for name in options.stages for stage in GROUPS.get(name, [name])))
    if unknown := [name for name in stages if name not in STAGES]:
        parser.error(f"unknown stage {' '.join(unknown)}: give some of {' '.join([*GROUPS, *STAGES])}")
    given = options.out or os.environ.get("OUT")
    out = Path(given) if given else Path(__file__).parent / "results" / f"gpu-{machine.today()}"
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.limit
    fine = [run_stage(name, out, options.dry, end) for name in stages]
    text = summary(out, options.peak_flops)
    (out / "summary.md").write_text(text + "\n", encoding="utf-8")
    print(f"\n{text}\n\n{out}")
    sys.exit(0 if all(fine) else 1)


if __name__ == "__main__":
    main()
