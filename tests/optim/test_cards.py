"""The Python in this part's cards runs, and the table that a card shows is the one that is printed."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def blocks(card, language):
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / card).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("card", ["schedules.md", "decay_groups.md", "gradient_clipping.md"])
def test_the_python_of_a_card_runs(card):
    code = blocks(card, "python")
    assert code
    for block in code:
        exec(compile(block, card, "exec"), {"__name__": "card"})


def test_the_cards_table_is_the_printed_one(capsys):
    exec(blocks("decay_groups.md", "python")[1], {})
    assert capsys.readouterr().out == blocks("decay_groups.md", "text")[0]
