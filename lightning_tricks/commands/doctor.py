"""`doctor`: what is wrong with a run, by its logs, with evidence, the likely cause and the remedy. Loads no torch."""

import sys
from pathlib import Path

from lightning_tricks._core.errors import UsageError
from lightning_tricks.commands import CommandParser
from lightning_tricks.commands.answers import add_answers, check_files, json_text, names_of, write_answers


def run(args: list[str]) -> None:
    """Print the findings of a run; write them as a page or as JSON. Exits with 1 if one is above a note.

    Raises:
        UsageError: there is no log, it cannot be read or has no training loss; a file cannot be written.
    """
    from lightning_tricks.logs.doctor import Report, find_run, read_printed
    from lightning_tricks.logs.run_log import RunLog, read_log
    from lightning_tricks.logs.symptoms import findings

    parser = CommandParser(
        "lightning-tricks doctor",
        description="What is wrong with a run, by its logs; of this collection or of another Lightning project.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="LOGDIR", help="of a run; of several, the newest is taken")
    parser.add_argument(
        "--stderr", nargs="+", default=[], metavar="FILE", help="what the run has printed, such as slurm-1.out"
    )
    add_answers(parser)
    options = parser.parse_args(args)
    names = names_of("doctor", options)
    check_files("doctor", options)
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
    write_answers(options, report.text, html=report.html, json=lambda: json_text(report.record()))
    if report.is_sick:
        sys.exit(1)
