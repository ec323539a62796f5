"""Let any optimizer train bf16 weights: each step is computed in fp32 and rounded so that small updates survive."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, bfloat16, nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from lightning_tricks._errors import UsageError
from lightning_tricks.optim.resting_state import MASTER, RestingState
from lightning_tricks.optim.stochastic_rounding import copy_rounded_, local, rounding_seed

Update = Literal["stochastic_rounding", "fp32_masters"]
StateType = Literal["fp32", "bf16"]


class _Lifted(NamedTuple):
    """A bf16 parameter while a step is computed."""

    param: Tensor
    shadow: Tensor
    state: dict[str, Any] | None
    place: int


class BF16Step:
    """Wraps `optimizer.step`: bf16 parameters are replaced by fp32 copies for its length, then rounded back.

    Under `stochastic_rounding` the copies are thrown away and the parameter is rounded up or down at random; under
    `fp32_masters` they are kept in `optimizer.state[param]["master"]` and the parameter is the nearest bf16 value. A
    parameter that was written to from outside since (loaded, clamped) is taken as it is: the master follows it, element
    by element. Parameters that are not bf16 are stepped as they are. The closure runs first, and hooks on the step
    fire once, while the optimizer holds its own parameters.

    Optimizers of `torch.optim` take their parameters a bucket at a time, so that no more than `bucket_bytes` of
    temporary copies exist (or those of the largest parameter); others, which may mix parameters, all at once.

    Loading restores the state in the type it rests in; torch alone would cast it to the parameters' bf16.

    Args:
        optimizer: any that calls its closure once, at the start.
        update: how a step reaches a bf16 parameter.
        optimizer_state: what state tensors of a parameter's shape rest in between steps; they are fp32 within them.
            bf16 is rounded stochastically too, or an average with beta 0.999 would stop moving.
        seed: of the rounding; equal on all ranks.
        bucket_bytes: bound of the temporary copies of weights and gradients, in bytes.

    Attributes:
        steps: how many were made; with the seed and the optimizer's state, all that a bitwise resume needs.

    Raises:
        UsageError: the optimizer calls its closure again or not at the start of a step: LBFGS at once, others when
            they do.

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
        self._state = RestingState(optimizer, bfloat16 if optimizer_state == "bf16" else torch.float32, self._masters)
        self._per_parameter = getattr(torch.optim, type(optimizer).__name__, None) is type(optimizer)
        self._generators: dict[torch.device, torch.Generator] = {}
        self._step: Callable[..., Any] = optimizer.step
        optimizer.step = MethodType(self._wrapper(), optimizer)  # type: ignore[method-assign]

    def _wrapper(self) -> Callable[..., Any]:
        # `wraps` carries the mark by which LRScheduler knows a step that it has wrapped already. A step that an earlier
        # BF16Step has wrapped finds fp32 parameters only, and nothing to do.
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
        lists = [group["params"] for group in self.optimizer.param_groups]
        whole = [list(params) for params in lists]
        places = {param: place for place, param in enumerate(p for params in whole for p in params)}
        lifted: list[_Lifted] = []
        with _hooks_hidden(self.optimizer):
            try:
                for bucket in self._buckets(whole):
                    self._lift(bucket, places, lists, lifted)
                    versions = [item.shadow._version for item in lifted]
                    once = [] if closure is None else [self._once(loss, lifted, versions)]
                    self._step(*once, **kwargs)
                    while lifted:
                        self._land(lifted[-1])
                        lifted.pop()
            finally:
                for item in lifted:  # none, unless the step failed
                    self._put_state(item.shadow, item.param, item.state)
                for params, own in zip(lists, whole, strict=True):
                    params[:] = own
        self.steps += 1
        return loss

    def _buckets(self, whole: list[list[Tensor]]) -> Iterator[list[list[Tensor]]]:
        """The groups' parameters, a part at a time; fp32 weights and gradients of a part fit in `bucket_bytes`."""
        bucket: list[list[Tensor]] = [[] for _ in whole]
        room = self.bucket_bytes
        for place, params in enumerate(whole):
            for param in params:
                size = 8 * local(param).numel() if _lifts(param) else 0
                if self._per_parameter and size > room and any(bucket):
                    yield bucket
                    bucket, room = [[] for _ in whole], self.bucket_bytes
                bucket[place].append(param)
                room -= size
        yield bucket

    def _lift(
        self, bucket: list[list[Tensor]], places: dict[Tensor, int], lists: list[list[Tensor]], lifted: list[_Lifted]
    ) -> None:
        """Put shadows in the place of a bucket's bf16 parameters, in the groups and in the state."""
        for params, part in zip(lists, bucket, strict=True):
            params.clear()
            for param in part:
                if not _lifts(param):
                    params.append(param)
                    continue
                state = self.optimizer.state.get(param)
                shadow = nn.Parameter(self._fp32_weights(param, state), requires_grad=param.requires_grad)
                shadow.__dict__.update(param.__dict__)  # what others have noted on it, such as a role
                shadow.grad = param.grad.float()  # type: ignore[union-attr]
                self._put_state(param, shadow, None if state is None else self._state.lift(state))
                lifted.append(_Lifted(param, shadow, state, places[param]))
                params.append(shadow)

    def _fp32_weights(self, param: Tensor, state: dict[str, Any] | None) -> Tensor:
        weights = param.detach().float()
        if self._masters and state is not None and MASTER in state:
            master = local(state[MASTER])
            written_to = master.to(bfloat16) != local(param)
            local(weights).copy_(torch.where(written_to, local(weights), master))
        return weights

    def _land(self, item: _Lifted) -> None:
        """Round a shadow and its state back to where they rest."""
        generator = self._generator(item)
        weights = item.shadow.detach()
        if self._masters:
            local(item.param).copy_(local(weights))
        else:
            copy_rounded_(local(item.param), local(weights), generator)
        flown = self.optimizer.state.get(item.shadow)
        rested = None if flown is None else self._state.rest(item.param, flown, generator)
        if self._masters:
            rested = {**(rested or {}), MASTER: weights}
        self._put_state(item.shadow, item.param, rested)

    def _generator(self, item: _Lifted) -> torch.Generator:
        device = local(item.param).device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        return self._generators[device].manual_seed(rounding_seed(self.seed, self.steps, item.place, item.param))

    def _put_state(self, old: Tensor, new: Tensor, state: dict[str, Any] | None) -> None:
        self.optimizer.state.pop(old, None)
        if state is not None:
            self.optimizer.state[new] = state

    def _once(self, loss: Any, lifted: list[_Lifted], versions: list[int]) -> Callable[[], Any]:
        """The closure as the optimizer sees it: it ran before, so its result is given once, before any change."""
        calls = iter([loss])

        def closure() -> Any:
            if [item.shadow._version for item in lifted] != versions:
                raise _closure_error(self.optimizer)
            for result in calls:
                return result
            raise _closure_error(self.optimizer)

        return closure


def _lifts(param: Tensor) -> bool:
    return param.dtype == bfloat16 and param.grad is not None


@contextmanager
def _hooks_hidden(optimizer: Optimizer) -> Iterator[None]:
    """Hooks have their turn around the whole step; a bucket is not one more step to them."""
    places: list[dict[int, Any]] = [
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    ]
    kept = [dict(hooks) for hooks in places]
    for hooks in places:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, own in zip(places, kept, strict=True):
            hooks.update(own)


def _closure_error(optimizer: Optimizer) -> UsageError:
    return UsageError(
        f"BF16True cannot drive the optimizer {type(optimizer).__name__}, which computes the gradient anew within a "
        "step: use one that calls its closure once and first, such as AdamW, or the plugin BF16Mixed"
    )
