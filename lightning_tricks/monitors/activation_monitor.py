"""Log the output of each block: its size, its zeros, and whether it is still finite."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.find_modules import find_blocks, match_modules
from lightning_tricks._core.tensors import tensors_in
from lightning_tricks._trainer.lightning import Module, Trainer
from lightning_tricks.monitors._module_calls import ModuleMonitor, after_calls, outside_compiled

__all__ = ["ActivationMonitor"]

STATS = ("rms", "max_abs", "zero_fraction", "nonfinite_fraction")


def activation_stats(x: Tensor) -> Tensor:
    """The four `STATS` of all numbers in `x`, a floating-point tensor of any shape but not empty.

    A NaN anywhere makes the first two NaN, an infinity makes them infinite. The root mean square of bf16 or fp16 is
    summed in fp32.

    Returns:
        (4,) fp32 tensor on the device of `x`.
    """
    wide = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else None
    stats = (
        torch.linalg.vector_norm(x, dtype=wide) / x.numel() ** 0.5,
        torch.linalg.vector_norm(x, torch.inf),
        (x == 0).sum() / x.numel(),
        (x * 0).isnan().sum() / x.numel(),  # half of the passes over memory that `isfinite` takes
    )
    return torch.stack([value.float() for value in stats])


def first_tensor(output: Any) -> Tensor | None:
    """The first dense floating-point tensor in an output, not empty; of a DTensor its local part."""
    return next((tensor.detach() for tensor in tensors_in(output) if tensor.is_floating_point()), None)


class ActivationMonitor(ModuleMonitor):
    r"""Record the size of each block's output, its zeros and non-finite values on log steps. Never changes training.

    For each block `activations/<block>/rms`, `/max_abs`, `/zero_fraction` and `/nonfinite_fraction` of the first
    floating-point tensor in its output, in the last micro-batch of the step. `<block>` is the submodule's name. Only
    the block's first run counts: activation checkpointing runs it again, and so do the other parts of a micro-batch
    under pipeline stages. The non-finite fraction is the largest over
    ranks, so that a NaN on any rank shows; the others are those of rank 0, of its part of the rows under sequence or
    context parallelism.

    Blocks compiled one by one (`block.compile()`, `torch.compile(block)`) are watched from outside their graphs, which
    stay as they are. Blocks inside a model that is compiled as a whole cannot be seen: one warning says so.

    Args:
        blocks: regular expressions that match whole names of submodules, such as `decoder\.blocks\.\d+`. Default:
            the repeated blocks, that is the members of lists that hold modules of one class; else the model's parts.

    Raises:
        UsageError: `blocks` is empty, or has a pattern that matches no submodule or is no regular expression.
    """

    def __init__(self, blocks: list[str] | None = None) -> None:
        if blocks is not None and (isinstance(blocks, str) or not blocks):
            raise UsageError(f"ActivationMonitor.blocks={blocks!r}: give a list of names or patterns, or leave it out")
        super().__init__("ActivationMonitor records nothing: {}; if you use torch.compile, compile each block")
        self.blocks = blocks

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Find the blocks."""
        if self.blocks is None:
            blocks = find_blocks(pl_module)
        else:
            blocks = match_modules(pl_module, self.blocks, "ActivationMonitor.blocks")
        self.begin_fit(trainer, partial(self._watch_blocks, pl_module, blocks))

    def _watch_blocks(self, pl_module: Module, blocks: dict[str, nn.Module]) -> None:
        self.watch(outside_compiled(pl_module, blocks), after_calls, _stats_of)
        if not self._names:
            self.warn("its blocks are inside a model that is compiled as a whole")

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record the measurements of a log step."""
        example = ", ".join(self._names[:1])
        found = self.end_batch(f"no block ({example}, ...) ran where it can be seen")
        if found is None:
            return
        for name, stats in found.items():
            self._buffer.record_all(tuple(f"activations/{name}/{stat}" for stat in STATS[:3]), stats[:3])
        nonfinite = {f"activations/{name}/{STATS[3]}": stats[3] for name, stats in found.items()}
        self._buffer.record_largest([f"activations/{name}/{STATS[3]}" for name in self._names], nonfinite)


def _stats_of(block: nn.Module, output: Any) -> Tensor | None:
    tensor = first_tensor(output)
    return None if tensor is None else activation_stats(tensor)
