"""FLOPs of the training step of a module that we never saw, counted while the step really runs.

What is recomputed is a figure of its own. Compiled code hides its operators, so it is refused.
"""

import functools
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.flop_counter import FlopCounterMode

from lightning_tricks._core.find_modules import clean_name
from lightning_tricks._core.replaced import replaced

__all__ = ["count_flops"]

_NO_PRODUCTS = ("aten", "prim", "prims", "profiler", "fsdp", "c10d", "_c10d_functional", "_c10d_functional_autograd")
_RNN = ("_cudnn_rnn", "miopen_rnn", "mkldnn_rnn_layer")  # operators of aten with products but without a formula
# Torch computes the gradient of these in another order while a dispatch mode is on: the last bits would differ. They
# were found by running torch's own samples of every operator (`op_db`), with a mode and without.
_OTHER_GRADIENT = ("ProdBackward", "CumprodBackward", "MaskedFillBackward")
_COMPILED_NODE = "CompiledFunctionBackward"  # the autograd node of compiled code (AOTAutograd)
# These read facts about a tensor and compute nothing: torch's own counter leaves them to the tensor's class as well.
_QUESTIONS = (
    "dim", "is_contiguous", "is_non_overlapping_and_dense", "is_strides_like_format", "numel", "size", "storage_offset",
    "stride",
)  # fmt: skip


class CannotCount(Exception):  # noqa: N818  not the user's error: the FLOPs can come from elsewhere
    """The module's FLOPs cannot be counted; the message says why in a few words."""


class FlopCounter(TorchDispatchMode):
    """Adds up the FLOPs of the products that run while it is entered.

    Code that `torch.compile` has compiled runs as it would without this mode. It hides operators, so it is a failure:
    compiled modules are found at the start, other compiled code by its nodes in the graph of a backward pass.

    Args:
        root: the module whose compiled parts are looked for.

    Attributes:
        uncounted: the names of operators without a known formula, in the order of their first calls.
        failure: why not everything could be counted; None if everything could.
        went_backward: a backward pass has run.
    """

    supports_higher_order_operators = True

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.went_backward = False
        self.uncounted: dict[str, None] = {}
        self.failure: CannotCount | None = None
        self._model = self._recompute = 0
        self._formulas = FlopCounterMode(display=False, custom_mapping=_more_formulas()).flop_registry
        self._counting = False
        self._left_out: set[Any] = set()  # autograd nodes of these
        for name, part in root.named_modules():
            if part._compiled_call_impl is not None or "_orig_mod" in part._modules:  # by `compile`, `torch.compile`
                self.fail(f"{clean_name(f'{name}.').rstrip('.') or type(root).__name__} is compiled")

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

    def fail(self, reason: str) -> None:
        """Give no figure, for this reason or an earlier one."""
        self.failure = self.failure or CannotCount(reason)

    @contextmanager
    def counting(self, wanted: bool = True) -> Iterator[None]:
        """Count inside the `with` if `wanted`, else pause counting; can be nested.

        After a failure nothing is counted any more, because that could change a gradient.
        """
        before, wanted = self._counting, wanted and self.failure is None
        if before and not wanted and _get_current_dispatch_mode() is not self:  # only the last mode can be left
            self.fail("training_step has entered another dispatch mode")
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

    def before_backward(self, outputs: Any) -> None:
        """To be called before a backward pass: leaves out the gradients that would differ, which have no products."""
        if not self._counting:
            return
        self.went_backward = True
        nodes = [output.grad_fn if isinstance(output, Tensor) else output.node for output in outputs]
        seen: set[Any] = set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen or node in self._left_out:
                continue
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            if type(node).__name__ == _COMPILED_NODE:
                self.fail("it calls compiled code")
            if node.name().startswith(_OTHER_GRADIENT):
                self._left_out.add(node)
                paused = ExitStack()
                node.register_prehook(lambda _, paused=paused: paused.enter_context(self.counting(False)) and None)
                node.register_hook(lambda *_, paused=paused: paused.close())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and count it."""
        kwargs = kwargs or {}
        packet = getattr(func, "_overloadpacket", func)
        # A DTensor calls the operators on its shard next, which are the work of this device.
        if any(issubclass(kind, DTensor) for kind in types) or _is_question(packet):
            return NotImplemented
        # a DTensor asks once for the shape of a result, and computes nothing
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)
        formula = self._formulas.get(packet)
        if formula is None and _is_composite(func):  # under inference_mode operators arrive whole
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        self._count(func, formula, args, kwargs, out)
        return out

    def _count(self, func: Any, formula: Callable[..., Any] | None, args: Any, kwargs: Any, out: Any) -> None:
        if formula is None:
            if _may_multiply(func, args):
                self.uncounted[str(func)] = None
            return
        try:
            flops = int(formula(*args, **kwargs, out_val=out))
        except Exception as error:  # an operator that runs must not fail because it cannot be counted
            reason = str(error).partition("\n")[0]
            self.fail(f"{func}: {reason}")
            return
        if _is_recompute(func):
            self._recompute += flops
        else:
            self._model += flops


@contextmanager
def count_flops(module: nn.Module) -> Iterator[FlopCounter]:
    """Count the FLOPs of all forward and backward passes inside the `with`. Changes no result.

    The counter's `flops` are those of the model and those of activation checkpointing, which computes a second time;
    work that a fused attention kernel repeats inside itself is in neither figure. Linear layers, convolutions, grouped
    products (of experts) and attention are counted; attention counts in full, masked or not. A sharded module counts
    the work of this device.

    Args:
        module: names the parts in messages.

    Raises:
        CannotCount: by `counter.flops`, where code is compiled, which hides its operators.

    Source: https://github.com/pytorch/pytorch/blob/main/torch/utils/flop_counter.py.
    """
    counter = FlopCounter(module)
    with _backward_seen(counter), counter.counting():
        yield counter


@contextmanager
def counting_real_step(trainer: Any, module: nn.Module) -> Iterator[FlopCounter]:
    """As `count_flops`, in `training_step` and in the backward passes that a Trainer runs inside the `with`.

    The Trainer's strategy calls both, so its methods are replaced meanwhile. Matrix products of the optimizer are not
    counted. Each rank counts its own work.
    """
    counter, strategy = FlopCounter(module), trainer.strategy
    step = strategy.optimizer_step

    def optimizer_step(optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        with counter.counting(False):
            return step(optimizer, counter.counting()(closure), *args, **kwargs)

    with (
        replaced(strategy, "training_step", counter.counting()(strategy.training_step)),
        replaced(strategy, "backward", counter.counting()(strategy.backward)),
        replaced(strategy, "optimizer_step", optimizer_step),
        _backward_seen(counter),
    ):
        yield counter


@contextmanager
def _backward_seen(counter: FlopCounter) -> Iterator[None]:
    """Tell the counter of backward passes."""
    run_backward: Any = getattr(torch.autograd, "_engine_run_backward", None)  # of `torch.autograd.backward`, `grad`
    if run_backward is None:
        counter.fail("this version of torch does not tell when a backward pass begins")

    def engine_run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        counter.before_backward(outputs)
        return run_backward(outputs, *args, **kwargs)

    with replaced(torch.autograd, "_engine_run_backward", engine_run_backward):
        yield


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


def _may_multiply(func: Any, args: Any) -> bool:
    """Whether an operator without a formula may compute products: one of `_RNN`, or another package's on matrices."""
    if isinstance(func, torch._ops.OpOverload) and func.namespace in _NO_PRODUCTS:
        return func._overloadpacket.__name__ in _RNN
    return any(isinstance(arg, Tensor) and arg.is_floating_point() and arg.dim() > 1 for arg in args)


def _is_recompute(func: Any) -> bool:
    """Whether a forward pass runs inside a backward pass, as activation checkpointing does.

    Autograd computes its own products with gradients off, unless it computes a second derivative; then it keeps its
    graph, and only the call stack tells. Our operator for experts, which torch runs with gradients off, has another one
    for its gradients.
    """
    if torch._C._current_graph_task_id() == -1:
        return False
    if str(func).startswith("lightning_tricks.grouped_product."):
        return True
    if not torch.is_grad_enabled():
        return False
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        return True
    return any("checkpoint" in frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe()))


def _more_formulas() -> dict[Any, Any]:
    """Formulas by operator. Attention counts the same in every kernel; torch has no formula for grouped products."""
    formulas: dict[str, Callable[..., int]] = {
        "lightning_tricks::grouped_product": lambda rows, weight, *_, **__: 2 * prod(rows) * weight[-2],
        "lightning_tricks::grouped_product_backward": lambda _, rows, weight, *__, **___: 4 * prod(rows) * weight[-2],
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
    formulas["torch_attn::_varlen_attn"] = _varlen_attention
    formulas["torch_attn::_varlen_attn_backward"] = lambda grad, *shapes, **_: (
        2 * _varlen_attention(*shapes[:3], *shapes[5:])  # without the output and its sums
    )
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


def _varlen_attention(query: Any, key: Any, value: Any, *others: Any, out_shape: Any = None, **_: Any) -> int:
    """Of rows laid one after the other, (tokens, heads, head_dim); `others[3]` is the length of a row."""
    return int(2 * prod(query[:-1]) * others[3] * (query[-1] + value[-1]))


def _grouped(a: Any, b: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """FLOPs of a product in groups, in which each row, column or inner index belongs to one group.

    Shapes: rows in groups (M, K) x (G, K, N); columns in groups (G, M, K) x (K, N); inner index in groups
    (M, K) x (K, N); one product for each group (G, M, K) x (G, K, N).
    """
    rows = a[-2] if len(a) > len(b) else prod(a[:-1])
    return int(2 * rows * a[-1] * b[-1])
