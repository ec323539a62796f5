"""What the arithmetic of FLOPs refuses, each in one line with the value and what to give."""

from functools import partial
from types import SimpleNamespace

import pytest

from lightning_tricks._core.errors import UsageError
from lightning_tricks.accounting import matmul_parameters, recompute_flops_per_token, training_flops_per_token


def experts(active):
    return SimpleNamespace(**(vars(SHAPE) | {"n_experts": 8, "experts_per_token": active}))


SHAPE = SimpleNamespace(
    vocab_size=10, d_model=4, n_layers=3, n_heads=2, kv_heads=1, head_dim=2, ffn_width=8, activation="gelu"
)
REFUSED = [
    (partial(training_flops_per_token, SHAPE, 8, "half"), "attention='half': give one of causal, full"),
    (partial(training_flops_per_token, SHAPE, 0, "full"), "seq_len=0: give a length of at least 1"),
    (partial(recompute_flops_per_token, SHAPE, 8, "half", "none"), "attention='half'"),
    (
        partial(recompute_flops_per_token, SHAPE, 8, "full", "half"),
        "activation_checkpointing='half': give one of none, cheap, selective, full",
    ),
    *(
        (partial(matmul_parameters, experts(n)), f"experts_per_token={n}: give a number from 1 to n_experts=8")
        for n in (None, 0, 9)
    ),
]


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_cannot_be_computed_is_refused(call, words):
    with pytest.raises(UsageError, match=words):
        call()
