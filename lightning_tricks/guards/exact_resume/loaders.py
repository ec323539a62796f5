"""Training loaders that know where they are, and go on from there: the rows in their order, and their random numbers.

A pass is one iteration over a loader. Its order follows from the samplers' state at its start, its random numbers from
one seed, the number of the pass and the number of the batch. So three numbers say where a DataLoader is. Rows with an
index are passed over in the sampler, without loading them. An IterableDataset is read again and the batches are
dropped, unless it has `state_dict` and `load_state_dict`. A loader of another kind is served as it is, and followed if
it has these two methods itself.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

from lightning_tricks._core import random_state as _random_state
from lightning_tricks._core.random_state import own_randomness, seed_process
from lightning_tricks._trainer.objects import is_a
from lightning_tricks.guards.exact_resume.order import (
    Order,
    Position,
    generators_of,
    is_iterable,
    sampler_state,
    seed_from,
    set_sampler_state,
)

_END = object()


def has_state(owner: Any) -> bool:
    """Whether an object says where it is, and can be put there."""
    return hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")


def can_be_replayed(loader: Any) -> bool:
    """Whether a loader is torch's, and each pass over its dataset begins at the same place or at one that it says."""
    if not isinstance(loader, DataLoader):
        return False
    own_way = type(loader).__iter__ is not DataLoader.__iter__ and not is_a(loader, "StatefulDataLoader")
    return not own_way and (has_state(loader.dataset) or not hasattr(loader.dataset, "__next__"))


class LoaderStates:
    """Where a loader was before each of the batches that it has served in an epoch, from the running step on.

    `fetched` is called after each batch that was fetched, `at_first_batch` after the first one.
    """

    def __init__(self, fetched: Callable[[], None]) -> None:
        self._fetched = fetched
        self.at_first_batch: Callable[[], None] | None = None
        self._places: list[Any] = []
        self._forgotten = 0

    def begin_epoch(self) -> None:
        """Count batches from 0 again."""
        self._places, self._forgotten = [], 0

    def add(self, place: Any) -> None:
        """Note the place before a batch that was fetched."""
        self._places.append(place)
        if self.at_first_batch is not None:
            self.at_first_batch()
            self.at_first_batch = None
        self._fetched()

    def forget_before(self, batch: int) -> None:
        """Forget the places before the batches that come before one of the epoch."""
        number = min(max(batch - self._forgotten, 0), len(self._places))
        del self._places[:number]
        self._forgotten += number

    def before(self, batch: int, now: Callable[[], Any]) -> Any:
        """The place before a batch of the epoch; for one that was not served yet, what `now` returns."""
        index = batch - self._forgotten
        return self._places[index] if 0 <= index < len(self._places) else now()


class ServedLoader:
    """Serves the batches of any iterable and calls `fetched` after each; in all else it answers as the loader does."""

    def __init__(self, loader: Any, fetched: Callable[[], None]) -> None:
        self._loader, self._fetched = loader, fetched

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # of a copy that is still empty
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self._fetched()
            yield batch


class StatefulLoader(ServedLoader):
    """Keeps the states of a loader that says where it is, by `state_dict` and `load_state_dict`, before its batches.

    Lightning's own way saves the state as of the batch that it has fetched ahead, which is then left out.
    """

    state_dict = load_state_dict = None  # for Lightning, which would save and load it as well

    def __init__(self, loader: Any, fetched: Callable[[], None]) -> None:
        super().__init__(loader, fetched)
        self.places = LoaderStates(fetched)
        self.resumed: dict[str, Any] | None = None  # place from which the next iteration goes on
        self._cycles = 0  # passes that ended since the epoch began, of a loader that is shorter than another one
        self._ended = False  # the last pass ran to its end

    def begin_epoch(self) -> None:
        """Forget the passes of the epoch before."""
        self._cycles, self._ended = 0, False
        self.places.begin_epoch()

    def place_before(self, batch: int) -> dict[str, Any]:
        """The loader's state before a batch of this epoch, and the passes that ended before."""
        return self.resumed or self.places.before(batch, self._place)

    def next_epoch(self) -> dict[str, Any]:
        """The place from which the next epoch begins."""
        return {**self._place(), "cycles": 0, "at_end": True, "ended": False}

    def _place(self) -> dict[str, Any]:
        state = self._loader.state_dict()
        return {"state": state, "cycles": self._cycles, "at_end": False, "ended": self._ended}

    def __iter__(self) -> Iterator[Any]:
        resumed, self.resumed = self.resumed, None
        if resumed is not None:
            self._loader.load_state_dict(resumed["state"])
            self._cycles = resumed.get("cycles", 0)
            if resumed.get("ended"):  # CombinedLoader's max_size asks no more of it in this epoch
                self._ended = True
                return
        served = yield from self._pass()
        if not served and resumed is not None and resumed.get("at_end"):  # some loaders then have no batch left
            self._cycles = 0
            yield from self._pass()

    def _pass(self) -> Generator[Any, None, int]:
        """Serve one pass; returns the number of batches."""
        number, self._ended = 0, False
        iterator = iter(self._loader)  # a loader may begin its pass, or go on from a state, no earlier than here
        while True:
            place = self._place()
            try:
                batch = next(iterator)
            except StopIteration:
                self._cycles, self._ended = self._cycles + 1, True
                return number
            self.places.add(place)
            number += 1
            yield batch


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
        self.generators: list[_random_state.Generator] = []

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
        seed_process(seed_from(*self.key, *place), self.generators)


class _NoRows:
    """A dataset whose rows are empty."""

    def __getitem__(self, index: Any) -> tuple[()]:
        return ()


class Replay:
    """Serves the batches of a loader and keeps their position.

    Args:
        loader: as Lightning has processed it.
        seed: of the loader's random numbers.
        rank: this process, whose random numbers differ from those of the others.
        fetched: called after each batch that was fetched.
    """

    def __init__(self, loader: DataLoader, seed: int, rank: int, fetched: Callable[[], None]) -> None:
        self.loader, self.rank = loader, rank
        self.stateful = is_iterable(loader) and has_state(loader.dataset)
        self.position = Position(seed=seed)
        self.places = LoaderStates(fetched)
        self.resumed: Position | None = None  # where the next pass begins
        self._ended = False  # the last pass ran to its end

    def go_on_from(self, position: Position | None) -> None:
        """Let the next pass be the one of `position`.

        At the start of a pass the samplers take their state at once: the start of an epoch changes it afterwards, as by
        `DistributedSampler.set_epoch`.
        """
        self.resumed = position
        if position is not None and position.batches == 0:
            set_sampler_state(self.loader, position.order)

    def begin_epoch(self) -> None:
        """Forget the passes of the epoch before."""
        self._ended, self.position = False, replace(self.position, cycles=0)
        self.places.begin_epoch()

    def end_pass(self) -> None:
        """End the pass from which the run was to go on, if no batch of its rest was asked for. It loads no row."""
        if self.resumed is None or not self.resumed.batches:
            return
        start, self.resumed = self.resumed, None
        self.position = start
        self._set_state(start)
        if is_iterable(self.loader):
            return
        inner, _ = self._inner_loader(replace(start, batches=0), ())
        changes = {"dataset": _NoRows(), "collate_fn": len, "num_workers": 0, "timeout": 0, "pin_memory": False}
        vars(inner).update(changes)
        with own_randomness(0):
            iterator = DataLoader.__iter__(inner)
        ahead = self.loader.num_workers * (self.loader.prefetch_factor or 0)
        deque(islice(iterator, start.batches + ahead), 0)  # generators draw what they have drawn in that pass

    def position_before(self, batch: int) -> Position:
        """The position before a batch of this epoch."""
        if self.resumed is not None or self.position.number < 0:
            return self.resumed or self.next_pass()
        return self.places.before(batch, lambda: self.position)

    def next_pass(self) -> Position:
        """The start of the pass after this one, as of now."""
        order, datasets = sampler_state(self.loader), None
        if self.stateful and not self.loader.num_workers:
            datasets = [self.loader.dataset.state_dict()]  # type: ignore[attr-defined]
        now = self.position
        return Position(now.number + 1, order=order, datasets=datasets, cycles=now.cycles + self._ended, seed=now.seed)

    def batches(self) -> Iterator[Any]:
        """The batches of one pass, or the rest of the one from which the run goes on."""
        resumed, self.resumed = self.resumed, None
        self.position = resumed or self.next_pass()
        if self.position.batches == 0:
            self.position = replace(self.position, order=sampler_state(self.loader))
        pairs = self._read(self.position, load_state=resumed is not None)
        while True:
            pair = next(pairs, None)
            self._ended = pair is None
            if pair is None:
                return
            before, (batch, self.position) = self.position, pair
            self.places.add(before)
            yield batch

    def _read(self, start: Position, load_state: bool) -> Iterator[tuple[Any, Position]]:
        """Pairs of a batch and the position after it. Unless `load_state`, the dataset's own state is at `start`."""
        loader, key = self.loader, (start.seed, self.rank, start.number)
        self._set_state(start, load_state)
        inner, number = self._inner_loader(start, key)
        generators = [] if self.stateful or loader.num_workers else generators_of(loader.dataset)
        with own_randomness(seed_from(*key, "start")):
            iterator = DataLoader.__iter__(inner)
        states = list(start.datasets or [None] * max(loader.num_workers, 1))
        even, position = True, start
        while True:
            seed = seed_from(*key, number)
            with nullcontext() if loader.num_workers else own_randomness(seed, generators):
                batch: Any = next(iterator, _END)
            if batch is _END:
                return
            if self.stateful:
                batch, worker, states[worker], ended = batch
                # a dataset at its end cannot be put there: the states from before are kept, and read on from
                even = even and not ended and worker == number % len(states)
                if even and worker == len(states) - 1:
                    position = replace(position, rounds=number // len(states) + 1, datasets=list(states))
            number += 1
            if number > start.batches:
                position = replace(position, batches=number)
                yield batch, position

    def _set_state(self, start: Position, load_state: bool = True) -> None:
        set_sampler_state(self.loader, start.order)
        if load_state and start.datasets is not None and not self.loader.num_workers:
            self.loader.dataset.load_state_dict(start.datasets[0])  # type: ignore[attr-defined]

    def _inner_loader(self, start: Position, key: tuple[Any, ...]) -> tuple[DataLoader, int]:
        """The loader that makes the batches of a pass, and the number of the first one that it makes."""
        loader, iterable = self.loader, is_iterable(self.loader)
        inner = _copy_as(DataLoader, loader)
        worker = Worker(loader, key, start.rounds if iterable else start.batches, start.datasets)
        # workers that live on would have the first pass's seeds in all passes
        changes: dict[str, Any] = {"_iterator": None, "persistent_workers": False, "in_order": True}
        if not iterable:
            order = Order(loader, seed_from(start.seed, start.number, "order"), start.batches)
            changes["sampler" if loader.batch_sampler is None else "batch_sampler"] = order
        if loader.num_workers or self.stateful:
            changes["collate_fn"] = worker.finish
        if loader.num_workers:
            changes["worker_init_fn"] = worker.start
        vars(inner).update(changes)
        return inner, start.rounds * max(loader.num_workers, 1) if iterable else start.batches


class ReplayedLoader:
    """First base of the class of a loader that is served by its Replay."""

    state_dict = load_state_dict = None  # for Lightning, which would ask a loader for its own state at each save

    def __iter__(self) -> Iterator[Any]:
        return vars(self)["replay"].batches()

    def __reduce__(self) -> Any:
        """The class is made on the fly, so a copy makes it anew from the loader's own one."""
        return _empty, (type(self).__bases__[1],), vars(self)


def replayed(loader: DataLoader, *args: Any) -> DataLoader:
    """A copy of a loader, still of its class, that is served by a Replay, its attribute `replay`."""
    served = _copy_as(type(_empty(type(loader))), loader)
    vars(served)["replay"] = Replay(served, *args)
    return served


def _empty(cls: type[DataLoader]) -> Any:
    """A loader without attributes, of the class of that name that is served by its attribute `replay`."""
    return object.__new__(type(cls.__name__, (ReplayedLoader, cls), {}))


def _copy_as(cls: type[DataLoader], loader: DataLoader) -> DataLoader:
    """A copy of another class, past DataLoader's constructor and its refusal to change."""
    made = object.__new__(cls)
    vars(made).update(vars(loader))
    if loader.num_workers and loader.multiprocessing_context is not None:  # it is private to each class
        made.multiprocessing_context = loader.multiprocessing_context
    return made
