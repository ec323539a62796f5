"""`compare`: runs side by side: settings that differ, curves, and what their seeds can show. Loads no torch.

From the first to the last: `compared_run`, `statistics`, `predictions`, `comparison`, `report`, `curves` and `page`.
"""

import json
import sys
from pathlib import Path

from lightning_tricks._errors import UsageError
from lightning_tricks._writable import check_file
from lightning_tricks.commands import CommandParser


def run(args: list[str]) -> None:
    """Print the comparison of runs, or write it as JSON, page or picture.

    Exits with 1 if a group is worse, and with 2 if a folder that was named has no log; then the others are compared.

    Raises:
        UsageError: see `read_runs` and `compare_runs`; an option has a wrong value; a file cannot be written.
    """
    from lightning_tricks.commands.compare.compared_run import AXES, read_runs
    from lightning_tricks.commands.compare.comparison import compare_runs
    from lightning_tricks.commands.compare.curves import draw_in_terminal, draw_picture
    from lightning_tricks.commands.compare.page import page
    from lightning_tricks.commands.compare.report import record, text

    parser = CommandParser(
        "lightning-tricks compare",
        description="Runs side by side, of this collection or of another Lightning project. Runs whose settings differ "
        "in seeds alone are one group; each group is compared with the first.",
        allow_abbrev=False,
    )
    parser.add_argument("folders", nargs="+", metavar="DIR", help="of a run, or with several")
    parser.add_argument(
        "--names", nargs="+", default=[], metavar="ROLE=NAME", help="of metrics, such as loss=my/loss val_loss=my/val"
    )
    parser.add_argument(
        "--group",
        choices=["settings", "folders", "runs"],
        default="settings",
        help="what is a group: runs of equal settings, of one DIR, or each run; default: %(default)s",
    )
    parser.add_argument(
        "--at",
        choices=[*AXES, "last", "best"],
        help="where the verdict is; default: equal steps, or tokens where batches differ",
    )
    parser.add_argument(
        "--seed_noise", metavar="FIGURE", help="standard deviation over seeds, for groups of one run each"
    )
    parser.add_argument(
        "--predictions", nargs="+", default=[], metavar="FILE", help="of predict --output, one for each group"
    )
    parser.add_argument("--png", metavar="FILE", help="write a picture of the curves")
    parser.add_argument("--html", metavar="FILE", help="write a page with tables and curves")
    parser.add_argument("--json", metavar="FILE", help="write JSON, - for standard output")
    options = parser.parse_args(args)
    names = dict(word.partition("=")[::2] for word in options.names)
    if wrong := next((role for role, name in names.items() if not name), None):
        raise UsageError(f"compare: names={wrong}: give ROLE=NAME, such as val_loss=my/val")
    if options.png is not None and Path(options.png).suffix != ".png":
        raise UsageError(f"compare: png={options.png}: give a name that ends in .png")
    for name in ("png", "html", "json"):
        if getattr(options, name) not in (None, "-" if name == "json" else None):
            check_file(f"compare: {name}", getattr(options, name))
    noise = _noise(options.seed_noise)
    runs, left_out = read_runs(options.folders, names)
    found = compare_runs(runs, options.group, options.at, noise, "val_loss" in names, options.predictions)
    if options.png is not None:
        draw_picture(found, Path(options.png))
    if options.html is not None:
        Path(options.html).write_text(page(found, left_out), encoding="utf-8")
    written = json.dumps(record(found, left_out), indent=1, allow_nan=False) + "\n"
    if options.json == "-":
        sys.stdout.write(written)
    else:
        print(text(found, left_out, draw_in_terminal(found)))
        if options.json is not None:
            Path(options.json).write_text(written, encoding="utf-8")
    if len({each.argument for each in runs}) < len(options.folders):
        sys.exit(2)  # a line says which folder was left out
    if any(found.verdict(number) == "worse" for number in range(1, len(found.groups))):
        sys.exit(1)


def _noise(word: str | None) -> float | None:
    """The number of an option, above 0."""
    try:
        value = None if word is None else float(word)
    except ValueError:
        value = -1.0
    if value is not None and not 0 < value < float("inf"):
        raise UsageError(f"compare: seed_noise={word}: give a number above 0, in the units of the loss")
    return value
