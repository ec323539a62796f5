"""Answers that Lightning keeps to itself. No other file reads its private state, or asks what class its objects are.

Each function names the place in Lightning 2.6.6 from which it was read; `tests/test_trainer.py` compares the answers
with what a Trainer does, and turns red where another version differs. Nothing here imports Lightning, as a Trainer may
be of either package.
"""

from typing import Any


def is_accumulating(trainer: Any) -> bool:
    """Whether the running micro-batch is followed by another one of the same optimizer step.

    Read from `_TrainingEpochLoop._should_accumulate` (loops/training_epoch_loop.py).
    """
    return bool(trainer.fit_loop._should_accumulate())


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


def uncopied(module: Any) -> list[Any]:
    """Objects held by a LightningModule that a copy shares with it: its device mesh, and torch.compile's settings.

    Read from `LightningModule.__init__` (core/module.py) and `from_compiled` (utilities/compile.py).
    """
    return [getattr(module, "_device_mesh", None), getattr(module, "_compiler_ctx", None)]


def set_device_mesh(module: Any, mesh: Any) -> None:
    """Let `LightningModule.device_mesh` answer, as ModelParallelStrategy does (strategies/model_parallel.py)."""
    module._device_mesh = mesh
