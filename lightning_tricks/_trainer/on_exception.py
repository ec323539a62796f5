"""For the hook `on_exception`: an error inside it must not take the place of the error that ended the run."""

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_tricks._trainer.lightning import rank_zero_warn


@contextmanager
def only_warn(consequence: str) -> Iterator[None]:
    """Turn an error inside the `with` into a warning that begins with `consequence`.

    After an error of CUDA, every call on that device raises. Without this, the user would see the hook's own error, and
    the `on_exception` of later callbacks would not be called.
    """
    try:
        yield
    except Exception as error:
        rank_zero_warn(f"{consequence}: {type(error).__name__}: {error}")
