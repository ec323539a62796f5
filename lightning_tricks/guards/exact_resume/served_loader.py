"""Loaders of other kinds than torch's: served as they are, and those with a state also followed by it."""

from collections.abc import Callable, Generator, Iterator
from typing import Any


class Places:
    """Where a loader was before each of the batches that it has served in an epoch, from the running step on."""

    def __init__(self) -> None:
        self._places: list[Any] = []
        self._forgotten = 0

    def begin_epoch(self) -> None:
        """Count batches from 0 again."""
        self._places, self._forgotten = [], 0

    def add(self, place: Any) -> None:
        """Note the place before the next batch."""
        self._places.append(place)

    def forget_before(self, batch: int) -> None:
        """Forget the places before the batches that come before one of the epoch."""
        number = min(max(batch - self._forgotten, 0), len(self._places))
        del self._places[:number]
        self._forgotten += number

    def before(self, batch: int, now: Callable[[], Any]) -> Any:
        """The place before a batch of the epoch; for one that was not served yet, what `now` returns."""
        index = batch - self._forgotten
        return self._places[index] if 0 <= index < len(self._places) else now()


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
    """Keeps the states of a loader that says where it is, by `state_dict` and `load_state_dict`, before its batches.

    Lightning's own way saves the state as of the batch that it has fetched ahead, which is then left out.

    Args:
        loader: with those two methods.
        fetched: called after each batch that was fetched.
    """

    state_dict = load_state_dict = None  # for Lightning, which would save and load it as well

    def __init__(self, loader: Any, fetched: Callable[[], None]) -> None:
        super().__init__(loader, fetched)
        self.places = Places()
        self.resumed: dict[str, Any] | None = None  # place from which the next iteration goes on
        self.at_first_batch: Callable[[], None] | None = None
        self._cycles = 0  # passes that ended since the epoch began, of a loader that is shorter than another one

    def begin_epoch(self) -> None:
        """Forget the passes of the epoch before."""
        self._cycles = 0
        self.places.begin_epoch()

    def place_before(self, batch: int) -> dict[str, Any]:
        """The loader's state before a batch of this epoch, and the passes that ended before."""
        return self.resumed or self.places.before(batch, self._place)

    def next_epoch(self) -> dict[str, Any]:
        """The place from which the next epoch begins."""
        return {**self._place(), "cycles": 0, "at_end": True}

    def _place(self) -> dict[str, Any]:
        return {"state": self._loader.state_dict(), "cycles": self._cycles, "at_end": False}

    def __iter__(self) -> Iterator[Any]:
        resumed, self.resumed = self.resumed, None
        if resumed is not None:
            self._loader.load_state_dict(resumed["state"])
            self._cycles = resumed.get("cycles", 0)
        served = yield from self._pass()
        if not served and resumed is not None and resumed.get("at_end"):  # some loaders then have no batch left
            self._cycles = 0
            yield from self._pass()

    def _pass(self) -> Generator[Any, None, int]:
        """Serve one pass; returns the number of batches."""
        number = 0
        iterator = iter(self._loader)  # a loader may begin its pass, or go on from a state, no earlier than here
        while True:
            place = self._place()
            try:
                batch = next(iterator)
            except StopIteration:
                self._cycles += 1
                return number
            self.places.add(place)
            number += 1
            if self.at_first_batch is not None:
                self.at_first_batch()
                self.at_first_batch = None
            self._fetched()
            yield batch
