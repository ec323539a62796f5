"""The folder of a run, `save_dir/name/version_N`, with its checkpoints in it."""

import itertools
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import fsspec
from jsonargparse import Namespace

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.foreign_files import check_links
from lightning_tricks._host.address import is_address
from lightning_tricks._host.machine import listed
from lightning_tricks._host.writable import check_folders_of_run
from lightning_tricks._trainer.lightning import pl, rank_zero_info, rank_zero_only, rank_zero_warn
from lightning_tricks._trainer.loop import logging_step
from lightning_tricks._trainer.objects import choose_version, chosen_version, folder_of_run, has_versions, next_version
from lightning_tricks.cli.choose_checkpoint import folder_name, number, relative_to_cwd
from lightning_tricks.cli.recipe_parser import lightning_cli


def expand_save_dirs(trainer: Any) -> None:
    """Expand `~` and variables in the `save_dir` of each logger of a parsed recipe's Trainer.

    Lightning's loggers expand them when they write, but its savers take the text as it is: logs and checkpoints would
    get two folders.
    """
    for logger in listed(trainer, "logger"):
        settings = logger.get("init_args") if isinstance(logger, Namespace) else None
        if settings and settings.get("save_dir"):
            settings.save_dir = os.path.expanduser(os.path.expandvars(settings.save_dir))


def check_folders(trainer: Any) -> None:
    """Refuse folders that the run could not write its logs and checkpoints to."""
    if trainer.is_global_zero:
        check_folders_of_run(trainer.loggers, trainer.checkpoint_callbacks, trainer.default_root_dir)


class RunFolder(pl.Callback):
    """The folders of one run: `choose` is called before the Trainer starts.

    A callback, by which it knows of the first batch, and then says at which step a resumed run goes on.
    """

    def __init__(self) -> None:
        self._started = False
        self.checkpoint: str | None = None  # with which the run goes on
        self._made: list[Path] = []

    def choose(self, command: str, checkpoint: str | None, trainer: Any) -> None:
        """Give each local logger of the Trainer its folder, and make it on rank 0.

        A fit that starts afresh gets the next number, the same for all loggers: it finds no checkpoint of another run.
        One that resumes goes on in the run's folder that holds the checkpoint, or in the newest if checkpoints lie
        elsewhere (`dirpath`); a checkpoint of another recipe starts a new folder. An evaluation writes into a folder of
        its command's name. Loggers that cannot resume get a new number each time, as with Lightning. A start that is
        refused later leaves its folder.

        For a run that goes on it adds a filter of warnings, to be taken back by the caller.
        """
        self.checkpoint = checkpoint
        loggers = [one for one in trainer.loggers if has_versions(one) and not is_address(one.root_dir)]
        free = [logger for logger in loggers if chosen_version(logger) is None]
        next_number = max((next_version(logger) for logger in free), default=0)
        resumable = [logger for logger in free if hasattr(logger, "resume_at")]
        version: Any = command if command != "fit" else None
        if command == "fit" and checkpoint:
            version = _version_to_go_on(checkpoint, trainer, resumable)
        for logger in resumable if version is not None else []:
            choose_version(logger, version)
        fresh = [logger for logger in free if chosen_version(logger) is None]
        while fresh and not self._make(_root(fresh[0]) / f"version_{next_number}"):
            next_number += 1  # another run has just taken it
        for logger in fresh:
            choose_version(logger, next_number)
        for folder in (_root(logger) / folder_name(chosen_version(logger)) for logger in loggers):
            if not self._make(folder):
                check_links(folder)
        if checkpoint and command == "fit" and version is not None:  # the checkpoints there are the run's own
            warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
        for saver in trainer.checkpoint_callbacks if checkpoint and command != "fit" else []:
            if getattr(saver, "dirpath", "") is None:  # otherwise it warns that it saved elsewhere before
                saver.dirpath = os.path.dirname(str(checkpoint))

    def _make(self, folder: Path) -> bool:
        """Make a folder that is not there; False where it was there already, and this run did not make it."""
        if rank_zero_only.rank != 0 or folder in self._made:
            return True
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
        except OSError as error:
            if folder.is_dir():
                return False
            raise UsageError(
                f"{relative_to_cwd(folder)}: the run's folder cannot be made ({error.strerror}): give the logger "
                "another save_dir"
            ) from error
        self._made.append(folder)
        return True

    def on_train_batch_start(self, trainer: "pl.Trainer", *_: Any) -> None:
        """Training has begun; only now is the step of a resumed run known."""
        if not self._started and trainer.ckpt_path:
            rank_zero_info(f"Going on from step {logging_step(trainer)} of {relative_to_cwd(trainer.ckpt_path)}")
        self._started = True

    def on_fit_end(self, trainer: "pl.Trainer", pl_module: Any) -> None:
        """Say that no step was left: otherwise the last lines are those of a run that has trained."""
        if self.checkpoint and not self._started:
            rank_zero_warn(
                f"no step was left to train: {relative_to_cwd(self.checkpoint)} is at step {trainer.global_step}: give "
                "a larger max_steps, max_epochs or total_tokens to go on, or --ckpt_path none to start a new run"
            )


class SaveRecipe(lightning_cli.SaveConfigCallback):
    """Write `config.yaml` into the run's folder, beside its checkpoints; never over that of another run.

    Where another run has left one (no logger, or a logger with a fixed version), the file is `config-v1.yaml` and so
    on, as ModelCheckpoint numbers its files there. An evaluation there writes none. A fit that goes on writes over its
    own, once it has started: a recipe that is refused leaves the file as it was.
    """

    path: str | None = None  # of the file, once it is written

    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Write the file of an evaluation."""
        if trainer.state.fn != "fit":
            super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Write the file of a fit."""
        super().setup(trainer, pl_module, "fit")

    def save_config(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Write the file; Lightning calls it on rank 0."""
        folder, fs = folder_of_run(trainer), fsspec.core.url_to_fs(folder_of_run(trainer))[0]
        text = self.parser.dump(self.config, skip_none=False)
        path = os.path.join(folder, self.config_filename)
        stem, suffix = os.path.splitext(path)

        def is_there(name: str) -> bool:  # also as a link that leads to nothing yet, and would be written through
            return os.path.islink(name) or bool(fs.exists(name))

        if trainer.state.fn != "fit":
            if is_there(path) and os.path.basename(folder) != trainer.state.fn:
                return
        elif not _goes_on(trainer, folder) or os.path.islink(path) or fs.exists(f"{stem}-v1{suffix}"):
            numbered = (f"{stem}-v{number}{suffix}" for number in itertools.count(1))
            path = next(each for each in itertools.chain([path], numbered) if not is_there(each))
        fs.makedirs(folder, exist_ok=True)
        with fs.open(path, "w", encoding="utf-8") as file:
            file.write(text)
        self.path = path


def _goes_on(trainer: Any, folder: str) -> bool:
    """Whether a fit starts from a checkpoint of its own folder."""
    savers = [getattr(saver, "dirpath", None) for saver in trainer.checkpoint_callbacks]
    own = {os.path.realpath(place or os.path.join(folder, "checkpoints")) for place in savers}
    start = next((callback.checkpoint for callback in trainer.callbacks if isinstance(callback, RunFolder)), None)
    return start is not None and os.path.realpath(os.path.dirname(os.path.abspath(start))) in own


def _version_to_go_on(checkpoint: str, trainer: Any, loggers: Iterable[Any]) -> int | str | None:
    """The version whose folder a resumed run goes on in; None for a new one."""
    folder = Path(os.path.abspath(checkpoint)).parent
    run = Path(os.path.realpath(folder)).parent
    for logger in loggers:
        if run.parent == Path(os.path.realpath(_root(logger))):
            return number(run) if number(run) >= 0 else run.name
    savers = [getattr(saver, "dirpath", None) for saver in trainer.checkpoint_callbacks]
    if any(place and os.path.realpath(place) == os.path.realpath(folder) for place in savers):
        newest = max((next_version(logger) - 1 for logger in loggers), default=-1)
        return newest if newest >= 0 else None
    return None


def _root(logger: Any) -> Path:
    """The folder in which a logger makes its versions."""
    return Path(logger.root_dir)
