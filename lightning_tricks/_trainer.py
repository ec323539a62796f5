"""Lightning's private state: the only file that reads it, and that compares the class names of Lightning's objects.

Each function names the place in Lightning 2.6.6 from which it was read. `tests/test_trainer.py` compares each answer
with the behaviour of a Trainer, and fails where another version differs. This file imports no Lightning, because a
Trainer may be of either package, `lightning` or `pytorch_lightning`.
"""

import importlib
import subprocess
import threading
from pathlib import Path
from types import FrameType
from typing import Any

# Functions of Lightning's module `trainer/call.py` that call one hook of each callback, of the module, of the strategy.
HOOK_CALLERS = ("_call_callback_hooks", "_call_lightning_module_hook", "_call_strategy_hook")
# The function by which `loops/training_epoch_loop.py` finds out which arguments a hook takes.
SIGNATURE_CHECK = "is_param_in_hook_signature"


def is_accumulating(trainer: Any) -> bool:
    """Whether the running micro-batch is followed by another one of the same optimizer step.

    Read from `_TrainingEpochLoop._should_accumulate` (loops/training_epoch_loop.py).
    """
    return bool(trainer.fit_loop._should_accumulate())


def is_last_step(trainer: Any) -> bool:
    """Whether training stops after the running optimizer step, as far as that is known: at `max_steps`, or asked to.

    The end of the last epoch does not count. Read from `_FitLoop.done` (loops/fit_loop.py).
    """
    loop = trainer.fit_loop
    at_end = loop.max_steps != -1 and loop.epoch_loop.global_step >= loop.max_steps
    return at_end or (trainer.should_stop and loop._can_stop_early)


def validation_follows(trainer: Any) -> bool:
    """In `on_train_batch_end`: whether validation comes before the next batch. If by time, every rank must ask.

    Read from `_TrainingEpochLoop.on_advance_end` and `_EvaluationLoop.skip` (loops/training_epoch_loop.py,
    loops/evaluation_loop.py).
    """
    loop = trainer.fit_loop.epoch_loop
    answer = bool(loop._should_check_val_fx(trainer.fit_loop._data_fetcher))
    if answer and loop.val_loop._combined_loader is not None:
        answer = not loop.val_loop.skip  # a loader without batches
    if trainer._val_check_time_interval is not None:
        answer = trainer.strategy.broadcast(answer)  # the clocks of the ranks differ
    return answer


def has_default_checkpoint_io(trainer: Any) -> bool:
    """Whether checkpoints are read and written by Lightning's own plugin, and by no other (strategies/strategy.py)."""
    return type(trainer.strategy.checkpoint_io).__name__ == "TorchCheckpointIO"


def logging_step(trainer: Any) -> int:
    """The step at which `self.log` logs the running batch: the number of batches that have ended in a step.

    With several optimizers `trainer.global_step` counts the steps of each, this does not. Read from
    `_LoggerConnector.log_metrics` (trainer/connectors/logger_connector/logger_connector.py).
    """
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def batch_progress(trainer: Any) -> Any:
    """The counters of training micro-batches, `current` in this epoch and `total`, which a checkpoint restores.

    Read from `_TrainingEpochLoop.batch_progress` (loops/training_epoch_loop.py), a `_BatchProgress`.
    """
    return trainer.fit_loop.epoch_loop.batch_progress


def is_restarting(trainer: Any) -> bool:
    """Whether training goes on from a checkpoint. Read from `_Loop.restarting` (loops/loop.py)."""
    return bool(trainer.fit_loop.restarting)


def data_rank(trainer: Any) -> tuple[int, int]:
    """(rank, world size) among the processes that see different data; (0, 1) without a Trainer.

    With tensor parallelism there are fewer of them than processes. `distributed_sampler_kwargs` is public.
    """
    kwargs = trainer.distributed_sampler_kwargs if trainer is not None else None
    return (kwargs["rank"], kwargs["num_replicas"]) if kwargs else (0, 1)


def trainer_of(module: Any) -> Any:
    """The Trainer that a LightningModule is attached to; None for one that is not, and for any other module.

    Read from `LightningModule.trainer` (core/module.py), which raises where there is none.
    """
    return getattr(module, "_trainer", None)


def attach_stand_in(module: Any, stand_in: Any) -> None:
    """Let `LightningModule.trainer` of a copy answer with a stand-in for its Trainer.

    Written past its setter, which keeps a weak reference only, and without a Fabric, which its getter asks first
    (core/module.py).
    """
    vars(module).update(_trainer=stand_in, _fabric=None)


def is_a(instance: Any, *class_names: str) -> bool:
    """Whether an object is of a class with one of these names: `isinstance` would ask for one Lightning package."""
    return any(cls.__name__ in class_names for cls in type(instance).__mro__)


def lightning_file(trainer: Any, name: str) -> Any:
    """Lightning's Python module `name`, such as `trainer.call`, from the package that a Trainer is of."""
    classes = (cls.__module__ for cls in type(trainer).__mro__)
    package = next(module for module in classes if module.endswith(".trainer.trainer")).removesuffix(".trainer.trainer")
    return importlib.import_module(f"{package}.{name}")


def set_running_hook(module: Any, name: str | None) -> str | None:
    """Name the running hook, by which `self.log` decides when to log; returns the name from before.

    Read from `_call_lightning_module_hook` (trainer/call.py). Faster than `Module.__setattr__`.
    """
    state = module.__dict__
    before, state["_current_fx_name"] = state["_current_fx_name"], name
    return before


def running_call(frame: FrameType) -> Any:
    """The bound method behind `fit`, `validate`, `test` or `predict`, if `frame` is the one that runs it; else None.

    Each such call has a bound method of its own. Every exception of the call passes this frame. Read from
    `_call_and_handle_interrupt` (trainer/call.py).
    """
    return frame.f_locals.get("trainer_fn") if frame.f_code.co_name == "_call_and_handle_interrupt" else None


def launched_processes(trainer: Any) -> list[subprocess.Popen]:
    """The other ranks' processes that this one has started, by `_SubprocessScriptLauncher`; those of torchrun are not.

    Read from strategies/launchers/subprocess_script.py.
    """
    processes = getattr(trainer.strategy.launcher, "procs", [])  # multiprocessing's launcher has others
    return [process for process in processes if isinstance(process, subprocess.Popen)]


def dismiss_process_observer() -> None:
    """Let the `launched_processes` end with any exit code: a thread of Lightning kills this process for one but 0.

    Read from `_ChildProcessObserver` (fabric/strategies/launchers/subprocess_script.py).
    """
    for thread in threading.enumerate():
        if is_a(thread, "_ChildProcessObserver"):
            vars(thread)["_child_processes"] = []


def signal_connector(trainer: Any) -> Any:
    """The object whose `register_signal_handlers` installs Lightning's handlers after `setup`, before the sanity check.

    Its `teardown` puts those of before back: the last thing that a Trainer does at its end, after an exception too.
    Read from `_SignalConnector` (trainer/connectors/signal_connector.py) and `Trainer._teardown`.
    """
    return trainer._signal_connector


def sigterm_broadcast(trainer: Any) -> tuple[Any, str] | None:
    """Owner and name of the method by which rank 0 tells the others of a SIGTERM, in each micro-batch; None without it.

    Read from `_TrainingEpochLoop._broadcast_sigterm_tensor` (loops/training_epoch_loop.py).
    """
    owner, name = trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"
    return (owner, name) if hasattr(owner, name) else None


def validation_is_due(trainer: Any) -> bool:
    """Whether a validation comes after the micro-batch that ends now.

    Read from `on_advance_end` of `_TrainingEpochLoop` (loops/training_epoch_loop.py).
    """
    loop = trainer.fit_loop.epoch_loop
    return bool(loop._should_check_val_fx(trainer.fit_loop._data_fetcher)) and not loop.val_loop.skip


def epoch_is_over(trainer: Any) -> bool:
    """Whether the running batch is the last one of its epoch, or the last one was and the next has not begun.

    Read from `_TrainingEpochLoop._num_ready_batches_reached` (loops/training_epoch_loop.py).
    """
    return bool(trainer.fit_loop.epoch_loop._num_ready_batches_reached())


def go_on_with_next_epoch(trainer: Any) -> None:
    """After a restart from the end of an epoch, begin the next one, with the hooks of its start.

    Lightning does so where `max_epochs` counts; where `max_steps` does, it goes on within the epoch that has ended.
    Call it in `on_train_start`. Read from `_FitLoop.restarting`, `reset` and `on_advance_start` (loops/fit_loop.py).
    """
    loop = trainer.fit_loop
    if not loop._restarting:
        return
    for tracker in (loop.epoch_progress.current, loop.epoch_progress.total):
        tracker.completed = tracker.processed
    loop._restarting = loop.epoch_loop.restarting = False
    loop.reset_restart_stage()
    loop.epoch_loop.reset_restart_stage()


def reopen_epoch(checkpoint: dict[str, Any]) -> None:
    """Take the epoch of a checkpoint as one that has not ended, where only the run had ended in it.

    Read from `_FitLoop.update_restart_stage` and `done` (loops/fit_loop.py).
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_progress"]
    for tracker in (progress["current"], progress["total"]):
        tracker["started"] = tracker["ready"]
        tracker["processed"] = tracker["completed"] = tracker["ready"] - 1


def prefetched_batches(trainer: Any) -> int:
    """Batches that were fetched before the running one ended: one where the loaders have no length.

    Read from `_PrefetchDataFetcher.batches` (loops/fetchers.py).
    """
    return len(getattr(trainer.fit_loop._data_fetcher, "batches", ()))


def set_consumed(trainer: Any, index: int) -> None:
    """Tell a CombinedLoader that one of its loaders has run to its end before: an epoch lasts until all have.

    Read from `_MaxSizeCycle._consumed` (utilities/combined_loader.py); its other modes have no such list.
    """
    consumed = getattr(trainer.fit_loop._combined_loader._iterator, "_consumed", None)
    if consumed:
        consumed[index] = True


def shift_micro_batches(checkpoint: dict[str, Any], by: int) -> None:
    """Change the number of training micro-batches that a checkpoint says are done, in its epoch and in all.

    Read from `_Loop.state_dict` (loops/loop.py) and `_BatchProgress` (loops/progress.py).
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for tracker in (progress["current"], progress["total"]):
        for name in tracker:
            tracker[name] += by


def slurm_environment(trainer: Any) -> Any:
    """Lightning's SLURMEnvironment if the Trainer runs in one, else None.

    Read from `_AcceleratorConnector.cluster_environment` (trainer/connectors/accelerator_connector.py).
    """
    environment = trainer._accelerator_connector.cluster_environment
    return environment if is_a(environment, "SLURMEnvironment") else None


def slurm_checkpoint(trainer: Any) -> Path:
    """The path of the next checkpoint from which a fit under SLURM without a `ckpt_path` goes on.

    Read from `_CheckpointConnector.hpc_save_path` (trainer/connectors/checkpoint_connector.py).
    """
    return Path(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))


def configured_optimizers(module: Any) -> tuple[list[Any], list[Any]]:
    """Optimizers and scheduler configurations that `configure_optimizers` returns, each in a list, checked.

    Read from `_init_optimizers_and_lr_schedulers` (core/optimizer.py), which makes up a `_MockOptimizer` for a module
    that has none; here the list is empty.
    """
    optimizer = lightning_file(module.trainer, "core.optimizer")
    optimizers, schedulers = optimizer._init_optimizers_and_lr_schedulers(module)
    return [found for found in optimizers if not is_a(found, "_MockOptimizer")], schedulers


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside a LightningOptimizer, or the one given (core/optimizer.py)."""
    return getattr(optimizer, "optimizer", optimizer)


def optimizer_index(trainer: Any, optimizer: Any) -> int:
    """Index of an optimizer, wrapped or not, among the Trainer's."""
    inner = unwrapped(optimizer)
    return next(i for i, other in enumerate(trainer.optimizers) if unwrapped(other) is inner)


def steps_between_saves(trainer: Any) -> list[int]:
    """`every_n_train_steps` of each ModelCheckpoint that has one. Read from callbacks/model_checkpoint.py."""
    every = [getattr(callback, "_every_n_train_steps", 0) for callback in trainer.checkpoint_callbacks]
    return [steps for steps in every if steps]


def last_saved_step(saver: Any) -> int:
    """`trainer.global_step` when a ModelCheckpoint last saved, 0 if never. Read from callbacks/model_checkpoint.py."""
    return int(getattr(saver, "_last_global_step_saved", 0))


def has_versions(logger: Any) -> bool:
    """Whether a logger writes into numbered folders `version_N`, as TensorBoardLogger and CSVLogger do."""
    return hasattr(logger, "_get_next_version")


def chosen_version(logger: Any) -> int | str | None:
    """The version that a logger was given or has taken; None before that, and for a logger without versions.

    Read from `_version` of loggers/tensorboard.py and loggers/csv_logs.py: their public `version` takes one when asked.
    """
    return getattr(logger, "_version", None)


def choose_version(logger: Any, version: int | str) -> None:
    """Give a logger its version, before it writes."""
    logger._version = version


def next_version(logger: Any) -> int:
    """The first number above those of the folders that a logger finds (`_get_next_version`)."""
    return int(logger._get_next_version())


def shows_hp_metric(logger: Any) -> bool:
    """Whether a TensorBoardLogger has written `hp_metric` beside the module's hyper-parameters (`log_hyperparams`)."""
    return bool(getattr(logger, "hparams", None) and getattr(logger, "_default_hp_metric", False))


def compiled_steps(module: Any) -> dict[str, Any] | None:
    """The steps of a LightningModule from before `torch.compile(module)`; None where it is not compiled.

    Read from `from_compiled` (utilities/compile.py).
    """
    return getattr(module, "_compiler_ctx", None)


def uncopied(module: Any) -> list[Any]:
    """Objects held by a LightningModule that a copy shares with it: its device mesh, and its `compiled_steps`.

    Read from `LightningModule.__init__` (core/module.py).
    """
    return [getattr(module, "_device_mesh", None), compiled_steps(module)]


def set_device_mesh(module: Any, mesh: Any) -> None:
    """Let `LightningModule.device_mesh` answer, as ModelParallelStrategy does (strategies/model_parallel.py)."""
    module._device_mesh = mesh
