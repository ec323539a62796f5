"""What attention within packed documents costs on a CPU: with a dense mask, and by a call for each document.

    python -m benchmarks.packed_documents             # 3 minutes on a quiet machine

Forward and backward pass in fp32 on one thread, CPU time, 4 heads and 2 of keys, 64 wide; documents of random lengths.
The ways take turns, and a ratio is taken within a round. `by documents` is what the decoder does where
`packed_documents` finds that it pays; `error` is the largest relative norm of a gradient's difference from the mask's.
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
from lightning_tricks.models.attention import Documents, causal_attention, document_mask, packed_documents

REPOSITORY = Path(__file__).resolve().parents[1]
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
CASES = ((2, 2048, 8), (2, 2048, 32), (2, 2048, 128), (1, 8192, 16))  # rows, tokens of a row, documents of a row


def documents(rows: int, length: int, number: int) -> Tensor:
    """Document ids (rows, length), the same on each call."""
    generator = torch.Generator().manual_seed(0)
    cuts = torch.stack([torch.randperm(length - 1, generator=generator)[: number - 1] + 1 for _ in range(rows)])
    return (torch.arange(length) >= cuts.unsqueeze(-1)).sum(1)


def measure(rows: int, length: int, number: int, rounds: int) -> dict[str, Any]:
    """Ratios to the dense mask, the error, and whether the decoder goes by documents."""
    torch.manual_seed(0)
    ids = documents(rows, length, number)
    lengths = [torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in ids]
    each = Documents(ids, torch.empty(0), tuple(n for row in lengths for n in row))
    q, k, v = (torch.randn(rows, n, length, HEAD_DIM, requires_grad=True) for n in (HEADS, KV_HEADS, KV_HEADS))
    upstream = torch.randn(q.shape)

    def way(mask: Tensor | Documents | None) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: torch.autograd.grad(causal_attention(q, k, v, mask), (q, k, v), upstream)

    ways = {"dense mask": way(document_mask(ids)), "by documents": way(each), "plain causal": way(None)}
    pairs = zip(ways["by documents"](), ways["dense mask"](), strict=True)
    error = max(((mine - exact).norm() / exact.norm()).item() for mine, exact in pairs)
    times = in_turns(ways, rounds)
    taken = packed_documents(ids, None, q.dtype, HEAD_DIM) is not None
    result = {name: ratio(times, name, "dense mask") for name in ("by documents", "plain causal")}
    return {"rows": rows, "length": length, "documents": number, **result, "error": error, "taken": taken}


def table(result: dict[str, Any]) -> str:
    """All cases as Markdown: the median of the ratios, and in brackets the extremes over the rounds."""
    lines = ["| rows x tokens | documents a row | by documents | without documents | error | taken |"]
    lines.append("|---|--:|--:|--:|--:|---|")
    for case in result["cases"]:
        both = case["by documents"], case["plain causal"]
        ratios = ["{median:.2f} ({min:.2f} to {max:.2f})".format(**each) for each in both]
        size, taken = f"{case['rows']} x {case['length']:,}", "by documents" if case["taken"] else "dense mask"
        lines.append(f"| {size} | {case['documents']} | {' | '.join(ratios)} | {case['error']:.0e} | {taken} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="default %(default)s")
    parser.add_argument("--out", type=Path, help="default benchmarks/results/packed-documents-DATE-cpu.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cases = [measure(*case, options.rounds) for case in CASES]
    result = {
        "benchmark": "packed_documents", "machine": machine.describe(), "threads": 1, "rounds": options.rounds,
        "load_average": os.getloadavg(), "cases": cases,
    }  # fmt: skip
    out = options.out or REPOSITORY / f"benchmarks/results/packed-documents-{machine.today()}-cpu.json"
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{table(result)}\n\n{out}")


if __name__ == "__main__":
    main()
