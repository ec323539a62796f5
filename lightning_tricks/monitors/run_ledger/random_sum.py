"""Checksums of the random state of this process, in microseconds and without a wait for the device."""

import ctypes
import random
import zlib

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
        check = zlib.crc32(ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES))
    else:
        check = zlib.crc32(repr(generator.state).encode())
    return zlib.crc32(repr(random.getstate()[1][-9:]).encode(), check)


def _of_memory(state: torch.Tensor, check: int) -> int:
    return zlib.crc32(ctypes.string_at(state.data_ptr(), state.numel()), check)
