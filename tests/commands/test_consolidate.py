"""`consolidate`: the file is what a plain Trainer would have saved, and what cannot be done is said in one line."""

import re
from pathlib import Path

import pytest
import torch
from checkpoints.saved import flat
from checkpoints.shards import REST, of_file, write_shards
from checkpoints.test_open_checkpoint import Line, fit

from lightning_tricks import __main__ as door
from lightning_tricks._core.errors import UsageError


@pytest.fixture
def saved(tmp_path):
    model = Line()
    fit(model, 3).save_checkpoint(tmp_path / "plain.ckpt")
    return tmp_path / "plain.ckpt", of_file(tmp_path / "plain.ckpt", tmp_path / "folder.ckpt", model)


def consolidate(*args) -> None:
    door.run(["consolidate", *(str(arg) for arg in args)])


def test_the_file_holds_what_the_plain_file_holds(saved, tmp_path, capsys):
    plain, folder = saved
    consolidate(folder, tmp_path / "one.ckpt")
    expected, found = (flat(torch.load(path, weights_only=True)) for path in (plain, tmp_path / "one.ckpt"))
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        assert torch.equal(found[path], value) if torch.is_tensor(value) else found[path] == value
    printed = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"{folder}: (?!0\.00)\d+\.\d\d KiB, read to memory", printed[0])
    assert printed[1] == f"{tmp_path}/one.ckpt: step 3, 4 tensors of the module, 1 optimizer"
    assert len(printed) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"plain.ckpt", "folder.ckpt", "one.ckpt"}


def test_an_existing_file_is_replaced_only_on_request(saved, tmp_path):
    plain, folder = saved
    before = plain.read_bytes()
    with pytest.raises(UsageError, match=r"plain.ckpt exists: name another file, or give --overwrite"):
        consolidate(folder, plain)
    assert plain.read_bytes() == before
    torch.save({"state_dict": {}}, plain)
    consolidate(folder, plain, "--overwrite")
    assert torch.load(plain, weights_only=True)["global_step"] == 3


def test_the_state_of_a_plugin_passes_and_what_is_not_safe_is_said(tmp_path, capsys, monkeypatch):
    scaler = {"scale": 1024.0, "skipped_steps": 2}
    rest = {**REST, "FP16Mixed": scaler, "hyper_parameters": {"path": Path("x")}}
    folder = write_shards(tmp_path / "at.ckpt", {"state_dict": {"a": torch.ones(2)}}, rest)
    with pytest.raises(UsageError, match=r"holds pathlib\.\w+, .*set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1"):
        consolidate(folder, tmp_path / "one.ckpt")
    assert not (tmp_path / "one.ckpt").exists()
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    consolidate(folder, tmp_path / "one.ckpt")
    found = torch.load(tmp_path / "one.ckpt", weights_only=False)
    assert found["FP16Mixed"] == scaler
    assert found["hyper_parameters"] == {"path": Path("x")}
    assert "which weights_only=True does not allow" in capsys.readouterr().out.splitlines()[-1]


def test_a_folder_of_deepspeed_goes_to_its_own_reader(tmp_path, monkeypatch):
    (tmp_path / "ds.ckpt" / "checkpoint").mkdir(parents=True)
    (tmp_path / "ds.ckpt" / "checkpoint" / "mp_rank_00_model_states.pt").touch()
    called = []
    monkeypatch.setattr(
        "lightning_tricks.commands.consolidate.consolidate_deepspeed", lambda *paths: called.append(paths)
    )
    consolidate(tmp_path / "ds.ckpt", tmp_path / "one.ckpt")
    assert called == [(tmp_path / "ds.ckpt", tmp_path / "one.ckpt")]
