"""What a step of Muon costs beside its matrix products, on a CPU.

    python -m benchmarks.muon_cost                  # 1 minute

A step of `Muon`, against the products of its Newton-Schulz iterations in the same type, batched
by shape as the step has them. One thread, CPU time, in turns; a ratio is taken within a round.
"""

import argparse
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import machine
from benchmarks.data_speed import in_turns, ratio
from lightning_tricks.optim import Muon

REPOSITORY = Path(__file__).resolve().parents[1]
ITERATIONS = 5
SHAPES = {  # how many of each
    "of `recipes/tiny.yaml`: 16 of 256 x 256, 4 of 1024 x 256 and 256 x 1024": (
        {(256, 256): 16, (1024, 256): 4, (256, 1024): 4}
    ),
    "24 of 256 x 256": {(256, 256): 24},
    "24 of 64 x 64": {(64, 64): 24},
    "16 of 64 x 64, 4 of 256 x 64 and 64 x 256": {(64, 64): 16, (256, 64): 4, (64, 256): 4},
}


class _Operators(TorchDispatchMode):
    """Counts operators."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def stepped(shapes: dict[tuple[int, int], int]) -> tuple[Muon, torch.dtype]:
    """An optimizer whose matrices have gradients and state, and the type in which it iterates."""
    matrices = [nn.Parameter(torch.randn(shape)) for shape, count in shapes.items() for _ in range(count)]
    for matrix in matrices:
        matrix.grad = torch.randn_like(matrix)
    optimizer = Muon(matrices, lr=1e-3, weight_decay=0.1)
    optimizer.step()
    return optimizer, getattr(torch, optimizer.param_groups[0]["ns_dtype"])


def products(shapes: dict[tuple[int, int], int], dtype: torch.dtype) -> Callable[[], None]:
    """A call that computes what the iterations of one step multiply; a tall matrix is one that lies on its side."""
    counts: Counter[tuple[int, int]] = Counter()
    for (rows, columns), count in shapes.items():
        counts[min(rows, columns), max(rows, columns)] += count
    batches: list[Tensor] = [torch.randn(count, *shape).to(dtype) for shape, count in counts.items()]

    def act() -> None:
        for x in batches:
            for _ in range(ITERATIONS):
                gram = x @ x.mT
                (gram @ gram) @ x

    return act


def measure(rounds: int) -> dict[str, Any]:
    """Milliseconds of a step, its ratio to the products, and its operators."""
    found = {}
    for name, shapes in SHAPES.items():
        optimizer, dtype = stepped(shapes)
        with _Operators() as operators:
            optimizer.step()
        times = in_turns({"products": products(shapes, dtype), "step": optimizer.step}, rounds)
        found[name] = {
            "type": str(dtype)[6:],
            "operators": operators.count,
            "step_ms": round(1000 * sorted(cpu for cpu, _ in times["step"])[rounds // 2], 2),
            "ratio": ratio(times, "step", "products"),
        }
        print(name, json.dumps(found[name]), flush=True)
    return found


def table(result: dict[str, Any]) -> str:
    """The rows as Markdown."""
    lines = ["| matrices | iterates in | operators | step | step / products |", "|---|---|--:|--:|--:|"]
    for name, row in result["rows"].items():
        over = "{median:.2f} ({min:.2f} to {max:.2f})".format(**row["ratio"])
        lines.append(f"| {name} | {row['type']} | {row['operators']} | {row['step_ms']:.0f} ms | {over} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25, help="default %(default)s")
    parser.add_argument("--out", type=Path, help="default benchmarks/results/muon-cost-DATE-cpu.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    result = {"benchmark": "muon_cost", "machine": machine.describe(), "threads": 1, "rounds": options.rounds,
              "load_average": os.getloadavg(), "rows": measure(options.rounds)}  # fmt: skip
    out = options.out or REPOSITORY / f"benchmarks/results/muon-cost-{machine.today()}-cpu.json"
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"\n{table(result)}\n\n{out}")


if __name__ == "__main__":
    main()
