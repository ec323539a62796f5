"""Copy a checkpoint to host memory, so that training may go on while it is written."""

import io
import pickle
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Kind = tuple[int, bool]  # bytes of a buffer, and whether it is page-locked


class HostBuffers:
    """Host memory, as much as the last snapshot took; page-locked for copies from a GPU, which are then at full speed.

    Fresh memory is slow, page-locked or not, so the next snapshot gets the same. torch's own allocator of page-locked
    memory is not used: it rounds each size up to a power of two.
    """

    def __init__(self) -> None:
        self._used: list[tuple[Kind, Tensor]] = []
        self._free: dict[Kind, list[Tensor]] = {}

    def restart(self) -> None:
        """Offer the last snapshot's buffers to the next one; free the buffers that the last one did not take."""
        self._free = {}
        for kind, buffer in self._used:
            self._free.setdefault(kind, []).append(buffer)
        self._used = []

    def take(self, size: int, locked: bool) -> Tensor:
        """A buffer of `size` bytes, (size,) uint8, page-locked or not.

        Raises:
            RuntimeError: the operating system locks no more memory.
        """
        if free := self._free.get((size, locked)):
            buffer = free.pop()
        elif locked:
            buffer = _pinned(size)
        else:
            buffer = torch.empty(size, dtype=torch.uint8)
        self._used.append(((size, locked), buffer))
        return buffer

    def reserve(self, kinds: Sequence[Kind]) -> None:
        """Take buffers for the next snapshot and touch their memory, so that the operating system has it ready.

        Raises:
            RuntimeError: the operating system locks no more memory.
        """
        for size, locked in kinds:
            self.take(size, locked).zero_()


def kinds_of(tensors: Iterable[Tensor]) -> list[Kind]:
    """The buffers that a snapshot of these tensors takes, of DTensors for the part of this process."""
    found = {}
    for tensor in tensors:
        for part in _parts(tensor):
            storage = part.untyped_storage()
            if storage.nbytes():
                key = (storage.device, storage.data_ptr(), storage.nbytes())
                found[key] = (storage.nbytes(), storage.device.type == "cuda")
    return list(found.values())


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors of this process's memory that a tensor, or a wrapper such as a DTensor, consists of."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, Tensor):
                yield from _parts(part)
    elif type(tensor) in (Tensor, nn.Parameter) and _lies_in_memory(tensor):
        yield tensor


def _pinned(size: int) -> Tensor:
    buffer = torch.empty(size, dtype=torch.uint8)
    runtime = torch.cuda.cudart()
    error = int(runtime.cudaHostRegister(buffer.data_ptr(), size, 1))  # 1: for every GPU of the process
    if error:
        raise RuntimeError(
            f"{size:,} bytes of host memory cannot be page-locked (CUDA error {error}): give the job more memory, or "
            "set asynchronous to False"
        )
    weakref.finalize(buffer, runtime.cudaHostUnregister, buffer.data_ptr()).atexit = False
    return buffer


def snapshot(tree: Any, buffers: HostBuffers | None = None) -> Any:
    """A copy of nested state that training cannot change; all tensors are on the host.

    Every tensor is copied, also those on the CPU (AdamW's `step`, the state of generators), and every other object as
    saving and loading would copy it. Tensors that share memory share it in the copy, so tied weights stay one entry of
    the file. DTensors and other wrappers keep their class, with copies of the tensors in them.

    Copies from a GPU follow the work queued on its current stream. The function waits for them, once, and not for
    other streams.

    Args:
        tree: any object that pickle can save.
        buffers: for the copies. The next snapshot with the same buffers overwrites this one.
    """
    found = _Pickler(pickled := io.BytesIO())
    found.dump(tree)
    pickled.seek(0)
    # a save may fall into validation, and a tensor made in inference mode could not be written again outside of it
    with torch.inference_mode(False), torch.no_grad():
        copies = _Copies(buffers)
        unpickler = _Unpickler(pickled, [copies.of(tensor) for tensor in found.tensors])
        copies.wait()
        return unpickler.load()


class _Pickler(pickle.Pickler):
    """Pickles a number in the place of each tensor, wherever an object holds it."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        """The number of a tensor, which pickle then writes; None for every other object, which it writes as ever."""
        if not isinstance(value, Tensor):
            return None
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.tensors)
            self.tensors.append(value)  # held here, so no other tensor can get its id
        return self._numbers[id(value)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        return self._tensors[number]


class _Copies:
    """The copies of one snapshot: each piece of memory is copied once, whole, however many tensors lie in it."""

    def __init__(self, buffers: HostBuffers | None) -> None:
        self._buffers = buffers
        self._storages: dict[tuple[torch.device, int, int], Tensor] = {}  # by device, address and bytes
        if buffers is not None:
            buffers.restart()

    def of(self, tensor: Tensor) -> Tensor:
        if hasattr(tensor, "__tensor_flatten__"):  # torch's protocol of wrappers, such as DTensor
            names, context = tensor.__tensor_flatten__()
            parts = {name: getattr(tensor, name) for name in names}  # of a DTensor also its mesh, since torch 2.13
            inner = {name: self.of(part) if isinstance(part, Tensor) else part for name, part in parts.items()}
            return type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())  # type: ignore[attr-defined]
        if type(tensor) not in (Tensor, nn.Parameter) or not _lies_in_memory(tensor):
            return tensor.detach().to("cpu", copy=True)
        copy = torch.empty(0, dtype=tensor.dtype)
        copy.set_(self._storage(tensor).untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
        if isinstance(tensor, nn.Parameter):
            copy = nn.Parameter(copy, tensor.requires_grad)
        return copy

    def _storage(self, tensor: Tensor) -> Tensor:
        """The bytes of the memory in which a tensor lies, on the host."""
        storage = tensor.untyped_storage()
        key = (storage.device, storage.data_ptr(), storage.nbytes())
        if key not in self._storages:
            source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            buffers = self._buffers if len(source) else None
            locked = source.is_cuda and buffers is not None
            copy = torch.empty(len(source), dtype=torch.uint8) if buffers is None else buffers.take(len(source), locked)
            self._storages[key] = copy.copy_(source, non_blocking=locked)
        return self._storages[key]

    def wait(self) -> None:
        """Return when the copies from GPUs are there."""
        for device in {device for device, _, _ in self._storages if device.type == "cuda"}:
            event = torch.cuda.Event(blocking=True)
            event.record(torch.cuda.current_stream(device))
            event.synchronize()


def _lies_in_memory(tensor: Tensor) -> bool:
    """Whether a tensor is a view of one piece of memory, bit for bit."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )
