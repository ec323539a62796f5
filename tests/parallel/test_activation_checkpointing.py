"""Activation checkpointing: the same gradients from fewer kept bytes, at the price of products run again."""

import copy
import functools
import gc
import weakref
from typing import get_args

import pytest
import torch
import transformers as hf
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.find_modules import repeated_blocks
from lightning_tricks.accounting.recompute import Mode, modes_of_blocks
from lightning_tricks.models import GPT2, Decoder, Llama
from lightning_tricks.parallel.activation_checkpointing import ATTENTION_OPS, LINEAR_OPS, checkpoint_block

SHAPE = {"vocab_size": 61, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 32}
CONFIGS = {"llama": Llama(**SHAPE, n_kv_heads=2), "gpt2": GPT2(**SHAPE)}
LINEARS = {"llama": 7, "gpt2": 6}


class Watch(TorchDispatchMode):
    """Counts operations and remembers every storage that came to be."""

    def __init__(self):
        super().__init__()
        self.linears = self.attentions = 0
        self.storages = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.linears += func in LINEAR_OPS
        self.attentions += func in ATTENTION_OPS
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.storages.append(weakref.ref(tensor.untyped_storage()))
        return out

    def bytes_alive(self, without=()):
        gc.collect()
        alive = {storage.data_ptr(): storage.nbytes() for ref in self.storages if (storage := ref()) is not None}
        own = {tensor.untyped_storage().data_ptr() for tensor in without}
        return sum(size for address, size in alive.items() if address not in own)


@functools.cache
def measured(name, mode, fused=False):
    """Bytes the blocks keep, what the backward pass ran again, and the gradients."""
    torch.manual_seed(0)
    decoder = Decoder(CONFIGS[name])
    decoder.fuse_projections(fused)
    decoder.set_activation_checkpointing(mode)
    input_ids = torch.randint(61, (2, 32))
    with Watch() as forward:
        loss = decoder(input_ids).float().square().mean()
    kept = forward.bytes_alive(decoder.parameters())
    with Watch() as backward:
        loss.backward()
    return kept, backward, {name: p.grad for name, p in decoder.named_parameters()}


@pytest.mark.parametrize("name", CONFIGS)
def test_each_mode_keeps_less_than_the_one_before(name):
    none, cheap, selective, full = (measured(name, mode)[0] for mode in get_args(Mode))
    assert full < selective < cheap < none
    assert full < 0.4 * none
    assert selective < 0.7 * none


@pytest.mark.parametrize(("name", "kv_width", "ffn_width"), [("llama", 16, 256), ("gpt2", 32, 128)])
def test_selective_keeps_attention_and_every_second_linear_layer_but_the_last_and_cheap_each_of_them(
    name, kv_width, ffn_width
):
    # a token: q, v, gate (or up) and what attention returns, with the softmax's logarithm of each of 4 heads
    numbers_a_token = 32 + kv_width + ffn_width + 32 + 4
    difference = measured(name, "selective")[0] - measured(name, "full")[0]
    assert difference == 3 * (2 * 32) * numbers_a_token * 4  # blocks, tokens, bytes of fp32
    # k and o, and up of a gated MLP
    more = kv_width + 32 + (ffn_width if name == "llama" else 0)
    assert measured(name, "cheap")[0] - measured(name, "selective")[0] == 3 * (2 * 32) * more * 4


@pytest.mark.parametrize(("name", "kv_width", "ffn_width"), [("llama", 16, 2 * 256), ("gpt2", 32, 128)])
def test_fused_blocks_keep_the_same_but_selective_keeps_queries_keys_and_values_and_nothing_of_the_mlp(
    name, kv_width, ffn_width
):
    for mode in ("none", "cheap", "full"):
        assert measured(name, mode, fused=True)[0] == measured(name, mode)[0]
    tokens = 3 * (2 * 32) * 4  # of three blocks, bytes of fp32
    cheap, selective, full = (measured(name, mode, fused=True)[0] for mode in ("cheap", "selective", "full"))
    assert selective - full == (32 + 2 * kv_width + 32 + 4) * tokens
    assert cheap - selective == (32 + ffn_width) * tokens  # o, and gate and up


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_bitwise_those_without(name, fused):
    _, _, expected = measured(name, "none", fused)
    for mode in ("cheap", "selective", "full"):
        _, _, found = measured(name, mode, fused)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("budget", [0.4, 0.6, 0.85])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("fused", [False, True])
def test_a_budget_mixes_the_modes_and_gradients_are_bitwise_those_without(name, budget, fused):
    _, _, expected = measured(name, "none", fused)
    torch.manual_seed(0)
    decoder = Decoder(CONFIGS[name])
    decoder.fuse_projections(fused)
    decoder.set_activation_checkpointing({"budget": budget})
    input_ids = torch.randint(61, (2, 32))
    with Watch() as forward:
        loss = decoder(input_ids).float().square().mean()
    modes = [block.checkpointing for block in decoder.blocks]
    assert len(set(modes)) == 2
    assert modes == modes_of_blocks(CONFIGS[name], {"budget": budget}, 32, fused)
    # each block keeps what it keeps beside others of its mode; a block that keeps all has the mask of the causal rows
    kept = forward.bytes_alive(decoder.parameters())
    assert kept == pytest.approx(sum(measured(name, mode, fused)[0] for mode in modes) / 3, rel=0.01)
    loss.backward()
    torch.testing.assert_close({name: p.grad for name, p in decoder.named_parameters()}, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_backward_pass_runs_again_what_each_mode_says(name):
    runs = {mode: measured(name, mode)[1] for mode in get_args(Mode)}
    again = {mode: runs[mode].linears - runs["none"].linears for mode in runs}
    # per block: all but the last linear layer; of those every second one (k, o, up of a gated MLP; k, o of the other)
    selective = 3 * {"llama": 3, "gpt2": 2}[name]
    assert again == {"none": 0, "cheap": 0, "selective": selective, "full": 3 * (LINEARS[name] - 1)}
    assert {mode: runs[mode].attentions for mode in runs} == {"none": 0, "cheap": 0, "selective": 0, "full": 3}
    runs = {mode: measured(name, mode, fused=True)[1] for mode in get_args(Mode)}
    again = {mode: runs[mode].linears - runs["none"].linears for mode in runs}
    # of four products the last one is not needed, and selective keeps the first: o, and that of gate and up or of up
    assert again == {"none": 0, "cheap": 0, "selective": 3 * 2, "full": 3 * 3}


def test_checkpointed_blocks_keep_names_classes_and_random_numbers():
    block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    plain, x = copy.deepcopy(block), torch.randn(8, 4)
    checkpoint_block(block, "full")
    checkpoint_block(block, "full")
    for module in (plain, block):
        torch.manual_seed(0)
        module(x).square().mean().backward()
    assert [name for name, _ in block.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert type(block) is nn.Sequential
    for ours, theirs in zip(block.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
CACHING = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=2)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2)),
}


@pytest.mark.parametrize(("name", "mode"), [("llama", "selective"), ("mixtral", "full"), ("gpt2", "full")])
def test_a_block_that_appends_to_a_cache_has_the_same_gradients_when_checkpointed(name, mode):
    torch.manual_seed(0)
    plain = CACHING[name]()  # use_cache is on, and GPT-2 gives its blocks the cache by position
    checkpointed, found = copy.deepcopy(plain), {}
    for block in repeated_blocks(checkpointed).values():
        checkpoint_block(block, mode)
    ids, mask = torch.randint(64, (2, 16)), torch.ones(2, 16, dtype=torch.long)
    mask[0, 10:] = 0
    for model in (plain, checkpointed):
        torch.manual_seed(0)  # GPT-2 has dropout
        loss = model.train()(input_ids=ids, labels=ids, attention_mask=mask).loss
        loss.backward()
        found[model] = [loss.detach(), *(p.grad for p in model.parameters())]
    torch.testing.assert_close(found[checkpointed], found[plain], rtol=0, atol=0)


def test_a_cache_that_holds_tokens_is_refused():
    model, ids, prefix = CACHING["llama"](), torch.randint(64, (2, 4)), hf.DynamicCache()
    checkpoint_block(model.model.layers[1], "full")
    model(input_ids=ids, labels=ids)  # the first block is not checkpointed and fills its part of the cache
    for layer in range(2):
        prefix.update(torch.zeros(2, 2, 3, 16), torch.zeros(2, 2, 3, 16), layer)
    with pytest.raises(UsageError, match=r"^activation_checkpointing: past_key_values of Llama\w+ holds 3 tokens"):
        model(input_ids=ids, labels=ids, past_key_values=prefix)


def test_without_gradients_a_checkpointed_block_appends_to_its_cache():
    model, cache, ids = CACHING["llama"]().eval(), hf.DynamicCache(), torch.randint(64, (2, 4))
    for layer in model.model.layers:
        checkpoint_block(layer, "full")
    with torch.no_grad():
        for start in (0, 2):
            last = model(input_ids=ids[:, start : start + 2], past_key_values=cache, use_cache=True).logits
        assert [cache.get_seq_length(layer) for layer in range(2)] == [4, 4]
        torch.testing.assert_close(last, model(input_ids=ids, use_cache=False).logits[:, 2:])


def test_selective_keeps_every_second_linear_layer_of_a_block_of_any_length():
    block = nn.Sequential(*(nn.Linear(8, 8) for _ in range(9)))
    checkpoint_block(block, "selective")
    for _ in range(2):  # counted from 1 in each forward pass
        out = block(torch.randn(4, 8, requires_grad=True))
        with Watch() as again:
            out.sum().backward()
        # linear layers 2, 4, 6 and 8 run again, on top of two products for each of 9 layers
        assert again.linears == 2 * 9 + 4
