"""The loss at the end of a decay of the learning rate that starts now, from the log so far and one of an earlier decay.

By the multi-power law the loss is `a + b * sum ** -alpha`, with the sum of all learning rates so far, less the gains by
their falls: `c * fall * (1 - (1 + d * lr ** -0.65 * sum_since) ** -0.6)` each. Learning rates are over their peak.

Source: Luo et al. 2025, https://arxiv.org/abs/2503.12811. The two exponents are rounded from the fits to 25M, 100M and
400M parameters in its code, https://github.com/thu-yao-01-luo/MultiPowerLaw, which nearly agree.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_tricks._core.errors import UsageError

LEAST_POINTS = 20  # of each log, after its warmup
LEAST_FALL = 0.1  # of the learning rate from its peak, in one log
MOST_OFF = 0.1  # of the gain by the decay: the error of the law in the logs, and that of a forecast by their noise
# of the gain; on 30 pairs of curves that the authors publish, a loss is off by up to 0.15 of it where the other log has
# a decay or a second level, by up to 0.31 where it is of a cosine, and all intervals hold
LAW_ERROR = 0.25
_BETA, _GAMMA = 0.6, 0.65
_BINS = 300  # that a log is averaged to
_PARAMETERS = 5  # that the logs tell
_NEAR = 1.3  # times the smallest residual: parameters with less are as good

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LossCurve:
    """A log from the first step on; the learning rate is linear between its points, and 0 before the first step.

    Args:
        steps: updates done; (points,).
        losses: (points,).
        lrs: learning rates; (points,).

    Raises:
        UsageError: the lengths differ, the steps fall, or a loss is not positive and finite.
    """

    steps: Array
    losses: Array
    lrs: Array

    def __post_init__(self) -> None:
        if not 0 < len(self.steps) == len(self.losses) == len(self.lrs):
            raise UsageError("a log needs equally many steps, losses and learning rates")
        if not (np.isfinite(self.losses) & (self.losses > 0) & (np.diff(self.steps, prepend=0) >= 0)).all():
            raise UsageError("a log with a loss that is not finite, or with steps that fall: leave these points out")


@dataclass(frozen=True)
class DecayForecast:
    """The end of a decay; all figures are NaN where nothing can be fitted.

    Args:
        loss: expected.
        low: the lowest of the fits that are nearly as good, less a quarter of the gain, by which the law may be off,
            and twice the error by noise.
        high: likewise the highest.
        gain: by which the loss falls from now on.
        refusal: why the figures should not be used, on one line; None where they may be.
    """

    loss: float = math.nan
    low: float = math.nan
    high: float = math.nan
    gain: float = math.nan
    refusal: str | None = None


def decay_forecast(run: LossCurve, decay: Array, others: Sequence[LossCurve] = ()) -> DecayForecast:
    """The loss at the end of a decay that starts where a log ends.

    Args:
        run: the log.
        decay: learning rates of the steps to come; (steps,).
        others: logs of the same model, data and peak, one of them with a decay, such as that of an earlier branch;
            too short ones are left out.
    """
    peak = max(float(each.lrs.max()) for each in (run, *others))
    own, *more = (_Curve.of(each, peak) for each in (run, *others))
    if (points := len(own.losses)) < LEAST_POINTS:
        return DecayForecast(refusal=f"{points} points after the warmup: a log needs {LEAST_POINTS} or more")
    curves = [own, *(each for each in more if len(each.losses) >= LEAST_POINTS)]
    if min(float(each.lrs.min()) for each in curves) > 1 - LEAST_FALL:
        return DecayForecast(refusal="the learning rate never fell: add the log of a short decay, as of a branch")
    steps = run.steps[-1] + 1 + np.arange(len(decay))
    ahead = _Curve.of(LossCurve(*map(np.append, (run.steps, run.losses, run.lrs), (steps, steps, decay))), peak)
    sums, losses = (np.concatenate([getattr(each, name) for each in curves]) for name in ("sums", "losses"))
    now, fits = len(curves[0].sums) - 1, []
    for d in np.geomspace(3, 3e5, 40) / ahead.sums[-1]:
        gains, gain_ahead = np.concatenate([each.gains(d) for each in curves]), ahead.gains(d)[-1]
        for alpha in np.linspace(0.1, 1.2, 23):
            terms = np.stack([np.ones_like(sums), sums**-alpha, -gains], 1)
            found = np.linalg.lstsq(terms / losses[:, None], np.ones_like(sums), rcond=None)[0]
            if found.min() >= 0:
                off = terms @ found - losses
                noise = float(np.sqrt(np.mean(np.diff(off) ** 2) / 2))  # of neighbours, which share the law's error
                end, before = found @ (1, ahead.sums[-1] ** -alpha, -gain_ahead), terms[now] @ found
                fits.append((float(np.sqrt(np.mean(off**2))), float(end), float(before), noise))
    if not fits:
        return DecayForecast(refusal="the losses do not fall with the steps and with the learning rate, as by the law")
    residual, loss, before, noise = min(fits)
    ends, gain = [end for other, end, *_ in fits if other <= _NEAR * residual], before - loss
    law_off = math.sqrt(max(residual**2 - noise**2, 0.0))
    noise_off = noise * math.sqrt(_PARAMETERS / len(sums))
    error, refusal = LAW_ERROR * abs(gain) + 2 * noise_off, None
    if (most := max(law_off, noise_off)) > MOST_OFF * gain:
        refusal = f"the law is off by {most:.2g} in the logs, the decay brings {gain:.2g}"
    return DecayForecast(loss, min(ends) - error, max(ends) + error, gain, refusal)


@dataclass(frozen=True)
class _Curve:
    """A log from the peak of its learning rate on, averaged to a few points.

    Args:
        sums: of the learning rate from the first step on; (points,).
        lrs: (points,).
        losses: (points,).
    """

    sums: Array
    lrs: Array
    losses: Array

    @classmethod
    def of(cls, curve: LossCurve, peak: float) -> "_Curve":
        """Learning rates are over the peak."""
        lrs = curve.lrs / peak
        sums = np.cumsum(np.diff(curve.steps, prepend=0) * (lrs + np.append(0, lrs[:-1])) / 2)
        first = int(np.argmax(lrs >= 0.999 * lrs.max()))
        starts = np.unique(np.linspace(first, len(lrs), _BINS, endpoint=False).astype(int))
        sizes = np.diff(starts, append=len(lrs))
        means = [np.add.reduceat(each, starts) / sizes for each in (sums, lrs, curve.losses)]
        return cls(*means)

    def gains(self, d: float) -> Array:
        """By which all falls of the learning rate have lowered the loss at each point, over `c`; (points,)."""
        falls = -np.diff(self.lrs)
        at = np.flatnonzero(falls)
        since = np.maximum(self.sums[:, None] - (self.sums[at] + self.sums[at + 1]) / 2, 0)  # none before a fall
        lrs = np.maximum(self.lrs[at + 1], 1e-6)
        return np.asarray((1 - (1 + d * lrs**-_GAMMA * since) ** -_BETA) @ falls[at])
