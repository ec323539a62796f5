"""The findings of a run as text, as JSON and as one HTML page with a plot for each."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lightning_tricks._quote import html_text, printable
from lightning_tricks.monitors.doctor.finding import Finding
from lightning_tricks.monitors.doctor.run_log import RunLog, Series

NEEDED_BY = {  # what is not looked for where a metric is missing
    "val_loss": "overfitting, validation leak",
    "grad_norm": "the clip",
    "lr": "the learning rate at its peak",
    "speed": "falling speed",
    "data_share": "waits for data (GoodputMonitor)",
}
_WIDTH, _HEIGHT, _MOST_POINTS = 560, 120, 800
_COLORS = {"error": "#c62828", "warning": "#b26a00", "note": "#4a6572"}


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

    def _head(self) -> Iterator[str]:
        figures = [f"{self.log.steps():,} steps"]
        for role, word in (("loss", "training loss"), ("val_loss", "validation loss")):
            if len(series := self.log[role]):
                figures.append(f"{word} {series.values[-1]:.4g}")
        yield f"{self.name}: {', '.join(figures)}"
        yield from (f"not read: {line}" for line in self.unread)

    def _not_looked_for(self) -> str | None:
        missing = [f"{role} ({what})" for role, what in NEEDED_BY.items() if not len(self.log[role])]
        return f"not in the log, so not looked for: {'; '.join(missing)}" if missing else None

    def _verdict(self) -> str:
        notes = sum(finding.severity == "note" for finding in self.found)
        above = len(self.found) - notes
        words = f"{above} finding{'s' * (above != 1)}" if above else "nothing found above a note"
        return f"doctor: {words}" + (f", {notes} note{'s' * (notes != 1)}" if notes else "")

    def text(self) -> str:
        """The report for a terminal."""
        lines = [*self._head()]
        for number, finding in enumerate(self.found, 1):
            lines += [
                f"{number}. {finding.severity}: {finding.symptom.replace('_', ' ')}",
                f"   evidence: {finding.evidence}",
                f"   cause ({finding.status}): {finding.cause}",
                f"   remedy: {finding.remedy}",
            ]
        if line := self._not_looked_for():
            lines.append(line)
        return "\n".join(map(printable, [*lines, self._verdict()]))

    def record(self) -> dict[str, Any]:
        """The report for JSON."""
        return {
            "run": self.name,
            "steps": self.log.steps(),
            "findings": [{**asdict(finding), "score": round(finding.score, 2)} for finding in self.found],
            "not_in_the_log": [role for role in NEEDED_BY if not len(self.log[role])],
            "not_read": self.unread,
        }

    def html(self) -> str:
        """One page without any other file."""
        head, *unread = map(html_text, self._head())
        parts = [f"<p>{line}</p>" for line in unread] + [self._section(finding) for finding in self.found]
        if line := self._not_looked_for():
            parts.append(f"<p>{html_text(line)}</p>")
        return _PAGE.format(
            title=head, verdict=html_text(self._verdict()), parts="\n".join(parts), width=_WIDTH, height=_HEIGHT
        )

    def _section(self, finding: Finding) -> str:
        rows = (
            ("evidence", finding.evidence), (f"cause ({finding.status})", finding.cause), ("remedy", finding.remedy),
        )  # fmt: skip
        table = "".join(f"<tr><th>{name}</th><td>{html_text(text)}</td></tr>" for name, text in rows)
        pictures = [
            f"{plot(self.log.metrics[name], finding.steps)}<figcaption>{html_text(name)}</figcaption>"
            for name in finding.metrics
            if name in self.log.metrics
        ]
        plots = "".join(f"<figure>{picture}</figure>" for picture in pictures)
        color, title = _COLORS[finding.severity], html_text(finding.symptom.replace("_", " "))
        head = f'<h2 style="color:{color}">{finding.severity}: {title}</h2>'
        return f"<section>{head}<table>{table}</table>{plots}</section>"


def plot(series: Series, marks: tuple[int, ...] = ()) -> str:
    """The series as an inline SVG, with vertical lines at marked steps; of many points, extremes of each part stay."""
    points = thinned(series.finite())
    if len(points) < 2:
        return "<svg></svg>"
    low, high = float(points.values.min()), float(points.values.max())
    first, last = float(points.steps[0]), float(points.steps[-1])
    xs = (points.steps - first) / max(last - first, 1.0) * _WIDTH
    ys = _HEIGHT - (points.values - low) / ((high - low) or 1.0) * _HEIGHT
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
    places = [(mark - first) / max(last - first, 1.0) * _WIDTH for mark in marks if first <= mark <= last]
    lines = "".join(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{_HEIGHT}"/>' for x in places)
    ends = (
        f'<text x="2" y="11">{high:.4g}</text><text x="2" y="{_HEIGHT - 3}">{low:.4g}</text>'
        f'<text x="{_WIDTH - 2}" y="{_HEIGHT - 3}" text-anchor="end">step {last:.0f}</text>'
    )
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}">{lines}<polyline points="{line}"/>{ends}</svg>'


def thinned(series: Series) -> Series:
    """The smallest and the largest value of each of equal parts, at most 800 points."""
    if len(series) <= _MOST_POINTS:
        return series
    size = math.ceil(2 * len(series) / _MOST_POINTS)
    starts = range(0, len(series), size)
    parts = [series.values[start : start + size] for start in starts]
    kept = sorted({start + int(f(part)) for start, part in zip(starts, parts, strict=True) for f in _EXTREMES})
    return Series(series.steps[kept], series.values[kept])


_EXTREMES = (np.argmin, np.argmax)
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.45 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }}
th {{ text-align: left; vertical-align: top; padding-right: 1rem; white-space: nowrap; font-weight: 600; }}
figure {{ margin: .6rem 0; }} figcaption {{ font-size: 13px; opacity: .7; }}
svg {{ width: 100%; max-width: {width}px; height: {height}px; border-bottom: 1px solid #999; }}
polyline {{ fill: none; stroke: #1565c0; stroke-width: 1.2; }} line {{ stroke: #c62828; stroke-dasharray: 3 3; }}
text {{ font-size: 11px; fill: currentColor; opacity: .7; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #111; color: #ddd; }} polyline {{ stroke: #64b5f6; }} }}
</style></head><body><h1>{title}</h1><p>{verdict}</p>
{parts}
</body></html>
"""
