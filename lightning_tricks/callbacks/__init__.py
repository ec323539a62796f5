"""The public names of every callback: those of `monitors` watch, those of `guards` act."""

from lightning_tricks.guards.averages.ema import EMA as EMA
from lightning_tricks.guards.averages.tail_average import TailAverage as TailAverage
from lightning_tricks.guards.exact_resume.exact_resume import ExactResume as ExactResume
from lightning_tricks.guards.gc_control import GCControl as GCControl
from lightning_tricks.guards.hang_watchdog.hang_watchdog import HangWatchdog as HangWatchdog
from lightning_tricks.guards.init_from import InitFrom as InitFrom
from lightning_tricks.guards.lean_loop import LeanLoop as LeanLoop
from lightning_tricks.guards.preemption.preemption import Preemption as Preemption
from lightning_tricks.guards.saving.safe_checkpoint import SafeCheckpoint as SafeCheckpoint
from lightning_tricks.guards.step_guard.step_guard import StepGuard as StepGuard
from lightning_tricks.metrics.metric_buffer import MetricBuffer as MetricBuffer
from lightning_tricks.monitors.compression_baseline import CompressionBaseline as CompressionBaseline
from lightning_tricks.monitors.dashboard.tensorboard_dashboard import TensorBoardDashboard as TensorBoardDashboard
from lightning_tricks.monitors.goodput.goodput_monitor import GoodputMonitor as GoodputMonitor
from lightning_tricks.monitors.grad_norm_monitor import GradNormMonitor as GradNormMonitor
from lightning_tricks.monitors.inside.activation_monitor import ActivationMonitor as ActivationMonitor
from lightning_tricks.monitors.inside.attention_monitor import AttentionMonitor as AttentionMonitor
from lightning_tricks.monitors.lr_monitor import LRMonitor as LRMonitor
from lightning_tricks.monitors.memory_monitor import MemoryMonitor as MemoryMonitor
from lightning_tricks.monitors.mfu.mfu_monitor import MFUMonitor as MFUMonitor
from lightning_tricks.monitors.precision.precision_monitor import PrecisionMonitor as PrecisionMonitor
from lightning_tricks.monitors.prediction_writer import PredictionWriter as PredictionWriter
from lightning_tricks.monitors.ranks.rank_monitor import RankMonitor as RankMonitor
from lightning_tricks.monitors.sample_text import SampleText as SampleText
from lightning_tricks.monitors.training_progress_bar import TrainingProgressBar as TrainingProgressBar
from lightning_tricks.monitors.update_monitor import UpdateMonitor as UpdateMonitor
