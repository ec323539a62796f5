"""Count the FLOPs of every operator that runs, forward and backward, with recomputed FLOPs as a figure of their own."""

import functools
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import prod
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.flop_counter import FlopCounterMode

from lightning_tricks._find_modules import clean_name

_NO_PRODUCTS = ("aten", "prim", "prims", "profiler", "fsdp", "c10d", "_c10d_functional", "_c10d_functional_autograd")
_RNN = ("_cudnn_rnn", "miopen_rnn", "mkldnn_rnn_layer")  # operators of aten with products but without a formula
# Torch computes the gradient of these in another order while a dispatch mode is on: the last bits may differ.
_OTHER_GRADIENT = ("prod", "cumprod", "masked_fill")
# These read facts about a tensor and compute nothing: torch's own counter leaves them to the tensor's class as well.
_QUESTIONS = (
    "dim", "is_contiguous", "is_non_overlapping_and_dense", "is_strides_like_format", "numel", "size", "storage_offset",
    "stride",
)  # fmt: skip


class CannotCount(Exception):  # noqa: N818  not the user's error: the FLOPs can come from elsewhere
    """The module's FLOPs cannot be counted; the message names the part of the module and says why in a few words."""


# Text in torch's errors, and the cause in plain words.
_IN_WORDS = {
    "DataDependent": "its work depends on the values of a tensor",
    "DynamicOutputShape": "its shapes depend on the values of a tensor",
    "Please convert all Tensors to FakeTensors": "it uses tensors that are no parameters or buffers of the module",
}


def in_words(error: Exception) -> str:
    """The reason why a copy without data cannot run, in plain words; for an unknown error, its first line."""
    text = f"{type(error).__name__}: {error}".strip().removesuffix(":")
    return next((words for name, words in _IN_WORDS.items() if name in text), text.partition("\n")[0])


class FlopCounter(TorchDispatchMode):
    """Adds up the FLOPs of the products that run while it is entered.

    Code that `torch.compile` has compiled runs as it would without this mode, and hides most of its operators: count
    with compilation off.

    Args:
        root: the module whose parts `part_in` names.

    Attributes:
        uncounted: operators without a known formula, and for each the part of the module that ran it first.
        failure: why not everything could be counted; None if everything could.
    """

    supports_higher_order_operators = True

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.uncounted: dict[str, str] = {}
        self.failure: CannotCount | None = None
        self._model = self._recompute = 0
        self._formulas = FlopCounterMode(display=False, custom_mapping=_more_formulas()).flop_registry
        self._names = {id(part): clean_name(f"{name}.").rstrip(".") for name, part in root.named_modules()}
        self._names[id(root)] = type(root).__name__
        self._counting = self._on_copy = False

    def __enter__(self) -> Self:
        """Count from here on: where tensors without data are in use already, they are the module's own."""
        self._on_copy = detect_fake_mode() is not None
        return super().__enter__()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let `torch.compile` compile under this mode, as it would without it."""
        return True

    @property
    def flops(self) -> tuple[int, int]:
        """FLOPs of forward and backward pass, and FLOPs that activation checkpointing spent a second time.

        Raises:
            CannotCount: not everything could be counted.
        """
        if self.failure is not None:
            raise self.failure
        return self._model, self._recompute

    def part_in(self, frames: Iterable[FrameType]) -> str:
        """The path of the first part of the module that runs in `frames`, without wrappers; else `autograd`."""
        parts = (id(frame.f_locals.get("self")) for frame in frames)
        return next((self._names[part] for part in parts if part in self._names), "autograd")

    def running_part(self) -> str:
        """The part of the module that calls this."""
        return self.part_in(frame for frame, _ in traceback.walk_stack(sys._getframe()))

    @contextmanager
    def counting(self, wanted: bool = True) -> Iterator[None]:
        """Count inside the `with` if `wanted`, else pause counting; can be nested.

        After a failure nothing is counted any more, because that could change a gradient.
        """
        before, wanted = self._counting, wanted and self.failure is None
        if before and not wanted and _get_current_dispatch_mode() is not self:  # only the last mode can be left
            self.failure = self.failure or CannotCount("training_step has entered another dispatch mode")
            wanted = True
        if wanted != before:
            self._switch(wanted)
        try:
            yield
        finally:
            if wanted != before:
                self._switch(before)

    def _switch(self, on: bool) -> None:
        self._counting = on
        if on:
            self.__enter__()
        else:
            self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and count it."""
        kwargs = kwargs or {}
        packet = getattr(func, "_overloadpacket", func)
        # A DTensor calls the operators on its shard next, which are the work of this device.
        if any(issubclass(kind, DTensor) for kind in types) or _is_question(packet):
            return NotImplemented
        if not self._on_copy and any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)  # a DTensor asks once for the shape of a result, and computes nothing
        formula = self._formulas.get(packet)
        if formula is None and _is_composite(func):  # under inference_mode operators arrive whole
            with self:
                return func.decompose(*args, **kwargs)
        if packet is torch.ops.aten._grouped_mm and isinstance(args[0], FakeTensor):
            out = _grouped_output(*args, **kwargs)  # torch has shapes for bf16 only
        else:
            if _has_other_gradient(packet, args):
                self.failure = CannotCount(f"counting would change the last bits of the gradient of {packet.__name__}")
            out = func(*args, **kwargs)
        self._count(func, formula, args, kwargs, out)
        return out

    def _count(self, func: Any, formula: Callable[..., Any] | None, args: Any, kwargs: Any, out: Any) -> None:
        if formula is None:
            if _may_multiply(func, args) and str(func) not in self.uncounted:
                self.uncounted[str(func)] = self.running_part()
            return
        try:
            flops = int(formula(*args, **kwargs, out_val=out))
        except Exception as error:  # an operator that runs must not fail because it cannot be counted
            self.failure = CannotCount(f"{self.running_part()}: {in_words(error)}")
            return
        if _is_recompute():
            self._recompute += flops
        else:
            self._model += flops


def _is_question(packet: Any) -> bool:
    namespace, _, name = getattr(packet, "_qualified_op_name", "").partition("::")
    return (namespace == "aten" and name.removeprefix("sym_") in _QUESTIONS) or (namespace, name) == ("prim", "layout")


@functools.cache
def _is_composite(func: Any) -> bool:
    """Whether torch runs other operators in place of this one, on CPUs and on CUDA devices."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return False
    keys = ("CompositeImplicitAutograd", "CPU", "CUDA")
    kernels = [torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in keys]
    return kernels == [True, False, False]


def _has_other_gradient(packet: Any, args: Any) -> bool:
    if getattr(packet, "_qualified_op_name", "").removeprefix("aten::").rstrip("_") not in _OTHER_GRADIENT:
        return False
    inputs = args[2:] if packet.__name__.startswith("masked_fill") else args[:1]  # the fill value; the tensor
    has_gradient = any(isinstance(arg, Tensor) and arg.requires_grad for arg in inputs)
    return has_gradient and torch.is_grad_enabled() and not isinstance(args[0], FakeTensor)


def _may_multiply(func: Any, args: Any) -> bool:
    """Whether an operator without a formula may compute products: one of `_RNN`, or another package's on matrices."""
    if isinstance(func, torch._ops.OpOverload) and func.namespace in _NO_PRODUCTS:
        return func._overloadpacket.__name__ in _RNN
    return any(isinstance(arg, Tensor) and arg.is_floating_point() and arg.dim() > 1 for arg in args)


def _is_recompute() -> bool:
    """Whether a forward pass runs inside a backward pass, as activation checkpointing does.

    Autograd computes its own products with gradients off, unless it computes a second derivative; then it keeps its
    graph, and only the call stack tells.
    """
    if torch._C._current_graph_task_id() == -1 or not torch.is_grad_enabled():
        return False
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        return True
    return any("checkpoint" in frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe()))


def _more_formulas() -> dict[Any, Any]:
    """Formulas by operator. Attention counts the same in every kernel; torch has no formula for grouped products."""
    formulas: dict[str, Callable[..., int]] = {
        "aten::_grouped_mm": _grouped,
        "aten::_scaled_grouped_mm": _grouped,
        "aten::_scaled_grouped_mm_v2": _grouped,  # of a newer torch, as the next
        "aten::_scaled_mm_v2": _grouped,
        "transformers::grouped_mm_fallback": _grouped,  # where torch has no grouped product
        "transformers::grouped_mm_fallback_backward": lambda *shapes, **options: 2 * _grouped(*shapes, **options),
    }
    for kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"):
        formulas[f"aten::_scaled_dot_product_{kernel}"] = _attention
        formulas[f"aten::_scaled_dot_product_{kernel}_backward"] = _attention_backward
    found = {}
    for name, formula in formulas.items():
        namespace, _, operator = name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), operator, None)
        if packet is not None:
            found[packet] = formula
    return found


def _attention(query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return int(2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1]))


def _attention_backward(grad: Any, *shapes: Any, **options: Any) -> int:
    return 2 * _attention(*shapes, **options)


def _grouped(a: Any, b: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """FLOPs of a product in groups, in which each row, column or inner index belongs to one group.

    Shapes: rows in groups (M, K) x (G, K, N); columns in groups (G, M, K) x (K, N); inner index in groups
    (M, K) x (K, N); one product for each group (G, M, K) x (G, K, N).
    """
    rows = a[-2] if len(a) > len(b) else prod(a[:-1])
    return int(2 * rows * a[-1] * b[-1])


def _grouped_output(a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    groups = (len(a) if a.dim() == 3 else len(offs),) if a.dim() == b.dim() else ()
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]), dtype=out_dtype or a.dtype)
