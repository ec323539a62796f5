"""Whether it pays on a CPU to compile the blocks of a decoder: the seconds it takes against those it saves in a run.

The first block is run, forward and backward, as the run will; only a run that is long enough has it compiled too. The
choice holds for the whole run, also after a resume: compiled and eager blocks round differently.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_tricks.accounting.peak_flops import available_cores, seconds_of

LARGEST_SHARE = 0.25  # of a block's time that compiling has saved on a CPU: 14 to 19 % in fp32, 7 % in bf16
TYPICAL_SECONDS = 20.0  # that compiling takes: 3 to 12 on two quiet cores, and more the first time
VALIDATION_SHARE = 0.5  # of those seconds, still to come: validation compiles the forward pass alone
ROUNDS = 5


@dataclass(frozen=True)
class CompileChoice:
    """What `choose` found.

    Args:
        compiled: whether the blocks are to run compiled.
        reason: a clause that says why, with the seconds.
    """

    compiled: bool
    reason: str


def choose(block: nn.Module, act: Callable[[], Any], calls: int | None) -> CompileChoice:
    """Measure a block eager, and compiled where that could pay; it is left as it was.

    Args:
        block: of the run, on a CPU.
        act: runs the block forward and backward, as a step does, and changes nothing.
        calls: number of such calls in the rest of the run; None: not known, as of a run without an end.
    """
    cores = available_cores()

    def seconds() -> float:
        return seconds_of(act, cores)[1]

    seconds()
    eager = min(seconds() for _ in range(3))
    if calls is not None and LARGEST_SHARE * eager * calls < TYPICAL_SECONDS:
        return CompileChoice(False, f"the rest of the run has {eager * calls:.0f} s in its blocks, too few to earn it")
    begin = time.perf_counter()
    try:
        block.compile()
        act()
        taken = time.perf_counter() - begin
        pairs = [(_eagerly(seconds), seconds()) for _ in range(ROUNDS)]
    except Exception as error:  # no C++ compiler, or one that fails: each has an exception of its own
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        return CompileChoice(False, f"torch.compile fails here ({reason})")
    finally:
        block._compiled_call_impl = None  # which `compile` has set
    eager, compiled = (statistics.median(each) for each in zip(*pairs, strict=True))
    found = f"a block takes {1e3 * compiled:.1f} ms compiled and {1e3 * eager:.1f} ms eager"
    if calls is None:
        return CompileChoice(compiled < eager, f"{found}, after {taken:.0f} s of compiling")
    saved = (eager - compiled) * calls
    found = f"{found}: {saved:.0f} s in the rest of the run, after {taken:.0f} s of compiling"
    return CompileChoice(saved > VALIDATION_SHARE * taken, found)


def _eagerly(seconds: Callable[[], float]) -> float:
    with torch.compiler.set_stance("force_eager"):
        return seconds()
