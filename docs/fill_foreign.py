"""Write the table of docs/existing_projects.md from what `python -m benchmarks.foreign` measured.

python docs/fill_foreign.py benchmarks/results/foreign-DATE-cpu.json
"""

import sys
from typing import Any

from fill_page import DOCS, between_markers, rewrite

sys.path.insert(0, str(DOCS.parent))  # the benchmark is found from the root of the checkout

from benchmarks.foreign import table


def fill(page: str, result: dict[str, Any]) -> str:
    """The page with the table of this result."""
    versions = result["machine"]["versions"]
    packages = ", ".join(f"{name} {versions[name]}" for name in sorted(versions))
    text = f"{table(result['rows'])}\n\nMeasured {result['machine']['date'][:10]} on a CPU: {packages}."
    return between_markers(page, {"foreign": text})


if __name__ == "__main__":
    rewrite("existing_projects.md", fill)
