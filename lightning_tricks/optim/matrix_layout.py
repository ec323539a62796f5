"""How the matrices of one parameter lie in it: a fused projection, a stack of experts, the filters of a convolution."""

import math
import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_tricks._errors import UsageError
from lightning_tricks.optim.param_places import Model, Place, weight_of


class MatrixLayout(NamedTuple):
    """The matrices in a parameter: which of its dimensions are outputs, and which outputs belong to one matrix.

    Every dimension that counts neither matrices nor outputs is an input: of a convolution, the channels and the kernel.

    Args:
        shape: of the whole parameter.
        stacked: whether the first dimension counts matrices, such as experts.
        output_dim: the dimension of the outputs: 0 of an `nn.Linear`, 1 of transformers' `Conv1D`, 2 of experts
            (experts, in, out).
        parts: number of outputs of each matrix of a fused projection, in their order; empty for one matrix, None for a
            fused projection whose parts are not known.
        interleaved: whether the outputs of the parts alternate: gate, up, gate, up.
        to_heads: whether the outputs are queries, keys or values of attention heads.
    """

    shape: tuple[int, ...]
    stacked: bool = False
    output_dim: int = 0
    parts: tuple[int, ...] | None = ()
    interleaved: bool = False
    to_heads: bool = False

    @classmethod
    def from_plain(cls, saved: dict[str, Any] | None, shape: Sequence[int]) -> "MatrixLayout":
        """The layout of a group's entry, see `plain`; without one, a matrix (outputs, inputs) or a convolution."""
        return cls(**saved) if saved else cls(tuple(shape))

    @property
    def plain(self) -> dict[str, Any]:
        """As a dict of plain types, which a checkpoint can hold."""
        return self._asdict()

    @property
    def outputs(self) -> int:
        """Outputs of all parts together; of one expert in a stack."""
        return self.shape[self.output_dim]

    @property
    def inputs(self) -> int:
        """Inputs of each matrix; those of a convolution count the kernel."""
        count = self.shape[0] if self.stacked else 1
        return math.prod(self.shape) // max(self.outputs * count, 1)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(outputs, inputs) of each matrix; of one expert in a stack."""
        return [(outputs, self.inputs) for outputs in self.parts or (self.outputs,)]

    def by_heads(self, head_dim: int, name: str) -> "MatrixLayout":
        """The same layout with one part for each attention head; without heads, itself.

        Raises:
            UsageError: the outputs of a projection are no multiple of `head_dim`.
        """
        if not self.to_heads:
            return self
        sizes = self.parts or (self.outputs,)
        if any(size % head_dim for size in sizes):
            raise UsageError(
                f"head_dim={head_dim}: '{name}' has projections of {list(sizes)} outputs, which are not whole heads: "
                "give the width of the model's attention heads"
            )
        return self._replace(parts=tuple(head_dim for size in sizes for _ in range(size // head_dim)))

    def split(self, weight: Tensor) -> list[Tensor]:
        """The matrices in a weight of this shape, each (outputs, inputs), of a stack (experts, outputs, inputs)."""
        first = 1 if self.stacked else 0
        matrix = weight.movedim(self.output_dim, first).flatten(first + 1)
        if not self.parts:
            return [matrix]
        if self.interleaved:
            return [matrix[..., part :: len(self.parts), :] for part in range(len(self.parts))]
        return list(matrix.split(self.parts, first))

    def join(self, matrices: Sequence[Tensor]) -> Tensor:
        """The weight of such matrices, in order: the inverse of `split`."""
        first = 1 if self.stacked else 0
        if len(matrices) == 1:
            matrix = matrices[0]
        elif self.interleaved:
            stacked = [matrix.unsqueeze(first + 1) for matrix in matrices]
            matrix = torch.cat(stacked, first + 1).flatten(first, first + 1)
        else:
            matrix = torch.cat(list(matrices), first)
        shape = list(self.shape)
        shape.insert(first, shape.pop(self.output_dim))
        return matrix.reshape(shape).movedim(first, self.output_dim)


_CONVOLUTION = nn.modules.conv._ConvNd
_PRODUCTS = (
    nn.Linear, _CONVOLUTION, nn.Bilinear, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase,
)  # fmt: skip
# fused projections that hold queries, keys and values one after the other
_THREE = re.compile(r"qkv|qkv_proj|Wqkv|c_attn|to_qkv")
_TWO = re.compile(r"kv|kv_proj|to_kv")  # keys, then values
# any fused projection: the parts of the others may be interleaved or of different widths
_FUSED = re.compile(r".*qkv.*|query_key_value|c_attn|kqv|in_proj")
# one projection by itself
_PROJECTION = re.compile(r"(q|k|v|query|key|value)(_proj|_lin)?")


def is_product(layer: nn.Module) -> bool:
    """Whether a layer multiplies its input with its weights: torch's layers, and others with the same attributes."""
    if isinstance(layer, _PRODUCTS) or _is_transposed(layer):
        return True
    return all(isinstance(getattr(layer, name, None), int) for name in ("in_features", "out_features"))


def _is_transposed(layer: nn.Module) -> bool:
    """Whether a layer is transformers' `Conv1D` or a copy of it: `nf` outputs, and a weight (in, nf)."""
    weight = weight_of(layer)
    outputs = getattr(layer, "nf", None)
    return isinstance(outputs, int) and weight is not None and weight.ndim == 2 and weight.shape[1] == outputs


def declared_parts(model: Model) -> dict[int, list[int]]:
    """The outputs of each matrix in the weights that modules name in a dict `_matrices`, by the parameter's id.

    Raises:
        UsageError: it names what is no parameter.
    """
    found: dict[int, list[int]] = {}
    for path, owner in model.layers.items():
        for own_name, sizes in getattr(owner, "_matrices", {}).items():
            if (param := model.parameter(path, own_name)) is None:
                raise UsageError(
                    f"_matrices of module '{path}' names '{own_name}', which is no parameter of it: correct the name"
                )
            found[id(param)] = list(sizes)
    return found


def layout_of(
    place: Place, model: Model, role: str, heads: Collection[int], declared: Sequence[int] | None
) -> MatrixLayout:
    """The layout of a parameter whose role is one of `MATRICES`.

    - torch's convolutions, recurrent layers and `nn.MultiheadAttention` have layouts of their own, as has transformers'
      `Conv1D`; every other weight of two dimensions is (outputs, inputs).
    - A stack of experts says by `is_transposed` and `is_concatenated` how it lies (transformers 5). Without them, two
      stacks tell by their shapes which of them is twice as wide as the other, and a router by its inputs what the first
      stack multiplies. Otherwise it is (experts, in, out), as `torch.bmm` takes it.
    - A projection to twice the width that a layer beside it takes back is two fused projections: gate and up, keys and
      values. One with a name such as `qkv`, `Wqkv` or `c_attn` is three, if the layer beside it tells their widths.
      Other names of fused projections, such as `query_key_value`, leave the parts unknown (None).
    - A module can declare the outputs of each part in a dict `_matrices`: `{"qkv.weight": [512, 128, 128]}`, with names
      as seen from that module.

    Raises:
        UsageError: a declaration whose numbers are not those of the weight.
    """
    layer, shape, local = place.layer, tuple(place.param.shape), place.local
    name = local.removesuffix("_weight") if local != "weight" else (place.parts[-2:-1] or [""])[0]
    layout = MatrixLayout(shape, to_heads=_PROJECTION.fullmatch(name) is not None)
    if isinstance(layer, _CONVOLUTION):
        layout = layout._replace(output_dim=1 if layer.transposed else 0, to_heads=False)
    elif isinstance(layer, nn.RNNBase | nn.RNNCellBase):
        gates = shape[0] // layer.hidden_size if local.startswith(("weight_ih", "weight_hh")) else 1
        layout = layout._replace(parts=(layer.hidden_size,) * gates if gates > 1 else ())
    elif isinstance(layer, nn.MultiheadAttention) and local == "in_proj_weight":
        layout = layout._replace(parts=(layer.embed_dim,) * 3, to_heads=True)
    elif role == "expert" and len(shape) == 3 and not is_product(layer):
        layout = _of_stack(place, model, heads)
    elif len(shape) == 2:
        layout = layout._replace(output_dim=1 if _is_transposed(layer) else 0)
        if role in ("matrix", "expert"):
            layout = _of_projection(layout, place, model, name)
    if declared is None:
        return layout
    if sum(declared) != layout.outputs:
        raise UsageError(
            f"_matrices: {place.name} has {layout.outputs} rows, and not {sum(declared)}: correct the numbers"
        )
    return layout._replace(parts=tuple(declared), interleaved=False)


def _of_projection(layout: MatrixLayout, place: Place, model: Model, name: str) -> MatrixLayout:
    """The layout of a linear layer, with parts where it is a fused projection."""
    if layout.to_heads or place.local != "weight":
        return layout
    outputs, inputs, beside = layout.outputs, layout.inputs, _beside(place, model)
    back = {taken for given, taken in beside if given == inputs}  # widths that the layers beside it turn back
    if (_THREE.fullmatch(name) or name == "in_proj") and outputs == 3 * inputs:
        return layout._replace(parts=(inputs,) * 3, to_heads=True)
    if _THREE.fullmatch(name) and (parts := _grouped(outputs, back)):
        return layout._replace(parts=parts, to_heads=True)
    half, odd = divmod(outputs, 2)
    if half in back and not odd and all(taken != outputs for _, taken in beside):
        if _TWO.fullmatch(name):
            return layout._replace(parts=(half, half), to_heads=True)
        # a width that other layers give too is no width inside a gated MLP; Mamba's is given for the step sizes
        if half != inputs and (name == "in_proj" or all(given != half for given, _ in beside)):
            return layout._replace(parts=(half, half))
    is_fused = _FUSED.fullmatch(name) is not None
    return layout._replace(parts=None if is_fused else (), to_heads=is_fused)


def _beside(place: Place, model: Model) -> list[tuple[int, int]]:
    """(outputs, inputs) of the linear layers which may take what this one gives."""
    above = place.path.rpartition(".")[0]
    if not place.path or isinstance(model.layers[above], nn.ModuleList):
        return []
    names, found = list(model.inside(above)), model.inside(above)
    if isinstance(model.layers[above], nn.Sequential):
        names = names[names.index(place.path) :]
    return [sizes for other in names if other != place.path and (sizes := _sizes(found[other])) is not None]


def _grouped(outputs: int, back: set[int]) -> tuple[int, ...] | None:
    """Outputs of queries, keys and values where keys and values have fewer heads; None where they cannot be told."""
    for queries in back:
        keys, odd = divmod(outputs - queries, 2)
        if keys > 0 and not odd and queries % keys == 0:
            return queries, keys, keys
    return None


def _sizes(layer: nn.Module) -> tuple[int, int] | None:
    """(outputs, inputs) of a linear layer or a `Conv1D`; None of another module."""
    weight = weight_of(layer)
    if weight is None or weight.ndim != 2 or isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        return None
    return (weight.shape[1], weight.shape[0]) if _is_transposed(layer) else (weight.shape[0], weight.shape[1])


def _of_stack(place: Place, model: Model, heads: Collection[int]) -> MatrixLayout:
    """The layout of a raw parameter of three dimensions, (matrices, in, out) or (matrices, out, in)."""
    layer, shape = place.layer, tuple(place.param.shape)
    stacks = [tuple(param.shape) for param in layer._parameters.values() if param is not None and param.ndim == 3]
    told = getattr(layer, "is_transposed", None)
    is_input_first = bool(told) if told is not None else _input_first(stacks, _router_inputs(place, model, heads))
    layout = MatrixLayout(shape, stacked=True, output_dim=2 if is_input_first else 1)
    others = [layout._replace(shape=other) for other in stacks]
    is_gated = any((2 * other.inputs, other.outputs) == (layout.outputs, layout.inputs) for other in others)
    if not is_gated or getattr(layer, "has_gate", True) is False:
        return layout
    parts = (layout.outputs // 2,) * 2
    return layout._replace(parts=parts, interleaved=getattr(layer, "is_concatenated", True) is False)


def _input_first(stacks: Sequence[tuple[int, ...]], width: int | None) -> bool:
    """Whether stacks of one layer are (matrices, in, out), from their shapes; true where these do not tell."""
    for _, first, second in stacks:
        for _, other_first, other_second in stacks:
            if first == 2 * other_second and second == other_first:
                return False  # (gate and up, in) beside (in, up)
            if second == 2 * other_first and first == other_second:
                return True
    # the first stack multiplies what the router takes
    return not (stacks and stacks[0][2] == width != stacks[0][1])


def _router_inputs(place: Place, model: Model, heads: Collection[int]) -> int | None:
    """The inputs of the router beside a stack of experts: of a matrix with one output for each expert."""
    for path in (place.path, place.path.rpartition(".")[0]):
        if isinstance(model.layers[path], nn.ModuleList | nn.Sequential):
            return None
        near = [*model.inside(path).values()]
        near += [layer for child in model.inside(path) for layer in model.inside(child).values()]
        for weight in map(weight_of, near):
            if weight is None or id(weight) in heads:
                continue
            if weight.ndim == 2 and weight.shape[0] == place.param.shape[0]:
                return weight.shape[1]
    return None
