"""The pages of the API reference, from signatures, types and docstrings, which griffe reads without an import.

A page for each class, a page for the functions of each package, and for each package a list of both. Public names are
those of `lightning_tricks/__init__.pyi`, and what its packages export besides. Nothing here is committed;
`build_site.py` writes the pages into the site.
"""

import logging
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import griffe

PACKAGE = "lightning_tricks"
# Packages of which a module has a public name and the rest is private; the page has its own first sentence.
_BY_MODULE = {
    "commands": "Commands that Python can call as well, and their answers.",
    "language_model": "The ready LightningModule of the recipes.",
    "parallel": "The sizes of a mesh of ranks.",
}
_EXPORTS_ONLY = ("checkpoints",)  # public packages without a name in `lightning_tricks` itself
# The card of a name that no title has, where its mentions would find another page.
_CARDS = {
    "LRMonitor": "monitors",
    "MuonAdamW": "muon",
    "OptimizerMixin": "decay_groups",
    "PredictionWriter": "generating_text",
    "TrainingProgressBar": "monitors",
    "UpdateMonitor": "monitors",
    "from_hf": "decoder",
    "load_weights": "checkpoints",
}
# Methods that Lightning or torch calls, then those that our commands and other parts call.
_HOOKS = {
    "setup", "teardown", "state_dict", "load_state_dict", "forward", "prepare_data",
    "after_rollback", "check_run", "check_sample", "is_recorded", "planned", "planned_factor", "planned_steps",
}  # fmt: skip
# Bases whose methods Lightning or torch calls.
_OTHERS = re.compile(r"pl\.(?!Callback\b)|lightning_cli|torch\.|nn\.|Optimizer|Mixin|AutocastPrecision|LRScheduler")
# What the end of an option's name says of its number.
_UNITS = {
    "fraction": "0 to 1",
    "gb": "10^9 bytes",
    "gib": "GiB",
    "minutes": "minutes",
    "rows": "rows",
    "samples": "samples",
    "seconds": "seconds",
    "steps": "steps",
    "tokens": "tokens",
}
_INDENT = " " * 4


@dataclass(frozen=True)
class Entry:
    """A public name.

    Args:
        name: as it is written.
        module: from which it is imported.
        package: whose list has it.
        thing: what griffe knows of it.
        card: the page in docs that describes it, None where there is none.
    """

    name: str
    module: str
    package: str
    thing: griffe.Object
    card: str | None = None

    @property
    def page(self) -> str:
        """Its page of the reference, without its ending: a class has one, functions and constants share one."""
        return f"{self.package}/{self.name if self.thing.is_class else 'functions'}"

    @property
    def link(self) -> str:
        """Its place from the folder of the reference."""
        return f"{self.page}.md" if self.thing.is_class else f"{self.page}.md#{self.name}"

    @property
    def summary(self) -> str:
        """The first sentence of the docstring, of a constant without one its value."""
        return summary_of(self.thing) or (f"`{self.thing.value}`" if self.thing.is_attribute else "")


@dataclass
class Reference:
    """The whole reference.

    Args:
        entries: by package, in the order of the names.
        about: the first paragraph of each package's docstring.
    """

    entries: dict[str, list[Entry]] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)

    def all(self) -> Iterator[Entry]:
        """The entries of all packages."""
        for entries in self.entries.values():
            yield from entries


def read_reference(root: Path, cards: Mapping[str, str]) -> Reference:
    """What is public in the package of a checkout.

    Args:
        root: of the checkout.
        cards: the text of each page in docs, by its name without ending.
    """
    logging.getLogger("griffe").setLevel(logging.ERROR)  # names of torch, which is not read
    package = griffe.load(PACKAGE, search_paths=[root], allow_inspection=False, docstring_parser="google")
    stub = (root / PACKAGE / "__init__.pyi").read_text(encoding="utf-8")
    pairs = re.findall(rf"^from {PACKAGE}\.(\S+) import (\w+) as", stub, re.M)
    found: dict[str, dict[str, Entry]] = {}
    callbacks = _exported(package["callbacks"])
    for path, name in pairs:
        page = "callbacks" if name in callbacks else path.split(".")[0]
        found.setdefault(page, {})[name] = Entry(name, PACKAGE, page, _find(package, path, name), card_of(name, cards))
    for page in sorted({*found, *_EXPORTS_ONLY} - _BY_MODULE.keys()):
        names = found.setdefault(page, {})
        for name in sorted(_exported(package[page]) - names.keys()):
            card = card_of(name, cards, in_code=True)
            names[name] = Entry(name, f"{PACKAGE}.{page}", page, _find(package, page, name), card)
    entries = {page: sorted(names.values(), key=_order) for page, names in sorted(found.items())}
    return Reference(entries, {page: _BY_MODULE.get(page) or _about(package[page]) for page in entries})


def card_of(name: str, cards: Mapping[str, str], in_code: bool = False) -> str | None:
    """The page that describes a name: its own by title or file, else one that opens with it, else the one with it most.

    Args:
        name: a public name.
        cards: the text of each page in docs, by its name without ending.
        in_code: count the name where it begins a span of code, and not as a word.
    """
    word = re.compile(rf"`{re.escape(name)}\b" if in_code else rf"(?<![\w.]){re.escape(name)}\b")

    def is_own(card: str) -> bool:
        return bool(word.search(cards[card].partition("\n")[0])) or card == _snake(name)

    def rank(card: str) -> tuple[bool, bool, int]:
        opening = cards[card].partition("\n## ")[0]
        return is_own(card), bool(word.search(opening)), len(word.findall(cards[card]))

    mentioned = [card for card in sorted(cards) if word.search(cards[card])]
    found = max(mentioned, key=rank, default=None)
    return _CARDS.get(name, found) if found is None or not is_own(found) else found


def pages(reference: Reference, titles: Mapping[str, str]) -> dict[str, str]:
    """Markdown by file name: the index, and for each package its list, its classes and its functions.

    Args:
        reference: what is public.
        titles: of the cards, by their names without ending.
    """
    made = {"README.md": _index(reference)}
    for package, entries in reference.entries.items():
        lists = f"{package}/README.md"
        about = _prose(reference.about[package], _links(reference, lists))
        made[lists] = f"# {package}\n\n{about}\n\n" + "\n".join(_list(reference, entries, lists)) + "\n"
        for page in dict.fromkeys(entry.page for entry in entries):
            held = [entry for entry in entries if entry.page == page]
            is_class = held[0].thing.is_class
            title = held[0].name if is_class else f"Functions of {package}"
            parts = [f"# {title}"]
            for entry in held:
                parts += [] if is_class else [f"## {entry.name} {{: #{entry.name} }}"]
                parts.append(_entry(entry, _links(reference, f"{page}.md"), titles))
            made[f"{page}.md"] = "\n\n".join(parts) + "\n"
    return made


def navigation(reference: Reference) -> list[Any]:
    """The pages in their order, as the navigation of the site has them."""
    found: list[Any] = ["reference/README.md"]
    for package, entries in reference.entries.items():
        own = sorted(
            {f"reference/{entry.page}.md" for entry in entries},
            key=lambda page: (page.endswith("functions.md"), page.lower()),
        )
        found.append({package: [f"reference/{package}/README.md", *own]})
    return found


def _links(reference: Reference, page: str) -> dict[str, str]:
    """The link to each name from a page of the reference."""
    start = posixpath.dirname(page)
    return {entry.name: posixpath.relpath(entry.link, start) for entry in reference.all()}


def _list(reference: Reference, entries: Sequence[Entry], page: str) -> list[str]:
    """The names of a package with their first sentences, by where they come from; each has its anchor here too."""
    links, groups = _links(reference, page), {}
    for entry in entries:
        groups.setdefault(_group(entry), []).append(entry)
    lines: list[str] = []
    for group, held in groups.items():
        lines += ["", f"## {group}", ""] if len(groups) > 1 else [""]
        lines += [_line(entry, links[entry.name], f"{{: #{entry.name} }}") for entry in held]
    return lines[1:]


def _group(entry: Entry) -> str:
    return entry.thing.path.split(".")[1] if entry.package == "callbacks" else f"From `{entry.module}`"


def _line(entry: Entry, link: str, attributes: str = "") -> str:
    said = f": {_escape(entry.summary)}" if entry.summary else ""
    return f"- [`{entry.name}`]({link}){attributes}{said}"


def summary_of(thing: griffe.Object) -> str:
    """The first sentence of a docstring, in one line."""
    text = thing.docstring.value if thing.docstring else ""
    line = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.:]) (?=[A-Z`])", line)[0].rstrip(":")


def _index(reference: Reference) -> str:
    lines = [
        "# API reference",
        "",
        "Every public name with its signature, arguments and errors, made from the code. Names come from "
        "`lightning_tricks` unless the line of an entry says otherwise.",
    ]
    links = _links(reference, "README.md")
    for package, entries in reference.entries.items():
        lines += ["", f"## [{package}]({package}/README.md)", ""]
        lines += [_line(entry, links[entry.name]) for entry in entries]
    return "\n".join(lines) + "\n"


def _exported(module: Any) -> set[str]:
    """The names that a package gives away: its `__all__`, or what it imports `as` the same name."""
    if module.exports is not None:
        return {str(name) for name in module.exports}
    text = module.filepath.read_text(encoding="utf-8")
    return set(re.findall(r"^from \S+ import (\w+) as \1$", text, re.M))


def _find(package: Any, path: str, name: str) -> Any:
    """The object behind a name of a module, by its imports, as a module beside it may have the same name."""
    source = package[path].imports.get(name)
    if source is None:
        return package[f"{path}.{name}"]
    return _find(package, *source.removeprefix(f"{PACKAGE}.").rsplit(".", 1))


def _order(entry: Entry) -> tuple[bool, str]:
    return entry.module != PACKAGE, entry.name.lower()


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _about(module: Any) -> str:
    return module.docstring.value.split("\n\n")[0] if module.docstring else ""


def _entry(entry: Entry, links: Mapping[str, str], titles: Mapping[str, str]) -> str:
    thing = entry.thing
    code = [f"from {entry.module} import {entry.name}"]
    if thing.is_class or thing.is_function:
        code += ["", _signature(entry.name, thing)]
    elif thing.value is not None:
        code += ["", f"{entry.name} = {thing.value}"]
    others = {name: link for name, link in (_internal(thing) | links).items() if name != entry.name}
    first, _, rest = _docstring(thing, others).partition("\n\n")
    parts = [first, "```python\n" + "\n".join(code) + "\n```"]
    if entry.card is not None:
        parts.append(f"**Guide:** [{titles[entry.card]}](../../{entry.card}.md)")
    parts.append(rest)
    if thing.is_class:
        parts += [_method(entry.name, method, others) for method in _methods(thing)]
    parts.append(f"<small>[Source]({_source(thing)})</small>")
    return "\n\n".join(part for part in parts if part)


def _source(thing: Any) -> str:
    """The page of the file that defines something, from a page of the reference."""
    path = thing.module.path.replace(".", "/") + "/__init__" * (thing.module.filepath.name == "__init__.py")
    return f"../../repository/{path}.py.md"


def _internal(thing: Any) -> dict[str, str]:
    """The classes and functions of the package that a module has or imports, with their source files."""
    targets = {name: _resolved(member) for name, member in thing.module.members.items()}
    return {name: _source(it) for name, it in targets.items() if it is not None and (it.is_class or it.is_function)}


def _resolved(member: Any) -> Any:
    """What a name of a module stands for, None where it is of another package."""
    try:
        target = member.final_target if member.is_alias else member
    except griffe.GriffeError:
        return None
    return target if target.path.startswith(f"{PACKAGE}.") else None


def _type(annotation: Any, thing: Any) -> str:
    """An annotation, in which a name of ours for several values or types stands as these."""
    members = thing.module.members

    def expanded(word: re.Match[str]) -> str:
        target = _resolved(members[word[0]]) if word[0] in members else None
        return str(getattr(target, "value", None) or word[0])

    return re.sub(r"(?<![\w.'\"])[A-Z]\w+", expanded, str(annotation))


def _methods(thing: Any) -> list[Any]:
    """What a user calls: no method that Lightning calls, and of a base class only those with arguments of their own."""
    if any(_OTHERS.match(str(base)) for base in thing.bases):
        return []
    of_bases = {name for base in thing.mro() for name in base.members}
    found = []
    for method in thing.members.values():
        if method.is_alias or not (method.is_function or "property" in method.labels) or not method.docstring:
            continue
        hidden = method.name.startswith(("_", "on_")) or method.name in _HOOKS
        if not hidden and (method.name not in of_bases or "Args:" in method.docstring.value):
            found.append(method)
    return found


def _method(owner: str, method: Any, links: Mapping[str, str]) -> str:
    label = f"{owner}.{method.name}"
    shown = _signature(label, method) if method.is_function else f"{label}: {_type(method.annotation, method)}"
    return f"## {method.name} {{: #{label} }}\n\n```python\n{shown}\n```\n\n{_docstring(method, links)}"


def _signature(name: str, thing: Any) -> str:
    """A call with all parameters, on one line where it fits."""
    kinds = griffe.ParameterKind
    prefixes = {kinds.var_positional: "*", kinds.var_keyword: "**"}
    written: list[str] = []
    before = None
    for parameter in _parameters(thing):
        if before is kinds.positional_only and parameter.kind is not before:
            written.append("/")
        if parameter.kind is kinds.keyword_only and before not in (kinds.keyword_only, kinds.var_positional):
            written.append("*")
        before = parameter.kind
        text = prefixes.get(parameter.kind, "") + parameter.name
        if parameter.annotation is not None:
            text += f": {_type(parameter.annotation, thing)}"
        if parameter.default is not None and parameter.kind not in prefixes:
            spaced = " = " if parameter.annotation is not None else "="
            text += f"{spaced}{_default(parameter.default, thing)}"
        written.append(text)
    if before is kinds.positional_only:
        written.append("/")
    returns = f" -> {_type(thing.returns, thing)}" if thing.is_function and thing.returns is not None else ""
    line = f"{name}({', '.join(written)}){returns}"
    if len(line) <= 88:
        return line
    return "\n".join([f"{name}(", *(f"{_INDENT}{text}," for text in written), f"){returns}"])


def _parameters(thing: Any) -> list[Any]:
    """Without `self` or `cls`."""
    parameters = list(thing.parameters)
    is_method = thing.is_class or (
        thing.parent is not None and thing.parent.is_class and "staticmethod" not in thing.labels
    )
    if is_method and parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    return parameters


def _default(value: Any, thing: Any) -> str:
    """A default; the value of a constant in place of its name."""
    constant = thing.module.members.get(str(value)) if isinstance(value, griffe.ExprName) else None
    return str(constant.value) if constant is not None and constant.is_attribute else str(value)


def _docstring(thing: Any, links: Mapping[str, str]) -> str:
    if not thing.docstring:
        return ""
    types: dict[str, tuple[Any, Any]] = {}
    if thing.is_class or thing.is_function:
        types = {p.name: (p.annotation, p.default) for p in _parameters(thing)}
    kind, parts = griffe.DocstringSectionKind, []
    for section in thing.docstring.parse("google", returns_named_value=False, warnings=False):
        value: Any = section.value
        if section.kind is kind.text:
            parts.append(_prose(value, links))
        elif section.kind in (kind.parameters, kind.attributes):
            title = "Arguments" if section.kind is kind.parameters else "Attributes"
            parts.append(_table(title, value, types, thing, links))
        elif section.kind is kind.raises:
            raised = [(_linked(f"`{item.annotation}`", links), item.description) for item in value]
            parts.append(_items("Raises", raised, links))
        elif section.kind in (kind.returns, kind.yields):
            given = str(thing.returns) if thing.is_function else ""
            said = [item.description if str(item.annotation or "") in ("", given) else f"{item.annotation}: "
                    f"{item.description}" for item in value]  # fmt: skip
            parts.append(
                f"**{'Returns' if section.kind is kind.returns else 'Yields'}:** {_prose(' '.join(said), links)}"
            )
        elif section.kind is kind.examples or (section.kind is kind.admonition and section.title == "Example"):
            text = value.contents if section.kind is kind.admonition else "\n\n".join(str(part) for _, part in value)
            parts.append(f"**Example**\n\n```pycon\n{text}\n```")
        elif section.kind is kind.admonition:
            label = value.kind.replace("-", " ").capitalize()
            text = value.contents if section.title in (None, label) else f"{section.title}\n{value.contents}"
            parts.append(f"**{label}:** {_prose(text, links)}")
    return "\n\n".join(parts)


def _table(
    title: str, items: Sequence[Any], types: Mapping[str, tuple[Any, Any]], thing: Any, links: Mapping[str, str]
) -> str:
    """A row for each argument: its name, type and unit, default and meaning. The names of options end in their unit."""
    rows = [f"**{title}**{{: .arguments }}", "", "| name | type | default | meaning |", "|---|---|---|---|"]
    for item in items:
        annotation, default = types.get(item.name.lstrip("*"), (None, None))
        type_ = f"`{_type(annotation, thing)}`" if annotation is not None else ""
        unit = _UNITS.get(item.name.rpartition("_")[2], "") if type_.startswith(("`int", "`float")) else ""
        several = item.name.startswith("*")
        shown = "" if several else f"`{_default(default, thing)}`" if default is not None else "required"
        text = " ".join(_prose(item.description, links).split())
        cells = (f"`{item.name}`", ", ".join(filter(None, ("" if several else type_, unit))), shown, text)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _items(title: str, items: Sequence[tuple[str, str]], links: Mapping[str, str]) -> str:
    lines = [f"**{title}**", ""]
    for name, description in items:
        text = _prose(description, links).replace("\n", f"\n{_INDENT}")
        lines.append(f"- {name}: {text}")
    return "\n".join(lines)


def _prose(text: str, links: Mapping[str, str]) -> str:
    """A docstring's text as Markdown: its code links to the entries of its names, all else stands as it is written."""
    text = re.sub(r"^(Sources?|Promise|Promises): ", r"**\1:** ", text.strip(), flags=re.M)
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("- ") and lines and lines[-1].strip() and not lines[-1].startswith(("- ", "  ")):
            lines.append("")
        lines.append(line)
    parts = re.split(r"(``.+?``|`[^`]+`|\*\*\w+:\*\*|https?://\S+)", "\n".join(lines), flags=re.S)
    return "".join(_linked(part, links) if at % 2 else _escape(part) for at, part in enumerate(parts))


def _linked(code: str, links: Mapping[str, str]) -> str:
    name = re.split(r"[(.\s]", code.strip("`"))[0]
    return f"[{code}]({links[name]})" if code.startswith("`") and name in links else code


def _escape(text: str) -> str:
    """Characters that Markdown would take for its own, outside code."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(part if at % 2 else re.sub(r"([*_<\[\]\\])", r"\\\1", part) for at, part in enumerate(parts))
