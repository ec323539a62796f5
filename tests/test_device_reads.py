"""The helper of the tests that find no wait for the device: which calls it sees, and that it leaves nothing behind."""

import math
from contextlib import contextmanager

import pytest
import torch
from harness.device_reads import watching_reads

X = torch.tensor([0.25, 1.0, 2.0])
ROW = torch.arange(3)


@contextmanager
def noted():
    found = []
    with watching_reads(lambda call, frame: found.append((call, frame.f_code.co_name))):
        yield found


def set_by_mask(value):
    x = X.clone()
    x[x > 0.5] = value


READS = {  # a read, and its name
    "item": (lambda: X[0].item(), ".item()"),
    "float": (lambda: float(X[0]), "float()"),
    "if": (lambda: 1 if X[0] > 0 else 2, "bool()"),
    "index": (lambda: [5, 6, 7][ROW[1]], "index"),
    "math": (lambda: math.isnan(X[0]), "float()"),
    "tolist": (lambda: X.tolist(), ".tolist()"),
    "to cpu": (lambda: X.to("cpu"), ".to()"),
    "indices": (lambda: torch.where(X > 0), "torch.where()"),
    "mask": (lambda: X[X > 0.5], "[mask]"),
    "set by mask": (lambda: set_by_mask(torch.ones(2)), "[mask] ="),
    "repeats": (lambda: X.repeat_interleave(ROW), ".repeat_interleave()"),
    "in torch's code": (lambda: torch.nn.utils.clip_grad_norm_([X.clone().requires_grad_()], 1.0), None),
    "to a device": (lambda: X.to(torch.device("cpu")), None),
    "without a wait": (lambda: X.to("cpu", non_blocking=True), None),
    "values by condition": (lambda: torch.where(X > 0, X, -X), None),
    "fill by mask": (lambda: set_by_mask(0.0), None),
    "without data": (lambda: repr(torch.empty(2, device="meta")), None),
}  # fmt: skip


@pytest.mark.parametrize(("read", "name"), READS.values(), ids=READS)
def test_a_read_is_noted_once_by_its_name_and_its_place(read, name):
    read()  # imports, on the first call
    with noted() as found:
        read()
    places = {"<lambda>", "set_by_mask"}
    assert [call for call, _ in found] == ([] if name is None else [name])
    assert {place for _, place in found} <= places


def test_nothing_is_left_behind_nor_noted_afterwards():
    before = {**vars(torch.Tensor)}, {**vars(torch)}
    with noted() as found:
        pass
    X[0].item()
    assert found == []
    assert before == ({**vars(torch.Tensor)}, {**vars(torch)})
