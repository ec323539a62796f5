"""Each wrong input of the table, through the real command line: exit code 2 and the line that says what to mend."""

import argparse
import inspect
import logging
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.parsers import no_hyper_parameters, one_parser  # noqa: F401, fixtures
from cli.wrong_inputs import PLAIN, ROWS, SMALL, Row
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_tricks import __main__ as door
from lightning_tricks._core.errors import UsageError
from lightning_tricks._host import writable as _writable
from lightning_tricks._host.process import check_launcher_variables
from lightning_tricks._host.writable import check_file
from lightning_tricks.cli.fit_options import check_options


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe, a text, and checkpoints of a run of it with one fault each."""
    from lightning_tricks import RecipeCLI

    folder = tmp_path_factory.mktemp("wrong")
    (folder / "small.yaml").write_text(SMALL)
    (folder / "plain.yaml").write_text(PLAIN)
    (folder / "text.txt").write_text(inspect.getsource(argparse)[:60_000])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        cli = RecipeCLI(args=["fit", "--config", "small.yaml", "--trainer.max_steps=2", "--trainer.logger=false"])
        cli.trainer.save_checkpoint("right.ckpt")
    for name, change in CHANGES.items():
        right = torch.load(folder / "right.ckpt", weights_only=True)
        change(right)
        torch.save(right, folder / f"{name}.ckpt")
    torch.save([1, 2], folder / "list.ckpt")
    return folder


def other_class(checkpoint: dict[str, Any]) -> None:
    del checkpoint["decoder_config"]
    checkpoint["state_dict"] = {"layer.weight": torch.ones(1, 2)}


CHANGES = {"other": other_class, "no_version": lambda checkpoint: checkpoint.pop("pytorch-lightning_version")}


pytestmark = pytest.mark.usefixtures("one_parser", "no_hyper_parameters")


@pytest.fixture(scope="module", autouse=True)
def silent_lightning() -> Any:
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)  # not the bare attribute: loggers below remember what is enabled


def stderr_of(args: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines of a command that must fail with exit code 2, without what Lightning tells of itself."""
    monkeypatch.setattr(sys, "argv", ["lightning-tricks", *args])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        door.main()
    said = capsys.readouterr().err
    assert stop.value.code == 2, said
    assert "Traceback" not in said
    return said.strip().splitlines()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.args or row.edit or row.words))
def test_a_wrong_input_is_one_line_with_option_value_and_remedy(row: Row, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    for name, content in row.files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    args = shlex.split(row.args) if isinstance(row.args, str) else row.args
    if row.edit is not None:
        assert row.edit[0] in SMALL
        (folder / "edited.yaml").write_text(SMALL.replace(*row.edit, 1))
        args = ["fit", "--config", "edited.yaml", *args]
    elif not row.whole:
        cold = [] if row.recipe == "plain.yaml" else ["--data.cache_dir", str(tmp_path / "cold")]
        args = ["fit", "--config", row.recipe, *cold, *args]
    if row.prepare is not None:
        row.prepare(folder, monkeypatch)
    lines = stderr_of([arg.replace("{folder}", str(folder)) for arg in args], capsys, monkeypatch)
    for name in row.files:
        (folder / name).unlink()
    assert len(lines) <= row.lines, lines
    assert lines[-1].startswith("error: ")
    for word in row.words:
        assert word in lines[-1]
    assert not (tmp_path / "cold").exists()


LAUNCHERS = [
    ({"WORLD_SIZE": "abc"}, r"^WORLD_SIZE='abc': .* whole number: .* `unset WORLD_SIZE`$"),
    ({"NODE_RANK": "1.5"}, r"^NODE_RANK='1\.5'"),
    ({"MASTER_PORT": ""}, "^MASTER_PORT=''"),
    ({"LOCAL_WORLD_SIZE": "٤"}, "^LOCAL_WORLD_SIZE='٤'"),
    ({"RANK": "5", "WORLD_SIZE": "2"}, "^RANK=5, WORLD_SIZE=2: ranks count from 0 .* torchrun"),
    ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "^LOCAL_RANK=2, LOCAL_WORLD_SIZE=2: .* `unset LOCAL_RANK"),
    ({"MASTER_PORT": "99999"}, "^MASTER_PORT=99999: ports go up to 65535"),
]


@pytest.mark.parametrize(("variables", "line"), LAUNCHERS)
def test_a_variable_that_no_launcher_sets_is_named_with_its_value(variables, line):
    with pytest.raises(UsageError, match=line):
        check_launcher_variables(variables)


NUMBERS = [
    ({"seed_everything": -1}, "seed_everything=-1", "0 to 4294967295"),
    ({"seed_everything": 2**32}, "seed_everything=4294967296", "0 to 4294967295"),
    ({"trainer": [1, 2]}, "trainer=[1, 2]", "settings below it"),
    *(
        ({"trainer": {name: value}}, f"trainer.{name}={value}", remedy)
        for name, value, remedy in (
            ("accumulate_grad_batches", 0, "1 or more"),
            ("val_check_interval", 0, "limit_val_batches: 0"),
            ("check_val_every_n_epoch", 0, "1 or more"),
            ("limit_train_batches", -1, "above 0"),
            ("num_nodes", 0, "the number of hosts"),
            ("devices", 0, "from 1 to 1024"),
            ("devices", 10_000_000, "from 1 to 1024"),
            ("gradient_clip_val", -1, "above 0"),
            ("gradient_clip_val", float("nan"), "above 0"),
        )
    ),
]


@pytest.mark.parametrize(("options", "value", "remedy"), NUMBERS)
def test_a_number_on_which_lightning_would_fail_later_is_refused(options, value, remedy):
    with pytest.raises(UsageError) as caught:
        check_options(options)
    assert str(caught.value).startswith(value)
    assert remedy in str(caught.value)


def test_a_file_is_refused_by_its_own_rights_and_a_device_needs_none_in_its_folder(tmp_path, monkeypatch):
    file = tmp_path / "plan.json"
    file.touch()
    check_file("plan: json", file)
    monkeypatch.setattr(_writable, "_refusal", lambda folder: "no rights")
    check_file("plan: json", os.devnull)
    with pytest.raises(UsageError, match=r"^plan: json=new: cannot be written \(no rights\)"):
        check_file("plan: json", "new")
    with pytest.raises(UsageError, match=r"^plan: json=s3:/bucket/a: this is an address: name a path on this host"):
        check_file("plan: json", "s3://bucket/a")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UsageError, match=r"plan\.json: cannot be written \(Permission denied\)"):
        check_file("plan: json", file)


def test_what_fails_in_a_run_and_can_be_mended_is_one_line_and_an_unknown_error_none():
    from lightning_tricks.cli.error_lines import usage_errors

    with pytest.raises(UsageError, match=r"^runs/log: No space left on device; free some space"):  # noqa: SIM117
        with usage_errors(lambda: None):
            raise OSError(28, "No space left on device", "runs/log")
    with pytest.raises(UsageError, match=r"^No `val_dataloader\(\)` method$"), usage_errors(lambda: None):
        raise MisconfigurationException("No `val_dataloader()`\n    method ")
    with pytest.raises(UsageError, match=r"^the processes have not met \(.*EADDRINUSE"), usage_errors(lambda: None):
        raise torch.distributed.DistNetworkError("port: 29500, code: -98,\n name: EADDRINUSE")
    with pytest.raises(PermissionError), usage_errors(lambda: None):
        raise PermissionError(13, "Permission denied", "a file of the user's own code")
