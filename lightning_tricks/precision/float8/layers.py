"""Choose the linear layers that multiply in fp8, with a reason for each other one, and show the choice as a table."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.find_modules import clean_name
from lightning_tricks.optim.param_roles import head_weights
from lightning_tricks.parallel.tensor import TENSOR_AXIS

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"]

# every dimension of a product, tokens included, must be a multiple of this: 16 bytes for cuBLAS, a block of 32 for MX
MULTIPLE: dict[str, int] = {"tensorwise": 16, "rowwise": 16, "rowwise_with_gw_hp": 16, "mxfp8": 32}


def named_linears(module: nn.Module) -> dict[str, nn.Linear]:
    """Every linear layer at or below `module` by its name without wrappers' prefixes, shared ones once."""
    found = ((clean_name(name + ".").rstrip("."), part) for name, part in module.named_modules())
    return {name: part for name, part in found if isinstance(part, nn.Linear)}


def choose_layers(
    module: nn.Module,
    recipe: str,
    exclude: Sequence[str] = (),
    pays: Callable[[nn.Module, str], bool] | None = None,
) -> dict[str, str]:
    """The first reason that keeps a linear layer from being converted, by its name; empty if it is converted.

    Args:
        module: of the layers.
        recipe: of Float8.
        exclude: patterns of names.
        pays: of (layer, name), whether fp8 is faster; torchao's filter. None: all layers may be converted.
    """
    heads = {id(weight) for weight in head_weights(module)}  # their error goes straight into the loss
    linears, multiple = named_linears(module), MULTIPLE[recipe]

    def reason_of(name: str, layer: nn.Linear) -> str:
        weight = layer._parameters.get("weight")  # None if a hook computes it
        if id(weight) in heads:
            return "output head"
        if type(layer) is not nn.Linear or "forward" in vars(layer) or weight is None:
            return "has a forward or a weight of its own"
        if excludes(exclude, name):
            return "exclude"
        if layer.in_features % multiple or layer.out_features % multiple:
            return f"dimensions no multiples of {multiple}"
        return "" if pays is None or pays(layer, name) else "too small to pay"

    reasons = {name: reason_of(name, layer) for name, layer in linears.items()}
    chosen = {layer for name, layer in linears.items() if not reasons[name]}
    kept = {id(param) for part in module.modules() if part not in chosen for param in part._parameters.values()}
    for name, layer in linears.items():
        if not reasons[name] and id(layer.weight) in kept:
            reasons[name] = "weight shared with a layer that stays"
    return reasons


def excludes(exclude: Sequence[str], name: str) -> bool:
    """Whether one of the patterns is found in a layer's name."""
    return any(re.search(pattern, name) for pattern in exclude)


def refuse_unmatched(exclude: Sequence[str], names: Sequence[str]) -> None:
    """Refuse a pattern that matches no linear layer."""
    for pattern in exclude:
        if not any(excludes([pattern], name) for name in names):
            raise UsageError(
                f"Float8.exclude: pattern {pattern!r} matches no linear layer: names are such as {names[-1]}"
            )


def check_patterns(exclude: Sequence[str]) -> tuple[str, ...]:
    """`exclude` as a tuple; refuses a pattern that is no regular expression, and a single string."""
    if isinstance(exclude, str):
        raise UsageError(f"Float8.exclude={exclude!r}: give a list of patterns")
    for pattern in exclude:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError(f"Float8.exclude: pattern {pattern!r} is no regular expression: {error}") from None
    return tuple(exclude)


def refuse_tensor_parallel(module: nn.Module, layers: Sequence[nn.Linear]) -> None:
    """Refuse layers that a module has divided itself, and that multiply with a shard: a scale would be the shard's.

    Weights of FSDP2 are allowed, as it gathers them before the product. Their layer lies in a module that FSDP2 wraps,
    and they are split over one mesh dimension only.
    """
    gathered = {id(part) for root in module.modules() if isinstance(root, FSDPModule) for part in root.modules()}
    for name, layer in named_linears(module).items():
        weight = layer._parameters.get("weight")
        if layer not in layers or not isinstance(weight, DTensor):
            continue
        splits = sum(not placement.is_replicate() for placement in weight.placements)
        if id(layer) not in gathered or splits > 1:
            raise UsageError(
                f"plugins: Float8 does not work with tensor parallelism, which splits {name} ({weight.placements}): "
                "leave it to FSDP2Strategy's mesh.tensor, or use BF16Mixed"
            )


def refuse_parts(layers: Mapping[str, nn.Linear], multiple: int) -> None:
    """Refuse a layer of which a tensor rank of FSDP2Strategy has a part of a size that fp8 cannot multiply."""
    for name, layer in layers.items():
        weight: Any = layer.weight
        names = (isinstance(weight, DTensor) and weight.device_mesh.mesh_dim_names) or ()
        if TENSOR_AXIS not in names:
            continue
        axis = names.index(TENSOR_AXIS)
        ranks, placement = weight.device_mesh.size(axis), weight.placements[axis]
        size = weight.shape[placement.dim] // ranks
        if size % multiple:
            field = ("out_features", "in_features")[placement.dim]
            raise UsageError(
                f"plugins: Float8: mesh.tensor={ranks} leaves {size} of the {field} of {name} to a rank, no multiple "
                f"of {multiple}, which fp8 needs: exclude the layer, or take fewer tensor ranks"
            )


def layers_table(layers: dict[str, tuple[nn.Linear, str]]) -> str:
    """A plain text table of linear layers: name, number, shape (outputs x inputs), format of the products.

    One row stands for all layers that differ only in the numbers in their names.
    """
    counts: Counter[tuple[str, str, str]] = Counter()
    for name, (layer, note) in layers.items():
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        counts[pattern, f"{layer.out_features} x {layer.in_features}", note] += 1
    rows = [("linear layers", "count", "shape", "products")]
    rows += [(pattern, str(count), shape, note) for (pattern, shape, note), count in counts.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        f"{name.ljust(widths[0])}  {count.rjust(widths[1])}  {shape.rjust(widths[2])}  {note}".rstrip()
        for name, count, shape, note in rows
    )


def nothing_to_convert(recipe: str, reasons: Sequence[str]) -> UsageError:
    """The error if no layer is converted: the number of layers for each reason, and a remedy."""
    if not reasons:
        return UsageError("plugins: Float8 found no nn.Linear in the module: use BF16Mixed instead")
    counts = ", ".join(f"{count} {reason}" for reason, count in Counter(reasons).most_common())
    small = "too small to pay" in reasons
    remedy = "set convert_small: true to convert them all the same" if small else "use BF16Mixed"
    return UsageError(f"plugins: Float8(recipe={recipe!r}) converts none of {len(reasons)} layers ({counts}): {remedy}")
