"""Tables and plots of the pages are those of the committed measurements: `fill.py --check`, and what it finds."""

import fill
import pytest
from filler import Filler

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


def test_filling_mends_it(tmp_path, monkeypatch):
    page = (fill.DOCS / "optimizers.md").read_text(encoding="utf-8")
    monkeypatch.setattr(fill, "DOCS", tmp_path)
    (tmp_path / "optimizers.md").write_text(page.replace("| AdamW |", "| spoilt |"), encoding="utf-8")
    assert fill.main(["optimizers"]) == 0
    assert (tmp_path / "optimizers.md").read_text(encoding="utf-8") == page


def test_a_plot_that_is_not_is_named(tmp_path, monkeypatch, capsys):
    page = (fill.DOCS / "mup.md").read_text(encoding="utf-8")
    plot = (fill.DOCS / "images/mup.svg").read_text(encoding="utf-8")
    assert "L 50" in plot
    monkeypatch.setattr(fill, "DOCS", tmp_path)
    (tmp_path / "images").mkdir()
    (tmp_path / "mup.md").write_text(page, encoding="utf-8")
    said = {"": "is missing", plot.replace("L 50", "L 51", 1): "is another plot", plot: None}
    for spoilt, problem in said.items():
        if spoilt:
            (tmp_path / "images/mup.svg").write_text(spoilt, encoding="utf-8")
        assert fill.main(["--check", "mup-transfer"]) == (1 if problem else 0)
        expected = f"docs/mup.md: images/mup.svg {problem}: run python docs/scripts/fill.py mup-transfer"
        assert capsys.readouterr().out.strip() == (expected if problem else "")


def test_plots_that_differ_in_rounding_and_in_hashes_are_the_same():
    svg = 'Matplotlib v3.11.2 <use xlink:href="#m0123456789" x="10.004" y="-3e-05"/>'
    assert fill.same_plot(svg, svg.replace("0123456789", "abcdef0123").replace("10.004", "10.009"))
    assert not fill.same_plot(svg, svg.replace("10.004", "10.02"))
    assert not fill.same_plot(svg, svg.replace("use", "path"))
    assert fill.same_plot(svg, "Matplotlib v3.12.0")  # not compared


def test_a_new_script_is_found_and_a_name_stands_in_one_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(fill, "SCRIPTS", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    source = (
        "from filler import Filler\nFILLERS = {'new': Filler('new.md', lambda _: {'place': 'text'}, measured=False)}"
    )
    (tmp_path / "fill_made_by_a_test.py").write_text(source, encoding="utf-8")
    assert fill.fillers.__wrapped__().keys() == {"new"}
    assert isinstance(fill.fillers.__wrapped__()["new"], Filler)
    (tmp_path / "fill_made_by_another.py").write_text(source, encoding="utf-8")
    with pytest.raises(ValueError, match=r"fill_made_by_another\.py: new stands in another fill_\*\.py already"):
        fill.fillers.__wrapped__()
