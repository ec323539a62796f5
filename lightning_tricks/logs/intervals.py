"""Intervals of a difference: between two groups of seeds, or pairs of seeds.

Every interval is a mean, plus or minus a quantile of Student's t times a standard error.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np


@dataclass(frozen=True)
class Interval:
    """A difference with its interval.

    Args:
        difference: the second one less the first.
        half_width: the interval is `difference - half_width` to `difference + half_width`.
        method: in words.
    """

    difference: float
    half_width: float
    method: str

    @property
    def excludes_zero(self) -> bool:
        """Whether a difference is shown, of this sign."""
        return abs(self.difference) > self.half_width


def student_t(probability: float, df: float) -> float:
    """Quantile of Student's t: the value below which it lies with a probability.

    Args:
        probability: at least 0.5 and below 1.
        df: degrees of freedom, at least 1, of any fraction; infinite for the normal distribution.
    """
    normal = NormalDist().inv_cdf(probability)
    if math.isinf(df):
        return normal
    # t is sqrt(df) * tan(angle), and the density of the angle is cos(angle) ** (df - 1) over its integral
    half = math.sqrt(math.pi) / 2 * math.exp(math.lgamma(df / 2) - math.lgamma((df + 1) / 2))
    places, weights = np.polynomial.legendre.leggauss(64)
    angle = math.atan(normal / math.sqrt(df))
    for _ in range(40):  # Newton's steps rise to the quantile: the normal's is below it, and the density falls
        below = angle / 2 * float(weights @ np.cos(angle / 2 * (places + 1)) ** (df - 1))
        angle += ((2 * probability - 1) * half - below) / math.cos(angle) ** (df - 1)
    return math.sqrt(df) * math.tan(angle)


def welch(first: Sequence[float], second: Sequence[float], level: float) -> Interval:
    """Interval of the difference of two means, whose groups may have different variances: Welch's t.

    Args:
        first: at least two values, one a seed.
        second: likewise, of other runs.
        level: probability with which such intervals hold the true difference, such as 0.95.

    Source: Welch's test for comparisons over seeds is recommended in Colas et al. 2018, https://arxiv.org/abs/1806.08295.
    """
    errors = [float(np.var(values, ddof=1)) / len(values) for values in (first, second)]
    total = sum(errors)
    parts = sum(error**2 / (len(values) - 1) for error, values in zip(errors, (first, second), strict=True))
    df = total**2 / parts if parts > 0 else len(first) + len(second) - 2
    half = student_t((1 + level) / 2, df) * math.sqrt(total)
    words = f"Welch's t over {len(first)} and {len(second)} seeds"
    return Interval(float(np.mean(second) - np.mean(first)), half, words)


def paired(differences: Sequence[float], level: float) -> Interval:
    """Interval of the mean of differences, each between two runs with one seed: Student's t.

    Args:
        differences: at least two.
        level: as in `welch`.
    """
    error = float(np.std(differences, ddof=1)) / math.sqrt(len(differences))
    half = student_t((1 + level) / 2, len(differences) - 1) * error
    return Interval(float(np.mean(differences)), half, f"differences of {len(differences)} seeds that both have")


def with_spread(
    first: Sequence[float], second: Sequence[float], spread: float, df: float, level: float, method: str
) -> Interval:
    """Interval of the difference of two means where the standard deviation over seeds is known from elsewhere.

    Args:
        first: at least one value.
        second: likewise.
        spread: standard deviation over seeds, of both.
        df: degrees of freedom of `spread`; infinite for a given figure.
        level: as in `welch`.
        method: in words.
    """
    half = student_t((1 + level) / 2, df) * spread * math.sqrt(1 / len(first) + 1 / len(second))
    return Interval(float(np.mean(second) - np.mean(first)), half, method)


def pooled_spread(groups: Sequence[Sequence[float]]) -> tuple[float, int] | None:
    """Standard deviation within groups and its degrees of freedom; None where no group has two values.

    Example:
        >>> pooled_spread([[1.0, 3.0], [5.0], [2.0, 6.0]])
        (2.23606797749979, 2)
    """
    several = [values for values in groups if len(values) > 1]
    df = sum(len(values) - 1 for values in several)
    if not df:
        return None
    squares = sum(float(np.var(values, ddof=1)) * (len(values) - 1) for values in several)
    return math.sqrt(squares / df), df
