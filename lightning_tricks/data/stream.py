"""Many shards as one array of tokens, read at any position; windows may cross from one shard into the next."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_tricks.data.shards import open_shard

_CHUNK = 1 << 24  # tokens compared at once in a scan


class TokenStream:
    """The tokens of several shards, in the order of `paths`; see `open_shard` for their formats and errors.

    It is pickled as paths, so that loader workers map the files themselves instead of receiving a copy.
    """

    def __init__(self, paths: list[Path], shard_format: str = "auto") -> None:
        self.paths, self.shard_format = paths, shard_format
        self._shards = [open_shard(path, shard_format) for path in paths]
        self._ends = np.cumsum([len(shard) for shard in self._shards])
        self._maxima: dict[int, int] = {}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths, "shard_format": self.shard_format}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def _locate(self, position: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._ends, position, side="right"))
        return shard, position - int(self._ends[shard - 1] if shard else 0)

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """Tokens start..start+count-1, shape (count,); fewer where the stream ends."""
        stop = min(start + count, len(self))
        out = np.empty(max(stop - start, 0), dtype=np.int64)
        done = 0
        while done < len(out):
            shard, offset = self._locate(start + done)
            part = self._shards[shard][offset : offset + len(out) - done]
            out[done : done + len(part)] = part
            done += len(part)
        return out

    def place(self, position: int) -> tuple[Path, int]:
        """The shard that holds `position`, and the token's index in it."""
        shard, offset = self._locate(position)
        return self.paths[shard], offset

    def describe(self, position: int) -> str:
        """Name the shard that holds `position` and the token's index in it, for messages."""
        path, offset = self.place(position)
        return f"shard {path}, token {offset}"

    def count_before(self, token: int, positions: Sequence[int]) -> list[int]:
        """Number of times that a token occurs before each of the positions; reads up to the last of them."""
        counts, seen, start = {}, 0, 0
        for position in sorted(positions):
            while start < position:
                part = self.read(start, min(position - start, _CHUNK))
                seen, start = seen + int(np.count_nonzero(part == token)), start + len(part)
            counts[position] = seen
        return [counts[position] for position in positions]

    def first_at_least(self, bound: int, limit: int) -> int | None:
        """Position of the first id >= `bound` among the first `limit` tokens, None when there is none.

        The largest id of each shard is remembered, so a second question is answered without reading.
        """
        for number, (shard, end) in enumerate(zip(self._shards, self._ends.tolist(), strict=True)):
            before = end - len(shard)
            if before >= limit:
                break
            if number not in self._maxima:
                self._maxima[number] = max(int(shard[i : i + _CHUNK].max()) for i in range(0, len(shard), _CHUNK))
            if self._maxima[number] >= bound:
                i = next(i for i in range(0, len(shard), _CHUNK) if shard[i : i + _CHUNK].max() >= bound)
                return before + i + int(np.argmax(shard[i : i + _CHUNK] >= bound))
        return None
