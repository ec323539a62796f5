"""bf16 products over fp32 weights: the default for pretraining on everything since Ampere; and what others share."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from lightning_tricks._trainer.lightning import pl
from lightning_tricks._trainer.objects import trainer_of
from lightning_tricks._trainer.refusals import PRECISION_PLUGIN

__all__ = ["BF16Mixed"]


class AutocastPrecision(pl.plugins.Precision):
    """Autocast to `_dtype` on the model's device; off where FSDP2 casts parameters and inputs already.

    Attributes:
        device: type of the model's device, `cpu` or `cuda`; before training, of this machine's.
    """

    _dtype = torch.bfloat16  # of matrix products

    def __init__(self) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._autocasts = True

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @property
    def fsdp2_policy(self) -> MixedPrecisionPolicy:
        """FSDP2's casts in the place of autocast: weights gathered in 16 bits, gradients reduced in fp32."""
        return MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=torch.float32)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Find out the weights' device, and whether FSDP2 casts; the weights do not change.

        Raises:
            UsageError: a strategy that has a precision of its own.
        """
        trainer = trainer_of(module)
        PRECISION_PLUGIN.check(getattr(trainer, "strategy", None), f"plugins: {type(self).__name__}")
        if trainer is not None:
            self.device = trainer.strategy.root_device.type
        self._autocasts = not _casts_by_fsdp2(module, self._dtype)
        return module

    def forward_context(self) -> AbstractContextManager[Any]:
        """Wrap a forward pass. Weight casts are not cached: activation checkpointing must cast them again."""
        return torch.autocast(self.device, dtype=self._dtype, enabled=self._autocasts, cache_enabled=False)


def _casts_by_fsdp2(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether FSDP2 casts all parameters and inputs of `module` to `dtype`: autocast would only repeat it."""
    # torch has no public way to ask
    policies = [part._get_fsdp_state()._mp_policy for part in module.modules() if isinstance(part, FSDPModule)]
    casts = bool(policies) and all(policy.param_dtype == dtype and policy.cast_forward_inputs for policy in policies)
    return casts and all(isinstance(parameter, DTensor) for parameter in module.parameters())


class BF16Mixed(AutocastPrecision):
    """Autocast to bf16; weights, gradients and optimizer state stay in fp32.

    It does the same as Lightning's `precision: bf16-mixed`, and more: gradients of fused optimizers can be clipped
    (as Lightning does after 2.6); under FSDP2 the sharding casts (`fsdp2_policy`) in place of autocast: weights are
    gathered in bf16 and gradients reduced in fp32.

    Attributes:
        fsdp2_policy: for a module that shards itself: `fully_shard(block, mp_policy=plugin.fsdp2_policy)`.

    Raises:
        UsageError: when training starts, under a strategy with a precision of its own (FSDP1, DeepSpeed).

    Source: Kalamkar et al. 2019, https://arxiv.org/abs/1905.12322 (as good as fp32, with its hyper-parameters and
        without loss scaling).
    """

    precision = "bf16-mixed"
