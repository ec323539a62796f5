"""The loss of an optimizer step: the one place that makes it, for guards, ledger, doctor, progress line and dashboard.

What `training_step` returns is no such loss. Lightning divides it by the number of micro-batches that a step should
have, fp16 multiplies it, and TokenMeanMixin returns a sum over a constant.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_tricks._core.tensors import tensors_in, widest
from lightning_tricks._trainer.run_facts import enabled_scaler
from lightning_tricks.metrics.row import Row
from lightning_tricks.optim.grad_scaler import loss_scale

LOSS = "_step_loss"  # in the buffer's rows: the loss of the step, over all ranks
LOGGED = "train/loss"

Part = tuple[Tensor, Tensor]  # of a micro-batch: the sum of the losses that count, and their number


class StepLoss:
    """Each optimizer step's loss: the sum of the losses that count over their number.

    It is taken over the micro-batches that came, of which the last step of an epoch may have fewer, and over all ranks.
    Each fit has one, `MetricBuffer.of(trainer).step_loss()`; nothing is measured before somebody asks for it. From each
    micro-batch it takes a sum and a count, both on their device, in `on_before_backward`:

    - those of `loss_sums`, an attribute of the module, (summed loss, number of its summands) as scalar tensors.
      TokenMeanMixin, and so LanguageModel, has it: nats and counted tokens;
    - of a module without it, the loss times the rows in the batch: what `training_step` returns is taken for a mean
      over rows. The rows are the length of the batch's first tensor that has a dimension.

    In manual optimization, the losses of several backward passes in one batch are added. Where the optimizer computes
    several losses of one batch, as LBFGS does, the first one counts.

    Attributes:
        known: whether a micro-batch of this fit has had a loss. None has where a module calls `loss.backward()` itself.
        latest: of the last step that was read, on the host; None before, and where that step has no loss: no row or
            token of any rank counts.
        pending: parts of the micro-batches since the last `take`; empty without `keep`.
    """

    def __init__(self, trainer: Any) -> None:
        self.known = False
        self.latest: float | None = None
        self.pending: list[Part] = []
        self._trainer = trainer
        self._keeps = self._logs = False
        self._rows = 1
        self._in_batch = False  # whether the running micro-batch has had a backward pass
        self._of_batch = torch.ones(())  # the count of its part

    def keep(self) -> None:
        """Keep the parts for `take`: a guard judges each step on the device."""
        self._keeps = True

    def log(self) -> None:
        """Log it as `train/loss`, unless the module logs or records a metric of this name by itself."""
        self._logs = True

    def begin_batch(self, batch: Any) -> None:
        """A micro-batch begins."""
        self._rows = next((len(tensor) for tensor in tensors_in(batch) if tensor.dim()), 1)
        self._in_batch = False

    def add(self, module: Any, loss: Tensor, row: Row) -> None:
        """Take the part of a micro-batch, whose backward pass comes next, into the row of the step."""
        further, self._in_batch, self.known = self._in_batch, True, True
        if further and module.automatic_optimization:
            return
        sums = None if further else _sums_of(module)
        total, count = sums or self._of_mean(module, loss, further)
        self._of_batch = count
        for parts in (row.means.setdefault(LOSS, []), *([self.pending] if self._keeps else [])):
            before = parts.pop()[0] if further and parts else 0
            parts.append((total + before, count))

    def _of_mean(self, module: Any, loss: Tensor, further: bool) -> Part:
        """The part of a loss that is a mean, without Lightning's divisor and the scale of fp16."""
        loss = (loss.full_tensor() if hasattr(loss, "full_tensor") else loss).detach()
        loss = loss.float() if loss.dtype.itemsize < 4 else loss
        loss = loss.reshape(()) if loss.numel() == 1 else loss.mean()  # `manual_backward(losses, gradient=...)`
        scaler = enabled_scaler(self._trainer.precision_plugin)
        if scaler is not None and (scale := loss_scale(scaler)) is not None:
            loss = loss / scale.to(loss.device)
        if module.automatic_optimization and (divisor := int(self._trainer.accumulate_grad_batches)) > 1:
            loss = loss * divisor  # in the precision of the division, whose rounding it mostly undoes
        dtype = widest(loss.device)
        count = self._of_batch if further else torch.full((), self._rows, dtype=dtype, device=loss.device)
        return loss.to(dtype) * count, count

    def take(self) -> Sequence[Part]:
        """The parts of the step that an optimizer makes next, this rank's; those of the next step begin anew."""
        parts, self.pending = self.pending, []
        return parts

    def drop(self, row: Row) -> None:
        """Forget the micro-batches that no optimizer step followed: their gradients are cleared."""
        self.pending = []
        row.means.pop(LOSS, None)

    def open(self, row: Row) -> None:
        """Give the loss its place in a row: the same one on each rank, also where a rank has no loss."""
        row.means.setdefault(LOSS, [])

    def close(self, row: Row) -> None:
        """A rank without a loss adds nothing to the sum and to the count."""
        if not row.means.setdefault(LOSS, []):
            nothing = torch.zeros((), device=self._trainer.strategy.root_device)
            row.means[LOSS].append((nothing, nothing))

    def read(self, rows: Sequence[Row], logged: Collection[str]) -> None:
        """The rows have come to the host; `logged` are the names that the module logs by itself."""
        self.latest = rows[-1].values.get(LOSS)
        if self._logs and LOGGED not in logged:
            for row in rows:
                if LOSS in row.values:
                    row.values.setdefault(LOGGED, row.values[LOSS])


def _sums_of(module: Any) -> Part | None:
    """The module's `loss_sums`; None where it has none, or something else of this name."""
    sums = getattr(module, "loss_sums", None)
    if not isinstance(sums, tuple) or [isinstance(one, Tensor) and one.numel() == 1 for one in sums] != [True, True]:
        return None
    return sums[0].detach().reshape(()), sums[1].detach().reshape(())
