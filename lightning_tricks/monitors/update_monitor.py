"""Log how far each optimizer step moves the weights, relative to their size."""

import functools
import math
import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.find_modules import find_blocks, whole_of
from lightning_tricks._trainer.lightning import Module, Trainer, pl, rank_zero_warn
from lightning_tricks.metrics.metric_buffer import MetricBuffer
from lightning_tricks.metrics.row import Row
from lightning_tricks.optim import MATRICES, param_roles

__all__ = ["UpdateMonitor"]

_PARTS = ("update_square", "weight_square", "count")


def sample_stride(numel: int, row: int, max_elements: int | None) -> int:
    """The stride of a sample of at most `max_elements` of `numel` elements.

    It shares no factor with the length of a row, so that the sample takes elements of every column.
    """
    if max_elements is None or numel <= max_elements:
        return 1
    stride = -(-numel // max_elements)
    while math.gcd(stride, row) > 1:
        stride += 1
    return stride


def square_sums(tensors: list[Tensor]) -> Tensor:
    """Sum of squares of each tensor, at least in fp32: (n,) fp32 on the first one's device."""
    wide = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
    norms = torch._foreach_norm(tensors, 2, dtype=wide)
    return torch.stack([norm.float().to(tensors[0].device) for norm in norms]).square()


class _Watched(NamedTuple):
    """A parameter whose updates are measured on a sample of its elements."""

    block: int
    param: Tensor
    stride: int
    scale: float  # factor from the sample's sum to this rank's share of the sum over all ranks
    elements: float  # this rank's share of the number of elements

    def sample(self) -> Tensor:
        return _local(self.param).flatten()[:: self.stride]


def _local(param: Tensor) -> Tensor:
    """This rank's part of a parameter; a complex one as its real and imaginary parts."""
    local = param.to_local() if isinstance(param, DTensor) else param.detach()
    return torch.view_as_real(local) if local.is_complex() else local


def trained_parameters(trainer: Any, module: torch.nn.Module) -> list[Tensor]:
    """The parameters of `module` that an optimizer moves at this moment, in the optimizers' order.

    The optimizer of an engine such as DeepSpeed's holds copies; there, all parameters that require a gradient count.
    """
    own = set(module.parameters())
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    found = [param for group in groups for param in group["params"] if param in own]
    return [param for param in found or module.parameters() if param.requires_grad]


class UpdateMonitor(pl.Callback):
    """Record how far the optimizer moves the weights on each log step. Never changes training.

    For each block `updates/<block>/ratio`, the root mean square of the step over that of the weights before it, and
    `updates/<block>/weight_rms`; `updates/ratio` over all blocks. About 1e-3 is healthy by a rule of thumb: far below,
    the lr may be too low, above too high. A step that the fp16 scaler skips gives 0. Weights that are all zero have no
    ratio.

    It counts the matrices, convolutions and embeddings that an optimizer trains at that step: no frozen weights (until
    they are unfrozen) and no target network. Biases and norms are left out, as their size says little. Weights outside
    the repeated blocks are named after their own module. Each tensor is sampled at a fixed stride and the sums are
    scaled back; shards are joined over ranks. With several optimizers, or several steps in one batch, the ratio is that
    of the whole batch.

    Args:
        max_elements: how many elements of a tensor (of a shard, of each rank) are copied and compared. None: all, at
            the price of a second copy of the weights during the step. Default: 65,536, at which the root mean square of
            independent normal elements is exact to about 0.3 %.

    Raises:
        UsageError: `max_elements` is below 1.

    Source: "Ratio of weights:updates" in https://cs231n.github.io/neural-networks-3/#ratio
        (https://github.com/cs231n/cs231n.github.io/blob/master/neural-networks-3.md).
    """

    def __init__(self, max_elements: int | None = 65536) -> None:
        if max_elements is not None and max_elements < 1:
            raise UsageError(f"UpdateMonitor.max_elements={max_elements}: give 1 or more, or null for all")
        self.max_elements = max_elements
        self._blocks: list[str] = []
        self._trained: list[Tensor] = []
        self._watched: list[_Watched] = []
        self._before: list[Tensor] = []

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Find the weights: a strategy has placed them by now."""
        self._trained, self._before = [], []
        self._buffer = MetricBuffer.of(trainer)
        self._buffer.at_flush(self._ratios)
        self._find_weights(trainer, pl_module)

    def _find_weights(self, trainer: Trainer, pl_module: Module) -> None:
        """Find the trained weights and this rank's share of each, unless they are the same as before."""
        trained = trained_parameters(trainer, pl_module)
        if len(trained) == len(self._trained) and all(map(operator.is_, trained, self._trained)):
            return
        self._trained, moving = trained, set(trained)
        try:
            roles = param_roles(pl_module)
        except UsageError as error:  # a watcher must not end a run that would train
            rank_zero_warn(f"UpdateMonitor records nothing: {error}")
            roles = []
        whole = whole_of(pl_module)
        of_whole = roles if whole is pl_module else param_roles(whole)
        names, kinds = list(find_blocks(whole)), (*MATRICES, "embedding")
        blocks: dict[str, str] = {}
        for name, param, role, *_ in of_whole:
            if role in kinds and (whole is not pl_module or param in moving):
                block = next((block for block in names if name.startswith(f"{block}.")), name.rpartition(".")[0])
                blocks[name] = block or name
        self._blocks = list(dict.fromkeys(blocks.values()))  # of all pipeline stages, as all sum them up
        self._watched = [
            self._watch(self._blocks.index(blocks[name]), param, trainer.world_size)
            for name, param, *_ in roles
            if name in blocks and param in moving
        ]
        if not self._watched:
            return
        device = pl_module.device
        self._index = torch.tensor([watched.block for watched in self._watched], device=device)
        self._scale = torch.tensor([watched.scale for watched in self._watched], device=device)
        self._count = torch.tensor([watched.elements for watched in self._watched], device=device)

    def _watch(self, block: int, param: Tensor, world_size: int) -> _Watched:
        mesh = zip(param.device_mesh.shape, param.placements, strict=True) if isinstance(param, DTensor) else ()
        copies = world_size / math.prod(size for size, placement in mesh if not placement.is_replicate())
        local = _local(param)
        stride = sample_stride(local.numel(), local.numel() // max(len(local), 1), self.max_elements)
        sampled = -(-local.numel() // stride)
        elements = local.numel() / 2 if param.is_complex() else local.numel()
        return _Watched(block, param, stride, local.numel() / max(sampled, 1) / copies, elements / copies)

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Module, optimizer: torch.optim.Optimizer) -> None:
        """Copy the samples before the first optimizer step of a log step."""
        if not self._before and self._buffer.is_log_step():
            self._find_weights(trainer, pl_module)
            self._before = [watched.sample().clone() for watched in self._watched]

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Compare the samples with their copies, and record the sums of each block."""
        if not self._before:
            return
        before, self._before = self._before, []
        updates = torch._foreach_sub([watched.sample() for watched in self._watched], before)
        device = self._scale.device
        squares = [square_sums(tensors).to(device) * self._scale for tensors in (list(updates), before)]
        sums = torch.zeros(len(_PARTS), len(self._blocks), device=device)
        sums.index_add_(1, self._index, torch.stack([*squares, self._count]))
        names = tuple(f"_updates/{block}/{part}" for part in _PARTS for block in self._blocks)
        self._buffer.record_all(names, sums.flatten(), "sum")

    def _ratios(self, rows: list[Row]) -> dict[str, float]:
        values = rows[-1].values
        result: dict[str, float] = {}
        total_update = total_weight = 0.0
        for block in self._blocks:
            sums = [values.get(f"_updates/{block}/{part}") for part in _PARTS]
            if sums[0] is None or sums[1] is None or not sums[2]:
                continue
            total_update, total_weight = total_update + sums[0], total_weight + sums[1]
            result[f"updates/{block}/weight_rms"] = math.sqrt(sums[1] / sums[2])
            if sums[1] != 0:
                result[f"updates/{block}/ratio"] = math.sqrt(sums[0] / sums[1])
        if total_weight != 0:
            result["updates/ratio"] = math.sqrt(total_update / total_weight)
        return result
