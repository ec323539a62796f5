"""The random state of a process: saved as plain values, put back to the bit."""

import io
import random

import numpy as np
import pytest
import torch
from harness.processes import run

from lightning_tricks._core.random_state import (
    random_state,
    save_random_states,
    saved_random_states,
    seed_numpy,
    set_random_state,
    set_random_state_of,
)


@pytest.fixture(autouse=True)
def _as_before():
    generator, state = np.random.mtrand.get_bit_generator(), random_state()
    yield
    np.random.mtrand.set_bit_generator(generator)
    set_random_state(state)


def draw() -> list[float]:
    values = [random.random(), random.gauss(0, 1), float(np.random.normal()), float(torch.rand(()))]
    return [*values, *np.random.normal(size=3).tolist()]


def reopened(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_a_state_from_a_safe_file_gives_the_same_numbers_again(kind):
    np.random.mtrand.set_bit_generator(getattr(np.random, kind)(1))
    draw()  # Python and NumPy keep the second of two normal numbers
    state = reopened(random_state())
    numbers = draw()
    np.random.mtrand.set_bit_generator(np.random.MT19937(2))
    draw()
    set_random_state(state)
    assert draw() == numbers
    assert type(np.random.mtrand.get_bit_generator()).__name__ == kind


@pytest.mark.parametrize("kind", ["MT19937", "PCG64"])
def test_numpy_is_seeded_whatever_its_generator(kind):
    np.random.mtrand.set_bit_generator(getattr(np.random, kind)(1))
    seed_numpy(2**40 + 5)
    numbers = np.random.random(3).tolist()
    np.random.random(3)
    seed_numpy(2**40 + 5)
    assert np.random.random(3).tolist() == numbers


def test_a_rank_that_the_saved_run_did_not_have_gets_a_stream_of_its_own():
    states = [random_state()]
    drawn = []
    for rank in (0, 1, 2, 1):
        set_random_state_of(rank, states)
        drawn.append(draw())
    assert drawn[1] == drawn[3]
    assert len({tuple(numbers) for numbers in drawn}) == 3


def check_gathering(rank: int) -> None:
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(rank)
    save_random_states(checkpoint := {})
    states = saved_random_states(checkpoint)
    assert [state["torch"].equal(torch.Generator().manual_seed(r).get_state()) for r, state in enumerate(states)] == [
        True,
        True,
    ]


@pytest.mark.long
def test_every_process_gets_the_states_of_all():
    run(check_gathering)


def test_the_states_are_saved_once_unless_a_callback_gives_its_own():
    checkpoint = {}
    assert saved_random_states(checkpoint) is None
    save_random_states(checkpoint)
    states = saved_random_states(checkpoint)
    torch.rand(1)
    save_random_states(checkpoint)
    assert len(states) == 1
    assert saved_random_states(checkpoint) is states
    own = random_state()
    save_random_states(checkpoint, own)
    assert saved_random_states(checkpoint) == [own]
