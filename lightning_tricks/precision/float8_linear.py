"""Linear layers that multiply in fp8 with one scale for each tensor; the checks that layers of every recipe share."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.tensors import autocasts, matmul_dtype, refuse_second_derivative

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2  # of inputs and weights; of gradients of outputs
_SMALLEST_AMAX = 1e-12  # torchao's: a scale is finite


class LayerSettings(NamedTuple):
    """Settings that the converted layers of one plugin share."""

    recipe: str
    multiple: int
    evaluate_in_bf16: bool
    needs_compile: bool
    emulate: bool


class CheckedLinear(nn.Linear):
    """The checks before a product in fp8: shapes, autocast, compiling, and evaluation in bf16.

    The product is that of the class next in the bases. The object is still the nn.Linear that it was: weight, bias,
    name, hooks and references to it are untouched.

    Raises:
        UsageError: in forward, if the number of tokens is no multiple of 16 (32 for mxfp8); in training outside of
            `torch.compile` on CUDA, if `needs_compile`.
    """

    fp8: LayerSettings
    fp8_name: str
    fp8_added: tuple[str, ...]

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features), in autocast's dtype or else the input's."""
        if self._stays_plain(input):
            return F.linear(input, self.weight, self.bias)
        flat, device = self._checked(input), input.device.type
        # torchao's layer asks CUDA's autocast only, and would cast twice
        with torch.autocast(device, enabled=False) if autocasts(device) else nullcontext():
            output = super().forward(flat)
        return output.view(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """As nn.Linear, and the recipe."""
        return f"{nn.Linear.extra_repr(self)}, fp8={self.fp8.recipe}"

    def _stays_plain(self, input: Tensor) -> bool:
        return input.numel() == 0 or (self.fp8.evaluate_in_bf16 and not self.training)

    def _checked(self, input: Tensor) -> Tensor:
        """The input as a contiguous matrix in autocast's dtype: torchao cannot scale other inputs by rows."""
        tokens = input.shape[:-1].numel()
        if tokens % self.fp8.multiple:
            raise UsageError(
                f"Float8: {self.fp8_name} got {tokens} tokens, no multiple of {self.fp8.multiple}, which fp8 needs: "
                "change batch size or length (drop_last), or exclude the layer; in validation evaluate_in_bf16"
            )
        if not torch.compiler.is_compiling():
            self._refuse_eager(input)
        return input.to(matmul_dtype(input)).reshape(-1, self.in_features).contiguous()

    def _refuse_eager(self, input: Tensor) -> None:
        trains = self.training and torch.is_grad_enabled()
        if self.fp8.needs_compile and trains and input.is_cuda and not isinstance(input, FakeTensor):
            raise UsageError(
                f"Float8: {self.fp8_name} runs outside torch.compile, where its many casts make fp8 slower than bf16: "
                "compile the blocks (compile_blocks: true, or block.compile()), or set allow_eager: true"
            )


class KeptWeight(NamedTuple):
    """Weights in fp8 that are kept over the micro-batches of a step, one below the other.

    Attributes:
        rows: (out_features, in_features).
        columns: the same numbers as (in_features, out_features), for the gradient of the input.
        scale: scalar.
    """

    rows: Tensor
    columns: Tensor
    scale: Tensor


class _Tensorwise(nn.Linear):
    """A product with one scale for each tensor.

    Attributes:
        amaxes: takes in its `grad` the largest magnitudes of input and gradient; None: nobody wants them.
        scales: (2,) fp32, of input and gradient, from earlier steps; None: computed from the tensors themselves.
        kept: the weight in fp8; None: cast in each pass. `kept_together`: of all layers of one `multiply_together`.
    """

    fp8: LayerSettings
    amaxes: Tensor | None
    scales: Tensor | None
    kept: KeptWeight | None
    kept_together: KeptWeight | None

    def forward(self, input: Tensor) -> Tensor:
        """(tokens, in_features) to (tokens, out_features)."""
        return self._outputs(input, (self,), self.kept)[0]

    def _outputs(self, input: Tensor, layers: Sequence[nn.Linear], kept: KeptWeight | None) -> list[Tensor]:
        trains = self.training and self.weight.requires_grad  # without gradients a layer has no history
        amaxes = self.amaxes if trains and torch.is_grad_enabled() else None
        scales, kept = self.scales if trains else None, kept if self.training else None
        weights = [layer.weight for layer in layers]
        rows, columns, scale = kept or (None, None, None)
        outputs = _Products.apply(input, amaxes, scales, rows, columns, scale, self.fp8.emulate, *weights)
        return [
            output if layer.bias is None else output + layer.bias.to(output.dtype)
            for output, layer in zip(outputs, layers, strict=True)
        ]


class Float8Linear(CheckedLinear, _Tensorwise):
    """The checks of CheckedLinear, then the product."""

    def multiply_together(self, input: Tensor, layers: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
        """The output of each layer for one input, by one product: one cast of the input, one scale for all weights.

        The backward pass multiplies with each weight.

        Layers that must be called one by one are: those that stay in bf16, and those that FSDP2 gathers in fp8, whose
        weights have a scale each. Compiled, they share the cast of the input.

        Args:
            input: (..., in_features).
            layers: of which this one is the first.
        """
        apart = any(type(layer) is not Float8Linear or _is_gathered(layer.weight) for layer in layers)
        if apart or self._stays_plain(input):
            return tuple(layer(input) for layer in layers)
        flat, device = self._checked(input), input.device.type
        with torch.autocast(device, enabled=False) if autocasts(device) else nullcontext():
            outputs = self._outputs(flat, layers, self.kept_together)
        return tuple(output.view(*input.shape[:-1], output.shape[-1]) for output in outputs)


# torch.compile sees one operator here and traces what it calls: gathered weights are of a class of torchao
@torch._dynamo.allow_in_graph
class _Products(torch.autograd.Function):
    """One product of an input with weights that lie one below the other, and its gradients, all in fp8.

    The gradient of `amaxes` is (largest magnitude of the input, of the gradients): in this way a number leaves the
    backward pass of a compiled block without a write to memory that the graph was given. If the layer is called twice,
    or run again for activation checkpointing, autograd adds the numbers of its backward passes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        amaxes: Tensor | None,
        scales: Tensor | None,
        rows: Tensor | None,
        columns: Tensor | None,
        weight_scale: Tensor | None,
        emulate: bool,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        amax = largest([x]) if amaxes is not None or scales is None else None
        scale = scale_for(amax, E4M3) if scales is None else scales[0]
        x8 = _cast(x, scale, E4M3, scales is not None)
        ctx.save_for_backward(x8, scale, amax, scales, columns, weight_scale, *weights)
        ctx.emulate, ctx.records, ctx.shapes = emulate, amaxes is not None, [weight.shape[0] for weight in weights]
        if rows is None or weight_scale is None:
            parts, weight_scale = cast_weights(weights)
            rows = torch.cat(parts) if len(parts) > 1 else parts[0]
        output = _mm(x8, scale, rows.t(), weight_scale, x.dtype, emulate, fast=True)
        return output.split(ctx.shapes, dim=-1) if len(weights) > 1 else (output,)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a product in fp8", "take bf16 for it")
        x8, x_scale, x_amax, scales, columns, weight_scale, *weights = ctx.saved_tensors
        amax = largest(grads) if ctx.records or scales is None else None
        scale = scale_for(amax, E5M2) if scales is None else scales[1]
        # One by one: Inductor would write gradients that lie side by side in a pass of its own, with what they are
        # computed from read again: 40 % more bytes in the backward pass of a block than by a sum of products.
        grads8 = [_cast(grad, scale, E5M2, scales is not None) for grad in grads]
        grad_x, grad_weights = None, cast(list[Tensor | None], [None] * len(weights))
        if ctx.needs_input_grad[0]:
            if columns is None:
                parts, weight_scale = cast_weights(weights)
            else:
                parts = columns.t().split(ctx.shapes)
            for grad8, part in zip(grads8, parts, strict=True):
                product = _mm(grad8, scale, part, weight_scale, grads[0].dtype, ctx.emulate)
                grad_x = product if grad_x is None else grad_x + product
        if len(grads) > 1 and not ctx.emulate:
            x8 = x8.t().contiguous().t()  # once for all
        for number, grad8 in enumerate(grads8):
            if ctx.needs_input_grad[7 + number]:
                grad_weights[number] = _mm(grad8.t(), scale, x8, x_scale, grads[0].dtype, ctx.emulate)
        grad_amaxes = None if amax is None or not ctx.records else torch.stack([x_amax.float(), amax.float()])
        return grad_x, grad_amaxes, None, None, None, None, None, *grad_weights


def largest(tensors: Sequence[Tensor]) -> Tensor:
    """The largest magnitude, a scalar; by rows first, so that a compiler finds it in the kernel of a norm."""
    each = [tensor.abs().amax(-1).amax() for tensor in tensors]
    return each[0] if len(each) == 1 else torch.stack(each).amax()


def scale_for(amax: Any, dtype: torch.dtype) -> Tensor:
    """What maps `amax` to the largest number of `dtype`, fp32; as torchao in fp64, where compilers divide alike."""
    return (torch.finfo(dtype).max / amax.double().clamp(min=_SMALLEST_AMAX)).float()


def cast_weights(weights: Sequence[Any]) -> tuple[list[Tensor], Tensor]:
    """The weights in fp8, and their one scale."""
    if _is_gathered(weights[0]):
        return [weights[0]._data], weights[0]._scale
    scale = scale_for(largest(weights), E4M3)
    return [_cast(weight, scale, E4M3) for weight in weights], scale


def _is_gathered(weight: Tensor) -> bool:
    """Whether it is torchao's tensor of a weight that FSDP2 has gathered in fp8."""
    return hasattr(weight, "_data") and hasattr(weight, "_scale")


def _cast(x: Tensor, scale: Tensor, dtype: torch.dtype, saturate: bool = False) -> Tensor:
    """`x * scale` in fp8.

    Args:
        x: of any floating dtype.
        scale: its own, up to which nothing overflows and an infinite number is NaN; or another, then `saturate`.
        dtype: of the result.
        saturate: beyond the largest number give that number; what is not finite stays so, as NaN.
    """
    scaled, top = x.float() * scale, torch.finfo(dtype).max
    if saturate:  # not by `clamp`, beside which Triton may write wrong bytes: see torchao's _inductor_patch
        scaled = torch.where(scaled > top, top, torch.where(scaled < -top, -top, scaled))
        scaled = torch.where(x.isfinite(), scaled, torch.nan)
    return scaled.to(dtype)


def _mm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, emulate: bool, fast: bool = False
) -> Tensor:
    """The product of two matrices in fp8. Hopper reads both along the dimension over which it sums."""
    if emulate:
        return torch.mm(a.float() / a_scale, b.float() / b_scale).to(dtype)
    return torch._scaled_mm(
        a.contiguous(),
        b if b.stride(0) == 1 else b.t().contiguous().t(),
        scale_a=a_scale.reciprocal(),
        scale_b=b_scale.reciprocal(),
        out_dtype=dtype,
        use_fast_accum=fast,
    )


def pays(recipe: str) -> Callable[[Any, str], bool]:
    """Whether a layer is large enough to be faster in fp8: torchao's rule, from tables that were measured on an H100.

    torchao has one for `tensorwise` and one for `rowwise`; the other recipes scale parts of a row too.

    Source: `_auto_filter_for_recipe`,
        https://github.com/pytorch/ao/blob/main/torchao/float8/float8_linear_utils.py.
    """

    def of_tensors(layer: nn.Linear, name: str) -> bool:
        return layer.in_features > 4096 or layer.out_features > 1024

    def of_rows(layer: nn.Linear, name: str) -> bool:
        inputs, outputs = layer.in_features, layer.out_features
        return outputs > 2048 and inputs > 1024 and (outputs > 4096 or inputs > 2048)

    return of_tensors if recipe == "tensorwise" else of_rows


def template() -> nn.Linear:
    """A converted layer of any size, whose class and attributes `convert` takes."""
    layer = Float8Linear(16, 16, device="meta")
    layer.amaxes = layer.scales = layer.kept = layer.kept_together = None
    return layer


def convert(layer: nn.Linear, name: str, settings: LayerSettings, template: nn.Linear) -> None:
    """Give exactly an nn.Linear the class and attributes of `template`, in place; the weight stays the same object."""
    plain = vars(nn.Linear(1, 1, device="meta"))
    added = {key: value for key, value in vars(template).items() if key not in plain}
    layer.__class__ = type(template)
    vars(layer).update(added, fp8=settings, fp8_name=name, fp8_added=tuple(added))


def revert(layer: nn.Linear) -> None:
    """Make a converted layer the nn.Linear that it was."""
    for key in (*vars(layer)["fp8_added"], "fp8", "fp8_name", "fp8_added"):
        del vars(layer)[key]
    layer.__class__ = nn.Linear
