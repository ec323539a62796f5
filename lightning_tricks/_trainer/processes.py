"""The processes of a run: ranks, processes that Lightning's launcher has started, signals, SLURM."""

import os
import subprocess
import threading
from pathlib import Path
from typing import Any

from lightning_tricks._trainer.objects import is_a


def launched_processes(trainer: Any) -> list[subprocess.Popen]:
    """The other ranks' processes that this one has started, by `_SubprocessScriptLauncher`; none under torchrun.

    Read from strategies/launchers/subprocess_script.py.
    """
    processes = getattr(trainer.strategy.launcher, "procs", [])  # multiprocessing's launcher has others
    return [process for process in processes if isinstance(process, subprocess.Popen)]


def store_before_the_run(trainer: Any) -> Any:
    """The store by which processes that a launcher such as torchrun has started find each other, before Lightning does.

    Keep it until then: on rank 0 it may be the server. torch hands the same one out again when the process group is
    made. None where there is one process, or where Lightning starts the others.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if trainer.world_size == 1 or environment is None or not environment.creates_processes_externally:
        return None
    from torch.distributed import rendezvous  # which not every build of torch has

    os.environ.setdefault("MASTER_ADDR", environment.main_address)  # as Lightning does when it makes the group
    os.environ.setdefault("MASTER_PORT", str(environment.main_port))
    return next(rendezvous("env://", environment.global_rank(), environment.world_size()))[0]


def dismiss_process_observer() -> None:
    """Let the `launched_processes` end with any exit code: a thread of Lightning kills this process for one but 0.

    Read from `_ChildProcessObserver` (fabric/strategies/launchers/subprocess_script.py).
    """
    for thread in threading.enumerate():
        if is_a(thread, "_ChildProcessObserver"):
            vars(thread)["_child_processes"] = []


def signal_connector(trainer: Any) -> Any:
    """The object whose `register_signal_handlers` installs Lightning's handlers after `setup`, before the sanity check.

    Its `teardown` puts the earlier handlers back: the last act of a Trainer, after an exception too.
    Read from `_SignalConnector` (trainer/connectors/signal_connector.py) and `Trainer._teardown`.
    """
    return trainer._signal_connector


def sigterm_broadcast(trainer: Any) -> tuple[Any, str] | None:
    """Owner and name of the method by which rank 0 tells the others of a SIGTERM, in each micro-batch; None without it.

    Read from `_TrainingEpochLoop._broadcast_sigterm_tensor` (loops/training_epoch_loop.py).
    """
    owner, name = trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"
    return (owner, name) if hasattr(owner, name) else None


def slurm_environment(trainer: Any) -> Any:
    """Lightning's SLURMEnvironment if the Trainer runs in one, else None.

    Read from `_AcceleratorConnector.cluster_environment` (trainer/connectors/accelerator_connector.py).
    """
    environment = trainer._accelerator_connector.cluster_environment
    return environment if is_a(environment, "SLURMEnvironment") else None


def slurm_checkpoint(trainer: Any) -> Path:
    """The path of the next checkpoint from which a fit under SLURM without a `ckpt_path` goes on.

    Read from `_CheckpointConnector.hpc_save_path` (trainer/connectors/checkpoint_connector.py).
    """
    return Path(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))
