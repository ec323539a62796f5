"""Time two waits for which Lightning has no hooks: the wait for a training batch, and the wait for a checkpoint."""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning_tricks._replaced import replaced
from lightning_tricks._trainer import fetch_hooks
from lightning_tricks.monitors._stopwatch import Stopwatch
from lightning_tricks.monitors.goodput.device_wait import DeviceWait


@contextmanager
def fetches_timed(trainer: Any, watch: Stopwatch, device_wait: DeviceWait | None) -> Iterator[None]:
    """Count the waits for a batch between two steps as "data", or let `device_wait` count those of the device.

    Only waits in the phase "steps" are counted so; in another phase they are time of that phase. A wait ends the phase
    "validation".
    """
    owner, before, after = fetch_hooks(trainer)
    original_begin, original_end = getattr(owner, before), getattr(owner, after)
    counts = False

    def begin() -> None:
        nonlocal counts
        if watch.phase == "validation":
            watch.switch("steps")
        counts = watch.phase == "steps"
        if counts:
            device_wait.begin() if device_wait else watch.enter("data")
        original_begin()

    def end() -> None:
        original_end()
        if counts:
            device_wait.end() if device_wait else watch.leave()

    with replaced(owner, before, begin), replaced(owner, after, end):
        yield


@contextmanager
def saves_timed(
    trainer: Any, watch: Stopwatch, before_save: Callable[[Any], None], after_save: Callable[[], None]
) -> Iterator[None]:
    """Count the time that training waits for a checkpoint as "checkpoint", also for one written in the background.

    Args:
        before_save: called with the checkpoint's path before the time of a save begins.
        after_save: called when it has ended, also with an error.
    """
    original_save = trainer.save_checkpoint

    @functools.wraps(original_save)
    def save(filepath: Any, *args: Any, **kwargs: Any) -> Any:
        before_save(filepath)
        try:
            return timed(original_save)(filepath, *args, **kwargs)
        finally:
            after_save()

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            watch.enter("checkpoint")
            try:
                return function(*args, **kwargs)
            finally:
                watch.leave()

        return run

    with ExitStack() as replacements:
        replacements.enter_context(replaced(trainer, "save_checkpoint", save))
        for writer in (trainer.strategy, trainer.strategy.checkpoint_io):
            if hasattr(writer, "wait"):
                replacements.enter_context(replaced(writer, "wait", timed(writer.wait)))
        yield
