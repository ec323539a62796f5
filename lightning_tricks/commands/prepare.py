"""`prepare`: turn a recipe's text into token shards. Needs no device of the recipe."""

from typing import Any

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.quote import say


def run(model: Any, datamodule: Any, trainer: Any) -> None:
    """Turn the recipe's text into token shards, and stop."""
    if datamodule is None:
        raise UsageError("prepare: the recipe has no data")
    datamodule.prepare_data()
    datamodule.setup("fit")
    if hasattr(datamodule, "data_summary"):
        say(datamodule.data_summary())
