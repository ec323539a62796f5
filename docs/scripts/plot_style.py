"""How the plots of the front pages look: once on a light page, once on a dark one, with the page showing through."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple


class Theme(NamedTuple):
    """Colors of one plot."""

    ink: str
    faint: str
    ours: str
    second: str
    others: str


LIGHT = Theme(ink="#1f2328", faint="#d1d9e0", ours="#0969da", second="#bc4c00", others="#8c959f")
DARK = Theme(ink="#e6edf3", faint="#3d444d", ours="#58a6ff", second="#f0883e", others="#7d8590")


@contextmanager
def _style(theme: Theme, salt: str) -> Iterator[None]:
    import matplotlib as mpl

    mpl.use("Agg")
    inked = ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.labelcolor", "ytick.labelcolor")
    faint = ("axes.edgecolor", "grid.color", "xtick.color", "ytick.color")
    sizes = ("xtick.labelsize", "ytick.labelsize", "axes.labelsize", "legend.fontsize")
    settings = {
        **dict.fromkeys(inked, theme.ink), **dict.fromkeys(faint, theme.faint), **dict.fromkeys(sizes, 11),
        "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left", "axes.titlesize": 12,
        "legend.frameon": False, "svg.hashsalt": salt,
    }  # fmt: skip
    with mpl.style.context(["default", settings]):
        yield


def themes(file: Path) -> Iterator[tuple[Theme, Path]]:
    """Each theme with its file, `NAME.svg` and `NAME_dark.svg`, while Matplotlib draws in its style."""
    for theme, target in ((LIGHT, file), (DARK, file.with_stem(f"{file.stem}_dark"))):
        with _style(theme, file.stem):
            yield theme, target


def save(figure: Any, target: Path) -> None:
    """Write a figure without a background and without a date."""
    import matplotlib.pyplot as plt

    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None}, transparent=True)
    plt.close(figure)
