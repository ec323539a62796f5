"""A mixture of experts equals those of transformers, and no micro-batch, mode or validation changes what it learns."""

import inspect
import re
import typing

import pytest
import torch
import transformers as hf
from models.decoders import build, tokens
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.protocols import CountsInBackward, HasExperts
from lightning_tricks.models import Decoder, Llama
from lightning_tricks.models.decoder import MLP
from lightning_tricks.models.moe import Mixture, take_loads
from lightning_tricks.optim.param_roles import param_roles
from lightning_tricks.precision.bf16_true import to_bf16

SIZES = {"vocab_size": 61, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 24, "d_ff": 48}
OF_8 = {"n_experts": 8, "experts_per_token": 2, "d_expert": 16}
LOSSES = {"sequence_balance_weight": 0.01, "router_z_weight": 0.001}
CONFIG = Llama(**SIZES, **OF_8, **LOSSES, n_shared_experts=1, dense_layers=1)
THEIRS = {"hidden_size": 32, "num_experts_per_tok": 2, "hidden_act": "silu"}
V3 = {"moe_intermediate_size": 16, "n_routed_experts": 8, "n_shared_experts": 2, "norm_topk_prob": True}
OLMOE = hf.OlmoeConfig(**THEIRS, intermediate_size=16, num_experts=8, norm_topk_prob=False)
QWEN3 = hf.Qwen3MoeConfig(**THEIRS, moe_intermediate_size=16, num_experts=8, norm_topk_prob=True)
SHARED = {"router": "sigmoid", "n_shared_experts": 2}
CASES = {
    "Mixtral": (MixtralSparseMoeBlock, hf.MixtralConfig(**THEIRS, intermediate_size=16, num_local_experts=8), {}),
    "Qwen3-MoE": (Qwen3MoeSparseMoeBlock, QWEN3, {}),
    "OLMoE": (OlmoeSparseMoeBlock, OLMOE, {"normalize_router": False}),
    "DeepSeek-V3": (
        DeepseekV3MoE, hf.DeepseekV3Config(**THEIRS, **V3, n_group=1, topk_group=1, routed_scaling_factor=2.5),
        {**SHARED, "router_scale": 2.5},
    ),
    "DeepSeek-V3 in groups": (
        DeepseekV3MoE, hf.DeepseekV3Config(**THEIRS, **V3, n_group=4, topk_group=2, routed_scaling_factor=1.0),
        {**SHARED, "router_groups": 4, "groups_per_token": 2},
    ),
}  # fmt: skip


def mixture(**options):
    config = Llama(**SIZES, **OF_8, **options)
    shared = MLP(config, config.n_shared_experts * config.expert_width) if config.n_shared_experts else None
    torch.manual_seed(0)
    found = Mixture(config, shared)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.normal_(0, 0.3)
    return found


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_transformers(name):
    kind, config, options = CASES[name]
    config._experts_implementation = "eager"
    ours, theirs = mixture(**options), kind(config)
    with torch.no_grad():
        theirs.gate.weight.copy_(ours.router.weight)
        theirs.experts.gate_up_proj.copy_(torch.cat((ours.experts.gate, ours.experts.up), 1))
        theirs.experts.down_proj.copy_(ours.experts.down)
        if ours.shared is not None:
            ours.router.bias.copy_(torch.linspace(-0.3, 0.3, 8))
            theirs.gate.e_score_correction_bias.copy_(ours.router.bias)
            for part in ("gate", "up", "down"):
                theirs.shared_experts.get_submodule(f"{part}_proj").weight.copy_(ours.shared.get_submodule(part).weight)
    inputs = [torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)]
    outputs = ours(inputs[0])[0], theirs(inputs[1])
    weights = torch.randn(2, 16, 32)
    for output in outputs:
        (output * weights).sum().backward()
    pairs = [
        outputs, (inputs[0].grad, inputs[1].grad), (ours.router.weight.grad, theirs.gate.weight.grad),
        (torch.cat((ours.experts.gate.grad, ours.experts.up.grad), 1), theirs.experts.gate_up_proj.grad),
        (ours.experts.down.grad, theirs.experts.down_proj.grad),
    ]  # fmt: skip
    for found, expected in pairs:  # sums of up to 32 products in fp32, in another order
        assert (found - expected).norm() <= 2e-6 * expected.norm()


def learned(decoder, parts=1, mode="none"):
    """Loss, gradients and loads of four rows in so many micro-batches."""
    decoder.set_activation_checkpointing(mode)
    decoder.zero_grad()
    total = 0.0
    for ids, labels in zip(tokens(4, 24).chunk(parts), tokens(4, 24, seed=2).chunk(parts), strict=True):
        nats = decoder(ids, labels=labels)
        nats.backward()
        total += nats.item()
    return total, {n: p.grad.clone() for n, p in decoder.named_parameters()}, take_loads([*decoder.routers().values()])


@pytest.mark.parametrize(("parts", "mode"), [(4, "none"), (2, "cheap"), (1, "selective"), (4, "full")])
def test_micro_batches_and_checkpointing_change_neither_gradients_nor_counts(parts, mode):
    decoder = build(CONFIG)
    loss, gradients, loads = learned(decoder)
    found = learned(decoder, parts, mode)
    assert found[0] == pytest.approx(loss, rel=1e-6)
    for name, expected in gradients.items():
        assert (found[1][name] - expected).norm() <= 1e-6 * expected.norm(), name
    assert loads.shape == (2, 10)
    assert torch.equal(found[2][:, :8], loads[:, :8])  # tokens of each expert, exactly
    assert loads[:, :8].sum(1).tolist() == [4 * 24 * 2] * 2
    torch.testing.assert_close(found[2][:, 8:], loads[:, 8:])
    assert (loads[:, 8] > 0).all()
    assert (loads[:, 8] / (4 * 24) <= torch.tensor(8.0).log()).all()  # nats


class Watch(TorchDispatchMode):
    """The shapes of products and the number of top-k's that run."""

    def __init__(self):
        super().__init__()
        self.products, self.topks = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.topks += func is torch.ops.aten.topk.default
        if func is torch.ops.aten.mm.default:
            self.products.append(tuple(out.shape))
        return out


@pytest.mark.parametrize(("shared", "fused"), [(0, False), (0, True), (1, False), (1, True)])
@pytest.mark.parametrize("mode", ["cheap", "selective", "full"])
def test_no_mode_runs_a_router_again(mode, shared, fused):
    decoder = build(Llama(**SIZES, **OF_8, n_shared_experts=shared))
    decoder.set_activation_checkpointing(mode)
    decoder.fuse_projections(fused)
    with Watch() as forward:
        loss = decoder(tokens(4, 24), labels=tokens(4, 24, seed=2))
    with Watch() as backward:
        loss.backward()
    assert (forward.topks, backward.topks) == (3, 0)
    assert forward.products.count((96, 8)) == 3  # logits of 96 tokens
    assert backward.products.count((96, 8)) == 0


def test_a_validation_counts_nothing_and_its_loss_is_the_cross_entropy_alone():
    decoder = build(CONFIG)
    ids, labels = tokens(4, 24), tokens(4, 24, seed=2)
    trained = decoder(ids, labels=labels)
    with torch.no_grad():
        nats = decoder.eval()(ids, labels=labels)
        plain = torch.nn.functional.cross_entropy(decoder(ids).flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(nats, plain)
    assert take_loads([*decoder.routers().values()]) is None
    features, loss = decoder.train().features_and_loss(ids)
    torch.testing.assert_close(decoder.head(features, labels) + loss, trained)
    assert trained > nats + 0.01 * 2 * 96 * 0.9  # at least the balance of two blocks, which is 1 a token at even loads


def test_losses_by_hand():
    mix = mixture(sequence_balance_weight=0.5, router_z_weight=0.25)
    logits = torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]).repeat(2, 1).log_softmax(-1) + 2.0
    scores, chosen = logits.softmax(-1), torch.tensor([[0, 1], [0, 2]])
    # one row of two tokens; loads of experts 0, 1, 2: 2, 1, 1 of 4, times 8 experts
    share = 2 * scores[0]
    balance = 0.5 * (8 / 4) * (2 * share[0] + share[1] + share[2])
    z = 0.25 * 2 * 2.0**2  # logsumexp is 2
    torch.testing.assert_close(mix._loss(logits, scores, chosen, 1), balance + z)
    # as two rows of one token: loads of 1 of 2
    of_rows = 0.5 * (8 / 2) * (2 * scores[0, 0] + scores[0, 1] + scores[0, 2])
    torch.testing.assert_close(mix._loss(logits, scores, chosen, 2), of_rows + z)
    assert mix.eval()._loss(logits, scores, chosen, 1) == 0


def test_the_bias_chooses_and_does_not_weigh_and_moves_against_the_load():
    router = mixture(balance_rate=0.25).router
    x = torch.randn(64, 32)
    before = router(x)
    router.bias.copy_(torch.tensor([100.0, 50.0, *[0.0] * 6]))
    weights, chosen, _, scores = router(x)
    assert (chosen == torch.tensor([0, 1])).all()
    two = scores[:, :2]
    torch.testing.assert_close(weights, two / two.sum(-1, keepdim=True))
    torch.testing.assert_close(scores, before[3])
    router.bias.zero_()
    router.move_bias(torch.tensor([9.0, 1.0, 4.0, 4.0, 4.0, 4.0, 4.0, 2.0]))  # the mean is 4
    assert router.bias.tolist() == [-0.25, 0.25, 0, 0, 0, 0, 0, 0.25]
    router.move_bias(torch.ones(8) * torch.arange(8), moves=0.0)
    assert router.bias.tolist() == [-0.25, 0.25, 0, 0, 0, 0, 0, 0.25]
    assert mixture(balance="none").router.bias is None


def test_the_router_is_in_fp32_under_autocast_and_experts_in_bf16():
    mix = mixture(n_shared_experts=1)
    x = torch.randn(2, 8, 32)
    with torch.autocast("cpu", torch.bfloat16):
        weights, _, logits, _ = mix.router(x.bfloat16().flatten(0, 1))
        assert (weights.dtype, logits.dtype) == (torch.float32, torch.float32)
        assert mix(x.bfloat16())[0].dtype == torch.bfloat16
    expected = torch.nn.functional.linear(x.bfloat16().float().flatten(0, 1), mix.router.weight)
    assert torch.equal(logits, expected)
    to_bf16(mix)  # of BF16True; what it leaves in fp32, FSDP2's mixed precision leaves too
    assert (mix.router.weight.dtype, mix.experts.up.dtype) == (torch.float32, torch.bfloat16)


def test_optimizers_read_experts_as_stacks_of_plain_matrices():
    found = {param.name: param for param in param_roles(Decoder(CONFIG))}
    for part, shape in {"gate": (16, 32), "down": (32, 16)}.items():
        role, layout = found[f"blocks.1.mlp.experts.{part}"].role, found[f"blocks.1.mlp.experts.{part}"].layout
        assert (role, layout.stacked, layout.output_dim, layout.outputs, layout.inputs) == ("expert", True, 1, *shape)
    assert found["blocks.1.mlp.router.weight"].role == "router"
    assert found["blocks.0.mlp.gate.weight"].role == found["blocks.1.mlp.shared.gate.weight"].role == "matrix"


def test_first_weights_follow_the_rule_of_dense_layers():
    decoder = Decoder(Llama(**{**SIZES, "d_model": 64}, **{**OF_8, "d_expert": 64}, n_shared_experts=1))
    mlp = decoder.blocks[1].mlp
    for weight in (mlp.router.weight, mlp.experts.gate, mlp.experts.up, mlp.shared.gate.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.15)
    for weight in (mlp.experts.down, mlp.shared.down.weight):
        assert weight.std().item() == pytest.approx(0.02 / 6**0.5, rel=0.05)
    assert mlp.router.bias.tolist() == [0.0] * 8


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"experts_per_token": 9}, "experts_per_token=9: give a whole number from 1 to 8"),
        ({"dense_layers": 3}, "dense_layers=3: give a whole number from 0 to 2"),
        ({"d_expert": 12}, "d_expert=12: products of experts need a multiple of 8"),
        ({"activation": "relu2"}, "n_experts=8: experts are gated: set activation to swiglu"),
        ({"balance_rate": -1.0}, "balance_rate=-1.0: give a number from 0 on"),
        ({"router_groups": 3}, "router_groups=3 does not divide n_experts=8 into equal groups"),
        ({"router_groups": 4, "experts_per_token": 3}, "experts_per_token=3: 1 groups have 2 experts: raise"),
        ({"experts_per_token": 1}, "experts_per_token=1: divided by their sum, all weights are 1"),
        ({"n_experts": None}, "d_expert=16 without experts: set n_experts, or leave it out"),
        ({"qk_norm": "heads"}, "qk_norm=heads: give true, false or, of a Llama, whole"),
    ],
)
def test_a_mixture_that_cannot_be_is_one_line(options, says):
    with pytest.raises(UsageError, match=re.escape(says)) as refused:
        Llama(**SIZES, **(OF_8 | options))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("option", ["n_experts", "qk_norm"])
def test_tensor_ranks_and_parts_of_rows_are_refused_in_one_line(option):
    decoder = Decoder(CONFIG if option == "n_experts" else Llama(**SIZES, qk_norm="whole"))
    with pytest.raises(
        UsageError, match=f"^mesh.tensor: decoder.{option}=.* is not divided over ranks: leave mesh.tensor at 1"
    ):
        decoder.parallel_plan()
    if option == "n_experts":
        with pytest.raises(UsageError, match=r"^mesh.context: decoder.sequence_balance_weight=0.01 needs whole rows"):
            decoder.check_context_parallel()


@pytest.mark.parametrize(("part", "protocol"), [("", HasExperts), ("router", CountsInBackward)])
def test_a_mixture_has_all_that_isinstance_asks_for_on_each_python(part, protocol):
    """From Python 3.12 on, it finds no submodule, buffer or parameter: they are in no dict that it looks at."""
    module = mixture().get_submodule(part)
    for name in typing._get_protocol_attrs(protocol):
        inspect.getattr_static(module, name)
    assert isinstance(module, protocol)
