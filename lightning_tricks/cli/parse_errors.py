"""Turn a page of jsonargparse's complaint into the one line that says what to mend, with the nearest known name.

jsonargparse tries each alternative of each union and reports all failures as an indented tree. The innermost complaint
is the one about what the user wrote; its ancestors say where that stands in the recipe.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lightning_tricks._suggest import did_you_mean

_NOISE = re.compile(
    r"Does not validate|Subtypes:|Errors:|Given value|Expected a <class 'NoneType'>|Expected a path but"
    r"|Not a valid subclass of \w+$|Subclass types expect|a class path \(str\)|a dict with"
)
_PLACE = re.compile(r"Parser key \"([^\"]*)\":")
_CLASS = re.compile(r"Problem with given class_path '([^']*)':")
_TYPES = {
    "float": "a number, such as 0.001 or 1e-3",
    "int": "a whole number",
    "bool": "true or false",
    "str": "text",
    "list": "a list in brackets, such as [a, b]",
    "tuple": "a list in brackets, such as [0.9, 0.95]",
    "dict": "a mapping in braces, such as {a: 1}",
}


@dataclass(frozen=True)
class ParseError:
    """What is wrong, and where.

    Args:
        key: Dotted place in the recipe, such as `model.decoder`; may be empty.
        class_name: The class whose option it is, without its module; may be empty.
        complaint: jsonargparse's innermost sentence.
        siblings: All innermost sentences, one for each alternative of a union.
        value: The value that was refused; None where the message does not tell it.
    """

    key: str
    class_name: str
    complaint: str
    siblings: tuple[str, ...] = ()
    value: str | None = None


@dataclass
class _Found:
    indent: int
    around: list[str]
    complaints: list[str]
    value: str | None = None


def parse_message(message: str) -> ParseError:
    """Find the innermost complaint in jsonargparse's message and the keys and class around it."""
    if "Problems parsing config:" in message:
        return ParseError("", "", message.rpartition("Problems parsing config:")[2].strip())
    ancestors: list[tuple[int, str]] = []
    best = _Found(-1, [], [message.strip().splitlines()[0]])
    for line in message.splitlines():
        text = line.strip().removeprefix("- ").strip()
        if not text:
            continue
        indent = len(line) - len(line.lstrip(" -"))
        ancestors = [(depth, said) for depth, said in ancestors if depth < indent]
        head = _PLACE.search(text) or _CLASS.match(text)
        complaint = text[head.end() :].strip() if head else text
        if head:
            ancestors.append((indent, head.group()))
        around = [said for _, said in ancestors]
        if given := re.match(r"Given value: (.*?)(?:\. Got value: Namespace\(.*)?$", text):
            if best.value is None and around == best.around:
                best.value = given[1]
        elif complaint and not _NOISE.match(complaint):
            if indent > best.indent:
                best = _Found(indent, around, [complaint])
            elif indent == best.indent and around == best.around:
                best.complaints.append(complaint)
    keys = [match[1] for said in best.around if (match := _PLACE.match(said))]
    classes = [match[1] for said in best.around if (match := _CLASS.match(said))]
    return ParseError(
        ".".join(keys),
        classes[-1].rsplit(".", 1)[-1] if classes else "",
        best.complaints[0],
        tuple(best.complaints),
        best.value,
    )


def one_line(error: ParseError, options: Iterable[str], classes: Mapping[str, Iterable[str]]) -> str:
    """The line to print.

    Args:
        error: From `parse_message`.
        options: Names of the command line's own options, without dashes.
        classes: Every class that a recipe may name, with the names of its parameters.
    """
    place = f"{error.key}: " if error.key else ""
    line = _wrong_value(error) or _wrong_class(error, classes) or _wrong_name(error, list(options), classes)
    return line or place + error.complaint


def _wrong_value(error: ParseError) -> str | None:
    """The line for a value of another type than the option has."""
    expected = [wanted for said in error.siblings if (wanted := _wanted(said))]
    plain = [said for said in error.siblings if re.match(r"Expected a <class '(float|int|str|tuple|list)'", said)]
    if not (expected or _choices(error)) or (_named_class(error) and not plain):
        return None
    if nested := re.match(r"NestedArg\(key='([^']+)'", error.value or ""):
        return f"{error.key}.{nested[1]}: name the class first, as in --{error.key} CLASS"
    got = re.search(r"Got value: (.*?)(?:\. Got value: Namespace\(.*)?$", error.complaint)
    value = error.value if got is None else got[1]
    if choices := _choices(error):
        near = did_you_mean(value, choices) if value else ""
        return f"{error.key}={value}: no such value{near or '; give one of ' + ', '.join(dict.fromkeys(choices))}"
    shown = f"{error.key}={value}" if value is not None else error.key
    return f"{shown}: give {' or '.join(dict.fromkeys(expected))}"


def _wanted(said: str) -> str | None:
    """Our words for one alternative, such as `a whole number`."""
    if match := re.match(r"Expected a <class '(\w+)'>", said):
        return _TYPES.get(match[1])
    if match := re.match(r"Expected a tuple with (\d+) elements", said):
        return f"a list of {match[1]} values, such as [0.9, 0.95]"
    return None


def _choices(error: ParseError) -> list[str]:
    """The values that an option lists."""
    lists = [match[1] for said in error.siblings if (match := re.match(r"Expected a typing\.Literal\[(.*?)\]", said))]
    return [choice.strip("'\"") for each in lists for choice in each.split(", ")]


def _named_class(error: ParseError) -> str | None:
    for said in error.siblings:
        if match := re.match(r"Expected a dot import path string: (\S+)", said):
            return match[1]
    return None


def _wrong_class(error: ParseError, classes: Mapping[str, Iterable[str]]) -> str | None:
    """The line for a class that does not exist."""
    name = _named_class(error)
    if name:
        near = did_you_mean(name, classes) or "; a class of your own is named with its module, as my_module.MyClass"
        return f"{error.key}: no class named {name!r}{near}"
    if match := re.match(r"Not a valid subclass of (\w+)\. Got value: (.*)", error.complaint):
        return f"{error.key}={match[2]}: give a class of {match[1]}, with class_path and init_args"
    return None


def _wrong_name(error: ParseError, options: list[str], classes: Mapping[str, Iterable[str]]) -> str | None:
    """The line for an option that does not exist, or is missing."""
    place, said = f"{error.key}: " if error.key else "", error.complaint
    if match := re.search(r"Option '([^']+)' is not accepted\. Got value: Namespace\(class_path='[\w.]*?(\w+)'", said):
        return f"{place}{match[2]} has no option {match[1]!r}{_near(match[1], classes.get(match[2], options))}"
    if match := re.match(r"(?:Option|Key|Group key) '([^']+)' is not (?:accepted|expected)", said):
        near = _near(match[1], classes.get(error.class_name, options))
        return f"{place}{error.class_name or 'the recipe'} has no option {match[1]!r}{near}"
    if match := re.match(r"the following arguments are required: (?:\w+\.)?(\w+)", said):
        if error.class_name:
            return f"{place}{error.class_name} needs {match[1]!r}: set it under init_args"
        return f"no {match[1]}: give a recipe that has one, with --config RECIPE.yaml"
    if match := re.match(r"Subcommand '(\w+)' does not accept (?:option|nested key) '([^']+)'", said):
        return f"{match[1]} has no option {match[2]!r}{_near(match[2], options)}"
    if match := re.match(r"[Uu]nrecognized arguments: (\S+)", said):
        if match[1].endswith((".yaml", ".yml")):
            return f"{match[1]}: a recipe is given as --config {match[1]}"
        return f"no option {match[1]!r}{_near(match[1].lstrip('-').split('=')[0], options)}"
    if match := re.match(r"(?:File does not exist|Path is not a file): '(.*)'", said):
        return f"--{error.key} {match[1]}: there is no such file; check the path (the command ls lists recipes)"
    if match := re.match(r"No module named '(.*)'", said):
        return f"{place}no module named {match[1]!r}: start the command in the folder that holds it, or install it"
    if match := re.match(r"argument (?:-\w/)?--(\S+): expected one argument", said):
        return f"--{match[1]} has no value: write --{match[1]} VALUE"
    if said.startswith('expected "subcommand" to be one of'):
        return "no command: write fit, validate, test, predict or prepare before the options"
    return None


def _near(word: str, names: Iterable[str]) -> str:
    """The likely name, or where that fails all of them, if they are few."""
    known = list(dict.fromkeys(names))
    near = did_you_mean(word, known, places=True)
    return near or (f"; its options are {', '.join(known)}" if 0 < len(known) <= 20 else "; --help lists the options")
