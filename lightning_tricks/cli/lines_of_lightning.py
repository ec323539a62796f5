"""Lines of Lightning's logger that say nothing about the run, or something that is not true here."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_tricks._lightning import pl

# Advertisements, and statements that are of no use or not true here: a resume follows the recipe's settings and not the
# checkpoint's, so not all states are restored.
_UNWANTED = ("💡 Tip: ", "TPU available: False", "Restored all states from the checkpoint")


@contextmanager
def without_advertisements() -> Iterator[None]:
    """Inside the `with`, Lightning's logger drops the unwanted lines."""

    def wanted(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(_UNWANTED)

    log = pl.utilities.rank_zero.rank_zero_module.log
    log.addFilter(wanted)
    try:
        yield
    finally:
        log.removeFilter(wanted)
