"""A cached folder is there whole or not at all."""

import errno
import os
import signal
import time
from pathlib import Path

import pytest

from lightning_tricks._errors import UsageError
from lightning_tricks.data.cache import build_once, default_cache_dir


def write_two(folder: Path) -> None:
    (folder / "a").write_text("a")
    (folder / "b").write_text("b")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_it_is_built_once(tmp_path):
    builds = []
    for _ in range(2):
        build_once(tmp_path / "deep" / "set", lambda folder: (builds.append(folder), write_two(folder)))
    assert len(builds) == 1
    assert names(tmp_path / "deep" / "set") == ["a", "b"]
    assert names(tmp_path / "deep") == ["set"]


def test_a_build_that_fails_leaves_nothing(tmp_path):
    def fail(folder: Path) -> None:
        write_two(folder)
        raise KeyError

    with pytest.raises(KeyError):
        build_once(tmp_path / "set", fail)
    assert names(tmp_path) == []


def test_a_build_that_is_killed_leaves_no_set(tmp_path):
    if (child := os.fork()) == 0:
        build_once(tmp_path / "set", lambda folder: (write_two(folder), os.kill(os.getpid(), signal.SIGKILL)))
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert not (tmp_path / "set").exists()
    (left,) = tmp_path.iterdir()
    build_once(tmp_path / "set", write_two)
    assert names(tmp_path / "set") == ["a", "b"]
    assert left.exists()  # it could be another process's, still at work


def test_old_leftovers_are_swept(tmp_path):
    left = tmp_path / ".set.abc"
    left.mkdir()
    (left / "a").touch()
    other = tmp_path / ".other.abc"
    other.mkdir()
    long_ago = time.time() - 2 * 24 * 3600
    for path in (left / "a", left, other):
        os.utime(path, (long_ago, long_ago))
    build_once(tmp_path / "set", write_two)
    assert names(tmp_path) == [".other.abc", "set"]


def test_of_two_builds_at_once_the_first_to_finish_wins(tmp_path):
    def build(folder: Path) -> None:
        write_two(folder)
        build_once(tmp_path / "set", lambda other: (other / "winner").touch())

    build_once(tmp_path / "set", build)
    assert names(tmp_path) == ["set"]
    assert names(tmp_path / "set") == ["winner"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"^cache_dir: cannot write to .*file/cache \(Not a directory\); set"):
        build_once(tmp_path / "file" / "cache" / "set", write_two)


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path):
    def fill(folder: Path) -> None:
        write_two(folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UsageError, match=r"^cache_dir: cannot write to .* \(No space left on device\)"):
        build_once(tmp_path / "set", fill)
    assert names(tmp_path) == []


def test_others_may_read_a_shared_cache(tmp_path):
    build_once(tmp_path / "set", write_two)
    assert (tmp_path / "set").stat().st_mode & 0o777 == 0o755


def test_the_default_is_the_user_s_cache(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_dir() == Path("/somewhere/lightning_tricks")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "lightning_tricks"
