"""A position in another run: with other processes, workers, batch sizes or data than the run that saved it."""

from dataclasses import replace
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import rank_zero_warn
from lightning_tricks._trainer import is_a
from lightning_tricks.guards.exact_resume.order import takes_sampler_state
from lightning_tricks.guards.exact_resume.replay import Position
from lightning_tricks.guards.exact_resume.workers import is_iterable

_LOST = "rows of this epoch may repeat or be left out"
# Attributes of samplers that follow from the batch size and the number of processes.
_SIZES = ("batch_size", "num_replicas", "rank", "num_samples", "total_size")


def describe(loader: DataLoader, world: int) -> dict[str, Any]:
    """What a position in a loader depends on, beside the position itself."""
    sampler = loader.sampler
    sharded = is_a(sampler, "DistributedSampler") and not is_a(sampler, "DistributedSamplerWrapper")
    settings = ("seed", "shuffle", "drop_last")
    return {
        "rows": None if is_iterable(loader) else _rows(loader.dataset),
        "batch_size": loader.batch_size,
        "workers": loader.num_workers,
        "world": world,
        "sharded": {name: getattr(sampler, name) for name in settings} if sharded else None,
    }


def _rows(dataset: Any) -> int:
    """The length of a dataset; -1 for one without, whose rows a sampler knows alone."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return -1


def transfer(name: str, loader: DataLoader, saved: dict[str, Any], now: dict[str, Any]) -> tuple[Position | None, int]:
    """The position of a checkpoint in a loader of this run, which may have to serve another number of batches.

    Args:
        name: of the loader, for messages.
        loader: a copy of the user's; it gets the sampler of the checkpoint's run where that had several processes and
            this one has one.
        saved: what `describe` said in the checkpoint's run, and the `position`.
        now: what it says in this one.

    Returns:
        The position, None if the loader starts again; and the change in the number of batches that are done.

    Raises:
        UsageError: for an IterableDataset, if the number of its processes or workers is another one.
    """
    position = Position(**saved["position"])
    if saved["rows"] is None and now["rows"] is None:
        for key, option in (("workers", "num_workers"), ("world", "devices")):
            if saved[key] != now[key]:
                raise UsageError(
                    f"{option}={now[key]}: {name} has an IterableDataset, of which each worker of each process reads "
                    f"its own part, and the checkpoint's run had {option}={saved[key]}: set the same, or take "
                    "ExactResume out to start its data again"
                )
    elif saved["rows"] != now["rows"]:
        say(name, f"its data had {saved['rows']} rows and now have {now['rows']}: they start again")
        return None, 0
    other_size = (saved["batch_size"], saved["world"]) != (now["batch_size"], now["world"])
    resized = saved["rows"] is not None and other_size
    if resized and not _restore_order(name, loader, saved, now):
        return None, 0
    if not takes_sampler_state(loader, position.order):
        say(name, f"its samplers or their generators are others now: {_LOST}")
        return None, 0
    return _resized(name, saved, now, position) if resized else (position, 0)


def _restore_order(name: str, loader: DataLoader, saved: dict[str, Any], now: dict[str, Any]) -> bool:
    """Put the rows into the order of the checkpoint's run, for batches of another size; say where that cannot be.

    Returns:
        Whether the rows come in that order.
    """
    if not (saved["batch_size"] and now["batch_size"]):
        say(
            name,
            f"the checkpoint counts batches of batch_size={saved['batch_size']} from {saved['world']} process(es), "
            f"and this run has batch_size={now['batch_size']} from {now['world']}: {_LOST}",
        )
        return False
    plain = isinstance(loader.sampler, RandomSampler | SequentialSampler)
    if saved["sharded"] and not now["sharded"] and now["world"] == 1 and plain:
        _shard_as(loader, saved["sharded"], now["batch_size"])
    elif saved["world"] != now["world"] and saved["sharded"] != now["sharded"]:
        say(name, f"{saved['world']} process(es) had another order of rows than {now['world']}: {_LOST}")
        return False
    return True


def _resized(name: str, saved: dict[str, Any], now: dict[str, Any], position: Position) -> tuple[Position, int]:
    rows = position.batches * saved["batch_size"] * saved["world"]
    batches, rest = divmod(rows, now["batch_size"] * now["world"])
    if rest:
        say(name, f"the last {rest} of the rows that were served do not fill a batch of this run, and come again")
    order = [{key: value for key, value in state.items() if key not in _SIZES} for state in position.order]
    return replace(position, batches=batches, order=order), batches - position.batches


def _shard_as(loader: DataLoader, settings: dict[str, Any], size: int) -> None:
    """Give a loader the order of rows that Lightning gives to several processes."""
    sampler: DistributedSampler[Any] = DistributedSampler(loader.dataset, num_replicas=1, rank=0, **settings)
    changes: dict[str, Any] = {"sampler": sampler, "batch_sampler": BatchSampler(sampler, size, loader.drop_last)}
    vars(loader).update(changes)  # DataLoader refuses to set them once it is made


def say(name: str, what: str) -> None:
    """One line of warning about a loader."""
    rank_zero_warn(f"ExactResume: {name}: {what}")
