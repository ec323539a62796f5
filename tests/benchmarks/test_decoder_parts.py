"""What `decoder_parts`, `kept_memory` and `muon_cost` measure is what they say."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import decoder_parts, kept_memory, muon_cost

SAME = ("norm", "head", "head_512", "swiglu", "rotation", "attention_64", "attention_128", "attention_products")


@pytest.mark.parametrize("name", SAME)
def test_both_forms_give_the_same_gradients(name, monkeypatch):
    torch.manual_seed(0)
    drawn = torch.randn_like
    monkeypatch.setattr(torch, "randn_like", lambda x: drawn(x, memory_format=torch.contiguous_format).fill_(0.5))
    trial = dict(decoder_parts.trials("toy"))[name]
    torch.testing.assert_close(trial.tried(), trial.before(), rtol=1e-4, atol=1e-5)


def test_each_part_is_measured_and_stands_in_the_table():
    found = {"toy": decoder_parts.measure("toy", ["rotation"], 1)}
    assert list(found["toy"]) == ["rotation"]
    assert "rotation by halves" in decoder_parts.table({"sizes": found})


def test_a_block_with_full_checkpointing_keeps_its_input(monkeypatch):
    monkeypatch.setattr(kept_memory, "LENGTH", 16)
    assert kept_memory.units((64, 128), "full", False, torch.bfloat16) == 1.0
    assert kept_memory.units((64, 128), "full", False, torch.float32) == 2.0


def test_a_block_with_cheap_checkpointing_keeps_results_of_products():
    # queries, keys, values, the result of attention, gate and up, and its input; a number for each head in fp32
    assert kept_memory.units((64, 128), "cheap", False, torch.bfloat16) == pytest.approx(10, abs=0.1)


@pytest.mark.parametrize("shape", [(8, 8), (8, 16), (16, 8)])
def test_the_products_beside_muon_are_those_of_its_step(shape):
    optimizer, dtype = muon_cost.stepped({shape: 3})
    with FlopCounterMode(display=False) as step:
        optimizer.step()
    with FlopCounterMode(display=False) as products:
        muon_cost.products({shape: 3}, dtype)()
    assert step.get_total_flops() == products.get_total_flops() > 0
