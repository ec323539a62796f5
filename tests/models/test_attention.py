"""Attention and rotary positions by themselves, against numbers worked out by hand and against torch."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_tricks.models import attention
from lightning_tricks.models.attention import (
    RMSNorm,
    RotaryPositions,
    causal_attention,
    document_mask,
    rotate,
)
from lightning_tricks.models.documents import packed_documents


def test_document_mask_is_causal_within_each_document():
    assert document_mask(torch.tensor([[4, 4, 7]]))[0, 0].tolist() == [
        [True, False, False],
        [True, True, False],
        [False, False, True],
    ]


def test_attention_is_the_softmax_weighted_mean_of_earlier_values():
    q = torch.tensor([[[[2.0], [1.0]]]])
    k = torch.tensor([[[[3.0], [5.0]]]])
    v = torch.tensor([[[[10.0], [20.0]]]])
    second = (math.exp(3) * 10 + math.exp(5) * 20) / (math.exp(3) + math.exp(5))  # head_dim 1: scores 1*3 and 1*5
    torch.testing.assert_close(causal_attention(q, k, v), torch.tensor([[[[10.0], [second]]]]))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "length"), [(torch.float32, 16), *((torch.bfloat16, n) for n in (1, 15, 16))])
def test_grouped_heads_and_both_ways_equal_the_formula_in_double(dtype, length, kv_heads, masked):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, length, 8).to(dtype).requires_grad_() for heads in (4, kv_heads, kv_heads))
    mask = document_mask(torch.tensor([[0] * 9 + [1] * 7, [3] * 16])[:, :length]) if masked else None
    out = causal_attention(q, k, v, mask)

    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(4 // kv_heads, dim=1) for x in exact[1:])
    allowed = torch.ones(length, length, dtype=torch.bool).tril() if mask is None else mask
    scores = (exact[0] @ keys.mT / math.sqrt(8)).masked_fill(~allowed, float("-inf"))
    expected = scores.softmax(-1) @ values

    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.03}
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, **tolerance)
    weights = torch.randn_like(expected)
    out.backward(weights.to(dtype))
    expected.backward(weights)
    for rough, right in zip((q, k, v), exact, strict=True):
        torch.testing.assert_close(rough.grad.double(), right.grad, rtol=tolerance["rtol"], atol=3 * tolerance["atol"])


def test_bf16_on_a_cpu_goes_by_products_up_to_the_limit(monkeypatch):
    lengths = []
    fused = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, *a, **k: lengths.append(q.shape[2]) or fused(q, *a, **k)
    )
    for length in (attention.PRODUCTS_MAX_LENGTH, attention.PRODUCTS_MAX_LENGTH + 1):
        x = torch.randn(1, 1, length, 2, dtype=torch.bfloat16)
        causal_attention(x, x, x)
    assert lengths == [attention.PRODUCTS_MAX_LENGTH + 1]


def test_a_pair_of_dimensions_turns_by_its_angle():
    cos, sin = RotaryPositions(4, 8, theta=100.0)(8, torch.float32)
    x = torch.tensor([1.0, 0.0, 0.0, 2.0]).expand(8, 4)  # pair 0 is (1, 0), pair 1 is (0, 2)
    turned = rotate(x, cos, sin)
    for position in range(8):
        fast, slow = position, position / 10  # 100 ** (-2/4) = 1/10
        expected = [math.cos(fast), -2 * math.sin(slow), math.sin(fast), 2 * math.cos(slow)]
        torch.testing.assert_close(turned[position], torch.tensor(expected))


def test_rms_norm_divides_by_the_root_mean_square_and_keeps_the_dtype():
    norm = RMSNorm(2, eps=1e-5)
    torch.nn.init.constant_(norm.weight, 3.0)
    x = torch.tensor([[3.0, 4.0]])  # mean square 12.5
    torch.testing.assert_close(norm(x), 3 * x / math.sqrt(12.5 + 1e-5))
    assert norm(x.bfloat16()).dtype == torch.bfloat16
    assert norm(torch.zeros(1, 2)).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("shape", [(3, 5, 8), (8,), (0, 8)])
def test_rms_norm_on_a_cpu_is_torchs_with_its_gradients(shape, monkeypatch):
    monkeypatch.setattr(attention, "OWN_NORM_FROM", 0)
    torch.manual_seed(0)
    norm = RMSNorm(8, eps=0.1)
    torch.nn.init.normal_(norm.weight)
    x, grad = torch.randn(shape, requires_grad=True), torch.randn(shape)
    expected = torch.nn.functional.rms_norm(x, (8,), norm.weight, 0.1)
    torch.testing.assert_close(norm(x), expected)
    with torch.autocast("cpu", torch.bfloat16):  # which must not round the sums of the backward pass
        found = torch.autograd.grad(norm(x), [x, norm.weight], grad)
    torch.testing.assert_close(found, torch.autograd.grad(expected, [x, norm.weight], grad))


def test_rms_norm_of_bf16_on_a_cpu_rounds_once(monkeypatch):
    monkeypatch.setattr(attention, "OWN_NORM_FROM", 0)
    torch.manual_seed(0)
    norm, x = RMSNorm(8, eps=0.1), torch.randn(512, 8, dtype=torch.bfloat16)
    torch.nn.init.normal_(norm.weight)
    exact = torch.nn.functional.rms_norm(x.double(), (8,), norm.weight.double(), 0.1)
    assert norm(x).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x).double(), exact, rtol=1.01 * 2**-8, atol=0)  # half a unit in the last place


def test_rms_norm_on_a_cpu_keeps_its_input_and_a_number_for_each_row_and_can_be_mapped(monkeypatch):
    monkeypatch.setattr(attention, "OWN_NORM_FROM", 0)
    norm, x = RMSNorm(8, eps=0.1), torch.randn(3, 5, 8, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (kept.append(tensor), tensor)[1], lambda tensor: tensor
    ):
        norm(x)
    assert sorted(tensor.numel() for tensor in kept) == [8, 15, 120]

    def loss(weight: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(norm, {"weight": weight}, row).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(norm.weight.detach(), x.detach())
    torch.testing.assert_close(
        each, torch.stack([torch.func.grad(loss)(norm.weight.detach(), row) for row in x.detach()])
    )
    torch.testing.assert_close(each.sum(0), torch.autograd.grad(norm(x).square().sum(), norm.weight)[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_cuda_takes_the_flash_kernel_and_with_documents_the_memory_efficient_one(kv_heads):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 64, 64) for heads in (4, kv_heads, kv_heads))
    mask = document_mask(torch.tensor([[0] * 40 + [1] * 24]).expand(2, 64))
    for backend, allowed in ((SDPBackend.FLASH_ATTENTION, None), (SDPBackend.EFFICIENT_ATTENTION, mask)):
        inputs = [x.to("cuda", torch.bfloat16).requires_grad_() for x in (q, k, v)]
        with sdpa_kernel(backend):  # no other kernel may step in: a refusal raises
            out = causal_attention(*inputs, None if allowed is None else allowed.cuda())
            out.sum().backward()
        torch.testing.assert_close(out.float().cpu(), causal_attention(q, k, v, allowed), rtol=0.03, atol=0.03)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_takes_the_varlen_kernel_for_documents_whose_starts_are_known():
    ids = torch.tensor([[0] * 500 + [1] + [2] * 523, [0] * 512 + [1] * 512], device="cuda")
    starts = torch.tensor([[0, 500, 501, 1024], [0, 512, 1024, 1024]], device="cuda", dtype=torch.int32)
    inputs = [torch.randn(2, n, 1024, 64, device="cuda").bfloat16().requires_grad_() for n in (4, 2, 2)]
    packed = packed_documents(ids, starts, torch.bfloat16, 64)
    assert packed.lengths is None
    outs = [causal_attention(*inputs, mask, 0.2) for mask in (packed, document_mask(ids))]
    torch.testing.assert_close(*outs, rtol=0.03, atol=0.03)
    grads = [torch.autograd.grad(out.float().square().sum(), inputs) for out in outs]
    torch.testing.assert_close(*grads, rtol=0.05, atol=0.1)
