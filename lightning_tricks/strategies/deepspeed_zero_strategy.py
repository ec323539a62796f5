"""DeepSpeed's ZeRO for any LightningModule in one line, on GPUs and on a CPU."""

import argparse
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal, cast, get_args

import torch
from torch import Tensor, nn

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.replaced import replaced
from lightning_tricks._core.tensors import whole_numel
from lightning_tricks._trainer.lightning import pl
from lightning_tricks._trainer.loop import is_accumulating
from lightning_tricks._trainer.objects import configured_optimizers, is_a
from lightning_tricks._trainer.refusals import PRECISION_PLUGIN
from lightning_tricks._trainer.run_facts import WeightsLayout
from lightning_tricks.checkpoints.load_weights import differing_weights
from lightning_tricks.checkpoints.record import record_of
from lightning_tricks.optim.limits import refuse_limits
from lightning_tricks.parallel.agreement import broadcast
from lightning_tricks.strategies.checkpoint_folder import FolderWriter, read_together, verify_together
from lightning_tricks.strategies.consolidate_deepspeed import (
    Layout,
    check_installed,
    load_deepspeed,
    read_layout,
    read_weights,
    states_to_save,
    write_states,
)

__all__ = ["DeepSpeedZeROStrategy"]

Stage = Literal[1, 2, 3]
_MAX_BUCKET = 200_000_000  # elements of a buffer, Lightning's default
_MAX_PERSISTENT = 100_000  # elements, DeepSpeed's default for the size below which stage 3 does not shard


class DeepSpeedZeROStrategy(pl.strategies.DeepSpeedStrategy):
    """Shard optimizer state, gradients and weights of any LightningModule over all devices, by DeepSpeed's engine.

    The module needs no change. Losses, clip and norm are those of one process with the whole batch. Accumulation and
    the clip by norm are the Trainer's; a window of micro-batches ends with the epoch, as on one device. A resume
    follows the recipe in learning rate, decay and clip. It also runs on a CPU, and compiles nothing.

    `trainer.precision` is `32-true`, `bf16-mixed` or `bf16-true` (both DeepSpeed's bf16: weights and products in bf16,
    an fp32 copy of each shard in the optimizer, gradients reduced in fp32, and those of micro-batches added up in fp32
    at stages 2 and 3, in bf16 at stage 1), and on GPUs `16-mixed`.

    Each process builds the whole model once, on its device, before it is sharded. A checkpoint is a folder that opens
    with the same number of processes and the same stage, 1 being like 2; `consolidate_deepspeed` makes one plain file
    of its weights.

    Args:
        stage: 1 shards the optimizer's state, 2 the gradients as well, 3 the weights as well. 3 takes the least memory.
        offload_optimizer: keep optimizer state and the fp32 copy on the host, where the step is computed. A fused torch
            optimizer is fast there.
        offload_parameters: keep the shards of the weights on the host; stage 3 only.
        timeout_seconds: how long a process waits for the others before it fails.

    Raises:
        UsageError: deepspeed is missing; an option, the precision, a precision plugin or a clip by value that
            DeepSpeed does not know; several optimizers, or one that needs the parameters' shapes; a checkpoint of
            another number of processes or of another kind.

    Source: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054;
        https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/engine.py (0.19.8).
    """

    weights_layout: ClassVar[WeightsLayout] = "engine"

    def __init__(
        self,
        stage: Stage = 3,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        timeout_seconds: float = 1800.0,
    ) -> None:
        # Lightning's own constructor imports deepspeed, but a recipe can be read where it is missing
        super(pl.strategies.DeepSpeedStrategy, self).__init__()
        self.config = zero_config(stage, offload_optimizer, offload_parameters)
        self._config_initialized = False
        self._timeout = timedelta(seconds=timeout_seconds)
        self.remote_device, self.load_full_weights, self.exclude_frozen_parameters = None, False, False
        self.loss_scale, self.initial_scale_power, self.loss_scale_window = 0.0, 16, 1000  # for 16-mixed
        self.hysteresis, self.min_loss_scale = 2, 1
        self.stage = stage
        self.offload_optimizer = offload_optimizer
        self.offload_parameters = offload_parameters
        self.timeout_seconds = timeout_seconds
        self._folder_writer = FolderWriter(self._timeout)

    @property
    def handles_gradient_accumulation(self) -> bool:
        """The Trainer counts micro-batches: DeepSpeed's own count would run on over the end of an epoch."""
        return False

    def check_run(self, trainer: Any, datamodule: Any, stage: str) -> None:
        """Refuse a run without deepspeed, or with what it does not support, before any process is started."""
        check_installed()
        refuse_settings(self, trainer)

    def setup_environment(self) -> None:
        """Refuse what cannot work, then join the process group."""
        assert self.lightning_module is not None
        refuse_settings(self, self.lightning_module.trainer)
        refuse_accelerator(self)
        load_deepspeed().utils.logging.logger.setLevel(logging.WARNING)
        super(pl.strategies.DeepSpeedStrategy, self).setup_environment()  # Lightning's own refuses a CPU here

    def setup_distributed(self) -> None:
        """Join the process group."""
        if self.root_device.type == "cuda":
            super().setup_distributed()
            return
        pl.strategies.deepspeed.reset_seed()
        self.set_world_ranks()
        # On a CPU, DeepSpeed would compile a faster way between processes. That takes half a minute and a compiler, and
        # a build that was killed leaves a lock on which the next run waits.
        with replaced(load_deepspeed().ops, "__compatible_ops__", {"deepspeed_shm_comm": False}):
            self._init_deepspeed_distributed()

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Around `configure_model`: the model is built whole, so that it may draw its weights in any way it likes."""
        yield

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Around `configure_model`: on the device."""
        with super(pl.strategies.DeepSpeedStrategy, self).tensor_init_context(empty_init=empty_init):
            yield

    def setup(self, trainer: Any) -> None:
        """Shard, and make the optimizer."""
        assert self.lightning_module is not None
        assert isinstance(self.config, dict)
        self._init_config_if_needed()
        self.config["zero_optimization"] |= fitting_sizes(self.lightning_module)
        if "bf16" in self.config:
            self.config["communication_data_type"] = "fp32"
            if self.stage > 1:  # at stage 1 it brings an optimizer whose checkpoints DeepSpeed cannot convert
                self.config["data_types"] = {"grad_accum_dtype": "fp32"}
        if not self.lightning_module.automatic_optimization:  # only the module knows which backward pass is the last
            self.config["managed_gradient_accumulation"] = False
            self.config["zero_optimization"]["overlap_comm"] = False
        super().setup(trainer)

    def init_deepspeed(self) -> None:
        """Wrap the module in the engine."""
        module: Any = self.lightning_module
        overridden = type(module).configure_gradient_clipping is not pl.LightningModule.configure_gradient_clipping
        if overridden and not getattr(module, "keeps_grad_norm", False):
            pl.strategies.deepspeed.rank_zero_warn(
                f"{type(module).__name__}.configure_gradient_clipping has no effect under DeepSpeed: its engine clips, "
                "by trainer.gradient_clip_val"
            )
        if module.trainer.training:
            self._initialize_deepspeed_train(module)
        else:
            self._initialize_deepspeed_inference(module)

    def _init_optimizers(self) -> Any:
        module: Any = self.lightning_module
        optimizers, schedulers = configured_optimizers(module)
        refuse_optimizers(module, optimizers, schedulers)
        return optimizers[0], schedulers[0] if schedulers else None

    def _setup_model_and_optimizer(self, model: nn.Module, optimizer: Any, lr_scheduler: Any = None) -> Any:
        return self._engine(model, self.config, optimizer, lr_scheduler)

    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        assert isinstance(self.config, dict)
        needed = ("bf16", "fp16", "zero_optimization") if self.stage == 3 else ("bf16", "fp16")
        config = {key: self.config[key] for key in needed if key in self.config}
        if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
            pl.strategies.deepspeed.remove_module_hooks(model)  # those of the engine that trained it
        self.model = self._engine(model, {"train_micro_batch_size_per_gpu": 1, **config})[0]

    def _engine(self, model: nn.Module, config: Any, optimizer: Any = None, lr_scheduler: Any = None) -> Any:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad] if optimizer else []
        arguments = argparse.Namespace(device_rank=self.local_rank)  # not Lightning's device index: a CPU has none
        engine, wrapped, _, _ = load_deepspeed().initialize(
            arguments, model, optimizer, trained, lr_scheduler=lr_scheduler, dist_init_required=False, config=config
        )
        return engine, wrapped

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step, after telling the engine whether this micro-batch is the last of its window."""
        assert self.lightning_module is not None
        if self.lightning_module.automatic_optimization:
            last = not is_accumulating(self.lightning_module.trainer)
            self.deepspeed_engine.set_gradient_accumulation_boundary(last)
        return super().training_step(*args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Around a micro-batch that is not the last of its window: the engine has been told."""
        yield

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run the engine's backward pass; the Trainer has divided the loss by the window's length."""
        assert self.lightning_module is not None
        closure_loss = super().backward(closure_loss, optimizer, *args, scale_wrt_gas=False, **kwargs)
        if self.stage == 3 and not self.lightning_module.automatic_optimization:
            # else a second backward pass within one training_step would overwrite the gradients of the first
            self.optimizers[0].clear_backward_seen_flag()  # type: ignore[attr-defined]
        return closure_loss

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply the gradients of this optimizer step, before its norm is taken. The engine holds them, not `.grad`.

        Args:
            factor: scalar, not read on the host; call it after the backward pass of the window's last micro-batch.
        """
        wrapped: Any = self.optimizers[0]
        wrapped.external_loss_scale = wrapped.loss_scale / factor
        wrapped.custom_loss_scaler = True

    @contextmanager
    def step_with_veto(self, veto: Callable[[Tensor], bool]) -> Iterator[None]:
        """Inside the `with`, skip each step for which `veto` returns True: weights and state stay, a scheduler goes on.

        DeepSpeed clips and steps in one call, and skips only a step that overflowed: it takes this one for an overflow.

        Args:
            veto: called once a step, on every rank, with the norm of all gradients before the clip and without the loss
                scale, a scalar fp32 tensor; infinite if a gradient is infinite or NaN, or if DeepSpeed found an
                overflow.
        """
        engine, zero = self.deepspeed_engine, cast(Any, self.optimizers[0])
        measure = "scaled_global_norm" if hasattr(zero, "scaled_global_norm") else "_get_norm_groups"  # stages 1, 2; 3
        measured, update_scale = getattr(zero, measure), zero._update_scale
        norms: list[Any] = []

        def measure_and_keep(*args: Any, **kwargs: Any) -> Any:
            result = measured(*args, **kwargs)
            norms[:] = result if isinstance(result, list | tuple) else [result]
            return result

        def ask_and_update_scale(overflow: bool) -> None:
            scale = zero.loss_scale
            update_scale(overflow)
            parts = torch.stack(
                [torch.as_tensor(norm, dtype=torch.float32, device=engine.device) for norm in norms or [-1]]
            )
            norms.clear()
            # DeepSpeed writes -1 for a norm that is not finite
            fine = (parts >= 0).all() & torch.tensor(not overflow, device=parts.device)
            norm = torch.where(fine, torch.linalg.vector_norm(parts) / scale, torch.inf)
            if veto(norm) and not zero.overflow:
                zero.overflow = True
                if engine.lr_scheduler is not None:
                    engine.lr_scheduler.step()  # which DeepSpeed leaves out after an overflow

        with replaced(zero, measure, measure_and_keep), replaced(zero, "_update_scale", ask_and_update_scale):
            yield

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Let the engine clip and step."""
        try:
            return super().optimizer_step(*args, **kwargs)
        finally:
            vars(self.optimizers[0]).update(custom_loss_scaler=False, external_loss_scale=None)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """An empty dict: each process writes its own part."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a folder; an older one of that name is there until the new one is whole."""
        if storage_options is not None:
            raise UsageError(f"storage_options={storage_options}: DeepSpeed writes to a file system and takes none")
        path = Path(self.broadcast(filepath))
        states, record = states_to_save(self.deepspeed_engine, checkpoint), record_of(checkpoint)
        self._folder_writer.save(path, states, write_states, record, self.checkpoint_io)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load this process's part of weights and optimizer state, and return the rest."""
        module: Any = self.lightning_module
        path = self.broadcast(checkpoint_path)
        layout = read_together(lambda: read_layout(path))
        verify_together(layout.path, self.checkpoint_io)
        if module.trainer.state.fn != "fit":
            return self._load_weights(module, layout)
        layout.refuse_other(self.stage, self.world_size, self.precision_plugin.precision)
        loaded = super().load_checkpoint(layout.path, weights_only)
        assert isinstance(self.config, dict)
        self.optimizers[0].clip_grad = self.config["gradient_clipping"]  # type: ignore[attr-defined]
        return loaded

    def _load_weights(self, module: Any, layout: Layout) -> dict[str, Any]:
        # DeepSpeed's own way fails at stage 3 without an optimizer, and knows one number of processes only
        plain = read_weights(layout) if self.is_global_zero else {"state_dict": {}}
        compares = module.strict_loading and self.is_global_zero
        own = module.state_dict(keep_vars=True)
        wrong = self.broadcast(differing_weights(own, plain["state_dict"]) if compares else None)
        if wrong:
            raise UsageError(f"the checkpoint {layout.path} is of another model: {wrong}")
        self._restore_zero_state(plain, strict=module.strict_loading)
        tensors = [*module.parameters(), *module.buffers()]  # DeepSpeed has given those with `ds_id` what rank 0 loaded
        broadcast((tensor for tensor in tensors if not hasattr(tensor, "ds_id")), self.root_device)
        return self.broadcast({key: value for key, value in plain.items() if key != "state_dict"})


def zero_config(stage: int, offload_optimizer: bool, offload_parameters: bool) -> dict[str, Any]:
    """DeepSpeed's settings, without the sizes that depend on the model."""
    zero: dict[str, Any] = {"stage": stage}
    if offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if offload_parameters:
        zero["offload_param"] = {"device": "cpu"}
    return {
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # its own for the host is compiled; torch's fused one is there already
        "train_micro_batch_size_per_gpu": 1,  # only a rate of samples that DeepSpeed reports depends on it
    }


def fitting_sizes(module: nn.Module) -> dict[str, int]:
    """Sizes that fit the model: buffers of a sixteenth of it at most; stage 3 keeps vectors (norms, biases) whole."""
    sizes = [(whole_numel(p), len(getattr(p, "ds_shape", p.shape))) for p in module.parameters()]
    bucket = min(_MAX_BUCKET, max(sum(numel for numel, _ in sizes) // 16, 16_384))
    vectors = max((numel for numel, dim in sizes if dim < 2), default=0)
    return {
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "stage3_prefetch_bucket_size": min(bucket, 50_000_000),
        "stage3_param_persistence_threshold": min(vectors, _MAX_PERSISTENT),
    }


def refuse_settings(strategy: Any, trainer: Any) -> None:
    """Refuse options, a device, a precision, a plugin or a clip that DeepSpeed does not support."""
    if strategy.stage not in get_args(Stage):
        raise UsageError(f"stage={strategy.stage!r}: give 1, 2 or 3")
    if strategy.offload_parameters and strategy.stage != 3:
        raise UsageError(
            f"offload_parameters=True with stage={strategy.stage}, which keeps weights whole: set stage to 3"
        )
    plugin, device = strategy.precision_plugin, strategy.root_device.type
    if device not in ("cpu", "cuda"):
        raise UsageError(f"trainer.accelerator={device}: DeepSpeedZeROStrategy runs on cuda and cpu; use FSDP2Strategy")
    if not is_a(plugin, "DeepSpeedPrecision"):
        PRECISION_PLUGIN.check(strategy, f"plugins: {type(plugin).__name__}")
    if plugin.precision.startswith("16") and device == "cpu":
        raise UsageError(
            f"trainer.precision={plugin.precision} on a CPU: DeepSpeed has fp16 on GPUs only; set bf16-mixed"
        )
    if trainer.gradient_clip_algorithm == "value" and trainer.gradient_clip_val:
        raise UsageError(
            "gradient_clip_algorithm=value: DeepSpeed clips by norm only; set it to norm, or use FSDP2Strategy"
        )


def refuse_accelerator(strategy: Any) -> None:
    """Refuse a device that is not DeepSpeed's own choice, or its absence."""
    device = strategy.root_device.type
    chosen = load_deepspeed().accelerator.get_accelerator().device_name()
    if chosen != device:
        raise UsageError(
            f"trainer.accelerator={device}, but DeepSpeed has chosen {chosen}: set the environment variable "
            f"DS_ACCELERATOR={device}"
        )


def refuse_optimizers(module: nn.Module, optimizers: Sequence[Any], schedulers: Sequence[Any]) -> None:
    """Refuse several optimizers or none, several schedulers, and an optimizer that needs the parameters' shapes."""
    if len(optimizers) != 1 or len(schedulers) > 1:
        raise UsageError(
            f"{type(module).__name__}.configure_optimizers gives {len(optimizers)} optimizers and {len(schedulers)} "
            "schedulers, DeepSpeed takes one optimizer and at most one scheduler: join them, or use FSDP2Strategy"
        )
    refuse_limits(optimizers[0], "flat parameters")
