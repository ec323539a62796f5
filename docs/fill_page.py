"""What the scripts beside this one share: they write the tables of a page from a result of the benchmarks."""

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent


def between_markers(page: str, texts: Mapping[str, str]) -> str:
    """`page` with each text in the place of its name: between `<!-- NAME -->` and the next `<!-- end -->`."""
    for name, text in texts.items():
        place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.S)
        page = place.sub(lambda match, text=text: f"{match[1]}{text}\n{match[2]}", page, count=1)
    return page


def rewrite(name: str, fill: Callable[[str, Any], str]) -> Any:
    """Fill a page of docs/ from the result whose file is the script's only argument; returns the result.

    Args:
        name: of the page.
        fill: gives the new page from the old one and the result.
    """
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} RESULT.json")
    result = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    page = DOCS / name
    page.write_text(fill(page.read_text(encoding="utf-8"), result), encoding="utf-8")
    return result
