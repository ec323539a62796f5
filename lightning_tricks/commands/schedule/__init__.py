"""`schedule`: the plan of a run before it starts: learning rates, batch, tokens and weight decay over its steps.

From the first to the last: `plan`, `curves`, `terminal` and `picture`; `present` finds the step of a run.
"""

import shutil
from pathlib import Path
from typing import Any, Literal, cast

from lightning_tricks._errors import UsageError
from lightning_tricks._quote import say
from lightning_tricks._writable import check_file
from lightning_tricks.commands import Recipe

NAME = "schedule"
HELP = "the learning rate of a recipe as a curve, before any step: --against R2.yaml, --output curve.svg"
NEEDS = "a recipe"
WORDS = "plot lr"
RECIPES = "against"


def run(
    model: Any,
    datamodule: Any,
    trainer: Any,
    *,
    against: str | None = None,
    constant: bool = False,
    ckpt_path: str | None = None,
    x: Literal["steps", "tokens"] = "steps",
    output: str | None = None,
    dark: bool = False,
) -> None:
    """Draw the learning rate of a recipe over its run, and a table of the run's phases.

    Args:
        model: of the recipe.
        datamodule: of the recipe.
        trainer: settings of the recipe.
        against: the file of a second recipe, whose curve is laid over the first.
        constant: draw the constant learning rate at the peak too.
        ckpt_path: mark the step of a run: a checkpoint, the folder of a run, or last.
        x: the axis, steps or tokens.
        output: files for a picture, .png or .svg, with commas.
        dark: draw the picture for a dark page.

    Raises:
        UsageError: the length of the run is not in the recipe; a file cannot be written; a package is missing.
    """
    from lightning_tricks.commands.schedule.curves import NamedPlan
    from lightning_tricks.commands.schedule.picture import FORMATS, draw_picture
    from lightning_tricks.commands.schedule.plan import planned
    from lightning_tricks.commands.schedule.present import present_step
    from lightning_tricks.commands.schedule.terminal import draw_in_terminal, shows_color, shows_unicode

    files = [Path(name) for name in (output or "").split(",") if name]
    for file in files:
        if file.suffix not in FORMATS:
            raise UsageError(f"schedule: output={file}: give names that end in {' or '.join(FORMATS)}")
        check_file("schedule: output", file)
    plans = [NamedPlan(_name(trainer) or "recipe", planned(model, datamodule, trainer))]
    if against is not None:
        other = cast(Recipe, against)
        plans.append(NamedPlan(Path(other.file).stem, _planned_against(other)))
    present = None if ckpt_path is None else present_step(ckpt_path, trainer)
    size = shutil.get_terminal_size((80, 24))
    print(
        draw_in_terminal(
            plans,
            axis=x,
            constant=constant,
            present=present,
            columns=size.columns,
            lines=size.lines,
            unicode=shows_unicode(),
            color=shows_color(),
        )
    )
    if files:
        draw_picture(plans, files, axis=x, constant=constant, present=present, dark=dark)
        say("drawn: " + ", ".join(map(str, files)))


def _planned_against(recipe: Recipe) -> Any:
    from lightning_tricks.commands.schedule.plan import planned

    try:
        return planned(recipe.model, recipe.datamodule, recipe.trainer)
    except UsageError as error:
        raise UsageError(f"against={recipe.file}: {error}") from error


def _name(trainer: Any) -> str | None:
    """The name of the run in the recipe: that of its logger."""
    loggers = trainer.get("logger")
    first = loggers[0] if isinstance(loggers, list) and loggers else loggers
    return getattr(first, "name", None) or None
