"""Run a function that changes a tensor in place, element by element: on CUDA as one kernel, elsewhere in pieces."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# elements computed at once: where not compiled, a temporary tensor takes 64 MiB in fp32; on a CPU 256 KiB, which stay
# in the cache of a core
CHUNK, CHUNK_ON_CPU = 1 << 24, 1 << 16

InPlace = Callable[..., None]
Numbers = Callable[[int], Sequence[Any]]
_found: dict[tuple[InPlace, torch.device], InPlace] = {}


def in_place(function: InPlace, tensors: Sequence[Tensor], numbers: Numbers, who: str) -> None:
    """`function(*tensors, *numbers(0))`, with little memory beside them; it changes the first tensor.

    Args:
        function: of tensors of one shape and of numbers, the same for each element.
        tensors: on one device.
        numbers: 0-dim tensors or None, for the chunk that begins at this element. A float would be compiled in.
        who: names the trick in the warning that compiling fails.
    """
    if not all(tensor.is_contiguous() for tensor in tensors):
        function(*tensors, *numbers(0))
        return
    run = _kernel(function, tensors, numbers, who)
    flat = [tensor.view(-1) if run is function else _plain(tensor) for tensor in tensors]
    chunk = CHUNK_ON_CPU if tensors[0].device.type == "cpu" else CHUNK
    for index, parts in enumerate(zip(*(tensor.split(chunk) for tensor in flat), strict=True)):
        run(*parts, *numbers(index * chunk))
    torch.autograd.graph.increment_version(tensors[0])  # whoever keeps something that was computed from it can see


def _kernel(function: InPlace, tensors: Sequence[Tensor], numbers: Numbers, who: str) -> InPlace:
    """`function`, on CUDA compiled, which moves each element once; eager kernels move all of them several times."""
    device = tensors[0].device
    if device.type != "cuda":
        return function
    if (function, device) not in _found:
        _found[function, device] = compiled = torch.compile(function, dynamic=True)
        try:
            compiled(*(torch.zeros(3, dtype=tensor.dtype, device=device) for tensor in tensors), *numbers(0))
        except Exception as error:  # no Triton, no C compiler, ...: a faster step is not worth the run
            warnings.warn(f"{who}: torch.compile fails here, so slower kernels run: {error}", stacklevel=2)
            _found[function, device] = function
    return _found[function, device]


def _plain(tensor: Tensor) -> Tensor:
    """The same numbers in one dimension, but no view of a parameter, for each shape of which torch would compile."""
    return tensor.new_empty(0).set_(tensor.untyped_storage(), tensor.storage_offset(), (tensor.numel(),), (1,))
