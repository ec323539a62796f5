"""Which type the state of an optimizer of bf16 weights rests in between steps, and in checkpoints."""

from typing import Any

import torch
from torch import Tensor, bfloat16
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_tricks.optim.stochastic_rounding import copy_rounded_, local

MASTER = "master"


class RestingState:
    """Moves the state of a bf16 parameter between the type it rests in and the fp32 that a step computes in.

    Also guards every later `optimizer.load_state_dict`: torch casts floating state to the type of the parameters, so
    that fp32 averages and masters would come back as bf16.

    Args:
        optimizer: whose state it is.
        dtype: that tensors with one value for each of the parameter's rest in, fp32 or bf16. Others stay fp32: factored
            averages, counts and what belongs to a parameter of a single number are small.
        masters: whether a loaded `master` is kept, always in fp32, or dropped.
    """

    def __init__(self, optimizer: Optimizer, dtype: torch.dtype, masters: bool) -> None:
        self._dtype, self._keeps_masters = dtype, masters
        self._saved: list[Any] = []
        optimizer.register_load_state_dict_pre_hook(self._before_load)
        optimizer.register_load_state_dict_post_hook(self._after_load)

    def lift(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state of one parameter as the optimizer is to see it: in fp32, without a master."""
        return {key: _in_fp32(value) for key, value in state.items() if key != MASTER}

    def rest(self, param: Tensor, state: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
        """The state of one parameter after a step; what rests in bf16 is rounded stochastically."""
        rested = dict(state)
        for key in sorted(state, key=str):  # a loaded state may come in another order
            if self._dtype_of(param, key, state[key]) == bfloat16:
                rested[key] = torch.empty_like(state[key], dtype=bfloat16)
                copy_rounded_(local(rested[key]), local(state[key]), generator)
        return rested

    def _dtype_of(self, param: Tensor, key: Any, value: Any) -> torch.dtype:
        # a class of its own, such as an 8-bit state, has its own way to rest
        plain = type(value) in (Tensor, DTensor) and value.is_floating_point() and key not in ("step", MASTER)
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
        """The saved values in the place of those that torch has cast."""
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


@torch.no_grad()
def take_masters(optimizer: Optimizer) -> None:
    """Give fp32 weights the value of the master that a loaded checkpoint of bf16 weights has for them, and drop it.

    A master that is not what the weight was rounded from belongs to another weight, and is dropped only. Meant for
    `optimizer.register_load_state_dict_post_hook`.
    """
    for param, state in optimizer.state.items():
        master = state.pop(MASTER, None)
        if master is None or param.dtype != torch.float32:
            continue
        here, there = local(param), local(master)
        if here.shape == there.shape:
            there = there.to(here.device, torch.float32)
            here.copy_(torch.where(there.to(bfloat16) == here, there, here))
