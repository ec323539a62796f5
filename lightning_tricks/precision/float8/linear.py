"""Turn an nn.Linear in place into a layer that multiplies in fp8, and measure the values that its rounding loses."""

import logging
import re
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from lightning_tricks._errors import UsageError
from lightning_tricks._tensors import autocasts, matmul_dtype

_E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max  # 448
_SMALLEST_AMAX = 1e-12  # torchao's floor for a largest magnitude


class LayerSettings(NamedTuple):
    """Settings that the converted layers of one plugin share."""

    recipe: str
    multiple: int
    evaluate_in_bf16: bool
    needs_compile: bool


class CheckedLinear(nn.Linear):
    """The checks before a product in fp8: shapes, autocast, compiling, and evaluation in bf16.

    The product is that of a class of torchao, next in the bases. The object is still the nn.Linear that it was:
    weight, bias, name, hooks and references to it are untouched.

    Raises:
        UsageError: in forward, if the number of tokens is no multiple of 16 (32 for mxfp8); in training outside of
            `torch.compile` on CUDA, if `needs_compile`.
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
        # Contiguous, because torchao cannot scale other inputs by rows. Cast here and not by autocast: torchao's layer
        # asks CUDA's autocast only, and would cast twice.
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


def load_template(recipe: str, emulate: bool) -> nn.Linear:
    """A converted layer of any size for `convert`. Imports torchao.

    Raises:
        UsageError: torchao is missing or too old.
    """
    needed = "0.18" if recipe == "mxfp8" else "0.17"
    try:
        found = version("torchao")
    except PackageNotFoundError:
        raise UsageError("plugins: Float8 needs torchao: pip install 'lightning_tricks[fp8]'") from None
    if _numbers(found) < _numbers(needed):
        raise UsageError(
            f"plugins: Float8(recipe={recipe!r}) needs torchao {needed} or later, found {found}: "
            "pip install -U 'lightning_tricks[fp8]'"
        )
    # torchao warns about its own kernels that this machine cannot load; its float8 layers use torch's
    levels = {logger: logger.level for logger in map(logging.getLogger, ("torchao", "torch.utils._pytree"))}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        from lightning_tricks.precision.float8.torchao_linear import template

        return template(recipe, emulate)
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def layer_stats(layer: nn.Linear, input: Tensor, shard: Any, recipe: str) -> dict[str, Tensor]:
    """See `Float8.layer_stats`; `shard` is that of a weight which FSDP2 gathers in fp8, or None."""
    of_input = _stats("input", input.to(matmul_dtype(input)), None, recipe)
    return of_input | _stats("weight", *_weight_and_scale(layer.weight, shard, recipe), recipe)


def _stats(name: str, values: Tensor, scale: Tensor | None, recipe: str) -> dict[str, Tensor]:
    if values.numel() == 0:  # this rank has no rows of the weight
        return {f"{name}_amax": values.new_zeros((), dtype=torch.float32), f"{name}_underflow": values.new_zeros(())}
    scale = e4m3_scale(values, recipe) if scale is None else scale
    return {f"{name}_amax": values.float().abs().amax(), f"{name}_underflow": underflow(values, scale)}


def _weight_and_scale(weight: Any, shard: Any, recipe: str) -> tuple[Tensor, Tensor | None]:
    """The elements of a weight on this rank, and their scale if it depends on elements of other ranks too.

    The weight is plain, a shard, or gathered by FSDP2 in bf16 or in fp8. `tensorwise` has one scale for a whole weight:
    every rank must call.
    """
    if hasattr(weight, "_scale"):  # gathered in fp8
        return _elements(shard), weight._scale
    if not isinstance(weight, DTensor):
        return weight, None
    scale = None
    if recipe == "tensorwise":
        amax: Any = weight.detach().abs().amax()
        scale = e4m3_scale(amax.full_tensor(), recipe)
    return _elements(weight), scale


def _elements(shard: Any) -> Tensor:
    return getattr(shard._local_tensor, "_tensor", shard._local_tensor)


def e4m3_scale(values: Tensor, recipe: str) -> Tensor:
    """The factor by which `recipe` multiplies `values` before it rounds them to E4M3 in a forward pass.

    Args:
        values: (..., in_features): a layer's input or weight.
        recipe: `tensorwise`: one scale, which makes the largest magnitude 448. `rowwise` and `rowwise_with_gw_hp`: one
            for each row, rounded down to a power of two. `mxfp8`: such a scale for each 32 elements of a row.

    Returns:
        fp32, of a shape that multiplies `values`.
    """
    magnitude = values.float().abs()
    if recipe == "tensorwise":
        return _E4M3_MAX / magnitude.amax().clamp(min=_SMALLEST_AMAX)
    if recipe == "mxfp8":
        amax = magnitude.unflatten(-1, (-1, 32)).amax(-1)
        return _power_of_two_below(_E4M3_MAX / amax.clamp(min=_SMALLEST_AMAX)).repeat_interleave(32, -1)
    return _power_of_two_below(_E4M3_MAX / magnitude.amax(-1, keepdim=True).clamp(min=_SMALLEST_AMAX))


def underflow(values: Tensor, scale: Tensor) -> Tensor:
    """The share of the nonzero elements of `values` that become zero in E4M3, a 0-dim tensor; 0 without any."""
    nonzero = values != 0
    rounded = (values.float() * scale).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
    lost = nonzero & (rounded.float() == 0)
    return lost.sum().float() / nonzero.sum().clamp(min=1)


def _power_of_two_below(scale: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(scale)  # mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(mantissa), exponent - 1)
