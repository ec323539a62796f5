"""Turn any module into shards with FSDP2: its blocks one by one, then the rest with the root.

Scalars have nothing to shard: each rank holds them whole, and their gradients are averaged after each backward pass.
"""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lightning_tricks._errors import UsageError
from lightning_tricks._find_modules import bound_to_buffers
from lightning_tricks._tensors import local
from lightning_tricks._trainer import is_a
from lightning_tricks.optim.limits import refuse_limits
from lightning_tricks.strategies.agreement import on_all_ranks


def shard_module(
    root: nn.Module,
    blocks: Collection[nn.Module],
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    reshard_after_forward: bool,
) -> None:
    """Replace all parameters of `root` but scalars by shards, which are gathered one block at a time.

    Values stay what they are on this rank, so they must be equal on all; meta tensors stay meta. Weights in another
    order of memory (channels_last) become contiguous.

    The root takes its inputs as they come: they are a batch, whose floats may be targets. Layers that compute with
    floating-point buffers (batch norm, spectral norm) keep their own type, as the buffers do.

    Args:
        root: any module; its forward, or a method that is registered as such, gathers the parameters of no block.
        blocks: submodules, the units of gathering, in the order of `root.modules()`.
        mesh: one dimension to shard over, or two: replicate over the first and shard over the second.
        policy: types in which weights are gathered and gradients reduced.
        offload: where the shards lie between the steps.
        reshard_after_forward: whether a block's weights are dropped after its forward pass and gathered again in the
            backward pass; those of the root never are.

    Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """
    for parameter in root.parameters():
        parameter.data = parameter.data.contiguous()
    scalars = {parameter for parameter in root.parameters() if parameter.ndim == 0}
    options: dict[str, Any] = {"mesh": mesh, "offload_policy": offload, "ignored_params": scalars}
    if policy.param_dtype is not None:
        for module in root.modules():
            if bound_to_buffers(module):
                fully_shard(module, reshard_after_forward=False, **options)
    for block in reversed(dict.fromkeys(blocks)):  # blocks inside others first, as `fully_shard` wants it
        if not isinstance(block, FSDPModule):
            fully_shard(block, mp_policy=policy, reshard_after_forward=reshard_after_forward, **options)
    as_they_come = dataclasses.replace(policy, cast_forward_inputs=False)
    fully_shard(root, mp_policy=as_they_come, reshard_after_forward=False, **options)


@contextmanager
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """Give each parameter the attributes that it had before, such as a mark for the optimizer.

    A shard is a new tensor, and `module.to` makes a new one of it again.
    """
    before = {name: dict(vars(parameter)) for name, parameter in module.named_parameters() if vars(parameter)}
    yield
    for name, attributes in before.items():
        vars(module.get_parameter(name)).update(attributes)


class Scalars:
    """The scalars of a sharded module, which are no shards: each rank holds them whole.

    Args:
        module: sharded by `shard_module`; it may replace a parameter later, as `module.to` does.

    Attributes:
        names: of the scalars in `module`.
    """

    def __init__(self, module: nn.Module) -> None:
        self.names = [name for name, parameter in module.named_parameters() if parameter.ndim == 0]
        places = (name.rpartition(".") for name in self.names)
        self._places = [(module.get_submodule(path), name) for path, _, name in places]

    @torch.no_grad()
    def average_gradients(self, device: torch.device) -> None:
        """Give each scalar the mean of its gradient over all ranks; every rank must call, after a backward pass.

        A rank that did not use a scalar adds 0; it stays without a gradient where no rank has one. Gradients of earlier
        micro-batches are equal on all ranks already, so they stay what they are.
        """
        scalars = [parameter for part, name in self._places if (parameter := part.get_parameter(name)).requires_grad]
        if not scalars or dist.get_world_size() == 1:
            return
        zero = torch.zeros((), device=device, dtype=torch.float64 if device.type == "cpu" else torch.float32)
        sums = torch.stack(
            [zero if p.grad is None else p.grad.to(zero) for p in scalars]
            + [zero if p.grad is None else zero + 1 for p in scalars]
        )
        dist.all_reduce(sums)
        means, users = sums.div(dist.get_world_size()).chunk(2)
        for parameter, mean, used in zip(scalars, means, users, strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(mean)
            elif used > 0:
                parameter.grad = mean.to(parameter)


def largest_group(root: nn.Module, blocks: Collection[nn.Module]) -> int:
    """Elements of the largest of the groups whose parameters `shard_module` gathers together."""
    sizes: list[int] = []
    taken: set[nn.Parameter] = set()
    for part in [*reversed(dict.fromkeys(blocks)), root]:  # blocks inside others first
        own = set(part.parameters()) - taken
        sizes.append(sum(parameter.numel() for parameter in own))
        taken |= own
    return max(sizes)


def local_bytes(module: nn.Module) -> int:
    """Bytes of the parameters that this rank holds."""
    return sum(local(parameter).nbytes for parameter in module.parameters())


def summary(mesh: DeviceMesh, blocks: Mapping[str, nn.Module], elements: int, gathered: int, module: nn.Module) -> str:
    """The lines that tell how `module` was sharded; `elements` in all, at most `gathered` of them at a time."""
    names, scalars = list(blocks), [name for name, parameter in module.named_parameters() if parameter.ndim == 0]
    few = names if len(names) < 3 else [names[0], "...", names[-1]]
    return "\n".join(
        [
            f"FSDP2 on replicate {mesh.shape[0]} x shard {mesh.shape[1]}",
            f"  blocks      {len(names):,}: {', '.join(few)}" if names else "  blocks      none",
            f"  parameters  {elements:,}, of which at most {gathered / max(elements, 1):.1%} are gathered at a time",
            f"  on rank 0   {local_bytes(module) / 2**20:,.2f} MiB of weights",
            *([f"  scalars     {len(scalars):,}, whole on every rank: {', '.join(scalars[:3])}"] if scalars else []),
        ]
    )


def refuse_unshardable(module: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    """Refuse the parameters that FSDP2 cannot shard, or would train wrongly; every rank must call.

    Raises:
        UsageError: on all ranks, if one of them has a lazy parameter or buffer, a complex one that is trained, a layer
            with sparse gradients, or a parameter that two blocks share.
    """
    on_all_ranks(lambda: _refuse_unshardable(module, blocks))


def _refuse_unshardable(module: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    for path, part in module.named_modules():
        for name, tensor in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]:
            where = f"FSDP2Strategy: '{f'{path}.{name}'.lstrip('.')}' of {type(part).__name__}"
            if is_lazy(tensor):
                raise UsageError(
                    f"{where} has no shape yet: give the layer its sizes, or run a batch through it before"
                )
            if tensor.is_complex() and tensor.requires_grad:
                raise UsageError(f"{where} is complex, which FSDP2 cannot train: keep it as two real ones, or take ddp")
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            where = f"FSDP2Strategy: '{path}.weight' of {type(part).__name__}"
            raise UsageError(f"{where} has sparse gradients, which FSDP2 cannot reduce: set sparse=False, or take ddp")
    owners: dict[nn.Parameter, tuple[str | None, str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        block = next((block for block in blocks if name.startswith(f"{block}.")), None)
        first_block, first_name = owners.setdefault(parameter, (block, name))
        if first_block != block and parameter.ndim > 0:
            raise UsageError(
                f"FSDP2Strategy: '{name}' and '{first_name}' are one parameter, of which only one is in a block "
                f"('{block or first_block}'), or both in different ones: name other blocks, such that one holds both"
            )


def refuse_mixed_dtypes(module: nn.Module) -> None:
    """Refuse trained parameters of several dtypes that are gathered together, which FSDP2 would say at the first batch.

    Args:
        module: sharded, and converted by the precision plugin.
    """
    seen: dict[nn.Module, tuple[str, torch.dtype]] = {}

    def look(part: nn.Module, path: str, group: nn.Module) -> None:
        group = part if isinstance(part, FSDPModule) else group
        for name, parameter in part.named_parameters(path, recurse=False):
            if isinstance(parameter, DTensor) and parameter.requires_grad:
                first, dtype = seen.setdefault(group, (name, parameter.dtype))
                if dtype != parameter.dtype:
                    raise UsageError(
                        f"FSDP2Strategy: '{name}' of {type(part).__name__} is {_short(parameter.dtype)} and '{first}' "
                        f"{_short(dtype)}, and FSDP2 gathers them together: build all in one dtype, or take BF16True"
                    )
        for name, child in part.named_children():
            look(child, f"{path}.{name}".lstrip("."), group)

    look(module, "", module)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def refuse_fsdp1(module: nn.Module) -> None:
    """Refuse a module that FSDP1 has flattened parts of."""
    if any(is_a(part, "FullyShardedDataParallel") for part in module.modules()):
        raise UsageError(
            f"{type(module).__name__} wraps parts of itself in FullyShardedDataParallel (FSDP1): "
            "leave the sharding to FSDP2Strategy"
        )


def refuse_optimizers(optimizers: Iterable[Any]) -> None:
    """Refuse optimizers that take no DTensors."""
    for optimizer in optimizers:
        refuse_limits(optimizer, "shards")


def refuse_late_parameters(module: nn.Module, scalars: Collection[str]) -> None:
    """Refuse a parameter that was made after sharding, which would stay different on each rank.

    Args:
        module: sharded.
        scalars: names of the parameters that were there and are no shards.
    """
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor) and name not in scalars:
            raise UsageError(
                f"parameter '{name}' was made after sharding: make it in __init__ or configure_model, "
                "where FSDP2Strategy sees it"
            )
