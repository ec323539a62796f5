"""Weights come from every kind of file and folder, by name; the first name or shape that differs is refused."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_tricks._core.errors import UsageError
from lightning_tricks.checkpoints import load_weights
from lightning_tricks.checkpoints.load_weights import differing_weights, read_weights
from lightning_tricks.checkpoints.write_file import write_file


def model(width: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(2, width), nn.Linear(width, 1))


@pytest.fixture
def source():
    torch.manual_seed(1)
    return model()


def safetensors(state, path):
    pytest.importorskip("safetensors.torch").save_file(state, path)


LIGHTNING = {"pytorch-lightning_version": "2.6.0", "global_step": 7, "lr_schedulers": [{}], "loops": {"fit_loop": {}}}
WAYS = {
    "whole.ckpt": lambda state, path: torch.save(
        {**LIGHTNING, "optimizer_states": [{}], "optimizer_class": "SGD", "state_dict": state}, path
    ),
    "record.ckpt": lambda state, path: write_file({**LIGHTNING, "state_dict": state}, path),
    "weights_only.ckpt": lambda state, path: torch.save({"state_dict": state}, path),
    "bare.pt": torch.save,
    "compiled.pt": lambda state, path: torch.save({f"_orig_mod.{name}": value for name, value in state.items()}, path),
    "nanogpt.pt": lambda state, path: torch.save({"model": state, "iter_num": 3}, path),
    "old.pt": lambda state, path: torch.save(state, path, _use_new_zipfile_serialization=False),
    "weights.safetensors": safetensors,
}


@pytest.mark.parametrize("name", WAYS)
def test_every_kind_of_file_gives_the_same_weights(name, source, tmp_path):
    WAYS[name](source.state_dict(), tmp_path / name)
    other = model()
    line = load_weights(other, tmp_path / name)
    for key, value in source.state_dict().items():
        assert torch.equal(other.state_dict()[key], value)
    assert line.startswith(f"{tmp_path / name}: 4 of its 4 weights loaded")
    left = "; left out: the optimizer's state, the schedule, the step and the position in the data"
    assert line.endswith(left) == (name == "whole.ckpt")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("1.bias"), "has no '1.bias', which the model has: take the model"),
        (lambda state: state.update({"2.bias": torch.ones(1)}), "has '2.bias', which the model lacks: take the model"),
        (lambda state: state.update({"0.bias": torch.ones(5)}), "'0.bias' is (5,) in it and (3,) in the model"),
        (lambda state: state.update({"0.bias": 5}), "holds no weights: neither"),
    ],
)
def test_the_first_difference_is_named_and_nothing_is_loaded(change, words, source, tmp_path):
    state = source.state_dict()
    change(state)
    torch.save(state, tmp_path / "x.pt")
    other = model()
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(UsageError, match=re.escape(words)):
        load_weights(other, tmp_path / "x.pt")
    assert all(torch.equal(other.state_dict()[name], value) for name, value in before.items())


def test_the_first_weight_that_differs_is_the_modules_first_and_other_state_has_no_shape():
    own = {"0.weight": SimpleNamespace(shape=(0,), ds_shape=(2, 2)), "0.extra": {"steps": 1}}  # as DeepSpeed shards it
    same = {"0.weight": torch.ones(2, 2), "0.extra": {"steps": 2}}
    assert differing_weights(own, same) is None
    assert "no '0.weight'" in differing_weights(own, {"more": torch.ones(1)})
    assert "has 'more'" in differing_weights(own, {**same, "more": torch.ones(1)})
    other = differing_weights(own, {**same, "0.extra": torch.ones(3)})
    assert other == "'0.extra' is (3,) in it and no tensor in the model"


def test_without_strict_loading_what_both_have_is_loaded_and_the_rest_is_named(source, tmp_path):
    state = source.state_dict()
    del state["1.weight"], state["1.bias"]
    torch.save({**state, "head.weight": torch.ones(1)}, tmp_path / "x.pt")
    other = model()
    other.strict_loading = False
    first = other[1].weight.clone()
    line = load_weights(other, tmp_path / "x.pt")
    assert torch.equal(other[0].weight, source[0].weight)
    assert torch.equal(other[1].weight, first)
    assert line.endswith(
        "2 of its 3 weights loaded; not in it, so as initialised: 1.weight and 1 more; not in the model: head.weight"
    )
    torch.save({"head.weight": torch.ones(1)}, tmp_path / "y.pt")
    with pytest.raises(UsageError, match=r"has no weight of the model: its first is 'head\.weight'"):
        load_weights(other, tmp_path / "y.pt")


def test_a_flipped_bit_and_a_missing_file_are_refused(source, tmp_path):
    path = tmp_path / "x.pt"
    torch.save(source.state_dict(), path)
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x07\x08") - 3] ^= 1
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"^damaged: "):
        load_weights(model(), path)
    for name in ("no.ckpt", "no.safetensors"):
        with pytest.raises(UsageError, match="there is no such file"):
            read_weights(tmp_path / name)


def test_a_damaged_file_of_safetensors_is_refused_in_one_line(tmp_path):
    pytest.importorskip("safetensors")
    path = tmp_path / "cut.safetensors"
    path.write_bytes(b'\x10\0\0\0\0\0\0\0{"a":')
    with pytest.raises(UsageError, match=rf"^damaged: {path} cannot be read \(.*\)[^\n]*$"):
        load_weights(model(), path)
