"""One process of `verify_resume`: call the user's function, and train what it returns under a ResumeRecorder."""

import importlib
import json
import runpy
import sys
from collections.abc import Callable
from typing import Any

from lightning_tricks._lightning import pl
from lightning_tricks.commands.resume_recorder import ResumeRecorder


def run(settings: dict[str, Any]) -> None:
    """Train one phase of `verify_resume`; the recorder ends the process.

    Args:
        settings: from `verify_resume`: where the function is, and the fields of a Phase.
    """
    sys.path += [place for place in settings["sys_path"] if place not in sys.path]
    make = _find(settings)
    pl.seed_everything(0, workers=True, verbose=False)
    module, data, arguments = make()
    recorder = ResumeRecorder(*(settings[name] for name in ("folder", "steps", "first_step", "kill")))
    callbacks = arguments.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    own = {"callbacks": [*callbacks, recorder], "logger": pl.loggers.CSVLogger(settings["folder"])}
    if not any(isinstance(callback, pl.callbacks.ProgressBar) for callback in callbacks):
        own["enable_progress_bar"] = False
    trainer = pl.Trainer(**{**arguments, **own, "default_root_dir": settings["folder"]})
    is_module = isinstance(data, pl.LightningDataModule)
    loaders = {"datamodule": data} if is_module else {"train_dataloaders": data}
    trainer.fit(module, ckpt_path=settings["ckpt_path"], **loaders)


def _find(settings: dict[str, Any]) -> Callable[[], Any]:
    if settings["file"]:  # a script: its part under `if __name__ == "__main__":` is not run
        return runpy.run_path(settings["file"], run_name="__mp_main__")[settings["name"]]
    found: Any = importlib.import_module(settings["module"])
    for name in settings["name"].split("."):
        found = getattr(found, name)
    return found


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
