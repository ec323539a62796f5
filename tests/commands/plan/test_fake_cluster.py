"""The fake cluster: any rank's part, the collectives of a step, and ranks that would not send the same."""

import dataclasses
import math
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_tricks._core.errors import UsageError
from lightning_tricks.commands.plan.fake_cluster import fake_world, view_cluster
from lightning_tricks.models import Decoder, Llama
from lightning_tricks.parallel.dims import ParallelDims
from lightning_tricks.parallel.parallelize import ParallelOptions, check_module

pytestmark = pytest.mark.long

CONFIG = Llama(vocab_size=64, d_model=32, n_layers=2, n_heads=4, d_ff=64, max_seq_len=32)
DIMS = ParallelDims(tensor=2, context=2).of_world(64)


def loss(decoder: Decoder) -> torch.Tensor:
    ids = torch.zeros(1, 32, dtype=torch.long)
    return decoder(ids, labels=ids)


class Uneven(Decoder):
    """Sends something on rank 0 alone, as a log line under `if rank == 0` does."""

    def forward(self, *args, **kwargs):
        nats = super().forward(*args, **kwargs)
        if dist.get_rank() == 0:
            dist.all_reduce(nats.detach().clone())
        return nats


def test_a_rank_has_its_part_of_each_matrix_and_sends_over_each_axis():
    view = view_cluster(lambda: Decoder(CONFIG), DIMS, ParallelOptions(), loss, [63])[0]
    assert view.parameters["blocks.0.attn.q.weight"] == (0, 32)  # 16 rows of a tensor rank over 32 shards: none is left
    assert view.parameters["blocks.0.attn_norm.weight"] == (0,) or view.parameters["blocks.0.attn_norm.weight"] == (1,)
    assert {collective.ranks for collective in view.collectives} == {2, 32}
    assert view.table.startswith("FSDP2 on shard 16 x context 2 x tensor 2\n")
    assert "over 32 shards a micro-batch: gathers 2 x " in view.table


def sent_over_four(view, least, whole):
    """Elements that four ranks send, in collectives of `least` or more, each times `whole` of its name."""
    sent = 0
    for collective in view.collectives:
        (shape,) = collective.sizes[-1:]
        elements = math.prod(int(size) for size in re.findall(r"\d+", shape.partition(")")[0]))
        if collective.ranks == 4 and elements >= least:
            sent += elements * whole.get(collective.name, 0)
    return sent


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_table_counts_what_tensor_ranks_send_for_a_token(sequence_parallel):
    dims, options = ParallelDims(tensor=4).of_world(12), ParallelOptions(sequence_parallel=sequence_parallel)
    view = view_cluster(lambda: Decoder(CONFIG), dims, options, loss, [0])[0]
    whole = {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 1, "all_reduce": 2}
    sent = sent_over_four(view, 32 * 32 / 4, whole)  # not the scales' gradients, nor the loss of 32 tokens
    assert f"a token: {4 * sent / 32 / 1024:.2f} KiB of activations" in view.table  # of 32 tokens, in fp32


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize(("method", "kv_heads", "tensor"), [("gather", 2, 1), ("gather", 4, 2), ("ulysses", 2, 1)])
def test_what_context_ranks_send_for_a_token_is_the_sum_of_the_collectives(method, kv_heads, tensor, mode):
    config = dataclasses.replace(CONFIG, n_kv_heads=kv_heads)
    dims = ParallelDims(tensor=tensor, context=4).of_world(12 * tensor)
    options = ParallelOptions(context_method=method, activation_checkpointing=mode)
    view = view_cluster(lambda: Decoder(config), dims, options, loss, [0])[0]
    # on a CPU positions and heads are exchanged by a gather, of which each rank keeps its part
    whole = {"all_gather_into_tensor": 4 if method == "gather" else 1, "reduce_scatter_tensor": 1}
    sent = sent_over_four(view, 8 * 8, whole)  # not the sums of the loss
    # 8 of the 32 tokens, in fp32; 2 blocks of width 32, whose forward pass runs twice with checkpointing
    times = 2 if mode == "none" else 3
    by_hand = {"gather": 2 * 4 * 8 * kv_heads // tensor, "ulysses": 4 * 32}[method]  # 2 heads are repeated for 4 ranks
    assert sent == 8 * 2 * times * by_hand
    assert f"over 4 context ranks: {4 * sent / 8 / 1024:.2f} KiB a token, " in view.table


EXPERTS = dataclasses.replace(CONFIG, n_experts=8, experts_per_token=2, d_expert=16)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_what_expert_ranks_send_for_a_token_is_the_sum_of_the_collectives(mode):
    dims, options = ParallelDims(expert=4).of_world(12), ParallelOptions(activation_checkpointing=mode)
    view = view_cluster(lambda: Decoder(EXPERTS), dims, options, loss, [0])[0]
    sent = sent_over_four(view, 32 * 32, {"alltoall_base_": 1})  # not the numbers of rows
    # 2 experts for each of 32 tokens, there and back; 2 blocks, whose forward pass runs twice with checkpointing
    assert sent == 32 * 2 * (2 if mode == "none" else 3) * 2 * 2 * 32
    assert f"over 4 expert ranks a token: {4 * sent / 32 / 1024:.2f} KiB of rows for experts" in view.table


def test_experts_are_sharded_over_the_ranks_that_have_the_same_and_gathered_with_their_block():
    dims = ParallelDims(expert=4).of_world(12)
    view = view_cluster(lambda: Decoder(EXPERTS), dims, ParallelOptions(), loss, [11])[0]
    # 2 of 8 experts, which 3 ranks share: there is no third of 16 outputs, so one rank has none
    assert view.parameters["blocks.0.mlp.experts.up"] == (0, 16, 32)
    dims = ParallelDims(expert=2).of_world(16)
    view = view_cluster(lambda: Decoder(EXPERTS), dims, ParallelOptions(), ranks=[15])[0]
    assert view.parameters["blocks.0.mlp.experts.up"] == (4, 2, 32)  # 4 experts over 8 ranks: by their outputs
    assert "each rank has 1/2 of the experts of 2 mixtures" in view.table
    gathered = 4 * 2 * 4 * 3 * 16 * 32 / 2**20  # in fp32, 2 blocks of 4 experts here
    assert f"over 8 shards of experts a micro-batch: gathers 2 x {gathered:.2f} MiB of weights" in view.table


def test_experts_that_cannot_be_shared_out_are_one_line():
    for decoder, says in (
        (Decoder(CONFIG), r"mesh\.expert=3: the model has no mixture of experts to share out: leave mesh\.expert at 1"),
        (Decoder(EXPERTS), r"mesh\.expert=3: the 8 experts of 'blocks\.0\.mlp' are no multiple of it: take another"),
    ):
        with pytest.raises(UsageError, match=says):
            check_module(decoder, ParallelDims(expert=3).of_world(3))


def test_ranks_that_would_send_different_things_are_refused_in_a_line():
    assert [view.rank for view in view_cluster(lambda: Decoder(CONFIG), DIMS, ParallelOptions(), loss)] == [0, 32, 63]
    with pytest.raises(UsageError, match=r"rank 2 and rank 0 would wait for each other for ever: collective \d+ of a"):
        view_cluster(lambda: Uneven(CONFIG), ParallelDims().of_world(4), ParallelOptions(), loss)


def test_an_error_of_a_rank_is_that_of_the_caller():
    with pytest.raises(UsageError, match=r"mesh\.tensor: Linear says nowhere"):
        view_cluster(lambda: nn.Linear(4, 4), DIMS, ParallelOptions())


def test_a_process_in_a_group_is_no_cluster():
    with fake_world(0, 2), pytest.raises(UsageError, match="needs a process without a process group"):
        view_cluster(lambda: Decoder(CONFIG), DIMS, ParallelOptions(), ranks=[0])
    assert not dist.is_initialized()


@pytest.mark.parametrize(("hold", "over_shards", "over_replicas"), [(False, 20, 20), (True, 5, 5)])
def test_gradients_that_wait_for_the_last_of_four_micro_batches_are_sent_once(hold, over_shards, over_replicas):
    def step(decoder):
        for number in range(4):
            if hold:  # as FSDP2Strategy does
                decoder.set_requires_gradient_sync(number == 3)
            nats = loss(decoder)
            if number < 3:
                nats.backward()
        return nats

    dims = ParallelDims(replicate=2).of_world(8)
    names = [c.name for c in view_cluster(lambda: Decoder(CONFIG), dims, ParallelOptions(), step, [0])[0].collectives]
    # two blocks, the embedding, the head, and what is in none
    assert sum("reduce_scatter" in name for name in names) == over_shards
    assert sum("allreduce" in name for name in names) == over_replicas
