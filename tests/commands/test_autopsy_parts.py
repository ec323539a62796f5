"""The documents of a row, the score that ranks them, and the text that is shown of them, by hand."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from lightning_tricks.commands.autopsy.documents import Document, documents_of
from lightning_tricks.commands.autopsy.gradients import Gradients, moments_of
from lightning_tricks.commands.autopsy.report import standard, suspicions, visible
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
    alone = found[1].alone(batch)
    assert alone["input_ids"].tolist() == [[5, 6, 0, 7, 8, 9]]
    assert alone["labels"].tolist() == [[-100, -100, 7, 8, 9, 0]]
    assert len(documents_of(rows, [0], [batch], None)) == 1


class Squares(nn.Module):
    """Its loss is the square of each token's own weight; that of token 3 is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.0, 1.0, 2.0, math.inf]))

    def sums(self, batch):
        counted = batch["labels"] != -100
        return self.weight[batch["input_ids"][counted]].square().sum(), counted.sum()


def gradients(*rows: list[int]) -> Gradients:
    """Of rows that are two documents each: the first two tokens, and the third one."""
    module = Squares()
    batches = [{"input_ids": torch.tensor([row]), "labels": torch.tensor([row])} for row in rows]
    places = [(row, *place) for row in range(len(rows)) for place in ((0, 2), (2, 3))]
    documents = [Document(row, row, first, stop, first, np.array(rows[row][first:stop])) for row, first, stop in places]
    return Gradients(module, module.sums, batches, documents, 2)


def test_of_a_row_with_a_document_that_is_not_finite_the_others_count():
    found = gradients([1, 2, 3], [2, 1, 1])
    whole = found.of_batch()
    assert (whole.left_out, whole.tokens, whole.nats) == ({1}, 5, 1 + 4 + 4 + 1 + 1)
    # two of each weight, over five tokens
    assert whole.gradient[0].tolist() == pytest.approx([0, 3 * 2 * 1 / 5, 2 * 2 * 2 / 5, 0])
    first, left_out = found.effect(0, whole), found.effect(1, whole)
    assert (first.loss, first.norm) == pytest.approx((2.5, math.hypot(2, 4) / 5))
    assert (left_out.loss, left_out.norm_without) == (math.inf, whole.norm)
    assert math.isnan(left_out.norm)


def test_the_only_document_of_a_batch_is_all_of_its_gradient_and_nothing_is_left_without_it():
    found = gradients([1, 2, 3])
    only = found.effect(0, found.of_batch())
    assert (only.norm, only.share) == pytest.approx((math.hypot(1, 2), 1.0))
    assert math.isnan(only.norm_without)
    assert math.isnan(only.cosine)


def test_the_moments_of_adamw_are_those_of_the_parameters_that_train():
    module = nn.Linear(2, 1)
    module.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([("weight", module.weight)], lr=0.1)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    checkpoint = {"optimizer_class": "AdamW", "optimizer_states": [optimizer.state_dict()]}
    (moments,) = moments_of(checkpoint, module)
    mean, _, steps, _ = moments
    assert (mean.tolist(), steps) == ([[pytest.approx(0.1)] * 2], 1)
    checkpoint["optimizer_states"][0]["param_groups"][0]["amsgrad"] = True
    assert moments_of(checkpoint, module) is None
    checkpoint["optimizer_states"][0]["param_groups"][0]["amsgrad"] = False
    module.bias.requires_grad_(True)
    assert moments_of(checkpoint, module) is None, "the checkpoint has no state for it"


def test_the_score_is_the_larger_distance_from_the_median_in_robust_deviations():
    found = suspicions([2.0, 3.0, 4.0, 3.0, 9.0], [1.0, 2.0, 4.0, 2.0, 2.0], [1, 1, 1, 1, 4])
    # surprise: -1, 0, 1, 0, 12, whose median distance from 0 is 1
    assert [round(1.4826 * s.loss, 9) for s in found] == [-1, 0, 1, 0, 12]
    # pull: log 1, log 2, log 4, log 2, log 1, of median log 2 and median distance log 2
    assert [round(1.4826 * s.gradient, 9) for s in found] == [-1, 0, 1, 0, -1]
    assert (found[4].score, found[4].reason) == (found[4].loss, "loss")
    assert [s.score for s in found] == [max(s.loss, s.gradient) for s in found]


def test_what_is_not_finite_is_the_most_suspicious():
    found = suspicions([2.0, math.nan, 3.0], [1.0, math.nan, 0.0], [8, 8, 8])
    assert [s.reason for s in found] == ["gradient", "not finite", "loss"]
    assert found[1].score == math.inf
    assert suspicions([math.nan], [math.nan], [3])[0].score == math.inf
    assert suspicions([2.0], [1.0], [3])[0].score == 0.0


def test_where_most_are_equal_the_mean_distance_is_the_unit():
    assert standard([1.0, 1.0, 1.0, 5.0]) == [0.0, 0.0, 0.0, 4.0]
    assert standard([]) == []


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
