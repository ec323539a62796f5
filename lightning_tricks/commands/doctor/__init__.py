"""`doctor`: what is wrong with a run, by its logs, with evidence, the likely cause and the remedy. Loads no torch.

From the first to the last: `scalar_records`, `read_log` and `report`; the symptoms are in `monitors/doctor`, which asks
the same questions during a run.
"""

import json
import sys
from pathlib import Path

from lightning_tricks._errors import UsageError
from lightning_tricks._writable import check_file
from lightning_tricks.commands import CommandParser


def run(args: list[str]) -> None:
    """Print the findings of a run; write them as a page or as JSON. Exits with 1 if one is above a note.

    Raises:
        UsageError: there is no log, it cannot be read or has no training loss; a file cannot be written.
    """
    from lightning_tricks.commands.doctor.read_log import find_run, read_log, read_printed
    from lightning_tricks.commands.doctor.report import Report
    from lightning_tricks.monitors.doctor.run_log import RunLog
    from lightning_tricks.monitors.doctor.symptoms import findings

    parser = CommandParser(
        "lightning-tricks doctor",
        description="What is wrong with a run, by its logs; of this collection or of another Lightning project.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="LOGDIR", help="of a run; of several, the newest is taken")
    parser.add_argument(
        "--names", nargs="+", default=[], metavar="ROLE=NAME", help="of metrics, such as loss=my/loss val_loss=my/val"
    )
    parser.add_argument(
        "--stderr", nargs="+", default=[], metavar="FILE", help="what the run has printed, such as slurm-1.out"
    )
    parser.add_argument("--html", metavar="FILE", help="write a page with a plot for each finding")
    parser.add_argument("--json", metavar="FILE", help="write JSON, - for standard output")
    options = parser.parse_args(args)
    names = dict(word.partition("=")[::2] for word in options.names)
    if wrong := next((role for role, name in names.items() if not name), None):
        raise UsageError(f"doctor: names={wrong}: give ROLE=NAME, such as loss=my/loss")
    for name in ("html", "json"):
        if getattr(options, name) not in (None, "-" if name == "json" else None):
            check_file(f"doctor: {name}", getattr(options, name))
    lines, folder = read_printed(options.stderr), Path(options.folder)
    try:
        folder = find_run(folder)
        log, unread = read_log(folder, names)
    except UsageError as error:
        if not lines:
            raise
        log, unread = RunLog(), [str(error)]  # it has ended before its first log step
    log.printed = lines
    report = Report(str(folder), log, findings(log), unread)
    if options.html is not None:
        Path(options.html).write_text(report.html(), encoding="utf-8")
    record = json.dumps(report.record(), indent=1, allow_nan=False) + "\n"
    if options.json == "-":
        sys.stdout.write(record)
    else:
        print(report.text())
        if options.json is not None:
            Path(options.json).write_text(record, encoding="utf-8")
    if report.is_sick:
        sys.exit(1)
