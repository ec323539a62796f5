"""The work of one process of the table over strategies: train, measure memory, save, resume, open others' files.

`start` begins such processes; each writes what it found to a file of its rank.
"""

import gc
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from benchmarks.memory_logger import Memory
from benchmarks.strategy_rows import ROWS, TRIALS, Row, batches
from lightning_tricks import GradNormMonitor, LRMonitor, MFUMonitor, consolidate_deepspeed
from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.find_modules import clean_name
from lightning_tricks._trainer.lightning import pl
from lightning_tricks._trainer.run_facts import stage_groups
from lightning_tricks.checkpoints import AtomicCheckpointIO

TIME_LIMIT = 240.0  # seconds for the processes of one job
Found = dict[Any, Any]


class Look(pl.Callback):
    """Writes the first step's gradients to a file, and measures what the process holds at the third step.

    Then gradients are there and the optimizer has its state, and nothing of the forward pass is left.
    """

    def __init__(self, gradients: Path) -> None:
        self.gradients, self.before = gradients, held([])
        self.bytes: dict[str, int] = {}
        self.tensors: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == 0:
            found = whole_gradients(trainer, pl_module)
            if trainer.is_global_zero:
                torch.save(found, self.gradients)
        elif trainer.global_step == 2:
            self.bytes = bytes_of(trainer, pl_module, self.before)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.tensors = {name: tensor.detach().clone() for name, tensor in own_tensors(trainer, pl_module).items()}


def whole_gradients(trainer: Any, module: Any) -> dict[str, Tensor]:
    """Every gradient, gathered from the ranks, by its plain name; every rank must call."""
    strategy, named = trainer.strategy, list(module.named_parameters())
    if isinstance(strategy.model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(strategy.model, with_grads=True):
            return {clean_name(name): p.grad.detach().clone() for name, p in module.named_parameters()}
    if hasattr(strategy, "deepspeed_engine"):
        from deepspeed.utils import safe_get_full_grad

        # what the engine divides by in its step, which our token mean gives it
        scale = trainer.optimizers[0].external_loss_scale or 1.0
        return {name: safe_get_full_grad(p).detach().clone() / scale for name, p in named}
    grads = {clean_name(name): p.grad for name, p in named}
    whole = {name: (g.full_tensor() if isinstance(g, DTensor) else g).detach().clone() for name, g in grads.items()}
    if (groups := stage_groups(trainer)) is not None:
        parts: list[Any] = [None] * dist.get_world_size(groups[1])
        dist.all_gather_object(parts, whole, group=groups[1])
        whole = {name: gradient for part in parts for name, gradient in part.items()}
    return whole


def local(tensor: Tensor) -> Tensor:
    """What this process has of a tensor."""
    tensor = getattr(tensor, "ds_tensor", tensor)  # DeepSpeed's shard, at stage 3
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def own_tensors(trainer: Any, module: Any) -> dict[str, Tensor]:
    """This process's part of the weights and of the optimizer: its state, and what it steps where that is a copy."""
    found = {f"weight {clean_name(name)}": local(p) for name, p in module.named_parameters()}
    optimizer = getattr(trainer.optimizers[0], "optimizer", trainer.optimizers[0])
    for place, (stepped, state) in enumerate(optimizer.state.items()):
        found[f"stepped {place}"] = local(stepped)
        found |= {f"state {place} {key}": local(value) for key, value in state.items() if isinstance(value, Tensor)}
    return found


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of each storage by its address."""
    there = [local(tensor).untyped_storage() for tensor in tensors if not isinstance(tensor, FakeTensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in there if storage.nbytes()}


def has_memory(tensor: Tensor) -> bool:
    """False of what torch.compile has traced with and left behind."""
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True


def held(also: Iterable[Tensor]) -> int:
    """Bytes of all strided tensors that this process can reach, and of `also`."""
    gc.collect()
    found = [thing for thing in gc.get_objects() if isinstance(thing, Tensor)]
    found = [tensor for tensor in found if tensor.layout == torch.strided and not tensor.is_meta]
    found = [tensor for tensor in found if has_memory(local(tensor))]
    grads = [tensor.grad for tensor in found if tensor.is_leaf and tensor.grad is not None]
    return sum(storages([*found, *grads, *also]).values())


def bytes_of(trainer: Any, module: Any, before: int) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer state, and of whatever else came since `before` was measured."""
    tensors = own_tensors(trainer, module)
    parts = {
        "weights": [tensor for name, tensor in tensors.items() if name.startswith("weight ")],
        "gradients": [p.grad for p in module.parameters() if p.grad is not None],
        "optimizer": [tensor for name, tensor in tensors.items() if name.startswith("state ")],
    }
    found = {name: sum(storages(part).values()) for name, part in parts.items()}
    found["other"] = held(tensors.values()) - before - sum(found.values())
    if hasattr(trainer.strategy.model, "_get_ddp_logging_data"):  # DDP's buckets are no tensors of Python's
        sizes = str(trainer.strategy.model._get_ddp_logging_data()["bucket_sizes"])
        found["other"] += sum(int(size) for size in sizes.split(","))
    return found | {"total": sum(found.values())}


def fit(trial: str, row: Row, steps: int, folder: Path, save_at: int = 0, resume: Path | None = None) -> Found:
    """Train one trial, from its start or from a checkpoint of step `save_at`: its series and what `Look` saw."""
    strategy, world = row.strategy(), row.processes
    rank = int(os.environ.get("RANK", 0))
    made, memory = TRIALS[trial], Memory()
    folder.mkdir(exist_ok=True)
    look = Look(folder / f"gradients-{trial}.pt")
    monitors: list[Any] = [LRMonitor(), GradNormMonitor(), MFUMonitor(peak_flops=1e12), look]
    if save_at and not resume:
        monitors.append(ModelCheckpoint(folder, filename="{step}", every_n_train_steps=save_at, save_top_k=-1))
    trainer = pl.Trainer(
        max_steps=steps, accelerator="cpu", devices=world, strategy=strategy, logger=memory, log_every_n_steps=1,
        callbacks=monitors, gradient_clip_val=made.clip, use_distributed_sampler=False, default_root_dir=folder,
        plugins=[AtomicCheckpointIO()] if strategy in ("auto", "ddp") else None,
        enable_checkpointing=bool(save_at and not resume), enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    torch.manual_seed(0)
    module = made.module(made.optimizer)
    trainer.fit(module, batches(steps, save_at if resume else 0, *row.data_rank(rank)), ckpt_path=resume)
    series = memory.series
    return {
        "loss": getattr(module, "losses", None) or series["train/loss"],
        "norm": series["train/grad_norm"],
        "lr": series["train/lr"],
        "clipped": series.get("train/clipped_fraction", []),
        "tokens": of_a_step(series, "tokens_per_second"),
        "flops": [world * flops for flops in of_a_step(series, "model_flops_per_second")],
        "groups": module.groups,
        "bytes": look.bytes,
        "tensors": look.tensors,
    }


def of_a_step(series: dict[str, list[float]], rate: str) -> list[int]:
    """The number in each step of what `rate` gives a second, such as tokens; empty where the monitor has no rate."""
    seconds, rates = series.get("throughput/step_seconds", []), series.get(f"throughput/{rate}", [])
    return [round(each * time) for each, time in zip(rates, seconds, strict=bool(rates))]


def attempt(act: Callable[[], Found]) -> Found:
    """What `act` finds; where it refuses, the line it says; where it fails, the error."""
    try:
        return act()
    except UsageError as error:
        return {"refused": str(error)}
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"}


def train_row(name: str, folder: Path, steps: int, save_at: int) -> Found:
    """Every trial of a row; the first is saved on its way."""
    row, found = ROWS[name], {}
    for trial in row.trials:
        saving = save_at if trial == row.trials[0] else 0
        found[trial] = attempt(partial(fit, trial, row, steps, folder / name, saving))
    return found


def open_rows(pairs: list[tuple[str, str]], folder: Path, steps: int, save_at: int) -> Found:
    """Of each pair of rows, go on from the checkpoint of the first as the second.

    Of DeepSpeed's checkpoints one process also evaluates the weights, from one file.
    """
    found: dict[tuple[str, str], Found] = {}
    for of, name in pairs:
        where, saved = folder / f"{of}-as-{name}", folder / of / f"step={save_at}.ckpt"
        found[of, name] = attempt(partial(fit, ROWS[of].trials[0], ROWS[name], steps, where, save_at, saved))
        if name == "one" and ROWS[of].needs == "deepspeed":
            found[of, "one, weights"] = attempt(partial(evaluate, saved, where, save_at))
    return found


def evaluate(saved: Path, folder: Path, save_at: int) -> Found:
    """Loss of the batch after the save, by one process that opens one file of DeepSpeed's weights."""
    file = consolidate_deepspeed(saved, folder / "weights.ckpt")
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    module = TRIALS["adamw"].module(TRIALS["adamw"].optimizer)
    batch = batches(save_at + 1, save_at)
    return {"loss": [trainer.validate(module, batch, ckpt_path=file, verbose=False)[0]["val/loss"]]}


def _enter(rank: int, job: Callable[..., Found], port: int, world: int, out: Path, args: tuple[Any, ...]) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank), NODE_RANK="0", RANK=str(rank),
        WORLD_SIZE=str(world), OMP_NUM_THREADS="1",
    )  # fmt: skip
    os.environ.pop("PL_GLOBAL_SEED", None)
    torch.set_num_threads(1)
    gc.freeze()  # `held` need not look through half a million objects that were imported
    log = os.open(f"{out}-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.save(job(*args), f"{out}-{rank}.pt")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo sometimes aborts in its own teardown


def start(job: Callable[..., Found], world: int, out: Path, *args: Any) -> list[Found]:
    """Run `job(*args)` in `world` new processes; what each of them found. Their output goes to `out-RANK.log`.

    They are forked from a server that has imported this module: importing takes longer than a job.

    Raises:
        RuntimeError: one of them failed, or they took longer than `TIME_LIMIT`.
    """
    port = random.SystemRandom().randrange(20_000, 32_000)  # below those that a system gives away in the meantime
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    context: Any = mp.start_processes(
        _enter, (job, port, world, out, args), nprocs=world, join=False, start_method="forkserver"
    )
    deadline = time.monotonic() + TIME_LIMIT
    try:
        while not context.join(timeout=1.0):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{job.__name__} {args[0]} took longer than {TIME_LIMIT:g} seconds")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    return [torch.load(f"{out}-{rank}.pt", weights_only=False) for rank in range(world)]
