"""Which linear layers multiply in fp8, why the others do not, and the table that says so."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_tricks._errors import UsageError
from lightning_tricks._find_modules import clean_name, find_blocks

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"]

# every dimension of a product, the tokens too, is a multiple of this: 16 bytes for cuBLAS, a block of 32 for MX
MULTIPLE: dict[str, int] = {"tensorwise": 16, "rowwise": 16, "rowwise_with_gw_hp": 16, "mxfp8": 32}


class Choice(NamedTuple):
    """A linear layer and why it stays as it is; an empty reason where it is to be converted."""

    layer: nn.Linear
    reason: str


def named_linears(module: nn.Module) -> dict[str, nn.Linear]:
    """Every linear layer at or below `module` by its name without wrappers' prefixes, shared ones once."""
    found = ((clean_name(name + ".").rstrip("."), part) for name, part in module.named_modules())
    return {name: part for name, part in found if isinstance(part, nn.Linear)}


def too_small(recipe: str, out_features: int, in_features: int) -> bool:
    """Whether casting to fp8 costs more than the faster product saves, on the hardware that torchao measured.

    `tensorwise` and `rowwise` have torchao's own thresholds, of H100 tables for each shape. For `rowwise_with_gw_hp`
    torchao has none: it casts along rows as `rowwise` does and leaves one product of three in bf16, so it gains no more
    and has the thresholds of `rowwise`. For `mxfp8` torchao names keys and values of 5120 x 1024 as too small.

    Source: `_auto_filter_for_recipe` in https://github.com/pytorch/ao/blob/main/torchao/float8/float8_linear_utils.py,
    tables in https://github.com/pytorch/ao/blob/main/docs/source/workflows/training.md (Performance); mxfp8:
    https://github.com/pytorch/ao/blob/main/torchao/prototype/moe_training/README.md.
    """
    if recipe == "tensorwise":
        return in_features <= 4096 and out_features <= 1024
    if recipe == "mxfp8":
        return in_features <= 1024 or out_features <= 1024
    return out_features <= 2048 or in_features <= 1024 or (out_features <= 4096 and in_features <= 2048)


def choose_layers(
    module: nn.Module, recipe: str, exclude: Sequence[str] = (), convert_small: bool = False
) -> dict[str, Choice]:
    """Every linear layer of `module` by name, with the reason why it is not converted; the first that fits counts."""
    linears = named_linears(module)
    heads, owners = find_heads(module), _owners(module)
    multiple = MULTIPLE[recipe]

    def reason(name: str, layer: nn.Linear) -> str:
        if type(layer) is not nn.Linear:
            return f"is a {type(layer).__name__}"  # a subclass, which would lose its own forward
        if "forward" in vars(layer):
            return "its forward was replaced"
        if layer in heads:
            return "output head"
        if any(re.search(pattern, name) for pattern in exclude):
            return "exclude"
        if not layer.weight.requires_grad:
            return "weight is frozen"
        shared = [owner for owner in owners[id(layer.weight)] if type(owner) is not nn.Linear]
        if shared:
            return f"weight shared with a {type(shared[0]).__name__}"
        if layer.in_features % multiple or layer.out_features % multiple:
            return f"dimensions no multiples of {multiple}"
        if not convert_small and too_small(recipe, layer.out_features, layer.in_features):
            return "too small to pay"
        return ""

    choices = {name: Choice(layer, reason(name, layer)) for name, layer in linears.items()}
    return {name: _with_partners(choice, choices, owners) for name, choice in choices.items()}


def find_heads(module: nn.Module) -> set[nn.Module]:
    """The layers that give logits: their error goes straight into the loss, so they stay in bf16.

    What Hugging Face models name so (`get_output_embeddings`), and what stands outside the repeated blocks and has as
    many outputs as an embedding has rows, as one that shares its weight has. Where there is none of these, the last
    linear layer outside the repeated blocks, unless it is the only one of the module.
    """
    linears = named_linears(module)
    embeddings = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    # a block that is a linear layer itself, as in an MLP, is none
    inside = tuple(f"{block}." for block in find_blocks(module))
    outside = [layer for name, layer in linears.items() if not name.startswith(inside)]
    named: list[Any] = [part for part in module.modules() if hasattr(part, "get_output_embeddings")]
    heads: set[nn.Module] = {part.get_output_embeddings() for part in named}
    heads |= {layer for layer in outside if any(layer.out_features == part.num_embeddings for part in embeddings)}
    return heads - {None} or (set(outside[-1:]) if len(linears) > 1 else set())


def refuse_unmatched(exclude: Sequence[str], names: Sequence[str]) -> None:
    """Raise where a pattern names no linear layer.

    Raises:
        UsageError: see above.
    """
    for pattern in exclude:
        if not any(re.search(pattern, name) for name in names):
            raise UsageError(
                f"Float8.exclude: pattern {pattern!r} matches no linear layer: names are such as {names[-1]}"
            )


def check_patterns(exclude: Sequence[str]) -> tuple[str, ...]:
    """`exclude`, of which every pattern is a regular expression.

    Raises:
        UsageError: one is not.
    """
    if isinstance(exclude, str):
        raise UsageError(f"Float8.exclude={exclude!r}: give a list of patterns")
    for pattern in exclude:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError(f"Float8.exclude: pattern {pattern!r} is no regular expression: {error}") from None
    return tuple(exclude)


def refuse_tensor_parallel(module: nn.Module, layers: Sequence[nn.Linear]) -> None:
    """Raise where a weight stays in shards while its layer multiplies: fp8 scales would be those of a part.

    FSDP2's shards are gathered before; they lie below a module that it wraps, and are split once.

    Raises:
        UsageError: see above.
    """
    gathered = {id(part) for root in module.modules() if isinstance(root, FSDPModule) for part in root.modules()}
    for name, layer in named_linears(module).items():
        weight = layer.weight
        if layer not in layers or not isinstance(weight, DTensor):
            continue
        splits = sum(not placement.is_replicate() for placement in weight.placements)
        if id(layer) not in gathered or splits > 1:
            raise UsageError(
                f"plugins: Float8 does not work with tensor parallelism, which splits {name} ({weight.placements}): "
                "shard over data only (FSDP2), or use BF16Mixed"
            )


def group_rows(layers: dict[str, tuple[nn.Linear, str]]) -> Iterator[tuple[str, int, nn.Linear, str]]:
    """Layers alike but for the numbers in their names, as (pattern, how many, one of them, what they multiply in)."""
    groups: dict[tuple[str, tuple[int, int], str], list[nn.Linear]] = {}
    for name, (layer, note) in layers.items():
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        groups.setdefault((pattern, (layer.out_features, layer.in_features), note), []).append(layer)
    for (pattern, _, note), members in groups.items():
        yield pattern, len(members), members[0], note


def layers_table(layers: dict[str, tuple[nn.Linear, str]]) -> str:
    """A plain text table of linear layers: name pattern, how many, shape (outputs x inputs), what they multiply in."""
    rows = [("linear layers", "count", "shape", "products")]
    for pattern, count, layer, note in group_rows(layers):
        rows.append((pattern, str(count), f"{layer.out_features} x {layer.in_features}", note))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        f"{name.ljust(widths[0])}  {count.rjust(widths[1])}  {shape.rjust(widths[2])}  {note}".rstrip()
        for name, count, shape, note in rows
    )


def nothing_to_convert(recipe: str, reasons: Sequence[str]) -> UsageError:
    """What to raise where no layer is converted: how many stay for which reason, and the way out."""
    if not reasons:
        return UsageError("plugins: Float8 found no nn.Linear in the module: use BF16Mixed instead")
    counts = ", ".join(f"{count} {reason}" for reason, count in Counter(reasons).most_common())
    remedy = (
        "set convert_small: true to convert them all the same" if "too small to pay" in reasons else "use BF16Mixed"
    )
    return UsageError(f"plugins: Float8(recipe={recipe!r}) converts none of {len(reasons)} layers ({counts}): {remedy}")


def _owners(module: nn.Module) -> dict[int, list[nn.Module]]:
    owners: dict[int, list[nn.Module]] = {}
    for part in module.modules():
        for param in part.parameters(recurse=False):
            owners.setdefault(id(param), []).append(part)
    return owners


def _with_partners(choice: Choice, choices: dict[str, Choice], owners: dict[int, list[nn.Module]]) -> Choice:
    """A layer stays as it is where one that shares its weight does."""
    partners = owners[id(choice.layer.weight)]
    if choice.reason or len(partners) == 1:
        return choice
    stays = any(other.reason for other in choices.values() if any(other.layer is partner for partner in partners))
    return choice._replace(reason="weight shared with a layer that stays") if stays else choice
