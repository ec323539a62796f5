"""A new checkpoint takes an older one's place whole or not at all."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch

from lightning_tricks._core.errors import UsageError
from lightning_tricks.checkpoints import swap_in
from lightning_tricks.checkpoints.write_file import (
    clear_staging,
    is_locked,
    locked,
    put_in_place,
    staging_path,
    write_file,
)
from lightning_tricks.guards.checkpoint_folder import CheckpointFolder, Retention


def folder_at(path: Path, *names: str) -> Path:
    path.mkdir()
    for name in names:
        (path / name).write_text(name)
    return path


def content(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def test_a_folder_replaces_a_folder_without_a_mixture(tmp_path):
    path = folder_at(tmp_path / "last.ckpt", "meta.pt", "__0_0.distcp", "__1_0.distcp")
    with swap_in(path) as new:
        assert content(path) == {"meta.pt", "__0_0.distcp", "__1_0.distcp"}  # still there
        folder_at(new, "meta.pt", "__0_0.distcp")
    assert content(path) == {"meta.pt", "__0_0.distcp"}
    assert content(tmp_path) == {"last.ckpt"}


def test_a_file_is_on_the_disk_before_it_takes_its_name_and_its_folder_after(tmp_path, monkeypatch):
    path, seen, fsync = tmp_path / "weights.ckpt", [], os.fsync

    def recorded(file: int) -> None:
        seen.append((Path(os.readlink(f"/proc/self/fd/{file}")).name, path.exists()))
        fsync(file)

    monkeypatch.setattr(os, "fsync", recorded)
    write_file({}, path)
    assert seen == [(".weights.ckpt.saving", False), (tmp_path.name, True)]


@pytest.mark.parametrize("is_file", [True, False])
def test_what_another_process_writes_is_neither_deleted_nor_written_over(tmp_path, is_file, monkeypatch):
    path, run = tmp_path / "step=2.ckpt", CheckpointFolder(tmp_path, Retention(1, 0, "min"), "another run")
    new = staging_path(path)
    new.write_text("new") if is_file else folder_at(new, "meta.pt")
    with locked(new):
        run.sweep()
        with pytest.raises(UsageError, match=r"another process is writing this checkpoint: two runs save to "):
            write_file({}, path)
        assert new.exists()
    run.sweep()
    assert not new.exists()

    save, seen = torch.save, []
    monkeypatch.setattr(torch, "save", lambda *args: seen.append(is_locked(new)) or save(*args))
    write_file({}, path)
    assert seen == [True]
    assert not is_locked(path)


@pytest.mark.parametrize("old_is_file", [True, False])
def test_a_file_and_a_folder_replace_each_other(tmp_path, old_is_file):
    path = tmp_path / "last.ckpt"
    path.write_text("old") if old_is_file else folder_at(path, "meta.pt")
    with swap_in(path) as new:
        folder_at(new, "meta.pt") if old_is_file else new.write_text("new")
    assert path.is_dir() is old_is_file
    assert content(tmp_path) == {"last.ckpt"}


def test_an_error_leaves_what_was_there(tmp_path):
    path = folder_at(tmp_path / "last.ckpt", "meta.pt")

    def fail():
        with swap_in(path) as new:
            folder_at(new, "__0_0.distcp")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert content(path) == {"meta.pt"}
    assert content(tmp_path) == {"last.ckpt"}


def test_what_a_killed_process_left_is_cleared(tmp_path):
    path = tmp_path / "last.ckpt"
    folder_at(clear_staging(path), "__0_0.distcp", "__7_0.distcp")
    folder_at(tmp_path / ".last.ckpt.replaced", "meta.pt")
    with swap_in(path) as new:
        folder_at(new, "meta.pt")
    assert content(path) == {"meta.pt"}
    assert content(tmp_path) == {"last.ckpt"}


def test_a_kill_between_the_renames_loses_nothing(tmp_path):
    path = folder_at(tmp_path / "last.ckpt", "meta.pt", "__1_0.distcp")
    path.rename(tmp_path / ".last.ckpt.replaced")  # and there it was killed
    with swap_in(path) as new:
        assert content(tmp_path / ".last.ckpt.replaced") == {"meta.pt", "__1_0.distcp"}  # until there is a newer one
        folder_at(new, "meta.pt")
    assert content(tmp_path) == {"last.ckpt"}


RENAME = Path.rename


def no_space_for(monkeypatch, refused) -> None:
    """Let the renaming of these paths fail."""

    def rename(self, target):
        if refused(self):
            raise OSError(errno.ENOSPC, "No space left on device")
        return RENAME(self, target)

    monkeypatch.setattr(Path, "rename", rename)


@pytest.mark.parametrize("older", ["put back", "not there", "lost its name"])
def test_a_rename_that_fails_says_why_and_the_older_one_has_its_name_again_or_a_note_tells_where_it_is(
    tmp_path, monkeypatch, older
):
    path, replaced = tmp_path / "last.ckpt", tmp_path / ".last.ckpt.replaced"
    if older != "not there":
        folder_at(path, "meta.pt", "__1_0.distcp")
    folder_at(clear_staging(path), "meta.pt")
    no_space_for(monkeypatch, lambda one: ".saving" in one.name or (older == "lost its name" and one != path))
    with pytest.raises(OSError, match="No space left on device") as caught:
        put_in_place(path)
    assert caught.value.errno == errno.ENOSPC
    if older == "lost its name":
        assert caught.value.__notes__ == [f"the older checkpoint is at {replaced}: rename it to {path}"]
        assert content(replaced) == {"meta.pt", "__1_0.distcp"}
    else:
        assert content(tmp_path) == {".last.ckpt.saving"} | ({"last.ckpt"} if older == "put back" else set())


def test_an_older_one_that_cannot_be_deleted_is_a_warning_and_the_new_one_is_saved(tmp_path, monkeypatch):
    path = folder_at(tmp_path / "last.ckpt", "meta.pt", "old")

    def refused(folder):
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(folder))

    folder_at(clear_staging(path), "meta.pt", "new")
    monkeypatch.setattr(shutil, "rmtree", refused)
    with pytest.warns(UserWarning, match="could not be deleted") as caught:
        put_in_place(path)
    assert content(path) == {"meta.pt", "new"}
    assert f"{tmp_path}/.last.ckpt.replaced" in str(caught[0].message)
    assert "\n" not in str(caught[0].message)


def test_no_name_on_the_way_is_taken_for_a_checkpoint(tmp_path):
    place = clear_staging(tmp_path / "last.ckpt")
    assert place.suffix != ".ckpt"
    assert not place.name.startswith("last")


def test_a_folder_of_the_users_is_not_deleted(tmp_path):
    path = folder_at(tmp_path / "notes", "thesis.tex")
    with pytest.raises(UsageError, match="is a folder of something else than a checkpoint"), swap_in(path):
        pass
    assert content(path) == {"thesis.tex"}
    with swap_in(tmp_path / "new" / "deep.ckpt") as new:
        new.write_text("made with its folders")
    assert (tmp_path / "new" / "deep.ckpt").exists()
