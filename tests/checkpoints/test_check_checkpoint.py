"""What is no whole checkpoint, and each damage of one, is found before anything is unpickled, and said in one line."""

import contextlib
import os
import random
import re
import zipfile
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from checkpoints.saved import assert_same, checkpoint, checkpoint_of, trained
from checkpoints.shards import write_shards

from lightning_tricks._core.errors import UsageError
from lightning_tricks.checkpoints import AtomicCheckpointIO, check_checkpoint, record, verify_checkpoint
from lightning_tricks.checkpoints.check_checkpoint import identity
from lightning_tricks.checkpoints.record import RECORD_FILE, Record, checksum_of, read_record, to_json
from lightning_tricks.checkpoints.write_file import write_file


def refusal(path: Path, check=verify_checkpoint) -> str:
    with pytest.raises(UsageError) as caught:
        check(path)
    line = str(caught.value)
    assert "\n" not in line
    assert str(path) in line
    return line


def load(path: Path):
    return AtomicCheckpointIO().load_checkpoint(path)


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.ckpt"
    write_file(checkpoint(size=3), path)
    return path


@pytest.fixture(params=["ours", "lightning's"])
def real(request, tmp_path):
    """A checkpoint with moments, scaler and random state: ours, and one that Lightning wrote."""
    path = tmp_path / "real.ckpt"
    writer = AtomicCheckpointIO() if request.param == "ours" else pl.plugins.TorchCheckpointIO()
    content = checkpoint_of(*trained())
    content["state_dict"]["large"] = torch.arange(100_000.0)  # several blocks of the reader
    writer.save_checkpoint(content, path)
    return path


def test_a_whole_checkpoint_passes_and_is_given_back(real):
    assert verify_checkpoint(str(real), resumes=True) == real


def test_every_flipped_bit_is_found(small):
    content = bytearray(small.read_bytes())
    for bit in range(0, 8 * len(content), 3):
        content[bit // 8] ^= 1 << bit % 8
        small.write_bytes(content)
        refusal(small)
        content[bit // 8] ^= 1 << bit % 8


def test_a_flipped_bit_of_a_tensor_is_found_in_our_files_and_in_lightnings(real):
    content = bytearray(real.read_bytes())
    start = content.index(torch.arange(100_000.0).numpy().tobytes())
    rng = random.Random(0)
    for _ in range(20):
        byte, bit = start + rng.randrange(400_000), rng.randrange(8)
        content[byte] ^= 1 << bit
        real.write_bytes(content)
        assert re.fullmatch(
            r"damaged: .* has other bytes in .* than were written: take an older checkpoint", refusal(real)
        )
        assert refusal(real, load) == refusal(real)
        content[byte] ^= 1 << bit


def test_a_flipped_bit_anywhere_in_lightnings_own_file_is_found_or_harmless(tmp_path):
    path = tmp_path / "plain.ckpt"
    torch.save(checkpoint(size=3), path)
    content = bytearray(path.read_bytes())
    for bit in range(0, 8 * len(content), 41):
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        with contextlib.suppress(UsageError):
            assert_same(load(path), checkpoint(size=3))
        content[bit // 8] ^= 1 << bit % 8


def test_a_file_cut_at_any_kind_of_place_is_refused_by_both_checks(small):
    content = small.read_bytes()
    end, directory = content.index(b"PK\x05\x06"), content.index(b"PK\x01\x02")
    tensor = content.index(torch.full((3,), 2.0).numpy().tobytes())
    for size in (3, 10, 40, tensor + 2, directory, directory + 60, end, end + 10):  # to the end of the directory
        small.write_bytes(content[:size])
        assert refusal(small).startswith("incomplete: " if size > 3 else f"{small} is no checkpoint"), size
        assert refusal(small, check_checkpoint) == refusal(small)
    for size in (end + 22, end + 23, end + 60, len(content) - 1):  # in the record
        small.write_bytes(content[:size])
        assert refusal(small).startswith("damaged: "), size
    small.write_bytes(content + b"x")
    assert refusal(small).startswith(("damaged: ", "incomplete: "))
    small.write_bytes(b"")
    assert refusal(small) == refusal(small, check_checkpoint) == f"incomplete: {small} is empty"


def test_a_checkpoint_of_a_newer_version_says_what_to_install(small, monkeypatch):
    monkeypatch.setattr(record, "VERSION", 0)
    expected = f"{small} is of version 1, this lightning_tricks reads up to 0: update the clone"
    assert refusal(small, load).startswith(expected)


def test_a_file_that_a_user_opened_and_saved_again_opens(small):
    content = load(small)
    content["global_step"] = 7
    torch.save(content, small)
    assert read_record(small) is None
    assert load(small)["global_step"] == 7


def test_a_program_that_has_switched_checksums_off_does_not_spoil_ours(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        write_file(checkpoint(), tmp_path / "at.ckpt")
        assert torch.serialization.get_crc32_options() is False
    finally:
        torch.serialization.set_crc32_options(True)
    assert_same(load(tmp_path / "at.ckpt"), checkpoint())


def test_a_folder_is_compared_with_its_record(tmp_path):
    folder = write_shards(tmp_path / "at.ckpt", {"state_dict": {"weight": torch.ones(1000)}})
    assert verify_checkpoint(folder) == folder  # another program's: no checksums
    sums = {file.name: checksum_of(file) for file in folder.iterdir()}
    (folder / RECORD_FILE).write_bytes(to_json(Record(step=3, checksums=sums)))
    assert verify_checkpoint(folder) == folder
    shard = folder / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[-2000] ^= 4
    shard.write_bytes(content)
    assert check_checkpoint(folder) == folder  # names and sizes alone
    assert refusal(folder) == f"damaged: {shard} has other bytes than were written: take an older checkpoint"


def test_a_newer_checkpoint_that_takes_the_name_in_mid_check_is_no_damage(small, monkeypatch):
    newer = small.with_name("newer.ckpt")
    write_file(checkpoint(step=3, size=3), newer)
    read = record._archive_damage

    def replaced(file, checksum):
        if newer.exists():
            os.replace(newer, small)
        return read(file, checksum)

    monkeypatch.setattr(record, "_archive_damage", replaced)
    assert verify_checkpoint(small) == small
    assert load(small)["global_step"] == 3


# ---- names and sizes


@pytest.fixture
def folder(tmp_path):
    return write_shards(tmp_path / "at.ckpt", {"state_dict": {"weight": torch.arange(64.0), "bias": torch.arange(9.0)}})


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


@pytest.mark.parametrize("name", [".metadata", "meta.pt", "__0_0.distcp"])
@pytest.mark.parametrize("left", [None, 0, 10, -1])  # bytes; -1: all but the last one
def test_a_folder_with_a_file_that_is_missing_or_cut_short_is_incomplete(folder, name, left):
    file = folder / name
    size, whole = file.stat().st_size, file.read_bytes()
    file.unlink()
    if left is not None:
        file.write_bytes(whole[:left])
    message = refusal(folder, check_checkpoint)
    if name == "__0_0.distcp":
        assert message == f"incomplete: {file} has {len(whole[: left or 0]):,} of {size:,} bytes"
    elif left is None:
        assert message.startswith(f"incomplete: {folder} has no {name} ")
    else:
        assert message.startswith("incomplete: ")


def test_a_folder_of_something_else(folder, tmp_path):
    older = folder.rename(folder.parent / ".at.ckpt.replaced")  # where a kill hit the moment of the swap
    assert refusal(folder, check_checkpoint).endswith(f"{older} is the one before it: rename it")
    assert f"{tmp_path} is a folder without a checkpoint" in refusal(tmp_path, check_checkpoint)
    (tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt").touch()
    assert "is a checkpoint of DeepSpeed" in refusal(tmp_path, check_checkpoint)


def test_what_is_not_there_and_what_is_no_checkpoint(tmp_path):
    assert refusal(tmp_path / "no.ckpt", load) == f"ckpt_path={tmp_path}/no.ckpt: there is no such file or folder"
    text = tmp_path / "text.ckpt"
    text.write_text("hello")
    assert refusal(text, load) == f"{text} is no checkpoint: not a file that torch.save wrote"
    with zipfile.ZipFile(text, "w") as file:
        file.writestr("readme.txt", "hello")
    assert "is no checkpoint: a zip archive of something else" in refusal(text, check_checkpoint)
    torch.save({"weight": torch.ones(1)}, text)
    assert "holds no state_dict, so it is no checkpoint of Lightning" in refusal(text, load)


def test_a_checkpoint_that_goes_while_one_looks_at_it_has_no_identity(tmp_path, monkeypatch):
    (tmp_path / "gone").write_text("")
    there = identity(tmp_path / "gone")
    (tmp_path / "gone").unlink()
    monkeypatch.setattr(os.path, "exists", lambda path: True)  # as it was a moment before
    assert (len(there), identity(tmp_path / "gone"), identity(None)) == (3, [], [])
