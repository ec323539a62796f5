"""The answer of `autopsy`: documents ranked by how far each stands out, as a table and as JSON."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lightning_tricks.commands.autopsy.documents import Document, Samples
from lightning_tricks.commands.autopsy.gradients import DocumentEffect

SHOWN = 100  # characters of a document's text
SCORE = (
    "score: how far loss or gradient, for the document's length, lies above the batch's median, in robust standard "
    "deviations"
)
_NORMAL = 1.4826  # median distance from the median of a normal distribution, to its standard deviation


@dataclass(frozen=True)
class Suspicion:
    """The score of one document: how far it stands out of its batch.

    Two things are measured, each in a form that does not grow with the length of a document: how surprising its tokens
    are, and how strongly they pull the weights. Each is compared with the median of the batch, in units of the usual
    distance from it, so that no outlier hides itself or another one by widening the scale. The larger is the score.

    One alone does not suffice. In a trained model, tokens in a wrong order have a high loss and a gradient like others;
    a token that is repeated has a low loss soon, and a gradient that all of its positions share. The norm of a
    document's part of the gradient, by itself, ranks long documents first.

    Args:
        loss: of the tokens' surprise: (loss - median loss) * sqrt(tokens), in units of its usual distance.
        gradient: of the pull: log(norm / sqrt(tokens)), likewise.
    """

    loss: float
    gradient: float

    @property
    def score(self) -> float:
        """The larger of the two; infinite where the loss or the gradient is not finite."""
        return max(self.loss, self.gradient)

    @property
    def reason(self) -> str:
        """The one that it is."""
        if math.isinf(self.score):
            return "not finite"
        return "loss" if self.loss >= self.gradient else "gradient"


def suspicions(losses: Sequence[float], norms: Sequence[float], tokens: Sequence[int]) -> list[Suspicion]:
    """How far each document of a batch stands out, by nats per token, norm (NaN: not finite) and number of tokens."""
    finite = [i for i, pair in enumerate(zip(losses, norms, strict=True)) if all(map(math.isfinite, pair))]
    usual = median(losses[i] for i in finite) if finite else 0.0
    surprise = standard([(losses[i] - usual) * math.sqrt(tokens[i]) for i in finite])
    smallest = min((norms[i] for i in finite if norms[i] > 0), default=1.0)  # a norm of 0 has no logarithm
    pull = standard([math.log(max(norms[i], smallest) / math.sqrt(tokens[i])) for i in finite])
    found = dict(zip(finite, map(Suspicion, surprise, pull), strict=True))
    return [found.get(i, Suspicion(math.inf, math.inf)) for i in range(len(losses))]


def standard(values: Sequence[float]) -> list[float]:
    """Distance of each value from the median, in units of the median distance (scaled as a standard deviation).

    Where more than half of the values are equal, in units of the mean distance; 0 where all are.

    Example:
        >>> standard([1.0, 2.0, 3.0, 4.0, 100.0])[2:4]
        [0.0, 0.6744907594765952]
    """
    if not values:
        return []
    middle = median(values)
    distances = [abs(value - middle) for value in values]
    unit = _NORMAL * median(distances) or math.fsum(distances) / len(distances) or 1.0
    return [(value - middle) / unit for value in values]


@dataclass(frozen=True)
class RankedDocument:
    """All that is known of one document."""

    document: Document
    effect: DocumentEffect
    suspicion: Suspicion
    text: str  # of its first tokens, with control characters made visible
    shard: tuple[Path, int]  # the file that holds it, and the index of its first token there
    file: Path | None  # the text file that it was made of; None where that is not known

    def __str__(self) -> str:
        """Its cells in the table, and two lines of place and text."""
        e, d = self.effect, self.document
        update = "" if e.update_without is None else f"{e.update_without:16.4g}  {_percent(e.update_change)}"
        place = f"sample {d.sample}, tokens {d.first + 1} to {d.stop}; {self.shard[0]}, token {self.shard[1]}"
        place += f"; {self.file}" if self.file else ""
        return (
            f"{self.suspicion.score:5.1f}  {self.suspicion.reason:10}  {e.loss:6.3f} {d.tokens:7d} {e.norm:10.3g}"
            f" {_percent(e.share)} {e.norm_without:15.4g} {e.cosine:7.3f}{update}\n      {place}\n      {self.text}"
        )

    def to_json(self) -> dict[str, Any]:
        """The same as plain types; None for what is not finite."""
        d, s = self.document, self.suspicion
        place = {"sample": d.sample, "first_token": d.first + 1, "last_token": d.stop, "stream_token": d.token}
        source = {"shard": str(self.shard[0]), "shard_token": self.shard[1], "file": self.file and str(self.file)}
        numbers = {"score": s.score, "score_of_loss": s.loss, "score_of_gradient": s.gradient, **asdict(self.effect)}
        return {**place, **source, "tokens": d.tokens, "text": self.text, "reason": s.reason, **_finite(numbers)}


@dataclass(frozen=True)
class Report:
    """The batch of a step, and the effect of each document on it."""

    step: int  # as the logs count, from 0
    samples: Samples
    tokens: int  # with a loss, of the documents whose gradient is finite, as the three numbers below
    loss: float  # nats per token
    norm: float  # of the gradient, before any clip
    update: float | None  # norm of AdamW's update, see AdamUpdate; None where it is not computed
    checkpoint: Path  # whose weights were used
    checkpoint_step: int  # optimizer steps done in it
    documents: Sequence[RankedDocument]  # the most suspicious first

    def table(self, top: int) -> str:
        """The batch in a few lines, and the `top` most suspicious documents."""
        head = "      score  reason        loss  tokens   gradient  share    norm without  cosine"
        head += "  update without  change" if self.update is not None else ""
        rows = [f"{place:4d}  {document}" for place, document in enumerate(self.documents[:top], start=1)]
        return "\n".join([*self._summary(), *(["", head, *rows, "", SCORE] if rows else [])])

    def _summary(self) -> list[str]:
        runs = " and ".join(f"{first} to {last}" for first, last in self.samples.runs)
        count = sum(last - first + 1 for first, last in self.samples.runs)
        update = "" if self.update is None else f", AdamW's update {self.update:.4g} learning rates"
        broken = sum(math.isinf(each.suspicion.score) for each in self.documents)
        lines = [
            f"step {self.step} took the samples {runs}: {count} rows, "
            f"{len(self.documents)} documents, {sum(each.document.tokens for each in self.documents)} tokens",
            f"weights: {self.checkpoint}, {self._distance()}",
            f"batch: {self.loss:.4f} nats per token, gradient norm {self.norm:.4g}{update}",
        ]
        if self.samples.told_by is None:
            lines.append("the samples are those of a run that goes on with the global batch of this checkpoint")
        elif self.samples.told_by != self.checkpoint:
            lines.append(f"the samples are told by {self.samples.told_by}")
        if broken:
            lines.append(f"{broken} documents have a gradient that is not finite: the batch's figures are without them")
        return lines

    def _distance(self) -> str:
        away = self.checkpoint_step - self.step
        if away == 0:
            return f"of step {self.checkpoint_step}: the step began with them"
        return f"of step {self.checkpoint_step}: {abs(away)} steps {'after' if away > 0 else 'before'} the step began"

    def to_json(self) -> dict[str, Any]:
        """All figures of all documents as plain types."""
        return {
            "step": self.step,
            "samples": [list(run) for run in self.samples.runs],
            "samples_told_by": self.samples.told_by and str(self.samples.told_by),
            "tokens": self.tokens,
            "checkpoint": str(self.checkpoint),
            "checkpoint_step": self.checkpoint_step,
            **_finite({"loss": self.loss, "gradient_norm": self.norm, "update_norm": self.update}),
            "documents": [document.to_json() for document in self.documents],
        }

    def write(self, file: Path) -> None:
        """Write `to_json` to a file."""
        file.write_text(json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def visible(text: str, length: int = SHOWN) -> str:
    r"""The first characters of a text on one line, each that cannot be printed as its escape.

    Example:
        >>> print(visible("two\nlines\x00", 20))
        two\nlines\x00
    """
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:length])
    return shown + ("..." if len(text) > length else "")


def _percent(fraction: float | None) -> str:
    return f"{math.nan if fraction is None else 100 * fraction:5.0f}%"


def _finite(numbers: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity."""
    return {name: value if value is None or math.isfinite(value) else None for name, value in numbers.items()}
