"""Run a module as plain torch would: in fp32, without fp8, compile, recomputation, and the hooks of watchers and FSDP2.

Knows no Trainer.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules import module as torch_module
from torch.utils import checkpoint as checkpointing
from torch.utils._python_dispatch import _disable_current_modes

from lightning_tricks._replaced import replaced

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_LEFT_OUT = ("lightning_tricks.", "torch.distributed.")  # hooks from here watch, gather or shard
_HALF = (torch.float16, torch.bfloat16)


def to_fp32(value: Any) -> Any:
    """A tensor of 16 bits in fp32; anything else itself."""
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value


def fp32_copy(parameter: Any, device: torch.device) -> Tensor:
    """A parameter's values in memory of their own, whole and in 32 bits at least: a leaf with the same tensor hooks.

    For shards every rank must call.
    """
    values = parameter.detach()
    if hasattr(values, "full_tensor"):
        values = _plain_shards(values).full_tensor().to(device)
    copy = values.to(torch.float32) if values.dtype in _HALF else values.clone()
    copy.requires_grad_(parameter.requires_grad)
    for hook in (parameter._backward_hooks or {}).values():
        copy.register_hook(hook)
    return copy


def _plain_shards(values: Any) -> Any:
    """Of a weight that FSDP2 would gather in fp8, a class of torchao's: the shards that it wraps."""
    shard = values._local_tensor
    if not hasattr(shard, "fsdp_pre_all_gather"):
        return values
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        shard._tensor, values.device_mesh, values.placements, run_check=False, shape=values.shape,
        stride=values.stride(),
    )  # fmt: skip


@contextmanager
def plain_run(module: nn.Module, fp8_layers: Sequence[nn.Module] = ()) -> Iterator[None]:
    """Inside the `with`, `module` runs in eager mode and in the dtype of its tensors, and keeps all activations.

    Autocast is off, also that of the module's own code; products use no TF32; `fp8_layers` and torchao's layers
    multiply as nn.Linear does; `torch.utils.checkpoint` calls its function and no more; hooks of this package and of
    torch.distributed are not called, those of others are.
    """
    with ExitStack() as scope:
        enter = scope.enter_context
        enter(_disable_current_modes())
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and to load it would take seconds
            enter(torch.compiler.set_stance("force_eager"))
        enter(_no_tf32())
        enter(_no_autocast())
        enter(replaced(checkpointing, "CheckpointFunction", _CalledOnce))
        enter(replaced(checkpointing, "_checkpoint_without_reentrant_generator", _called_once))
        for name, hooks in vars(torch_module).items():
            if name.startswith("_global_") and name.endswith("_hooks") and isinstance(hooks, dict):
                enter(replaced(torch_module, name, _kept(hooks)))
        for part in module.modules():
            for name in _HOOKS:
                hooks = vars(part)[name]
                if any(_is_left_out(hook) for hook in hooks.values()):
                    enter(replaced(part, name, _kept(hooks)))
            if getattr(part, "_compiled_call_impl", None) is not None:
                enter(replaced(part, "_compiled_call_impl", None))
        own = {id(layer): layer for layer in fp8_layers}
        theirs = {id(part): part for part in module.modules() if _is_of_torchao(part)}
        for layer in {**own, **theirs}.values():
            enter(replaced(layer, "forward", partial(_linear, layer)))
        yield


def step_of(module: nn.Module) -> Callable[..., Any]:
    """The `training_step` of a module, without the gathering that FSDP2 has put around it."""
    step: Any = vars(module).get("training_step")
    if isinstance(module, FSDPModule) and hasattr(step, "__wrapped__"):
        return step.__wrapped__  # `register_fsdp_forward_method` keeps it there
    return module.training_step  # type: ignore[return-value]


def _linear(layer: Any, input: Tensor) -> Tensor:
    return F.linear(input, layer.weight, layer.bias)


def _is_of_torchao(part: nn.Module) -> bool:
    return isinstance(part, nn.Linear) and any(cls.__module__.startswith("torchao.") for cls in type(part).__mro__)


def _kept(hooks: Any) -> Any:
    kept = type(hooks)()
    kept.update({key: hook for key, hook in hooks.items() if not _is_left_out(hook)})
    return kept


def _is_left_out(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", None) or type(hook).__module__).startswith(_LEFT_OUT)


class _CalledOnce:
    """In place of the autograd function of reentrant checkpointing."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


def _called_once(*_: Any, **__: Any) -> Iterator[None]:
    """In place of the generator of non-reentrant checkpointing: `checkpoint` calls the function between the two."""
    yield


@contextmanager
def _no_autocast() -> Iterator[None]:
    original = torch.autocast.__enter__

    def enter(self: Any) -> Any:
        enabled, self._enabled = self._enabled, False
        try:
            return original(self)
        finally:
            self._enabled = enabled

    with replaced(torch.autocast, "__enter__", enter), ExitStack() as scope:
        for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
            scope.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def _no_tf32() -> Iterator[None]:
    # Torch refuses products on CUDA where its older switches and newer settings say different things: both change.
    # Not `torch.backends.cudnn.rnn`, which is a file of that name; read from torch/backends/__init__.py.
    get, put = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    kinds = [(backend, op) for backend in ("cuda", "mkldnn") for op in ("matmul", "conv", "rnn")]
    before = [get(*kind) for kind in kinds]
    products, convolutions = torch._C._get_float32_matmul_precision(), torch._C._get_cudnn_allow_tf32()
    try:
        torch._C._set_float32_matmul_precision("highest")
        torch._C._set_cudnn_allow_tf32(False)
        for kind in kinds:
            put(*kind, "ieee")
        yield
    finally:
        torch._C._set_float32_matmul_precision(products)
        torch._C._set_cudnn_allow_tf32(convolutions)
        for kind, value in zip(kinds, before, strict=True):
            put(*kind, value)


# ------------------------------------------------------------------- functions that bring a backward pass of their own


class OwnBackward:
    """The classes of `torch.autograd.Function` whose own `backward` is replaced by the derivative of their `forward`.

    Args:
        patterns: regular expressions for the whole name of a class, or for `module.name`.

    Attributes:
        used: names of the classes whose forward autograd could differentiate, in the last backward pass.
        opaque: names of those where it could not (a kernel, or `no_grad` inside): their own `backward` ran.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = [re.compile(pattern) for pattern in patterns]
        self.used: set[str] = set()
        self.opaque: set[str] = set()

    def chosen(self, cls: type) -> bool:
        """Whether a pattern names the class."""
        names = (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")
        return any(pattern.fullmatch(name) for pattern in self._patterns for name in names)

    @contextmanager
    def replaced_by_autograd(self) -> Iterator[None]:
        """Inside the `with`, for forward and backward passes."""
        self.used, self.opaque = set(), set()
        with ExitStack() as scope:
            for cls in _subclasses(torch.autograd.Function) if self._patterns else ():
                if self.chosen(cls):
                    self._replace(cls, scope)
            yield

    def _replace(self, cls: Any, scope: ExitStack) -> None:
        forward, backward, setup = cls.forward, cls.backward, cls.setup_context
        has_setup = setup is not torch.autograd.Function.setup_context
        name = f"{cls.__module__}.{cls.__qualname__}"

        def keep_inputs(ctx: Any, *args: Any) -> Any:
            ctx.shadow_inputs = args
            return forward(ctx, *args)

        def keep_inputs_in_setup(ctx: Any, inputs: Any, output: Any) -> Any:
            ctx.shadow_inputs = inputs
            return setup(ctx, inputs, output)

        def by_autograd(ctx: Any, *grads: Any) -> Any:
            wanted = [
                needed and isinstance(x, Tensor)
                for x, needed in zip(ctx.shadow_inputs, ctx.needs_input_grad, strict=True)
            ]
            leaves = [x.detach() if isinstance(x, Tensor) else x for x in ctx.shadow_inputs]
            leaves = [x.requires_grad_() if want else x for x, want in zip(leaves, wanted, strict=True)]
            with torch.enable_grad():
                given = [x.clone() if want else x for x, want in zip(leaves, wanted, strict=True)]  # may be written to
                outputs = forward(*given) if has_setup else forward(_Context(ctx), *given)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            pairs = [
                (output, grad)
                for output, grad in zip(outputs, grads, strict=True)
                if isinstance(output, Tensor) and output.requires_grad and grad is not None
            ]
            if not pairs:
                self.opaque.add(name)
                return backward(ctx, *grads)
            self.used.add(name)
            inputs = [x for x, want in zip(leaves, wanted, strict=True) if want]
            found = iter(_grad(pairs, inputs))
            return tuple(next(found) if want else None for want in wanted)

        if has_setup:
            scope.enter_context(replaced(cls, "setup_context", staticmethod(keep_inputs_in_setup)))
        else:
            scope.enter_context(replaced(cls, "forward", staticmethod(keep_inputs)))
        scope.enter_context(replaced(cls, "backward", staticmethod(by_autograd)))


def _grad(pairs: Sequence[tuple[Tensor, Tensor]], inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    outputs, grads = [output for output, _ in pairs], [grad for _, grad in pairs]
    return torch.autograd.grad(outputs, inputs, grads, allow_unused=True)


class _Context:
    """What a `forward` may do with its `ctx`, of which nothing is needed: autograd keeps its own."""

    def __init__(self, ctx: Any) -> None:
        self.needs_input_grad = ctx.needs_input_grad

    def _ignore(self, *_: Any) -> None:
        pass

    save_for_backward = save_for_forward = mark_dirty = mark_non_differentiable = set_materialize_grads = _ignore


def functions_behind(loss: Tensor) -> set[type]:
    """The classes of `torch.autograd.Function`, written in Python, in the graph of a loss."""
    found: set[type] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        cls = getattr(type(node), "_forward_cls", None)
        if cls is not None:
            found.add(cls)
    return found


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    each: type[Any]
    for each in cls.__subclasses__():
        yield each
        yield from _subclasses(each)
