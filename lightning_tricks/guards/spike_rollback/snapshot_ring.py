"""The last few states of a run in the host's memory, each with the step that comes next."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_tricks.checkpoints.snapshot import PinnedBuffers
from lightning_tricks.guards.spike_rollback.training_state import TrainingState


@dataclass(frozen=True)
class Snapshot:
    """A state, and where the run stood.

    Args:
        step: the next one, `trainer.global_step`.
        sample: position of its first sample; None for data without positions.
        detector: state of the SpikeDetector.
        state: weights and optimizer.
        buffers: page-locked memory of the state; None on a CPU.
    """

    step: int
    sample: int | None
    detector: dict[str, Any]
    state: TrainingState
    buffers: PinnedBuffers | None


class SnapshotRing:
    """At most `size` snapshots; a new one takes the memory of the oldest."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._snapshots: list[Snapshot] = []  # the oldest first
        self._free: list[PinnedBuffers] = []

    def __len__(self) -> int:
        return len(self._snapshots)

    def take(self, trainer: Any, pl_module: Any, sample: int | None, detector: dict[str, Any]) -> Snapshot | None:
        """Copy the present state; None where the size is 0."""
        if self.size == 0:
            return None
        if len(self) == self.size:
            self._drop(self._snapshots[0])
        buffers = None
        if trainer.strategy.root_device.type == "cuda":
            buffers = self._free.pop() if self._free else PinnedBuffers()
        state = TrainingState(trainer, pl_module, buffers)
        taken = Snapshot(trainer.global_step, sample, detector, state, buffers)
        self._snapshots.append(taken)
        return taken

    def newest(self, is_good: Callable[[int], bool]) -> Snapshot | None:
        """The newest snapshot of a good step."""
        return next((taken for taken in reversed(self._snapshots) if is_good(taken.step)), None)

    def keep(self, is_good: Callable[[int], bool]) -> None:
        """Drop the snapshots of other steps."""
        for taken in [taken for taken in self._snapshots if not is_good(taken.step)]:
            self._drop(taken)

    def _drop(self, taken: Snapshot) -> None:
        self._snapshots = [other for other in self._snapshots if other is not taken]
        if taken.buffers is not None:
            self._free.append(taken.buffers)
