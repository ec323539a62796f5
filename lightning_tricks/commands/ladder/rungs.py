"""The runs of a ladder: each is the recipe with other sizes and a scaled schedule, trained by `fit` in a process."""

import copy
import os
import pkgutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.quote import yaml_text
from lightning_tricks._trainer.lightning import BACKEND
from lightning_tricks.commands.ladder.sizes import Size
from lightning_tricks.commands.verify_resume import last_error, program
from lightning_tricks.logs.run import read_run
from lightning_tricks.logs.scalars import read_scalars
from lightning_tricks.optim.mup import MuP

_SAVES = 4  # of a rung: it goes on from the last one
_WATCH_OR_WRITE = ("lightning_tricks.monitors", "lightning_tricks.outputs")  # what changes no training
_OF_WIDTH = ("d_model", "n_heads", "n_kv_heads", "d_ff", "d_expert")
_TRIAL_STEPS, _STEP_SECONDS = 12, "throughput/step_seconds"


@dataclass(frozen=True)
class RungRun:
    """One run.

    Args:
        rung: its number, from 1.
        size: of it.
        seed: to be added to the recipe's seeds.
        lr_scale: times the recipe's learning rates.
    """

    rung: int
    size: Size
    seed: int = 0
    lr_scale: float = 1.0

    @property
    def name(self) -> str:
        """Of its folder."""
        seed = f"-seed-{self.seed}" if self.seed else ""
        return f"rung-{self.rung}{seed}" + (f"-lr-{self.lr_scale:g}" if self.lr_scale != 1 else "")


@dataclass(frozen=True)
class Ladder:
    """What all runs of a ladder have in common.

    Args:
        out: its folder.
        settings: of the recipe, as `config.yaml` has them.
        recipe: its size.
        mup: of the rungs.
        validations: of each run.
    """

    out: Path
    settings: dict[str, Any]
    recipe: Size
    mup: MuP
    validations: int

    def command(self, run: RungRun) -> list[str]:
        """The `fit` that trains a run, or goes on with it, or finds it finished; its recipe is written."""
        file = self.out / f"{run.name}.yaml"
        file.write_text(yaml_text(self.settings_of(run)), encoding="utf-8")
        return ["fit", "--config", str(file)]

    def settings_of(self, run: RungRun) -> dict[str, Any]:
        """The recipe with the sizes of a run, its seed, and a schedule as long as it is."""
        settings, size = copy.deepcopy(self.settings), run.size
        model, data, trainer = settings["model"]["init_args"], settings["data"]["init_args"], settings["trainer"]
        model["decoder"]["init_args"] |= {
            name: getattr(size.config, name) for name in _OF_WIDTH if hasattr(size.config, name)
        }
        model["mup"] = {"base_width": self.mup.base_width, "base_head_dim": self.mup.base_head_dim}
        windows = [node for node in _mappings(trainer.get("callbacks")) if "horizon_steps" in node]  # of TailAverage
        _scale_steps([model, *windows], size.steps / self.recipe.steps)
        for change in _mappings(data.get("weights")):  # of a mixture
            if change.get("at_tokens") is not None:
                change["at_tokens"] = round(change["at_tokens"] * size.tokens / self.recipe.tokens)
        for owner, key in learning_rates(model):
            owner[key] *= run.lr_scale
        fewer_rows, every = self.recipe.rows // size.rows, size.steps // self.validations
        data["micro_batch_size"] = size.rows
        if isinstance(data.get("seed"), int):
            data["seed"] += run.seed
        given = settings.get("seed_everything")
        seed = given if isinstance(given, int) and not isinstance(given, bool) else 0
        limit = trainer.get("limit_val_batches")
        saver = {"class_path": "SafeCheckpoint", "init_args": {"every_n_train_steps": max(1, size.steps // _SAVES)}}
        logger = {"save_dir": str(self.out), "name": run.name, "version": ""}
        log_every = round((trainer.get("log_every_n_steps") or 50) * size.steps / self.recipe.steps)
        start = {"resume": "auto", "ckpt_path": None, "init_from": None, "total_tokens": None}
        trainer |= {
            "max_steps": size.steps,
            "max_epochs": None,
            "accumulate_grad_batches": size.accumulate,
            "val_check_interval": every * size.accumulate,
            "check_val_every_n_epoch": None,
            "limit_val_batches": limit * fewer_rows if type(limit) is int else limit,  # the same rows
            "log_every_n_steps": max(1, log_every),
            "logger": {"class_path": "ResumingCSVLogger", "init_args": logger},
            "callbacks": [*_kept(trainer.get("callbacks")), saver],
            "default_root_dir": str(self.out / run.name),
            "enable_checkpointing": None,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        return settings | start | {"seed_everything": seed + run.seed}

    def loss(self, run: RungRun) -> float | None:
        """The validation loss at the end of a run; None where it has not come to its end."""
        folder = self.out / run.name
        losses = read_run(folder).scalars.series("val/loss") if folder.is_dir() else {}
        return losses.get(run.size.steps - 1)

    def train(self, run: RungRun, lock: int) -> float:
        """Train a run to its end; its validation loss. `lock`: a file that stays open as long as the process lives.

        Raises:
            UsageError: it failed, with the last line that it wrote.
        """
        file = self.out / f"{run.name}.txt"
        _fit(self.command(run), file, lock)
        if (loss := self.loss(run)) is None:
            raise UsageError(f"ladder: {run.name} has ended without a validation at its end: see {file}")
        return loss

    def seconds(self, size: Size, lock: int) -> tuple[float, float]:
        """Seconds of the start of a run and of a step of it, by a short trial in a folder that is then removed."""
        with tempfile.TemporaryDirectory(prefix="trial-", dir=self.out) as place:
            folder = Path(place)
            settings = replace(self, out=folder).settings_of(RungRun(0, size))
            ends = {"max_steps": _TRIAL_STEPS, "limit_val_batches": 0, "log_every_n_steps": 1}
            no_saves = {"enable_checkpointing": False, "callbacks": settings["trainer"]["callbacks"][:-1]}
            settings["trainer"] |= ends | no_saves
            for node in _mappings(settings["model"]):  # whose parts are longer
                node |= {key: None for key in ("schedule", "decay_schedule") if key in node}
            (folder / "trial.yaml").write_text(yaml_text(settings), encoding="utf-8")
            before = os.times().elapsed
            _fit(["fit", "--config", str(folder / "trial.yaml")], folder / "trial.txt", lock)
            whole = os.times().elapsed - before
            each = [*read_scalars(folder / "rung-0", {_STEP_SECONDS}).series(_STEP_SECONDS).values()]
            return whole - sum(each), statistics.median(each)


def _fit(words: list[str], file: Path, lock: int) -> None:
    """Run a `fit` with its output in a file; what ends this process ends it too, after it has saved."""
    with file.open("w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            [*program(), *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "LIGHTNING_TRICKS_BACKEND": BACKEND},
            pass_fds=(lock,),
        )
        try:
            code = process.wait()
        except BaseException:
            process.terminate()  # Preemption saves
            process.wait()
            raise
        output.seek(0)
        if code:
            raise UsageError(f"ladder: {file.stem} failed with exit code {code}: {last_error(output)}")


def _kept(callbacks: Any) -> list[dict[str, Any]]:
    """The callbacks that change training: no watchers, none that write for people, no savers."""
    given = callbacks if isinstance(callbacks, list) else [callbacks] if callbacks else []
    found = []
    for each in given:
        cls = pkgutil.resolve_name(each["class_path"])
        names = {base.__name__ for base in cls.__mro__}
        if not cls.__module__.startswith(_WATCH_OR_WRITE) and not names & {"Checkpoint", "ProgressBar"}:
            found.append(each)
    return found


def _mappings(node: Any) -> Iterator[dict[str, Any]]:
    """All mappings in settings."""
    if isinstance(node, dict):
        yield node
    for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _mappings(each)


def _scale_steps(settings: Any, factor: float) -> None:
    """Make each length of a schedule longer or shorter, in place; `ns_steps` are those inside of a step of Muon."""
    for node in _mappings(settings):
        for key, value in node.items():
            is_length = key == "decay_start" or (key.endswith("_steps") and key != "ns_steps")
            if is_length and type(value) is int and value > 0:
                node[key] = max(1, round(value * factor))


def learning_rates(model: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Where the learning rates of a module's settings stand: a mapping and its key."""
    if model.get("optimizer") is None:  # as `default_adamw` does
        model["optimizer"] = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 3e-4, "betas": [0.9, 0.95]}}
    return [
        (node, key)
        for node in _mappings(model["optimizer"])
        for key, value in node.items()
        if (key == "lr" or key.endswith("_lr")) and isinstance(value, int | float)
    ]
