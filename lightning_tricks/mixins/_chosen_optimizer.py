"""What OptimizerMixin says of an optimizer when it is chosen: that it cannot work in this run, or what it does."""

from typing import Any

import torch

from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import pl, rank_zero_info
from lightning_tricks._trainer import is_a
from lightning_tricks.optim import ComposedOptimizer, MuonAdamW
from lightning_tricks.optim.follow_recipe import parts_of
from lightning_tricks.optim.limits import Place, refuse_limits

_KNOWN = ("torch", "lightning_tricks")  # packages whose optimizers are named without theirs


def refuse_for_run(optimizer: torch.optim.Optimizer, trainer: Any, module: Any) -> None:
    """Refuse an optimizer that is known not to work under the Trainer's strategy and precision, or in the module.

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


def say_whether_gradients_stay(optimizer: torch.optim.Optimizer) -> None:
    """Say of optimizers that clear the gradients within their step, as heavyball's do unless told otherwise."""
    for part in parts_of(optimizer):
        if getattr(part, "consume_grad", False):
            rank_zero_info(
                f"{type(part).__name__} clears each gradient in its step (consume_grad): monitors read them before it; "
                "a hook of yours that comes after the step finds None"
            )


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """The class as checkpoints name it, with its package, and with those that an optimizer is composed of.

    Two libraries have a SOAP each, and neither can take up the state of the other's.
    """
    package, name = type(optimizer).__module__.partition(".")[0], type(optimizer).__name__
    if isinstance(optimizer, ComposedOptimizer) and not isinstance(optimizer, MuonAdamW):
        return f"{name}({', '.join(f'{key}={name_of(part)}' for key, part in optimizer.optimizers.items())})"
    return name if package in _KNOWN else f"{package}.{name}"


def refuse_other(here: str, there: str) -> None:
    """Refuse to go on from the state of another optimizer.

    Args:
        here: of this run, as `name_of` gives it.
        there: of the checkpoint, likewise.

    Raises:
        UsageError: they differ.
    """
    if here != there:
        raise UsageError(
            f"the checkpoint holds the state of {there}, which {here} cannot take up: set the optimizer to "
            f"{there}, or start a new run from it with --init_from (InitFrom from Python), which keeps the weights "
            "and drops the optimizer's state, the schedule and the step"
        )
