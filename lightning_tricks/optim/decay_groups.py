"""Parameter groups for an optimizer, by the role of each parameter: matrices decay, biases and norms do not."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.find_modules import clean_name
from lightning_tricks._core.tensors import whole_numel
from lightning_tricks.optim.param_roles import MATRICES, param_roles
from lightning_tricks.optim.param_rule import LayerwiseLRDecay, ParamRule, match_rules, tied_names

__all__ = ["decay_groups"]

Rules = Sequence[ParamRule | LayerwiseLRDecay]


def decay_groups(
    module: nn.Module,
    weight_decay: float = 0.1,
    decay_embeddings: bool = True,
    rules: Rules | None = None,
) -> list[dict[str, Any]]:
    """Group the trainable parameters of `module` for any torch optimizer.

    Group `decay` holds matrices, convolutions and (by the option) embeddings; `no_decay` holds biases, norms, other
    vectors and scalars, the state of recurrences, and parameters that the model itself exempts (`_no_weight_decay`,
    timm's `no_weight_decay()`). `param_roles` says how it recognizes each role. Rules add groups of their own, named
    after their role and pattern; a parameter goes to the first rule that fits. Every trainable parameter is in exactly
    one group, tied ones once, in the order of `module.named_parameters()`.

    Args:
        module: any module, before or after compile, checkpoint and FSDP2 wrapping.
        weight_decay: of the `decay` group. Default: Llama's 0.1.
        decay_embeddings: whether `nn.Embedding` weights decay; learned positions, class and mask tokens count as
            embeddings too, and so does a weight tied to the output head. Default: true, nanoGPT's rule.
        rules: exceptions by name or role.

    Returns:
        Groups with the keys `name`, `params`, `param_names`, `weight_decay` and `lr_scale` (of its rule, else 1.0).
        torch does not know `lr_scale`: multiply each group's learning rate by it, as `build_optimizer` does. For
        optimizers such as MuonAdamW, the lists `roles` and `layouts` (`MatrixLayout.plain`, None where a parameter
        holds no matrix) have an entry for each parameter. `optimizer` is the name in the group's rule, and `rule` the
        rule's index in `expanded(module, rules)`; both are None without a rule.

    Raises:
        UsageError: a negative or NaN decay, a rule that gets no parameter, or an error of `param_roles`.

    Source: `configure_optimizers` in nanoGPT's model.py, https://github.com/karpathy/nanoGPT/blob/master/model.py
        (there: decay where dim >= 2); Touvron et al. 2023, https://arxiv.org/abs/2302.13971 (0.1).
    """
    if not (weight_decay >= 0 and math.isfinite(weight_decay)):
        raise UsageError(f"weight_decay={weight_decay!r}: give a finite number, 0 or more")
    params, written = param_roles(module), expanded(module, rules)
    rule_of = match_rules(params, written, tied_names(module))
    decays = {"decay": weight_decay, "no_decay": 0.0}
    # by name and number of the rule
    groups: dict[tuple[str, int | None], dict[str, Any]] = {
        (name, None): _group(name, decay) for name, decay in decays.items()
    }
    decaying = {*MATRICES, *(["embedding"] if decay_embeddings else [])}
    for param in params:
        name = "decay" if param.role in decaying and not param.exempt else "no_decay"
        number = rule_of.get(param.name)
        if number is not None and (name, number) not in groups:
            rule = written[number]
            groups[name, number] = _group(f"{name}:{rule.label}", decays[name], rule, number)
        group = groups[name, number]
        group["params"].append(param.param)
        group["param_names"].append(param.name)
        group["roles"].append(param.role)
        group["layouts"].append(None if param.layout is None else param.layout.plain)
    return [group for group in groups.values() if group["params"]]


def expanded(module: nn.Module, rules: Rules | None) -> list[ParamRule]:
    """The rules, with each LayerwiseLRDecay replaced by its own rules."""
    found: list[ParamRule] = []
    for rule in rules or ():
        found += rule.rules(module, found) if isinstance(rule, LayerwiseLRDecay) else [rule]
    return found


def _group(name: str, weight_decay: float, rule: ParamRule | None = None, number: int | None = None) -> dict[str, Any]:
    if rule is not None and rule.weight_decay is not None:
        weight_decay = rule.weight_decay
    return {
        "name": name, "params": [], "param_names": [], "roles": [], "layouts": [], "weight_decay": weight_decay,
        "lr_scale": 1.0 if rule is None else rule.lr_scale, "optimizer": None if rule is None else rule.optimizer,
        "rule": number,
    }  # fmt: skip


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


def groups_table(groups: Iterable[dict[str, Any]], lr: float) -> str:
    """A plain text table of parameter groups: name, tensors, parameters, lr, decay, and the totals.

    Args:
        groups: from `decay_groups`, or an optimizer's `param_groups`.
        lr: learning rate of groups without one of their own, before their `lr_scale`.
    """
    rows = [("group", "tensors", "parameters", "lr", "decay")]
    tensors = parameters = 0
    for number, group in enumerate(groups):
        numel = sum(map(whole_numel, group["params"]))
        own_lr = group["lr"] if "lr" in group else lr * group.get("lr_scale", 1.0)
        name = group.get("name", f"group {number}")
        decay = f"{float(group.get('weight_decay', 0.0)):g}"
        rows.append((name, str(len(group["params"])), f"{numel:,}", f"{float(own_lr):g}", decay))
        tensors, parameters = tensors + len(group["params"]), parameters + numel
    rows.append(("total", str(tensors), f"{parameters:,}", "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows)
    return "\n".join(lines)
