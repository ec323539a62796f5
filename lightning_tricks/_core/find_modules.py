"""Find a model's parts without knowing the model: its repeated blocks, and modules by a pattern of their name."""

import itertools
import re
from collections.abc import Sequence

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.spectral_norm import SpectralNorm

from lightning_tricks._core.errors import UsageError

_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_WRAPPERS = re.compile(rf"(?<![^.])(?:{'|'.join(_WRAPPED)})\.")


def clean_name(name: str) -> str:
    """`name` as the plain model would have it, without the prefixes of compile, checkpointing and FSDP wrappers."""
    return _WRAPPERS.sub("", name)


def whole_of(module: nn.Module) -> nn.Module:
    """`module` before this rank dropped the layers of other pipeline stages, on the meta device; else `module`.

    What a parameter is, and which blocks are alike, follows from the whole model. Names are the same.
    """
    whole: nn.Module = vars(module).get("_whole_module", module)
    return whole


def names_of_others(module: nn.Module) -> set[str]:
    """The names of the weights and buffers that other pipeline stages have; none without stages."""
    return set(map(clean_name, whole_of(module).state_dict())) - set(map(clean_name, module.state_dict()))


def parameters_by_name(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of `module` by each of their plain names; tied ones have several."""
    return {clean_name(name): parameter for name, parameter in module.named_parameters(remove_duplicate=False)}


def named_submodules(module: nn.Module) -> dict[str, nn.Module]:
    """All modules below `module`, by their names without wrappers' prefixes.

    A wrapped module is represented by its outermost wrapper, whose call is outside of the compiled code, and which runs
    once where the checkpointed module runs twice. FSDP1's wrapper is the exception: it gathers parameters inside.
    """
    found: dict[str, nn.Module] = {}
    for name, submodule in module.named_modules():
        name = clean_name(name + ".").rstrip(".")
        if name and "_fsdp_wrapped_module" not in submodule._modules:
            found.setdefault(name, submodule)
    return found


def repeated_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks of `module` by name, in their order; none where nothing is repeated.

    They are the members of every outermost ModuleList or Sequential of at least two modules of one class, if two
    modules of this class are alike (the parameters that both have are of the same shapes). Single layers count only
    if no such list has members of several layers.

    So both halves of an encoder-decoder have blocks, also of two classes. A list inside a block, such as its experts,
    is no list of blocks. The stages of a U-Net or a Swin differ in width: their blocks are members of the lists inside.
    Of a pipeline stage: those of the whole model that this rank has.
    """
    modules = named_submodules(module)
    if (whole := whole_of(module)) is not module:
        return {name: modules[name] for name in repeated_blocks(whole) if name in modules}
    lists = _lists_by_class(modules)
    repeated = {cls: found for cls, found in lists.items() if _two_alike([modules[n] for ns in found for n in ns])}
    if any(_is_composed(modules[found[0][0]]) for found in repeated.values()):
        repeated = {cls: found for cls, found in repeated.items() if _is_composed(modules[found[0][0]])}
    names = {name for found in repeated.values() for members in found for name in members}
    return {name: modules[name] for name in modules if name in names and not _is_inside(name, names)}


def find_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """`repeated_blocks`; if there are none, the children with parameters of the first module that has several."""
    return repeated_blocks(module) or _children(module)


def bound_to_buffers(module: nn.Module) -> list[nn.Parameter]:
    """The own parameters of a layer that computes with them and floating-point buffers: torch wants one dtype for both.

    Such are batch norm, by its running statistics, and layers with spectral norm, by their singular vectors; and layers
    that say so by a true attribute `stays_fp32`, as a router of experts does.
    """
    parametrizations = getattr(module, "parametrizations", None)
    parts = [module] if parametrizations is None else [module, parametrizations]
    found = [parameter for part in parts for parameter in part.parameters(recurse=part is not module)]
    by_statistics = getattr(module, "running_mean", None) is not None or getattr(module, "stays_fp32", False)
    by_hook = any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values())
    by_parametrization = any(buffer.is_floating_point() for part in parts[1:] for buffer in part.buffers())
    return found if by_statistics or by_hook or by_parametrization else []


def check_pattern(pattern: str, option: str) -> None:
    """Refuse a pattern that is no regular expression; `option` names it to the user."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise UsageError(f"{option}: pattern {pattern!r} is no regular expression: {error}") from None


def match_modules(module: nn.Module, patterns: Sequence[str], option: str) -> dict[str, nn.Module]:
    """The submodules whose whole name one of `patterns`, regular expressions, matches; of a pipeline stage its own.

    Raises:
        UsageError: a pattern that matches none, or is no regular expression; `option` names it to the user.
    """
    modules, whole = named_submodules(module), named_submodules(whole_of(module))
    chosen: set[str] = set()
    for pattern in patterns:
        check_pattern(pattern, option)
        names = {name for name in whole if re.fullmatch(pattern, name)}
        if not names:
            example = next(iter(find_blocks(module)), "model")
            raise UsageError(f"{option}: pattern {pattern!r} matches no submodule: give whole names such as {example}")
        chosen |= names
    return {name: submodule for name, submodule in modules.items() if name in chosen}


def _lists_by_class(modules: dict[str, nn.Module]) -> dict[type, list[list[str]]]:
    """The names of the members of each list of at least two modules of one class with parameters."""
    lists: dict[type, list[list[str]]] = {}
    for name, container in modules.items():
        children = list(container.children()) if isinstance(container, (nn.ModuleList, nn.Sequential)) else []
        classes: set[type] = {type(_unwrapped(child)) for child in children}
        if len(children) > 1 and len(classes) == 1 and _has_parameters(children[0]):
            lists.setdefault(classes.pop(), []).append([f"{name}.{key}" for key, _ in container.named_children()])
    return lists


def _two_alike(members: list[nn.Module]) -> bool:
    """Whether two modules are alike: they share names of parameters, and these have the same shapes."""
    shapes = [{clean_name(name): _shape(param) for name, param in member.named_parameters()} for member in members]
    return any(
        all(one[name] == other[name] for name in shared)
        for one, other in itertools.combinations(shapes, 2)
        if (shared := one.keys() & other.keys())
    )


def _shape(param: nn.Parameter) -> tuple[int, ...] | None:
    # a lazy parameter has no shape yet; FSDP1's are flat, and this rank has a part of each
    return None if is_lazy(param) or getattr(param, "_fsdp_flattened", False) else tuple(param.shape)


def _is_composed(module: nn.Module) -> bool:
    return any(_has_parameters(child) for child in _unwrapped(module).children())


def _is_inside(name: str, names: set[str]) -> bool:
    """Whether a module above the one called `name` is one of `names`."""
    parts = name.split(".")
    return any(".".join(parts[:count]) in names for count in range(1, len(parts)))


def _children(module: nn.Module) -> dict[str, nn.Module]:
    path = ""
    while True:
        children = [(name, child) for name, child in _unwrapped(module).named_children() if _has_parameters(child)]
        if len(children) != 1 or not _is_composed(children[0][1]):
            return {path + name: child for name, child in children}
        path, module = f"{path}{children[0][0]}.", children[0][1]


def _unwrapped(module: nn.Module) -> nn.Module:
    """The module inside the wrappers of compile, checkpointing and FSDP."""
    children = dict(module.named_children())
    inner = next((children[name] for name in _WRAPPED if name in children), None)
    return module if inner is None else _unwrapped(inner)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
