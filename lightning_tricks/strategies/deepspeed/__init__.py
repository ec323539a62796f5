"""DeepSpeed's ZeRO for any LightningModule, and its checkpoints as one file."""
