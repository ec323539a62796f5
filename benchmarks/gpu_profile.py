"""The stage `profile` of gpu.py: where the time of one micro-batch goes, kernel by kernel, and what the head costs."""

import re
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.contenders import CONTENDERS
from benchmarks.feed import load, own_loader, write_tokens
from benchmarks.gpu_checks import clean_up
from benchmarks.gpu_sizes import SIZES, toy, variants
from benchmarks.gpu_train import nothing_moves_to_the_host
from benchmarks.gpu_yardstick import HEADS, head_times
from benchmarks.stage_file import resume, write

# Size and contender; the first one has an optimizer step in each micro-batch, the others have none in these.
PROFILED = (("gpt2_124m", "ours"), ("llama7b", "ours"), ("llama7b", "fp8_tensorwise"))
_FIRST, _LAST = 5, 8  # micro-batches between which the profiler watches; everything is compiled by then
_KERNELS = 40
# What a kernel does, by its name: the first that fits.
KINDS = {
    "attention": r"sdpa|flash|fmha|attention",
    "matrix products": r"gemm|nvjet|cutlass|cublas|xmma|aten::(mm|addmm|bmm|_scaled_mm)",
    "optimizer": r"multi_tensor|[Aa]dam|foreach",
    "compiled by Inductor": r"triton_",
    "copies": r"Memcpy|Memset",
    "other": r"",
}


class Profile:
    """What `Meter` calls: watches the micro-batches from `_FIRST` to `_LAST`, and ends training there."""

    def __init__(self, cuda: bool) -> None:
        activity = torch.profiler.ProfilerActivity
        self.cuda, self.seconds = cuda, 0.0
        self.profiler = torch.profiler.profile(activities=[activity.CUDA if cuda else activity.CPU])

    def __call__(self, index: int) -> bool:
        if index in (_FIRST, _LAST) and self.cuda:
            torch.cuda.synchronize()
        if index == _FIRST:
            self.profiler.start()
            self.seconds = -time.perf_counter()
        if index == _LAST:
            self.seconds += time.perf_counter()
            self.profiler.stop()
        return index == _LAST

    def summary(self) -> dict[str, Any]:
        """Milliseconds of a micro-batch, by the clock, of the kernels of each kind, and of the longest kernels."""
        found = kernels(self.profiler.key_averages(), "device" if self.cuda else "cpu")
        kinds = dict.fromkeys(KINDS, 0.0)
        for kernel in found:
            kinds[next(kind for kind, names in KINDS.items() if re.search(names, kernel["name"]))] += kernel["ms"]
        return {"ms": 1000 * self.seconds / (_LAST - _FIRST), "kinds": kinds, "kernels": found[:_KERNELS]}


def kernels(events: Iterable[Any], where: str) -> list[dict[str, Any]]:
    """The events that took time themselves, by the time that they took: milliseconds and calls a micro-batch.

    Args:
        events: of a profiler, which watched the micro-batches from `_FIRST` to `_LAST`.
        where: `device` or `cpu`.
    """
    times = [(getattr(event, f"self_{where}_time_total") / 1000, event) for event in events]
    count = _LAST - _FIRST
    return [
        {"name": event.key[:120], "ms": ms / count, "calls": event.count / count}
        for ms, event in sorted(times, key=lambda pair: -pair[0])
        if ms
    ]


def profile_of(stage: str, contender: str, dry: bool, cuda: bool) -> dict[str, Any]:
    """Train a few micro-batches; see `Profile.summary`."""
    size = toy(SIZES[stage], cuda) if dry else SIZES[stage]
    options = variants(size.base, dry, emulate=not cuda)[contender]
    watch = Profile(cuda)
    with tempfile.TemporaryDirectory() as folder, nothing_moves_to_the_host():
        shards = write_tokens(Path(folder), 256 if dry else 32000, 100_000 if dry else 2_000_000)
        cli: Any = load(size.recipe, shards, Path(folder), (*size.options, *options))
        CONTENDERS["ours_loader"](cli, own_loader(cli), 2 * _LAST, watch)
        vars(cli).clear()  # jsonargparse keeps the last parser, and that one its command line
    clean_up()
    return watch.summary()


def run_profile(out: Path, dry: bool) -> None:
    """Profile some recipes, and time the head and loss of GPT-2 and Llama-3; what `out` holds is not done again."""
    cuda = torch.cuda.is_available()
    fresh = {"stage": "profile", "machine": machine.describe(), "dry": dry, "profiles": {}, "head": {}}
    result: dict[str, Any] = resume(out, fresh)
    for stage, contender in PROFILED:
        name = f"{stage} {contender}"
        if name not in result["profiles"]:
            torch._dynamo.reset()
            result["profiles"][name] = profile_of(stage, contender, dry, cuda)
            write(out, result)
    shapes = {"toy": (64, 16, 128)} if dry else HEADS
    for name, shape in shapes.items():
        if name not in result["head"]:
            result["head"][name] = {"shape": shape, **head_times(shape, "cuda" if cuda else "cpu", 3 if dry else 10)}
            write(out, result)
