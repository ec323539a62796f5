"""Figures of a whole validation set as torchmetrics: sums over batches and ranks, and one division at the end."""

from lightning_tricks.metrics.bits_per_byte import BitsPerByte
from lightning_tricks.metrics.token_loss import TokenLoss, TokenPerplexity

__all__ = ["BitsPerByte", "TokenLoss", "TokenPerplexity"]
