"""How the matrices of one parameter lie in it: a fused projection, a stack of experts, the filters of a convolution."""

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


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
    """

    shape: tuple[int, ...]
    stacked: bool = False
    output_dim: int = 0
    parts: tuple[int, ...] | None = ()
    interleaved: bool = False

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
        """Inputs of each matrix, also of an empty stack; those of a convolution count the kernel."""
        others = {self.output_dim, 0} if self.stacked else {self.output_dim}
        return math.prod(size for dim, size in enumerate(self.shape) if dim not in others)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(outputs, inputs) of each matrix; of one expert in a stack."""
        return [(outputs, self.inputs) for outputs in self.parts or (self.outputs,)]

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
# queries, keys and values, one after the other
_THREE = re.compile(r"qkv|qkv_proj|Wqkv|c_attn|to_qkv|in_proj(_weight)?")
_KEYS_VALUES = re.compile(r"kv|kv_proj|to_kv")
_GATED = re.compile(r"gate_up(_proj)?|w13|Wi")
# any fused projection: the parts of the others may be interleaved or of different widths
_FUSED = re.compile(r".*qkv.*|query_key_value|c_attn|kqv|in_proj")


def is_product(layer: nn.Module) -> bool:
    """Whether a layer multiplies its input with its weights: one of torch's, or transformers' `Conv1D`."""
    return isinstance(layer, _PRODUCTS) or _is_conv1d(layer)


def _is_conv1d(layer: nn.Module) -> bool:
    # by name, so that transformers is not imported; FSDP2 makes a subclass
    known = ("transformers.pytorch_utils", "Conv1D")
    return any((cls.__module__, cls.__name__) == known for cls in type(layer).__mro__)


def layout_of(layer: nn.Module, name: str, role: str, shape: Sequence[int]) -> MatrixLayout:
    """The layout of a parameter whose role is one of `MATRICES`, where its module does not declare it.

    - torch's convolutions, recurrent layers and `nn.MultiheadAttention` have layouts of their own, as has transformers'
      `Conv1D`; every other weight of two dimensions is (outputs, inputs).
    - A stack of experts is (experts, in, out), as `torch.bmm` takes it; (experts, out, in) if its layer has a false
      attribute `is_transposed`, as in transformers 5. Gate and up alternate if it has a false `is_concatenated`.
    - A weight with a name such as `gate_up_proj` or `kv_proj` is two fused projections of one width; with a name such
      as `qkv`, `Wqkv` or `c_attn` it is three, if it has three times as many outputs as inputs. Other fused
      projections, such as `query_key_value`, leave the parts unknown (None).

    Args:
        layer: that computes with the parameter.
        name: of the weight there, or of the layer if the weight is called `weight`.
        role: of the parameter.
        shape: of the parameter.
    """
    layout = MatrixLayout(tuple(shape))
    if isinstance(layer, _CONVOLUTION):
        return layout._replace(output_dim=1 if layer.transposed else 0)
    if isinstance(layer, nn.RNNBase | nn.RNNCellBase):
        gates = shape[0] // layer.hidden_size if name.startswith(("weight_ih", "weight_hh")) else 1
        return layout._replace(parts=(layer.hidden_size,) * gates if gates > 1 else ())
    if role == "expert" and len(shape) == 3:
        layout = MatrixLayout(tuple(shape), stacked=True, output_dim=2 if getattr(layer, "is_transposed", True) else 1)
    elif _is_conv1d(layer):
        layout = layout._replace(output_dim=1)
    if role not in ("matrix", "expert"):
        return layout
    outputs, is_whole = layout.outputs, layout.outputs % 2 == 0
    if _THREE.fullmatch(name) and outputs == 3 * layout.inputs:
        return layout._replace(parts=(outputs // 3,) * 3)
    if _KEYS_VALUES.fullmatch(name) and is_whole:
        return layout._replace(parts=(outputs // 2,) * 2)
    if _GATED.fullmatch(name) and is_whole:
        return layout._replace(parts=(outputs // 2,) * 2, interleaved=not getattr(layer, "is_concatenated", True))
    return layout._replace(parts=None) if _FUSED.fullmatch(name) else layout
