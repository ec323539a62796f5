"""A loader of another kind than torch's that says itself where it is, by `state_dict` and `load_state_dict`."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any


class StatefulLoader:
    """Serves the batches of a loader with a state, and keeps the states of the last batches.

    Lightning's own way saves the state as of the batch that it has fetched ahead, which is then left out. In everything
    else this object answers as the loader does.

    Args:
        loader: with `state_dict` and `load_state_dict`.
        depth: number of earlier states to keep.
        fetched: called after each batch that was fetched.
    """

    def __init__(self, loader: Any, depth: int, fetched: Callable[[], None]) -> None:
        self._loader, self._fetched = loader, fetched
        self._states: deque[Any] = deque(maxlen=depth)
        self.resumed: Any = None

    def __getattr__(self, name: str) -> Any:
        if name in ("_loader", "state_dict", "load_state_dict"):  # by those two Lightning would save it as well
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if self.resumed is not None:
            self._loader.load_state_dict(self.resumed)
            self.resumed = None
        for batch in self._loader:
            self._states.append(self._loader.state_dict())
            self._fetched()
            yield batch

    def state_before(self, batches: int) -> Any:
        """The state when so many batches fewer had been fetched; 0 for the one now."""
        return self._states[-1 - batches] if 0 < batches < len(self._states) else self._loader.state_dict()
