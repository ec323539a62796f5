"""The role of each parameter of a model (matrix, bias, norm, embedding, ...), found from module types and names."""

import re
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, get_args

from torch import nn
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from lightning_tricks._errors import UsageError
from lightning_tricks._find_modules import clean_name, named_submodules
from lightning_tricks.optim.output_heads import head_weights

Role = Literal["exempt", "state", "norm", "bias", "vector", "router", "embedding", "head", "expert", "matrix"]

MATRICES: tuple[Role, ...] = ("matrix", "expert", "router", "head")
"""Roles of weights that multiply hidden states: linear layers, convolutions, experts, output heads."""

_ORDER: tuple[Role, ...] = get_args(Role)
_BIAS = re.compile(r"(^|_)bias(es)?(_|$)")
_NORM = re.compile(r"(^|_)norms?(_|$)")
# Mamba's (`A_log`, `dt_bias`; Vision Mamba's `A_b_log` runs backwards) and RWKV's (`time_decay`, `time_mix_key`)
_STATE = re.compile(r"A(_\w+)?_logs?|dt_bias|time_(decay|first|mix_\w+)")
_SKIP = re.compile(r"D(_\w+)?|Ds")
_ROUTER = re.compile(r"\w*router|\w*gating|wg")
_GATE = re.compile(r"(\w+_)?gate")  # a router only where experts are beside it: a gated MLP has one too
_EXPERTS = re.compile(r"(\w+_)?experts?|expert_\w+")
# raw parameters that stand for a token or a position: `cls_token`, `reg_token`, `pos_embed`, `position_embeddings`
_EMBEDDING = re.compile(r"(^|_)(tokens?|embed|embeds|embeddings?|emb)$|(^|_)pos(ition(al)?)?_(emb|enc)")


class RoledParam(NamedTuple):
    """A trainable parameter, its name without wrappers' prefixes, and its role."""

    name: str
    param: Parameter
    role: Role


def param_roles(module: nn.Module) -> list[RoledParam]:
    """The trainable parameters of `module` with their roles, each once, in the order of `named_parameters`.

    The first role of this list that fits is taken; for a tied parameter, the first that fits in any of its places:

    - `exempt`: the parameter has a true attribute `_no_weight_decay`, as in the mamba_ssm package; a module above it
      lists its name (seen from there) in a collection `_no_weight_decay`; or the method `no_weight_decay()` of a module
      above it returns its name, the name of a module which holds it, or a pattern with wildcards, as in timm. Such a
      method may return names that the model does not have;
    - `state`: belongs to a recurrence, by its name: `A_log`, `dt_bias`, `D` beside an `A_log` (Mamba), `time_decay`,
      `time_first`, `time_mix_...` (RWKV), of any shape;
    - `norm`: held by a LayerNorm, RMSNorm, GroupNorm, BatchNorm, InstanceNorm or a class whose name ends in `Norm`, of
      any shape; or a raw parameter with such a name (`norm`, `attn_norm_weight`), as in stacked blocks;
    - `bias`: has such a name (`bias`, `in_proj_bias`, `bias_hh_l0`, `biases.0`) and any shape, such as (experts, out);
      or is the table of an embedding with such a name (T5's `relative_attention_bias`);
    - `vector`: fewer than two dimensions;
    - `embedding`: held by an `nn.Embedding`, `nn.EmbeddingBag` or a class named `...Embedding(s)`; or a raw parameter
      named as a token or a position (`cls_token`, `register_tokens`, `mask_token`, `pos_embed`, `position_embeddings`);
    - `router`: chooses the experts of a token: held by a module named `router`, `gating`, `wg`, by a class named
      `...Router` or `...Gate`, or by a `gate` beside `experts`;
    - `head`: makes the outputs, see `head_weights`; tied to an embedding, it is an `embedding`;
    - `expert`: lies in a module named `experts`, or is a raw parameter of three dimensions, (experts, in, out);
    - `matrix`: everything else: linear layers, convolutions.

    Raises:
        UsageError: nothing is trainable; a parameter has no shape yet (lazy), or was flattened by FSDP1; a
            `_no_weight_decay` names no parameter; a method `no_weight_decay()` returns no collection of names.

    Source: `no_weight_decay` in timm's models and its use in timm/optim/_param_groups.py,
        https://github.com/huggingface/pytorch-image-models; `_no_weight_decay` in
        https://github.com/state-spaces/mamba/blob/main/mamba_ssm/modules/mamba2.py. transformers 5 has no such mark:
        its Trainer leaves out norms and biases only, so that `A_log` decays there.
    """
    exempt = {id(param) for param in _exempted(module)}
    heads = {id(param) for param in head_weights(module)}
    paths = [name.rpartition(".") for name in named_submodules(module)]
    mixtures = {above for above, _, local in paths if _EXPERTS.fullmatch(local)}
    found: dict[int, RoledParam] = {}
    for path, owner in module.named_modules():
        for name, param in owner.named_parameters(prefix=path, recurse=False):
            name = clean_name(name)
            _refuse_unreadable(name, param)
            if not param.requires_grad:
                continue
            role = "exempt" if id(param) in exempt else _role(owner, name, param)
            if role == "matrix":
                role = "head" if id(param) in heads else _role_of_matrix(owner, name, param, mixtures)
            known = found.setdefault(id(param), RoledParam(name, param, role))
            if _ORDER.index(role) < _ORDER.index(known.role):
                found[id(param)] = known._replace(role=role)
    if not found:
        raise UsageError(f"{type(module).__name__} has no trainable parameter: leave requires_grad on for some")
    return list(found.values())


def _role(owner: nn.Module, name: str, param: Parameter) -> Role:
    classes = [cls.__name__ for cls in type(owner).__mro__]
    # a ParameterList names its members 0, 1, ...: the list's own name tells their role
    parts = [part for part in name.split(".") if not part.isdigit()] or [name]
    local = parts[-1]
    if _STATE.fullmatch(local) or (_SKIP.fullmatch(local) and any(map(_STATE.fullmatch, owner._parameters))):
        return "state"
    # BatchNorm2d and similar classes derive from one whose name ends in Norm
    if any(cls.endswith("Norm") for cls in classes) or _NORM.search(local):
        return "norm"
    embeds = isinstance(owner, nn.EmbeddingBag) or any(cls.endswith(("Embedding", "Embeddings")) for cls in classes)
    # the parameter of an nn.Embedding is named `weight`: the embedding's own name tells its role
    if _BIAS.search(local) or (embeds and _BIAS.search(".".join(parts[-2:-1]))):
        return "bias"
    if param.ndim < 2:
        return "vector"
    return "embedding" if embeds or _EMBEDDING.search(local) else "matrix"


def _role_of_matrix(owner: nn.Module, name: str, param: Parameter, mixtures: Collection[str]) -> Role:
    """`router`, `expert` or `matrix`; `mixtures` are the names of the modules that have experts."""
    path = name.split(".")[:-1]
    local, above = (path or [""])[-1], ".".join(path[:-1])
    chooses = _ROUTER.fullmatch(local) or type(owner).__name__.endswith(("Router", "Gate", "Gating"))
    if chooses or (_GATE.fullmatch(local) and above in mixtures):
        return "router"
    is_convolution = any(cls.__name__ == "_ConvNd" for cls in type(owner).__mro__)
    return "expert" if any(map(_EXPERTS.fullmatch, path)) or (param.ndim == 3 and not is_convolution) else "matrix"


def _exempted(module: nn.Module) -> Iterator[Parameter]:
    for path, owner in module.named_modules():
        for name in _names(getattr(owner, "_no_weight_decay", ()), f"_no_weight_decay of module '{path}'"):
            try:
                yield owner.get_parameter(name)
            except AttributeError:
                raise UsageError(
                    f"_no_weight_decay of module '{path}' names '{name}', which is no parameter of it: correct the name"
                ) from None
        if callable(method := getattr(owner, "no_weight_decay", None)):
            yield from _matching(owner, _names(method(), f"no_weight_decay() of module '{path}'"))
    yield from (param for param in module.parameters() if getattr(param, "_no_weight_decay", False))


def _names(listed: Any, where: str) -> Collection[str]:
    if isinstance(listed, str) or not isinstance(listed, Collection) or not all(isinstance(n, str) for n in listed):
        shown = " ".join(repr(listed).split())[:80]
        raise UsageError(f"{where} is {shown}: give a collection of parameter names")
    return listed


def _matching(owner: nn.Module, patterns: Collection[str]) -> Iterator[Parameter]:
    # timm's models of one family share a list; each has only some of its names, and some names are modules
    for name, param in owner.named_parameters():
        name = clean_name(name)
        if any(fnmatchcase(name, pattern) or name.startswith(f"{pattern}.") for pattern in patterns):
            yield param


def _refuse_unreadable(name: str, param: Parameter) -> None:
    # torch's mark on FSDP1's parameters: flat shards, which show neither role nor dimensions
    if getattr(param, "_fsdp_flattened", False):
        raise UsageError(
            f"parameter '{name}' was flattened by FSDP1, which hides what decays: "
            "shard with FSDP2 (FSDP2Strategy) instead"
        )
    if is_lazy(param):
        raise UsageError(f"parameter '{name}' has no shape yet: run one batch through the lazy module first")
