"""Settings of a constructor in plain types: a checkpoint that holds them opens with `weights_only=True` anywhere.

`save_hyperparameters()` keeps the objects that the constructor was given. In the checkpoint, schedules, parameter rules
and decoder shapes become plain dicts as in a recipe: `class_path` with a short name, and `init_args`.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from lightning_tricks._core.errors import UsageError
from lightning_tricks.models import DecoderConfig
from lightning_tricks.optim import LayerwiseLRDecay, MuP, ParamRule
from lightning_tricks.schedules import Schedule

_OURS = (Schedule, ParamRule, LayerwiseLRDecay, MuP, DecoderConfig)


def to_plain(value: Any) -> Any:
    """`value` with all objects of our classes in plain types, at any depth of dicts and lists."""
    if type(value) is dict:
        return {key: to_plain(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_plain(entry) for entry in value)
    if not isinstance(value, _OURS) or not dataclasses.is_dataclass(value):
        return value
    settings = {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return {"class_path": type(value).__name__, "init_args": settings}


def setting_of(value: Any, base: type, option: str) -> Any:
    """An argument of a constructor, a `base` or its plain form; refuses anything else."""
    found = from_plain(value, base, option)
    if not isinstance(found, base):
        example = next((cls for cls in subclasses(base) if not cls.__name__.startswith("_")), base).__name__
        raise UsageError(f"{option}={shown(value)}: give a {base.__name__} object, such as {example}(...)")
    return found


def rules_of(rules: Any) -> list[ParamRule | LayerwiseLRDecay] | None:
    """The argument `param_rules`, a list of rules or of their plain forms; refuses anything else."""
    if rules is None:
        return None
    kinds = {cls.__name__: cls for cls in (ParamRule, LayerwiseLRDecay)}
    found = []
    for rule in rules if isinstance(rules, list | tuple) else [None]:
        name = rule.get("class_path") if isinstance(rule, dict) else None
        found.append(from_plain(rule, kinds.get(str(name), ParamRule), "param_rules"))
        if not isinstance(found[-1], ParamRule | LayerwiseLRDecay):
            raise UsageError(f"param_rules={shown(rule or rules)}: give a list of {' and '.join(kinds)} objects")
    return found


def shown(value: Any) -> str:
    """A value in a message: on one line, and not longer than that."""
    return " ".join(repr(value).split())[:80]


def from_plain(value: Any, base: type, option: str) -> Any:
    """The inverse of `to_plain` for a `base`, or lists and tuples of them; any other value is returned unchanged."""
    if type(value) in (list, tuple):
        return type(value)(from_plain(entry, base, option) for entry in value)
    if not isinstance(value, dict) or "class_path" not in value:
        return value
    settings = value.get("init_args", {})
    nested = {name: from_plain(entry, Schedule, f"{option}.{name}") for name, entry in settings.items()}
    return build(value["class_path"], nested, base, option)


def build(name: str, settings: dict[str, Any], base: type, option: str) -> Any:
    """An object of the class called `name`: `base` or a subclass that is imported."""
    found = [cls for cls in (base, *subclasses(base)) if cls.__name__ == name]
    if len(found) != 1:
        raise UsageError(
            f"{option}: the checkpoint names {name}, and {len(found)} subclasses of {base.__name__} with that name are "
            f"imported: import the one that is meant, or pass {option} yourself"
        )
    try:
        return found[0](**settings)
    except TypeError as error:
        line = f"{option}: this version's {name} does not take the checkpoint's settings ({error})"
        raise UsageError(line) from error


def subclasses(base: type) -> Iterator[type]:
    """All subclasses of a class that are imported, at any depth."""
    children: list[type] = base.__subclasses__()
    for child in children:
        yield child
        yield from subclasses(child)
