"""Hooks that measure modules of any model while they run, and leave the graphs of torch.compile as they are."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_tricks._core.find_modules import clean_name
from lightning_tricks._core.replaced import replaced
from lightning_tricks._trainer.lightning import Module, Trainer, WarnOnce, pl
from lightning_tricks._trainer.loop import is_accumulating
from lightning_tricks._trainer.objects import compiled_steps
from lightning_tricks.metrics.metric_buffer import MetricBuffer

Calls = Callable[[nn.Module, Callable[..., None]], AbstractContextManager]  # before_calls or after_calls


class ModuleMonitor(pl.Callback):
    """Base of the monitors that measure modules, by name, in the last micro-batch of a log step.

    A subclass calls `begin_fit` in `on_fit_start`, `watch` in the function that it gives there, and `end_batch` at the
    end of each micro-batch.

    Args:
        warning: the line that says what cannot be measured, with `{}` for the reason.
    """

    def __init__(self, warning: str) -> None:
        self._names: list[str] = []  # of the modules that are watched
        self._found: dict[str, Any] = {}
        self.measures_forward = False
        self._hooks = ExitStack()
        self._attach: Callable[[], None] | None = None
        self._warning, self._warn_once = warning, WarnOnce()

    def begin_fit(self, trainer: Any, attach: Callable[[], None]) -> None:
        """Find the buffer; call `attach` before the first batch: any hook before it may still compile modules."""
        self._buffer, self._attach = MetricBuffer.of(trainer), attach

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        """Measure in the last micro-batch of a log step."""
        if self._attach is not None:
            attach, self._attach = self._attach, None
            attach()
        self._found = {}
        self.measures_forward = not is_accumulating(trainer) and self._buffer.is_log_step()

    def end_batch(self, unseen: str) -> dict[str, Any] | None:
        """The measurements of this micro-batch; None if nothing was to be measured in it, or nothing is watched.

        Warns with the reason `unseen` if none of the watched modules was seen.
        """
        measured, self.measures_forward = self.measures_forward, False
        if not measured or not self._names:
            return None
        if not self._found:
            self.warn(unseen)
        return self._found

    def watch(self, modules: dict[str, nn.Module], calls: Calls, measure: Callable[..., Any]) -> None:
        """Run `measure(module, ...)` at the first call of each module in each micro-batch that is measured.

        Its result, unless None, is kept under the module's name. A compiled module may be around one of them, so the
        hooks stay for the whole fit: each that comes or goes would make torch.compile compile again.
        """
        self._names = list(modules)
        for name, module in modules.items():
            self._hooks.enter_context(calls(module, partial(self._see, name, partial(measure, module))))

    def _see(self, name: str, measure: Callable[..., Any], *call: Any) -> None:
        if self.measures_forward and name not in self._found:
            with measuring_in_forward():
                measured = measure(*call)
            if measured is not None:
                self._found[name] = measured

    def warn(self, reason: str) -> None:
        """Say once what is not measured."""
        self._warn_once("", self._warning.format(reason))

    def on_fit_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Leave the model as it was."""
        self.measures_forward, self._attach = False, None
        self._hooks.close()

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        """Leave the model as it was."""
        self.on_fit_end(trainer, pl_module)


@contextmanager
def measuring_in_forward() -> Iterator[None]:
    """No gradients in the middle of a forward pass, with the weights that autocast has cast left as they are.

    Not `torch.no_grad`: the release after Lightning 2.6 replaces it in a forward pass by one that forgets these casts,
    so that a layer that runs again has two, whose gradients are added up with another rounding. In torch before 2.13 a
    weight that is cast here first has no gradient: it must not become the cast of the layer's own run.
    """
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.autograd.no_grad():
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)


def outside_compiled(root: nn.Module, found: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """The members of `found`, submodules of `root` by name, that lie in no other module that is compiled.

    In there, a hook would not be called, and could change the compiled code.
    """
    # a compiled root gives the empty prefix, with which every name starts
    compiled = tuple(clean_name(f"{name}.").lstrip(".") for name, part in root.named_modules() if _is_compiled(part))
    return {name: module for name, module in found.items() if not (name.startswith(compiled) or _is_script(module))}


def before_calls(module: nn.Module, see: Callable[[Any, dict[str, Any]], None]) -> AbstractContextManager[Any]:
    """A context in which `see(args, kwargs)` runs before each call of `module`, except from compiled code."""
    if _is_compiled_in_place(module):
        return _around_graph(module, before=see)
    return module.register_forward_pre_hook(_Hook(lambda _, args, kwargs: see(args, kwargs)), with_kwargs=True)


def after_calls(module: nn.Module, see: Callable[[Any], None]) -> AbstractContextManager[Any]:
    """A context in which `see(output)` runs after each call of `module`, except from compiled code."""
    if _is_compiled_in_place(module):
        return _around_graph(module, after=see)
    return module.register_forward_hook(_Hook(lambda _, args, output: see(output)))


class _Hook:
    """A hook that runs outside compiled code. In a copy of the module, or one that is pickled, it does nothing."""

    def __init__(self, run: Callable[..., None] | None = None) -> None:
        self._run = run

    def __call__(self, *call: Any) -> None:
        if not torch.compiler.is_compiling() and self._run is not None:
            self._run(*call)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Hook, ()


@contextmanager
def _around_graph(module: Any, before: Any = None, after: Any = None) -> Iterator[None]:
    """Call `before` and `after` around the graph of a module compiled in place: a hook would become part of it."""
    graph, watching = module._compiled_call_impl, True

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not watching:  # a later watcher may still call this
            return graph(*args, **kwargs)
        if before is not None:
            before(args, kwargs)
        output = graph(*args, **kwargs)
        if after is not None:
            after(output)
        return output

    try:
        with replaced(module, "_compiled_call_impl", call):
            yield
    finally:
        watching = False


def _is_compiled_in_place(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None  # by `module.compile()`


def _is_compiled(module: nn.Module) -> bool:
    wrapped = "_orig_mod" in module._modules  # by `torch.compile(module)`
    return wrapped or _is_script(module) or _is_compiled_in_place(module) or compiled_steps(module) is not None


def _is_script(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)  # it takes no hooks
