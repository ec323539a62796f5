"""Weights that FSDP2 gathers in fp8: how they become so, their scales, and their checkpoints. Needs torchao."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch._guards import detect_fake_mode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchao.float8 import convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

from lightning_tricks.precision.float8.torchao_linear import torchao_config


def gather_in_fp8(layers: Iterable[nn.Linear], emulate: bool) -> None:
    """Give layers that are about to be sharded weights that FSDP2 gathers in fp8; one that several share stays one."""
    config = torchao_config("tensorwise", emulate, gather_in_fp8=True)
    wrapped: dict[int, nn.Parameter] = {}
    for layer in layers:
        key = id(layer.weight)
        if key not in wrapped:
            carrier = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
            carrier.weight = layer.weight
            wrapped[key] = convert_to_float8_training(carrier, config=config).weight
        layer.weight = wrapped[key]


def gathers_in_fp8(layer: nn.Linear) -> bool:
    """Whether FSDP2 gathers the layer's weight in fp8, or would if it were sharded."""
    return hasattr(_local(layer.weight), "fsdp_pre_all_gather")


def gather_as_it_is(layers: Iterable[nn.Linear]) -> None:
    """Undo `gather_in_fp8` where no sharding came: optimizers and checkpoints shall see plain weights."""
    plain: dict[int, nn.Parameter] = {}
    for layer in layers:
        weight: Any = layer.weight
        if gathers_in_fp8(layer) and not isinstance(weight, DTensor):
            inner = weight._tensor
            new = inner if isinstance(inner, nn.Parameter) else nn.Parameter(inner, weight.requires_grad)
            layer.weight = plain.setdefault(id(weight), new)


class Scales:
    """The scales of the weights that are gathered in fp8, found for all at once instead of one by one.

    A scale belongs to the weights as they are: once an optimizer steps, or a checkpoint is read, it is of the past.

    Args:
        layers: layers whose weights are sharded and gathered in fp8. Every rank must have the same.
    """

    def __init__(self, layers: Iterable[nn.Linear]) -> None:
        by_mesh: dict[DeviceMesh, list[nn.Module]] = {}
        self.weights: dict[nn.Module, DTensor] = {}
        for layer in layers:
            weight: Any = layer.weight
            by_mesh.setdefault(weight.device_mesh, []).append(layer)
            self.weights[layer] = weight  # the shard, which the layer's attribute is not while it is gathered
            layer.register_state_dict_post_hook(_save_plain)
        self._groups = [nn.ModuleList(group) for group in by_mesh.values()]
        self._hold = False

    def find(self) -> None:
        """Find every scale, with one all-reduce for each mesh, unless those found last still hold.

        Not while FLOPs are counted on a copy without data, which has no scales.
        """
        if self._hold or detect_fake_mode() is not None:
            return
        for group in self._groups:
            precompute_float8_dynamic_scale_for_fsdp(group)
        self._hold = True

    def forget(self, *_: Any) -> None:
        """Let each weight find its own scale when it is gathered, until `find` is called."""
        self._hold = False
        for weight in self.weights.values():
            _local(weight)._precomputed_scale = None


def sharded_weight(weight: DTensor) -> Any:
    """This rank's shard of a weight that is gathered in fp8, in the type that it is trained in."""
    return _local(weight)._tensor.detach()


def _save_plain(layer: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    # a checkpoint holds what it would without fp8, no tensors of torchao's
    value = state_dict.get(f"{prefix}weight")
    if isinstance(value, DTensor) and hasattr(_local(value), "fsdp_pre_all_gather"):
        state_dict[f"{prefix}weight"] = DTensor.from_local(
            sharded_weight(value), value.device_mesh, value.placements, run_check=False,
            shape=value.size(), stride=value.stride(),
        )  # fmt: skip


def _local(weight: Any) -> Any:
    return weight._local_tensor if isinstance(weight, DTensor) else weight
