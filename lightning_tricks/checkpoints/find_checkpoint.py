"""Find the newest checkpoint in some folders that is whole, and tell which ones were passed over and why.

Nothing here changes a file, except that an older checkpoint which a kill left without its name gets it back.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.foreign_files import is_inside
from lightning_tricks._host.address import is_address
from lightning_tricks.checkpoints.bucket import Bucket, fetch, mirror
from lightning_tricks.checkpoints.check_checkpoint import replaced_path
from lightning_tricks.checkpoints.record import Record, read_record


@dataclass(frozen=True)
class Candidate:
    """One checkpoint, file or folder of shards, as found in a folder.

    Args:
        path: its name, with links followed.
        place: where it lies: `path`, or the name that it has while a newer one takes its place.
        link: a name that leads to it, such as `last.ckpt`; None where there is none.
        address: of a checkpoint in a bucket, which is fetched to `place` when it is looked at.
        record: None where it has none, or none that can be read.
        written_ns: time of the last write.
        problem: why it cannot be used, as far as its name and its record tell.
    """

    path: Path
    place: Path
    record: Record | None
    written_ns: int
    problem: str | None = None
    link: Path | None = None
    address: str | None = None

    @property
    def shown_path(self) -> Path:
        """The path to show: the link, where there is one."""
        return self.link or self.place

    def look(self, check: Callable[[Path], Any]) -> str | None:
        """Why it cannot be used; None where it can, and is on this host now. See `newest_whole`."""
        try:
            if self.problem is None:
                check(fetch(self.address) if self.address else self.place)
        except UsageError as error:
            return str(error).removeprefix("damaged: ").removesuffix(": take an older checkpoint")
        except OSError as error:
            return f"cannot be read ({error.strerror or error})"
        return self.problem


@dataclass
class Found:
    """The answer of `newest_whole`."""

    chosen: Candidate | None = None
    passed_over: list[str] = field(default_factory=list)  # one line for each newer one, the newest first


def candidates(folder: Path | str) -> list[Candidate]:
    """The checkpoints of one folder, the oldest first, each once: links lead to files that stand there themselves.

    The number in their records decides, then the step; where a record is missing, the time of writing. Of an address,
    those in the bucket and those on this host; of two with one number, the one on this host is the newer.
    """
    if is_address(folder):
        stored = Bucket(str(folder)).look()
        there = [
            Candidate(place := mirror(folder) / name, place, one.record, 0, one.problem or _not_finite(one.record),
                      address=f"{folder}/{name}")
            for name, one in stored.items()
            if not one.is_part
        ]  # fmt: skip
        return _in_order([*there, *candidates(mirror(folder))])
    folder = Path(folder)
    names = set(folder.glob("*.ckpt"))
    names |= {folder / path.name[1:].removesuffix(".replaced") for path in folder.glob(".*.ckpt.replaced")}
    found: dict[Path, Candidate] = {}
    for path in sorted(names):
        place = path if os.path.lexists(path) else replaced_path(path)
        with contextlib.suppress(FileNotFoundError):  # another process may delete it meanwhile
            candidate = _candidate(path, place, folder)
            if candidate.link or candidate.place not in found:
                found[candidate.place] = candidate
    return _in_order(found.values())


def _candidate(path: Path, place: Path, folder: Path) -> Candidate:
    """Read one checkpoint's record; FileNotFoundError where there is none."""
    written, link = place.lstat().st_mtime_ns, None
    if place.is_symlink():
        real = Path(os.path.realpath(place))
        if not real.exists():
            return Candidate(path, place, None, written, f"a link to {os.readlink(place)}, which is not there")
        if not is_inside(folder, place):
            return Candidate(path, place, None, written, f"a link to {real}, which is outside of its folder")
        link = place
        path = place = folder / real.name if real.parent == Path(os.path.realpath(folder)) else real
        written = place.stat().st_mtime_ns
    try:
        record = read_record(place)
    except UsageError as error:
        return Candidate(path, place, None, written, str(error), link)
    return Candidate(path, place, record, written, _not_finite(record), link)


def _not_finite(record: Record | None) -> str | None:
    return "its weights are not finite numbers" if record and record.finite is False else None


def _in_order(found: Iterable[Candidate]) -> list[Candidate]:
    """Sort checkpoints with a record by its number, and place the others between them by their time of writing.

    The time alone would not do: a copy of a file may change it.
    """
    found = list(found)
    numbered = sorted((c.record.number, c.record.step, c.written_ns, i) for i, c in enumerate(found) if c.record)
    times = accumulate((written_ns for _, _, written_ns, _ in numbered), max)  # never falls, so the numbers decide
    timed = [(time, order, found[i]) for order, (time, (*_, i)) in enumerate(zip(times, numbered, strict=True))]
    timed += [(c.written_ns, len(found), c) for c in found if c.record is None]
    return [c for *_, c in sorted(timed, key=lambda entry: entry[:2])]


def newest_whole(folders: Iterable[Path | str], check: Callable[[Path], Any]) -> Found:
    """The newest checkpoint of these folders that can be used; reads whole files, the newest first, until one is whole.

    Args:
        folders: there or not, or addresses. Between folders, the time of writing decides.
        check: raises a UsageError or an OSError where a checkpoint cannot be used.
    """
    answer = Found()
    for candidate in _newest_first([candidates(folder) for folder in folders]):
        problem = candidate.look(check)
        if problem is None:
            answer.chosen = candidate
            break
        name = str(candidate.address or candidate.place)
        answer.passed_over.append(problem if name in problem else f"{name}: {problem}")
    return answer


def _newest_first(lists: list[list[Candidate]]) -> Iterator[Candidate]:
    """Merge lists, each in its own order; the one whose last checkpoint was written last goes first."""
    while lists := [left for left in lists if left]:
        yield max(lists, key=lambda left: left[-1].written_ns).pop()


def restore_name(candidate: Candidate) -> Path:
    """The path of a checkpoint, after giving it its name back if a kill left it without. Several ranks may call it."""
    if candidate.place != candidate.path:
        with contextlib.suppress(FileNotFoundError):  # another rank was faster
            candidate.place.rename(candidate.path)
    return candidate.path
