"""Write the table of docs/existing_projects.md from what `python -m benchmarks.foreign` measured.

python docs/fill_foreign.py benchmarks/results/foreign-DATE-cpu.json
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.foreign import table  # noqa: E402  the benchmark is found from the checkout's root

PAGE = ROOT / "docs/existing_projects.md"


def fill(page: str, result: dict[str, Any]) -> str:
    """The page with the table of this result."""
    versions = result["machine"]["versions"]
    packages = ", ".join(f"{name} {versions[name]}" for name in sorted(versions))
    text = f"{table(result['rows'])}\n\nMeasured {result['machine']['date'][:10]} on a CPU: {packages}."
    return re.sub(r"(<!-- foreign -->\n).*?(\n<!-- /foreign -->)", lambda m: m[1] + text + m[2], page, flags=re.S)


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
