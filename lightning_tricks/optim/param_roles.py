"""The role of each parameter of a model (matrix, bias, norm, embedding, ...) and the layout of its matrices."""

import re
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, get_args

from torch import nn
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from lightning_tricks._errors import UsageError
from lightning_tricks.optim.matrix_layout import MatrixLayout, declared_parts, is_product, layout_of
from lightning_tricks.optim.param_places import Model, Place, weight_of

# `lm_head`, `heads.head` (torchvision), `head.fc` (timm), `embed_out` (GPT-NeoX), `score` (a classifier on a decoder)
_HEAD = re.compile(
    r"((lm|mlm|cls|seg|out|output|pred\w*|v|value|reward)_)?heads?|unembed\w*|embed_out|score|output_projection|logits"
)
_METHODS = ("get_output_embeddings", "get_classifier")  # of transformers and timm


def head_weights(model: Model) -> list[Parameter]:
    """The matrices that turn hidden states into the outputs of a model, tied ones included.

    - What a method `get_output_embeddings()` (transformers) or `get_classifier()` (timm) of a module returns; outside
      of this module, matrices with such a name: `lm_head`, `head`, `heads.head`, `head.fc`, `unembed`, `score`,
      `logits`, `v_head`, but not inside a block that is repeated, whose heads are those of attention.
    - If there is none: the one linear layer in no repeated block that has the shape of the largest embedding, with more
      rows than columns.
    - If there is none: the last matrix, if it is an `nn.Linear` in no repeated block: `fc` of a ResNet, the end of an
      `nn.Sequential`. A model of several towers (CLIP) has as many, if they have the same number of outputs.
    - In addition, each linear layer beside one of these that takes the same inputs, and whose outputs no layer beside
      it takes: `value` beside `lm_head`.
    """
    found = [*_by_method_and_name(model)] or _by_vocabulary(model) or _last(model)
    known = {id(param) for param in found}
    return found + [param for param in _beside(model, known) if id(param) not in known]


def _by_method_and_name(model: Model) -> Iterator[Parameter]:
    answered: list[str] = []
    for path, child in model.layers.items():
        if head := _returned(child):
            yield from head
            answered.append(f"{path}." if path else "")
    for name, param in model.matrices:
        is_head = not _in_block(name) and any(map(_HEAD.fullmatch, name.split(".")[:-1]))
        if is_head and not name.startswith(tuple(answered)):
            yield param


def _returned(module: nn.Module) -> list[Parameter]:
    for method in _METHODS:
        if callable(found := getattr(module, method, None)):
            try:
                head = found()
            except (AttributeError, NotImplementedError, TypeError):  # no head, or a method of another kind
                continue
            if isinstance(head, nn.Module):
                return [param for param in head.parameters() if param.ndim >= 2]
    return []


def _linear(model: Model) -> dict[str, Parameter]:
    """The weights of all `nn.Linear` by the names of the layers; a computed weight is not read."""
    layers = ((path, layer) for path, layer in model.layers.items() if isinstance(layer, nn.Linear))
    found = ((path, weight_of(layer)) for path, layer in layers)
    return {path: weight for path, weight in found if weight is not None}


def _by_vocabulary(model: Model) -> list[Parameter]:
    tables = [layer for layer in model.layers.values() if isinstance(layer, nn.Embedding)]
    largest = max(((table.num_embeddings, table.embedding_dim) for table in tables), default=(0, 0))
    if largest[0] <= largest[1]:
        return []
    linear = ((path, weight) for path, weight in _linear(model).items() if not _in_block(f"{path}.weight"))
    found = [weight for _, weight in linear if tuple(weight.shape) == largest]
    return found if len(found) == 1 else []


def _last(model: Model) -> list[Parameter]:
    paths = {id(weight): path for path, weight in _linear(model).items()}
    names, matrices = zip(*model.matrices, strict=True) if model.matrices else ((), ())
    if len(matrices) < 2 or id(matrices[-1]) not in paths or _in_block(names[-1]):
        return []
    last = matrices[-1]
    above = paths[id(last)].rpartition(".")[0]
    towers = {name.removeprefix(f"{above}.").split(".")[0] for name in names if _in_block(name)}
    found = [last]
    for param in matrices[-2 : -1 - len(towers) : -1]:
        path = paths.get(id(param))
        if path is None or path.rpartition(".")[0] != above or param.shape[0] != last.shape[0]:
            break
        found.append(param)
    return found


def _beside(model: Model, heads: set[int]) -> Iterator[Parameter]:
    """The linear layers next to a head which take the same inputs, and whose outputs no layer beside it takes."""
    linear = _linear(model)
    for above, layer in model.layers.items():
        if isinstance(layer, nn.Sequential | nn.ModuleList) or _in_block(f"{above}.any.weight"):
            continue
        inside = model.inside(above).items()
        near = [linear.get(path) for path, part in inside if next(part.parameters(), None) is not None]
        taken = {weight.shape[1] for weight in near if weight is not None}
        for order in (near, near[::-1]):
            inputs = None  # of the head before this layer
            for weight in order:
                if weight is not None and id(weight) in heads:
                    inputs = weight.shape[1]
                elif weight is None or weight.shape[1] != inputs or weight.shape[0] in taken:
                    inputs = None
                else:
                    yield weight


def _in_block(name: str) -> bool:
    """Whether a parameter lies in a member of a list of modules, deeper than at its top: `blocks.0.mlp.up.weight`."""
    return any(part.isdigit() for part in name.split(".")[:-2])


Role = Literal["state", "norm", "bias", "vector", "router", "embedding", "head", "expert", "matrix"]

MATRICES: tuple[Role, ...] = ("matrix", "expert", "router", "head")
"""Roles of weights that multiply hidden states: linear layers, convolutions, experts, output heads."""

_ORDER: tuple[Role, ...] = get_args(Role)
_NORMS = (
    nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm,
)  # fmt: skip
# a norm that torch does not have: a layer with an epsilon, whose parameters have such names only
_EPSILONS = ("eps", "epsilon", "variance_epsilon")
_SCALES = {"weight", "scale", "gain", "gamma", "g", "bias", "beta", "b", "shift", "offset"}
_BIAS = re.compile(r"(^|_)bias(es)?(_|$)|^b\d*$")
_NORM = re.compile(r"(^|_)(layer|rms|batch|group)?norms?\d*(_|$)")
# Mamba's (`A_log`, `dt_bias`; Vision Mamba's `A_b_log` runs backwards) and RWKV's (`time_decay`, `time_mix_key`)
_STATE = re.compile(r"A(_\w+)?_logs?|dt_bias|time_(decay|first|mix_\w+)")
_SKIP = re.compile(r"D(_\w+)?|Ds")
_ROUTER = re.compile(r"\w*router|\w*gating|wg")
_GATE = re.compile(r"(\w+_)?gate")  # a router only where experts are beside it: a gated MLP has one too
_EXPERTS = re.compile(r"(\w+_)?experts?|expert_\w+")
# raw parameters that stand for a token or a position: `cls_token`, `reg_token`, `pos_embed`, `rel_pos_h`
_EMBEDDING = re.compile(r"(^|_)(tokens?|embed|embeds|embeddings?|emb)$|(^|_)pos(ition(al)?)?_(emb|enc)|(^|_)rel_pos")


class RoledParam(NamedTuple):
    """A trainable parameter, its name without wrappers' prefixes, and what an optimizer must know about it.

    Args:
        name: without wrappers' prefixes.
        param: the parameter.
        role: see `param_roles`.
        exempt: whether the model asks for no weight decay; it changes neither role nor layout.
        layout: of the matrices in it; None where the role is none of `MATRICES`.
    """

    name: str
    param: Parameter
    role: Role
    exempt: bool = False
    layout: MatrixLayout | None = None


def param_roles(module: nn.Module) -> list[RoledParam]:
    """The trainable parameters of `module` with their roles, each once, in the order of `named_parameters`.

    What a parameter is follows from the layer that computes with it: from an instance of torch's classes, from the
    attributes and shapes of other layers, and last from the names of attributes. **The name of a class decides
    nothing**: FSDP2 renames classes, and wrappers hide them. A parametrization (weight norm, spectral norm) has the
    role of the layer whose weight it makes.

    The first role of this list that fits is taken; for a tied parameter, the first that fits in any of its places:

    - `state`: belongs to a recurrence, by its name: `A_log`, `dt_bias`, `D` beside an `A_log` (Mamba), `time_decay`,
      `time_first`, `time_mix_...` (RWKV), of any shape;
    - `norm`: held by torch's LayerNorm, RMSNorm, GroupNorm, BatchNorm, InstanceNorm or their subclasses; by another
      layer with an epsilon (`eps`, `variance_epsilon`) which has only parameters named as `weight`, `scale`, `bias`;
      or a raw parameter with such a name, or in a layer with such a name (`norm`, `attn_norm`), of any shape;
    - `bias`: has such a name (`bias`, `in_proj_bias`, `bias_hh_l0`, `biases.0`, `b1`) and any shape, such as (experts,
      out); or is the table of an embedding with such a name (T5's `relative_attention_bias`);
    - `vector`: fewer than two dimensions; a raw parameter with at most one dimension larger than 1; the scale of a
      weight norm;
    - `embedding`: held by an `nn.Embedding`, an `nn.EmbeddingBag` or a layer with `num_embeddings`; or a raw parameter
      named as a token or a position (`cls_token`, `register_tokens`, `mask_token`, `pos_embed`, `rel_pos_h`), or
      `weight` of a layer with such a name;
    - `router`: chooses the experts of a token: lies in a module named `router`, `gating`, `wg`; a `gate` beside
      experts; or a matrix beside experts with one output for each of them;
    - `head`: makes the outputs, see `head_weights`; tied to an embedding, it is an `embedding`;
    - `expert`: lies in a module named `experts`, or is a raw parameter of three dimensions, a stack of matrices;
    - `matrix`: everything else: linear layers, convolutions.

    A parameter is `exempt` from weight decay if it has a true attribute `_no_weight_decay`, as in the mamba_ssm
    package; if a module above it lists its name (seen from there) in a collection `_no_weight_decay`; or if the method
    `no_weight_decay()` of a module above it returns its name, the name of a module which holds it, or a pattern with
    wildcards, as in timm. Such a method may return names that the model does not have.

    Raises:
        UsageError: nothing is trainable; a parameter has no shape yet (lazy), or was flattened by FSDP1; a
            `_no_weight_decay` or `_matrices` names no parameter; a method `no_weight_decay()` returns no collection of
            names.

    Source: `no_weight_decay` in timm's models and its use in timm/optim/_param_groups.py,
        https://github.com/huggingface/pytorch-image-models; `_no_weight_decay` in
        https://github.com/state-spaces/mamba/blob/main/mamba_ssm/modules/mamba2.py. transformers 5 has no such mark:
        its Trainer leaves out norms and biases only, so that `A_log` decays there.
    """
    model = Model(module)
    for place in model.places:
        _refuse_unreadable(place)
    exempt, heads = {id(param) for param in _exempted(model)}, {id(param) for param in head_weights(model)}
    declared = declared_parts(model)
    experts = _numbers_of_experts(model)
    found: dict[int, RoledParam] = {}
    for place in model.places:
        param = place.param
        if not param.requires_grad:
            continue
        role = _role(place)
        if role == "matrix":
            role = "head" if id(param) in heads else _role_of_matrix(place, experts)
        known = found.get(id(param))
        if known is None or _ORDER.index(role) < _ORDER.index(known.role):
            layout = layout_of(place, model, role, heads, declared.get(id(param))) if role in MATRICES else None
            name = place.name if known is None else known.name
            found[id(param)] = RoledParam(name, param, role, id(param) in exempt, layout)
    if not found:
        raise UsageError(f"{type(module).__name__} has no trainable parameter: leave requires_grad on for some")
    return list(found.values())


def _role(place: Place) -> Role:
    """The role of a parameter as far as its own layer tells it; `matrix` for all matrices."""
    layer, param = place.layer, place.param
    # a ParameterList names its members 0, 1, ...: the list's own name tells their role
    parts = [part for part in place.parts if not part.isdigit()] or place.parts
    local, above = parts[-1], parts[-2] if len(parts) > 1 else ""
    if _STATE.fullmatch(local) or (_SKIP.fullmatch(local) and any(map(_STATE.fullmatch, layer._parameters))):
        return "state"
    if is_product(layer):
        return "bias" if _BIAS.search(local) else "vector" if param.ndim < 2 or place.is_scale else "matrix"
    if (
        isinstance(layer, _NORMS)
        or _normalizes(layer)
        or _NORM.search(local)
        or (_is_leaf(place) and _NORM.search(above))
    ):
        return "norm"
    embeds = isinstance(layer, nn.Embedding | nn.EmbeddingBag) or hasattr(layer, "num_embeddings")
    # the parameter of an nn.Embedding is named `weight`: the embedding's own name tells its role
    if _BIAS.search(local) or (embeds and _BIAS.search(above)):
        return "bias"
    if param.ndim < 2:
        return "vector"
    if embeds or _EMBEDDING.search(local) or (local == "weight" and _EMBEDDING.search(above)):
        return "embedding"
    return "vector" if place.is_scale or sum(size > 1 for size in param.shape) < 2 else "matrix"


def _normalizes(layer: nn.Module) -> bool:
    """Whether a layer that is not torch's looks like a norm: an epsilon, and nothing to train but scale and shift."""
    has_epsilon = any(isinstance(getattr(layer, name, None), float) for name in _EPSILONS)
    return has_epsilon and _SCALES.issuperset(layer._parameters.keys()) and not any(True for _ in layer.children())


def _is_leaf(place: Place) -> bool:
    return place.local in _SCALES and not any(True for _ in place.layer.children())


def _role_of_matrix(place: Place, experts: dict[str, int]) -> Role:
    """`router`, `expert` or `matrix`; `experts` are the numbers of experts of the modules that have some, by name."""
    path, param = place.parts[:-1], place.param
    own, above = (path or [""])[-1], ".".join(path[:-1])
    if not any(map(_EXPERTS.fullmatch, path)):
        counts = {experts.get(above), experts.get(place.path)} - {None, 0}
        if any(map(_ROUTER.fullmatch, path)) or (_GATE.fullmatch(own) and above in experts):
            return "router"
        if param.ndim == 2 and param.shape[0] in counts:
            return "router"
    is_stack = param.ndim == 3 and not is_product(place.layer)
    return "expert" if is_stack or any(map(_EXPERTS.fullmatch, path)) else "matrix"


def _numbers_of_experts(model: Model) -> dict[str, int]:
    """The number of experts by the name of the module in which they lie; 0 where it is not known."""
    found: dict[str, int] = {}
    for path, layer in model.layers.items():
        above, _, local = path.rpartition(".")
        if path and _EXPERTS.fullmatch(local):
            count = len(layer) if isinstance(layer, nn.ModuleList) else 0
            found[above] = max(found.get(above, 0), count)
    for place in model.places:
        if place.param.ndim == 3 and not is_product(place.layer) and _role(place) == "matrix":
            path = place.path.rpartition(".")[0] if _EXPERTS.fullmatch((place.parts[-2:-1] or [""])[0]) else place.path
            found[path] = max(found.get(path, 0), place.param.shape[0])
    return found


def _exempted(model: Model) -> Iterator[Parameter]:
    for path, owner in model.layers.items():
        for name in _names(getattr(owner, "_no_weight_decay", ()), f"_no_weight_decay of module '{path}'"):
            if (param := model.parameter(path, name)) is None:
                raise UsageError(
                    f"_no_weight_decay of module '{path}' names '{name}', which is no parameter of it: correct the name"
                )
            yield param
        if callable(method := getattr(owner, "no_weight_decay", None)):
            yield from _matching(model, path, _names(method(), f"no_weight_decay() of module '{path}'"))
    yield from (place.param for place in model.places if getattr(place.param, "_no_weight_decay", False))


def _names(listed: Any, where: str) -> Collection[str]:
    if isinstance(listed, str) or not isinstance(listed, Collection) or not all(isinstance(n, str) for n in listed):
        shown = " ".join(repr(listed).split())[:80]
        raise UsageError(f"{where} is {shown}: give a collection of parameter names")
    return listed


def _matching(model: Model, path: str, patterns: Collection[str]) -> Iterator[Parameter]:
    # timm's models of one family share a list; each has only some of its names, and some names are modules
    for name, param in model.below(path):
        if any(fnmatchcase(name, pattern) or name.startswith(f"{pattern}.") for pattern in patterns):
            yield param


def _refuse_unreadable(place: Place) -> None:
    # torch's mark on FSDP1's parameters: flat shards, which show neither role nor dimensions
    if getattr(place.param, "_fsdp_flattened", False):
        raise UsageError(
            f"parameter '{place.name}' was flattened by FSDP1, which hides what decays: "
            "shard with FSDP2 (FSDP2Strategy) instead"
        )
    if is_lazy(place.param):
        raise UsageError(f"parameter '{place.name}' has no shape yet: run one batch through the lazy module first")
