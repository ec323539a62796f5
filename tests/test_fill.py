"""Tables and plots of the pages are those of the committed measurements: `fill.py --check`, and what it finds."""

import fill
import pytest

pytestmark = pytest.mark.pages


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_each_page_is_what_the_newest_results_give(capsys):
    assert fill.main(["--check"]) == 0, capsys.readouterr().out


def test_a_page_that_is_not_is_named(tmp_path, monkeypatch, capsys):
    page = (fill.DOCS / "optimizers.md").read_text(encoding="utf-8")
    spoilt = page.replace("<!-- cost -->\n", "<!-- cost -->\nspoilt\n")
    monkeypatch.setattr(fill, "DOCS", tmp_path)
    (tmp_path / "optimizers.md").write_text(spoilt, encoding="utf-8")
    assert fill.main(["--check", "optimizers"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("docs/optimizers.md: <!-- cost --> is another text")
