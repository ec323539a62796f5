"""Two files of random tokens, for recipes and data modules of TokenData."""

from pathlib import Path

import numpy as np

from lightning_tricks.data import ShardWriter


def write_token_files(folder: Path, train: int = 3900, tokens: int = 4000) -> Path:
    """`train.bin` of so many tokens below 64, and `val.bin` with the rest of all `tokens`; the same each time."""
    folder.mkdir(exist_ok=True)
    ids = np.random.default_rng(0).integers(0, 64, tokens)
    for name, part in (("train", ids[:train]), ("val", ids[train:])):
        with ShardWriter(folder, name, 64) as writer:
            writer.append(part)
        (folder / f"{name}_000000.bin").rename(folder / f"{name}.bin")
    return folder
