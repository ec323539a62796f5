"""Check a checkpoint by all ranks, so that they open it or refuse it together."""

from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_tricks._errors import UsageError
from lightning_tricks.checkpoints.check_checkpoint import check_checkpoint
from lightning_tricks.checkpoints.record import damage, read_record
from lightning_tricks.strategies.agreement import on_all_ranks, on_rank_0


def check_together(path: Any) -> Path:
    """`check_checkpoint` on every rank, so that no rank goes on and waits for one that refuses; every rank must call.

    Raises:
        UsageError: on all ranks, the message of the first rank that cannot open it.
    """
    problem = None
    try:
        check_checkpoint(path)
    except UsageError as error:
        problem = str(error)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for rank, found in enumerate(problems):
        if found is not None:
            hint = "" if all(problems) else f" (on rank {rank}: a checkpoint lies where all ranks see it)"
            raise UsageError(found + hint)
    return Path(path)


def verify_together(folder: Path) -> None:
    """Compare every file of a folder with its record, each rank its share of the files; every rank must call.

    A folder without a record has no checksums, so nothing is compared.

    Raises:
        UsageError: on all ranks, naming a file that has other bytes than were written; a checkpoint of a newer version.
    """
    record = on_rank_0(lambda: read_record(folder))
    if record is None:
        return
    own = sorted(record.checksums)[dist.get_rank() :: dist.get_world_size()]
    share = {name: record.checksums[name] for name in own}
    for found in on_all_ranks(lambda: damage(folder, record, share)):
        if found:
            raise UsageError(f"damaged: {found}: take an older checkpoint")
