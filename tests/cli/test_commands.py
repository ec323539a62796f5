"""The table of commands: each row leads to a module that runs."""

import json
import subprocess
from pathlib import Path

import pytest

from lightning_tricks import __main__ as door
from lightning_tricks import commands
from lightning_tricks._core.errors import UsageError
from lightning_tricks.cli import RecipeCLI
from lightning_tricks.commands import COMMANDS, find


def test_each_command_can_be_run_and_is_in_help_and_completion(capsys):
    commands.COMMANDS["completion"].load().run([])
    script, text = capsys.readouterr().out, door.help_text()
    for name, command in COMMANDS.items():
        assert f"\n  {name} " in text
        assert f" {name} " in script.replace('"', " ")
        assert command.help
        assert command.needs in ("nothing", "a recipe", "a Trainer", "a fit", "settings", "the parser")
        assert not command.module or callable(command.load().run)
    on_recipes = {name for name, command in COMMANDS.items() if command.needs in ("a recipe", "a Trainer")}
    assert RecipeCLI.subcommands().keys() == on_recipes
    lines = text.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines.index("before a run:") < lines.index("after a run, by its logs:")
    assert len(lines) == len(COMMANDS) + len(commands.GROUPS) + 9  # a line each, and usage, summary and first run


def test_the_recipes_are_lines_or_json(capsys):
    door.run(["ls"])
    lines = capsys.readouterr().out.splitlines()
    door.run(["ls", "--json", "-"])
    recipes = json.loads(capsys.readouterr().out)
    assert [line.split(maxsplit=1) for line in lines] == [[each["name"], each["title"]] for each in recipes]
    names = [each["name"] for each in recipes]
    assert names[:6] == ["tiny", "small", "moe_tiny", "gpt2_124m", "speedrun_124m", "llama1b"], "by size"
    assert names[-1] == "moe_671b"
    assert names.index("llama7b_deepspeed") < names.index("mixtral_8x7b") < names.index("llama70b")


def test_every_module_that_runs_is_in_the_table():
    folder = Path(commands.__file__).parent
    files = {path.stem: path / "__init__.py" if path.is_dir() else path for path in folder.iterdir()}
    runs = {name for name, file in files.items() if file.is_file() and "\ndef run(" in file.read_text("utf-8")}
    assert runs == {command.module for command in COMMANDS.values() if command.module}


@pytest.mark.parametrize(
    ("word", "meant"), [("check_resume", "verify-resume"), ("tokenize", "prepare"), ("autopsi", "autopsy")]
)
def test_another_word_leads_to_its_command(word, meant):
    assert find("verify_resume").name == "verify-resume"
    with pytest.raises(UsageError, match=rf"^unknown command '{word}'; did you mean {meant}\?: --help lists them$"):
        find(word)


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "found"), [(["va"], ["validate"]), (["cp", "llama7b_"], ["llama7b_1gpu", "llama7b_deepspeed"])]
)
def test_a_shell_completes_commands_and_recipes(words, found, capsys):
    COMMANDS["completion"].load().run([])
    line = f"COMP_WORDS=(lightning-tricks {' '.join(words)}); COMP_CWORD={len(words)}; _lightning_tricks; "
    script = capsys.readouterr().out + line + 'echo "${COMPREPLY[@]}"'
    assert subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split() == found
