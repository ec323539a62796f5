"""Classes by their short names, and the settings that stay when an override names another class.

- Several packages have an AdamW, an SGD and a Muon; jsonargparse refuses a name that several have. Here it is the class
  of ours, else of torch, else of Lightning.
- With `--model.decoder GPT2`, jsonargparse keeps each setting of the old class whose name the new class has too, and
  says nothing. Here a class may list the settings that it takes over (`taken_over`), and each change is one line.
"""

import pkgutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jsonargparse._typehints as typehints
from jsonargparse import Namespace

from lightning_tricks._core.replaced import replaced
from lightning_tricks._trainer.lightning import pl

ALIASES = {"WSD": "WarmupStableDecay"}
FIRST = ("lightning_tricks", "torch", "lightning", "pytorch_lightning")


@contextmanager
def known_names_first() -> Iterator[None]:
    """Inside the `with`, a short name that several classes have is that of the first of these packages; see ALIASES."""
    original = typehints.resolve_class_path_by_name

    def resolve(cls: Any, name: str) -> str:
        name = ALIASES.get(name, name)
        try:
            return original(cls, name)
        except ValueError:
            paths = [path for path in typehints.get_all_subclass_paths(cls) if path.rpartition(".")[2] == name]
            for package in FIRST:
                own = [path for path in paths if path.partition(".")[0] == package]
                if len(own) == 1:
                    return own[0]
            raise

    with replaced(typehints, "resolve_class_path_by_name", resolve):
        yield


@dataclass
class ClassChange:
    """One class in place of another one."""

    old: str  # a class path, as `new`
    new: str
    before: dict[str, Any]  # settings that the recipe gave to the old class
    after: dict[str, Any]  # settings that the new class has taken over


def _settings(spec: Any) -> dict[str, Any]:
    """The `init_args` of a class in a configuration, by their first names; empty without any."""
    init_args = spec["init_args"] if spec and "init_args" in spec else None
    return dict(vars(init_args) if isinstance(init_args, Namespace) else init_args or {})


def _taken_over(class_path: str) -> tuple[str, ...] | None:
    """Names of the settings that the class takes over from another one; None for jsonargparse's rule."""
    cls = pkgutil.resolve_name(class_path)
    if isinstance(cls, type) and issubclass(cls, pl.Callback):
        return ()  # callbacks stand in a list: the old one only had the same index
    return getattr(cls, "taken_over", None)


@contextmanager
def watch_class_changes() -> Iterator[list[ClassChange]]:
    """Inside the `with`, classes choose the settings that they take over. Gives a list that each change is added to."""
    original = typehints.discard_init_args_on_class_path_change
    changes: list[ClassChange] = []

    def discard(parser: Any, previous: Any, value: Any) -> None:
        before = _settings(previous)
        if not before or previous["class_path"] == value["class_path"]:
            original(parser, previous, value)
            return
        wanted = _taken_over(value["class_path"])
        for name in before:
            if wanted is not None and name not in wanted:
                previous["init_args"].pop(name)
        original(parser, previous, value)
        change = ClassChange(previous["class_path"], value["class_path"], before, _settings(previous))
        if change not in changes:  # jsonargparse asks several times
            changes.append(change)

    with replaced(typehints, "discard_init_args_on_class_path_change", discard):
        yield changes


def change_lines(changes: list[ClassChange], config: Mapping[str, Any]) -> list[str]:
    """One line for each change, in order, that the final `config` shows: which settings stay, which are dropped."""
    found: dict[str, str] = {}
    for change in changes:
        for place, final in _places(config, change.new):
            stay = _listed({k: v for k, v in change.after.items() if k in final and final[k] == v})
            gone = {k: v for k, v in change.before.items() if k not in change.after}
            dropped = _listed({k: v for k, v in gone.items() if k not in final or final[k] != v})
            new, old = (class_path.rpartition(".")[2] for class_path in (change.new, change.old))
            line = f"{place}: {new} in place of {old}"
            line += f"; {stay} stay" if stay else ""
            if dropped:
                again = next((k for k in gone if k in final), None)
                line += f"; dropped: {dropped}"
                line += f" (to set one again: --{place}.{again} {gone[again]})" if again else ""
            found[place] = line  # the last one counts
    return list(found.values())


def _places(config: Mapping[str, Any], class_path: str, before: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each option that holds the class, as the command line names it, with the class's final settings."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            place = before if key == "init_args" else f"{before}.{key}".lstrip(".")
            if value.get("class_path") == class_path:
                yield place, value.get("init_args") or {}
            yield from _places(value, class_path, place)


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())
