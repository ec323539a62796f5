"""bf16 products over fp32 weights: the default for pretraining on everything since Ampere."""

from contextlib import AbstractContextManager
from typing import Any

from torch import bfloat16, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_tricks._lightning import pl
from lightning_tricks.optim.state_storage import take_masters
from lightning_tricks.precision._autocast import Autocast, refuse_strategy


class BF16Mixed(pl.plugins.Precision):
    """Autocast to bf16; weights, gradients and optimizer state stay in fp32.

    It does the same as Lightning's `precision: bf16-mixed`, and more: gradients of fused optimizers can be clipped;
    under FSDP2 the sharding casts (`fsdp2_policy`) in place of autocast: weights are gathered in bf16 and gradients
    reduced in fp32.

    Attributes:
        fsdp2_policy: for a module that shards itself: `fully_shard(block, mp_policy=plugin.fsdp2_policy)`.

    Raises:
        UsageError: when training starts, under a strategy with a precision of its own (FSDP1, DeepSpeed).

    Source: Kalamkar et al. 2019, https://arxiv.org/abs/1905.12322 (as good as fp32, with its hyper-parameters and
        without loss scaling).
    """

    precision = "bf16-mixed"

    def __init__(self) -> None:
        self._autocast = Autocast(bfloat16)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @property
    def fsdp2_policy(self) -> MixedPrecisionPolicy:
        """Weights gathered in bf16, gradients reduced in fp32."""
        return self._autocast.fsdp2_policy

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Find out the weights' device, and whether FSDP2 casts; the weights do not change."""
        refuse_strategy(self, module)
        self._autocast.follow(module)
        return module

    def forward_context(self) -> AbstractContextManager[None]:
        """Wrap a forward pass."""
        return self._autocast.context()

    def connect(self, model: Any, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        """Take the fp32 masters over from a checkpoint of `BF16True`."""
        for optimizer in optimizers:
            optimizer.register_load_state_dict_post_hook(take_masters)
        return model, optimizers, lr_schedulers
