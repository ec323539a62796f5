"""The trials of each optimizer of the table, in processes of their own: short runs, resumed, sharded, and in bf16."""

import functools
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from benchmarks.memory_logger import Memory
from benchmarks.optimizer_rows import ROWS, Spec, built, factory, spec
from benchmarks.strategy_rows import LENGTH, VOCABULARY, batches
from benchmarks.strategy_runs import attempt
from lightning_tricks import BF16True, DeepSpeedZeROStrategy, FSDP2Strategy, Llama, WarmupCosine
from lightning_tricks._core.tensors import local
from lightning_tricks._trainer.lightning import pl
from lightning_tricks.checkpoints import AtomicCheckpointIO
from lightning_tricks.models import Decoder
from lightning_tricks.optim import build_optimizer, limits

# past a period of ten steps; more steps before the save than after it, or Lightning would end the epoch too early
STEPS, SAVED = 14, 8
CONFIG = Llama(vocab_size=VOCABULARY, d_model=64, n_layers=2, n_heads=2, max_seq_len=LENGTH)
Found = dict[str, Any]


class Held(pl.Callback):
    """Keeps the bytes that live tensors hold after two of the steps."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step in (SAVED + 1, STEPS - 1):
            gc.collect()
            tensors = [thing for thing in gc.get_objects() if isinstance(thing, Tensor)]
            live = [tensor for tensor in tensors if not tensor.is_meta and not isinstance(tensor, FakeTensor)]
            self.bytes.append(sum(tensor.numel() * tensor.element_size() for tensor in live))


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The plain tensors in a state: in lists and dicts at any depth, of shards, and of tensors made of several."""
    if isinstance(value, dict | list | tuple):
        entries = [value[key] for key in sorted(value, key=str)] if isinstance(value, dict) else value
        for entry in entries:
            yield from tensors_of(entry)
    elif isinstance(value, DTensor):
        yield from tensors_of(value.to_local())
    elif isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from tensors_of(getattr(value, name))
    elif isinstance(value, Tensor):
        yield value


@functools.cache
def rank_and_world() -> tuple[int, int]:
    """Of this process, as it was started: the first Trainer clears the variables at its end."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def fit(name: str, folder: Path, steps: int = STEPS, resume: Path | None = None, **options: Any) -> Found:
    """Train the small model: its losses, and this process's weights and state at the end."""
    row, held, memory = ROWS[name], Held(), Memory()
    rank, world = rank_and_world()
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)
    if world == 1:
        options["plugins"] = [*options.get("plugins", []), AtomicCheckpointIO()]
    torch.manual_seed(0)
    module = row.module(CONFIG, optimizer=factory(row.optimizer), schedule=WarmupCosine(warmup_steps=4))
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=world,
        logger=memory,
        log_every_n_steps=1,
        callbacks=[held] if resume else [held, saver],
        gradient_clip_val=1.0,
        use_distributed_sampler=False,
        default_root_dir=folder,
        enable_checkpointing=not resume,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, batches(steps, SAVED if resume else 0, rank, world), ckpt_path=resume)
    optimizer: Any = getattr(trainer.optimizers[0], "optimizer", trainer.optimizers[0])
    weights = [local(p).detach().clone() for p in module.parameters()]
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    state = [tensor.detach().clone() for p in stepped for tensor in tensors_of(optimizer.state[p])]
    return {"loss": memory.series["train/loss"], "bytes": held.bytes, "tensors": weights + state}


def without_tensors(found: Found) -> Found:
    return {name: value for name, value in found.items() if name != "tensors"}


def resumed(name: str, folder: Path, **options: Callable[[], Any]) -> Found:
    """A run, and one that goes on from its checkpoint: whether both end alike, to the bit.

    Args:
        name: of the row.
        folder: for the checkpoint.
        **options: of the Trainer, made anew for each of the two.
    """
    made = lambda: {option: make() for option, make in options.items()}  # noqa: E731
    whole = fit(name, folder, **made())
    again = attempt(partial(fit, name, folder / "again", resume=folder / f"step={SAVED}.ckpt", **made()))
    if "tensors" not in again:
        return without_tensors(whole) | {"resume": next(f"{kind}: {line}" for kind, line in again.items())}
    pairs = list(zip(whole["tensors"], again["tensors"], strict=False))
    equal = len(whole["tensors"]) == len(again["tensors"]) and all(torch.equal(*pair) for pair in pairs)
    gap = max(abs(a - b) for a, b in zip(whole["loss"][SAVED:], again["loss"], strict=True))
    return without_tensors(whole) | {"resume": "bitwise" if equal else f"differs by {gap:.1e} in loss"}


def bf16_true(name: str, folder: Path) -> Found:
    """A run with bf16 weights, and whether the process holds more at its end than in its middle."""
    found = fit(name, folder, plugins=[BF16True()])
    return without_tensors(found) | {"grows": found["bytes"][1] > 1.01 * found["bytes"][0]}


def stepped(name: str, compiled: bool = False, tensor_lr: bool = False) -> list[Tensor]:
    """The weights after three steps on the same gradients, of a model of one block."""
    torch.manual_seed(0)
    model = Decoder(CONFIG)
    row = ROWS[name]
    optimizer = build_optimizer(model, _with_tensor_lr(row.optimizer)) if tensor_lr else built(name, model)
    step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        step()
    return [parameter.detach() for parameter in model.parameters()]


def _with_tensor_lr(chosen: Spec) -> Callable[[Any], torch.optim.Optimizer]:
    """The optimizer of a row, whose learning rate (of the matrices, where those have one) is a Tensor."""
    inner = chosen["init_args"].get("matrices")
    if inner:
        return factory(chosen, matrices=spec(inner["class_path"], **_tensor_lr(inner)))
    return factory(spec(chosen["class_path"], **_tensor_lr(chosen)))


def _tensor_lr(chosen: Spec) -> dict[str, Any]:
    return {**chosen["init_args"], "lr": torch.tensor(chosen["init_args"]["lr"])}


def against_eager(name: str, **how: bool) -> Found:
    """Largest difference of a weight from three plain steps, over the largest weight."""
    plain, other = stepped(name), stepped(name, **how)
    pairs = zip(plain, other, strict=True)
    return {"gap": max(float((one - two).abs().max() / one.abs().max()) for one, two in pairs)}


def in_one(names: Sequence[str], folder: Path, refused: bool = False) -> dict[str, Found]:
    """What one process tries of each row, by its name and the place.

    Args:
        names: of rows.
        folder: for checkpoints.
        refused: try what is refused as well.
    """
    if refused:
        limits.LIMITS.clear()
    found: dict[str, Found] = {}
    for name in names:
        here = folder / name.replace(" ", "_")
        trials: dict[str, Callable[[], Found]] = {
            "one": partial(resumed, name, here / "one"),
            "bf16_true": partial(bf16_true, name, here / "bf16_true"),
        }
        if ROWS[name].module is ROWS["AdamW"].module:  # Sophia's gradients come from the loss, at each step
            trials["tensor lr"] = partial(against_eager, name, tensor_lr=True)
            if ROWS[name].needs != "torchao":  # which compiles its step by itself
                trials["compile"] = partial(against_eager, name, compiled=True)
        found[name] = {}
        for trial, act in trials.items():
            # torchao compiles its step by itself, one kernel for each shape, which takes longer than all of this
            stance: Any = nullcontext() if trial == "compile" else torch.compiler.set_stance("force_eager")
            with stance:
                found[name][trial] = attempt(act)
    return found


def in_two(names: Sequence[str], folder: Path, strategy: str, refused: bool = False) -> dict[str, Found]:
    """What two processes try of each row: `fsdp2` or `deepspeed`; other arguments as for `in_one`."""
    if refused:
        limits.LIMITS.clear()
    make = FSDP2Strategy if strategy == "fsdp2" else partial(DeepSpeedZeROStrategy, 2)
    with torch.compiler.set_stance("force_eager"):
        return {
            name: {strategy: attempt(partial(resumed, name, folder / name.replace(" ", "_"), strategy=make))}
            for name in names
        }
