"""The `llms.txt` of the wheel: for an agent that has nothing but the installed package, where what is.

    python docs/scripts/llms_txt.py          # writes docs/llms_wheel.txt: in the wheel, lightning_tricks/llms.txt
    python docs/scripts/llms_txt.py --check  # writes nothing; exits with 1 if it is out of date

Its links lead to files of the installed package. The site has another one, of its pages: `build_site.py` writes it.
Source: https://llmstxt.org: a title, a summary, text, and lists of links under headings.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
ROOT = SCRIPTS.parents[1]
PACKAGE = ROOT / "lightning_tricks"
FILE = ROOT / "docs/llms_wheel.txt"
sys.path[:0] = [str(SCRIPTS), str(ROOT)]

from public_names import public_names  # noqa: E402

from lightning_tricks.commands import COMMANDS, Command, recipes_folder  # noqa: E402

# The headings of the public names, and the packages or modules that stand below each.
USES = {
    "Watch a run: callbacks that never change training": ("monitors", "outputs"),
    "Act on a run: callbacks whose first sentence says what they change": ("guards",),
    "Build a model, and train it": ("language_model", "models", "mixins"),
    "Read data": ("data",),
    "Choose optimizer and learning rate": ("optim", "schedules"),
    "Choose precision and strategy": ("precision", "strategies", "parallel"),
    "Measure and log": ("metrics", "loggers", "accounting"),
    "Call commands from Python": ("cli", "commands"),
}
TOP = """\
# lightning_tricks

> {about}

Links lead to files beside this one. All names below the commands and recipes are imported from `lightning_tricks`, and
callbacks from `lightning_tricks.callbacks`, too; the docstring of each has its arguments, its errors and its source.

- First run: `python -m lightning_tricks cp tiny .`, then `python -m lightning_tricks fit --config tiny.yaml`.
- In your own project: `pl.Trainer(callbacks=[GradNormMonitor(), StepGuard()])` with any LightningModule.
- In a recipe, a class is `class_path` and its arguments are `init_args`. Each setting is an option of the command line
  by its place in the file, such as `--model.optimizer.lr 1e-3`.
- A command that prints facts takes `--json -`: see its `--help`.
- Exit codes: 0, or 1 where a command finds something, or 2 for a mistake, with option, value and remedy in one line.
- The pages of the docs are in the repository and its sdist, not in the wheel.
"""


def first_sentence(docstring: str | None) -> str:
    """The first sentence of a docstring, in one line."""
    line = " ".join((docstring or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.:]) (?=[A-Z`])", line)[0].rstrip(":")


def text() -> str:
    """What the file holds."""
    about = ast.get_docstring(ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8")))
    parts = [TOP.format(about=first_sentence(about))]
    parts.append(section("Commands: python -m lightning_tricks COMMAND --help", map(command_line, COMMANDS.values())))
    recipes = sorted(recipes_folder().glob("*.yaml"))
    titles = (path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for path in recipes)
    lines = [f"- [{path.stem}](recipes/{path.name}): {title}" for path, title in zip(recipes, titles, strict=True)]
    parts.append(section("Recipes: python -m lightning_tricks cp NAME .", lines))
    parts += [section(use, name_lines(packages)) for use, packages in USES.items()]
    return "\n".join(parts)


def section(heading: str, lines: Iterator[str] | list[str]) -> str:
    """A heading and its list."""
    return f"## {heading}\n\n" + "\n".join(lines) + "\n"


def command_line(command: Command) -> str:
    """The line of a command; Lightning's own stand in `cli`."""
    name = f"commands/{command.module}" if command.module else "cli/__init__"
    file = f"{name}.py" if (PACKAGE / f"{name}.py").is_file() else f"{name}/__init__.py"
    return f"- [{command.name}]({file}): {command.help}"


def name_lines(packages: tuple[str, ...]) -> Iterator[str]:
    """The lines of the public names of some packages."""
    for name, module in public_names().items():
        path = Path(*module.split(".")[1:])
        if path.parts[0] in packages:
            tree = ast.parse((PACKAGE / path.with_suffix(".py")).read_text(encoding="utf-8"))
            (thing,) = (node for node in tree.body if getattr(node, "name", None) == name)
            assert isinstance(thing, ast.ClassDef | ast.FunctionDef)
            yield f"- [{name}]({path.as_posix()}.py): {first_sentence(ast.get_docstring(thing))}"


def main(args: list[str]) -> int:
    """Write the file, or say that it is out of date."""
    made = text()
    stale = not FILE.is_file() or FILE.read_text(encoding="utf-8") != made
    if stale and "--check" in args:
        print(f"{FILE.relative_to(ROOT)} is out of date: run python docs/scripts/llms_txt.py")
    elif stale:
        FILE.write_text(made, encoding="utf-8")
    return int(stale and "--check" in args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
