"""When the time of a fit begins: at the start of its process, or now if this is not the process's first fit."""

import sys
import time

from lightning_tricks._process_age import process_age

wall_clock = time.time
_imported_at = wall_clock()
_has_fitted = False


def fit_start() -> float:
    """Seconds since 1970: the start of the process for its first fit; now for a later fit, and in a notebook.

    Where the system does not tell when the process started, it is the time at which this file was imported.
    """
    global _has_fitted
    is_first, _has_fitted = not _has_fitted, True
    if not is_first or hasattr(sys, "ps1"):  # a notebook may have been open for hours
        return wall_clock()
    age = process_age()
    return _imported_at if age is None else wall_clock() - age
