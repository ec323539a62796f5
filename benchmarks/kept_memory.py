"""What a block keeps for its backward pass in each checkpointing mode and budget, and what the loss takes.

    python -m benchmarks.kept_memory                # 2 minutes

Blocks are counted in units of one row of d_model numbers in 16 bits, a token: eager by the storages that are alive
after the forward pass, compiled by the tensors that autograd saves. Weights are in bf16, or in fp32 under autocast.
Budgets are those of 16 compiled blocks in bf16: the mean of the modes that ours gives them, and torch's own option
`activation_memory_budget` for each block. FLOPs are counted in the graphs, attention as causal.
The loss at a large vocabulary is head and cross-entropy of fp32 features, forward and backward pass: by how much the
process grows beyond features, weight and their gradients.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks

import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import machine
from lightning_tricks.accounting.recompute import Mode, modes_of_blocks
from lightning_tricks.models import Llama
from lightning_tricks.models.attention import RotaryPositions
from lightning_tricks.models.decoder import Block
from lightning_tricks.models.linear_cross_entropy import linear_cross_entropy

REPOSITORY = Path(__file__).resolve().parents[1]
LENGTH = 1024
SHAPES = {"d_ff 3 d_model": (512, 1536), "d_ff 2.69 d_model, as Llama-2-7B": (512, 1376)}
BLOCKS, BUDGETS = 16, (0.0, 0.25, 0.5, 0.75, 1.0)
TOKENS, VOCABULARY, WIDTH = 4096, 131_072, 64


class _Made(TorchDispatchMode):
    """Every storage that an operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def alive(self) -> dict[int, int]:
        """Bytes of those that still exist, by their address."""
        return {key: size for key, (weak, size) in self.storages.items() if not weak.expired()}


class _Graphs:
    """A backend that runs graphs as they are, divided as torch's default backend does, and counts their products.

    Attributes:
        flops: of linear layers and of attention's forward pass, for each graph.
    """

    def __init__(self) -> None:
        self.flops: list[tuple[int, int]] = []
        self.compile = aot_autograd(
            fw_compiler=self._count, bw_compiler=self._count, partition_fn=min_cut_rematerialization_partition
        )

    def _count(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        linear = attention = 0
        for node in graph.graph.nodes:
            values = [one.meta.get("val") for one in node.args if isinstance(one, torch.fx.Node)]
            shapes = [value.shape for value in values if isinstance(value, Tensor)]
            # an operator that draws random numbers stands among the arguments of one that keeps their state
            names = " ".join(str(one) for one in (node.target, *node.args) if not isinstance(one, torch.fx.Node))
            if node.target is torch.ops.aten.mm.default:
                linear += 2 * shapes[0].numel() * shapes[1][1]
            elif "scaled_dot_product" in names and "backward" not in names and len(shapes) > 2:
                batch, heads, length, wide = next(shape for shape in shapes if len(shape) == 4)
                attention += 2 * batch * heads * length * length * wide  # two products, with half of the keys
        self.flops.append((linear, attention))
        return make_boxed_func(graph.forward)

    @property
    def again(self) -> float:
        """FLOPs that the backward pass repeats, as a share of those of both passes without them."""
        (linear, attention), (backward, repeated) = self.flops
        return round((backward - 2 * linear + repeated) / (3 * (linear + attention)), 3)


def config_of(shape: tuple[int, int], blocks: int = 1) -> Llama:
    """The decoder of a shape."""
    width, hidden = shape
    return Llama(vocab_size=64, d_model=width, n_layers=blocks, n_heads=width // 64, d_ff=hidden, max_seq_len=LENGTH)


def budgets() -> list[dict[str, Any]]:
    """What ours and torch's budgets keep, in units of a block, and what they compute again, as a share of a step."""
    shape, found = next(iter(SHAPES.values())), []

    def measured(mode: Mode, budget: float) -> tuple[float, float]:
        torch._dynamo.reset()
        graphs = _Graphs()
        with functorch_config.patch(activation_memory_budget=budget):
            kept = units(shape, mode, True, torch.bfloat16, graphs)
        return kept, graphs.again

    by_mode = {mode: measured(mode, 1.0) for mode in get_args(Mode)}
    for budget in BUDGETS:
        counts = Counter(modes_of_blocks(config_of(shape, BLOCKS), {"budget": budget}, LENGTH))
        kept, again = (sum(by_mode[mode][i] * n for mode, n in counts.items()) / BLOCKS for i in range(2))
        theirs = by_mode["none"] if budget == 1 else measured("none", budget)
        found.append({
            "budget": budget, "modes": dict(counts), "units": round(kept, 2), "again": round(again, 3),
            "torch": {"units": theirs[0], "again": theirs[1]},
        })  # fmt: skip
        print(json.dumps(found[-1]), flush=True)
    return found


def units(
    shape: tuple[int, int], mode: Mode, compiled: bool, dtype: torch.dtype, graphs: _Graphs | None = None
) -> float:
    """What one block keeps, its input among it and its output not; with `graphs`, which compile it, it runs back."""
    width, _ = shape
    block = Block(config_of(shape)).to(dtype)
    block.checkpointing = mode
    rope = RotaryPositions(64, LENGTH, 1e4)(LENGTH, torch.bfloat16)
    x = torch.randn(1, LENGTH, width, dtype=dtype, requires_grad=True)
    own = {tensor.untyped_storage()._cdata for tensor in (*block.parameters(), *rope)}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            found[storage._cdata] = storage.nbytes()
            kept.append(storage)  # so that no other one gets its address
        return tensor

    kept: list[Any] = []
    made = _Made()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        if compiled:
            block.compile(backend="inductor" if graphs is None else graphs.compile)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                out = block(x, rope, None)
        else:
            with made:
                out = block(x, rope, None)
    if graphs is not None:
        out.float().sum().backward()
    if not compiled:
        found = {key: size for key, size in made.alive().items() if key not in own}
        found[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
    found.pop(out.untyped_storage()._cdata, None)
    return round(sum(found.values()) / (2 * width * LENGTH), 2)


def _grown() -> int:
    """The most bytes that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def loss_bytes(plain: bool) -> int:
    """How much the process grows, beyond what it returns; in a process of its own."""
    torch.manual_seed(0)
    features, weight = (torch.randn(n, WIDTH, requires_grad=True) for n in (TOKENS, VOCABULARY))
    labels = torch.randint(VOCABULARY, (TOKENS,))
    few = linear_cross_entropy(features[:8], weight[:8], labels[:8] % 8)  # what a first call loads
    few.backward()
    grads = [tensor.grad.fill_(1.0) for tensor in (features, weight) if tensor.grad is not None]
    before = _grown()
    if plain:
        F.cross_entropy(F.linear(features, weight), labels, reduction="sum").backward()
    else:
        linear_cross_entropy(features, weight, labels).backward()
    return _grown() - before if grads else 0


_MODES = {
    "none": ("everything", "nothing"),
    "cheap": (
        "the block's input, the results of attention and of all linear layers but the last",
        "norms, rotations, activations",
    ),
    "selective": (
        "the same without every second linear layer (k, o, and up of a gated MLP)",
        "about half of the products too",
    ),
    "full": ("the block's input", "the whole block, a third more compute"),
}


def table(result: dict[str, Any]) -> str:
    """The modes at the first shape, as Markdown."""
    first = result["blocks"][0]["shape"]
    lines = ["| mode | kept | runs again | units eager | units compiled |", "|---|---|---|--:|--:|"]
    for mode, (kept, again) in _MODES.items():
        eager, compiled = (
            next(
                row["bfloat16"]
                for row in result["blocks"]
                if (row["shape"], row["mode"], row["compiled"]) == (first, mode, how)
            )
            for how in (False, True)
        )
        lines.append(f"| `{mode}` | {kept} | {again} | {eager:.1f} | {compiled:.1f} |")
    return "\n".join(lines)


def budget_table(result: dict[str, Any]) -> str:
    """The budgets of both, as Markdown."""
    lines = [
        "| budget | modes of 16 blocks | units | computed again | units, torch's budget | computed again |",
        "|--:|---|--:|--:|--:|--:|",
    ]
    for row in result["budgets"]:
        modes = ", ".join(f"{count} {mode}" for mode, count in sorted(row["modes"].items(), key=lambda one: -one[1]))
        theirs = row["torch"]
        lines.append(
            f"| {row['budget']:g} | {modes} | {row['units']:.1f} | {row['again']:.1%} | {theirs['units']:.1f} | "
            f"{theirs['again']:.1%} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="default benchmarks/results/kept-memory-DATE-cpu.json")
    parser.add_argument("--loss", choices=("plain", "slices"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.loss:
        print(loss_bytes(options.loss == "plain"))
        return
    blocks = []
    for name, shape in SHAPES.items():
        for mode in get_args(Mode):
            for compiled in (False, True):
                torch._dynamo.reset()
                row = {
                    "shape": name,
                    "mode": mode,
                    "compiled": compiled,
                    **{
                        str(dtype)[6:]: units(shape, mode, compiled, dtype) for dtype in (torch.bfloat16, torch.float32)
                    },
                }
                blocks.append(row)
                print(json.dumps(row), flush=True)
    loss = {
        form: int(
            subprocess.check_output([sys.executable, "-m", "benchmarks.kept_memory", "--loss", form], cwd=REPOSITORY)
        )
        for form in ("plain", "slices")
    }
    print(json.dumps(loss), f"ratio {loss['slices'] / loss['plain']:.3f}")
    result = {
        "benchmark": "kept_memory", "machine": machine.describe(), "length": LENGTH, "blocks": blocks,
        "budgets": budgets(),
        "loss": {"tokens": TOKENS, "vocabulary": VOCABULARY, "width": WIDTH, "bytes": loss},
    }  # fmt: skip
    out = options.out or REPOSITORY / f"benchmarks/results/kept-memory-{machine.today()}-cpu.json"
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(out)


if __name__ == "__main__":
    main()
