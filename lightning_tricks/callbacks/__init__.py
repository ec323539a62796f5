"""The public names of every callback: those of `monitors` watch, those of `guards` act."""

from lightning_tricks.guards.lean_loop import LeanLoop
from lightning_tricks.metrics.metric_buffer import MetricBuffer
from lightning_tricks.monitors.compression_baseline import CompressionBaseline
from lightning_tricks.monitors.dashboard.tensorboard_dashboard import TensorBoardDashboard
from lightning_tricks.monitors.grad_norm_monitor import GradNormMonitor
from lightning_tricks.monitors.inside.activation_monitor import ActivationMonitor
from lightning_tricks.monitors.inside.attention_monitor import AttentionMonitor
from lightning_tricks.monitors.lr_monitor import LRMonitor
from lightning_tricks.monitors.memory_monitor import MemoryMonitor
from lightning_tricks.monitors.mfu.mfu_monitor import MFUMonitor
from lightning_tricks.monitors.precision.precision_monitor import PrecisionMonitor
from lightning_tricks.monitors.prediction_writer import PredictionWriter
from lightning_tricks.monitors.ranks.rank_monitor import RankMonitor
from lightning_tricks.monitors.sample_text import SampleText
from lightning_tricks.monitors.training_progress_bar import TrainingProgressBar
from lightning_tricks.monitors.update_monitor import UpdateMonitor

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
