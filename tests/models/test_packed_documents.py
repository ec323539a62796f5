"""Documents without a dense mask: by documents on a CPU, by torch's varlen kernel elsewhere, equal to the mask."""

import inspect

import pytest
import torch
from harness.token_files import write_token_files

from lightning_tricks.accounting.flop_counting import _more_formulas
from lightning_tricks.commands.autopsy import joined
from lightning_tricks.commands.coordinate_check import _batches
from lightning_tricks.data import TokenData
from lightning_tricks.data.batches import begins_after, with_documents
from lightning_tricks.language_model import LanguageModel
from lightning_tricks.models import Decoder, Llama, attention, documents
from lightning_tricks.models.attention import causal_attention, document_mask, max_logit
from lightning_tricks.models.documents import packed_documents

SPEC = (torch.bfloat16, 64)  # of queries and keys, where only the device decides


def rows_of(*rows):
    """Ids and starts as batches have them, of rows of documents of these lengths."""
    tokens = torch.ones(len(rows), sum(rows[0]), dtype=torch.int64)
    for row, lengths in enumerate(rows):
        tokens[row, torch.tensor(lengths).cumsum(0) - 1] = 0
    found = {
        name: torch.from_numpy(array) for name, array in with_documents(begins_after(tokens.numpy(), eot_id=0)).items()
    }
    return found["document_ids"], found.get("document_starts")


def varlen_stand_in(*args, **options):
    """The answer of `varlen_attn`, which has no CPU kernel, for arguments that the installed one takes."""
    given = inspect.signature(REAL_VARLEN).bind(*args, **options)
    q, k, v, offsets, same, longest, longest_k = given.args[:7]
    assert (given.kwargs["window_size"], longest, offsets is same) == ((-1, 0), longest_k, True)
    assert offsets.dtype == torch.int32
    assert q.dtype == k.dtype == v.dtype
    position = torch.arange(len(q))
    mask = document_mask(torch.bucketize(position, offsets, right=True)[None])
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return causal_attention(q, k, v, mask, given.kwargs["scale"])[0].transpose(0, 1)


REAL_VARLEN = documents.varlen_attn


@pytest.fixture(params=["by documents", "varlen", "varlen of torch 2.11"])
def way(request, monkeypatch):
    monkeypatch.setattr(documents, "varlen_attn", varlen_stand_in)
    monkeypatch.setattr(documents, "varlen_serves", lambda *_: request.param != "by documents")
    if request.param == "varlen of torch 2.11":  # keys are repeated for a kernel that is not told of grouped heads
        monkeypatch.setattr(documents, "_VARLEN_OPTIONS", frozenset({"window_size", "scale"}))
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


@pytest.mark.parametrize("way", ["varlen"], indirect=True)
def test_varlen_gets_queries_of_a_norm_under_autocast_in_the_dtype_of_the_values(way):
    packed = packed_documents(*rows_of([500, 1, 523]), *SPEC)
    q, k, v = (torch.randn(1, 2, 1024, 8, dtype=dtype) for dtype in (torch.float32, torch.float32, torch.bfloat16))
    assert causal_attention(q, k, v, packed).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("rows", "pays"),
    [
        ([[1024]], True),
        ([[512, 512]], True),
        ([[1024], [32] * 32], False),  # 33 documents in 2048 tokens
        ([[1024], [32] * 30 + [64]], True),  # 32 of them
        ([[64] * 16], True),
        ([[60] * 2 + [63] * 2 + [56] * 3 + [61] * 10], False),  # 17 in 1024
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
    assert starts.shape == (2, 16)
    assert starts.dtype == torch.int32
    for row, begins in zip(ids, starts, strict=True):
        begins = begins[begins < 1024]
        assert row[begins].tolist() == row.unique().tolist()
        assert (row[begins[1:] - 1] == row[begins[1:]] - 1).all()


def test_rows_of_which_some_have_too_many_documents_for_starts_make_a_batch(tmp_path):
    files = write_token_files(tmp_path / "tokens")  # an end of text in 64 tokens on average, and room for two in a row
    data = TokenData(str(files / "train.bin"), None, None, 64, 128, 1, document_ids=True, eot_id=0)
    cut = _batches(data, 4)  # of two rows each
    rows = [data.training_rows()[row] for row in range(8)]
    assert {"document_starts" in row for row in rows} == {True, False}
    for batch, size in [(joined(rows, torch.device("cpu")), 8), *((batch, 2) for batch in cut)]:
        shapes = {name: tuple(each.shape) for name, each in batch.items()}
        assert shapes == dict.fromkeys(["input_ids", "labels", "document_ids"], (size, 128))


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
    monkeypatch.setattr(documents, "varlen_serves", lambda *_: False)
    monkeypatch.setattr(documents, "BY_DOCUMENTS_FROM", 1025)
    torch.testing.assert_close(found, step(build(), ids, None), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("way", ["varlen"], indirect=True)
def test_a_language_model_hands_on_the_starts_of_a_batch(way, monkeypatch):
    ids, starts = rows_of([500, 1, 523])
    tokens = torch.randint(31, ids.shape)
    batch = {"input_ids": tokens, "labels": tokens.roll(-1, 1), "document_ids": ids, "document_starts": starts}
    config = Llama(vocab_size=31, d_model=16, n_layers=1, n_heads=2, max_seq_len=1024)
    module = LanguageModel(config, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    module.configure_model()
    monkeypatch.setattr(documents, "BY_DOCUMENTS_FROM", 1025)
    monkeypatch.setattr(attention, "document_mask", None)  # which would be called without the starts
    nats, tokens = module.token_sums(batch)
    assert tokens == 1024
    torch.testing.assert_close(module.predict_step(batch, 0).sum(), -nats)


@pytest.mark.parametrize(("varlen", "whole"), [(True, False), (False, False), (False, True)])
def test_compiled_decoders_have_one_graph_whatever_the_documents(varlen, whole, monkeypatch):
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(documents, "varlen_attn", lambda q, k, v, offsets, *_, **__: q + 0 * offsets.sum())
    monkeypatch.setattr(documents, "varlen_serves", lambda *_: varlen)
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
