"""Write the tables of docs/existing_projects.md from what `python -m benchmarks.lightning_suite` measured.

python docs/fill_lightning.py benchmarks/results/lightning-suite-DATE-cpu.json
"""

import sys
from typing import Any

from fill_page import DOCS, between_markers, rewrite

sys.path.insert(0, str(DOCS.parent))  # the benchmark is found from the root of the checkout

from benchmarks.lightning_suite import page_text


def fill(page: str, result: dict[str, Any]) -> str:
    """The page with the tables of this result."""
    return between_markers(page, {"lightning": page_text(result)})


if __name__ == "__main__":
    rewrite("existing_projects.md", fill)
