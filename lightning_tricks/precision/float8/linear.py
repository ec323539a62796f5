"""A linear layer that multiplies in fp8, made of an nn.Linear in place, and what fp8 does to its tensors."""

from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_tricks._dtypes import autocasts, matmul_dtype
from lightning_tricks._errors import UsageError


class LayerSettings(NamedTuple):
    """What the converted layers of one plugin have in common."""

    recipe: str
    multiple: int
    evaluate_in_bf16: bool
    needs_compile: bool


class CheckedLinear(nn.Linear):
    """The half of a converted layer that does not multiply: shapes, autocast, and evaluation in bf16.

    A class of torchao stands behind it in the bases. The object is still the nn.Linear that it was: weight, bias, name,
    hooks and references to it are untouched.

    Raises:
        UsageError: in forward, where the tokens of a product are no multiple of 16 (32 for mxfp8); in training outside
            of `torch.compile` on CUDA, where `needs_compile`.
    """

    fp8: LayerSettings
    fp8_name: str
    fp8_added: tuple[str, ...]

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features), in autocast's dtype or else the input's."""
        if input.numel() == 0 or (self.fp8.evaluate_in_bf16 and not self.training):
            return F.linear(input, self.weight, self.bias)
        tokens = input.shape[:-1].numel()
        if tokens % self.fp8.multiple:
            raise UsageError(
                f"Float8: {self.fp8_name} got {tokens} tokens, no multiple of {self.fp8.multiple}, which fp8 needs: "
                "change batch size or length (drop_last), or exclude the layer; in validation evaluate_in_bf16"
            )
        if not torch.compiler.is_compiling():
            self._refuse_eager(input)
        device = input.device.type
        # Flat, for torchao cannot scale by rows what is not contiguous. Cast here and not by autocast: torchao's layer
        # asks CUDA's only, and would cast twice.
        flat = input.to(matmul_dtype(input)).reshape(-1, self.in_features).contiguous()
        with torch.autocast(device, enabled=False) if autocasts(device) else nullcontext():
            output = super().forward(flat)
        return output.view(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """As nn.Linear, and the recipe."""
        return f"{nn.Linear.extra_repr(self)}, fp8={self.fp8.recipe}"

    def _refuse_eager(self, input: Tensor) -> None:
        trains = self.training and torch.is_grad_enabled()
        if self.fp8.needs_compile and trains and input.is_cuda and not isinstance(input, FakeTensor):
            raise UsageError(
                f"Float8: {self.fp8_name} runs outside torch.compile, where its many casts make fp8 slower than bf16: "
                "compile the blocks (compile_blocks: true, or block.compile()), or set allow_eager: true"
            )


def convert(layer: nn.Linear, name: str, settings: LayerSettings, stand_in: nn.Linear) -> None:
    """Make `layer` one of the class of `stand_in`, in place; the weight stays the same object.

    Args:
        layer: exactly an nn.Linear.
        name: how messages call it.
        settings: shared by all layers of the plugin.
        stand_in: a converted layer of any size, to take class and settings from.
    """
    plain = vars(nn.Linear(1, 1, device="meta"))
    added = {key: value for key, value in vars(stand_in).items() if key not in plain}
    layer.__class__ = type(stand_in)
    vars(layer).update(added, fp8=settings, fp8_name=name, fp8_added=tuple(added))


def revert(layer: nn.Linear) -> None:
    """Make a converted layer the nn.Linear that it was."""
    for key in (*vars(layer)["fp8_added"], "fp8", "fp8_name", "fp8_added"):
        del vars(layer)[key]
    layer.__class__ = nn.Linear
