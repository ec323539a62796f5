"""Small texts and shards for the tests of the data room."""

from pathlib import Path

import numpy as np
import pytest

from lightning_tricks.data import ShardWriter

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "looked", "at", "the", "moon", "while", "rain", "fell")


@pytest.fixture
def write_shard(tmp_path):
    """Write token ids as one llm.c shard and return its path."""

    def write(ids, name: str = "train", vocab_size: int = 256) -> Path:
        with ShardWriter(tmp_path, name, vocab_size) as writer:
            writer.append(np.asarray(ids))
        return tmp_path / f"{name}_000000.bin"

    return write


@pytest.fixture
def story(tmp_path) -> Path:
    """A text file of 200 short paragraphs, about 30 KB."""
    random = np.random.default_rng(0)
    paragraphs = [f"Chapter {n}: " + " ".join(random.choice(WORDS, 25)) + ".\n" for n in range(200)]
    path = tmp_path / "story.txt"
    path.write_text("\n".join(paragraphs), encoding="utf-8")
    return path
