"""Everything that needs a GPU, in stages that fail alone: start it with benchmarks/gpu.sh.

Each stage runs in a process of its own with a limit of its own; a crash or a hang costs that stage and no other. JSON
of each stage, a log and the table go into one folder. A second call with the same folder goes on with what is not done.
"""

import argparse
import datetime
import getpass
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_table import summary
from benchmarks.stage_file import DEVICE_LOST, to_try_again, write

# Stage: the contenders that it measures in turns, and its limit in seconds.
STAGES: dict[str, tuple[str, int]] = {
    "yardstick": ("", 40),
    "smoke": ("", 100),
    "llama7b": ("ours,bare,fp8_tensorwise,ours_again", 215),
    "memory_7b": ("ours_bf16,ours_budget,stock_hand", 90),
    "profile": ("", 90),
    "fp8_7b": ("ours,fp8_tensorwise,fp8_delayed_kept_fused,fp8_delayed,ours_fused", 280),
    "llama7b_16k": ("ours,fp8_delayed_kept_fused,fp8_tensorwise", 120),
    "precision_proof": ("", 100),
    "gpt2_124m": ("ours,bare,ours_fused,ours_graphs,hand_whole,stock,ours_watched,fp8_tensorwise,ours_again", 210),
    "llama1b": ("ours,bare,ours_fused,hand_blocks,fp8_tensorwise,ours_again", 165),
    "experts_1b": ("ours,experts,experts_fine", 115),
    "documents_1b": ("documents,documents_dense,ours", 105),
    "tests": ("", 400),
    "llama8b": ("ours,bare,fp8_tensorwise,ours_again", 260),
    "rowwise_7b": ("ours,fp8_rowwise", 170),
    "litgpt_1b": ("ours,litgpt", 200),
    "fsdp2_1b": ("one_device,fsdp2,one_device_again", 150),
}
# What one call runs, in this order. The first four make the 30 minutes of a rented GPU, what is needed most first.
GROUPS = {
    "first": ["yardstick", "smoke", "llama7b", "memory_7b", "profile"],
    "fp8": ["yardstick", "fp8_7b", "llama7b_16k", "precision_proof"],
    "sizes": ["yardstick", "gpt2_124m", "llama1b", "experts_1b"],
    "last": ["documents_1b", "tests"],
    "more": ["yardstick", "llama8b", "fsdp2_1b"],
    "others": ["yardstick", "rowwise_7b", "litgpt_1b"],
}
CALL_SECONDS = 540.0
_CLOSING_SECONDS = 5  # before its limit a stage is to end by itself
_TRIES = 6  # a process that crashes is started again for what it had still to do, so often at most
# What the project imports on every path; without network these must be there before.
_NEEDED = ("torch", "lightning", "jsonargparse", "docstring_parser", "typeshed_client", "tensorboard",
           "tokenizers", "torchmetrics", "tqdm", "PIL", "numpy")  # fmt: skip


def run_stage(name: str, out: Path, dry: bool, end: float) -> bool:
    """Run one stage, output to the log; whether all went well."""
    result, (contenders, limit) = out / f"{name}.json", STAGES[name]
    if result.exists():
        write(result, to_try_again(json.loads(result.read_text(encoding="utf-8"))))
    start = time.monotonic()
    stop = end if dry else min(start + limit, end)  # toy sizes may run on a slow machine
    if stop - start < _CLOSING_SECONDS:
        print(f"{name}: left out, the time is used up", flush=True)
        return False
    code = run_process(name, contenders, result, out / "gpu.log", dry, stop)
    said = {0: "done", None: f"stopped at its limit of {stop - start:.0f} s"}.get(code, f"FAILED, exit code {code}")
    print(f"{name}: {said} after {time.monotonic() - start:.0f} s", flush=True)
    if code != 0:
        last = (out / "gpu.log").read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        print("\n".join(last), flush=True)
    return code == 0


def run_process(name: str, contenders: str, result: Path, log: Path, dry: bool, stop: float) -> int | None:
    """Run the process of a stage until the moment `stop`; a new one goes on where it crashed.

    Returns:
        The exit code of the last one, None if it had to be killed.
    """
    module = "benchmarks.gpu_train" if contenders else "benchmarks.gpu_checks"
    command = [sys.executable, "-m", module, name, "--out", str(result), *["--dry"] * dry]
    command += ["--contenders", contenders] if contenders else []
    code: int | None = None
    try:
        for _ in range(_TRIES):
            seconds = stop - time.monotonic()
            with log.open("a", encoding="utf-8") as file:
                print(f"\n##### {name} {contenders}", file=file, flush=True)
                code = run_limited([*command, "--seconds", f"{seconds - _CLOSING_SECONDS:.0f}"], file, seconds)
            in_time = stop - time.monotonic() > 2 * _CLOSING_SECONDS
            if code is None or not in_time or not (code == DEVICE_LOST or interrupted(result)):
                break
    finally:
        if interrupted(result):  # the file is as old as the run, check or test that was under way
            under_way = {"under_way_seconds": round(time.time() - result.stat().st_mtime)}
            write(result, json.loads(result.read_text(encoding="utf-8")) | under_way)
    return code


def interrupted(result: Path) -> bool:
    """Whether the process that wrote this file ended in the middle of something."""
    return result.exists() and bool(json.loads(result.read_text(encoding="utf-8")).get("running"))


def run_limited(command: list[str], output: Any, seconds: float) -> int | None:
    """The exit code, or None where the command and all that it started had to be killed after `seconds`.

    What it leaves in the folder for temporary files is removed, but for what torch has compiled.
    """
    with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as folder:
        compiled = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"  # torch's own default
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(compiled), **os.environ, "TMPDIR": folder}
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # data workers, too
                process.wait()


def compute_processes() -> list[str]:
    """The processes that compute on the GPU, as nvidia-smi tells them."""
    command = ["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"]
    if chosen := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={chosen}")
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in said.splitlines() if line.strip()]


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see --help. Exit code 1 if a stage failed."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.sh", description=__doc__)
    groups = "; ".join(f"{name}: {' '.join(stages)}" for name, stages in GROUPS.items())
    parser.add_argument("stages", nargs="*", metavar="STAGE", default=["first"], help=f"or a group ({groups})")
    parser.add_argument(
        "--dry", action="store_true", help="toy sizes, on a CPU without a GPU: does everything still run?"
    )
    parser.add_argument("--out", type=Path, help="folder; default $OUT, else benchmarks/results/gpu-DATE")
    parser.add_argument("--limit", type=float, default=CALL_SECONDS, help="seconds for everything; default %(default)s")
    parser.add_argument("--peak_flops", type=float, help="dense bf16 FLOP/s of the GPU, if it is not a known one")
    parser.add_argument(
        "--summary", type=Path, nargs="+", metavar="FOLDER", help="run nothing; one table of these folders"
    )
    options = parser.parse_args(arguments)
    if options.summary:
        print(summary(options.summary, options.peak_flops))
        return
    end = time.monotonic() + options.limit
    # a group and a stage may share a name: the group has that stage alone
    stages = list(dict.fromkeys(stage for name in options.stages for stage in GROUPS.get(name, [name])))
    if unknown := [name for name in stages if name not in STAGES]:
        parser.error(f"unknown stage {' '.join(unknown)}: give some of {' '.join(dict.fromkeys([*GROUPS, *STAGES]))}")
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        parser.error(
            f"cannot import {' '.join(missing)}: install them, or put their wheels into .whl (benchmarks/README.md)"
        )
    if not options.dry and (others := compute_processes()):
        parser.error(f"other processes compute on the GPU, end them first: {'; '.join(others)}")
    given = options.out or os.environ.get("OUT")
    default = Path(__file__).parent / "results" / f"gpu-{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    out = Path(given) if given else default
    out.mkdir(parents=True, exist_ok=True)
    fine = []
    # as SystemExit, so that the stage's process ends too and what is on disk gets its table
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        for name in stages:
            fine.append(run_stage(name, out, options.dry, end))
            (out / "summary.md").write_text(summary([out], options.peak_flops) + "\n", encoding="utf-8")
    finally:
        text = summary([out], options.peak_flops)
        (out / "summary.md").write_text(text + "\n", encoding="utf-8")
        print(f"\n{text}\n\n{out}")
        signal.signal(signal.SIGTERM, before)
    sys.exit(0 if all(fine) else 1)


if __name__ == "__main__":
    main()
