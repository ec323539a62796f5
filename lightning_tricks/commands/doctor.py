"""`doctor`: what is wrong with a run, by its logs, with evidence, the likely cause and the remedy. Loads no torch."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.quote import html_text, printable
from lightning_tricks._core.terminal import colored, terminal_columns, wrapped
from lightning_tricks.commands import CommandParser
from lightning_tricks.commands.answers import add_answers, check_files, json_text, names_of, write_answers
from lightning_tricks.logs.finding import MIN_POINTS, Finding, in_words
from lightning_tricks.logs.page import Curve, figure, limits, page, plot, thinned
from lightning_tricks.logs.run import find_run
from lightning_tricks.logs.run_log import RunLog, Series, read_log
from lightning_tricks.logs.symptoms import TELLING, findings

NEEDED_BY = {  # what is not looked for where a metric is missing
    "val_loss": "overfitting, validation leak",
    "grad_norm": "the clip",
    "lr": "the learning rate at its peak",
    "speed": "falling speed",
    "data_share": "waits for data, which GoodputMonitor logs",
}
_STYLES = {"error": "red", "warning": "yellow", "note": "cyan"}  # by severity
_LONGEST = 300  # characters of a printed line


def read_printed(files: Sequence[str]) -> list[str]:
    """The lines of files that tell how a run ended, such as those of an error; at most 300 characters of each.

    Raises:
        UsageError: a file cannot be read.
    """
    found = []
    for file in files:
        try:
            with Path(file).open(encoding="utf-8", errors="replace") as lines:
                found += [line.strip()[:_LONGEST] for line in lines if TELLING.search(line)]
        except OSError as error:
            raise UsageError(f"doctor: stderr={file}: {error.strerror}: give what the run has printed") from None
    return found


@dataclass(frozen=True)
class Report:
    """What is to be said of a run.

    Args:
        name: of its folder.
        log: of the run.
        found: the most severe and certain first.
        unread: a line for each file that could not be read.
    """

    name: str
    log: RunLog
    found: list[Finding]
    unread: list[str]

    @property
    def is_sick(self) -> bool:
        """Whether a finding is above a note."""
        return any(finding.severity != "note" for finding in self.found)

    @property
    def is_too_short(self) -> bool:
        """Whether the training loss has too few points to say more than that it is NaN or has exploded."""
        return len(self.log["loss"]) < MIN_POINTS

    def _head(self) -> Iterator[str]:
        figures = [f"{self.log.steps():,} steps"]
        for role, word in (("loss", "training loss"), ("val_loss", "validation loss")):
            if len(series := self.log[role]):
                figures.append(f"{word} {series.values[-1]:.4g}")
        yield f"{self.name}: {', '.join(figures)}"
        yield from (f"not read: {line}" for line in self.unread)

    def _end(self) -> Iterator[str]:
        missing = [what for role, what in NEEDED_BY.items() if not len(self.log[role])]
        if missing:
            yield f"not looked for, as the log lacks it: {'; '.join(missing)}"
        notes = sum(finding.severity == "note" for finding in self.found)
        above = len(self.found) - notes
        words = [f"{above} finding{'s' * (above != 1)}"] if above else []
        if self.is_too_short:
            points = f"{len(self.log['loss'])} points of the training loss, {MIN_POINTS} are needed"
            words.append(f"too short to judge{' the rest' * bool(above)} ({points})")
        words = words or ["no fault found"]
        yield "doctor: " + ", ".join([*words, *([f"{notes} note{'s' * (notes != 1)}"] if notes else [])])

    @property
    def _has_options(self) -> bool:
        """Whether a command line with a Trainer ran it."""
        return any(name.startswith("trainer.") for name in self.log.settings)

    def _rows(self, finding: Finding) -> list[tuple[str, str]]:
        return [
            ("evidence", finding.evidence),
            (f"cause ({finding.status})", finding.cause),
            ("remedy", finding.remedy if self._has_options else in_words(finding.remedy)),
        ]

    @staticmethod
    def _title(finding: Finding) -> str:
        return f"{finding.severity}: {finding.symptom.replace('_', ' ')}"

    def text(self, columns: int = sys.maxsize) -> str:
        """The report for a terminal of so many columns."""
        head, *lines = map(printable, self._head())
        for number, finding in enumerate(self.found, 1):
            lines.append(f"{number}. {colored(self._title(finding), _STYLES[finding.severity])}")
            lines += [printable(f"   {name}: {text}") for name, text in self._rows(finding)]
        return wrapped("\n".join([colored(head, "bold"), *lines, *map(printable, self._end())]), columns, 5)

    def record(self) -> dict[str, Any]:
        """The report for JSON."""
        return {
            "run": self.name,
            "steps": self.log.steps(),
            "too_short_to_judge": self.is_too_short,
            "findings": [{**asdict(finding), "score": round(finding.score, 2)} for finding in self.found],
            "not_in_the_log": [role for role in NEEDED_BY if not len(self.log[role])],
            "not_read": self.unread,
        }

    def html(self) -> str:
        """One page, with a plot of each metric of a finding."""
        head, *unread = self._head()
        *missing, verdict = self._end()
        curves = self._curves()
        return page(
            head,
            [
                f'<p class="verdict">{html_text(verdict)}</p>',
                *(f"<p>{html_text(line)}</p>" for line in unread),
                *map(self._section, self.found),
                *(
                    ["<p>In each plot: dashed, the steps of the finding; a red band, no finite value.</p>"]
                    * bool(self.found)
                ),
                *([f'<section><h2>Curves</h2><div class="plots">{curves}</div></section>'] * bool(curves)),
                *(f"<p>{html_text(line)}</p>" for line in missing),
            ],
        )

    def _curves(self) -> str:
        """The main metrics that no finding shows."""
        shown = {name for finding in self.found for name in finding.metrics}
        names = [name for role in ("loss", "val_loss", "grad_norm", "lr") if (name := self.log.names.get(role))]
        return "".join(figure(plot_of(self.log.metrics[name], name), name) for name in names if name not in shown)

    def _section(self, finding: Finding) -> str:
        rows = "".join(f"<dt>{html_text(name)}</dt><dd>{html_text(text)}</dd>" for name, text in self._rows(finding))
        plots = "".join(
            figure(plot_of(self.log.metrics[name], name, finding.steps), name)
            for name in finding.metrics
            if name in self.log.metrics
        )
        title = html_text(self._title(finding))
        return f'<section><h2>{title}</h2><dl>{rows}</dl><div class="plots">{plots}</div></section>'


def plot_of(series: Series, name: str, marks: Sequence[float] = ()) -> str:
    """A metric over steps, with lines at marked steps and bands where it is not finite; extremes stay."""
    points, bad = thinned(series.finite()), ~np.isfinite(series.values)
    firsts, lasts = bad & ~np.append(False, bad[:-1])[: len(bad)], bad & ~np.append(bad[1:], False)[: len(bad)]
    bands = list(zip(series.steps[firsts].tolist(), series.steps[lasts].tolist(), strict=True))
    curve = Curve(0, name, points.steps.astype(np.float64), points.values)
    return plot([curve], limits(points.values), marks=marks, bands=bands)


def run(args: list[str]) -> None:
    """Print the findings of a run; write them as a page or as JSON. Exits with 1 if one is above a note.

    Raises:
        UsageError: there is no log, it cannot be read or has no training loss; a file cannot be written.
    """
    parser = CommandParser(
        "lightning-tricks doctor",
        description="What is wrong with a run, by its logs; of this collection or of another Lightning project.",
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
    forms = {"html": report.html, "json": lambda: json_text(report.record())}
    write_answers(options, lambda: report.text(terminal_columns(sys.maxsize)), **forms)
    if report.is_sick:
        sys.exit(1)
