"""What a checkpoint costs: time, memory and stall of a save, time of a load, against torch's own and Lightning's.

    python -m benchmarks.checkpoints                               # 2 to 5 minutes, 4 GB of memory, 2 GB of disk
    python -m benchmarks.checkpoints --parameters 5e6 --rounds 1 --out /tmp/checkpoints.json

Weights of 50M parameters with AdamW's state are saved to the disk and to a file system in memory, where the cost of
the software shows. Each measurement is a forked process, which shares the tensors with the others; contenders take
turns, in a new order each round, and a ratio is taken within its round. Time of a save lasts until the file is there;
`stall` is the part in which training waits. Extra memory is the process's peak over what it had before. CPU time is
that of all threads: trust it where the machine has other work.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch

from benchmarks import machine
from lightning_tricks._trainer.lightning import pl
from lightning_tricks.checkpoints import AtomicCheckpointIO, verify_checkpoint
from lightning_tricks.checkpoints.open_checkpoint import load_file

_FORK = multiprocessing.get_context("fork")
_WIDTH = 1024
Wait = Callable[[], None]


def state(parameters: int) -> dict[str, Any]:
    """A checkpoint of so many parameters in matrices of a million, with AdamW's moments and steps."""
    rows = max(1, round(parameters / _WIDTH**2))
    weights = {f"blocks.{index}.weight": torch.randn(_WIDTH, _WIDTH) for index in range(rows)}
    moments = {
        index: {"step": torch.tensor(1.0), "exp_avg": torch.randn_like(weight), "exp_avg_sq": torch.rand_like(weight)}
        for index, weight in enumerate(weights.values())
    }
    optimizer = {"state": moments, "param_groups": [{"lr": 1e-3, "params": list(range(rows))}]}
    return {
        "pytorch-lightning_version": pl.__version__, "global_step": 1, "epoch": 0, "loops": {}, "lr_schedulers": [],
        "state_dict": weights, "optimizer_states": [optimizer],
    }  # fmt: skip


def _torch_save(checkpoint: dict[str, Any], file: Path) -> Wait:
    torch.save(checkpoint, file)
    return lambda: None


def _torch_save_fsync(checkpoint: dict[str, Any], file: Path) -> Wait:
    with file.open("wb") as opened:
        torch.save(checkpoint, opened)
        opened.flush()
        os.fsync(opened.fileno())
    return lambda: None


def _through(io: Any, checkpoint: dict[str, Any], file: Path) -> Wait:
    io.save_checkpoint(checkpoint, file)
    return io.teardown


SAVES: dict[str, Callable[[dict[str, Any], Path], Wait]] = {
    "torch_save": _torch_save,
    "torch_save_fsync": _torch_save_fsync,
    "lightning": lambda checkpoint, file: _through(pl.plugins.TorchCheckpointIO(), checkpoint, file),
    "ours": lambda checkpoint, file: _through(AtomicCheckpointIO(), checkpoint, file),
    "lightning_async": lambda checkpoint, file: _through(
        pl.plugins.AsyncCheckpointIO(pl.plugins.TorchCheckpointIO()), checkpoint, file
    ),
    "ours_async": lambda checkpoint, file: _through(AtomicCheckpointIO(asynchronous=True), checkpoint, file),
}
LOADS: dict[str, Callable[[Path], Any]] = {
    "torch_load": lambda file: torch.load(file, weights_only=True),
    "lightning": lambda file: pl.plugins.TorchCheckpointIO().load_checkpoint(file, weights_only=True),
    "ours_unchecked": lambda file: load_file(file, True, mmap=False),
    "ours": lambda file: AtomicCheckpointIO().load_checkpoint(file),
    "verify_checkpoint": lambda file: verify_checkpoint(file),
}


def _memory(field: str) -> float:
    """`VmRSS` (now) or `VmHWM` (at most) of this process in GiB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 2**20


def measure(act: Callable[[], Wait]) -> dict[str, float]:
    """Seconds, CPU seconds, stall and extra memory (GiB) of an act, in a process of its own."""

    def child(end: Any) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
        memory, cpu, start = _memory("VmRSS"), time.process_time(), time.perf_counter()
        wait = act()
        stall = time.perf_counter() - start
        wait()
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
        end.send({"seconds": seconds, "stall": stall, "cpu": cpu_seconds, "memory": _memory("VmHWM") - memory})

    here, there = _FORK.Pipe()
    process = _FORK.Process(target=child, args=(there,))
    process.start()
    there.close()
    result: dict[str, float] = here.recv()
    process.join()
    return result


def rounds(cases: dict[str, Callable[[], Wait]], number: int) -> dict[str, list[dict[str, float]]]:
    """Measurements of each case, one a round, in an order that turns with the round."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for turn in range(number):
        for name in list(cases) if turn % 2 else reversed(list(cases)):
            found[name].append(measure(cases[name]))
    return found


def summary(found: dict[str, list[dict[str, float]]], against: str) -> dict[str, dict[str, Any]]:
    """Medians of each case, ratios to `against` of the same round, and what was measured."""
    result: dict[str, dict[str, Any]] = {}
    for name, cases in found.items():
        row: dict[str, Any] = {key: round(statistics.median(case[key] for case in cases), 3) for key in cases[0]}
        for key in ("seconds", "cpu", "stall"):
            pairs = zip(cases, found[against], strict=True)
            row[f"{key}_ratio"] = round(statistics.median(case[key] / other[key] for case, other in pairs), 2)
        result[name] = {**row, "rounds": [{key: round(value, 3) for key, value in case.items()} for case in cases]}
    return result


def save_cases(checkpoint: dict[str, Any], folder: Path) -> dict[str, Callable[[], Wait]]:
    """A save of each kind, each over its older file."""
    return {name: lambda save=save: save(checkpoint, folder / "at.ckpt") for name, save in SAVES.items()}  # type: ignore[misc]


def load_cases(file: Path) -> dict[str, Callable[[], Wait]]:
    """A load of each kind of a file that lies in the page cache."""
    return {name: lambda load=load: (load(file), lambda: None)[1] for name, load in LOADS.items()}  # type: ignore[misc]


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=5e7, help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default %(default)s")
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk; default the current one")
    parser.add_argument("--memory_folder", type=Path, default=Path("/dev/shm"), help="default %(default)s")
    parser.add_argument("--out", type=Path, help="JSON file; default benchmarks/results/checkpoints-DATE-cpu.json")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds: give at least 1")
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    checkpoint = state(int(options.parameters))
    size = sum(value.nbytes for value in checkpoint["state_dict"].values())
    result: dict[str, Any] = {
        "benchmark": "checkpoints", "machine": machine.describe(), "threads": 1, "rounds": options.rounds,
        "parameters": size // 4, "gib": round(3 * size / 2**30, 3), "load_average": os.getloadavg(),
    }  # fmt: skip
    for name, place in {"disk": options.folder, "memory": options.memory_folder}.items():
        folder = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=place))
        try:
            result[f"save_{name}"] = summary(rounds(save_cases(checkpoint, folder), options.rounds), "torch_save_fsync")
            if name == "memory":
                AtomicCheckpointIO().save_checkpoint(checkpoint, folder / "at.ckpt")
                result["load"] = summary(rounds(load_cases(folder / "at.ckpt"), options.rounds), "torch_load")
        finally:
            shutil.rmtree(folder)
    out = options.out or Path(__file__).parent / "results" / f"checkpoints-{machine.today()}-cpu.json"
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))


_NAMES = {
    "torch_save": "`torch.save`, not flushed to the disk", "torch_save_fsync": "`torch.save` and fsync",
    "lightning": "Lightning's `TorchCheckpointIO`", "ours": "`AtomicCheckpointIO`",
    "lightning_async": "Lightning's `AsyncCheckpointIO`", "ours_async": "`AtomicCheckpointIO(asynchronous=True)`",
    "torch_load": "`torch.load`", "ours_unchecked": "`AtomicCheckpointIO` without its check",
    "verify_checkpoint": "`verify_checkpoint` alone",
}  # fmt: skip


def table(result: dict[str, Any]) -> str:
    """Both tables of docs/checkpoints.md."""
    lines = [
        "| a save | time, disk | time, memory | CPU time | training waits, disk | extra host memory |",
        "|---|---|---|---|---|---|",
    ]
    for name in SAVES:
        disk, memory = result["save_disk"][name], result["save_memory"][name]
        lines.append(
            f"| {_NAMES[name]} | {disk['seconds_ratio']:.2f} | {memory['seconds_ratio']:.2f} "
            f"| {memory['cpu_ratio']:.2f} | {disk['stall_ratio']:.2f} | {memory['memory'] / result['gib']:.2f} |"
        )
    lines += ["", "| a load | time | CPU time |", "|---|---|---|"]
    for name in LOADS:
        row = result["load"][name]
        lines.append(f"| {_NAMES[name]} | {row['seconds_ratio']:.2f} | {row['cpu_ratio']:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
