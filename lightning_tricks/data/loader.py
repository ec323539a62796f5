"""The loaders that Lightning is given: plain iterables around torch's DataLoader.

Not DataLoaders themselves, so that Lightning adds no sampler of its own: ours already know rank and position.
"""

from collections.abc import Callable, Iterator

import torch
from torch.utils.data import DataLoader

from lightning_tricks.data.batches import Batch, TrainBatches, ValidationBatches


def load(
    batches: TrainBatches | ValidationBatches, positions: range, num_workers: int, check: Callable[..., None]
) -> Iterator[Batch]:
    """Yield `batches[p]` for each position in order, fetched ahead by workers and pinned where there is CUDA.

    Args:
        batches: the dataset.
        positions: where the batches are, in the order to serve them.
        num_workers: processes that fetch; 0 fetches here. The batches and their order are the same.
        check: called with the dataset, the position and the batch before it is yielded; raises to refuse it.
    """
    loader = DataLoader(
        batches,
        batch_size=None,
        sampler=positions,
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
        # its own generator: drawing the workers' seed must not move the run's random numbers
        generator=torch.Generator().manual_seed(0),
    )
    for position, batch in zip(positions, loader, strict=True):
        check(batches, position, batch)
        yield batch


class TrainLoader:
    """Endless or not, it has no length; each `iter` asks anew where the run stands.

    Args:
        batches: rows by sample position.
        positions: gives the positions to serve from now on.
        num_workers: see `load`.
        check: see `load`.
    """

    def __init__(
        self,
        batches: TrainBatches,
        positions: Callable[[], range],
        num_workers: int,
        check: Callable[..., None],
    ) -> None:
        self.batches, self.positions, self.num_workers, self.check = batches, positions, num_workers, check

    def __iter__(self) -> Iterator[Batch]:
        return load(self.batches, self.positions(), self.num_workers, self.check)


class ValidationLoader:
    """All validation batches of this process, in order; its length is the number of batches."""

    def __init__(self, batches: ValidationBatches, num_workers: int, check: Callable[..., None]) -> None:
        self.batches, self.num_workers, self.check = batches, num_workers, check

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return load(self.batches, range(len(self)), self.num_workers, self.check)
