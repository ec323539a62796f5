"""LightningModule mixins: each owns one method, and goes before the LightningModule in the bases."""

from lightning_tricks.mixins.gradient_clipping_mixin import GradientClippingMixin
from lightning_tricks.mixins.optimizer_mixin import OptimizerMixin
from lightning_tricks.mixins.token_mean_mixin import TokenMeanMixin

__all__ = ["GradientClippingMixin", "OptimizerMixin", "TokenMeanMixin"]
