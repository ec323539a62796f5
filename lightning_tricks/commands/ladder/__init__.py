"""`ladder`: small rungs of a recipe are trained, and its own final loss is forecast from theirs, before it runs."""

import fcntl
import json
import math
import os
import re
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.quote import say, shell_line
from lightning_tricks._host.writable import check_folder
from lightning_tricks.commands import CommandParser
from lightning_tricks.commands.answers import add_json, check_json, json_text, write_json
from lightning_tricks.commands.ladder.rungs import Ladder, RungRun, learning_rates
from lightning_tricks.commands.ladder.sizes import Size, base_of, ladders, sizes_below
from lightning_tricks.commands.schedule.plan import planned
from lightning_tricks.data.base import TokenDataModule
from lightning_tricks.guards.batch_size_warmup import BatchSizeWarmup
from lightning_tricks.language_model import LanguageModel
from lightning_tricks.logs import forecast_file as on_file
from lightning_tricks.logs.run import flat
from lightning_tricks.logs.scaling_law import FURTHEST_WITHOUT_FLOOR, LEAST_RUNGS, Rung, forecast
from lightning_tricks.logs.table import human, lines_of
from lightning_tricks.monitors.goodput_monitor import duration

_PLAN = "ladder.json"
_MOST_WITH_SEEDS, _MOST_VALIDATIONS = 3, 4
_LR_SCALES, _LR_RUNG = (0.5, 2.0), 2
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
Plan = dict[str, Any]


def run(args: list[str]) -> tuple[list[str], Callable[..., None]]:
    """The words of the recipe, and the function that builds a ladder of it."""
    parser = CommandParser(
        "ladder",
        description="Train small rungs of a recipe, each by fit in a folder of its own, and forecast the recipe's "
        "final validation loss before it runs. Finished rungs are kept, so that the same command goes on after a kill. "
        "Other options are those of fit.",
    )
    parser.add_argument("--out", default="runs/ladder", metavar="DIR", help="default: %(default)s")
    parser.add_argument("--rungs", type=int, default=5, metavar="N", help="sizes; default: %(default)s")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="of the cheapest rungs; default: %(default)s")
    parser.add_argument("--budget", metavar="TIME", help="wall time here of all rungs, such as 20m or 3h")
    parser.add_argument("--print-commands", action="store_true", help="print the fits, for other machines; run nothing")
    add_json(parser)
    options, recipe = parser.parse_known_args(args)
    if not recipe:
        raise UsageError("ladder: give a recipe with --config RECIPE.yaml")
    if options.rungs < LEAST_RUNGS:
        raise UsageError(f"ladder: rungs={options.rungs}: a forecast needs {LEAST_RUNGS} or more")
    if options.seeds < 1:
        raise UsageError(f"ladder: seeds={options.seeds}: give 1 or more")
    if "LOCAL_RANK" in os.environ:
        raise UsageError("ladder starts the processes of its rungs itself: give the command without torchrun")
    if options.budget and options.print_commands:
        raise UsageError(f"ladder: budget={options.budget}: --print-commands runs no trial to measure it: give one")
    return recipe, partial(_build, options, recipe, _seconds(options.budget))


def _seconds(text: str | None) -> float | None:
    """Seconds of a time such as `1h30m`."""
    if text is None:
        return None
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", text)
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if "".join(map("".join, parts)) != text or not seconds:
        raise UsageError(f"ladder: budget={text}: give a time such as 90s, 20m or 1h30m")
    return seconds


def _build(
    options: Namespace,
    words: list[str],
    budget: float | None,
    model: Any,
    data: Any,
    trainer: Mapping[str, Any],
    settings: dict[str, Any],
) -> None:
    """Plan, train and forecast; `settings` are those of the recipe in plain types."""
    out = Path(options.out)
    with check_json("ladder", options.json):
        ladder = _ladder(out, model, data, trainer, settings)
        check_folder("ladder: out", out)
        out.mkdir(parents=True, exist_ok=True)
        with _locked(out) as lock:
            plan, sizes = _plan(options, budget, ladder, data, lock)
            runs = list(_runs(sizes, options.seeds))
            say(*_table(plan, runs), file=sys.stderr if options.print_commands else None)
            answer: Plan = {"plan": plan}
            if options.print_commands:
                say(*(shell_line(["python", "-m", "lightning_tricks", *ladder.command(each)]) for each in runs))
            else:
                losses = _train(ladder, runs, plan, lock)
                answer |= _forecast(ladder, plan, runs, losses, words)
                line = on_file.forecast_line(answer)
                say("", f"ladder: {line}; written to {out / on_file.NAME}")
    write_json(options.json, answer)
    sys.exit(1 if answer.get("forecast", {}).get("refusal") else 0)


@contextmanager
def _locked(out: Path) -> Iterator[int]:
    """Keep other calls out of a folder, also while a rung that a killed call has left still trains."""
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"ladder: out={out}: another call, or its rung, is at work there: wait for it") from None
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, by which a rung saves and ends
        try:
            yield file.fileno()
        finally:
            signal.signal(signal.SIGTERM, before)


def _ladder(out: Path, model: Any, data: Any, trainer: Mapping[str, Any], settings: dict[str, Any]) -> Ladder:
    """What the recipe says; refuses one that no rungs can be made of."""
    if not isinstance(model, LanguageModel) or "decoder" not in settings["model"].get("init_args", {}):
        raise UsageError(
            f"ladder: model={type(model).__name__}: rungs need a LanguageModel, whose decoder has d_model and n_heads"
        )
    if not isinstance(data, TokenDataModule):
        raise UsageError(f"ladder: data={type(data).__name__}: give TextData, TokenData or MixtureData")
    if any(isinstance(callback, BatchSizeWarmup) for callback in trainer.get("callbacks") or ()):
        raise UsageError("ladder: BatchSizeWarmup: a rung has one batch: give --trainer.callbacks-=BatchSizeWarmup")
    if settings.get("init_from"):
        raise UsageError(f"ladder: init_from={settings['init_from']}: other sizes cannot start from it: leave it out")
    try:
        run = planned(model, data, trainer, [0])
    except UsageError as error:
        raise UsageError(str(error).replace("schedule:", "ladder:", 1)) from None
    accumulate = int(trainer.get("accumulate_grad_batches") or 1)
    assert run.rows is not None
    ranks = run.rows[0] // (data.micro_batch_size * accumulate)
    recipe = Size(model.config, run.total_steps, data.micro_batch_size, accumulate, ranks, data.seq_len)
    validations = min(max(len(run.validations), 1), _MOST_VALIDATIONS)
    return Ladder(out, settings, recipe, base_of(model.config, model.mup), validations)


def _plan(
    options: Namespace, budget: float | None, ladder: Ladder, data: TokenDataModule, lock: int
) -> tuple[Plan, list[Size]]:
    """The plan on file, or a new one, which is written; and the sizes of its rungs.

    Raises:
        UsageError: the plan on file is of another recipe; there are no validation data; no ladder fits the budget.
    """
    file = ladder.out / _PLAN
    own = json.loads(json_text(on_file.deciding(flat(ladder.settings))))
    plan: Plan = {"settings": own, "options": {"rungs": options.rungs, "seeds": options.seeds, "budget": budget}}
    sizes = sizes_below(ladder.recipe, ladder.mup, ladder.validations)
    if file.is_file():
        found = json.loads(file.read_text(encoding="utf-8"))
        plan["options"]["budget"] = budget or found["options"].get("budget")  # whose plan may be asked for without it
        if names := on_file.differing(found["settings"] | found["options"], own | plan["options"]):
            raise UsageError(
                f"ladder: out={ladder.out}: its rungs are of another recipe ({', '.join(names[:3])}): give the same "
                "options, or another --out"
            )
        return found, [size for size in sizes if size.config.d_model in {each["width"] for each in found["rungs"]}]
    data.prepare_data()
    data.setup("fit")
    validation = sum(len(source.streams.get("val", ())) for source in data.sources)
    limit = ladder.settings["trainer"].get("limit_val_batches")
    if not validation or limit == 0:
        raise UsageError(f"ladder: limit_val_batches={limit}, {validation} validation tokens: a forecast needs some")
    if isinstance(limit, int):
        validation = min(validation, limit * ladder.recipe.step_tokens // ladder.recipe.accumulate)
    there = data.training_rows().order.rows_in_pass * data.seq_len
    choices = [each for each in ladders(ladder.recipe, sizes, options.rungs) if each[-1].tokens <= there]
    if not choices:
        raise UsageError(f"ladder: the largest rung would read its {there:,} tokens more than once: give more text")
    cost = None if options.print_commands else _measured(ladder, choices[-1], validation, lock)
    near = [each for each in choices if ladder.recipe.flops / each[-1].flops <= FURTHEST_WITHOUT_FLOOR]
    chosen = (near or choices[:1])[-1]
    if budget is not None and cost is not None:
        totals = [sum(cost(run.size) for run in _runs(each, options.seeds)) for each in choices]
        chosen = _affordable(choices, totals, budget)
    plan["rungs"] = [_facts(size) for size in chosen]
    plan["target"] = _facts(ladder.recipe) | {"reads_data_times": ladder.recipe.tokens / there}
    plan["seconds"] = None if cost is None else [cost(size) for size in chosen]
    on_file.write(file, json_text(plan))
    return plan, chosen


def _affordable(choices: Sequence[list[Size]], seconds: Sequence[float], budget: float) -> list[Size]:
    """The ladder nearest to the recipe that fits the budget."""
    found = next((each for each, total in zip(choices, seconds, strict=True) if total <= budget), None)
    if found is None:
        least = min(seconds)
        raise UsageError(
            f"ladder: budget={budget:.0f}s: the cheapest ladder takes {duration(least)} here: give --budget "
            f"{math.ceil(least / 60)}m, or --print-commands for faster machines"
        )
    return found


def _facts(size: Size) -> Plan:
    names = ("parameters", "tokens", "steps", "step_tokens", "flops")
    return {"width": size.config.d_model, "layers": size.config.n_layers} | {
        name: getattr(size, name) for name in names
    }


def _measured(ladder: Ladder, sizes: Sequence[Size], validation: int, lock: int) -> Callable[[Size], float]:
    """The seconds of a run by its size, on a line through short trials of the smallest and the largest."""
    ends = sizes[0], sizes[-1]
    say("ladder: a short trial of two sizes", file=sys.stderr)
    starts, steps = zip(*(ladder.seconds(size, lock) for size in ends), strict=True)
    first, last = (size.flops / size.steps for size in ends)

    def seconds(size: Size) -> float:
        step = steps[0] + (steps[1] - steps[0]) * (size.flops / size.steps - first) / (last - first)
        forward = ladder.validations * validation / size.step_tokens / 3  # a third of a step's products
        return float(max(starts) + (size.steps + forward) * max(step, min(steps)))

    return seconds


def _runs(sizes: Sequence[Size], seeds: int) -> Iterator[RungRun]:
    """All runs in their order: more seeds of the cheapest rungs, and other learning rates of the second."""
    for number, size in enumerate(sizes, 1):
        for seed in range(seeds if number <= min(_MOST_WITH_SEEDS, len(sizes) - 2) else 1):
            yield RungRun(number, size, seed)
        if number == _LR_RUNG:
            for scale in _LR_SCALES:
                yield RungRun(number, size, lr_scale=scale)


def _table(plan: Plan, runs: Sequence[RungRun]) -> list[str]:
    """The plan for people."""
    rows = [["rung", "width", "layers", "parameters", "tokens", "a step", "steps", "FLOPs", "runs", "expected"]]
    target, rungs, total = plan["target"], plan["rungs"], 0.0
    for number, facts in enumerate([*rungs, target], 1):
        count = sum(run.rung == number for run in runs)
        time = count * plan["seconds"][number - 1] if count and plan["seconds"] else 0.0
        figures = [human(facts[key]) for key in ("parameters", "tokens", "step_tokens")]
        sizes = [str(facts["width"]), str(facts["layers"]), *figures, f"{facts['steps']:,}", human(facts["flops"])]
        rows.append([str(number) if count else "recipe", *sizes, str(count or ""), duration(time) if time else ""])
        total += time
    ratio, distance = target["tokens"] / target["parameters"], target["flops"] / rungs[-1]["flops"]
    lines = [*lines_of(rows), "", f"{ratio:.3g} tokens a parameter of body and head, as the recipe has"]
    if total:
        lines.append(f"expected: {duration(total)} for {len(runs)} runs, {len(_LR_SCALES)} of other learning rates")
    if distance > FURTHEST_WITHOUT_FLOOR:
        lines.append(f"note: {distance:.3g} times the largest rung: so far out, rungs must show a floor of the loss")
    if not runs[0].size.has_small_head:
        lines.append("note: the head of the smallest rung is larger than its body")
    if (times := target["reads_data_times"]) > 1:
        lines.append(f"note: the recipe reads its text {times:.2g} times, and the forecast is that of fresh text")
    return lines


def _train(ladder: Ladder, runs: Sequence[RungRun], plan: Plan, lock: int) -> dict[str, float]:
    """Train what is not finished; the losses of all runs by their names.

    Raises:
        UsageError: a run fails, or has no finite loss; another learning rate is better.
    """
    losses: dict[str, float] = {}
    for number, run in enumerate(runs):
        begun, loss = os.times().elapsed, ladder.loss(run)
        if loss is None:
            loss = ladder.train(run, lock)
            say(f"{run.name}: {on_file.METRIC} {loss:.4f} in {duration(os.times().elapsed - begun)}", file=sys.stderr)
        if not math.isfinite(loss) and run.lr_scale == 1:
            raise UsageError(f"ladder: {run.name} has ended without a finite loss: lower --model.optimizer.lr")
        losses[run.name] = loss
        if run.lr_scale == _LR_SCALES[-1]:
            _check_lr(ladder, runs[: number + 1], losses)
    return losses


def _check_lr(ladder: Ladder, runs: Sequence[RungRun], losses: Mapping[str, float]) -> None:
    """Refuse a learning rate that is a step off: the loss is lower by two deviations of seeds with another."""
    same = _by_rung(runs, losses)
    flops = {run.rung: run.size.flops for run in runs}
    noise = forecast([Rung(flops[rung], tuple(own)) for rung, own in same.items()], max(flops.values())).noise
    own = float(np.mean(same[_LR_RUNG]))
    others = {run.lr_scale: losses[run.name] for run in runs if run.lr_scale != 1 and math.isfinite(losses[run.name])}
    scale = min(others, key=others.__getitem__, default=1.0)
    if scale == 1 or math.log(own / others[scale]) <= 2 * noise:
        return
    rates = learning_rates(ladder.settings["model"]["init_args"])
    take = " ".join(f"--model.optimizer.{key} {scale * owner[key]:g}" for owner, key in rates)
    raise UsageError(
        f"ladder: the learning rate is a step off: rung {_LR_RUNG} ends at {others[scale]:.4f} with {scale:g} times "
        f"of it and at {own:.4f} with it: take {take or 'another'}, and another --out"
    )


def _by_rung(runs: Sequence[RungRun], losses: Mapping[str, float]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for run in runs:
        if run.lr_scale == 1:
            found.setdefault(run.rung, []).append(losses[run.name])
    return found


def _forecast(
    ladder: Ladder, plan: Plan, runs: Sequence[RungRun], losses: Mapping[str, float], words: list[str]
) -> Plan:
    """The forecast, which is written once: a later call with the same losses keeps its date."""
    file, target = ladder.out / on_file.NAME, plan["target"]["flops"]
    rungs = [facts | {"losses": own} for facts, own in zip(plan["rungs"], _by_rung(runs, losses).values(), strict=True)]
    if file.is_file() and (record := on_file.read_forecast("ladder", str(file)))["rungs"] == rungs:
        return record
    points = on_file.rungs_of({"rungs": rungs})
    shown = [(flops, forecast(points, flops)) for flops in np.geomspace(rungs[0]["flops"], target, 20).tolist()]
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "recipe": words,
        "sha256": on_file.sha256(plan["settings"]),
        "settings": plan["settings"],
        "metric": on_file.METRIC,
        "target": plan["target"],
        "rungs": rungs,
        "other_learning_rates": {f"{run.lr_scale:g}": losses[run.name] for run in runs if run.lr_scale != 1},
        "forecast": asdict(forecast(points, target)),
        "curve": [[flops, one.loss, one.low, one.high] for flops, one in shown],
    }
    on_file.write(file, json_text(record))
    record = on_file.read_forecast("ladder", str(file))
    on_file.write(file.with_suffix(".html"), on_file.page(record))
    return record


def _commit() -> str | None:
    """The commit of the current folder, if it is one of git."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
