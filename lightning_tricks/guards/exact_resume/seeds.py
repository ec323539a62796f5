"""Random numbers of a loader as a function of the batch: they do not depend on the batches before it.

A loader's dataset draws from the process's global generators (torch, NumPy, Python) and from generators that it holds
itself. Seeding all of them anew for each batch makes a batch the same in whatever process it is made, at whatever time.
"""

import hashlib
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from lightning_tricks._random_state import seed_numpy

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
_DEPTH = 4  # a dataset that wraps a dataset with a list of transforms, one of which holds a generator
_OBJECTS = 500  # looked into; more of them are data


def number_of(*key: Any) -> int:
    """64 bits that depend on every part of a key of numbers and names."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest())


def seed_process(seed: int, generators: Iterable[Generator] = ()) -> None:
    """Seed the global generators of this process, and some others. CUDA's are left alone: they are the model's."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    seed_numpy(seed)
    for generator in generators:
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        elif isinstance(generator, random.Random):
            generator.seed(seed)
        else:
            bits = cast(Any, generator)._bit_generator  # of both classes of NumPy; its public name is of one only
            bits.state = type(bits)(seed).state


@contextmanager
def own_randomness(seed: int, generators: Iterable[Generator] = ()) -> Iterator[None]:
    """Seed the global generators inside the `with`, and put their states back afterwards.

    NumPy's generator is exchanged for another one: to read its state would take more time than all the rest.
    """
    torch_state, python_state, numpy_generator = torch.get_rng_state(), random.getstate(), get_bit_generator()
    set_bit_generator(np.random.MT19937())
    try:
        seed_process(seed, generators)
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        set_bit_generator(numpy_generator)


def generators_of(holder: Any) -> list[Generator]:
    """Generators in the attributes of an object, of its attributes and of its lists' members, in a fixed order."""
    found: list[Generator] = []
    seen: list[Any] = []  # the objects themselves, because an id may be used again

    def look(value: Any, depth: int) -> None:
        if isinstance(value, Generator):
            if all(value is not other for other in found):
                found.append(value)
        elif isinstance(value, list | tuple) and len(value) <= 64:
            for member in value:
                look(member, depth)
        elif depth and _may_hold(value) and len(seen) < _OBJECTS and all(value is not other for other in seen):
            seen.append(value)
            for attribute in list(vars(value).values()):
                look(attribute, depth - 1)

    look(holder, _DEPTH)
    return found


def _may_hold(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, type | torch.Tensor | torch.nn.Module)
