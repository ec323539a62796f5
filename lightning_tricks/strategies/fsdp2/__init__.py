"""PyTorch's fully_shard for any LightningModule: sharding, checkpointing of blocks, sharded checkpoints."""
