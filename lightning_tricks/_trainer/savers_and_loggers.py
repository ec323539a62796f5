"""The objects that write files: checkpoint callbacks, the checkpoint plugin, loggers."""

import os
from typing import Any


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
