"""Tables and plots of the pages are those of the committed measurements: `fill.py --check`, and what it finds."""

import fill
import pytest

pytestmark = pytest.mark.pages


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_each_page_is_what_the_newest_results_give(capsys):
    assert fill.main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda page: page.replace("<!-- cost -->\n", "<!-- cost -->\nspoilt\n"), "<!-- cost --> is another text"),
        (lambda page: page.replace("<!-- refusals -->", ""), "no place <!-- refusals -->"),
        (lambda page: page + "optimizers-2000-01-01-cpu.json", "names optimizers-2000-01-01-cpu.json, and optimizers-"),
    ],
)
def test_a_page_that_is_not_is_named(spoil, says, tmp_path, monkeypatch, capsys):
    page = (fill.DOCS / "optimizers.md").read_text(encoding="utf-8")
    monkeypatch.setattr(fill, "DOCS", tmp_path)
    (tmp_path / "optimizers.md").write_text(spoil(page), encoding="utf-8")
    assert fill.main(["--check", "optimizers"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"docs/optimizers.md: {says}")


def test_plots_that_differ_in_rounding_and_in_hashes_are_the_same():
    svg = 'Matplotlib v3.11.2 <use xlink:href="#m0123456789" x="10.004" y="-3e-05"/>'
    assert fill.same_plot(svg, svg.replace("0123456789", "abcdef0123").replace("10.004", "10.009"))
    assert not fill.same_plot(svg, svg.replace("10.004", "10.02"))
    assert not fill.same_plot(svg, svg.replace("use", "path"))
    assert fill.same_plot(svg, "Matplotlib v3.12.0")  # not compared
