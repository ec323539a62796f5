"""A pytest plugin for a run of Lightning's own tests: puts our parts into every Trainer and records how each fit ends.

`lightning_suite.py` starts pytest with it, and names the modes. Everything is patched in the process that runs
the tests, before their modules are imported, and the tests themselves stay as they are.
"""

import functools
import hashlib
import inspect
import json
import os
import random
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from lightning.pytorch.trainer.connectors.callback_connector import _CallbackConnector

import lightning_tricks as lt
import lightning_tricks.monitors
import lightning_tricks.outputs

MODE, LINES, ONLY = "LIGHTNING_SUITE_MODE", "LIGHTNING_SUITE_LINES", "LIGHTNING_SUITE_ONLY"  # in the environment
_ERROR_CHARACTERS = 400

connectors: Any = _CallbackConnector
precisions: Any = _AcceleratorConnector
runs: Any = call

Make = Callable[[], Sequence[pl.Callback]]


def monitors() -> list[pl.Callback]:
    """One of every public callback of the monitors and the outputs, except two that refuse a module without text."""
    options: dict[str, dict[str, Any]] = {
        "BranchLineage": {"trunk": "step=8.ckpt", "trunk_step": 8, "decay_steps": 4},
        "MFUMonitor": {"peak_flops": 1e12},  # else the CPU's is measured
    }
    packages = tuple(f"{package.__name__}." for package in (lightning_tricks.monitors, lightning_tricks.outputs))
    classes = [
        cls for name in dir(lt) if isinstance(cls := getattr(lt, name), type) and cls.__module__.startswith(packages)
    ]
    need_text = (lt.CompressionBaseline, lt.LMEval, lt.SampleText)
    return [cls(**options.get(cls.__name__, {})) for cls in classes if cls not in need_text]


def one(cls: type[pl.Callback], **options: Any) -> Make:
    """A mode of one callback."""
    return lambda: [cls(**options)]


CALLBACKS: dict[str, Make] = {
    "monitors": monitors,
    # Lightning's toy model diverges at its learning rate, and by the default limits such steps are to be skipped
    "StepGuard": one(lt.StepGuard, sigmas=1e6, norm_ratio=1e6),
    "SpikeRollback": one(lt.SpikeRollback),
    "EMA": one(lt.EMA),
    "TailAverage": one(lt.TailAverage),
    "ExactResume": one(lt.ExactResume),
    "Preemption": one(lt.Preemption),
    "HangWatchdog": one(lt.HangWatchdog),
    "GCControl": one(lt.GCControl),
    "BatchSizeWarmup": one(lt.BatchSizeWarmup, stages={0: 1}),  # one stage: as many micro-batches as without it
}


# ------------------------------------------------------------------------------------------- what a mode puts in


def add_callbacks(make: Make) -> None:
    """Every Trainer gets more callbacks, behind the test's own; a progress bar where Lightning's would stand."""
    original = connectors.on_trainer_init

    @functools.wraps(original)
    def on_trainer_init(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        callbacks = given["callbacks"]
        theirs = [callbacks] if isinstance(callbacks, pl.Callback) else list(callbacks or [])
        bar = given["enable_progress_bar"] and not any(isinstance(callback, ProgressBar) for callback in theirs)
        ours = [callback for callback in make() if bar or not isinstance(callback, ProgressBar)]
        return original(**{**given, "callbacks": [*theirs, *ours]})

    connectors.on_trainer_init = on_trainer_init


def safe_options(
    dirpath: Any = None, monitor: str | None = None, save_last: Any = None, save_top_k: int = 1, mode: str = "min",
    every_n_train_steps: int | None = None, train_time_interval: Any = None, verbose: bool = False, **others: Any,
) -> dict[str, Any] | None:  # fmt: skip
    """SafeCheckpoint's options for ModelCheckpoint's, or None where it has no such option."""
    keeps = save_top_k >= 1 or (save_top_k == 0 and bool(save_last))
    if others or not keeps or every_n_train_steps == 0 or mode not in ("min", "max"):
        return None
    minutes = train_time_interval.total_seconds() / 60 if train_time_interval else None
    return {
        "dirpath": dirpath, "monitor": monitor, "mode": mode, "keep_best": max(save_top_k, 1),
        "every_n_train_steps": every_n_train_steps, "every_n_minutes": minutes,
    }  # fmt: skip


def replace_checkpoint(count: Callable[[], None]) -> None:
    """`ModelCheckpoint(...)` makes a SafeCheckpoint where the arguments fit."""
    first_init = lt.SafeCheckpoint.__init__

    @functools.wraps(ModelCheckpoint.__init__)
    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        names = ("dirpath", "filename", "monitor")  # nobody gives more by position
        given = dict(zip(names, args, strict=False)) | kwargs
        given = {name: value for name, value in given.items() if name != "filename" or value is not None}
        options = safe_options(**given) if cls is ModelCheckpoint else None
        if options is None:
            return object.__new__(cls)
        count()
        made: Any = object.__new__(lt.SafeCheckpoint)
        first_init(made, **options)
        return made

    @functools.wraps(first_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if "keep_last" not in vars(self):  # else Python calls it for what `new` has made
            first_init(self, *args, **kwargs)

    ModelCheckpoint.__new__ = new  # type: ignore[method-assign]
    lt.SafeCheckpoint.__init__ = init  # type: ignore[method-assign]


def same_format(plugin: Precision) -> Precision | None:
    """Our plugin of the format that Lightning's has; None where we have none."""
    if type(plugin) is MixedPrecision and plugin.precision == "bf16-mixed":
        return lt.BF16Mixed()
    if type(plugin) is HalfPrecision and plugin.precision == "bf16-true":
        return lt.BF16True()
    return None


def bf16_for_fp32(plugin: Precision) -> Precision | None:
    """bf16 wherever the test asked for no format."""
    return lt.BF16Mixed() if type(plugin) is Precision else None


def replace_precision(choose: Callable[[Precision], Precision | None], count: Callable[[], None]) -> None:
    """The Trainer takes the plugin that `choose` gives for Lightning's."""
    original = precisions._check_and_init_precision

    @functools.wraps(original)
    def check_and_init_precision(self: Any) -> Precision:
        plugin = original(self)
        ours = choose(plugin) if self._precision_plugin_flag is not plugin else None
        if ours is not None:
            count()
        return ours or plugin

    precisions._check_and_init_precision = check_and_init_precision


class Mixed:
    """While it lasts, a mixin stands before the module's class, unless the class has a method of its own there."""

    def __init__(self, mixin: type, method: str, count: Callable[[], None]) -> None:
        self.mixin, self.method, self.count = mixin, method, count

    def __call__(self, module: Any) -> Callable[[], None]:
        """Mix in; returns what takes it out."""
        cls = type(module)
        if not isinstance(module, pl.LightningModule) or isinstance(module, self.mixin):
            return lambda: None
        if self.method in vars(module) or getattr(cls, self.method) is not getattr(pl.LightningModule, self.method):
            return lambda: None
        self.count()
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        module.__class__ = type(cls.__name__, (self.mixin, cls), names)

        def take_out() -> None:
            module.__class__ = cls

        return take_out


# -------------------------------------------------------------------------------------------- how a fit has ended


def feed(digest: Any, value: Any) -> None:
    """Add a value to a digest: tensors by their bits, containers by their items, other objects by their class."""
    if isinstance(value, torch.Tensor):
        digest.update(f"{type(value).__name__} {value.dtype} {tuple(value.shape)}".encode())
        if value.layout == torch.strided and value.device.type == "cpu" and type(value) in (
            torch.Tensor, torch.nn.Parameter, torch.nn.Buffer,
        ):  # fmt: skip
            digest.update(value.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        digest.update(value.tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            digest.update(str(key).encode())
            feed(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(f"[{len(value)}".encode())
        for item in value:
            feed(digest, item)
    elif value is None or isinstance(value, bool | int | float | str):
        digest.update(repr(value).encode())
    else:
        digest.update(type(value).__name__.encode())


def digest(value: Any) -> str:
    """12 hexadecimal digits of a value; in place of them, the error of a value that cannot be read."""
    found = hashlib.sha256()
    try:
        feed(found, value() if callable(value) else value)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:100]
    return found.hexdigest()[:12]


def end_state(trainer: Any) -> dict[str, Any]:
    """Weights and buffers, optimizers, random states, metrics and counters."""
    module: Any = getattr(trainer, "lightning_module", None)
    try:
        metrics = {str(name): digest(value) for name, value in trainer.callback_metrics.items()}
    except Exception as error:
        metrics = {"error": str(error)[:100]}
    return {
        "weights": digest(lambda: [dict(module.named_parameters()), dict(module.named_buffers())]),
        "optimizers": digest(lambda: [optimizer.state_dict() for optimizer in trainer.optimizers]),
        "random": digest([torch.get_rng_state(), list(np.random.get_state()), random.getstate()]),
        "steps": digest(lambda: [trainer.global_step, trainer.current_epoch, trainer.should_stop]),
        "metrics": metrics,
    }


# --------------------------------------------------------------------------------------------------- the plugin


def starts_processes(*args: Any, **kwargs: Any) -> None:
    """In the place of a launcher's `launch`: our parts are put into this process only."""
    pytest.skip("starts processes")


class Suite:
    """Runs the tests that it is told to, each in a folder of its own and from one seed; writes two lines for each."""

    def __init__(self, mode: str, lines: Path, only: Sequence[str] | None) -> None:
        self.mode, self.lines, self.only = mode, lines, None if only is None else set(only)
        self.test: dict[str, Any] = {}
        self.mix: Mixed | None = None
        self.patch()

    def count(self, what: str = "used") -> None:
        self.test[what] = self.test.get(what, 0) + 1

    def write(self, line: dict[str, Any]) -> None:
        with self.lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def patch(self) -> None:
        """Put the mode's parts where every Trainer finds them, and record each fit's end around all of them."""
        count = functools.partial(self.count, "used")
        if self.mode in CALLBACKS:
            add_callbacks(CALLBACKS[self.mode])
        elif self.mode == "SafeCheckpoint":
            replace_checkpoint(count)
        elif self.mode == "precision":
            replace_precision(same_format, count)
        elif self.mode == "BF16Mixed":
            replace_precision(bf16_for_fp32, count)
        elif self.mode == "GradientClippingMixin":
            self.mix = Mixed(lt.GradientClippingMixin, "configure_gradient_clipping", count)
        for launcher in (_MultiProcessingLauncher, _SubprocessScriptLauncher):
            skipped: Any = launcher
            skipped.launch = starts_processes
        original, on_init = runs._call_and_handle_interrupt, connectors.on_trainer_init

        @functools.wraps(on_init)
        def on_trainer_init(connector: Any, *args: Any, **kwargs: Any) -> Any:
            self.count("trainers")
            return on_init(connector, *args, **kwargs)

        @functools.wraps(original)
        def call_and_handle_interrupt(trainer: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
            pid, take_out = os.getpid(), self.mix(args[0]) if self.mix and args else lambda: None
            try:
                return original(trainer, function, *args, **kwargs)
            finally:
                take_out()
                if os.getpid() == pid:
                    name = getattr(function, "__name__", "?")
                    plugin = type(getattr(trainer, "precision_plugin", None)).__name__
                    ended = {"of": name.strip("_").removesuffix("_impl"), "precision": plugin, **end_state(trainer)}
                    self.test.setdefault("fits", []).append(ended)

        connectors.on_trainer_init = on_trainer_init
        runs._call_and_handle_interrupt = call_and_handle_interrupt

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.only is not None:
            items[:] = [item for item in items if item.nodeid in self.only]

    def pytest_collection_finish(self, session: Any) -> None:
        if session.config.option.collectonly:
            self.lines.write_text(json.dumps([item.nodeid for item in session.items]), encoding="utf-8")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[Any]:
        before, folder = os.getcwd(), tempfile.mkdtemp(prefix="lightning-suite-")
        self.test = {"test": item.nodeid, "outcome": "passed"}
        self.write({"start": item.nodeid})
        os.chdir(folder)  # what a test leaves beside itself is not found by the next one
        began, pid = time.monotonic(), os.getpid()
        try:
            return (yield)
        finally:
            os.chdir(before)
            if os.getpid() == pid:
                self.write(self.test | {"seconds": round(time.monotonic() - began, 2)})
                shutil.rmtree(folder, ignore_errors=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: Any) -> None:
        seed = zlib.crc32(item.nodeid.encode())  # many tests draw their weights without one
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Iterator[Any]:
        report: Any = yield
        if report.outcome != "passed" and self.test.get("outcome") == "passed":
            self.test["outcome"] = report.outcome
            if call.excinfo is not None and report.failed:
                error = call.excinfo.value
                self.test["error"] = f"{report.when}: {type(error).__name__}: {error}"[:_ERROR_CHARACTERS]
                self.test["at"] = [f"{Path(str(e.path)).name}:{e.lineno + 1}" for e in call.excinfo.traceback][-6:]
            elif report.failed:  # such as an xfail that passed
                self.test["error"] = f"{report.when}: {report.longrepr}"[:_ERROR_CHARACTERS]
        return report


def pytest_configure(config: Any) -> None:
    """Called by pytest, before it imports a test."""
    only = os.environ.get(ONLY)
    tests = json.loads(Path(only).read_text(encoding="utf-8")) if only else None
    config.pluginmanager.register(Suite(os.environ[MODE], Path(os.environ[LINES]), tests), "lightning-suite")
