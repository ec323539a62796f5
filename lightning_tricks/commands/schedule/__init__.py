"""`schedule`: the plan of a run before it starts: learning rates, batch, tokens and weight decay over its steps.

`plan` makes the plan, `terminal` draws it.
"""

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, cast

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.terminal import shows_color
from lightning_tricks._host.machine import listed
from lightning_tricks.commands import Recipe
from lightning_tricks.commands.answers import check_json, write_json


def run(
    model: Any,
    datamodule: Any,
    trainer: Any,
    *,
    against: str | None = None,
    x: Literal["steps", "tokens"] = "steps",
    pipeline: bool = False,
    json: str | None = None,
) -> None:
    """Draw the learning rate of a recipe over its run, and a table of the run's phases.

    Args:
        model: of the recipe.
        datamodule: of the recipe.
        trainer: settings of the recipe.
        against: the file of a second recipe, whose curve is laid over the first.
        x: the axis, steps or tokens.
        pipeline: draw what each pipeline rank does in a micro-batch of the recipe, in place of the learning rate.
        json: file for the plan of each recipe, - for standard output.

    Raises:
        UsageError: the length of the run is not in the recipe; a package is missing; `pipeline` without such ranks.
    """
    check_json("schedule", json)
    if pipeline:
        if json is not None:
            raise UsageError(f"json={json}: not with pipeline, which is a picture: leave out one of the two")
        print(_of_pipeline(model, datamodule, trainer, shutil.get_terminal_size((80, 24)).columns))
        return
    from lightning_tricks.commands.schedule.plan import planned
    from lightning_tricks.commands.schedule.terminal import NamedPlan, draw_in_terminal
    from lightning_tricks.logs.table import shows_unicode

    plans = [NamedPlan(_name(trainer) or "recipe", planned(model, datamodule, trainer))]
    if against is not None:
        other = cast(Recipe, against)
        name = stem if (stem := Path(other.file).stem) != plans[0].name else other.file  # labels tell curves apart
        try:
            plans.append(NamedPlan(name, planned(other.model, other.datamodule, other.trainer)))
        except UsageError as error:
            raise UsageError(f"against={other.file}: {error}") from error
    write_json(json, [{"name": each.name, **asdict(each.plan)} for each in plans])
    if json == "-":
        return
    columns, lines = shutil.get_terminal_size((80, 24))
    shows = {"unicode": shows_unicode(), "color": shows_color()}
    print(draw_in_terminal(plans, axis=x, columns=columns, lines=lines, **shows))


def _of_pipeline(model: Any, datamodule: Any, trainer: Any, columns: int) -> str:
    from lightning_tricks.commands.plan.setup import read_setup
    from lightning_tricks.parallel.stage_timeline import check_order, drawn, timeline, waiting

    setup = read_setup(model, datamodule, trainer, None, None, on_gpu=False)
    ranks, strategy = setup.dims.pipeline, setup.strategy
    if ranks == 1:
        raise UsageError("pipeline: the recipe has no pipeline ranks: give --trainer.strategy.init_args.mesh.pipeline")
    check_order(strategy.pipeline_schedule, ranks, strategy.pipeline_micro_batches)
    acts = timeline(strategy.pipeline_schedule, ranks, strategy.pipeline_micro_batches)
    return (
        f"{strategy.pipeline_schedule}, {strategy.pipeline_micro_batches} micro-batches: {ranks} pipeline ranks wait "
        f"{waiting(acts):.0%} of the time (.)\n{drawn(acts, columns)}\n"
        "digit: forward pass of a micro-batch; b: its backward pass; i, w: halves of it, for inputs and for weights"
    )


def _name(trainer: Any) -> str | None:
    """The name of the run in the recipe: that of its logger."""
    return next((getattr(logger, "name", None) or None for logger in listed(trainer, "logger")), None)
