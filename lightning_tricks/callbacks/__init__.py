"""Lightning callbacks: each watches one thing."""

from lightning_tricks.callbacks.compression_baseline import CompressionBaseline
from lightning_tricks.callbacks.training_progress_bar import TrainingProgressBar

__all__ = ["CompressionBaseline", "TrainingProgressBar"]
