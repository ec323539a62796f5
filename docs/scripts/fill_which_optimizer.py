"""The table of docs/which_optimizer.md, for `fill.py`: a choice of the rows that docs/optimizers.md has."""

from typing import Any

from fill_optimizers import cell, shown, table
from filler import Filler

SHOWN = ("AdamW", "MuonAdamW", "AdamW8bit", "SGD", "Lion", "Adafactor", "SOAP", "Shampoo")
HEAD = "optimizer|bytes a parameter|step, times AdamW's|bits/byte after 200 steps|FSDP2"
WEIGHT_AND_GRADIENT = 8  # bytes of both in fp32


def texts(_: Any) -> dict[str, str]:
    """What each optimizer costs, the one with the fewest bits/byte first, and the file with the figures."""
    from fill import newest, result_of

    file, found = newest("optimizers").name, result_of("optimizers")["rows"]
    rows = []
    for name in sorted(SHOWN, key=lambda name: found[name]["learns"]["bits_per_byte"]):
        costs, learns = found[name]["costs"], found[name]["learns"]
        total = WEIGHT_AND_GRADIENT + costs["state_bytes_per_parameter"]
        figures = [shown(costs, "ratio", ".2g"), shown(learns, "bits_per_byte", ".3f")]
        rows.append([f"`{name}`", f"{total:.1f}", *figures, cell(found[name]["tried"], "fsdp2")])
    return {"choice": f"{table(HEAD.split('|'), rows)}\n\nThe file is [{file}](../benchmarks/results/{file})."}


FILLERS = {"which-optimizer": Filler("which_optimizer.md", texts, measured=False)}
