"""Up or down at random, right on average; what bf16 holds, infinities and NaN stay."""

import pytest
import torch

from lightning_tricks.optim import stochastic_rounding
from lightning_tricks.optim.stochastic_rounding import copy_rounded_, round_to_bf16, rounding_seed

MAX = torch.finfo(torch.bfloat16).max


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def from_bits(*bits):
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def test_every_bf16_number_stays_what_it_is():
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    rounded = round_to_bf16(every.float(), generator())
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded.isnan(), every.isnan())
    numbers = ~every.isnan()
    assert torch.equal(rounded[numbers].view(torch.int16), every[numbers].view(torch.int16))


@pytest.mark.parametrize(("low", "high"), [(1.0, 1 + 2**-7), (-1.0, -1 - 2**-7), (3.0, 3 + 2**-6), (0.0, 2.0**-133)])
@pytest.mark.parametrize("share", [0.001, 0.3, 0.5, 0.9])
def test_a_value_between_two_goes_up_as_often_as_it_is_near_the_upper(low, high, share):
    n = 200_000
    value = low + share * (high - low)
    rounded = round_to_bf16(torch.full((n,), value), generator()).double()
    exact = torch.full((n,), value).double()[0].item()
    up = (exact - low) / (high - low)
    assert set(rounded.unique().tolist()) == {low, high}
    found = (rounded == high).double().mean().item()
    assert abs(found - up) < 4 * (up * (1 - up) / n) ** 0.5 + 1e-9


def test_nan_of_any_bits_stays_nan_and_infinity_infinity():
    odd = from_bits(0x7F800001, 0x7FFFFFFF, -1, 0x7FC00000, 0xFF80FFFF - (1 << 32))
    for seed in range(100):
        assert round_to_bf16(odd, generator(seed)).isnan().all()
        infinite = torch.tensor([float("inf"), -float("inf")])
        assert torch.equal(round_to_bf16(infinite, generator(seed)), infinite.bfloat16())


def test_only_what_is_beyond_the_largest_bf16_number_may_become_infinite():
    inside = torch.tensor([MAX, -MAX]).nextafter(torch.zeros(2)).repeat(10_000)
    assert round_to_bf16(inside, generator()).isfinite().all()
    beyond = round_to_bf16(torch.full((10_000,), torch.finfo(torch.float32).max), generator())
    assert set(beyond.float().unique().tolist()) <= {MAX, float("inf")}


def test_the_random_state_of_the_model_is_not_touched():
    before = torch.get_rng_state()
    round_to_bf16(torch.rand(10, generator=generator()), generator())
    assert torch.equal(torch.get_rng_state(), before)


def test_the_same_seed_rounds_alike_and_another_does_not():
    value = torch.full((1000,), 1.0 + 2**-8)
    assert torch.equal(round_to_bf16(value, generator(1)), round_to_bf16(value, generator(1)))
    assert not torch.equal(round_to_bf16(value, generator(1)), round_to_bf16(value, generator(2)))


@pytest.mark.parametrize("shape", [(), (0,), (7,), (5, 3)])
def test_writes_in_place_piece_by_piece(monkeypatch, shape):
    monkeypatch.setattr(stochastic_rounding, "_CHUNK", 4)
    source = torch.ones(shape) + 2**-8
    target = torch.zeros(shape, dtype=torch.bfloat16)
    copy_rounded_(target, source, generator())
    assert ((target == 1) | (target == 1 + 2**-7)).all()


def test_writes_into_tensors_that_are_not_contiguous():
    target = torch.zeros(6, 4, dtype=torch.bfloat16).t()
    copy_rounded_(target, torch.arange(24.0).view(4, 6), generator())
    assert torch.equal(target.float(), torch.arange(24.0).view(4, 6))


def test_each_run_step_and_parameter_has_its_own_seed():
    weight = torch.zeros(2)
    seeds = {rounding_seed(a, b, c, weight) for a in range(5) for b in range(5) for c in range(5)}
    assert len(seeds) == 125
    assert rounding_seed(1, 2, 3, weight) == rounding_seed(1, 2, 3, torch.ones(5))
