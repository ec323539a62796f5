"""Layouts: which matrices a parameter holds, found from structure, and weights taken apart and put together again."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_param_roles import Holder
from torch import nn

from lightning_tricks.optim import MatrixLayout, MuonAdamW, build_optimizer, param_roles


def layouts(module):
    return {param.name: param.layout for param in param_roles(module)}


@given(
    parts=st.lists(st.integers(1, 3), min_size=1, max_size=3), inputs=st.integers(1, 4),
    stack=st.none() | st.integers(0, 3), output_last=st.booleans(), interleaved=st.booleans(),
)  # fmt: skip
def test_a_weight_that_is_split_and_joined_is_the_same(parts, inputs, stack, output_last, interleaved):
    parts = parts[:1] * len(parts) if interleaved else parts
    first = [] if stack is None else [stack]
    shape = (*first, inputs, sum(parts)) if output_last else (*first, sum(parts), inputs)
    layout = MatrixLayout(
        shape, stack is not None, len(first) + output_last, tuple(parts) if len(parts) > 1 else (), interleaved
    )
    weight = torch.arange(math.prod(shape)).view(shape)
    matrices = layout.split(weight)
    assert [tuple(matrix.shape) for matrix in matrices] == [(*first, outputs, inputs) for outputs in parts]
    assert layout.sizes == [(outputs, inputs) for outputs in parts]
    assert torch.equal(layout.join(matrices), weight)
    assert MatrixLayout.from_plain(layout.plain, ()) == layout


def test_a_transposed_convolution_is_a_matrix_of_its_outputs():
    layer = nn.ConvTranspose2d(2, 3, (1, 2))
    layout = layouts(Holder(body=layer, head=nn.Linear(3, 2)))["body.weight"]
    (matrix,) = layout.split(layer.weight.detach())
    x = torch.randn(5, 2, 1, 1)
    torch.testing.assert_close(layer(x)[:, :, 0, 0], x[:, :, 0, 0] @ matrix[:, ::2].T + layer.bias)
    assert torch.equal(layout.join([matrix]), layer.weight)


def test_parts_are_told_by_names_and_by_three_times_the_inputs():
    names = {"qkv": 24, "in_proj": 24, "kv_proj": 16, "gate_up_proj": 24, "Wi": 24, "qkv_proj": 16, "up": 24, "q": 8}
    block = nn.ModuleDict({name: nn.Linear(8, outputs) for name, outputs in names.items()})
    found = layouts(Holder(blocks=nn.ModuleList([block]), head=nn.Linear(8, 2)))
    told = {name.split(".")[-2]: layout.parts for name, layout in found.items() if layout}
    told.pop("head")
    assert told == {
        "qkv": (8, 8, 8), "in_proj": (8, 8, 8), "kv_proj": (8, 8), "gate_up_proj": (12, 12), "Wi": (12, 12),
        "qkv_proj": None, "up": (), "q": (),
    }  # fmt: skip


def test_a_stack_tells_its_sides_by_a_flag():
    plain, flagged, alternating = (Holder(gate_up=torch.zeros(4, 8, 24)) for _ in range(3))
    flagged.is_transposed, alternating.is_concatenated = False, False
    found = layouts(Holder(blocks=nn.ModuleList([plain, flagged, alternating]), head=nn.Linear(8, 2)))
    stacks = [layout for name, layout in found.items() if name.endswith("gate_up")]
    assert [(layout.output_dim, layout.parts, layout.interleaved) for layout in stacks] == [
        (2, (12, 12), False), (1, (4, 4), False), (2, (12, 12), True),
    ]  # fmt: skip


def test_the_name_of_a_class_decides_nothing():
    """Classes named as norms, embeddings and routers, with other layers in them; and layers whose class has no name."""

    def renamed(name, layer):
        layer.__class__ = type(name, (type(layer),), {})
        return layer

    named = ["LinearNorm", "TokenEmbedding", "TopKRouter", "Conv1D", "FSDPLinear", "SoftGate", "GroupedExperts"]
    layers = [renamed(name, nn.Linear(8, 16)) for name in named]
    raw = [renamed(name, Holder(weight=torch.zeros(16, 8))) for name in [*named, "RMSNorm", "Embeddings", "Bias"]]
    found = param_roles(Holder(blocks=nn.ModuleList([*layers, *raw]), head=nn.Linear(16, 2)))
    assert {param.role for param in found if param.param.ndim == 2} == {"matrix", "head"}
    assert {(param.layout.outputs, param.layout.inputs) for param in found if param.role == "matrix"} == {(16, 8)}

    from transformers.pytorch_utils import Conv1D

    model = Holder(a=renamed("X", nn.RMSNorm(8)), b=renamed("Y", Conv1D(24, 8)), c=renamed("Z", nn.Embedding(9, 8)))
    model.head = nn.Linear(8, 9)
    assert {param.name: param.role for param in param_roles(model) if param.role != "bias"} == {
        "a.weight": "norm", "b.weight": "matrix", "c.weight": "embedding", "head.weight": "head",
    }  # fmt: skip
    assert layouts(model)["b.weight"].output_dim == 1


def _old_spectral_norm(layer):
    return nn.utils.spectral_norm(layer)


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.spectral_norm, _old_spectral_norm])
def test_a_computed_weight_is_not_read(norm):
    """To read `weight` of such a layer makes a step of its power iteration: the run after it is another one."""
    model = nn.Sequential(norm(nn.Linear(8, 8)), nn.Linear(8, 8), norm(nn.Linear(8, 4)))
    for param in model[0].parameters():
        param._no_weight_decay = param.ndim == 2
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = build_optimizer(model, lambda groups: MuonAdamW(groups, lr=0.1))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    roles = {param.name.rpartition(".")[2]: param for param in param_roles(model) if param.name.startswith("0.")}
    assert {name: (param.role, param.exempt) for name, param in roles.items() if name != "bias"} in (
        {"original": ("matrix", True)},
        {"weight_orig": ("matrix", True)},
    )
    assert {group["name"]: len(group["params"]) for group in optimizer.param_groups} == {
        "muon:decay": 1, "adamw:decay": 1, "muon:no_decay": 1, "adamw:no_decay": 3,
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
@pytest.mark.parametrize("layer", [lambda: nn.Linear(8, 4), lambda: nn.Conv1d(8, 4, 3)])
def test_of_a_weight_norm_the_sizes_do_not_decay_and_the_directions_are_those_of_the_layer(norm, layer):
    plain = layouts(Holder(layer=layer(), head=nn.Linear(4, 2)))["layer.weight"]
    scale, direction = [
        param for param in param_roles(Holder(layer=norm(layer()), head=nn.Linear(4, 2)))
        if param.name.startswith("layer.") and param.role != "bias"
    ]  # fmt: skip
    assert (scale.role, scale.layout) == ("vector", None)
    assert (direction.role, direction.layout) == ("matrix", plain)


def test_complex_matrices_and_scalars_go_to_adamw():
    model = Holder(
        body=nn.Linear(4, 4), spectral=torch.zeros(4, 4, dtype=torch.complex64), scale=torch.tensor(1.0),
        head=nn.Linear(4, 2),
    )  # fmt: skip
    optimizer = build_optimizer(model, lambda groups: MuonAdamW(groups, lr=0.1, fused=False))
    found = {name: group["optimizer"] for group in optimizer.param_groups for name in group["param_names"]}
    assert (found["body.weight"], found["spectral"], found["scale"]) == ("muon", "adamw", "adamw")
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert all(torch.isfinite(torch.view_as_real(p) if p.is_complex() else p).all() for p in model.parameters())
