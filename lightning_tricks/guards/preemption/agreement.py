"""The ranks of a run agree to stop, without a wait in a step."""

from typing import Any

import torch
import torch.distributed as dist


class Agreement:
    """Finds the largest number that any rank has given, over a gloo group of its own; every rank must make each call.

    Each call of `later` starts an `all_reduce` on the host, in the background, and reads the result of the one before,
    which has had a whole step to finish. So no step waits for another rank, and no device for the host.

    Args:
        world_size: number of ranks; 1 needs no group, and `later` gives its own number at once.
    """

    def __init__(self, world_size: int) -> None:
        self._group: Any = dist.new_group(backend="gloo") if world_size > 1 else None
        self._pending: tuple[Any, torch.Tensor] | None = None

    def later(self, number: int) -> int:
        """The largest of the numbers that the ranks gave to the call before this one; 0 at the first call."""
        if self._group is None:
            return number
        agreed = self._finish()
        self._start(number)
        return agreed

    def now(self, number: int) -> int:
        """The largest of the numbers that the ranks give to this call and gave to the one before; waits for all."""
        if self._group is None:
            return number
        self._start(max(number, self._finish()))
        return self._finish()

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.now(0)

    def close(self) -> None:
        """Give the group back, when all ranks are at the end of a fit and none of them has failed."""
        self._finish()
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = self._pending = None

    def _start(self, number: int) -> None:
        tensor = torch.tensor([number], dtype=torch.int32, device="cpu")
        self._pending = dist.all_reduce(tensor, dist.ReduceOp.MAX, self._group, async_op=True), tensor

    def _finish(self) -> int:
        if self._pending is None:
            return 0
        (work, tensor), self._pending = self._pending, None
        work.wait()
        return int(tensor)
