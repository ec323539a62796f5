"""The role of each parameter of a model (matrix, bias, norm, embedding, ...) and the layout of its matrices."""

import re
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, get_args

from torch import nn
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.find_modules import clean_name, parameters_by_name, whole_of
from lightning_tricks.optim.matrix_layout import MatrixLayout, is_product, layout_of

# `lm_head`, `heads.head` (torchvision), `head.fc` (timm), `embed_out` (GPT-NeoX), `score` (a classifier on a decoder),
# `text_projection` (CLIP)
_HEAD = re.compile(
    r"((lm|mlm|cls|seg|out|output|pred\w*|v|value|reward)_)?heads?|unembed\w*|embed_out|score|output_projection|logits"
    r"|(text|visual)_projection"
)
_METHODS = ("get_output_embeddings", "get_classifier")  # of transformers and timm
_PARAMETRIZED = re.compile(r"(^|\.)parametrizations\.([^.]+)\.original\d*$")
_NORM_SCALE = re.compile(r"(^|\.)(original0|\w*weight\w*_g)$")  # of a weight norm: only scales the rows of a weight


class ParamSite(NamedTuple):
    """A parameter in the layer that computes with it.

    Args:
        name: without wrappers' prefixes.
        param: the parameter.
        path: of the layer; of a parametrization, the layer whose weight it makes.
        layer: that layer, without wrappers.
        local: the name of the weight there.
    """

    name: str
    param: Parameter
    path: str
    layer: nn.Module
    local: str

    @property
    def parts(self) -> list[str]:
        """The names on the way from the model to the weight."""
        return [*filter(None, self.path.split(".")), self.local]

    @property
    def is_matrix(self) -> bool:
        """Whether it has rows and columns, and is more than the scale of a weight norm."""
        return self.param.ndim >= 2 and not _NORM_SCALE.search(self.name)


def _layers(module: nn.Module) -> dict[str, nn.Module]:
    """All modules by name without wrappers' prefixes; of a wrapper and the module in it, the inner one."""
    found = module.named_modules(remove_duplicate=False)
    return {clean_name(path + ".").rstrip("."): layer for path, layer in found}


def _sites(module: nn.Module) -> list[ParamSite]:
    """Every parameter in every layer that holds it: a tied one comes several times. A computed weight is not read."""
    layers, found = _layers(module), []
    for raw, param in module.named_parameters(remove_duplicate=False):
        _refuse_unreadable(name := clean_name(raw), param)
        path, _, local = _PARAMETRIZED.sub(r"\1\2", name).rpartition(".")
        found.append(ParamSite(name, param, path, layers[path], local))
    return found


def head_weights(module: nn.Module) -> list[Parameter]:
    """The matrices that turn hidden states into the outputs of a model, tied ones included.

    - What a method `get_output_embeddings()` (transformers) or `get_classifier()` (timm) of a module returns; outside
      of this module, matrices with such a name: `lm_head`, `head`, `heads.head`, `head.fc`, `unembed`, `score`,
      `logits`, `v_head`, but not inside a block that is repeated, whose heads are those of attention.
    - If there is none: the last matrix, if it is an `nn.Linear` in no repeated block: `fc` of a ResNet, the end of an
      `nn.Sequential`.
    """
    found, answered = list[Parameter](), list[str]()
    for path, child in _layers(module).items():
        if head := _returned(child):
            found += head
            answered.append(f"{path}." if path else "")
    matrices = list({id(site.param): site for site in _sites(module) if site.is_matrix}.values())
    for site in matrices:
        is_head = not _in_block(site.name) and any(map(_HEAD.fullmatch, site.parts[:-1]))
        if is_head and not site.name.startswith(tuple(answered)):
            found.append(site.param)
    last = matrices[-1] if len(matrices) > 1 else None
    if not found and last is not None and isinstance(last.layer, nn.Linear) and not _in_block(".".join(last.parts)):
        return [last.param]
    return found


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
# parameters of a norm that torch does not have
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


def param_roles(module: nn.Module, frozen: bool = False) -> list[RoledParam]:
    """The trainable parameters of `module` with their roles, each once, in the order of `named_parameters`.

    With `frozen`, those without a gradient too.

    What a parameter is follows from the class of the layer that computes with it, if it is one of torch's, and from the
    names of attributes. **The name of a class decides nothing**: FSDP2 renames classes, and wrappers hide them. A
    parametrization (weight norm, spectral norm) has the role of the layer whose weight it makes.

    The first role of this list that fits is taken; for a tied parameter, the first that fits at any of its sites:

    - `state`: belongs to a recurrence, by its name: `A_log`, `dt_bias`, `D` beside an `A_log` (Mamba), `time_decay`,
      `time_first`, `time_mix_...` (RWKV), of any shape;
    - `norm`: held by torch's LayerNorm, RMSNorm, GroupNorm, BatchNorm, InstanceNorm or their subclasses; or a raw
      parameter with such a name, or `weight`, `scale`, `bias` of a layer with such a name (`norm`, `attn_norm`), of any
      shape;
    - `bias`: has such a name (`bias`, `in_proj_bias`, `bias_hh_l0`, `biases.0`, `b1`) and any shape, such as (experts,
      out); or is the table of an embedding with such a name (T5's `relative_attention_bias`);
    - `vector`: fewer than two dimensions; a raw parameter with at most one dimension larger than 1; the scale of a
      weight norm;
    - `embedding`: held by an `nn.Embedding` or an `nn.EmbeddingBag`; or a raw parameter named as a token or a position
      (`cls_token`, `register_tokens`, `mask_token`, `pos_embed`, `rel_pos_h`), or `weight` of a layer with such a name;
    - `router`: lies in a module named `router`, `gating`, `wg`; or is a `gate` beside experts;
    - `head`: makes the outputs, see `head_weights`; tied to an embedding, it is an `embedding`;
    - `expert`: lies in a module named `experts`, or is a raw parameter of three dimensions, a stack of matrices;
    - `matrix`: everything else: linear layers, convolutions.

    A module can declare the outputs of each part of a fused projection in a dict `_matrices`:
    `{"qkv.weight": [512, 128, 128]}`, with names as seen from that module. `layout_of` has the other layouts.

    A parameter is `exempt` from weight decay if it has a true attribute `_no_weight_decay`, as in the mamba_ssm
    package; or if the method `no_weight_decay()` of a module above it returns its name as seen from there, the name of
    a module which holds it, or a pattern with wildcards, as in timm. It may return names that the model does not have.

    Of a pipeline stage: those of this rank, with their roles in the whole model.

    Raises:
        UsageError: nothing is trainable; a parameter has no shape yet (lazy), or was flattened by FSDP1; a
            `_matrices` names no parameter; a method `no_weight_decay()` returns no collection of names.

    Source: `no_weight_decay` in timm's models and its use in timm/optim/_param_groups.py,
        https://github.com/huggingface/pytorch-image-models; `_no_weight_decay` in
        https://github.com/state-spaces/mamba/blob/main/mamba_ssm/modules/mamba2.py. transformers 5 has no such mark:
        its Trainer leaves out norms and biases only, so that `A_log` decays there.
    """
    if (whole := whole_of(module)) is not module:
        here = parameters_by_name(module)
        return [each._replace(param=here[each.name]) for each in param_roles(whole, frozen) if each.name in here]
    layers, sites = _layers(module), _sites(module)
    exempt, heads = {id(param) for param in _exempted(layers, sites)}, {id(param) for param in head_weights(module)}
    declared, experts = _declared_parts(layers, sites), _beside_experts(layers, sites)
    found: dict[int, RoledParam] = {}
    for site in sites:
        param = site.param
        if not (frozen or param.requires_grad):
            continue
        role = _role(site)
        if role == "matrix":
            role = "head" if id(param) in heads else _role_of_matrix(site, experts)
        known = found.get(id(param))
        if known is None or _ORDER.index(role) < _ORDER.index(known.role):
            layout = _layout(site, role, declared.get(id(param))) if role in MATRICES else None
            name = site.name if known is None else known.name
            found[id(param)] = RoledParam(name, param, role, id(param) in exempt, layout)
    if not found:
        raise UsageError(f"{type(module).__name__} has no trainable parameter: leave requires_grad on for some")
    return list(found.values())


def _role(site: ParamSite) -> Role:
    """The role of a parameter as far as its own layer tells it; `matrix` for all matrices."""
    layer, param = site.layer, site.param
    # a ParameterList names its members 0, 1, ...: the list's own name tells their role
    parts = [part for part in site.parts if not part.isdigit()] or site.parts
    local, above = parts[-1], parts[-2] if len(parts) > 1 else ""
    if _STATE.fullmatch(local) or (_SKIP.fullmatch(local) and any(map(_STATE.fullmatch, layer._parameters))):
        return "state"
    if is_product(layer):
        return "bias" if _BIAS.search(local) else "matrix" if site.is_matrix else "vector"
    if isinstance(layer, _NORMS) or _NORM.search(local) or (local in _SCALES and _NORM.search(above)):
        return "norm"
    embeds = isinstance(layer, nn.Embedding | nn.EmbeddingBag)
    # the parameter of an nn.Embedding is named `weight`: the embedding's own name tells its role
    if _BIAS.search(local) or (embeds and _BIAS.search(above)):
        return "bias"
    if param.ndim < 2:
        return "vector"
    if embeds or _EMBEDDING.search(local) or (local == "weight" and _EMBEDDING.search(above)):
        return "embedding"
    return "matrix" if site.is_matrix and sum(size > 1 for size in param.shape) > 1 else "vector"


def _role_of_matrix(site: ParamSite, beside_experts: set[str]) -> Role:
    """`router`, `expert` or `matrix`; `beside_experts` are the names of the modules that have experts."""
    path = site.parts[:-1]
    if any(map(_EXPERTS.fullmatch, path)):
        return "expert"
    is_gate = bool(path) and _GATE.fullmatch(path[-1]) and ".".join(path[:-1]) in beside_experts
    if is_gate or any(map(_ROUTER.fullmatch, path)):
        return "router"
    return "expert" if site.param.ndim == 3 and not is_product(site.layer) else "matrix"


def _beside_experts(layers: dict[str, nn.Module], sites: list[ParamSite]) -> set[str]:
    """The names of the modules that have a submodule named `experts`, or a stack of matrices of their own."""
    stacks = (site for site in sites if site.param.ndim == 3 and not is_product(site.layer))
    named = {path.rpartition(".")[0] for path in layers if path and _EXPERTS.fullmatch(path.rpartition(".")[2])}
    return named | {site.path for site in stacks if _role(site) == "matrix"}


def _layout(site: ParamSite, role: Role, declared: list[int] | None) -> MatrixLayout:
    """The layout of a parameter, with the parts that its module declares."""
    name = (site.parts[-2:-1] or [""])[0] if site.local == "weight" else site.local
    layout = layout_of(site.layer, name, role, site.param.shape)
    if declared is None:
        return layout
    if sum(declared) != layout.outputs:
        raise UsageError(
            f"_matrices: {site.name} has {layout.outputs} rows, and not {sum(declared)}: correct the numbers"
        )
    return layout._replace(parts=tuple(declared), interleaved=False)


def _declared_parts(layers: dict[str, nn.Module], sites: list[ParamSite]) -> dict[int, list[int]]:
    """The outputs of each matrix in the weights that modules name in a dict `_matrices`, by the parameter's id."""
    by_name = {name: site.param for site in sites for name in (".".join(site.parts), site.name)}
    found = {}
    for path, owner in layers.items():
        for name, sizes in getattr(owner, "_matrices", {}).items():
            param = by_name.get(f"{path}.{name}" if path else name)
            if param is None:
                raise UsageError(
                    f"_matrices of module '{path}' names '{name}', which is no parameter of it: correct the name"
                )
            found[id(param)] = list(sizes)
    return found


def _exempted(layers: dict[str, nn.Module], sites: list[ParamSite]) -> Iterator[Parameter]:
    for path, owner in layers.items():
        if callable(method := getattr(owner, "no_weight_decay", None)):
            patterns, prefix = _names(method(), path), f"{path}." if path else ""
            # timm's models of one family share a list; each has only some of its names, and some names are modules
            for site in sites:
                name = site.name.removeprefix(prefix)
                if site.name.startswith(prefix) and any(
                    fnmatchcase(name, pattern) or name.startswith(f"{pattern}.") for pattern in patterns
                ):
                    yield site.param
    yield from (site.param for site in sites if getattr(site.param, "_no_weight_decay", False))


def _names(listed: Any, path: str) -> Collection[str]:
    if isinstance(listed, str) or not isinstance(listed, Collection) or not all(isinstance(n, str) for n in listed):
        shown = " ".join(repr(listed).split())[:80]
        raise UsageError(f"no_weight_decay() of module '{path}' is {shown}: give a collection of parameter names")
    return listed


def _refuse_unreadable(name: str, param: Parameter) -> None:
    # torch's mark on FSDP1's parameters: flat shards, which show neither role nor dimensions
    if getattr(param, "_fsdp_flattened", False):
        raise UsageError(
            f"parameter '{name}' was flattened by FSDP1, which hides what decays: "
            "shard with FSDP2 (FSDP2Strategy) instead"
        )
    if is_lazy(param):
        raise UsageError(f"parameter '{name}' has no shape yet: run one batch through the lazy module first")
