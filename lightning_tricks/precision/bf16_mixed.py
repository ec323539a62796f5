"""bf16 products over fp32 weights: the default for pretraining on everything since Ampere."""

from lightning_tricks.precision._autocast import AutocastPrecision


class BF16Mixed(AutocastPrecision):
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
