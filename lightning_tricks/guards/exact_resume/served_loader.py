"""Loaders of other kinds than torch's: served as they are, and those with a state also followed by it."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any


class ServedLoader:
    """Serves the batches of a loader and tells of each; in everything else it answers as the loader does.

    Args:
        loader: any iterable.
        fetched: called after each batch that was fetched.
    """

    def __init__(self, loader: Any, fetched: Callable[[], None]) -> None:
        self._loader, self._fetched = loader, fetched

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # of a copy that is still empty
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self._fetched()
            yield batch


class StatefulLoader(ServedLoader):
    """Keeps the states of the last batches of a loader that says where it is, by `state_dict` and `load_state_dict`.

    Lightning's own way saves the state as of the batch that it has fetched ahead, which is then left out.

    Args:
        loader: with those two methods.
        fetched: called after each batch that was fetched.
        depth: number of earlier states to keep.
    """

    state_dict = load_state_dict = None  # for Lightning, which would save and load it as well

    def __init__(self, loader: Any, fetched: Callable[[], None], depth: int) -> None:
        super().__init__(loader, fetched)
        self._states: deque[Any] = deque(maxlen=depth)
        self.resumed: Any = None  # state from which the next iteration goes on

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
        if self.resumed is not None:
            return self.resumed
        return self._states[-1 - batches] if 0 < batches < len(self._states) else self._loader.state_dict()
