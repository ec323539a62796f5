"""Lightning's loop without its idle hooks: for steps of a few milliseconds, of which they take a large share.

Lightning calls some twenty hooks a step, on every callback and on the module, most of which nobody wrote, each within a
profiler's context and with a debug message; and each step it inspects the signature of `training_step` anew.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning_tricks._lightning import Module, Trainer, pl, rank_zero_info
from lightning_tricks._replaced import replaced
from lightning_tricks._trainer import HOOK_CALLERS, SIGNATURE_CHECK, lightning_file, set_running_hook


def lean_callers(trainer: Any, call: Any, base: type) -> dict[str, Callable[..., Any]]:
    """Replacements for Lightning's `HOOK_CALLERS`, by name; for another Trainer they do what the originals do.

    Args:
        trainer: the one that they serve.
        call: Lightning's module that holds the originals.
        base: Lightning's Callback class, whose hooks do nothing.
    """
    callback_hooks, module_hook, strategy_hook = (getattr(call, name) for name in HOOK_CALLERS)

    def call_callbacks(of: Any, hook_name: str, *args: Any, monitoring_callbacks: Any = None, **kwargs: Any) -> None:
        module = of.lightning_module
        if of is not trainer or module is None or monitoring_callbacks is not None:
            return callback_hooks(of, hook_name, *args, monitoring_callbacks=monitoring_callbacks, **kwargs)
        idle, before = getattr(base, hook_name), set_running_hook(module, hook_name)
        for callback in of.callbacks:
            fn = getattr(callback, hook_name)  # named as in Lightning's own, for `running_place`
            if getattr(fn, "__func__", None) is not idle and callable(fn):
                fn(of, module, *args, **kwargs)
        set_running_hook(module, before)
        return None

    def call_module(of: Any, hook_name: str, *args: Any, pl_module: Any = None, **kwargs: Any) -> Any:
        module = of.lightning_module
        if of is not trainer or module is None or pl_module is not None:
            return module_hook(of, hook_name, *args, pl_module=pl_module, **kwargs)
        return _call_as(module, hook_name, getattr(module, hook_name), args, kwargs)

    def call_strategy(of: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
        if of is not trainer:
            return strategy_hook(of, hook_name, *args, **kwargs)
        return _call_as(of.lightning_module, hook_name, getattr(of.strategy, hook_name), args, kwargs)

    return dict(zip(HOOK_CALLERS, (call_callbacks, call_module, call_strategy), strict=True))


def _call_as(module: Any, hook_name: str, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a hook, with its name known to `self.log`."""
    if not callable(fn):
        return None
    before = set_running_hook(module, hook_name)
    output = fn(*args, **kwargs)
    set_running_hook(module, before)
    return output


def with_memory(check: Callable[..., bool]) -> Callable[..., bool]:
    """Lightning's `SIGNATURE_CHECK`, which keeps its answer for each function."""
    answers: dict[Any, bool] = {}

    def ask(hook: Any, *args: Any, **kwargs: Any) -> bool:
        key = (getattr(hook, "__func__", hook), args, tuple(kwargs.items()))  # a bound method is a new object each time
        if key not in answers:
            answers[key] = check(hook, *args, **kwargs)
        return answers[key]

    return ask


class LeanLoop(pl.Callback):
    """Call only the hooks that somebody wrote, and call them directly. Never changes training.

    Every hook that a callback, the module or the strategy has is called as before: in the same order, with the same
    arguments. Left out are a callback's hooks that no class overrides, the profiler's contexts, debug messages and the
    inspection of signatures that were inspected before. So it stays off, and says so, where a profiler is set or
    Lightning logs at debug level. From the start of training to its end it replaces four functions in Lightning's
    modules, three of which serve its own Trainer only.
    """

    def __init__(self) -> None:
        self._replacements = ExitStack()

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Take the calls over."""
        names = ("trainer.call", "loops.training_epoch_loop", "callbacks", "profilers")
        call, loop, callbacks, profilers = (lightning_file(trainer, name) for name in names)
        profiled = type(trainer.profiler) is not profilers.PassThroughProfiler  # type: ignore[attr-defined]
        if profiled or call.log.isEnabledFor(logging.DEBUG):
            rank_zero_info("LeanLoop stays off: a profiler or a debug log wants to see every hook")
            return
        for name, lean in lean_callers(trainer, call, callbacks.Callback).items():
            self._replacements.enter_context(replaced(call, name, lean))
        check = with_memory(getattr(loop, SIGNATURE_CHECK))
        self._replacements.enter_context(replaced(loop, SIGNATURE_CHECK, check))

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Give the calls back."""
        self._replacements.close()

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        """Give the calls back."""
        self._replacements.close()
