"""One line for each exception of Lightning or torch that the user can mend; any other one keeps its traceback."""

import errno
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import pl
from lightning_tricks._suggest import did_you_mean
from lightning_tricks.checkpoints.other_weights import other_weights
from lightning_tricks.mixins._plain_settings import subclasses

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}


@contextmanager
def usage_errors(ckpt_path: Callable[[], str | None]) -> Iterator[None]:
    """Raise a UsageError for each exception that the user can mend; `ckpt_path` gives that option's value, if known."""
    try:
        yield
    except Exception as error:
        line = str(error) if isinstance(error, UsageError) else _line(error)
        if line is None:
            raise
        path = ckpt_path()
        if path and line.startswith("ckpt_path: "):
            line = f"ckpt_path={path}{line.removeprefix('ckpt_path')}"
        elif path and path in line and "ckpt_path" not in line:
            line = f"ckpt_path: {line}"
        if isinstance(error, UsageError) and line == str(error):
            raise
        raise UsageError(line) from error


def _line(error: Exception) -> str | None:
    said = _flat(error)
    if isinstance(error, pl.utilities.exceptions.MisconfigurationException):
        return said
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        return f"{error.filename or 'a file of the run'}: {error.strerror}; free some space, or write to another disk"
    if type(error).__module__ == "torch.distributed" and not torch.distributed.is_initialized():
        return _no_start(said)
    if isinstance(error, RuntimeError) and said.startswith("Error(s) in loading state_dict"):
        return other_weights(said)
    if isinstance(error, RuntimeError) and re.match(r"DataLoader worker \(pid", said):
        return (
            f"num_workers: {said.partition(' It is possible')[0].rstrip('.')}; most often the host ran out of memory: "
            "set data.num_workers lower, or 0 to load in the process itself"
        )
    if isinstance(error, KeyError) and "Trying to restore" in said:
        return (
            "ckpt_path: the checkpoint holds weights and no optimizer state (save_weights_only), so fit cannot go on "
            "from it: give a checkpoint that was saved whole; validate, test and predict take this one"
        )
    return None


def _flat(error: Exception) -> str:
    said = error.args[0] if isinstance(error, KeyError) and error.args else error
    return re.sub(r"\s+", " ", str(said)).strip()


def _no_start(said: str) -> str:
    """The line for a failure of torch.distributed before all processes had met."""
    if "EADDRINUSE" in said:
        port = re.search(r"port: (\d+)", said)
        return (
            f"MASTER_PORT{f'={port[1]}' if port else ''}: another program listens on this port: set the environment "
            "variable MASTER_PORT to a free one, or unset it"
        )
    return (
        f"this process has waited in vain for the others to start ({said}): start all of them with the same "
        "command, or set trainer.strategy.init_args.timeout_seconds higher"
    )


def trainer_line(error: Exception, config: Mapping[str, Any]) -> str | None:
    """The line for an error by which Lightning's Trainer refused its arguments `config`; None for any other error."""
    said = _flat(error)
    if "SLURM" in said or "--ntasks" in said:
        return (
            f"SLURM_NTASKS={os.environ.get('SLURM_NTASKS')}: with this environment variable Lightning takes the run "
            f"for a job of SLURM, and refuses it ({said.partition(' HINT')[0].rstrip('.')}): start it with srun and "
            "--ntasks-per-node, or `unset SLURM_NTASKS` where there is no such job"
        )
    kinds = pl.utilities.exceptions.MisconfigurationException | ValueError | TypeError | ModuleNotFoundError
    if match := re.match(r"Found more than one stateful callback of type `(\w+)`", said):
        return (
            f"trainer.callbacks: {match[1]} stands twice, and its state can be saved once only: take one out; "
            "callbacks+ adds to those of the recipe, and --trainer.callbacks [...] replaces them"
        )
    if not isinstance(error, kinds):
        return None
    if isinstance(error, ModuleNotFoundError) and "torch_xla" in said:
        return (
            f"trainer.accelerator={config['accelerator']}: this machine has no TPU that torch can use: give cpu or auto"
        )
    if match := re.match(r"`\w+Accelerator` can not run on your system", said):
        return f"trainer.accelerator={config['accelerator']}: this machine has none: give cpu or auto"
    if "enable_checkpointing=False" in said:
        savers = [type(one).__name__ for one in config["callbacks"] or [] if isinstance(one, pl.callbacks.Checkpoint)]
        return (
            f"trainer.enable_checkpointing=False: {' and '.join(savers)} in trainer.callbacks saves checkpoints: leave "
            "enable_checkpointing out, or take the callback out"
        )
    if "FSDPPrecision" in said:  # Lightning names the class that FSDP1 wants, and not what to write
        said += ": set trainer.precision in place of the plugin, or shard with FSDP2 (FSDP2Strategy)"
    elif "invalid strategy name" in said:
        names = [cls.__name__ for cls in subclasses(pl.strategies.Strategy)]
        near = did_you_mean(config["strategy"], [*pl.strategies.StrategyRegistry.available_strategies(), *names])
        return f"trainer.strategy={config['strategy']}: no such strategy{near}"
    elif match := re.search(r"invalid accelerator name: `accelerator='(.*?)'`\. Available names are: (.*?)\.", said):
        names = [*match[2].split(", "), "gpu"]
        near = did_you_mean(match[1], names)
        return f"trainer.accelerator={match[1]}: no such accelerator{near or '; give one of ' + ', '.join(names)}"
    elif match := re.search(r"Trainer\(devices='?(.*?)'?\)|^(`devices`) selected with", said):
        return f"trainer.devices={config['devices']}: give the number of processes on this host, 1 or more, or auto"
    elif re.match(r"No supported gpu backend found", said):
        return "trainer.accelerator=gpu: this machine has no GPU that torch can use: give cpu or auto"
    elif match := re.search(r"Received both `precision=(.*?)` and `plugins=(.*?)\(\)`", said):
        return (
            f"trainer.precision={match[1]}: {match[2]} in trainer.plugins decides the precision: leave "
            f"trainer.precision out, or take {match[2]} out: --trainer.plugins null"
        )
    return f"trainer: {said}"
