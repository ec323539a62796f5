"""Copy a module with shapes but without data: running the copy takes no memory and leaves the module as it was."""

import copy
from collections import OrderedDict
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_tricks._trainer import attach_stand_in, is_a, trainer_of, uncopied
from lightning_tricks.accounting.flop_counting.flop_counter import CannotCount

_MOST_OBJECTS = 100_000  # on the host; more must be data, and their copy would take seconds


def copy_without_data(module: Any, batch: Any, trainer: Any, fake: FakeTensorMode, no_metrics: bool) -> tuple[Any, Any]:
    """Copies of the module and of the batch, with tensors of `fake`.

    NumPy arrays are shared, and the copy cannot write to them. The copy can read the plain values of the Trainer only.

    Args:
        module: its sharded parts become whole in the copy, its compiled parts eager.
        batch: of any type that can be copied.
        trainer: the module's, or None.
        fake: the mode that the copy's tensors belong to.
        no_metrics: let torchmetrics do nothing in the copy.

    Raises:
        CannotCount: the module holds more than 100,000 objects on the host.
    """
    memo = _shared(module, trainer) | _whole_parameters(module, fake)  # the copy of each object, by the object's id
    memo |= _read_only_arrays(module, memo)
    with FakeCopyMode(fake):
        replica, batch = _copy(module, memo), copy.deepcopy(batch, memo)
    for part in replica.modules():
        _uncompile(part, memo)
        if no_metrics and is_a(part, "Metric", "MetricCollection"):
            vars(part).update(forward=_do_nothing, update=_do_nothing, compute=_do_nothing)
        if part is replica or is_a(part, "LightningModule"):
            _detach(part, trainer)
    return replica, batch


def _shared(module: Any, trainer: Any) -> dict[int, Any]:
    """Stand-ins for the Trainer, its callbacks and loggers; empty dicts for hooks, which would act on the original."""
    memo: dict[int, Any] = {id(held): held for held in uncopied(module)}
    for reference in (trainer, trainer_of(module)):  # a module holds a proxy
        if reference is not None:
            memo[id(reference)] = _TrainerValues(trainer)
    for watcher in [*getattr(trainer, "callbacks", []), *getattr(trainer, "loggers", [])]:
        memo[id(watcher)] = _NullObject()
    for part in module.modules():
        hooks = [value for name, value in vars(part).items() if name[0] == "_" and "_hooks" in name]
        memo |= {id(registered): OrderedDict() for registered in hooks if isinstance(registered, OrderedDict)}
    return memo


def _whole_parameters(module: Any, fake: FakeTensorMode) -> dict[int, Any]:
    """A whole parameter or buffer without data for each sharded one of the module."""
    memo: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        if isinstance(tensor, DTensor) or hasattr(tensor, "ds_shape"):  # FSDP2's; DeepSpeed's at stage 3
            shape = getattr(tensor, "ds_shape", tensor.shape)
            with fake:
                whole: Any = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
            if isinstance(tensor, torch.nn.Parameter):
                whole = torch.nn.Parameter(whole, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = whole
    return memo


def _read_only_arrays(module: Any, memo: dict[int, Any]) -> dict[int, Any]:
    """A read-only view of each NumPy array that the module holds, at any depth."""
    arrays: dict[int, Any] = {}
    seen = set(memo)
    queue = [vars(part) for part in module.modules()]
    while queue:
        value = queue.pop()
        if id(value) in seen or isinstance(value, torch.Tensor | type | ModuleType | FunctionType):
            continue
        seen.add(id(value))
        if isinstance(value, np.ndarray):
            arrays[id(value)] = value.view()
            arrays[id(value)].flags.writeable = False
        elif isinstance(value, dict | list | tuple | set):
            if len(value) + len(seen) > _MOST_OBJECTS:
                raise CannotCount(f"it holds more than {_MOST_OBJECTS:,} objects on the host")
            queue.extend(value.values() if isinstance(value, dict) else value)
        elif _rows(value) > _MOST_OBJECTS:
            raise CannotCount(f"it holds a {type(value).__name__} of more than {_MOST_OBJECTS:,} rows")
        elif hasattr(value, "__dict__"):
            queue.append(vars(value))
    return arrays


def _rows(value: Any) -> int:
    try:
        return 0 if isinstance(value, str | bytes | range) else len(value)
    except Exception:
        return 0


def _copy(module: Any, memo: dict[int, Any]) -> Any:
    """A deep copy. Modules of `fully_shard`, which forbids to copy them, become plain modules of their own class."""
    sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
    for part in sharded:
        plain: Any = type(part).__mro__[2]  # fully_shard makes a class of (FSDPModule, the module's own)
        memo[id(part)] = plain.__new__(plain)
    for part in sharded:
        state = {
            name: _without_gathering(value)
            for name, value in vars(part).items()
            if "composable" not in name and name != "_compiled_call_impl"
        }
        vars(memo[id(part)]).update(copy.deepcopy(state, memo))
    return copy.deepcopy(module, memo)


def _without_gathering(value: Any) -> Any:
    """The method that `register_fsdp_forward_method` has wrapped on the object; any other value as it is."""
    code = getattr(getattr(value, "__func__", None), "__code__", None)
    return value.__wrapped__ if code and code.co_qualname.startswith("register_fsdp_forward_method.") else value


def _uncompile(part: Any, memo: dict[int, Any]) -> None:
    """Give the copy methods of its own where torch.compile has wrapped the original's on the object."""
    for name, value in list(vars(part).items()):
        method = getattr(value, "_torchdynamo_orig_callable", None)
        if isinstance(method, MethodType) and id(method.__self__) in memo:
            vars(part)[name] = MethodType(method.__func__, memo[id(method.__self__)])


def _detach(part: Any, trainer: Any) -> None:
    """Give a module a Trainer that can only be read, optimizers that do not step, and no log."""

    def backward(loss: Any, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)

    def stand_ins(count: int) -> Any:
        return _NullObject() if count == 1 else [_NullObject() for _ in range(count)]

    n_optimizers = len(getattr(trainer, "optimizers", None) or [None])
    n_schedulers = len(getattr(trainer, "lr_scheduler_configs", None) or [])
    attach_stand_in(part, _TrainerValues(trainer))
    silent = ("log", "log_dict", "toggle_optimizer", "untoggle_optimizer", "clip_gradients")
    vars(part).update(
        dict.fromkeys(silent, _do_nothing),
        manual_backward=backward,
        optimizers=lambda use_pl_optimizer=True: stand_ins(n_optimizers),
        lr_schedulers=lambda: stand_ins(n_schedulers) if n_schedulers else None,
    )


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    return None


class _NullObject:
    """Stands for an optimizer, scheduler, logger or callback: no method does anything, but `step` runs its closure."""

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


class _TrainerValues:
    """The plain values of a Trainer, with those of a run on one device that steps after each micro-batch."""

    _ON_ONE_DEVICE = {
        "world_size": 1, "num_nodes": 1, "num_devices": 1, "accumulate_grad_batches": 1, "global_rank": 0,
        "logger": _NullObject(), "loggers": [],
    }  # fmt: skip

    def __init__(self, trainer: Any) -> None:
        vars(self)["_real"] = trainer

    def __getattr__(self, name: str) -> Any:
        if name in self._ON_ONE_DEVICE:
            return self._ON_ONE_DEVICE[name]
        value = getattr(vars(self)["_real"], name)
        if not isinstance(value, bool | int | float | str | None):
            raise CannotCount(f"training_step needs trainer.{name}")
        return value
