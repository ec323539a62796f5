"""What FSDP2Strategy does not take, each told in one line before anything is sent."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from lightning_tricks._errors import UsageError
from lightning_tricks._trainer import is_a

# Their state or their arithmetic does not take DTensors, as tried with torch 2.13.
NO_DTENSORS = {"Adafactor": "AdamW", "AdamWFp8": "AdamW8bit", "SOAP": "Muon or AdamW"}


def refuse_fsdp1(module: nn.Module) -> None:
    """Refuse a module that FSDP1 has flattened parts of.

    Raises:
        UsageError: as said.
    """
    if any(is_a(part, "FullyShardedDataParallel") for part in module.modules()):
        raise UsageError(
            f"{type(module).__name__} wraps parts of itself in FullyShardedDataParallel (FSDP1): "
            "leave the sharding to FSDP2Strategy"
        )


def refuse_optimizers(optimizers: Sequence[Any]) -> None:
    """Refuse optimizers that take no DTensors, by the names of their classes.

    Raises:
        UsageError: as said, with one that does.
    """
    for optimizer in optimizers:
        for cls in type(optimizer).__mro__:
            if cls.__name__ in NO_DTENSORS:
                raise UsageError(
                    f"{cls.__name__} does not work on sharded parameters: take {NO_DTENSORS[cls.__name__]}, "
                    "or strategy: ddp"
                )


def refuse_late_parameters(module: nn.Module) -> None:
    """Refuse a parameter that was made after sharding, which would stay different on each rank.

    Raises:
        UsageError: by its name.
    """
    late = [name for name, parameter in module.named_parameters() if not isinstance(parameter, DTensor)]
    if late:
        raise UsageError(
            f"parameter '{late[0]}' was made after sharding: make it in __init__ or configure_model, "
            "where FSDP2Strategy sees it"
        )
