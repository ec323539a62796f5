"""Attention logits: the maximum by hand and by brute force, whatever the slices, and the block's own work untouched."""

import itertools
import math

import pytest
import torch
from harness import processes
from harness.models import GPT, LLAMA, SHAPE, Decoding, batches
from harness.runs import decoding, fit, warned
from torch import nn

import lightning_tricks.models.attention as attention
from lightning_tricks.callbacks import ActivationMonitor, AttentionMonitor
from lightning_tricks.models import Decoder, Llama
from lightning_tricks.models.attention import document_mask, max_logit
from lightning_tricks.monitors.attention_monitor import modules_with_max_logit

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 2, 2, 2]])


def test_the_maximum_by_hand_is_over_what_a_query_may_see():
    # one head of width 4: scale 1/2; queries 1, 2, 3 and keys 10, -20, 30 (times the first unit vector)
    unit = torch.tensor([1.0, 0, 0, 0])
    q, k = (torch.tensor(x)[None, None, :, None] * unit for x in ([1.0, 2.0, 3.0], [10.0, -20.0, 30.0]))
    assert max_logit(q, k) == 45.0  # 3 * 30 / 2
    assert max_logit(q.flip(2), k) == 15.0  # 3*10, 2*10, 2*-20, 1*10, 1*-20, 1*30: the first, halved
    assert max_logit(-q[:, :, :1], k[:, :, :1]) == -5.0  # signed
    alone = document_mask(torch.tensor([[0, 0, 1]]))
    assert max_logit(torch.tensor([3.0, 1, 1])[None, None, :, None] * unit, k[:, :, [2, 0, 1]], alone) == 45.0
    assert max_logit(torch.tensor([1.0, 1, 3])[None, None, :, None] * unit, k[:, :, [2, 0, 1]], alone) == 15.0


@pytest.mark.parametrize(("limit", "queries"), [(1, 256), (4 * 7 * 2, 256), (2**24, 3), (2**24, 256)], ids=str)
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_maximum_is_that_of_all_products_whatever_the_slices(kv_heads, documents, limit, queries, monkeypatch):
    monkeypatch.setattr(attention, "LOGITS_IN_A_SLICE", limit)
    monkeypatch.setattr(attention, "QUERIES_IN_A_SLICE", queries)
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 7, 8), torch.randn(2, kv_heads, 7, 8)
    mask = torch.ones(7, 7, dtype=torch.bool).tril() if documents is None else document_mask(documents)
    for sharpened in range(7):  # the largest product at each place in turn
        sharp = q.clone()
        sharp[:, :, sharpened] *= 10
        logits = sharp @ k.repeat_interleave(4 // kv_heads, dim=1).mT / 8**0.5
        expected = logits.masked_fill(~mask, -math.inf).max()
        found = max_logit(sharp, k, None if documents is None else mask)
        torch.testing.assert_close(found, expected)


def test_a_nan_shows():
    q = torch.ones(1, 1, 4, 2)
    q[0, 0, 2, 0] = math.nan
    assert max_logit(q, torch.ones(1, 1, 4, 2)).isnan()


@pytest.mark.parametrize("config", [LLAMA, GPT, Llama(**SHAPE, qk_norm=True)], ids=["llama", "gpt2", "qk_norm"])
@pytest.mark.parametrize("documents", [False, True])
def test_a_block_tells_the_maximum_of_what_its_attention_computes(config, documents, monkeypatch):
    torch.manual_seed(0)
    decoder = Decoder(config)
    for block in decoder.blocks:
        block.attn.q.weight.data.mul_(30)
    scores, told = [], []
    real = attention.causal_attention

    def spy(q, k, v, mask, scale):
        seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril() if mask is None else mask
        every_head = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores.append((q @ every_head.mT / q.shape[3] ** 0.5).masked_fill(~seen, -math.inf).max())
        return real(q, k, v, mask, scale)

    monkeypatch.setattr(attention, "causal_attention", spy)
    ids = torch.randint(61, (2, 16))
    document_ids = torch.arange(16).div(6, rounding_mode="floor").expand(2, 16) if documents else None
    for block in decoder.blocks:
        block.register_forward_pre_hook(lambda block, args: told.append(block.max_attention_logit(*args)))
    decoder(ids, document_ids)
    torch.testing.assert_close(torch.stack(told), torch.stack(scores))
    assert scores[0] != scores[1]


def test_the_outermost_module_that_offers_it_is_asked():
    assert list(modules_with_max_logit(Decoding())) == ["model.blocks.0", "model.blocks.1"]
    assert list(modules_with_max_logit(Decoding(compiled="wrapped"))) == ["model.blocks.0", "model.blocks.1"]
    assert list(modules_with_max_logit(nn.ModuleList([Decoding().model.blocks[0].attn]))) == ["0"]


class Told(Decoding):
    """Runs its blocks twice a batch, and counts how often they are asked."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.asked = []
        for place, block in enumerate(self.model.blocks):
            block.max_attention_logit = lambda x, rope, mask, place=place: self.say(place, x)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + super().training_step(batch, batch_idx)

    def say(self, place, x):
        assert not torch.is_grad_enabled()
        self.asked.append(place)
        return torch.tensor(float(len(self.asked)))


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_each_block_is_asked_once_a_log_step_in_its_last_micro_batch(checkpointing):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Told()
    if checkpointing == "full":  # from outside, so that the backward pass calls the block again
        model.model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.model.blocks)
    run = fit(model, AttentionMonitor(), accumulate_grad_batches=3, max_steps=4)
    assert model.asked == [0, 1, 0, 1]
    assert [step for step, _ in run.rows] == [1, 3]
    assert run.of("attention/model.blocks.0/max_logit") == [1.0, 3.0]
    assert run.of("attention/model.blocks.1/max_logit") == [2.0, 4.0]
    assert len(run.names()) == 2


def test_queries_of_zero_have_a_figure_and_it_is_zero():
    model = Decoding()
    for block in model.model.blocks:
        block.attn.q.weight.data.zero_()
    assert fit(model, AttentionMonitor(), max_steps=1).rows[0][1] == {
        "attention/model.blocks.0/max_logit": 0.0,
        "attention/model.blocks.1/max_logit": 0.0,
    }


def test_a_block_that_did_not_run_has_no_figure():
    class Skipping(Decoding):
        def training_step(self, batch, batch_idx):
            x = self.model.embed(batch)
            return self.model.blocks[1](x, self.model.positions(16, x.dtype), mask=None).sum()

    assert fit(Skipping(), AttentionMonitor()).names() == {"attention/model.blocks.1/max_logit"}


@pytest.mark.parametrize("compiled", ["in_place", "in_place_late", "wrapped"])
def test_compiled_blocks_tell_what_eager_ones_do_and_compile_once(compiled):
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        run = decoding(AttentionMonitor(), ActivationMonitor(), compiled=compiled, backend="eager", max_steps=6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # both blocks share one
    eager = decoding(AttentionMonitor(), ActivationMonitor(), max_steps=6)
    assert len(run.rows) == 3
    for (_, found), (_, expected) in zip(run.rows, eager.rows, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
        assert len(found) == 10


def test_a_model_without_it_gets_one_line():
    class Plain(Decoding):
        def __init__(self):
            super().__init__()
            self.model = nn.Sequential(nn.Embedding(61, 4), nn.Linear(4, 4))

    with warned("AttentionMonitor") as lines:
        run = fit(Plain(), AttentionMonitor())
    assert lines == ["AttentionMonitor records nothing: no module of Plain has a method max_attention_logit"]
    assert run.names() == set()


class Ranks(Decoding):
    """The ranks see different batches: each its own, or that of the rank that is `seen`."""

    seen = None

    def training_step(self, batch, batch_idx):
        rank = self.global_rank if self.seen is None else self.seen
        return super().training_step((batch * (1 + 2 * rank)) % 61, batch_idx)


def largest_of_ranks(rank):
    options = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
    return fit(Ranks(), AttentionMonitor(), max_steps=1, **options).rows[0][1]


@pytest.mark.long
def test_ranks_give_their_largest():
    singles = []
    for seen in (0, 1):
        model = Ranks()
        model.seen = seen
        singles.append(fit(model, AttentionMonitor(), max_steps=1).rows[0][1])
    assert all(singles[0][name] != singles[1][name] for name in singles[0])
    largest = {name: max(single[name] for single in singles) for name in singles[0]}
    assert processes.run(largest_of_ranks) == [pytest.approx(largest, rel=1e-5)] * 2


def language_model():
    """Ours, with its data."""
    from lightning_tricks.language_model import LanguageModel

    ids = torch.arange(2 * 16).view(2, 16)
    torch.manual_seed(0)
    model = LanguageModel(LLAMA, optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-2))
    return model, batches([{"input_ids": ids, "labels": ids}] * 4)


def sharded(rank, alone):
    from torch.distributed.tensor import DTensor

    from lightning_tricks.strategies import FSDP2Strategy

    found = {}
    for compiled, watched in itertools.product((False, True), (False, True)):
        torch.compiler.reset()
        model, data = language_model()
        if compiled:
            configure = model.configure_model

            def compiling(model=model, configure=configure):
                configure()
                for block in model.decoder.blocks:
                    block.compile(backend="eager")

            model.configure_model = compiling
        monitors = [AttentionMonitor(), ActivationMonitor()] if watched else []
        options = {"devices": 2, "strategy": FSDP2Strategy(), "max_steps": 2, "log_every_n_steps": 1}
        run = fit(model, *monitors, data=data, **options)
        found[compiled, watched] = run.rows, [p.to_local() if isinstance(p, DTensor) else p for p in run.weights]
    for compiled in (False, True):
        (_, plain), (rows, weights) = found[compiled, False], found[compiled, True]
        assert all(torch.equal(a, b) for a, b in zip(plain, weights, strict=True)), compiled
        assert len([name for _, row in rows for name in row if "max_logit" in name]) == 4
        for (_, row), (_, expected) in zip(rows, alone, strict=True):
            own = {name: value for name, value in row.items() if name in expected}
            assert own == pytest.approx(expected, rel=1e-3), compiled


@pytest.mark.long
def test_shards_tell_what_one_process_tells_eager_and_compiled_and_train_the_same():
    model, data = language_model()
    run = fit(model, AttentionMonitor(), ActivationMonitor(), data=data, max_steps=2, log_every_n_steps=1)
    own = [(step, {n: v for n, v in row.items() if n.startswith(("att", "act"))}) for step, row in run.rows]
    processes.run(sharded, own)
