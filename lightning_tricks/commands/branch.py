"""`branch`: start the decay of a WarmupStableDecay run from a checkpoint of its stable part.

`read_trunk` and `Trunk.check` decide from where a decay may start; `Branch` makes the `fit` out of the recipe.
"""

import os
import pkgutil
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.quote import say
from lightning_tricks._host.machine import listed
from lightning_tricks._trainer.objects import chosen_version, has_versions
from lightning_tricks.checkpoints.bucket import local_copy
from lightning_tricks.checkpoints.check_checkpoint import check_checkpoint, check_training_state, is_of_deepspeed
from lightning_tricks.checkpoints.open_checkpoint import open_checkpoint
from lightning_tricks.checkpoints.record import read_record
from lightning_tricks.commands import CommandParser
from lightning_tricks.commands.answers import add_json
from lightning_tricks.logs.branch_forecast import line_of_branch, lr_of
from lightning_tricks.mixins._plain_settings import from_plain
from lightning_tricks.mixins.optimizer_mixin import SCHEDULE_KEY
from lightning_tricks.schedules import Schedule, WarmupConstant, WarmupStableDecay

_SET_BY_BRANCH = re.compile(
    r"--(trainer\.max_(?:steps|epochs)|total_tokens|init_from|[\w.]*\.decay_(?:start|steps|fraction))(?:=|$)"
)


@dataclass(frozen=True)
class Trunk:
    """The checkpoint that a decay branches off, and of its run what the checkpoint says."""

    path: str  # links are followed, because `last.ckpt` soon leads to another one
    step: int  # optimizer steps done
    schedule: Schedule | None = None
    total_steps: int | None = None  # None for a run without an end, too

    def check(self, schedule: Any, total_steps: int | None) -> None:
        """Refuse a checkpoint in the warmup, or inside the decay of its run, and schedules without a stable part.

        Schedule and length are those of the recipe, which stand in where the checkpoint does not say.
        """
        if not isinstance(schedule, WarmupStableDecay):
            raise UsageError(
                f"model.schedule={_name(schedule)}: branch starts the decay of a WarmupStableDecay: give "
                "--model.schedule WarmupStableDecay, with its warmup_steps"
            )
        own, total = (schedule, total_steps) if self.schedule is None else (self.schedule, self.total_steps)
        for whose, each in (("", schedule), (" of its run", own)):
            if isinstance(each, WarmupConstant | WarmupStableDecay) and self.step < each.warmup_steps:
                raise UsageError(
                    f"ckpt_path={self.path}: step {self.step} lies in the warmup{whose} (warmup_steps="
                    f"{each.warmup_steps}): branch off a later checkpoint"
                )
        if isinstance(own, WarmupConstant):
            return
        if not isinstance(own, WarmupStableDecay):
            raise UsageError(
                f"ckpt_path={self.path}: its run followed {_name(own)}, which has no stable part: branch off a run "
                "with WarmupStableDecay or WarmupConstant"
            )
        if total is not None and total > 0 and self.step > (start := own.start_of_decay(total)):
            raise UsageError(
                f"ckpt_path={self.path}: step {self.step} lies inside the decay of its run, which started at step "
                f"{start}: branch off a checkpoint from step {own.warmup_steps} to {start}"
            )


def _name(schedule: Any) -> str:
    return "null" if schedule is None else type(schedule).__name__


def read_trunk(ckpt_path: str, weights_only: bool | None = None) -> Trunk:
    """The step of a checkpoint, file or folder, and the schedule of its run, which DeepSpeed's do not hold.

    No tensor of a folder is read. Refused is a checkpoint that is not whole, and weights alone.
    """
    path = Path(ckpt_path)
    if path.is_dir() and is_of_deepspeed(path):
        if (record := read_record(path)) is None:
            raise UsageError(
                f"branch: ckpt_path={path}: this checkpoint of DeepSpeed has no record of its step: resume it by fit, "
                "with decay_start of the schedule at its step, and trainer.max_steps at the end of the decay"
            )
        return Trunk(str(path.resolve()), record.step)
    check_checkpoint(path, resumes=True)
    state: Mapping[str, Any] = open_checkpoint(path, parts=(), weights_only=weights_only, verify=False)
    check_training_state(dict(state), path)
    followed = dict(state.get(SCHEDULE_KEY) or {})
    total_steps = followed.pop("total_steps", None)
    schedule = from_plain(followed, Schedule, f"ckpt_path={path}: schedule") if followed else None
    return Trunk(str(path.resolve()), int(state["global_step"]), schedule, total_steps)


class Branch:
    """The change of `fit` into a branch: the recipe with another end, in a folder of its own."""

    def __init__(self, ckpt_path: str, decay_steps: int, json: str | None = None) -> None:
        self.ckpt_path = ckpt_path
        self.decay_steps = decay_steps
        self.json = json
        self.start = 0
        self.decay: list[float] = []  # learning rates of its steps, over the peak
        self.lr: float | None = None

    def change(self, config: Any) -> None:
        """Look at the checkpoint, and let the decay start at its step."""
        self.ckpt_path = str(local_copy(self.ckpt_path))
        trunk = read_trunk(self.ckpt_path, config.get("weights_only"))
        settings, trainer = config.model.get("init_args") or {}, config.trainer
        trunk.check(_built(settings.get("schedule")), trainer.get("max_steps"))
        _start_decays(settings, "model", trunk.step)
        self.start, end = trunk.step, trunk.step + self.decay_steps
        self.decay = [_built(settings["schedule"]).factor(step, end) for step in range(self.start, end)]
        self.lr = lr_of({"model": config.model.as_dict()})
        trainer.max_steps = end
        trainer.max_epochs = None
        if "total_tokens" in config:  # another length in the recipe
            config.total_tokens = None
        config.ckpt_path = self.ckpt_path
        origin = Namespace(trunk=trunk.path, trunk_step=trunk.step, decay_steps=self.decay_steps)
        lineage = Namespace(class_path="lightning_tricks.callbacks.BranchLineage", init_args=origin)
        trainer.callbacks = [*listed(trainer, "callbacks"), lineage]

    def check(self, trainer: Any) -> None:
        """Refuse checkpoints beside that of the trunk: each run would take the other's for its own.

        Say what the decay should end at, as far as the trunk's log tells.
        """
        versions = [(logger.root_dir, chosen_version(logger)) for logger in trainer.loggers if has_versions(logger)]
        runs = [os.path.join(root, name if isinstance(name, str) else f"version_{name}") for root, name in versions]
        runs += [] if trainer.loggers else [str(trainer.default_root_dir)]
        places = [os.path.join(run, "checkpoints") for run in runs]
        places += [saver.dirpath for saver in trainer.checkpoint_callbacks if getattr(saver, "dirpath", None)]
        for place in places if trainer.checkpoint_callbacks else []:
            if os.path.realpath(place) == str(Path(self.ckpt_path).resolve().parent):
                raise UsageError(
                    f"branch: its checkpoints would go to {place.removeprefix(os.getcwd() + os.sep)}, where that of "
                    "the trunk lies: give the logger another version or name, or the saver another dirpath"
                )
        trunk = Path(self.ckpt_path).resolve().parent.parent
        if trainer.is_global_zero and (line := line_of_branch(trunk, self.start, self.decay, self.lr)):
            say(line)

    def options(self) -> list[str]:
        """The options of a `fit` that goes on with the branch."""
        return ["--model.schedule.decay_start", str(self.start)]


def _start_decays(settings: Any, place: str, step: int) -> None:
    """Let each WarmupStableDecay in the settings decay from a step on: that of the run, and those of parameter rules.

    Another schedule that depends on the length of the run is refused: before the branch, it was another curve.
    """
    if isinstance(settings, list):
        for number, entry in enumerate(settings):
            _start_decays(entry, f"{place}[{number}]", step)
    if not isinstance(settings, Namespace):
        return
    curve = _built(settings)
    if isinstance(curve, WarmupStableDecay):
        settings.init_args.update(Namespace(decay_start=step, decay_steps=None, decay_fraction=None))
    elif getattr(curve, "needs_total", False):
        raise UsageError(
            f"{place}={type(curve).__name__}: it depends on the length of the run, which a branch changes: give "
            "WarmupStableDecay, or a schedule without an end"
        )
    for name, entry in vars(settings).items():
        _start_decays(entry, f"{place}.{name}".removesuffix(".init_args"), step)


def _built(spec: Any) -> Any:
    """The schedule of a parsed recipe; None where it has none, or has something else than a Schedule."""
    cls = pkgutil.resolve_name(spec["class_path"]) if spec and "class_path" in spec else None
    settings = vars(spec.get("init_args") or Namespace()) if cls else {}
    return cls(**settings) if isinstance(cls, type) and issubclass(cls, Schedule) else None


def run(args: list[str]) -> tuple[list[str], Branch]:
    """The `fit` that a branch is, in words and as a change of its recipe."""
    parser = CommandParser(
        "branch",
        description="Start the decay of a WarmupStableDecay run from a checkpoint of its stable part, in a folder "
        "of its own: a fit that goes on from the checkpoint, with decay_start at its step and max_steps N steps later. "
        "Other options are those of fit; the recipe's learning rate and shape of the decay hold, not the checkpoint's.",
    )
    parser.add_argument("--ckpt_path", metavar="FILE", help="file, or folder of shards")
    parser.add_argument("--decay_steps", type=int, metavar="N", help="length of the decay in optimizer steps")
    add_json(parser)
    options, recipe = parser.parse_known_args(args)
    path, steps = options.ckpt_path, options.decay_steps
    if not path or path in ("none", "last", "best", "hpc"):
        given = f"ckpt_path={path}: " if path else ""
        raise UsageError(
            f"branch: {given}name the checkpoint of the stable part from which the decay shall start: --ckpt_path FILE"
        )
    if steps is None:
        raise UsageError("branch: give the length of the decay in optimizer steps: --decay_steps N")
    if steps < 1:
        raise UsageError(f"branch: decay_steps={steps}: give the optimizer steps of the decay, 1 or more")
    for arg in recipe:
        if found := _SET_BY_BRANCH.match(arg):
            raise UsageError(
                f"branch: {found[1]} follows from the checkpoint and --decay_steps: leave it out of the command line"
            )
    return recipe, Branch(path, steps, options.json)
