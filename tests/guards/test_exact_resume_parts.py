"""The parts of ExactResume: seeds, the order of samplers, positions in any batch of any loader."""

import pickle
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from exact_run import Rows, Stream, loaders
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_tricks.guards.exact_resume.order import sampler_state, set_sampler_state
from lightning_tricks.guards.exact_resume.replay import Position, can_be_replayed, replayed
from lightning_tricks.guards.exact_resume.seeds import generators_of, number_of, own_randomness
from lightning_tricks.guards.exact_resume.workers import Worker
from lightning_tricks.guards.saving.random_state import random_state


def bits(batches) -> list[str]:
    return [str([row.tolist() for row in batch]) for batch in batches]


def served(loader, position=None):
    copy = replayed(loader, 11, 0, 8, lambda: None)
    copy.replay.resumed = position
    return copy


def same(one, other) -> bool:
    return str(one) == str(other)


def test_the_position_before_the_last_batches_reaches_into_the_pass_before():
    """A shorter one of two loaders begins again in the middle of a step."""
    loader = served(DataLoader(Rows(3)))
    assert same(loader.replay.position_before(0), loader.replay.next_pass())  # nothing was fetched
    list(loader)
    next(iter(loader))
    before = [loader.replay.position_before(batches) for batches in range(5)]
    assert [(place.number, place.batches) for place in before] == [(1, 1), (1, 0), (0, 2), (0, 1), (0, 0)]


@pytest.mark.parametrize("kind", ["shuffle", "rows", "whim", "generator", "stream", "sized", "stateful", "torchdata"])
def test_from_each_position_of_two_passes_the_rest_is_the_same(kind):
    loader, positions, whole = served(loaders(kind)), [], []
    for _ in range(2):
        for batch in loader:
            positions.append(loader.replay.earlier[-1])
            whole += bits([batch])
    for index, position in enumerate(positions):
        again = served(loaders(kind), Position(**vars(position)))
        rest = bits(again)
        assert rest == whole[index : index + len(rest)]
        assert len(rest) in (len(whole) // 2 - index, len(whole) - index)


@pytest.mark.parametrize("kind", ["shuffle/2", "rows/2", "whim/2", "stateful/2", "stream/3"])
def test_workers_make_the_same_batches_from_a_position_on(kind):
    loader, positions = served(loaders(kind)), []
    whole = []
    for batch in loader:
        positions.append(loader.replay.earlier[-1])
        whole += bits([batch])
    for index in (1, 4, len(whole) - 1):
        assert bits(served(loaders(kind), positions[index])) == whole[index:]


class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.rand(())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_rank_has_random_numbers_of_its_own(num_workers):
    ranks = [replayed(DataLoader(Noise(), num_workers=num_workers), 11, rank, 8, lambda: None) for rank in (0, 1)]
    drawn = [float(batch) for loader in ranks for batch in loader]
    assert len(set(drawn)) == 8


def test_a_dataset_with_a_state_reads_few_rows_again():
    loader, copy = loaders("stateful"), served(loaders("stateful"))
    passed = iter(copy)
    for _ in range(9):
        next(passed)
    rest = bits(served(loader, copy.replay.position))
    assert loader.dataset.read == 5 == sum(len(eval(batch)) for batch in rest)


def test_a_pass_does_not_touch_the_random_state_of_the_run():
    for kind in ("shuffle", "whim", "stream", "stateful", "generator"):
        before = random_state()
        assert len(bits(served(loaders(kind)))) > 5
        assert same(random_state(), before)


def test_own_randomness_ends_with_an_exception():
    before = random_state()
    with pytest.raises(KeyError), own_randomness(5):  # noqa: PT012
        drawn = torch.rand(()), random.random(), np.random.rand()
        raise KeyError
    assert same(random_state(), before)
    with own_randomness(5):
        assert drawn == (torch.rand(()), random.random(), np.random.rand())


def test_numbers_of_different_keys_differ_and_stay_the_same_for_ever():
    assert number_of(1, 2) != number_of(12) != number_of(2, 1)
    assert number_of(3, 0, 1, "order") == 15402862281366432254 or number_of(3, 0, 1, "order") < 2**64


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


@pytest.mark.parametrize(
    "sampler",
    [
        lambda data: RandomSampler(data, replacement=True, num_samples=70, generator=torch.Generator().manual_seed(1)),
        lambda data: WeightedRandomSampler([0.1, 0.9, 0.4] * 4, 12),
        lambda data: DistributedSampler(data, num_replicas=2, rank=1),
    ],
)
def test_samplers_of_torch_serve_the_same_order_again(sampler):
    def loader():
        data = Rows(12)
        return DataLoader(data, batch_size=2, sampler=sampler(data))

    copy = served(loader())
    list(copy)
    passed = iter(copy)
    for _ in range(3):
        next(passed)
    position = copy.replay.position
    assert bits(served(loader(), position)) == bits(passed)


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
