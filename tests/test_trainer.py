"""Lightning's private state: each answer of `_trainer/` against the behaviour of a Trainer, and nobody else reads it.

A test that fails here after an update of Lightning names the function to read again.
"""

import ast
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.compile import from_compiled, to_uncompiled
from monitored import Memory
from preloaded import python
from short_run import events
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

import lightning_tricks
from lightning_tricks import _trainer
from lightning_tricks._replaced import replaced


class Wrapper(torch.optim.Optimizer):
    """An optimizer that wraps another as its attribute `optimizer`, as Lookahead does."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Model(pl.LightningModule):
    """Linear layers, each with an optimizer; several are stepped by hand."""

    def __init__(self, optimizers: int = 1, **hparams: Any) -> None:
        super().__init__()
        if hparams:
            self.save_hyperparameters(hparams)
        self.automatic_optimization = optimizers == 1
        self.made = []
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 1) for _ in range(optimizers))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", loss := sum(layer(batch).square().mean() for layer in self.layers))
        if not self.automatic_optimization:
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        self.made = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in self.layers]
        return self.made


class Notes(pl.Callback):
    """Answers of `ask(trainer, pl_module)` when a batch starts, and which batches had an optimizer step."""

    def __init__(self, ask: Any) -> None:
        self.ask, self.answers, self.stepped = ask, [], []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.answers.append(self.ask(trainer, pl_module))
        self.stepped.append(False)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.stepped[-1] = True


def trainer_with(*callbacks: Any, **options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    checkpoints = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    defaults = {"devices": 1, "max_epochs": 1, "log_every_n_steps": 1, "enable_checkpointing": checkpoints}
    return pl.Trainer(callbacks=list(callbacks), **{**quiet, **defaults, **options})


def data(batches: int = 3) -> DataLoader:
    return DataLoader(torch.ones(batches, 2))


def noted(ask: Any, model: Any = None, batches: int = 3, **options: Any) -> tuple[Notes, Any]:
    notes = Notes(ask)
    trainer = trainer_with(notes, **options)
    trainer.fit(model or Model(), data(batches))
    return notes, trainer


def test_is_accumulating_until_the_batch_that_has_the_optimizer_step():
    notes, _ = noted(lambda trainer, _: _trainer.is_accumulating(trainer), batches=5, accumulate_grad_batches=2)
    assert notes.stepped == [False, True, False, True, True]  # an epoch ends with a step
    assert [not accumulating for accumulating in notes.answers] == notes.stepped


def test_steps_in_epoch_are_those_that_are_done_in_it():
    notes, _ = noted(
        lambda trainer, _: _trainer.steps_in_epoch(trainer), batches=5, accumulate_grad_batches=2, max_epochs=2
    )
    assert notes.answers == [0, 0, 1, 1, 2] * 2


class Validated(Model):
    """Validates."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


@pytest.mark.parametrize(
    ("options", "validated"),
    [
        ({"val_check_interval": 2}, [2, 4]),
        ({"val_check_interval": 1.0}, [5]),
        ({"val_check_interval": 3, "check_val_every_n_epoch": None, "max_epochs": 2}, [3, 6, 9]),
        ({"val_check_interval": "00:00:00:00"}, [1, 2, 3, 4, 5]),
        ({"limit_val_batches": 0}, []),
        ({"max_steps": 3, "val_check_interval": 3}, [3]),
    ],
)
def test_validation_follows_where_it_then_comes(options, validated):
    events: list[Any] = []

    class Watches(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            events.append((trainer.fit_loop.total_batch_idx + 1, _trainer.validation_follows(trainer)))

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            events.append("validation")

    trainer_with(Watches(), **{"num_sanity_val_steps": 0, **options}).fit(Validated(), data(5), data(1))
    came = [event for event, after in zip(events, [*events[1:], None], strict=True) if after == "validation"]
    assert came == [event for event in events if event != "validation" and event[1]]
    assert [batch for batch, _ in came] == validated


def test_no_validation_follows_where_its_loader_is_empty():
    answers = []

    class Watches(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            answers.append(_trainer.validation_follows(trainer))

    trainer_with(Watches(), num_sanity_val_steps=0, val_check_interval=1).fit(Validated(), data(3), DataLoader([]))
    assert answers[1:] == [False, False]


@pytest.mark.parametrize(("options", "stops"), [({"max_steps": 2}, 2), ({"max_epochs": 2}, None)])
def test_is_last_step_at_max_steps_or_where_it_was_asked_to_stop(options, stops):
    answers = []

    class Watches(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = stops is None and trainer.global_step == 4
            answers.append(_trainer.is_last_step(trainer))

    trainer = trainer_with(Watches(), **options)
    trainer.fit(Model(), data(3))
    assert len(answers) == trainer.global_step == (stops or 4)
    assert answers == [False] * (len(answers) - 1) + [True]


@pytest.mark.parametrize("options", [{"max_steps": 9}, {"max_steps": 3}, {"max_epochs": 1}])
def test_the_limits_of_a_run_move_its_end_while_it_runs(options):
    class Moves(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                for owner, name, value in _trainer.limits_of_run(trainer, 5):
                    assert name in vars(owner)
                    setattr(owner, name, value)
                assert (trainer.max_steps, trainer.max_epochs) == (5, -1)

    trainer = trainer_with(Moves(), **{"max_epochs": None, **options})
    trainer.fit(Model(), data(3))
    assert trainer.global_step == 5


def test_the_default_checkpoint_io_is_lightnings_own():
    assert _trainer.has_default_checkpoint_io(trainer_with())
    trainer = trainer_with(plugins=[type("Own", (pl.plugins.TorchCheckpointIO,), {})()])
    assert not _trainer.has_default_checkpoint_io(trainer)


@pytest.mark.parametrize("optimizers", [1, 2])
def test_logging_step_is_the_step_that_a_logger_is_given(optimizers):
    memory = Memory()
    notes, trainer = noted(lambda trainer, _: _trainer.logging_step(trainer), Model(optimizers), logger=memory)
    assert notes.answers == [step for step, values in memory.rows if "loss" in values] == [0, 1, 2]
    assert trainer.global_step == 3 * optimizers  # why `global_step` would not do


def test_batch_progress_counts_the_batches_of_the_epoch_and_of_all_epochs():
    def counts(trainer: Any, _: Any) -> tuple[int, int]:
        progress = _trainer.batch_progress(trainer)
        return progress.current.ready, progress.total.processed

    notes, _ = noted(counts, batches=2, max_epochs=2)
    assert notes.answers == [(1, 0), (2, 1), (1, 2), (2, 3)]


def test_is_restarting_and_the_progress_of_a_run_from_a_checkpoint(tmp_path):
    class Asks(Model):
        def train_dataloader(self) -> DataLoader:
            self.restarting = _trainer.is_restarting(self.trainer)
            self.done = _trainer.batch_progress(self.trainer).total.processed
            return data(6)

    first, second = Asks(), Asks()
    trainer = trainer_with(max_steps=2, max_epochs=None)
    trainer.fit(first)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    trainer_with(max_steps=3, max_epochs=None).fit(second, ckpt_path=tmp_path / "two.ckpt", weights_only=False)
    assert (first.restarting, first.done) == (False, 0)
    assert (second.restarting, second.done) == (True, 2)


def test_data_rank_is_that_of_the_distributed_sampler():
    assert _trainer.data_rank(None) == _trainer.data_rank(trainer_with()) == (0, 1)
    two = trainer_with(devices=2, strategy="ddp")
    assert _trainer.data_rank(two) == (two.global_rank, two.world_size) == (0, 2)


def test_trainer_of_a_module_is_the_one_that_fits_it():
    model = Model()
    assert _trainer.trainer_of(model) is _trainer.trainer_of(torch.nn.Linear(1, 1)) is None
    with pytest.raises(RuntimeError, match="not attached"):
        _ = model.trainer
    notes, trainer = noted(lambda _, module: _trainer.trainer_of(module), model)
    assert notes.answers == [trainer] * 3


def test_is_a_goes_by_names_and_knows_subclasses():
    assert _trainer.is_a(ModelCheckpoint(), "Checkpoint")
    assert _trainer.is_a(Model(), "Other", "LightningModule")
    assert not _trainer.is_a(Model(), "Trainer")


def test_lightning_file_is_of_the_package_that_the_trainer_is_of():
    other = pytest.importorskip("pytorch_lightning")

    class Own(pl.Trainer):
        pass

    assert _trainer.lightning_file(Own(logger=False, accelerator="cpu"), "trainer").Trainer is pl.Trainer
    assert _trainer.lightning_file(other.Trainer(logger=False, accelerator="cpu"), "trainer").Trainer is other.Trainer


def test_the_hook_callers_call_all_hooks_and_the_signature_check_is_asked():
    heard: dict[str, set[str]] = {}
    trainer = trainer_with(Notes(lambda *_: None))

    def spy(file: Any, name: str) -> Any:
        original = getattr(file, name)

        def call(first: Any, second: Any, *args: Any, **kwargs: Any) -> Any:
            heard.setdefault(name, set()).add(second)
            return original(first, second, *args, **kwargs)

        return replaced(file, name, call)

    call, loop = (_trainer.lightning_file(trainer, name) for name in ("trainer.call", "loops.training_epoch_loop"))
    callbacks, module, strategy = _trainer.HOOK_CALLERS
    with spy(call, callbacks), spy(call, module), spy(call, strategy), spy(loop, _trainer.SIGNATURE_CHECK):
        trainer.fit(Model(), data())
    assert {"on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end"} <= heard[callbacks]
    assert {"on_train_batch_start", "optimizer_step", "configure_gradient_clipping"} <= heard[module]
    assert {"training_step", "backward"} <= heard[strategy]
    assert heard[_trainer.SIGNATURE_CHECK] == {"batch_idx"}


def test_by_the_running_hook_the_module_decides_whether_it_may_log():
    class Renames(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.names = [_trainer.set_running_hook(self, "on_fit_start")]
            with pytest.raises(Exception, match=r"can't `self.log\(\)` inside `on_fit_start`"):
                self.log("loss", 0.0)
            self.names.append(_trainer.set_running_hook(self, self.names[0]))
            return super().training_step(batch, batch_idx)

    model = Renames()
    trainer_with().fit(model, data(1))
    assert model.names == ["training_step", "on_fit_start"]


def frames() -> Iterator[Any]:
    frame = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def test_running_call_finds_the_trainers_own_call():
    def ask(*_: Any) -> list[Any]:
        return [call for call in map(_trainer.running_call, frames()) if call is not None]

    notes, trainer = noted(ask)
    (call,) = notes.answers[0]
    assert call.__self__ is trainer
    again, _ = noted(ask)
    assert again.answers[0] != [call]
    assert ask() == []


def test_launched_processes_are_the_ranks_that_the_trainer_has_started(monkeypatch):
    trainer = trainer_with(devices=3, strategy="ddp")
    assert _trainer.launched_processes(trainer) == _trainer.launched_processes(trainer_with()) == []
    file = _trainer.lightning_file(trainer, "strategies.launchers.subprocess_script")
    monkeypatch.setattr(file, "_basic_subprocess_cmd", lambda: [sys.executable, "-c", ""])
    monkeypatch.setattr(file, "_launch_process_observer", lambda _: None)  # it kills this process when one fails
    trainer.strategy.launcher.launch(lambda: None, trainer=trainer)
    assert [process.wait() for process in _trainer.launched_processes(trainer)] == [0, 0]


def test_spawn_and_fork_train_in_copies_of_the_trainer():
    answers = {
        name: _trainer.trains_in_copies(trainer_with(strategy=name)) for name in ("ddp_fork", "ddp_spawn", "ddp")
    }
    assert answers == {"ddp_fork": True, "ddp_spawn": True, "ddp": False}
    assert not _trainer.trains_in_copies(trainer_with())


def test_without_its_observer_a_process_outlives_a_child_that_fails(tmp_path):
    code = """
import os, subprocess, sys
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning_tricks._trainer import dismiss_process_observer
child = subprocess.Popen([sys.executable, "-c", "input(); raise SystemExit(143)"], stdin=subprocess.PIPE)
observer = _ChildProcessObserver(main_pid=os.getpid(), child_processes=[child], sleep_period=0.2)
observer.start()
if sys.argv[1:]:
    dismiss_process_observer()
child.communicate(b"now")
observer.join()
"""
    command = [python(), "-c", code]
    assert subprocess.run(command, cwd=tmp_path).returncode == -signal.SIGKILL
    assert subprocess.run([*command, "dismiss"], cwd=tmp_path).returncode == 0


def test_the_signal_connector_installs_handlers_after_setup_and_puts_back_as_the_last_act(tmp_path):
    seen: list[str] = []

    class Asks(pl.Callback):
        def setup(self, trainer: Any, *_: Any, **__: Any) -> None:
            seen.append("setup")

        def on_sanity_check_start(self, *_: Any) -> None:
            seen.append("sanity check")

        def on_exception(self, *_: Any) -> None:
            seen.append("exception")

    class Checks(Model):
        def validation_step(self, *_: Any) -> None:
            raise RuntimeError

    trainer = trainer_with(Asks())
    connector = _trainer.signal_connector(trainer)
    install, put_back = connector.register_signal_handlers, connector.teardown
    before = signal.getsignal(signal.SIGTERM)
    with (
        replaced(connector, "register_signal_handlers", lambda: (seen.append("install"), install())),
        replaced(connector, "teardown", lambda: (seen.append("put back"), put_back())),
        pytest.raises(RuntimeError),
    ):
        trainer.fit(Checks(), data(), data())
    assert seen == ["setup", "install", "sanity check", "exception", "put back"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_sigterm_broadcast_comes_before_each_batch_of_several_processes(monkeypatch):
    seen: list[str] = []

    class Two(pl.Callback):
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
            monkeypatch.setattr(type(trainer), "world_size", 2)

        def on_train_batch_start(self, *_: Any) -> None:
            seen.append("batch")

        def on_train_batch_end(self, *_: Any) -> None:
            monkeypatch.undo()

    trainer = trainer_with(Two())
    owner, name = _trainer.sigterm_broadcast(trainer)
    with replaced(owner, name, lambda: seen.append("broadcast")):
        trainer.fit(Model(), data(2))
    assert seen == ["broadcast", "batch", "batch"]  # the second batch belongs to one process again


def test_slurm_environment_and_the_checkpoint_that_lightning_goes_on_from(tmp_path, monkeypatch):
    assert _trainer.slurm_environment(trainer_with()) is None
    for name, value in {"NTASKS": 1, "JOB_ID": 12, "PROCID": 0, "LOCALID": 0, "NODEID": 0, "JOB_NAME": "train"}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.setenv("MASTER_PORT", "0")
    trainer = trainer_with(default_root_dir=tmp_path, max_steps=2, max_epochs=None)
    assert _trainer.slurm_environment(trainer).auto_requeue
    trainer.fit(Model(), data())
    trainer.save_checkpoint(_trainer.slurm_checkpoint(trainer))
    again = trainer_with(default_root_dir=tmp_path, max_steps=3, max_epochs=None)
    again.fit(Model(), data(), weights_only=False)
    assert again.ckpt_path == str(tmp_path / "hpc_ckpt_1.ckpt")
    assert _trainer.slurm_checkpoint(again) == tmp_path / "hpc_ckpt_2.ckpt"


def test_last_saved_step_is_that_of_the_newest_checkpoint(tmp_path):
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=2)
    assert _trainer.last_saved_step(saver) == 0
    trainer_with(saver, max_steps=3, max_epochs=None).fit(Model(), data())
    assert _trainer.last_saved_step(saver) == 2


@pytest.mark.parametrize("optimizers", [0, 1, 2])
def test_configured_optimizers_are_those_that_the_module_returns(optimizers):
    class Asks(pl.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            self.found = _trainer.configured_optimizers(pl_module), list(pl_module.made)

    asks, model = Asks(), Model(optimizers or 1)
    if optimizers == 0:
        model.configure_optimizers = lambda: None
    trainer_with(asks).fit(model, data(1))
    (found, schedulers), made = asks.found
    assert found == made
    assert len(found) == optimizers
    assert schedulers == []


@pytest.mark.parametrize("kind", [torch.optim.SGD, Wrapper])
def test_an_optimizer_is_known_by_its_index_wrapped_or_not(kind):
    class Made(Model):
        def configure_optimizers(self) -> Any:
            self.made = [one if kind is torch.optim.SGD else kind(one) for one in super().configure_optimizers()]
            return self.made

    def ask(trainer: Any, module: Any) -> list[Any]:
        wrapped = module.optimizers()
        assert [type(optimizer).__name__ for optimizer in wrapped] == [f"Lightning{kind.__name__}"] * 2
        assert [_trainer.unwrapped(optimizer) for optimizer in wrapped] == module.made
        assert [_trainer.unwrapped(optimizer) for optimizer in module.made] == module.made
        return [_trainer.optimizer_index(trainer, optimizer) for optimizer in [*wrapped, *module.made]]

    assert noted(ask, Made(2))[0].answers[0] == [0, 1, 0, 1]


def test_steps_between_saves_are_those_of_the_files(tmp_path):
    every_two = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = trainer_with(ModelCheckpoint(tmp_path / "epochs", every_n_epochs=1), every_two)
    trainer.fit(Model(), data(5))
    assert _trainer.steps_between_saves(trainer) == [2]
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["step=2.ckpt", "step=4.ckpt"]


@pytest.mark.parametrize("logger_class", [TensorBoardLogger, CSVLogger])
def test_a_loggers_version_is_the_folder_that_it_writes_into(tmp_path, logger_class):
    (tmp_path / "runs" / "version_4").mkdir(parents=True)
    fresh, chosen = (logger_class(tmp_path, name="runs") for _ in range(2))
    assert _trainer.has_versions(fresh)
    assert _trainer.chosen_version(fresh) is None
    assert _trainer.next_version(fresh) == fresh.version == 5
    assert _trainer.chosen_version(fresh) == 5
    _trainer.choose_version(chosen, 7)
    assert Path(chosen.log_dir).name == "version_7"
    assert not _trainer.has_versions(Memory())
    assert _trainer.chosen_version(Memory()) is None


@pytest.mark.parametrize("default", [True, False])
def test_shows_hp_metric_where_tensorboard_shows_it(tmp_path, default):
    logger = TensorBoardLogger(tmp_path, default_hp_metric=default)
    assert not _trainer.shows_hp_metric(logger)
    trainer_with(logger=logger).fit(Model(width=3), data(1))
    assert _trainer.shows_hp_metric(logger) is default
    assert ("hp_metric" in events(Path(logger.log_dir)).Tags()["scalars"]) is default


def test_compiled_steps_of_a_module_that_lightning_runs_compiled():
    model = Model()
    assert _trainer.compiled_steps(model) is _trainer.compiled_steps(torch.nn.Linear(1, 1)) is None
    compiled = from_compiled(torch.compile(model, backend="eager"))
    assert _trainer.compiled_steps(compiled) is not None
    assert _trainer.compiled_steps(to_uncompiled(compiled)) is None


def test_a_device_mesh_that_is_set_is_the_modules(monkeypatch):
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    model, mesh = Model(), init_device_mesh("cpu", (1,))
    assert model.device_mesh is None
    _trainer.set_device_mesh(model, mesh)
    assert model.device_mesh is mesh


# Names of Lightning's private state. A class that inherits from one of Lightning's may use them on itself.
PRIVATE = {
    "fit_loop", "epoch_loop", "batch_progress", "_batches_that_stepped", "_should_accumulate", "_trainer",
    "_current_fx_name", "_compiler_ctx", "_device_mesh", "_every_n_train_steps", "_default_hp_metric",
    "_get_next_version", "_init_optimizers_and_lr_schedulers", "_call_and_handle_interrupt",
    "_call_callback_hooks", "_call_lightning_module_hook", "_call_strategy_hook", "is_param_in_hook_signature",
}  # fmt: skip
# Variables that hold Lightning's objects: nothing that begins with an underscore is read from these.
LIGHTNINGS = {"trainer", "pl_module", "lightning_module", "strategy", "plugin", "logger", "callback"}


def last_name(node: ast.AST) -> str:
    """`trainer` of `trainer`, `self.trainer` and `buffer._trainer`; empty for what has no name."""
    return getattr(node, "attr", getattr(node, "id", "")).lstrip("_")


def private_reads(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of_itself = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            of_lightning = last_name(node.value) in LIGHTNINGS and node.attr.startswith("_")
            by_name = node.attr == "__mro__" and {last_name(n) for n in ast.walk(node.value)} & LIGHTNINGS
            if not of_itself and (node.attr in PRIVATE or of_lightning or by_name):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Constant) and node.value in PRIVATE - {"_trainer"}:  # as in getattr
            yield f"line {node.lineno}: {node.value!r}"
        elif isinstance(node, ast.Compare) and ".__name__" in ast.unparse(node.left):
            names = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            if ast.unparse(node.left).startswith("type(") and names:
                yield f"line {node.lineno}: {ast.unparse(node)}, take is_a"


def test_lightnings_private_state_is_read_in_one_file_only():
    package = Path(lightning_tricks.__file__).parent
    files = [path for path in package.rglob("*.py") if path.parent.name != "_trainer"]
    found = [
        f"{path.relative_to(package)}, {read}"
        for path in files
        for read in private_reads(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert len(files) > 100
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "trainer.fit_loop", "self.trainer.strategy._lightning_module", "module._trainer", 'getattr(x, "_compiler_ctx")',
        "[c.__name__ for c in type(trainer.strategy).__mro__]", 'type(error).__name__ == "SIGTERMException"',
    ],
)  # fmt: skip
def test_a_private_read_would_have_been_found(code):
    assert len(list(private_reads(ast.parse(code)))) == 1
    assert not list(private_reads(ast.parse("self._trainer.max_steps, self._device_mesh, type(x).__name__")))


class AtEachBatchEnd(pl.Callback):
    """Answers of `ask(trainer)` at the end of each training batch, and where a validation followed."""

    def __init__(self, ask: Any) -> None:
        self.ask, self.answers, self.validated = ask, [], []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.answers.append(self.ask(trainer))
        self.validated.append(False)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.validated[-1] = True


def test_an_epoch_is_over_at_its_last_batch_and_until_the_next_begins():
    notes = AtEachBatchEnd(_trainer.epoch_is_over)
    trainer = trainer_with(notes, max_epochs=2)
    trainer.fit(Model(), data(3))
    assert notes.answers == [False, False, True] * 2
    assert _trainer.epoch_is_over(trainer)


class Unsized(torch.utils.data.IterableDataset):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.ones(self.rows, 2))


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_fetch_hooks_enclose_each_wait_for_a_training_batch(epochs):
    events = []

    class Batches(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> torch.Tensor:
            events.append("batch")
            return torch.ones(2)

    class Replaces(pl.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            owner, before, after = _trainer.fetch_hooks(trainer)
            for name, event in ((before, "before"), (after, "after")):
                assert callable(getattr(owner, name))
                setattr(owner, name, lambda event=event: events.append(event))

        def on_train_batch_start(self, *_: Any) -> None:
            events.append("step")

    trainer_with(Replaces(), max_epochs=epochs).fit(Model(), DataLoader(Batches(), batch_size=None))
    assert events == ["before", "batch", "after", "step"] * 2 * epochs


@pytest.mark.parametrize(("consumed", "batches"), [(False, 5), (True, 3)])
def test_set_consumed_ends_an_epoch_with_the_longest_loader_that_is_left(consumed, batches):
    class Sum(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 0 and consumed:
                _trainer.set_consumed(self.trainer, 1)
            self.batches = batch_idx + 1
            return super().training_step(batch[0], batch_idx)

    model = Sum()
    trainer_with().fit(model, [DataLoader(Unsized(3)), DataLoader(Unsized(5))])
    assert model.batches == batches


def test_rewind_to_step_changes_what_a_restart_counts(tmp_path):
    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:
                trainer.save_checkpoint(tmp_path / "five.ckpt")

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            _trainer.rewind_to_step(checkpoint, 2, False)

    def counts(trainer: Any) -> tuple[int, int]:
        progress = _trainer.batch_progress(trainer)
        return progress.current.ready, progress.total.ready

    trainer_with(Save()).fit(Model(), data(7))
    notes = AtEachBatchEnd(counts)
    trainer_with(notes).fit(Model(), data(7), ckpt_path=tmp_path / "five.ckpt", weights_only=False)
    assert notes.answers == [(4, 4), (5, 5), (6, 6), (7, 7)]


class Starts(pl.Callback):
    """Epochs that began and batches that ran; calls a function when training starts."""

    def __init__(self, act: Any = lambda trainer: None) -> None:
        self.act, self.seen = act, []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.act(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(f"epoch {trainer.current_epoch}")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch_idx)


def test_a_batch_that_was_running_at_a_save_is_counted_once(tmp_path):
    def counts(trainer: Any) -> tuple[int, int, int]:
        total = _trainer.batch_progress(trainer).total
        return total.ready, total.processed, _trainer.logging_step(trainer)

    class Save(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                trainer.save_checkpoint(tmp_path / "running.ckpt")

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            _trainer.rewind_to_step(checkpoint, 0, True)

    unbroken, resumed = AtEachBatchEnd(counts), AtEachBatchEnd(counts)
    trainer_with(Save(), unbroken).fit(Model(), data(3))
    trainer_with(Starts(_trainer.forget_running_batch), resumed).fit(
        Model(), data(3), ckpt_path=tmp_path / "running.ckpt", weights_only=False
    )
    assert resumed.answers == unbroken.answers[2:]


def test_the_updates_of_a_plateau_are_those_after_all_that_belongs_to_the_batches_done():
    class Falls(Model):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()[0]
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss", **self.when}}

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

    class Asks(pl.Callback):
        def __init__(self) -> None:
            self.expected, self.done = [], []

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            self.done.append(trainer.lr_scheduler_configs[0].scheduler.last_epoch)
            self.expected += _trainer.plateau_updates(trainer)  # nothing is due while a batch runs

        def ask(self, trainer: Any, *_: Any) -> None:
            if self.expected:
                self.expected[-1] = (self.expected[-1], *_trainer.plateau_updates(trainer))[-1]

        on_validation_end = on_train_epoch_end = on_train_batch_end = ask

    for when, done, expected in (
        ({"interval": "step"}, [0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]),
        ({"interval": "step", "frequency": 2}, [0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 2, 2]),
        ({"interval": "epoch"}, [0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 2]),
    ):
        model, asks = Falls(), Asks()
        model.when = when
        trainer_with(asks, max_epochs=2, num_sanity_val_steps=0).fit(model, data(3), data(1))
        assert (asks.done, asks.expected[:3]) == (done, expected[:3]), when


def test_metrics_that_are_put_back_are_callback_metrics_and_means_over_an_epoch_are_known():
    class Logs(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("mean", 1.0, on_step=False, on_epoch=True)
            self.log("both", 1.0, on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

    notes = AtEachBatchEnd(_trainer.epoch_means)
    before = Starts(lambda trainer: _trainer.set_callback_metrics(trainer, {"before": torch.tensor(3.0)}))
    trainer = trainer_with(notes, before)
    trainer.fit(Logs(), data(2))
    assert notes.answers == [{"mean", "both", "both_epoch"}] * 2
    assert trainer.callback_metrics["before"] == 3.0


def test_after_an_epochs_end_the_next_one_begins(tmp_path):
    saver = ModelCheckpoint(tmp_path, filename="end", save_on_train_epoch_end=True)
    trainer_with(saver).fit(Model(), data(3))
    for limit in ({"max_steps": 5, "max_epochs": -1}, {"max_epochs": 2, "limit_train_batches": 2}):
        starts = Starts(_trainer.go_on_with_next_epoch)
        trainer_with(starts, **limit).fit(Model(), data(3), ckpt_path=tmp_path / "end.ckpt", weights_only=False)
        assert starts.seen == ["epoch 1", 0, 1]


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end", "on_train_epoch_end"])
def test_the_step_and_the_batch_that_a_save_is_a_part_of_are_counted_when_the_next_epoch_begins(hook, tmp_path):
    class Validated(Model):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

    class Counts(Starts):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            self.seen.append((_trainer.logging_step(trainer), _trainer.batch_progress(trainer).total.completed))

    def save(trainer: Any, *args: Any) -> None:
        trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    limit = {"max_steps": 5, "max_epochs": -1, "val_check_interval": 3, "num_sanity_val_steps": 0}
    whole = Counts()
    trainer_with(pl.callbacks.LambdaCallback(**{hook: save}), whole, **limit).fit(Validated(), data(3), data(1))
    starts = Counts(_trainer.go_on_with_next_epoch)
    trainer_with(starts, **limit).fit(Validated(), data(3), data(1), ckpt_path=tmp_path / "3.ckpt", weights_only=False)
    assert [one for one in starts.seen if isinstance(one, tuple)] == whole.seen[-2:] == [(3, 3), (4, 4)]


def test_a_run_that_ended_in_mid_epoch_goes_on_in_that_epoch(tmp_path):
    class Reopen(Starts):
        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            _trainer.reopen_epoch(checkpoint)

    trainer = trainer_with(max_steps=2)
    trainer.fit(Model(), data(3))
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    starts = Reopen()
    options = {"max_steps": 5, "max_epochs": 2}
    trainer_with(starts, **options).fit(Model(), data(3), ckpt_path=tmp_path / "two.ckpt", weights_only=False)
    assert starts.seen == [2, "epoch 1", 0, 1]


class Noisy(Model):
    """Notes its losses, which hold random numbers, and the batches at which its gradients are accumulated."""

    def __init__(self) -> None:
        super().__init__()
        self.losses, self.accumulating = [], []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch * torch.rand(()), batch_idx)
        self.losses.append(loss.item())
        return loss

    def on_after_backward(self) -> None:
        self.accumulating.append(_trainer.is_accumulating(self.trainer))


class Repeats(pl.Callback):
    """Computes the second optimizer step again, and compares the gradients."""

    def __init__(self) -> None:
        self.kept, self.same = [], []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.kept.append((batch, batch_idx, torch.get_rng_state()))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step != 1:
            return
        before = [parameter.grad.clone() for parameter in pl_module.parameters()]
        kept, counts = self.kept[2:], trainer.fit_loop.state_dict()
        states = iter([state for *_, state in kept])
        _trainer.repeat_micro_batches(
            trainer, [pair[:2] for pair in kept], optimizer, lambda: torch.set_rng_state(next(states))
        )
        self.same = [torch.equal(a, p.grad) for a, p in zip(before, pl_module.parameters(), strict=True)]
        assert trainer.fit_loop.state_dict() == counts


def test_a_steps_micro_batches_run_again_with_the_same_gradients():
    model, repeats = Noisy(), Repeats()
    trainer_with(repeats, accumulate_grad_batches=2).fit(model, data(6))
    assert repeats.same == [True, True]
    assert model.losses[2:4] == model.losses[4:6]
    assert model.accumulating == [True, False] * 4


class Looks(pl.Callback):
    """Notes the places at which a Trainer is, in calls that Lightning makes there; each of `ask(stack)`."""

    def __init__(self, ask: Any) -> None:
        self.ask, self.answers = ask, {}

    def look(self, place: str) -> None:
        frame, stack = sys._getframe(1), []
        while frame is not None:
            stack.append(frame)
            frame = frame.f_back
        self.answers[place] = self.ask(stack)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.look("between steps")

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.look("optimizer" if trainer.lightning_module.automatic_optimization else "")

    def on_validation_batch_start(self, *_: Any) -> None:
        self.look("validation")

    def on_save_checkpoint(self, *_: Any) -> None:
        self.look("checkpoint")


class LooksInSteps(Model):
    """The module's own places."""

    def __init__(self, looks: Looks, optimizers: int = 1) -> None:
        super().__init__(optimizers)
        self.looks = [looks]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.looks[0].look("forward")
        for layer in self.layers:
            layer.weight.register_hook(lambda _: self.looks[0].look("backward"))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


class LookedAt(torch.utils.data.Dataset):
    def __init__(self, looks: Looks, place: str) -> None:
        self.looks, self.place = looks, place

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        self.looks.look(self.place)
        return torch.ones(2)


def looked(tmp_path: Path, ask: Any, optimizers: int = 1, number: int = 1, mode: str = "") -> dict[str, Any]:
    looks = Looks(ask)
    trainer = trainer_with(looks, ModelCheckpoint(tmp_path, every_n_train_steps=1), num_sanity_val_steps=0)
    train, val = (
        [DataLoader(LookedAt(looks, f"{kind} loader {index}")) for index in range(number)]
        for kind in ("training", "validation")
    )
    module = LooksInSteps(looks, optimizers)
    module.transfer_batch_to_device = lambda batch, *_: torch.ones(1, 2)
    module.validation_step = lambda batch, batch_idx, dataloader_idx=0: None
    trainer.fit(module, CombinedLoader(train, mode) if mode else train if number > 1 else train[0], val)
    looks.look("after the fit")
    return looks.answers


@pytest.mark.parametrize("optimizers", [1, 2])
def test_running_part_is_the_place_of_a_stack(tmp_path, optimizers):
    found = looked(tmp_path, _trainer.running_part, optimizers)
    found.pop("", None)
    expected = {
        "between steps": "", "forward": "forward", "backward": "backward", "validation": "validation",
        "checkpoint": "checkpoint", "training loader 0": "loader", "validation loader 0": "loader",
        "after the fit": "",
    }  # fmt: skip
    assert found == expected | ({"optimizer": "optimizer"} if optimizers == 1 else {})


def test_is_evaluating_in_a_validation_and_is_running_until_the_end_of_the_call(tmp_path):
    evaluating = looked(tmp_path / "1", _trainer.is_evaluating)
    assert {place for place, answer in evaluating.items() if answer} == {"validation", "validation loader 0"}
    trainers: list[Any] = []
    ask = lambda stack: [_trainer.is_running(trainer, stack) for trainer in (*trainers, None)]  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelCheckpoint, "setup", lambda self, trainer, *_, **__: trainers.append(trainer))
        running = looked(tmp_path / "2", ask)
    assert running.pop("after the fit") == [False, False]
    assert set(map(tuple, running.values())) == {(True, False)}


@pytest.mark.parametrize("number", [1, 2])
def test_the_awaited_loader_is_the_one_that_fetches(tmp_path, number):
    ask = lambda stack: (found := _trainer.awaited_loader(stack)) and (found[0].dataset.place, *found[1:])  # noqa: E731
    found = looked(tmp_path, ask, number=number)
    loaders = {place: answer for place, answer in found.items() if "loader" in place}
    names = [f"{kind} loader {index}" for kind in ("training", "validation") for index in range(number)]
    assert loaders == {name: (name, int(name[-1]), number) for name in names}
    assert found["forward"] is None


@pytest.mark.parametrize(("number", "known"), [(1, True), (2, False)])
def test_where_the_iterator_does_not_tell_the_awaited_loader_it_is_known_only_if_there_is_one(tmp_path, number, known):
    found = looked(tmp_path, _trainer.awaited_loader, number=number, mode="min_size")["training loader 0"]
    assert (found and found[1:]) == ((0, 1) if known else None)


def test_evaluation_progress_counts_the_batches_of_a_validation():
    counts = []

    class Counts(pl.Callback):
        def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
            counts.append(_trainer.evaluation_progress(trainer).current.ready)

    model = Model()
    model.validation_step = lambda batch, batch_idx: None
    trainer = trainer_with(Counts(), num_sanity_val_steps=0)
    trainer.fit(model, data(2), data(3))
    trainer.validate(model, data(2))
    assert counts == [1, 2, 3, 1, 2]


@pytest.mark.parametrize("options", [{"max_epochs": 2, "accumulate_grad_batches": 3}, {"max_steps": 4}, {}])
def test_run_length_is_the_step_at_which_training_ends(options):
    lengths: list[int | None] = []

    class Asks(pl.Callback):
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            lengths.append(_trainer.run_length(trainer))

        def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
            lengths.append(_trainer.run_length(trainer))

    trainer = trainer_with(Asks(), **options)
    trainer.fit(Model(), data(5))
    assert set(lengths) == {trainer.global_step} == {trainer.estimated_stepping_batches}


def test_a_step_limit_that_is_set_ends_the_run():
    trainer = trainer_with(max_epochs=-1)
    with replaced(*_trainer.step_limit(trainer), 2):
        assert trainer.max_steps == 2
        trainer.fit(Model(), data(5))
    assert (trainer.global_step, trainer.max_steps) == (2, -1)
