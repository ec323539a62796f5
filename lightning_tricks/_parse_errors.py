"""Turn a page of jsonargparse's complaint into the one line that says what to mend, with the nearest known name.

jsonargparse tries each alternative of each union and reports all failures as an indented tree. The innermost complaint
is the one about what the user wrote; its ancestors say where that stands in the recipe.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_NOISE = re.compile(
    r"Does not validate|Subtypes:|Errors:|Given value|Expected a <class 'NoneType'>|Expected a path but"
    r"|Not a valid subclass|Subclass types expect|a class path \(str\)|a dict with"
)


@dataclass(frozen=True)
class ParseError:
    """What is wrong, and where.

    Args:
        key: Dotted place in the recipe, such as `model.decoder`; may be empty.
        class_name: The class whose option it is, without its module; may be empty.
        complaint: jsonargparse's innermost sentence.
    """

    key: str
    class_name: str
    complaint: str


def parse_message(message: str) -> ParseError:
    """Find the innermost complaint in jsonargparse's message and the keys and class around it."""
    if message.startswith("Problems parsing config:"):
        return ParseError(
            "", "", "the recipe is no valid YAML: " + re.sub(r"\s+", " ", message.split(":", 1)[1]).strip()
        )
    ancestors: list[tuple[int, str]] = []
    best: tuple[int, list[str], str] = (-1, [], message.strip().splitlines()[0])
    for line in message.splitlines():
        text = line.strip().removeprefix("- ").strip()
        if not text:
            continue
        indent = len(line) - len(line.lstrip(" -"))
        ancestors = [(depth, said) for depth, said in ancestors if depth < indent]
        head = re.match(r"Parser key \"[^\"]*\":|Problem with given class_path '[^']*':", text)
        complaint = text[head.end() :].strip() if head else text
        if head:
            ancestors.append((indent, head.group()))
        if complaint and not _NOISE.match(complaint) and indent > best[0]:
            best = (indent, [said for _, said in ancestors], complaint)
    _, around, complaint = best
    keys = [match[1] for said in around if (match := re.match(r"Parser key \"(.*)\"", said))]
    classes = [match[1] for said in around if (match := re.match(r"Problem with given class_path '(.*)'", said))]
    return ParseError(".".join(keys), classes[-1].rsplit(".", 1)[-1] if classes else "", complaint)


def one_line(error: ParseError, options: Iterable[str], classes: Mapping[str, Iterable[str]]) -> str:
    """The line to print.

    Args:
        error: From `parse_message`.
        options: Names of the command line's own options, without dashes.
        classes: Every class that a recipe may name, with the names of its parameters.
    """
    place = f"{error.key}: " if error.key else ""
    if match := re.match(r"Expected a dot import path string: (\S+)", error.complaint):
        return f"{place}no class named {match[1]!r}{did_you_mean(match[1], classes)}"
    if match := re.match(r"(?:Option|Key|Group key) '([^']+)' is not (?:accepted|expected)", error.complaint):
        near = did_you_mean(match[1], classes.get(error.class_name, options))
        return f"{place}{error.class_name or 'the recipe'} has no option {match[1]!r}{near}"
    if match := re.search(
        r"Option '([^']+)' is not accepted\. Got value: Namespace\(class_path='[\w.]*?(\w+)'", error.complaint
    ):
        return f"{place}{match[2]} has no option {match[1]!r}{did_you_mean(match[1], classes.get(match[2], options))}"
    if match := re.match(r"the following arguments are required: (?:\w+\.)?(\w+)", error.complaint):
        if error.class_name:
            return f"{place}{error.class_name} needs {match[1]!r}"
        return f"no {match[1]}: give a recipe that has one, with --config RECIPE.yaml"
    if match := re.match(r"Subcommand '(\w+)' does not accept (?:option|nested key) '([^']+)'", error.complaint):
        return f"{match[1]} has no option {match[2]!r}{did_you_mean(match[2], options)}"
    if match := re.match(r"[Uu]nrecognized arguments: (\S+)", error.complaint):
        if match[1].endswith((".yaml", ".yml")):
            return f"{match[1]}: a recipe is given as --config {match[1]}"
        return f"no option {match[1]!r}{did_you_mean(match[1].lstrip('-').split('=')[0], options)}"
    if match := re.match(r"Expected a <class '([^']+)'>\. Got value: (.*)", error.complaint):
        return f"{error.key}={match[2]}: expected a value of type {match[1]}"
    return place + error.complaint


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """'; did you mean X?' for the closest of `names`, compared whole, then by first part, then by last; or nothing."""
    known = sorted(set(names))
    head, tail = word.split(".")[0], word.split(".")[-1]
    near = (
        difflib.get_close_matches(word, known, 1, 0.8)
        or difflib.get_close_matches(head, {name.split(".")[0] for name in known} - {head}, 1, 0.8)
        or difflib.get_close_matches(tail, known, 1, 0.6)
    )
    return f"; did you mean {near[0]}?" if near else ""
