"""Documents without a dense mask: by documents on a CPU, by torch's varlen kernel elsewhere, equal to the mask."""

import inspect

import pytest
import torch

from lightning_tricks.accounting.flop_counting import _more_formulas
from lightning_tricks.data.batches import with_documents
from lightning_tricks.models import Decoder, Llama, attention
from lightning_tricks.models.attention import causal_attention, document_mask, max_logit, packed_documents

SPEC = (torch.bfloat16, 64)  # of queries and keys, where only the device decides


def rows_of(*rows):
    """Ids and starts as batches have them, of rows of documents of these lengths."""
    tokens = torch.ones(len(rows), sum(rows[0]), dtype=torch.int64)
    for row, lengths in enumerate(rows):
        tokens[row, torch.tensor(lengths).cumsum(0) - 1] = 0
    found = {name: torch.from_numpy(array) for name, array in with_documents(tokens.numpy(), eot_id=0).items()}
    return found["document_ids"], found.get("document_starts")


def varlen_stand_in(*args, **options):
    """The answer of `varlen_attn`, which has no CPU kernel, for arguments that the installed one takes."""
    given = inspect.signature(REAL_VARLEN).bind(*args, **options)
    q, k, v, offsets, same, longest, longest_k = given.args[:7]
    assert (given.kwargs["window_size"], longest, offsets is same) == ((-1, 0), longest_k, True)
    assert offsets.dtype == torch.int32
    position = torch.arange(len(q))
    mask = document_mask(torch.bucketize(position, offsets, right=True)[None])
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return causal_attention(q, k, v, mask, given.kwargs["scale"])[0].transpose(0, 1)


REAL_VARLEN = attention.varlen_attn


@pytest.fixture(params=["by documents", "varlen", "varlen of torch 2.11"])
def way(request, monkeypatch):
    monkeypatch.setattr(attention, "varlen_attn", varlen_stand_in)
    monkeypatch.setattr(attention, "varlen_serves", lambda *_: request.param != "by documents")
    if request.param == "varlen of torch 2.11":  # keys are repeated for a kernel that is not told of grouped heads
        monkeypatch.setattr(attention, "_VARLEN_OPTIONS", frozenset({"window_size", "scale"}))
    return request.param


@pytest.mark.parametrize("scale", [None, 0.3])
def test_results_and_gradients_are_those_of_the_dense_mask(way, scale):
    ids, starts = rows_of([500, 1, 523], [512, 512], [300, 424, 300])
    packed = packed_documents(ids, starts, *SPEC)
    torch.manual_seed(0)
    assert (packed.lengths is None) == (way != "by documents")
    inputs = [torch.randn(3, n, 1024, 8, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2)]
    upstream = torch.randn(3, 4, 1024, 8, dtype=torch.float64)
    found, expected = (causal_attention(*inputs, mask, scale) for mask in (packed, document_mask(ids)))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    grads = [torch.autograd.grad(out, inputs, upstream) for out in (found, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)
    q, k = (x.detach() for x in inputs[:2])
    assert max_logit(q, k, packed, scale) == max_logit(q, k, document_mask(ids), scale)


@pytest.mark.parametrize(
    ("rows", "pays"),
    [
        ([[512, 512]], True),  # half of the products
        ([[513, 511]], False),
        ([[1024], [64] * 16], False),
        ([[700, 324], [64] * 16], True),  # 700^2 + 324^2 + 16 * 64^2 = 660,512, under half of 2 * 1024^2
        ([[64] * 16], True),
        ([[8, 56] + [64] * 14 + [60, 60]], False),  # 18 documents in 1072 tokens
        ([[511, 512]], False),  # a row of 1023
    ],
)
def test_a_cpu_runs_the_kernel_by_documents_where_that_pays(rows, pays):
    ids, _ = rows_of(*rows)
    packed = packed_documents(ids, None, *SPEC)
    assert (packed is not None) == pays
    assert not pays or packed.lengths == tuple(n for row in rows for n in row)


def test_starts_are_the_first_positions_of_the_ids():
    ids, starts = rows_of([100, 1, 27], [128, 0], [1, 127])
    assert rows_of([100, 28], [128, 0], [1, 127])[1].tolist() == [[0, 100], [0, 128], [0, 1]]
    assert starts is None  # three documents, and room for two
    assert rows_of([3, 60])[1] is None
    ids, starts = rows_of([500, 1, 523], [512, 512])
    assert starts.shape == (2, 16) and starts.dtype == torch.int32
    for row, begins in zip(ids, starts, strict=True):
        begins = begins[begins < 1024]
        assert row[begins].tolist() == row.unique().tolist()
        assert (row[begins[1:] - 1] == row[begins[1:]] - 1).all()
    given, found = packed_documents(ids, starts, *SPEC), packed_documents(ids, None, *SPEC)
    assert given.lengths == found.lengths == (500, 1, 523, 512, 512)


def build(mode="none", tokens=1024):
    torch.manual_seed(0)
    decoder = Decoder(Llama(vocab_size=31, d_model=16, n_layers=2, n_heads=2, n_kv_heads=1, max_seq_len=tokens))
    decoder.set_activation_checkpointing(mode)
    return decoder


def step(decoder, ids, starts):
    decoder.zero_grad()
    tokens = torch.randint(31, ids.shape, generator=torch.Generator().manual_seed(1))
    nats = decoder(tokens, ids, labels=tokens.roll(-1, 1), document_starts=starts)
    nats.backward()
    return nats.detach() / ids.numel(), {name: p.grad / ids.numel() for name, p in decoder.named_parameters()}


@pytest.mark.parametrize("mode", ["none", "cheap", "selective", "full"])
def test_a_decoder_trains_as_with_the_mask(way, mode, monkeypatch):
    ids, starts = rows_of([500, 1, 523], [512, 512])
    with monkeypatch.context() as without_mask:
        without_mask.setattr(attention, "document_mask", None)
        found = step(build(mode), ids, starts)
    monkeypatch.setattr(attention, "varlen_serves", lambda *_: False)
    monkeypatch.setattr(attention, "BY_DOCUMENTS_FROM", 1025)
    torch.testing.assert_close(found, step(build(), ids, None), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("varlen", "whole"), [(True, False), (False, False), (False, True)])
def test_compiled_decoders_have_one_graph_whatever_the_documents(varlen, whole, monkeypatch):
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(attention, "varlen_attn", lambda q, k, v, offsets, *_, **__: q + 0 * offsets.sum())
    monkeypatch.setattr(attention, "varlen_serves", lambda *_: varlen)
    decoder = build()
    for part in [decoder] if whole else decoder.blocks:
        part.compile(fullgraph=True, backend="aot_eager")
    for rows in ([[500, 1, 523]], [[512, 512]]):  # without varlen the mask serves: it has one shape as well
        step(decoder, *rows_of(*rows))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_flops_of_varlen_are_those_of_rows_in_full():
    formulas, tail = _more_formulas(), ((17,), (17,), 1024, 1024)
    q, kv, sums = (2048, 4, 64), (2048, 2, 64), (4, 2048)
    forward = formulas[torch.ops.torch_attn._varlen_attn](q, kv, kv, *tail)
    assert forward == 2 * 2 * 4 * 1024**2 * 128  # as of 2 rows of 1024 with 4 heads in any other kernel
    assert formulas[torch.ops.torch_attn._varlen_attn_backward](q, q, kv, kv, q, sums, *tail) == 2 * forward
