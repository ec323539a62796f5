"""Recipes as the command line builds them, and the batches that feed and time every contender."""

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from lightning_tricks.cli import RecipeCLI
from lightning_tricks.data import ShardWriter

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
Batch = dict[str, Tensor]
Mark = Callable[[int], bool | None]


class Meter:
    """Serve `count` of `batches` and call `mark(0)`, ..., `mark(count)`, one call before each and one at the end.

    Where a mark returns true, the batches end before their number is reached.

    Lightning fetches one batch ahead, so there a step lies between marks n + 1 and n + 2 that in a bare loop lies
    between n and n + 1. Between any two marks from the first on it is the same number of steps.
    """

    def __init__(self, batches: Iterable[Batch], count: int, mark: Mark) -> None:
        self.batches, self.count, self.mark = batches, count, mark

    def __iter__(self) -> Iterator[Batch]:
        for index, batch in enumerate(self.batches):
            if self.mark(index) or index == self.count:
                return
            yield batch


def write_tokens(folder: Path, vocab_size: int, tokens: int, eot_id: int | None = None, mean_document: int = 1) -> str:
    """Write a shard of uniformly random ids below `vocab_size`; the glob that finds it.

    Args:
        folder: where.
        vocab_size: of the ids.
        tokens: how many.
        eot_id: the id at which documents end. None: nothing ends on purpose.
        mean_document: tokens of a document, on average.
    """
    rng = np.random.default_rng(0)
    ids = rng.integers(0, vocab_size, tokens)
    if eot_id is not None:
        ids[ids == eot_id] = (eot_id + 1) % vocab_size
        ids[rng.random(tokens) < 1 / mean_document] = eot_id
    with ShardWriter(folder, "train", vocab_size) as writer:
        writer.append(ids)
    return str(folder / "train_*.bin")


def load(recipe: str, shards: str, folder: Path, overrides: Sequence[str] = ()) -> RecipeCLI:
    """Build a recipe as the command line does, on the given shards, with nothing that is not training.

    Args:
        recipe: name of a file in recipes/, without its ending.
        shards: glob of token shards.
        folder: where everything that a Trainer writes goes.
        overrides: further options, such as `["--trainer.max_steps", "10"]`.
    """
    common = {
        "data": "TokenData",
        "data.init_args.train": shards,
        "data.init_args.val": "null",
        "trainer.devices": "1",
        "trainer.strategy": "auto",
        "trainer.callbacks": "[]",
        "trainer.enable_checkpointing": "false",
        "trainer.enable_model_summary": "false",
        "trainer.limit_val_batches": "0",
        "trainer.max_epochs": "1",  # the batches' end is the run's end, while the schedule keeps its length
        "trainer.default_root_dir": str(folder),
    }
    options = [text for name, value in common.items() for text in (f"--{name}", value)]
    arguments = ["--config", str(RECIPES / f"{recipe}.yaml"), *options, *overrides]
    argv, sys.argv = sys.argv, sys.argv[:1]  # LightningCLI warns where both are given
    try:
        return RecipeCLI(run=False, save_config_callback=None, args=arguments)
    finally:
        sys.argv = argv


def in_memory(cli: RecipeCLI, count: int) -> Iterator[Batch]:
    """The recipe's first `count` training batches, read once and then repeated without end."""
    cli.datamodule.setup("fit")
    return itertools.cycle(list(itertools.islice(cli.datamodule.train_dataloader(), count)))


def own_loader(cli: RecipeCLI) -> Iterable[Batch]:
    """The batches that the recipe's data module loads as it goes."""
    cli.datamodule.setup("fit")
    return cli.datamodule.train_dataloader()


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Discard all output, from C too: printing costs nothing then."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for old, number in zip(kept, (1, 2), strict=True):
            os.dup2(old, number)
            os.close(old)
        os.close(nowhere)
