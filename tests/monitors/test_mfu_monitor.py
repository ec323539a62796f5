"""Throughput: rates worked out by hand with a clock of our own, for any batch and module, and no trace left."""

import dataclasses
import sys
from typing import NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from harness import processes
from harness.runs import Clock, Memory, On, fit, warned
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_tricks import LanguageModel, Llama
from lightning_tricks._core.errors import UsageError
from lightning_tricks.accounting import recompute_flops_per_token, training_flops_per_token
from lightning_tricks.accounting.device_speed import device_peak
from lightning_tricks.accounting.flop_counting import FlopCounter
from lightning_tricks.callbacks import MetricBuffer, MFUMonitor
from lightning_tricks.metrics import metric_buffer
from lightning_tricks.monitors import _clock as stopwatch
from lightning_tricks.monitors import mfu_monitor
from lightning_tricks.monitors._clock import Stopwatch
from lightning_tricks.monitors.mfu_monitor import contents_of

PREFIX = "throughput/"
PEAKS = sys.modules[device_peak.__module__]


@pytest.fixture(autouse=True)
def forget_the_peak():
    PEAKS._cpu_peak.cache_clear()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(stopwatch, "clock", clock)
    return clock


class Net(pl.LightningModule):
    """One Linear(4, 4); a step takes `seconds` of the clock, the last of a list ever after, a validation batch 7."""

    def __init__(self, clock=None, seconds=(2.0,)) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)
        self.clock, self.seconds = clock or Clock(), [*seconds]

    def rows(self, batch):
        return batch if isinstance(batch, torch.Tensor) else batch["input_ids"]

    def pass_time(self):
        self.clock.now += self.seconds.pop(0) if self.seconds[1:] else self.seconds[0]

    def training_step(self, batch, batch_idx):
        self.pass_time()
        return self.layer(self.rows(batch).float().reshape(-1, 4)).square().mean()

    def validation_step(self, batch, batch_idx):
        self.clock.now += 7.0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Figures(NamedTuple):
    """What a run logged: {step: values}."""

    rows: dict[int, dict[str, float]]
    trainer: pl.Trainer

    def series(self, name):
        return {step: values[PREFIX + name] for step, values in self.rows.items() if PREFIX + name in values}

    def shows(self, **expected):
        """Each series has these values, or one value at the end of each interval: 1, 3 and 5, counted from 0."""
        for name, values in expected.items():
            wanted = values if isinstance(values, dict) else dict.fromkeys((1, 3, 5), values)
            assert self.series(name) == pytest.approx(wanted), name


IDS = torch.ones(64, 8, dtype=torch.long)


def run(module, monitor=None, data=IDS, batch_size=2, callbacks=(), **options):
    defaults = {"max_steps": 6, "limit_val_batches": 0, "num_sanity_val_steps": 0}
    monitor = monitor or MFUMonitor(flops_per_token=10.0, peak_flops=1000.0)
    loader = data if isinstance(data, DataLoader) else DataLoader(data, batch_size=batch_size)
    done = fit(module, monitor, *callbacks, data=loader, val=loader, **{**defaults, **options})
    rows = {}
    for step, values in done.rows:
        rows.setdefault(step, {}).update(values)
    return Figures(rows, done.trainer)


# ---------------------------------------------------------------------------------------------------------- the rates


def test_the_figures_of_an_interval_by_hand(clock):
    log = run(Net(clock))
    # 2 rows of 8 tokens a step, 2 seconds a step: 8 tokens/s, 1 sample/s; 10 FLOPs each against a peak of 1000
    expected = {
        "tokens_per_second": 8.0, "tokens_per_second_per_device": 8.0, "samples_per_second": 1.0, "step_seconds": 2.0,
        "model_flops_per_second": 80.0, "mfu": 0.08,
    }  # fmt: skip
    log.shows(**expected, first_step_seconds={0: 2.0})
    assert {name: log.trainer.callback_metrics[PREFIX + name] for name in expected} == pytest.approx(expected)
    # no hfu: what is computed again is not known where FLOPs were given
    recorded = {name for row in log.rows.values() for name in row}
    assert recorded == {PREFIX + name for name in (*expected, "first_step_seconds")}


def test_each_interval_has_its_own_rate(clock):
    log = run(Net(clock, [50.0, 2.0, 1.0, 3.0, 8.0, 8.0]))
    # 16 tokens in 2 seconds; 32 in 1 + 3; 32 in 8 + 8; the 50 seconds of the first step are in none
    log.shows(tokens_per_second={1: 8.0, 3: 8.0, 5: 2.0}, step_seconds={1: 2.0, 3: 2.0, 5: 8.0})
    log.shows(first_step_seconds={0: 50.0})


def test_all_micro_batches_of_a_step_count(clock):
    log = run(Net(clock), accumulate_grad_batches=3, max_steps=4)
    log.shows(first_step_seconds={0: 6.0}, step_seconds={1: 6.0, 3: 6.0}, tokens_per_second={1: 8.0, 3: 8.0})
    log.shows(samples_per_second={1: 1.0, 3: 1.0}, mfu={1: 0.08, 3: 0.08})


def test_logging_every_step_leaves_the_first_one_out_all_the_same_and_one_step_is_reported(clock):
    run(Net(clock), log_every_n_steps=1, max_steps=3).shows(
        first_step_seconds={0: 2.0}, tokens_per_second={1: 8.0, 2: 8.0}
    )
    assert run(Net(clock), max_steps=1).rows == {0: {"throughput/first_step_seconds": 2.0}}


def test_waiting_for_data_counts_as_training_time(clock):
    def late():
        while True:
            clock.now += 0.5
            yield IDS[:2]

    assert run(Net(clock), data=DataLoader(Stream(late), batch_size=None), max_steps=4).series("step_seconds")[3] == 2.5


class Stream(IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return self.items()


def test_a_second_fit_starts_anew(clock):
    net, monitor = Net(clock), MFUMonitor(flops_per_token=10.0, peak_flops=1000.0)
    run(net, monitor)
    clock.now += 1000.0
    run(net, monitor).shows(first_step_seconds={0: 2.0}, tokens_per_second=8.0)


def test_manual_optimization_and_several_optimizers(clock):
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(super().training_step(batch, batch_idx))
                optimizer.step()

        def configure_optimizers(self):
            return [super().configure_optimizers(), super().configure_optimizers()]

    log = run(Manual(clock), MFUMonitor(peak_flops=1000.0), max_steps=12)
    # each of two passes: 4 rows of 4 through a 4 by 4 matrix, forward and its gradient, 2 * 2 * 4 * 16 = 256 FLOPs
    assert log.series("step_seconds")[3] == pytest.approx(4.0)
    assert log.series("tokens_per_second")[3] == pytest.approx(16 / 4)
    assert log.series("model_flops_per_second")[3] == pytest.approx(2 * 256 / 4)


# ---------------------------------------------------------------------------------------------- what is left out of it


def test_validation_is_left_out_and_reported_and_the_sanity_check_is_not_timed(clock):
    log = run(Net(clock), limit_val_batches=3, val_check_interval=3, num_sanity_val_steps=1)
    # after steps 2 and 5 (from 0), three batches of 7 seconds each; the second has no step after it to go with
    log.shows(validation_seconds={3: 21.0, 5: 21.0}, tokens_per_second={1: 8.0, 2: 8.0, 3: 8.0, 5: 8.0})
    log.shows(first_step_seconds={0: 2.0})


def test_an_interval_too_short_for_the_clock_has_no_rate(clock):
    run(Net(clock, [0.0])).shows(first_step_seconds={0: 0.0}, tokens_per_second={}, step_seconds={})


def test_compilations_are_left_out_and_reported(clock):
    from torch._dynamo.callback import CallbackTrigger, callback_handler

    class Compiling(Net):
        def training_step(self, batch, batch_idx):
            if batch_idx in (0, 3):
                with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0"):
                    self.clock.now += 30.0
            return super().training_step(batch, batch_idx)

    before = len(callback_handler.start_callbacks), len(callback_handler.end_callbacks)
    log = run(Compiling(clock))
    log.shows(compile_seconds={0: 30.0, 3: 30.0}, first_step_seconds={0: 2.0}, tokens_per_second=8.0)
    assert (len(callback_handler.start_callbacks), len(callback_handler.end_callbacks)) == before


def test_waiting_for_the_device_is_training_time_also_before_a_validation_or_a_checkpoint(clock, tmp_path, monkeypatch):
    # the steps before are queued only; the transfer waits for them, one second each time
    to_host = metric_buffer.to_host

    def wait(tensors):
        clock.now += 1.0
        return to_host(tensors)

    monkeypatch.setattr(metric_buffer, "to_host", wait)

    class Saving(Net):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 6:
                self.trainer.save_checkpoint(tmp_path / "a.ckpt")

        def on_save_checkpoint(self, checkpoint):
            self.clock.now += 5.0

    log = run(Saving(clock), limit_val_batches=1, val_check_interval=3, log_every_n_steps=4, max_steps=8)
    # two steps and a wait; one and a wait; two and a wait, ...
    log.shows(first_step_seconds={0: 3.0}, step_seconds={2: 2.5, 3: 3.0, 5: 2.5, 6: 3.0, 7: 3.0})
    log.shows(validation_seconds={3: 7.0, 6: 7.0}, checkpoint_seconds={7: 5.0})


def test_an_interval_that_fails_has_no_rate_and_loses_nothing_else(clock):
    def fail(trainer, *_):
        MetricBuffer.of(trainer).record("throughput/other", trainer.global_step)
        if trainer.global_step == 5:
            raise RuntimeError("lost")

    memory = Memory()
    with pytest.raises(RuntimeError, match="lost"):
        run(Net(clock), callbacks=[On(on_train_batch_end=fail)], logger=memory)
    assert [step for step, values in memory.rows if "throughput/tokens_per_second" in values] == [1, 3]
    assert [values["throughput/other"] for _, values in memory.rows if "throughput/other" in values] == [1, 2, 3, 4, 5]


def test_a_second_goes_to_what_was_entered_last(clock):
    watch = Stopwatch("training")
    clock.now += 1
    watch.enter("validation")
    clock.now += 2
    watch.enter("checkpoint")
    clock.now += 4
    # what still goes on is not taken
    assert watch.take() == (1.0, {})
    watch.leave()
    assert watch.take() == (0.0, {"checkpoint": 4.0})
    clock.now += 8
    watch.enter("checkpoint")
    clock.now += 16
    watch.leave()
    watch.leave()
    clock.now += 32
    assert watch.take() == (32.0, {"validation": 10.0, "checkpoint": 16.0})
    assert watch.take() == (0.0, {})


# ---------------------------------------------------------------------------------------------------------- the batch


@dataclasses.dataclass
class Both:
    images: torch.Tensor
    tokens: torch.Tensor


class Named(NamedTuple):
    images: torch.Tensor
    tokens: torch.Tensor


ONES = torch.ones(3, 5, dtype=torch.long)


@pytest.mark.parametrize(
    ("batch", "shape", "samples"),
    [
        (ONES, (3, 5), 3),
        ([torch.zeros(3), ONES], (3, 5), 3),
        ({"lengths": torch.ones(3, dtype=torch.long), "input_ids": ONES}, (3, 5), 3),
        ({"tokens": torch.ones(3, dtype=torch.long), "ids": ONES}, (3, 5), 3),
        ((ONES, torch.ones(3, 9, dtype=torch.long)), (3, 5), 3),
        ((ONES, torch.ones(3, 7, 2)), (3, 5), 3),
        ({"labels": torch.ones(3, 9, dtype=torch.long), "input_ids": ONES}, (3, 5), 3),
        ({"features": torch.ones(3, 7, 2), "labels": ONES}, (3, 5), 3),
        ((torch.ones(3, 7, 2), torch.ones(3, 9, 2)), (3, 7), 3),
        ({"deep": {"input_ids": ONES}}, (3, 5), 3),
        (Both(torch.ones(3, 3, 8, 8), ONES), (3, 5), 3),
        (Named(torch.ones(3, 3, 8, 8), ONES), (3, 5), 3),
        ((torch.ones(3, 3, 8, 8), torch.ones(3, 6, dtype=torch.long)), None, 3),
        ((torch.ones(3, 10), torch.ones(3, dtype=torch.long)), None, 3),
        (torch.ones(3, 5, dtype=torch.bool), None, 3),
        ((torch.tensor(1.0), torch.ones(4)), None, 4),
        ({"text": ["a", "b"]}, None, 0),
    ],
)
def test_tokens_and_samples_are_found_in_any_batch(batch, shape, samples):
    held = contents_of(None, batch)
    assert (held.tokens, held.length) == ((shape[0] * shape[1], shape[1]) if shape else (0, 0))
    assert held.samples == samples


def test_marked_padding_is_no_token_and_no_device_is_read():
    from transformers import BatchEncoding

    mask = torch.tensor([[1, 1, 1, 0, 0]] * 3)
    held = contents_of(None, BatchEncoding({"input_ids": ONES, "attention_mask": mask}))
    assert isinstance(held.tokens, torch.Tensor)
    assert (held.tokens, held.positions) == (9, 15)
    assert contents_of(None, {"input_ids": ONES, "attention_mask": mask.bool()}).tokens == 9
    # additive masks and masks of pairs mark no tokens
    for other in (mask.float(), torch.ones(3, 1, 5, 5, dtype=torch.long)):
        assert contents_of(None, {"input_ids": ONES, "attention_mask": other}).tokens == 15


def padded(n_real=6):
    mask = torch.tensor([1] * n_real + [0] * (8 - n_real))
    return [{"input_ids": IDS[0], "attention_mask": mask} for _ in range(64)]


def test_padding_counts_neither_as_token_nor_as_work(clock):
    log = run(Net(clock), data=padded(6))
    log.shows(tokens_per_second=6.0, mfu=0.06, samples_per_second=1.0)  # 12 of the 16 tokens of a step are real
    # also where the FLOPs were counted on the whole batch: 2 rows of 8 are 4 of 4, 256 FLOPs with their padding
    log = run(Net(clock), MFUMonitor(peak_flops=1000.0), data=padded(6))
    assert log.series("model_flops_per_second")[3] == pytest.approx(256 / 2 * 12 / 16)
    # FLOPs by the sample know none
    log = run(Net(clock), MFUMonitor(flops_per_sample=100.0, peak_flops=1000.0), data=padded(6))
    log.shows(tokens_per_second=6.0, mfu=0.1)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_module_may_count_its_own_tokens(clock, as_tensor):
    class Counting(Net):
        def tokens_in(self, batch):
            return torch.tensor(4) if as_tensor else 4

    log = run(Counting(clock))
    log.shows(tokens_per_second=2.0, mfu=0.02)
    # a number says what counts as a token, a scalar which of the 16 positions are no padding; 256 FLOPs were counted
    log = run(Counting(clock), MFUMonitor(peak_flops=1000.0))
    assert log.series("model_flops_per_second")[3] == pytest.approx(256 / 2 * (4 / 16 if as_tensor else 1))


def test_images_have_samples_and_no_tokens(clock):
    log = run(Net(clock), MFUMonitor(peak_flops=1000.0), data=torch.ones(64, 1, 2, 2))
    # 2 images of 4 values a step: 2 * 2 * 2 * 16 = 128 FLOPs in 2 seconds
    log.shows(samples_per_second=1.0, model_flops_per_second=64.0, mfu=0.064)
    log.shows(tokens_per_second={}, tokens_per_second_per_device={})


def test_a_batch_is_counted_before_the_step_takes_it_apart(clock):
    class Popping(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch.pop("input_ids"), batch_idx)

    data = [{"input_ids": IDS[0]} for _ in range(64)]
    log = run(Popping(clock), MFUMonitor(peak_flops=1000.0), data=data)
    log.shows(tokens_per_second=8.0, mfu=0.128)


# ---------------------------------------------------------------------------------------------------------- the FLOPs


def test_counted_flops_tell_mfu_from_hfu(clock):
    class Checkpointed(Net):
        def training_step(self, batch, batch_idx):
            self.pass_time()
            x = batch.float().reshape(-1, 4)
            return torch.utils.checkpoint.checkpoint(
                lambda x: self.layer(x).relu().square(), x, use_reentrant=False
            ).mean()

    log = run(Checkpointed(clock), MFUMonitor(peak_flops=1000.0))
    # 256 FLOPs a step for the model, 128 for the forward product once more, in 2 seconds
    log.shows(mfu=0.128, hfu=0.192, model_flops_per_second=128.0)


def test_a_module_may_know_its_flops_for_rows_of_any_length(clock):
    asked = []

    class Knowing(Net):
        def flops_per_token(self, seq_len, attention):
            asked.append((seq_len, attention))
            return 10.0 * seq_len, 5.0 * seq_len

    rows = [torch.ones(1, 8, dtype=torch.long)] * 2 + [torch.ones(1, 4, dtype=torch.long)] * 4
    log = run(Knowing(clock), MFUMonitor(peak_flops=1000.0, attention="full"), data=DataLoader(rows, batch_size=None))
    # one row a step: 8 tokens of 80 FLOPs, later 4 tokens of 40, each in 2 seconds
    log.shows(mfu={1: 0.32, 3: 0.08, 5: 0.08}, hfu={1: 0.48, 3: 0.12, 5: 0.12})
    assert asked == [(8, "full"), (4, "full")]


@pytest.mark.parametrize("attention", ["causal", "full"])
def test_the_language_model_has_its_flops_in_closed_form(clock, attention, caplog):
    config = Llama(vocab_size=32, d_model=16, n_layers=1, n_heads=2, max_seq_len=8)
    model = LanguageModel(config, activation_checkpointing="full")

    two_seconds = On(on_train_batch_end=lambda *_: setattr(clock, "now", clock.now + 2.0))
    data = [{"input_ids": IDS[0], "labels": IDS[0]} for _ in range(64)]
    with caplog.at_level("INFO"):
        log = run(model, MFUMonitor(peak_flops=1e9, attention=attention), data=data, callbacks=[two_seconds])
    once, again = (
        training_flops_per_token(config, 8, attention),
        recompute_flops_per_token(config, 8, attention, "full"),
    )
    assert log.series("mfu")[5] == pytest.approx(8 * once / 1e9)
    assert log.series("hfu")[5] == pytest.approx(8 * (once + again) / 1e9)
    said = [record.message for record in caplog.records if "MFUMonitor" in record.message]
    assert len(said) == 1
    assert f"{attention} attention" in said[0]


def test_the_time_spent_on_counting_is_no_training_time(clock, monkeypatch):
    count = FlopCounter._count

    def slow(*args):
        clock.now += 1000.0
        return count(*args)

    monkeypatch.setattr(FlopCounter, "_count", slow)
    log = run(Net(clock), MFUMonitor(peak_flops=1000.0))
    assert log.series("first_step_seconds")[0] > 1000.0
    log.shows(step_seconds=2.0)


def test_an_interval_of_unknown_flops_has_no_figure_and_an_hfu_above_one_is_left_out():
    step = {"_samples": 1, "_positions": 1, "_tokens": 1, "_flops": 80.0, "_recompute": 40.0}
    steps = [step, step | {"_flops": float("nan")}]
    found = mfu_monitor.rates(steps, seconds=1.0, devices=1, copies=1, peak=1000.0)
    assert found["tokens_per_second"] == 2.0
    assert not {"mfu", "hfu", "model_flops_per_second"} & found.keys()
    found = mfu_monitor.rates([step], seconds=1.0, devices=1, copies=1, peak=100.0)
    assert found["mfu"] == pytest.approx(0.8)
    assert "hfu" not in found


@pytest.mark.parametrize("counts", [False, True])
def test_an_optimizer_that_asks_for_several_passes_does_their_work(clock, counts):
    class Lbfgs(Net):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=1e-6, max_iter=4, tolerance_grad=0, tolerance_change=0)

    monitor = MFUMonitor(None if counts else 10.0, peak_flops=1e5)
    log = run(Lbfgs(clock), monitor)
    # 4 passes of 2 seconds a step, each over 16 tokens; 16 FLOPs a token were counted
    assert log.series("step_seconds")[3] == pytest.approx(8.0)
    assert log.series("tokens_per_second")[3] == pytest.approx(16 / 8)
    assert log.series("model_flops_per_second")[3] == pytest.approx(4 * 16 * (16 if counts else 10) / 8)


# ----------------------------------------------------------------------------------------------------------- the peak


CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")


@pytest.mark.parametrize(
    ("precision", "teraflops"),
    [("bf16-mixed", 989.5), ("bf16-true", 989.5), ("16-mixed", 989.5), ("32-true", 67.0), (32, 67.0)],
)
def test_the_peak_follows_the_device_and_the_precision(monkeypatch, precision, teraflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    peak, said = device_peak(CUDA, precision)
    assert peak == teraflops * 1e12
    assert f"peak {teraflops:g} TFLOP/s (NVIDIA H200, " in said
    assert "dense" in said


def test_fp32_products_in_tf32_have_its_peak(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert device_peak(CUDA, "32-true")[0] == 494.5e12
    monkeypatch.setattr(PEAKS, "measure_peak_flops", lambda device, dtype: {"fp32": 1e12}[dtype])
    assert device_peak(CPU, "32-true")[0] == 1e12
    assert device_peak(CUDA, "32-true", given=5e12) == (5e12, "peak 5 TFLOP/s (given)")


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA H100 80GB HBM3"])
def test_a_plugin_that_multiplies_in_fp8_has_its_dense_peak_and_says_so(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    peak, said = device_peak(CUDA, "bf16-mixed", "fp8")
    assert peak == 1979e12  # the datasheet's first figure, with sparsity, is 3958
    assert said == f"peak 1979 TFLOP/s ({name}, fp8, dense)"


@pytest.mark.parametrize(
    ("device", "precision"),
    [("cuda:0", "bf16-mixed"), ("mps", "bf16-mixed"), ("cpu", "64-true"), ("cuda:0", "transformer-engine")],
)
def test_an_unknown_peak_is_no_guess_but_a_line(monkeypatch, device, precision):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU 3000")
    peak, said = device_peak(torch.device(device), precision)
    assert peak is None
    assert said.startswith("no MFU")
    assert said.endswith("give peak_flops")


def test_a_run_on_an_unknown_device_lacks_only_mfu(clock, monkeypatch, caplog):
    monkeypatch.setattr(PEAKS, "measure_peak_flops", lambda device, dtype: None)
    with caplog.at_level("INFO"):
        log = run(Net(clock), MFUMonitor())
    assert sum("give peak_flops" in record.message for record in caplog.records) == 1
    log.shows(model_flops_per_second=128.0, tokens_per_second=8.0, mfu={}, hfu={})


def test_a_cpus_peak_is_measured_and_labelled(clock, monkeypatch, caplog):
    asked = []
    monkeypatch.setattr(PEAKS, "measure_peak_flops", lambda device, dtype: asked.append(dtype) or 2e12)
    with caplog.at_level("INFO"):
        log = run(Net(clock), MFUMonitor(), precision="bf16-mixed")
        device_peak(CPU, "bf16-mixed")
    assert asked == ["bf16"]  # once a process
    (said,) = [record.message for record in caplog.records if "MFUMonitor" in record.message]
    assert "16 FLOP a token (counted, full attention)" in said
    assert "peak 2 TFLOP/s (CPU, bf16, measured)" in said
    assert log.series("mfu")[3] == pytest.approx(128 / 2e12)


def test_mfu_above_one_is_left_out_with_one_warning(clock):
    with warned("MFUMonitor") as lines:
        log = run(Net(clock, [2.0, 2.0, 2.0, 2.0, 4.0, 4.0]), MFUMonitor(flops_per_token=10.0, peak_flops=60.0))
    # 16 tokens of 10 FLOPs in 2 seconds are 80 FLOP/s of 60; in 4 seconds 40
    log.shows(mfu={5: 40 / 60}, model_flops_per_second={1: 80.0, 3: 80.0, 5: 40.0})
    (said,) = lines
    assert "throughput/mfu is left out" in said
    assert said.endswith("give peak_flops")


# -------------------------------------------------------------------------------------------------------- many ranks


def test_rates_by_hand_of_many_ranks():
    # 8 ranks, 4 of them see different data: each sum holds every token twice
    step = {"_samples": 8, "_positions": 800, "_tokens": 600, "_flops": 8000.0, "_recompute": 800.0}
    found = mfu_monitor.rates([step, step], seconds=4.0, devices=8, copies=2, peak=1e3)
    assert found == pytest.approx(
        {
            "step_seconds": 2.0,
            "samples_per_second": 8 / 2 * 2 / 4,
            "tokens_per_second": 600 / 2 * 2 / 4,
            "tokens_per_second_per_device": 600 / 2 * 2 / 4 / 8,
            # three quarters of the positions are tokens
            "model_flops_per_second": 0.75 * 8000 / 2 * 2 / 4 / 8,
            "mfu": 0.75 * 8000 / 2 * 2 / 4 / 8 / 1e3,
            "hfu": 0.75 * 8800 / 2 * 2 / 4 / 8 / 1e3,
        }
    )


def train_two(rank):
    stopwatch.clock = clock = Clock()
    # rank 0 sees rows of 8 tokens, rank 1 rows of 8 of which half is padding
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[:, 8 - 4 * rank :] = 0
    padding = [{"input_ids": torch.ones(2, 8, dtype=torch.long), "attention_mask": mask} for _ in range(12)]
    found = []
    for batches in (padding, [torch.ones(2, 8 - 4 * rank, dtype=torch.long)] * 12):
        options = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
        log = run(Net(clock), data=DataLoader(batches, batch_size=None), **options)
        found.append({name: float(value) for name, value in log.trainer.callback_metrics.items()})
    return found


@pytest.mark.long
def test_two_ranks_count_their_own_tokens_once():
    with_padding, shorter = processes.run(train_two)[0]
    # a step: 16 + 8 real tokens and 4 samples on two devices, in 2 seconds
    expected = {"tokens_per_second": 12.0, "tokens_per_second_per_device": 6.0, "samples_per_second": 2.0}
    expected |= {"mfu": 6 * 10 / 1000, "step_seconds": 2.0}
    assert {name: with_padding[PREFIX + name] for name in expected} == pytest.approx(expected)
    # without masks, and rows of another length on each rank
    assert shorter[PREFIX + "tokens_per_second"] == pytest.approx((16 + 8) / 2)
    assert shorter[PREFIX + "mfu"] == pytest.approx(6 * 10 / 1000)


# ------------------------------------------------------------------------------------------------------ its manners


def test_on_a_device_the_transfer_takes_something_along_to_wait_for(clock, monkeypatch):
    device = torch.zeros(())  # as on a device that works in its own time
    monkeypatch.setattr(mfu_monitor, "fence", lambda _: device)
    recorded, record = [], MetricBuffer.record
    monkeypatch.setattr(MetricBuffer, "record", lambda self, *a, **k: recorded.append(a[1]) or record(self, *a, **k))
    run(Net(clock))
    assert sum(value is device for value in recorded) == 6


def test_without_a_logging_interval_nothing_is_done(clock, caplog):
    with caplog.at_level("INFO"):
        log = run(Net(clock), log_every_n_steps=0)
    assert not log.rows
    assert not [name for name in log.trainer.callback_metrics if name.startswith(PREFIX)]
    assert not [record for record in caplog.records if "MFUMonitor" in record.message]


def test_without_a_logger_the_figures_reach_callbacks(clock):
    log = run(Net(clock), logger=False, max_steps=4, limit_val_batches=2, val_check_interval=4)
    assert log.trainer.callback_metrics["throughput/mfu"] == pytest.approx(0.08)
    assert log.trainer.callback_metrics["throughput/validation_seconds"] == 14.0


def test_flops_by_the_token_of_what_has_none_are_refused(clock):
    with pytest.raises(
        UsageError, match="flops_per_token=10: no tokens were found in the batch; give flops_per_sample"
    ):
        run(Net(clock), data=torch.ones(64, 1, 2, 2))


def test_precision_plugins_may_say_their_dtype(clock, monkeypatch):
    class InFp8(Precision):
        peak_dtype = "fp8"

    monkeypatch.setattr(PEAKS, "measure_peak_flops", lambda device, dtype: {"fp8": 7e12}.get(dtype))
    log = run(Net(clock), MFUMonitor(flops_per_token=7e10), plugins=[InFp8()])
    assert log.series("mfu")[3] == pytest.approx(8 * 7e10 / 7e12)
