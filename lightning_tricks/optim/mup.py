"""muP: learning rate, decay and initial weights that are tuned at one width hold at every other width."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import nn

from lightning_tricks._core.errors import UsageError, check_count
from lightning_tricks._core.protocols import KnowsBaseShapes, KnowsMuPRule
from lightning_tricks.optim.composed_optimizer import ComposedOptimizer
from lightning_tricks.optim.matrix_layout import MatrixLayout
from lightning_tricks.optim.muon import SCALES
from lightning_tricks.optim.param_roles import MATRICES, Role, param_roles

__all__ = ["MuP"]

Kind = Literal["input", "hidden", "head"]
Rule = Literal["adam", "sgd", "muon"]
Shape = tuple[int, ...]

# The rule of an optimizer by the name of its class; another one declares it by an attribute `mup_rule`. The update of
# those of Adam's kind does not depend on the size of the gradient.
_RULES: dict[str, Rule] = {
    **dict.fromkeys(("Adam", "NAdam", "RAdam", "Lion", "AdamWFp8", "AdamW8bit", "AdamW4bit"), "adam"),
    **dict.fromkeys(("AdamW", "AdamWScheduleFree", "RAdamScheduleFree"), "adam"),
    **dict.fromkeys(("SGD", "SGDScheduleFree"), "sgd"),
    "Muon": "muon",
}

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
    """

    kind: Kind
    fan_in: float
    fan_out: float
    shape: tuple[float, float] = (1.0, 1.0)
    base_shape: tuple[float, float] = (1.0, 1.0)

    @property
    def is_base(self) -> bool:
        """Whether it is as large as in the base model."""
        return self.fan_in == self.fan_out == 1.0

    @classmethod
    def of(cls, role: Role, layout: MatrixLayout | None, shape: Shape, base: Shape) -> "WidthRatio":
        """The ratios of a parameter with a known shape in the base model."""
        if layout is None or role not in MATRICES:  # the width is the last side of an embedding
            return cls("input", 1.0, shape[-1] / base[-1] if shape else 1.0)
        small = layout._replace(shape=base)
        fan_in, fan_out = layout.inputs / small.inputs, layout.outputs / small.outputs
        if role == "head":
            return cls("head", fan_in, 1.0)
        return cls("hidden", fan_in, fan_out, (layout.outputs, layout.inputs), (small.outputs, small.inputs))


def lr_factor(ratio: WidthRatio, group: dict[str, Any], optimizer: torch.optim.Optimizer) -> float:
    """The factor on the learning rate of a parameter; its weight decay is divided by the same factor.

    | optimizer | hidden | head | embedding, norm, bias |
    |---|---|---|---|
    | Adam-like | 1 / fan_in | 1 | 1 |
    | SGD | fan_out / fan_in | fan_in | fan_out |
    | Muon | see below | - | - |

    fan_in and fan_out are those of `WidthRatio`. In muP, the spectral norm of Muon's update must grow in proportion to
    sqrt(fan_out / fan_in). With `match_rms_adamw` it grows in proportion to sqrt(max(rows, columns)), so that the
    factor is 1 / sqrt(r) where all sides grow by r; with `original` it does not grow then, and the factor is 1.

    Args:
        ratio: of the parameter.
        group: the parameter group that holds it.
        optimizer: the optimizer that holds the group.

    Raises:
        UsageError: the optimizer has no rule.

    Source: `MuAdam` and `MuSGD` in mup/optim.py of https://github.com/microsoft/mup; Muon:
        https://github.com/NVIDIA/Megatron-LM/pull/3715.
    """
    owner = optimizer.optimizers[group["optimizer"]] if isinstance(optimizer, ComposedOptimizer) else optimizer
    rule = rule_of(owner)
    if rule == "adam":
        return 1.0 if ratio.kind == "head" else 1.0 / ratio.fan_in
    if rule == "sgd":
        return ratio.fan_in if ratio.kind == "head" else ratio.fan_out / ratio.fan_in
    scale = SCALES[group["adjust_lr_fn"] or "original"]
    own, base = (float(scale(*sides)) for sides in (ratio.shape, ratio.base_shape))  # type: ignore[arg-type]
    return math.sqrt(ratio.fan_out / ratio.fan_in) * base / own


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """The row of the table that an optimizer has.

    Raises:
        UsageError: the optimizer has none.
    """
    name = type(optimizer).__name__
    rule: Rule | None = optimizer.mup_rule if isinstance(optimizer, KnowsMuPRule) else _RULES.get(name)
    if rule is None:
        raise UsageError(f"MuP has no rule for {name}: take one of {', '.join(_RULES)}, or MuonAdamW")
    return rule


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

    `LanguageModel` does all of it. Any other module has a method `base_shapes()`, which returns the shape in the base
    model of each parameter by name, multiplies its logits by base_width / width, and calls `scale_initial_weights`
    once; `OptimizerMixin` or `build_optimizer` sets the learning rates.

    Args:
        base_width: d_model of the model for which the settings were tuned; 256 is common. Smaller or larger than the
            width of this model.
        base_head_dim: width of an attention head in that model. Default: as in this one, so that a wider model has
            more heads.

    Raises:
        UsageError: an option out of its range; heads that do not fit into the base width; a module without
            `base_shapes()`.

    Source: Yang et al. 2022 (Tensor Programs V), https://arxiv.org/abs/2203.03466, by its code: optim.py, layer.py and
        README.md of https://github.com/microsoft/mup; the table in the README.md of
        https://github.com/EleutherAI/nanoGPT-mup; independent weight decay: `decoupled_wd` in that optim.py, Wortsman
        et al. 2023, https://arxiv.org/abs/2309.14322, Kosson et al. 2025, https://arxiv.org/abs/2510.19093 (abstracts).
    """

    base_width: int
    base_head_dim: int | None = None

    def __post_init__(self) -> None:
        for option, value in (("base_width", self.base_width), ("base_head_dim", self.base_head_dim)):
            if value is not None:
                check_count(f"MuP.{option}", value)

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

        Raises:
            UsageError: the module has no method `base_shapes()`, or its shapes are of another module.
        """
        if not isinstance(module, KnowsBaseShapes):
            raise UsageError(
                f"MuP: {type(module).__name__} does not tell its base model: define its method base_shapes(), which "
                "returns the shape there of each parameter by name, and multiply its logits by base_width / width"
            )
        base, found = module.base_shapes(), {}
        for name, param, role, _, layout in param_roles(module):
            if name not in base or len(base[name]) != param.ndim:
                raise UsageError(f"MuP: base_shapes() has no shape of {param.ndim} dimensions for '{name}': add it")
            found[name] = WidthRatio.of(role, layout, tuple(param.shape), tuple(base[name]))
        return found

    def lr_factors(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
        """The factor on the learning rate of each parameter for which it is not 1, by name; see `lr_factor`.

        Args:
            module: of the parameters.
            optimizer: over groups of `decay_groups`; its class decides the rule for each parameter.

        Raises:
            UsageError: an optimizer without a rule; an error of `width_ratios`.
        """
        ratios = self.width_ratios(module)
        if all(ratio.is_base for ratio in ratios.values()):
            return {}
        factors = {
            name: lr_factor(ratios[name], group, optimizer)
            for group in optimizer.param_groups
            for name in group["param_names"]
        }
        return {name: factor for name, factor in factors.items() if factor != 1.0}

    @torch.no_grad()
    def scale_initial_weights(self, module: nn.Module, drawn: Literal["constant", "by_fan_in"] = "constant") -> None:
        """Change the freshly drawn weights of a module that is not ours to those of muP, in place; call it once.

        Args:
            module: with weights on any device but meta, before sharding or after it.
            drawn: how the module has drawn them. `constant`: with a standard deviation that does not depend on the
                width, such as transformers' 0.02; `by_fan_in`: in proportion to 1 / sqrt(fan-in), as torch's layers
                do: hidden matrices then stay, and the head is drawn as in the base model.

        Raises:
            UsageError: an unknown `drawn`; weights on the meta device; an error of `width_ratios`.
        """
        if drawn not in ("constant", "by_fan_in"):
            raise UsageError(f"MuP.scale_initial_weights: drawn={drawn!r}: give constant or by_fan_in")
        if any(param.is_meta for param in module.parameters()):
            raise UsageError(
                f"MuP.scale_initial_weights: {type(module).__name__} is on the meta device: draw its weights first"
            )
        ratios = self.width_ratios(module)
        for name, param, *_ in param_roles(module):
            kind, fan_in = ratios[name][:2]
            if kind == "hidden" and drawn == "constant":
                param.div_(fan_in**0.5)
            elif kind == "head" and drawn == "by_fan_in":
                param.mul_(fan_in**0.5)


def at_width(config: Config, width: int, head_dim: int) -> Config:
    """A decoder's config at another width: heads `head_dim` wide, the same share of key heads, MLPs in proportion."""
    shape: Any = config
    if (width, head_dim) == (shape.d_model, shape.head_dim):
        return config
    n_heads = width // head_dim
    kv_heads = (
        None if shape.n_kv_heads is None else math.gcd(max(1, shape.n_kv_heads * n_heads // shape.n_heads), n_heads)
    )
    widths = {
        name: max(1, round(value * width / shape.d_model))
        for name in ("d_ff", "d_expert")
        if (value := getattr(shape, name, None)) is not None
    }
    return dataclasses.replace(shape, d_model=width, n_heads=n_heads, n_kv_heads=kv_heads, **widths)
