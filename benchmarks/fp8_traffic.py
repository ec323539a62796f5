"""Kernels of one compiled Llama block in bf16 and fp8, and the bytes that they read and write beside the products.

    python -m benchmarks.fp8_traffic

Counted, not timed: Inductor's own count for the code that it generates, so it needs a CUDA build of torch with Triton,
and a device that need not compute. One row is one form of the block, forward and backward.
"""

import argparse
import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import metrics
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

from benchmarks import machine
from benchmarks.stage_file import write
from lightning_tricks.models.attention import RMSNorm, rotate
from lightning_tricks.precision import Float8

D_MODEL, D_FF, N_HEADS, TOKENS, LENGTH = 4096, 11008, 32, 8192, 4096
STEPS_BEFORE_DELAYED = 16
OURS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "delayed": {"scaling": "delayed"},
    "delayed, kept": {"scaling": "delayed", "keep_fp8_weights": True},
}


class LlamaBlock(nn.Module):
    """Llama-2 7B's, in plain torch; `fused`: one product for queries, keys and values, and one for gate and up."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.attn_norm, self.mlp_norm = RMSNorm(D_MODEL, 1e-5), RMSNorm(D_MODEL, 1e-5)
        self.q, self.k, self.v, self.o = (nn.Linear(D_MODEL, D_MODEL, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(D_MODEL, D_FF, bias=False) for _ in range(2))
        self.down = nn.Linear(D_FF, D_MODEL, bias=False)

    def multiplied_together(self) -> Sequence[Sequence[nn.Module]]:
        """What is one product."""
        return ((self.q, self.k, self.v), (self.gate, self.up)) if self.fused else ()

    def project(self, x: Tensor, *layers: Any) -> Sequence[Tensor]:
        """The outputs of layers of one input."""
        if not self.fused:
            return [layer(x) for layer in layers]
        if hasattr(layers[0], "multiply_together"):
            return layers[0].multiply_together(x, layers)
        return F.linear(x, torch.cat([layer.weight for layer in layers])).split([len(y.weight) for y in layers], -1)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map the residual stream (batch, length, d_model) to the next one."""
        heads = [
            part.unflatten(-1, (N_HEADS, -1)).transpose(1, 2)
            for part in self.project(self.attn_norm(x), self.q, self.k, self.v)
        ]
        q, k = rotate(heads[0], cos, sin), rotate(heads[1], cos, sin)
        x = x + self.o(F.scaled_dot_product_attention(q, k, heads[2], is_causal=True).transpose(1, 2).flatten(2))
        gate, up = self.project(self.mlp_norm(x), self.gate, self.up)
        return x + self.down(F.silu(gate) * up)


def convert_by_torchao(block: nn.Module) -> None:
    """Convert by torchao, tensorwise."""
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(block)


def counted() -> dict[str, float]:
    """Of the graphs since the last call: kernels and their bytes, and products."""
    kernels = [(node, 4 * count) for node, count in metrics.nodes_num_elem]
    own = [
        count for node, count in kernels if not isinstance(node, (ExternKernelSchedulerNode, NopKernelSchedulerNode))
    ]
    products = sum(node.is_extern() and "mm" in str(cast(Any, node.node).get_origin_node()) for node, _ in kernels)
    metrics.reset()
    return {"kernels": len(own), "mib": round(sum(own) / 2**20, 1), "products": products}


def run(name: str, fused: bool) -> dict[str, Any]:
    """Compile one form of the block, forward and backward."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    block = LlamaBlock(fused)
    plugin = None
    if name == "torchao":
        convert_by_torchao(block)
    elif name != "bf16":
        plugin = Float8(base="bf16-true", convert_small=True, **OURS[name])
        holder = nn.ModuleDict({"block": block, "head": nn.Linear(16, 16)})
    block = block.to("cuda", torch.bfloat16)
    if plugin is not None:
        plugin.convert_module(holder)
        if plugin._kept is not None:
            plugin._kept.refresh()
        if plugin._history is not None:
            state = plugin._history.state_dict()
            plugin._history.load_state_dict({**state, "steps": STEPS_BEFORE_DELAYED})
    x = torch.randn(TOKENS // LENGTH, LENGTH, D_MODEL, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    cos, sin = (torch.randn(LENGTH, D_MODEL // N_HEADS, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    metrics.reset()
    block.compile(fullgraph=True)
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        before = torch.cuda.memory_allocated()
        out = block(x, cos, sin)
    kept = torch.cuda.memory_allocated() - before - out.nbytes
    forward = counted()
    out.backward(torch.randn_like(out))
    row = {"form": name, "fused": fused, "forward": forward, "backward": counted()}
    del block, x, out
    gc.collect()
    return {**row, "mib_for_backward": round(kept / 2**20, 1)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see --help."""
    default = Path(__file__).parent / "results" / f"fp8-traffic-{machine.today()}.json"
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fp8_traffic", description=__doc__)
    parser.add_argument("forms", nargs="*", help=f"of bf16, torchao, {', '.join(OURS)}; default: all")
    parser.add_argument("--out", type=Path, default=default, help="JSON file; rows that it holds already are kept")
    options = parser.parse_args(arguments)
    torch._logging.set_logs(inductor_metrics=True)  # has Inductor count
    torch._inductor.config.force_disable_caches = True
    shape = {"d_model": D_MODEL, "d_ff": D_FF, "n_heads": N_HEADS, "tokens": TOKENS, "length": LENGTH}
    result = {"versions": machine.describe()["versions"], "block": shape, "rows": []}
    if options.out.exists():
        result = json.loads(options.out.read_text(encoding="utf-8"))
    done = {(row["form"], row["fused"]) for row in result["rows"]}
    for name in options.forms or ["bf16", "torchao", *OURS]:
        for fused in (False,) if name == "torchao" else (False, True):
            if (name, fused) in done:
                continue
            result["rows"].append(run(name, fused))
            write(options.out, result)
            print(json.dumps(result["rows"][-1]))


if __name__ == "__main__":
    main()
