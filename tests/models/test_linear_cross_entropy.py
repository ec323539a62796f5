"""Head and loss in slices give the value and gradients of the plain formula."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from lightning_tricks.models import Decoder, Llama
from lightning_tricks.models import linear_cross_entropy as module
from lightning_tricks.models.linear_cross_entropy import (
    for_the_compiler,
    linear_cross_entropy,
    nats_and_gradient,
    softcapped,
)


def problem(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(37, 12, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(50, 12, generator=generator).requires_grad_()
    labels = torch.randint(0, 50, (37,), generator=generator)
    labels[::5] = -100
    return x, weight, labels


def reference(x, weight, labels):
    return F.cross_entropy((x @ weight.to(x.dtype).T).float(), labels, ignore_index=-100, reduction="sum")


def in_fp64(x, weight, labels, softcap, z_loss):
    """The loss, and by autograd the gradients of the loss with its z-loss."""
    x, weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    logits = x @ weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    nats = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    whole = nats + z_loss * logits[labels != -100].logsumexp(1).square().sum()
    return nats.item(), *(gradient.float() for gradient in torch.autograd.grad(whole, (x, weight)))


@pytest.mark.parametrize("rows", [1, 8, 37, 100])
def test_value_and_gradients_equal_the_plain_formula_for_every_slicing(rows):
    x, weight, labels = problem()
    (0.3 * linear_cross_entropy(x, weight, labels, rows=rows)).backward()
    y, head, _ = problem()
    loss = reference(y, head, labels)
    (0.3 * loss).backward()
    assert linear_cross_entropy(x, weight, labels, rows=rows).item() == pytest.approx(loss.item(), rel=1e-6)
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight.grad, head.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [8, 100])
@pytest.mark.parametrize(
    ("softcap", "z_loss"), [(0.5, 0.0), (3.0, 0.0), (1000.0, 0.0), (None, 0.1), (None, 1e-4), (3.0, 0.1)]
)
def test_cap_and_z_loss_are_their_formulas_in_fp64(softcap, z_loss, rows):
    x, weight, labels = problem()
    each = torch.empty(len(x))
    loss = linear_cross_entropy(x, weight, labels, rows=rows, each=each, softcap=softcap, z_loss=z_loss)
    loss.backward()
    nats, *gradients = in_fp64(x, weight, labels, softcap, z_loss)
    with torch.no_grad():  # where z_loss changes nothing
        assert loss.item() == linear_cross_entropy(x, weight, labels, rows=rows, softcap=softcap, z_loss=9.0).item()
    assert loss.item() == pytest.approx(nats, rel=1e-6)
    assert each.sum().item() == pytest.approx(nats, rel=1e-6)
    for found, exact in zip((x.grad, weight.grad), gradients, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=2e-6)


def test_a_cap_bounds_the_loss_of_wild_logits_and_16_bits_are_capped_in_32():
    x, weight, labels = problem()
    loss = linear_cross_entropy(x.detach() * 1000, weight, labels, softcap=2.0)
    assert loss.item() < (labels != -100).sum() * (2 * 2.0 + math.log(50))
    logits = torch.tensor([9.0, 10.0, 40.0]).bfloat16()
    assert softcapped(logits, 4.0).tolist() == pytest.approx([4 * math.tanh(value / 4.0) for value in (9, 10, 40)])


def test_large_logits_do_not_overflow():
    x, weight, labels = problem()
    loss = linear_cross_entropy(x.detach() * 1000, weight, labels)
    assert loss.item() == pytest.approx(reference(x.detach() * 1000, weight, labels).item(), rel=1e-5)


def test_all_labels_ignored_give_zero_and_zero_gradients():
    x, weight, labels = problem()
    loss = linear_cross_entropy(x, weight, torch.full_like(labels, -100))
    loss.backward()
    assert loss.item() == 0
    assert not x.grad.any()
    assert not weight.grad.any()


def test_under_bf16_autocast_the_products_are_bf16_and_the_sums_are_not():
    x, weight, labels = problem()
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, labels)
    loss.backward()
    assert (loss.dtype, x.grad.dtype, weight.grad.dtype) == (torch.float32,) * 3
    assert loss.item() == pytest.approx(reference(*problem()).item(), rel=1e-2)
    assert loss.item() == pytest.approx(reference(problem()[0].bfloat16(), *problem()[1:]).item(), rel=1e-3)


def test_the_gradient_of_a_bf16_head_is_summed_in_fp32_over_many_slices():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 16, generator=generator).bfloat16()
    weight = torch.randn(8, 16, generator=generator).bfloat16().requires_grad_()
    labels = torch.zeros(4096, dtype=torch.int64)
    linear_cross_entropy(x, weight, labels, rows=8).backward()
    exact = weight.detach().float().requires_grad_()
    reference(x.float(), exact, labels).backward()
    assert (weight.grad.float() - exact.grad).norm() < 2**-8 * exact.grad.norm()  # the rounding of bf16, once


def test_the_weight_of_the_loss_is_not_rounded_to_the_dtype_of_the_features():
    """1 / 319 in bf16 is 0.9968 / 319, and so was the gradient of everything below the head."""
    x, weight, labels = problem(torch.bfloat16)
    linear_cross_entropy(x, weight, labels).backward()
    unweighted, x.grad = x.grad, None
    (linear_cross_entropy(x, weight, labels) / 319).backward()
    assert torch.equal(x.grad, (unweighted.float() / 319).bfloat16())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_it_multiplies_once_and_keeps_nothing(context):
    x, weight, labels = problem()
    with FlopCounterMode(display=False) as trained:
        linear_cross_entropy(x, weight, labels)
    with context(), FlopCounterMode(display=False) as validated:
        loss = linear_cross_entropy(x, weight, labels)
    product = 2 * 37 * 12 * 50
    assert (trained.get_total_flops(), validated.get_total_flops()) == (3 * product, product)
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(reference(x, weight, labels).item(), rel=1e-6)


@pytest.mark.parametrize(("softcap", "z_loss"), [(None, 0.0), (15.0, 0.0), (None, 0.01), (15.0, 0.01)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_compiled_on_cuda_is_the_same_formula_in_one_graph(dtype, softcap, z_loss):
    generator = torch.Generator().manual_seed(0)
    logits = (30 * torch.randn(37, 50, generator=generator)).to(dtype)
    labels = torch.randint(0, 50, (37,), generator=generator)
    labels[::5] = -100
    graph = torch.compile(for_the_compiler, backend="eager", fullgraph=True)
    nats, gradient = graph(logits, labels, -100, True, softcap=softcap, z_loss=z_loss)
    options = {"softcap": softcap, "z_loss": z_loss}
    expected, expected_gradient = nats_and_gradient(logits.clone(), labels, -100, **options)
    torch.testing.assert_close(nats, expected, rtol=1e-6, atol=0)
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient, expected_gradient.to(dtype), rtol=1e-5, atol=1e-7)
    assert not gradient[::5].any()
    only, none = for_the_compiler(logits, labels, -100, False, softcap=softcap)
    assert none is None
    assert only == nats


def test_a_decoder_whose_blocks_are_compiled_has_the_same_loss_to_the_bit_on_a_cpu(monkeypatch):
    def refuse():
        raise AssertionError("a CPU keeps a slice in its cache, and needs no compiler for it")

    monkeypatch.setattr(module, "_compiled", refuse)
    decoder = Decoder(Llama(vocab_size=50, d_model=16, n_layers=1, n_heads=2, max_seq_len=8))
    features, labels = torch.randn(2, 8, 16), torch.randint(0, 50, (2, 8))
    plain = decoder.head(features, labels)
    decoder.compile_blocks()
    assert decoder.head.compiled
    assert torch.equal(decoder.head(features, labels), plain)
