"""The page's plots: what is shown of a curve, its marks and its numbers."""

import numpy as np
import pytest

from lightning_tricks.commands.doctor import plot_of
from lightning_tricks.logs.page import limits, plot, thinned, ticks
from lightning_tricks.logs.run_log import Series


def test_a_plot_keeps_the_extremes_and_marks_steps():
    values = np.zeros(10_000)
    values[[1234, 7777]] = [9.0, -9.0]
    series = Series(np.arange(10_000), values)
    kept = thinned(series)
    assert len(kept) <= 800
    assert {1234, 7777} <= set(kept.steps.tolist())
    drawn = plot_of(series, "loss", (5000, 20_000))
    assert drawn.count('class="mark"') == 1
    assert drawn.count("<polyline") == 1
    assert ">10k<" in plot_of(Series(np.arange(10_001), np.arange(10_001.0)), "loss")
    assert plot_of(Series.of({}), "loss") == plot([], (0, 1)) == "<svg></svg>"


def test_ticks_are_round_and_limits_have_a_margin():
    assert ticks(2.0, 3.5) == pytest.approx([2.0, 2.5, 3.0, 3.5])
    assert ticks(1.0, 1.0) == [1.0]
    assert limits(np.array([1.0, 2.0])) == (pytest.approx(0.94), pytest.approx(2.06))
    assert limits(np.array([])) == (0.0, 1.0)
