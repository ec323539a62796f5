"""Lightning callbacks: each watches one thing."""

from lightning_tricks.callbacks.compression_baseline import CompressionBaseline
from lightning_tricks.callbacks.lr_monitor import LRMonitor
from lightning_tricks.callbacks.metric_buffer import MetricBuffer
from lightning_tricks.callbacks.training_progress_bar import TrainingProgressBar

__all__ = [
    "CompressionBaseline",
    "LRMonitor",
    "MetricBuffer",
    "TrainingProgressBar",
]
