"""FSDP2 for any LightningModule in one line: blocks found, precision, checkpointing and compile in the right order."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    register_fsdp_forward_method,
)

from lightning_tricks._activation_checkpointing import Mode, check_mode
from lightning_tricks._errors import UsageError
from lightning_tricks._find_modules import match_modules, repeated_blocks
from lightning_tricks._lightning import pl_import
from lightning_tricks._trainer import set_device_mesh
from lightning_tricks.checkpoints import FolderCheckpointIO
from lightning_tricks.checkpoints.folder_checkpoint_io import check_content
from lightning_tricks.checkpoints.read_folder import load_file
from lightning_tricks.strategies._refuse import refuse_fsdp1, refuse_late_parameters, refuse_optimizers
from lightning_tricks.strategies._start import (
    Whole,
    broadcast_from_rank0,
    fill_meta,
    has_meta,
    refuse_unfillable,
    same_random_state,
)
from lightning_tricks.strategies.fsdp2.checkpoint_blocks import checkpoint_block
from lightning_tricks.strategies.fsdp2.load_shards import check_together, load_optimizers, load_weights, read_shards
from lightning_tricks.strategies.fsdp2.manual_optimization import GatherOnCall
from lightning_tricks.strategies.fsdp2.save_shards import gather, on_rank_0, save_shards, shards_by_name
from lightning_tricks.strategies.fsdp2.shard import HowToShard, largest_group, local_bytes, shard_module

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ModelParallelStrategy
else:
    ModelParallelStrategy = pl_import("strategies").ModelParallelStrategy

rank_zero_info = pl_import("utilities.rank_zero").rank_zero_info
rank_zero_warn = pl_import("utilities.rank_zero").rank_zero_warn
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class FSDP2Strategy(ModelParallelStrategy):
    """Shard weights, gradients and optimizer state of any LightningModule over all devices.

    The module needs no change: the repeated blocks are found, converted by the precision plugin, checkpointed, compiled
    and sharded one by one, then the rest with the LightningModule itself, whose steps gather it. All of that is before
    `configure_optimizers`, which sees the sharded parameters, and after the module's own `configure_model`. A module
    that calls `fully_shard` itself there is left as it made itself. Losses, clip and norm are those of one process with
    the whole batch. One device is a case like any other.

    Ranks start with rank 0's weights and buffers. A module may build its parameters on the meta device, where it has a
    method `init_weights` that fills them.

    Args:
        replicate_size: groups that each hold the whole model (HSDP); the devices of one are sharded over. 1: no copies.
        blocks: regular expressions of the whole names of what is gathered at a time; None finds the repeated blocks.
        reshard_after_forward: drop a block's weights after its forward pass (ZeRO-3); False keeps them (ZeRO-2).
        cpu_offload: keep shards and optimizer on the host; on a CPU they are there already.
        activation_checkpointing: what of each block is computed again in the backward pass: `none` (or None), `full` or
            `selective`, see `checkpoint_block`.
        compile_blocks: compile each block with `torch.compile`.
        init_on_rank_0: run `configure_model` on rank 0 only and send the others their shards, where the model is too
            large for one copy a process. Other ranks run it on the meta device. A module that builds on the meta device
            itself needs no rank 0 and is filled by `init_weights`.
        save_distributed_checkpoint: a folder to which each rank writes its shards; False: one file, written by rank 0.
        timeout_seconds: how long a rank waits for the others before it fails.

    Raises:
        UsageError: another word for `activation_checkpointing`; sizes that do not multiply to the number of devices,
            before any process waits; a pattern that matches nothing; parameters made after sharding; an optimizer that
            takes no DTensors; under manual optimization, see `GatherOnCall`.

    Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html; Zhao et al. 2023,
        https://arxiv.org/abs/2304.11277.
    """

    def __init__(
        self,
        replicate_size: int = 1,
        blocks: Sequence[str] | None = None,
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        activation_checkpointing: Mode | None = "none",
        compile_blocks: bool = False,
        init_on_rank_0: bool = False,
        save_distributed_checkpoint: bool = True,
        timeout_seconds: float = 1800.0,
    ) -> None:
        super().__init__(
            data_parallel_size="auto",
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            timeout=timedelta(seconds=timeout_seconds),
        )
        self.replicate_size = replicate_size
        self.blocks = blocks
        self.reshard_after_forward = reshard_after_forward
        self.cpu_offload = cpu_offload
        self.activation_checkpointing = check_mode(activation_checkpointing)
        self.compile_blocks = compile_blocks
        self.init_on_rank_0 = init_on_rank_0
        self.shards_modules = True  # what a module goes by that would otherwise shard itself

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every rank has data of its own."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_environment(self) -> None:
        """Check the sizes, join the process group, and name the mesh: `replicate` and `shard`."""
        world = self.num_nodes * self.num_processes
        if self.replicate_size < 1 or world % self.replicate_size:
            raise UsageError(
                f"replicate_size={self.replicate_size} does not divide the {world} devices: "
                "give a divisor of num_nodes x devices"
            )
        if self._offloads and self._process_group_backend is None:
            self._process_group_backend = "cpu:gloo,cuda:nccl"  # norms of gradients on the host are added up there
        super(ModelParallelStrategy, self).setup_environment()
        self._setup_distributed()
        shape = (self.replicate_size, world // self.replicate_size)
        self._device_mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=("replicate", "shard"))
        assert self.lightning_module is not None
        set_device_mesh(self.lightning_module, self._device_mesh)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Around `configure_model`: on the meta device where rank 0 alone makes the values."""
        on_meta = self.init_on_rank_0 and self.global_rank != 0
        with torch.device("meta") if on_meta else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    def setup(self, trainer: Any) -> None:
        """Shard, then make the optimizers."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        assert module is not None
        refuse_fsdp1(module)
        # rank 0 has no values either where the module itself builds on the meta device, to be filled by `init_weights`
        from_rank_0 = self.init_on_rank_0 and self.world_size > 1 and not self.broadcast(has_meta(module))
        if not from_rank_0:
            refuse_unfillable(module)
        own = any(isinstance(part, FSDPModule) for part in module.modules())  # its own, or ours of an earlier fit
        if not own:
            self._shard(module, from_rank_0)
        elif from_rank_0 and self.broadcast(has_meta(module), src=1):
            raise UsageError(
                f"{type(module).__name__} shards itself in configure_model, where rank 0's values cannot reach the "
                "others: leave fully_shard to the strategy, or set init_on_rank_0 to false"
            )
        if self.init_on_rank_0:
            same_random_state(self.root_device)
        fill_meta(module, self.root_device)
        if self._offloads and not own:
            module.to("cpu")  # values drawn on the device, so that they are those of a run without offloading
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        self.barrier()
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
            refuse_optimizers(self.optimizers)
            if not own:
                refuse_late_parameters(module)
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """Move what is not sharded; shards are where they belong."""
        assert self.model is not None
        if not self._offloads:
            self.model.to(self.root_device)
            return
        for buffer in self.model.buffers():
            buffer.data = buffer.to(self.root_device)

    @property
    def _gather_on_call(self) -> GatherOnCall | None:
        return vars(self.lightning_module).get("_gather_on_call")

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own."""
        with self._gather_on_call.step() if self._gather_on_call else nullcontext():
            return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the backward pass, at whose end all gradients are reduced."""
        if self._gather_on_call:
            closure_loss = self._gather_on_call.before_backward(closure_loss)
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Step, and drop what was gathered before."""
        if not self._gather_on_call:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        self._gather_on_call.refuse_gradients_of_whole_parameters()
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._gather_on_call.reshard()
        return output

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Lightning restores state when it has called the hooks on the checkpoint, as on one device."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights, named as on one device: each rank's shards, or all of them on rank 0."""
        assert self.lightning_module is not None
        return self._to_save(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """One optimizer's state: each rank's shards by name, or all of it by place on rank 0."""
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        if not self._save_distributed_checkpoint:
            return self._to_save(optimizer.state_dict())
        assert self.lightning_module is not None
        return shards_by_name(self.lightning_module, optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a folder or a file; what had its name is there until the new one is whole."""
        if storage_options is not None:
            raise UsageError(f"storage_options={storage_options}: FSDP2Strategy writes to a file system and takes none")
        path = self.broadcast(filepath)
        if not self._save_distributed_checkpoint:
            self._checkpoint_io = self._checkpoint_io or FolderCheckpointIO()
            on_rank_0(lambda: self.checkpoint_io.save_checkpoint(checkpoint, path))
        elif "://" in str(path):
            raise UsageError(f"{path}: shards go to a file system; set save_distributed_checkpoint to False")
        else:
            save_shards(checkpoint, Path(path))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a folder's shards of this rank, or a whole file of which each rank then takes its part."""
        given = self.broadcast(checkpoint_path)
        path = check_together(given)
        assert self.lightning_module is not None
        if path.is_dir():
            return read_shards(path, self.lightning_module, bool(self.optimizers), weights_only)
        if not path.is_file():  # elsewhere
            return self.checkpoint_io.load_checkpoint(given, weights_only=weights_only)
        checkpoint = load_file(path, weights_only)
        check_content(checkpoint, path)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Give the module the checkpoint's weights."""
        assert self.lightning_module is not None
        load_weights(self.lightning_module, checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Give each optimizer its state."""
        assert self.lightning_module is not None
        load_optimizers(self.lightning_module, self.optimizers, checkpoint["optimizer_states"])

    def _to_save(self, state: dict[str, Any]) -> dict[str, Any]:
        return state if self._save_distributed_checkpoint else gather(state, keep=self.global_rank == 0)

    def _shard(self, module: Any, from_rank_0: bool) -> None:
        blocks = self._find(module)
        elements = sum(parameter.numel() for parameter in module.parameters())
        at_once = largest_group(module, blocks.values())
        whole = Whole(module) if from_rank_0 else None
        if whole is None and not has_meta(module):
            broadcast_from_rank0(module, self.root_device)
        if hasattr(self.precision_plugin, "convert_before_sharding"):
            self.precision_plugin.convert_before_sharding(module)
        for block in blocks.values():
            if self.activation_checkpointing != "none":
                checkpoint_block(block, self.activation_checkpointing)
            if self.compile_blocks:
                block.compile()
        shard_module(module, list(blocks.values()), self._how())
        # of the object, as the shards are: a second fit, by another strategy, finds both
        module._gather_on_call = None if module.automatic_optimization else GatherOnCall(module, blocks.values())
        for step in _STEPS:
            if step != "training_step" or module._gather_on_call is None:
                register_fsdp_forward_method(module, step)
        if whole is not None:
            whole.scatter(module, self.root_device)
        rank_zero_info(self._summary(blocks, elements, at_once, local_bytes(module)))

    def _find(self, module: nn.Module) -> dict[str, nn.Module]:
        if self.blocks is not None:
            return match_modules(module, self.blocks, "FSDP2Strategy.blocks")
        found = repeated_blocks(module)
        if not found:
            rank_zero_warn(
                f"FSDP2Strategy: {type(module).__name__} has no repeated blocks, so all of it is gathered at once: "
                "name parts of it by blocks"
            )
        return found

    def _how(self) -> HowToShard:
        mesh = self.device_mesh if self.replicate_size > 1 else self.device_mesh["shard"]
        policy = getattr(self.precision_plugin, "fsdp2_policy", None) or MixedPrecisionPolicy()
        offload = CPUOffloadPolicy() if self._offloads else OffloadPolicy()
        return HowToShard(mesh, policy, self.reshard_after_forward, offload)

    @property
    def _offloads(self) -> bool:
        return self.cpu_offload and self.root_device.type == "cuda"

    def _summary(self, blocks: dict[str, nn.Module], elements: int, at_once: int, bytes_here: int) -> str:
        names = list(blocks)
        few = names if len(names) < 3 else [names[0], "...", names[-1]]
        mesh = " x ".join(
            f"{name} {size}" for name, size in zip(("replicate", "shard"), self.device_mesh.shape, strict=True)
        )
        return "\n".join(
            [
                f"FSDP2 on {mesh}",
                f"  blocks      {len(names):,}: {', '.join(few)}" if names else "  blocks      none",
                f"  parameters  {elements:,}, of which at most {at_once / max(elements, 1):.1%} are gathered at a time",
                f"  on rank 0   {bytes_here / 2**20:,.2f} MiB of weights",
            ]
        )
