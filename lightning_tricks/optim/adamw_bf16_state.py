"""AdamW over fp32 weights with both of its averages in bf16: 4 bytes of state a parameter in place of 8."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, bfloat16

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.tensors import local

__all__ = ["AdamWBF16State"]

_AVERAGES = ("exp_avg", "exp_avg_sq")


class AdamWBF16State(torch.optim.AdamW):
    """AdamW whose averages of gradients and of their squares are stored in bf16; weights and gradients stay in fp32.

    torch's fused kernel computes the update in fp32, and rounds both averages to the nearest bf16 value; it accepts
    averages of another dtype than the weights' on CUDA only. So an average with beta 0.999 does not move in a step that
    would change it by less than 1/512 of its value. Checkpoints hold bf16, and a load keeps the averages to the bit.

    For weights that are in bf16 themselves, the plugin `BF16True` keeps averages in fp32.

    Args:
        params: parameters or groups.
        lr: learning rate; 3e-4 as `default_adamw`.
        betas: of the two averages; (0.9, 0.95) as `default_adamw`.
        eps: added to the root of the second average.
        weight_decay: torch's default; `build_optimizer` and OptimizerMixin have their own.

    Raises:
        UsageError: torch has no kernel for it on the device of the parameters, such as a CPU; a parameter that is not
            in fp32.

    Source: `fused_opt_states_bf16` of torchtitan,
        https://github.com/pytorch/torchtitan/blob/main/docs/bf16_optimizer_states.md (after DeepSeek-V3).
    """

    mup_rule = "adam"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and create its averages as zeros in bf16: torch would create them in fp32 at the first step."""
        super().add_param_group(param_group)
        params: list[Tensor] = self.param_groups[-1]["params"]
        _refuse(params)
        for param in params:
            averages = {name: torch.zeros_like(param, dtype=bfloat16, requires_grad=False) for name in _AVERAGES}
            self.state[param] = {"step": torch.zeros((), device=param.device), **averages}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by `load_state_dict`, which has cast the averages to the dtype of the parameters."""
        super().__setstate__(state)
        own = [param for group in self.param_groups for param in group["params"]]
        for held in filter(None, map(self.state.get, own)):  # in a ComposedOptimizer, the state is that of all
            held.update({name: held[name].to(bfloat16) for name in _AVERAGES if name in held})


def _refuse(params: list[Tensor]) -> None:
    for param in params:
        if param.dtype != torch.float32:
            raise UsageError(
                f"AdamWBF16State: a parameter is {str(param.dtype).removeprefix('torch.')}: it is for fp32 weights, as "
                "with the plugin BF16Mixed; with BF16True take AdamW"
            )
    for device in dict.fromkeys(local(param).device for param in params):
        if not _has_kernel(device):
            raise UsageError(
                f"AdamWBF16State: torch {torch.__version__} has no kernel for averages in bf16 on {device.type}, only "
                "on CUDA: take AdamW"
            )


def _has_kernel(device: torch.device) -> bool:
    """Whether torch's fused kernel accepts fp32 weights with bf16 averages there: a trial with one element."""
    fp32, bf16 = ([torch.zeros(1, dtype=dtype, device=device)] for dtype in (torch.float32, bfloat16))
    try:
        torch._fused_adamw_(
            fp32, [fp32[0].clone()], bf16, [bf16[0].clone()], [], [torch.ones((), device=device)],
            lr=0.0, beta1=0.9, beta2=0.95, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
    except RuntimeError:
        return False
    return True
