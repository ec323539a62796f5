"""The size of the global batch: a warmup of it, and learning rates that follow it."""
