"""Write the tables of docs/checkpoints.md from what `python -m benchmarks.checkpoints` measured.

python docs/fill_checkpoints.py benchmarks/results/checkpoints-DATE-cpu.json
"""

import sys
from typing import Any

from fill_page import DOCS, between_markers, rewrite

sys.path.insert(0, str(DOCS.parent))  # the benchmark is found from the root of the checkout

from benchmarks.checkpoints import table


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
    return between_markers(page, {"checkpoints": text})


if __name__ == "__main__":
    rewrite("checkpoints.md", fill)
