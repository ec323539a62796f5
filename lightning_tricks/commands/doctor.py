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
from lightning_tricks.logs.finding import MIN_POINTS, Finding, in_words, told_once
from lightning_tricks.logs.loss_symptoms import MIN_VALIDATIONS
from lightning_tricks.logs.page import LOG_WORD, Curve, figure, is_wide, limits, page, plot, thinned
from lightning_tricks.logs.run import find_run, last_written, run_folders
from lightning_tricks.logs.run_log import RunLog, Series, read_log
from lightning_tricks.logs.symptoms import ADVERSARIAL, OF_ONE_LOSS, TELLING, findings

CHECKS = (  # in words, if its result is told; role and points that it needs; symptoms; section of docs/playbook.md
    ("NaN", "loss", 1, "not_finite", "The loss is NaN"),
    ("divergence", "loss", MIN_POINTS, "divergence early_spike", "The loss is high while the learning rate is"),
    ("plateau", "loss", MIN_POINTS, "plateau", "The loss is flat from the start"),
    ("spikes", "loss", 2 * MIN_POINTS, "spike spikes steps_skipped", "One spike"),
    ("overfitting", "val_loss", MIN_VALIDATIONS, "overfitting", "Validation rises while training falls"),
    ("label leak", "val_loss", MIN_VALIDATIONS, "train_gap", "Training is too good"),
    ("validation leak", "val_loss", MIN_VALIDATIONS, "validation_leak", "Validation is too good"),
    ("clip", "grad_norm", MIN_POINTS, "clip_pinned clip_unused gradients_add_up", "The norm is always above the clip"),
    ("stall at peak rate", "lr", MIN_POINTS, "stalled_at_peak", "The loss is high while the learning rate is"),
    ("speed", "speed", MIN_POINTS, "throughput_falls throughput_sawtooth throughput_zero", "Throughput falls"),
    ("data waits (GoodputMonitor)", "data_share", MIN_POINTS, "loader_stalls", "The loader is too slow"),
    ("", "loss", 0, "restore", "The loss jumps after a resume"), ("", "loss", 0, "low_mfu", "MFU is low"),
    ("", "loss", 0, "scaler_collapse", "The loss scale falls"), ("", "loss", 0, "dead_units", "Units are dead"),
    ("", "loss", 0, "attention_logits activations_grow", "Attention logits grow"),
    ("", "loss", 0, "slow_rank", "One rank is slower"),
)  # fmt: skip
_LEGEND = """<p>The word behind a cause: established, the log shows it; supported, two signals agree; hypothesis, it is
the usual one. In the plots, dashed lines are the steps of findings and the clip, red bands NaN or infinity.</p>"""
_STYLES = {"error": "red", "warning": "yellow", "note": "cyan"}  # by severity
_SLOW_FIRST = 0.05  # of the points of a speed, which decide on no logarithmic axis: the first steps are slow
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
        among: number of runs of which it is the newest.
    """

    name: str
    log: RunLog
    found: list[Finding]
    unread: list[str]
    among: int = 1

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
        if self.among > 1:
            yield f"newest of {self.among} runs: for another one, give its folder"
        yield from (f"not read: {line}" for line in self.unread)

    def _end(self) -> Iterator[str]:
        if good := list(self._good()):
            yield f"checked and good: {', '.join(good)}"
        if missing := [words for words, role, *_ in CHECKS if words and not len(self.log[role])]:
            yield f"not looked for, as the log lacks it: {', '.join(missing)}"
        notes = sum(finding.severity == "note" for finding in self.found)
        above = len(self.found) - notes
        words = [f"{above} finding{'s' * (above != 1)}"] if above else []
        if self.is_too_short:
            points = f"{len(self.log['loss'])} points of the training loss, {MIN_POINTS} are needed"
            words.append(f"too short to judge{' the rest' * bool(above)} ({points})")
        words = words or ["no fault found"]
        yield "doctor: " + ", ".join([*words, *([f"{notes} note{'s' * (notes != 1)}"] if notes else [])])

    def _good(self) -> Iterator[str]:
        """The checks that had the points that they need, and no finding."""
        without = {finding.symptom for finding in self.found}
        without |= set() if self.log.clip_norm() > 0 else {"clip_pinned"}
        without |= set(OF_ONE_LOSS) if any(map(ADVERSARIAL.search, self.log.metrics)) else set()
        for words, role, points, symptoms, _ in CHECKS:
            if words and len(self.log[role].finite()) >= points and without.isdisjoint(symptoms.split()):
                yield words

    def _rows(self) -> Iterator[tuple[int, Finding, list[tuple[str, str]]]]:
        """The number of each finding, and what is told of it, by name."""
        has_options = any(name.startswith("trainer.") for name in self.log.settings)  # a command line ran it
        for number, (finding, remedy) in enumerate(zip(self.found, told_once(self.found), strict=True), 1):
            rows = [("evidence", finding.evidence), (f"cause ({finding.status})", finding.cause)]
            yield number, finding, [*rows, ("remedy", remedy if has_options else in_words(remedy))]

    def text(self, columns: int = sys.maxsize) -> str:
        """The report for a terminal of so many columns."""
        head, *lines = map(printable, self._head())
        for number, finding, rows in self._rows():
            title = f"{finding.severity}: {finding.symptom.replace('_', ' ')}"
            lines.append(f"{number}. {colored(title, _STYLES[finding.severity])}")
            lines += [printable(f"   {name}: {text}") for name, text in rows]
        return wrapped("\n".join([colored(head, "bold"), *lines, *map(printable, self._end())]), columns, 5)

    def record(self) -> dict[str, Any]:
        """The report for JSON."""
        return {
            "run": self.name,
            "steps": self.log.steps(),
            "too_short_to_judge": self.is_too_short,
            "findings": [{**asdict(finding), "score": round(finding.score, 2)} for finding in self.found],
            "not_in_the_log": list(dict.fromkeys(role for _, role, *_ in CHECKS if not len(self.log[role]))),
            "not_read": self.unread,
        }

    def html(self) -> str:
        """One page: the findings as links, a plot of each of their metrics, and what is told of each finding."""
        head, *lines = self._head()
        *checked, verdict = self._end()
        told = list(self._rows())
        links = "".join(f'<li><a href="#f{number}">{_title(finding)}</a></li>' for number, finding, _ in told)
        remedy = f"<p>First remedy: {html_text(told[0][2][-1][1])}</p>" if told else ""
        return page(
            head,
            [
                f'<p class="verdict">{html_text(verdict)}</p>',
                *([f"<ol>{links}</ol>{remedy}"] * bool(told)),
                *(f"<p>{html_text(line)}</p>" for line in [*lines, *checked]),
                f'<div class="plots">{"".join(self._plots())}</div>',
                *([_LEGEND] * bool(told)),
                *(_section(*each) for each in told),
            ],
        )

    def _plots(self) -> Iterator[str]:
        """Those of the findings' metrics first; none of a metric that is constant, unless it is a loss."""
        log, found = self.log, self.found
        loss, val_loss, norm, lr, *rates = map(log.name, ("loss", "val_loss", "grad_norm", "lr", "speed", "mfu"))
        names = [name for finding in found for name in finding.metrics]
        for name in dict.fromkeys([*names, loss, val_loss, norm, lr]):
            series = log.metrics.get(name, Series.of({}))
            if len(np.unique(series.values)) > (name not in (loss, val_loss)):
                steps = {step for finding in found if name in finding.metrics for step in finding.steps}
                clip = log.clip_norm() if name == norm else 0.0
                yield plot_of(series, name, sorted(steps), clip, _SLOW_FIRST * (name in rates))


def _title(finding: Finding) -> str:
    return f'<b class="{finding.severity}">{finding.severity}</b>: {finding.symptom.replace("_", " ")}'


def _section(number: int, finding: Finding, rows: list[tuple[str, str]]) -> str:
    if section := next((check[-1] for check in CHECKS if finding.symptom in check[3].split()), None):
        rows = [*rows, ("playbook", f"“{section}” in docs/playbook.md of the repository")]
    told = "".join(f"<dt>{html_text(name)}</dt><dd>{html_text(text)}</dd>" for name, text in rows)
    head = f"<h2>{number}. {_title(finding)}</h2>"
    return f'<section class="{finding.severity}" id="f{number}">{head}<dl>{told}</dl></section>'


def plot_of(series: Series, name: str, marks: Sequence[float] = (), clip: float = 0.0, low_share: float = 0.0) -> str:
    """A metric over steps, with lines at marked steps and a clip above 0, and bands where it is not finite.

    Extremes stay. A share of the lowest points makes no axis logarithmic.
    """
    points, bad = thinned(series.finite()), ~np.isfinite(series.values)
    firsts, lasts = bad & ~np.append(False, bad[:-1])[: len(bad)], bad & ~np.append(bad[1:], False)[: len(bad)]
    bands = list(zip(series.steps[firsts].tolist(), series.steps[lasts].tolist(), strict=True))
    values = np.append(points.values, [clip] * (clip > 0 and len(points) > 0))
    log = is_wide(np.sort(values)[int(low_share * len(values)) :]) and bool(values.min() > 0)
    curve = Curve(0, name, points.steps.astype(np.float64), points.values)
    level = (f"clip {clip:.4g}", clip) if clip > 0 else None
    drawn = plot([curve], limits(values, log), marks, bands, log, level)
    return figure(drawn, f"{name} over steps{LOG_WORD if log else '' if len(points) else ': no finite value'}")


def run(args: list[str]) -> None:
    """Print the findings of a run; write them as a page or as JSON. Exits with 1 if one is above a note.

    Raises:
        UsageError: there is no log, it cannot be read or has no training loss; a file cannot be written.
    """
    parser = CommandParser(
        "doctor",
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
        among = sum(last_written(one, "metrics.csv") > 0 for one in run_folders(folder, "doctor", []))
        folder = find_run(folder)
        log, unread = read_log(folder, names)
    except UsageError as error:
        if not lines:
            raise
        log, unread, among = RunLog(), [str(error)], 1  # it has ended before its first log step
    log.printed = lines
    report = Report(str(folder), log, findings(log), unread, among)
    forms = {"html": report.html, "json": lambda: json_text(report.record())}
    write_answers(options, lambda: report.text(terminal_columns(sys.maxsize)), **forms)
    if any(finding.severity != "note" for finding in report.found):
        sys.exit(1)
