"""`compare`: runs side by side: settings that differ, curves, and what their seeds can show. Loads no torch."""

import shutil
import sys

from lightning_tricks._core.errors import UsageError
from lightning_tricks.commands import CommandParser
from lightning_tricks.commands.answers import add_answers, check_files, json_text, names_of, write_answers


def run(args: list[str]) -> None:
    """Print the comparison of runs, or write it as JSON or a page.

    Exits with 1 if a group is worse, and with 2 if a folder that was named has no log; then the others are compared.

    Raises:
        UsageError: see `read_runs` and `compare_runs`; an option has a wrong value; a file cannot be written.
    """
    from lightning_tricks.logs.compare.compared_run import AXES, read_runs
    from lightning_tricks.logs.compare.comparison import compare_runs
    from lightning_tricks.logs.compare.curves import draw_in_terminal
    from lightning_tricks.logs.compare.report import page, record, text
    from lightning_tricks.logs.terminal import shows_unicode

    parser = CommandParser(
        "lightning-tricks compare",
        description="Runs side by side, of this collection or of another Lightning project. Runs whose settings differ "
        "in seeds alone are one group; each group is compared with the first.",
        allow_abbrev=False,
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
        help="where the verdict is; default: equal steps, or tokens where batches differ",
    )
    parser.add_argument(
        "--seed_noise", metavar="FIGURE", help="standard deviation over seeds, for groups of one run each"
    )
    parser.add_argument(
        "--predictions", nargs="+", default=[], metavar="FILE", help="of predict --output, one for each group"
    )
    add_answers(parser)
    options = parser.parse_args(args)
    names, noise = names_of("compare", options), _noise(options.seed_noise)
    check_files("compare", options)
    runs, left_out = read_runs(options.folders, names)
    found = compare_runs(runs, options.group, options.at, noise, "val_loss" in names, options.predictions)
    write_answers(
        options,
        lambda: text(found, left_out, draw_in_terminal(found, shutil.get_terminal_size().columns, shows_unicode())),
        html=lambda: page(found, left_out),
        json=lambda: json_text(record(found, left_out)),
    )
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
