"""BitsPerByte, TokenLoss, TokenPerplexity: sums over batches and ranks, exact, in any LightningModule."""

import doctest
import math
import pickle

import lightning.pytorch as pl
import pytest
import torch
from harness import processes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_tricks import LanguageModel, Llama
from lightning_tricks.metrics import BitsPerByte, TokenLoss, TokenPerplexity, token_metrics
from lightning_tricks.metrics.token_metrics import add, widest

# nats, tokens and bytes of six ragged batches
BATCHES = [(6.5, 3, 4), (0.25, 1, 1), (40.0, 12, 31), (0.0, 0, 0), (7.125, 5, 9), (2.5, 2, 0)]
NATS, TOKENS, BYTES = 56.375, 23, 45
EXPECTED = {"loss": NATS / TOKENS, "bpb": NATS / 45 / math.log(2), "perplexity": math.exp(NATS / TOKENS)}


class Own(pl.LightningModule):
    """A module of the user's own, which logs as Lightning's documentation says."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.loss, self.bpb, self.perplexity = TokenLoss(), BitsPerByte(), TokenPerplexity()
        self.seen: list[dict[str, float]] = []

    def training_step(self, batch, _):
        return self.weight * 1.0

    def validation_step(self, batch, _):
        nats, tokens, n_bytes = batch
        self.loss.update(nats, tokens)
        self.perplexity.update(nats, tokens)
        self.bpb.update(nats, n_bytes)
        self.log_dict({"loss": self.loss, "bpb": self.bpb, "perplexity": self.perplexity})

    def on_validation_end(self):
        found = self.trainer.callback_metrics
        self.seen.append({name: found[name].item() for name in EXPECTED})

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(rows=BATCHES) -> DataLoader:
    return DataLoader([(torch.tensor(n), torch.tensor(t), torch.tensor(b)) for n, t, b in rows], batch_size=None)


def trainer(**options) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(accelerator="cpu", enable_checkpointing=False, **{"max_epochs": 1, **quiet, **options})


def updated(metric, batches=BATCHES):
    for nats, tokens, n_bytes in batches:
        metric.update(nats, n_bytes if isinstance(metric, BitsPerByte) else tokens)
    return metric


def test_worked_out_by_hand():
    assert updated(TokenLoss()).compute().item() == pytest.approx(56.375 / 23, rel=1e-13)
    assert updated(TokenPerplexity()).compute().item() == pytest.approx(math.exp(56.375 / 23), rel=1e-13)
    # 8 bytes for 16 bits: 2 bits a byte
    metric = BitsPerByte()
    metric.update(16 * math.log(2), 8)
    assert metric.compute().item() == pytest.approx(2.0, rel=1e-13)


@pytest.mark.parametrize("cls", [TokenLoss, BitsPerByte])
def test_one_number_a_row_and_their_sum_are_the_same(cls):
    rows, once = cls(), cls()
    rows.update(torch.tensor([1.5, 2.5, 0.25]), torch.tensor([2, 3, 0]))
    once.update(4.25, 5)
    assert rows.compute() == once.compute()


def test_without_a_token_it_is_nan_and_no_number():
    metric = TokenLoss()
    metric.update(torch.tensor(0.0), torch.tensor(0))
    assert metric.compute().isnan()


def test_an_infinite_loss_stays_infinite():
    metric = updated(TokenLoss())
    metric.update(torch.tensor(math.inf), torch.tensor(1))
    metric.update(torch.tensor(1.0), torch.tensor(1))
    assert metric.compute() == math.inf


def test_a_billion_tokens_are_right_to_1e_6_in_fp32_alone():
    """As on a device without float64: 7,630 batches of 131,072 tokens."""
    batch, total, naive = torch.tensor(131_072 * 3.3), torch.zeros(2), torch.zeros(())
    for _ in range(7630):
        total, naive = add(total, batch), naive + batch
    mean = batch.item() / 131_072
    assert total[0].item() / (7630 * 131_072) == pytest.approx(mean, rel=1e-7)
    assert naive.item() / (7630 * 131_072) != pytest.approx(mean, rel=1e-6)  # a plain fp32 sum is too coarse


class NoFloat64(TorchDispatchMode):
    """As on Apple's GPUs: any result in float64 is an error."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
            raise TypeError(f"{func}: no float64 on this device")
        return result


def test_nothing_is_float64_on_a_device_that_has_none(monkeypatch):
    assert (widest(torch.device("mps")), widest(torch.device("cuda"))) == (torch.float32, torch.float64)
    monkeypatch.setattr(token_metrics, "widest", lambda device: torch.float32)
    model = LanguageModel(Llama(vocab_size=8, d_model=8, n_layers=1, n_heads=2, max_seq_len=8))
    model.configure_model()
    ids = torch.randint(0, 8, (2, 8))
    with NoFloat64():
        model.validation_step({"input_ids": ids, "labels": ids, "n_bytes": torch.tensor([3, 4])}, 0)
        loss = model.token_loss.compute()
        model.bits_per_byte.compute()
    assert loss.item() == pytest.approx(math.log(8), abs=0.1)


def test_it_follows_a_module_to_a_device_and_to_no_dtype():
    module = torch.nn.ModuleList([updated(TokenLoss())])
    before = module[0].compute().item()
    module[0]._computed = None
    module.to(torch.bfloat16).half()
    module.to("meta").to_empty(device="cpu")
    assert module[0].nats.dtype == torch.float32
    assert module[0].compute().item() == before
    module[0].reset()
    assert (module[0].nats.tolist(), module[0].count.item()) == ([0.0, 0.0], 0)


def test_a_module_of_the_users_own_logs_the_figures_of_the_whole_set():
    model = Own()
    trainer().validate(model, loader(), verbose=False)
    assert model.seen == [pytest.approx(EXPECTED, rel=1e-12)]


def test_each_epoch_starts_anew_and_the_sanity_check_leaves_nothing():
    model = Own()
    run = trainer(max_epochs=3, num_sanity_val_steps=2, limit_train_batches=1)
    run.fit(model, loader(), loader())
    assert model.seen[1:] == [pytest.approx(EXPECTED, rel=1e-12)] * 3
    assert model.loss.count == 0


def test_it_pickles_in_mid_epoch_and_adds_no_key_to_a_checkpoint():
    half = pickle.loads(pickle.dumps(updated(TokenLoss(), BATCHES[:3])))
    assert updated(half, BATCHES[3:]).compute().item() == updated(TokenLoss()).compute().item()
    assert Own().state_dict().keys() == {"weight"}


def validate_half(rank):
    """Ragged halves: rank 0 has the small batches of both, in values that fp32 cannot add exactly."""
    rows, model = BATCHES[:2] if rank == 0 else BATCHES[2:], Own()
    options = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False, "limit_val_batches": len(rows)}
    trainer(**options).validate(model, loader(rows), verbose=False)
    fine = TokenLoss()
    fine.update(16777216.0 if rank == 0 else 1.0, 1)
    return model.seen, fine.compute().item()


@pytest.mark.long
def test_two_ragged_ranks_have_the_figures_of_one_process():
    for seen, fine in processes.run(validate_half):
        assert seen == [pytest.approx(EXPECTED, rel=1e-12)]
        assert fine == 16777217 / 2  # 2**24 + 1 is no fp32 number


def test_the_examples_in_the_docstrings_run():
    assert doctest.testmod(token_metrics).failed == 0
