"""The loaders that Lightning is given. They refuse a token id that the vocabulary lacks, before it reaches a model.

They are plain iterables around torch's DataLoader and no DataLoaders, so that Lightning adds no sampler of its own: our
positions already depend on the rank. On a GPU a wrong id ends in a device-side assert without a reason; here the error
names the shard, the position and the id.
"""

from collections.abc import Callable, Iterable, Iterator, Sized

import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_tricks._errors import UsageError
from lightning_tricks.data.batches import Batch, TrainBatches, ValidationBatches
from lightning_tricks.data.positions import Positions
from lightning_tricks.data.stream import TokenStream

Batches = TrainBatches | ValidationBatches
SCANNED_TOKENS = 1 << 30  # training tokens read before the start, in a second or two; later ones are checked in batches


class IdGuard:
    """Compares token ids with the smallest vocabulary that it was given."""

    def __init__(self) -> None:
        self.bound: int | None = None
        self.whose = ""

    def scan(self, streams: dict[str, TokenStream], vocab_size: int, whose: str) -> None:
        """Check the streams now and every batch from now on; see `ShardData.check_ids`."""
        for split, stream in streams.items():
            limit = SCANNED_TOKENS if split == "train" else len(stream)
            if (position := stream.first_at_least(vocab_size, limit)) is not None:
                raise _wrong_id(stream, position, vocab_size, whose)
        if self.bound is None or vocab_size < self.bound:
            self.bound, self.whose = vocab_size, whose

    def check(self, batches: Batches, position: int, batch: Batch) -> None:
        """Refuse a batch with an id that is too large: two maxima on the CPU, which take microseconds."""
        if self.bound is None:
            return
        # the labels hold every token of a row but its first
        if max(int(batch["labels"].max()), int(batch["input_ids"][:, 0].max())) < self.bound:
            return
        length = batch["input_ids"].shape[1] + 1
        for start in batches.starts(position).tolist():
            (wrong,) = np.nonzero(batches.stream.read(start, length) >= self.bound)
            if len(wrong):
                raise _wrong_id(batches.stream, start + int(wrong[0]), self.bound, self.whose)


def _wrong_id(stream: TokenStream, position: int, vocab_size: int, whose: str) -> UsageError:
    return UsageError(
        f"{stream.describe(position)}: id {stream.read(position, 1)[0]} does not fit {whose}, which has {vocab_size} "
        "tokens; raise vocab_size or use the tokenizer that wrote the shard"
    )


class Loader:
    """Yields `batches[p]` for each position p in order, fetched ahead by workers and pinned if there is CUDA.

    Args:
        batches: the dataset.
        positions: called at each `iter`, returns the positions to serve from now on. Their end may change meanwhile:
            they are asked again before each batch.
        num_workers: processes that fetch; 0 fetches in this one. The batches and their order are the same.
        guard: refuses a batch before it is yielded.
    """

    addressed_by_position = True  # ExactResume has nothing to do for a loader that says so

    def __init__(
        self, batches: Batches, positions: Callable[[], Iterable[int]], num_workers: int, guard: IdGuard
    ) -> None:
        self.batches, self.positions, self.num_workers, self.guard = batches, positions, num_workers, guard

    def __iter__(self) -> Iterator[Batch]:
        return self._load(self.positions())

    def _load(self, positions: Iterable[int]) -> Iterator[Batch]:
        loader = DataLoader(
            self.batches,
            batch_size=None,
            # to no end: a DataLoader stops once its workers have fetched all up to the end that they knew
            sampler=positions.without_end() if isinstance(positions, Positions) else positions,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            # its own generator: drawing the workers' seed must not move the run's random numbers
            generator=torch.Generator().manual_seed(0),
        )
        # not strict: workers fetch batches beyond the end, which nobody takes unless the end moves
        for position, batch in zip(positions, loader, strict=False):
            self.guard.check(self.batches, position, batch)
            yield batch


class SizedLoader(Loader):
    """A loader whose length is the number of its batches; the training loader has none."""

    def __len__(self) -> int:
        positions = self.positions()
        assert isinstance(positions, Sized)
        return len(positions)
