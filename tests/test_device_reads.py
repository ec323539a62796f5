"""The helper of the tests that find no wait for the device: which calls it sees, and that it leaves nothing behind."""

import math
import threading
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
    "int": (lambda: int(X[1]), "int()"),
    "if": (lambda: 1 if X[0] > 0 else 2, "bool()"),
    "index": (lambda: [5, 6, 7][ROW[1]], "index"),
    "print": (lambda: print(X), "repr()"),
    "format": (lambda: f"{X[0]:.2f}", "format()"),
    "math": (lambda: math.isnan(X[0]), "float()"),
    "tolist": (lambda: X.tolist(), ".tolist()"),
    "numpy": (lambda: X.numpy(), ".numpy()"),
    "cpu": (lambda: X.cpu(), ".cpu()"),
    "to cpu": (lambda: X.to("cpu"), ".to()"),
    "nonzero": (lambda: torch.nonzero(X), "torch.nonzero()"),
    "indices": (lambda: torch.where(X > 0), "torch.where()"),
    "mask": (lambda: X[X > 0.5], "[mask]"),
    "mask in a tuple": (lambda: X[None][0, X > 0.5], "[mask]"),
    "set by mask": (lambda: set_by_mask(torch.ones(2)), "[mask] ="),
    "in": (lambda: 0.25 in X, "in"),
    "equal": (lambda: torch.equal(X, X), "torch.equal()"),
    "repeats": (lambda: X.repeat_interleave(ROW), ".repeat_interleave()"),
    "in torch's code": (lambda: torch.nn.utils.clip_grad_norm_([X.clone().requires_grad_()], 1.0), None),
    "norm that must be finite": (
        lambda: torch.nn.utils.clip_grad_norm_([with_gradient()], 1.0, error_if_nonfinite=True), "bool()",
    ),
    "to a device": (lambda: X.to(torch.device("cpu")), None),
    "to a type": (lambda: X.to(torch.float64), None),
    "without a wait": (lambda: X.to("cpu", non_blocking=True), None),
    "values by condition": (lambda: torch.where(X > 0, X, -X), None),
    "slices": (lambda: X[None, 1:][:, [0, 1]], None),
    "fill by mask": (lambda: set_by_mask(0.0), None),
    "equal repeats": (lambda: X.repeat_interleave(2), None),
    "repeats of known length": (lambda: X.repeat_interleave(ROW, output_size=3), None),
    "adamw's step": (lambda: adamw_step(), None),
    "without data": (lambda: repr(torch.empty(2, device="meta")), None),
}  # fmt: skip


def with_gradient():
    parameter = torch.ones(2, requires_grad=True)
    parameter.grad = torch.ones(2)
    return parameter


def adamw_step():
    torch.optim.AdamW([with_gradient()], foreach=False).step()


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


def test_a_read_that_fails_does_not_hide_the_next_one():
    with noted() as found:
        with pytest.raises(RuntimeError):
            X.item()
        X[0].item()
    assert len(found) == 2


def test_other_threads_and_hooks_of_the_backward_pass_are_seen():
    def hook(gradient):
        gradient.sum().item()

    with noted() as found:
        thread = threading.Thread(target=lambda: X[0].item())
        thread.start()
        thread.join()
        parameter = torch.ones(2, requires_grad=True)
        parameter.register_hook(hook)
        parameter.sum().backward()
    assert found == [(".item()", "<lambda>"), (".item()", "hook")]


def in_graph(x):
    return torch.where(x > 0, x, -x)[1:].sum() + x[None].sum()


def breaks_the_graph(x):
    if x.sum() > 0:
        return torch.nonzero(x)
    return x * x.sum().item()


def test_compiled_code_stays_one_graph_and_reads_between_graphs_are_seen():
    torch._dynamo.reset()
    with noted() as found:
        torch.compile(in_graph, backend="eager", fullgraph=True)(X)
        assert found == []
        breaks = torch.compile(breaks_the_graph, backend="eager")
        breaks(X)
        breaks(X)
    assert [call for call, _ in found] == ["bool()", "torch.nonzero()"] * 2
    torch._dynamo.reset()
