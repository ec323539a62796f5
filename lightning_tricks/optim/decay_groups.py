"""Parameter groups for an optimizer, by the role of each parameter: matrices decay, biases and norms do not."""

import difflib
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_tricks._errors import UsageError
from lightning_tricks._find_modules import clean_name
from lightning_tricks.optim.param_roles import param_roles


@dataclass(frozen=True)
class ParamRule:
    r"""Another learning rate or weight decay for the parameters whose names match a pattern.

    Args:
        pattern: regular expression, searched in the name without wrappers' prefixes (`re.search`): `embed` matches
            every name that contains embed, `^model\.embed\.weight$` one name.
        lr_scale: multiplies the optimizer's learning rate; the schedule applies to the product.
        weight_decay: replaces the decay that follows from the role, also where the model exempts it; None keeps it.

    Raises:
        UsageError: the pattern is no regular expression; a negative or NaN number.
    """

    pattern: str
    lr_scale: float = 1.0
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise UsageError(f"ParamRule.pattern={self.pattern!r} is no regular expression: {error}") from None
        for option, value in (("lr_scale", self.lr_scale), ("weight_decay", self.weight_decay)):
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise UsageError(f"ParamRule.{option}={value!r} (pattern {self.pattern!r}): give a finite number >= 0")


def match_rules(names: Sequence[str], rules: Sequence[ParamRule]) -> dict[str, ParamRule]:
    """The rule of each name that has one: the first in the list whose pattern matches.

    Raises:
        UsageError: a rule gets no parameter: it matches none, or earlier rules took them all.
    """
    chosen: dict[str, ParamRule] = {}
    for number, rule in enumerate(rules):
        matches = [name for name in names if re.search(rule.pattern, name)]
        if not matches:
            near = ", ".join(difflib.get_close_matches(rule.pattern, names, n=3, cutoff=0.0))
            raise UsageError(
                f"param_rules: pattern {rule.pattern!r} matches no parameter: near names are {near}; change the "
                "pattern, or set param_rules to null for no rules (--model.param_rules null)"
            )
        fresh = [name for name in matches if name not in chosen]
        if not fresh:
            raise UsageError(
                f"param_rules: earlier rules take all {len(matches)} parameters that rule {number} "
                f"(pattern {rule.pattern!r}) matches: move it up or remove it"
            )
        chosen.update(dict.fromkeys(fresh, rule))
    return chosen


def decay_groups(
    module: nn.Module,
    weight_decay: float = 0.1,
    decay_embeddings: bool = True,
    rules: Sequence[ParamRule] | None = None,
) -> list[dict[str, Any]]:
    """Group the trainable parameters of `module` for any torch optimizer.

    Group `decay` holds matrices, convolutions and (by the option) embeddings; `no_decay` holds biases, norms, other
    vectors and scalars, the state of recurrences, and parameters that the model itself exempts (`_no_weight_decay`,
    timm's `no_weight_decay()`). `param_roles` says how it recognizes each role. Rules add groups of their own, named
    after their pattern; a name goes to the first rule that matches. Every trainable parameter is in exactly one group,
    tied ones once, in the order of `module.named_parameters()`.

    Args:
        module: any module, before or after compile, checkpoint and FSDP2 wrapping.
        weight_decay: of the `decay` group. Default: Llama's 0.1.
        decay_embeddings: whether `nn.Embedding` weights decay; learned positions, class and mask tokens count as
            embeddings too, and so does a weight tied to the output head. Default: true, nanoGPT's rule.
        rules: exceptions by name.

    Returns:
        Groups with the keys `name`, `params`, `param_names`, `weight_decay` and `lr_scale` (of its rule, else 1.0).
        torch does not know `lr_scale`: multiply each group's learning rate by it, as `build_optimizer` does.

    Raises:
        UsageError: a negative or NaN decay, a rule that gets no parameter, or an error of `param_roles`.

    Source: `configure_optimizers` in nanoGPT's model.py, https://github.com/karpathy/nanoGPT/blob/master/model.py
        (there: decay where dim >= 2); Touvron et al. 2023, https://arxiv.org/abs/2302.13971 (0.1).
    """
    if not (weight_decay >= 0 and math.isfinite(weight_decay)):
        raise UsageError(f"weight_decay={weight_decay!r}: give a finite number, 0 or more")
    params = param_roles(module)
    rule_of = match_rules([param.name for param in params], rules or [])
    groups = {name: _group(name, decay) for name, decay in (("decay", weight_decay), ("no_decay", 0.0))}
    decaying = {"matrix", "embedding"} if decay_embeddings else {"matrix"}
    for param in params:
        name = "decay" if param.role in decaying else "no_decay"
        if rule := rule_of.get(param.name):
            decay = groups[name]["weight_decay"] if rule.weight_decay is None else rule.weight_decay
            name = f"{name}:{rule.pattern}"
            groups.setdefault(name, _group(name, decay, rule.lr_scale))
        groups[name]["params"].append(param.param)
        groups[name]["param_names"].append(param.name)
    return [group for group in groups.values() if group["params"]]


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


def groups_table(groups: Iterable[dict[str, Any]], lr: float) -> str:
    """A plain text table of parameter groups: name, tensors, parameters, lr, decay, and the totals.

    Args:
        groups: from `decay_groups`, or an optimizer's `param_groups`.
        lr: learning rate of groups without one of their own, before their `lr_scale`.
    """
    rows = [("group", "tensors", "parameters", "lr", "decay")]
    tensors = parameters = 0
    for number, group in enumerate(groups):
        numel = sum(param.numel() for param in group["params"])
        own_lr = group["lr"] if "lr" in group else lr * group.get("lr_scale", 1.0)
        name = group.get("name", f"group {number}")
        decay = f"{float(group.get('weight_decay', 0.0)):g}"
        rows.append((name, str(len(group["params"])), f"{numel:,}", f"{float(own_lr):g}", decay))
        tensors, parameters = tensors + len(group["params"]), parameters + numel
    rows.append(("total", str(tensors), f"{parameters:,}", "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows)
    return "\n".join(lines)
