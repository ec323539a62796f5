"""Checks and log lines of OptimizerMixin for the optimizer of a run, and the optimizer's name in checkpoints."""

from typing import Any

import torch

from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import pl, rank_zero_info
from lightning_tricks._trainer import is_a
from lightning_tricks.optim import ComposedOptimizer, MuonAdamW
from lightning_tricks.optim.keep_settings_on_load import parts_of
from lightning_tricks.optim.limits import Place, refuse_limits

_KNOWN = ("torch", "lightning_tricks")  # packages that `name_of` leaves out


def refuse_for_run(optimizer: torch.optim.Optimizer, trainer: Any, module: Any) -> None:
    """Refuse an optimizer that is known not to work with the Trainer's strategy or precision, or with the module.

    Raises:
        UsageError: see `LIMITS`.
    """
    strategy, places = trainer.strategy, list[Place]()
    if is_a(strategy, "ModelParallelStrategy"):
        places.append("shards")
    if is_a(strategy, "DeepSpeedStrategy", "FSDPStrategy"):
        places.append("flat parameters")
    if is_a(trainer.precision_plugin, "BF16True"):
        places.append("BF16True")
    if module.automatic_optimization and type(module).backward is pl.LightningModule.backward:
        places.append("first derivatives")
    refuse_limits(optimizer, *places)


def log_cleared_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Log that an optimizer clears the gradients within its step, as heavyball's do by default."""
    for part in parts_of(optimizer):
        if getattr(part, "consume_grad", False):
            rank_zero_info(
                f"{type(part).__name__} clears each gradient in its step (consume_grad): monitors read them before it; "
                "a hook of yours that comes after the step finds None"
            )


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """The name of an optimizer in checkpoints: its class, its package, and the optimizers that it is composed of.

    The package matters: two libraries have a SOAP each, and neither can load the state of the other's.
    """
    package, name = type(optimizer).__module__.partition(".")[0], type(optimizer).__name__
    if isinstance(optimizer, ComposedOptimizer) and not isinstance(optimizer, MuonAdamW):
        return f"{name}({', '.join(f'{key}={name_of(part)}' for key, part in optimizer.optimizers.items())})"
    return name if package in _KNOWN else f"{package}.{name}"


def refuse_other(here: str, there: str) -> None:
    """Refuse to resume from the state of another optimizer.

    Args:
        here: `name_of` this run's optimizer.
        there: `name_of` the checkpoint's.

    Raises:
        UsageError: they differ.
    """
    if here != there:
        raise UsageError(
            f"the checkpoint holds the state of {there}, which {here} cannot take up: set the optimizer to "
            f"{there}, or start a new run from it with --init_from (InitFrom from Python), which keeps the weights "
            "and drops the optimizer's state, the schedule and the step"
        )
