"""The documents of a row, and the text that is shown of them, by hand."""

import numpy as np
import pytest

from lightning_tricks.commands.autopsy.autopsy import visible
from lightning_tricks.commands.autopsy.documents import documents_of
from lightning_tricks.data import ShardWriter, TokenData
from lightning_tricks.data.order import WindowOrder


def test_a_document_ends_with_its_end_of_text_token(tmp_path):
    ids = np.array([5, 6, 0, 7, 8, 9, 0, 0, 4, 3, 2])
    with ShardWriter(tmp_path, "train", 256) as writer:
        writer.append(ids)
    data = TokenData(str(tmp_path / "train_*.bin"), seq_len=10, eot_id=0)
    data.setup()
    rows = data.training_rows()
    assert WindowOrder(11, 10, 0).starts(np.array([0])).tolist() == [0]
    batch = rows[0]
    found = documents_of(rows, [0], [batch], 0)
    # the row's first token, 5, has no loss
    assert [document.ids.tolist() for document in found] == [[6, 0], [7, 8, 9, 0], [0], [4, 3, 2]]
    assert [(document.first, document.stop, document.token) for document in found] == [
        (0, 2, 1), (2, 6, 3), (6, 7, 7), (7, 10, 8),
    ]  # fmt: skip
    assert len(documents_of(rows, [0], [batch], None)) == 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 字", "plain é 字"),
        ("a\n\tb\x00", r"a\n\tb\x00"),
        ("\u200b\ufeff\x1b[31m", r"\u200b\ufeff\x1b[31m"),
        ("x" * 101, "x" * 100 + "..."),
    ],
)
def test_control_characters_are_visible_and_the_text_stays_on_a_line(text, shown):
    assert visible(text) == shown
