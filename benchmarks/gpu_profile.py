"""The stage `profile` of gpu.py: where the time of one micro-batch goes, kernel by kernel, and what the head costs."""

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.contenders import CONTENDERS
from benchmarks.feed import load, own_loader, write_tokens
from benchmarks.gpu_sizes import SIZES, toy
from benchmarks.gpu_yardstick import HEADS, head_times
from benchmarks.stage_file import resume, write

_FIRST, _LAST = 5, 8  # micro-batches between which the profiler watches; everything is compiled by then
_KERNELS = 40


class Profile:
    """What `Meter` calls: watches the micro-batches from `_FIRST` to `_LAST`, and ends training there."""

    def __init__(self, cuda: bool) -> None:
        activity = torch.profiler.ProfilerActivity
        self.cuda = cuda
        self.profiler = torch.profiler.profile(activities=[activity.CUDA if cuda else activity.CPU])

    def __call__(self, index: int) -> bool:
        if index in (_FIRST, _LAST) and self.cuda:
            torch.cuda.synchronize()
        if index == _FIRST:
            self.profiler.start()
        if index == _LAST:
            self.profiler.stop()
        return index == _LAST

    def kernels(self) -> list[dict[str, Any]]:
        """Name, milliseconds a micro-batch and calls a micro-batch of the kernels, the longest first."""
        return kernels(self.profiler.key_averages(), "device" if self.cuda else "cpu")


def kernels(events: Iterable[Any], where: str) -> list[dict[str, Any]]:
    """The events that took time themselves, by the time that they took.

    Args:
        events: of a profiler, which watched the micro-batches from `_FIRST` to `_LAST`.
        where: `device` or `cpu`.
    """
    times = [(getattr(event, f"self_{where}_time_total") / 1000, event) for event in events]
    count = _LAST - _FIRST
    return [
        {"name": event.key[:120], "ms": ms / count, "calls": event.count / count}
        for ms, event in sorted(times, key=lambda pair: -pair[0])[:_KERNELS]
        if ms
    ]


def run_profile(out: Path, dry: bool) -> None:
    """Profile the recipe gpt2_124m, and time its head and loss and Llama-3's; what `out` holds is not done again."""
    cuda = torch.cuda.is_available()
    result: dict[str, Any] = resume(out, {"stage": "profile", "machine": machine.describe(), "dry": dry, "head": {}})
    if "kernels" not in result:
        size = toy(SIZES["gpt2_124m"], cuda) if dry else SIZES["gpt2_124m"]
        watch = Profile(cuda)
        with tempfile.TemporaryDirectory() as folder:
            shards = write_tokens(Path(folder), 256 if dry else 32000, 100_000 if dry else 2_000_000)
            cli: Any = load(size.recipe, shards, Path(folder), size.options)
            CONTENDERS["ours_loader"](cli, own_loader(cli), 2 * _LAST, watch)
        result["kernels"] = watch.kernels()
        write(out, result)
    shapes = {"toy": (64, 16, 128)} if dry else HEADS
    for name, shape in shapes.items():
        if name not in result["head"]:
            result["head"][name] = {"shape": shape, **head_times(shape, "cuda" if cuda else "cpu", 3 if dry else 10)}
            write(out, result)
