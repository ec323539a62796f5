"""Find a model's parts without knowing the model: its repeated blocks, and modules by a pattern of their name."""

import re
from collections.abc import Iterator, Sequence

from torch import nn

from lightning_tricks._errors import UsageError
from lightning_tricks.optim import clean_name

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


def repeated_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks of `module` by name, in their order; none where nothing is repeated.

    They are the members of every ModuleList or Sequential that holds at least two modules of one class with
    parameters; of several such classes, the one with the most members. A list inside another one's member, such as the
    experts of a layer, does not count.
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
    return {name: modules[name] for name in max(lists.values(), key=len, default=[])}


def find_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """`repeated_blocks`; without such, the children that have parameters, of the first module with more than one."""
    return repeated_blocks(module) or _children(module)


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
