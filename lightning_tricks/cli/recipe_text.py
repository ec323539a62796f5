"""Read a recipe's YAML, and refuse mistakes that YAML itself allows.

A key that stands twice: YAML keeps the last and silently drops the first. Settings written beside `class_path` in place
of under its `init_args`: jsonargparse then takes the mapping for something else. An anchor that holds itself, and
anchors that repeat each other to more values than any recipe has: the parser would never come to an end.
"""

from collections.abc import Iterable
from typing import Any

import jsonargparse
import yaml

from lightning_tricks._errors import UsageError

PARSER_MODE = "recipe"  # jsonargparse's word for the language that a parser reads
_BESIDE_CLASS_PATH = {"class_path", "init_args", "dict_kwargs", "<<"}
_MOST_VALUES = 100_000  # of a recipe, with what its anchors repeat; the longest here has 100


class RecipeTextError(yaml.YAMLError):
    """A mistake in a recipe's text; a YAMLError, so that jsonargparse reports it as one."""


def load_text(text: str, path: str = "") -> Any:
    """The value of YAML text, as jsonargparse reads it; `path` is that of a file, empty for a value of an option.

    Raises:
        RecipeTextError: no YAML; no settings in the file; a key twice in one mapping; a setting beside `class_path`.
    """
    where = f"{path}, " if path else ""
    try:
        if not {":", "&"}.isdisjoint(text):
            _check_text(text, where)
        value = jsonargparse.get_loader("yaml")(text)
    except RecipeTextError:
        raise
    except RecursionError as error:
        raise RecipeTextError(f"{where}brackets or lists lie too deep in each other") from error
    except yaml.YAMLError as error:
        said = " ".join(str(error).replace('in "<unicode string>",', " ").split())
        raise RecipeTextError(f"{where}no valid YAML: {said}") from error
    if path and not isinstance(value, dict):
        raise RecipeTextError(f"{where}no recipe: it holds no settings, such as `trainer: {{max_steps: 100}}`")
    return value


def check_values(args: Iterable[str]) -> None:
    """Refuse the same mistakes in lists and mappings on the command line, where jsonargparse would try other readings.

    Raises:
        UsageError: a key stands twice in one mapping; a setting stands beside `class_path`.
    """
    option = ""
    for arg in args:
        if arg.startswith("--"):
            option, _, arg = arg.partition("=")
        if arg.startswith(("[", "{", "&")):
            try:
                _check_text(arg, f"{option}, ")
            except RecipeTextError as error:
                raise UsageError(str(error)) from None
            except yaml.YAMLError:
                pass  # jsonargparse reports these


def _check_text(text: str, where: str) -> None:
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    if node is not None:
        _count_values(node, where, {})
        _check(node, where, "")


def _count_values(node: yaml.Node, where: str, counts: dict[yaml.Node, int | None]) -> int:
    """Number of values below a node, each anchor counted as often as it is repeated; None marks a node on the way."""
    if node in counts:
        if (known := counts[node]) is None:
            line = node.start_mark.line + 1
            raise RecipeTextError(f"{where}line {line}: the anchor holds itself, without an end: write its values out")
        return known
    counts[node] = None
    parts = node.value if isinstance(node, yaml.CollectionNode) else []
    inner = (part for entry in parts for part in (entry if isinstance(entry, tuple) else (entry,)))
    found = 1 + sum(_count_values(part, where, counts) for part in inner)
    if found > _MOST_VALUES:
        line = node.start_mark.line + 1
        raise RecipeTextError(
            f"{where}line {line}: its anchors repeat each other to more than {_MOST_VALUES:,} values: write out the "
            "values that are meant"
        )
    counts[node] = found
    return found


def _check(node: yaml.Node | None, where: str, place: str) -> None:
    """Look at each mapping below `node`, which stands at the dotted `place` of the recipe."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check(item, where, place)
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    pairs = [(key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)]
    for key, _ in pairs:
        line = key.start_mark.line + 1
        if key.value in lines and key.tag != "tag:yaml.org,2002:merge":
            both = f"lines {lines[key.value]} and {line}" if lines[key.value] != line else f"line {line}"
            raise RecipeTextError(
                f"{where}{both}: {_joined(place, key.value)!r} stands twice, and YAML would keep the last only: "
                "join the two"
            )
        lines[key.value] = line
    stray = next((name for name in lines if name not in _BESIDE_CLASS_PATH), None)
    if "class_path" in lines and stray is not None:
        name = next(value.value for key, value in pairs if key.value == "class_path")
        raise RecipeTextError(
            f"{where}line {lines[stray]}: {_joined(place, stray)!r} stands beside class_path: write the settings of "
            f"{name} under init_args"
        )
    for key, value in pairs:
        _check(value, where, place if key.value == "init_args" else _joined(place, key.value))


def _joined(place: str, key: Any) -> str:
    return f"{place}.{key}" if place else str(key)


jsonargparse.set_loader(PARSER_MODE, load_text, exceptions=(yaml.YAMLError,))
