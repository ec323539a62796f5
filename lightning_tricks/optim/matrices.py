"""The matrices that one parameter holds: projections of a fused QKV, experts in a stack, filters of a convolution."""

import re
from collections.abc import Sequence

from torch import nn

from lightning_tricks._errors import UsageError
from lightning_tricks._find_modules import clean_name, named_submodules

# fused projections that hold queries, keys and values one after the other, in equal parts if the width says so
_THREE = re.compile(r"qkv|qkv_proj|Wqkv|in_proj|c_attn|to_qkv")
# any fused projection: the parts of the others may be interleaved or of different widths
_FUSED = re.compile(r".*qkv.*|query_key_value|c_attn|kqv|in_proj")
# one projection by itself
_PROJECTION = re.compile(r"(q|k|v|query|key|value)(_proj|_lin)?")


def held_matrices(module: nn.Module) -> dict[str, list[int]]:
    """Rows of each matrix in every weight of `module` that holds several of them, by name without wrappers' prefixes.

    A module can declare them in a dict `_matrices`: `{"qkv.weight": [512, 128, 128]}`, with names as seen from that
    module. Without it, a fused projection of a known name (`qkv`, `qkv_proj`, `Wqkv`, `in_proj`, `c_attn`, `to_qkv`)
    holds three equal parts if it has three times as many outputs as inputs. A weight of transformers' `Conv1D` has its
    outputs in the second dimension; its numbers are negative.

    Raises:
        UsageError: `_matrices` names what is no parameter, or other rows than those of the weight.
    """
    found: dict[str, list[int]] = {}
    modules = {"": module, **named_submodules(module)}
    for path, owner in modules.items():
        rows_dim = 1 if any(cls.__name__ == "Conv1D" for cls in type(owner).__mro__) else 0
        for name, param in owner.named_parameters(prefix=path, recurse=False):
            name = clean_name(name)
            if param.ndim == 2 and _THREE.fullmatch(_last_name(name)):
                rows, columns = param.shape[rows_dim], param.shape[1 - rows_dim]
                if rows == 3 * columns:
                    found[name] = [-columns if rows_dim else columns] * 3
    for path, owner in modules.items():
        for own_name, sizes in getattr(owner, "_matrices", {}).items():
            name = f"{path}.{own_name}" if path else own_name
            try:
                rows = owner.get_parameter(own_name).shape[0]
            except AttributeError:
                raise UsageError(
                    f"_matrices of module '{path}' names '{own_name}', which is no parameter of it: correct the name"
                ) from None
            if sum(sizes) != rows:
                raise UsageError(
                    f"_matrices of module '{path}': {own_name} has {rows} rows, and not {sum(sizes)}: correct the "
                    "numbers"
                )
            found[name] = list(sizes)
    return found


def split_by_heads(name: str, shape: Sequence[int], held: Sequence[int], head_dim: int) -> list[int]:
    """The rows of each matrix as in `held_matrices`, but of each head where `name` projects to queries, keys or values.

    Raises:
        UsageError: the rows of a projection are no multiple of `head_dim`.
    """
    last = _last_name(name)
    if not (_PROJECTION.fullmatch(last) or _FUSED.fullmatch(last)):
        return list(held)
    sizes = list(held) or [shape[0]]
    if any(size % head_dim for size in sizes):
        raise UsageError(
            f"head_dim={head_dim}: '{name}' has projections of {sizes} rows, which are not whole heads: give the width "
            "of the model's attention heads"
        )
    return [size // abs(size) * head_dim for size in sizes for _ in range(abs(size) // head_dim)]


def is_unknown_fusion(name: str, held: Sequence[int]) -> bool:
    """Whether a weight has the name of a fused projection, while the rows of its parts are unknown."""
    return not held and _FUSED.fullmatch(_last_name(name)) is not None


def _last_name(name: str) -> str:
    """`qkv` of `blocks.0.qkv.weight`, `in_proj` of `attn.in_proj_weight`."""
    return name.removesuffix("_weight").removesuffix(".weight").split(".")[-1]
