"""Switch a schedule-free optimizer between the weights that it trains and the average that is evaluated and saved.

Optimizers of the package `schedulefree`, and others like them, compute gradients at weights `y` and keep weights `z` in
their state; the model is the average `x`, which follows from both. Their own methods `eval` and `train` overwrite y
with x, and x with y, so that y comes back rounded. Here y is kept meanwhile, and comes back to the bit.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim import Optimizer

from lightning_tricks._core.errors import UsageError
from lightning_tricks.optim.keep_settings_on_load import parts_of
from lightning_tricks.schedules import Schedule, WarmupConstant

TRAINED = "trained_weights"  # key in the state of a parameter: y, while the parameter holds x


def schedule_free_parts(optimizer: Optimizer) -> list[Any]:
    """The optimizers of which `optimizer` is made that are schedule-free: those with the methods `train` and `eval`.

    Example:
        >>> schedule_free_parts(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))]))
        []
    """
    names = ("train", "eval")
    return [part for part in parts_of(optimizer) if all(callable(getattr(part, name, None)) for name in names)]


def has_trained_weights(optimizer: Any) -> bool:
    """Whether the parameters hold the weights that are trained, and not their average."""
    # heavyball's optimizers start with the trained weights, and set the key at the first `eval`
    return any(group.get("train_mode", True) for group in optimizer.param_groups)


def put_average(optimizer: Any) -> None:
    """Put the average into the parameters, and keep the weights that are trained in the state: `TRAINED`. Idempotent.

    A checkpoint of model and optimizer that is saved then holds the average as the weights, and resumes to the bit.
    """
    if not has_trained_weights(optimizer):
        return
    with _unseen_by_autograd(optimizer):
        for param, state in _states(optimizer):
            state[TRAINED] = param.detach().clone()
        optimizer.eval()
    _drop_empty_states(optimizer)


def put_trained_weights(optimizer: Any) -> None:
    """Put the weights that are trained back into the parameters, to the bit. Idempotent.

    Where nobody kept them, as in a checkpoint that was saved by `optimizer.eval()` alone, they are computed.
    """
    if has_trained_weights(optimizer):
        return
    with _unseen_by_autograd(optimizer):
        optimizer.train()
        for param, state in _states(optimizer):
            if TRAINED in state:
                param.copy_(state.pop(TRAINED))
    _drop_empty_states(optimizer)


@contextmanager
def _unseen_by_autograd(optimizer: Any) -> Iterator[None]:
    """Let parameters change in a validation, or between a forward pass and its backward pass.

    Inference mode is off, because training needs the copies that are made here. Version counters stay as they
    are: if a checkpoint is saved between the two passes, autograd would refuse the weights as changed, although they
    are back to the bit.
    """
    params = tuple(param for group in optimizer.param_groups for param in group["params"])
    with torch.inference_mode(False), torch.no_grad(), _unsafe_preserve_version_counter(params):
        yield


def _states(optimizer: Any) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """Parameters that have had a step, with their state."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [(param, optimizer.state[param]) for param in params if optimizer.state.get(param)]


def _drop_empty_states(optimizer: Any) -> None:
    """Remove the empty states that `eval` and `train` create by reading the state of parameters without one."""
    for param in [param for param, state in optimizer.state.items() if not state]:
        del optimizer.state[param]


def check_constant(optimizer: Optimizer, curves: Sequence[Schedule | None]) -> None:
    """Refuse a learning-rate curve that does not suit a schedule-free optimizer.

    Args:
        optimizer: any optimizer; without a schedule-free part, it may have any curve.
        curves: the curve of each group's learning rate; None for a constant one.

    Raises:
        UsageError: a curve that is not constant after its warmup; a warmup here and in the optimizer.
    """
    names = {id(group): type(part).__name__ for part in schedule_free_parts(optimizer) for group in part.param_groups}
    for group, curve in zip(optimizer.param_groups, curves, strict=True):
        name = names.get(id(group))
        if name is None or curve is None:
            continue
        if not isinstance(curve, WarmupConstant):
            raise UsageError(
                f"schedule={type(curve).__name__}: {name} wants a constant learning rate, since its average of the "
                "weights takes the place of the decay: take WarmupConstant, or no schedule"
            )
        if curve.warmup_steps and group.get("warmup_steps"):
            raise UsageError(
                f"schedule: WarmupConstant.warmup_steps={curve.warmup_steps} and {name}.warmup_steps="
                f"{group['warmup_steps']} would multiply: set one of them to 0"
            )
