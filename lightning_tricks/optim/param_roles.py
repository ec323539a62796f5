"""What each parameter of a model is for (matrix, bias, norm, embedding, ...), found from module types and names."""

import re
from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple

from torch import nn
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from lightning_tricks._errors import UsageError

Role = Literal["exempt", "norm", "bias", "vector", "embedding", "matrix"]

_ORDER: tuple[Role, ...] = ("exempt", "norm", "bias", "vector", "embedding", "matrix")
# each part of a name that a wrapper adds: torch.compile, activation checkpointing, FSDP
_WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
_BIAS = re.compile(r"(^|_)bias(es)?(_|$)")
_NORM = re.compile(r"(^|_)norms?(_|$)")


class RoledParam(NamedTuple):
    """A trainable parameter, its name without wrappers' prefixes, and its role."""

    name: str
    param: Parameter
    role: Role


def clean_name(name: str) -> str:
    """`name` as the plain model would have it, without the prefixes of compile, checkpointing and FSDP wrappers."""
    return _WRAPPERS.sub("", name)


def param_roles(module: nn.Module) -> list[RoledParam]:
    """The trainable parameters of `module` with their roles, each once, in the order of `named_parameters`.

    The roles, of which the first that fits counts; a tied parameter has the first that fits any of its places:

    - `exempt`: the parameter has a true attribute `_no_weight_decay`, or a module above it lists its name (seen from
      there) in a collection `_no_weight_decay`;
    - `norm`: held by a LayerNorm, RMSNorm, GroupNorm, BatchNorm, InstanceNorm or a class whose name ends in `Norm`, of
      any shape; or named so (`norm`, `attn_norm_weight`), as a raw parameter of a stacked block is;
    - `bias`: named so (`bias`, `in_proj_bias`, `bias_hh_l0`, `biases.0`), of any shape, such as (experts, out);
    - `vector`: fewer than two dimensions;
    - `embedding`: held by an `nn.Embedding`, `nn.EmbeddingBag` or a class named `...Embedding(s)`;
    - `matrix`: everything else: linear layers, convolutions, stacked experts.

    Raises:
        UsageError: nothing is trainable; a parameter has no shape yet (lazy), or was flattened by FSDP1; a name in a
            `_no_weight_decay` is that of no parameter.
    """
    exempt = {id(param) for param in _exempted(module)}
    found: dict[int, RoledParam] = {}
    for path, owner in module.named_modules():
        for name, param in owner.named_parameters(prefix=path, recurse=False):
            name = clean_name(name)
            _refuse_unreadable(name, param)
            if not param.requires_grad:
                continue
            role = "exempt" if id(param) in exempt else _role(owner, name, param)
            known = found.setdefault(id(param), RoledParam(name, param, role))
            if _ORDER.index(role) < _ORDER.index(known.role):
                found[id(param)] = known._replace(role=role)
    if not found:
        raise UsageError(f"{type(module).__name__} has no trainable parameter: leave requires_grad on for some")
    return list(found.values())


def _role(owner: nn.Module, name: str, param: Parameter) -> Role:
    classes = [cls.__name__ for cls in type(owner).__mro__]
    # a ParameterList names its members 0, 1, ...: the list's own name tells what they are
    local = next((part for part in reversed(name.split(".")) if not part.isdigit()), name)
    # torch's BatchNorm2d and its like derive from classes named so
    if any(cls.endswith("Norm") for cls in classes) or _NORM.search(local):
        return "norm"
    if _BIAS.search(local):
        return "bias"
    if param.ndim < 2:
        return "vector"
    if isinstance(owner, nn.EmbeddingBag) or any(cls.endswith(("Embedding", "Embeddings")) for cls in classes):
        return "embedding"
    return "matrix"


def _exempted(module: nn.Module) -> Iterator[Parameter]:
    for path, owner in module.named_modules():
        listed = getattr(owner, "_no_weight_decay", ())
        if isinstance(listed, str) or not isinstance(listed, Collection):
            raise UsageError(f"_no_weight_decay of module '{path}' is {listed!r}: give a collection of parameter names")
        for name in listed:
            try:
                yield owner.get_parameter(name)
            except AttributeError:
                raise UsageError(
                    f"_no_weight_decay of module '{path}' names '{name}', which is no parameter of it: correct the name"
                ) from None
    yield from (param for param in module.parameters() if getattr(param, "_no_weight_decay", False))


def _refuse_unreadable(name: str, param: Parameter) -> None:
    # torch's mark on FSDP1's parameters; its shards are flat, so neither role nor dimension can be seen
    if getattr(param, "_fsdp_flattened", False):
        raise UsageError(
            f"parameter '{name}' was flattened by FSDP1, which hides what decays: "
            "shard with FSDP2 (FSDP2Strategy) instead"
        )
    if is_lazy(param):
        raise UsageError(f"parameter '{name}' has no shape yet: run one batch through the lazy module first")
