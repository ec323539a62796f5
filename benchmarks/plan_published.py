"""Compare plans and their model on paper with published runs of Llama 3 and MPT on H100 and H200, by their sizes.

Nothing is tuned to these rows: the errors are what they are. `python -m benchmarks.plan_published` traces on this CPU,
takes a minute or two, and needs no GPU.

Sources, all read: https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md (H100 of
96 GB, 400 Gb/s a GPU) and https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_8b_h200_2025-06_torchtitan.md
and https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md (H100 of 80 GB, BF16, rows of
2048 tokens; its network is not stated: 400 Gb/s a GPU are assumed; memory is not published)
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks import machine
from benchmarks.stage_file import write
from lightning_tricks import GPT2, BF16Mixed, FSDP2Strategy, LanguageModel, Llama, ParallelDims
from lightning_tricks.accounting.flops import training_flops_per_token
from lightning_tricks.accounting.gpus import GPUS, NETWORK_GBITS
from lightning_tricks.commands.plan import PlanOptions
from lightning_tricks.commands.plan.fake_cluster import at_once
from lightning_tricks.commands.plan.memory import whole_model
from lightning_tricks.commands.plan.plan import Links, MemoryPlan, plan_recipe, step_time
from lightning_tricks.commands.plan.setup import read_setup

LENGTH, VOCABULARY = 8192, 128256
SHAPES: dict[str, dict[str, Any]] = {
    "8B": {"d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "d_ff": 14336},
    "70B": {"d_model": 8192, "n_layers": 80, "n_heads": 64, "n_kv_heads": 8, "d_ff": 28672},
}


@dataclass(frozen=True)
class Published:
    """A row of the sources.

    Attributes:
        gpus: of all hosts, eight in each.
        compiled: whether blocks are compiled.
        rate: tokens/s of a GPU.
        gib: largest memory; None where none is given.
        model: of `SHAPES`.
        rows: of 8192 tokens, a micro-batch.
        tensor: ranks that share a matrix.
        gpu: a word of the table of GPUs.
        fp8: whether products are in fp8.
    """

    gpus: int
    compiled: bool
    rate: float
    gib: float | None
    model: str = "8B"
    rows: int = 2
    tensor: int = 1
    gpu: str = "h100-96gb"
    fp8: bool = False

    @property
    def name(self) -> str:
        """For the table."""
        how = "eager" if not self.compiled else "compiled, fp8" if self.fp8 else "compiled"
        mesh = f", tensor {self.tensor}" if self.tensor > 1 else ""
        return f"{self.model}, {self.gpus} {self.gpu.partition('-')[0].upper()}{mesh}, {how}"


ROWS = (
    Published(8, False, 5762, 82.4),
    Published(8, True, 6667, 77.0),
    Published(128, False, 5605, 67.0),
    Published(128, True, 6514, 62.0),
    Published(8, True, 8532, None, fp8=True),
    Published(128, True, 8380, None, fp8=True),
    Published(256, True, 829, 71.9, "70B", 16, 8, fp8=True),
    Published(32, True, 10938, 47.96, gpu="h200", fp8=True),
    Published(64, True, 10753, 46.97, gpu="h200", fp8=True),
)
PAIRS = ((0, 2), (1, 3), (4, 5), (7, 8), (4, 6))  # what is known, and what is foretold from it


MPT_LENGTH, MPT_VOCABULARY = 2048, 50368
MPT_SHAPES: dict[str, dict[str, Any]] = {
    "1B": {"d_model": 2048, "n_layers": 24, "n_heads": 16},
    "3B": {"d_model": 2560, "n_layers": 32, "n_heads": 20},
    "13B": {"d_model": 5120, "n_layers": 40, "n_heads": 40},
    "30B": {"d_model": 7168, "n_layers": 48, "n_heads": 56},
    "70B": {"d_model": 8192, "n_layers": 80, "n_heads": 64},
}
# model, GPUs of several hosts, rows of a micro-batch, published tokens/s of a GPU and MFU in percent of 8 GPUs from
# which it is foretold (3B: of rows of 4096 tokens; 70B: of 30B, both with full checkpointing, which MFU leaves out)
MPT_ROWS = (
    ("1B", 16, 20, 46037, 41.82), ("1B", 32, 20, 45130, 41.82), ("1B", 64, 20, 44402, 41.82),
    ("3B", 16, 10, 24142, 42.31), ("3B", 32, 6, 23021, 42.31), ("3B", 64, 6, 22525, 42.31),
    ("13B", 16, 2, 4767, 39.79), ("13B", 32, 2, 4811, 39.79), ("13B", 64, 2, 4800, 39.79),
    ("30B", 16, 10, 2263, 38.11), ("30B", 32, 14, 2308, 38.11),
    ("70B", 32, 2, 882, 38.11), ("70B", 64, 8, 1039, 38.11),
)  # fmt: skip


def mpt_rate(model: str, gpus: int, rows: int, mfu: float) -> float:
    """Tokens/s of a GPU by the model on paper, whose computation runs at a given MFU."""
    config = GPT2(**MPT_SHAPES[model], vocab_size=MPT_VOCABULARY, max_seq_len=MPT_LENGTH)
    data = SimpleNamespace(micro_batch_size=rows, seq_len=MPT_LENGTH)
    trainer = {"strategy": FSDP2Strategy(), "plugins": [BF16Mixed()]}
    setup = read_setup(LanguageModel(config), data, trainer, gpus // 8, 8, on_gpu=True)
    (whole,) = at_once([partial(whole_model, setup)])
    card = GPUS["h100"]
    peak, tokens = card.peak("bf16"), rows * MPT_LENGTH
    assert peak is not None
    compute = tokens * training_flops_per_token(config, MPT_LENGTH, "full") / (mfu * peak)
    links = Links(card.link_gb, NETWORK_GBITS / 8, 8)
    return tokens / step_time(compute, 1, tokens, setup.dims, whole.traffic, links).total


def plan_of(row: Published, mfu: float = 0.4, memory: bool = True) -> MemoryPlan:
    """Our plan of the same sizes, in bf16: fp8 needs a GPU to be converted for."""
    config = Llama(**SHAPES[row.model], vocab_size=VOCABULARY, max_seq_len=LENGTH)
    checkpointing: Any = "full" if row.model == "70B" else "selective"
    adamw: Any = partial(torch.optim.AdamW, lr=3e-4, fused=True)
    module = LanguageModel(
        config, optimizer=adamw, activation_checkpointing=checkpointing, compile_blocks=row.compiled and memory
    )
    settings = {
        "max_steps": 10, "plugins": [BF16Mixed()], "strategy": FSDP2Strategy(mesh=ParallelDims(tensor=row.tensor)),
    }  # fmt: skip
    data = SimpleNamespace(micro_batch_size=row.rows, seq_len=LENGTH)
    where: dict[str, Any] = {"gpu": row.gpu, "nodes": row.gpus // 8, "devices": 8, "network_gbits": 400.0}
    return plan_recipe(module, data, settings, PlanOptions(mfu=mfu, **where), suggest=False)


def logits_gib(row: Published) -> float:
    """Whole logits in bf16 and fp32, and a gradient of each, on one tensor rank."""
    return row.rows * LENGTH * VOCABULARY / row.tensor * (2 + 4 + 4 + 2) / 2**30


def rate_from(known: Published, wanted: Published, plan: MemoryPlan, planned: MemoryPlan) -> float:
    """Tokens/s of a GPU by the model on paper, whose computation is that of another row."""
    flops = [training_flops_per_token(one.setup.module.config, LENGTH, "full") for one in (plan, planned)]
    tokens = wanted.rows * LENGTH
    times = planned.step_time()
    assert times is not None
    compute = tokens / known.rate * flops[1] / flops[0] / wanted.tensor
    waits = times.sends.get("tensor", 0.0)
    return tokens / (waits + max(compute, times.sends.get("shard", 0.0))) / wanted.tensor


def measure() -> dict[str, Any]:
    """All rows and pairs."""
    plans = [plan_of(row) for row in ROWS]
    memory, scaling = [], []
    for row, plan in zip(ROWS, plans, strict=True):
        if row.gib is None or plan.memory is None:
            continue
        ours, more = plan.memory.peak / 2**30, logits_gib(row)
        head = sum(of.get("head and loss", 0) for of in [plan.memory.instants["head and loss"]]) / 2**30
        memory.append({
            "row": row.name, "published_gib": row.gib, "plan_gib": ours, "logits_gib": more, "our_head_gib": head,
            "error": ours / row.gib - 1, "error_with_logits": (ours + more) / row.gib - 1,
            "instant": plan.memory.largest,
        })  # fmt: skip
        print(memory[-1], flush=True)
    for a, b in PAIRS:
        rate = rate_from(ROWS[a], ROWS[b], plans[a], plans[b])
        names = {"from": ROWS[a].name, "row": ROWS[b].name}
        scaling.append({**names, "published": ROWS[b].rate, "foretold": rate, "error": rate / ROWS[b].rate - 1})
        print(scaling[-1], flush=True)
    for model, gpus, rows, published, percent in MPT_ROWS:
        rate = mpt_rate(model, gpus, rows, percent / 100)
        names = {
            "from": "MPT 30B, 8 H100" if model == "70B" else f"MPT {model}, 8 H100",
            "row": f"MPT {model}, {gpus} H100",
        }
        scaling.append({**names, "published": published, "foretold": rate, "error": rate / published - 1})
        print(scaling[-1], flush=True)
    return {"memory": memory, "scaling": scaling}


def table(result: dict[str, Any]) -> str:
    """Memory, then time, in Markdown."""
    lines = ["| run | published | plan | error | all logits, as in torchtitan | error with them |"]
    lines.append("|---|---|---|---|---|---|")
    for one in result["memory"]:
        sizes = (f"{one[key]:.1f} GiB" for key in ("published_gib", "plan_gib"))
        errors = [f"{one['error']:+.0%}", f"+ {one['logits_gib']:.1f} GiB", f"{one['error_with_logits']:+.0%}"]
        lines.append(f"| {' | '.join([one['row'], *sizes, *errors])} |")
    lines += ["", "| run | from | published tokens/s a GPU | estimated | error |", "|---|---|---|---|---|"]
    for one in result["scaling"]:
        cells = [one["row"], one["from"], f"{one['published']:,.0f}", f"{one['foretold']:,.0f}", f"{one['error']:+.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(given: Sequence[str] | None = None) -> int:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_published", description=__doc__)
    default = Path(__file__).parent / "results" / f"plan-published-{machine.today()}-cpu.json"
    parser.add_argument("--out", type=Path, default=default, help="JSON file; default: in benchmarks/results")
    options = parser.parse_args(given)
    with machine.quiet():
        result = {"machine": machine.describe(), **measure()}
    write(options.out, result)
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
