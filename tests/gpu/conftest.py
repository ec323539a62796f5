"""For tests that compare two runs on a GPU to the bit: kernels that add in the same order each time."""

import os

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once, when it starts


@pytest.fixture(autouse=True)
def _waits_are_allowed_again():
    yield
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def _same_order_of_sums():
    """Left alone, backward kernels of attention add in another order each time: flash, and cuDNN's on Hopper."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
