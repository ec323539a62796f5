"""The command `branch`: `fit` on a recipe, with the decay from the checkpoint's step to the end of the run."""

import os
import pkgutil
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from lightning_tricks._errors import UsageError
from lightning_tricks._trainer import chosen_version, has_versions
from lightning_tricks.cli.choose_checkpoint import folder_name, short
from lightning_tricks.cli.recipe_cli import RecipeCLI, run_command
from lightning_tricks.commands.branch import Trunk, check_branch_options, read_trunk
from lightning_tricks.commands.command_parser import CommandParser
from lightning_tricks.schedules import Schedule, WarmupStableDecay

_SET_BY_BRANCH = re.compile(
    r"--(trainer\.max_(?:steps|epochs)|total_tokens|init_from|[\w.]*\.decay_(?:start|steps|fraction))(?:=|$)"
)


class BranchCLI(RecipeCLI):
    """`fit` of a branch: the recipe with another end, in a folder of its own.

    Args:
        ckpt_path: of the checkpoint to branch off.
        decay_steps: length of the decay in optimizer steps.
        **kwargs: as in RecipeCLI.
    """

    own_folder = True

    def __init__(self, ckpt_path: str, decay_steps: int, **kwargs: Any) -> None:
        self._ckpt, self._decay_steps = ckpt_path, decay_steps
        super().__init__(**kwargs)

    def parse_arguments(self, parser: Any, args: Any) -> None:
        """Parse, look at the checkpoint, and let the decay start at its step."""
        super().parse_arguments(parser, args)
        config = self.config["fit"]
        trunk = read_trunk(self._ckpt, config.get("weights_only"))
        spec: Any = (config.model.get("init_args") or {}).get("schedule")
        trunk.check(_built(spec), config.trainer.get("max_steps"))
        _start_decays(config.model.init_args, "model", trunk.step)
        config.trainer.max_steps = trunk.step + self._decay_steps
        config.trainer.max_epochs = None
        if "total_tokens" in config:  # another length in the recipe
            config.total_tokens = None
        config.ckpt_path = self._ckpt
        self._add_lineage(config.trainer, trunk)

    def _add_lineage(self, config: Any, trunk: Trunk) -> None:
        origin = Namespace(trunk=trunk.path, trunk_step=trunk.step, decay_steps=self._decay_steps)
        name = "lightning_tricks.callbacks.BranchLineage"
        given = config.get("callbacks") or []
        given = given if isinstance(given, list) else [given]
        config.callbacks = [*given, Namespace(class_path=name, init_args=origin)]

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        check_own_folder(self.trainer, self._ckpt)
        return kwargs

    def _options(self) -> list[str]:
        """The options of a `fit` that goes on with the branch; with `decay_start`, it takes the saved `config.yaml`."""
        start = self.config["fit"].model.init_args.schedule.init_args.decay_start
        return [*super()._options(), "--model.schedule.decay_start", str(start)]


def _start_decays(settings: Any, place: str, step: int) -> None:
    """Let each WarmupStableDecay in the settings decay from a step on: that of the run, and those of parameter rules.

    Raises:
        UsageError: another schedule depends on the length of the run: before the branch, it was another curve.
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


def check_own_folder(trainer: Any, ckpt_path: str) -> None:
    """Refuse to write the branch's checkpoints beside that of the trunk: each would take the other's for its own.

    Raises:
        UsageError: see above.
    """
    loggers = [logger for logger in trainer.loggers if has_versions(logger)]
    runs = [os.path.join(logger.root_dir, folder_name(chosen_version(logger))) for logger in loggers]
    runs += [] if trainer.loggers else [str(trainer.default_root_dir)]
    places = [os.path.join(run, "checkpoints") for run in runs]
    places += [saver.dirpath for saver in trainer.checkpoint_callbacks if getattr(saver, "dirpath", None)]
    for place in places if trainer.checkpoint_callbacks else []:
        if os.path.realpath(place) == str(Path(ckpt_path).resolve().parent):
            raise UsageError(
                f"branch: its checkpoints would go to {short(place)}, where that of the trunk lies: give the logger "
                "another version or name, or the saver another dirpath"
            )


def branch(args: Sequence[str]) -> None:
    """Start a decay from a checkpoint of the stable part of a run.

    Args:
        args: after the name of the command.

    Raises:
        UsageError: see `check_branch_options`, `read_trunk` and `Trunk.check`; an option that the command sets itself.
    """
    parser = CommandParser(
        "lightning-tricks branch",
        description="Start the decay of a WarmupStableDecay run from a checkpoint of its stable part, in a folder "
        "of its own: a fit that goes on from the checkpoint, with decay_start at its step and max_steps N steps later. "
        "Other options are those of fit; the recipe's learning rate and shape of the decay hold, not the checkpoint's.",
        allow_abbrev=False,
    )
    parser.add_argument("--ckpt_path", metavar="FILE", help="file, or folder of shards")
    parser.add_argument("--decay_steps", type=int, metavar="N", help="length of the decay in optimizer steps")
    options, recipe = parser.parse_known_args(args)
    check_branch_options(options.ckpt_path, options.decay_steps)
    for arg in recipe:
        if found := _SET_BY_BRANCH.match(arg):
            raise UsageError(
                f"branch: {found[1]} follows from the checkpoint and --decay_steps: leave it out of the command line"
            )
    cli = partial(BranchCLI, options.ckpt_path, options.decay_steps)
    run_command(["branch", *args], cli, ["fit", *recipe])
