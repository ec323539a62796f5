"""torch.compile sees one graph: of the whole model, and of all blocks alike, with and without checkpointing."""

import dataclasses

import pytest
import torch

from lightning_tricks.models import GPT2, Decoder, Llama

SHAPE = {"vocab_size": 61, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 16}
CONFIGS = {"llama": Llama(**SHAPE, n_kv_heads=2, qk_norm=True), "gpt2": GPT2(**SHAPE)}
CONFIGS["experts"] = Llama(**SHAPE, n_experts=4, d_expert=16, n_shared_experts=1)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


def trained(name, *, compiled, mode="none", documents=False, autocast=False, n_layers=1, fused=False):
    """Logits and gradients of one step."""
    torch.manual_seed(0)
    decoder = Decoder(dataclasses.replace(CONFIGS[name], n_layers=n_layers))
    decoder.set_activation_checkpointing(mode)
    decoder.fuse_projections(fused)
    model = decoder
    if compiled == "whole":
        model = torch.compile(decoder, fullgraph=True, backend="aot_eager")
    elif compiled == "blocks":
        for block in decoder.blocks:
            block.compile(fullgraph=True, backend="aot_eager")
    input_ids = torch.randint(61, (2, 16))
    document_ids = torch.arange(16).div(6, rounding_mode="floor").expand(2, 16) if documents else None
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(input_ids, document_ids)
    logits.float().square().mean().backward()
    return {"logits": logits.detach()} | {name: p.grad for name, p in decoder.named_parameters()}


# each mode of checkpointing with each way to compile it, each architecture with some of them: it does not ask for it;
# the whole model with the two other modes is below, with documents


@pytest.mark.parametrize(
    ("name", "mode", "fused"),
    [
        ("gpt2", "none", True),
        ("gpt2", "full", False),
        ("llama", "selective", False),
        ("llama", "selective", True),
        ("llama", "cheap", True),
        *(("experts", m, m != "none") for m in ("none", "selective", "full")),
    ],
)
def test_one_graph_of_all_blocks_gives_the_same_logits_and_gradients(name, mode, fused):
    torch._dynamo.utils.counters.clear()
    found = trained(name, compiled="blocks", mode=mode, n_layers=2, fused=fused)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch.testing.assert_close(found, trained(name, compiled="no", n_layers=2))


def test_blocks_of_a_budget_share_a_graph_for_each_mode():
    torch._dynamo.utils.counters.clear()
    found = trained("llama", compiled="blocks", mode={"budget": 0.4}, n_layers=4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    torch.testing.assert_close(found, trained("llama", compiled="no", n_layers=4))


@pytest.mark.parametrize(("name", "mode"), [("llama", "full"), ("gpt2", "none")])
def test_one_graph_with_documents_and_autocast(name, mode):
    options = {"documents": True, "autocast": True}
    found = trained(name, compiled="whole", mode=mode, fused=mode == "none", **options)
    expected = trained(name, compiled="no", **options)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=2e-3)
