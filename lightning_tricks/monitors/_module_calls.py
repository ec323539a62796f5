"""Watch modules of any model run, without entering what torch.compile has compiled."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from lightning_tricks._find_modules import clean_name
from lightning_tricks._replaced import replaced
from lightning_tricks._trainer import compiled_steps

Undo = Callable[[], None]


def in_sight(root: nn.Module, found: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Those of `found`, submodules of `root` by name, that are not inside a module that is compiled as a whole.

    There a watcher would see nothing, and could change what is compiled.
    """
    compiled = [clean_name(name + ".") for name, module in root.named_modules() if _is_compiled(module)]
    compiled = [outer.lstrip(".") for outer in compiled]  # of the root itself: what every name starts with
    return {name: module for name, module in found.items() if not any(name.startswith(outer) for outer in compiled)}


def outermost_compiled(root: nn.Module) -> list[nn.Module]:
    """The modules of `root`, itself included, that are compiled and not inside another that is."""
    if _is_compiled(root):
        return [root]
    found = {id(part): part for child in root.children() for part in outermost_compiled(child)}
    return list(found.values())


def before_calls(module: nn.Module, see: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> Undo:
    """Have `see(args, kwargs)` called before each call of `module`, where that is not inside a compiled region."""
    if getattr(module, "_compiled_call_impl", None) is not None:
        return _CompiledCall.of(module).watch(before=see)

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            see(args, kwargs)

    return module.register_forward_pre_hook(hook, with_kwargs=True).remove


def after_calls(module: nn.Module, see: Callable[[Any], None]) -> Undo:
    """Have `see(output)` called after each call of `module`, where that is not inside a compiled region."""
    if getattr(module, "_compiled_call_impl", None) is not None:
        return _CompiledCall.of(module).watch(after=see)

    def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not torch.compiler.is_compiling():
            see(output)

    return module.register_forward_hook(hook).remove


class _CompiledCall:
    """What a module compiled in place (`module.compile()`) calls instead: the same, between its watchers.

    Hooks of such a module are traced into its graph; this stands around the graph, which stays as it was.
    """

    def __init__(self, module: Any) -> None:
        self.call: Callable[..., Any] = module._compiled_call_impl
        self.installed = ExitStack()
        self.installed.enter_context(replaced(module, "_compiled_call_impl", self))
        self.before: list[Callable[[tuple[Any, ...], dict[str, Any]], None]] = []
        self.after: list[Callable[[Any], None]] = []

    @classmethod
    def of(cls, module: Any) -> "_CompiledCall":
        if not isinstance(module._compiled_call_impl, cls):
            return cls(module)
        return module._compiled_call_impl

    def watch(self, before: Any = None, after: Any = None) -> Undo:
        watchers, see = (self.before, before) if before is not None else (self.after, after)
        watchers.append(see)

        def undo() -> None:
            watchers.remove(see)
            if not self.before and not self.after:
                self.installed.close()

        return undo

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.call(*args, **kwargs)
        for see in self.before:
            see(args, kwargs)
        output = self.call(*args, **kwargs)
        for look in self.after:
            look(output)
        return output


def _is_compiled(module: nn.Module) -> bool:
    in_place = getattr(module, "_compiled_call_impl", None) is not None  # by `module.compile()`
    return in_place or "_orig_mod" in module._modules or compiled_steps(module) is not None
