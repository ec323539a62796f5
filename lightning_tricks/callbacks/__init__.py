"""The public names of every callback: `monitors` watch, `guards` act, `outputs` write for people."""

import sys

from lightning_tricks.guards.averages.ema import EMA as EMA
from lightning_tricks.guards.averages.tail_average import TailAverage as TailAverage
from lightning_tricks.guards.batch_size_warmup import BatchSizeWarmup as BatchSizeWarmup
from lightning_tricks.guards.decay_on_demand import DecayOnDemand as DecayOnDemand
from lightning_tricks.guards.exact_resume.exact_resume import ExactResume as ExactResume
from lightning_tricks.guards.gc_control import GCControl as GCControl
from lightning_tricks.guards.init_from import InitFrom as InitFrom
from lightning_tricks.guards.lean_loop import LeanLoop as LeanLoop
from lightning_tricks.guards.lr_scaling_rule import LRScalingRule as LRScalingRule
from lightning_tricks.guards.preemption.preemption import Preemption as Preemption
from lightning_tricks.guards.saving.safe_checkpoint import SafeCheckpoint as SafeCheckpoint
from lightning_tricks.guards.schedule_free import ScheduleFree as ScheduleFree
from lightning_tricks.guards.spike_rollback.spike_rollback import SpikeRollback as SpikeRollback
from lightning_tricks.guards.step_guard.step_guard import StepGuard as StepGuard
from lightning_tricks.guards.total_tokens import TotalTokens as TotalTokens
from lightning_tricks.guards.watchdog.hang_watchdog import HangWatchdog as HangWatchdog
from lightning_tricks.guards.watchdog.rank_monitor import RankMonitor as RankMonitor
from lightning_tricks.metrics.metric_buffer import MetricBuffer as MetricBuffer
from lightning_tricks.monitors.activation_monitor import ActivationMonitor as ActivationMonitor
from lightning_tricks.monitors.attention_monitor import AttentionMonitor as AttentionMonitor
from lightning_tricks.monitors.doctor_monitor import DoctorMonitor as DoctorMonitor
from lightning_tricks.monitors.goodput_monitor import GoodputMonitor as GoodputMonitor
from lightning_tricks.monitors.grad_norm_monitor import GradNormMonitor as GradNormMonitor
from lightning_tricks.monitors.lr_monitor import LRMonitor as LRMonitor
from lightning_tricks.monitors.memory_monitor import MemoryMonitor as MemoryMonitor
from lightning_tricks.monitors.mfu.mfu_monitor import MFUMonitor as MFUMonitor
from lightning_tricks.monitors.precision_monitor import PrecisionMonitor as PrecisionMonitor
from lightning_tricks.monitors.run_ledger.run_ledger import RunLedger as RunLedger
from lightning_tricks.monitors.shadow_gradient.shadow_gradient import ShadowGradient as ShadowGradient
from lightning_tricks.monitors.tensorboard_dashboard import TensorBoardDashboard as TensorBoardDashboard
from lightning_tricks.monitors.training_progress_bar import TrainingProgressBar as TrainingProgressBar
from lightning_tricks.monitors.update_monitor import UpdateMonitor as UpdateMonitor
from lightning_tricks.outputs.branch_lineage import BranchLineage as BranchLineage
from lightning_tricks.outputs.compression_baseline import CompressionBaseline as CompressionBaseline
from lightning_tricks.outputs.lm_eval.lm_eval import LMEval as LMEval
from lightning_tricks.outputs.prediction_writer import PredictionWriter as PredictionWriter
from lightning_tricks.outputs.sample_text import SampleText as SampleText

# the path that earlier versions wrote into the config.yaml of a branch
sys.modules["lightning_tricks.monitors.branch_lineage"] = sys.modules[BranchLineage.__module__]
