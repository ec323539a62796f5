"""What is coloured where colours are shown, and that a pipe gets none."""

import re
from contextlib import suppress

import pytest

from lightning_tricks import __main__ as door
from lightning_tricks._core.errors import UsageError, one_line_and_exit
from lightning_tricks._trainer.lightning import rank_zero_warn
from lightning_tricks.commands.check import checks, run

RED, GREEN, YELLOW, CYAN, BOLD = 31, 32, 33, 36, 1


@pytest.fixture(params=["1", ""], ids=["colour", "plain"])
def forced(request, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", request.param)
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.chdir(request.config.rootpath)
    return bool(request.param)


def colored(text):
    return [(int(style), word) for style, word in re.findall(r"\x1b\[(\d+)m([^\x1b]*)\x1b\[0m", text)]


def test_errors_and_warnings(forced, capsys):
    with suppress(SystemExit), one_line_and_exit():
        rank_zero_warn("a shard is missing", "and \x1b[31manother")
        raise UsageError("lr=\x1b[31m: give a number")
    said = capsys.readouterr().err
    assert colored(said) == ([(YELLOW, "warning:"), (RED, "error:")] if forced else [])
    plain = "warning: a shard is missing\nand \\x1b[31manother\nerror: lr=\\x1b[31m: give a number\n"
    assert re.sub(r"\x1b\[\d+m", "", said) == plain


def test_the_best_values_and_the_settings_that_differ_in_runs(forced, capsys):
    door.run(["runs", "docs/samples/sweep"])
    found = colored(capsys.readouterr().out)
    assert ((BOLD, "best loss") in found, (CYAN, "0.01") in found) == (forced, forced)
    assert [word for style, word in found if style == GREEN] == ["3.2006", "3.0158"] * forced


def test_severities_of_the_doctor_and_names_of_ls(forced, capsys):
    with suppress(SystemExit):
        door.run(["doctor", "docs/samples"])
    assert ((RED, "error: not finite") in colored(capsys.readouterr().out)) == forced
    door.run(["ls"])
    assert ((BOLD, "tiny") in colored(capsys.readouterr().out)) == forced


def test_ticks_and_crosses_of_a_check(forced, capsys, monkeypatch):
    def data(checked):
        raise UsageError("data=here: \x1b[31m")

    def model(checked):
        return "1,000 parameters"

    monkeypatch.setattr(checks, "CHECKS", [data, model])
    with suppress(SystemExit):
        run(None, None, {})
    said = capsys.readouterr().out
    assert colored(said) == ([(RED, "✗"), (GREEN, "✓")] if forced else [])
    assert "data=here: \\x1b[31m" in said
