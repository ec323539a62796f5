"""Exceptions to the rule, by name: another learning rate or weight decay for the parameters a pattern finds."""

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_tricks._errors import UsageError


@dataclass(frozen=True)
class ParamRule:
    r"""Another learning rate or weight decay for the parameters whose name a pattern finds.

    Args:
        pattern: regular expression, searched in the name without wrappers' prefixes (`re.search`): `embed` finds every
            name with embed in it, `^model\.embed\.weight$` one name.
        lr_scale: the optimizer's learning rate is multiplied by it; the schedule applies on top.
        weight_decay: replaces the decay that the parameters' roles give; None keeps it. A number also gives decay to a
            parameter that the model exempts.

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
    """The rule of each name that has one: the first in the list whose pattern is found in it.

    Raises:
        UsageError: a rule that gets no parameter, because it finds none or because earlier rules took them all.
    """
    chosen: dict[str, ParamRule] = {}
    for place, rule in enumerate(rules):
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
                f"param_rules: earlier rules take all {len(matches)} parameters that rule {place} "
                f"(pattern {rule.pattern!r}) matches: move it up or remove it"
            )
        chosen.update(dict.fromkeys(fresh, rule))
    return chosen
