"""Parameter groups for an optimizer: matrices decay, biases and norms do not, and rules give single weights settings.

The role of a parameter decides (`param_roles`); a `ParamRule` is an exception by name, by role, or by both.
"""

import difflib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from types import MappingProxyType
from typing import Any

from torch import nn

from lightning_tricks._core.errors import UsageError, check_choice
from lightning_tricks._core.find_modules import (
    check_pattern,
    clean_name,
    repeated_blocks,
    whole_of,
)
from lightning_tricks._core.tensors import whole_numel
from lightning_tricks.logs.table import lines_of
from lightning_tricks.optim.param_roles import MATRICES, Role, RoledParam, param_roles
from lightning_tricks.schedules import Schedule

__all__ = ["LayerwiseLRDecay", "ParamRule", "decay_groups"]

Tied = Mapping[str, Sequence[str]]
NOT_TIED: Tied = MappingProxyType({})
RULE_KEYS = ("betas", "eps")  # of a group, if its rule has them and its optimizer knows them


@dataclass(frozen=True)
class ParamRule:
    r"""Other settings for the parameters whose names match a pattern, or which have a role.

    Args:
        pattern: regular expression, searched in the name without wrappers' prefixes (`re.search`): `embed` matches
            every name that contains embed, `^model\.embed\.weight$` one name. Empty: every name. A tied weight has
            several names, of which one must match.
        lr_scale: multiplies the optimizer's learning rate; the schedule applies to the product.
        weight_decay: replaces the decay that follows from the role, also where the model exempts it; None keeps it.
        role: of the parameters, see `param_roles`; with a pattern, both must fit. None: any.
        optimizer: name of the optimizer that steps them, one of several: `muon` or `adamw` of MuonAdamW.
        betas: replace those of the optimizer, as many as it has; None keeps them.
        eps: replaces that of the optimizer; None keeps it.
        schedule: curve of their learning rate, in place of the run's. None: the run's.
        decay_schedule: curve of their weight decay, whose peak is their decay. None: the decay is constant.

    Raises:
        UsageError: neither pattern nor role; the pattern is no regular expression; an unknown role; a negative or NaN
            number; a beta that is not from 0 on and below 1.
    """

    pattern: str = ""
    lr_scale: float = 1.0
    weight_decay: float | None = None
    role: Role | None = None
    optimizer: str | None = None
    betas: tuple[float, ...] | None = None
    eps: float | None = None
    schedule: Schedule | None = None
    decay_schedule: Schedule | None = None

    def __post_init__(self) -> None:
        if not self.pattern and self.role is None:
            raise UsageError("ParamRule: it has neither pattern nor role: say which parameters it is for")
        check_pattern(self.pattern, "ParamRule")
        if self.role is not None:
            check_choice("ParamRule.role", self.role, Role)
        for option, value in (("lr_scale", self.lr_scale), ("weight_decay", self.weight_decay), ("eps", self.eps)):
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise UsageError(f"ParamRule.{option}={value!r} ({self.in_words()}): give a finite number >= 0")
        if self.betas is not None and not all(0 <= beta < 1 for beta in self.betas):
            raise UsageError(f"ParamRule.betas={self.betas!r} ({self.in_words()}): give numbers from 0 on and below 1")

    @property
    def label(self) -> str:
        """Role and pattern, as they stand in the name of a group: `role=head`, `embed`, `role=matrix:attn`."""
        return ":".join(filter(None, (self.role and f"role={self.role}", self.pattern)))

    def in_words(self) -> str:
        """Pattern and role, for a message."""
        role = f"role {self.role!r}" if self.role else ""
        return ", ".join(filter(None, (role, f"pattern {self.pattern!r}" if self.pattern else "")))

    def fits(self, param: RoledParam, tied: Tied = NOT_TIED) -> bool:
        """Whether a parameter matches both pattern and role; `tied` has its other names, of which one may match."""
        names = (param.name, *tied.get(param.name, ()))
        return self.role in (None, param.role) and any(re.search(self.pattern, name) for name in names)


def tied_names(module: nn.Module) -> dict[str, list[str]]:
    """The other names of each parameter that a module holds in several places, by its first name."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(clean_name(name))
    return {first: others for first, *others in names.values() if others}


def match_rules(params: Sequence[RoledParam], rules: Sequence[ParamRule], tied: Tied = NOT_TIED) -> dict[str, int]:
    """The index of the first rule that fits, by parameter name; parameters without a rule are left out.

    Args:
        params: of a module.
        rules: in order.
        tied: see `tied_names`. Rules for an embedding and for a head may stand together: where the two are one weight,
            it goes by the first.

    Raises:
        UsageError: a rule gets no parameter: it matches none, or earlier rules took them all.
    """
    chosen: dict[str, int] = {}
    remedy = "change the rule, or set param_rules to null for no rules (--model.param_rules null)"
    for number, rule in enumerate(rules):
        matches = check_some_match(rule, params, tied, "param_rules", remedy)
        fresh = [name for name in matches if name not in chosen]
        if not fresh and any(rule.fits(param) for param in params):
            raise UsageError(
                f"param_rules: earlier rules take all {len(matches)} parameters that rule {number} "
                f"({rule.in_words()}) matches: move it up or remove it"
            )
        chosen.update(dict.fromkeys(fresh, number))
    return chosen


def check_some_match(
    rule: ParamRule, params: Sequence[RoledParam], tied: Tied, option: str, remedy: str
) -> dict[str, None]:
    """The names of the parameters that a rule of `option` fits, in their order; refuses a rule that fits none."""
    matches = dict.fromkeys(param.name for param in params if rule.fits(param, tied))
    if not matches:
        raise UsageError(f"{option}: {rule.in_words()} matches no parameter: {_near(rule, params)}; {remedy}")
    return matches


def _near(rule: ParamRule, params: Sequence[RoledParam]) -> str:
    names = [param.name for param in params if re.search(rule.pattern, param.name)]
    if rule.role is not None and (names or not rule.pattern):
        roles = sorted({param.role for param in params if param.name in names})
        return f"roles there are {', '.join(roles)}"
    near = difflib.get_close_matches(rule.pattern, [param.name for param in params], n=3, cutoff=0.0)
    return f"near names are {', '.join(near)}"


@dataclass(frozen=True)
class LayerwiseLRDecay:
    """Stands in a list of rules for one rule a block: each block learns `decay` times as fast as the one above it.

    Of n repeated blocks, block i (from 0) has lr_scale `decay ** (n - i)`. Parameters before the blocks, such as
    embeddings, have `decay ** (n + 1)`; parameters after them, such as the last norm and the head, keep their learning
    rate. For fine-tuning. Rules before it in the list take precedence.

    Args:
        decay: factor from a block to the one below it, above 0 and up to 1. 0.65 to 0.8 for fine-tuning in the sources.

    Raises:
        UsageError: a decay out of range; a model without repeated blocks, or one in which all parameters of
            the blocks, and those before them, are frozen or fit an earlier rule.

    Source: Clark et al. 2020 (ELECTRA), https://arxiv.org/abs/2003.10555, appendix A; Bao et al. 2021 (BEiT),
        https://arxiv.org/abs/2106.08254.
    """

    decay: float = 0.75

    def __post_init__(self) -> None:
        if not (0 < self.decay <= 1 and math.isfinite(self.decay)):
            raise UsageError(f"LayerwiseLRDecay.decay={self.decay!r}: give a number above 0 and up to 1")

    def rules(self, module: nn.Module, earlier: Sequence[ParamRule] = ()) -> list[ParamRule]:
        """One rule for the parameters before the blocks, and one for each block, in their order.

        A rule that would get no parameter, because all are frozen or fit a rule of `earlier`, is left out.
        """
        blocks = list(repeated_blocks(module))
        if not blocks:
            raise UsageError(
                f"LayerwiseLRDecay: {type(module).__name__} has no repeated blocks: write a rule for each layer"
            )
        tied = tied_names(module)
        free = [param.name for param in param_roles(module) if not any(rule.fits(param, tied) for rule in earlier)]
        names = [clean_name(name) for name, _ in module.named_parameters()]
        prefixes = tuple(f"{block}." for block in blocks)
        before = set(takewhile(lambda name: not name.startswith(prefixes), names))
        found = [
            ParamRule(f"^{re.escape(block)}\\.", lr_scale=self.decay ** (len(blocks) - index))
            for index, block in enumerate(blocks)
            if any(name.startswith(f"{block}.") for name in free)
        ]
        if first := [name for name in free if name in before]:
            pattern = f"^({'|'.join(map(re.escape, first))})$"
            found.insert(0, ParamRule(pattern, lr_scale=self.decay ** (len(blocks) + 1)))
        if not found:
            raise UsageError(
                f"LayerwiseLRDecay: all parameters of the {len(blocks)} blocks, and those before them, are frozen or "
                "fit an earlier rule: move it up or remove it"
            )
        return found


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
        rule's index in `expanded(module, rules)`; both are None without a rule. `betas` and `eps` are there if the rule
        has them.

    Raises:
        UsageError: a negative or NaN decay, a rule that gets no parameter, or an error of `param_roles`.

    Source: `configure_optimizers` in nanoGPT's model.py, https://github.com/karpathy/nanoGPT/blob/master/model.py
        (there: decay where dim >= 2); Touvron et al. 2023, https://arxiv.org/abs/2302.13971 (0.1).
    """
    if not (weight_decay >= 0 and math.isfinite(weight_decay)):
        raise UsageError(f"weight_decay={weight_decay!r}: give a finite number, 0 or more")
    params, written = param_roles(module), expanded(module, rules)
    # also those of frozen parameters: a rule need not go because `freeze` was added
    rule_of = match_rules(param_roles(module, frozen=True), written, tied_names(module))
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
    module = whole_of(module)
    for rule in rules or ():
        found += rule.rules(module, found) if isinstance(rule, LayerwiseLRDecay) else [rule]
    return found


def _group(name: str, weight_decay: float, rule: ParamRule | None = None, number: int | None = None) -> dict[str, Any]:
    if rule is not None and rule.weight_decay is not None:
        weight_decay = rule.weight_decay
    own = {key: value for key in RULE_KEYS if (value := getattr(rule, key, None)) is not None}
    if "betas" in own:
        own["betas"] = tuple(own["betas"])  # the lists of a group have an entry for each parameter
    return {
        "name": name, "params": [], "param_names": [], "roles": [], "layouts": [], "weight_decay": weight_decay,
        "lr_scale": 1.0 if rule is None else rule.lr_scale, "optimizer": None if rule is None else rule.optimizer,
        "rule": number, **own,
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

    Columns of betas and eps follow where the groups have different ones.

    Args:
        groups: from `decay_groups`, or an optimizer's `param_groups`.
        lr: learning rate of groups without one of their own, before their `lr_scale`.
    """
    groups = list(groups)
    own = [key for key in RULE_KEYS if len({str(group[key]) for group in groups if key in group}) > 1]
    rows = [("group", "tensors", "parameters", "lr", "decay", *own)]
    tensors = parameters = 0
    for number, group in enumerate(groups):
        numel = sum(map(whole_numel, group["params"]))
        own_lr = group["lr"] if "lr" in group else lr * group.get("lr_scale", 1.0)
        name = group.get("name", f"group {number}")
        decay = f"{float(group.get('weight_decay', 0.0)):g}"
        settings = [str(group.get(key, "")) for key in own]
        rows.append((name, str(len(group["params"])), f"{numel:,}", f"{float(own_lr):g}", decay, *settings))
        tensors, parameters = tensors + len(group["params"]), parameters + numel
    rows.append(("total", str(tensors), f"{parameters:,}", "", "", *("" for _ in own)))
    return "\n".join(lines_of(rows))
