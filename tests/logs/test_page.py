"""The page's plots: what is shown of a curve, its marks and its numbers."""

import re
import shutil

import numpy as np
import pytest

from lightning_tricks.commands.doctor import plot_of
from lightning_tricks.logs.page import Curve, figure, limits, page, plot, thinned, ticks
from lightning_tricks.logs.run_log import Series
from lightning_tricks.logs.table import html_table

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


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
    assert plot_of(Series.of({}), "loss") == figure(plot([], (0, 1)), "loss over steps: no finite value")


def test_an_axis_begins_at_the_first_point_or_mark():
    def places(*marks):
        drawn = plot_of(Series(np.array([100, 150, 200]), np.ones(3)), "loss", marks)
        return [float(x) for x in re.findall(r"M([\d.]+),", drawn)]

    first, middle, last = places()
    assert (first, middle - first) == (64.0, last - middle)  # a dot's width behind the frame
    assert places(0)[0] == pytest.approx((first + last) / 2)


def test_values_that_are_not_finite_are_a_band_each_and_widen_the_axis():
    values = np.ones(100)
    values[[5, 6, 7, 50]], values[90:] = np.nan, np.inf
    drawn = plot_of(Series(np.arange(100), values), "loss")
    widths = [float(width) for width in re.findall(r'<rect class="bad" x="[\d.]+" width="([\d.]+)"', drawn)]
    assert widths == [pytest.approx(9.7, abs=0.2), 2.0, pytest.approx(43.8, abs=0.3)]
    assert 'class="bad"' not in plot_of(Series(np.arange(9), np.ones(9)), "loss")
    early = plot_of(Series(np.arange(100), np.where(np.arange(100) < 10, 1.0, np.nan)), "loss")
    assert ">80<" in early  # the axis goes on to the end of the run
    assert "<svg></svg>" in plot_of(Series(np.arange(3), np.full(3, np.nan)), "loss")


def test_an_axis_is_logarithmic_where_positive_values_span_decades_and_its_caption_says_so():
    def drawn(values, *options):
        return plot_of(Series(np.arange(len(values)), np.array(values, dtype=float)), "norm", (), *options)

    wide = drawn([1.0, 10.0, 100.0, 1000.0] * 10)
    assert "norm over steps, logarithmic<" in wide
    assert re.findall(r'text-anchor="end">([^<]*)<', wide) == ["1", "10", "100", "1000"]
    heights = [float(y) for y in re.findall(r"[\d.]+,([\d.]+)", re.search('points="([^"]*)"', wide)[1])[:4]]
    assert np.diff(heights) == pytest.approx([heights[1] - heights[0]] * 3, abs=0.2)
    assert "norm: 1000 at the end" in wide
    assert re.findall(r'text-anchor="end">([^<]*)<', drawn([1.0, 110.0] * 10)) == ["1", "10", "100"]  # no 3.1623
    for values in ([1.0] * 39 + [99.0], [0.0] + [1.0] * 39 + [1e6], [-1.0] + [1.0] * 39 + [1e6]):
        assert "logarithmic" not in drawn(values)
    assert "logarithmic" in drawn([8.3] + [9521.0] * 99)  # a loss that diverged at once
    slow_first = [1e-9] + [1.0] * 39  # of a speed
    assert ["logarithmic" in drawn(slow_first, 0.0, share) for share in (0.0, 0.05)] == [True, False]
    clipped = drawn([1.0, 2.0] * 20, 0.001)
    assert "logarithmic" in clipped
    assert ">clip 0.001</text>" in clipped
    assert ">clip 1</text>" in drawn([1.0, 2.0] * 20, 1)


def test_the_points_of_a_short_curve_are_dots():
    def dots(n):
        return plot([Curve(0, "a", np.arange(float(n)), np.ones(n))], (0, 2)).count("h0")

    assert [dots(1), dots(12), dots(13)] == [1, 12, 0]


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_the_page_is_not_wider_than_a_phone(tmp_path):
    long = "/runs/" + "a_very_long_folder_" * 6
    rows = [
        ["val/loss", "A", "B", "C", "B - A", "C - A"],
        ["at 200 steps, 102k tokens, 9B FLOPs", "4.6", "4.0", "6693.4604", "-0.6099 ± 0.0018", "+6690.1019 ± 0.0537"],
    ]
    (tmp_path / "a.html").write_text(
        page(f"{long}: 40 steps", [f"<p>{long}</p>", plot_of(Series(np.arange(9), np.ones(9)), long), html_table(rows)])
    )
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": 390, "height": 844})
        shown.goto((tmp_path / "a.html").as_uri())
        assert shown.evaluate("document.documentElement.scrollWidth") == 390
        assert shown.evaluate("document.querySelector('.wide').scrollWidth") <= 390 - 2 * 16  # no part to scroll to
        cells = "[...document.querySelectorAll('td')].map(cell => cell.getBoundingClientRect().right)"
        assert max(shown.evaluate(cells)) <= 390 - 16  # none is cut


def test_ticks_are_round_and_limits_have_a_margin():
    assert ticks(2.0, 3.5) == pytest.approx([2.0, 2.5, 3.0, 3.5])
    assert ticks(1.0, 1.0) == [1.0]
    assert limits(np.array([1.0, 2.0])) == (pytest.approx(0.94), pytest.approx(2.06))
    assert limits(np.array([])) == (0.0, 1.0)
