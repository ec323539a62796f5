"""What the blocks of our decoder keep for the backward pass, as `plan` traces it, by a formula worked out by hand."""

from functools import partial

import pytest
import torch

from lightning_tricks import GPT2, Llama
from lightning_tricks.commands.plan.fake_cluster import at_once
from lightning_tricks.commands.plan.memory import kernels_of_a_gpu
from lightning_tricks.commands.plan.memory_trace import LOSS, TraceOptions, trace_step
from lightning_tricks.models.decoder import Decoder


def bytes_of_blocks(shape, mode, fused=False, itemsize=2):
    """Bytes a token that the blocks of our decoder keep on a GPU, by hand, for products and a residual stream in bf16.

    The input of the block and that of the MLP's norm; both norms' results, queries, keys, values and attention's output
    with a number for each head; of a gated MLP gate, its activation, up and their product, of others what goes into the
    activation and what comes out of it (of relu2 what comes out of relu and out of the square).
    """
    d, kv, f = shape.d_model, shape.kv_heads * shape.head_dim, shape.ffn_width
    attention, gated = itemsize * d + 4 * shape.n_heads, shape.activation == "swiglu"
    if mode == "full":
        return shape.n_layers * itemsize * d
    block = {
        "selective": itemsize * (2 * d + (2 * kv if fused else kv + f)),
        "cheap": itemsize * (3 * d + 2 * kv + (2 if gated else 1) * f),
        "none": itemsize * (5 * d + 2 * kv + (4 if gated else 2) * f),
    }[mode]
    return shape.n_layers * (block + attention)


def kept_by_a_block(config, mode, fused):
    """Bytes a token that one more block keeps on a GPU, in bf16 as FSDP2 casts it."""

    def act(depth):
        with torch.device("meta"):
            decoder = Decoder(config(n_layers=depth)).bfloat16()
        decoder.set_activation_checkpointing(mode)
        decoder.fuse_projections(fused)

        def loss(module):
            ids = torch.zeros(2, 256, dtype=torch.long)
            return module(ids, labels=ids)

        options = TraceOptions(loss, replaced=kernels_of_a_gpu())
        return trace_step(decoder, dict(enumerate(decoder.blocks)), options)

    two, three = (memory.instants[LOSS]["activations"] for memory in at_once([partial(act, 2), partial(act, 3)]))
    return (three - two) / (2 * 256)


SIZES = {"vocab_size": 64, "d_model": 256, "n_heads": 4, "max_seq_len": 256}
CONFIGS = {
    "swiglu": partial(Llama, **SIZES, n_kv_heads=2, d_ff=640),
    "relu2": partial(Llama, **SIZES, activation="relu2"),
    "gelu": partial(GPT2, **SIZES, bias=False),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "mode", "fused"),
    [
        *(("swiglu", mode, False) for mode in ("none", "cheap", "selective", "full")), ("relu2", "none", False),
        ("gelu", "cheap", False), ("swiglu", "none", True), ("swiglu", "selective", True),
    ],
)  # fmt: skip
def test_the_formula_is_what_a_block_keeps(config, mode, fused):
    config = CONFIGS[config]
    formula = bytes_of_blocks(config(n_layers=1), mode, fused)
    # rotary tables, numbers of each row and causal masks are not in it
    assert kept_by_a_block(config, mode, fused) == pytest.approx(formula, rel=0.03)
