"""Let any optimizer train bf16 weights: each step is computed in fp32 and rounded so that small updates survive."""

import functools
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, bfloat16, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.tensors import local
from lightning_tricks.optim.one_kernel import in_place

_MIX = (-0x7A143595, -0x3D4D51CB)  # 0x85EBCA6B and 0xC2B2AE35, as int32


def random_bits(like: Tensor, seed: Tensor) -> Tensor:
    """A random integer from 0 to 65,535 for each element: its number in the tensor plus the seed, mixed.

    A function of the two alone, on every device: no generator is needed, and nothing moves the model's random state.

    Args:
        like: of the shape and the device; fewer than 2^31 elements.
        seed: of `seed_on`. Sums wrap around, so that streams of two seeds are parts of one, 2^32 long.

    Returns:
        int32, shape of `like`.

    Source: the finalizer of MurmurHash3, https://github.com/aappleby/smhasher/blob/master/src/MurmurHash3.cpp.
    """
    bits = torch.arange(like.numel(), dtype=torch.int32, device=like.device).add_(seed).view(like.shape)
    for shift, factor in zip((16, 13), _MIX, strict=True):  # a shift of int32 keeps the sign, which the mask removes
        bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << (32 - shift)) - 1)).mul_(factor)
    return bits.bitwise_right_shift_(16).bitwise_and_(0xFFFF)


def seed_on(device: torch.device, seed: int) -> Tensor:
    """The lower 32 bits of a seed as an int32 scalar, filled on the device: a copy from the host would wait."""
    return torch.full((), (seed + (1 << 31)) % (1 << 32) - (1 << 31), dtype=torch.int32, device=device)


def round_to_bf16(source: Tensor, seed: Tensor) -> Tensor:
    """The bf16 neighbour above or below each value, the nearer one more often: the mean of many roundings is the value.

    bf16 is the upper half of fp32's bits, so a random 16-bit integer added to the lower half carries into the upper
    half with the right probability. A value that bf16 can represent does not change, nor do infinities and NaN; a
    finite value becomes infinite only above bf16's largest, 3.39e38.

    Args:
        source: fp32, any shape.
        seed: as in `random_bits`.

    Returns:
        bf16, shape of `source`.

    Source: Zamirai et al. 2020, https://arxiv.org/abs/2010.06192.
    """
    bits = random_bits(source, seed).add_(source.view(torch.int32)).bitwise_and_(-(1 << 16))
    # with a carry, a NaN's bits may come out as any number
    return torch.where(source.isfinite(), bits.view(torch.float32), source).bfloat16()


def _write_rounded(target: Tensor, source: Tensor, seed: Tensor) -> None:
    target.copy_(round_to_bf16(source, seed))


def copy_rounded_(target: Tensor, source: Tensor, seed: int) -> None:
    """Write `source` (fp32) into `target` (bf16, same shape) by `round_to_bf16`, with little memory beside them."""
    in_place(_write_rounded, (target, source), lambda start: (seed_on(target.device, seed + start),), "BF16True")


def rounding_seed(seed: int, step: int, index: int, param: Tensor) -> int:
    """A seed for one parameter at one step, of 32 bits: equal on ranks with the same shard, different on others.

    Args:
        seed: of the run; equal on all ranks.
        step: number of the optimizer's step.
        index: of the parameter in its optimizer.
        param: the parameter. For a DTensor, the rank's coordinates on the mesh dimensions that split it count too.
    """
    shard: list[int] = []
    if isinstance(param, DTensor):
        coordinates = param.device_mesh.get_coordinate() or ()
        pairs = zip(coordinates, param.placements, strict=False)
        shard = [coordinate for coordinate, placement in pairs if not placement.is_replicate()]
    text = repr((seed, step, index, shard))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest())


def _restored(param: Tensor, saved: Any, cast: Any, key: Any = None) -> Any:
    """The saved values in fp32, in place of those that torch has cast."""
    if isinstance(saved, dict):
        return {k: _restored(param, saved[k], cast[k], k) for k in saved}
    if isinstance(saved, list | tuple):
        return type(saved)(_restored(param, *pair) for pair in zip(saved, cast, strict=True))
    if not isinstance(saved, Tensor) or not saved.is_floating_point() or key == "step":
        return cast
    return saved.to(param.device, torch.float32)


def _in_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == bfloat16 else value


Groups = list[list[Tensor]]  # the parameters of each of the optimizer's groups


class _Copy(NamedTuple):
    """A bf16 parameter, the fp32 copy that is stepped in its place, and its state from before the step."""

    param: Tensor
    copy: Tensor
    stored_state: dict[str, Any] | None
    position: int


class BF16Step:
    """Wraps `optimizer.step`: fp32 copies take the place of the bf16 parameters in a step, and are rounded after it.

    Each value is rounded up or down at random, and the copies are thrown away. Parameters of another dtype are stepped
    as they are. The closure runs first; hooks fire once a step, on the optimizer's own parameters.

    Optimizers of `torch.optim` get their parameters in buckets, so that temporary copies take `bucket_bytes` at most
    (or the size of the largest parameter's). Other optimizers may combine parameters, and get all of them at once.

    State is fp32, also after a load; torch alone would cast it to the parameters' bf16.

    Args:
        optimizer: any optimizer that calls its closure once, at the start of a step.
        seed: of the rounding; equal on all ranks.
        bucket_bytes: bound of the temporary copies of weights and gradients, in bytes.

    Attributes:
        steps: number of steps made; with the seed and the optimizer's state, all that a bitwise resume needs.

    Raises:
        UsageError: for LBFGS at once; for other optimizers when they call their closure again, or late in a step.

    Source: Zamirai et al. 2020, https://arxiv.org/abs/2010.06192 (nearest rounding cancels small updates).
    """

    def __init__(self, optimizer: Optimizer, seed: int = 0, bucket_bytes: int = 256 << 20) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise _closure_error(optimizer)
        self.optimizer, self.seed, self.bucket_bytes, self.steps = optimizer, seed, bucket_bytes, 0
        self._saved: list[Any] = []  # the state of each parameter in the state dict that is being loaded
        self._hooks = [
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]
        self._per_parameter = getattr(torch.optim, type(optimizer).__name__, None) is type(optimizer)
        self._replaced = vars(optimizer).get("step")  # of a scheduler or a user; None for the class's own method
        self._step: Callable[..., Any] = optimizer.step
        self._wrapped = MethodType(self._wrapper(), optimizer)
        optimizer.step = self._wrapped  # type: ignore[method-assign]

    def remove(self) -> None:
        """Give the optimizer back the `step` that it had, and act on no later load; weights and state stay as they are.

        If other code has wrapped `step` after this class, `step` stays wrapped. `_replaced.replaced` is not used here:
        it would keep an optimizer alive whose owner never calls `remove`.
        """
        for hook in self._hooks:
            hook.remove()
        if vars(self.optimizer).get("step") is self._wrapped:
            del self.optimizer.step
            if self._replaced is not None:
                self.optimizer.step = self._replaced  # type: ignore[method-assign]

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        saved = state_dict["state"]
        self._saved = [saved.get(key) for group in state_dict["param_groups"] for key in group["params"]]

    def _after_load(self, optimizer: Optimizer) -> None:
        # torch has cast floating state to the dtype of the parameters: fp32 averages would have become bf16
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for param, saved in zip(params, self._saved, strict=True):
            if saved is not None and param.dtype == bfloat16:
                optimizer.state[param] = _restored(param, saved, optimizer.state[param])
        self._saved = []

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
        with without_hooks(self.optimizer):
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
                copy = nn.Parameter(param.detach().float(), requires_grad=param.requires_grad)
                copy.__dict__.update(param.__dict__)  # attributes that others have set on it, such as a role
                copy.grad = param.grad.float()  # type: ignore[union-attr]
                in_fp32 = None if state is None else {key: _in_fp32(value) for key, value in state.items()}
                self._move_state(param, copy, in_fp32)
                copies.append(_Copy(param, copy, state, positions[param]))
                group.append(copy)

    def _round_back(self, item: _Copy) -> None:
        """Round a copy into its parameter, which takes over its state."""
        seed = rounding_seed(self.seed, self.steps, item.position, item.param)
        copy_rounded_(local(item.param), local(item.copy), seed)
        self._move_state(item.copy, item.param, self.optimizer.state.get(item.copy))

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
def without_hooks(optimizer: Optimizer) -> Iterator[None]:
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
