"""NorMuon: each row of an orthogonalized update is divided by the root mean square that it had in the last steps."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lightning_tricks._core.tensors import local
from lightning_tricks.optim.matrix_layout import MatrixLayout

EPS = 1e-8


def row_factors(now: Tensor, averages: Tensor, layout: MatrixLayout, norms: Sequence[float]) -> Tensor:
    """The factor of each row: one over the root of its average mean square, and one number for each matrix.

    That number gives a matrix the Frobenius norm of its entry in `norms`, if its rows have the mean squares `now`.

    Args:
        now: of the rows of some weights of one layout: (weights, ...), with 1 for each dimension of inputs.
        averages: of the last steps, of the same shape.
        layout: of each weight.
        norms: of the matrices of the layout, of each expert in a stack.
    """
    roots = averages.sqrt() + EPS
    stacked = [each.flatten(0, 1) if layout.stacked else each for each in (now * layout.inputs / roots.square(), roots)]
    output_dim = layout.output_dim + (0 if layout.stacked else 1)
    rows = layout._replace(shape=tuple(stacked[0].shape), stacked=True, output_dim=output_dim)
    factors = [
        norm / squares.sum(-2, keepdim=True).sqrt().clamp(min=EPS) / root
        for norm, squares, root in zip(norms, *map(rows.split, stacked), strict=True)
    ]
    return rows.join(factors).view_as(now)


def _rows_of(weight: Tensor, layout: MatrixLayout) -> tuple[list[int], list[int], tuple[slice, ...]]:
    """The dimensions of inputs of a weight; its shape with 1 for these; the part of it of which rows are here."""
    inputs = [dim for dim in range(layout.stacked, len(layout.shape)) if dim != layout.output_dim]
    sizes, offsets = tuple(local(weight).shape), (0,) * len(layout.shape)
    if isinstance(weight, DTensor):
        sizes, offsets = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    parts = [slice(offset, offset + size) for size, offset in zip(sizes, offsets, strict=True)]
    shape = [1 if dim in inputs else size for dim, size in enumerate(layout.shape)]
    return inputs, shape, tuple(slice(0, 1) if dim in inputs else part for dim, part in enumerate(parts))


def shard_dims(weight: Tensor) -> tuple[Any, tuple[int, ...]]:
    """The mesh of a weight, and the dimensions of it over whose ranks the weight is divided."""
    if not isinstance(weight, DTensor):
        return None, ()
    mesh = weight.device_mesh
    divided = (dim for dim, place in enumerate(weight.placements) if not place.is_replicate())
    return mesh, tuple(dim for dim in divided if mesh.size(dim) > 1)


def normalize_rows(
    updates: Sequence[Tensor],
    weights: Sequence[Tensor],
    layouts: Sequence[MatrixLayout],
    averages: Sequence[Tensor],
    beta: float,
    scale: Callable[[int, int], float],
    skip: Tensor | None,
) -> list[Tensor]:
    """Updates of NorMuon from orthogonalized ones; every rank that has a part of the weights must call.

    With O the orthogonalized update of a matrix and v the average of the mean square of each row, v <- beta v +
    (1 - beta) mean(O^2), and the update is O / (sqrt(v) + eps), multiplied by one number that gives it the Frobenius
    norm of an orthogonal matrix times its scale.

    Args:
        updates: this rank's parts.
        weights: plain tensors, or DTensors that are divided over the same dimensions of one mesh.
        layouts: of the whole weights.
        averages: v of each weight in fp32, flat and whole on each rank; changed in place.
        beta: weight of the old average in the new one.
        scale: of (rows, columns) of a matrix.
        skip: a 0-dim tensor: where it is true, the averages stay.

    Returns:
        fp32, the shapes of `updates`.
    """
    alike: dict[tuple[MatrixLayout, Any], list[int]] = {}
    for number, (weight, layout) in enumerate(zip(weights, layouts, strict=True)):
        alike.setdefault((layout, getattr(weight, "placements", None)), []).append(number)
    stacks, sums = list[Tensor](), list[Tensor]()
    rows = [_rows_of(weights[numbers[0]], layout) for (layout, _), numbers in alike.items()]
    for numbers, (inputs, shape, here) in zip(alike.values(), rows, strict=True):
        stacks.append(torch.stack([updates[number] for number in numbers]).float())
        sums.append(torch.zeros(len(numbers), *shape, device=stacks[-1].device))
        sums[-1][:, *here] = stacks[-1].square().sum([dim + 1 for dim in inputs], keepdim=True)
    flat = torch.cat([part.flatten() for part in sums])
    mesh, dims = shard_dims(weights[0])
    for dim in dims:
        dist.all_reduce(flat, group=mesh.get_group(dim))
    found: dict[int, Tensor] = {}
    wholes = flat.split([part.numel() for part in sums])
    each = zip(alike.items(), stacks, wholes, rows, strict=True)
    for ((layout, _), numbers), stack, whole, (_, shape, here) in each:
        now, own = whole.view(-1, *shape) / layout.inputs, [averages[number] for number in numbers]
        old = torch.stack(own).view_as(now)
        new = old.lerp(now, 1 - beta)
        kept = new if skip is None else torch.where(skip, old, new)
        torch._foreach_copy_(own, list(kept.flatten(1).unbind()))
        norms = [scale(*sizes) * math.sqrt(min(sizes)) for sizes in layout.sizes]
        stack.mul_(row_factors(now, new, layout, norms)[:, *here])
        found |= zip(numbers, stack.unbind(), strict=True)
    return [found[number] for number in range(len(updates))]
