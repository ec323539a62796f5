"""Catch a token id that the vocabulary lacks before it reaches an embedding: in the shards, and in each batch.

On a GPU such an id is a device-side assert that says nothing; here it is a shard, a position and an id.
"""

import numpy as np

from lightning_tricks._errors import UsageError
from lightning_tricks.data.batches import Batch, TrainBatches, ValidationBatches
from lightning_tricks.data.stream import TokenStream

SCANNED_TOKENS = 1 << 30  # training tokens looked at before the start: a second or two; batches show the rest


class IdGuard:
    """Remembers the smallest vocabulary that it was told of and holds every batch to it."""

    def __init__(self) -> None:
        self.bound: int | None = None
        self.whose = ""

    def scan(self, streams: dict[str, TokenStream], vocab_size: int, whose: str) -> None:
        """Look through the first 2**30 training tokens and all validation tokens; watch the batches from now on.

        Args:
            streams: `train` and `val`.
            vocab_size: ids 0..vocab_size-1 are good.
            whose: vocabulary it is, for the message.

        Raises:
            UsageError: names the shard, the position and the id of the first one that is too large.
        """
        for split, stream in streams.items():
            limit = SCANNED_TOKENS if split == "train" else len(stream)
            if (position := stream.first_at_least(vocab_size, limit)) is not None:
                raise _bad_id(stream, position, vocab_size, whose)
        if self.bound is None or vocab_size < self.bound:
            self.bound, self.whose = vocab_size, whose

    def check(self, batches: TrainBatches | ValidationBatches, position: int, batch: Batch) -> None:
        """Refuse a batch that holds an id beyond the bound; two maxima on the CPU, microseconds."""
        if self.bound is None:
            return
        # the labels hold every token of a row but its first
        if max(int(batch["labels"].max()), int(batch["input_ids"][:, 0].max())) < self.bound:
            return
        length = batch["input_ids"].shape[1] + 1
        for start in batches.starts(position).tolist():
            (hits,) = np.nonzero(batches.stream.read(start, length) >= self.bound)
            if len(hits):
                raise _bad_id(batches.stream, start + int(hits[0]), self.bound, self.whose)


def _bad_id(stream: TokenStream, position: int, vocab_size: int, whose: str) -> UsageError:
    number = int(stream.read(position, 1)[0])
    return UsageError(
        f"{stream.describe(position)}: id {number} does not fit {whose}, which has {vocab_size} tokens; "
        "raise vocab_size or use the tokenizer that wrote the shard"
    )
