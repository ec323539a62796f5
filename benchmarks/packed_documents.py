"""What attention within packed documents costs on a CPU: with a dense mask, and by a call for each document.

    python -m benchmarks.packed_documents             # 5 minutes on a quiet machine

Forward and backward pass on one thread, CPU time; documents of random lengths. The ways take turns, and a ratio is
taken within a round. `by documents` is what the decoder does where `packed_documents` finds that it pays; `error` is
the largest relative norm of a gradient's difference from the mask's, in fp32. The cases of 2 heads lie at the bounds.
"""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks

import torch
from torch import Tensor

from benchmarks import machine
from benchmarks.data_speed import in_turns, ratio
from lightning_tricks.models.attention import causal_attention, document_mask
from lightning_tricks.models.documents import Documents, packed_documents

REPOSITORY = Path(__file__).resolve().parents[1]
CASES = (  # rows, tokens of a row, documents of a row, heads, heads of keys, their width
    (2, 2048, 1, 4, 2, 64), (2, 2048, 8, 4, 2, 64), (2, 2048, 32, 4, 2, 64), (1, 8192, 16, 4, 2, 64),
    (2, 1024, 16, 2, 1, 32), (2, 1024, 32, 2, 1, 32), (4, 512, 8, 2, 1, 32),
)  # fmt: skip


def documents(rows: int, length: int, number: int) -> Tensor:
    """Document ids (rows, length), the same on each call."""
    generator = torch.Generator().manual_seed(0)
    cuts = torch.stack([torch.randperm(length - 1, generator=generator)[: number - 1] + 1 for _ in range(rows)])
    return (torch.arange(length) >= cuts.unsqueeze(-1)).sum(1)


def measure(case: Sequence[int], dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Ratios to the dense mask, the error, and whether the decoder goes by documents."""
    rows, length, number, heads, kv_heads, head_dim = case
    torch.manual_seed(0)
    ids = documents(rows, length, number)
    lengths = [torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in ids]
    each = Documents(ids, torch.empty(0), tuple(n for row in lengths for n in row))
    shapes = [(rows, n, length, head_dim) for n in (heads, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    upstream = torch.randn(q.shape, dtype=dtype)

    def way(mask: Tensor | Documents | None) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: torch.autograd.grad(causal_attention(q, k, v, mask), (q, k, v), upstream)

    ways = {"dense mask": way(document_mask(ids)), "by documents": way(each), "plain causal": way(None)}
    pairs = zip(ways["by documents"](), ways["dense mask"](), strict=True)
    error = max(((mine - exact).norm() / exact.norm()).item() for mine, exact in pairs)
    times = in_turns(ways, rounds)
    taken = packed_documents(ids, None, dtype, head_dim) is not None
    ratios = {name: ratio(times, name, "dense mask") for name in ("by documents", "plain causal")}
    return {**ratios, "error": error, "taken": taken}


def table(result: dict[str, Any]) -> str:
    """All cases as Markdown: the median of the ratios, and in brackets the extremes over the rounds."""
    lines = [
        "| rows x tokens | documents a row | heads | by documents, fp32 | bf16 | no documents, fp32 | error | taken |"
    ]
    lines.append("|---|--:|--:|--:|--:|--:|--:|---|")
    for each in result["cases"]:
        rows, length, number, heads, _, head_dim = each["case"]
        fp32, bf16 = each["fp32"], each["bf16"]
        ratios = fp32["by documents"], bf16["by documents"], fp32["plain causal"]
        said = " | ".join("{median:.2f} ({min:.2f} to {max:.2f})".format(**one) for one in ratios)
        taken = "by documents" if fp32["taken"] else "dense mask"
        shape = f"{rows} x {length:,} | {number} | {heads} of {head_dim}"
        lines.append(f"| {shape} | {said} | {fp32['error']:.0e} | {taken} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="default %(default)s")
    parser.add_argument("--out", type=Path, help="default benchmarks/results/packed-documents-DATE-cpu.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    cases = [
        {"case": case, **{name: measure(case, dtype, options.rounds) for name, dtype in dtypes.items()}}
        for case in CASES
    ]
    result = {
        "benchmark": "packed_documents", "machine": machine.describe(), "threads": 1, "rounds": options.rounds,
        "load_average": os.getloadavg(), "cases": cases,
    }  # fmt: skip
    out = options.out or REPOSITORY / f"benchmarks/results/packed-documents-{machine.today()}-cpu.json"
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{table(result)}\n\n{out}")


if __name__ == "__main__":
    main()
