"""Whether the numbers of a module are finite, decided on their device: one tensor to read for all of them."""

from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import get_total_norm

from lightning_tricks._core.tensors import local

_RUNNING_STATISTICS = ("running_mean", "running_var")  # of every kind of batch and instance normalization


def numbers_of(module: nn.Module, buffers: Collection[str] = ()) -> Iterator[Tensor]:
    """What must be finite in a module: its parameters, its running statistics, and further buffers by their names.

    Those are `finite_buffers(module)` when training began. Others may hold infinities by design, as masks do.
    """
    yield from module.parameters()
    for name, buffer in module.named_buffers():
        if name in buffers or _is_running_statistic(name):
            yield buffer


def finite_buffers(module: nn.Module) -> set[str]:
    """The names of the floating buffers that a checkpoint holds and that are finite now, without running statistics.

    Reads the device once for each.
    """
    saved = {
        f"{prefix}.{name}" if prefix else name
        for prefix, owner in module.named_modules()
        for name in {*owner._buffers.keys()} - owner._non_persistent_buffers_set  # of a ScriptModule a list
    }
    floating = {
        name: buffer
        for name, buffer in module.named_buffers()
        if name in saved and not _is_running_statistic(name) and (buffer.is_floating_point() or buffer.is_complex())
    }
    return {name for name, buffer in floating.items() if not is_lazy(buffer) and not float(not_finite([buffer]))}


def _is_running_statistic(name: str) -> bool:
    return name.rpartition(".")[2] in _RUNNING_STATISTICS


def not_finite(numbers: Iterable[Tensor]) -> Tensor:
    """1.0 where one of this process's numbers is NaN or infinite, else 0.0; shape (), on their device.

    Of a DTensor or of a weight that DeepSpeed has partitioned, the part on this rank counts; add the values of all
    ranks.
    """
    # the largest absolute value: a norm that cannot overflow where no number is infinite, and that is NaN if one is NaN
    norm = get_total_norm(_parts(numbers), norm_type=float("inf"))
    return 1.0 - norm.isfinite().float()


@torch.no_grad()
def _parts(numbers: Iterable[Tensor]) -> list[Tensor]:
    """The numbers on this rank, each as a real tensor; not those of one byte, nor of sparse and nested tensors."""
    parts = []
    for number in numbers:
        if is_lazy(number):  # it has none yet
            continue
        part = local(getattr(number, "ds_tensor", number)).detach()
        if part.is_nested or part.layout != torch.strided or part.itemsize == 1 or part.numel() == 0:
            continue
        part = torch.view_as_real(part) if part.is_complex() else part
        if part.is_floating_point():
            parts.append(part)
    return parts
