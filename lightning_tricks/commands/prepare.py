"""`prepare`: turn a recipe's text into token shards. Needs no device of the recipe."""

from typing import Any

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.quote import say


def run(model: Any, datamodule: Any, trainer: Any, rank: int = 0, world: int = 1) -> None:
    """Turn the recipe's text into token shards, and stop.

    Args:
        rank: share of the text to tokenize, from 0; each share is a process of its own, on any host.
        world: number of shares.
    """
    if datamodule is None:
        raise UsageError("prepare: the recipe has no data")
    if not 0 <= rank < world:
        raise UsageError(f"rank={rank}, world={world}: ranks count from 0 to world - 1; start one process for each")
    if world > 1:
        if not hasattr(datamodule, "prepare_share"):
            raise UsageError(f"world={world}: {type(datamodule).__name__} has no shares of text; leave it out")
        if missing := datamodule.prepare_share(rank, world):
            say(f"The share of rank {rank} of {world} is tokenized; {missing} parts of other ranks are missing yet")
            return
    datamodule.prepare_data()
    datamodule.setup("fit")
    if hasattr(datamodule, "data_summary"):
        say(datamodule.data_summary())
