"""OutlierWindow and Judgement: limits worked out by hand, and rejected values that never enter."""

import math

import pytest
import torch

from lightning_tricks.guards.judging import Judgement
from lightning_tricks.guards.outlier_window import OutlierWindow

ACCEPTED = torch.tensor(True)
NONE = torch.finfo(torch.float64).max


def window(*values: float, size: int = 4, active_after: int = 2, sigmas: float = 2.0) -> OutlierWindow:
    filled = OutlierWindow([0.0], size, active_after, sigmas, "cpu")
    for value in values:
        filled.accept(torch.tensor([value]), ACCEPTED)
    return filled


@pytest.mark.parametrize(
    ("values", "limit"),
    [
        ((), NONE),
        ((1.0,), NONE),  # not active yet
        ((1.0, 3.0), 2 + 2 * math.sqrt(2)),
        ((1.0, 2.0, 3.0), 2 + 2 * 1.0),
        ((100.0, 1.0, 2.0, 3.0, 4.0), 2.5 + 2 * math.sqrt(5 / 3)),  # the first has left the window
        ((0.1, 0.1, 0.1), 0.1 * (1 + 2e-5)),  # no deviation: as much as rounding needs
    ],
)
def test_limits_by_hand(values, limit):
    assert window(*values).limits.item() == pytest.approx(limit, rel=1e-6)


def test_a_rejected_value_leaves_no_trace():
    kept = window(1.0, 3.0)
    before = kept.state_dict()
    kept.accept(torch.tensor([math.nan]), ~ACCEPTED)
    assert torch.equal(kept.state_dict()["values"], before["values"])
    assert kept.state_dict()["filled"].tolist() == [1, 1, 0, 0]


def test_each_signal_has_its_own_limit():
    two = OutlierWindow([0.0, 0.0], 4, 2, 1.0, "cpu")
    for values in ([1.0, 10.0], [3.0, 10.0]):
        two.accept(torch.tensor(values), ACCEPTED)
    assert two.limits.tolist() == pytest.approx([2 + math.sqrt(2), 10.0001])


def test_a_window_of_another_size_starts_anew():
    small = window(1.0, 2.0)
    assert not small.load_state_dict(window(5.0, 6.0, 7.0, size=8).state_dict())
    assert small.state_dict()["steps"] == 2
    assert small.load_state_dict(window(5.0, 6.0, 7.0).state_dict())
    assert small.state_dict()["steps"] == 3


def test_a_window_of_128_steps_has_new_limits_every_16_and_goes_on_between_them_to_the_bit():
    torch.manual_seed(0)
    kept = OutlierWindow([0.0, 10.0], 128, 64, 6.0, "cpu")
    new = []
    for step, value in enumerate(torch.rand(203, 2)):
        if kept.accept(value, torch.tensor(step % 50 != 7)):
            new.append(step + 1)
        if step == 100:
            other = OutlierWindow([0.0, 10.0], 128, 64, 6.0, "cpu")
            other.load_state_dict(kept.state_dict())
        if step > 100:
            other.accept(value, torch.tensor(step % 50 != 7))
            assert torch.equal(other.limits, kept.limits)
    assert new == list(range(16, 203, 16))


def test_a_ratio_raises_the_limit_to_so_many_times_the_largest_value():
    kept = OutlierWindow([0.0, 3.0], 4, 2, 2.0, "cpu")
    for value in (1.0, 3.0, 2.0):
        kept.accept(torch.tensor([value, value]), ACCEPTED)
    assert kept.limits.tolist() == pytest.approx([2 + 2 * 1.0, 9.0])


@pytest.mark.parametrize(
    ("losses", "norm", "overflows", "within"),
    [
        ([1.5, 2.5], 2.0, False, True),  # their mean is the limit
        ([1.5, 2.6], 2.0, False, False),
        ([1.5, 2.5], 2.1, False, False),
        ([1.5, 2.5], math.inf, False, False),
        ([1.5, 2.5], math.inf, True, True),  # the scaler's to skip
        ([1.5, math.nan], math.inf, True, False),
        ([], 2.0, False, True),
    ],
)
def test_the_mean_over_the_micro_batches_is_judged(losses, norm, overflows, within):
    parts = [(torch.tensor(loss), torch.ones(())) for loss in losses]
    judged = Judgement(parts, torch.tensor(norm), torch.tensor([2.0, 2.0]), False, overflows)
    assert bool(judged.good) is within


def test_a_step_in_which_nothing_counts_has_the_loss_0_and_does_not_enter_the_window():
    nothing = [(torch.tensor(0.0), torch.tensor(0))] * 2
    judged = Judgement(nothing, torch.tensor(1.0), torch.tensor([2.0, 2.0]), False, False)
    assert (judged.values.tolist(), bool(judged.good), bool(judged.counted)) == ([0.0, 1.0], True, False)
