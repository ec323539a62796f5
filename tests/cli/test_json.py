"""`--json -` of each command that prints facts: standard output has JSON alone, and exit codes stay."""

import inspect
import json
import sys
from contextlib import suppress
from types import SimpleNamespace

import branching_run as small
import pytest
from cli.parsers import one_parser  # noqa: F401, a fixture

from lightning_tricks import __main__ as door
from lightning_tricks._core.errors import UsageError
from lightning_tricks.commands import COMMANDS, verify_resume
from lightning_tricks.commands import eval as eval_command
from lightning_tricks.logs.ledger_diff import compare
from lightning_tricks.logs.ledger_file import read_ledger

WITHOUT = {  # they write files, or print text that is no fact
    "average", "completion", "consolidate", "cp", "fit", "import", "predict", "prepare", "show-data",
}  # fmt: skip


def test_each_command_that_prints_facts_takes_json(capsys):
    lacking = set()
    for name, command in COMMANDS.items():
        if command.needs in ("nothing", "a fit", "settings"):
            for words in ([name, "diff"], [name, "check"]) if name == "ledger" else [[name]]:
                with suppress(SystemExit):
                    command.load().run([*words[1:], "--help"])
                if "--json FILE" not in capsys.readouterr().out:
                    lacking.add(name)
        elif command.module and "json" not in inspect.signature(command.load().run).parameters:
            lacking.add(name)
    assert lacking == WITHOUT - {"fit", "predict"}  # and validate and test below


@pytest.fixture(scope="module")
def folder(tmp_path_factory, one_parser):  # noqa: F811
    folder = tmp_path_factory.mktemp("json")
    small.prepare(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        ledger = "--trainer.callbacks+=RunLedger"
        small.command("fit", ledger)
        small.command("fit", ledger, "--trainer.max_steps=8", "--model.optimizer.lr=1e-3")
        yield folder


def facts(capsys, *words):
    """The JSON of a command, and what else it printed."""
    capsys.readouterr()
    code = 0
    try:
        door.run([*words, "--json", "-"])
    except SystemExit as stop:
        code = int(stop.code or 0)
    printed = capsys.readouterr()
    return json.loads(printed.out), code, printed.err


CHECKPOINT = "runs/toy/version_0/checkpoints/step=6.ckpt"


@pytest.mark.parametrize("command", ["validate", "test"])
def test_figures_of_an_evaluation(folder, capsys, command):
    found, code, err = facts(capsys, command, "--config", "toy.yaml", "--ckpt_path", CHECKPOINT)
    assert (code, found["step"], found["checkpoint"]) == (0, 6, CHECKPOINT)
    assert found["folder"].endswith(command)
    loss = found["metrics"]["val/loss" if command == "validate" else "test/loss"]
    assert 3 < loss < 6
    assert f"{loss:.4f}"[:5] in err
    with pytest.raises(UsageError, match=f"^{command}: json=.*no/such"):
        door.run([command, "--config", "toy.yaml", "--ckpt_path", CHECKPOINT, "--json", "no/such/file"])


def test_figures_of_a_branch(folder, capsys):
    words = ["--config", "toy.yaml", "--ckpt_path", CHECKPOINT, "--decay_steps", "2"]
    found, code, err = facts(capsys, "branch", *words)
    assert (code, found["step"]) == (0, 8)
    assert found["checkpoint"].endswith("step=6.ckpt")
    assert found["folder"] == str(small.newest("toy"))
    assert found["metrics"]["val/loss"] > 0
    assert "Go on:" in err


def test_what_two_ledgers_and_one_show(folder, capsys):
    one, other = "runs/toy/version_0", "runs/toy/version_1"
    same, code, err = facts(capsys, "ledger", "diff", one, one)
    assert (code, same["differs"], same["first_difference"], same["compared_steps"]) == (0, False, None, 12)
    assert "ledger diff: no difference" in err
    found, code, _ = facts(capsys, "ledger", "diff", one, other)
    assert (code, found["differs"], found["compared_steps"]) == (1, True, 8)
    step, parts = found["first_difference"]
    assert found["parts"][parts[0]]["differs"] == step
    found, code, _ = facts(capsys, "ledger", "check", one)
    assert (code, found["whole"], found["problems"]) == (0, True, [])


def test_what_a_verified_resume_shows(folder, capsys, monkeypatch):
    diff = compare(read_ledger("runs/toy/version_0"), read_ledger("runs/toy/version_1"))
    report = verify_resume.ResumeReport(8, 4, 1, diff)
    monkeypatch.setattr(verify_resume, "compare_phases", lambda command, steps: report)
    found, code, err = facts(capsys, "verify-resume", "--config", "toy.yaml")
    assert (code, found["equal"], found["steps"], found["steps_before_kill"]) == (1, False, 8, 4)
    assert found["first_difference"] == [*diff.first()]
    assert "verify-resume: " in err


def test_scores_of_an_evaluation_without_lm_eval_itself(capsys, monkeypatch):
    results = {"results": {"text": {"acc,none": 0.5, "stderr": float("nan"), "at": object}}}
    utils = SimpleNamespace(handle_non_serializable=str, make_table=lambda found: "a table")
    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace(utils=utils))
    monkeypatch.setitem(sys.modules, "lm_eval.utils", utils)
    fake = SimpleNamespace(Tasks=lambda *_: None, evaluate=lambda *_, **__: dict(results))
    model = SimpleNamespace(config=SimpleNamespace(max_seq_len=8), tokenizer=None, eot_id=None)
    for name, value in {
        "harness": lambda: fake,
        "trained_model": lambda *_: ("run.ckpt", model, model, "cpu"),
        "TextModel": lambda *_: None,
        "version": lambda _: "1.0",
    }.items():
        monkeypatch.setattr(eval_command, name, value)
    found, code, err = facts(capsys, "eval", "--ckpt_path", "run.ckpt", "--tasks", "text")
    assert (code, found["config"]["checkpoint"], found["lm_eval_version"]) == (0, "run.ckpt", "1.0")
    assert found["results"]["text"] == {"acc,none": 0.5, "stderr": None, "at": str(object)}
    assert err == "a table\n"
