"""How the matrices of one parameter lie in it: a fused projection, a stack of experts, the filters of a convolution."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_tricks._errors import UsageError


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
    def channels(self) -> int:
        """Inputs without the kernel of a convolution."""
        kernel = math.prod(self.shape[2:]) if len(self.shape) > 2 and not self.stacked else 1
        return self.inputs // max(kernel, 1)

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
