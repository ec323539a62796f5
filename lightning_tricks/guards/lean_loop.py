"""Lightning's loop without its idle hooks: for steps of a few milliseconds, where they weigh.

Lightning calls some twenty hooks a step, on every callback and on the module, most of which nobody wrote, each within a
profiler's context and with a debug message; and each step it inspects the signature of `training_step` anew.
"""

import importlib
import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning_tricks._lightning import pl, pl_import
from lightning_tricks._replaced import replaced

rank_zero_info = pl_import("utilities.rank_zero").rank_zero_info


def lean_calls(trainer: Any, call: Any, base: type) -> dict[str, Callable[..., Any]]:
    """Replacements for three functions of Lightning's module `trainer.call`, by name.

    Args:
        trainer: the only one that they serve; for any other they do what the originals do.
        call: the module.
        base: Lightning's Callback class, whose hooks do nothing.
    """
    callback_hooks, module_hook, strategy_hook = (getattr(call, name) for name in _REPLACED)

    def call_callback_hooks(
        of: Any, hook_name: str, *args: Any, monitoring_callbacks: Any = None, **kwargs: Any
    ) -> None:
        module = of.lightning_module
        if of is not trainer or module is None or monitoring_callbacks is not None:
            return callback_hooks(of, hook_name, *args, monitoring_callbacks=monitoring_callbacks, **kwargs)
        state, idle = module.__dict__, getattr(base, hook_name)
        previous, state["_current_fx_name"] = state["_current_fx_name"], hook_name
        for callback in of.callbacks:
            hook = getattr(callback, hook_name)
            if getattr(hook, "__func__", None) is not idle and callable(hook):
                hook(of, module, *args, **kwargs)
        state["_current_fx_name"] = previous
        return None

    def call_module_hook(of: Any, hook_name: str, *args: Any, pl_module: Any = None, **kwargs: Any) -> Any:
        module = of.lightning_module
        if of is not trainer or module is None or pl_module is not None:
            return module_hook(of, hook_name, *args, pl_module=pl_module, **kwargs)
        return _call_as(module, hook_name, getattr(module, hook_name), args, kwargs)

    def call_strategy_hook(of: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
        if of is not trainer:
            return strategy_hook(of, hook_name, *args, **kwargs)
        return _call_as(of.lightning_module, hook_name, getattr(of.strategy, hook_name), args, kwargs)

    return dict(zip(_REPLACED, (call_callback_hooks, call_module_hook, call_strategy_hook), strict=True))


_REPLACED = ("_call_callback_hooks", "_call_lightning_module_hook", "_call_strategy_hook")
_INSPECTS = "is_param_in_hook_signature"


def _call_as(module: Any, name: str, hook: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a hook with its name kept for `self.log`; past Module.__setattr__, which takes longer than many a hook."""
    if not callable(hook):
        return None
    state = module.__dict__
    previous, state["_current_fx_name"] = state["_current_fx_name"], name
    output = hook(*args, **kwargs)
    state["_current_fx_name"] = previous
    return output


def remembered(inspect: Callable[..., bool]) -> Callable[..., bool]:
    """Lightning's `is_param_in_hook_signature`, with its answer for each function kept."""
    answers: dict[Any, bool] = {}

    def ask(hook: Any, *args: Any, **kwargs: Any) -> bool:
        key = (getattr(hook, "__func__", hook), args, tuple(kwargs.items()))  # a bound method is a new object each time
        if key not in answers:
            answers[key] = inspect(hook, *args, **kwargs)
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
        self._calls_taken_over = ExitStack()

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Take the calls over."""
        # the Trainer may be of the other Lightning package than this callback
        lightnings = next(cls for cls in type(trainer).__mro__ if cls.__module__.endswith(".trainer.trainer"))
        package = lightnings.__module__.removesuffix(".trainer.trainer")
        call, loop, callbacks = (
            importlib.import_module(f"{package}.{name}")
            for name in ("trainer.call", "loops.training_epoch_loop", "callbacks")
        )
        profiler = type(trainer.profiler).__name__  # type: ignore[attr-defined]
        if profiler != "PassThroughProfiler" or call.log.isEnabledFor(logging.DEBUG):
            rank_zero_info("LeanLoop stays off: a profiler or a debug log wants to see every hook")
            return
        replacements = [(call, name, lean) for name, lean in lean_calls(trainer, call, callbacks.Callback).items()]
        replacements.append((loop, _INSPECTS, remembered(getattr(loop, _INSPECTS))))
        for module, name, lean in replacements:
            self._calls_taken_over.enter_context(replaced(module, name, lean))

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Give the calls back."""
        self._calls_taken_over.close()

    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        """Give the calls back."""
        self._calls_taken_over.close()
