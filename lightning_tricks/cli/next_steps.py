"""Commands to type after a fit: evaluate the run, or go on with it."""

import os
import sys
from collections.abc import Sequence
from typing import Any

from lightning_tricks._core.quote import printable, shell_line
from lightning_tricks._trainer.lightning import pl
from lightning_tricks.callbacks import TotalTokens
from lightning_tricks.checkpoints.find_checkpoint import Candidate
from lightning_tricks.cli.choose_checkpoint import newest_checkpoint, relative_to_cwd
from lightning_tricks.cli.run_folder import SaveRecipe
from lightning_tricks.monitors.tensorboard_dashboard import how_to_open

_LENGTHS = ("--trainer.max_steps", "--trainer.max_epochs", "--total_tokens")
_START = ("--ckpt_path", "--resume", "--init_from")  # the options that say where a run starts


def program() -> str:
    """`python -m lightning_tricks`, `lightning-tricks`, `python train.py`: the command line before its arguments."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None:
        return f"python -m {spec.name.removesuffix('.__main__')}"
    script = sys.argv[0] if sys.argv else ""
    if script.endswith(".py"):
        return f"python {relative_to_cwd(script)}"
    return os.path.basename(script) or "python -m lightning_tricks"


def _without(options: Sequence[str], *names: str) -> list[str]:
    """The options of a command line except the named ones, written `--name value` or `--name=value`."""
    kept: list[str] = []
    rest = iter(options)
    for option in rest:
        if option in names:
            next(rest, None)  # its value
        elif option.partition("=")[0] not in names:
            kept.append(option)
    return kept


def _newest_of_run(trainer: Any) -> Candidate | None:
    """The newest checkpoint in the folders of the run's savers."""
    savers = trainer.checkpoint_callbacks
    folders = [saver.dirpath for saver in savers if getattr(saver, "dirpath", None)]
    # of a spawned process its best checkpoint is known, and not the folder that it has chosen
    folders += [os.path.dirname(saver.best_model_path) for saver in savers if getattr(saver, "best_model_path", "")]
    return next((newest for folder in folders if (newest := newest_checkpoint(folder))), None)


def _not_saved(trainer: Any, newest: Candidate | None) -> str | None:
    """The line for a run whose last step is not in the newest checkpoint, as far as is known."""
    if newest is None:
        return "No checkpoint was saved: there is nothing to evaluate or to go on from"
    if newest.record is not None and newest.record.step < trainer.global_step:
        return (
            f"No checkpoint was saved after step {newest.record.step}, and the run ended at step "
            f"{trainer.global_step}: the lines below take {printable(relative_to_cwd(newest.shown_path))}"
        )
    return None


def _options_of_run(trainer: Any, options: Sequence[str], *dropped: str) -> list[str]:
    """The options of the run but for `dropped`: as typed, or its saved `config.yaml` where they are many."""
    if not _without(options, "--config", "-c", "--ckpt_path", *_LENGTHS):
        return _without(options, *dropped)
    written = (callback.path for callback in trainer.callbacks if isinstance(callback, SaveRecipe))
    saved = next(written, None)  # None where a process started by this one has written it
    return ["--config", relative_to_cwd(saved)] if saved and os.path.isfile(saved) else _without(options, *dropped)


def go_on(trainer: Any, options: Sequence[str], checkpoint: str) -> str:
    """The line to print after a `fit` with these options that was stopped: how to go on to its end."""
    same = _options_of_run(trainer, options, *_START)
    return f"Go on:       {program()} {shell_line(['fit', *same, '--ckpt_path', relative_to_cwd(checkpoint)])}"


def _twice_as_long(trainer: Any, newest: Candidate) -> tuple[str, str]:
    """The option by which a run like this one is twice as long, in the unit in which its length was given."""
    for callback in trainer.callbacks:
        if isinstance(callback, TotalTokens):
            return "--total_tokens", f"{2 * callback.total_tokens}"
    if trainer.max_steps == -1 and trainer.max_epochs > 0:
        return "--trainer.max_epochs", f"{2 * trainer.max_epochs}"
    steps = trainer.global_step or (newest.record.step if newest.record else 0)  # 0 where children have trained
    return "--trainer.max_steps", str(2 * steps)


def next_steps(trainer: Any, options: Sequence[str]) -> list[str]:
    """The lines to print after a `fit` with these options, as typed."""
    found: list[str] = []

    def line(command: str, *added: str) -> str:
        return f"{program()} {shell_line([command, *_options_of_run(trainer, options, *_START, *_LENGTHS), *added])}"

    for logger in trainer.loggers:
        if isinstance(logger, pl.loggers.TensorBoardLogger):
            found.append(f"TensorBoard: {how_to_open(relative_to_cwd(logger.root_dir))}")
    newest = _newest_of_run(trainer)
    if not_saved := _not_saved(trainer, newest):
        found.append(not_saved)
    if newest:
        checkpoint = relative_to_cwd(newest.shown_path)
        more = line("fit", "--ckpt_path", checkpoint, *_twice_as_long(trainer, newest))
        found += [f"Evaluate:    {line('validate', '--ckpt_path', checkpoint)}", f"Go on:       {more}"]
    return found
