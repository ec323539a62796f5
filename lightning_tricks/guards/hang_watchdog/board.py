"""What the ranks tell each other, in the key-value store of their process group.

A call that is made while the process of the store is stopped does not return, whatever its timeout (torch 2.13). So
each call has a thread of its own, which is given up with the store when it takes too long.
"""

import json
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
CALL_SECONDS = 5.0


class Board:
    """Places and requests of the ranks of a run.

    Args:
        rank: of this process.
        world: number of ranks.
        token: the same on all ranks, and another for each fit.
        store: a connection that nobody else uses; None for one process.
    """

    def __init__(self, rank: int, world: int, token: str, store: Any) -> None:
        self.rank, self.world = rank, world
        self.was_open = store is not None
        self._store = dist.PrefixStore(f"hang_watchdog/{token}", store) if store is not None else None

    @property
    def is_open(self) -> bool:
        """Whether the store answers."""
        return self._store is not None

    def tell(self, told: dict[str, Any]) -> int:
        """Tell the others about this rank; returns the number of requests that any rank has made so far."""

        def call(store: Any) -> int:
            store.set(str(self.rank), json.dumps(told))
            return int(store.add("requests", 0))

        return self._call(call) or 0

    def request(self) -> int:
        """Ask all ranks to answer; returns the number of requests so far."""
        return self._call(lambda store: int(store.add("requests", 1))) or 0

    def told(self) -> dict[int, dict[str, Any]]:
        """What each rank has told last."""

        def call(store: Any) -> dict[int, dict[str, Any]]:
            ranks = [rank for rank in range(self.world) if store.check([str(rank)])]
            return {rank: json.loads(store.get(str(rank))) for rank in ranks}

        return self._call(call) or {}

    def _call(self, function: Callable[[Any], T]) -> T | None:
        store = self._store
        if store is None:
            return None
        result: list[T] = []

        def run() -> None:
            try:
                result.append(function(store))
            except Exception:  # such as a store whose process is gone
                self._store = None

        thread = threading.Thread(target=run, daemon=True, name="hang-watchdog-store")
        thread.start()
        thread.join(CALL_SECONDS)
        if thread.is_alive():
            self._store = None
        return result[0] if result else None


def own_store() -> Any:
    """A connection of its own to the store of the default process group; None where there is none."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    try:
        return dist.group.WORLD.get_group_store().clone()  # type: ignore[union-attr]
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
