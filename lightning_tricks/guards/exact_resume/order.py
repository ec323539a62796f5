"""The order in which a loader's sampler serves the rows, replayed from the start of a pass without loading a row."""

import random
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from lightning_tricks._random_state import plain, with_arrays
from lightning_tricks._trainer import is_a
from lightning_tricks.guards.exact_resume.seeds import Generator, number_of, own_randomness

# These draw random numbers at the start of a pass only, so they need no seed for each batch.
_KNOWN = ("torch.", "lightning.", "lightning_fabric.", "pytorch_lightning.", "builtins")
_END = object()


class Order:
    """A sampler that serves what another one does, from batch `skip` on, and draws no random number of the run's.

    Args:
        loader: its batch sampler is served, or its sampler if it makes no batches.
        seed: the random numbers that the sampler draws depend on it and on the number of the batch.
        skip: batches to pass over.
    """

    def __init__(self, loader: DataLoader, seed: int, skip: int) -> None:
        self.sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self.foreign = any(not type(sampler).__module__.startswith(_KNOWN) for sampler in samplers_of(loader))
        self.seed, self.skip = seed, skip

    def __iter__(self) -> Iterator[Any]:
        served = self._serve()
        for _ in range(self.skip):
            next(served, None)
        yield from served

    def _serve(self) -> Iterator[Any]:
        with own_randomness(self.seed):
            iterator = iter(self.sampler)
            indices = next(iterator, _END)
        number = 0
        while indices is not _END:
            yield indices
            number += 1
            with own_randomness(number_of(self.seed, number)) if self.foreign else nullcontext():
                indices = next(iterator, _END)


def samplers_of(loader: DataLoader) -> list[Any]:
    """The samplers of a loader and those inside them, in a fixed order; none for an IterableDataset."""
    found: list[Any] = []
    waiting: list[Any] = [loader.batch_sampler, loader.sampler]
    while waiting:
        sampler = waiting.pop()
        if not hasattr(sampler, "__dict__") or any(sampler is other for other in found):
            continue
        found.append(sampler)
        # Lightning shards a sampler of the user's through this dataset
        inside = [v for v in vars(sampler).values() if isinstance(v, Sampler) or is_a(v, "_DatasetSamplerWrapper")]
        waiting += inside
    return found


def sampler_state(loader: DataLoader) -> list[dict[str, Any]]:
    """What the next pass over a loader depends on: numbers (such as an epoch) and generators of its samplers."""
    states = []
    for holder in (loader, *samplers_of(loader)):
        attributes = {"generator": loader.generator} if holder is loader else vars(holder)
        state = {name: _state(value) for name, value in attributes.items() if _is_state(value)}
        if hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict") and holder is not loader:
            state[""] = holder.state_dict()
        states.append(state)
    return states


def takes_sampler_state(loader: DataLoader, states: list[dict[str, Any]]) -> bool:
    """Whether `set_sampler_state` can put a state back: there are as many samplers, with the same generators."""
    holders = (loader, *samplers_of(loader))
    return len(holders) == len(states) and all(
        _takes(holder, name, value)
        for holder, state in zip(holders, states, strict=True)
        for name, value in state.items()
    )


def _takes(holder: Any, name: str, value: Any) -> bool:
    if name == "":
        return hasattr(holder, "load_state_dict")
    now = getattr(holder, name, None)
    return not isinstance(value, dict) or (isinstance(now, Generator) and _state(now).keys() == value.keys())


def set_sampler_state(loader: DataLoader, states: list[dict[str, Any]]) -> None:
    """Put the state of `sampler_state` back; `takes_sampler_state` has to be true."""
    for holder, state in zip((loader, *samplers_of(loader)), states, strict=True):
        for name, value in state.items():
            if name == "":
                holder.load_state_dict(value)
            elif isinstance(value, dict):
                _set_generator(getattr(holder, name), value)
            else:
                setattr(holder, name, value)


def _is_state(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | Generator)


def _state(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return {"torch": value.get_state()}
    if isinstance(value, random.Random):
        version, words, gauss = value.getstate()
        return {"python": [version, list(words), gauss]}
    if isinstance(value, np.random.Generator):
        return {"numpy": plain(value.bit_generator.state)}
    return {"numpy": plain(value.get_state(legacy=False))} if isinstance(value, np.random.RandomState) else value


def _set_generator(generator: Any, state: dict[str, Any]) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state["torch"].cpu())
    elif isinstance(generator, random.Random):
        version, words, gauss = state["python"]
        generator.setstate((version, tuple(words), gauss))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = with_arrays(state["numpy"])
    else:
        generator.set_state(with_arrays(state["numpy"]))
