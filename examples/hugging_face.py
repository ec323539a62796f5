"""A Hugging Face model under a plain Trainer: three lines are added to watch the run.

    pip install transformers
    python examples/hugging_face.py
    tensorboard --logdir lightning_logs

A Llama of two tiny layers, with random weights, learns to count in steps: it takes seconds on a CPU and downloads
nothing. The progress line shows loss, gradient norm, learning rate, tokens/s and MFU; TensorBoard has the same as
curves. A model from the hub is `AutoModelForCausalLM.from_pretrained(...)` in place of the one below.
"""

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_tricks as lt  # added: 1 of 3

VOCABULARY, LENGTH = 64, 48


class Counting(Dataset):
    """Sequences such as 5, 8, 11, ... modulo the vocabulary, in steps of 1 to 4: the first two tokens tell the rest."""

    def __init__(self, n: int, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        start, step = torch.randint(VOCABULARY, (n, 1), generator=rng), torch.randint(1, 5, (n, 1), generator=rng)
        self.ids = (start + step * torch.arange(LENGTH)) % VOCABULARY

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index):
        ids = self.ids[index]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


class CausalLM(pl.LightningModule):
    """Fine-tunes any causal language model of transformers."""

    def __init__(self, model, lr: float = 3e-3) -> None:
        super().__init__()
        self.model = model
        self.lr = lr

    def training_step(self, batch, batch_idx):
        """Mean loss of a batch."""
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        """Mean loss of a batch."""
        self.log("val_loss", self.model(**batch).loss)

    def configure_optimizers(self):
        """AdamW at a constant learning rate."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.1)


def main() -> None:
    """Train for 100 optimizer steps of two micro-batches each."""
    pl.seed_everything(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    watch = [lt.TrainingProgressBar(), lt.GradNormMonitor(), lt.LRMonitor(), lt.MFUMonitor(), lt.MemoryMonitor()]  # 2
    trainer = pl.Trainer(
        max_steps=100,
        accumulate_grad_batches=2,
        val_check_interval=100,
        log_every_n_steps=10,
        gradient_clip_val=1.0,
        accelerator="cpu",
        devices=1,
        callbacks=[*watch, lt.ActivationMonitor(), lt.TensorBoardDashboard("val_loss")],  # 3
    )
    training = DataLoader(Counting(3200, seed=0), batch_size=16, shuffle=True)
    trainer.fit(CausalLM(LlamaForCausalLM(config)), training, DataLoader(Counting(64, seed=1), batch_size=16))


if __name__ == "__main__":
    main()
