"""One process of `verify-resume`: train with RunLedger, save in the middle, and end, by SIGKILL or at the last step.

The recipe of `verify-resume` names the callbacks; for the function `verify_resume` this module is the process itself.
"""

import importlib
import json
import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_tricks._host.machine import listed
from lightning_tricks._trainer.lightning import Module, Trainer, pl
from lightning_tricks._trainer.loop import is_accumulating, logging_step
from lightning_tricks.checkpoints.atomic_checkpoint_io import wait_for_write
from lightning_tricks.commands.verify_resume import CHECKPOINT, Phase, ledger_options
from lightning_tricks.monitors.run_ledger import RunLedger


class EndOfPhase(pl.Callback):
    """Ends the process once some steps are done: no line after that is run.

    The recipe's savers write below its folder in place of their own.

    Args:
        folder: to write to; it must exist.
        last_step: optimizer steps, of earlier starts too, after which the run ends.
        kill: save there, and end by SIGKILL in the middle of the next step; False ends with exit code 0.
    """

    def __init__(self, folder: str, last_step: int, kill: bool = False) -> None:
        self.folder, self.last_step, self.kill = Path(folder), last_step, kill

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Lead the savers elsewhere, before they make their folders."""
        for number, saver in enumerate(trainer.checkpoint_callbacks):
            if hasattr(saver, "dirpath"):
                saver.dirpath = str(self.folder / f"saver_{number}")

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        """End, if all steps are done; the ledger is written."""
        if not self.kill and logging_step(trainer) >= self.last_step:
            trainer.strategy.barrier("verify-resume")
            os._exit(0)

    def on_after_backward(self, trainer: Trainer, pl_module: Module) -> None:
        """Kill the process, if that is due."""
        self._kill_if_due(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save after the last step."""
        self._kill_if_due(trainer)
        if self.kill and not is_accumulating(trainer) and logging_step(trainer) + 1 == self.last_step:
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Save once more, after a validation that was due: it may have moved the random state."""
        if self.kill and logging_step(trainer) == self.last_step:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        trainer.save_checkpoint(self.folder / CHECKPOINT)
        wait_for_write(trainer)

    def _kill_if_due(self, trainer: Trainer) -> None:
        if self.kill and logging_step(trainer) >= self.last_step:
            os.kill(os.getpid(), signal.SIGKILL)


def run_phase(settings: dict[str, Any]) -> None:
    """Train one phase of `verify_resume`; the callback ends the process.

    Args:
        settings: from `verify_resume`: where the function is, and the fields of a Phase.
    """
    sys.path += [place for place in settings["sys_path"] if place not in sys.path]
    make = _find(settings)
    pl.seed_everything(0, workers=True, verbose=False)
    module, data, arguments = make()
    phase = Phase(*(settings[name] for name in ("folder", "last_step", "kill", "ckpt_path")))
    added = [RunLedger(**ledger_options(phase)), EndOfPhase(phase.folder, phase.last_step, phase.kill)]
    callbacks = listed(arguments, "callbacks")
    own: dict[str, Any] = {"callbacks": [*callbacks, *added], "logger": pl.loggers.CSVLogger(phase.folder)}
    own |= {"default_root_dir": phase.folder, "log_every_n_steps": 1}
    if not any(isinstance(callback, pl.callbacks.ProgressBar) for callback in callbacks):
        own["enable_progress_bar"] = False
    trainer = pl.Trainer(**{**arguments, **own})
    is_module = isinstance(data, pl.LightningDataModule)
    loaders = {"datamodule": data} if is_module else {"train_dataloaders": data}
    trainer.fit(module, ckpt_path=phase.ckpt_path, **loaders)


def _find(settings: dict[str, Any]) -> Callable[[], Any]:
    if settings["file"]:  # a script: its part under `if __name__ == "__main__":` is not run
        return runpy.run_path(settings["file"], run_name="__mp_main__")[settings["name"]]
    found: Any = importlib.import_module(settings["module"])
    for name in settings["name"].split("."):
        found = getattr(found, name)
    return found


if __name__ == "__main__":
    run_phase(json.loads(sys.argv[1]))
