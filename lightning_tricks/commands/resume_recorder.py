"""One process of `verify-resume`: write down each micro-batch of a fit, save in the middle, and kill the process.

The recipe of `verify-resume` names the callback; for the function `verify_resume` this module is the process itself.
"""

import copyreg
import hashlib
import importlib
import json
import os
import runpy
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lightning_tricks._errors import UsageError
from lightning_tricks._find_modules import clean_name
from lightning_tricks._lightning import Module, Trainer, pl
from lightning_tricks._random_state import random_state
from lightning_tricks._tensors import local
from lightning_tricks._trainer import is_accumulating
from lightning_tricks.checkpoints.atomic_checkpoint_io import wait_for_write
from lightning_tricks.commands.verify_resume import CHECKPOINT
from lightning_tricks.monitors.run_ledger.sums import salt, tensor_sum


class ResumeRecorder(pl.Callback):
    """Writes `rank_R.jsonl`, a line for each micro-batch, then ends the process: no line after it is run.

    A line holds the state before the micro-batch (random state; at the start of a step weights, optimizer state and
    scaler too), the batch, and what comes of it: loss, learning rate, gradient norm. A last line holds the final state.
    The recipe's savers write below the recorder's folder in place of their own.

    Args:
        folder: to write to; it must exist.
        steps: optimizer steps until the end.
        first_step: optimizer steps done before.
        kill: save after `steps` and end by SIGKILL in the middle of the next step; False ends with exit code 0.
    """

    def __init__(self, folder: str, steps: int, first_step: int = 0, kill: bool = False) -> None:
        self.folder = Path(folder)
        self.last_step = first_step + steps
        self.kill = kill
        self.done = first_step
        self.row: dict[str, Any] = {}
        self.in_step = 0  # micro-batches of the running step that are done

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Lead the savers elsewhere, before they make their folders."""
        for number, saver in enumerate(trainer.checkpoint_callbacks):
            if hasattr(saver, "dirpath"):
                saver.dirpath = str(self.folder / f"saver_{number}")

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        """Begin a line."""
        self.row = {"step": self.done + 1, "micro_batch": self.in_step, "data": checksum(batch)}
        self.row["random state"] = checksum(random_state())
        if self.in_step == 0:
            self.row |= state(trainer, pl_module)
        self.row |= {"lr": [], "gradient norm": []}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Module, optimizer: Any) -> None:
        """Note the learning rates with which the optimizer steps, and the norm of this rank's gradients."""
        self.row["lr"] += [float(group["lr"]).hex() for group in optimizer.param_groups]
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        squares = [local(gradient).detach().double().square().sum().item() for gradient in gradients]
        self.row["gradient norm"].append((sum(squares) ** 0.5).hex())

    def on_after_backward(self, trainer: Trainer, pl_module: Module) -> None:
        """Kill the process, if that is due."""
        self._kill_if_due()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Write the line; after the last step save, or end."""
        self._kill_if_due()
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self._write(trainer, {**self.row, "loss": None if loss is None else checksum(loss)})
        self.in_step += 1
        if is_accumulating(trainer):
            return
        self.in_step, self.done = 0, self.done + 1
        if self.done == self.last_step:
            if self.kill:
                self._save(trainer)
            else:
                self._write(trainer, {"step": self.done + 1, "micro_batch": 0, **state(trainer, pl_module)})
                trainer.strategy.barrier("verify-resume")
                os._exit(0)

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Save once more, after a validation that was due: it may have moved the random state."""
        if self.kill and self.done == self.last_step:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        trainer.save_checkpoint(self.folder / CHECKPOINT)
        wait_for_write(trainer)

    def _kill_if_due(self) -> None:
        if self.kill and self.done == self.last_step:
            os.kill(os.getpid(), signal.SIGKILL)

    def _write(self, trainer: Trainer, row: dict[str, Any]) -> None:
        with (self.folder / f"rank_{trainer.global_rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"rank": trainer.global_rank, **row}) + "\n")


def state(trainer: Any, module: Module) -> dict[str, Any]:
    """Checksums of this rank's weights and buffers, optimizer state and scaler, each by its name."""
    names = {id(parameter): clean_name(name) for name, parameter in module.named_parameters()}
    optimizer_state: dict[str, int] = {}
    for number, optimizer in enumerate(trainer.optimizers):
        for parameter, entries in optimizer.state.items():
            for name, value in entries.items():
                optimizer_state[f"{name} of {names.get(id(parameter), number)}"] = checksum(value)
        for index, group in enumerate(optimizer.param_groups):
            settings = {name: value for name, value in group.items() if name not in ("params", "lr")}
            optimizer_state[f"settings of group {index} of optimizer {number}"] = checksum(settings)
    weights = {clean_name(name): checksum(value) for name, value in module.state_dict(keep_vars=True).items()}
    scaler = {name: checksum(value) for name, value in trainer.precision_plugin.state_dict().items()}
    return {"weights": weights, "optimizer state": optimizer_state, "scaler": scaler}


def checksum(value: Any) -> int:
    """64 bits that depend on every bit of a value, in any nesting: of tensors their sum, with type and shape.

    Args:
        value: an object of another class counts as what pickle would rebuild it from.

    Raises:
        UsageError: something in it cannot be pickled.
    """
    return salt(" ".join(_words(value, ())))


def _words(value: Any, inside: tuple[int, ...]) -> Iterator[str]:
    """The text of which a checksum is made; `inside` are the `id` of the objects around the value."""
    if isinstance(value, Tensor):
        here = local(getattr(value, "ds_tensor", value)).detach()
        yield f"{here.dtype}{tuple(here.shape)}{tensor_sum(here).item() if here.numel() else 0}"
    elif isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        yield f"{value.dtype}{value.shape}{hashlib.blake2b(value.tobytes()).hexdigest()}"
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield repr(key)
            yield from _words(part, inside)
        yield f"{len(value)} entries"
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _words(part, inside)
        yield f"{len(value)} parts"
    elif isinstance(value, Set):
        yield repr(sorted(salt(" ".join(_words(part, inside))) for part in value))
    elif isinstance(value, bool | int | float | complex | str | bytes | None):
        yield repr(value)
    elif hasattr(value, "__qualname__"):
        yield f"{value.__module__}.{value.__qualname__}"  # a function or a class
    elif id(value) in inside:
        yield "itself"
    else:
        yield from _words(_parts(value), (*inside, id(value)))


def _parts(value: Any) -> Any:
    """The parts from which pickle would rebuild an object, or its name."""
    kind = type(value)
    try:
        reduce = copyreg.dispatch_table.get(kind)
        parts = reduce(value) if reduce else value.__reduce_ex__(4)
    except Exception as error:  # each class has its own
        name = f"{kind.__module__}.{kind.__qualname__}"
        raise UsageError(
            f"{name} has no checksum: leave it out of the batch, or let it be pickled ({error})"
        ) from error
    return [list(part) if isinstance(part, Iterator) else part for part in parts] if isinstance(parts, tuple) else parts


def run_phase(settings: dict[str, Any]) -> None:
    """Train one phase of `verify_resume`; the recorder ends the process.

    Args:
        settings: from `verify_resume`: where the function is, and the fields of a Phase.
    """
    sys.path += [place for place in settings["sys_path"] if place not in sys.path]
    make = _find(settings)
    pl.seed_everything(0, workers=True, verbose=False)
    module, data, arguments = make()
    recorder = ResumeRecorder(*(settings[name] for name in ("folder", "steps", "first_step", "kill")))
    callbacks = arguments.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    own = {"callbacks": [*callbacks, recorder], "logger": pl.loggers.CSVLogger(settings["folder"])}
    if not any(isinstance(callback, pl.callbacks.ProgressBar) for callback in callbacks):
        own["enable_progress_bar"] = False
    trainer = pl.Trainer(**{**arguments, **own, "default_root_dir": settings["folder"]})
    is_module = isinstance(data, pl.LightningDataModule)
    loaders = {"datamodule": data} if is_module else {"train_dataloaders": data}
    trainer.fit(module, ckpt_path=settings["ckpt_path"], **loaders)


def _find(settings: dict[str, Any]) -> Callable[[], Any]:
    if settings["file"]:  # a script: its part under `if __name__ == "__main__":` is not run
        return runpy.run_path(settings["file"], run_name="__mp_main__")[settings["name"]]
    found: Any = importlib.import_module(settings["module"])
    for name in settings["name"].split("."):
        found = getattr(found, name)
    return found


if __name__ == "__main__":
    run_phase(json.loads(sys.argv[1]))
