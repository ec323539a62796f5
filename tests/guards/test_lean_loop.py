"""The lean loop: the same hooks in the same order, and the same training."""

import logging
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from harness.runs import On, trainer_with
from lightning.pytorch.loops import training_epoch_loop
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.trainer import call
from torch.utils.data import DataLoader

from lightning_tricks._trainer import HOOK_CALLERS
from lightning_tricks.callbacks import LeanLoop
from lightning_tricks.guards.lean_loop import lean_callers, with_memory

CALLBACK_HOOKS = [name for name in vars(pl.Callback) if name.startswith("on_") and not name.endswith("_checkpoint")]


def named(name):
    def hook(self, trainer, pl_module, *args, **kwargs):
        self.seen.append((self.label, name, pl_module._current_fx_name, len(args)))

    return hook


class Written(pl.Callback):
    """Every hook of a callback, written down."""

    def __init__(self, label, seen):
        self.label, self.seen = label, seen


for hook_name in CALLBACK_HOOKS:
    setattr(Written, hook_name, named(hook_name))


class Idle(pl.Callback):
    pass


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)
        self.seen = []

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).square().mean()
        self.seen.append(self._current_fx_name)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.layer(batch).mean())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(("end", batch_idx, self._current_fx_name, sorted(outputs)))
        self.log("inside", batch_idx)

    def backward(self, loss):
        self.seen.append(self._current_fx_name)  # other hooks have come and gone since this one's name was set
        super().backward(loss)

    def on_before_zero_grad(self, optimizer):
        self.seen.append(("zero", type(optimizer).__name__))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def fit(*callbacks, model=None, **kwargs):
    model = model or Model()
    options = {
        "max_epochs": 2,
        "accumulate_grad_batches": 2,
        "val_check_interval": 2,
        "gradient_clip_val": 0.1,
        **kwargs,
    }
    trainer = trainer_with(*callbacks, **{"max_steps": -1, "log_every_n_steps": 1, "logger": False, **options})
    data = DataLoader(torch.arange(32.0).reshape(8, 4) / 10, batch_size=2)
    trainer.fit(model, data, data)
    return model, trainer


def originals():
    return [*(getattr(call, name) for name in HOOK_CALLERS), training_epoch_loop.is_param_in_hook_signature]


def test_every_written_hook_is_called_as_before():
    before = originals()
    runs = []
    for lean in ([], [LeanLoop()]):
        seen = []
        model, trainer = fit(Written("a", seen), *lean, Idle(), Written("b", seen))
        runs.append((seen, model.seen, [p.tolist() for p in model.parameters()], sorted(trainer.callback_metrics)))
    assert runs[0] == runs[1]
    assert len(runs[0][0]) > 100
    assert originals() == before


def test_while_training_idle_hooks_and_profiler_contexts_are_left_out():
    class Profiled(pl.Callback):
        def __init__(self):
            self.names = []

        def on_train_epoch_start(self, trainer, pl_module):
            real = type(trainer.profiler).profile
            trainer.profiler.profile = lambda name: self.names.append(name) or real(trainer.profiler, name)

        def on_train_epoch_end(self, trainer, pl_module):
            vars(trainer.profiler).pop("profile", None)

    plain, lean = Profiled(), Profiled()
    fit(Idle(), plain)
    fit(Idle(), lean, LeanLoop())
    hooks = {name for name in plain.names if name.startswith(("[Callback]", "[LightningModule]", "[Strategy]"))}
    assert len(hooks) > 20
    once_an_epoch = {name for name in hooks if name.endswith("on_train_epoch_end")}
    assert set(lean.names) == set(plain.names) - hooks | once_an_epoch


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_a_failing_run_gives_the_calls_back(error):
    before = originals()

    class Fails(Model):
        def on_train_batch_end(self, *_):
            assert originals() != before
            raise error

    with pytest.raises((error, SystemExit)):
        fit(LeanLoop(), model=Fails())
    assert originals() == before


def test_what_somebody_else_puts_there_while_training_stays(monkeypatch):
    monkeypatch.setattr(call, "_call_strategy_hook", call._call_strategy_hook)  # back at the test's end
    theirs = []

    def wrap(*_):
        if not theirs:
            lean = call._call_strategy_hook
            theirs.append(lambda *args, **kwargs: lean(*args, **kwargs))
            call._call_strategy_hook = theirs[0]

    fit(LeanLoop(), On(on_train_batch_start=wrap))
    assert call._call_strategy_hook is theirs[0]


def test_a_fit_within_a_fit_is_called_as_ever():
    def inner():
        seen, profiler = [], SimpleProfiler()
        fit(Written("inner", seen), Idle(), max_epochs=1, profiler=profiler)
        return seen, {name: len(times) for name, times in profiler.recorded_durations.items()}

    runs = []
    fit(LeanLoop(), On(on_train_batch_end=lambda *_: runs or runs.append(inner())))
    assert runs[0] == inner()
    assert runs[0][1]["[Callback]Idle.on_train_batch_end"] == 4


def test_it_stays_off_under_a_profiler(caplog):
    before, seen = originals(), []
    with caplog.at_level(logging.INFO):
        fit(LeanLoop(), On(on_train_batch_end=lambda *_: seen.append(originals())), profiler=SimpleProfiler())
    assert all(each == before for each in seen)
    assert "LeanLoop stays off" in caplog.text


def test_it_stays_off_where_lightning_logs_at_debug_level(caplog):
    with caplog.at_level(logging.DEBUG, logger=call.log.name):
        fit(LeanLoop(), Idle())
    assert "LeanLoop stays off" in caplog.text
    assert "calling callback hook: on_train_batch_end" in caplog.text


def test_a_hook_that_is_the_base_classs_own_is_not_called():
    called = []

    class Base:
        def on_train_batch_end(self, *_):
            called.append("base")

    class Own(Base):
        def on_train_batch_end(self, *_):
            called.append("own")

    module = SimpleNamespace(_current_fx_name="before")
    trainer = SimpleNamespace(lightning_module=module, callbacks=[type("Idle", (Base,), {})(), Own()])
    lean_callers(trainer, call, Base)["_call_callback_hooks"](trainer, "on_train_batch_end")
    assert called == ["own"]
    assert module._current_fx_name == "before"


def test_a_hook_that_is_none_is_left_out_as_in_lightnings_own_loop():
    class Without(Model):
        on_before_zero_grad = None

    lean, plain = fit(LeanLoop(), model=Without())[0], fit(model=Without())[0]
    assert lean.seen == plain.seen
    assert torch.equal(lean.layer.weight, plain.layer.weight)


def test_a_signature_is_inspected_once_and_each_function_has_its_own_answer():
    asked = []

    class Steps:
        def one(self, batch):
            pass

        def two(self, batch, batch_idx):
            pass

    ask = with_memory(lambda hook, name, min_args: asked.append(hook) or hook.__name__ == "two")
    steps = Steps()
    assert [ask(steps.one, "batch_idx", min_args=2) for _ in range(3)] == [False] * 3
    assert [ask(steps.two, "batch_idx", min_args=2) for _ in range(3)] == [True] * 3
    assert len(asked) == 2


def test_a_step_without_an_index_gets_none():
    class Short(Model):
        def training_step(self, batch):
            return super().training_step(batch, None)

    lean, plain = fit(LeanLoop(), model=Short())[0], fit(model=Short())[0]
    assert torch.equal(lean.layer.weight, plain.layer.weight)
