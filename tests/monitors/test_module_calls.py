"""Calls of a model's parts are watched from outside of compiled graphs, and nothing is left behind."""

import copy
import pickle
from contextlib import ExitStack

import pytest
import torch
from harness.models import LLAMA
from torch import nn

from lightning_tricks._core.find_modules import find_blocks
from lightning_tricks.models import Decoder
from lightning_tricks.monitors._module_calls import after_calls, before_calls, outside_compiled


def model(**parts: nn.Module) -> nn.Module:
    root = nn.Module()
    for name, part in parts.items():
        root.add_module(name, part)
    return root


@pytest.mark.parametrize("first", [0, 1], ids=["before_undone_first", "after_undone_first"])
@pytest.mark.parametrize("compiled", ["no", "in_place", "wrapped"])
def test_each_call_is_seen_with_its_arguments_and_output_until_undone(compiled, first):
    torch.compiler.reset()
    layer, seen = nn.Linear(1, 1), []
    if compiled == "in_place":
        layer.compile(backend="eager")
    elif compiled == "wrapped":
        layer = torch.compile(layer, backend="eager")
    before = layer._compiled_call_impl
    scopes = [ExitStack(), ExitStack()]
    scopes[0].enter_context(before_calls(layer, lambda args, kwargs: seen.append(("in", args, kwargs))))
    scopes[1].enter_context(after_calls(layer, lambda output: seen.append(("out", output))))
    x = torch.ones(1, 1)
    y = layer(x)
    layer(input=x)
    assert [entry[0] for entry in seen] == ["in", "out", "in", "out"]
    assert seen[0][1] == (x,)
    assert seen[2][2] == {"input": x}
    assert seen[1][1] is y
    scopes[first].close()
    layer(x)
    assert [entry[0] for entry in seen[4:]] == ["out" if first == 0 else "in"]
    scopes[1 - first].close()
    layer(x)
    assert len(seen) == 5
    assert not layer._forward_hooks
    assert not layer._forward_pre_hooks
    assert layer._compiled_call_impl is before


def test_a_module_that_is_compiled_anew_while_it_is_watched_stays_so():
    layer, anew = nn.Linear(1, 1), lambda *_: "compiled anew"
    layer.compile(backend="eager")
    with before_calls(layer, lambda args, kwargs: None):
        layer._compiled_call_impl = anew
    assert layer._compiled_call_impl is anew


def test_a_watched_module_can_be_copied_and_pickled_and_nobody_watches_its_copies():
    layer, seen, x = nn.Linear(1, 1), [], torch.ones(1, 1)
    with before_calls(layer, lambda args, kwargs: seen.append(args)), after_calls(layer, seen.append):
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert other(x) == layer(x)
    assert len(seen) == 4


def test_what_is_inside_a_compiled_module_is_out_of_sight():
    def names(root):
        return list(outside_compiled(root, find_blocks(root)))

    assert names(model(net=Decoder(LLAMA))) == ["net.blocks.0", "net.blocks.1"]
    assert names(model(net=torch.compile(Decoder(LLAMA), backend="eager"))) == []
    assert names(torch.compile(model(net=Decoder(LLAMA)), backend="eager")) == []
    in_place = model(net=Decoder(LLAMA), other=nn.Linear(2, 2))
    in_place.other.compile(backend="eager")
    in_place.net.blocks[0].compile(backend="eager")
    assert names(in_place) == ["net.blocks.0", "net.blocks.1"]
    in_place.net.compile(backend="eager")
    assert names(in_place) == []
