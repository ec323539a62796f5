"""The training stages of gpu.py: tokens/s and peak memory of a recipe, beside other loops or in other formats.

Runs in a process of its own: `python -m benchmarks.gpu_train STAGE --out FILE`. The JSON is written before and after
each measurement: a process that is killed loses only the current one, and a new process on the same file goes on with
the others.
"""

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.contenders import CONTENDERS
from benchmarks.feed import load, own_loader, write_tokens
from benchmarks.formats import on_gpu
from benchmarks.gpu_checks import clean_up, require_device
from benchmarks.gpu_sizes import SIZES, STRATEGIES, Size, toy
from benchmarks.stage_file import write
from lightning_tricks.accounting import matmul_parameters, training_flops_per_token

# What a run takes beside its steps, once everything is compiled: building the model, starting the loader, cleaning up.
_START_SECONDS = 6.0


def compiled_graphs() -> int:
    """How many graphs torch.compile has made in this process: while the clock runs there should be no new one."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def graph_breaks() -> int:
    """How often torch.compile gave a piece of code back to Python; blocks that it traces whole have none."""
    return sum(torch._dynamo.utils.counters["graph_break"].values())


@contextmanager
def whole_peak() -> Iterator[list[float]]:
    """Collect every peak in GiB that somebody ends while this lasts: MemoryMonitor starts a new one at a log step."""
    peaks: list[float] = []
    reset = torch.cuda.reset_peak_memory_stats

    def keep_and_reset(*args: Any, **kwargs: Any) -> None:
        peaks.append(torch.cuda.max_memory_allocated() / 2**30)
        reset(*args, **kwargs)

    torch.cuda.reset_peak_memory_stats = keep_and_reset
    try:
        yield peaks
    finally:
        torch.cuda.reset_peak_memory_stats = reset


def plain(contender: str) -> str:
    """A contender's name without `_again`, which marks a second run of the same."""
    return contender.removesuffix("_again")


def run_once(size: Size, contender: str, shards: str, folder: Path, dry: bool) -> dict[str, Any]:
    """Train a recipe for a few steps and time the last of them, from one synchronisation to the next."""
    cuda = torch.cuda.is_available()
    first, last = size.warmup * size.accumulate, (size.warmup + size.timed) * size.accumulate
    seen: dict[int, tuple[float, int, int]] = {}

    def mark(index: int) -> None:
        if index not in (first, last):
            return
        if cuda:
            torch.cuda.synchronize()
            if index == first:
                torch.cuda.reset_peak_memory_stats()
                peaks.clear()
                state.start()
        seen[index] = time.perf_counter(), compiled_graphs(), graph_breaks()

    start, graphs_before, breaks_before = time.perf_counter(), compiled_graphs(), graph_breaks()
    variants = {**on_gpu(dry, emulate=not cuda), **STRATEGIES}
    options = variants.get(plain(contender))
    cli: Any = load(size.recipe, shards, folder, (*size.options, *(options or ())))
    # Here everyone reads through the data module, as there is time to do so while the device works.
    run = CONTENDERS["ours_loader" if contender == "ours" or options is not None else contender]
    with machine.device_state(cuda) as state, whole_peak() as peaks:
        run(cli, own_loader(cli), last, mark)
        peaks.append(torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0)
    seconds = seen[last][0] - seen[first][0]
    micro_batches, data = last - first, cli.datamodule
    return {
        "contender": contender,
        "tokens_per_second": micro_batches * data.micro_batch_size * data.seq_len / seconds,
        "micro_batch_ms": 1000 * seconds / micro_batches,
        "micro_batches": last,
        "timed_micro_batches": micro_batches,
        "warmup_seconds": seen[first][0] - start,
        "graphs_compiled_in_warmup": seen[first][1] - graphs_before,
        "graphs_compiled_while_timed": seen[last][1] - seen[first][1],
        "graph_breaks": seen[last][2] - breaks_before,
        "peak_allocated_gib": max(peaks) if cuda else None,
        "peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if cuda else None,
        **state.summary(),
        **_setting(cli),
    }


def _setting(cli: Any) -> dict[str, Any]:
    """The run's options and what its steps should cost, as the recipe that was built says."""
    data, config, plugin = cli.datamodule, cli.model.config, cli.trainer.precision_plugin
    heads = config.n_heads, config.kv_heads, data.seq_len, config.head_dim
    low = torch.bfloat16  # in which every format that is compared here attends
    return {
        "seq_len": data.seq_len,
        "micro_batch_size": data.micro_batch_size,
        "accumulate_grad_batches": cli.trainer.accumulate_grad_batches,
        "log_every_n_steps": cli.trainer.log_every_n_steps,
        "precision": str(cli.trainer.precision),
        "peak_dtype": getattr(plugin, "peak_dtype", None) or "bf16",  # emulated fp8 has none
        "last_loss": last_logged(cli, "train/loss"),
        "last_grad_norm": last_logged(cli, "train/grad_norm"),
        "converted_share": getattr(plugin, "converted_share", None),
        "activation_checkpointing": cli.model.activation_checkpointing,
        "compile_blocks": cli.model.compile_blocks,
        "attention": machine.attention_backend(*heads, low) if torch.cuda.is_available() else None,
        "matmul_parameters": matmul_parameters(config),
        "flops_per_token": {kind: training_flops_per_token(config, data.seq_len, kind) for kind in ("causal", "full")},
    }


def last_logged(cli: Any, name: str) -> float | None:
    """The value of a metric at the last log step; None where the contender logs none."""
    value = cli.trainer.callback_metrics.get(name)
    return None if value is None else float(value)


def order(contenders: Sequence[str], rounds: int) -> list[tuple[int, str]]:
    """Round and contender of every run: each round begins with another contender."""
    return [
        (number, contenders[(place + number) % len(contenders)])
        for number in range(rounds)
        for place in range(len(contenders))
    ]


def train(stage: str, out: Path, dry: bool, contenders: Sequence[str], seconds: float) -> bool:
    """Measure a recipe with each contender, round by round, as long as another run is likely to fit in `seconds`.

    A contender that raises is not tried again, and costs no other.

    Args:
        stage: one of `SIZES`.
        out: result file; runs of an earlier process in it are kept, and a run that ended that process counts as failed.
        dry: toy sizes, on a CPU where there is no GPU.
        contenders: in the order of the first round, which each later round rotates.
        seconds: how long this process may take.

    Returns:
        Whether no contender failed.
    """
    end = time.perf_counter() + seconds
    result: dict[str, Any] = {"stage": stage, "machine": machine.describe(), "runs": [], "failures": [], "running": {}}
    if out.exists():
        result = json.loads(out.read_text(encoding="utf-8"))
    if result["running"]:
        fail(result, "ended the process: it crashed, or hung")
        write(out, result)  # there may be nothing left to run
    size = SIZES[stage]
    if dry:
        size = toy(size, torch.cuda.is_available())
    with tempfile.TemporaryDirectory() as folder:
        shards = write_tokens(Path(folder), 256 if dry else 32000, 100_000 if dry else 20_000_000)
        for number, contender in order(contenders, size.rounds):
            done = any((run["round"], run["contender"]) == (number, contender) for run in result["runs"])
            if done or any(failure["contender"] == contender for failure in result["failures"]):
                continue
            if time.perf_counter() + expected_seconds(result["runs"]) > end:
                print(f"{stage}: no time for round {number + 1}, {contender}")
                break
            print(f"== {stage}, round {number + 1}, {contender}", flush=True)
            result["running"] = {"round": number, "contender": contender}
            write(out, result)
            measure(result, size, shards, Path(folder), dry)
            write(out, result)
            clean_up()
    return not result["failures"]


def expected_seconds(runs: Sequence[dict[str, Any]]) -> float:
    """How long one more run takes if nothing is left to compile; 0 before the first one."""
    steps = max((run["micro_batch_ms"] * run["micro_batches"] / 1000 for run in runs), default=-_START_SECONDS)
    return _START_SECONDS + steps


def measure(result: dict[str, Any], size: Size, shards: str, folder: Path, dry: bool) -> None:
    """Add the run that `result["running"]` names to the runs, or to the failures."""
    at = result["running"]
    try:
        run = run_once(size, at["contender"], shards, folder, dry)
    except Exception as error:
        traceback.print_exc()
        fail(result, "".join(traceback.format_exception_only(error)).strip()[-2000:])
        traceback.clear_frames(error.__traceback__)  # they hold the model
    else:
        result["runs"].append({"round": at["round"], **run})
        result["running"] = {}


def fail(result: dict[str, Any], why: str) -> None:
    """Count the run that `result["running"]` names as failed."""
    result["failures"].append({**result["running"], "error": why})
    result["running"] = {}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line, for gpu.py. Exit code 1 if a contender failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=SIZES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--contenders", default="ours,bare,stock")
    parser.add_argument("--seconds", type=float, default=3600.0)
    options = parser.parse_args(arguments)
    require_device(options.dry)
    # Several contenders share this process, each with graphs of its own. Past its limit torch would go on eagerly, and
    # the figure would be another one's: then it shall fail instead.
    with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
        fine = train(options.stage, options.out, options.dry, options.contenders.split(","), options.seconds)
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
