"""The place of a Trainer's thread in a run, read from its Python stack, so that a step does no work for it."""

import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from lightning_tricks._trainer.objects import is_a

_PARTS = (  # part, Lightning's module (any module if empty) and its function; read from the files named here
    ("checkpoint", "trainer.trainer", "save_checkpoint"),
    ("loader", "loops.fetchers", "__next__"),
    ("loader", "loops.fetchers", "__iter__"),
    ("backward", "", "backward"),  # strategies of this collection have their own
    ("forward", "", "training_step"),
    ("optimizer", "core.optimizer", "step"),
    ("validation", "loops.evaluation_loop", "run"),
)
_OF_A_BATCH = {  # hooks that do a batch's own work; all others are asked between, and may do anything
    "training_step", "validation_step", "test_step", "predict_step", "backward", "optimizer_step", "lr_scheduler_step",
    "optimizer_zero_grad", "configure_gradient_clipping", "batch_to_device", "transfer_batch_to_device",
}  # fmt: skip


class RunningCall:
    """The call of a Trainer's `fit`, `validate`, `test` or `predict` that the present thread is in.

    Lightning makes a new bound method for each such call, which identifies it. The reference to that method is weak, so
    that the objects of a failed fit are freed as they would be without this.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        method = _running_method()
        self._method = None if method is None else weakref.ref(method)

    def is_current(self) -> bool:
        """Whether the thread that asks is in this call, and in no other one inside it."""
        return self._method is not None and self._method() is _running_method() is not None

    def stack(self) -> list[FrameType]:
        """The stack of the call's thread, the innermost frame first; empty when the call has ended."""
        stack = list(outwards(sys._current_frames().get(self._thread)))
        method = None if self._method is None else self._method()
        return stack if method is not None and any(_called_method(frame) is method for frame in stack) else []


def _called_method(frame: FrameType) -> Any:
    """The bound method behind `fit`, `validate`, `test` or `predict`, if `frame` is one that runs it; else None.

    Read from `_call_and_handle_interrupt` (trainer/call.py) and, in a
    process of `ddp_spawn` or `ddp_fork`, `_wrapping_function` (strategies/launchers/multiprocessing.py).
    """
    names = {"_call_and_handle_interrupt": "trainer_fn", "_wrapping_function": "function"}
    name = names.get(frame.f_code.co_name)
    return frame.f_locals.get(name) if name else None


def _running_method() -> Any:
    return next(filter(None, map(_called_method, outwards(sys._getframe()))), None)


def line_of(frame: FrameType) -> str:
    """The file, the line and the function that a frame is in."""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_qualname}"


def stacks_of_threads() -> str:
    """The stacks of all threads of this process but the one that asks, in Python's words.

    No source file is read for them: a file system that does not answer may be the reason of a hang.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    blocks = []
    for ident, innermost in sys._current_frames().items():
        if ident != threading.get_ident():
            code = [(frame.f_code, frame.f_lineno) for frame in outwards(innermost)]
            lines = [f'  File "{each.co_filename}", line {line}, in {each.co_qualname}' for each, line in code]
            blocks.append("\n".join([f"Thread {names.get(ident, ident)} (most recent call last):", *reversed(lines)]))
    return "\n".join(blocks)


def running_part(stack: Sequence[FrameType]) -> str:
    """The part of a run that a thread is in: "checkpoint", "loader", "backward", "forward", "optimizer", "validation".

    Empty for every other place, such as callbacks between two steps. Read from trainer/trainer.py, loops/fetchers.py,
    loops/evaluation_loop.py and core/optimizer.py. A method `backward` is the strategy's, autograd's or torch's.

    Args:
        stack: the innermost frame first.
    """
    for frame in stack:
        for part, module, function in _PARTS:
            if frame.f_code.co_name == function and _is_of(frame, module):
                return part
    return ""


def _hook_of(frame: FrameType) -> tuple[Any, str] | None:
    """The hook that a frame of Lightning's calls, as (owner, name); None for any other frame.

    The owner is a callback, a module, a data module or a strategy; of a step, which the strategy passes on, the module.
    Read from the `_call_*` functions of trainer/call.py, whose locals are `fn`, `hook_name`, `pl_module` and, of
    callbacks, `callback`.
    """
    local = frame.f_locals if _is_of(frame, "trainer.call") else {}
    if "fn" not in local or "hook_name" not in local:
        return None
    owner: Any = local.get("callback", getattr(local["fn"], "__self__", None))
    name = local["hook_name"]
    if is_a(owner, "Strategy") and name.endswith("_step"):
        owner = owner.lightning_module
    return local.get("pl_module") if owner is None else owner, name  # a module's: a function that somebody put there


def running_place(stack: Sequence[FrameType]) -> tuple[str, str]:
    """The part of a run that a thread is in, as by `running_part`, or "hook"; and which hook, or which checkpoint.

    A hook is one that does no batch's own work, whatever the thread does inside it; of two, the outer one. So is a
    logger that gets its values and a metric that is computed at the end of an epoch. Read from `log_metrics` of
    `_LoggerConnector` and `_get_cache` of `_ResultCollection` (trainer/connectors/logger_connector/).

    Args:
        stack: the innermost frame first.
    """
    hook = ""
    for frame in stack:
        name = frame.f_code.co_name
        if name == "save_checkpoint" and _is_of(frame, "trainer.trainer"):
            return "checkpoint", Path(str(frame.f_locals.get("filepath", ""))).name
        if (found := _hook_of(frame)) is not None and found[1] not in _OF_A_BATCH:
            hook = f"{type(found[0]).__name__}.{found[1]}"
        elif name == "log_metrics" and _is_of(frame, "logger_connector.logger_connector"):
            hook = f"{type(frame.f_locals.get('logger')).__name__}.log_metrics"
        elif name == "_get_cache" and _is_of(frame, "logger_connector.result"):
            metric = frame.f_locals["result_metric"]
            hook = hook if metric.is_tensor else f"{type(metric.value).__name__}.compute"
    return ("hook", hook) if hook else (running_part(stack), "")


def is_compiling(stack: Sequence[FrameType]) -> bool:
    """Whether torch.compile is at work in a thread: in a forward, or in the backward, which may be compiled there.

    Read from `torch/_dynamo/convert_frame.py` and `compile_fx_inner` of `torch/_inductor/compile_fx.py`, torch 2.13.
    """
    return any(
        _is_of(frame, "_dynamo.convert_frame")
        or (frame.f_code.co_name == "compile_fx_inner" and _is_of(frame, "_inductor.compile_fx"))
        for frame in stack
    )


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those that called it, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_evaluating(stack: Sequence[FrameType]) -> bool:
    """Whether a thread is in a validation or a test (`_EvaluationLoop.run`, loops/evaluation_loop.py)."""
    return any(frame.f_code.co_name == "run" and _is_of(frame, "loops.evaluation_loop") for frame in stack)


def describe_loader(stack: Sequence[FrameType]) -> str:
    """The loader that a thread waits for: its class, its dataset, its workers and who of them owes the next batch.

    Read from `_BaseDataLoaderIter` and `_MultiProcessingDataLoaderIter` of torch (utils/data/dataloader.py).
    """
    found = awaited_loader(stack)
    text = type(found[0]).__name__ if found else "a loader"
    if found and found[2] > 1:
        text += f" (number {found[1]} of {found[2]}, from 0)"
    holders = (frame.f_locals.get("self") for frame in stack)
    iterator = next((holder for holder in holders if hasattr(holder, "_num_workers")), None)  # torch's, torchdata's
    dataset = getattr(iterator if iterator is not None else found and found[0], "_dataset", None)
    dataset = getattr(found[0], "dataset", None) if dataset is None and found else dataset
    if dataset is not None:
        text += f" over {type(dataset).__name__}"
    workers = list(getattr(iterator, "_workers", ()))
    if not workers:
        return f"{text}, no workers: {line_of(stack[0])}" if stack else text
    text += f", {len(workers)} workers, {sum(worker.is_alive() for worker in workers)} alive"
    with suppress(AttributeError, KeyError, IndexError, TypeError):
        worker = workers[number := iterator._task_info[iterator._rcvd_idx][0]]  # type: ignore[union-attr]
        gone = "" if worker.is_alive() else ", which is gone"
        text += f"; worker {number} (process {worker.pid}{gone}) has the next batch to give"
    return text


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
