"""The table of muP: the factor on the learning rate for each optimizer and kind of weight, as the width grows."""

import math
from typing import Any, Literal, NamedTuple

import torch

from lightning_tricks._errors import UsageError
from lightning_tricks.optim.composed_optimizer import ComposedOptimizer
from lightning_tricks.optim.matrix_layout import MatrixLayout
from lightning_tricks.optim.orthogonalize import SCALES
from lightning_tricks.optim.param_roles import MATRICES, Role

Kind = Literal["input", "hidden", "head"]
Shape = tuple[int, ...]

# Optimizers whose update does not depend on the size of the gradient: they follow the rule of Adam.
_ADAM = {
    "Adam", "AdamW", "NAdam", "RAdam", "Lion", "AdamW8bit", "AdamW4bit", "AdamWFp8", "AdamWBF16State",
    "AdamWScheduleFree", "RAdamScheduleFree",
}  # fmt: skip
_SGD = {"SGD", "SGDScheduleFree"}


class Growth(NamedTuple):
    """How far a parameter has grown from the base model to this one.

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
    def of(cls, role: Role, layout: MatrixLayout | None, shape: Shape, base: Shape, multiplied: bool) -> "Growth":
        """The growth of a parameter with a known shape in the base model."""
        if layout is None or role not in MATRICES:  # the width is the last side of an embedding
            return cls("input", 1.0, shape[-1] / base[-1] if shape else 1.0)
        small = layout._replace(shape=base)
        fan_in, fan_out = layout.inputs / small.inputs, layout.outputs / small.outputs
        if role == "head":
            return cls("head", fan_in, 1.0, multiplied=multiplied)
        return cls("hidden", fan_in, fan_out, (layout.outputs, layout.inputs), (small.outputs, small.inputs))

    @classmethod
    def by_ratio(cls, role: Role, layout: MatrixLayout | None, fan_in: float, fan_out: float) -> "Growth":
        """The growth of a parameter of a model whose matrices have all grown alike."""
        if layout is not None and layout.channels == 1:
            fan_in = 1.0  # each filter of a depthwise convolution has one channel at every width
        if role == "head":
            return cls("head", fan_in, 1.0)
        if layout is None or role not in MATRICES or fan_in == 1.0:
            return cls("input", 1.0, fan_out)
        fan_out = 1.0 if role == "router" else fan_out  # the number of experts does not grow
        rows, columns = layout.outputs, layout.inputs
        return cls("hidden", fan_in, fan_out, (rows, columns), (rows / fan_out, columns / fan_in))


def lr_factor(grown: Growth, group: dict[str, Any], optimizer: torch.optim.Optimizer) -> float:
    """The factor on the learning rate of a parameter; its weight decay is divided by the same factor.

    | optimizer | hidden | head | head without multiplier | embedding, norm, bias |
    |---|---|---|---|---|
    | Adam-like | 1 / fan_in | 1 | 1 / fan_in | 1 |
    | SGD | fan_out / fan_in | fan_in | 1 / fan_in | fan_out |
    | Muon | see below | - | - | - |

    fan_in and fan_out are the ratios of `Growth`. In muP, the spectral norm of Muon's update must grow in proportion to
    sqrt(fan_out / fan_in). With `match_rms_adamw` it grows in proportion to sqrt(max(rows, columns)), so that the
    factor is 1 / sqrt(r) where all sides grow by r; with `original` it does not grow then, and the factor is 1.

    Args:
        grown: how far the parameter has grown.
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
        return 1.0 if grown.kind == "head" and grown.multiplied else 1.0 / grown.fan_in
    if rule == "sgd":
        if grown.kind == "head":
            return grown.fan_in if grown.multiplied else 1.0 / grown.fan_in
        return grown.fan_out / grown.fan_in
    if getattr(optimizer, "_head_dim", None) is not None:
        raise UsageError("MuP has no rule for MuonAdamW.head_dim: leave it out, or leave out mup")
    scale = SCALES[group["adjust_lr_fn"] or "original"]
    own, base = (float(scale(*sides)) for sides in (grown.shape, grown.base_shape))  # type: ignore[arg-type]
    return math.sqrt(grown.fan_out / grown.fan_in) * base / own


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
