"""What happens around a save of the Trainer, in one order for all callbacks that take part."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

from lightning_tricks._core.replaced import replaced

_FIELD = "_lightning_tricks_saves"  # on the replaced method: the parts of its pipeline


@dataclass(eq=False)
class _Part:
    before_save: Callable[[Any], None]
    during_save: Callable[[], AbstractContextManager[Any]]
    after_save: Callable[[], None]


@contextmanager
def around_saves(
    trainer: Any,
    *,
    before_save: Callable[[Any], None] | None = None,
    during_save: Callable[[], AbstractContextManager[Any]] | None = None,
    after_save: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Take part in each `trainer.save_checkpoint` inside the `with`; the only replacement of that method.

    All parts' `before_save` come first, in the order in which they joined; then each `during_save` is entered, the
    latest first, because it took the place of the earlier ones' weights last; then the checkpoint is written; then each
    is left in the reverse order, and each `after_save` is called, also after an error.

    Args:
        trainer: of this process. A user's own override of its method stays: it is called inside.
        before_save: called with the path.
        during_save: a context for the save itself: it may put in place the weights to save, or take the time.
        after_save: called last, if this part's `before_save` was begun.
    """
    part = _Part(before_save or _nothing_before, during_save or ExitStack, after_save or _nothing_after)
    saves = getattr(trainer.save_checkpoint, _FIELD, None)
    if saves is None:
        saves = _Saves()
        saves.replacement.enter_context(replaced(trainer, "save_checkpoint", saves.around(trainer.save_checkpoint)))
    saves.parts.append(part)
    try:
        yield
    finally:
        saves.parts.remove(part)
        if not saves.parts:
            saves.replacement.close()


class _Saves:
    """The parts of one Trainer's saves, and the replacement of its method, which ends with the last part."""

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self.replacement = ExitStack()

    def around(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """`save` with what the parts do around it."""

        @wraps(save)
        def save_checkpoint(filepath: Any, *args: Any, **kwargs: Any) -> Any:
            with ExitStack() as afterwards, ExitStack() as during:
                for part in self.parts:
                    afterwards.callback(part.after_save)
                    part.before_save(filepath)
                for part in reversed(self.parts):
                    during.enter_context(part.during_save())
                return save(filepath, *args, **kwargs)

        setattr(save_checkpoint, _FIELD, self)
        return save_checkpoint


def _nothing_before(path: Any) -> None:
    pass


def _nothing_after() -> None:
    pass
