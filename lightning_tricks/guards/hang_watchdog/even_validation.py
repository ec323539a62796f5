"""The numbers of validation batches, compared over the ranks before a validation that would hang."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lightning_tricks._errors import UsageError


def communicates(model: nn.Module) -> bool:
    """Whether the forward of a model needs all ranks.

    FSDP2, tensor parallelism, FSDP1 and DeepSpeed's stage 3 gather weights; DDP broadcasts buffers, if there are any.
    """
    if any(isinstance(parameter, DTensor) or hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return True
    if isinstance(model, DistributedDataParallel):
        return bool(model.will_sync_module_buffers())
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def uneven(lengths: Sequence[Sequence[float]]) -> str | None:
    """The error where ranks have different numbers of validation batches; None where they are equal.

    Args:
        lengths: of each rank, the number of batches of each loader; infinite where a loader has no length.
    """
    if all(own == lengths[0] for own in lengths):
        return None
    numbers = {rank: ", ".join("unknown" if n == float("inf") else str(n) for n in own) for rank, own in
               enumerate(lengths)}  # fmt: skip
    common = max(numbers.values(), key=list(numbers.values()).count)
    others = [f"rank {rank}: {text}" for rank, text in numbers.items() if text != common]
    first = next(rank for rank, text in numbers.items() if text == common)
    shown = ", ".join([f"rank {first}: {common}", *others[:7]])
    smallest = int(min(min(own, default=0) for own in lengths))
    return (
        f"val_dataloaders: the ranks have different numbers of validation batches ({shown}), and the validation would "
        "hang, because the model's forward needs all ranks: give every rank the same number, such as by "
        f"Trainer.limit_val_batches={smallest}"
    )


def check_lengths(trainer: Any) -> None:
    """Compare the lengths, in one collective; every rank must call.

    Raises:
        UsageError: they differ; on every rank.
    """
    if trainer.world_size == 1 or not (dist.is_available() and dist.is_initialized()):
        return
    if not communicates(trainer.strategy.model or trainer.lightning_module):
        return
    lengths: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lengths, list(trainer.num_val_batches))
    if (line := uneven(lengths)) is not None:
        raise UsageError(line)
