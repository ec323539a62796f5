"""FLOPs of one micro-batch of a module that we never saw: its `training_step` is run on a copy without weights."""

import contextlib
import copy
import inspect
import logging
import random
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any


class CannotCount(Exception):  # noqa: N818  no error of the user's: there are other ways to the figure
    """The module's FLOPs cannot be counted without running it; the message says why in a few words."""


def count_flops(
    module: Any, batch: Any, trainer: Any = None, context: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> tuple[int, int]:
    """FLOPs of forward and backward pass of `module.training_step(batch, 0)`, as (the model's, those spent again).

    The step is run on a copy whose tensors have shapes and no data, so it takes no memory and no device time. Module,
    batch and random states are left as they were, and `self.log` does nothing. Counted are the products that torch's
    FlopCounterMode knows: linear layers, convolutions and attention, masked or not, the latter in full; kernels of
    other packages count nothing. What activation checkpointing runs a second time is the second figure; what a fused
    attention kernel recomputes inside itself is in neither.

    Args:
        module: with a `training_step`, such as a LightningModule; sharded, compiled and wrapped parts are counted as
            one device would run them all.
        batch: a micro-batch, of any type that can be copied.
        trainer: what the module asks its Trainer for; it may read plain values only.
        context: makes what the step runs under, such as autocast.

    Raises:
        CannotCount: the step reads values (`.item()`, `if loss > 0`), needs its Trainer, or fails without data.

    Source: https://github.com/pytorch/pytorch/blob/main/torch/utils/flop_counter.py.
    """
    for without_metrics in (False, True):
        try:
            return _count(module, batch, trainer, context(), without_metrics)
        except Exception as error:
            if without_metrics or not _has_metrics(module):
                reason = str(error).strip().partition("\n")[0]
                raise CannotCount(f"{type(error).__name__}: {reason}" if reason else type(error).__name__) from error
    raise AssertionError


def _count(
    module: Any, batch: Any, trainer: Any, context: AbstractContextManager[Any], without_metrics: bool
) -> tuple[int, int]:
    import torch
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    counter = _counter()
    with _silence(), _random_states_kept(), torch.compiler.set_stance("force_eager"):
        # With a ShapeEnv a value may be read, to be logged; asking which branch it takes is an error. Without fallback
        # kernels nothing is ever run on a device, no collective either.
        fake = FakeTensorMode(allow_fallback_kernels=False, shape_env=ShapeEnv(), static_shapes=True)
        with FakeCopyMode(fake):
            memo = _shared(module, trainer) | _without_weights(module, fake)
            replica, batch = _copy(module, memo), copy.deepcopy(batch, memo)
        _detach(replica, trainer, without_metrics)
        with fake, counter, counter.of_graphs, torch.enable_grad():
            with context:
                loss = _training_step(replica, batch)
            if getattr(replica, "automatic_optimization", True):
                if loss is None or not loss.requires_grad:
                    raise CannotCount("training_step returned no loss to go backward from")
                replica.backward(loss) if hasattr(replica, "backward") else loss.backward()
    return counter.model, counter.recompute


def _metric_classes() -> tuple[type, ...]:
    metrics = sys.modules.get("torchmetrics")
    return (metrics.Metric, metrics.MetricCollection) if metrics else ()


def _has_metrics(module: Any) -> bool:
    return any(isinstance(part, _metric_classes()) for part in module.modules())


def _training_step(replica: Any, batch: Any) -> Any:
    parameters = inspect.signature(replica.training_step).parameters
    if "dataloader_iter" in parameters:
        raise CannotCount("training_step takes the iterator, not a batch")
    output = replica.training_step(batch, 0) if len(parameters) > 1 else replica.training_step(batch)
    return output.get("loss") if isinstance(output, dict) else output


def _counter() -> Any:
    """A FlopCounterMode that tells the model's FLOPs from those of recomputing."""
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils.flop_counter import FlopCounterMode

    class GraphsOfGradients(TorchFunctionMode):
        """Knows when a backward pass is itself differentiated, as a gradient penalty is."""

        inside = False

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            before = self.inside
            self.inside = before or bool((kwargs or {}).get("create_graph"))
            try:
                return func(*args, **(kwargs or {}))
            finally:
                self.inside = before

    class Counter(FlopCounterMode):
        model = recompute = 0

        def __init__(self) -> None:
            super().__init__(display=False, custom_mapping=_attention_formulas())
            self.mod_tracker: Any = nullcontext()  # we want no figures by module, and its hooks forbid autograd.grad
            self.of_graphs = GraphsOfGradients()

        def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
            formula = self.flop_registry.get(func_packet)
            flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=out))
            # The engine runs backward with gradients off. On they are where a checkpoint runs its forward pass again.
            backward = torch._C._current_graph_task_id() != -1
            if backward and torch.is_grad_enabled() and not self.of_graphs.inside:
                self.recompute += flops
            else:
                self.model += flops
            return out

    return Counter()


def _attention_formulas() -> dict[Any, Any]:
    """One count for every fused kernel: torch has none for the CPU's, and recomputed scores in those of the others."""
    import torch

    def forward(query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
        batch, heads, length, head_dim = query
        return 2 * batch * heads * length * key[-2] * (head_dim + value[-1])

    def backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
        return 2 * forward(query, key, value)

    kernels = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    packets = {name: f"_scaled_dot_product_{name}" for name in kernels}
    aten = torch.ops.aten
    return {getattr(aten, packet): forward for packet in packets.values()} | {
        getattr(aten, f"{packet}_backward"): backward for packet in packets.values()
    }


_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


def _shared(module: Any, trainer: Any) -> dict[int, Any]:
    """What the copy does not get a copy of: nothing of the Trainer, and no hooks, which would act on the original."""
    mesh = getattr(module, "_device_mesh", None)
    memo: dict[int, Any] = {id(mesh): mesh}
    for reference in (trainer, vars(module).get("_trainer")):  # a module holds a proxy
        if reference is not None:
            memo[id(reference)] = _Readable(trainer)
    for watcher in [*getattr(trainer, "callbacks", []), *getattr(trainer, "loggers", [])]:
        memo[id(watcher)] = _Nothing()
    for part in module.modules():
        for name in _HOOKS:
            hooks = part.__dict__.get(name)
            if hooks is not None:
                memo[id(hooks)] = OrderedDict()
    return memo


def _without_weights(module: Any, fake: Any) -> dict[int, Any]:
    """A whole parameter or buffer without data for each one of the module's that lies in shards."""
    import torch
    from torch.distributed.tensor import DTensor

    memo = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        if isinstance(tensor, DTensor) or hasattr(tensor, "ds_shape"):  # FSDP2's; DeepSpeed's at stage 3
            shape = getattr(tensor, "ds_shape", tensor.shape)
            with fake:
                whole: Any = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
            if isinstance(tensor, torch.nn.Parameter):
                whole = torch.nn.Parameter(whole, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = whole
    return memo


def _copy(module: Any, memo: dict[int, Any]) -> Any:
    """A deep copy, also of modules that `fully_shard` has forbidden to copy: they become what they were before."""
    from torch.distributed.fsdp import FSDPModule

    sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
    for part in sharded:
        plain: Any = type(part).__mro__[2]  # fully_shard makes a class of (FSDPModule, the module's own)
        memo[id(part)] = plain.__new__(plain)
    for part in sharded:
        state = {
            name: _without_gathering(value)
            for name, value in vars(part).items()
            if "composable" not in name and name not in ("_trainer", "_compiled_call_impl")
        }
        vars(memo[id(part)]).update(copy.deepcopy(state, memo))
    return copy.deepcopy(module, memo)


def _without_gathering(value: Any) -> Any:
    """The method that `register_fsdp_forward_method` has wrapped on the object, or else what it is."""
    code = getattr(getattr(value, "__func__", None), "__code__", None)
    return value.__wrapped__ if code and code.co_qualname.startswith("register_fsdp_forward_method.") else value


def _detach(replica: Any, trainer: Any, without_metrics: bool) -> None:
    """Give every LightningModule in the copy a Trainer that can only be read, optimizers that rest, and no log."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def backward(loss: Any, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)

    def resting(count: int) -> Any:
        return _Nothing() if count == 1 else [_Nothing() for _ in range(count)]

    n_optimizers = len(getattr(trainer, "optimizers", None) or [None])
    n_schedulers = len(getattr(trainer, "lr_scheduler_configs", None) or [])
    for part in replica.modules():
        if without_metrics and isinstance(part, _metric_classes()):
            vars(part).update(forward=nothing, update=nothing, compute=nothing)
        if "_trainer" in vars(part) or part is replica:
            vars(part).update(
                _trainer=_Readable(trainer), _fabric=None, log=nothing, log_dict=nothing, manual_backward=backward,
                toggle_optimizer=nothing, untoggle_optimizer=nothing, clip_gradients=nothing,
                optimizers=lambda use_pl_optimizer=True: resting(n_optimizers),
                lr_schedulers=lambda: resting(n_schedulers) if n_schedulers else None,
            )  # fmt: skip


class _Nothing:
    """An optimizer, a scheduler or a logger that does nothing, but runs an optimizer's closure."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{"lr": 0.0}]

    def step(self, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        return closure() if callable(closure) else None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *args: Any) -> None:
        return None


class _Readable:
    """A Trainer's plain values, as of a run on one device that steps after each micro-batch."""

    _ALONE = {
        "world_size": 1, "num_nodes": 1, "num_devices": 1, "accumulate_grad_batches": 1, "global_rank": 0,
        "logger": _Nothing(), "loggers": [],
    }  # fmt: skip

    def __init__(self, trainer: Any) -> None:
        vars(self)["_real"] = trainer

    def __getattr__(self, name: str) -> Any:
        if name in self._ALONE:
            return self._ALONE[name]
        value = getattr(vars(self)["_real"], name)
        if not isinstance(value, bool | int | float | str | None):
            raise CannotCount(f"training_step needs trainer.{name}")
        return value


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """No warnings and no log lines: the real step will say it, and torch logs what fails on a copy without data."""
    level = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(level)


@contextlib.contextmanager
def _random_states_kept() -> Iterator[None]:
    """Put Python's, numpy's and torch's random states back: a step may draw on the host."""
    import torch

    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy else None
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(states[0])
        if numpy:
            numpy.random.set_state(states[1])
