"""The table of docs/parameter_roles.md is what real layers give."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_the_table_is_what_the_layers_give(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    script = runpy.run_path(str(ROOT / "docs/fill_layers.py"))
    page = (ROOT / "docs/parameter_roles.md").read_text(encoding="utf-8")
    written = page.split("<!-- layers -->\n")[1].split("\n<!-- end -->")[0]
    assert script["table"]().splitlines() == written.splitlines()  # python docs/fill_layers.py writes it
    assert len(script["LAYERS"]) >= 40
