"""What weights_only=True would refuse at load is found at save, with its key, and nothing else is."""

import argparse
import collections
import datetime
import io
import sys
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from lightning_tricks.checkpoints.unsafe_content import unsafe_content


@dataclass
class Settings:
    layers: int = 2


class Kind(Enum):
    A = 1


UNSAFE = {
    "test_unsafe_content.Settings": Settings(), "pathlib.PosixPath": Path("x"),
    "datetime.timedelta": datetime.timedelta(1),
    "numpy.float32": np.float32(1), "numpy.ndarray": np.ones(2), "argparse.Namespace": argparse.Namespace(a=1),
    "collections.deque": collections.deque([1]), "collections.defaultdict": collections.defaultdict(int),
    "decimal.Decimal": Decimal(1), "test_unsafe_content.Kind": Kind.A, "functools.partial": partial(int),
    "builtins.int": int, "builtins.len": len, "builtins.range": range(3), "builtins.frozenset": frozenset({1}),
    "torch.nn.modules.linear.Linear": nn.Linear(1, 1),
}  # fmt: skip
SAFE = [
    None, True, 1, 10**40, 1.5, 1j, "text", b"bytes", bytearray(b"x"), {1}, (1, 2), [[]], {"a": {1: 2}},
    torch.Size([1]),
    collections.OrderedDict(a=1), collections.Counter("a"), torch.float32, torch.device("cpu"), torch.ones(2),
    nn.Parameter(torch.ones(1)), torch.ones(2).to_sparse(), torch.ones(2, dtype=torch.float8_e4m3fn), torch.strided,
]  # fmt: skip


def found_and_opens(value, path: Path) -> tuple[list[str], bool]:
    checkpoint = {"state_dict": {"weight": torch.ones(1)}, "a": {"b": [0, value]}}
    torch.save(checkpoint, path)
    try:
        torch.load(path, weights_only=True)
    except Exception:
        return unsafe_content(checkpoint, path), False
    return unsafe_content(checkpoint, path), True


@pytest.mark.parametrize("name", UNSAFE)
def test_what_does_not_open_is_named_with_its_key(name, tmp_path):
    assert found_and_opens(UNSAFE[name], tmp_path / "at.ckpt") == ([f"a.b.1 ({name})"], False)


@pytest.mark.parametrize("value", SAFE, ids=lambda value: type(value).__name__)
def test_what_opens_is_not_named(value, tmp_path):
    assert found_and_opens(value, tmp_path / "at.ckpt") == ([], True)


def test_keys_and_several_entries_are_named(tmp_path):
    found, opens = found_and_opens({Path("x"): 1, "y": {"z": Kind.A}}, tmp_path / "at.ckpt")
    assert found == ["a.b.1.x (pathlib.PosixPath)", "a.b.1.y.z (test_unsafe_content.Kind)"]
    assert not opens


def test_what_the_program_allows_is_not_named(tmp_path):
    with torch.serialization.safe_globals([Settings]):
        assert found_and_opens(Settings(), tmp_path / "at.ckpt") == ([], True)


def test_a_number_that_torch_cannot_read_is_found(tmp_path):
    found, opens = found_and_opens(2**3000, tmp_path / "at.ckpt")
    assert len(found) == 1
    assert not opens


def test_no_tensor_is_read_for_it(tmp_path):
    """Only the pickle is read, so the cost does not grow with the tensors."""
    path = tmp_path / "at.ckpt"
    torch.save({"weight": torch.full((1000,), 3.0), "path": Path("x")}, path)
    content = path.read_bytes().replace(torch.full((1000,), 3.0).numpy().tobytes(), bytes(4000))
    path.write_bytes(content)
    assert io.BytesIO(content).getbuffer().nbytes == path.stat().st_size
    assert unsafe_content({"path": Path("x")}, path) == ["path (pathlib.PosixPath)"]
