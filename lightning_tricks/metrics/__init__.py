"""Metrics of a whole validation set, as torchmetrics: sums over batches and ranks, and one division at the end."""

from lightning_tricks.metrics.token_metrics import BitsPerByte as BitsPerByte
from lightning_tricks.metrics.token_metrics import TokenLoss as TokenLoss
from lightning_tricks.metrics.token_metrics import TokenPerplexity as TokenPerplexity
