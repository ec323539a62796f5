"""Check a checkpoint by all ranks, so that they open it or refuse it together."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_tricks._core.errors import UsageError
from lightning_tricks.checkpoints.check_checkpoint import check_checkpoint
from lightning_tricks.checkpoints.record import damage, read_record
from lightning_tricks.parallel.agreement import on_all_ranks, on_rank_0

T = TypeVar("T")


def check_together(path: Any) -> Path:
    """`check_checkpoint` on every rank, so that no rank goes on and waits for one that refuses; every rank must call.

    Raises:
        UsageError: on all ranks, the message of the first rank that cannot open it.
        OSError: on all ranks, what the file system says on one of them.
    """
    read_together(lambda: check_checkpoint(path))
    return Path(path)


def read_together(read: Callable[[], T]) -> T:
    """Read something of a checkpoint on every rank; every rank must call.

    Args:
        read: does not communicate; its result can be pickled.

    Returns:
        The result of this rank.

    Raises:
        UsageError: on all ranks, the message of the first rank that raises one.
        Exception: see `on_all_ranks`.
    """

    def result_and_problem() -> tuple[Any, str | None]:
        try:
            return read(), None
        except UsageError as error:
            return None, str(error)

    told = on_all_ranks(result_and_problem)
    for rank, (_, problem) in enumerate(told):
        if problem is not None:
            everywhere = all(other is not None for _, other in told)
            hint = "" if everywhere else f" (on rank {rank}: a checkpoint lies where all ranks see it)"
            raise UsageError(problem + hint)
    result: T = told[dist.get_rank()][0]
    return result


def was_verified(checkpoint_io: Any, path: Path) -> bool:
    """Whether the command that has chosen a checkpoint has verified it, for every rank; every rank must call."""
    ask = getattr(checkpoint_io, "was_verified", None)
    return all(on_all_ranks(lambda: ask is not None and ask(path)))


def verify_together(folder: Path, checkpoint_io: Any = None) -> None:
    """Compare every file of a folder with its record, each rank its share of the files; every rank must call.

    A folder without a record has no checksums, so nothing is compared. Nor is one that `was_verified`.

    Raises:
        UsageError: on all ranks, naming a file that has other bytes than were written; a checkpoint of a newer version.
    """
    record = on_rank_0(lambda: read_record(folder))
    if record is None or was_verified(checkpoint_io, folder):
        return
    own = sorted(record.checksums)[dist.get_rank() :: dist.get_world_size()]
    share = {name: record.checksums[name] for name in own}
    for found in on_all_ranks(lambda: damage(folder, record, share)):
        if found:
            raise UsageError(f"damaged: {found}: take an older checkpoint")
