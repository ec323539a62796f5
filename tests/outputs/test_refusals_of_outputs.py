"""What an output refuses when it is made, or given a prediction, each in one line with the value and what to give."""

from functools import partial

import pytest
import torch

from lightning_tricks._core.errors import UsageError
from lightning_tricks.callbacks import LMEval, PredictionWriter, SampleText
from lightning_tricks.outputs.prediction_writer import rows_of

TWO = torch.tensor([[1, 2], [3, 4]])
REFUSED = [
    (partial(LMEval, "arc"), "tasks='arc': give a list"),
    (partial(LMEval, []), r"tasks=\[\]: give a list"),
    (partial(LMEval, ["a"], batch_size=0), "batch_size=0: give at least 1"),
    (partial(LMEval, ["a"], limit=0), "limit=0: give a number of questions"),
    (partial(PredictionWriter, "p.pt"), r"output='p.pt': .* end the name in .jsonl"),
    (partial(SampleText, prompts="def"), "prompts='def': give a list"),
    (partial(SampleText, prompts=[]), r"prompts=\[\]: give a list"),
    (partial(SampleText, max_new_tokens=0), "max_new_tokens=0: give at least 1"),
    (partial(SampleText, top_p=2.0), "top_p=2.0"),
    (partial(rows_of, {"ids": TWO, "names": torch.ones(3)}), "^predict_step: {'ids': 2, 'names': 3} rows: return equ"),
    (partial(rows_of, {"ids": TWO, "text": ["a", "b"]}), "^predict_step: dict cannot be written: return a tensor"),
    (partial(rows_of, [TWO, TWO]), "^predict_step: list cannot be written"),
    (partial(rows_of, torch.tensor(2)), "^predict_step: Tensor cannot be written"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_an_output_cannot_do_is_refused(call, words):
    with pytest.raises(UsageError, match=words):
        call()
