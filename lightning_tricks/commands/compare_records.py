"""Compare two runs that `ResumeRecorder` wrote down, and name the first thing that differs."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# In the order of cause and effect within a micro-batch, so that the first one that differs is the cause of the others.
PARTS = ("data", "random state", "weights", "optimizer state", "scaler", "lr", "loss", "gradient norm")


@dataclass(frozen=True, order=True)
class Difference:
    """A part that differs, sorted by its place in the run."""

    step: int
    micro_batch: int
    order: int  # index in PARTS
    rank: int
    detail: str = ""  # the first name that differs, such as a weight's

    @property
    def part(self) -> str:
        """One of PARTS."""
        return PARTS[self.order]

    def __str__(self) -> str:
        """Such as: weights at step 5 (head.weight), on rank 0."""
        return f"{self.part} at step {self.step}" + (f" ({self.detail})" if self.detail else "")


def read(*files: Path) -> list[dict[str, Any]]:
    """The lines of one rank; those of a run that was killed, and then those of its resume."""
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def differences(straight: list[dict[str, Any]], broken: list[dict[str, Any]], rank: int) -> Iterator[Difference]:
    """Each part of each micro-batch that differs between two runs of one rank."""
    for one, other in zip(straight, broken, strict=False):
        for order, part in enumerate(PARTS):
            if one.get(part) != other.get(part):
                detail = _first(one.get(part), other.get(part))
                yield Difference(one["step"], one["micro_batch"], order, rank, detail)
    if len(straight) != len(broken):  # windows of other lengths: the data were divided otherwise
        last = min(straight, broken, key=len)[-1]
        yield Difference(last["step"], last["micro_batch"] + 1, 0, rank, "another number of micro-batches")


def _first(one: Any, other: Any) -> str:
    """The first name in two mappings with different values."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return ""
    return next(name for name in [*one, *other] if one.get(name) != other.get(name))
