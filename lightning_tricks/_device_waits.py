"""Where the host waits for the device: each read of a tensor's values, with the line of Python that makes it.

A kernel is started and the host goes on; `.item()`, `bool(x)`, `.cpu()` or `x[mask]` wait until the device has caught
up. On CUDA torch names such waits itself, anywhere else the reads of tensors are replaced for a time.
"""

import ast
import dis
import functools
import itertools
import linecache
import os
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._guards import CompileContext

from lightning_tricks._replaced import replaced

Note = Callable[[str, FrameType], None]

_WORDS = {
    "__bool__": "bool()", "__int__": "int()", "__float__": "float()", "__complex__": "complex()", "__index__": "index",
    "__repr__": "repr()", "__str__": "repr()", "__format__": "format()", "__contains__": "in", "__array__": "numpy()",
    "__getitem__": "[mask]", "__setitem__": "[mask] =", "is_nonzero": "bool()",
}  # fmt: skip
_METHODS = (
    "item", "cpu", "tolist", "numpy", "to", "nonzero", "argwhere", "is_nonzero", "equal", "allclose", "unique",
    "unique_consecutive", "masked_select", "bincount", "where", "repeat_interleave", "__bool__", "__int__", "__float__",
    "__complex__", "__index__", "__repr__", "__format__", "__contains__", "__array__", "__getitem__", "__setitem__",
)  # fmt: skip
_FUNCTIONS = (
    "nonzero", "argwhere", "is_nonzero", "equal", "allclose", "unique", "unique_consecutive", "masked_select",
    "bincount", "where", "repeat_interleave",
)  # fmt: skip
_CUDA_WAITS = ("synchronize", "Event.synchronize")  # asked for by name, of which torch's debug mode says nothing
_SAID_BY_TORCH = "called a synchronizing CUDA operation"
_LIBRARY = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")})
_INSTRUCTIONS = {"STORE_SUBSCR": "[mask] =", "BINARY_SUBSCR": "[mask]", "CONTAINS_OP": "in"}
_INDUCTOR = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "/torchinductor_")  # in the path of what the compiler has written
_GENERATED = ("<eval_with_key>", "<frozen ", "<string>")

_inside = threading.local()  # whether this thread is in a read already: `print(x)` makes several


@contextmanager
def watching_waits(note: Note, device: torch.device) -> Iterator[None]:
    """Inside the `with`, call `note(what, frame)` at each wait of the host for `device`, in any thread of the process.

    On CUDA a wait is what `torch.cuda.set_sync_debug_mode` warns of, copies from pageable memory to the device among
    it, and `torch.cuda.synchronize`. A warning that the running code hides (`warnings.simplefilter("ignore")`) is not
    seen; a wait of a C++ operator in the backward pass is told at the end of that pass. On another device it is a read,
    see `watching_reads`.

    Args:
        note: gets the call in words, such as `.item()`, and the innermost frame outside torch, this file and Python's
            library. It must read no tensor.
        device: of the training.
    """
    watching = _watching_cuda(note) if device.type == "cuda" else watching_reads(note, device.type)
    with watching:
        yield


@contextmanager
def watching_reads(note: Note, device: str = "cpu") -> Iterator[None]:
    """Inside the `with`, call `note(what, frame)` at each read by the host of a tensor on a type of device.

    Seen are methods of tensors and functions of torch whose result the host needs, or whose shape depends on values;
    not reads by torch's C++ code, such as `torch.arange(x)`, nor copies to the device. On a CPU every tensor counts as
    one of the device, but for those that stay on the host in any run: those of `lies_on_host`, the `step` of an
    optimizer, and constants while `torch.compile` compiles.

    Args:
        note: see `watching_waits`.
        device: type of the device whose tensors count.
    """
    with ExitStack() as stack:
        for owner, names in ((Tensor, _METHODS), (torch, _FUNCTIONS)):
            for name in names:
                word = _WORDS.get(name, f"{'torch' if owner is torch else ''}.{name}()")
                stack.enter_context(replaced(owner, name, _noting(name, word, getattr(owner, name), note, device)))
        yield


def _noting(name: str, word: str, read: Callable[..., Any], note: Note, device: str) -> Callable[..., Any]:
    from torch._dynamo.eval_frame import skip_code  # here, as it takes long and a training step has it already

    def noting(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or getattr(_inside, "read", False) or not _waits(name, args, kwargs, device):
            return read(*args, **kwargs)
        caller = sys._getframe(1)
        if not _is_of_host(caller):
            note(word, own_frame(caller)[0])
        _inside.read = True
        try:
            return read(*args, **kwargs)
        finally:
            _inside.read = False

    skip_code(noting.__code__)  # torch.compile may take it into a graph, but does not compile it after a graph break
    return functools.wraps(read, updated=())(noting)


def _is_of_host(caller: FrameType) -> bool:
    """Whether the value is one that lies on the host in any run."""
    is_step = caller.f_code.co_name == "_get_value" and caller.f_globals.get("__name__") == "torch.optim.optimizer"
    return is_step or CompileContext.try_get() is not None


def _waits(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], device: str) -> bool:
    """Whether this call of a method or function of `_METHODS` or `_FUNCTIONS` has to wait for a `device`."""
    tensor = args[0] if args else kwargs.get("input")
    if not isinstance(tensor, Tensor) or tensor.device.type != device or hasattr(tensor, "_lies_on_host"):
        return False
    if name == "to":
        given = (*args[1:], *kwargs.values())
        words = given if device == "cpu" else map(str, given)  # on a CPU, `.to(device)` names the device itself
        return not kwargs.get("non_blocking") and any(isinstance(each, str) and each == "cpu" for each in words)
    if name == "where":
        return len(args) + len(kwargs) == 1  # of the condition alone: its indices
    if name == "repeat_interleave":
        return isinstance(kwargs.get("repeats", args[1] if len(args) > 1 else tensor), Tensor) and (
            kwargs.get("output_size") is None
        )
    if name in ("__getitem__", "__setitem__"):
        fills = name == "__setitem__" and not isinstance(args[2], Tensor)  # a number fills by the mask, without indices
        return _has_mask(args[1]) and not fills
    return True


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts)


@contextmanager
def _watching_cuda(note: Note) -> Iterator[None]:
    before, show = torch.cuda.get_sync_debug_mode(), warnings.showwarning

    def showwarning(message: Any, category: Any, filename: str, lineno: int, *more: Any, **kwargs: Any) -> None:
        if str(message).startswith(_SAID_BY_TORCH):
            frame, inner = own_frame(sys._getframe(1))
            note(_WORDS.get(inner, f"{inner}()") if inner else call_in(frame), frame)
        else:
            show(message, category, filename, lineno, *more, **kwargs)

    def by_name(wait: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(wait)
        def waiting(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                note("synchronize()", own_frame(sys._getframe(1))[0])
            return wait(*args, **kwargs)

        return waiting

    with ExitStack() as stack:
        for name in _CUDA_WAITS:
            owner = functools.reduce(getattr, name.split(".")[:-1], torch.cuda)
            name = name.rpartition(".")[2]
            stack.enter_context(replaced(owner, name, by_name(getattr(owner, name))))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        warnings.filterwarnings("always", message=_SAID_BY_TORCH)
        stack.enter_context(replaced(warnings, "showwarning", showwarning))
        stack.callback(torch.cuda.set_sync_debug_mode, before)
        torch.cuda.set_sync_debug_mode("warn")
        yield


def lies_on_host(tensor: Tensor) -> Tensor:
    """The tensor, marked as one that lies on the host in any run: on a CPU its reads are no waits either."""
    tensor._lies_on_host = True  # type: ignore[attr-defined]
    return tensor


def own_frame(frame: FrameType) -> tuple[FrameType, str]:
    """The innermost frame, from `frame` outwards, outside torch, this file, Python's library and generated code.

    Returns:
        The frame, and the name of the function that it has called, which is empty where `frame` itself is returned.
        The outermost frame where there is none of these.
    """
    inner = ""
    while _is_foreign(frame) and frame.f_back is not None:
        if frame.f_code.co_filename != __file__ and frame.f_globals.get("__name__") != "warnings":
            inner = frame.f_code.co_name
        frame = frame.f_back
    return frame, inner


def _is_foreign(frame: FrameType) -> bool:
    file, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
    if file == __file__ or module == "torch" or module.startswith("torch."):
        return True
    in_library = file.startswith(_LIBRARY) and "site-packages" not in file and "dist-packages" not in file
    return in_library or file.startswith(_GENERATED) or _INDUCTOR in file


def call_in(frame: FrameType) -> str:
    """The call that a frame is in, in words: `.item()`, `float()`, `bool()` of a condition; by instruction and source.

    Where there is no source, the name of the instruction.
    """
    instruction = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    if "JUMP" in instruction or instruction in ("UNARY_NOT", "TO_BOOL"):
        return "bool()"
    if "FORMAT" in instruction:
        return "format()"
    if instruction in _INSTRUCTIONS:
        return _INSTRUCTIONS[instruction]
    call = _expression(frame)
    if isinstance(call, ast.Call):
        name = call.func
        is_method = isinstance(name, ast.Attribute) and ast.unparse(name.value) != "torch"
        return f".{name.attr}()" if isinstance(name, ast.Attribute) and is_method else f"{ast.unparse(name)}()"
    return "[mask]" if isinstance(call, ast.Subscript) else instruction.lower()


def _expression(frame: FrameType) -> ast.expr | None:
    """The expression that a frame is computing, where its source is there."""
    index = frame.f_lasti // 2
    line, last, start, end = next(itertools.islice(frame.f_code.co_positions(), index, None), (None,) * 4)
    if line is None or last is None or start is None or end is None:
        return None
    file = frame.f_code.co_filename
    lines = [linecache.getline(file, number).encode() for number in range(line, last + 1)]  # columns count bytes
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    try:
        return ast.parse(b"(" + b"".join(lines).strip() + b")", mode="eval").body
    except SyntaxError:
        return None
