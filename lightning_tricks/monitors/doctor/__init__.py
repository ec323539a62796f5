"""The questions that a doctor asks of a run, and the callback that asks them during training."""
