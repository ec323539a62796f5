"""The parser of the command line: recipes as YAML, negative numbers as values, each error as one line.

Mistakes that YAML itself allows are refused in the text. A key that stands twice: YAML keeps the last and silently
drops the first. Settings beside `class_path` in place of under its `init_args`: jsonargparse takes the mapping for
something else.

Several packages have an AdamW, an SGD and a Muon; jsonargparse refuses a name that several have. Here it is the class
of the first package in PACKAGE_ORDER.
"""

import argparse
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import jsonargparse
import jsonargparse._typehints as typehints
import torch
import yaml
from jsonargparse import Namespace
from jsonargparse._common import NonParsingAction

# Imported for their class names, which a recipe then writes without the module's path.
from lightning_tricks import callbacks, data, language_model, loggers, precision, strategies  # noqa: F401
from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.replaced import replaced
from lightning_tricks._core.terminal import terminal_columns, wrapped
from lightning_tricks._host.import_path import name_modules
from lightning_tricks._trainer.lightning import STRATEGY_NAMES, pl
from lightning_tricks.cli.error_lines import one_line, parse_message
from lightning_tricks.cli.help import HelpAction
from lightning_tricks.mixins._plain_settings import subclasses
from lightning_tricks.models import DecoderConfig
from lightning_tricks.schedules import Schedule

if TYPE_CHECKING:
    from lightning.pytorch import cli as lightning_cli
else:
    lightning_cli = importlib.import_module(f"{pl.__name__}.cli")

ALIASES = {"WSD": "WarmupStableDecay", **STRATEGY_NAMES}
PACKAGE_ORDER = ("lightning_tricks", "torch", "lightning", "pytorch_lightning")  # of classes with one name
PARSER_MODE = "recipe"  # jsonargparse's word for the language that a parser reads
_BESIDE_CLASS_PATH = {"class_path", "init_args", "dict_kwargs", "<<"}
_NEGATIVE = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|-\.?(inf|nan)", re.IGNORECASE)


# The bases of the classes that a recipe may name shortly.
CLASS_BASES: tuple[type, ...] = (
    pl.LightningModule, pl.LightningDataModule, torch.optim.Optimizer, Schedule, DecoderConfig, pl.Callback,
    pl.loggers.Logger, pl.strategies.Strategy, pl.plugins.Precision,
)  # fmt: skip


class RecipeParser(lightning_cli.LightningArgumentParser):
    """A parser whose errors are one line, with the nearest known name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("parser_mode", PARSER_MODE)
        self._last_dump: tuple[Any, str] | None = None
        with_help = kwargs.pop("add_help", True)
        super().__init__(*args, add_help=False, **kwargs)
        if with_help:
            self.add_argument("-h", "--help", action=HelpAction)

    def parse_path(self, cfg_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Read a recipe's file.

        Raises:
            UsageError: it holds no text.
        """
        try:
            return super().parse_path(cfg_path, *args, **kwargs)
        except UnicodeDecodeError as error:
            raise UsageError(f"--config {cfg_path}: no UTF-8 text; give a recipe in YAML") from error

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """The help, no line of which is wider than the terminal."""
        return wrapped(super().format_help(*args, **kwargs), terminal_columns(120), 2)

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

    def link_arguments(self, source: Any, target: str, compute_fn: Any = None, apply_on: str = "parse") -> None:
        """Link as in LightningCLI's parser, where `model.width` is an argument of the model's class.

        Here `model` and `data` take any class, and jsonargparse calls the argument `model.init_args.width`. The source
        of a link on `instantiate` is an attribute of the object and keeps its name.
        """
        if apply_on == "parse":
            source = tuple(map(_of_any_class, source)) if isinstance(source, tuple) else _of_any_class(source)
        super().link_arguments(source, _of_any_class(target), compute_fn, apply_on)

    def _add_signature_parameter(self, container: Any, nested_key: Any, param: Any, *args: Any, **kwargs: Any) -> None:
        """Leave out a default that is a bare `object()`: the library's sign for "not given", and no value of the type.

        All classes of heavyball have such defaults. Where a text is as good as a class, it names no file of settings:
        jsonargparse would take what the file holds, such as that of a mixture's source.
        """
        if type(param.default) is object:
            kwargs["default"] = argparse.SUPPRESS
        if re.search(r"\bstr\b", str(param.annotation)):
            kwargs["sub_configs"] = False
        super()._add_signature_parameter(container, nested_key, param, *args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the cause of a failed parse as a UsageError; a parser nested in another one reports to that one."""
        if not self.exit_on_error:
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        options = [option.lstrip("-") for action in parser._actions for option in action.option_strings]
        raise UsageError(one_line(parse_message(message), options, nameable_classes())) from None


class RemoveCallback(NonParsingAction):
    """Takes each callback of a class out of those that the words before it have set."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs | {"default": argparse.SUPPRESS, "help": "Take callbacks of this class out."})

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Change the list in the settings so far."""
        there = namespace.get("trainer.callbacks") or []
        there = there if isinstance(there, list) else [there]
        package, _, name = values.rpartition(".")  # a class may have several paths in its package
        left = [one for one in there if one.class_path.rpartition(".")[2] != name
                or not one.class_path.startswith(package.partition(".")[0])]  # fmt: skip
        if len(left) == len(there):
            known = ", ".join(one.class_path.rpartition(".")[2] for one in there) or "none"
            raise UsageError(f"trainer.callbacks-={values}: not in the list of callbacks, which has {known}")
        namespace["trainer.callbacks"] = left


def _of_any_class(option: str) -> str:
    return re.sub(r"^(model|data)\.(?!init_args\b|class_path\b)", r"\1.init_args.", option)


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


def nameable_classes() -> dict[str, list[str]]:
    """Every class that a recipe may name shortly, with its parameters' names."""
    found = [cls for base in CLASS_BASES for cls in subclasses(base)]
    known = {package: number for number, package in enumerate(reversed(PACKAGE_ORDER), 1)}
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
            for package in PACKAGE_ORDER:
                own = [path for path in paths if path.partition(".")[0] == package]
                if len(own) == 1:
                    return own[0]
            raise

    with replaced(typehints, "resolve_class_path_by_name", resolve):
        yield


@contextmanager
def watch_class_changes() -> Iterator[list[str]]:
    """Inside the `with`, classes choose the settings that they take over. Gives a list of lines, one a change.

    With `--model.decoder GPT2`, jsonargparse alone keeps each setting of the old class whose name the new class has
    too, and says nothing.
    """
    original = typehints.discard_init_args_on_class_path_change
    lines: list[str] = []

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
        after = _settings(previous)
        new, old = (spec["class_path"].rpartition(".")[2] for spec in (value, previous))
        stay = ", ".join(f"{name}={given}" for name, given in before.items() if name in after)
        dropped = ", ".join(f"{name}={given}" for name, given in before.items() if name not in after)
        line = (
            f"{new} instead of {old}"
            + (f"; kept: {stay}" if stay else "")
            + (f"; dropped: {dropped}" if dropped else "")
        )
        if wanted != () and line not in lines:  # jsonargparse asks several times
            lines.append(line)

    with replaced(typehints, "discard_init_args_on_class_path_change", discard):
        yield lines


def _settings(spec: Any) -> dict[str, Any]:
    """The `init_args` of a class in a configuration; empty without any."""
    init_args = spec["init_args"] if spec and "init_args" in spec else None
    return dict(vars(init_args) if isinstance(init_args, Namespace) else init_args or {})


def _taken_over(class_path: str) -> tuple[str, ...] | None:
    """Names of the settings that the class takes over from another one; None for jsonargparse's rule."""
    cls = pkgutil.resolve_name(class_path)
    if isinstance(cls, type) and issubclass(cls, pl.Callback):
        return ()  # callbacks stand in a list: the old one only had the same index
    return getattr(cls, "taken_over", None)


class RecipeTextError(yaml.YAMLError):
    """A mistake in a recipe's text; a YAMLError, so that jsonargparse reports it as one."""


def load_text(text: str, path: str = "") -> Any:
    """The value of YAML text, as jsonargparse reads it; `path` is that of a file, empty for a value of an option.

    Raises:
        RecipeTextError: no YAML; no settings in the file; a key twice in one mapping; a setting beside `class_path`.
    """
    where = f"{path}, " if path else ""
    name_modules(text)
    try:
        if not {":", "&"}.isdisjoint(text):
            _check(yaml.compose(text, Loader=yaml.SafeLoader), where, "")
        value = jsonargparse.get_loader("yaml")(text)
    except RecipeTextError:
        raise
    except yaml.YAMLError as error:
        said = " ".join(str(error).replace('in "<unicode string>",', " ").split())
        raise RecipeTextError(f"{where}no valid YAML: {said}") from error
    if path and not isinstance(value, dict):
        raise RecipeTextError(f"{where}no recipe: it holds no settings, such as `trainer: {{max_steps: 100}}`")
    return value


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
                f"{where}{both}: {_joined(place, key.value)!r} is there twice, and YAML would keep only the last: "
                "join the two"
            )
        lines[key.value] = line
    stray = next((name for name in lines if name not in _BESIDE_CLASS_PATH), None)
    if "class_path" in lines and stray is not None:
        name = next(value.value for key, value in pairs if key.value == "class_path")
        raise RecipeTextError(
            f"{where}line {lines[stray]}: {_joined(place, stray)!r} is beside class_path: write the settings of "
            f"{name} under init_args"
        )
    for key, value in pairs:
        _check(value, where, place if key.value == "init_args" else _joined(place, key.value))


def _joined(place: str, key: Any) -> str:
    return f"{place}.{key}" if place else str(key)


jsonargparse.set_loader(PARSER_MODE, load_text, exceptions=(yaml.YAMLError,))
