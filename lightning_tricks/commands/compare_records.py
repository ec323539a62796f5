"""Compare two records of a run, and name the first thing that differs. Imports no torch."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]  # what was written down about a step or a micro-batch, by the names of its parts


@dataclass(frozen=True, order=True)
class Difference:
    """A part that differs, sorted by its place in the run.

    Args:
        step: of the run.
        micro_batch: of the step.
        order: index of the part among those that are compared.
        rank: whose record it is.
        part: that differs.
        detail: what differs within it, such as the name of a weight; may be empty.
    """

    step: int
    micro_batch: int
    order: int
    rank: int
    part: str
    detail: str = ""

    @property
    def place(self) -> str:
        """Such as: at step 5 (head.weight)."""
        return f"at step {self.step}" + (f" ({self.detail})" if self.detail else "")

    def __str__(self) -> str:
        """Such as: weights at step 5 (head.weight)."""
        return f"{self.part} {self.place}"


def first_differences(
    pairs: Iterable[tuple[Record, Record]], parts: Sequence[str], judge: Callable[[str, Record, Record], str | None]
) -> list[Difference]:
    """The first difference of each part that differs; the first of all comes first.

    Args:
        pairs: records of two runs at one place, with `step`, and with `micro_batch` and `rank` where there are several.
            One of the two may be empty.
        parts: in the order of cause and effect, so that the first one that differs is the cause of the others.
        judge: called with a part and a pair; returns None where the part does not differ, else the detail.
    """
    found: dict[str, Difference] = {}
    for one, other in pairs:
        place = one or other
        for order, part in enumerate(parts):
            detail = judge(part, one, other)
            if detail is None:
                continue
            here = Difference(place["step"], place.get("micro_batch", 0), order, place.get("rank", 0), part, detail)
            found[part] = min(found.get(part, here), here)
    return sorted(found.values())
