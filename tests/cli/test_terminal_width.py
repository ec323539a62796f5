"""No line of our own text is wider than the terminal."""

import re
import unicodedata
from contextlib import suppress

import pytest

from lightning_tricks import __main__ as door
from lightning_tricks._core.errors import UsageError
from lightning_tricks.commands import COMMANDS
from lightning_tricks.commands.check import checks, run

SAMPLES = "docs/samples"
LINES = {
    "--help": ["--help"],
    "ls": ["ls"],
    "runs": ["runs", f"{SAMPLES}/sweep"],
    "runs with many settings": ["runs", SAMPLES],
    "doctor": ["doctor", SAMPLES],
    "plan": ["plan", "--config", "recipes/llama7b.yaml", "--gpu", "a100", "--mfu", "0.3", "--price", "2.5"],
    "schedule": ["schedule", "--config", "recipes/tiny.yaml"],
    **{f"{name} --help": [name, "--help"] for name, command in COMMANDS.items() if command.needs == "nothing"},
}
WIDTHS = pytest.mark.parametrize("columns", [80, 120])


def too_wide(capsys, columns):
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in capsys.readouterr().out.splitlines()]
    assert lines
    return [line for line in lines if sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in line) > columns]


@pytest.fixture(autouse=True, params=["", "1"], ids=["plain", "colour"])
def in_colour(request, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", request.param)
    monkeypatch.setenv("NO_COLOR", "")


@WIDTHS
@pytest.mark.parametrize(
    "words",
    [pytest.param(words, marks=[pytest.mark.long] * (name == "plan")) for name, words in LINES.items()],
    ids=LINES,
)
def test_no_line_is_wider_than_the_terminal(capsys, monkeypatch, request, words, columns):
    monkeypatch.chdir(request.config.rootpath)
    monkeypatch.setenv("COLUMNS", str(columns))
    with suppress(SystemExit):
        door.run(words)
    assert not too_wide(capsys, columns)


@WIDTHS
def test_no_line_of_a_check_is_wider_than_the_terminal(capsys, monkeypatch, columns):
    def data(checked):
        raise UsageError("data=here: " + "each of these words 模型 数据 stands whole in one of the lines, " * 5)

    def model(checked):
        return "1,000 parameters"

    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(checks, "CHECKS", [data, model])
    with pytest.raises(SystemExit):
        run(None, None, {})
    assert not too_wide(capsys, columns)
