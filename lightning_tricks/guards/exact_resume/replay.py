"""A DataLoader that knows where it is, and goes on from there: the rows in their order, and their random numbers.

A pass is one iteration over the loader. Its order follows from the samplers' state at its start, its random numbers
from one seed, the number of the pass and the number of the batch. So three numbers say where the loader is. Rows with
an index are passed over in the sampler, without loading them. An IterableDataset is read again and the batches are
dropped, unless it has `state_dict` and `load_state_dict`.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data import DataLoader

from lightning_tricks._trainer import is_a
from lightning_tricks.guards.exact_resume.order import Order, sampler_state, set_sampler_state
from lightning_tricks.guards.exact_resume.seeds import generators_of, number_of, own_randomness
from lightning_tricks.guards.exact_resume.served_loader import Places
from lightning_tricks.guards.exact_resume.workers import Worker, has_state, is_iterable

_END = object()


def can_be_replayed(loader: Any) -> bool:
    """Whether a loader is torch's, and each pass over its dataset begins at the same place or at one that it says."""
    if not isinstance(loader, DataLoader):
        return False
    own_way = type(loader).__iter__ is not DataLoader.__iter__ and not is_a(loader, "StatefulDataLoader")
    return not own_way and (has_state(loader.dataset) or not hasattr(loader.dataset, "__next__"))


@dataclass(frozen=True)
class Position:
    """The next batch of a loader.

    Args:
        number: of the pass, from 0.
        batches: taken in this pass.
        order: `sampler_state` at the start of the pass.
        rounds: batches that each worker had made when the dataset's states in `datasets` were taken.
        datasets: state of the dataset in each worker; None for a dataset without one.
        cycles: passes that ended since the epoch began, of a loader that is shorter than another one.
        seed: that of the loader.
    """

    number: int = -1
    batches: int = 0
    order: list[dict[str, Any]] = field(default_factory=list)
    rounds: int = 0
    datasets: list[Any] | None = None
    cycles: int = 0
    seed: int = 0


class Replay:
    """Serves the batches of a loader and keeps their position.

    Args:
        loader: as Lightning has processed it.
        seed: of the loader's random numbers.
        rank: this process, whose random numbers differ from those of the others.
        fetched: called after each batch that was fetched.
    """

    def __init__(self, loader: DataLoader, seed: int, rank: int, fetched: Callable[[], None]) -> None:
        self.loader, self.rank, self.fetched = loader, rank, fetched
        self.stateful = is_iterable(loader) and has_state(loader.dataset)
        self.position = Position(seed=seed)
        self.places = Places()
        self.resumed: Position | None = None  # where the next pass begins
        self.at_first_batch: Callable[[], None] | None = None
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
            self.places.add(self.position)
            batch, self.position = pair
            if self.at_first_batch is not None:
                self.at_first_batch()
                self.at_first_batch = None
            self.fetched()
            yield batch

    def _read(self, start: Position, load_state: bool) -> Iterator[tuple[Any, Position]]:
        """Pairs of a batch and the position after it, from `start` on.

        Args:
            start: position of the first batch.
            load_state: put a dataset with a state, in this process, to `start`; else it is there already.
        """
        loader, key = self.loader, (start.seed, self.rank, start.number)
        set_sampler_state(loader, start.order)
        if load_state and start.datasets is not None and not loader.num_workers:
            loader.dataset.load_state_dict(start.datasets[0])  # type: ignore[attr-defined]
        inner, number = self._inner_loader(start, key)
        generators = [] if self.stateful or loader.num_workers else generators_of(loader.dataset)
        with own_randomness(number_of(*key, "start")):
            iterator = DataLoader.__iter__(inner)
        states = list(start.datasets or [None] * max(loader.num_workers, 1))
        even, position = True, start
        while True:
            seed = number_of(*key, number)
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

    def _inner_loader(self, start: Position, key: tuple[Any, ...]) -> tuple[DataLoader, int]:
        """The loader that makes the batches of a pass, and the number of the first one that it makes."""
        loader, iterable = self.loader, is_iterable(self.loader)
        inner = _copy_as(DataLoader, loader)
        worker = Worker(loader, key, start.rounds if iterable else start.batches, start.datasets)
        # workers that live on would have the first pass's seeds in all passes
        changes: dict[str, Any] = {"_iterator": None, "persistent_workers": False, "in_order": True}
        if not iterable:
            order = Order(loader, number_of(start.seed, start.number, "order"), start.batches)
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
