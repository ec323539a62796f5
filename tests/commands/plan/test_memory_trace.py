"""The memory of a step traced without data is that of the real one, line by line."""

from functools import partial

import pytest
import torch
from parallel.test_activation_checkpointing import Watch
from torch import nn

from lightning_tricks import GPT2, Llama
from lightning_tricks._core.find_modules import repeated_blocks
from lightning_tricks.commands.plan.fake_cluster import at_once
from lightning_tricks.commands.plan.memory_trace import (
    FORWARD,
    LAST,
    LOSS,
    STEP,
    StepMemory,
    TraceOptions,
    _AllocationLog,
    largest_of_each_instant,
    trace_step,
)
from lightning_tricks.models import Decoder, attention
from lightning_tricks.optim import MuonAdamW, build_optimizer, muon

pytestmark = pytest.mark.long
ROWS, LENGTH = 2, 16
SMALL = {"vocab_size": 64, "d_model": 32, "n_heads": 2, "max_seq_len": LENGTH}


def loss_of(decoder):
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    return decoder(ids, labels=ids)


def adamw(module):
    return torch.optim.AdamW(module.parameters())


def traced(build, depth=2, **options):
    """In a forked process, as a plan does it; without an optimizer, where none is given."""

    def act():
        with torch.device("meta"):
            module = build(depth)
        given = {"loss": loss_of, "on_gpu": False, **options}
        return trace_step(module, repeated_blocks(module), TraceOptions(**given))

    (memory,) = at_once([act])
    return memory


def decoder(depth, config=Llama, mode="none", **sizes):
    made = Decoder(config(**{**SMALL, "n_layers": depth, **sizes}))
    made.set_activation_checkpointing(mode)
    return made


def really_kept(module, loss_of=loss_of):
    """Bytes that the forward pass keeps for the backward pass, beside the weights."""
    own = {tensor.untyped_storage().data_ptr() for tensor in [*module.parameters(), *module.buffers()]}
    kept = {}

    def pack(tensor):
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in own:
            kept[memory.data_ptr()] = memory  # held, so that no other one gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(module)
    assert loss.requires_grad
    return sum(memory.nbytes() for memory in kept.values())


def test_lines_of_a_module_worked_out_by_hand():
    def build(depth):
        return nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))

    memory = traced(build, loss=lambda module: module(torch.zeros(10, 8)).sum(), optimizer=adamw)
    parameters = 8 * 16 + 16 * 4
    step = memory.instants[STEP]
    assert step["weights"] == 4 * parameters
    assert step["gradients"] == 4 * parameters
    assert step["optimizer state"] == 8 * parameters + 2 * 4  # and the number of steps of two parameters
    # the batch, what relu gives, which the second layer takes, and the sum's input is not kept
    assert memory.instants["backward pass of head and loss"]["activations"] == 4 * (10 * 8 + 10 * 16) + 4
    assert memory.instants[FORWARD]["optimizer state"] == step["optimizer state"]  # there from the second step on


@pytest.mark.parametrize("build", [decoder, partial(decoder, config=GPT2), partial(decoder, qk_norm=True)])
def test_what_is_kept_for_the_backward_pass_is_what_saved_tensor_hooks_count(build):
    memory = traced(build)
    lines = memory.instants[LOSS]
    kept = lines["activations"] + lines.get("head and loss", 0)
    torch.manual_seed(0)
    real = really_kept(build(2))
    tables = kept - real  # rope tables, ids and a few numbers are made in the step, and kept by nobody else
    assert abs(tables) <= 0.05 * real


@pytest.mark.parametrize("budget", [0.0, 0.3, 0.5, 0.75, 1.0])
def test_activations_of_a_budget_are_the_storages_that_a_real_forward_pass_leaves(budget):
    build = partial(decoder, mode={"budget": budget}, n_kv_heads=1)
    lines = traced(build, 4).instants[LOSS]
    module = build(4)
    with Watch() as forward:
        loss = loss_of(module)
    assert loss.requires_grad
    real = forward.bytes_alive(without=[*module.parameters(), *module.buffers()])
    assert real == pytest.approx(lines["activations"] + lines["head and loss"], rel=0.01)


@pytest.mark.parametrize("micro_batches", [1, 4])  # Lightning drops those of the last step after the forward pass
def test_gradients_of_earlier_micro_batches_are_there_in_the_forward_pass(micro_batches):
    memory = traced(decoder, micro_batches=micro_batches, optimizer=adamw)
    assert memory.instants[FORWARD]["gradients"] == memory.instants[STEP]["gradients"]


def test_two_depths_tell_any_other_to_the_byte():
    four, five, eight = (traced(decoder, depth, optimizer=adamw) for depth in (4, 5, 8))
    assert four.at_depth(five, (4, 5), 8).instants == eight.instants


def test_a_batch_that_still_grows_with_the_depth_tells_no_other_depth(monkeypatch):
    def optimizer(module):
        return build_optimizer(module, lambda groups: MuonAdamW(groups, lr=0.1, fused=False))

    def at(*depths):
        return [traced(decoder, depth, optimizer=optimizer) for depth in depths]

    largest = max(p.numel() for p in decoder(1).blocks[0].parameters())  # three of them in a block
    monkeypatch.setattr(muon, "BATCH_BYTES_ON_CPU", 2 * 6 * largest)  # two blocks fill a batch
    four, five, eight = at(4, 5, 8)
    assert four.at_depth(five, (4, 5), 8).instants == eight.instants
    monkeypatch.setattr(muon, "BATCH_BYTES_ON_CPU", 2 * 18 * largest)  # six do
    four, five = at(4, 5)
    assert four.at_depth(five, (4, 5), 8) is None


def test_moments_at_different_places_are_not_extended():
    here = {("a", 0): {1: {"weights": 2}, 2: {"activations": 1}}}
    there = {("a", 0): {1: {"weights": 3}, 2: {"activations": 4}}}

    def grown(other):
        return StepMemory({}, moments=here).at_depth(StepMemory({}, moments=other), (4, 5), 8)

    assert grown(there).instants == {"a": {"activations": 1 + 4 * 3}}  # and not from 2 weights to 4 activations
    assert grown({("a", 0): {1: {"weights": 3}}}) is None
    assert grown({("b", 0): there["a", 0]}) is None


def test_a_gpus_norm_keeps_its_input_alone_as_ours_does_on_a_cpu(monkeypatch):
    monkeypatch.setattr(attention, "OWN_NORM_FROM", 0)

    def with_torchs_norms(depth):
        made = decoder(depth)
        for module in (made, *made.blocks):
            for name, norm in list(module.named_children()):
                if isinstance(norm, nn.RMSNorm):
                    setattr(module, name, nn.RMSNorm(norm.normalized_shape, norm.eps))
        return made

    def kept(build, on_gpu):
        return traced(build, on_gpu=on_gpu).instants[LOSS]["activations"]

    normed = 4 * ROWS * LENGTH * SMALL["d_model"]  # torch's on a CPU keeps another tensor of that size for 5 norms
    assert kept(with_torchs_norms, False) - kept(with_torchs_norms, True) >= 2 * normed
    assert kept(decoder, False) == kept(decoder, True) == kept(with_torchs_norms, True)


def test_what_torch_leaves_out_without_data_is_counted():
    def kept(build, x, **options):
        memory = traced(lambda depth: build(), loss=lambda m: first(m(torch.zeros(*x))).sum(), **options)
        return memory, memory.instants["backward pass of head and loss"]

    def first(output):
        return output[0] if isinstance(output, tuple) else output

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, 16, 8))

        def forward(self, x):
            return torch._grouped_mm(x, self.weight, offs=torch.tensor([4, 8], dtype=torch.int32))

    _, lines = kept(lambda: nn.LSTM(8, 32), (10, 4, 8))
    assert lines["activations"] >= 4 * 10 * 4 * 32 * (1 + 14)  # its output, and oneDNN's workspace
    assert kept(lambda: nn.LSTM(8, 32), (10, 4, 8), on_gpu=True)[0].notes  # cuDNN's is not known
    _, cpu = kept(lambda: nn.Conv2d(8, 8, 1), (2, 8, 16, 16))
    _, gpu = kept(lambda: nn.Conv2d(8, 8, 1), (2, 8, 16, 16), on_gpu=True)
    assert cpu["working memory"] > gpu["working memory"]  # copies in another layout
    memory, _ = kept(Experts, (8, 16), optimizer=adamw)  # refused in fp32 by torch's form without data
    assert memory.instants[STEP]["gradients"] == 4 * 2 * 16 * 8


def test_reduced_gradients_of_offloaded_shards_pass_through_the_device():
    log = _AllocationLog()
    log.enter(LAST)
    kept, gradient = torch.zeros(4), torch.zeros(2)
    log.record(kept)
    log.record(gradient)
    entry = log.live[gradient.untyped_storage()._cdata]
    entry.line, entry.on_host = "gradients", True
    more = torch.zeros(1)
    log.record(more)
    lines = {"working memory": 4 * (4 + 2)}  # and not with what comes later
    assert largest_of_each_instant(log.moments()) == {LAST: lines}
    assert largest_of_each_instant(log.moments(on_host=True)) == {LAST: {"gradients": 4 * 2}}
