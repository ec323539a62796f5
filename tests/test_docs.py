"""What the README and the docs show is run: Python blocks as they stand, recipe commands up to the built model."""

import re
import shlex
from pathlib import Path

import pytest

from lightning_tricks.cli import load_recipe
from lightning_tricks.commands.recipes import recipes_folder

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md", *sorted(ROOT.glob("docs/*.md"))]


def blocks(page: Path, *languages: str) -> list[str]:
    pattern = rf"^```({'|'.join(languages)})\n(.*?)^```"
    return [match[2] for match in re.finditer(pattern, page.read_text(encoding="utf-8"), re.M | re.S)]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "docs"}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), namespace)


def commands(page: Path) -> list[str]:
    text = "\n".join(blocks(page, "bash", "sh", "console")).replace("\\\n", " ")
    found = re.findall(r"(?:python|-m) ?-?m? ?lightning_tricks ((?:fit|validate|test|predict|prepare) [^\n&|#]*)", text)
    return [command.strip() for command in found]


@pytest.mark.parametrize(("page", "command"), [(p, c) for p in PAGES for c in commands(p)], ids=lambda x: str(x)[-40:])
def test_recipe_commands_build(page, command, monkeypatch):
    monkeypatch.chdir(ROOT)
    args = shlex.split(command)[1:]
    if "--ckpt_path" in args:
        place = args.index("--ckpt_path")
        del args[place : place + 2]
    model, data, _ = load_recipe(*args)
    assert model is not None
    assert data is not None


def test_every_recipe_named_in_the_docs_exists():
    for page in PAGES:
        for name in re.findall(r"recipes/([\w/]+\.yaml)", page.read_text(encoding="utf-8")):
            assert (recipes_folder() / name).is_file(), f"{page.name}: recipes/{name}"


def test_every_card_is_reached_from_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = [card.name for card in (ROOT / "docs").glob("*.md") if f"docs/{card.name}" not in readme]
    assert not missing
