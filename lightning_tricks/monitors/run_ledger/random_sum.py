"""Checksums of the random state of this process, in microseconds and without a wait for the device."""

import ctypes
import random
import sys
import zlib
from functools import cache

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator

_MT19937_BYTES = 625 * 4  # 624 words, and the position in them


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
    return zlib.crc32(repr(_end_of_python_state()).encode(), check)


def _of_memory(state: torch.Tensor, check: int) -> int:
    return zlib.crc32((ctypes.c_char * state.numel()).from_address(state.data_ptr()), check)


class _Python(ctypes.Structure):
    """The beginning of CPython's generator object (`Modules/_randommodule.c`), behind the object's header."""

    _fields_ = (("index", ctypes.c_int), ("words", ctypes.c_uint32 * 624))


def _end_of_python_state() -> tuple[int, ...]:
    """The last eight words of Python's global generator, and its index.

    `random.getstate()` makes 625 Python numbers, a tenth of what a step's line costs.
    """
    if not _is_as_read():
        return tuple(random.getstate()[1][-9:])
    state = _in_memory()
    return (*state.words[-8:], state.index)


def _in_memory() -> _Python:
    return _Python.from_address(id(random._inst) + object.__basicsize__)


@cache
def _is_as_read() -> bool:
    """Whether this Python's generator has its state where it is looked for; another one may have it elsewhere."""
    own = getattr(random, "_inst", None)
    if sys.implementation.name != "cpython" or type(own) is not random.Random:
        return False
    if type(own).__basicsize__ < object.__basicsize__ + ctypes.sizeof(_Python):
        return False
    state = _in_memory()
    return (*state.words, state.index) == tuple(random.getstate()[1])
