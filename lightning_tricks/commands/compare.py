"""`compare`: runs side by side: settings that differ, curves, and what their seeds can show. Loads no torch."""

import math
import shutil
import sys
import textwrap
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.quote import html_text, printable
from lightning_tricks._core.terminal import shows_color
from lightning_tricks.commands import CommandParser
from lightning_tricks.commands.answers import add_answers, check_files, json_text, names_of, write_answers
from lightning_tricks.logs import forecast_file as on_file
from lightning_tricks.logs import page as html
from lightning_tricks.logs import table
from lightning_tricks.logs.compared_run import AXES, ComparedRun, axis_text, axis_unit, read_runs
from lightning_tricks.logs.comparison import LEVEL, Comparison, Row, compare_runs
from lightning_tricks.logs.intervals import Interval
from lightning_tricks.logs.page import LOG_WORD, Curve, is_wide, limits, thinned
from lightning_tricks.logs.run import find_runs

_BEGIN = 0.1  # of the axis: what is higher there may be above the frame
_HEIGHT, _LABELS = 9, 14  # lines; columns right of the plot for its numbers
_MOST_SETTINGS, _LONGEST = 20, 28  # rows of settings, and characters of one, in the terminal
_WIDTH = 118  # of a line of text there


def groups_table(found: Comparison) -> table.Table:
    """A row for each group: its letter, seeds, and its runs with their steps."""
    rows = [["", "seeds", "steps", "runs"]]
    for group in found.groups:
        steps = sorted({run.run.steps or 0 for run in group.runs})
        shown = f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,}"
        rows.append([group.letter, str(group.n_seeds), shown, ", ".join(run.name for run in group.runs)])
    return rows


def settings_table(found: Comparison) -> table.Table:
    """A row for each setting that differs: its short name, and each group's values."""
    rows = [["settings that differ", *(group.letter for group in found.groups)]]
    return rows + [[name, *values] for name, values in found.settings().items()]


def values_table(found: Comparison) -> table.Table:
    """A row for each place at which the groups are compared, and one of the spread of seeds there."""
    first, others = found.groups[0], found.groups[1:]
    heads = [found.metric + ("" if found.is_validation else ", means")]
    heads += [group.letter for group in found.groups] + [f"{group.letter} - {first.letter}" for group in others]
    rows = [heads]
    shown = [row for row in found.rows.values() if row.name == "steps" or not _as_steps(found, row)]
    for row in sorted(shown, key=lambda row: row.name != found.at):
        place = place_text(row)
        if row.name == "steps":
            place += "".join(f", {_amount(other)}" for other in found.rows.values() if _as_steps(found, other))
        differences = [difference_text(row, number) for number in range(1, len(found.groups))]
        rows.append([place, *map(_figure, row.means), *differences])
        if row.name == found.at and any(spread is not None for spread in row.spreads):
            spreads = ["" if spread is None else _figure(spread) for spread in row.spreads]
            rows.append(["  spread of seeds there", *spreads, *("" for _ in others)])
    return rows


def _as_steps(found: Comparison, row: Row) -> bool:
    """Whether a row says what that of steps says."""
    is_cost = row.name in ("tokens", "flops") and row.name != found.at
    return is_cost and "steps" in found.rows and found.amount_of_step(row.name) is not None


def place_text(row: Row) -> str:
    """A row's name: `at 819k tokens`."""
    return row.name if row.place is None else f"at {_amount(row)}"


def _amount(row: Row) -> str:
    assert row.place is not None
    size, unit = axis_unit(row.name, row.place)
    return f"{row.place:,.0f} {unit}" if row.name == "steps" else f"{table.human(row.place / size)} {unit}"


def difference_text(row: Row, number: int) -> str:
    """A difference with its interval, where there is one."""
    if (interval := row.intervals[number]) is not None:
        return f"{interval.difference:+.4f} ± {interval.half_width:.4f}"
    return f"{row.difference(number):+.4f}" if math.isfinite(row.difference(number)) else ""


def _percent(share: float) -> str:
    return f"{100 * share:.4g} %"


def _figure(value: float) -> str:
    return f"{value:.4f}"


def verdicts(found: Comparison) -> list[str]:
    """One sentence for each group beside the first; one in all where there is one group."""
    if len(found.groups) == 1:
        return [_of_one_group(found)]
    return [_verdict(found, number) for number in range(1, len(found.groups))]


def _verdict(found: Comparison, number: int) -> str:
    first, group, row = found.groups[0], found.groups[number], found.row
    kind, interval, where = found.verdict(number), row.intervals[number], _where(row)
    a, b = first.letter, group.letter
    failed = [(sum(map(found.has_failed, one.runs)), one) for one in (first, group)]
    if counts := [f"{number} of {len(one.runs)} runs of {one.letter}" for number, one in failed if number]:
        rest = f"{b} is {kind} than {a}" if kind != "not known" else f"{a} and {b} do not compare"
        return f"{rest}: {' and '.join(counts)} ended without a finite loss"
    if interval is None:
        return _of_single_runs(found, number, where)
    low, high = interval.difference - interval.half_width, interval.difference + interval.half_width
    span = f"{_percent(found.level)} interval {low:+.4f} to {high:+.4f}, {interval.method}"
    if kind == "no difference":
        return (
            f"{a} and {b} are not distinguishable by these seeds: {b} - {a} = {interval.difference:+.4f} {where} "
            f"({span}); only one above {interval.half_width:.4f} would show"
        )
    values = f"{found.metric} {_figure(row.means[number])} against {_figure(row.means[0])}"
    lower = "lower" if kind == "better" else "higher"
    return f"{b} is {kind} than {a}: {values} {where}, {lower} by {abs(interval.difference):.4f} ({span})"


def _where(row: Row) -> str:
    return place_text(row) if row.place is not None else f"at the {row.name} point"


def _of_single_runs(found: Comparison, number: int, where: str) -> str:
    """What may be said of one run each: which was lower, and at how many points."""
    difference, a, b = found.row.difference(number), found.groups[0].letter, found.groups[number].letter
    kind = "lower" if difference < 0 else "higher"
    which = f"{kind} than {a} by {abs(difference):.4f}" if difference else f"equal to {a}"
    same, count = found.points_with_sign(number, difference)
    words = f", and {kind if difference else 'equal'} at {same} of {count} points" if count else ""
    return f"{b} is {which} {where}{words} (one seed each: no statement of significance)"


def _of_one_group(found: Comparison) -> str:
    row = found.row
    names, spread, apart = (
        f"{len(row.values)} runs",
        row.spreads[0],
        max(row.values.values()) - min(row.values.values()),
    )
    if spread is None:
        how = f"they end {apart:.4f} apart, which is no seed's doing" if apart else "all values are equal"
        return f"no difference of settings: the {names} have one seed as well: {how}"
    if not math.isfinite(spread):
        return f"no difference of settings: the {names} differ only in their seed, and some ended without a finite loss"
    return (
        f"no difference that these seeds can show: the {names} differ only in their seed. They lie "
        f"{apart:.4f} apart {_where(row)}, a standard deviation of {spread:.4f} (for --seed_noise)"
    )


def text(found: Comparison, left_out: Sequence[str], curves: Sequence[str] = ()) -> str:
    """All of it for a terminal."""
    parts = [table.lines_of(groups_table(found), left={0, 3})]
    settings = settings_table(found)
    if len(settings) > 1:
        shown = [[table.shortened(cell, _LONGEST) for cell in row] for row in settings[: _MOST_SETTINGS + 1]]
        more = len(settings) - 1 - _MOST_SETTINGS
        parts.append([*table.lines_of(shown), *([f"and {more} more: --html FILE has all"] if more > 0 else [])])
    parts.append(table.lines_of(values_table(found)))
    parts.append(list(curves))
    parts.append([_filled(f"note: {line}") for line in notes(found, left_out)])
    parts.append([_filled(f"compare: {line}") for line in verdicts(found)])
    return "\n\n".join("\n".join(part) for part in parts if part)


def page(found: Comparison, left_out: Sequence[str]) -> str:
    """The page."""
    alone = len(found.groups) == 1
    names = [f"{group.letter}: {', '.join(run.name for run in group.runs)}" for group in found.groups]
    names = [run.name for run in found.groups[0].runs] if alone else names
    legend = (f'<span><i class="{html.color_class(n)}"></i>{html_text(name)}</span>' for n, name in enumerate(names))
    told = "".join(f"<li>{html_text(line)}</li>" for line in notes(found, left_out))
    settings = settings_table(found)
    axes = [axis for axis in found.known if axis in ("steps", "hours") or found.amount_of_step(axis) is None]
    parts = [
        *(f'<p class="verdict">{html_text(line)}</p>' for line in verdicts(found)),
        table.html_table(groups_table(found), left={3}),
        table.html_table(values_table(found)),
        table.html_table(settings) if len(settings) > 1 else "<p>No setting differs.</p>",
        f"<ul>{told}</ul>" if told else "",
        f'<p class="legend">{"".join(legend)}</p><div class="plots">',
        *(_figure_over(found, axis) for axis in axes),
        "</div>",
    ]
    return html.page(f"compare: {len(found.runs)} runs, {len(found.groups)} group{'s' * (not alone)}", parts)


def _figure_over(found: Comparison, axis: str) -> str:
    curves, unit = run_curves(found, axis)
    caption = caption_of(found, unit, curves)
    low, high, log = axis_shown(curves)
    each = [f"{table.human(n)} {axis_text(one)}" for one in ("tokens", "flops") if (n := found.amount_of_step(one))]
    caption += f"; in all runs a step is {', '.join(each)}" if each and axis == "steps" else ""
    return html.figure(html.plot(curves, (low, high), log=log), caption)


def _filled(line: str) -> str:
    return textwrap.fill(
        printable(line), _WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )


def notes(found: Comparison, left_out: Sequence[str]) -> Iterator[str]:
    """What a reader of the figures must know; what was left out or not read first."""
    yield from left_out
    yield from found.notes
    if any(found.row.intervals[number] is None for number in range(1, len(found.groups))):
        yield "for a verdict, run another seed of one group or more, or give --seed_noise if their spread is known"
    if any(interval is not None for row in found.rows.values() for interval in row.intervals):
        several = len(found.groups) > 2
        words = f", {_percent(found.level)} each, so that all hold together (Bonferroni)" if several else ""
        yield f"± is half of a {_percent(LEVEL)} interval of the difference over seeds{words}; lower is better"


def record(found: Comparison, left_out: Sequence[str]) -> dict[str, Any]:
    """All of it for JSON."""
    first, others = found.groups[0], found.groups[1:]
    return {
        "metric": found.metrics,
        "is_validation": found.is_validation,
        "at": found.at,
        "level": found.level,
        "groups": [
            {"letter": group.letter, "n_seeds": group.n_seeds, "runs": [run.name for run in group.runs]}
            for group in found.groups
        ],
        "settings_that_differ": {
            name: dict(zip([group.letter for group in found.groups], values, strict=True))
            for name, values in found.settings().items()
        },
        "rows": [_row_record(found, row) for row in found.rows.values()],
        "verdicts": [
            {"group": group.letter, "against": first.letter, "verdict": found.verdict(number), "line": line}
            for number, (group, line) in enumerate(zip(others, verdicts(found), strict=False), 1)
        ]
        or [{"group": "A", "against": None, "verdict": "no difference", "line": verdicts(found)[0]}],
        "notes": list(notes(found, left_out)),
    }


def _row_record(found: Comparison, row: Row) -> dict[str, Any]:
    groups = {
        group.letter: {
            "mean": row.means[number],
            "spread_of_seeds": row.spreads[number],
            "runs": {run.name: row.values[run.name] for run in group.runs},
            "difference": row.difference(number) if number else None,
            "interval": _interval_record(row.intervals[number]),
        }
        for number, group in enumerate(found.groups)
    }
    return {"name": row.name, "place": row.place, "groups": groups}


def _interval_record(interval: Interval | None) -> dict[str, Any] | None:
    if interval is None:
        return None
    ends = [interval.difference - interval.half_width, interval.difference + interval.half_width]
    return {"difference": interval.difference, "low": ends[0], "high": ends[1], "method": interval.method}


# ---- its curves; the limits show the ends of all


def run_curves(found: Comparison, axis: str) -> tuple[list[Curve], str]:
    """A curve for each run, in the color of its group, and the unit of x; of one group, each in a color of its own."""
    alone = len(found.groups) == 1
    curves: list[Curve] = []
    size, unit = axis_unit(axis, max(found.places(run, axis)[-1] for run in found.runs))
    for number, group in enumerate(found.groups):
        for place, run in enumerate(group.runs):
            outcome, label = thinned(found.outcomes[run.name].finite()), run.name if alone else group.letter
            x = found.places(run, axis, outcome) / size
            curves.append(Curve(place if alone else number, label, x, outcome.values))
    return curves, unit


def axis_shown(curves: list[Curve]) -> tuple[float, float, bool]:
    """The ends of the axis of values, of what comes after the first tenth, and whether it is logarithmic."""
    end = max((float(curve.x[-1]) for curve in curves if len(curve.x)), default=1.0)
    later = [curve.y[curve.x >= _BEGIN * end] for curve in curves]
    ends = [end for curve in curves if len(curve.y) for end in (curve.y[-1], curve.y.min())]
    values = np.concatenate([*later, ends])
    return (*limits(values, is_wide(values)), is_wide(values))


def caption_of(found: Comparison, unit: str, curves: list[Curve]) -> str:
    """What a plot shows over a unit, and how high the points are that it does not."""
    top = max((float(curve.y.max()) for curve in curves if len(curve.y)), default=-math.inf)
    _, high, log = axis_shown(curves)
    cut = f"; first values, up to {top:.4g}, are above the frame" if top > high else ""
    return f"{found.metric} over {unit}{LOG_WORD * log}{cut}"


def draw_in_terminal(found: Comparison, columns: int, unicode: bool) -> list[str]:
    """The curve of each group's first run over the axis of the verdict, as lines; of one group, that of each run.

    One line where uniplot is not installed.

    Args:
        found: the comparison.
        columns: width of the terminal.
        unicode: whether it shows more than ASCII.
    """
    axis = found.at if found.at in found.known else found.known[0]
    of_runs, unit = run_curves(found, axis)
    firsts = {curve.label: curve for curve in reversed(of_runs) if len(curve.x) > 1}
    if not (curves := list(reversed(firsts.values()))[: table.MOST_CURVES]):
        return []
    low, high, log = axis_shown(curves)
    size, letter = table.unit(max(float(curve.x[-1]) for curve in curves))
    try:
        lines = table.draw_curves(
            [(curve.label, (curve.x / size).tolist(), curve.y.tolist()) for curve in curves],
            width=max(columns - _LABELS, table.LEAST_WIDTH),
            height=_HEIGHT,
            x_unit=letter,
            y_min=low,
            y_max=high,
            y_as_log=log,
            x_gridlines=[],
            character_set="braille" if unicode and (shows_color() or len(curves) == 1) else "ascii",
            color=shows_color(),
        )
    except UsageError as error:
        return [str(error)]
    lines = [caption_of(found, unit, curves), *lines]
    return lines if unicode else [line.translate(table.TO_ASCII) for line in lines]


# ---- the command


def run(args: list[str]) -> None:
    """Print the comparison of runs, or write it as JSON or a page.

    Exits with 1 if a group is worse, and with 2 if a folder that was named has no log; then the others are compared.

    Raises:
        UsageError: see `read_runs` and `compare_runs`; an option has a wrong value; a file cannot be written.
    """
    parser = CommandParser(
        "compare",
        description="Runs side by side, of this collection or of another Lightning project. Runs whose settings differ "
        "in seeds alone are one group; each group is compared with the first.",
    )
    parser.add_argument("folders", nargs="+", metavar="DIR", help="of a run, or with several")
    parser.add_argument(
        "--group",
        choices=["settings", "folders", "runs"],
        default="settings",
        help="what is a group: runs of equal settings, of one DIR, or each run; default: %(default)s",
    )
    parser.add_argument(
        "--at",
        choices=[*AXES, "last", "best"],
        metavar="PLACE",
        help=f"where the verdict is: {', '.join(AXES)}, last or best; default: steps, or tokens where batches differ",
    )
    parser.add_argument(
        "--seed_noise", metavar="FIGURE", help="standard deviation over seeds, for groups of one run each"
    )
    parser.add_argument("--forecast", metavar="FILE", help="of a ladder: the runs beside it instead, one or more")
    parser.add_argument("--speedup", metavar="LADDER", help="what the second DIR saves in compute against the first")
    add_answers(parser)
    options = parser.parse_args(args)
    names, noise = names_of("compare", options), _noise(options.seed_noise)
    check_files("compare", options)
    if options.forecast is not None:
        _beside_forecast(options, names)
        return
    runs, left_out = read_runs(options.folders, names)
    if options.speedup is not None:
        _print_speedup(options, runs)
        return
    found = compare_runs(runs, options.group, options.at, noise, "val_loss" in names)
    write_answers(
        options,
        lambda: text(
            found, left_out, draw_in_terminal(found, shutil.get_terminal_size().columns, table.shows_unicode())
        ),
        html=lambda: page(found, left_out),
        json=lambda: json_text(record(found, left_out)),
    )
    if len({each.argument for each in runs}) < len(options.folders):
        sys.exit(2)  # a line says which folder was left out
    if any(found.verdict(number) == "worse" for number in range(1, len(found.groups))):
        sys.exit(1)


def _beside_forecast(options: Namespace, names: dict[str, str]) -> None:
    """Print each run beside the forecast of a ladder."""
    record = on_file.read_forecast("compare: forecast", options.forecast)
    found = [
        on_file.outcome(record, run) for folder in options.folders for run in find_runs(Path(folder), names, "compare")
    ]
    lines = [on_file.forecast_line(record), *(each["line"] for each in found)]
    write_answers(
        options,
        lambda: "\n".join(f"compare: {printable(line)}" for line in lines),
        html=lambda: on_file.page(record, found),
        json=lambda: json_text({"forecast": record["forecast"], "date": record["date"], "runs": found}),
    )


def _print_speedup(options: Namespace, runs: list[ComparedRun]) -> None:
    """Print what the runs of the second folder save in compute."""
    if options.html is not None or len(options.folders) != 2:
        raise UsageError(
            f"compare: speedup={options.speedup}: give two folders, before and after a change, and no html"
        )
    record = on_file.read_forecast("compare: speedup", options.speedup)
    sides = [[run for run in runs if run.argument == number] for number in (0, 1)]
    found = on_file.speedup_of(record, sides)
    write_answers(options, lambda: f"compare: {on_file.speedup_line(found)}", json=lambda: json_text(asdict(found)))


def _noise(word: str | None) -> float | None:
    """The number of an option, above 0."""
    try:
        value = None if word is None else float(word)
    except ValueError:
        value = -1.0
    if value is not None and not 0 < value < float("inf"):
        raise UsageError(f"compare: seed_noise={word}: give a number above 0, in the units of the loss")
    return value
