"""Lightning's objects: their class by its name, a module and its optimizers, what saves checkpoints, loggers."""

import importlib
import os
from typing import Any


def is_a(instance: Any, *class_names: str) -> bool:
    """Whether an object is of a class with one of these names: `isinstance` would ask for one Lightning package."""
    return any(cls.__name__ in class_names for cls in type(instance).__mro__)


def lightning_file(trainer: Any, name: str) -> Any:
    """Lightning's Python module `name`, such as `trainer.call`, from the package that a Trainer is of."""
    classes = (cls.__module__ for cls in type(trainer).__mro__)
    package = next(module for module in classes if module.endswith(".trainer.trainer")).removesuffix(".trainer.trainer")
    return importlib.import_module(f"{package}.{name}")


# ---- a LightningModule and its optimizers


def trainer_of(module: Any) -> Any:
    """The Trainer that a LightningModule is attached to; None for one that is not, and for any other module.

    Read from `LightningModule.trainer` (core/module.py), which raises where there is none.
    """
    return getattr(module, "_trainer", None)


def configured_optimizers(module: Any) -> tuple[list[Any], list[Any]]:
    """Optimizers and scheduler configurations that `configure_optimizers` returns, each in a list, checked.

    Read from `_init_optimizers_and_lr_schedulers` (core/optimizer.py), which makes up a `_MockOptimizer` for a module
    that has none; here the list is empty.
    """
    optimizer = lightning_file(module.trainer, "core.optimizer")
    optimizers, schedulers = optimizer._init_optimizers_and_lr_schedulers(module)
    return [found for found in optimizers if not is_a(found, "_MockOptimizer")], schedulers


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside a LightningOptimizer, or the one given (core/optimizer.py).

    Asks for the class: optimizers such as Lookahead have an attribute `optimizer` of their own.
    """
    return optimizer.optimizer if is_a(optimizer, "LightningOptimizer") else optimizer


def optimizer_index(trainer: Any, optimizer: Any) -> int:
    """Index of an optimizer, wrapped or not, among the Trainer's."""
    inner = unwrapped(optimizer)
    return next(i for i, other in enumerate(trainer.optimizers) if unwrapped(other) is inner)


def clip_hook(trainer: Any) -> tuple[Any, str]:
    """Owner and name of the method between the hooks `on_before_optimizer_step` and each step, which calls the clip.

    In manual optimization too, where it clips nothing. It gets the module and the optimizer. Read from
    `Precision._after_closure` and `_clip_gradients` (plugins/precision/precision.py).
    """
    return trainer.precision_plugin, "_clip_gradients"


def compiled_steps(module: Any) -> dict[str, Any] | None:
    """The steps of a LightningModule from before `torch.compile(module)`; None where it is not compiled.

    Read from `from_compiled` (utilities/compile.py).
    """
    return getattr(module, "_compiler_ctx", None)


def set_device_mesh(module: Any, mesh: Any) -> None:
    """Let `LightningModule.device_mesh` answer, as ModelParallelStrategy does (strategies/model_parallel.py)."""
    module._device_mesh = mesh


# ---- checkpoint callbacks, the checkpoint plugin, loggers


def has_default_checkpoint_io(trainer: Any) -> bool:
    """Whether checkpoints are read and written by Lightning's own plugin, and by no other (strategies/strategy.py)."""
    return type(trainer.strategy.checkpoint_io).__name__ == "TorchCheckpointIO"


def steps_between_saves(trainer: Any) -> list[int]:
    """`every_n_train_steps` of each ModelCheckpoint that has one."""
    every = [steps_between_saves_of(callback) for callback in trainer.checkpoint_callbacks]
    return [steps for steps in every if steps]


def steps_between_saves_of(saver: Any) -> int:
    """`every_n_train_steps` of a ModelCheckpoint, 0 where it has none. Read from callbacks/model_checkpoint.py."""
    return int(getattr(saver, "_every_n_train_steps", 0) or 0)


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


def is_run_by_cli(trainer: Any) -> bool:
    """Whether LightningCLI runs it, which saves the settings by a callback."""
    return any(is_a(callback, "SaveConfigCallback") for callback in trainer.callbacks)


def shows_hp_metric(logger: Any) -> bool:
    """Whether a TensorBoardLogger has written `hp_metric` beside the module's hyper-parameters (`log_hyperparams`)."""
    return bool(getattr(logger, "hparams", None) and getattr(logger, "_default_hp_metric", False))


def folder_of_run(trainer: Any) -> str:
    """The folder of a run, in which ModelCheckpoint makes `checkpoints`, whatever the logger.

    Right on rank 0, where a logger knows its version, and once the Trainer has opened the loggers (before `setup`). It
    does not communicate. Of loggers other than Lightning's TensorBoardLogger and CSVLogger, `trainer.log_dir` is the
    folder that all their runs share. Read from `__resolve_ckpt_dir` of callbacks/model_checkpoint.py.
    """
    if not trainer.loggers:
        return str(trainer.default_root_dir)
    logger = trainer.loggers[0]
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return os.path.join(logger.save_dir or trainer.default_root_dir, str(logger.name), version)
