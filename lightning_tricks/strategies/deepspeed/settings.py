"""DeepSpeed's package, imported when it is needed, its settings for a run, and the runs that it does not support."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Literal, get_args

from torch import nn

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.tensors import whole_numel
from lightning_tricks._trainer import is_a
from lightning_tricks._trainer.refusals import refuse
from lightning_tricks.optim.limits import refuse_limits

Stage = Literal[1, 2, 3]
_MAX_BUCKET = 200_000_000  # elements of a buffer, Lightning's default
_MAX_PERSISTENT = 100_000  # elements, DeepSpeed's default for the size below which stage 3 does not shard

INSTALL = "pip install setuptools wheel && DS_BUILD_OPS=0 pip install --no-build-isolation 'deepspeed>=0.19.8'"


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
        refuse("a precision plugin", strategy, f"plugins: {type(plugin).__name__}")
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


def check_installed() -> None:
    """Refuse to go on without the package; it is not imported."""
    if "deepspeed" not in sys.modules and find_spec("deepspeed") is None:
        raise UsageError(f"strategy: DeepSpeedZeROStrategy needs deepspeed: {INSTALL}")


def load_deepspeed() -> Any:
    """The package `deepspeed`, unless it is missing or does not import here."""
    check_installed()
    try:
        import deepspeed
    except Exception as error:  # it probes compilers and devices while it is imported
        raise UsageError(
            f"strategy: deepspeed is installed but does not import ({_first_line(error)}): {INSTALL} --force-reinstall"
        ) from error
    return deepspeed


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
