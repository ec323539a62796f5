"""The order in which a loader's sampler serves the rows, replayed from the start of a pass without loading a row.

From top to bottom: the random numbers of a batch, as a function of the batch; the samplers and their state; a position
in a loader, and that position in a run with other processes, workers, batch sizes or data than the run that saved it.
"""

import hashlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.random_state import Generator, generator_state, own_randomness, set_generator_state
from lightning_tricks._trainer.lightning import rank_zero_warn
from lightning_tricks._trainer.objects import is_a

_DEPTH = 4  # a dataset that wraps a dataset with a list of transforms, one of which holds a generator
_OBJECTS = 500  # looked into; more of them are data
# These draw random numbers at the start of a pass only, so they need no seed for each batch.
_KNOWN = ("torch.", "lightning.", "lightning_fabric.", "pytorch_lightning.", "builtins")
_END = object()
_LOST = "rows of this epoch may repeat or be left out"
# Attributes of samplers that follow from the batch size and the number of processes.
_SIZES = ("batch_size", "num_replicas", "rank", "num_samples", "total_size")


def seed_from(*key: Any) -> int:
    """64 bits that depend on every part of a key of numbers and names."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest())


def generators_of(holder: Any) -> list[Generator]:
    """Generators in the attributes of an object, of its attributes and of its lists' members, in a fixed order.

    A dataset draws from the global generators of the process and from these. All of them seeded anew for each batch, a
    batch is the same in whatever process it is made, at whatever time.
    """
    found: list[Generator] = []
    seen: list[Any] = []  # the objects themselves, because an id may be used again

    def look(value: Any, depth: int) -> None:
        if isinstance(value, Generator):
            if all(value is not other for other in found):
                found.append(value)
        elif isinstance(value, list | tuple) and len(value) <= 64:
            for member in value:
                look(member, depth)
        elif isinstance(value, type | torch.Tensor | torch.nn.Module) or not hasattr(value, "__dict__"):
            return
        elif depth and len(seen) < _OBJECTS and all(value is not other for other in seen):
            seen.append(value)
            for attribute in list(vars(value).values()):
                look(attribute, depth - 1)

    look(holder, _DEPTH)
    return found


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
            with own_randomness(seed_from(self.seed, number)) if self.foreign else nullcontext():
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
        numbers = {name: value for name, value in attributes.items() if isinstance(value, bool | int | float | str)}
        generators = {name: value for name, value in attributes.items() if isinstance(value, Generator)}
        state: dict[str, Any] = numbers | {name: generator_state(value) for name, value in generators.items()}
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
    return not isinstance(value, dict) or (isinstance(now, Generator) and generator_state(now).keys() == value.keys())


def set_sampler_state(loader: DataLoader, states: list[dict[str, Any]]) -> None:
    """Put the state of `sampler_state` back; `takes_sampler_state` has to be true."""
    for holder, state in zip((loader, *samplers_of(loader)), states, strict=True):
        for name, value in state.items():
            if name == "":
                holder.load_state_dict(value)
            elif isinstance(value, dict):
                set_generator_state(getattr(holder, name), value)
            else:
                setattr(holder, name, value)


def is_iterable(loader: DataLoader) -> bool:
    """Whether the loader's dataset is read in its own order, and has no rows that a sampler could name."""
    return isinstance(loader.dataset, IterableDataset)


@dataclass(frozen=True)
class Position:
    """The next batch of a loader."""

    number: int = -1  # of the pass, from 0
    batches: int = 0  # taken in this pass
    order: list[dict[str, Any]] = field(default_factory=list)  # `sampler_state` at the start of the pass
    rounds: int = 0  # batches that each worker had made when the dataset's states in `datasets` were taken
    datasets: list[Any] | None = None  # state of the dataset in each worker; None for a dataset without one
    cycles: int = 0  # passes that ended since the epoch began, of a loader that is shorter than another one
    seed: int = 0  # that of the loader


def describe(loader: DataLoader, world: int) -> dict[str, Any]:
    """What a position in a loader depends on, beside the position itself."""
    sampler = loader.sampler
    sharded = is_a(sampler, "DistributedSampler") and not is_a(sampler, "DistributedSamplerWrapper")
    settings = ("seed", "shuffle", "drop_last")
    return {
        "rows": None if is_iterable(loader) else _rows(loader.dataset),
        "batch_size": loader.batch_size,
        "workers": loader.num_workers,
        "world": world,
        "sharded": {name: getattr(sampler, name) for name in settings} if sharded else None,
    }


def _rows(dataset: Any) -> int:
    """The length of a dataset; -1 for one without, whose rows a sampler knows alone."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return -1


def transfer(name: str, loader: DataLoader, saved: dict[str, Any], now: dict[str, Any]) -> tuple[Position | None, int]:
    """The position of a checkpoint in a loader of this run, which may have to serve another number of batches.

    Args:
        name: of the loader, for messages.
        loader: a copy of the user's; it gets the sampler of the checkpoint's run where that had several processes and
            this one has one.
        saved: what `describe` said in the checkpoint's run, and the `position`.
        now: what it says in this one.

    Returns:
        The position, None if the loader starts again; and the change in the number of batches that are done.

    Raises:
        UsageError: for an IterableDataset, if the number of its processes or workers is another one; without a state,
            also if the size of its batches is.
    """
    position = Position(**saved["position"])
    if saved["rows"] is None and now["rows"] is None:
        for key, option in (("workers", "num_workers"), ("world", "devices")):
            if saved[key] != now[key]:
                raise UsageError(
                    f"{option}={now[key]}: {name} has an IterableDataset, of which each worker of each process reads "
                    f"its own part, and the checkpoint's run had {option}={saved[key]}: set the same, or take "
                    "ExactResume out to start its data again"
                )
        if position.batches and position.datasets is None and saved["batch_size"] != now["batch_size"]:
            raise UsageError(
                f"batch_size={now['batch_size']}: {name} has an IterableDataset without a state, which is read again "
                f"up to a batch, and the checkpoint's run had batch_size={saved['batch_size']}: set the same, or take "
                "ExactResume out to start its data again"
            )
    elif saved["rows"] != now["rows"]:
        say(name, f"its data had {saved['rows']} rows and now have {now['rows']}: they start again")
        return None, 0
    other_size = (saved["batch_size"], saved["world"]) != (now["batch_size"], now["world"])
    resized = saved["rows"] is not None and other_size
    if resized and not _restore_order(name, loader, saved, now):
        return None, 0
    if not takes_sampler_state(loader, position.order):
        say(name, f"its samplers or their generators are others now: {_LOST}")
        return None, 0
    return _resized(name, saved, now, position) if resized else (position, 0)


def _restore_order(name: str, loader: DataLoader, saved: dict[str, Any], now: dict[str, Any]) -> bool:
    """Put the rows into the order of the checkpoint's run, for batches of another size; else say so, and False."""
    if not (saved["batch_size"] and now["batch_size"]):
        say(
            name,
            f"the checkpoint counts batches of batch_size={saved['batch_size']} from {saved['world']} process(es), "
            f"and this run has batch_size={now['batch_size']} from {now['world']}: {_LOST}",
        )
        return False
    plain = isinstance(loader.sampler, RandomSampler | SequentialSampler)
    if saved["sharded"] and not now["sharded"] and now["world"] == 1 and plain:
        _shard_as(loader, saved["sharded"], now["batch_size"])
    elif saved["world"] != now["world"] and saved["sharded"] != now["sharded"]:
        say(name, f"{saved['world']} process(es) had another order of rows than {now['world']}: {_LOST}")
        return False
    return True


def _resized(name: str, saved: dict[str, Any], now: dict[str, Any], position: Position) -> tuple[Position, int]:
    rows = position.batches * saved["batch_size"] * saved["world"]
    batches, rest = divmod(rows, now["batch_size"] * now["world"])
    if rest:
        say(name, f"the last {rest} of the rows that were served do not fill a batch of this run, and come again")
    order = [{key: value for key, value in state.items() if key not in _SIZES} for state in position.order]
    return replace(position, batches=batches, order=order), batches - position.batches


def _shard_as(loader: DataLoader, settings: dict[str, Any], size: int) -> None:
    """Give a loader the order of rows that Lightning gives to several processes."""
    sampler: DistributedSampler[Any] = DistributedSampler(loader.dataset, num_replicas=1, rank=0, **settings)
    changes: dict[str, Any] = {"sampler": sampler, "batch_sampler": BatchSampler(sampler, size, loader.drop_last)}
    vars(loader).update(changes)  # DataLoader refuses to set them once it is made


def say(name: str, what: str) -> None:
    """One line of warning about a loader."""
    rank_zero_warn(f"ExactResume: {name}: {what}")
