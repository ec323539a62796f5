"""Sums over the bits of values, modulo 2**64: exact, the same in any order, and on the device without a wait.

A sum of floats hides a flipped low bit. Here the bits are read as integers and each integer has an odd factor: a change
of bit b changes the sum by 2**b times an odd number, which is never 0 modulo 2**64. Two changes of values with
different factors cancel each other only by chance, because the factors are random. Integer sums do not depend on their
order, so the sums of several processes add up to the sum of a single one.

From top to bottom: the factors and the sum of a tensor; the batch of a step; the weights, part by part; the optimizers'
state; the random state, by a checksum of its memory.
"""

import ctypes
import hashlib
import math
import random
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lightning_tricks._core.find_modules import clean_name, parameters_by_name, whole_of
from lightning_tricks._core.tensors import OverStages, local, tensors_in

MODULUS = 2**64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ARE_INTEGERS = set(_INTEGERS.values())
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
BASE = 0x2545F4914F6CDD1D  # odd; row i of a tensor, or of a global batch, has the factor BASE**i
SLICE = 1 << 17  # values of a tensor that are summed at a time
_KEPT = 32  # number of shapes whose factors are kept, for batches of varying length: 32 MiB at most
LEAST = 8192  # elements of a part at least: fewer take no less time
PER_TENSOR = 4096  # the fixed cost of a tensor, in elements that could be summed in the same time
ROW = 64  # elements that share a factor, at least
_MT19937_BYTES = 625 * 4  # 624 words, and the position in them


def salt(name: str) -> int:
    """A number of 64 bits for a name, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def signed(number: int) -> int:
    """The int64 with the bits of `number` modulo 2**64."""
    return (number + MODULUS // 2) % MODULUS - MODULUS // 2


def odd_factors(index: Tensor, salt: int) -> Tensor:
    """A random odd int64 for each number of `index`, a function of that number and the salt alone.

    The mixer is splitmix64, on the device of `index`.

    Source: Vigna's public-domain code, https://prng.di.unimi.it/splitmix64.c.
    """
    z = (index + signed(salt)) * signed(_GOLDEN)
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * signed(factor)  # the mask makes the shift unsigned
    return (z ^ ((z >> 31) & ((1 << 33) - 1))) | 1


def integers(tensor: Tensor) -> Tensor:
    """The bits of each element as an integer of its size, in the same memory; float64 and complex values as two.

    As one integer, the sign of a float64 would count 2**63, and two flipped signs would add up to 0 modulo 2**64.
    """
    if tensor.dtype in _ARE_INTEGERS:
        return tensor
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    if tensor.dtype == torch.float64:
        return (tensor if tensor.dim() else tensor.reshape(1)).contiguous().view(torch.int32)
    return tensor.view(_INTEGERS[tensor.element_size()])


def read(sums: Sequence[Tensor]) -> list[int]:
    """0-dim int64 tensors as numbers from 0 to 2**64 - 1, with one transfer for each device."""
    numbers = [0] * len(sums)
    for device in {each.device for each in sums}:
        places = [place for place, each in enumerate(sums) if each.device == device]
        for place, number in zip(places, torch.stack([sums[place] for place in places]).tolist(), strict=True):
            numbers[place] = number % MODULUS
    return numbers


def tensor_sum(tensor: Tensor, number: int = 0) -> Tensor:
    """The sum of a dense tensor that is not empty, a 0-dim int64 on its device.

    Each value has a factor for its row and one for its place in the row. The tensor is summed in slices, by blocks of
    places within the rows, and in each by blocks of rows: the factors take no more memory the larger it is, and are
    kept for tensors of the same shape.

    Args:
        tensor: its first dimension counts the rows.
        number: among the tensors of a batch; each has other factors.
    """
    bits = _by_rows(tensor)
    rows, columns, device = len(bits), bits[0].numel(), bits.device
    flat = bits.reshape(rows, columns) if bits.is_contiguous() else bits.flatten(1)
    width = min(columns, SLICE)
    height = min(rows, max(SLICE // width, 1))
    parts = []
    for left in range(0, columns, width):
        factors = _factors(height, left, min(left + width, columns), number, device)
        for first in range(0, rows, height):
            block = flat[first : first + height, left : left + width]
            part = (block * factors[: len(block)]).sum()
            parts.append(part * signed(pow(BASE, first, MODULUS)) if first else part)
    return torch.stack(parts).sum() if parts[1:] else parts[0]


def _by_rows(tensor: Tensor) -> Tensor:
    bits = integers(tensor)
    if bits.dim() < 2:
        bits = bits.reshape(tensor.shape[0] if tensor.dim() else 1, -1)  # a float64 is two integers of one row
    return bits


@lru_cache(maxsize=_KEPT)
def _factors(rows: int, first: int, end: int, number: int, device: torch.device) -> Tensor:
    """The factors of the columns from `first` to `end` in the first rows of a tensor, (rows, end - first)."""
    powers = torch.full((rows, 1), BASE, device=device)
    powers[0] = 1
    return powers.cumprod(0) * odd_factors(torch.arange(first, end, device=device), salt(f"tensor {number}"))


def batch_sums(batch: Any) -> tuple[list[Tensor], int]:
    """The sum of each tensor of a micro-batch, a 0-dim int64 on its device, and the number of rows.

    `step_sum` joins the sums of a step. The factor of a row is a power of BASE, so that each micro-batch is summed as
    if it were the first, and the host moves the sum to its place in the global batch later.
    """
    tensors = list(tensors_in(batch))
    sums = [tensor_sum(tensor, number) for number, tensor in enumerate(tensors)]
    return sums, len(_by_rows(tensors[0])) if tensors else 0


def step_sum(sums: list[int], rows: int, rank: int, world: int) -> int:
    """A rank's share of the sum of a step; the shares of all ranks, added modulo 2**64, are the sum of the step.

    Args:
        sums: of each micro-batch.
        rows: number of rows in a micro-batch. Those of micro-batch m begin at row `(m * world + rank) * rows` of the
            global batch.
        rank: among the processes that see different data.
        world: number of these processes.
    """
    places = ((number * world + rank) * rows for number in range(len(sums)))
    return sum(pow(BASE, place, MODULUS) * value for place, value in zip(places, sums, strict=True)) % MODULUS


def leading_dims(shape: torch.Size) -> int:
    """The number of leading dimensions whose index identifies a row; the values of a row share a factor.

    A row spans the last dimension, or as many of the last dimensions as hold 64 values, but never the first dimension.
    In a vector each value is a row; a 0-dim tensor has one row.
    """
    leading, length = len(shape), 1
    while leading > 1 and length < ROW:
        leading -= 1
        length *= shape[leading]
    return leading


class _Piece:
    """Rows of one parameter on this rank, as a slice of its first dimension, and a factor for each row.

    This rank `counts` them in `of_all`, unless another rank that holds a copy does.
    """

    def __init__(self, param: Tensor, first: int, end: int, factors: Tensor, counts: bool) -> None:
        self.param, self.first, self.end, self.factors, self.counts = param, first, end, factors, counts

    def row_sums(self) -> Tensor:
        """The sum of the integers of each row, (rows,)."""
        return self._integers(local(self.param).detach()).sum(1)

    def _integers(self, here: Tensor) -> Tensor:
        """The integers of each row in the parameter's memory, (rows, integers)."""
        if here.dim() < 2:
            return integers(here).reshape(here.numel(), -1)[self.first : self.end]  # a complex value is two
        rows = here[self.first : self.end]
        if here.dim() > 2:
            rows = rows.flatten(0, leading_dims(self.param.shape) - 1)
        return integers(rows).flatten(1)


class WeightSum:
    """The parameters of a module, cut into parts of consecutive rows with about equally many elements.

    All values of a row share one factor, so that a part is read once, and only one number a row is written. The price:
    two changes in one row that cancel each other in a plain sum are not seen. The factor follows from the row's index
    in the whole parameter and from the parameter's name, so that the parts and their sums do not depend on how the
    weights are sharded.

    Args:
        module: its parameters are on their devices.
        parts: largest number of parts; there are fewer if a part would have less than 8,192 elements.
        rank: of this process.
        first: rank of the first process with the same layers, which counts a parameter that all of them hold whole.

    Attributes:
        parts: number of parts, the same on every rank.
        recorded: whether there is a parameter that can be read.
        elements: number of weights on this rank.
        sharded: whether ranks may hold different weights.
        left_out: names of parameters whose bits cannot be read, such as those of a tensor subclass.
    """

    def __init__(self, module: nn.Module, parts: int, rank: int, first: int = 0) -> None:
        self.left_out: list[str] = []
        here = parameters_by_name(module)
        named = [(clean_name(name), param) for name, param in whole_of(module).named_parameters()]
        # of another pipeline stage: the one on the meta device, whose place is kept
        params = [(name, here.get(name, param)) for name, param in named if self._fits(name, here.get(name, param))]
        costs = [PER_TENSOR + param.numel() for _, param in params]
        self.parts = max(1, min(parts, sum(costs) // LEAST))
        self.recorded = len(params) > 0
        self.elements = sum(local(param).numel() for name, param in params if name in here)
        self.sharded = any(isinstance(param, DTensor) for _, param in params)
        self._pieces: list[list[_Piece]] = [[] for _ in range(self.parts)]
        before = 0
        for (name, param), cost in zip(params, costs, strict=True):
            if name in here and getattr(param, "over_stages", OverStages(None, True)).counts:
                self._cut(name, param, before / sum(costs), cost / sum(costs), rank, first)
            before += cost
        self._joined = [self._factors_by_device(pieces) for pieces in self._pieces]

    def _fits(self, name: str, param: Tensor) -> bool:
        if is_lazy(param) or type(local(param).detach()) is not Tensor or hasattr(param, "ds_tensor"):
            self.left_out.append(clean_name(name))
            return False
        return param.numel() > 0

    def _cut(self, name: str, param: Tensor, start: float, share: float, rank: int, first_rank: int) -> None:
        """Add this rank's rows of a parameter, whose cost is `share` of the whole after `start`, to their parts."""
        offsets, counts = _shard_offsets(param, rank, first_rank)
        slices = param.shape[0] if param.dim() else 1
        here = local(param).shape[0] if param.dim() else 1
        cuts = [math.ceil((part / self.parts - start) / share * slices) for part in range(self.parts)]
        for pieces, low, high in zip(self._pieces, cuts, [*cuts[1:], slices], strict=True):
            first, end = max(low - offsets[0], 0), min(high - offsets[0], here)
            if first < end and local(param).numel():
                factors = odd_factors(_row_index(param, offsets, first, end), salt(name))
                pieces.append(_Piece(param, first, end, factors, counts))

    @staticmethod
    def _factors_by_device(pieces: list[_Piece]) -> dict[torch.device, tuple[list[_Piece], Tensor]]:
        devices = dict.fromkeys(piece.factors.device for piece in pieces)
        found = {device: [piece for piece in pieces if piece.factors.device == device] for device in devices}
        return {device: (own, torch.cat([piece.factors for piece in own])) for device, own in found.items()}

    def of_part(self, part: int, device: torch.device) -> Tensor:
        """The sum over this rank's rows of a part, copies included: an int64 on `device`."""
        totals = []
        for own, factors in self._joined[part].values():
            rows = torch.cat([piece.row_sums() for piece in own]) if own[1:] else own[0].row_sums()
            totals.append((rows * factors).sum())
        if len(totals) == 1:
            return totals[0]
        zero = torch.zeros((), dtype=torch.int64, device=device)
        return sum((each.to(device, non_blocking=True) for each in totals), zero)

    def of_all(self, device: torch.device) -> Tensor:
        """The sum over all rows that this rank counts; over all ranks together, each row counts once."""
        result = torch.zeros((), dtype=torch.int64, device=device)
        for piece in (piece for pieces in self._pieces for piece in pieces if piece.counts):
            result += (piece.row_sums() * piece.factors).sum().to(device)
        return result


def _shard_offsets(param: Any, rank: int, first: int) -> tuple[list[int], bool]:
    """Where this rank's shard begins in the whole parameter, by dimension, and whether this rank counts it."""
    if not isinstance(param, DTensor):
        return [0] * max(param.dim(), 1), rank == first
    (chunk,) = param.__create_chunk_list__()
    coordinate = param.device_mesh.get_coordinate() or [0] * param.device_mesh.ndim
    copies = [index for index, placed in zip(coordinate, param.placements, strict=True) if placed.is_replicate()]
    # a mesh of fewer ranks than there are, such as of one tensor rank: the others hold the same
    is_first = int(param.device_mesh.mesh.min()) == first
    return list(chunk.offsets) or [0], is_first and not any(copies)


def _row_index(param: Tensor, offsets: list[int], first: int, end: int) -> Tensor:
    """Index in the whole parameter of each row of a slice of this rank's shard."""
    here = local(param)
    if here.dim() < 2:
        return torch.arange(first + offsets[0], end + offsets[0], device=here.device)
    index = torch.zeros(1, dtype=torch.int64, device=here.device)
    for dim in range(leading_dims(param.shape)):
        low, high = (first, end) if dim == 0 else (0, here.shape[dim])
        here_index = torch.arange(low + offsets[dim], high + offsets[dim], device=here.device)
        index = (index[:, None] * param.shape[dim] + here_index).flatten()
    return index


def optimizer_sum(optimizers: Sequence[Any], module: nn.Module, scaler: Any, device: torch.device) -> Tensor:
    """A sum over this rank's optimizer state and settings, the module's buffers and the scaler: an int64 on `device`.

    Numbers and texts count with their names; objects of other classes do not.
    """
    sums, words = [torch.zeros((), dtype=torch.int64, device=device)], 0

    def add(name: str, value: Any) -> None:
        nonlocal words
        if isinstance(value, Tensor) and type(value := local(value).detach()) is not Tensor:  # such as one of 8 bits
            inner = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else ()
            add(name, {each: getattr(value, each) for each in inner})
        elif isinstance(value, Tensor):
            if value.numel():
                sums.append((tensor_sum(value) * signed(salt(name) | 1)).to(device, non_blocking=True))
        elif isinstance(value, Mapping):
            for key, part in value.items():
                add(f"{name}.{key}", part)
        elif isinstance(value, list | tuple):
            add(name, dict(enumerate(value)))
        elif isinstance(value, bool | int | float | complex | str | None):
            words += salt(f"{name}={value!r}")

    for number, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            add(f"{number}.{index}", {name: value for name, value in group.items() if name != "params"})
            states = [optimizer.state.get(param, {}) for param in group["params"]]
            add(f"{number}.{index}.state", states)
    add("buffers", {clean_name(name): buffer for name, buffer in module.named_buffers()})
    add("scaler", {name: value for name, value in vars(scaler).items() if isinstance(value, Tensor)} if scaler else {})
    return torch.stack(sums).sum() + signed(words)


def torch_random_sum(device: torch.device) -> int:
    """CRC-32 of the states of torch's generators: the CPU's, and a CUDA device's, which is kept on the host too."""
    check = _of_memory(torch.default_generator.get_state(), 0)
    if device.type == "cuda":
        check = _of_memory(torch.cuda.default_generators[device.index or 0].get_state(), check)
    return check


def other_random_sum() -> int:
    """CRC-32 of the states of NumPy's and Python's global generators.

    Of Python's state, only the index and the last eight of its 624 words: no two states of one generator's sequence
    have these in common.
    """
    generator = get_bit_generator()
    if isinstance(generator, np.random.MT19937):  # its state as a dictionary takes a hundred microseconds
        check = zlib.crc32((ctypes.c_char * _MT19937_BYTES).from_address(generator.ctypes.state_address))
    else:
        check = zlib.crc32(repr(generator.state).encode())
    return zlib.crc32(repr(random.getstate()[1][-9:]).encode(), check)


def _of_memory(state: Tensor, check: int) -> int:
    return zlib.crc32((ctypes.c_char * state.numel()).from_address(state.data_ptr()), check)
