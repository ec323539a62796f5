"""Check a recipe against this machine while there is one process: each process that is started would fail by itself.

What a part knows of itself (files, libraries, memory) it tells in its own method `check_run`.
"""

import os
from typing import Any

import torch

from lightning_tricks._core.errors import UsageError
from lightning_tricks._host.machine import most_processes
from lightning_tricks._trainer.lightning import pl
from lightning_tricks._trainer.objects import is_a

_MEETING_POINT = ("MASTER_ADDR", "MASTER_PORT")  # what a process on another host must know
_LOADERS = {"fit": "train_dataloader", "validate": "val_dataloader"}


def check_before_launch(trainer: Any, module: Any, datamodule: Any, command: str, accelerator: Any) -> None:
    """Refuse a run that this machine cannot start, before any process is started and before the data are prepared.

    Raises:
        UsageError: no data; more processes than this machine can hold, or without a GPU where the recipe leaves the
            `accelerator` open; other hosts that nothing leads here; what the parts' own checks refuse.
    """
    _check_processes(trainer, accelerator)
    _check_hosts(trainer)
    loader = _LOADERS.get(command, f"{command}_dataloader")
    if datamodule is None and not pl.utilities.model_helpers.is_overridden(loader, module):
        raise UsageError(
            f"{command}: the recipe has no data, and {type(module).__name__} has no {loader}: add some, such as "
            "`data: TextData`"
        )
    trainer.strategy.connect(module)  # as the Trainer does later; the strategy's own check asks for it
    for part in (trainer.strategy, trainer.precision_plugin, module, datamodule, *trainer.callbacks):
        if hasattr(part, "check_run"):
            part.check_run(trainer, datamodule, command)


def _check_processes(trainer: Any, accelerator: Any) -> None:
    """Refuse more processes on the CPU than are meant, or than the machine can start."""
    count = trainer.num_devices
    if not is_a(trainer.accelerator, "CPUAccelerator") or count == 1:
        return
    if count > (most := most_processes()):
        raise UsageError(
            f"trainer.devices={count}: so many processes on {os.cpu_count()} CPU cores: give at most {most}"
        )
    launched = torch.distributed.is_torchelastic_launched() or "LOCAL_RANK" in os.environ
    if accelerator == "auto" and not launched:
        raise UsageError(
            f"trainer.devices={count}: this machine has no GPU, so these would be {count} processes on its CPU: give "
            "--trainer.devices 1 --trainer.strategy auto, or --trainer.accelerator cpu if they are meant"
        )


def _check_hosts(trainer: Any) -> None:
    """Refuse several hosts that cannot find each other, or a torchrun of another number of processes."""
    environment: Any = getattr(trainer.strategy, "cluster_environment", None)
    missing = [name for name in _MEETING_POINT if name not in os.environ]
    if trainer.num_nodes > 1 and is_a(environment, "LightningEnvironment") and missing:
        raise UsageError(
            f"trainer.num_nodes={trainer.num_nodes}: this process would wait for the other hosts in vain: start "
            "`torchrun --nnodes ...` on each host, or set the environment variables "
            f"{', '.join(missing)} and NODE_RANK there; on this host alone, --trainer.num_nodes 1"
        )
    if torch.distributed.is_torchelastic_launched():
        started = int(os.environ["WORLD_SIZE"])
        if started != trainer.world_size:
            raise UsageError(
                f"trainer.devices={trainer.num_devices}, trainer.num_nodes={trainer.num_nodes}: torchrun has started "
                f"{started} processes, which is another number: make --nproc-per-node the one and --nnodes the other, "
                "or give --elastic true to keep the rows of a step"
            )
