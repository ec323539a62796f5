"""`--help` of a command on a recipe: its own options, then those of the recipe by use, each in one line.

`--help all` is jsonargparse's list. `--PLACE.help [CLASS]` has all options of one class; without CLASS, the recipe's.
"""

import argparse
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jsonargparse._typehints as typehints
import torch
from jsonargparse import Namespace
from jsonargparse._actions import _ActionConfigLoad, remove_actions
from jsonargparse._parameter_resolvers import get_signature_parameters

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.suggest import did_you_mean
from lightning_tricks._core.terminal import terminal_columns, wrapped
from lightning_tricks.cli.fit_options import FIT_OPTIONS
from lightning_tricks.data.text_data import TextData
from lightning_tricks.language_model import LanguageModel
from lightning_tricks.models import Llama
from lightning_tricks.schedules import WarmupCosine

# The classes whose options are shown without a recipe.
_USUAL = {"data": TextData, "model": LanguageModel, "model.decoder": Llama, "model.optimizer": torch.optim.AdamW,
          "model.schedule": WarmupCosine}  # fmt: skip
_SHOWN = {"data": 9, "model": 6, "model.decoder": 8, "trainer": 10}  # least number of options, else 4
_TRAINER = ("max_steps", "devices", "num_nodes", "strategy", "precision", "accumulate_grad_batches",
            "gradient_clip_val", "val_check_interval", "log_every_n_steps", "callbacks")  # fmt: skip
_TEXTS = {
    "ckpt_path": "the checkpoint to start from: a file, a folder or last",
    "weights_only": "true: take tensors from the checkpoint, and no other objects",
    "trainer.strategy": "such as ddp or FSDP2Strategy",
    "trainer.callbacks": "+=X adds one, -=X removes one",
}


class HelpAction(argparse._HelpAction):
    """`--help`, `--help all` and, from `help_last`, `--help=PLACE:CLASS`."""

    def __init__(self, option_strings: Sequence[str], **kwargs: Any) -> None:
        super().__init__(option_strings, help="the main options; all of them with --help all")
        self.nargs, self.metavar = "?", "all"

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Print it, with the settings of the words before it, and exit."""
        if values not in (None, "all"):
            print(_class_help(parser, namespace, *values.split(":")))
        elif values or not any(action.dest == "model" for action in parser._actions):
            parser.print_help()
        else:
            print("\n".join(_main_options(parser, namespace)))
        parser.exit()


def help_last(args: Sequence[str]) -> list[str]:
    """Move the request for help behind the other words, so that it knows their settings.

    Example:
        >>> help_last(["fit", "--model.optimizer.help", "AdamW", "--config", "a.yaml"])
        ['fit', '--config', 'a.yaml', '--help=model.optimizer:AdamW']
    """
    for number, arg in enumerate(args):
        if match := re.fullmatch(r"(?:-h|--(?:(\w[\w.]*)\.)?help)(?:=(.*))?", arg):
            place, value = match.groups("")
            after = list(args[number + 1 :])
            if match[2] is None and after and (not after[0].startswith("-") if place else after[0] == "all"):
                value = after.pop(0)
            wanted = f"{place.replace('.init_args', '')}:{value}" if place else value
            return [*args[:number], *after, f"--help={wanted}" if wanted else "--help"]
    return list(args)


def _options(cls: Any) -> dict[str, Any]:
    """The parameters of a class by name; not those that an optimizer gets."""
    return {one.name: one for one in get_signature_parameters(cls, None, logger=False) if one.name != "params"}


def _bases(parser: Any, config: Any, place: str) -> Any:
    """The classes of which a subclass can stand at a place of the recipe."""
    kind = next((getattr(each, "_typehint", None) for each in parser._actions if each.dest == place), None)
    above, _, name = place.rpartition(".")
    if kind is None and above and (owner := _class_at(parser, config, above)[0]) is not None:
        kind = getattr(_options(owner).get(name), "annotation", None)
    return typehints.get_help_types(kind) or ()


def _class_at(parser: Any, config: Any, place: str) -> tuple[Any, Mapping[str, Any]]:
    """The class that stands at a place, or None, and its settings; without a recipe the usual one."""
    above = "trainer." if place.startswith("trainer.") else ""
    spec = config.get(above + place.removeprefix(above).replace(".", ".init_args."))
    if isinstance(spec, Namespace) and "class_path" in spec:
        return pkgutil.resolve_name(spec.class_path), vars(spec.get("init_args") or Namespace())
    if place not in _USUAL or config.get(place.partition(".")[0]) is not None:
        return None, {}
    bases = _bases(parser, config, place)
    return next((cls for cls in (_USUAL[place], *bases) if issubclass(cls, bases)), None), {}


def _class_help(parser: Any, config: Any, place: str, name: str) -> str:
    """All options of the class of this name at this place, or of the recipe's."""
    if not (bases := _bases(parser, config, place)):
        raise UsageError(f"{place}.help: no class stands there; --help lists the main options")
    cls, settings = _class_at(parser, config, place)
    if name or cls is None:
        known = {each.rpartition(".")[2] for base in bases for each in typehints.get_all_subclass_paths(base)}
        of_recipe, near = cls, did_you_mean(name, known) or f"; there are {', '.join(sorted(known))}"
        try:
            only = "".join(known) if len(known) == 1 else ""
            cls = pkgutil.resolve_name(typehints.resolve_class_path_by_name(bases, name or only))
            assert issubclass(cls, bases)
        except (ImportError, AttributeError, ValueError, TypeError, AssertionError):
            raise UsageError(f"{place}.help{f'={name}: no such class' if name else ': name a class'}{near}") from None
        settings = settings if cls is of_recipe else {}
    shown = type(parser)(usage=argparse.SUPPRESS, description="", add_help=False)
    shown.add_class_arguments(cls, place, skip={"params"})
    remove_actions(shown, (_ActionConfigLoad,))
    plain = {option: value for option, value in settings.items() if "Namespace(" not in repr(value)}
    shown.set_defaults({f"{place}.{option}": value for option, value in plain.items()})
    return str(shown.format_help().strip())


def _main_options(parser: Any, config: Any) -> Iterator[str]:
    """The options of a command, then those of the recipe by their use."""
    yield wrapped(parser.format_usage().strip(), terminal_columns(120), 11)
    command = parser.prog.split()[-1]
    late = ("config", "seed_everything", *FIT_OPTIONS)
    actions = {each.dest: (config.get(each.dest), each.default, (each.help or "").removeprefix("fit: "))
               for each in sorted(parser._actions, key=lambda each: each.dest in late)
               if each.option_strings and each.default is not argparse.SUPPRESS}  # fmt: skip
    yield f"{command}:"
    yield from _rows({name: row for name, row in actions.items() if not re.match(r"(trainer|model|data)\b", name)
                      and (command == "fit" or name not in FIT_OPTIONS)}, 99)  # fmt: skip
    model = _class_at(parser, config, "model")[0]
    places = [f"model.{name}" for name in _options(model)] if model is not None else []
    parts = [place for place in places if _class_at(parser, config, place)[0] is not None]
    for place in ("data", "model", *parts):
        cls, settings = _class_at(parser, config, place)
        if cls is not None:
            yield f"{place}: {cls.__name__}, all options: --{place}.help {cls.__name__}"
            options = {f"{place}.{name}": (settings.get(name, one.default), one.default, one.doc)
                       for name, one in _options(cls).items()}  # fmt: skip
            yield from _rows({name: row for name, row in options.items() if name not in parts}, _SHOWN.get(place, 4))
    yield "trainer:"
    trainer = [name for name in actions if name.startswith("trainer.")]
    order = dict.fromkeys([*(f"trainer.{name}" for name in _TRAINER), *trainer])
    yield from _rows({name: actions[name] for name in order}, _SHOWN["trainer"])
    yield "all options: --help all"


def _shown(value: Any) -> str:
    """A value as in a recipe, a class by its name alone."""
    if isinstance(value, Namespace | dict):
        return str(value.get("class_path") or "{...}").rpartition(".")[2]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, bool | None):
        return "null" if value is None else str(value).lower()
    return "required" if value is inspect.Parameter.empty else f"{value:g}" if isinstance(value, float) else str(value)


def _rows(options: Mapping[str, tuple[Any, Any, Any]], count: int) -> Iterator[str]:
    """Value and first sentence of the options that are set, and of others up to `count`, in one line each."""
    is_set = [name for name, (value, default, _) in options.items() if value != default]
    shown = [*is_set, *(name for name in options if name not in is_set)][: max(count, len(is_set))]
    cut = {name: re.sub(r"(.{10}).{4,}", r"\1...", _shown(options[name][0])) for name in options if name in shown}
    names, values = max(map(len, cut), default=0), max(map(len, cut.values()), default=0)
    for name, value in cut.items():
        line = f"  --{name:{names}} {value:{values}}  "
        text = re.split(r"[.;] |\.$| \(default", " ".join(_TEXTS.get(name, options[name][2] or "").split()))[0]
        yield (line + textwrap.shorten(text, max(terminal_columns(120) - len(line), 4), placeholder=" ...")).rstrip()
