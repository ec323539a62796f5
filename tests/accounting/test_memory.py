"""Memory of training by formula: values worked out by hand, and what the real blocks keep."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_tricks import GPT2, Llama
from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.replaced import replaced
from lightning_tricks.accounting.gpus import GPUS, find_gpu, link_of
from lightning_tricks.accounting.memory import activation_bytes_per_token, training_memory, training_memory_gb
from lightning_tricks.commands.plan.fake_cluster import at_once
from lightning_tricks.commands.plan.memory_trace import LOSS, TraceOptions, trace_step
from lightning_tricks.models import attention
from lightning_tricks.models.decoder import Decoder

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_adamw_in_fp32_takes_sixteen_bytes_a_parameter():
    memory = training_memory(7 * 10**9, B=1, S=4096, L=32, D=4096)
    assert (memory.weights, memory.gradients, memory.optimizer) == (28 * 10**9, 28 * 10**9, 56 * 10**9)
    assert memory.activations == 34 * 32 * 4096 * 4096
    assert memory.total == sum((memory.weights, memory.gradients, memory.optimizer, memory.activations))
    assert training_memory_gb(7 * 10**9, 1, 4096, 32, 4096) == pytest.approx(112 + 34 * 32 * 4096**2 / 1e9)


def test_full_checkpointing_keeps_inputs_and_one_layer():
    memory = training_memory(10**6, B=2, S=8, L=5, D=16, activation_checkpointing="full")
    assert memory.activations == 2 * 5 * 256 + 34 * 256


@pytest.mark.parametrize("name", ["N", "B", "S", "L", "D"])
def test_a_number_below_one_is_refused(name):
    with pytest.raises(UsageError, match=f"training_memory: {name}=0: give a number of at least 1"):
        training_memory(**{"N": 1, "B": 1, "S": 1, "L": 1, "D": 1, name: 0})


def test_another_mode_is_refused():
    with pytest.raises(UsageError, match="activation_checkpointing='selective': this formula knows none and full"):
        training_memory(1, 1, 1, 1, 1, "selective")
    with pytest.raises(UsageError, match="activation_checkpointing='some': give one of none, "):
        activation_bytes_per_token(Llama(), "some")


def kept_by_a_block(config, mode):
    """Bytes a token that one more block keeps on a GPU, in bf16 as FSDP2 casts it."""

    def act(depth):
        with torch.device("meta"):
            decoder = Decoder(config(n_layers=depth)).bfloat16()
        decoder.set_activation_checkpointing(mode)

        def loss(module):
            ids = torch.zeros(2, 256, dtype=torch.long)
            return module(ids, labels=ids)

        with replaced(attention, "PRODUCTS_MAX_LENGTH", 0):
            return trace_step(decoder, dict(enumerate(decoder.blocks)), TraceOptions(loss))

    two, three = (memory.instants[LOSS]["activations"] for memory in at_once([partial(act, 2), partial(act, 3)]))
    return (three - two) / (2 * 256)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["none", "cheap", "selective", "full"])
@pytest.mark.parametrize(
    "config",
    [
        partial(Llama, vocab_size=64, d_model=256, n_heads=4, n_kv_heads=2, d_ff=640, max_seq_len=256),
        partial(Llama, vocab_size=64, d_model=256, n_heads=4, activation="relu2", max_seq_len=256),
        partial(GPT2, vocab_size=64, d_model=256, n_heads=4, bias=False, max_seq_len=256),
    ],
    ids=["swiglu", "relu2", "gelu"],
)
def test_the_formula_is_what_a_block_keeps(config, mode):
    formula = activation_bytes_per_token(config(n_layers=1), mode)
    # rotary tables, numbers of each row and causal masks are not in it
    assert kept_by_a_block(config, mode) == pytest.approx(formula, rel=0.03)


def test_a_gpu_is_found_by_its_word_with_its_peak_and_datasheet():
    card = find_gpu("H100")
    assert (card.memory_gb, card.link_gb, card.peak("bf16")) == (80, 450.0, 989.5e12)
    assert card.source == "https://www.nvidia.com/en-us/data-center/h100/"
    assert all(one.peak("bf16") or word == "t4" for word, one in GPUS.items())


def test_the_memory_of_an_h200_is_that_which_torch_reported():
    machine = json.loads((RESULTS / "gpu-2026-11-26" / "yardstick.json").read_text())["machine"]
    assert machine["gpu"] == "NVIDIA H200"
    assert machine["gpu_memory_gib"] == round(find_gpu("h200").bytes / 2**30, 1)


@pytest.mark.parametrize(
    ("name", "link"),
    [("H100 80GB HBM3", 450), ("H100 PCIe", 63), ("A100-SXM4-40GB", 300), ("A100-PCIE-40GB", 31), ("L40S", 31),
     ("GH200 480GB", 450), ("Tesla T4", 31), ("B200", 900)],
)  # fmt: skip
def test_a_link_is_found_by_the_drivers_name(name, link):
    assert link_of(name) == link


def test_an_unknown_gpu_names_the_nearest_and_the_options_for_any_other():
    with pytest.raises(UsageError, match=r"gpu=h1000: did you mean h100\? .*--gpu_memory_gb, --peak_tflops, --link_gb"):
        find_gpu("h1000")
