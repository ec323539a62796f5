"""The dtype in which optimizer state of bf16 weights is stored between steps, and in checkpoints."""

from typing import Any

import torch
from torch import Tensor, bfloat16
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_tricks._tensors import local
from lightning_tricks.optim.masters import MASTER
from lightning_tricks.optim.stochastic_rounding import copy_rounded_


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
