"""`verify-resume`: whether a recipe that is killed and resumed trains as if nothing had happened."""

import json
import sys
from pathlib import Path
from typing import Any

from lightning_tricks._errors import UsageError
from lightning_tricks.commands.command_parser import CommandParser
from lightning_tricks.commands.resume_recorder import ResumeRecorder
from lightning_tricks.commands.verify_resume import DEFAULT_STEPS, Phase, compare_phases


def verify_resume(args: list[str]) -> None:
    """Print a line for each part of a recipe's training, and exit with 1 if a resume changes one.

    Raises:
        UsageError: see `verify_resume` of the file beside this one; no recipe.
    """
    parser = CommandParser(
        "lightning-tricks verify-resume",
        description="Train a recipe for N steps, and again with kill -9 and a resume in the middle, in processes of "
        "their own and in a temporary folder; compare data, random state, weights, optimizer state, scaler, lr, loss "
        "and gradient norm to the bit. Other options are those of fit.",
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help="optimizer steps; default %(default)s")
    options, recipe = parser.parse_known_args(args)
    if not recipe:
        raise UsageError("verify-resume: give a recipe with --config RECIPE.yaml")

    def command(phase: Phase) -> list[str]:
        file = Path(phase.folder, "verify.json")  # JSON is YAML
        file.write_text(json.dumps(_settings(phase)), encoding="utf-8")
        return [sys.executable, "-m", "lightning_tricks", "fit", *recipe, "--config", str(file)]

    report = compare_phases(command, options.steps)
    print(report)
    sys.exit(0 if report.equal else 1)


def _settings(phase: Phase) -> dict[str, Any]:
    """The settings that a phase lays over the recipe."""
    recorder = {"class_path": f"{ResumeRecorder.__module__}.ResumeRecorder", "init_args": phase.recorder()}
    logger = {"class_path": "ResumingCSVLogger", "init_args": {"save_dir": phase.folder, "name": "log"}}
    trainer = {"logger": logger, "default_root_dir": phase.folder, "callbacks+": [recorder]}
    return {"ckpt_path": phase.ckpt_path or "none", "trainer": trainer}
