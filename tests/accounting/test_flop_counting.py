"""FLOPs of any module's training step: by hand, and apart from what is recomputed."""

import contextlib

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from harness import processes
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_tricks.accounting import matmul_parameters, recompute_flops_per_token, training_flops_per_token
from lightning_tricks.accounting.flop_counting import CannotCount, FlopCounter, count_flops
from lightning_tricks.models import GPT2, Decoder, Llama

# 3 rows through Linear(8, 16) and Linear(16, 4): 2 * 3 * 8 * 16 = 768 and 2 * 3 * 16 * 4 = 384 forward. Backward each
# weight's gradient costs as much again, and so does each input's, but for the first layer's.
FORWARD, TOTAL = 768 + 384, 2 * 768 + 3 * 384


class Net(pl.LightningModule):
    def __init__(self, step=None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.step = step or (lambda self, x: self.run(x).sum())

    def run(self, x):
        return self.second(F.relu(self.first(x)))

    def training_step(self, batch, batch_idx):
        return self.step(self, batch)


BATCH = torch.ones(3, 8)


def counted(net, batch, context=contextlib.nullcontext):
    """The FLOPs of one step and its backward pass."""
    with count_flops(net) as counter:
        with context():
            loss = net.training_step(batch, 0)
        if loss is not None:
            loss.backward()
    return counter.flops


def test_products_forward_and_backward_are_counted():
    assert counted(Net(), BATCH) == (TOTAL, 0)


def test_a_frozen_layer_spends_nothing_on_its_gradient():
    net = Net()
    net.first.requires_grad_(False)
    assert counted(net, BATCH) == (768 + 2 * 384, 0)


def test_convolutions_are_counted():
    net = Net(lambda self, x: self.conv(x).sum())
    net.conv = nn.Conv2d(3, 5, 3, padding=1)
    # each of 2 * 6 * 6 * 5 outputs is a product of 3 * 3 * 3; backward the weight's gradient alone
    assert counted(net, torch.ones(2, 3, 6, 6)) == (2 * 2 * 2 * 6 * 6 * 5 * 27, 0)


@pytest.mark.parametrize("kind", ["math", "fused"])
@pytest.mark.parametrize("heads_of_keys", [4, 2])
def test_attention_counts_in_full_whichever_kernel_runs_it(kind, heads_of_keys):
    def step(self, x):
        q = x * self.scale
        k, v = q[:, :heads_of_keys], q[:, :heads_of_keys]
        backend = (
            torch.nn.attention.SDPBackend.MATH if kind == "math" else torch.nn.attention.SDPBackend.FLASH_ATTENTION
        )
        with torch.nn.attention.sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads_of_keys < 4).sum()

    net = Net(step)
    net.scale = nn.Parameter(torch.ones(()))
    # 2 rows, 4 heads, 16 x 16 pairs of positions, width 8; two products forward, four backward
    assert counted(net, torch.ones(2, 4, 16, 8)) == (6 * 2 * 2 * 4 * 16 * 16 * 8, 0)


# by the shapes of both matrices: 16 rows, columns or inner indices, in groups; a product of each has 2 * 8 * 16 FLOPs
GROUPED = {
    "rows": ((16, 8), (3, 8, 16)),
    "columns": ((3, 8, 16), (16, 16)),
    "inner": ((8, 16), (16, 16)),
    "one each": ((4, 4, 8), (4, 8, 16)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", GROUPED)
def test_grouped_products_are_counted_whatever_their_groups_are(kind, dtype):
    def step(self, batch):
        ends = None if kind == "one each" else torch.tensor([2, 2, 16], dtype=torch.int32)
        return F.grouped_mm(self.a, self.b, offs=ends).square().sum()

    net = Net(step)
    net.a, net.b = (nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in GROUPED[kind])
    # forward, and the gradients of both
    assert counted(net, BATCH) == (3 * 16 * 2 * 8 * 16, 0)


def mixture(name):
    from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {
        "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    if name == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**sizes, intermediate_size=48, num_local_experts=4))
    own = {"moe_intermediate_size": 48, "num_experts": 4, "intermediate_size": 64, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **own))


@pytest.mark.parametrize(
    ("name", "precision"), [("mixtral", "fp32"), ("qwen3_moe", "bf16-mixed"), ("mixtral", "bf16-true")]
)
def test_mixtures_of_transformers_have_the_flops_of_their_closed_form(name, precision):
    net = Net(lambda self, ids: self.model(input_ids=ids, labels=ids, use_cache=False).loss)
    net.model = mixture(name).to(torch.bfloat16 if precision == "bf16-true" else torch.float32)
    model, again = counted(net, torch.ones(2, 16, dtype=torch.long), context=in_bf16 if "mixed" in precision else
                               contextlib.nullcontext)  # fmt: skip
    # weights that a token meets: q and o, k and v, the router, three matrices of two experts each, and the head
    weights = 2 * 32 * 32 + 2 * 32 * 16 + 32 * 4 + 2 * 3 * 32 * 48 + 32 * 96
    attention = 2 * 2 * 16 * 32  # scores and values of 16 tokens
    assert again == 0
    # and a few FLOPs for the angles of the rotary embedding
    assert model / 32 == pytest.approx(3 * (2 * weights + attention), rel=0.001)


def test_what_a_checkpoint_runs_again_is_counted_apart():
    def again(self, x):
        return checkpoint(self.run, x, use_reentrant=False).sum()

    def again_reentrant(self, x):
        return checkpoint(self.run, x.clone().requires_grad_(), use_reentrant=True).sum()

    # the newer form stops when it has what the backward pass needs, which the last product is not
    assert counted(Net(again), BATCH) == (TOTAL, 768)
    # the older one runs all, and wants a gradient of its input
    assert counted(Net(again_reentrant), BATCH) == (TOTAL + 768, FORWARD)


def test_a_gradient_of_a_gradient_is_the_models_own():
    def penalty(self, x):
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self.first(x).sum(), x, create_graph=True)
        return gradient.square().sum()

    # forward, the gradient of x, and backward through that: each 768; the inner ones' gradient is one, too
    model, recompute = counted(Net(penalty), BATCH)
    assert recompute == 0
    assert model == 3 * 768


# the closed form of a recomputed forward pass asks for the architecture as the whole does
@pytest.mark.parametrize(
    ("attention", "mode", "grouped", "fused"),
    [
        (Llama, "none", 2, False), (GPT2, "none", None, True), (Llama, "selective", None, False),
        (GPT2, "selective", 2, False), (Llama, "selective", 2, True), (GPT2, "selective", None, True),
        (Llama, "full", 2, False), (GPT2, "full", None, True), (Llama, "cheap", 2, True),
    ],
)  # fmt: skip
def test_closed_form_and_count_agree_on_our_decoder(attention, mode, grouped, fused):
    config = attention(vocab_size=96, d_model=32, n_layers=1, n_heads=4, n_kv_heads=grouped, max_seq_len=64)
    tokens = torch.randint(0, 96, (2, 64))
    net = Net(lambda self, batch: self.decoder(batch, labels=batch))
    net.decoder = Decoder(config)
    net.decoder.set_activation_checkpointing(mode)
    net.decoder.fuse_projections(fused)
    model, recompute = (flops / tokens.numel() for flops in counted(net, tokens))
    assert model == pytest.approx(training_flops_per_token(config, 64, "full"), rel=0.01)
    assert recompute == pytest.approx(recompute_flops_per_token(config, 64, "full", mode, fused), rel=0.01)


@pytest.mark.parametrize("mode", ["none", "cheap", "selective", "full", {"budget": 0.3}])
@pytest.mark.parametrize(("shared", "fused"), [(0, False), (2, False), (2, True)])
def test_closed_form_and_count_are_equal_for_experts(mode, shared, fused):
    config = Llama(
        vocab_size=96, d_model=32, n_layers=3, n_heads=4, max_seq_len=64, n_experts=8, experts_per_token=2, d_expert=16,
        n_shared_experts=shared, dense_layers=1, d_ff=48, sequence_balance_weight=0.01, router_z_weight=0.01,
    )  # fmt: skip
    tokens = torch.randint(0, 96, (2, 64))
    net = Net(lambda self, batch: self.decoder(batch, labels=batch))
    net.decoder = Decoder(config)
    net.decoder.set_activation_checkpointing(mode)
    net.decoder.fuse_projections(fused)
    model, recompute = (flops / tokens.numel() for flops in counted(net, tokens))
    assert model == training_flops_per_token(config, 64, "full")
    assert recompute == recompute_flops_per_token(config, 64, "full", mode, fused)
    others = 96 * 32 + 32 * 7  # the embedding and the norms
    assert matmul_parameters(config, active=False) == sum(p.numel() for p in net.decoder.parameters()) - others
    assert matmul_parameters(config, active=False) - matmul_parameters(config) == 2 * (8 - 2) * 3 * 32 * 16


@contextlib.contextmanager
def in_bf16():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


def test_operators_that_arrive_whole_are_counted_under_inference_mode():
    counter = FlopCounter(net := Net())
    with torch.inference_mode(), counter.counting():
        net.run(BATCH)
    assert counter.flops == (FORWARD, 0)


def test_a_torch_that_lacks_what_is_asked_gives_no_figure(monkeypatch):
    monkeypatch.delattr(torch.autograd, "_engine_run_backward")
    with count_flops(net := Net()) as counter:
        net.run(BATCH)
    with pytest.raises(CannotCount, match=r"^this version of torch does not tell when a backward pass begins$"):
        assert counter.flops


def test_a_count_that_cannot_be_interrupted_is_no_figure():
    counter = FlopCounter(net := Net())

    def step(product):
        with counter.counting(False):
            product(BATCH)

    with counter.counting():
        net.run(BATCH)
        step(net.first)  # as an optimizer that multiplies matrices
    assert counter.flops == (FORWARD, 0)
    with counter.counting(), FlopCounter(net):
        step(net.first)
    with pytest.raises(CannotCount, match="training_step has entered another dispatch mode"):
        assert counter.flops


def count_in_shards(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    rows, weight = distribute_tensor(torch.ones(4, 8), mesh, [Shard(0)]), distribute_tensor(torch.ones(8, 16), mesh)
    counter = FlopCounter(Net())
    with counter.counting():
        assert (rows @ weight).shape == (4, 16)
    assert counter.flops == (2 * 2 * 8 * 16, 0), "the other two rows are the other rank's"
    torch.distributed.destroy_process_group()


@pytest.mark.long
def test_of_a_sharded_product_this_devices_part_is_counted():
    processes.run(count_in_shards)
