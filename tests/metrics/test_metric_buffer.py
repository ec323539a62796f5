"""Each step's own values at its own step, in every logger, at one transfer an interval, whatever ends the run."""

import contextlib
import copy
import csv
import itertools
import math
import pickle
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from harness import processes
from harness.device_reads import watching_reads
from harness.runs import Memory, On, warned
from harness.runs import trainer_with as quiet_trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader, DistributedSampler

import lightning_tricks.metrics.metric_buffer as metric_buffer
from lightning_tricks._core.errors import UsageError
from lightning_tricks.callbacks import LRMonitor, MetricBuffer, StepGuard

BATCHES = 12


class Model(pl.LightningModule):
    """Loss 3, 5, 7, ... (micro-batch i gives 2 i + 3), whatever the weights, which move all the same."""

    def __init__(self, own_log: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(1.0))
        self.own_log = own_log

    def training_step(self, batch, batch_idx):
        loss = batch.sum() + self.weight - self.weight.detach()
        if self.own_log:
            self.log("self/loss", loss.detach())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", batch.sum())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Recorder(pl.Callback):
    """Records what `give(trainer, buffer, outputs)` says, at each micro-batch's end."""

    def __init__(self, give=None) -> None:
        self.give = give or (lambda trainer, buffer, loss: buffer.record("train/loss", loss))

    def setup(self, trainer, pl_module, stage):
        self.buffer = MetricBuffer.of(trainer)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.give(trainer, self.buffer, outputs["loss"] if outputs else None)


class Plain(Memory):
    """The shape of the W&B and MLflow loggers: one `log_metrics(metrics, step)`, nothing about wall time."""

    def log_metrics(self, metrics, step=None):
        super().log_metrics({name: value for name, value in metrics.items() if name != "epoch"}, step)

    def of(self, name: str) -> dict[int, float]:
        found = [(step, row[name]) for step, row in self.rows if name in row]
        assert len(dict(found)) == len(found), f"{name} stands twice at a step"
        return dict(found)


def loader(n: int = BATCHES) -> DataLoader:
    return DataLoader(torch.arange(2 * n, dtype=torch.float32) + 1, batch_size=2)


def trainer_with(callbacks, logger, **options) -> pl.Trainer:
    defaults = {"max_steps": 10, "log_every_n_steps": 4, "limit_val_batches": 0, "num_sanity_val_steps": 0}
    return quiet_trainer(*callbacks, logger=logger, **{**defaults, **options})


def run(give=None, model=None, callbacks=(), **kwargs):
    """Train with a Recorder and a Plain logger; returns (logger, trainer)."""
    logger = Plain()
    trainer = trainer_with([Recorder(give), *callbacks], logger, **kwargs)
    trainer.fit(model or Model(), loader(), loader(2) if kwargs.get("limit_val_batches") else None)
    return logger, trainer


def loss_of(step: int) -> float:
    return 4 * (step % BATCHES) + 3.0


# ---- each step's own value at its own step


def test_every_step_has_its_own_value_at_its_own_step():
    logger, _ = run()
    assert logger.of("train/loss") == {step: loss_of(step) for step in range(10)}
    assert [step for step, _ in logger.rows] == list(range(10))


@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_step_is_the_one_that_self_log_uses(tmp_path, accumulate):
    def read() -> dict[str, dict[int, float]]:
        rows = list(csv.DictReader((tmp_path / "csv/version_0/metrics.csv").open()))
        return {n: {int(r["step"]): float(r[n]) for r in rows if r.get(n)} for n in ("self/loss", "train/loss")}

    def give(trainer, buffer, loss):
        buffer.record("train/loss", accumulate * loss)  # Lightning hands it over divided

    logger = CSVLogger(tmp_path, name="csv", version=0)
    trainer = trainer_with(
        [Recorder(give)], logger, max_epochs=2, max_steps=-1, log_every_n_steps=1, accumulate_grad_batches=accumulate
    )
    trainer.fit(Model(own_log=True), loader(10))
    both = read()
    assert both["train/loss"] == both["self/loss"]
    assert list(both["train/loss"]) == list(range(2 * math.ceil(10 / accumulate)))


def test_epochs_and_their_short_last_step_count_on():
    seen = []
    logger, _ = run(
        lambda trainer, buffer, loss: (buffer.record_mean("train/loss", loss, 1), seen.append(buffer.is_log_step())),
        max_epochs=2, max_steps=-1, accumulate_grad_batches=5, log_every_n_steps=3,
    )  # fmt: skip
    # Of 12 micro-batches 5, 5 and 2 make a step. Lightning hands the loss over divided by 5.
    losses = [[loss_of(i) / 5 for i in part] for part in (range(5), range(5, 10), range(10, 12))] * 2
    assert logger.of("train/loss") == pytest.approx({i: sum(part) / len(part) for i, part in enumerate(losses)})
    assert seen == ([False] * 10 + [True] * 2) * 2


def test_the_latest_of_several_values_for_a_step_counts():
    def give(trainer, buffer, loss):
        buffer.record("a", 1.0)
        buffer.record("a", loss)
        buffer.record("b", loss)
        buffer.record("b", 1.0)

    logger, _ = run(give, max_steps=2)
    assert logger.of("a") == {0: 3.0, 1: 7.0}
    assert logger.of("b") == {0: 1.0, 1: 1.0}


class TwoByHand(Model):
    """Steps two optimizers by hand, or in each batch the first so many of them."""

    automatic_optimization = False

    def steps_in(self, batch_idx):
        return 2

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers()[: self.steps_in(batch_idx)]:
            optimizer.zero_grad()
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=lr) for lr in (0.1, 0.2)]


def test_manual_optimization_and_two_optimizers():
    log_steps = []
    logger, trainer = run(
        lambda trainer, buffer, loss: (buffer.record("train/loss", loss), log_steps.append(buffer.is_log_step())),
        model=TwoByHand(own_log=True), callbacks=[LRMonitor()], max_steps=12, log_every_n_steps=4,
    )  # fmt: skip
    assert trainer.global_step == 12
    assert logger.of("train/loss") == {step: loss_of(step) for step in range(6)}
    assert logger.of("self/loss") == {3: loss_of(3)}
    assert logger.of("train/lr/1") == dict.fromkeys(range(6), 0.2)
    assert log_steps == [False] * 3 + [True] + [False, True]


@pytest.mark.parametrize("place", [0, 1])
def test_values_are_in_wherever_the_callback_stands(place):
    at_start = On(setup=lambda trainer, *_, **__: MetricBuffer.of(trainer))
    callbacks = [at_start, MetricBuffer()]
    callbacks.insert(2 * place, Recorder())
    logger = Plain()
    trainer = trainer_with(callbacks, logger)
    trainer.fit(Model(), loader())
    assert logger.of("train/loss") == {step: loss_of(step) for step in range(10)}
    assert sum(isinstance(callback, MetricBuffer) for callback in trainer.callbacks) == 1


# ---- what it costs


def test_one_transfer_an_interval_and_none_between():
    def give(trainer, buffer, loss):
        buffer.record("loss", loss)
        buffer.record("number", 2.0)
        buffer.record("bf16", loss.bfloat16())
        buffer.record("sum", loss, over_ranks="sum")
        buffer.record_mean("mean", loss, 3)
        buffer.record_mean("mean", loss, torch.tensor(3))
        buffer.record_all(("x", "y"), torch.stack([loss, loss]))
        buffer.record("_hidden", loss)
        trail.append(len(reads))

    reads, trail = [], []
    with watching_reads(lambda what, frame: reads.append(what)):
        run(give, max_steps=12, log_every_n_steps=5)
    assert [now - before for before, now in itertools.pairwise(trail)] == [0, 0, 0, 0, 1] * 2 + [0]
    assert reads.count(".tolist()") == 3


def test_log_every_n_steps_0_keeps_nothing():
    def give(trainer, buffer, loss):
        buffer.record("a", loss)
        buffer.record("n", 1.0)
        buffer.record_mean("b", loss, 1)
        buffer.record_all(("c",), loss[None])
        assert not buffer.is_log_step()
        assert not buffer._current
        assert not buffer._finished

    called = []
    logger, trainer = run(give, log_every_n_steps=0, callbacks=[AtFlush(lambda rows: called.append(rows) or {})])
    assert logger.rows == called == []
    assert "a" not in trainer.callback_metrics


def test_of_values_that_some_ranks_may_not_have_only_those_that_one_has_are_logged():
    def give(trainer, buffer, loss):
        buffer.record_largest(["x", "y"], {"y": loss} if trainer.global_step > 1 else {})

    logger, _ = run(give, max_steps=2)
    assert logger.rows == [(1, {"y": loss_of(1)})]


# ---- what may be recorded


def test_integers_beyond_24_bits_and_short_floats_arrive_exactly():
    def give(trainer, buffer, loss):
        buffer.record("int64", torch.tensor(2**24 + 1))
        buffer.record("bf16", torch.tensor(1.5, dtype=torch.bfloat16))
        buffer.record("fp64", torch.tensor(0.1, dtype=torch.float64))
        buffer.record("bool", torch.tensor(True))
        buffer.record("vector of one", torch.tensor([4.0]))
        buffer.record("python int", 2**24 + 1)

    logger, _ = run(give, max_steps=1)
    assert logger.rows == [
        (0, {"int64": 2**24 + 1, "bf16": 1.5, "fp64": 0.1, "bool": 1, "vector of one": 4, "python int": 2**24 + 1})
    ]


def test_a_mean_is_the_sum_of_totals_over_the_sum_of_counts():
    totals = iter([1.0, 2.0, 6.0, 0.0, 0.0, 0.0, math.nan, 0.0, 0.0])
    counts = iter([1, torch.tensor(1), 2.0, 0, 0, 0, 0, 0, 0])

    def give(trainer, buffer, loss):
        buffer.record_mean("train/loss", torch.tensor(next(totals)), next(counts))

    with pytest.warns(UserWarning, match="loss is nan at step 2"):  # not at step 1: of no token there is no mean
        logger, _ = run(give, max_steps=3, accumulate_grad_batches=3)
    means = logger.of("train/loss")
    assert means[0] == 9 / 4
    assert list(means) == [0, 2]


def test_totals_and_counts_of_micro_batches_add_up_exactly():
    def give(trainer, buffer, loss):
        buffer.record_mean("count", torch.tensor(2**24 + 1), torch.tensor(1, dtype=torch.int64))
        buffer.record_mean("total", torch.tensor(3.0), torch.tensor(2**24 + 1))

    logger, _ = run(give, max_steps=1, accumulate_grad_batches=2)
    assert logger.rows == [(0, {"count": 2**24 + 1, "total": 3.0 / (2**24 + 1)})]


def test_a_vector_gives_each_name_its_value():
    def give(trainer, buffer, loss):
        buffer.record_all(("norm/a", "_norm/b", "norm/c"), torch.stack([loss, loss + 1, loss + 2]))
        buffer.record_all((), torch.empty(0))

    logger, _ = run(give, max_steps=2)
    assert logger.rows == [(0, {"norm/a": 3, "norm/c": 5}), (1, {"norm/a": 7, "norm/c": 9})]


def test_a_wrong_shape_is_refused_where_it_is_recorded():
    two = torch.ones(2)
    for give, text in [
        (lambda trainer, buffer, loss: buffer.record("x", two), r"x: .*\(2,\).*record_all"),
        (lambda trainer, buffer, loss: buffer.record_mean("x", two, 1), r"x: .*\(2,\)"),
        (lambda trainer, buffer, loss: buffer.record_mean("x", loss, two), r"x: .*\(2,\)"),
        (lambda trainer, buffer, loss: buffer.record_all(("x", "y", "z"), two), r"3 names \(x, y, z"),
    ]:
        with pytest.raises(UsageError, match=text):
            run(give)


def test_a_recorded_tensor_holds_no_graph():
    kept = []

    class Graph(Model):
        def training_step(self, batch, batch_idx):
            buffer = MetricBuffer.of(self.trainer)
            loss = super().training_step(batch, batch_idx)
            buffer.record("a", loss)
            buffer.record_mean("b", loss, loss)
            buffer.record_all(("c",), loss[None])
            current = buffer._current
            kept.extend([*current.tensors.values(), *current.means["b"][0]])
            return loss

    run(lambda *_: None, model=Graph(), max_steps=1)
    assert len(kept) == 4
    assert not any(tensor.requires_grad for tensor in kept)


# ---- at_flush


class AtFlush(pl.Callback):
    def __init__(self, derive) -> None:
        self.derive = derive

    def setup(self, trainer, pl_module, stage):
        MetricBuffer.of(trainer).at_flush(self.derive)
        MetricBuffer.of(trainer).at_flush(self.derive)


def test_at_flush_sees_what_was_derived_before_it():
    later = AtFlush(lambda rows: {"doubled": 2 * rows[-1].values["sum"]})
    earlier = AtFlush(lambda rows: {"sum": sum(row.values["_x"] for row in rows)})
    logger, _ = run(lambda trainer, buffer, loss: buffer.record("_x", loss), callbacks=[earlier, later], max_steps=4)
    assert logger.rows == [(3, {"sum": 36.0, "doubled": 72.0})]


def test_at_flush_sees_the_intervals_rows_and_its_result_joins_the_last():
    seen = []

    def derive(rows):
        seen.append([(row.step, row.values["_x"]) for row in rows])
        assert all(a.wall_time <= b.wall_time for a, b in itertools.pairwise(rows))
        return {"sum": sum(row.values["_x"] for row in rows), "_hidden": 1.0}

    logger, trainer = run(
        lambda trainer, buffer, loss: buffer.record("_x", loss), callbacks=[AtFlush(derive)], max_steps=6
    )
    assert seen == [[(i, loss_of(i)) for i in range(4)], [(4, loss_of(4)), (5, loss_of(5))]]
    assert logger.rows == [(3, {"sum": 36.0}), (5, {"sum": loss_of(4) + loss_of(5)})]
    assert not {"_x", "_hidden"} & trainer.callback_metrics.keys()


@pytest.mark.parametrize("fails", [False, True])
def test_a_function_is_called_in_the_fit_that_asked_for_it_and_in_no_later_one(fails):
    class Fails(Model):
        def on_train_batch_end(self, *_):
            if fails and self.trainer.global_step == 4:
                raise RuntimeError("after a flush")

    def ask(trainer, *_, **__):  # in each fit with a new function, as a watcher's helper object does
        fit = max(calls, default=0) + 1
        MetricBuffer.of(trainer).at_flush(lambda rows: calls.append(fit) or {"fit": fit})

    calls, asks, recorder, buffer = [], On(setup=ask), Recorder(), MetricBuffer()
    for _ in range(3):
        trainer = trainer_with([asks, recorder, buffer], Plain(), max_steps=4)
        with pytest.raises(RuntimeError, match="after") if fails else contextlib.nullcontext():
            trainer.fit(Fails(), loader())
    assert calls == [1, 2, 3]


def test_wall_time_goes_to_a_logger_that_takes_it(monkeypatch):
    class Timed(Plain):
        takes_wall_time = True

        def log_metrics(self, metrics, step=None, wall_time=None):
            super().log_metrics({**metrics, "wall_time": wall_time}, step)

    clock = iter(range(100, 200))
    frozen = SimpleNamespace(time=lambda: float(next(clock)), monotonic=float)
    monkeypatch.setattr(metric_buffer, "time", frozen)
    logger = Timed()
    trainer_with([Recorder()], logger, max_steps=6).fit(Model(), loader())
    assert logger.of("wall_time") == {step: 100.0 + step for step in range(6)}


# ---- ModelCheckpoint, EarlyStopping, validation


def test_a_checkpoint_monitors_the_value_of_its_own_step(tmp_path):
    save = ModelCheckpoint(
        tmp_path, monitor="train/loss", mode="max", every_n_train_steps=3, save_top_k=-1,
        filename="{step}-{train/loss:.0f}", auto_insert_metric_name=False,
    )  # fmt: skip
    logger, _ = run(callbacks=[save], log_every_n_steps=50, max_steps=9)
    # after steps 3, 6 and 9: the losses of the third, sixth and ninth batch, though the interval never ended
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.ckpt")}
    assert found == {"3-11.ckpt", "6-23.ckpt", "9-35.ckpt"}
    assert save.best_model_score == 35
    assert list(logger.of("train/loss")) == list(range(9))


def test_epoch_end_monitors_see_the_last_steps_value(tmp_path):
    save = ModelCheckpoint(tmp_path, monitor="train/loss", save_top_k=-1, save_on_train_epoch_end=True)
    stop = EarlyStopping("train/loss", patience=1, mode="min", check_on_train_epoch_end=True)
    _, trainer = run(callbacks=[stop, save], log_every_n_steps=50, max_steps=-1, max_epochs=9)
    assert trainer.current_epoch == 2  # the loss of the last batch is the same in each epoch
    assert list(save.best_k_models.values()) == [loss_of(BATCHES - 1)] * 2


def test_validation_sees_what_was_recorded_before_it():
    seen = []

    look = lambda trainer, _: seen.append((trainer.global_step, trainer.callback_metrics["train/loss"].item()))  # noqa: E731
    logger, trainer = run(
        callbacks=[On(on_validation_end=look)], val_check_interval=3, limit_val_batches=1, log_every_n_steps=50
    )
    assert seen == [(3, 11.0), (6, 23.0), (9, 35.0)]
    assert trainer.callback_metrics["train/loss"] == loss_of(9)
    assert trainer.logged_metrics["train/loss"] == loss_of(9)
    assert logger.of("val/loss") == {2: 3.0, 5: 3.0, 8: 3.0}


def test_a_checkpoint_in_mid_window_comes_after_a_flush(tmp_path):
    def give(trainer, buffer, loss):
        buffer.record("train/loss", loss)
        if trainer.global_step == 3:
            trainer.save_checkpoint(tmp_path / "mid.ckpt")
            assert [step for step, _ in logger.rows] == [0, 1]

    logger = Plain()
    trainer_with([Recorder(give)], logger, log_every_n_steps=50).fit(Model(), loader())
    assert list(logger.of("train/loss")) == list(range(10))


def test_fast_dev_run_records_and_logs_each_step():
    seen = []
    _, trainer = run(
        lambda trainer, buffer, loss: (buffer.record("train/loss", loss), seen.append(buffer.is_log_step())),
        fast_dev_run=3,
    )
    assert seen == [True] * 3
    assert trainer.callback_metrics["train/loss"] == loss_of(2)


@pytest.mark.parametrize(("accumulate", "log_steps"), [(1, [11, 23]), (3, [7]), (5, [5]), (12, [1])])
def test_the_last_step_of_the_last_epoch_is_a_log_step(accumulate, log_steps):
    seen: dict[int, set[bool]] = {}

    def give(trainer, buffer, loss):
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        seen.setdefault(step, set()).add(buffer.is_log_step())
        buffer.record("train/loss", loss)

    logger, _ = run(give, max_steps=-1, max_epochs=2, accumulate_grad_batches=accumulate, log_every_n_steps=12)
    assert [step for step, answers in seen.items() if answers == {True}] == log_steps
    assert all(len(answers) == 1 for answers in seen.values())  # each micro-batch of a step hears the same
    assert list(logger.of("train/loss")) == list(range(len(seen)))


def test_a_run_that_is_told_to_stop_ends_its_interval():
    def give(trainer, buffer, loss):
        buffer.record("train/loss", loss)
        trainer.should_stop = trainer.global_step == 2
        log_steps.append(buffer.is_log_step())
        flushed.append(len(logger.rows))

    log_steps, flushed, logger = [], [], Plain()
    trainer_with([Recorder(give)], logger, min_steps=6).fit(Model(), loader())  # so that the run goes on all the same
    assert [step for step, is_log in enumerate(log_steps, 1) if is_log] == [2, 4, 8, 10]
    assert flushed == [0, 0, 2, 2, 4, 4, 4, 4, 8, 8]


# ---- loggers


def test_all_loggers_get_the_same(tmp_path):
    plain, board = Plain(), TensorBoardLogger(tmp_path, "tb", 0)
    trainer_with([Recorder()], [plain, board]).fit(Model(), loader())
    expected = {step: loss_of(step) for step in range(10)}
    assert plain.of("train/loss") == expected
    events = EventAccumulator(str(tmp_path / "tb/version_0"), size_guidance={"scalars": 0}).Reload()
    assert {event.step: event.value for event in events.Scalars("train/loss")} == expected
    assert len(events.Scalars("train/loss")) == 10


class Saving(Plain):
    """Notes how many rows it had whenever it was told to save."""

    def save(self):
        self.saved = [*getattr(self, "saved", []), len(self.rows)]


def test_flushes_in_quick_succession_save_once_and_a_checkpoint_saves_in_any_case(tmp_path, monkeypatch):
    loggers = {}
    for seconds, steps in ((-1, 99), (1000, 99), (1000, 7)):
        monkeypatch.setattr(metric_buffer, "SAVE_SECONDS", seconds)
        logger = loggers[seconds, steps] = Saving()
        checkpoint = ModelCheckpoint(tmp_path / f"{seconds} {steps}", every_n_train_steps=steps)
        trainer_with([Recorder(), checkpoint], logger).fit(Model(), loader())
    assert set(loggers[-1, 99].saved) == {0, 4, 8, 10}  # Lightning saves at the start and at the end
    assert 8 not in loggers[1000, 99].saved
    assert 7 in loggers[1000, 7].saved


# ---- what goes wrong


class Broken(Model):
    """Records in each step, and fails in the seventh after it has."""

    def training_step(self, batch, batch_idx):
        buffer = MetricBuffer.of(self.trainer)
        loss = super().training_step(batch, batch_idx)
        buffer.record("partial", loss)
        if batch_idx == 6:
            raise ZeroDivisionError("the original")
        return loss


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_in_mid_window_loses_nothing(error):
    class Failing(Broken):
        def training_step(self, batch, batch_idx):
            try:
                return super().training_step(batch, batch_idx)
            except ZeroDivisionError:
                raise error from None

    logger = Plain()
    with pytest.raises(error if error is ZeroDivisionError else SystemExit):
        trainer_with([Recorder()], logger).fit(Failing(), loader())
    assert logger.of("train/loss") == {step: loss_of(step) for step in range(6)}
    assert logger.of("partial") == {step: loss_of(step) for step in range(7)}


def test_a_broken_device_does_not_hide_the_original_error(monkeypatch):
    def give(trainer, buffer, loss):
        buffer.record("train/loss", loss)
        if trainer.global_step == 6:
            monkeypatch.setattr(metric_buffer, "to_host", broken)

    def broken(tensors):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    logger = Plain()
    with (
        pytest.warns(UserWarning, match="metrics since the last logged step are lost: RuntimeError: CUDA error"),
        pytest.raises(ZeroDivisionError, match="the original"),
    ):
        trainer_with([Recorder(give)], logger).fit(Broken(), loader())
    assert list(logger.of("train/loss")) == [0, 1, 2, 3]


def test_a_module_that_holds_it_can_be_copied_and_pickled_in_mid_fit():
    module, copies = Model(), []

    def give(trainer, buffer, loss):
        buffer.record("train/loss", loss)
        module._buffer = buffer  # as LanguageModel keeps it
        copies.extend([copy.deepcopy(module), pickle.loads(pickle.dumps(module))])

    logger, _ = run(give, module, max_steps=1)
    for other in copies:
        other._buffer.record("train/loss", torch.tensor(5.0))  # of no Trainer: it keeps nothing
        other._buffer.flush()
    assert len(copies) == 2
    assert logger.rows == [(0, {"train/loss": 3.0})]


# ---- several ranks


class Two(Model):
    def training_step(self, batch, batch_idx):
        rank = self.trainer.global_rank
        buffer = MetricBuffer.of(self.trainer)
        value = torch.tensor(float(10**rank * (self.trainer.global_step + 1)))
        buffer.record("alone", value)
        buffer.record("sum", value, over_ranks="sum")
        buffer.record("max", value, over_ranks="max")
        buffer.record("number", 10.0**rank, over_ranks="sum")
        buffer.record_all(("v0", "v1"), torch.stack([value, -value]), over_ranks="max")
        # 1 nat and 1 token from rank 0, 10 nats and 3 tokens from rank 1, twice
        buffer.record_mean("mean", torch.tensor(10.0**rank), 1 + 2 * rank)
        return super().training_step(batch, batch_idx)


OF_TWO = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}


def _ranks(rank):
    logger, data = Plain(), torch.arange(64.0)
    batches = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, 2, rank, shuffle=False))
    options = {"accumulate_grad_batches": 2, "max_steps": 3, "log_every_n_steps": 2, **OF_TWO}
    trainer = trainer_with([LRMonitor()], logger, **options)
    trainer.fit(Two(), batches)
    names = ("sum", "max", "v0", "v1", "number", "mean", "alone")
    return {name: list(logger.of(name).values()) for name in names}, float(trainer.callback_metrics["sum"])


@pytest.mark.long
def test_sums_maxima_and_means_over_two_ranks():
    expected = {
        "sum": [11.0, 22.0, 33.0], "max": [10.0, 20.0, 30.0], "v0": [10.0, 20.0, 30.0], "v1": [-1.0, -2.0, -3.0],
        "number": [11.0] * 3, "mean": [22 / 8] * 3,
    }  # fmt: skip
    for rank, found in enumerate(processes.run(_ranks)):
        # the latest is on every rank, so that EarlyStopping agrees
        assert found == ({**expected, "alone": [10.0**rank * i for i in (1, 2, 3)]}, 33.0)


def _fails_alone(rank):
    """Rank 0 fails in mid-window; nobody answers a collective any more."""

    class Failing(Two):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 6 and self.trainer.global_rank == 0:
                raise ZeroDivisionError("rank 0")
            return loss

    logger = Plain()
    trainer = trainer_with([LRMonitor()], logger, max_steps=8, **OF_TWO)
    gone = ZeroDivisionError if rank == 0 else RuntimeError  # rank 1 waits for gradients until rank 0 has left
    with warned("rank 0 alone") as lines, pytest.raises(gone):
        trainer.fit(Failing(), DataLoader(torch.arange(64.0), batch_size=2))
    return logger.of("sum"), len(lines)


@pytest.mark.long
def test_a_rank_that_fails_asks_nobody():
    (sums, warned), _ = processes.run(_fails_alone)
    assert list(sums) == list(range(7))
    assert (sums[3], sums[6], warned) == (44.0, 7.0, 1)


class LogsNaN(Model):
    def training_step(self, batch, batch_idx):
        self.log("self/loss", math.nan if self.global_step >= 5 else 1.0)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("recorded", "guarded"), [(True, False), (True, True), (False, False)])
def test_a_loss_that_is_nan_is_said_at_the_log_step_once_unless_a_guard_watches(recorded, guarded):
    def give(trainer, buffer, loss):
        buffer.record("train/loss", loss * (math.nan if recorded and trainer.global_step >= 6 else 1.0))

    with warned("loss is nan") as lines:
        run(give, Model() if recorded else LogsNaN(), callbacks=[StepGuard()] if guarded else [])
    expected = [] if guarded else ["train/loss is nan at step 5: "] if recorded else ["self/loss is nan at step 7: "]
    assert [line.partition("if the")[0] for line in lines] == expected
