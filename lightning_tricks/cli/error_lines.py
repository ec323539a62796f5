"""One line for each mistake: of jsonargparse's complaint about a recipe, and of exceptions that the user can mend.

jsonargparse tries each alternative of each union and reports all failures as an indented tree. The innermost sentence
is about the user's text; the headings above it say where that text stands in the recipe. Of Lightning and torch, an
exception that is not known here keeps its traceback.
"""

import logging
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lightning_tricks._core.errors import PIP_EXTRA, UsageError, disk_full_line
from lightning_tricks._core.suggest import did_you_mean
from lightning_tricks._trainer.lightning import pl
from lightning_tricks.checkpoints.load_weights import other_weights
from lightning_tricks.mixins._plain_settings import subclasses

# Advertisements, and statements that are of no use or not true here: a resume follows the recipe's settings and not the
# checkpoint's, so not all states are restored.
_UNWANTED = ("💡 Tip: ", "TPU available: False", "Restored all states from the checkpoint")
_NOISE = re.compile(
    r"Does not validate|Subtypes:|Errors:|Given value|Expected a <class 'NoneType'>|Expected a path but"
    r"|Not a valid subclass of \w+$|Subclass types expect|a class path \(str\)|a dict with"
)
_KEY = re.compile(r"Parser key \"([^\"]*)\":")
_CLASS = re.compile(r"Problem with given class_path '(?:[^']*\.)?([^'.]*)':")
_GOT = re.compile(r"(?:Given value|.*?Got value): (.*?)(?:\. Got value: Namespace\(.*)?$")
_TYPES = {
    "float": "a number, such as 0.001 or 1e-3",
    "int": "a whole number",
    "bool": "true or false",
    "str": "text",
    "list": "a list in brackets, such as [a, b]",
    "Sequence": "a list in brackets, such as [a, b]",
    "tuple": "a list in brackets, such as [0.9, 0.95]",
    "dict": "a mapping in braces, such as {a: 1}",
}
# jsonargparse's sentence, and ours. In ours stand the groups of the pattern and `key`, the place in the recipe; `at`,
# the same before a colon; `owner`, the class whose option it is; `near`, the nearest known name for `option`.
_LINES = [
    (r".*?Option '(?P<option>[^']+)' is not accepted\. Got value: Namespace\(class_path='[\w.]*?(?P<owner>\w+)'",
     "{at}{owner} has no option {option!r}{near}"),
    (r"(?:Option|Key|Group key) '(?P<option>[^']+)' is not (?:accepted|expected)",
     "{at}{owner} has no option {option!r}{near}"),
    (r"Subcommand '(?P<owner>\w+)' does not accept (?:option|nested key) '(?P<option>[^']+)'",
     "{owner} has no option {option!r}{near}"),
    (r"[Uu]nrecognized arguments: (?P<file>\S+\.ya?ml)(?!\S)", "{file}: a recipe is given as --config {file}"),
    (r"[Uu]nrecognized arguments: (?P<given>-*(?P<option>[^\s=]*)\S*)", "no option {given!r}{near}"),
    (r"(?:File does not exist|Path is not a file): '(?P<file>.*)'",
     "--{key} {file}: there is no such file; check the path, or copy a recipe by `cp tiny .` (ls lists them)"),
    (r".*?No module named '(?P<module>heavyball|pytorch_optimizer|schedulefree|torchao)'",
     f"{{at}}{{module}} is not installed: {PIP_EXTRA.format('optimizers')}"),
    (r".*?No module named '(?P<module>[^']*)'",
     "{at}no module named {module!r}: start the command in the folder that holds it, or install it"),
    (r"Parser key \"[^\"]*\":$", "{key}: give a class, with class_path and init_args"),
    (r"Unexpected config: ?(?P<got>.*)",
     "--config: `{got}` is no recipe: it holds no settings, such as `trainer: {{max_steps: 100}}`"),
    (r"(?:Parser key \"[^\"]*\": )?Unable to load config ['\"](?P<got>.*)['\"]",
     "{key}={got}: neither settings nor a file of settings at this path"),
]  # fmt: skip


@dataclass
class ParseError:
    """One user's mistake, as jsonargparse reports it."""

    complaints: list[str]  # the innermost sentences, one for each alternative of a union; the first one counts
    headings: list[str]  # above them, outermost first
    indent: int = -1  # of the sentences in the message
    value: str | None = None  # the value that was refused; None where the message does not tell it

    @property
    def key(self) -> str:
        """Dotted place in the recipe, such as `model.decoder`; may be empty."""
        found = (match[1] for heading in (*self.headings, *self.complaints[:1]) if (match := _KEY.match(heading)))
        return ".".join(found)

    @property
    def class_name(self) -> str:
        """The class whose option it is, without its module; may be empty."""
        return next((match[1] for heading in reversed(self.headings) if (match := _CLASS.match(heading))), "")


def parse_message(message: str) -> ParseError:
    """Find the innermost complaints in jsonargparse's message, and the headings above them."""
    if "Problems parsing config:" in message:
        return ParseError([message.rpartition("Problems parsing config:")[2].strip()], [])
    headings: list[tuple[int, str]] = []
    best = ParseError([message.strip().splitlines()[0]], [])
    for line in message.splitlines():
        text = line.strip().removeprefix("- ").strip()
        if not text:
            continue
        indent = len(line) - len(line.lstrip(" -"))
        headings = [(depth, heading) for depth, heading in headings if depth < indent]
        head = _KEY.search(text) or _CLASS.match(text)
        complaint = text[head.end() :].strip() if head else text
        if head:
            headings.append((indent, head.group()))
        above = [heading for _, heading in headings]
        if text.startswith("Given value: "):
            if best.value is None and above == best.headings and (given := _GOT.match(text)):
                best.value = given[1]
        elif complaint and not _NOISE.match(complaint):
            if indent > best.indent:
                best = ParseError([complaint], above, indent)
            elif indent == best.indent and above == best.headings:
                best.complaints.append(complaint)
    return best


def one_line(error: ParseError, options: Iterable[str], classes: Mapping[str, Iterable[str]]) -> str:
    """The line to print.

    Args:
        error: from `parse_message`.
        options: names of the command line's own options, without dashes.
        classes: every class that a recipe may name, with the names of its parameters.
    """
    unknown = next(iter(_found(r"Expected a dot import path string: (\S+)", error)), None)
    if wrong := _wrong_value(error, class_expected=unknown is not None):
        return wrong
    if unknown is not None and unknown in classes:
        return f"{error.key}: {unknown} is a class of another kind: name one that can stand here"
    if unknown is not None:
        near = did_you_mean(unknown, classes) or "; a class of your own is named with its module, as my_module.MyClass"
        return f"{error.key}: no class named {unknown!r}{near}"
    at, said = f"{error.key}: " if error.key else "", error.complaints[0]
    if missing := re.match(r"the following arguments are required: (?:([\w-]+)\.)?(\w+)", said):
        command, name = missing.groups()
        if error.class_name:
            return f"{at}{error.class_name} needs {name!r}: set it under init_args"
        if name not in ("model", "data"):
            return f"{command or 'the command'} needs --{name}: write --{name} VALUE"
        return f"no {name}: give a recipe that has one, with --config RECIPE.yaml"
    for pattern, line in _LINES:
        if match := re.match(pattern, said):
            words = {"key": error.key, "at": at, "owner": error.class_name or "the recipe"} | match.groupdict()
            option = words.get("option", "")
            if named := next((part for part in option.split(".")[:-1] if part in classes), None):
                setting = option.rpartition(".")[2]
                return f"{at}{named} is a class: write {{class_path: {named}, init_args: {{{setting}: ...}}}}"
            near = _near(option, classes.get(words["owner"], options)) if option else ""
            return line.format(**words, near=near)
    return said if said.startswith("--") else at + said  # a nested parser has named the option


def _found(pattern: str, error: ParseError) -> list[str]:
    """The first group of the pattern in each sentence that it matches."""
    return [match[1] for said in error.complaints if (match := re.match(pattern, said))]


def _wrong_value(error: ParseError, class_expected: bool) -> str | None:
    """The line for a value of another type than the option has, or not among the option's values."""
    choices = [name.strip("'\"") for names in _found(r"Expected a typing\.Literal\[(.*?)\]", error)
               for name in names.split(", ")]  # fmt: skip
    expected = [wanted for said in error.complaints if (wanted := _wanted(said))]
    is_name = re.fullmatch(r"[A-Za-z_][\w.]*", error.value or "")  # of one class, where a list of several may stand
    plain = _found(rf"Expected a <class '(float|int|str|tuple{'' if is_name else '|list'})'", error)
    if not (expected or choices) or (class_expected and not plain):
        return None
    if nested := re.match(r"NestedArg\(key='([^']+)'", error.value or ""):
        return f"{error.key}.{nested[1]}: name the class first, as in --{error.key} CLASS"
    got = _GOT.match(error.complaints[0])
    value = error.value if got is None else got[1]
    if choices:
        near = did_you_mean(value, choices) if value else ""
        budget = ", or {budget: SHARE}" if _TYPES["dict"] in expected else ""  # only activation_checkpointing has both
        names = ", ".join(dict.fromkeys(choices))
        return f"{error.key}={value}: no such value{near or f'; give one of {names}{budget}'}"
    shown = f"{error.key}={value}" if value is not None else error.key
    return f"{shown}: give {' or '.join(dict.fromkeys(expected))}"


def _wanted(said: str) -> str | None:
    """Our words for the type that a sentence of jsonargparse asks for, such as `a whole number`."""
    if match := re.match(r"Expected a <class '(?:collections\.abc\.)?(\w+)'>", said):
        return _TYPES.get(match[1])
    if match := re.match(r"Expected a tuple with (\d+) elements", said):
        return f"a list of {match[1]} values, such as [0.9, 0.95]"
    return None


def _near(word: str, names: Iterable[str]) -> str:
    """The likely name; without one, all names if they are few."""
    known = list(dict.fromkeys(names))
    near = did_you_mean(word, known, places=True)
    return near or (f"; its options are {', '.join(known)}" if 0 < len(known) <= 20 else "; --help lists the options")


@contextmanager
def usage_errors(ckpt_path: Callable[[], str | None]) -> Iterator[None]:
    """Raise a UsageError for each exception that the user can mend; `ckpt_path` gives that option's value, if known."""
    try:
        yield
    except Exception as error:
        line = str(error) if isinstance(error, UsageError) else _line(error)
        if line is None:
            raise
        path = ckpt_path()
        if path and path in line and "ckpt_path" not in line:
            line = f"ckpt_path: {line}"
        if isinstance(error, UsageError) and line == str(error):
            raise
        raise UsageError(line) from error


def _line(error: Exception) -> str | None:
    said = _flat(error)
    if isinstance(error, pl.utilities.exceptions.MisconfigurationException):
        return said
    if (full := disk_full_line(error)) is not None:
        return full
    if type(error).__module__ == "torch.distributed" and not torch.distributed.is_initialized():
        return (
            f"the processes have not met ({said}): start all with the same command, take another MASTER_PORT, or set "
            "trainer.strategy.init_args.timeout_seconds higher"
        )
    if isinstance(error, RuntimeError) and said.startswith("Error(s) in loading state_dict"):
        return other_weights(said)
    if isinstance(error, ValueError) and said.startswith("`val_check_interval` ("):
        return f"trainer: {said}"
    return None


def _flat(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()


def trainer_line(error: Exception, config: Mapping[str, Any]) -> str | None:
    """The line for an error by which Lightning's Trainer refused its arguments `config`; None for any other error."""
    kinds = pl.utilities.exceptions.MisconfigurationException | ValueError | TypeError | ImportError
    if not isinstance(error, kinds) and not (isinstance(error, RuntimeError) and _is_raised_by_lightning(error)):
        return None
    said = _flat(error)
    if "invalid strategy name" in said:
        names = [cls.__name__ for cls in subclasses(pl.strategies.Strategy)]
        near = did_you_mean(config["strategy"], [*pl.strategies.StrategyRegistry.available_strategies(), *names])
        return f"trainer.strategy={config['strategy']}: no such strategy{near}"
    if "No supported gpu backend" in said or "can not run on your system" in said:
        remedy = "give --trainer.accelerator cpu, or look at nvidia-smi"
        return f"trainer.accelerator={config['accelerator']}: torch finds none on this machine: {remedy}"
    if twice := re.match(r"Found more than one stateful callback of type `(\w+)`", said):
        name = twice[1]
        return f"trainer.callbacks: there are two {name}: give --trainer.callbacks-={name} before the one to keep"
    return f"trainer: {said}"


def _is_raised_by_lightning(error: Exception) -> bool:
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals["__name__"]).startswith(("lightning.", "lightning_fabric.", "pytorch_lightning."))


@contextmanager
def without_advertisements() -> Iterator[None]:
    """Inside the `with`, Lightning's logger drops the unwanted lines."""

    def wanted(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(_UNWANTED)

    log = pl.utilities.rank_zero.rank_zero_module.log
    log.addFilter(wanted)
    try:
        yield
    finally:
        log.removeFilter(wanted)
