"""The parser of the command line: recipes as YAML, negative numbers as values, each error as one line."""

import argparse
import importlib
import inspect
import json
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from jsonargparse import Namespace

# Imported for their class names, which a recipe then writes without the module's path.
from lightning_tricks import callbacks, data, language_model, loggers, precision, strategies  # noqa: F401
from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import pl
from lightning_tricks.cli.parse_errors import one_line, parse_message
from lightning_tricks.cli.recipe_text import PARSER_MODE
from lightning_tricks.cli.short_names import FIRST
from lightning_tricks.mixins._plain_settings import subclasses
from lightning_tricks.models import DecoderConfig
from lightning_tricks.schedules import Schedule

if TYPE_CHECKING:
    from lightning.pytorch import cli as lightning_cli
else:
    lightning_cli = importlib.import_module(f"{pl.__name__}.cli")

_LARGEST_SEED = 2**32 - 1  # numpy's
_NEGATIVE = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|-\.?(inf|nan)", re.IGNORECASE)


# Options that take a class, and its base.
_BASES: dict[str, type] = {
    "model": pl.LightningModule,
    "data": pl.LightningDataModule,
    "model.optimizer": torch.optim.Optimizer,
    "model.schedule": Schedule,
    "model.decoder": DecoderConfig,
    "trainer.callbacks": pl.Callback,
    "trainer.logger": pl.loggers.Logger,
    "trainer.strategy": pl.strategies.Strategy,
    "trainer.plugins": pl.plugins.Precision,
}


class RecipeParser(lightning_cli.LightningArgumentParser):
    """A parser whose errors are one line, with the nearest known name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("parser_mode", PARSER_MODE)
        self._last_dump: tuple[Any, str] | None = None
        super().__init__(*args, **kwargs)

    def parse_path(self, cfg_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Read a recipe's file.

        Raises:
            UsageError: it holds no text.
        """
        try:
            return super().parse_path(cfg_path, *args, **kwargs)
        except UnicodeDecodeError as error:
            raise UsageError(f"--config {cfg_path}: no UTF-8 text; give a recipe in YAML") from error

    def dump(self, cfg: Any, *args: Any, **kwargs: Any) -> str:
        """The settings as YAML, of which the last are kept.

        A run writes the same settings to `config.yaml`, to its checkpoints, as hyper-parameters and to TensorBoard, and
        each time would take as long as reading the command line.
        """
        if not self.exit_on_error or isinstance(cfg, dict):  # nested in another parser
            return str(super().dump(cfg, *args, **kwargs))
        options = {"skip_unset" if name == "skip_none" else name: value for name, value in kwargs.items()}
        asked = (cfg.clone(with_meta=False), args, {"format": "parser_mode", "skip_validation": False, **options})
        if self._last_dump is None or self._last_dump[0] != asked:
            self._last_dump = asked, str(super().dump(cfg, *args, **kwargs))
        return self._last_dump[1]

    def _add_signature_parameter(self, container: Any, nested_key: Any, param: Any, *args: Any, **kwargs: Any) -> None:
        """Leave out a default that is a bare `object()`: the library's sign for "not given", and no value of the type.

        All classes of heavyball have such defaults.
        """
        if type(param.default) is object:
            kwargs["default"] = argparse.SUPPRESS
        super()._add_signature_parameter(container, nested_key, param, *args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the cause of a failed parse as a UsageError; a parser nested in another one reports to that one."""
        if not self.exit_on_error:
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        options = [option.lstrip("-") for action in parser._actions for option in action.option_strings]
        raise UsageError(one_line(parse_message(message), options, nameable_classes())) from None


def join_negative_numbers(args: Sequence[str]) -> list[str]:
    """`--option -1e-3` as `--option=-1e-3`: argparse takes a negative number with an exponent for an option.

    Example:
        >>> join_negative_numbers(["fit", "--lr", "-1e-3", "--steps", "-1"])
        ['fit', '--lr=-1e-3', '--steps=-1']
    """
    joined: list[str] = []
    for arg in args:
        if joined and joined[-1].startswith("--") and "=" not in joined[-1] and _NEGATIVE.fullmatch(arg):
            joined[-1] += f"={arg}"
        else:
            joined.append(arg)
    return joined


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse values among a command's parsed options that Lightning accepts and fails on later.

    Raises:
        UsageError: a seed that no generator takes; another word for `resume`; an interval of 0.
    """
    seed = options.get("seed_everything")
    if not isinstance(seed, bool | None) and not 0 <= seed <= _LARGEST_SEED:
        raise UsageError(f"seed_everything={seed}: give a whole number from 0 to {_LARGEST_SEED}")
    if options.get("resume") not in (None, "auto", "none"):
        raise UsageError(
            f"resume={options['resume']}: give auto (go on from the newest checkpoint, start where there is none) or "
            "none; to go on from a certain one, give --ckpt_path FILE, or --ckpt_path last"
        )
    trainer = options.get("trainer", {})
    if not isinstance(trainer, Mapping | Namespace):
        raise UsageError(
            f"trainer={json.dumps(trainer)}: give settings below it, such as `trainer: {{max_steps: 100}}`, or leave "
            "it out"
        )
    for option, remedy in (
        ("accumulate_grad_batches", "the micro-batches of one optimizer step, 1 or more"),
        ("val_check_interval", "a number above 0, or limit_val_batches: 0 for no validation"),
        ("check_val_every_n_epoch", "1 or more, or null to count batches only"),
    ):
        value = trainer.get(option)
        if isinstance(value, int | float) and (math.isnan(value) or value <= 0):
            raise UsageError(f"trainer.{option}={value}: give {remedy}")
    if isinstance(clip := trainer.get("gradient_clip_val"), int | float) and not clip >= 0:
        raise UsageError(f"trainer.gradient_clip_val={clip}: give a number above 0, or null for no clipping")


def class_list(args: Sequence[str]) -> str | None:
    """The classes that an option takes, where `--OPTION.help` names none; None without such an option."""
    for arg, following in zip(args, [*args[1:], "--"], strict=True):
        option = arg.removeprefix("--").removesuffix(".help")
        if arg == f"--{option}.help" and option in _BASES and following.startswith("-"):
            found = {cls.__name__: cls for cls in subclasses(_BASES[option]) if _can_be_named(cls)}
            width = max(map(len, found))
            lines = [f"  {name:{width}}  {_title(found[name])}".rstrip() for name in sorted(found, key=str.lower)]
            return "\n".join([f"{option} takes one of these classes, or one of your own as my_module.MyClass:", *lines,
                              f"{arg} CLASS lists the options of one."])  # fmt: skip
    return None


def _can_be_named(cls: type) -> bool:
    known = cls.__module__.partition(".")[0] in FIRST and ".demos." not in cls.__module__
    public = getattr(importlib.import_module("lightning_tricks"), cls.__name__, None) is cls
    ours = cls.__module__.startswith("lightning_tricks.")
    return known and not cls.__name__.startswith("_") and not inspect.isabstract(cls) and (public or not ours)


def _title(cls: type) -> str:
    """The first sentence of a class's docstring, on one line."""
    text = " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split())
    return textwrap.shorten(re.split(r"(?<=\.) ", text)[0], 90, placeholder=" ...")


def nameable_classes() -> dict[str, list[str]]:
    """Every class that a recipe may name shortly, with its parameters' names."""
    found = [cls for base in _BASES.values() for cls in subclasses(base)]
    known = {package: number for number, package in enumerate(reversed(FIRST), 1)}
    found.sort(key=lambda cls: known.get(cls.__module__.partition(".")[0], 0))  # of two with one name the last counts
    return {cls.__name__: _parameters(cls) for cls in found}


def _parameters(cls: type) -> list[str]:
    """Names of the constructor's parameters; where it takes `**kwargs`, also those of the next class in the bases."""
    names: list[str] = []
    for owner in cls.__mro__:
        if "__init__" not in vars(owner):
            continue
        parameters = list(inspect.signature(owner.__init__).parameters.values())[1:]  # type: ignore[misc]
        names += [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return [name for name in names if name != "params"]  # of an optimizer, which no recipe sets
