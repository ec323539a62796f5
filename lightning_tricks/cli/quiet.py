"""Keep Lightning's advertisements, and its statements that are of no use or not true here, out of a run's output."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_tricks._lightning import pl_import

# A resume follows the recipe's settings and not the checkpoint's, so not all states are restored.
_UNWANTED = ("💡 Tip: ", "TPU available: False", "Restored all states from the checkpoint")


def _wanted(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_UNWANTED)


@contextmanager
def without_advertisements() -> Iterator[None]:
    """While open, Lightning's logger drops them."""
    log = pl_import("utilities.rank_zero").rank_zero_module.log
    log.addFilter(_wanted)
    try:
        yield
    finally:
        log.removeFilter(_wanted)
