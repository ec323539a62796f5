"""`--help` of a command on a recipe: its own options; for `fit` then those of the recipe by use, in a sentence each.

`--help all` is jsonargparse's list. `--PLACE.help [CLASS]` has all options of one class; without CLASS, the recipe's.
"""

import argparse
import inspect
import json
import pkgutil
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jsonargparse._typehints as typehints
import torch
from jsonargparse import Namespace

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.suggest import did_you_mean
from lightning_tricks._core.terminal import terminal_columns, wrapped
from lightning_tricks.cli.fit_options import FIT_OPTIONS
from lightning_tricks.commands import COMMANDS
from lightning_tricks.data.text_data import TextData
from lightning_tricks.language_model import LanguageModel
from lightning_tricks.mixins._plain_settings import subclasses
from lightning_tricks.models import Llama
from lightning_tricks.schedules import WarmupCosine

# The classes whose options are shown without a recipe.
_USUAL = {"data": TextData, "model": LanguageModel, "model.decoder": Llama, "model.optimizer": torch.optim.AdamW,
          "model.schedule": WarmupCosine}  # fmt: skip
_SHOWN = {"data": 9, "model": 6, "model.decoder": 8, "trainer": 10}  # least number of options, else 4
_OF_TENSORS = r"  --\S+\.help \S+\s+Show[\w\s]+Tensor\s+and\s+exit\.\n|,\s+known\s+subclasses:\s+torch\.Tensor[^)]*"
_LISTS = ("trainer.callbacks", "trainer.plugins", "model.param_rules")
_TRAINER = ("max_steps", "devices", "num_nodes", "strategy", "precision", "accumulate_grad_batches",
            "gradient_clip_val", "val_check_interval", "log_every_n_steps", "callbacks")  # fmt: skip
_TEXTS = {
    "ckpt_path": "the checkpoint to start from: a file, a folder or last",
    "weights_only": "true: take tensors from the checkpoint, and no other objects",
    "config": "the recipe; of several, a later one overrides an earlier one",
    "seed_everything": "seed of the first weights; true chooses one",
    "trainer.strategy": "such as ddp or FSDP2Strategy",
    "trainer.precision": "such as bf16-mixed or 32-true",
    "trainer.accumulate_grad_batches": "micro-batches of one optimizer step",
    "trainer.gradient_clip_val": "largest norm of the gradient, to which a larger one is scaled down",
    "trainer.val_check_interval": "batches between two validations, or a share of an epoch, such as 0.5",
    "trainer.log_every_n_steps": "optimizer steps between two log lines",
    "trainer.callbacks": "+=X adds one, -=X removes one",
}


class HelpAction(argparse._HelpAction):
    """`--help`, `--help all`, `--help CLASS` and, from `help_last`, `--help=PLACE:CLASS`."""

    def __init__(self, option_strings: Sequence[str], **kwargs: Any) -> None:
        super().__init__(option_strings, help="the main options; all of them with --help all")
        self.nargs, self.metavar = "?", "all"

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Print it, with the settings of the words before it, and exit."""
        if values == "all" or (values is None and "model" not in _options(parser)):
            parser.print_help()
        else:
            place, _, name = (values or "").rpartition(":")
            place = place or (name and _place_of(parser, namespace, name))
            lines = _class_help(parser, namespace, place, name) if place else _main_options(parser, namespace)
            print(wrapped("\n".join(lines), terminal_columns(120), 2))
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
            if match[2] is None and after and (after[0] == "all" or (number + bool(place) and after[0][0] != "-")):
                value = after.pop(0)
            wanted = f"{place.replace('.init_args', '')}:{value}" if place else value
            return [*args[:number], *after, f"--help={wanted}" if wanted else "--help"]
    return list(args)


def _options(parser: Any) -> dict[str, Any]:
    """The options of a parser that have a value and are read, by name."""
    read = [one for one in parser._actions if argparse.SUPPRESS not in (one.default, one.help)]
    return {one.dest: one for one in read if one.option_strings}


def _class_parser(parser: Any, cls: Any, place: str) -> Any:
    """A parser of the options of a class at a place; not of the parameters that an optimizer gets."""
    options = type(parser)(usage=argparse.SUPPRESS, description="", add_help=False)
    options.add_class_arguments(cls, place, as_group=False, skip={"params"})
    return options


def _bases(parser: Any, config: Any, place: str) -> Any:
    """The classes of which a subclass can stand at a place of the recipe."""
    above = place.rpartition(".")[0]
    if place not in _options(parser) and above and (owner := _class_at(parser, config, above)[0]) is not None:
        parser = _class_parser(parser, owner, above)
    return typehints.get_help_types(getattr(_options(parser).get(place), "_typehint", None)) or ()


def _given(config: Any, place: str) -> list[Any]:
    """The classes of the recipe at a place, each with its settings by the names of their options."""
    above = "trainer." if place.startswith("trainer.") else ""
    given = config.get(above + place.removeprefix(above).replace(".", ".init_args."))
    return [(pkgutil.resolve_name(one.class_path),
             {f"{place}.{name}": value for name, value in vars(one.get("init_args") or Namespace()).items()})
            for one in (given if isinstance(given, list) else [given]) if getattr(one, "class_path", None)]  # fmt: skip


def _class_at(parser: Any, config: Any, place: str) -> tuple[Any, dict[str, Any]]:
    """The class that stands at a place, or None, and its settings; without a recipe the usual one."""
    found = [] if place in _LISTS else _given(config, place)
    if found or place not in _USUAL or config.get(place.partition(".")[0]) is not None:
        return found[0] if found else (None, {})
    bases = _bases(parser, config, place)
    return next((cls for cls in (_USUAL[place], *bases) if issubclass(cls, bases)), None), {}


def _names(bases: Any) -> set[str]:
    """The names of these classes and of their subclasses."""
    return {each.__name__ for base in bases for each in (base, *subclasses(base)) if each.__name__[0] != "_"}


def _place_of(parser: Any, config: Any, name: str) -> str:
    """The place of the recipe where a class of this name can stand."""
    places = ("trainer.logger", "trainer.strategy", *_USUAL, *_LISTS)
    names = {each: place for place in places for each in _names(_bases(parser, config, place))}
    if (found := names.get(name.rpartition(".")[2])) is None:
        raise UsageError(f"--help {name}: no such class{did_you_mean(name, names) or '; --help has the main options'}")
    return found


def _class_help(parser: Any, config: Any, place: str, name: str) -> Iterator[str]:
    """All options of the class of this name at this place, or of the recipe's."""
    if not (bases := _bases(parser, config, place)):
        raise UsageError(f"{place}.help: no class stands there; --help lists the main options")
    known = _names(bases)
    cls = _class_at(parser, config, place)[0]
    if name or cls is None:
        near = did_you_mean(name, known) or f"; there are {', '.join(sorted(known))}"
        try:
            cls = pkgutil.resolve_name(typehints.resolve_class_path_by_name(bases, name or "".join(known)))
            assert issubclass(cls, bases)
        except (ImportError, AttributeError, ValueError, TypeError, AssertionError):
            raise UsageError(f"{place}.help{f'={name}: no such class' if name else ': name a class'}{near}") from None
    shown, name = _class_parser(parser, cls, place), cls.__name__
    given = next((settings for each, settings in _given(config, place) if each is cls), None)
    changed = {option: given[option] for option, one in _options(shown).items()
               if given is not None and given.get(option, one.default) != one.default}  # fmt: skip
    shown.set_defaults({option: value for option, value in changed.items() if "Namespace(" not in repr(value)})
    text = re.sub(_OF_TENSORS, "", shown.format_help()).strip()
    words = [f"--{place} {name}"] if given is None and len(known) > 1 else []
    if place == "trainer.callbacks":  # whose options go to the last one: that of the recipe makes place for its copy
        spec = Namespace(class_path=name, init_args={option.split(".")[2]: changed[option] for option in changed})
        added = json.dumps(spec.as_dict(), default=str) if changed else name
        words = [f"--{place}-={name}"] * (given is not None) + [shlex.quote(f"--{place}+={added}")]
    yield f"{name}: {' '.join(inspect.cleandoc(cls.__doc__ or '').partition(chr(10) * 2)[0].split())}"
    if words:
        yield f"on the command line{', before its options' if text else ''}: {' '.join(words)}"
    yield text or "takes no options"


def _main_options(parser: Any, config: Any) -> Iterator[str]:
    """The options of a command; for `fit`, then those of the recipe by their use."""
    command, late = parser.prog.split()[-1], ("config", "seed_everything", *FIT_OPTIONS)
    options = dict(sorted(_options(parser).items(), key=lambda item: item[0] in late))
    own = {name: one for name, one in options.items() if not re.match(r"(trainer|model|data)\b", name)
           and (command == "fit" or name not in FIT_OPTIONS)}  # fmt: skip
    row = COMMANDS.get(command)  # of Lightning's commands it says more than their docstrings
    text = parser.description.split(". ")[0] if row is None or row.module else row.help
    yield f"{parser.format_usage()}{command}: {text}".removesuffix(".")
    yield from _rows(own, config)
    if command != "fit":
        yield "recipe: data, model and trainer, as in `fit --help`, such as --trainer.devices 8; all with --help all"
        return
    model = _class_at(parser, config, "model")[0]
    places = [*_options(_class_parser(parser, model, "model"))] if model is not None else []
    parts = [place for place in places if _class_at(parser, config, place)[0] is not None]
    for place in ("data", "model", *parts):
        cls, settings = _class_at(parser, config, place)
        if cls is not None:
            yield f"{place}: {cls.__name__}, all options: --{place}.help {cls.__name__}"
            rows = {name: one for name, one in _options(_class_parser(parser, cls, place)).items() if name not in parts}
            yield from _rows(rows, settings, _SHOWN.get(place, 4))
    yield "trainer:"
    order = dict.fromkeys([*(f"trainer.{name}" for name in _TRAINER), *options])
    yield from _rows({name: options[name] for name in order if name.startswith("trainer.")}, config, _SHOWN["trainer"])
    yield "all options: --help all, of a class: --help StepGuard"
    start = f"{parser.usage.partition(' --config')[0]} --config tiny.yaml"
    yield f"examples:\n  {start} --trainer.max_steps 100\n  {start} --trainer.callbacks+=EMA"


def _shown(value: Any) -> str:
    """A value as in a recipe, a class by its name alone."""
    if isinstance(value, Namespace | dict):
        return str(value.get("class_path") or "{...}").rpartition(".")[2]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    plain = json.dumps(value) if isinstance(value, bool | None) else str(value)
    return f"{value:g}" if isinstance(value, float) else plain


def _rows(options: Mapping[str, Any], given: Any, count: int | None = None) -> Iterator[str]:
    """Value and meaning of each option; with `count`, a sentence of each that is set, and of others up to it."""
    values = {name: given.get(name, one.default) for name, one in options.items()}
    is_set = [name for name, one in options.items() if values[name] != one.default]
    names = [*dict.fromkeys([*is_set, *options])][: max(count, len(is_set))] if count else [*options]
    texts = ["required" if values[name] is None and options[name].required else _shown(values[name]) for name in names]
    for number, name in enumerate(names):
        if values[name] is None and (real := re.search(r"Default: ``'?([^`']+)", options[name].help or "")):
            texts[number] = real[1].replace("None", "null")
    long, wide = max(map(len, names), default=0), max((len(text) for text in texts if len(text) < 13), default=0)
    for name, value in zip(names, texts, strict=True):
        text = " ".join(_TEXTS.get(name, options[name].help or "").removeprefix("fit: ").split()).removesuffix(".")
        line = f"  --{name:{long}} {value:{wide}}  " + (re.split(r"[.;] | \(default", text)[0] if count else text)
        yield wrapped(line.rstrip(), terminal_columns(120), min(long + wide + 7, terminal_columns(120) - 30))
