"""What the decoder promises: causality, documents, dtypes, meta device, initial weights."""

import copy
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from models.decoders import CONFIGS, TINY, build, tokens

from lightning_tricks._core.errors import UsageError
from lightning_tricks.models import GPT2, Decoder, Llama
from lightning_tricks.models.decoder import MLP
from lightning_tricks.models.generate import Sampling, generate


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


def gradients(decoder, input_ids, document_ids=None):
    decoder.zero_grad()
    weights = torch.randn(*input_ids.shape, 61, generator=torch.Generator().manual_seed(2))
    (decoder(input_ids, document_ids).float() * weights).mean().backward()
    return {name: p.grad.clone() for name, p in decoder.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_later_tokens_do_not_change_earlier_logits(config, dtype):
    decoder, input_ids = build(config).to(dtype), tokens(2, 24)
    changed = input_ids.clone()
    changed[:, 15:] = (changed[:, 15:] + 1) % 61
    before, after = decoder(input_ids), decoder(changed)
    assert torch.equal(before[:, :15], after[:, :15])
    assert (before[:, 15:] != after[:, 15:]).any(dim=-1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_documents_get_the_logits_each_would_have_alone(config, dtype):
    decoder, input_ids = build(config).to(dtype), tokens(2, 24)
    document_ids = torch.tensor([[0] * 7 + [1] * 16 + [2], [5] * 12 + [9] * 12], dtype=torch.int32)
    alone = [
        [input_ids[:1, :7], input_ids[:1, 7:23], input_ids[:1, 23:]],
        [input_ids[1:, :12], input_ids[1:, 12:]],
    ]
    expected = torch.cat([torch.cat([decoder(part) for part in row], dim=1) for row in alone])
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.1}
    torch.testing.assert_close(decoder(input_ids, document_ids), expected, **tolerance)


def test_positions_past_the_longest_row_are_refused_with_both_numbers(config):
    decoder = build(config)
    assert decoder(tokens(1, 24)).shape == (1, 24, 61)
    with pytest.raises(UsageError) as error:
        decoder(tokens(1, 25))
    assert str(error.value) == "a row of 25 tokens, but max_seq_len=24: shorten the rows or raise it"


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        ("swiglu", 2.0 / (1 + math.exp(-2.0)) * 3.0 * 5.0),  # silu(gate) * up * down
        ("gelu", 0.5 * 3.0 * (1 + math.tanh(math.sqrt(2 / math.pi) * (3.0 + 0.044715 * 27.0))) * 5.0),
        ("relu2", 9.0 * 5.0),
    ],
)
def test_mlp_is_its_formula(activation, expected):
    mlp = MLP(GPT2(d_model=1, n_heads=1, d_ff=1, activation=activation, bias=False))
    for name, value in (("gate", 2.0), ("up", 3.0), ("down", 5.0)):
        if hasattr(mlp, name):
            torch.nn.init.constant_(getattr(mlp, name).weight, value)
    assert mlp(torch.ones(1, 1, 1)).item() == pytest.approx(expected, rel=1e-6)
    if activation == "relu2":
        assert mlp(-torch.ones(1, 1, 1)).item() == 0.0


@pytest.mark.parametrize("place", ["autocast", "bfloat16"])
def test_bf16_logits_and_gradients_stay_near_those_of_fp32(config, place):
    decoder, input_ids = build(config), tokens(2, 24)
    exact_logits, exact = decoder(input_ids), gradients(decoder, input_ids)
    if place == "bfloat16":
        decoder = decoder.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=place == "autocast"):
        logits, rough = decoder(input_ids), gradients(decoder, input_ids)
    assert logits.dtype == torch.bfloat16
    assert torch.linalg.vector_norm(logits.float() - exact_logits) < 0.03 * torch.linalg.vector_norm(exact_logits)
    # The gradient of a key's bias is zero, so rounding is all there is: measured against the whole gradient.
    slack = 1e-3 * torch.nn.utils.get_total_norm(exact.values())
    for name, gradient in exact.items():
        error = torch.linalg.vector_norm(rough[name].float() - gradient)
        assert error < 0.1 * torch.linalg.vector_norm(gradient) + slack, name


def test_autocast_has_nothing_left_to_cast_before_a_linear_layer(config):
    decoder, seen = build(config), []
    for module in decoder.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        decoder(tokens(2, 24))
    assert set(seen) == {torch.bfloat16}


@pytest.mark.parametrize("tied", [True, False])
def test_tying_is_one_parameter_through_meta_copies_and_moves(tied):
    with torch.device("meta"):
        decoder = Decoder(Llama(**TINY, tie_embeddings=tied))
    holder = torch.nn.ModuleDict({"decoder": decoder}).to_empty(device="cpu")
    decoder.init_weights()
    for model in (decoder, copy.deepcopy(decoder), holder.double()["decoder"]):
        assert (model.head.weight is model.embed.weight) is tied
        assert ("head.weight" in dict(model.named_parameters())) is not tied


def test_weights_drawn_after_meta_equal_those_drawn_at_once(config):
    torch.manual_seed(3)
    direct = Decoder(config)
    with torch.device("meta"):
        late = Decoder(config)
    late.to_empty(device="cpu")
    for buffer in late.buffers():
        buffer.fill_(float("nan"))  # what an empty table may hold
    torch.manual_seed(3)
    late.init_weights()
    torch.testing.assert_close(late.state_dict(), direct.state_dict(), rtol=0, atol=0)
    assert torch.equal(late(tokens(1, 24)), direct(tokens(1, 24)))


def test_labels_turn_logits_into_the_sum_of_cross_entropies(config):
    decoder, input_ids = build(config), tokens(2, 24)
    labels = tokens(2, 24).roll(-1, dims=1)
    labels[0, 5:9] = -100
    expected = F.cross_entropy(decoder(input_ids).flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(decoder(input_ids, labels=labels), expected)


@pytest.mark.parametrize("base", [None, 16])
def test_a_cap_bounds_logits_loss_and_generated_tokens_after_the_scale_of_mup(config, base):
    base = None if base is None else dataclasses.replace(config, d_model=base)
    plain, capped = build(config), Decoder(dataclasses.replace(config, logit_softcap=0.9), base)
    capped.load_state_dict(plain.state_dict())
    uncapped = Decoder(config, base)
    uncapped.load_state_dict(plain.state_dict())
    input_ids, labels = tokens(2, 24), tokens(2, 24, seed=2)
    logits, expected = capped(input_ids), 0.9 * torch.tanh(uncapped(input_ids) / 0.9)
    torch.testing.assert_close(logits, expected)
    assert 0.6 < logits.abs().max() < 0.9
    nats = F.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(capped(input_ids, labels=labels), nats)
    found, exact = (torch.autograd.grad(loss, model.parameters()) for loss, model in
                    ((capped(input_ids, labels=labels), capped), (nats, uncapped)))  # fmt: skip
    for name, a, b in zip(dict(capped.named_parameters()), found, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=name)
    seen: list[torch.Tensor] = []

    class Greedy(Sampling):
        def choose(self, logits, generator=None):
            seen.append(logits)
            return super().choose(logits)

    next(generate(capped, input_ids[:, :20], 1, Greedy(temperature=0.0)))
    torch.testing.assert_close(seen[0], expected[:, 19])


@pytest.mark.parametrize("family", [Llama, GPT2])
def test_initial_weights_have_the_documented_spread(family):
    torch.manual_seed(0)
    decoder = Decoder(family(vocab_size=500, d_model=128, n_layers=8, n_heads=4, max_seq_len=500, init_std=0.04))
    for name, parameter in decoder.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            expected = 0.01 if name.endswith(("attn.o.weight", "mlp.down.weight")) else 0.04  # 0.04 / sqrt(2 * 8)
            assert parameter.std().item() == pytest.approx(expected, rel=0.03), name
            assert abs(parameter.mean().item()) < expected / 50, name


def test_zero_init_outputs_starts_every_block_as_the_identity(config):
    torch.manual_seed(0)
    decoder = Decoder(dataclasses.replace(config, zero_init_outputs=True))
    x = torch.randn(1, 4, 32)
    rope = decoder.positions(4, x.dtype) if config.positions == "rope" else None
    for block in decoder.blocks:
        assert torch.equal(block(x, rope, None), x)


def test_a_default_dtype_of_bf16_keeps_the_tables_exact():
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        decoder = Decoder(Llama(**TINY | {"max_seq_len": 2048}))
    finally:
        torch.set_default_dtype(previous)
    assert decoder.embed.weight.dtype == torch.bfloat16
    assert decoder.positions.cos.dtype == torch.float32
    # pair 0 turns by one radian a token
    assert decoder.positions.cos[1999, 0].item() == pytest.approx(
        torch.tensor(1999.0, dtype=torch.float64).cos().item(), abs=1e-4
    )
