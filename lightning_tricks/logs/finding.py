"""A finding: a symptom with its evidence, likely cause and remedy, and how findings are ranked. No torch."""

from dataclasses import dataclass
from typing import Literal

from lightning_tricks.logs.run_log import RunLog

Severity = Literal["error", "warning", "note"]
Status = Literal["established", "supported", "hypothesis"]

SEVERITY: dict[Severity, float] = {"error": 3.0, "warning": 2.0, "note": 1.0}
CERTAINTY: dict[Status, float] = {"established": 1.0, "supported": 0.7, "hypothesis": 0.4}

MIN_POINTS = 50  # of a training loss: a bin of a tenth then holds five, and its median has outlived two outliers
BINS = 10


@dataclass(frozen=True)
class Finding:
    """One symptom, with the likeliest cause.

    Args:
        symptom: its name, such as `clip_pinned`.
        severity: an `error` has spoilt the run, a `warning` costs quality or time, a `note` is worth a look.
        status: of the cause. `established`: the log shows it; `supported`: two signals agree; `hypothesis`: the
            symptom is certain, its cause is the usual one.
        evidence: steps and figures.
        cause: the likely one.
        remedy: options of the recipe, or what to do.
        metrics: as logged, for a plot.
        steps: to mark in the plot.
    """

    symptom: str
    severity: Severity
    status: Status
    evidence: str
    cause: str
    remedy: str
    metrics: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()

    @property
    def score(self) -> float:
        """Severity times certainty, by which findings are ranked."""
        return SEVERITY[self.severity] * CERTAINTY[self.status]

    def line(self) -> str:
        """Evidence, cause and remedy in one line."""
        return f"{self.evidence}. Likely cause ({self.status}): {self.cause}. Remedy: {self.remedy}"


def lower_lr(log: RunLog) -> str:
    """The remedy of a learning rate that is too high: the recipe's own by ten, where it is known."""
    found = log.setting("model.optimizer.lr", "optimizer.lr", "model.lr", "lr", "model.learning_rate", "learning_rate")
    if isinstance(found, int | float) and found > 0:
        return f"--model.optimizer.lr {found / 10:.2g} (it is {found:g})"
    return "the learning rate divided by 10"


def logged_names(log: RunLog, *roles: str) -> tuple[str, ...]:
    """The names as logged of those of the roles that were logged."""
    return tuple(log.name(role) for role in roles if len(log[role]))
