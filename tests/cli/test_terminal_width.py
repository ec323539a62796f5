"""No line of our own text is wider than the terminal, or has a broken word."""

import pytest

from lightning_tricks import __main__ as door

SAMPLES = "docs/samples"
LINES = {
    "--help": ["--help"],
    "ls": ["ls"],
    "runs": ["runs", f"{SAMPLES}/sweep"],
    "runs with many settings": ["runs", SAMPLES],
}


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("words", LINES.values(), ids=LINES)
def test_no_line_is_wider_than_the_terminal(capsys, monkeypatch, request, words, columns):
    monkeypatch.chdir(request.config.rootpath)
    monkeypatch.setenv("COLUMNS", str(columns))
    door.run(words)
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert [line for line in lines if len(line) > columns] == []
