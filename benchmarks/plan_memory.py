"""Compare the memory that `plan` foretells with that of real steps on this CPU: recipes, layouts, optimizers.

Each recipe is trained at small widths with its own architecture, precision, checkpointing and compilation, in one
process, in two shards and on two tensor ranks. What is kept for the backward pass is counted by saved-tensor hooks,
gradients and optimizer state by their tensors, the largest instant by torch's profiler; the median of three steps, as
ranks that send in the background drop what they have gathered a little earlier or later.
`python -m benchmarks.plan_memory` takes about 20 minutes on two cores.
"""

import argparse
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from benchmarks import machine
from benchmarks.stage_file import write
from lightning_tricks._trainer.lightning import pl
from lightning_tricks.cli import load_recipe
from lightning_tricks.commands import recipes_folder
from lightning_tricks.commands.plan.plan import plan_recipe

ROWS, LENGTH, VOCABULARY = 4, 128, 512
SIZES = {"vocab_size": VOCABULARY, "d_model": 128, "n_layers": 4, "n_heads": 4, "max_seq_len": LENGTH}
GROUPED = {"n_kv_heads": 2}
RECIPES: dict[str, dict[str, int]] = {
    "tiny": {}, "gpt2_124m": {}, "llama1b": {**GROUPED, "d_ff": 384}, "llama7b": {"d_ff": 384},
    "llama7b_1gpu": {"d_ff": 384}, "llama70b": {**GROUPED, "d_ff": 384},
}  # fmt: skip
LAYOUTS = {
    "one": ("--trainer.devices=1", "--trainer.strategy=auto"),
    "fsdp2": ("--trainer.devices=2", '--trainer.strategy={"class_path": "FSDP2Strategy", "init_args": {"mesh": null}}'),
    "tensor": (
        "--trainer.devices=2",
        "--model.compile_blocks=false",  # torch 2.13 mixes up what full checkpointing of such blocks keeps on a CPU
        '--trainer.strategy={"class_path": "FSDP2Strategy", "init_args": {"mesh": {"tensor": 2}}}',
    ),
}
OPTIMIZERS = {
    "AdamW": '{"class_path": "AdamW", "init_args": {"lr": 1e-3}}',
    "MuonAdamW": '{"class_path": "MuonAdamW", "init_args": {"lr": 1e-3}}',
    "AdamW8bit": '{"class_path": "torchao.optim.AdamW8bit", "init_args": {"lr": 1e-3}}',
}
KINDS = ("weights", "gradients", "optimizer state", "activations", "largest instant")
BOUND = 0.05


def arguments(recipe: str, layout: str, optimizer: str) -> list[str]:
    """The command line of a case."""
    sizes = [f"--model.decoder.{name}={value}" for name, value in {**SIZES, **RECIPES[recipe]}.items()]
    return [
        "--config", str(recipes_folder() / f"{recipe}.yaml"), *sizes, *LAYOUTS[layout],
        f"--model.optimizer={OPTIMIZERS[optimizer]}", f"--data.seq_len={LENGTH}", f"--data.micro_batch_size={ROWS}",
        "--trainer.accumulate_grad_batches=2", "--trainer.accelerator=cpu", "--trainer.num_nodes=1",
        "--trainer.callbacks=null", "--trainer.logger=false", "--trainer.max_steps=4",
        "--model.schedule=null",
    ]  # fmt: skip


def planned(recipe: str, layout: str, optimizer: str) -> dict[str, int]:
    """Bytes by kind, as the plan says."""
    plan = plan_recipe(*load_recipe(*arguments(recipe, layout, optimizer)), suggest=False)
    if plan.memory is None:
        raise RuntimeError(plan.why_no_memory)
    instants = plan.memory.instants
    kept = max(lines.get("activations", 0) + lines.get("head and loss", 0) for lines in instants.values())
    step = instants["optimizer step"]
    return {
        "weights": step["weights"], "gradients": step["gradients"], "optimizer state": step["optimizer state"],
        "activations": kept, "largest instant": plan.memory.peak,
    }  # fmt: skip


class Watch(pl.Callback):
    """Measures three optimizer steps after the first: the last micro-batch of each and the step itself."""

    def __init__(self) -> None:
        self.steps: list[dict[str, int]] = []
        self._profiler: Any = None
        self._hooks: Any = None
        self._kept: dict[int, tuple[Any, int]] = {}
        self._base = 0
        self._own: set[int] = set()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx < 3 or batch_idx % 2 == 0:  # two micro-batches a step
            return
        weights = [local(p) for p in [*pl_module.parameters(), *pl_module.buffers()]]
        grads = [local(p.grad) for p in pl_module.parameters() if p.grad is not None]
        state = tensors_of(trainer.optimizers[0].state)
        self.steps.append({"weights": size_of(weights), "optimizer state": size_of(state)})
        self._base = size_of([*weights, *state, *grads])
        self._own = {id_of(tensor) for tensor in [*weights, *grads]}
        self._kept = {}

        def pack(tensor: Tensor) -> Tensor:
            part = local(tensor)
            if id_of(part) not in self._own:
                memory = part.untyped_storage()
                self._kept.setdefault(memory.data_ptr(), (memory, memory.nbytes()))
            return tensor

        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profiler.__enter__()
        self._hooks.__enter__()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None
            self.steps[-1]["activations"] = sum(size for memory, size in self._kept.values() if memory.nbytes() == size)
            self._kept = {}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._profiler is not None:
            self.steps[-1]["gradients"] = size_of([local(p.grad) for p in pl_module.parameters() if p.grad is not None])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._profiler is not None:
            self._profiler.__exit__(None, None, None)
            now = most = 0
            for event in self._profiler.profiler.kineto_results.events():
                if event.name() == "[memory]":
                    now += event.nbytes()
                    most = max(most, now)
            self.steps[-1]["largest instant"] = self._base + most
            self._profiler = None


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def id_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def inner(tensor: Tensor) -> list[Tensor]:
    """The plain tensors of which one of another class is made, such as an 8-bit state."""
    tensor = local(tensor)
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in inner(getattr(tensor, name))]
    return [tensor]


def size_of(tensors: Sequence[Tensor]) -> int:
    parts = [part for tensor in tensors for part in inner(tensor)]
    return sum({id_of(part): part.untyped_storage().nbytes() for part in parts}.values())


def tensors_of(state: Any) -> list[Tensor]:
    """All tensors in a nest of dictionaries and lists."""
    if isinstance(state, Tensor):
        return [state]
    values = state.values() if hasattr(state, "values") else state if isinstance(state, list | tuple) else ()
    return [tensor for value in values for tensor in tensors_of(value)]


def train(recipe: str, layout: str, optimizer: str) -> dict[str, int]:
    """Measure a case on this rank."""
    module, _, settings = load_recipe(*arguments(recipe, layout, optimizer))
    watch = Watch()
    rows = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    several: Any = [{"input_ids": rows, "labels": rows} for _ in range(8)]
    data: Any = DataLoader(several, batch_size=None)
    kept = ("strategy", "plugins", "precision", "accumulate_grad_batches", "gradient_clip_val", "devices")
    trainer = pl.Trainer(
        **{name: settings[name] for name in kept if settings.get(name) is not None}, max_steps=4, accelerator="cpu",
        callbacks=[watch], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, data)
    return {kind: int(median(step[kind] for step in watch.steps)) for kind in KINDS}


def work(rank: int, world: int, port: int, cases: list[tuple[str, str, str]], folder: str) -> None:
    """One process: all cases of as many processes; rank 0 writes what it found."""
    if world > 1:
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "RANK": str(rank),
            "LOCAL_RANK": str(rank), "NODE_RANK": "0",
        }  # fmt: skip
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for case in cases:
        try:
            with machine.quiet():
                found["/".join(case)] = train(*case)
        except Exception:
            found["/".join(case)] = {"error": traceback.format_exc().splitlines()[-1]}
    if rank == 0:
        Path(folder, f"{world}.json").write_text(json.dumps(found), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)


def measured(cases: list[tuple[str, str, str]]) -> dict[str, dict[str, Any]]:
    """What real steps take, by case."""
    found: dict[str, dict[str, Any]] = {}
    context = multiprocessing.get_context("spawn")
    for world in (1, 2):
        those = [case for case in cases if (case[1] == "one") == (world == 1)]
        if not those:
            continue
        with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
            free.close()
            processes = [context.Process(target=work, args=(rank, world, port, those, folder)) for rank in range(world)]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            found |= json.loads(Path(folder, f"{world}.json").read_text(encoding="utf-8"))
    return found


def table(result: dict[str, Any]) -> str:
    """Largest and median relative error of each line over all cases, in Markdown."""
    rows = ["| | cases | median | largest | within 5 % |", "|---|---|---|---|---|"]
    for kind in KINDS:
        errors = [abs(row["relative_error"][kind]) for row in result["cases"] if kind in row["relative_error"]]
        close = sum(error <= BOUND for error in errors)
        name = "peak" if kind == "largest instant" else kind
        rows.append(f"| {name} | {len(errors)} | {median(errors):.1%} | {max(errors):.1%} | {close} |")
    described = result["machine"]
    versions = ", ".join(f"{name} {described['versions'][name]}" for name in ("torch", "lightning", "torchao"))
    return (
        "\n".join(rows) + f"\n\nMeasured {described['date'][:10]} on a CPU with {described['cores']} cores: {versions}."
    )


def main(given: Sequence[str] | None = None) -> int:
    """Command line; see --help. 1 where a plan is off by more than 5 %."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_memory", description=__doc__)
    parser.add_argument("recipes", nargs="*", help=f"of {' '.join(RECIPES)}; default: all")
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--optimizers", nargs="*", default=list(OPTIMIZERS), choices=list(OPTIMIZERS))
    parser.add_argument("--out", type=Path, help="JSON file; default: benchmarks/results, if all cases are measured")
    options = parser.parse_args(given)
    if unknown := [name for name in options.recipes if name not in RECIPES]:
        parser.exit(2, f"unknown recipe {' '.join(unknown)}: give some of {' '.join(RECIPES)}\n")
    recipes = options.recipes or list(RECIPES)
    cases = [(r, layout, o) for r in recipes for layout in options.layouts for o in options.optimizers]
    real = measured(cases)
    rows, off = [], 0
    for case in cases:
        name = "/".join(case)
        try:
            with machine.quiet():
                plan: dict[str, Any] = dict(planned(*case))
        except Exception as error:
            plan = {"error": str(error).splitlines()[-1]}
        here = real[name]
        errors = {kind: plan[kind] / here[kind] - 1 for kind in KINDS if here.get(kind) and "error" not in plan | here}
        worst = max((abs(error) for error in errors.values()), default=float("nan"))
        off += not worst <= BOUND
        said = "  ".join(f"{kind} {error:+.1%}" for kind, error in errors.items())
        print(f"{name:36} {said or plan.get('error') or here.get('error')}", flush=True)
        rows.append({"case": name, "planned": plan, "measured": here, "relative_error": errors})
    out = options.out
    everything = not options.recipes and len(cases) == len(RECIPES) * len(LAYOUTS) * len(OPTIMIZERS)
    if out is None and everything:
        out = Path(__file__).parent / "results" / f"plan-memory-{machine.today()}-cpu.json"
    if out is not None:
        write(out, {"machine": machine.describe(), "sizes": SIZES, "rows": ROWS, "cases": rows})
    print(f"{len(cases) - off} of {len(cases)} within {BOUND:.0%}")
    return int(off > 0)


if __name__ == "__main__":
    sys.exit(main())
