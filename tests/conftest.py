"""What every test shares: one torch thread a worker, and no network."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

torch.set_num_threads(1)

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Some 200 kB of Python source as one text file."""
    import argparse
    import inspect
    import pathlib
    import typing

    path = tmp_path_factory.mktemp("text") / "source.txt"
    Path(path).write_text("\n\n".join(inspect.getsource(module) for module in (argparse, pathlib, typing)))
    return str(path)
