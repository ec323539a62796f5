"""A finding: a symptom with its evidence, likely cause and remedy, and how findings are ranked. No torch."""

import re
from collections.abc import Iterator, Sequence
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


HIGHEST_LR = 1.0  # of any usual optimizer: SGD's rates go up to 1, those of Adam and Muon to 0.1
USUAL_LR = 3e-4  # of AdamW
FELL = 0.99  # of the first loss: a rate is good once the loss has fallen at it
RISING = 0.8  # of the rate after it: the loss was lowest before the rate came to where it is


def lower_lr(log: RunLog, before: float = 0) -> str:
    """The remedy of a learning rate that is too high: the last good one before a step, or a tenth of the recipe's."""
    found = log.setting("model.optimizer.lr", "optimizer.lr", "model.lr", "lr", "model.learning_rate", "learning_rate")
    known = isinstance(found, int | float) and found > 0
    loss, lr = log["loss"].between(0, before).finite(), log["lr"].between(0, before).finite()
    if len(loss) and len(lr) and loss.values.min() < loss.values[0] - (1 - FELL) * abs(loss.values[0]):
        at = int(loss.steps[loss.values.argmin()])
        good, top = lr.between(0, at + 1).values[-1:], lr.between(at, before).values.max(initial=0.0)
        if len(good) and 0 < good[0] < min(RISING * top, HIGHEST_LR):
            now, shown = f"it is {found:g}; " if known else "", f"{good[0]:.2g}"
            return f"--model.optimizer.lr {shown} ({now}the loss was lowest at that rate, at step {at})"
    if not known:
        return "the learning rate divided by 10"
    new = found / 10 if found / 10 < HIGHEST_LR else USUAL_LR
    return f"--model.optimizer.lr {new:.2g} (it is {found:g})"


_PARTS = re.compile(r"; (?![^(]*\))")  # of a remedy: not inside of brackets


def told_once(found: Sequence[Finding]) -> Iterator[str]:
    """The remedies; a part of an earlier one, or another value of its option, is `as for` the finding's number."""
    first: dict[str, int] = {}
    for number, finding in enumerate(found, 1):
        parts: dict[str, None] = {}
        for part in _PARTS.split(finding.remedy):
            option = re.match(r"--[\w.]+(\+=\w+)?", part)
            at = first.setdefault(option[0] if option else part, number)
            parts[part if at == number else f"as for {at}"] = None
        yield "; ".join(parts)


_PROPOSED = re.compile(r"(?:^|[;,] )(?:or )?--([\w.]+)(?:\+=| )([\w.]+)[^;,]*")


def in_words(remedy: str) -> str:
    """A remedy for a script, which has no options of a command line."""
    return re.sub(r"--(?:\w+\.)+(\w+)", r"\1", re.sub(r"--trainer\.callbacks\+=(\w+)", r"add the callback \1", remedy))


def without_present(log: RunLog, remedy: str) -> str:
    """A remedy without the callbacks and options that the run has already."""

    def left(match: re.Match[str]) -> str:
        return "" if match[2].lower() in str(log.setting(match[1])).lower().split(", ") else match[0]

    kept = _PROPOSED.sub(left, remedy).lstrip(";, ").removeprefix("or ")
    return kept or "the usual one is in the run: look at the batches of these steps"


def logged_names(log: RunLog, *roles: str) -> tuple[str, ...]:
    """The names as logged of those of the roles that were logged."""
    return tuple(log.name(role) for role in roles if len(log[role]))
