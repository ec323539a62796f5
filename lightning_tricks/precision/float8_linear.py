"""The layers that multiply in fp8, by torchao; weights that FSDP2 gathers in fp8.

Only `Float8` imports this module, when it has found torchao.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchao.float8 import (
    Float8LinearConfig,
    _auto_filter_for_recipe,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.tensors import autocasts, matmul_dtype, sharded_like

# torchao does not export its class, but its public function returns an object of it
_Base: Any = type(convert_to_float8_training(nn.Linear(16, 16, device="meta")))


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


class Float8Linear(CheckedLinear, _Base):
    """The checks of CheckedLinear, then torchao's scales and product."""


class _BlockScaled(nn.Linear):
    """A product in mxfp8. torchao's needs one dtype, so the weight is cast to the input's, as autocast does."""

    multiply: Callable[[Tensor, Tensor], Tensor]

    def forward(self, input: Tensor) -> Tensor:
        """(tokens, in_features) to (tokens, out_features)."""
        output = self.multiply(input, self.weight.to(input.dtype))
        return output if self.bias is None else output + self.bias.to(output.dtype)


class MXFP8Linear(CheckedLinear, _BlockScaled):
    """The checks of CheckedLinear, then torchao's block scales and product."""


def pays(recipe: str) -> Callable[[nn.Module, str], bool]:
    """Whether a layer is large enough to be faster in fp8: torchao's filter, from tables that were measured on an H100.

    torchao has one for `tensorwise` and one for `rowwise`; the other recipes scale parts of a row too.
    """
    return _auto_filter_for_recipe("tensorwise" if recipe == "tensorwise" else "rowwise", [])


def template(recipe: str, emulate: bool) -> nn.Linear:
    """A converted layer of any size, whose class and attributes `convert` takes. mxfp8 needs torchao 0.18."""
    layer: Any
    if recipe == "mxfp8":  # a prototype of torchao
        from torchao.prototype.moe_training import mxfp8_linear as mx
        from torchao.quantization.quantize_.common import KernelPreference

        kernels = KernelPreference.EMULATED if emulate else KernelPreference.AUTO
        options = {"kernel_preference": kernels, "scale_calculation_mode": mx.ScaleCalculationMode.RCEIL}
        layer = MXFP8Linear(32, 32, device="meta")
        layer.multiply = partial(mx._to_mxfp8_then_scaled_mm, **options)
        return layer
    layer = convert_to_float8_training(nn.Linear(16, 16, device="meta"), config=_config(recipe, emulate))
    layer.__class__ = Float8Linear
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


def gather_in_fp8(layers: Iterable[nn.Linear], emulate: bool) -> None:
    """Wrap the weights of layers that are about to be sharded, so that FSDP2 gathers them in fp8; shared ones once."""
    config = _config("tensorwise", emulate, enable_fsdp_float8_all_gather=True)
    wrapped: dict[int, nn.Parameter] = {}
    for layer in layers:
        key = id(layer.weight)
        if key not in wrapped:
            carrier = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
            carrier.weight = layer.weight
            wrapped[key] = convert_to_float8_training(carrier, config=config).weight
        layer.weight = wrapped[key]


def gathers_in_fp8(layer: nn.Linear) -> bool:
    """Whether FSDP2 gathers the layer's weight in fp8, or would if the weight were sharded."""
    return hasattr(_local(layer.weight), "fsdp_pre_all_gather")


def unwrap_unsharded(layers: Iterable[nn.Linear]) -> None:
    """Undo `gather_in_fp8` where no sharding followed: optimizers and checkpoints need plain weights."""
    plain: dict[int, nn.Parameter] = {}
    for layer in layers:
        weight: Any = layer._parameters.get("weight")  # to read a weight that a parametrization makes computes it
        if weight is not None and gathers_in_fp8(layer) and not isinstance(weight, DTensor):
            inner = weight._tensor
            new = inner if isinstance(inner, nn.Parameter) else nn.Parameter(inner, weight.requires_grad)
            layer.weight = plain.setdefault(id(weight), new)


class Scales:
    """The scales of weights that are gathered in fp8, computed for all at once instead of one by one.

    A scale belongs to the current values of a weight: an optimizer step or a loaded checkpoint makes it stale.

    Args:
        layers: layers whose weights are sharded and gathered in fp8, the same ones on every rank. May be empty.
    """

    def __init__(self, layers: Iterable[nn.Linear]) -> None:
        by_mesh: dict[DeviceMesh, list[nn.Module]] = {}
        self.shards: dict[nn.Module, DTensor] = {}
        for layer in layers:
            weight: Any = layer.weight
            by_mesh.setdefault(weight.device_mesh, []).append(layer)
            self.shards[layer] = weight  # while FSDP2 has it gathered, the layer's attribute is not the shard
            layer.register_state_dict_post_hook(_save_plain)
        self._groups = [nn.ModuleList(group) for group in by_mesh.values()]
        self._current = False

    def compute(self) -> None:
        """Compute every scale, with one all-reduce for each mesh, unless they are current."""
        if self._current:
            return
        for group in self._groups:
            precompute_float8_dynamic_scale_for_fsdp(group)
        self._current = True

    def forget(self, *_: Any) -> None:
        """Let each weight compute its own scale when it is gathered, until `compute` is called."""
        self._current = False
        for shard in self.shards.values():
            _local(shard)._precomputed_scale = None

    @contextmanager
    def computed_anew(self) -> Iterator[None]:
        """Have scales of the current weights inside the `with`, and none after it."""
        self.forget()
        self.compute()
        try:
            yield
        finally:
            self.forget()


def _config(recipe: str, emulate: bool, **options: Any) -> Float8LinearConfig:
    return dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate, **options)


def _save_plain(layer: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    # a checkpoint is the same as without fp8: it has no tensors of torchao's classes
    value = state_dict.get(f"{prefix}weight")
    if isinstance(value, DTensor) and hasattr(_local(value), "fsdp_pre_all_gather"):
        state_dict[f"{prefix}weight"] = sharded_like(value, _local(value)._tensor.detach())


def _local(weight: Any) -> Any:
    return weight._local_tensor if isinstance(weight, DTensor) else weight
