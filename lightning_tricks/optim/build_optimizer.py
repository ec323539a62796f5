"""The optimizer of a run from a module and a few settings: groups by role, checks, and a safe resume."""

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.find_modules import parameters_by_name, whole_of
from lightning_tricks.optim.composed_optimizer import ComposedOptimizer
from lightning_tricks.optim.decay_groups import RULE_KEYS, Rules, check_each_parameter_once, decay_groups
from lightning_tricks.optim.keep_settings_on_load import keep_low_bit, keep_settings_on_load, parts_of
from lightning_tricks.optim.limits import refuse_tensor_lr
from lightning_tricks.optim.mup import MuP, rule_of, split_groups

OptimizerFactory = Callable[[Iterable], torch.optim.Optimizer]


def default_adamw(params: Iterable) -> torch.optim.Optimizer:
    """AdamW with Llama-7B's learning rate and betas, 3e-4 and (0.9, 0.95), and torch's eps, 1e-8.

    Source: Touvron et al. 2023, https://arxiv.org/abs/2302.13971; AdamW: Loshchilov and Hutter 2017,
        https://arxiv.org/abs/1711.05101.
    """
    return torch.optim.AdamW(params, lr=3e-4, betas=(0.9, 0.95), eps=1e-8)


def build_optimizer(
    module: nn.Module,
    optimizer: OptimizerFactory | None = None,
    weight_decay: float = 0.1,
    decay_embeddings: bool = True,
    rules: Rules | None = None,
    mup: MuP | None = None,
) -> torch.optim.Optimizer:
    """The optimizer of `module`'s trainable parameters: `decay_groups`, guarded by `keep_settings_on_load`.

    That of a pipeline stage has the groups of the whole model, of which some may be empty.

    Args:
        module: any module.
        optimizer: makes the optimizer from parameter groups; None for `default_adamw`.
        weight_decay: of the matrices; the only place where the decay is set.
        decay_embeddings: whether embeddings decay.
        rules: exceptions by name or role; their `lr_scale` multiplies the optimizer's learning rate. A rule that names
            an optimizer wants one of several, such as MuonAdamW or ComposedOptimizer. One with betas or eps wants an
            optimizer that has them.
        mup: the settings are those of a model of its base width; its factors multiply the rules' `lr_scale`.

    Raises:
        UsageError: the optimizer refuses its settings; its learning rate is negative, NaN or infinite; it has a weight
            decay of its own; it leaves a parameter out; or an error of `decay_groups` or `MuP`.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        >>> optimizer = build_optimizer(model, lambda groups: torch.optim.SGD(groups, lr=0.1), weight_decay=0.01)
        >>> [(group["name"], group["param_names"], group["weight_decay"]) for group in optimizer.param_groups]
        [('decay', ['0.weight'], 0.01), ('no_decay', ['0.bias', '1.weight', '1.bias'], 0.0)]
    """
    whole = whole_of(module)
    groups = decay_groups(whole, weight_decay, decay_embeddings, rules)
    if whole is not module:
        groups = _with_stand_ins(groups, module)
    if mup is not None:  # built twice: the factor of a parameter depends on the class of the optimizer that has it
        first = _built(optimizer, [{**group, "params": [*group["params"]]} for group in groups])
        groups = split_groups(groups, mup.lr_factors(whole, first))
    of_rules = {group["rule"]: {key: group[key] for key in RULE_KEYS if key in group} for group in groups}
    built = _built(optimizer, groups)
    _refuse_unknown_settings(built, of_rules)
    if whole is not module:
        _drop_stand_ins(built, module)
    _refuse_own_decay(built)
    refuse_tensor_lr(built)
    _refuse_named_optimizer(built, groups)
    check_each_parameter_once(module, built.param_groups)
    for group in built.param_groups:
        group["lr"] = _scaled_lr(group)
    return keep_low_bit(keep_settings_on_load(built))


def _with_stand_ins(groups: list[dict[str, Any]], module: nn.Module) -> list[dict[str, Any]]:
    """Groups of a whole model with the parameters of a stage, and without memory for those of the others.

    The optimizer then makes of its groups what it would make for the whole model.
    """
    here, device = parameters_by_name(module), next(module.parameters()).device

    def of_stage(name: str, whole: Tensor) -> nn.Parameter:
        nothing = torch.zeros((), dtype=whole.dtype, device=device)
        return here[name] if name in here else nn.Parameter(nothing.expand(whole.shape))

    return [{**group, "params": list(map(of_stage, group["param_names"], group["params"]))} for group in groups]


def _drop_stand_ins(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    """Leave an optimizer the parameters of a stage."""
    here = set(module.parameters())
    for group in optimizer.param_groups:
        kept = [number for number, parameter in enumerate(group["params"]) if parameter in here]
        for key in ("params", "param_names", "roles", "layouts"):
            group[key] = [group[key][number] for number in kept]


def _built(optimizer: OptimizerFactory | None, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    try:
        built = (optimizer or default_adamw)(groups)
    except UsageError:
        raise
    except ValueError as error:  # torch's own checks: "Invalid learning rate: -1.0"
        raise UsageError(f"optimizer: {error}") from error
    if not hasattr(built, "param_groups"):
        raise UsageError(f"optimizer: its function returns a {type(built).__name__}: let it return the optimizer alone")
    return built


def check_settings(optimizer: OptimizerFactory | None, mup: MuP | None = None) -> torch.optim.Optimizer | None:
    """Refuse settings that are wrong for any module: lr, betas or eps out of range, an own decay, no rule for muP.

    Returns:
        An optimizer of a tiny module, for other checks; None where it cannot be built from that module.
    """
    tiny = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(1, 1)]), "head": nn.Linear(1, 1)})
    try:
        built = (optimizer or default_adamw)(decay_groups(tiny))
    except Exception as error:  # the optimizer may need other parameters; it is built again from the real module
        if isinstance(error, ValueError) and str(error).startswith("Invalid "):  # torch says so of settings
            raise UsageError(f"optimizer: {error}") from error
        return None
    if not isinstance(built, torch.optim.Optimizer):
        return None  # refused when it is built from the real module
    _refuse_own_decay(built)
    refuse_tensor_lr(built)
    for group in built.param_groups:
        _scaled_lr(group)
    for part in parts_of(built) if mup is not None else ():
        rule_of(part)
    return built


def _scaled_lr(group: dict[str, Any]) -> float | Tensor:
    lr = group["lr"]
    if not (float(lr) >= 0 and math.isfinite(float(lr))):
        raise UsageError(f"lr={float(lr)!r} of the optimizer: give a finite number, 0 or more")
    # if lr is a tensor, which torch shares among all groups, the product is a tensor of this group alone
    return lr * group.get("lr_scale", 1.0)


def _refuse_own_decay(optimizer: torch.optim.Optimizer) -> None:
    for part in parts_of(optimizer):
        parameter = inspect.signature(type(part)).parameters.get("weight_decay")
        own = part.defaults.get("weight_decay")
        # some, such as pytorch_optimizer's NorMuon, keep the decay only in their groups, where ours has replaced it
        if parameter is not None and "weight_decay" in part.defaults and own != parameter.default:
            raise UsageError(
                f"weight_decay={own} of {type(part).__name__} would have no effect: "
                "set the weight_decay beside the optimizer, which leaves out biases and norms"
            )


def _refuse_unknown_settings(optimizer: torch.optim.Optimizer, of_rules: dict[int | None, dict[str, Any]]) -> None:
    """Refuse betas or eps of a rule for an optimizer that would never read them, such as Muon, or has more of them."""
    for part in parts_of(optimizer):
        for group in part.param_groups:
            for key, value in of_rules.get(group.get("rule"), {}).items():
                known = part.defaults.get(key)
                fits = isinstance(known, int | float) if key == "eps" else known and len(known) == len(value)
                if not fits:
                    has = f"no {key}" if known is None else f"{key}={known!r}"
                    raise UsageError(
                        f"param_rules: {key}={value!r} of {group['name']!r}: {type(part).__name__} has {has}: narrow "
                        "the rule by a role, or change its value"
                    )


def _refuse_named_optimizer(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> None:
    named = [group for group in groups if group["optimizer"] is not None]
    if named and not isinstance(optimizer, ComposedOptimizer):
        raise UsageError(
            f"param_rules: optimizer={named[0]['optimizer']!r} of {named[0]['name']!r}: {type(optimizer).__name__} is "
            "one optimizer: take MuonAdamW, or ComposedOptimizer with several by name"
        )
