"""Placing tensors on devices."""

from lightning_tricks.strategies.shard_blocks import shard_blocks

__all__ = ["shard_blocks"]
