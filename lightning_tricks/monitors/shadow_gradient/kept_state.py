"""What a training step may change besides gradients: kept, so that the step can run again and leave no trace.

Knows no Trainer. A step runs again on copies of all tensors, and every Python value is put back afterwards.
"""

import collections
import enum
import random
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_tricks._random_state import generator_state, random_state, set_generator_state, set_random_state

LARGEST_BYTES = 2**26  # tensors and arrays above it are taken for data, unless they are buffers
_MOST_ITEMS = 1_000_000  # of a list or a dict, likewise
_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, type)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)
_ITERATORS = {cls.__iter__ for cls in (list, dict, set, collections.deque, collections.OrderedDict)}
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
# Objects of these packages are left alone, unless they are modules: a Trainer, loggers, optimizers, locks.
_PACKAGES = frozenset(
    {
        "lightning", "pytorch_lightning", "lightning_fabric", "lightning_tricks", "lightning_utilities", "torch",
        "functools", "logging", "threading", "weakref", "abc", "typing", "collections", "contextlib", "numpy",
        "builtins", "enum",
    }
)  # fmt: skip


class KeptState:
    """The state of a module and of its process at one moment.

    That is: the random states; all attributes of the module, its submodules and the objects that these hold; the
    attributes of their classes; the global variables of the files in which the classes stand. Values inside lists,
    dicts, sets and deques count. Not kept are files, other processes and objects of Lightning and torch.

    Args:
        module: the root.
        copies: also copy the tensors and arrays that are no parameters; needed for `put_back(on_copies=True)`.
    """

    def __init__(self, module: nn.Module, copies: bool) -> None:
        self._random = random_state()
        self._generators: list[tuple[Any, dict[str, Any]]] = []
        self._containers: list[_Container] = []
        self._copies: dict[int, Any] = {}
        self._seen: dict[int, Any] = {}  # by `id`, and kept alive for it
        self._wants_copies = copies
        self._walk(module)

    def put_back(self, on_copies: bool = False, instead: Mapping[int, Tensor] | None = None) -> None:
        """Restore the content of every container.

        Args:
            on_copies: put copies in place of the tensors, so that what writes to these leaves them alone.
            instead: other tensors for some, such as parameters, by the `id` of those that they replace.
        """
        set_random_state(self._random)
        for generator, state in self._generators:
            set_generator_state(generator, state)
        others = {**(self._copies if on_copies else {}), **(instead or {})}
        for container in self._containers:
            container.put_back(others)

    def _walk(self, root: Any) -> None:
        waiting = [root]
        while waiting:
            value = waiting.pop()
            if isinstance(value, (*_PLAIN, *_FUNCTIONS)) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            waiting += self._visit(value)

    def _visit(self, value: Any) -> Iterable[Any]:
        """Keep one object; gives its parts."""
        if isinstance(value, Tensor):
            if self._wants_copies and not isinstance(value, nn.Parameter) and not is_lazy(value):
                self._keep_tensor(value, LARGEST_BYTES)
            return ()
        if isinstance(value, np.ndarray):
            if self._wants_copies and not isinstance(value, np.memmap) and value.nbytes <= LARGEST_BYTES:
                self._copies[id(value)] = value.copy()
            return ()
        if isinstance(value, _GENERATORS):
            self._generators.append((value, generator_state(value)))
            return ()
        if isinstance(value, nn.Module):
            return self._visit_module(value)
        if isinstance(value, tuple):
            return value  # its tensors are copied only where a list, a dict or an attribute holds them
        if isinstance(value, (list, dict, set, collections.deque)):
            if len(value) > _MOST_ITEMS or type(value).__iter__ not in _ITERATORS or _is_foreign(value):
                return ()
            self._containers.append(_Container(value))
            return list(value.values()) if isinstance(value, dict) else list(value)
        if not _is_foreign(value) and hasattr(value, "__dict__"):
            return [vars(value), *self._of_class(type(value))]
        return ()

    def _visit_module(self, module: nn.Module) -> Iterable[Any]:
        for buffer in module._buffers.values():
            if buffer is not None and not is_lazy(buffer) and self._wants_copies:
                self._seen[id(buffer)] = buffer
                self._keep_tensor(buffer, None)
        own = vars(module)
        self._seen[id(own)] = own
        self._containers.append(_Container(own))
        parts = [value for name, value in own.items() if "_hooks" not in name]
        return [*parts, *self._of_class(type(module))]

    def _keep_tensor(self, tensor: Tensor, largest: int | None) -> None:
        if largest is None or tensor.nbytes <= largest:
            copy = tensor.detach().clone()
            self._copies[id(tensor)] = copy.requires_grad_() if tensor.is_leaf and tensor.requires_grad else copy

    def _of_class(self, cls: type) -> Iterable[Any]:
        """The attributes of a class and of its bases, and the global variables of their files."""
        for each in cls.__mro__:
            if _package(each) in _PACKAGES or id(each) in self._seen:
                continue
            self._seen[id(each)] = each
            names = vars(sys.modules[each.__module__]) if each.__module__ in sys.modules else {}
            if id(names) not in self._seen:
                self._seen[id(names)] = names
                self._containers.append(_Container(names))
                yield from [value for name, value in names.items() if not name.startswith("__")]
            self._containers.append(_Container(each))
            yield from [value for name, value in vars(each).items() if not name.startswith("__")]


class _Container:
    """An object that contains others, and its content: a list, a dict, a set, a deque or a class."""

    __slots__ = ("content", "owner")

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.content: Any = dict(vars(owner)) if isinstance(owner, type) else _copied(owner)

    def put_back(self, others: Mapping[int, Any]) -> None:
        owner, content = self.owner, self.content
        if isinstance(owner, type):
            for name in [name for name in vars(owner) if name not in content]:
                delattr(owner, name)
            for name, value in content.items():
                value = others.get(id(value), value)
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)
        elif isinstance(owner, dict):
            for name in [name for name in owner if name not in content]:
                del owner[name]
            if list(owner) == list(content):
                for name, value in content.items():
                    value = others.get(id(value), value)
                    if owner[name] is not value:
                        owner[name] = value
            else:  # something has gone: all again, for the order
                owner.clear()
                owner.update({name: others.get(id(value), value) for name, value in content.items()})
        else:
            wanted = [others.get(id(value), value) for value in content]
            if len(owner) == len(wanted) and all(a is b for a, b in zip(owner, wanted, strict=True)):
                return
            owner.clear()
            (owner.update if isinstance(owner, set) else owner.extend)(wanted)


def _copied(owner: Any) -> Any:
    return dict(owner) if isinstance(owner, dict) else set(owner) if isinstance(owner, set) else list(owner)


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _is_foreign(value: Any) -> bool:
    return any(
        _package(cls) in _PACKAGES - {"builtins", "abc", "typing", "collections"} for cls in type(value).__mro__[:-1]
    )
