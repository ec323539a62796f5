"""The place of a Trainer's thread in a run, read from its Python stack, so that a step does no work for it."""

from collections.abc import Sequence
from types import FrameType
from typing import Any

_PARTS = (  # part, Lightning's module (any module if empty) and its function; read from the files named here
    ("checkpoint", "trainer.trainer", "save_checkpoint"),
    ("loader", "loops.fetchers", "__next__"),
    ("loader", "loops.fetchers", "__iter__"),
    ("backward", "strategies.strategy", "backward"),
    ("forward", "", "training_step"),
    ("optimizer", "core.optimizer", "step"),
    ("validation", "loops.evaluation_loop", "run"),
)


def is_running(trainer: Any, stack: Sequence[FrameType]) -> bool:
    """Whether a thread with this stack is inside `fit`, `validate`, `test` or `predict` of a Trainer (`_run`)."""
    return any(
        frame.f_code.co_name == "_run" and _is_of(frame, "trainer.trainer") and frame.f_locals.get("self") is trainer
        for frame in stack
    )


def running_part(stack: Sequence[FrameType]) -> str:
    """The part of a run that a thread is in: "checkpoint", "loader", "backward", "forward", "optimizer", "validation".

    Empty for every other place, such as callbacks between two steps. Read from trainer/trainer.py, loops/fetchers.py,
    loops/evaluation_loop.py, strategies/strategy.py and core/optimizer.py.

    Args:
        stack: the innermost frame first.
    """
    for frame in stack:
        for part, module, function in _PARTS:
            if frame.f_code.co_name == function and _is_of(frame, module):
                return part
    return ""


def is_evaluating(stack: Sequence[FrameType]) -> bool:
    """Whether a thread is in a validation or a test (`_EvaluationLoop.run`, loops/evaluation_loop.py)."""
    return any(frame.f_code.co_name == "run" and _is_of(frame, "loops.evaluation_loop") for frame in stack)


def awaited_loader(stack: Sequence[FrameType]) -> tuple[Any, int, int] | None:
    """The loader from which a thread fetches a batch, its index and the number of loaders; None where that is unknown.

    Read from the iterators of utilities/combined_loader.py, which hold `iterables`; in `_MaxSizeCycle.__next__` and
    `_MaxSize.__next__` the loader's index is `i`, in `_Sequential` it is `_iterator_idx`.
    """
    for frame in stack:
        if _is_of(frame, "utilities.combined_loader") and hasattr(frame.f_locals.get("self"), "iterables"):
            iterator = frame.f_locals["self"]
            index = frame.f_locals.get("i", getattr(iterator, "_iterator_idx", None))
            number = len(iterator.iterables)
            if isinstance(index, int) and index < number:
                return iterator.iterables[index], index, number
            if number == 1:
                return iterator.iterables[0], 0, 1
    return None


def evaluation_progress(trainer: Any) -> Any:
    """The counters of validation or test batches, `current` in this validation and `total`.

    Read from `Trainer._evaluation_loop` (trainer/trainer.py), whose `batch_progress` is a `_BatchProgress`. Not for
    `predict`.
    """
    return trainer._evaluation_loop.batch_progress


def _is_of(frame: FrameType, module: str) -> bool:
    return not module or frame.f_globals.get("__name__", "").endswith(f".{module}")
