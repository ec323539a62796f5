"""Freeze the parameters of a module by name or role: they get no gradient, and no optimizer has them."""

import re
from collections.abc import Sequence

from torch import nn

from lightning_tricks._core.errors import UsageError, check_choice
from lightning_tricks._core.find_modules import check_pattern, whole_of
from lightning_tricks.optim.decay_groups import ParamRule, check_some_match, tied_names
from lightning_tricks.optim.param_roles import Role, param_roles

_ROLE = re.compile(r"role=(\w*):?")


def freeze(module: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Set `requires_grad` to false for the parameters that one of `patterns` fits. Idempotent.

    Args:
        module: any module; of a pipeline stage, whose model was frozen before it was cut, the names are of the whole.
        patterns: each a regular expression, searched in the name without wrappers' prefixes; or `role=norm`, see
            `param_roles`; or both, `role=matrix:attn`.

    Returns:
        The names of these parameters, in their order in the module.

    Raises:
        UsageError: a pattern that fits no parameter, or is no regular expression; an unknown role; patterns that fit
            all parameters.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        >>> freeze(model, ["role=norm", "0.bias"])
        ['0.bias', '1.weight', '1.bias']
    """
    whole, found = whole_of(module), set[str]()
    params, tied = param_roles(whole, frozen=True), tied_names(whole)
    for rule in map(_rule, patterns):
        found.update(check_some_match(rule, params, tied, "freeze", "correct it, or leave it out"))
    chosen = [param for param in params if param.name in found]
    if len(chosen) == len(params):
        raise UsageError(f"freeze={list(patterns)}: all {len(params)} parameters are frozen: leave out a pattern")
    for param in chosen:
        param.param.requires_grad_(False)
    return [param.name for param in chosen]


def _rule(text: str) -> ParamRule:
    """The parameters that a pattern is for, as a rule without settings."""
    if not isinstance(text, str) or not text:
        raise UsageError(f"freeze: {text!r} is no pattern: give part of a parameter's name, or role=embedding")
    role = _ROLE.match(text)
    pattern = text[role.end() :] if role else text
    check_pattern(pattern, "freeze")
    if role:
        check_choice("freeze: role", role[1], Role)
    return ParamRule(pattern, role=role and role[1])  # type: ignore[arg-type]  # checked above
