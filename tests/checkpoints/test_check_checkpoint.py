"""What is no whole checkpoint is refused in one line, which says what is wrong with it."""

import sys
import zipfile
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from shards import write_shards

from lightning_tricks._errors import UsageError
from lightning_tricks.checkpoints import check_checkpoint


@pytest.fixture
def folder(tmp_path):
    return write_shards(tmp_path / "at.ckpt", {"state_dict": {"weight": torch.arange(64.0), "bias": torch.arange(9.0)}})


def refusal(path) -> str:
    with pytest.raises(UsageError) as caught:
        check_checkpoint(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_whole_checkpoints_pass(folder, tmp_path):
    assert check_checkpoint(str(folder)) == folder
    for name, zipped in (("new.ckpt", True), ("old.ckpt", False)):
        torch.save({"state_dict": {}}, tmp_path / name, _use_new_zipfile_serialization=zipped)
        assert check_checkpoint(tmp_path / name) == tmp_path / name
    old = tmp_path / "old.ckpt"
    assert check_checkpoint(old, resumes=True) == old, "its keys are known only when it is loaded"


def test_weights_alone_are_whole_but_nothing_to_resume_from(folder, tmp_path):
    rest = torch.load(folder / "meta.pt", weights_only=True)
    torch.save({"state_dict": {"weight": torch.zeros(2)}, "loops": {}}, tmp_path / "weights.ckpt")
    torch.save({"state_dict": {}, "optimizer_states": [], "lr_schedulers": []}, tmp_path / "whole.ckpt")
    assert check_checkpoint(tmp_path / "whole.ckpt", resumes=True)
    assert check_checkpoint(folder, resumes=True)
    torch.save({key: value for key, value in rest.items() if key != "lr_schedulers"}, folder / "meta.pt")
    for path in (tmp_path / "weights.ckpt", folder):
        assert check_checkpoint(path) == path
        with pytest.raises(UsageError, match=rf"^ckpt_path={path}: it holds weights only[^\n]*$"):
            check_checkpoint(path, resumes=True)


def test_what_is_on_another_machine_is_left_to_the_reader():
    check_checkpoint("s3://bucket/last.ckpt")


def test_nothing_there(tmp_path):
    assert refusal(tmp_path / "no.ckpt") == f"ckpt_path={tmp_path}/no.ckpt: there is no such file or folder"


def test_a_kill_in_the_moment_of_the_swap_names_the_older_one(folder):
    older = folder.rename(folder.parent / ".at.ckpt.replaced")
    assert refusal(folder).endswith(f"{older} is the one before it: rename it")


@pytest.mark.parametrize("name", [".metadata", "meta.pt"])
def test_a_folder_without_its_metadata_is_incomplete(folder, name):
    (folder / name).unlink()
    message = refusal(folder)
    assert message.startswith(f"incomplete: {folder} has no {name} ")


def test_a_folder_of_shards_alone_is_incomplete(folder):
    (folder / ".metadata").unlink()
    (folder / "meta.pt").unlink()
    assert refusal(folder).startswith("incomplete: ")


@pytest.mark.parametrize("left", [None, 0, 10, -1])  # -1: all but the last byte of the second tensor
def test_a_shard_that_is_missing_or_cut_short_is_incomplete(folder, left):
    shard = folder / "__0_0.distcp"
    size, whole = shard.stat().st_size, shard.read_bytes()
    shard.unlink()
    if left is not None:
        shard.write_bytes(whole[:left])
    assert refusal(folder) == f"incomplete: {shard} has {len(whole[: left or 0]):,} of {size:,} bytes"


@pytest.mark.parametrize("name", [".metadata", "meta.pt"])
def test_metadata_cut_short_is_incomplete(folder, name):
    path = folder / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert refusal(folder).startswith("incomplete: ")
    path.write_bytes(b"")
    assert str(path) in refusal(folder)


def test_a_folder_of_deepspeed(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "zero_pp_rank_0_mp_rank_00_model_states.pt").touch()
    assert "is a checkpoint of DeepSpeed" in refusal(tmp_path)


def test_a_folder_of_checkpoints(folder):
    assert f"{folder.parent} is a folder without a checkpoint" in refusal(folder.parent)


def test_a_file_of_another_kind(tmp_path):
    text, archive = tmp_path / "text.ckpt", tmp_path / "archive.ckpt"
    text.write_text("hello")
    assert "is no checkpoint: not a file that torch.save wrote" in refusal(text)
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("readme.txt", "hello")
    assert "is no checkpoint: a zip archive of something else" in refusal(archive)


def test_a_file_cut_short(tmp_path):
    path = tmp_path / "at.ckpt"
    torch.save({"state_dict": {"weight": torch.zeros(1000)}}, path)
    path.write_bytes(path.read_bytes()[:-100])
    assert refusal(path) == f"incomplete: {path} ends too early, or its end is damaged"
