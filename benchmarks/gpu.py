"""Everything that needs a GPU, in stages that fail alone: start it with benchmarks/gpu.sh.

Each stage runs in processes of its own with a limit of its own; a crash or a hang costs that stage and no other. JSON
of each stage, a log and the table go into one folder.
"""

import argparse
import datetime
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_table import summary
from benchmarks.stage_file import DEVICE_LOST

# Stage: its processes, each with the contenders that it measures in turns, and its limit in seconds.
STAGES: dict[str, list[tuple[str, int]]] = {
    "yardstick": [("", 60)],
    "smoke": [("", 130)],
    "gpt2_124m": [("ours,bare,ours_watched,bare_again,stock", 200)],
    "llama1b": [("ours,bare,ours_watched,bare_again", 210)],
    "precision_7b": [("lightning_bf16,fp8_tensorwise,bf16_mixed,fp8_rowwise", 200)],
    "precision_1b": [("lightning_bf16,fp8_tensorwise,bf16_mixed,bf16_true", 150)],
    "precision_124m": [("lightning_bf16,fp8_tensorwise,bf16_mixed,bf16_true,lightning_bf16_again", 110)],
    "precision_proof": [("", 110)],
    "llama7b_1gpu": [("ours", 120), ("bare", 110)],
    "fsdp2_124m": [("one_device,fsdp2,one_device_again", 110)],
    "fsdp2_1b": [("one_device,fsdp2,one_device_again", 150)],
    "tests": [("", 520)],
}
# What one call runs, in this order.
GROUPS = {
    "first": ["yardstick", "smoke", "gpt2_124m", "llama1b"],
    "precision": ["yardstick", "precision_7b", "precision_1b", "precision_124m", "precision_proof"],
    "sharding": ["yardstick", "llama7b_1gpu", "fsdp2_124m", "fsdp2_1b"],
    "tests": ["tests"],
}
CALL_SECONDS = 540.0
_CLOSING_SECONDS = 5  # before its limit a stage is to end by itself
_TRIES = 6  # a process that crashes is started again for what it had still to do, so often at most
# What the project imports on every path; without network these must be there before.
_NEEDED = ("torch", "lightning", "jsonargparse", "docstring_parser", "typeshed_client", "google_crc32c", "tensorboard",
           "tokenizers", "torchmetrics", "tqdm", "PIL", "numpy")  # fmt: skip


def run_stage(name: str, out: Path, dry: bool, end: float) -> bool:
    """Run the processes of one stage, output to the log; whether all went well."""
    result, fine = out / f"{name}.json", True
    result.unlink(missing_ok=True)
    for contenders, limit in STAGES[name]:
        label, stop = f"{name} ({contenders})" if contenders else name, min(time.monotonic() + limit, end)
        if stop - time.monotonic() < _CLOSING_SECONDS:
            print(f"{label}: left out, the time is used up", flush=True)
            return False
        start = time.monotonic()
        code = run_process(name, contenders, result, out / "gpu.log", dry, stop)
        said = {0: "done", None: f"stopped at its limit of {stop - start:.0f} s"}.get(code, f"FAILED, exit code {code}")
        print(f"{label}: {said} after {time.monotonic() - start:.0f} s", flush=True)
        if code != 0:
            fine = False
            print(
                "\n".join((out / "gpu.log").read_text(encoding="utf-8", errors="replace").splitlines()[-15:]),
                flush=True,
            )
    return fine


def run_process(name: str, contenders: str, result: Path, log: Path, dry: bool, stop: float) -> int | None:
    """Run one process of a stage until the moment `stop`; a new one goes on where it crashed.

    Returns:
        The exit code of the last one, None if it had to be killed.
    """
    module = "benchmarks.gpu_train" if contenders else "benchmarks.gpu_checks"
    command = [sys.executable, "-m", module, name, "--out", str(result), *["--dry"] * dry]
    command += ["--contenders", contenders] if contenders else []
    code: int | None = None
    for _ in range(_TRIES):
        seconds = stop - time.monotonic()
        with log.open("a", encoding="utf-8") as file:
            print(f"\n##### {name} {contenders}", file=file, flush=True)
            code = run_limited([*command, "--seconds", f"{seconds - _CLOSING_SECONDS:.0f}"], file, seconds)
        if code is None or not (code == DEVICE_LOST or interrupted(result)):
            break
    return code


def interrupted(result: Path) -> bool:
    """Whether the process that wrote this file ended in the middle of something."""
    return result.exists() and bool(json.loads(result.read_text(encoding="utf-8")).get("running"))


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
    given = options.out or os.environ.get("OUT")
    out = (
        Path(given)
        if given
        else Path(__file__).parent / "results" / f"gpu-{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    )
    out.mkdir(parents=True, exist_ok=True)
    fine = []
    for name in stages:
        fine.append(run_stage(name, out, options.dry, end))
        text = summary([out], options.peak_flops)  # after each stage: this process may be killed, too
        (out / "summary.md").write_text(text + "\n", encoding="utf-8")
    print(f"\n{text}\n\n{out}")
    sys.exit(0 if all(fine) else 1)


if __name__ == "__main__":
    main()
