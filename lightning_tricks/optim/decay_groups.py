"""Parameter groups for an optimizer: matrices decay, biases and norms do not, by what each parameter is for."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn

from lightning_tricks._errors import UsageError
from lightning_tricks._find_modules import clean_name
from lightning_tricks.optim.param_roles import RoledParam, param_roles
from lightning_tricks.optim.param_rule import ParamRule, match_rules


def decay_groups(
    module: nn.Module,
    weight_decay: float = 0.1,
    decay_embeddings: bool = True,
    rules: Sequence[ParamRule] | None = None,
) -> list[dict[str, Any]]:
    """Group the trainable parameters of `module` for any torch optimizer.

    Group `decay` holds matrices, convolutions and (by the option) embeddings; `no_decay` holds biases, norms, other
    vectors and scalars, the state of recurrences, and parameters that the model itself exempts (`_no_weight_decay`,
    timm's `no_weight_decay()`). `param_roles` says how each is told. Rules add groups of
    their own, named after their pattern; the first rule that finds a name has it. Every trainable parameter is in
    exactly one group, tied ones once, and the order is that of `module.named_parameters()`.

    Args:
        module: any module, before or after compile, checkpoint and FSDP2 wrapping.
        weight_decay: of the `decay` group. Default: Llama's 0.1.
        decay_embeddings: whether `nn.Embedding` weights decay, as in nanoGPT; learned positions, class and mask
            tokens count too. A weight
            tied to the output head is an embedding. Default: true, which is nanoGPT's rule.
        rules: exceptions by name.

    Returns:
        Groups with the keys `name`, `params`, `param_names`, `weight_decay` and `lr_scale` (of its rule, else 1.0).
        torch does not know `lr_scale`: multiply each group's learning rate by it, as `build_optimizer` does.

    Raises:
        UsageError: a negative or NaN decay, a rule that gets no parameter, or what `param_roles` refuses.

    Source: `configure_optimizers` in nanoGPT's model.py, https://github.com/karpathy/nanoGPT/blob/master/model.py
        (there: decay where dim >= 2); Touvron et al. 2023, https://arxiv.org/abs/2302.13971 (0.1).
    """
    if not (weight_decay >= 0 and math.isfinite(weight_decay)):
        raise UsageError(f"weight_decay={weight_decay!r}: give a finite number, 0 or more")
    params = param_roles(module)
    rule_of = match_rules([param.name for param in params], rules or [])
    groups = {name: _group(name, decay) for name, decay in (("decay", weight_decay), ("no_decay", 0.0))}
    for param in params:
        name = "decay" if _decays(param, decay_embeddings) else "no_decay"
        if rule := rule_of.get(param.name):
            decay = groups[name]["weight_decay"] if rule.weight_decay is None else rule.weight_decay
            name = f"{name}:{rule.pattern}"
            groups.setdefault(name, _group(name, decay, rule.lr_scale))
        groups[name]["params"].append(param.param)
        groups[name]["param_names"].append(param.name)
    return [group for group in groups.values() if group["params"]]


def _decays(param: RoledParam, decay_embeddings: bool) -> bool:
    return param.role == "matrix" or (param.role == "embedding" and decay_embeddings)


def _group(name: str, weight_decay: float, lr_scale: float = 1.0) -> dict[str, Any]:
    return {"name": name, "params": [], "param_names": [], "weight_decay": weight_decay, "lr_scale": lr_scale}


def check_each_parameter_once(module: nn.Module, groups: Sequence[dict[str, Any]]) -> None:
    """Refuse groups that leave out a trainable parameter of `module`, or hold one twice.

    Raises:
        UsageError: naming the first such parameter.
    """
    count = Counter(id(param) for group in groups for param in group["params"])
    for name, param in module.named_parameters():
        if param.requires_grad and count[id(param)] != 1:
            where = "no group" if not count[id(param)] else f"{count[id(param)]} groups"
            raise UsageError(
                f"parameter '{clean_name(name)}' is in {where} of the optimizer: "
                "pass on the parameter groups that it is given, each once"
            )
