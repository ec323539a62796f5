"""The race's stock arm: what a Lightning user writes without a library, on the data of the other arms."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.hand_written import HandWritten
from lightning_tricks import GPT2, BitsPerByte
from lightning_tricks._trainer.lightning import pl


class Stock(pl.LightningModule):
    """GPT-2 by hand; AdamW with torch's defaults on all parameters, a constant learning rate.

    Args:
        lr: learning rate, the one setting that the race tunes.
    """

    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.lr = lr
        shape = GPT2(vocab_size=2048, d_model=128, n_layers=4, n_heads=2, max_seq_len=256)
        self.net = HandWritten(shape, 256)
        for weight in self.net.parameters():  # as nanoGPT and minGPT do
            if weight.ndim == 2:
                torch.nn.init.normal_(weight, std=0.02)
        self.bits_per_byte = BitsPerByte()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Mean cross-entropy of the batch."""
        return self.net(batch["input_ids"], batch["labels"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Add the batch to the bits per byte, which are those of the other arms."""
        logits = self.net.head(self.net.features(batch["input_ids"])).float()
        nats = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        self.bits_per_byte.update(nats, batch["n_bytes"])
        self.log("val/bits_per_byte", self.bits_per_byte)

    def configure_optimizers(self) -> Any:
        """AdamW as torch has it."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)
