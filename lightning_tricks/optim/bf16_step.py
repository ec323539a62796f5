"""Let any optimizer train bf16 weights: each step is computed in fp32 and rounded so that small updates survive."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, bfloat16, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from lightning_tricks._errors import UsageError
from lightning_tricks._tensors import local
from lightning_tricks.optim.stochastic_rounding import copy_rounded_, rounding_seed

MASTER = "master"  # key in the state of a parameter


@torch.no_grad()
def take_masters(optimizer: Optimizer) -> None:
    """Give each fp32 weight the value of its master, after a checkpoint of bf16 weights is loaded; drop the masters.

    A value of a master that does not round to its weight comes from other weights, and is only dropped. Meant for
    `optimizer.register_load_state_dict_post_hook`.
    """
    for param, state in optimizer.state.items():
        master = state.pop(MASTER, None)
        if master is None or param.dtype != torch.float32:
            continue
        here, there = local(param), local(master)
        if here.shape == there.shape:
            there = there.to(here.device, torch.float32)
            here.copy_(torch.where(there.bfloat16() == here, there, here))


class StateStorage:
    """Convert the state of a bf16 parameter between its storage dtype and fp32, in which a step computes.

    It also guards every later `optimizer.load_state_dict`, until `remove`: torch casts floating state to the dtype of
    the parameters, so that fp32 averages and masters would come back as bf16.

    Args:
        optimizer: owner of the state.
        dtype: of stored tensors of the parameter's shape, fp32 or bf16. Other state is small and stays fp32: factored
            averages, counts, and the state of a 0-dim parameter.
        masters: whether to keep the `master` of a loaded checkpoint, always in fp32, or to drop it.
    """

    def __init__(self, optimizer: Optimizer, dtype: torch.dtype, masters: bool) -> None:
        self._dtype, self._keeps_masters = dtype, masters
        self._saved: list[Any] = []
        self._hooks = [
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]

    def remove(self) -> None:
        """Remove the hooks: later loads are torch's own."""
        for hook in self._hooks:
            hook.remove()

    def to_fp32(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state of one parameter for a step: in fp32, without a master."""
        return {key: _in_fp32(value) for key, value in state.items() if key != MASTER}

    def to_storage(self, param: Tensor, fp32_state: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
        """The state of one parameter after a step; values stored in bf16 are rounded stochastically."""
        stored = dict(fp32_state)
        for key, value in sorted(fp32_state.items(), key=lambda item: str(item[0])):  # a loaded state has another order
            if self._dtype_of(param, key, value) == bfloat16:
                stored[key] = torch.empty_like(value, dtype=bfloat16)
                copy_rounded_(local(stored[key]), local(value), generator)
        return stored

    def _dtype_of(self, param: Tensor, key: Any, value: Any) -> torch.dtype:
        # a tensor class of another library, such as an 8-bit state, is stored in its own way
        is_plain = isinstance(value, DTensor) or not hasattr(value, "__tensor_flatten__")
        plain = isinstance(value, Tensor) and is_plain and value.is_floating_point() and key not in ("step", MASTER)
        return self._dtype if plain and value.dim() > 0 and value.shape == param.shape else torch.float32

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        saved = state_dict["state"]
        self._saved = [saved.get(key) for group in state_dict["param_groups"] for key in group["params"]]

    def _after_load(self, optimizer: Optimizer) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for param, saved in zip(params, self._saved, strict=True):
            if saved is not None and param.dtype == bfloat16:
                optimizer.state[param] = self._restored(param, saved, optimizer.state[param])
        self._saved = []

    def _restored(self, param: Tensor, saved: Any, cast: Any, key: Any = None) -> Any:
        """The saved values in their storage dtype, in place of those that torch has cast."""
        if isinstance(saved, dict):
            keys = [k for k in saved if self._keeps_masters or k != MASTER]
            return {k: self._restored(param, saved[k], cast[k], k) for k in keys}
        if isinstance(saved, list | tuple):
            return type(saved)(self._restored(param, *pair) for pair in zip(saved, cast, strict=True))
        if not isinstance(saved, Tensor) or not saved.is_floating_point() or key == "step":
            return cast
        return saved.to(param.device, self._dtype_of(param, key, saved))


def _in_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == bfloat16 else value


Update = Literal["stochastic_rounding", "fp32_masters"]
StateType = Literal["fp32", "bf16"]
Groups = list[list[Tensor]]  # the parameters of each of the optimizer's groups


class _Copy(NamedTuple):
    """A bf16 parameter, the fp32 copy that is stepped in its place, and its state from before the step."""

    param: Tensor
    copy: Tensor
    stored_state: dict[str, Any] | None
    position: int


class BF16Step:
    """Wraps `optimizer.step`: fp32 copies take the place of the bf16 parameters in a step, and are rounded after it.

    With `stochastic_rounding` each value is rounded up or down at random, and the copies are thrown away; with
    `fp32_masters` they are kept in `optimizer.state[param]["master"]`, and the parameter is the nearest bf16 value. If
    other code writes to a parameter (loads, clamps), the master takes the new value, element by element. Parameters of
    another dtype are stepped as they are. The closure runs first; hooks fire once a step, on the optimizer's own
    parameters.

    Optimizers of `torch.optim` get their parameters in buckets, so that temporary copies take `bucket_bytes` at most
    (or the size of the largest parameter's). Other optimizers may combine parameters, and get all of them at once.

    Loading restores the state in its storage dtype; torch alone would cast it to the parameters' bf16.

    Args:
        optimizer: any optimizer that calls its closure once, at the start of a step.
        update: `stochastic_rounding` or `fp32_masters`.
        optimizer_state: dtype in which state tensors of a parameter's shape are stored between steps; within a step
            they are fp32. bf16 is rounded stochastically too, or an average with beta 0.999 would stop moving.
        seed: of the rounding; equal on all ranks.
        bucket_bytes: bound of the temporary copies of weights and gradients, in bytes.

    Attributes:
        steps: number of steps made; with the seed and the optimizer's state, all that a bitwise resume needs.

    Raises:
        UsageError: for LBFGS at once; for other optimizers when they call their closure again, or late in a step.

    Source: Zamirai et al. 2020, https://arxiv.org/abs/2010.06192 (nearest rounding cancels small updates); Micikevicius
        et al. 2017, https://arxiv.org/abs/1710.03740 (masters).
    """

    def __init__(
        self,
        optimizer: Optimizer,
        update: Update = "stochastic_rounding",
        optimizer_state: StateType = "fp32",
        seed: int = 0,
        bucket_bytes: int = 256 << 20,
    ) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise _closure_error(optimizer)
        self.optimizer, self.seed, self.bucket_bytes, self.steps = optimizer, seed, bucket_bytes, 0
        self._masters = update == "fp32_masters"
        self._storage = StateStorage(optimizer, bfloat16 if optimizer_state == "bf16" else torch.float32, self._masters)
        self._per_parameter = getattr(torch.optim, type(optimizer).__name__, None) is type(optimizer)
        self._generators: dict[torch.device, torch.Generator] = {}
        self._replaced = vars(optimizer).get("step")  # of a scheduler or a user; None for the class's own method
        self._step: Callable[..., Any] = optimizer.step
        self._wrapped = MethodType(self._wrapper(), optimizer)
        optimizer.step = self._wrapped  # type: ignore[method-assign]

    def remove(self) -> None:
        """Give the optimizer back the `step` that it had, and act on no later load; weights and state stay as they are.

        If other code has wrapped `step` after this class, `step` stays wrapped. `_replaced.replaced` is not used here:
        it would keep an optimizer alive whose owner never calls `remove`.
        """
        self._storage.remove()
        if vars(self.optimizer).get("step") is self._wrapped:
            del self.optimizer.step
            if self._replaced is not None:
                self.optimizer.step = self._replaced  # type: ignore[method-assign]

    def _wrapper(self) -> Callable[..., Any]:
        # `wraps` carries the mark by which LRScheduler recognizes a step that it has wrapped already. If an earlier
        # BF16Step has wrapped the step too, it finds fp32 parameters only and changes nothing.
        @Optimizer.profile_hook_step
        @functools.wraps(self._step)
        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            return self._run(closure, **kwargs)

        return step

    @torch.no_grad()
    def _run(self, closure: Callable[[], Any] | None, **kwargs: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [group["params"] for group in self.optimizer.param_groups]
        params = [list(group) for group in groups]
        positions = {param: i for i, param in enumerate(p for group in params for p in group)}
        copies: list[_Copy] = []
        with _without_hooks(self.optimizer):
            try:
                for bucket in self._buckets(params):
                    self._put_copies(bucket, positions, groups, copies)
                    known = [] if closure is None else [self._known_result(loss, copies)]
                    self._step(*known, **kwargs)
                    while copies:
                        self._round_back(copies[-1])
                        copies.pop()
            finally:
                for item in copies:  # none, unless the step failed
                    self._move_state(item.copy, item.param, item.stored_state)
                for group, own in zip(groups, params, strict=True):
                    group[:] = own
        self.steps += 1
        return loss

    def _buckets(self, params: Groups) -> Iterator[Groups]:
        """The groups' parameters, a part at a time; fp32 weights and gradients of a part fit in `bucket_bytes`."""
        bucket: Groups = [[] for _ in params]
        free = self.bucket_bytes
        for i, group in enumerate(params):
            for param in group:
                size = 8 * local(param).numel() if _needs_copy(param) else 0
                if self._per_parameter and size > free and any(bucket):
                    yield bucket
                    bucket, free = [[] for _ in params], self.bucket_bytes
                bucket[i].append(param)
                free -= size
        yield bucket

    def _put_copies(self, bucket: Groups, positions: dict[Tensor, int], groups: Groups, copies: list[_Copy]) -> None:
        """Put fp32 copies in the place of a bucket's bf16 parameters, in the groups and in the state."""
        for group, part in zip(groups, bucket, strict=True):
            group.clear()
            for param in part:
                if not _needs_copy(param):
                    group.append(param)
                    continue
                state = self.optimizer.state.get(param)
                copy = nn.Parameter(self._fp32_weights(param, state), requires_grad=param.requires_grad)
                copy.__dict__.update(param.__dict__)  # attributes that others have set on it, such as a role
                copy.grad = param.grad.float()  # type: ignore[union-attr]
                self._move_state(param, copy, None if state is None else self._storage.to_fp32(state))
                copies.append(_Copy(param, copy, state, positions[param]))
                group.append(copy)

    def _fp32_weights(self, param: Tensor, state: dict[str, Any] | None) -> Tensor:
        weights = param.detach().float()
        if self._masters and state is not None and MASTER in state:
            master = local(state[MASTER])
            written_to = master.to(bfloat16) != local(param)
            local(weights).copy_(torch.where(written_to, local(weights), master))
        return weights

    def _round_back(self, item: _Copy) -> None:
        """Round a copy into its parameter, and its state into the storage dtype."""
        generator = self._generator(item)
        weights = item.copy.detach()
        if self._masters:
            local(item.param).copy_(local(weights))
        else:
            copy_rounded_(local(item.param), local(weights), generator)
        fp32_state = self.optimizer.state.get(item.copy)
        stored = None if fp32_state is None else self._storage.to_storage(item.param, fp32_state, generator)
        if self._masters:
            stored = {**(stored or {}), MASTER: weights}
        self._move_state(item.copy, item.param, stored)

    def _generator(self, item: _Copy) -> torch.Generator:
        device = local(item.param).device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        return self._generators[device].manual_seed(rounding_seed(self.seed, self.steps, item.position, item.param))

    def _move_state(self, old: Tensor, new: Tensor, state: dict[str, Any] | None) -> None:
        self.optimizer.state.pop(old, None)
        if state is not None:
            self.optimizer.state[new] = state

    def _known_result(self, loss: Any, copies: list[_Copy]) -> Callable[[], Any]:
        """A closure for the optimizer: it returns the loss of the one that ran, once, before any weight changes."""
        calls, versions = iter([loss]), [item.copy._version for item in copies]

        def closure() -> Any:
            if [item.copy._version for item in copies] != versions:
                raise _closure_error(self.optimizer)
            for result in calls:
                return result
            raise _closure_error(self.optimizer)

        return closure


def _needs_copy(param: Tensor) -> bool:
    return param.dtype == bfloat16 and param.grad is not None


@contextmanager
def _without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Take away the hooks on a step: they run before and after the whole step, not once for each bucket."""
    registries: list[dict[int, Any]] = [
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    ]
    kept = [dict(hooks) for hooks in registries]
    for hooks in registries:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, own in zip(registries, kept, strict=True):
            hooks.update(own)


def _closure_error(optimizer: Optimizer) -> UsageError:
    return UsageError(
        f"BF16True cannot drive the optimizer {type(optimizer).__name__}, which computes the gradient anew within a "
        "step: use one that calls its closure once and first, such as AdamW, or the plugin BF16Mixed"
    )
