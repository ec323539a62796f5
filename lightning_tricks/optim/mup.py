"""muP: learning rate, decay and initial weights that are tuned at one width hold at every other width."""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from lightning_tricks._errors import UsageError
from lightning_tricks.optim.mup_factors import Growth, lr_factor
from lightning_tricks.optim.output_heads import head_weights
from lightning_tricks.optim.param_places import Model
from lightning_tricks.optim.param_roles import RoledParam, param_roles

_SCALED = "_mup_scaled"  # attribute of a module whose initial weights `scale_initial_weights` has scaled

Config = TypeVar("Config")


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

    def growth(self, module: nn.Module) -> dict[str, Growth]:
        """How far each trainable parameter has grown from the base model to this one, by name.

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
            UsageError: an optimizer without a rule; initial weights that were not scaled; an error of `growth`.
        """
        growth = self.growth(module)
        if all(grown.is_base for grown in growth.values()):
            return {}
        if not hasattr(module, "base_shapes") and not any(hasattr(part, _SCALED) for part in module.modules()):
            raise UsageError(
                f"MuP: the initial weights of {type(module).__name__} are not those of muP: call "
                "scale_initial_weights(model) of the MuP once, where the model is built"
            )
        factors = {
            name: lr_factor(growth[name], group, optimizer)
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
            UsageError: it was called before; weights on the meta device; an error of `growth`.
        """
        name = type(module).__name__
        if any(hasattr(part, _SCALED) for part in module.modules()):
            raise UsageError(f"MuP.scale_initial_weights: the weights of {name} are scaled already: call it once")
        if drawn not in ("constant", "by_fan_in"):
            raise UsageError(f"MuP.scale_initial_weights: drawn={drawn!r}: give constant or by_fan_in")
        if any(param.is_meta for param in module.parameters()):
            raise UsageError(f"MuP.scale_initial_weights: {name} is on the meta device: draw its weights first")
        growth = self.growth(module)
        for param_name, param, *_ in param_roles(module):
            grown = growth[param_name]
            if grown.kind in ("hidden", "head"):
                factor = grown.fan_in ** (-0.5 if grown.kind == "hidden" else -1.0)
                param.mul_(factor * (grown.fan_in**0.5 if drawn == "by_fan_in" else 1.0))
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


def _by_shapes(params: list[RoledParam], base: Mapping[str, Any]) -> dict[str, Growth]:
    """The growth of each parameter by its shape in the base model; the module multiplies its logits itself."""
    found = {}
    for name, param, role, _, layout in params:
        if name not in base or len(base[name]) != param.ndim:
            raise UsageError(f"MuP: base_shapes() has no shape of {param.ndim} dimensions for '{name}': add it")
        found[name] = Growth.of(role, layout, tuple(param.shape), tuple(base[name]), multiplied=True)
    return found


def _by_role(param: RoledParam, ratio: float, fixed_input: bool) -> Growth:
    """The growth of a parameter where all matrices grow by one ratio, but for inputs of a fixed width."""
    return Growth.by_ratio(param.role, param.layout, 1.0 if fixed_input else ratio, ratio)
