"""The part of a loader that runs in its workers: seeds for each batch, and the states of a dataset that has states."""

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_tricks.guards.exact_resume.seeds import Generator, generators_of, number_of, seed_process


def is_iterable(loader: DataLoader) -> bool:
    """Whether the loader's dataset is read in its own order, and has no rows that a sampler could name."""
    return isinstance(loader.dataset, IterableDataset)


def has_state(owner: Any) -> bool:
    """Whether an object says where it is, and can be put there."""
    return hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")


class Worker:
    """`worker_init_fn` and `collate_fn` of a loader: both are called in the worker, around the making of each batch.

    Each batch is made under a seed of its own. With workers the seed of the next batch is set when one is finished; in
    the main process the caller sets it.

    Args:
        loader: whose own two functions are called as well.
        key: parts of the seed: the run's seed, rank and pass.
        first: number of the first batch that the workers make together; with an IterableDataset, that each makes.
        states: of the IterableDataset, for each worker; None to read it from its start.
    """

    def __init__(self, loader: DataLoader, key: tuple[Any, ...], first: int, states: list[Any] | None) -> None:
        self.init: Callable[[int], Any] | None = loader.worker_init_fn
        self.collate: Callable[[Any], Any] = loader.collate_fn
        self.workers, self.iterable = loader.num_workers, is_iterable(loader)
        self.rows = loader.batch_size or 1
        self.key, self.first, self.states = key, first, states
        self.stateful = self.iterable and has_state(loader.dataset)
        self.dataset: Any = None if self.workers else loader.dataset
        self.number = self.worker = 0
        self.generators: list[Generator] = []

    def start(self, worker: int) -> None:
        """In a worker, before its first batch."""
        if self.init is not None:
            self.init(worker)
        info: Any = get_worker_info()
        self.dataset, self.worker = info.dataset, worker
        self.number = self.first + (0 if self.iterable else worker)
        self.generators = [] if self.stateful else generators_of(self.dataset)
        if self.states is not None:
            self.dataset.load_state_dict(self.states[worker])
        self._seed()

    def finish(self, samples: Any) -> Any:
        """Collate a batch; of a dataset with a state, (batch, worker, state, whether the data are at their end)."""
        batch = self.collate(samples)
        if self.workers:
            self.number += 1 if self.iterable else self.workers
            self._seed()
        if not self.stateful:
            return batch
        ended = isinstance(samples, list) and len(samples) < self.rows
        return batch, self.worker, self.dataset.state_dict(), ended

    def _seed(self) -> None:
        place = (self.worker, self.number) if self.iterable else (self.number,)
        seed_process(number_of(*self.key, *place), self.generators)
