"""Write one line a step about data, random state, loss and weights, by which `ledger diff` compares two runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_tricks._core.accumulation import accumulation
from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.random_state import gather
from lightning_tricks._trainer.lightning import Module, Trainer, pl, rank_zero_warn
from lightning_tricks._trainer.loop import hooks_have_batch, is_accumulating, logging_step
from lightning_tricks._trainer.objects import folder_of_run
from lightning_tricks._trainer.run_facts import data_rank, enabled_scaler, stage_groups, step_samples, weights_layout
from lightning_tricks.logs.ledger_file import NAME, LedgerFile
from lightning_tricks.metrics.metric_buffer import MetricBuffer
from lightning_tricks.metrics.row import Row
from lightning_tricks.metrics.step_loss import LOSS
from lightning_tricks.monitors._bit_sums import (
    MODULUS,
    WeightSum,
    batch_sums,
    optimizer_sum,
    other_random_sum,
    read,
    step_sum,
    torch_random_sum,
)

__all__ = ["RunLedger"]

_DONE = "_ledger/done"


class RankValues(NamedTuple):
    """The values of one step on one rank; None for a value that it does not have."""

    batch: int | None
    torch_random: int
    other_random: int
    optimizer: int | None
    weights: int | None


def step_line(
    step: int,
    samples: list[tuple[int, int]] | None,
    loss: float | None,
    ranks: Sequence[RankValues | None],
    counted: Sequence[int],
) -> dict[str, Any]:
    """The line of a step, without its chain.

    Args:
        step: 0 for the first optimizer step, as the logs count.
        samples: first and last position of each run of consecutive samples, of all ranks.
        loss: of the step, over all ranks; None where it is not known.
        ranks: the values of each rank; None for a rank that could not be asked.
        counted: the ranks whose batches together are the global batch, each row once.
    """
    shares = [rank and rank.batch for rank in map(ranks.__getitem__, counted)]
    known = [share for share in shares if share is not None]
    batch = sum(known) % MODULUS if len(known) == len(counted) else None
    return {
        "step": step,
        "samples": None if samples is None else [list(run) for run in samples],
        "batch": _hex(batch, 16),
        "torch_random": _once([_hex(rank and rank.torch_random, 8) for rank in ranks]),
        "other_random": _once([_hex(rank and rank.other_random, 8) for rank in ranks]),
        "loss": _number(loss),
        "optimizer": _once([_hex(rank and rank.optimizer, 16) for rank in ranks]),
        "weights": _once([_hex(rank and rank.weights, 16) for rank in ranks]),
    }


def _once(values: list[Any]) -> Any:
    """The value that all ranks have in common, or else the list of their values."""
    return values[0] if all(value == values[0] for value in values) else values


def _hex(number: int | None, digits: int) -> str | None:
    return None if number is None else f"{number:0{digits}x}"


def _number(value: float | None) -> float | str | None:
    """A float with all its digits; NaN and infinities, which JSON does not have, as text."""
    return value if value is None or math.isfinite(value) else str(value)


@dataclass
class _Step:
    """A step that is not written yet: facts on the host, and sums that wait on the device, 0-dim int64 tensors."""

    samples: list[tuple[int, int]] | None
    rows: int = 0  # number of rows in a micro-batch
    batch: list[list[Tensor]] = field(default_factory=list)  # of the tensors in each micro-batch
    optimizer: Tensor | None = None
    weights: Tensor | None = None
    random: tuple[int, int] = (0, 0)  # sums over torch's state and over the others, once the step is done


class RunLedger(pl.Callback):
    """Write `ledger.jsonl` in the run's folder, a line for each optimizer step. Never changes training.

    Steps count as in the logs: the first one is step 0. For two runs that should be equal,
    `python -m lightning_tricks ledger diff A B` names the first step at which they differ, and the first entry of that
    step which differs. A line holds, in the order of cause and effect:

    - `samples`: positions of the step's samples in data that have them (TextData, TokenData);
    - `batch`: a sum over the bits of all tensors of the batch, in which each row and each place in it has a factor of
      its own. If the rows of the global batch are the same, it does not depend on how they are split over ranks and
      micro-batches;
    - `torch_random`, `other_random`: checksums of each rank's random state after the step: torch's on CPU and CUDA;
      NumPy's and Python's;
    - `loss`: the loss of the step over all micro-batches and ranks, with all its digits;
    - `optimizer`, with `cover_weights_in_steps=1` alone: a sum over the bits of each rank's optimizer state and
      settings after the step, the module's buffers and the scale of fp16;
    - `weights`: a sum over the bits of a part of each rank's weights after the step; each step sums the next part.

    Sums are of integers modulo 2**64, so that no flipped bit is lost in rounding. A value that is the same on all ranks
    stands once, others as a list by rank. Each start of the run, a resume too, writes a line `start` with the number of
    processes, the versions and the sum over all weights; steps that are trained again are appended, and none is
    removed. Each line ends in a checksum over itself and the line before, which `ledger check` follows.

    Nothing waits for the device between log steps: the values go with the MetricBuffer, and rank 0 writes an interval's
    lines at once. After an exception in a run of several processes, the last lines hold the values of rank 0 alone, and
    no loss.

    Under FSDP1 and DeepSpeed ZeRO 3, which hold no parameter whole, the lines have no `weights`.

    Args:
        path: of the file. None: `ledger.jsonl` in the run's folder, beside `checkpoints`.
        cover_weights_in_steps: optimizer steps after which every weight has been summed once; a step sums a part of at
            least 8,192 elements. 1 sums all weights and the optimizer's state at every step, to find the step at which
            one bit has changed.
            Default: 500, at which the sum costs a few calls and little memory traffic; a fault spreads to all weights
            with the next gradients.

    Raises:
        UsageError: the Trainer has two that write one file; `cover_weights_in_steps` is below 1; `path` cannot be
            written or is another kind of file.

    Source: Ma et al. 2025, Understanding Silent Data Corruption in LLM Training, https://arxiv.org/abs/2502.12340: how
    a device that computes wrong results affects a run, found by a bitwise comparison with a healthy device.
    """

    def __init__(self, path: str | None = None, cover_weights_in_steps: int = 500) -> None:
        if cover_weights_in_steps < 1:
            raise UsageError(f"RunLedger.cover_weights_in_steps={cover_weights_in_steps}: give 1 or more")
        self.path, self.cover_weights_in_steps = path, cover_weights_in_steps
        self._begin()

    def _begin(self) -> None:
        """Reset the state that belongs to one fit."""
        self._started = False  # whether the line `start` is written
        self._file: LedgerFile | None = None  # on rank 0
        self._weights: WeightSum | None = None
        self._counted: list[int] = []  # ranks whose batches make the global batch
        self._steps: dict[int, _Step] = {}

    def check_run(self, trainer: Any, datamodule: Any, stage: str) -> None:
        """Refuse a second ledger in the same file, before any process is started."""
        others = [other for other in trainer.callbacks if isinstance(other, RunLedger)]
        if len({other.path and Path(other.path).resolve() for other in others}) < len(others):
            raise UsageError(
                f"RunLedger.path={self.path}: the Trainer has two that write one file: remove one, or give it another "
                "path"
            )

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Refuse what no command has refused."""
        self.check_run(trainer, None, stage)

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Find the buffer."""
        self._begin()
        self._off = not trainer.log_every_n_steps or bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
        if not trainer.log_every_n_steps:  # type: ignore[attr-defined]
            rank_zero_warn("RunLedger writes nothing with log_every_n_steps=0: give the Trainer 1 or more")
        self._buffer = MetricBuffer.of(trainer)
        self._buffer.at_flush(self._write)
        if not self._off:
            self._buffer.step_loss()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Forget micro-batches that no optimizer step followed."""
        self._steps.pop(logging_step(trainer), None)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        """Sum the batch; before the first one, write the line `start`."""
        if self._off:
            return
        if not self._started:
            self._start(trainer, pl_module)
        number = logging_step(trainer)
        if number not in self._steps:
            self._steps[number] = _Step(step_samples(trainer))
        step = self._steps[number]
        sums, rows = batch_sums(batch if hooks_have_batch(trainer) else None)
        step.rows = step.rows or rows
        step.batch.append(sums)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After the step, sum random state and weights."""
        if self._off or is_accumulating(trainer):
            return
        device, number = trainer.strategy.root_device, logging_step(trainer)
        step = self._steps.get(number)
        if step is None:  # the batch is None, for which there is no optimizer step
            return
        step.random = torch_random_sum(device), other_random_sum()
        self._buffer.record(_DONE, 1.0)  # so that the step has a row
        if self.cover_weights_in_steps == 1:
            scaler = enabled_scaler(trainer.precision_plugin)
            step.optimizer = optimizer_sum(trainer.optimizers, pl_module, scaler, device)
        if self._weights is not None:
            step.weights = self._weights.of_part(number % self._weights.parts, device)

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Reset the state of this fit."""
        self._begin()

    def _start(self, trainer: Any, pl_module: Any) -> None:
        """Open the file and write the line `start`; reads the device once."""
        self._started, self._world = True, trainer.world_size
        self._data_rank, self._data_ranks = data_rank(trainer)
        self._find_weights(trainer, pl_module)
        total = 0 if self._weights is None else int(self._weights.of_all(trainer.strategy.root_device))
        place = Path(
            self.path or Path(trainer.strategy.broadcast(folder_of_run(trainer)), NAME)
        )  # the folder of rank 0
        everyones = self._gather((total, self._data_rank, self._open(place) if trainer.is_global_zero else ""))
        totals, ranks, errors = zip(*everyones, strict=True)
        if errors[0]:
            raise UsageError(errors[0])
        self._counted = [ranks.index(each) for each in range(self._data_ranks)]
        if self._file is not None:
            weights = f"{sum(totals) % MODULUS:016x}" if self._weights is not None else None
            self._file.append([self._start_line(trainer, weights)])

    def _open(self, path: Path) -> str:
        """Open the file. Returns the error line, which every rank raises; empty if there is no error."""
        try:
            self._file = LedgerFile(path)
        except UsageError as error:
            return str(error)
        except OSError as error:
            return f"RunLedger.path={path}: cannot be written ({error.strerror or error}): name another file"
        return ""

    def _find_weights(self, trainer: Any, pl_module: Any) -> None:
        if weights_layout(trainer.strategy) == "flat":
            rank_zero_warn(
                f"RunLedger: {type(trainer.strategy).__name__} holds no parameter whole: the ledger has no weights"
            )
            return
        groups = stage_groups(trainer)
        first = min(dist.get_process_group_ranks(groups[0])) if groups else 0
        weights = WeightSum(pl_module, self.cover_weights_in_steps, trainer.global_rank, first)
        self._weights = weights if weights.recorded else None
        if missing := weights.left_out:
            names = ", ".join(missing[:3]) + (", ..." if missing[3:] else "")
            rank_zero_warn(f"RunLedger: {len(missing)} parameters cannot be read and are not in the ledger: {names}")

    def _start_line(self, trainer: Any, weights: str | None) -> dict[str, Any]:
        device = trainer.strategy.root_device
        return {
            "start": logging_step(trainer),
            "processes": self._world,
            "data_ranks": self._data_ranks,
            "micro_batches": accumulation(trainer).micro_batches[-1],
            "strategy": type(trainer.strategy).__name__,
            "precision": str(trainer.precision),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "parts": self._weights and self._weights.parts,
            "elements": self._weights and self._weights.elements,
            "sharded": self._weights and self._weights.sharded,
            "weights": weights,
        }

    def _gather(self, own: Any) -> list[Any]:
        """What each rank gives, by rank; after a failure, only what this rank gives."""
        return [own] if self._buffer.failed else gather(own)

    def _write(self, rows: list[Row]) -> dict[str, float]:
        """Write the lines of an interval."""
        rows = [row for row in rows if _DONE in row.values and row.step in self._steps]
        if not rows:
            return {}
        steps = [self._steps.pop(row.step) for row in rows]
        everyones = self._gather(self._own_values(steps))
        if self._file is not None:
            silent = [None] * (self._world - len(everyones))
            losses = [None if silent else row.values.get(LOSS) for row in rows]  # of rank 0 alone, after a failure
            lines = zip(rows, steps, losses, zip(*everyones, strict=True), strict=True)
            self._file.append(
                step_line(row.step, step.samples, loss, [*ranks, *silent], self._counted)
                for row, step, loss, ranks in lines
            )
        return {}

    def _own_values(self, steps: list[_Step]) -> list[RankValues]:
        """The values of this rank; reads the device once."""
        waiting = [
            own for step in steps for own in (*chain(*step.batch), step.optimizer, step.weights) if own is not None
        ]
        numbers = iter(read(waiting))
        found = []
        for step in steps:
            sums = [sum(next(numbers) for _ in of_tensors) for of_tensors in step.batch]
            batch = step_sum(sums, step.rows, self._data_rank, self._data_ranks) if any(step.batch) else None
            states = (None if own is None else next(numbers) for own in (step.optimizer, step.weights))
            found.append(RankValues(batch, *step.random, *states))
        return found
