"""What a `fill_*.py` gives to `fill.py`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Filler(NamedTuple):
    """What fills places of a page.

    Args:
        page: in docs.
        texts: gives Markdown by the name of its place, from the result of a benchmark.
        draw: draws the plot, from the result, into `images/PAGE.svg`, and others beside it.
        measured: whether there is a result to fill it from.
    """

    page: str
    texts: Callable[[Any], Mapping[str, str]]
    draw: Callable[[Any, Path], None] | None = None
    measured: bool = True
