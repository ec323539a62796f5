"""Find the repeated blocks of any model, and watch them run without entering what torch.compile has compiled."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lightning_tricks._errors import UsageError
from lightning_tricks.optim import clean_name

Undo = Callable[[], None]
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def named_submodules(module: nn.Module) -> dict[str, nn.Module]:
    """All modules below `module` by their names without wrappers' prefixes.

    Of a wrapped module it is the outermost wrapper, which runs outside of what it compiles and once where it
    checkpoints; but for FSDP1's, within which the parameters are gathered.
    """
    found: dict[str, nn.Module] = {}
    for name, submodule in module.named_modules():
        name = clean_name(name + ".").rstrip(".")
        if name and "_fsdp_wrapped_module" not in submodule._modules:
            found.setdefault(name, submodule)
    return found


def find_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks of `module` by name, in their order.

    They are the members of every ModuleList or Sequential that holds at least two modules of one class with
    parameters; of several such classes, the one with the most members. A list inside another one's member, such as the
    experts of a layer, does not count. A model without them gives its children that have parameters, of the first
    module that has more than one such.
    """
    modules = named_submodules(module)
    lists: dict[type, list[str]] = {}
    seen: list[str] = []
    for name, container in modules.items():
        children = list(container.children()) if isinstance(container, (nn.ModuleList, nn.Sequential)) else []
        classes = {_class(child) for child in children}
        if len(children) < 2 or len(classes) > 1 or not _has_parameters(children[0]):
            continue
        if any(name.startswith(f"{outer}.") for outer in seen):
            continue
        seen.append(name)
        lists.setdefault(classes.pop(), []).extend(f"{name}.{key}" for key, _ in container.named_children())
    if lists:
        return {name: modules[name] for name in max(lists.values(), key=len)}
    return _children(module)


def match_modules(module: nn.Module, patterns: Sequence[str], option: str) -> dict[str, nn.Module]:
    """The submodules whose whole name one of `patterns`, regular expressions, matches.

    Raises:
        UsageError: a pattern that matches none, or is no regular expression; `option` is how the user knows it.
    """
    modules = named_submodules(module)
    chosen: set[str] = set()
    for pattern in patterns:
        try:
            names = {name for name in modules if re.fullmatch(pattern, name)}
        except re.error as error:
            raise UsageError(f"{option}: pattern {pattern!r} is no regular expression: {error}") from None
        if not names:
            example = next(iter(find_blocks(module)), "model")
            raise UsageError(f"{option}: pattern {pattern!r} matches no submodule: give whole names such as {example}")
        chosen |= names
    return {name: submodule for name, submodule in modules.items() if name in chosen}


def in_sight(root: nn.Module, found: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Those of `found`, submodules of `root` by name, that are not inside a module that is compiled as a whole.

    There a watcher would see nothing, and could change what is compiled.
    """
    compiled = [clean_name(name + ".") for name, module in root.named_modules() if _is_compiled(module)]
    compiled = [outer.lstrip(".") for outer in compiled]  # of the root itself: what every name starts with
    return {name: module for name, module in found.items() if not any(name.startswith(outer) for outer in compiled)}


def before_calls(module: nn.Module, see: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> Undo:
    """Have `see(args, kwargs)` called before each call of `module`, where that is not inside a compiled region."""
    if getattr(module, "_compiled_call_impl", None) is not None:
        return _CompiledCall.of(module).watch(module, before=see)

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            see(args, kwargs)

    return module.register_forward_pre_hook(hook, with_kwargs=True).remove


def after_calls(module: nn.Module, see: Callable[[Any], None]) -> Undo:
    """Have `see(output)` called after each call of `module`, where that is not inside a compiled region."""
    if getattr(module, "_compiled_call_impl", None) is not None:
        return _CompiledCall.of(module).watch(module, after=see)

    def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not torch.compiler.is_compiling():
            see(output)

    return module.register_forward_hook(hook).remove


class _CompiledCall:
    """What a module compiled in place (`module.compile()`) calls instead: the same, between its watchers.

    Hooks of such a module are traced into its graph; this stands around the graph, which stays as it was.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self.before: list[Callable[[tuple[Any, ...], dict[str, Any]], None]] = []
        self.after: list[Callable[[Any], None]] = []

    @classmethod
    def of(cls, module: Any) -> "_CompiledCall":
        if not isinstance(module._compiled_call_impl, cls):
            module._compiled_call_impl = cls(module._compiled_call_impl)
        return module._compiled_call_impl

    def watch(self, module: Any, before: Any = None, after: Any = None) -> Undo:
        watchers, see = (self.before, before) if before is not None else (self.after, after)
        watchers.append(see)

        def undo() -> None:
            watchers.remove(see)
            if not self.before and not self.after:
                module._compiled_call_impl = self.call

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
    marks = ("_compiled_call_impl", "_compiler_ctx")  # `module.compile()`; Lightning's, of a compiled LightningModule
    return "_orig_mod" in module._modules or any(getattr(module, mark, None) is not None for mark in marks)


def _class(module: nn.Module) -> type:
    inner = next((module._modules[name] for name in _WRAPPED if module._modules.get(name) is not None), None)
    return type(module) if inner is None else _class(inner)


def _children(module: nn.Module) -> dict[str, nn.Module]:
    path = ""
    while True:
        children = [(name, child) for name, child in _named_children(module) if _has_parameters(child)]
        if len(children) != 1 or not any(_has_parameters(child) for _, child in _named_children(children[0][1])):
            return {path + name: child for name, child in children}
        path, module = f"{path}{children[0][0]}.", children[0][1]


def _named_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    inner = next((module._modules[name] for name in _WRAPPED if module._modules.get(name) is not None), None)
    return module.named_children() if inner is None else _named_children(inner)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
