"""A checksum of the random state of this process, in microseconds and without a wait for the device."""

import ctypes
import random
import zlib

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator


def random_sum(device: torch.device) -> int:
    """CRC-32 of the states of torch's generators (the CPU's and that of a CUDA device), of NumPy's and of Python's.

    Of Python's generator the index and the last eight of its 624 words: they come from one sequence, so that no other
    state has them. A CUDA generator's state, seed and offset, lies on the host.
    """
    check = _of_memory(torch.default_generator.get_state(), 0)
    if device.type == "cuda":
        check = _of_memory(torch.cuda.default_generators[device.index or 0].get_state(), check)
    generator = get_bit_generator()
    if isinstance(generator, np.random.MT19937):  # its state as a dictionary takes a hundred microseconds
        size = 625 * 4  # 624 words, and the position in them
        check = zlib.crc32(ctypes.string_at(generator.ctypes.state_address, size), check)
    else:
        check = zlib.crc32(repr(generator.state).encode(), check)
    return zlib.crc32(repr(random.getstate()[1][-9:]).encode(), check)


def _of_memory(state: torch.Tensor, check: int) -> int:
    return zlib.crc32(ctypes.string_at(state.data_ptr(), state.numel()), check)
