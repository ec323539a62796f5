"""Lightning callbacks: each watches one thing."""

from lightning_tricks.callbacks.activation_monitor import ActivationMonitor
from lightning_tricks.callbacks.attention_monitor import AttentionMonitor
from lightning_tricks.callbacks.compression_baseline import CompressionBaseline
from lightning_tricks.callbacks.grad_norm_monitor import GradNormMonitor
from lightning_tricks.callbacks.lean_loop import LeanLoop
from lightning_tricks.callbacks.lr_monitor import LRMonitor
from lightning_tricks.callbacks.memory_monitor import MemoryMonitor
from lightning_tricks.callbacks.metric_buffer import MetricBuffer
from lightning_tricks.callbacks.mfu_monitor import MFUMonitor
from lightning_tricks.callbacks.precision_monitor import PrecisionMonitor
from lightning_tricks.callbacks.prediction_writer import PredictionWriter
from lightning_tricks.callbacks.rank_monitor import RankMonitor
from lightning_tricks.callbacks.sample_text import SampleText
from lightning_tricks.callbacks.tensorboard_dashboard import TensorBoardDashboard
from lightning_tricks.callbacks.training_progress_bar import TrainingProgressBar
from lightning_tricks.callbacks.update_monitor import UpdateMonitor

__all__ = [
    "ActivationMonitor",
    "AttentionMonitor",
    "CompressionBaseline",
    "GradNormMonitor",
    "LRMonitor",
    "LeanLoop",
    "MFUMonitor",
    "MemoryMonitor",
    "MetricBuffer",
    "PrecisionMonitor",
    "PredictionWriter",
    "RankMonitor",
    "SampleText",
    "TensorBoardDashboard",
    "TrainingProgressBar",
    "UpdateMonitor",
]
