"""The file of a ledger: JSON lines, each with a checksum over itself and the line before. Imports no torch.

Lines are only appended. Each start of the run, also a resume, writes a line `start` with the number of its first step.
A resume may repeat steps that are in the file already: then the later line is that of the run. A kill in the middle of
a write leaves an unfinished last line, which the next start cuts off.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.foreign_files import check_regular, parse_json, why

NAME = "ledger.jsonl"
_CHAIN = ', "chain": "'
_FIRST = b'{"start": '  # how every ledger begins
_MOST_PROCESSES = 1 << 20
# In the order of cause and effect within a step, so that the first one that differs is the cause of the others.
PARTS = ("samples", "batch", "torch_random", "other_random", "loss", "optimizer", "weights")
Line = dict[str, Any]


def chained(line: Line, before: str) -> tuple[str, str]:
    """The text of a line after a line with the checksum `before`, and its own checksum."""
    text = json.dumps(line)[:-1]
    chain = _checksum(text, before)
    return f'{text}{_CHAIN}{chain}"}}\n', chain


def _checksum(text: str, before: str) -> str:
    return hashlib.blake2b(f"{before} {text}".encode(), digest_size=8).hexdigest()


def parse(text: str, before: str) -> tuple[Line | None, str, bool]:
    """A line as (its values, its checksum, whether it follows the line before); no values if it cannot be read."""
    body, found, chain = text.rpartition(_CHAIN)
    try:
        values = parse_json(body + "}") if found else None
    except ValueError:
        values = None
    if not isinstance(values, dict) or not chain.endswith('"}'):
        return None, before, False
    return values, chain[:-2], chain[:-2] == _checksum(body, before)


class LedgerFile:
    """Appends lines to a ledger; only one process may have it open.

    Args:
        path: of the file; its folder is created. Lines of earlier starts stay; an unfinished last line is cut off.

    Raises:
        UsageError: the file exists and is no ledger, or is a link.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._chain = path, ""
        if path.is_symlink():
            raise UsageError(f"RunLedger.path={path}: this is a link to {os.path.realpath(path)}: name the file itself")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            self._find_end()

    def _find_end(self) -> None:
        """Cut the file after its last readable line, and continue from the checksum of that line."""
        end = start = 0
        with self.path.open("rb+") as file:
            if not (first := file.read(len(_FIRST))) == _FIRST[: len(first)]:
                raise UsageError(f"RunLedger.path={self.path}: the file is no ledger: name another one, or remove it")
            file.seek(0)
            for line in file:
                start += len(line)
                values, chain, _ = parse(line.decode(errors="replace").removesuffix("\n"), self._chain)
                if values is not None and line.endswith(b"\n"):
                    end, self._chain = start, chain
            file.truncate(end)

    def append(self, lines: Iterable[Line]) -> None:
        """Write all lines in one call, without a wait for the disk."""
        text = ""
        for line in lines:
            more, self._chain = chained(line, self._chain)
            text += more
        with self.path.open("ab", buffering=0) as file:
            file.write(text.encode())


@dataclass
class Ledger:
    """The content of a ledger file."""

    path: Path
    # by number, 0 for the first; under `start` the line `start` that it follows; of a repeated step, the last values
    steps: dict[int, Line] = field(default_factory=dict)
    starts: list[Line] = field(default_factory=list)
    repeated: list[tuple[Line, Line]] = field(default_factory=list)  # the earlier values of a step and the later ones
    broken: list[int] = field(default_factory=list)  # lines, from 1, whose checksum does not follow from the one before
    unfinished: bool = False  # the last line is incomplete

    def _add(self, values: Line, earlier: dict[int, Line]) -> bool:
        """Take a line; False for one that RunLedger does not write."""
        if "start" in values:
            values = {"weights": None, "processes": 1, **values}
            if not (_is_count(values["start"]) and values["processes"] in range(1, _MOST_PROCESSES)):
                return False
            self._forget_from(values["start"], earlier)
            self.starts.append(values)
        elif "step" in values:
            step = values["step"]
            if not (_is_count(step) and all(_fits(name, values.get(name)) for name in PARTS)):
                return False
            if self.starts:
                self._forget_from(step, earlier)  # without the line of its start, which a power failure can take
                self.steps[step] = {**dict.fromkeys(PARTS), **values, "start": self.starts[-1]}
                if step in earlier:
                    self.repeated.append((earlier.pop(step), self.steps[step]))
        return True

    def _forget_from(self, step: int, earlier: dict[int, Line]) -> None:
        """Keep the steps before one, which are in ascending order."""
        while self.steps and (last := next(reversed(self.steps))) >= step:
            earlier[last] = self.steps.pop(last)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _fits(name: str, value: Any) -> bool:
    """Whether a part of a step has the form that RunLedger gives it: None, one value, or a list of ranks' values."""
    if name == "samples":
        return value is None or isinstance(value, list)
    of_ranks = value if isinstance(value, list) and value else [value]
    if name != "loss":
        return all(one is None or isinstance(one, str) for one in of_ranks)
    return all(one is None or type(one) in (int, float) or one in ("nan", "inf", "-inf") for one in of_ranks)


def read_ledger(place: str | os.PathLike[str]) -> Ledger:
    """Read a ledger.

    Args:
        place: a file, or the folder of a run that holds `ledger.jsonl`.

    Raises:
        UsageError: the file cannot be read, or holds no step.
    """
    path = Path(place, NAME) if Path(place).is_dir() else Path(place)
    try:
        if path != Path(place):
            check_regular(path)
        text = path.read_bytes().decode(errors="replace")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: no ledger can be read ({why(error)}): name a run's folder or its file") from None
    ledger, chain = Ledger(path), ""
    earlier: dict[int, Line] = {}
    *lines, rest = text.split("\n")
    ledger.unfinished = bool(rest)
    for number, line in enumerate(lines, 1):
        values, chain, follows = parse(line, chain)
        taken = values is not None and ledger._add(values, earlier)
        if not follows or not taken:
            ledger.broken.append(number)
    if not ledger.steps:
        raise UsageError(f"{path}: holds no step of a ledger: name the file that RunLedger has written")
    return ledger
