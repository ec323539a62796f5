"""The score by which documents are ranked: how far a document stands out of its batch.

Two things are measured, each in a form that does not grow with the length of a document: how surprising its tokens are,
and how strongly they pull the weights. Each is compared with the median of the batch, in units of the usual distance
from it, so that no outlier hides itself or another one by widening the scale. The larger of the two is the score.

One alone does not suffice. In a trained model, tokens in a wrong order have a high loss and a gradient like others; a
token that is repeated has a low loss soon, and a gradient that all of its positions share. The norm of a document's
part of the gradient, by itself, ranks long documents first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

_NORMAL = 1.4826  # median distance from the median of a normal distribution, to its standard deviation


@dataclass(frozen=True)
class Suspicion:
    """How far one document stands out.

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
    """How far each document of a batch stands out.

    Args:
        losses: nats per token.
        norms: of each document's part of the gradient, in any one unit; NaN where it is not finite.
        tokens: of each document.
    """
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
