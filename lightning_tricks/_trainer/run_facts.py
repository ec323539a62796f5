"""What kind of run this is: the one place that answers it, for callbacks, mixins, plugins and the command line.

Nobody else asks for the class of a strategy, or whether it has some method (a test greps for both).
"""

from typing import Any, Literal

import torch.distributed as dist

from lightning_tricks._core.protocols import KnowsSamples
from lightning_tricks._trainer.objects import is_a

WeightsLayout = Literal["whole", "shards", "foreign shards", "flat", "engine", "foreign engine"]


def weights_layout(strategy: Any) -> WeightsLayout:
    """The form in which a rank of a strategy holds the weights.

    - "whole";
    - "shards": DTensors that FSDP2Strategy saves and loads by name; "foreign shards": those of Lightning's
      ModelParallelStrategy;
    - "flat": FSDP1's parameters without their shapes;
    - "engine": DeepSpeed, which also does the backward pass, the clip and the step, between no hooks of Lightning:
      under DeepSpeedZeROStrategy, whose step can be scaled and refused; "foreign engine": under Lightning's.

    A strategy of the collection says so itself, in an attribute `weights_layout`.
    """
    own: WeightsLayout | None = getattr(strategy, "weights_layout", None)
    if own is not None:
        return own
    if is_a(strategy, "DeepSpeedStrategy"):
        return "foreign engine"
    if is_a(strategy, "FSDPStrategy"):
        return "flat"
    return "foreign shards" if is_a(strategy, "ModelParallelStrategy") else "whole"


def data_rank(trainer: Any) -> tuple[int, int]:
    """(rank, number of ranks) among the processes that see different data; (0, 1) without a Trainer.

    With tensor parallelism there are fewer of them than processes. `distributed_sampler_kwargs` is public.
    """
    kwargs = trainer.distributed_sampler_kwargs if trainer is not None else None
    return (kwargs["rank"], kwargs["num_replicas"]) if kwargs else (0, 1)


def planned_data_ranks(strategy: Any, devices: int, num_nodes: int) -> int:
    """Number of processes that will see different data in a run that has not begun; `strategy` as a recipe gives it.

    Read from `ModelParallelStrategy.setup_environment` (strategies/model_parallel.py).
    """
    if weights_layout(strategy) == "shards":
        return int(strategy.dims_of(devices * num_nodes).data_ranks)
    if is_a(strategy, "ModelParallelStrategy"):
        size = strategy._data_parallel_size
        return num_nodes if size == "auto" else int(size)
    return devices * num_nodes


def opens_on_any_number(strategy: Any) -> bool:
    """Whether checkpoints of a strategy, an object or a Trainer's word, open on another number of processes."""
    if isinstance(strategy, str):
        return strategy == "auto" or strategy.startswith("ddp")
    return weights_layout(strategy) in ("shards", "whole")


def loss_ranks(trainer: Any) -> int:
    """Number of processes over which `strategy.reduce` joins a loss, and gradients are averaged: those that see
    different tokens. Under Lightning's ModelParallelStrategy all of them, of which some see the same.
    """
    strategy = trainer.strategy
    return strategy.dims.loss_ranks if weights_layout(strategy) == "shards" else trainer.world_size


def stage_groups(trainer: Any) -> tuple[Any, Any] | None:
    """Process groups of a rank that has some layers of the model: of the ranks with the same ones, and of the pipeline.

    None where each rank has all layers.
    """
    groups = getattr(trainer.strategy, "groups", None) if weights_layout(trainer.strategy) == "shards" else None
    return None if groups is None or groups.dims.pipeline == 1 else (groups.stage, groups.pipeline)


def random_rank(trainer: Any) -> int:
    """Process whose random numbers this one draws, see `ParallelDims.random_rank`: its own but for tensor ranks."""
    strategy = trainer.strategy
    rank: int = trainer.global_rank
    return strategy.dims.random_rank(rank) if weights_layout(strategy) == "shards" else rank


def equal_replicas(trainer: Any) -> Any:
    """The process group of the ranks that have the same whole weights and, in each step, the same gradients; or None.

    Under DDP all of them, unless a hook replaces its reduction: of post-local SGD, the weights differ between averages.
    Read from `DDPStrategy.__init__` (strategies/ddp.py).
    """
    strategy = trainer.strategy
    if not is_a(strategy, "DDPStrategy") or trainer.world_size == 1 or not dist.is_initialized():
        return None
    is_plain = strategy._ddp_comm_hook is None and strategy._model_averaging_period is None
    return dist.group.WORLD if is_plain else None


def is_alone(trainer: Any) -> bool:
    """Whether a run has one process only, so that nothing is joined."""
    return bool(trainer.world_size == 1)


def is_on_one_device(trainer: Any) -> bool:
    """Whether one process trains the module as it is, without a wrapper or hooks of a strategy in its passes."""
    return is_alone(trainer) and is_a(trainer.strategy, "SingleDeviceStrategy")


def reduce_over_all(strategy: Any, tensor: Any, reduce_op: str, group: Any = None) -> Any:
    """Join a tensor over a group, in place where it can be; `strategy.reduce` joins those with other tokens.

    Without a group, over all processes.
    """
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    return strategy.reduce(tensor, group=group, reduce_op=reduce_op)


def enabled_scaler(plugin: Any) -> Any:
    """The GradScaler of a precision plugin, None where it has none or one that is turned off."""
    scaler = getattr(plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def micro_batch(data: Any, loader: Any = None) -> tuple[int | None, int | None]:
    """(samples, tokens) in one micro-batch of one data rank; None where the data do not tell.

    Args:
        data: a data module; one with an int `micro_batch_size`, and `seq_len` in tokens, tells.
        loader: its `batch_size` counts for a data module without a `micro_batch_size`.
    """
    samples, length = getattr(data, "micro_batch_size", None), getattr(data, "seq_len", None)
    samples = samples or getattr(loader, "batch_size", None)
    if not isinstance(samples, int):
        return None, None
    return samples, samples * length if isinstance(length, int) else None


def step_samples(trainer: Any) -> list[tuple[int, int]] | None:
    """First and last position of each run of samples that the running optimizer step takes, of all ranks together.

    Ask before the step is counted: at the latest in a callback's `on_before_optimizer_step`. None for data that are not
    addressed by position; a data module that is has a method `step_samples()`, as TextData and TokenData.
    """
    data: Any = getattr(trainer, "datamodule", None)
    return data.step_samples() if isinstance(data, KnowsSamples) else None


def samples_in_words(runs: list[tuple[int, int]]) -> str:
    """The runs for a message, in the form that `skip_samples` takes: `[[6496, 6503]]`."""
    return str([list(run) for run in runs])
