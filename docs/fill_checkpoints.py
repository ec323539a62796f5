"""Write the tables of docs/checkpoints.md from what `python -m benchmarks.checkpoints` measured.

python docs/fill_checkpoints.py benchmarks/results/checkpoints-DATE-cpu.json
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.checkpoints import table  # noqa: E402  the benchmark is found from the checkout's root

PAGE = ROOT / "docs/checkpoints.md"


def fill(page: str, result: dict[str, Any]) -> str:
    """The page with the tables of this result."""
    described = result["machine"]
    packages = ", ".join(f"{name} {described['versions'][name]}" for name in ("torch", "lightning"))
    text = (
        f"{table(result)}\n\nTimes are in those of `torch.save` with fsync, or of `torch.load`, in the same round, "
        f"memory in sizes of the checkpoint: {result['parameters'] / 1e6:.0f}M parameters with AdamW's state, "
        f"{result['gib']:.2f} GiB. One thread, measured {described['date'][:10]} on a CPU with {described['cores']} "
        f"cores, load average {result['load_average'][0]:.1f} at the start: {packages}."
    )
    pattern = r"(<!-- checkpoints -->\n).*?(<!-- /checkpoints -->)"
    return re.sub(pattern, lambda m: f"{m[1]}{text}\n{m[2]}", page, flags=re.S)


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
