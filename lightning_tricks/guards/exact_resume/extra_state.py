"""The extra state that ExactResume saves: the part of a run that Lightning's checkpoints leave out.

It is:

- `trainer.callback_metrics`, by which a ModelCheckpoint and a ReduceLROnPlateau judge until the next validation.
- The update of a ReduceLROnPlateau that is due when a checkpoint is saved.
- The micro-batches of a step that a GradientAccumulationScheduler has set at the start of the epoch.
- The parameters that a callback such as BackboneFinetuning has unfrozen, which is frozen anew when a run begins.
"""

from contextlib import ExitStack
from typing import Any

import torch

from lightning_tricks._core.replaced import replaced
from lightning_tricks._trainer.lightning import Module, rank_zero_warn
from lightning_tricks._trainer.loop import epoch_means, is_restarting, plateau_updates, set_callback_metrics
from lightning_tricks._trainer.objects import is_a

# Lightning's callbacks, and their subclasses, beside which a resume is another run: why, and what to do. The others are
# exact, or leave training alone; docs/exact_resume.md has all of them.
NOT_EXACT = {
    "StochasticWeightAveraging": "saves its average in no checkpoint: take TailAverage or EMA",
    "LearningRateFinder": "searches again at each start: search once, and set the learning rate that it finds",
    "BatchSizeFinder": "searches again at each start: search once, and set the batch size that it finds",
    "ModelPruning": "saves pruned weights without their masks: prune after training, or do not resume",
    "SpikeDetection": "of Lightning 2.6 fails when a checkpoint is saved: take SpikeRollback or StepGuard",
}


def warn_of_other_callbacks(trainer: Any) -> None:
    """Name each of Lightning's callbacks beside which a resume is not exact."""
    for callback in trainer.callbacks:
        for name, why in NOT_EXACT.items():
            if is_a(callback, name):
                rank_zero_warn(f"ExactResume: beside {type(callback).__name__} a resume is not exact: it {why}")


def read(trainer: Any) -> dict[str, Any]:
    """The state of this process, as of the end of the batches that are done; in plain types."""
    metrics = {name: value.detach().cpu() for name, value in trainer.callback_metrics.items()}
    state: dict[str, Any] = {"metrics": metrics, "plateaus": plateau_updates(trainer)}
    if any(is_a(callback, "BaseFinetuning") for callback in trainer.callbacks):
        state["trained"] = _trained(trainer.lightning_module)
    return state


def put_back(trainer: Any, state: dict[str, Any]) -> None:
    """Put the metrics back, and the parameters that are trained; call it in `on_train_start`."""
    device = trainer.strategy.root_device
    set_callback_metrics(trainer, {name: value.to(device) for name, value in state["metrics"].items()})
    if "trained" in state:
        _set_trained(trainer.lightning_module, state["trained"])


def catch_up(trainer: Any, state: dict[str, Any]) -> None:
    """Make the updates of ReduceLROnPlateau that the checkpoint's run made after its save. Idempotent."""
    for config, updates in zip(trainer.lr_scheduler_configs, state["plateaus"], strict=False):
        scheduler: Any = config.scheduler
        if updates is None or not config.reduce_on_plateau or scheduler.last_epoch >= updates:
            continue
        if (metric := trainer.callback_metrics.get(config.monitor)) is not None:
            trainer.lightning_module.lr_scheduler_step(scheduler, metric)


def follow_accumulation(trainer: Any, replacements: ExitStack) -> None:
    """On resume within an epoch, let a GradientAccumulationScheduler set the micro-batches of a step when it starts."""
    for callback in trainer.callbacks:
        if hasattr(callback, "get_accumulate_grad_batches"):
            start = callback.on_train_start

            def start_and_set(trainer: Any, module: Module, callback: Any = callback, start: Any = start) -> None:
                start(trainer, module)
                if is_restarting(trainer):
                    trainer.accumulate_grad_batches = callback.get_accumulate_grad_batches(trainer.current_epoch)

            replacements.enter_context(replaced(callback, "on_train_start", start_and_set))


def warn_of_epoch_means(trainer: Any) -> None:
    """Name each scheduler whose metric a run that goes on in mid-epoch has over the rest of the epoch only."""
    means = epoch_means(trainer)
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and config.interval == "epoch" and config.monitor in means:
            rank_zero_warn(
                f"ExactResume: {type(config.scheduler).__name__} monitors {config.monitor!r}, a mean over the batches "
                "of an epoch, of which a run that resumes in mid-epoch has the rest only, so its learning rates may "
                "differ: monitor a metric of validation, or save at the ends of epochs"
            )


def _trained(module: Module) -> dict[str, list[str]]:
    """Names of the parameters that get gradients, and of the norms that keep running statistics."""
    norms = [name for name, norm in module.named_modules() if getattr(norm, "track_running_stats", False)]
    return {"parameters": [name for name, one in module.named_parameters() if one.requires_grad], "norms": norms}


def _set_trained(module: Module, trained: dict[str, list[str]]) -> None:
    parameters, norms = set(trained["parameters"]), set(trained["norms"])
    for name, parameter in module.named_parameters():
        parameter.requires_grad = name in parameters
    for name, norm in module.named_modules():
        if isinstance(norm, torch.nn.modules.batchnorm._BatchNorm):
            norm.track_running_stats = name in norms
