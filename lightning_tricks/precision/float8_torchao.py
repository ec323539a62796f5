"""Layers whose products in fp8 are torchao's: scales by rows and blocks, tensor ranks; weights gathered in fp8.

Only `Float8` imports this module, when it has found torchao.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from lightning_tricks._core.tensors import sharded_like
from lightning_tricks.precision.float8_linear import E4M3, CheckedLinear, scale_for

# torchao does not export its class, but its public function returns an object of it
_Base: Any = type(convert_to_float8_training(nn.Linear(16, 16, device="meta")))


class TorchaoLinear(CheckedLinear, _Base):
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
    layer.__class__ = TorchaoLinear
    return layer


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
        by_mesh: dict[DeviceMesh, list[DTensor]] = {}
        self.shards: dict[nn.Module, DTensor] = {}
        for layer in layers:
            weight: Any = layer.weight
            by_mesh.setdefault(weight.device_mesh, []).append(weight)
            self.shards[layer] = weight  # while FSDP2 has it gathered, the layer's attribute is not the shard
            layer.register_state_dict_post_hook(_save_plain)
        self._groups = list(by_mesh.values())
        self._current = False

    @torch.no_grad()
    def compute(self) -> None:
        """Compute every scale, with one all-reduce for each mesh, unless they are current."""
        if self._current:
            return
        for weights in self._groups:
            amaxes: Any = torch.stack(torch._foreach_norm(weights, ord=torch.inf))  # type: ignore[arg-type]
            whole = amaxes.redistribute(placements=[Replicate()] * amaxes.device_mesh.ndim).to_local()
            for weight, scale in zip(weights, scale_for(whole, E4M3), strict=True):
                _local(weight)._precomputed_scale = scale
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
