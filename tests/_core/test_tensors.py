"""The tensors of a batch are found in whatever holds them."""

from types import SimpleNamespace
from typing import Any

import torch

from lightning_tricks._core.tensors import tensors_in


def values(batch: Any) -> list[list[float]]:
    return [tensor.tolist() for tensor in tensors_in(batch)]


def test_tensors_come_in_the_order_of_the_batch():
    batch = {"a": [torch.ones(1), (torch.zeros(2),)], "b": SimpleNamespace(x=torch.tensor([5.0]), y="text"), "c": None}
    assert values(batch) == [[1], [0, 0], [5]]


def test_objects_that_hold_each_other_are_looked_into_once():
    graph = SimpleNamespace(x=torch.ones(1))
    graph.nodes = [SimpleNamespace(graph=graph, y=torch.full((1,), float(number))) for number in range(3)]
    assert values(graph) == [[1], [0], [1], [2]]


def test_a_chain_of_objects_may_be_longer_than_python_calls_itself():
    chain = SimpleNamespace(x=torch.ones(1))
    for _ in range(5_000):
        chain = SimpleNamespace(next=chain)
    assert values(chain) == [[1]]


def test_tensors_whose_bits_cannot_be_read_are_left_out():
    with torch.no_grad():
        odd = [torch.eye(2).to_sparse(), torch.zeros(0, 3), torch.nested.nested_tensor([torch.ones(1)])]
    assert values(odd) == []
