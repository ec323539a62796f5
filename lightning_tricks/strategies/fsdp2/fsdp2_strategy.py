"""FSDP2 for any LightningModule in one line: blocks found, precision, checkpointing and compile in the right order."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed import fsdp

from lightning_tricks._core.errors import UsageError, check_choice, check_count
from lightning_tricks._core.protocols import CastsShards, KnowsWeights
from lightning_tricks._core.random_state import random_state, set_random_state
from lightning_tricks._core.replaced import replaced
from lightning_tricks._host.address import is_address
from lightning_tricks._trainer.lightning import pl, rank_zero_info, rank_zero_warn
from lightning_tricks._trainer.loop import is_accumulating
from lightning_tricks._trainer.objects import is_a, set_device_mesh, unwrapped
from lightning_tricks._trainer.run_facts import WeightsLayout, enabled_scaler
from lightning_tricks.checkpoints import AtomicCheckpointIO
from lightning_tricks.checkpoints.open_checkpoint import AVERAGES, open_checkpoint
from lightning_tricks.checkpoints.record import record_of
from lightning_tricks.optim.clip import clip_parameters_by_norm
from lightning_tricks.optim.limits import refuse_limits
from lightning_tricks.parallel import shard
from lightning_tricks.parallel.activation_checkpointing import Mode
from lightning_tricks.parallel.agreement import broadcast, on_all_ranks, on_rank_0
from lightning_tricks.parallel.context import Method, check_length
from lightning_tricks.parallel.dims import Mesh, ParallelDims
from lightning_tricks.parallel.parallelize import ParallelOptions, check_module, find_blocks, layout_table, parallelize
from lightning_tricks.parallel.pipeline import (
    SPLITS_BACKWARD,
    Cut,
    Pipeline,
    PipelineSchedule,
    copy_on_meta,
    cut,
    find_pipelined,
)
from lightning_tricks.parallel.stage_timeline import check_order
from lightning_tricks.parallel.tensor import PartialGradients, refuse_other_losses
from lightning_tricks.strategies.checkpoint_folder import FolderWriter, check_together, verify_together, was_verified
from lightning_tricks.strategies.fsdp2 import sharded_checkpoint
from lightning_tricks.strategies.fsdp2.backward_passes import GatherOnCall, Reduction, WaitingGradients

__all__ = ["FSDP2Strategy"]

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_CHANGES_RESULTS = ("trainer.plugins", "FSDP2Strategy.mesh", "FSDP2Strategy.cpu_offload")


class FSDP2Strategy(pl.strategies.ModelParallelStrategy):
    """Shard weights, gradients and optimizer state of any LightningModule over all devices.

    The module needs no change. After its own `configure_model`, the strategy finds the repeated blocks, has the
    precision plugin convert them, checkpoints and compiles them, and shards them one by one, then the rest with the
    LightningModule itself, whose steps gather it. `configure_optimizers` comes later and sees the sharded parameters.
    A module that calls `fully_shard` itself is left as it is. Losses, clip and norm are those of one process with the
    whole batch. It also runs on one device.

    With `mesh: {pipeline: 4}` each of four ranks has some of the layers, if the model can be cut into stages (see
    `HasStages`), and the loss of a call of the model has its gradients already, see `Pipeline`. A batch is divided into
    `pipeline_micro_batches`, and the weights of a block stay gathered within a call.

    With `mesh: {tensor: 8}` eight ranks share each matrix (tensor parallelism), as the module's `parallel_plan` or a
    Hugging Face model's `tp_plan` says. With `mesh: {context: 2}` two ranks share each row (context parallelism), if
    the module has a `set_context_parallel`. Both are combined with shards, and with replicas. With `mesh: {expert: 4}`
    each of four shard ranks has a quarter of the experts of a mixture, see `HasExperts`.

    Ranks start with rank 0's weights and buffers. In training each rank has running statistics (batch norm) and other
    buffers of its own; before each validation, test, prediction and save all ranks take rank 0's. A module may build
    its parameters on the meta device if it has a method `init_weights` that fills them; random numbers are then drawn
    from rank 0's seed. Scalars are not sharded: each rank holds them whole, and their gradients are averaged.

    Args:
        blocks: regular expressions for the whole names of the modules to gather one at a time; None finds the repeated
            blocks.
        reshard_after_forward: drop a block's weights after its forward pass (ZeRO-3); False keeps them (ZeRO-2).
        cpu_offload: keep shards and optimizer on the host; on a CPU they are there already.
        activation_checkpointing: `none` (or None), `cheap`, `selective` or `full`: how much of each block is computed
            again in the backward pass, see `checkpoint_block`.
        compile_blocks: compile each block with `torch.compile`.
        init_on_rank_0: run `configure_model` on rank 0 only and send the others their shards, for a model too large for
            one copy per process. Other ranks run it on the meta device. A module that builds on the meta device itself
            needs no rank 0 and is filled by `init_weights`.
        save_distributed_checkpoint: write a folder, each rank its shards; False: one file, written by rank 0.
        timeout_seconds: how long a rank waits for the others before it fails.
        mesh: sizes by name, see `ParallelDims`, such as replicas (HSDP); None: all devices shard one model (FSDP).
        sequence_parallel: with tensor ranks, divide the rows between the matrices too, where the plan says how.
        context_method: how context ranks see the rest of a row: `gather` its keys and values, or `ulysses`, exchange
            positions for heads.
        reduce_gradients: when gradients are summed over the ranks. `micro_batch`: after each backward pass. `step`:
            only after the last one of an optimizer step; each gradient is whole until then, which takes 4 bytes a
            parameter on each rank, divided by the tensor ranks.
        pipeline_schedule: the order of forward and backward passes over the stages, one of torch's.
        pipeline_micro_batches: into how many parts of equal rows each batch is divided. More of them make the bubble
            smaller, in which ranks wait: (stages - 1) / (micro_batches + stages - 1) of the time under 1F1B.
        layers_per_stage: number of layers of each stage; None shares them out so that the last stage, which has the
            head, takes no longer than the others.

    Raises:
        UsageError: an unknown `activation_checkpointing`; a module that an earlier run has sharded in another way;
            sizes that do not multiply to the number of devices, before any process waits; a pattern that matches
            nothing; parameters that FSDP2 cannot train (see `refuse_unshardable`), or made after sharding; ranks that
            have built different modules; an optimizer that takes no DTensors; Lightning's fp16 with scalars or tensor
            ranks; under manual optimization, see `GatherOnCall`.

    Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html; Zhao et al. 2023,
        https://arxiv.org/abs/2304.11277.
    """

    weights_layout: ClassVar[WeightsLayout] = "shards"

    def __init__(
        self,
        blocks: Sequence[str] | None = None,
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        activation_checkpointing: Mode | None = "none",
        compile_blocks: bool = False,
        init_on_rank_0: bool = False,
        save_distributed_checkpoint: bool = True,
        timeout_seconds: float = 1800.0,
        mesh: ParallelDims | None = None,
        sequence_parallel: bool = True,
        context_method: Method = "gather",
        reduce_gradients: Reduction = "micro_batch",
        pipeline_schedule: PipelineSchedule = "1F1B",
        pipeline_micro_batches: int = 4,
        layers_per_stage: Sequence[int] | None = None,
    ) -> None:
        super().__init__(
            data_parallel_size="auto",
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            timeout=timedelta(seconds=timeout_seconds),
        )
        if not isinstance(mesh, ParallelDims | None):
            raise UsageError(
                f"mesh={mesh!r}: give ParallelDims, such as ParallelDims(tensor=2); in a recipe, {{tensor: 2}}"
            )
        self.mesh = mesh
        self.sequence_parallel = sequence_parallel
        check_choice("context_method", context_method, Method)
        self.context_method = context_method
        self.reduce_gradients = reduce_gradients
        check_choice("pipeline_schedule", pipeline_schedule, PipelineSchedule)
        check_count("pipeline_micro_batches", pipeline_micro_batches)
        given = [] if layers_per_stage is None else layers_per_stage
        if not isinstance(given, list | tuple) or not all(type(count) is int and count > 0 for count in given):
            raise UsageError(f"layers_per_stage={given!r}: give a list of whole numbers of at least 1, one a stage")
        self.pipeline_schedule, self.pipeline_micro_batches = pipeline_schedule, pipeline_micro_batches
        self.layers_per_stage = layers_per_stage
        self._waiting = WaitingGradients(reduce_gradients)
        self.blocks = blocks
        self.reshard_after_forward = reshard_after_forward
        self.cpu_offload = cpu_offload
        self.activation_checkpointing: Mode = activation_checkpointing or "none"
        check_choice("activation_checkpointing", self.activation_checkpointing, Mode)
        self.compile_blocks = compile_blocks
        self.init_on_rank_0 = init_on_rank_0
        self._tensor_ranks_unchecked = False
        self._partial_gradients: PartialGradients | None = None  # of tensor ranks
        self._own_sharding: dict[str, Any] | None = None  # of the module that it has sharded
        self._folder_writer = FolderWriter(timedelta(seconds=timeout_seconds))
        self._until_teardown = ExitStack()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The ranks that have rows of their own; tensor and context ranks share theirs."""
        dims = self.dims
        return {"num_replicas": dims.data_ranks, "rank": dims.data_rank(self.global_rank)}

    @property
    def dims(self) -> ParallelDims:
        """The sizes of the mesh, for all processes of the run."""
        return self.dims_of(self.num_nodes * self.num_processes)

    def dims_of(self, world: int) -> ParallelDims:
        """The sizes of the mesh for `world` processes; see `ParallelDims.of_world`."""
        return (self.mesh or ParallelDims()).of_world(world)

    def check_run(self, trainer: Any, datamodule: Any, stage: str) -> None:
        """Refuse sizes, rows or a module that cannot be divided so, as far as known, before any process is started."""
        dims, whole = self.dims_of(trainer.num_nodes * trainer.num_devices), trainer.lightning_module
        length = getattr(datamodule, "seq_len", None)
        if dims.context > 1 and isinstance(length, int):
            check_length(length, dims.context)
        if dims.pipeline > 1:
            self._check_pipeline(dims, trainer, datamodule, stage)
        module = whole.without_data() if isinstance(whole, KnowsWeights) else whole
        if next(module.parameters(), None) is not None:
            check_module(module, dims)
            if dims.pipeline > 1:
                self.cut_stages(copy_on_meta(module), dims, 0)

    def setup_environment(self) -> None:
        """Check the sizes, join the process group, and name the mesh: `replicate`, `shard` and `tensor`."""
        dims, trainer = self.dims, self._module.trainer
        self.check_run(trainer, trainer.datamodule, trainer.state.fn)
        if self._offloads and self._process_group_backend is None:
            self._process_group_backend = "cpu:gloo,cuda:nccl"  # norms of gradients on the host are added up there
        super(pl.strategies.ModelParallelStrategy, self).setup_environment()
        self._setup_distributed()
        self.groups = Mesh.of(dims, self.root_device.type, self._timeout)
        self._device_mesh = self.groups.device_mesh
        set_device_mesh(self._module, self._device_mesh)

    def _check_pipeline(self, dims: ParallelDims, trainer: Any, datamodule: Any, stage: str) -> None:
        """Refuse options and rows that stages cannot have."""
        schedule, count, plugin = self.pipeline_schedule, self.pipeline_micro_batches, trainer.precision_plugin
        rows = getattr(datamodule, "micro_batch_size", None)
        module = trainer.lightning_module
        chosen = getattr(module, "compile_blocks", False)
        on_cpu = is_a(trainer.accelerator, "CPUAccelerator")
        compiled = self.compile_blocks or chosen is True or (chosen == "auto" and not on_cpu)
        experts = getattr(getattr(module, "config", None), "n_experts", None)  # `full` keeps their routing
        keeps = any(
            isinstance(mode, dict) or mode in ("cheap", "selective") or (mode == "full" and experts is not None)
            for mode in (self.activation_checkpointing, getattr(module, "activation_checkpointing", None))
        )
        for wrong, line in (
            (compiled and schedule in SPLITS_BACKWARD, f"compile_blocks: {schedule} splits the backward pass, which "
             "compiled blocks cannot: take 1F1B or Interleaved1F1B, or leave it out"),
            (keeps and schedule in SPLITS_BACKWARD, f"activation_checkpointing: {schedule} splits the backward pass, "
             "for which torch keeps no results beside those that run again: take 1F1B or Interleaved1F1B, or "
             f"{'none' if experts else 'none or full'}"),
            (torch.__version__ < "2.13" and schedule in SPLITS_BACKWARD, f"pipeline_schedule={schedule}: splits the "
             f"backward pass, which torch {torch.__version__} cannot: take Interleaved1F1B, or torch 2.13"),
            (self.init_on_rank_0, "init_on_rank_0: no rank can hold the whole model: leave it out, with init_weights"),
            (self.reduce_gradients == "step", "reduce_gradients=step: stages reduce once a batch: leave it out"),
            (not self._save_distributed_checkpoint, "save_distributed_checkpoint=False: no rank has all weights: save "
             "folders, which `export` makes one file of"),
            (enabled_scaler(plugin) is not None, f"trainer.precision={getattr(plugin, 'precision', None)}: "
             "its loss scaling comes after the backward passes of the stages: take bf16"),
            (isinstance(rows, int) and rows % count, f"data.micro_batch_size={rows} is no multiple of "
             f"pipeline_micro_batches={count}: change one of the two"),
            (stage == "predict", "stages give a loss, and no logits: predict in one process"),
        ):  # fmt: skip
            if wrong:
                raise UsageError(f"mesh.pipeline: {line}")
        check_order(schedule, dims.pipeline, count)

    def cut_stages(self, module: nn.Module, dims: ParallelDims, rank: int) -> Cut | None:
        """Leave in a module what the pipeline stages of a rank have, in place; None where there are no stages."""
        if dims.pipeline == 1:
            return None
        whole, (name, model) = copy_on_meta(module), find_pipelined(module)
        place = dims.place(rank, "pipeline")
        made = cut(model, place, dims.pipeline, self.pipeline_schedule, self.layers_per_stage)
        vars(module)["_whole_module"] = whole
        vars(model)["_whole_module"] = whole.get_submodule(name)
        return made

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Join a value over the ranks that have different tokens; tensor ranks have the same values."""
        return super().reduce(tensor, self.groups.loss if group is None else group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks say yes, or any."""
        said = torch.tensor(int(decision), device=self.root_device)
        count = super().reduce(said, torch.distributed.group.WORLD, "sum")
        return bool(count == self.world_size) if all else bool(count)

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
        # FSDP2 keeps the tensors of its first gather; made in inference mode, they could not train in a later fit
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            self._until_teardown.enter_context(replaced(loop, "inference_mode", False))
        module = self._module
        sharded = any(isinstance(part, fsdp.FSDPModule) for part in module.modules())  # by itself, or by an earlier fit
        if sharded:
            self._refuse_other_sharding(module, trains=trainer.state.fn == "fit")
            self._waiting.forget(module)
        with nullcontext() if sharded else shard.attributes_kept(module):
            self._shard_and_fill(module, sharded)
            self.model = self.precision_plugin.convert_module(module)
            self.model_to_device()
        if (pipeline := vars(module).get("_pipeline")) is not None:
            pipeline.mark_parameters()  # which are other objects since they are on their device
        self.barrier()
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                refuse_limits(optimizer, "shards")
            if not sharded:
                shard.refuse_late_parameters(module, module._scalars.names)
            self._refuse_scaler(module)
            self._clip_shards()
        self.setup_precision_plugin()

    def _shard_and_fill(self, module: Any, sharded: bool) -> None:
        # rank 0 has no values either if the module itself builds on the meta device, to be filled by `init_weights`
        from_rank_0 = self.init_on_rank_0 and self.world_size > 1 and not self.broadcast(shard.has_meta(module))
        if not from_rank_0:
            shard.refuse_unfillable(module)
        if not sharded:
            self._shard(module, from_rank_0)
        elif from_rank_0 and self.broadcast(shard.has_meta(module), src=1):
            raise UsageError(
                f"{type(module).__name__} shards itself in configure_model, where rank 0's values cannot reach the "
                "others: leave fully_shard to the strategy, or set init_on_rank_0 to false"
            )
        if from_rank_0:  # rank 0 has drawn weights and the others have not, so random states differ
            set_random_state(on_rank_0(random_state))
        if shard.has_meta(module):
            shard.init_weights(module, self.root_device, self.groups.stage)
        if self._offloads and not sharded:
            module.to("cpu")  # values drawn on the device, so that they are those of a run without offloading
        if self.dims.tensor > 1:  # they have the same activations and drop the same, however a program seeds each
            set_random_state(on_rank_0(random_state, self.groups.tensor.get_group()))

    def _shard(self, module: Any, from_rank_0: bool) -> None:
        on_all_ranks(lambda: shard.refuse_unshardable(module, find_blocks(module, self.blocks)))
        shard.refuse_other_modules(module)
        state = shard.Rank0State(module) if from_rank_0 else None
        if state is None and not shard.has_meta(module):
            broadcast([*module.parameters(), *module.buffers()], self.root_device)
        stages = self.cut_stages(module, self.dims, self.global_rank)
        made = parallelize(module, self.groups, self.options, list(stages.stages.values()) if stages else None)
        if not made.blocks:
            rank_zero_warn(
                f"FSDP2Strategy: {type(module).__name__} has no repeated blocks, so all of it is gathered at once: "
                "name parts of it by blocks"
            )
        # attributes of the module, as the shards are: a second fit, by another strategy, finds all of them
        module._scalars = shard.Scalars(module)
        module._gather_on_call = module._pipeline = None
        if stages is not None:
            module._pipeline = stages.model.forward = Pipeline(
                stages, self.groups.pipeline, self.pipeline_schedule, self.pipeline_micro_batches, self.groups.ends,
                self.root_device,
            )  # fmt: skip
        else:
            if not module.automatic_optimization:
                module._gather_on_call = GatherOnCall(module, made.blocks.values())
            for step in _STEPS:
                if step != "training_step" or module._gather_on_call is None:
                    fsdp.register_fsdp_forward_method(module, step)
        module._sharded_with = self._own_sharding = self._sharding
        if state is not None:
            state.scatter(module, self.root_device)
        rank_zero_info(*layout_table(self.dims, made, self.options, module, stages).split("\n"))
        self._tensor_ranks_unchecked = self.dims.tensor > 1
        self._partial_gradients = PartialGradients(module, self.groups.tensor) if self.dims.tensor > 1 else None

    @property
    def options(self) -> ParallelOptions:
        """How `parallelize` is told to treat the module."""
        plugin = self.precision_plugin
        return self.options_with(
            convert=getattr(plugin, "convert_before_sharding", None),
            compile_blocks=self.compile_blocks,
            policy=plugin.fsdp2_policy if isinstance(plugin, CastsShards) else fsdp.MixedPrecisionPolicy(),
            offload=fsdp.CPUOffloadPolicy() if self._offloads else fsdp.OffloadPolicy(),
        )

    def options_with(self, **others: Any) -> ParallelOptions:
        """The strategy's own settings of `ParallelOptions`, and others, which a run or a plan knows."""
        return ParallelOptions(
            blocks=self.blocks,
            activation_checkpointing=self.activation_checkpointing,
            sequence_parallel=self.sequence_parallel,
            context_method=self.context_method,
            reshard_after_forward=self.reshard_after_forward,
            **others,
        )

    @property
    def _sharding(self) -> dict[str, Any]:
        """All that a module keeps of the run that has sharded it, by option.

        Those of `_CHANGES_RESULTS` matter when the module is only evaluated, too.
        """
        options, dims = self.options, self.dims
        return {
            "trainer.plugins": options.policy,
            "FSDP2Strategy.mesh": f"{dims} on {self.root_device.type}",
            "FSDP2Strategy.cpu_offload": self._offloads,
            "FSDP2Strategy.blocks": None if self.blocks is None else tuple(self.blocks),
            "FSDP2Strategy.reshard_after_forward": self.reshard_after_forward,
            "FSDP2Strategy.activation_checkpointing": self.activation_checkpointing,
            "FSDP2Strategy.compile_blocks": self.compile_blocks,
            "FSDP2Strategy.sequence_parallel": self.sequence_parallel if dims.tensor > 1 else None,
            "FSDP2Strategy.context_method": self.context_method if dims.context > 1 else None,
            "FSDP2Strategy.pipeline_schedule": self.pipeline_schedule if dims.pipeline > 1 else None,
            "FSDP2Strategy.pipeline_micro_batches": self.pipeline_micro_batches if dims.pipeline > 1 else None,
        }

    def _refuse_other_sharding(self, module: Any, trains: bool) -> None:
        """Refuse a module that an earlier run has sharded in another way, which this run would keep without a word."""
        earlier = vars(module).get("_sharded_with", {})  # empty where the module shards itself
        if earlier is self._own_sharding:
            return
        for option, value in self._sharding.items():
            before = earlier.get(option, value)
            if value != before and (trains or option in _CHANGES_RESULTS):
                raise UsageError(
                    f"{option}={value}: an earlier run has sharded this {type(module).__mro__[2].__name__} with "
                    f"{before}, and it stays so: give the same, or build a new module"
                )

    @property
    def _module(self) -> Any:
        return self.lightning_module

    @property
    def _offloads(self) -> bool:
        return self.cpu_offload and self.root_device.type == "cuda"

    @property
    def _gather_on_call(self) -> GatherOnCall | None:
        return vars(self._module).get("_gather_on_call")

    def _refuse_scaler(self, module: nn.Module) -> None:
        """Refuse Lightning's fp16 where torch's scaler fails, or tensor ranks would not skip the same steps."""
        plugin = self.precision_plugin
        if enabled_scaler(plugin) is None or isinstance(plugin, CastsShards):  # or it is FP16Mixed
            return
        found = [f"'{name}', which is not sharded" for name, weight in module.named_parameters() if not weight.ndim]
        found += ["mesh.tensor"] if self.dims.tensor > 1 else []
        if found:
            raise UsageError(
                f"trainer.precision={plugin.precision}: its loss scaling does not work with {found[0]}: take it out, "
                "and set plugins to FP16Mixed"
            )

    def _clip_shards(self) -> None:
        """Until the end of the fit, clip by a norm over parameters of all kinds: torch's takes those of one mesh."""
        plugin, of_lightning = self.precision_plugin, pl.plugins.Precision.clip_grad_by_norm
        if getattr(plugin.clip_grad_by_norm, "__func__", None) is of_lightning:  # and not the user's own
            self._until_teardown.enter_context(replaced(plugin, "clip_grad_by_norm", clip_parameters_by_norm))

    def model_to_device(self) -> None:
        """Move the tensors that are not sharded; shards are on their device already."""
        assert self.model is not None
        if self._offloads:
            scalars = (parameter for parameter in self.model.parameters() if parameter.ndim == 0)
            for tensor in [*self.model.buffers(), *scalars]:
                tensor.data = tensor.to(self.root_device)
        else:
            self.model.to(self.root_device)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own."""
        with self._gather_on_call.step() if self._gather_on_call else nullcontext():
            return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the backward pass, at whose end all gradients are reduced, before any hook sees them."""
        if self._gather_on_call:
            closure_loss = self._gather_on_call.before_backward(closure_loss)
        module, plugin = self._module, self.precision_plugin
        accumulates = module.automatic_optimization and is_accumulating(module.trainer)
        self._waiting.before_backward(module, accumulates)
        self.pre_backward(closure_loss)
        if self._tensor_ranks_unchecked:
            refuse_other_losses(closure_loss, self.groups.tensor)
        closure_loss = plugin.pre_backward(closure_loss, module)
        plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        if "_scalars" in vars(module):
            module._scalars.average_gradients(self.root_device, self.groups.loss)
        if self._partial_gradients is not None and not accumulates:
            self._tensor_ranks_unchecked = False
            self._partial_gradients.refuse()
        closure_loss = plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Step, and drop the parameters that were gathered before."""
        if self._gather_on_call:
            self._gather_on_call.refuse_gradients_of_whole_parameters()
        else:
            closure = self._waiting.then_summed(closure)
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        shard.drop_gathered(self._module)  # by a hook between the backward pass and the step that calls the module
        return output

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Lightning restores state when it has called the hooks on the checkpoint, as on one device."""
        return True

    def on_validation_start(self) -> None:
        """Evaluate the module that a checkpoint would hold."""
        self._take_buffers_of_rank_0()

    on_test_start = on_predict_start = on_validation_start

    def on_validation_end(self) -> None:
        """Leave the module in shards, as it was: FSDP2 keeps what it has gathered for the next batch."""
        shard.drop_gathered(self._module)

    on_test_end = on_predict_end = on_validation_end

    def _take_buffers_of_rank_0(self) -> None:
        """Let running statistics and other saved buffers be rank 0's on every rank; every rank must call."""
        saved = [
            buffer
            for part in self._module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None and name not in part._non_persistent_buffers_set
        ]
        broadcast(saved, self.root_device, self.groups.stage)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights, named as on one device: each rank's shards, or all of them on rank 0."""
        self._take_buffers_of_rank_0()
        return self._to_save(self._module.state_dict())

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """One optimizer's state: each rank's shards by name, or all of it by number on rank 0."""
        optimizer = unwrapped(optimizer)
        if not self._save_distributed_checkpoint:
            return self._to_save(optimizer.state_dict())
        return sharded_checkpoint.state_by_name(self._module, optimizer)

    def _to_save(self, state: dict[str, Any]) -> dict[str, Any]:
        return state if self._save_distributed_checkpoint else sharded_checkpoint.gather(state, self.global_rank == 0)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a folder or a file; an older one of that name is there until the new one is whole."""
        if storage_options is not None:
            raise UsageError(f"storage_options={storage_options}: FSDP2Strategy writes to a file system and takes none")
        path = self.broadcast(filepath)
        if not self._save_distributed_checkpoint:
            self._checkpoint_io = self._checkpoint_io or AtomicCheckpointIO()
            if AVERAGES in checkpoint:
                checkpoint = {**checkpoint, AVERAGES: self._to_save(checkpoint[AVERAGES])}
            on_rank_0(lambda: self.checkpoint_io.save_checkpoint(checkpoint, path))
        elif is_address(path):
            raise UsageError(f"{path}: save shards by SafeCheckpoint, or set save_distributed_checkpoint to False")
        else:
            state = sharded_checkpoint.shards_to_save(checkpoint, self.groups.stage)
            record = record_of(checkpoint)
            self._folder_writer.save(Path(path), state, sharded_checkpoint.write_shards, record, self.checkpoint_io)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a folder's shards of this rank, or a whole file of which each rank then takes its part."""
        path = check_together(self.broadcast(checkpoint_path))
        if path.is_dir():
            verify_together(path, self.checkpoint_io)
            return sharded_checkpoint.read_shards(path, self._module, self.optimizers, weights_only)
        return open_checkpoint(path, weights_only=weights_only, verify=not was_verified(self.checkpoint_io, path))

    def teardown(self) -> None:
        """Wait for a write in the background, then tear down the rest."""
        self._until_teardown.close()
        self._partial_gradients = None
        try:
            self.checkpoint_io.teardown()  # Lightning's own teardown does not call it
        finally:
            super().teardown()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Give the module the checkpoint's weights."""
        sharded_checkpoint.load_weights(self._module, checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Give each optimizer its state."""
        sharded_checkpoint.load_optimizers(self._module, self.optimizers, checkpoint["optimizer_states"])
