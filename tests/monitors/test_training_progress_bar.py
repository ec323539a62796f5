"""The progress line: what it shows, when it prints, and that it changes nothing."""

import math
import re
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from harness.runs import Clock, On, fit
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_tricks.callbacks import MetricBuffer, TrainingProgressBar
from lightning_tricks.monitors import training_progress_bar
from lightning_tricks.monitors.training_progress_bar import (
    TRAIN,
    VALIDATION,
    decimals,
    fitted,
    hours_minutes_seconds,
    shown,
)


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        self.log("train_loss", -1.0)  # a number of the module's own: the line has the loss of the step
        mean = self.layer(batch[0]).mean()
        return mean - mean.detach() + self.global_step + 1

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", 7.0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Monitors(pl.Callback):
    """Records what a run of a language model would, or what it is given."""

    def __init__(self, **values: float) -> None:
        self.values = {
            "train/lr": 3e-4,
            "throughput/tokens_per_second": 12345.0,
            "throughput/mfu": 0.4123,
            "memory/rss_gib": 61.25,
        } | {name.replace("__", "/"): value for name, value in values.items()}

    def setup(self, trainer, pl_module, stage):
        self.buffer = MetricBuffer.of(trainer)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.buffer.record("train/grad_norm", torch.tensor(100.0 + trainer.global_step))
        for name, value in self.values.items():
            self.buffer.record(name, value)


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield (torch.ones(3, 4),)


def run(bar, *callbacks, model=None, data=None, **options) -> None:
    torch.manual_seed(0)
    data = data if data is not None else DataLoader(TensorDataset(torch.ones(40, 3, 4)), batch_size=2)
    defaults = {"max_steps": 6, "val_check_interval": 4, "limit_val_batches": 1, "num_sanity_val_steps": 1}
    model, val = model or Model(), DataLoader(torch.ones(2, 1, 3, 4))
    fit(model, bar, *callbacks, data=data, val=val, **{"logger": False, **defaults, **options})


def stop_at(step):
    return On(on_train_batch_end=lambda trainer, *_: setattr(trainer, "should_stop", trainer.global_step == step))


def steps(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("step ") and "validation" not in line]


# ---- what it shows


def test_prints_one_whole_line_an_interval_with_that_steps_own_values(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")  # of a terminal, which a log file has not
    run(TrainingProgressBar(), Monitors())
    out = capsys.readouterr().out
    assert not {"\r", "\x1b"} & {*out}
    lines = [re.sub(r"ETA .*", "ETA", line) for line in steps(out)]
    assert lines == [
        f"step {step}/6 ({part}%)  loss {step}.0000  norm 10{step}.00  lr 3.0e-04  12.3k tokens/s  MFU 41.2%"
        "  61.2 GiB  ETA"
        for step, part in [(2, 33), (4, 67), (6, 100)]
    ]


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        ({"train/loss": 2, "train_loss": 3, "loss": 4}, "loss 2.0000"),
        ({"train_loss": 3, "loss": 4}, "loss 3.0000"),
        ({"loss": 4}, "loss 4.0000"),
        ({"train/loss": math.nan}, "loss nan"),
        ({"train/grad_norm/0": 1.5, "train/lr/0": 1.26e-5}, "norm 1.500  lr 1.3e-05"),
        ({"throughput/samples_per_second": 812.3}, "812 samples/s"),
        ({"throughput/samples_per_second": 812, "throughput/tokens_per_second": 5e6}, "5M tokens/s"),
        ({"throughput/mfu": 0.0021}, "MFU 0.2%"),
        ({"memory/peak_allocated_gib": 61.34, "memory/rss_gib": 3}, "61.3 GiB"),
        ({"memory/peak_rss_gib": 3}, "3.0 GiB"),
        ({"something/else": 3}, ""),
    ],
)
def test_names_and_their_order(metrics, text):
    assert "  ".join(shown({name: torch.tensor(value) for name, value in metrics.items()}, TRAIN)) == text


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        ({"val/loss": 2, "val_loss": 3, "val/bits_per_byte": 1.5}, "loss 2.0000  bits/byte 1.5000"),
        ({"val_loss": 3, "val_acc": 0.5}, "loss 3.0000  accuracy 0.5000"),
        ({"val/accuracy": 0.25, "train/loss": 1}, "accuracy 0.2500"),
    ],
)
def test_names_of_the_validation_line(metrics, text):
    assert "  ".join(shown(metrics, VALIDATION)) == text


def test_validation_has_a_line_of_its_own_below_that_of_its_step(capsys):
    run(TrainingProgressBar())
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("step")] == [
        "step 2/6 (33%)", "step 4/6 (67%)", "step 4", "step 6/6 (100%)",
    ]  # fmt: skip
    assert "step 4  validation  loss 7.0000" in lines


def test_validating_alone_prints_lightnings_table_only(capsys):
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, callbacks=[TrainingProgressBar()])
    trainer.validate(Model(), DataLoader(torch.ones(2, 1, 3, 4)))
    assert "step 0" not in capsys.readouterr().out


# ---- when it prints


def test_without_logging_there_is_the_validation_line_only(capsys):
    run(TrainingProgressBar(), Monitors(), log_every_n_steps=0)
    out = capsys.readouterr().out
    assert not steps(out)
    assert "step 4  validation  loss 7.0000" in out


class Manual(Model):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.layer(batch[0]).mean() * 0 + 1.5)
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        ({"accumulate_grad_batches": 3, "max_steps": 4}, ["2/4", "4/4"]),
        ({"max_steps": 5}, ["2/5", "4/5", "5/5"]),  # the last step, though no interval ends
        ({"model": Manual(), "max_steps": 12}, ["4/12", "8/12", "12/12"]),  # two optimizers: as Lightning counts
    ],
)
def test_each_interval_and_the_last_step_print_once(capsys, options, printed):
    run(TrainingProgressBar(), val_check_interval=20, **options)
    assert [line.split()[1] for line in steps(capsys.readouterr().out)] == printed


def test_a_second_fit_starts_anew(capsys, clock):
    def fail(trainer, *_):
        if trainer.global_step == 5:
            raise ZeroDivisionError

    bar = TrainingProgressBar()
    with pytest.raises(ZeroDivisionError):
        run(bar, clock.take(10), On(on_train_batch_end=fail))
    capsys.readouterr()
    run(bar, clock.take(10), max_steps=4, val_check_interval=20)
    assert [(line.split()[1], line.split()[-1]) for line in steps(capsys.readouterr().out)] == [
        ("2/4", "0:00:20"),
        ("4/4", "0:00:00"),
    ]


# ---- the time left


class Steps(Clock):
    def take(self, *seconds):
        """A callback by which each step takes so long, the later ones as long as the last that is given."""
        left = [*seconds]

        def pass_time(*_):
            self.now += left.pop(0) if left[1:] else left[0]

        return On(on_before_backward=pass_time)


@pytest.fixture
def clock(monkeypatch):
    clock = Steps()
    monkeypatch.setattr(training_progress_bar, "time", SimpleNamespace(perf_counter=clock))
    return clock


def etas(text: str) -> list[str]:
    return [re.search(r"ETA (\S+)", line)[1] for line in steps(text)]


def test_the_time_left_is_the_last_intervals_pace_and_the_validations_to_come(capsys, clock):
    class Timed(Model):
        def validation_step(self, batch, batch_idx):
            clock.now += 3600 if self.global_step else 10_000  # the sanity check does not count

    run(TrainingProgressBar(), clock.take(60, 60, 10), model=Timed(), val_check_interval=3, max_steps=11)
    # after step 3 those of steps 6 and 9 are left, in the line of step 6 too, which is printed before its validation
    assert etas(capsys.readouterr().out) == ["0:09:00", "2:01:10", "2:00:50", "1:00:30", "0:00:10", "0:00:00"]


def test_a_resumed_runs_first_validation_counts_few_to_come(capsys, clock, tmp_path):
    class Timed(Model):
        def validation_step(self, batch, batch_idx):
            clock.now += 100

    run(
        TrainingProgressBar(), On(on_train_end=lambda trainer, *_: trainer.save_checkpoint(tmp_path / "a")), max_steps=3
    )
    capsys.readouterr()
    run(TrainingProgressBar(), clock.take(1), model=Timed(), max_steps=18, ckpt_path=tmp_path / "a")
    assert etas(capsys.readouterr().out)[:3] == ["0:00:14", "0:05:12", "0:05:10"]


def test_with_epochs_the_time_left_is_that_until_the_last(capsys, clock):
    epochs = {"max_steps": -1, "max_epochs": 2, "val_check_interval": 20, "accumulate_grad_batches": 3}
    run(TrainingProgressBar(), clock.take(10), log_every_n_steps=7, **epochs)
    out = capsys.readouterr().out  # 20 batches an epoch, three to a step
    assert [line.split()[1] for line in steps(out)] == ["7/14", "14/14"]
    assert etas(out) == ["0:03:20", "0:00:00"]


def test_data_that_ends_before_max_steps_says_so(capsys):
    class Short(IterableDataset):
        def __iter__(self):
            return iter([(torch.ones(3, 4),)] * 3)

    run(TrainingProgressBar(), data=DataLoader(Short()), max_epochs=1, val_check_interval=None, limit_val_batches=0)
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == "training ended at step 3 of 6: the data ended"


def test_an_epoch_with_other_data_than_the_one_before_has_its_own_end(capsys):
    class Growing(Model):
        def train_dataloader(self):
            return DataLoader(TensorDataset(torch.ones(3 + self.current_epoch, 3, 4)))

    options = {"max_steps": -1, "max_epochs": 2, "log_every_n_steps": 1, "reload_dataloaders_every_n_epochs": 1}
    fit(Growing(), TrainingProgressBar(), logger=False, **options)
    positions = [line.split()[1] for line in steps(capsys.readouterr().out)]
    assert positions == ["1/6", "2/6", "3/7", "4/7", "5/7", "6/7", "7/7"]


def test_without_a_known_end_there_is_no_time_left(capsys):
    run(TrainingProgressBar(), stop_at(4), data=DataLoader(Endless()), max_steps=-1, max_epochs=2, min_epochs=0)
    lines = steps(capsys.readouterr().out)
    assert [line.split("  ")[0] for line in lines] == ["step 2", "step 4"]
    assert not any("ETA" in line for line in lines)


def test_with_manual_optimization_the_last_epoch_tells_no_step(capsys):
    run(TrainingProgressBar(), model=Manual(), max_steps=-1, max_epochs=1, val_check_interval=20, log_every_n_steps=10)
    assert [line.split("  ") for line in steps(capsys.readouterr().out)] == [
        ["step 20", "loss 3.0000"],
        ["step 40", "loss 3.0000"],
    ]


# ---- the terminal


@pytest.fixture
def terminal(monkeypatch):
    stdout = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(training_progress_bar, "sys", SimpleNamespace(stdout=stdout))
    monkeypatch.setenv("COLUMNS", "200")
    return monkeypatch


def test_on_a_terminal_the_line_is_redrawn_and_one_stays_at_each_tenth_of_the_run(capsys, terminal):
    run(TrainingProgressBar(), val_check_interval=20, log_every_n_steps=1, max_steps=20)
    out = re.sub(r"  loss [^\r\n]*", "", capsys.readouterr().out)
    assert out.startswith("\r\x1b[2Kstep 1/20 (5%)\r\x1b[2Kstep 2/20 (10%)\n\r\x1b[2Kstep 3/20 (15%)\r")
    assert re.findall(r"step (\d+)/[^\r\n]*\n", out) == [str(step) for step in range(2, 21, 2)]


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (200, "step {} (50%)  loss {}  norm 106.00  lr 3.0e-04  12.3k tokens/s  MFU 41.2%  61.2 GiB  ETA 1:02:05"),
        (80, "step {} (50%)  loss {}  norm 106.00  12.3k tokens/s  ETA 1:02:05"),
        (60, "step {} (50%)  loss {}  ETA 1:02:05"),
        (40, "step {} (50%)  loss {}"),
    ],
)
@pytest.mark.parametrize("loss", [2.5, 20_792_540.0])
def test_a_narrow_terminal_goes_without_what_matters_least(columns, line, loss):
    metrics = {"train/loss": loss, "train/grad_norm": 106.0, "memory/rss_gib": 61.2, **Monitors().values}
    parts = ["step 600/1200 (50%)", *shown(metrics, TRAIN), "ETA 1:02:05"]
    text = fitted(parts, columns)
    assert text == line.format("600/1200", "2.5000" if loss == 2.5 else "2.079e+07")
    assert len(text) < columns
    longest = ["step 1234567/2000000 (62%)", *shown(metrics, TRAIN), "ETA 1234:02:05"]
    assert columns < 80 or (len(fitted(longest, columns)) < columns and "ETA 1234:02:05" in fitted(longest, columns))


def test_a_line_wider_than_the_terminal_is_cut(capsys, terminal):
    terminal.setenv("COLUMNS", "22")
    run(TrainingProgressBar(), Monitors(), val_check_interval=20)
    assert capsys.readouterr().out.split("\r\x1b[2K")[1:] == [
        f"step {step}/6 ({part}%)  loss 1"[:21] + "\n" for step, part in [(2, 33), (4, 67), (6, 100)]
    ]


def test_the_validation_line_replaces_the_redrawn_one_and_stays(capsys, terminal):
    run(TrainingProgressBar())
    assert "\r\x1b[2Kstep 4  validation  loss 7.0000\n\r\x1b[2Kstep 6/6" in capsys.readouterr().out


def test_an_error_and_an_early_end_start_on_their_own_line(capsys, terminal):
    class Failing(Model):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    with pytest.raises(ZeroDivisionError):
        run(TrainingProgressBar(), model=Failing())
    assert re.fullmatch(r"\r\x1b\[2Kstep 2/6[^\n]*\n", capsys.readouterr().out)
    run(TrainingProgressBar(), stop_at(2), min_epochs=0, limit_val_batches=0)
    assert re.search(
        r"\r\x1b\[2Kstep 2/6[^\n]*\n\r\x1b\[2Ktraining ended at step 2 of 6: a callback or a signal stopped it\n$",
        capsys.readouterr().out,
    )


def test_what_a_program_prints_stands_above_the_redrawn_line(capsys, terminal):
    TrainingProgressBar().print("two", "words")
    assert capsys.readouterr().out == "\r\x1b[2Ktwo words\n"


# ---- what it leaves alone


def test_the_device_is_read_for_the_printed_lines_only(capsys, monkeypatch):
    reads = []
    read = torch.Tensor.__float__
    monkeypatch.setattr(torch.Tensor, "__float__", lambda self: (reads.append(1), read(self))[1])
    run(TrainingProgressBar(), val_check_interval=20)
    assert len(reads) == len(steps(capsys.readouterr().out)) == 3


def test_a_disabled_bar_is_silent_and_reads_nothing(capsys, monkeypatch):
    monkeypatch.setattr(training_progress_bar, "shown", lambda *_: pytest.fail("read"))
    bar = TrainingProgressBar()
    bar.disable()
    run(bar, val_check_interval=20)
    bar.print("step")
    assert "step" not in capsys.readouterr().out
    bar.enable()
    bar.print("step")
    assert capsys.readouterr().out == "step\n"


# ---- how it writes numbers


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00:00"), (59.6, "0:01:00"), (3725, "1:02:05"), (math.nan, "?")])
def test_a_duration_is_in_hours_minutes_and_seconds(seconds, text):
    assert hours_minutes_seconds(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.0000"), (2.5, "2.5000"), (1e-3, "0.0010"), (9.9e-4, "9.900e-04"), (-2e-5, "-2.000e-05"), (10, "10.000"),
     (1234.5678, "1234.6"), (99_999.0, "99999"), (20_792_540.0, "2.079e+07"), (-1e5, "-1.000e+05"), (math.nan, "nan"),
     (math.inf, "inf"), (-math.inf, "-inf")],
)  # fmt: skip
def test_small_values_keep_their_digits_and_large_ones_are_short(value, text):
    assert decimals(value, 4) == text
