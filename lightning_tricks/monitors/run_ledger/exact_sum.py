"""Sums over the bits of a tensor, modulo 2**64: exact, the same in any order, and on the device without a wait.

A sum of floats hides a flipped low bit. Here the bits are read as integers and each integer has an odd factor: a change
of bit b changes the sum by 2**b times an odd number, which is never 0 modulo 2**64. Two changes of values with
different factors cancel each other only by chance, because the factors are random. Integer sums do not depend on their
order, so the sums of several processes add up to the sum of a single one.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

MODULUS = 2**64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ARE_INTEGERS = set(_INTEGERS.values())
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


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


def total(numbers: Tensor, factors: Tensor) -> Tensor:
    """The sum of `numbers` times `factors`, of one shape and the latter int64, as a 0-dim int64."""
    if numbers.dtype == torch.int64 and numbers.device.type == "cpu":
        return numbers.reshape(-1).dot(factors.reshape(-1))  # one call; other devices have no dot of integers
    return (numbers * factors).sum()


def read(sums: Sequence[Tensor]) -> list[int]:
    """0-dim int64 tensors as numbers from 0 to 2**64 - 1, with one transfer for each device."""
    numbers = [0] * len(sums)
    for device in {each.device for each in sums}:
        places = [place for place, each in enumerate(sums) if each.device == device]
        for place, number in zip(places, torch.stack([sums[place] for place in places]).tolist(), strict=True):
            numbers[place] = number % MODULUS
    return numbers
