"""Autocast for every plugin: on the model's own device, and off where FSDP2 casts already; strategies it refuses."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from lightning_tricks._errors import UsageError
from lightning_tricks._trainer import is_a, trainer_of

_OWN_PRECISION = {"DeepSpeedStrategy": "DeepSpeed", "FSDPStrategy": "FSDP1", "XLAStrategy": "XLA"}


class Autocast:
    """Autocast to `dtype` on the model's device, once it is known; off where FSDP2 casts.

    Args:
        dtype: of the products, `torch.bfloat16` or `torch.float16`.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.device_type = "cuda" if torch.cuda.is_available() else "cpu"
        self.enabled = True

    @property
    def fsdp2_policy(self) -> MixedPrecisionPolicy:
        """FSDP2's casts in its place: weights gathered in `dtype`, gradients reduced in fp32."""
        return MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)

    def follow(self, module: nn.Module) -> None:
        """Find out the device of a module that is about to be trained, and whether FSDP2 casts for it."""
        trainer = trainer_of(module)
        if trainer is not None:
            self.device_type = trainer.strategy.root_device.type
        self.enabled = not casts_by_fsdp2(module, self.dtype)

    @contextmanager
    def context(self) -> Iterator[None]:
        """Wrap a forward pass. Weight casts are not cached: activation checkpointing must cast them again."""
        with torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=False):
            yield


def casts_by_fsdp2(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether FSDP2 casts all parameters and inputs of `module` to `dtype`: autocast would only repeat it."""
    sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
    policies = [part._get_fsdp_state()._mp_policy for part in sharded]  # torch has no public way to ask
    whole = all(isinstance(parameter, DTensor) for parameter in module.parameters())
    return (
        bool(policies)
        and whole
        and all(policy.param_dtype == dtype and policy.cast_forward_inputs for policy in policies)
    )


def refuse_strategy(plugin: Any, module: nn.Module) -> None:
    """Refuse a strategy that has a precision of its own, under which the plugin could not keep its promises.

    Raises:
        UsageError: `module` is about to be trained by DeepSpeed, FSDP1 or XLA. (FSDP1 refuses any plugin but its own
            already when the Trainer is built.)
    """
    trainer = trainer_of(module)
    strategy = getattr(trainer, "strategy", None)
    found = next((own for name, own in _OWN_PRECISION.items() if is_a(strategy, name)), None)
    if found is not None:
        raise UsageError(
            f"plugins: {type(plugin).__name__} does not work under {found}, which has a precision of its own: remove "
            "the plugin and set trainer.precision, or shard with FSDP2 (FSDP2Strategy)"
        )
