"""A forecast on file, written before the run that it is of, and what became of it. Loads no torch."""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.foreign_files import why
from lightning_tricks._core.quote import html_text
from lightning_tricks.logs import page as html
from lightning_tricks.logs.compared_run import ComparedRun, is_seed
from lightning_tricks.logs.page import Curve
from lightning_tricks.logs.run import Run
from lightning_tricks.logs.scaling_law import Rung, SeededLosses, Speedup, speedup

NAME = "forecast.json"
METRIC = "val/loss"
# Settings that decide the loss at the end, by dotted names; places, intervals of logs and watchers do not.
_DECIDES = re.compile(
    r"(model|data|init_from|total_tokens)\b(?!.*\.(cache_dir|num_workers)$)|trainer\.(max_\w+|accumulate_grad_batches|"
    r"gradient_clip_\w+|precision|plugins|strategy|devices|num_nodes|overfit_batches|limit_(train|val)_batches|callbacks$)"
)
_OF_VALIDATION = re.compile(r"(data\.(?!micro_batch_size|packing|shuffle|skip_samples)|trainer\.limit_val_batches)")


def deciding(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run, by dotted names, that decide its loss; without seeds."""
    return {name: value for name, value in settings.items() if _DECIDES.match(name) and not is_seed(name)}


def write(file: Path, text: str) -> None:
    """Write a file in one piece."""
    beside = file.with_name(f"{file.name}.tmp")
    beside.write_text(text, encoding="utf-8")
    beside.replace(file)


def sha256(settings: Mapping[str, Any]) -> str:
    """Of settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The names of settings that are not equal."""
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def read_forecast(option: str, path: str) -> dict[str, Any]:
    """The forecast in a file, or in the folder of a ladder.

    Raises:
        UsageError: it cannot be read as a forecast.
    """
    file = Path(path, NAME) if Path(path).is_dir() else Path(path)
    try:
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        _ = record["forecast"]["loss"], record["target"]["steps"], record["settings"], record["rungs"][0]["losses"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = why(error) if isinstance(error, OSError) else "it holds no forecast"
        raise UsageError(f"{option}={path}: {reason}: give the {NAME} of a ladder, or its folder") from error
    return record


def rungs_of(record: Mapping[str, Any]) -> list[Rung]:
    """The rungs of a forecast."""
    return [Rung(each["flops"], tuple(each["losses"])) for each in record["rungs"]]


def forecast_line(record: Mapping[str, Any]) -> str:
    """The forecast for people."""
    found, steps = record["forecast"], record["target"]["steps"]
    if found["refusal"] is not None:
        return f"no forecast: {found['refusal']}"
    floor = "" if found["has_floor"] else "; the rungs show no floor of the loss"
    return (
        f"{METRIC} after {steps:,} steps: {_interval(found)}, {found['distance']:.3g} times the compute of the "
        f"largest rung{floor}"
    )


def _interval(found: Mapping[str, Any]) -> str:
    return f"{found['loss']:.4f}, 90 % interval {found['low']:.4f} to {found['high']:.4f}"


def outcome(record: Mapping[str, Any], run: Run) -> dict[str, Any]:
    """A run beside a forecast: a line; its loss, its miss and whether it is inside where the forecast is of it."""
    found, steps, done = record["forecast"], record["target"]["steps"], run.steps or 0
    got: dict[str, Any] = {"name": run.name, "loss": None, "miss": None, "is_inside": None}
    if names := differing(record["settings"], deciding(run.settings)):
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return got | {"line": f"{run.name}: not the run of the forecast: {', '.join(names[:3])}{more} differ"}
    if done < steps or run.val_loss is None or not math.isfinite(run.val_loss):
        state = f"{done:,} of {steps:,} steps" if done < steps else "without a finite loss"
        return got | {"line": f"{run.name}: {state}: the forecast is of the end of the run"}
    got["loss"], line = run.val_loss, f"{run.name}: got {run.val_loss:.4f}"
    if found["loss"] is not None:
        got["miss"], got["is_inside"] = run.val_loss / found["loss"] - 1, found["low"] <= run.val_loss <= found["high"]
        line += f", predicted {_interval(found)}: {got['miss']:+.2%}, {'inside' if got['is_inside'] else 'outside'}"
    if (last := max(run.scalars.series(METRIC), default=done - 1) + 1) < steps:
        line += f"; its last validation was at step {last:,}, and not at the end"
    began = run.scalars.facts.first_time
    if began is not None and began < datetime.fromisoformat(record["date"]).timestamp():
        line += "; the run had begun before the forecast was written"
    return got | {"line": line + ("; the forecast is refused" if found["refusal"] else "")}


def page(record: Mapping[str, Any], outcomes: Sequence[Mapping[str, Any]] = ()) -> str:
    """A page with the rungs, the forecast with its interval, and the runs that came later."""
    rungs, curve = record["rungs"], np.array(record["curve"], float).reshape(-1, 4).T
    means = [float(np.mean(each["losses"])) for each in rungs]
    curves = [Curve(0, "rungs, mean over seeds", np.log10([each["flops"] for each in rungs]), np.array(means))]
    for group, name, values in ((1, "forecast", curve[1]), (7, "90 % interval", curve[2]), (7, "", curve[3])):
        curves.append(Curve(group, name, np.log10(curve[0]), values))
    end = np.log10([record["target"]["flops"]])
    runs = [each for each in outcomes if each["loss"] is not None]
    curves += [Curve(2 + n % 4, each["name"], end, np.array([each["loss"]])) for n, each in enumerate(runs)]
    legend = (
        f'<span><i class="{html.color_class(c.group)}"></i>{html_text(c.label)}</span>' for c in curves if c.label
    )
    ends = html.limits(np.concatenate([each.y for each in curves]))
    lines = [forecast_line(record), *(each["line"] for each in outcomes)]
    parts = [f'<p class="verdict">{html_text(line)}</p>' for line in lines]
    parts.append(f'<p class="legend">{"".join(legend)}</p>')
    parts.append(html.figure(html.plot(curves, ends), f"{METRIC} over the power of ten of FLOPs"))
    return html.page(f"forecast of {record['date']}", parts)


def speedup_of(record: Mapping[str, Any], sides: Sequence[Sequence[ComparedRun]]) -> Speedup:
    """What the runs of B save against those of A, by the rungs of a ladder.

    Raises:
        UsageError: a run without a validation loss or FLOPs; tokenizers or validation texts that differ.
    """
    found = []
    ladder = {name: value for name, value in record["settings"].items() if _OF_VALIDATION.match(name)}
    for runs in sides:
        losses: dict[str, float] = {}
        for run in runs:
            if names := differing(ladder, {name: run.settings.get(name) for name in ladder}):
                raise UsageError(
                    f"compare: speedup: {run.name}: {names[0]} is not that of the ladder, so its loss is of other "
                    "tokens: take runs on the ladder's data"
                )
            flops = run.amounts["flops"]
            if run.run.val_loss is None or flops is None:
                what = "validation loss" if run.run.val_loss is None else "FLOPs (MFUMonitor)"
                raise UsageError(f"compare: speedup: {run.name} has logged no {what}, which a speedup needs")
            losses[repr(sorted(run.seeds.items()))], cost = run.run.val_loss, float(flops.amounts[-1])
        found.append(SeededLosses(cost, losses))
    return speedup(rungs_of(record), found[0], found[1])


def speedup_line(found: Speedup) -> str:
    """The speedup for people."""
    if found.refusal is not None:
        return f"no speedup: {found.refusal}"
    return (
        f"B is worth {found.factor:.3g} times the compute of A: 90 % interval {found.low:.3g} to {found.high:.3g}, "
        f"by the {found.method} of the ladder"
    )
