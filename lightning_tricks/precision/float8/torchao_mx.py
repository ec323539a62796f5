"""The layer of the mxfp8 recipe, a prototype of torchao. Imports torchao 0.18 or later."""

from torch import Tensor, nn
from torchao.prototype.moe_training import mxfp8_linear
from torchao.quantization.quantize_.common import KernelPreference

from lightning_tricks.precision.float8.linear import CheckedLinear


class _Product(mxfp8_linear.MXFP8Linear):
    """torchao's layer, which needs one dtype: the weight is cast to the input's, as autocast does."""

    def forward(self, input: Tensor) -> Tensor:
        """(tokens, in_features) to (tokens, out_features)."""
        output = mxfp8_linear._to_mxfp8_then_scaled_mm(
            input,
            self.weight.to(input.dtype),
            kernel_preference=self.kernel_preference,
            scale_calculation_mode=self.scale_calculation_mode,
            wgrad_with_hp=self.wgrad_with_hp,
        )
        return output if self.bias is None else output + self.bias.to(output.dtype)


class MXFP8Linear(CheckedLinear, _Product):
    """Our checks, then torchao's block scales and product."""


def template(emulate: bool) -> nn.Linear:
    """A converted layer whose class and attributes `convert` takes."""
    kernels = KernelPreference.EMULATED if emulate else KernelPreference.AUTO
    layer: nn.Linear = mxfp8_linear.MXFP8Linear(32, 32, device="meta", kernel_preference=kernels)
    layer.__class__ = MXFP8Linear
    return layer
