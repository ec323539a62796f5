"""What every test shares: one torch thread a worker, no network, and a little text."""

import argparse
import inspect
import os
import pathlib
import typing

# before anything imports torch or a tokenizer
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Some 200 kB of Python source as one text file."""
    path = tmp_path_factory.mktemp("text") / "source.txt"
    path.write_text("\n\n".join(inspect.getsource(module) for module in (argparse, pathlib, typing)))
    return str(path)
