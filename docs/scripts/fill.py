"""Write the tables and the plots of the pages from the newest results in benchmarks/results.

    python docs/scripts/fill.py                      # every page
    python docs/scripts/fill.py optimizers mup       # these
    python docs/scripts/fill.py --check              # write nothing; a page that is not what its results give is named

A text stands in a page between `<!-- NAME -->` and the next `<!-- end -->`. What fills a page is in the `fill_*.py`
beside this one: each has `FILLERS`, a `Filler` by the name with which the files of its results begin.
"""

import argparse
import functools
import importlib
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent
DOCS, ROOT = SCRIPTS.parents[0], SCRIPTS.parents[1]
RESULTS = ROOT / "benchmarks/results"
sys.path[:0] = [str(SCRIPTS), str(ROOT)]  # scripts beside this one; the benchmarks and the package of this checkout

from filler import Filler  # noqa: E402


@functools.cache
def fillers() -> dict[str, Filler]:
    """What each `fill_*.py` beside this one fills.

    Raises:
        ValueError: two of them have one name.
    """
    found: dict[str, Filler] = {}
    for path in sorted(SCRIPTS.glob("fill_*.py")):
        for name, filler in importlib.import_module(path.stem).FILLERS.items():
            if name in found:
                raise ValueError(f"{path.name}: {name} stands in another fill_*.py already")
            found[name] = filler
    return dict(sorted(found.items()))


def newest(name: str) -> Path:
    """The file of the newest result of a benchmark on a CPU."""
    return max(RESULTS.glob(f"{name}-*-cpu.json"))


def result_of(name: str) -> Any:
    """The newest result of a filler, None for one that needs none."""
    return json.loads(newest(name).read_text(encoding="utf-8")) if fillers()[name].measured else None


def between_markers(page: str, texts: Mapping[str, str]) -> str:
    """`page` with each text in its place.

    Raises:
        ValueError: the page has no such place.
    """
    for name, text in texts.items():
        place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.S)
        page, found = place.subn(lambda match, text=text: f"{match[1]}{text}\n{match[2]}", page, count=1)
        if not found:
            raise ValueError(f"no place <!-- {name} -->")
    return page


def problems(name: str, page: str) -> list[str]:
    """What of a page is not as its results give it."""
    found = []
    for place, text in fillers()[name].texts(result_of(name)).items():
        try:
            same = between_markers(page, {place: text}) == page
        except ValueError as error:
            found.append(str(error))
            continue
        if not same:
            found.append(f"<!-- {place} --> is another text: run python docs/scripts/fill.py {name}")
    if fillers()[name].measured:
        named = set(re.findall(rf"{name}-[\d-]+-cpu\.json", page)) - {newest(name).name}
        found += [f"names {other}, and {newest(name).name} is newer" for other in sorted(named)]
    return found


def plot_problems(name: str) -> list[str]:
    """The plots of a page that its results draw otherwise.

    They are compared where Matplotlib is of the version that drew the committed ones, as others place text differently.
    """
    filler = fillers()[name]
    if filler.draw is None:
        return []
    found = []
    with tempfile.TemporaryDirectory() as folder:
        filler.draw(result_of(name), Path(folder) / f"{Path(filler.page).stem}.svg")
        for drawn in sorted(Path(folder).iterdir()):
            committed = DOCS / "images" / drawn.name
            if not committed.is_file():
                found.append(f"images/{drawn.name} is missing: run python docs/scripts/fill.py {name}")
            elif not same_plot(drawn.read_text(encoding="utf-8"), committed.read_text(encoding="utf-8")):
                found.append(f"images/{drawn.name} is another plot: run python docs/scripts/fill.py {name}")
    return found


def same_plot(one: str, other: str) -> bool:
    """Whether two SVGs show the same: all but hashes, and numbers to a hundredth of a point."""
    if _drawn_by(one) != _drawn_by(other):
        print(f"plots of {_drawn_by(other)} are not compared with those of {_drawn_by(one)}", file=sys.stderr)
        return True
    (ours, numbers), (theirs, others) = _parts(one), _parts(other)
    return ours == theirs and all(abs(a - b) <= 0.01 for a, b in zip(numbers, others, strict=True))


def _drawn_by(svg: str) -> str:
    return next(iter(re.findall(r"Matplotlib v[\d.]+", svg)), "a tool without a name")


def _parts(svg: str) -> tuple[str, list[float]]:
    """An SVG without hashes and numbers, and its numbers."""
    number = r"(?<![\w#.])-?\d+(?:\.\d+)?(?:e-?\d+)?"
    svg = re.sub(r"\b[mp][0-9a-f]{10}\b", "", svg)
    return re.sub(number, "0", svg), [float(found) for found in re.findall(number, svg)]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns 1 where a check finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(fillers())}")
    parser.add_argument("--check", action="store_true", help="write nothing, and name the pages that would change")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.names if name not in fillers()]:
        parser.error(f"unknown name {unknown[0]}: give some of {', '.join(fillers())}")
    found = []
    for name in options.names or fillers():
        filler = fillers()[name]
        path = DOCS / filler.page
        page = path.read_text(encoding="utf-8")
        if options.check:
            found += [f"docs/{filler.page}: {problem}" for problem in problems(name, page) + plot_problems(name)]
            continue
        result = result_of(name)
        path.write_text(between_markers(page, filler.texts(result)), encoding="utf-8")
        if filler.draw is not None:
            filler.draw(result, DOCS / f"images/{path.stem}.svg")
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
