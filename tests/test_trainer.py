"""Lightning's private state: each answer of `_trainer/` against the behaviour of a Trainer, and nobody else reads it.

A test that fails here after an update of Lightning names the function to read again.
"""

import ast
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import runs
from harness.models import Small, Wrapper
from harness.preloaded import python
from harness.runs import Memory, On
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.compile import from_compiled, to_uncompiled
from short_run import events
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

import lightning_tricks
from lightning_tricks._core.replaced import replaced
from lightning_tricks._trainer import loop as _loop
from lightning_tricks._trainer import objects as _objects
from lightning_tricks._trainer import processes as _processes
from lightning_tricks._trainer import run_facts as _run_facts
from lightning_tricks._trainer import run_length as _run_length
from lightning_tricks._trainer import running as _running
from lightning_tricks._trainer import saves as _saves


def model_with(optimizers: int = 1, **options: Any) -> Small:
    """Two numbers in; each layer has an optimizer."""
    return Small(2, *[1] * optimizers, optimizers=optimizers, **options)


def trainer_with(*callbacks: Any, **options: Any) -> pl.Trainer:
    """For one epoch; each step is logged."""
    defaults = {"max_steps": -1, "max_epochs": 1, "log_every_n_steps": 1, "logger": False, "num_sanity_val_steps": 0}
    return runs.trainer_with(*callbacks, **{**defaults, **options})


def data(batches: int = 3) -> DataLoader:
    return DataLoader(torch.ones(batches, 2))


def train(*callbacks: Any, model: Any = None, batches: int = 3, ckpt_path: Any = None, **options: Any) -> pl.Trainer:
    """Train, and validate on one batch if a test says where."""
    trainer = trainer_with(*callbacks, **options)
    val = data(1) if "val_check_interval" in options else None
    trainer.fit(model or model_with(), data(batches), val, ckpt_path=ckpt_path, weights_only=False)
    return trainer


def answers(ask: Any, *callbacks: Any, hook: str = "on_train_batch_start", **options: Any) -> list[Any]:
    """What `ask(trainer)` says at each call of a hook, in `train`."""
    found: list[Any] = []
    train(*callbacks, On(**{hook: lambda trainer, *_: found.append(ask(trainer))}), **options)
    return found


def test_is_accumulating_until_the_batch_that_has_the_optimizer_step():
    stepped = []
    found = answers(
        lambda trainer: stepped.append(False) or _loop.is_accumulating(trainer),
        On(on_before_optimizer_step=lambda *_: stepped.__setitem__(-1, True)), batches=5, accumulate_grad_batches=2,
    )  # fmt: skip
    assert stepped == [False, True, False, True, True]  # an epoch ends with a step
    assert [not accumulating for accumulating in found] == stepped


def test_steps_in_epoch_are_those_that_are_done_in_it():
    found = answers(_loop.steps_in_epoch, batches=5, accumulate_grad_batches=2, max_epochs=2)
    assert found == [0, 0, 1, 1, 2] * 2


@pytest.mark.parametrize(
    ("options", "validated"),
    [
        ({"val_check_interval": 2}, [2, 4]),
        ({"val_check_interval": 1.0}, [5]),
        ({"val_check_interval": 3, "check_val_every_n_epoch": None, "max_epochs": 2}, [3, 6, 9]),
        ({"val_check_interval": "00:00:00:00"}, [1, 2, 3, 4, 5]),
        ({"val_check_interval": 1, "limit_val_batches": 0}, []),
        ({"max_steps": 3, "val_check_interval": 3}, [3]),
    ],
)
def test_validation_follows_where_it_then_comes(options, validated):
    events: list[Any] = []
    ask = lambda trainer: events.append((trainer.fit_loop.total_batch_idx + 1, _loop.validation_follows(trainer)))  # noqa: E731
    notes = On(on_validation_end=lambda *_: events.append("validation"))
    answers(ask, notes, hook="on_train_batch_end", batches=5, **options)
    came = [event for event, after in zip(events, [*events[1:], None], strict=True) if after == "validation"]
    assert came == [event for event in events if event != "validation" and event[1]]
    assert [batch for batch, _ in came] == validated


def test_no_validation_follows_where_its_loader_is_empty():
    found = []
    notes = On(on_train_batch_end=lambda trainer, *_: found.append(_loop.validation_follows(trainer)))
    trainer_with(notes, val_check_interval=1).fit(model_with(), data(), DataLoader([]))
    assert found[1:] == [False, False]


def test_a_run_may_be_saved_when_a_step_the_validation_after_it_and_no_end_of_an_epoch_is_left():
    asked = []
    ask = lambda trainer, *_: asked.append((trainer.global_step, _saves.may_save(trainer)))  # noqa: E731
    notes = On(on_train_batch_end=ask, on_validation_end=ask)
    options = {"accumulate_grad_batches": 2, "val_check_interval": 4, "num_sanity_val_steps": 1}
    trainer_with(notes, **options).fit(model_with(), data(6), data(1))
    sanity, *batches = asked
    assert sanity == (0, False)
    # micro-batches 1 to 4, the validation behind the fourth, 5 and 6; the epoch's end comes behind the sixth
    assert batches == [(0, False), (1, True), (1, False), (2, False), (2, True), (2, False), (3, False)]


@pytest.mark.parametrize(("options", "stops"), [({"max_steps": 2}, 2), ({"max_epochs": 2}, None)])
def test_is_last_step_at_max_steps_or_where_it_was_asked_to_stop(options, stops):
    def ask(trainer: Any) -> bool:
        trainer.should_stop = stops is None and trainer.global_step == 4
        return _run_length.is_last_step(trainer)

    found = answers(ask, hook="on_train_batch_end", **options)
    assert found == [False] * ((stops or 4) - 1) + [True]


def test_the_default_checkpoint_io_is_lightnings_own():
    assert _objects.has_default_checkpoint_io(trainer_with())
    trainer = trainer_with(plugins=[type("Own", (pl.plugins.TorchCheckpointIO,), {})()])
    assert not _objects.has_default_checkpoint_io(trainer)


@pytest.mark.parametrize("optimizers", [1, 2])
def test_logging_step_is_the_step_that_a_logger_is_given(optimizers):
    memory = Memory()
    found = answers(_loop.logging_step, model=model_with(optimizers, logs=True), logger=memory)
    assert found == [step for step, values in memory.rows if "train/loss" in values] == [0, 1, 2]


def test_batch_progress_counts_the_batches_of_the_epoch_and_of_all_epochs():
    def counts(trainer: Any) -> tuple[int, int]:
        progress = _loop.batch_progress(trainer)
        return progress.current.ready, progress.total.processed

    assert answers(counts, batches=2, max_epochs=2) == [(1, 0), (2, 1), (1, 2), (2, 3)]


def test_is_restarting_and_the_progress_of_a_run_from_a_checkpoint(tmp_path):
    found = []

    class Asks(Small):
        def train_dataloader(self) -> DataLoader:
            done = _loop.batch_progress(self.trainer).total.processed
            found.append((_loop.is_restarting(self.trainer), done))
            return data(6)

    trainer = trainer_with(max_steps=2, max_epochs=None)
    trainer.fit(Asks(2, 1))
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    again = trainer_with(max_steps=3, max_epochs=None)
    again.fit(Asks(2, 1), ckpt_path=tmp_path / "two.ckpt", weights_only=False)
    assert found == [(False, 0), (True, 2)]


def test_data_rank_is_that_of_the_distributed_sampler():
    assert _run_facts.data_rank(None) == _run_facts.data_rank(trainer_with()) == (0, 1)
    two = trainer_with(devices=2, strategy="ddp")
    assert _run_facts.data_rank(two) == (two.global_rank, two.world_size) == (0, 2)


def test_trainer_of_a_module_is_the_one_that_fits_it():
    model = model_with()
    assert _objects.trainer_of(model) is _objects.trainer_of(torch.nn.Linear(1, 1)) is None
    with pytest.raises(RuntimeError, match="not attached"):
        _ = model.trainer
    assert answers(lambda trainer: _objects.trainer_of(model) is trainer, model=model) == [True] * 3


def test_is_a_goes_by_names_and_knows_subclasses():
    assert _objects.is_a(ModelCheckpoint(), "Checkpoint")
    assert _objects.is_a(model_with(), "Other", "LightningModule")
    assert not _objects.is_a(model_with(), "Trainer")


def test_lightning_file_is_of_the_package_that_the_trainer_is_of():
    other = pytest.importorskip("pytorch_lightning")
    own = type("Own", (pl.Trainer,), {})(logger=False, accelerator="cpu")
    assert _objects.lightning_file(own, "trainer").Trainer is pl.Trainer
    assert _objects.lightning_file(other.Trainer(logger=False, accelerator="cpu"), "trainer").Trainer is other.Trainer


def test_a_running_call_is_told_from_any_other():
    calls = []

    def ask(*_: Any) -> Any:
        calls.append(call := _running.RunningCall())
        return call.is_current(), calls[0].is_current(), bool(calls[0].stack())

    assert set(answers(ask)) == {(True, True, True)}
    assert set(answers(ask)) == {(True, False, False)}
    assert ask() == (False, False, False)


def test_a_running_call_is_found_in_a_process_of_spawn(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    launcher = trainer_with(strategy="ddp_spawn").strategy.launcher

    class Fit:
        def run(self) -> bool:
            return bool(_running.RunningCall().stack())

    found = SimpleQueue()
    launcher._wrapping_function(0, None, Fit().run, (), {}, found)
    assert found.get()


@pytest.mark.long
def test_launched_processes_are_the_ranks_that_the_trainer_has_started(monkeypatch):
    trainer = trainer_with(devices=3, strategy="ddp")
    assert _processes.launched_processes(trainer) == _processes.launched_processes(trainer_with()) == []
    file = _objects.lightning_file(trainer, "strategies.launchers.subprocess_script")
    monkeypatch.setattr(file, "_basic_subprocess_cmd", lambda: [sys.executable, "-c", ""])
    monkeypatch.setattr(file, "_launch_process_observer", lambda _: None)  # it kills this process when one fails
    trainer.strategy.launcher.launch(lambda: None, trainer=trainer)
    assert [process.wait() for process in _processes.launched_processes(trainer)] == [0, 0]


@pytest.mark.long
def test_without_its_observer_a_process_outlives_a_child_that_fails(tmp_path):
    code = """
import os, subprocess, sys
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning_tricks._trainer.processes import dismiss_process_observer
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


def test_the_signal_connector_installs_handlers_after_setup_and_puts_back_as_the_last_act():
    seen: list[str] = []

    class Checks(Small):
        def validation_step(self, *_: Any) -> None:
            raise RuntimeError

    says = lambda what: lambda *_, **__: seen.append(what)  # noqa: E731
    hooks = {"setup": says("setup"), "on_sanity_check_start": says("check"), "on_exception": says("exception")}
    trainer = trainer_with(On(**hooks), num_sanity_val_steps=2)
    connector = _processes.signal_connector(trainer)
    install, put_back = connector.register_signal_handlers, connector.teardown
    before = signal.getsignal(signal.SIGTERM)
    with (
        replaced(connector, "register_signal_handlers", lambda: (seen.append("install"), install())),
        replaced(connector, "teardown", lambda: (seen.append("put back"), put_back())),
        pytest.raises(RuntimeError),
    ):
        trainer.fit(Checks(2, 1), data(), data())
    assert seen == ["setup", "install", "check", "exception", "put back"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_sigterm_broadcast_comes_before_each_batch_of_several_processes(monkeypatch):
    seen: list[str] = []

    def two(trainer: Any, *_: Any) -> None:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(type(trainer), "world_size", 2)

    batch, end = lambda *_: seen.append("batch"), lambda *_: monkeypatch.undo()
    trainer = trainer_with(On(on_train_start=two, on_train_batch_start=batch, on_train_batch_end=end))
    owner, name = _processes.sigterm_broadcast(trainer)
    with replaced(owner, name, lambda: seen.append("broadcast")):
        trainer.fit(model_with(), data(2))
    assert seen == ["broadcast", "batch", "batch"]  # the second batch belongs to one process again


def test_slurm_environment_and_the_checkpoint_that_lightning_goes_on_from(tmp_path, monkeypatch):
    assert _processes.slurm_environment(trainer_with()) is None
    for name, value in {"NTASKS": 1, "JOB_ID": 12, "PROCID": 0, "LOCALID": 0, "NODEID": 0, "JOB_NAME": "train"}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.setenv("MASTER_PORT", "0")
    trainer = train(default_root_dir=tmp_path, max_steps=2, max_epochs=None)
    assert _processes.slurm_environment(trainer).auto_requeue
    trainer.save_checkpoint(_processes.slurm_checkpoint(trainer))
    again = train(default_root_dir=tmp_path, max_steps=3, max_epochs=None)
    assert again.ckpt_path == str(tmp_path / "hpc_ckpt_1.ckpt")
    assert _processes.slurm_checkpoint(again) == tmp_path / "hpc_ckpt_2.ckpt"


class Made(Small):
    """Keeps the optimizers that it returns; each may be wrapped."""

    def __init__(self, optimizers: int, wrap: Any = None) -> None:
        super().__init__(2, *[1] * max(optimizers, 1), optimizers=max(optimizers, 1))
        self.returned, self.wrap = optimizers > 0, wrap

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        made = [self.wrap(one) if self.wrap else one for one in (made if isinstance(made, list) else [made])]
        self.made = made if self.returned else []
        return self.made or None


@pytest.mark.parametrize("optimizers", [0, 1, 2])
def test_configured_optimizers_are_those_that_the_module_returns(optimizers):
    model = Made(optimizers)
    ask = lambda trainer: (_objects.configured_optimizers(model), list(model.made))  # noqa: E731
    (((found, schedulers), made),) = answers(ask, hook="on_fit_start", model=model, batches=1)
    assert found == made
    assert len(found) == optimizers
    assert schedulers == []


@pytest.mark.parametrize("wrap", [None, Wrapper])
def test_an_optimizer_is_known_by_its_index_wrapped_or_not(wrap):
    model = Made(2, wrap)

    def ask(trainer: Any) -> list[Any]:
        own = model.optimizers()
        assert [type(optimizer).__name__ for optimizer in own] == ["LightningWrapper" if wrap else "LightningSGD"] * 2
        assert [_objects.unwrapped(optimizer) for optimizer in [*own, *model.made]] == model.made * 2
        return [_objects.optimizer_index(trainer, optimizer) for optimizer in [*own, *model.made]]

    assert answers(ask, model=model)[0] == [0, 1, 0, 1]


def test_steps_between_saves_are_those_of_the_files(tmp_path):
    every_two = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = train(ModelCheckpoint(tmp_path / "epochs", every_n_epochs=1), every_two, batches=5)
    assert _objects.steps_between_saves(trainer) == [2]
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["step=2.ckpt", "step=4.ckpt"]


@pytest.mark.parametrize("logger_class", [TensorBoardLogger, CSVLogger])
def test_a_loggers_version_is_the_folder_that_it_writes_into(tmp_path, logger_class):
    (tmp_path / "runs" / "version_4").mkdir(parents=True)
    fresh, chosen = (logger_class(tmp_path, name="runs") for _ in range(2))
    assert _objects.has_versions(fresh)
    assert _objects.chosen_version(fresh) is None
    assert _objects.next_version(fresh) == fresh.version == 5
    assert _objects.chosen_version(fresh) == 5
    _objects.choose_version(chosen, 7)
    assert Path(chosen.log_dir).name == "version_7"
    assert not _objects.has_versions(Memory())
    assert _objects.chosen_version(Memory()) is None


@pytest.mark.parametrize("logger", [False, True], ids=["no logger", "csv"])
def test_the_folder_of_a_run_is_the_one_in_which_lightning_makes_its_checkpoints(logger, tmp_path):
    logger = CSVLogger(tmp_path, "name") if logger else False
    saver = ModelCheckpoint()
    trainer = pl.Trainer(logger=logger, callbacks=saver, accelerator="cpu", default_root_dir=tmp_path)
    saver.setup(trainer, Small(), "fit")
    assert Path(saver.dirpath) == Path(_objects.folder_of_run(trainer), "checkpoints")


@pytest.mark.parametrize("default", [True, False])
def test_shows_hp_metric_where_tensorboard_shows_it(tmp_path, default):
    logger = TensorBoardLogger(tmp_path, default_hp_metric=default)
    assert not _objects.shows_hp_metric(logger)
    model = model_with()
    model.save_hyperparameters({"width": 3})
    train(model=model, batches=1, logger=logger)
    assert _objects.shows_hp_metric(logger) is default
    assert ("hp_metric" in events(Path(logger.log_dir)).Tags()["scalars"]) is default


@pytest.mark.parametrize("automatic", [True, False])
def test_the_clip_hook_is_called_once_between_the_hooks_and_each_step(automatic, monkeypatch):
    called: list[Any] = []

    def look(trainer: Any, module: Any) -> None:
        plugin, name = _objects.clip_hook(trainer)
        clip = getattr(plugin, name)

        def clip_hook(model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            clip(model, optimizer, *args, **kwargs)
            called.append((model is module, _objects.optimizer_index(trainer, optimizer)))

        monkeypatch.setattr(plugin, name, clip_hook)
        monkeypatch.setattr(module, "on_before_optimizer_step", lambda optimizer: called.append("hook"))
        monkeypatch.setattr(module, "configure_gradient_clipping", lambda *_, **__: called.append("clip"))

    def by_hand(batch: Any, batch_idx: int) -> None:
        model.manual_backward(model(batch).sum())
        model.optimizers().step()

    model = model_with()
    if not automatic:
        model.automatic_optimization, model.training_step = False, by_hand
    train(On(on_train_start=look), model=model, max_steps=2)
    assert called == ["hook", *(["clip"] if automatic else []), (True, 0)] * 2


def test_compiled_steps_of_a_module_that_lightning_runs_compiled():
    model = model_with()
    assert _objects.compiled_steps(model) is _objects.compiled_steps(torch.nn.Linear(1, 1)) is None
    compiled = from_compiled(torch.compile(model, backend="eager"))
    assert _objects.compiled_steps(compiled) is not None
    assert _objects.compiled_steps(to_uncompiled(compiled)) is None


def test_a_device_mesh_that_is_set_is_the_modules(monkeypatch):
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    model, mesh = model_with(), init_device_mesh("cpu", (1,))
    assert model.device_mesh is None
    _objects.set_device_mesh(model, mesh)
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


def test_an_epoch_is_over_at_its_last_batch_and_until_the_next_begins():
    found = answers(_loop.epoch_is_over, hook="on_train_batch_end", max_epochs=2)
    assert found == [False, False, True] * 2
    assert _loop.epoch_is_over(train())


@pytest.mark.parametrize("monitors", [True, False])
def test_the_hook_at_an_epochs_end_is_the_last_one_that_is_called(tmp_path, monitors):
    called, hooks = [], []
    model, others = model_with(logs=True), [EarlyStopping("train/loss"), ModelCheckpoint(tmp_path)] * monitors

    def watch(trainer, module):
        for owner in (module, *trainer.callbacks):
            owner.on_train_epoch_end = lambda *_, owner=owner: called.append(owner)
        hooks.append(_loop.hook_at_epoch_end(trainer))

    train(*others, On(on_train_start=watch), model=model, max_epochs=1)
    assert len(called) == 2 + 2 * monitors
    assert hooks == [(called[-1], "on_train_epoch_end")]


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_fetch_hooks_enclose_each_wait_for_a_training_batch(epochs):
    events = []

    class Batches(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> torch.Tensor:
            events.append("batch")
            return torch.ones(2)

    def replace(trainer: Any, *_: Any) -> None:
        owner, before, after = _loop.fetch_hooks(trainer)
        for name, event in ((before, "before"), (after, "after")):
            assert callable(getattr(owner, name))
            setattr(owner, name, lambda event=event: events.append(event))

    hooks = On(on_fit_start=replace, on_train_batch_start=lambda *_: events.append("step"))
    trainer_with(hooks, max_epochs=epochs).fit(model_with(), DataLoader(Batches(), batch_size=None))
    assert events == ["before", "batch", "after", "step"] * 2 * epochs


class Unsized(torch.utils.data.IterableDataset):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.ones(self.rows, 2))


@pytest.mark.parametrize(("consumed", "batches"), [(False, 5), (True, 3)])
def test_set_consumed_ends_an_epoch_with_the_longest_loader_that_is_left(consumed, batches):
    def consume(module: Any, _: Any) -> None:
        if consumed and not module.losses:
            _loop.set_consumed(module.trainer, 1)

    model = model_with(act=consume, loss=lambda module, batch: module(batch[0]).square().mean())
    trainer_with().fit(model, [DataLoader(Unsized(3)), DataLoader(Unsized(5))])
    assert len(model.losses) == batches


def counts(trainer: Any) -> tuple[int, int, int, int]:
    """Batches of the epoch, of all epochs, those that are done, and the logged step."""
    progress = _loop.batch_progress(trainer)
    return progress.current.ready, progress.total.ready, progress.total.processed, _loop.logging_step(trainer)


def saves(path: Path, rewind: Any, batch: int, hook: str) -> On:
    """Saves at a batch, and changes the checkpoint."""

    def save(trainer: Any, *args: Any) -> None:
        if args[-1] == batch:
            trainer.save_checkpoint(path)

    return On(**{hook: save}, on_save_checkpoint=lambda trainer, module, checkpoint: rewind(checkpoint, trainer))


def test_rewind_to_step_changes_what_a_restart_counts(tmp_path):
    saver = saves(tmp_path / "five.ckpt", _loop.rewind_to_step, 4, "on_train_batch_end")
    train(saver, batches=7, accumulate_grad_batches=3)  # two of them are done
    found = answers(counts, hook="on_train_batch_end", batches=7, ckpt_path=tmp_path / "five.ckpt")
    assert [one[:2] for one in found] == [(4, 4), (5, 5), (6, 6), (7, 7)]
    assert [one[-1] for one in found] == [1, 2, 3, 4]  # one step was done, and one micro-batch is a step now


def test_a_batch_that_was_running_at_a_save_is_counted_once(tmp_path):
    saver = saves(tmp_path / "running.ckpt", _loop.rewind_to_step, 2, "on_train_batch_start")
    unbroken = answers(counts, saver, hook="on_train_batch_end")
    forget = On(on_train_start=lambda trainer, _: _loop.forget_running_batch(trainer))
    resumed = answers(counts, forget, hook="on_train_batch_end", ckpt_path=tmp_path / "running.ckpt")
    assert [one[1:] for one in resumed] == [one[1:] for one in unbroken[2:]]


@pytest.mark.parametrize(
    ("when", "done", "expected"),
    [
        ({"interval": "step"}, [0, 1, 2, 3, 4, 5], [1, 2, 3]),
        ({"interval": "step", "frequency": 2}, [0, 0, 1, 1, 1, 2], [0, 1, 1]),
        ({"interval": "epoch"}, [0, 0, 0, 1, 1, 1], [0, 0, 1]),
    ],
)
def test_the_updates_of_a_plateau_are_those_after_all_that_belongs_to_the_batches_done(when, done, expected):
    class Falls(Small):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "train/loss", **when}}

    begun, updates = [], []

    def begin(trainer: Any, *_: Any) -> None:
        begun.append(trainer.lr_scheduler_configs[0].scheduler.last_epoch)
        updates.extend(_loop.plateau_updates(trainer))  # nothing is due while a batch runs

    def ask(trainer: Any, *_: Any) -> None:
        if updates:
            updates[-1] = (updates[-1], *_loop.plateau_updates(trainer))[-1]

    asks = On(on_train_batch_start=begin, **dict.fromkeys(("on_validation_end", "on_train_epoch_end"), ask))
    asks.on_train_batch_end = ask
    train(asks, model=Falls(2, 1, logs=True), max_epochs=2, val_check_interval=1.0)
    assert (begun, updates[:3]) == (done, expected)


def test_metrics_that_are_put_back_are_callback_metrics_and_means_over_an_epoch_are_known():
    def log(module: Any, _: Any) -> None:
        module.log("mean", 1.0, on_step=False, on_epoch=True)
        module.log("both", 1.0, on_step=True, on_epoch=True)

    trainer = trainer_with()
    found: list[Any] = []
    trainer.callbacks += [
        On(on_train_start=lambda *_: _loop.set_callback_metrics(trainer, {"before": torch.tensor(3.0)})),
        On(on_train_batch_end=lambda *_: found.append(_loop.epoch_means(trainer))),
    ]
    trainer.fit(model_with(act=log), data(2))
    assert found == [{"mean", "both", "both_epoch"}] * 2
    assert trainer.callback_metrics["before"] == 3.0


class Starts(pl.Callback):
    """Epochs that began and batches that ran, after a function was called when training started."""

    def __init__(self, act: Any = lambda trainer: None, ask: Any = lambda trainer, batch: batch) -> None:
        self.act, self.ask, self.seen = act, ask, []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.act(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(f"epoch {trainer.current_epoch}")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.ask(trainer, batch_idx))


def test_after_an_epochs_end_the_next_one_begins(tmp_path):
    train(ModelCheckpoint(tmp_path, filename="end", save_on_train_epoch_end=True))
    for limit in ({"max_steps": 5, "max_epochs": -1}, {"max_epochs": 2, "limit_train_batches": 2}):
        starts = Starts(_loop.go_on_with_next_epoch)
        train(starts, **limit, ckpt_path=tmp_path / "end.ckpt")
        assert starts.seen == ["epoch 1", 0, 1]


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end", "on_train_epoch_end"])
def test_the_step_and_the_batch_that_a_save_is_a_part_of_are_counted_when_the_next_epoch_begins(hook, tmp_path):
    ask = lambda trainer, _: (_loop.logging_step(trainer), _loop.batch_progress(trainer).total.completed)  # noqa: E731
    save = On(**{hook: lambda trainer, *_: trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")})
    limit = {"max_steps": 5, "max_epochs": -1, "val_check_interval": 3}
    whole, resumed = Starts(ask=ask), Starts(_loop.go_on_with_next_epoch, ask)
    train(save, whole, **limit)
    train(resumed, **limit, ckpt_path=tmp_path / "3.ckpt")
    assert resumed.seen == whole.seen[-3:] == ["epoch 1", (3, 3), (4, 4)]


def test_a_run_that_ended_in_mid_epoch_goes_on_in_that_epoch(tmp_path):
    train(max_steps=2).save_checkpoint(tmp_path / "two.ckpt")
    starts = Starts()
    reopen = On(on_load_checkpoint=lambda trainer, module, checkpoint: _loop.reopen_epoch(checkpoint))
    train(reopen, starts, max_steps=5, max_epochs=2, ckpt_path=tmp_path / "two.ckpt")
    assert starts.seen == [2, "epoch 1", 0, 1]


class LookedAt(torch.utils.data.Dataset):
    def __init__(self, look: Any, place: str) -> None:
        self.look, self.place = look, place

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        self.look(self.place)
        return torch.ones(2)


def looked(tmp_path: Path, ask: Any, optimizers: int = 1, number: int = 1, mode: str = "") -> dict[str, Any]:
    """What `ask(stack)` says at each place at which a Trainer can be, in calls that Lightning makes there."""
    found: dict[str, Any] = {}

    def look(place: str) -> None:
        found[place] = ask([frame for frame, _ in traceback.walk_stack(sys._getframe(1))])

    def forward(module: Any, _: Any) -> None:
        look("forward")
        for parameter in module.parameters():
            parameter.register_hook(lambda _: look("backward"))

    places = On(
        on_train_batch_start=lambda *_: look("between steps"), on_save_checkpoint=lambda *_: look("checkpoint"),
        on_before_zero_grad=lambda *_: look("optimizer" if optimizers == 1 else ""),
        on_validation_batch_start=lambda *_: look("validation"),
    )  # fmt: skip
    trainer = trainer_with(places, ModelCheckpoint(tmp_path, every_n_train_steps=1))
    training, validation = (
        [DataLoader(LookedAt(look, f"{kind} loader {index}")) for index in range(number)]
        for kind in ("training", "validation")
    )
    module = model_with(optimizers, act=forward)
    module.transfer_batch_to_device = lambda batch, *_: torch.ones(1, 2)
    module.validation_step = lambda batch, batch_idx, dataloader_idx=0: None
    loaders = CombinedLoader(training, mode) if mode else training if number > 1 else training[0]
    trainer.fit(module, loaders, validation)
    look("after the fit")
    return found


@pytest.mark.parametrize("optimizers", [1, 2])
def test_running_part_is_the_place_of_a_stack_and_it_is_known_whether_that_evaluates(tmp_path, optimizers):
    seen = looked(tmp_path, lambda stack: (_running.running_part(stack), _running.is_evaluating(stack)), optimizers)
    seen.pop("", None)
    found = {place: part for place, (part, _) in seen.items()}
    expected = {
        "between steps": "", "forward": "forward", "backward": "backward", "validation": "validation",
        "checkpoint": "checkpoint", "training loader 0": "loader", "validation loader 0": "loader",
        "after the fit": "",
    }  # fmt: skip
    assert found == expected | ({"optimizer": "optimizer"} if optimizers == 1 else {})
    evaluating = {place for place, (_, answer) in seen.items() if answer}
    assert evaluating == {"validation", "validation loader 0"}


def test_torch_compile_is_seen_at_work_in_a_forward_and_in_a_backward():
    found = {"before": _running.is_compiling([*_running.outwards(sys._getframe())])}

    def backend(graph: Any, _: Any) -> Any:
        found["forward"] = _running.is_compiling([*_running.outwards(sys._getframe())])
        return graph

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert found == {"before": False, "forward": True}


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end", "on_train_end"])
def test_an_evaluation_of_a_checkpoint_is_logged_where_the_fit_logged_its_own(tmp_path, hook):
    """After six steps, the last of them number 5, whether Lightning had counted the batch when it saved or not."""
    logged: list[int] = []

    class Logger(CSVLogger):
        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            logged.extend([step] if "seen" in metrics else [])

    def save(trainer: Any, *_: Any) -> None:
        if trainer.global_step == 6:
            trainer.save_checkpoint(tmp_path / "six.ckpt")

    model = model_with()
    model.validation_step = lambda batch, batch_idx: model.log("seen", 1.0, on_epoch=True)
    options: dict[str, Any] = {"max_epochs": 2, "max_steps": 6, "val_check_interval": 3, "logger": Logger(tmp_path)}
    trainer_with(On(**{hook: save}), **options).fit(model, data(6), data(1))
    assert logged == [2, 5]
    restore = On(on_load_checkpoint=lambda trainer, module, checkpoint: _loop.take_loops_step(trainer, checkpoint))
    trainer = trainer_with(restore, **options)
    trainer.validate(model, data(1), ckpt_path=tmp_path / "six.ckpt", verbose=False)
    assert (logged, trainer.global_step) == ([2, 5, 5], 6)


@pytest.mark.parametrize("number", [1, 2])
def test_the_awaited_loader_is_the_one_that_fetches(tmp_path, number):
    ask = lambda stack: (found := _running.awaited_loader(stack)) and (found[0].dataset.place, *found[1:])  # noqa: E731
    found = looked(tmp_path, ask, number=number)
    loaders = {place: answer for place, answer in found.items() if "loader" in place}
    names = [f"{kind} loader {index}" for kind in ("training", "validation") for index in range(number)]
    assert loaders == {name: (name, int(name[-1]), number) for name in names}
    assert found["forward"] is None


@pytest.mark.parametrize(("number", "known"), [(1, True), (2, False)])
def test_where_the_iterator_does_not_tell_the_awaited_loader_it_is_known_only_if_there_is_one(tmp_path, number, known):
    found = looked(tmp_path, _running.awaited_loader, number=number, mode="min_size")["training loader 0"]
    assert (found and found[1:]) == ((0, 1) if known else None)


def test_evaluation_progress_counts_the_batches_of_a_validation():
    found = []
    ask = lambda trainer, *_: found.append(_running.evaluation_progress(trainer).current.ready)  # noqa: E731
    trainer, model = trainer_with(On(on_validation_batch_start=ask)), model_with()
    trainer.fit(model, data(2), data(3))
    trainer.validate(model, data(2))
    assert found == [1, 2, 3, 1, 2]


@pytest.mark.parametrize("options", [{"max_epochs": 2, "accumulate_grad_batches": 3}, {"max_steps": 4}, {}])
def test_run_length_is_the_step_at_which_training_ends(options):
    lengths: list[int | None] = []
    ask = lambda trainer, *_: lengths.append(_run_length.run_length(trainer))  # noqa: E731
    trainer = train(On(on_train_start=ask, on_train_epoch_start=ask), batches=5, **options)
    assert set(lengths) == {trainer.global_step} == {trainer.estimated_stepping_batches}


def test_a_step_limit_that_is_set_ends_the_run():
    trainer = trainer_with(max_epochs=-1)
    with replaced(*_run_length.step_limit(trainer), 2):
        assert trainer.max_steps == 2
        trainer.fit(model_with(), data(5))
    assert (trainer.global_step, trainer.max_steps) == (2, -1)
