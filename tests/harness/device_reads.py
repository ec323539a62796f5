"""Each read of a tensor's values by the host, such as `.item()`: on a GPU the host would wait there for the device."""

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.eval_frame import skip_code
from torch._guards import CompileContext

from lightning_tricks._core.replaced import replaced

Note = Callable[[str, FrameType], None]

_WORDS = {
    "__bool__": "bool()", "__int__": "int()", "__float__": "float()", "__complex__": "complex()", "__index__": "index",
    "__repr__": "repr()", "__format__": "format()", "__contains__": "in", "__array__": "numpy()",
    "__getitem__": "[mask]", "__setitem__": "[mask] =", "is_nonzero": "bool()",
}  # fmt: skip
_FUNCTIONS = (
    "nonzero", "argwhere", "is_nonzero", "equal", "allclose", "unique", "unique_consecutive", "masked_select",
    "bincount", "where", "repeat_interleave",
)  # fmt: skip
_METHODS = (
    *_FUNCTIONS, "item", "cpu", "tolist", "numpy", "to", "__bool__", "__int__", "__float__", "__complex__", "__index__",
    "__repr__", "__format__", "__contains__", "__array__", "__getitem__", "__setitem__",
)  # fmt: skip

_inside = threading.local()  # whether this thread is in a read already: `print(x)` makes several


@contextmanager
def watching_reads(note: Note) -> Iterator[None]:
    """Inside the `with`, call `note(what, frame)` at each read of a tensor's values, in any thread of the process.

    Seen are methods of tensors and functions of torch whose result the host needs, or whose shape depends on values;
    not reads by torch's C++ code. An optimizer's `step` and constants of the compiler lie on the host in any run, and
    are no reads.

    Args:
        note: gets the call in words, such as `.item()`, and the innermost frame outside torch.
    """
    with ExitStack() as stack:
        for owner, names in ((Tensor, _METHODS), (torch, _FUNCTIONS)):
            for name in names:
                word = _WORDS.get(name, f"{'torch' if owner is torch else ''}.{name}()")
                stack.enter_context(replaced(owner, name, _noting(name, word, getattr(owner, name), note)))
        yield


def _noting(name: str, word: str, read: Callable[..., Any], note: Note) -> Callable[..., Any]:
    def noting(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or getattr(_inside, "read", False) or not _reads(name, args, kwargs):
            return read(*args, **kwargs)
        if not _is_of_host(sys._getframe(1)):
            note(word, _own_frame(sys._getframe(1)))
        _inside.read = True
        try:
            return read(*args, **kwargs)
        finally:
            _inside.read = False

    skip_code(noting.__code__)  # torch.compile may take it into a graph, but does not compile it after a graph break
    return functools.wraps(read, updated=())(noting)


def _is_of_host(caller: FrameType) -> bool:
    is_step = caller.f_code.co_name == "_get_value" and caller.f_globals.get("__name__") == "torch.optim.optimizer"
    return is_step or CompileContext.try_get() is not None


def _reads(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call of a method or function reads values on a device."""
    tensor = args[0] if args else kwargs.get("input")
    if not isinstance(tensor, Tensor) or tensor.device.type != "cpu":
        return False
    if name == "to":  # `.to(device)` names the device itself here, and is none
        return not kwargs.get("non_blocking") and "cpu" in [x for x in (*args[1:], *kwargs.values()) if type(x) is str]
    if name == "where":
        return len(args) + len(kwargs) == 1  # of the condition alone: its indices
    if name == "repeat_interleave":
        repeats = kwargs.get("repeats", args[1] if len(args) > 1 else tensor)
        return isinstance(repeats, Tensor) and kwargs.get("output_size") is None
    if name in ("__getitem__", "__setitem__"):
        fills = name == "__setitem__" and not isinstance(args[2], Tensor)  # a number fills by the mask, without indices
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return not fills and any(isinstance(part, Tensor) and part.dtype == torch.bool for part in index)
    return True


def _own_frame(frame: FrameType) -> FrameType:
    """The innermost frame, from `frame` outwards, outside torch; the outermost one where there is none."""
    while f"{frame.f_globals.get('__name__')}.".startswith("torch.") and frame.f_back is not None:
        frame = frame.f_back
    return frame
