"""Load the checkpoint that was chosen: rank 0 hands its choice on, and every rank compares it when it is loaded."""

import json
import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import Module, Trainer, pl
from lightning_tricks._trainer import store_before_the_run
from lightning_tricks.checkpoints import AtomicCheckpointIO
from lightning_tricks.checkpoints.check_checkpoint import identity
from lightning_tricks.cli.choose_checkpoint import choose_checkpoint, looks_for_newest, short

_CHOICE = "LIGHTNING_TRICKS_CHOICE"  # environment variable: the choice of rank 0, for ranks that Lightning starts


class SameCheckpoint(pl.Callback):
    """Refuses to train where ranks chose different checkpoints, or another one lies at the path when it is loaded.

    Args:
        path: the checkpoint, None for none.
        before: its `identity` when it was chosen.
    """

    def __init__(self, path: str | None, before: list[int]) -> None:
        self.path = path
        self.before = before
        self.store: Any = None  # kept until all processes have their answers

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Compare the choices of all ranks, before anything is loaded."""
        if trainer.world_size == 1 or not (dist.is_available() and dist.is_initialized()):
            return
        choices: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(choices, self.path)
        for rank, other in enumerate(choices):
            if other != choices[0]:
                raise UsageError(
                    f"ckpt_path: rank 0 found {choices[0] or 'no checkpoint'} and rank {rank} {other or 'none'}: the "
                    "checkpoints must lie where all ranks see them, and no other run may write there; or give "
                    "--ckpt_path FILE"
                )

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        """Compare the file with the one that was chosen, now that it is loaded."""
        if identity(self.path) != self.before:
            raise UsageError(
                f"ckpt_path={short(self.path)}: it was replaced while this run started, so another run writes to the "
                "same folder: end one of them"
            )


def choose_once(command: str, options: Mapping[str, Any], trainer: Any) -> str | None:
    """The checkpoint that a command starts from. One that was looked for is compared again when the Trainer loads it.

    Args:
        command: see `choose_checkpoint`.
        options: the command's, with `ckpt_path` and `resume`.
        trainer: gets a SameCheckpoint.

    Raises:
        UsageError: see `choose_checkpoint`.
    """
    asked, resume = options.get("ckpt_path"), options.get("resume") or "none"
    if not looks_for_newest(command, asked, resume):
        return choose_checkpoint(command, asked, trainer)
    same = inherited_choice()
    if same is None:
        store = store_before_the_run(trainer)
        same = publish_choice(choose_checkpoint(command, asked, trainer, resume, store))
        same.store = store
    trainer.callbacks.insert(0, same)
    plugin = trainer.strategy.checkpoint_io
    if isinstance(plugin, AtomicCheckpointIO):
        plugin.remember_verified(same.before)
    return same.path


def publish_choice(path: str | None) -> SameCheckpoint:
    """Keep a choice for the processes that Lightning's launcher will start, which inherit the environment."""
    before = identity(path)
    os.environ[_CHOICE] = json.dumps([path, before])
    return SameCheckpoint(path, before)


def inherited_choice() -> SameCheckpoint | None:
    """The choice of the process that started this one; None in the first process of a host, and under torchrun."""
    if os.environ.get("LOCAL_RANK", "0") == "0" or _CHOICE not in os.environ:
        return None
    return SameCheckpoint(*json.loads(os.environ[_CHOICE]))


def clear_choice() -> None:
    """Take the choice out of the environment, when the command has ended."""
    os.environ.pop(_CHOICE, None)
