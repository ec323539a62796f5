"""muP: learning rate, decay and initial weights that are tuned at one width hold at every other width."""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import nn

from lightning_tricks._errors import UsageError
from lightning_tricks.optim.composed_optimizer import ComposedOptimizer
from lightning_tricks.optim.matrix_layout import MatrixLayout
from lightning_tricks.optim.muon import SCALES
from lightning_tricks.optim.param_places import Model
from lightning_tricks.optim.param_roles import MATRICES, Role, RoledParam, head_weights, param_roles

Kind = Literal["input", "hidden", "head"]
Shape = tuple[int, ...]

# Optimizers whose update does not depend on the size of the gradient: they follow the rule of Adam.
_ADAM = {
    "Adam", "AdamW", "NAdam", "RAdam", "Lion", "AdamW8bit", "AdamW4bit", "AdamWFp8", "AdamWBF16State",
    "AdamWScheduleFree", "RAdamScheduleFree",
}  # fmt: skip
_SGD = {"SGD", "SGDScheduleFree"}
_SCALED = "_mup_scaled"  # attribute of a module whose initial weights `scale_initial_weights` has scaled

Config = TypeVar("Config")


class WidthRatio(NamedTuple):
    """The size of a parameter in this model over its size in the base model.

    Args:
        kind: `hidden`: both sides of the matrix grow; `head`: only its input grows; `input`: its input does not grow,
            or it has none, such as embeddings, norms and biases.
        fan_in: number of inputs in this model over that in the base model.
        fan_out: the same ratio for the outputs.
        shape: (outputs, inputs) of a hidden matrix, else (1, 1).
        base_shape: the same in the base model.
        multiplied: whether the module multiplies its logits by base_width / width.
    """

    kind: Kind
    fan_in: float
    fan_out: float
    shape: tuple[float, float] = (1.0, 1.0)
    base_shape: tuple[float, float] = (1.0, 1.0)
    multiplied: bool = False

    @property
    def is_base(self) -> bool:
        """Whether it is as large as in the base model."""
        return self.fan_in == self.fan_out == 1.0

    @classmethod
    def of(cls, role: Role, layout: MatrixLayout | None, shape: Shape, base: Shape, multiplied: bool) -> "WidthRatio":
        """The ratios of a parameter with a known shape in the base model."""
        if layout is None or role not in MATRICES:  # the width is the last side of an embedding
            return cls("input", 1.0, shape[-1] / base[-1] if shape else 1.0)
        small = layout._replace(shape=base)
        fan_in, fan_out = layout.inputs / small.inputs, layout.outputs / small.outputs
        if role == "head":
            return cls("head", fan_in, 1.0, multiplied=multiplied)
        return cls("hidden", fan_in, fan_out, (layout.outputs, layout.inputs), (small.outputs, small.inputs))

    @classmethod
    def by_ratio(cls, role: Role, layout: MatrixLayout | None, fan_in: float, fan_out: float) -> "WidthRatio":
        """The ratios of a parameter of a model whose matrices have all grown by one ratio."""
        if layout is not None and layout.channels == 1:
            fan_in = 1.0  # each filter of a depthwise convolution has one channel at every width
        if role == "head":
            return cls("head", fan_in, 1.0)
        if layout is None or role not in MATRICES or fan_in == 1.0:
            return cls("input", 1.0, fan_out)
        fan_out = 1.0 if role == "router" else fan_out  # the number of experts does not grow
        rows, columns = layout.outputs, layout.inputs
        return cls("hidden", fan_in, fan_out, (rows, columns), (rows / fan_out, columns / fan_in))


def lr_factor(ratio: WidthRatio, group: dict[str, Any], optimizer: torch.optim.Optimizer) -> float:
    """The factor on the learning rate of a parameter; its weight decay is divided by the same factor.

    | optimizer | hidden | head | head without multiplier | embedding, norm, bias |
    |---|---|---|---|---|
    | Adam-like | 1 / fan_in | 1 | 1 / fan_in | 1 |
    | SGD | fan_out / fan_in | fan_in | 1 / fan_in | fan_out |
    | Muon | see below | - | - | - |

    fan_in and fan_out are those of `WidthRatio`. In muP, the spectral norm of Muon's update must grow in proportion to
    sqrt(fan_out / fan_in). With `match_rms_adamw` it grows in proportion to sqrt(max(rows, columns)), so that the
    factor is 1 / sqrt(r) where all sides grow by r; with `original` it does not grow then, and the factor is 1.

    Args:
        ratio: of the parameter.
        group: the parameter group that holds it.
        optimizer: the optimizer that holds the group.

    Raises:
        UsageError: the optimizer has no rule; MuonAdamW with `head_dim`.

    Source: `MuAdam` and `MuSGD` in mup/optim.py of https://github.com/microsoft/mup; in a head without multiplier, the
        multiplier 1 / fan_in becomes a factor on Adam's learning rate, and its square one on SGD's; Muon:
        https://github.com/NVIDIA/Megatron-LM/pull/3715.
    """
    rule = rule_of(_owner(optimizer, group))
    if rule == "adam":
        return 1.0 if ratio.kind == "head" and ratio.multiplied else 1.0 / ratio.fan_in
    if rule == "sgd":
        if ratio.kind == "head":
            return ratio.fan_in if ratio.multiplied else 1.0 / ratio.fan_in
        return ratio.fan_out / ratio.fan_in
    if getattr(optimizer, "_head_dim", None) is not None:
        raise UsageError("MuP has no rule for MuonAdamW.head_dim: leave it out, or leave out mup")
    scale = SCALES[group["adjust_lr_fn"] or "original"]
    own, base = (float(scale(*sides)) for sides in (ratio.shape, ratio.base_shape))  # type: ignore[arg-type]
    return math.sqrt(ratio.fan_out / ratio.fan_in) * base / own


def rule_of(optimizer: torch.optim.Optimizer) -> Literal["adam", "sgd", "muon"]:
    """The row of the table that an optimizer has.

    Raises:
        UsageError: the optimizer has none.
    """
    name = type(optimizer).__name__
    if name in _ADAM:
        return "adam"
    if name in _SGD:
        return "sgd"
    if name == "Muon":
        return "muon"
    raise UsageError(
        f"MuP has no rule for {name}: take AdamW, MuonAdamW, SGD or another of {', '.join(sorted(_ADAM - {'AdamW'}))}"
    )


def _owner(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> torch.optim.Optimizer:
    """The optimizer that steps a group: in a ComposedOptimizer, the one that the group names."""
    return optimizer.optimizers[group["optimizer"]] if isinstance(optimizer, ComposedOptimizer) else optimizer


def split_groups(groups: list[dict[str, Any]], factors: dict[str, float]) -> list[dict[str, Any]]:
    """Split groups by the factors of their parameters, which multiply the learning rate and divide the decay.

    Args:
        groups: from `decay_groups`; their lists have one entry a parameter.
        factors: by name of the parameter; 1 for names that are missing. A group without factors stays as it is.
    """
    parts: dict[tuple[int, float], dict[str, Any]] = {}
    for number, group in enumerate(groups):
        lists = [key for key, value in group.items() if isinstance(value, list)]
        for index, name in enumerate(group["param_names"]):
            factor = factors.get(name, 1.0)
            if (number, factor) not in parts:
                parts[number, factor] = _part(group, lists, factor)
            for key in lists:
                parts[number, factor][key].append(group[key][index])
    return list(parts.values())


def _part(group: dict[str, Any], lists: list[str], factor: float) -> dict[str, Any]:
    part = {**group, **{key: [] for key in lists}}
    if factor != 1.0:
        part["name"] = f"{group['name']}:mup*{factor:.4g}"
        part["lr_scale"], part["weight_decay"] = group["lr_scale"] * factor, group["weight_decay"] / factor
    return part


@dataclass(frozen=True)
class MuP:
    """The maximal update parametrization: a learning rate found on a narrow model is the best of a wide one as well.

    All settings of a recipe are those of a model of width `base_width`; at that width nothing changes, to the bit. With
    r = width / base_width, Adam-like optimizers give hidden matrices lr / r and weight decay * r (their product, by
    which weights shrink, stays the same), and hidden matrices start with 1 / sqrt(r) times the base model's standard
    deviation. Logits are multiplied by 1 / r, attention logits by sqrt(base_head_dim) / head_dim in place of
    1 / sqrt(head_dim). Nothing changes for embeddings, norms and biases. Each matrix has its own r: its fan-in over
    its fan-in in the base model. `lr_factor` has the rules of SGD and Muon.

    `LanguageModel` does all of it. For any other module, the factors follow from the roles of its parameters:
    `OptimizerMixin` or `build_optimizer` sets the learning rates, and the module calls `scale_initial_weights` once.
    In place of the multiplier of the logits, the head then has lr / r and weights 1 / r times as large. Attention heads
    keep their width.

    Args:
        base_width: d_model of the model for which the settings were tuned; 256 is common. Smaller or larger than the
            width of this model.
        base_head_dim: width of an attention head in that model. Default: as in this one, so that a wider model has
            more heads.
        fixed_inputs: regular expression for matrices of a module that is not ours whose input does not grow with the
            width, such as `patch_embed`. Default: all matrices grow.

    Raises:
        UsageError: an option out of its range; a width that is not known; heads that do not fit into the base width.

    Source: Yang et al. 2022 (Tensor Programs V), https://arxiv.org/abs/2203.03466, by its code: optim.py, layer.py and
        README.md of https://github.com/microsoft/mup; the table in the README.md of
        https://github.com/EleutherAI/nanoGPT-mup; independent weight decay: `decoupled_wd` in that optim.py, Wortsman
        et al. 2023, https://arxiv.org/abs/2309.14322, Kosson et al. 2025, https://arxiv.org/abs/2510.19093 (abstracts).
    """

    base_width: int
    base_head_dim: int | None = None
    fixed_inputs: str = ""

    def __post_init__(self) -> None:
        for option, value in (("base_width", self.base_width), ("base_head_dim", self.base_head_dim)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UsageError(f"MuP.{option}={value!r}: give a whole number of at least 1")
        try:
            re.compile(self.fixed_inputs)
        except re.error as error:
            raise UsageError(f"MuP.fixed_inputs={self.fixed_inputs!r} is no regular expression: {error}") from None

    def base_config(self, config: Config) -> Config:
        """The config of a decoder's base model: the same model, `base_width` wide.

        Raises:
            UsageError: `base_head_dim` differs at the base width itself, or does not divide it.
        """
        shape: Any = config
        head_dim = self.base_head_dim or shape.head_dim
        if shape.d_model == self.base_width and head_dim != shape.head_dim:
            raise UsageError(
                f"MuP.base_head_dim={head_dim}: the decoder has the base width {self.base_width} and heads "
                f"{shape.head_dim} wide: change n_heads, or leave base_head_dim out"
            )
        if self.base_width % head_dim:
            raise UsageError(
                f"MuP.base_width={self.base_width} holds no whole number of heads {head_dim} wide: change base_width, "
                "or give base_head_dim, the width of a head in the base model"
            )
        return at_width(config, self.base_width, head_dim)

    def width_ratios(self, module: nn.Module) -> dict[str, WidthRatio]:
        """The size of each trainable parameter over its size in the base model, by name.

        A module that knows its base model has a method `base_shapes()`, which returns the shapes there by name, and
        multiplies its logits by base_width / width itself. For any other module, the width is the number of inputs of
        its head, and all of its matrices grow with the width.

        Raises:
            UsageError: the shapes are of another module; the width is not known; the head is tied to an embedding.
        """
        params = param_roles(module)
        if callable(known := getattr(module, "base_shapes", None)):
            return _by_shapes(params, known())
        _refuse_computed(module)
        ratio = self._width(module) / self.base_width
        fixed = [param.name for param in params if self.fixed_inputs and re.search(self.fixed_inputs, param.name)]
        if self.fixed_inputs and not fixed:
            raise UsageError(f"MuP.fixed_inputs={self.fixed_inputs!r} matches no parameter of {type(module).__name__}")
        return {param.name: _by_role(param, ratio, param.name in fixed) for param in params}

    def _width(self, module: nn.Module) -> int:
        """The width of a module without `base_shapes`: the number of inputs of its output head."""
        name, params = type(module).__name__, param_roles(module)
        heads = [param for param in params if param.role == "head"]
        tied = {id(param.param) for param in params if param.role == "embedding"}
        if any(id(head) in tied for head in head_weights(Model(module))):
            raise UsageError(
                f"MuP: the head of {name} is tied to its embedding, which keeps its learning rate: untie them, or "
                "multiply the logits by base_width / width in the module and define its method base_shapes()"
            )
        widths = {head.layout.inputs for head in heads if head.layout is not None}
        if len(widths) != 1:
            found = f"has heads of the widths {sorted(widths)}" if widths else "shows no output head"
            raise UsageError(
                f"MuP: the width of {name} is not known, because it {found}: define its method base_shapes(), which "
                "returns the shape in the base model of each parameter, by name"
            )
        return widths.pop()

    def lr_factors(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
        """The factor on the learning rate of each parameter for which it is not 1, by name; see `lr_factor`.

        Args:
            module: of the parameters.
            optimizer: over groups of `decay_groups`; its class decides the rule for each parameter.

        Raises:
            UsageError: an optimizer without a rule; initial weights that were not scaled; an error of `width_ratios`.
        """
        ratios = self.width_ratios(module)
        if all(ratio.is_base for ratio in ratios.values()):
            return {}
        if not hasattr(module, "base_shapes") and not any(hasattr(part, _SCALED) for part in module.modules()):
            raise UsageError(
                f"MuP: the initial weights of {type(module).__name__} are not those of muP: call "
                "scale_initial_weights(model) of the MuP once, where the model is built"
            )
        factors = {
            name: lr_factor(ratios[name], group, optimizer)
            for group in optimizer.param_groups
            for name in group["param_names"]
        }
        return {name: factor for name, factor in factors.items() if factor != 1.0}

    @torch.no_grad()
    def scale_initial_weights(self, module: nn.Module, drawn: Literal["constant", "by_fan_in"] = "constant") -> None:
        """Change the freshly drawn weights of a module that is not ours to those of muP, in place and once.

        Args:
            module: with weights on any device but meta, before sharding or after it.
            drawn: how the module has drawn them. `constant`: with a standard deviation that does not depend on the
                width, such as transformers' 0.02; `by_fan_in`: in proportion to 1 / sqrt(fan-in), as torch's layers do.

        Raises:
            UsageError: it was called before; weights on the meta device; an error of `width_ratios`.
        """
        name = type(module).__name__
        if any(hasattr(part, _SCALED) for part in module.modules()):
            raise UsageError(f"MuP.scale_initial_weights: the weights of {name} are scaled already: call it once")
        if drawn not in ("constant", "by_fan_in"):
            raise UsageError(f"MuP.scale_initial_weights: drawn={drawn!r}: give constant or by_fan_in")
        if any(param.is_meta for param in module.parameters()):
            raise UsageError(f"MuP.scale_initial_weights: {name} is on the meta device: draw its weights first")
        ratios = self.width_ratios(module)
        for param_name, param, *_ in param_roles(module):
            ratio = ratios[param_name]
            if ratio.kind in ("hidden", "head"):
                factor = ratio.fan_in ** (-0.5 if ratio.kind == "hidden" else -1.0)
                param.mul_(factor * (ratio.fan_in**0.5 if drawn == "by_fan_in" else 1.0))
        setattr(module, _SCALED, True)


def at_width(config: Config, width: int, head_dim: int) -> Config:
    """A decoder's config at another width: heads `head_dim` wide, the same share of key heads, d_ff in proportion."""
    shape: Any = config
    if (width, head_dim) == (shape.d_model, shape.head_dim):
        return config
    n_heads = width // head_dim
    kv_heads = (
        None if shape.n_kv_heads is None else math.gcd(max(1, shape.n_kv_heads * n_heads // shape.n_heads), n_heads)
    )
    d_ff = None if shape.d_ff is None else max(1, round(shape.d_ff * width / shape.d_model))
    return dataclasses.replace(shape, d_model=width, n_heads=n_heads, n_kv_heads=kv_heads, d_ff=d_ff)


def _refuse_computed(module: nn.Module) -> None:
    """Refuse weights that a layer computes: the rules hold for the weight, not for the parameters behind it."""
    for place in Model(module).places:
        if place.param.ndim >= 2 and place.name != ".".join(place.parts):
            raise UsageError(
                f"MuP has no rule for '{place.name}', from which a parametrization computes the weight: fold it into "
                "the weight, or define base_shapes(), which returns the shape in the base model of each parameter"
            )


def _by_shapes(params: list[RoledParam], base: Mapping[str, Any]) -> dict[str, WidthRatio]:
    """The ratios of each parameter by its shape in the base model; the module multiplies its logits itself."""
    found = {}
    for name, param, role, _, layout in params:
        if name not in base or len(base[name]) != param.ndim:
            raise UsageError(f"MuP: base_shapes() has no shape of {param.ndim} dimensions for '{name}': add it")
        found[name] = WidthRatio.of(role, layout, tuple(param.shape), tuple(base[name]), multiplied=True)
    return found


def _by_role(param: RoledParam, ratio: float, fixed_input: bool) -> WidthRatio:
    """The ratios of a parameter where all matrices grow by one, but for inputs of a fixed width."""
    return WidthRatio.by_ratio(param.role, param.layout, 1.0 if fixed_input else ratio, ratio)
