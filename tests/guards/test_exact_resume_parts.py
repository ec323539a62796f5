"""The parts of ExactResume: seeds, the order of samplers, positions in any batch of any loader."""

import pickle
import random
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from exact_run import Rows, Stream, loaders
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import DataLoader, SubsetRandomSampler, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_tricks._core.random_state import random_state
from lightning_tricks.guards.exact_resume.loaders import Worker, can_be_replayed, replayed
from lightning_tricks.guards.exact_resume.order import (
    Position,
    describe,
    generators_of,
    sampler_state,
    seed_from,
    set_sampler_state,
    transfer,
)


def bits(batches) -> list[str]:
    return [str([row.tolist() for row in batch]) for batch in batches]


def served(loader, position=None):
    copied = replayed(loader, 11, 0, lambda: None)
    copied.replay.go_on_from(position)
    return copied


def same(one, other) -> bool:
    return str(one) == str(other)


def test_the_position_before_the_last_batches_reaches_into_the_pass_before():
    """A shorter one of two loaders begins again in the middle of a step."""
    loader = served(DataLoader(Rows(3)))
    assert same(loader.replay.position_before(0), loader.replay.next_pass())  # nothing was fetched
    list(loader)
    next(iter(loader))
    before = [loader.replay.position_before(batch) for batch in range(5)]
    assert [(place.number, place.batches) for place in before] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    loader.replay.places.forget_before(3)
    before = [loader.replay.position_before(batch) for batch in (3, 4)]
    assert [(place.number, place.batches) for place in before] == [(1, 0), (1, 1)]


def passes(kind, number):
    """The batches of some passes over a loader, and the position before each."""
    loader, positions, whole = served(loaders(kind)), [], []
    for _ in range(number):
        for batch in loader:
            positions.append(loader.replay.position_before(len(positions)))
            whole += bits([batch])
    return positions, whole


@pytest.mark.parametrize("kind", ["shuffle", "rows", "whim", "generator", "stream", "sized", "stateful", "torchdata"])
def test_from_each_position_of_two_passes_the_rest_is_the_same(kind):
    positions, whole = passes(kind, 2)
    for index, position in enumerate(positions):
        again = served(loaders(kind), Position(**vars(position)))
        rest = bits(again)
        assert rest == whole[index : index + len(rest)]
        assert len(rest) in (len(whole) // 2 - index, len(whole) - index)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["shuffle/2", "rows/2", "whim/2", "stateful/2", "stream/3"])
def test_workers_make_the_same_batches_from_a_position_on(kind):
    positions, whole = passes(kind, 1)
    for index in (1, 4, len(whole) - 1):
        assert bits(served(loaders(kind), positions[index])) == whole[index:]


class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.rand(())


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_rank_has_random_numbers_of_its_own(num_workers):
    ranks = [replayed(DataLoader(Noise(), num_workers=num_workers), 11, rank, lambda: None) for rank in (0, 1)]
    drawn = [float(batch) for loader in ranks for batch in loader]
    assert len(set(drawn)) == 8


def after(loader, batches):
    """A loader's position after some batches, and the rest of the pass."""
    copy = served(loader)
    passed = iter(copy)
    for _ in range(batches):
        next(passed)
    return copy.replay.position, passed


def test_a_dataset_with_a_state_reads_few_rows_again():
    loader, (position, _) = loaders("stateful"), after(loaders("stateful"), 9)
    rest = bits(served(loader, position))
    assert loader.dataset.read == 5 == sum(len(eval(batch)) for batch in rest)


def test_a_pass_does_not_touch_the_random_state_of_the_run():
    for kind in ("shuffle", "whim", "stream", "stateful", "generator"):
        before = random_state()
        assert len(bits(served(loaders(kind)))) > 5
        assert same(random_state(), before)


def test_numbers_of_different_keys_differ_and_stay_the_same_for_ever():
    assert seed_from(1, 2) != seed_from(12) != seed_from(2, 1)
    assert seed_from(3, 0, 1, "order") == 15402862281366432254 or seed_from(3, 0, 1, "order") < 2**64


def test_generators_are_found_in_transforms_of_a_wrapped_dataset():
    generators = [torch.Generator(), np.random.default_rng(), np.random.RandomState(), random.Random()]
    noise = [SimpleNamespace(own=generator) for generator in generators]
    dataset = SimpleNamespace(dataset=SimpleNamespace(transform=SimpleNamespace(transforms=noise)), again=generators[0])
    dataset.itself = dataset
    assert {id(g) for g in generators_of(dataset)} == {id(g) for g in generators}


def test_the_state_of_samplers_is_that_of_their_generators_and_numbers():
    class Epochs(SubsetRandomSampler):
        epoch = 0

        def __iter__(self):
            self.epoch += 1
            yield from self.legacy.permutation(4).tolist()
            yield from self.numpy.permutation(4).tolist()
            yield from self.python.sample(range(4), 4)

    def loader():
        sampler = Epochs(range(12), generator=torch.Generator().manual_seed(1))
        sampler.epoch = 0
        sampler.legacy, sampler.numpy = np.random.RandomState(1), np.random.default_rng(1)
        sampler.python = random.Random(1)
        return DataLoader(Rows(12), batch_size=2, sampler=sampler)

    first, second = loader(), loader()
    list(first.batch_sampler), list(first.batch_sampler)
    state = sampler_state(first)
    expected = list(first.batch_sampler)
    set_sampler_state(second, state)
    assert second.sampler.epoch == 2
    assert list(second.batch_sampler) == expected != list(loader().batch_sampler)


class Quarters(SubsetRandomSampler):
    """Each pass is the next quarter of the rows."""

    def __init__(self, indices):
        super().__init__(indices)
        self._passes = [0]

    def __iter__(self):
        self._passes[0] += 1
        return iter(self.indices[(self._passes[0] - 1) % 4 :: 4])

    def state_dict(self):
        return {"passes": self._passes[0]}

    def load_state_dict(self, state):
        self._passes[0] = state["passes"]


def test_a_sampler_that_says_where_it_is_goes_on_from_there():
    def loader():
        return DataLoader(list(range(8)), sampler=Quarters(list(range(8))))

    first = served(loader())
    assert [float(batch) for _ in range(2) for batch in first] == [0, 4, 1, 5]
    again = served(loader(), first.replay.next_pass())
    assert [float(batch) for batch in again] == [2, 6]


@pytest.mark.long
def test_workers_are_started_as_the_user_s_loader_says():
    """In the context and with the function that it names."""

    def mark(worker):
        get_worker_info().dataset.mark = 10.0 + worker

    class Marked(Noise):
        mark = 0.0

        def __getitem__(self, index):
            return self.mark

    options = {"num_workers": 2, "multiprocessing_context": "fork", "worker_init_fn": mark}
    copy = served(StatefulDataLoader(Marked(), **options))  # a class that keeps the context as its own
    inner, _ = copy.replay._inner_loader(copy.replay.next_pass(), (1,))
    assert inner.multiprocessing_context.get_start_method() == "fork"
    assert [float(batch) for batch in copy] == [10.0, 11.0, 10.0, 11.0]


def test_what_a_worker_is_given_can_be_pickled_for_spawn():
    worker = Worker(DataLoader(Rows(4), num_workers=2), (1, 2), 0, None)
    start, finish = pickle.loads(pickle.dumps((worker.start, worker.finish)))
    assert start.__self__ is finish.__self__  # one counts the batches of the other


def test_which_loaders_are_followed():
    class Endless(Stream):
        def __next__(self):
            return torch.ones(4)

    class OwnWay(DataLoader):
        def __iter__(self):
            return iter([])

    assert can_be_replayed(DataLoader(Rows(3)))
    assert can_be_replayed(DataLoader(Stream(3)))
    assert not can_be_replayed(DataLoader(Endless(3)))
    assert not can_be_replayed(OwnWay(Rows(3)))
    assert not can_be_replayed([1, 2])


def moved(before: DataLoader, now_with: DataLoader, saved: dict, now: dict) -> tuple:
    """What becomes of a place after 3 batches in another loader; what is said; the rows that come next."""
    position, _ = after(before, 3)
    state = {**describe(before, 1), **saved, "position": vars(position)}
    second = served(now_with)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        position, more = transfer("it", second, state, {**describe(second, 1), **now})
    second.replay.go_on_from(position)
    lines = [str(warned.message).removeprefix("ExactResume: it: ") for warned in caught]
    return position and position.batches, more, lines, torch.as_tensor(next(iter(second))).tolist()


def fours(**options) -> DataLoader:
    return DataLoader(list(range(24)), **{"batch_size": 4, **options})


def generator() -> dict:
    return {"shuffle": True, "generator": torch.Generator().manual_seed(1)}


class Odd(SubsetRandomSampler):
    """A sampler of the user's, which Lightning shards by another one."""

    def __iter__(self):
        return iter(self.indices)


SHARDED = {"seed": 1, "shuffle": True, "drop_last": False}
LOST = ": rows of this epoch may repeat or be left out"


@pytest.mark.parametrize(
    ("before", "now_with", "saved", "now", "line"),
    [
        (fours(), fours(), {"world": 2, "sharded": SHARDED}, {"world": 3},
         "2 process(es) had another order of rows than 3"),
        (fours(), fours(batch_size=None), {}, {},
         "the checkpoint counts batches of batch_size=4 from 1 process(es), and this run has batch_size=None from 1"),
        (fours(batch_size=None), fours(batch_size=None), {"world": 2, "sharded": SHARDED}, {},
         "the checkpoint counts batches of batch_size=None from 2 process(es), "
         "and this run has batch_size=None from 1"),
        (fours(sampler=DistributedSamplerWrapper(Odd(range(24)), num_replicas=2, rank=0)),
         fours(sampler=Odd(range(24))), {"world": 2}, {}, "its samplers or their generators are others now"),
        (fours(sampler=Quarters(list(range(24))), batch_size=1), fours(sampler=Odd(range(24)), batch_size=1), {}, {},
         "its samplers or their generators are others now"),
        (fours(**generator()), fours(), {}, {}, "its samplers or their generators are others now"),
        (fours(**generator()), fours(shuffle=True), {}, {}, "its samplers or their generators are others now"),
    ],
    ids=["three processes of two", "no batches", "rows of two processes", "a sampler of one process",
         "a sampler without a state", "no shuffling", "no generator"],
)  # fmt: skip
def test_a_place_that_cannot_be_found_again_is_told_in_one_line(before, now_with, saved, now, line):
    assert moved(before, now_with, saved, now)[:3] == (None, 0, [line + LOST])


def test_rows_that_do_not_fill_a_batch_of_another_size_come_again():
    line = "the last 2 of the rows that were served do not fill a batch of this run, and come again"
    assert moved(fours(), fours(batch_size=5), {}, {}) == (2, -1, [line], [10, 11, 12, 13, 14])
    assert moved(fours(), fours(batch_size=6), {}, {}) == (2, -1, [], [12, 13, 14, 15, 16, 17])
