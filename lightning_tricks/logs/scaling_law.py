"""The loss of a larger run from a ladder of small ones, and what a lower loss is worth in compute.

A ladder has a few sizes of one model, its rungs, each trained for the same number of tokens per parameter. Their losses
follow `floor + rest * FLOPs^-rate`, or the power law alone where they show no floor. As the law may not hold, each
answer has an interval, and may be refused in a line. Losses are of one validation text, per token or per byte.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from lightning_tricks._core.errors import UsageError
from lightning_tricks.logs.intervals import pooled_spread, student_t

LEAST_RUNGS = 4
LEAST_SPAN = 10.0  # compute of the largest rung over that of the smallest
FURTHEST_WITHOUT_FLOOR = 4.0  # times the compute of the largest rung
FURTHEST_SPEEDUP = 10.0  # likewise
CLEAR_FLOOR = 1.5  # times the convexity that noise gives one of twenty power laws: below it, a power law counts too
WIDEST = 0.55  # of a forecast's interval, where the loss falls by 1 from the largest rung on
WIDEST_SPEEDUP = 2.0  # upper end over lower end
MOST_ABOVE = 0.05  # share of draws whose floor is above a loss
PRIOR_NOISE, PRIOR_DF = 0.004, 2  # of the log of a loss over seeds: what is assumed, and the seeds it weighs as much as
_PAIRS = 3  # seeds in common from which on two recipes are compared seed by seed
_LOCAL = 3  # rungs that a local slope is taken from
_FLOORS, _RATES, _DRAWS = 200, 100, 4000  # of the posterior
_ENDS = (0.05, 0.95)  # of every interval

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Rung:
    """Runs of one size, which differ in the seed alone.

    Args:
        flops: of the training of one run.
        losses: at the end, one a seed.
        repeats_data: whether the runs read some tokens more than once.

    Raises:
        UsageError: a number is not positive and finite, or there is no loss.
    """

    flops: float
    losses: tuple[float, ...]
    repeats_data: bool = False

    def __post_init__(self) -> None:
        _check(self.flops, self.losses)


@dataclass(frozen=True)
class SeededLosses:
    """Runs of a recipe that is compared with another.

    Args:
        flops: of the training of one run.
        losses: at the end, by the seed.

    Raises:
        UsageError: as of `Rung`.
    """

    flops: float
    losses: Mapping[str, float]

    def __post_init__(self) -> None:
        _check(self.flops, list(self.losses.values()))

    @property
    def log_loss(self) -> float:
        """Mean of the logs."""
        return float(np.mean(np.log(list(self.losses.values()))))


@dataclass(frozen=True)
class Forecast:
    """The loss of a larger run.

    Args:
        loss: expected at its end; NaN for fewer than three rungs, as are the ends of the interval.
        low: lower end of the 90 % interval, of one run with any seed.
        high: upper end.
        distance: its compute over that of the largest rung.
        refusal: why the figures should not be used, on one line; None where they may be.
        has_floor: whether the losses show a floor beyond their noise: they fall more slowly towards the larger rungs.
        noise: standard deviation of a loss over seeds, as a fraction: that of the rungs, pooled with an assumed 0.4 %
            of two degrees of freedom.
        noise_df: degrees of freedom of the rungs' seeds; 0 where none has two, and the noise is only assumed.
    """

    loss: float
    low: float
    high: float
    distance: float
    refusal: str | None
    has_floor: bool
    noise: float
    noise_df: int


@dataclass(frozen=True)
class Speedup:
    """What the step from recipe A to recipe B is worth in compute.

    Args:
        factor: compute that A needs for the loss of B, over that of B; below 1 where B is worse.
        low: lower end of the 90 % interval.
        high: upper end, which may be infinite.
        refusal: as of `Forecast`.
        method: `floor` by the law, or `local slope` by the slope of the ladder around the two runs.
    """

    factor: float
    low: float
    high: float
    refusal: str | None
    method: Literal["floor", "local slope"]


def forecast(rungs: Sequence[Rung], flops: float) -> Forecast:
    """The loss at the end of a larger run of the same family.

    The loss is of a least-squares fit to the logs. The interval holds 90 % of a Bayesian posterior of the law and the
    noise, and 90 % of the same without the smallest rung, which is the likeliest to be off the law. Where no floor
    shows, the fit is the power law; its interval and that of a parabola in log-log, which follows a bend, are joined.
    They are joined too where a floor may be noise.

    Args:
        rungs: in any order.
        flops: of the training of the larger run.

    Raises:
        UsageError: there is no rung, or two have the same FLOPs.

    Source: the law is that of Hoffmann et al. 2022, https://arxiv.org/abs/2203.15556, in one variable.
    """
    points = _Points.of(rungs)
    distance = flops / points.top
    noise = points.noise, points.noise_df - PRIOR_DF
    if len(rungs) < 3:
        few = f"{len(rungs)} rungs: a forecast needs {LEAST_RUNGS} or more"
        return Forecast(math.nan, math.nan, math.nan, distance, few, False, *noise)
    target, convexity = math.log(distance), points.convexity()
    has_floor = convexity > 1
    loss, top = points.fitted(target, has_floor), points.fitted(0, has_floor)
    ends, shift = [points.posterior_interval(target)], 0.0
    if len(rungs) >= LEAST_RUNGS:
        upper = replace(points, x=points.x[1:], y=points.y[1:], seeds=points.seeds[1:])
        ends.append(upper.posterior_interval(target))
        shift = abs(upper.fitted(target, has_floor) - loss)
    if convexity < CLEAR_FLOOR:
        ends += [points.polynomial_interval(degree, target) for degree in (1, 2)]
    low, high = min(loss, *(end[0] for end in ends)), max(loss, *(end[1] for end in ends))
    loss, low, high, shift, top = (value * points.scale for value in (loss, low, high, shift, top))
    found = Forecast(loss, low, high, distance, None, has_floor, *noise)
    repeats = max(rungs, key=lambda rung: rung.flops).repeats_data
    return replace(found, refusal=_why_no_forecast(found, points, repeats, shift, top - loss))


def _why_no_forecast(found: Forecast, points: "_Points", repeats: bool, shift: float, gain: float) -> str | None:
    """Why a forecast is refused; the smallest rung moves the loss by `shift`, which falls by `gain` from the top on."""
    span, width = math.exp(-points.x[0]), found.high - found.low
    furthest = math.sqrt(span) if found.has_floor else min(FURTHEST_WITHOUT_FLOOR, math.sqrt(span))
    if len(points.x) < LEAST_RUNGS:
        return f"{len(points.x)} rungs: a forecast needs {LEAST_RUNGS} or more"
    if span < LEAST_SPAN * 0.999:  # rungs are planned in whole steps and widths
        return f"the rungs span {span:.3g} times the compute: a forecast needs {LEAST_SPAN:g} times or more"
    if repeats:
        return "the largest rung reads some tokens more than once, which the law leaves out: give more text"
    if found.distance < 1:
        return f"{found.distance:.3g} times the largest rung: a ladder tells of larger runs"
    if found.distance > furthest * 1.001:
        who = f"rungs that span {span:.3g} times" if found.has_floor else "rungs that show no floor"
        return f"{found.distance:.3g} times the largest rung: {who} tell up to {furthest:.3g} times: add a larger rung"
    if shift > width / 2:
        return f"without the smallest rung the loss moves by {shift:.3g}: leave that rung out, and add a larger one"
    if width > WIDEST * gain:
        return f"the interval is {width:.3g} wide, the loss falls by {gain:.3g}: add seeds to rungs, or a larger rung"
    return None


def speedup(rungs: Sequence[Rung], run_a: SeededLosses, run_b: SeededLosses) -> Speedup:
    """The compute that recipe A needs to reach the loss of recipe B, over that of B.

    By the law it is `((loss_a - floor) / (loss_b - floor)) ** (1 / rate) * flops_a / flops_b`. Where both recipes have
    the same seeds, three or more, their losses are compared in pairs, whose common noise cancels.

    Args:
        rungs: a ladder of either recipe, in any order.
        run_a: the recipe before the change.
        run_b: the recipe after it.

    Raises:
        UsageError: there are fewer than three rungs, or two have the same FLOPs.
    """
    if len(rungs) < 3:
        raise UsageError(f"a ladder of {len(rungs)} rungs: a speedup needs 3 or more")
    points = _Points.of(rungs, [list(run.losses.values()) for run in (run_a, run_b)])
    place_a, place_b = (math.log(run.flops / points.top) for run in (run_a, run_b))
    rng = np.random.default_rng(0)
    floor, _, rate, sd = points.draws(rng)
    errors = _errors_of_difference(points, sd, run_a.losses, run_b.losses, rng)
    falls = run_a.log_loss - run_b.log_loss
    has_floor, above = points.convexity() > 1, 0.0
    if has_floor:
        count = len(run_a.losses) + len(run_b.losses)
        mean = (run_a.log_loss + run_b.log_loss) / 2 - math.log(points.scale)
        middle = mean + sd / math.sqrt(count) * rng.standard_normal(_DRAWS)
        rest_a, rest_b = (np.exp(middle + sign * (falls + errors) / 2) - floor for sign in (1, -1))
        known = np.minimum(rest_a, rest_b) > 0
        above = 1 - float(known.mean())
        logs = np.log(np.where(known, rest_a, 1) / np.where(known, rest_b, 1)) / rate
    else:
        slope, slope_sd, df = points.local_slope((place_a + place_b) / 2)
        slopes = slope + slope_sd * rng.standard_t(df, _DRAWS)
        known = slopes > 0
        logs = (falls + errors) / np.where(known, slopes, 1)
    logs = np.where(known, logs, math.inf) + place_a - place_b  # a draw without an answer widens the upper end
    with np.errstate(over="ignore"):
        low, factor, high = np.exp(np.quantile(logs, (_ENDS[0], 0.5, _ENDS[1]), method="inverted_cdf"))
    method: Literal["floor", "local slope"] = "floor" if has_floor else "local slope"
    found = Speedup(float(factor), float(low), float(high), None, method)
    noise = float(np.quantile(np.abs(errors), 0.95))  # 2 standard deviations, or more where few seeds tell them
    return replace(found, refusal=_why_no_speedup(found, abs(falls), noise, math.exp(max(place_a, place_b)), above))


def _errors_of_difference(
    points: "_Points", sd: Array, a: Mapping[str, float], b: Mapping[str, float], rng: np.random.Generator
) -> Array:
    """Draws of the error of the difference of two mean log losses; `sd` is of a loss over seeds, by draw."""
    if len(a) < _PAIRS or a.keys() != b.keys():
        return sd * math.sqrt(1 / len(a) + 1 / len(b)) * rng.standard_normal(_DRAWS)
    differences = [math.log(b[seed] / a[seed]) for seed in a]
    df = len(differences) - 1
    # few pairs can be equal by chance: with them count two degrees of freedom of pairs that have nothing in common
    variance = (df * np.var(differences, ddof=1) + PRIOR_DF * 2 * points.noise**2) / (df + PRIOR_DF)
    return math.sqrt(variance / len(differences)) * rng.standard_t(df + PRIOR_DF, _DRAWS)


def _why_no_speedup(found: Speedup, difference: float, noise: float, distance: float, above: float) -> str | None:
    """Why a speedup is refused.

    Args:
        difference: of the mean log losses.
        noise: difference that seeds make in one of twenty pairs.
        distance: compute of the larger run over that of the largest rung.
        above: share of draws whose floor is above a loss.
    """
    furthest = FURTHEST_SPEEDUP if found.method == "floor" else 1
    if distance > furthest * 1.001:
        who = "a ladder" if found.method == "floor" else "a ladder that shows no floor"
        return f"a run has {distance:.3g} times the compute of the largest rung: {who} tells up to {furthest:g} times"
    if difference < noise:
        return f"the losses differ by {difference:.2%}, and by up to {noise:.2%} from seeds alone: add seeds to both"
    if above > MOST_ABOVE:
        return "a loss is as low as the floor of the ladder may be: add a larger rung"
    if found.high > min(WIDEST_SPEEDUP * found.low, 1e300):  # also where both are infinite
        return f"the interval is from {found.low:.3g} to {found.high:.3g}: add seeds, or a larger rung"
    return None


@dataclass(frozen=True)
class _Points:
    """Rungs from the smallest to the largest.

    Args:
        x: log of the compute over that of the largest rung; (rungs,).
        y: geometric mean of the losses over that of the largest rung; (rungs,).
        seeds: number of losses; (rungs,).
        top: FLOPs of the largest rung.
        scale: mean loss of the largest rung.
        noise: standard deviation of the log of a loss over seeds.
        noise_df: its degrees of freedom, the prior's among them.
    """

    x: Array
    y: Array
    seeds: Array
    top: float
    scale: float
    noise: float
    noise_df: int

    @classmethod
    def of(cls, rungs: Sequence[Rung], others: Sequence[Sequence[float]] = ()) -> "_Points":
        """Rungs; the seeds of other groups of losses tell of the noise too."""
        if not rungs:
            raise UsageError(f"a ladder without rungs: give {LEAST_RUNGS} or more")
        rungs = sorted(rungs, key=lambda rung: rung.flops)
        flops = np.array([rung.flops for rung in rungs])
        if (same := flops[1:][np.diff(flops) == 0]).size:
            raise UsageError(f"two rungs of {same[0]:.4g} FLOPs: give one rung with the losses of both")
        logs = [np.log(losses) for losses in (*(rung.losses for rung in rungs), *others)]
        spread, df = pooled_spread([each.tolist() for each in logs]) or (0.0, 0)
        noise = math.sqrt((df * spread**2 + PRIOR_DF * PRIOR_NOISE**2) / (df + PRIOR_DF))
        means = np.array([each.mean() for each in logs[: len(rungs)]])
        seeds = np.array([float(len(rung.losses)) for rung in rungs])
        top, scale = float(flops[-1]), math.exp(means[-1])
        return cls(np.log(flops / top), np.exp(means - means[-1]), seeds, top, scale, noise, df + PRIOR_DF)

    def convexity(self) -> float:
        """Of log loss over log compute, over what noise gives one of twenty power laws: above 1 it is a floor."""
        found, covariance, _, df = self.polynomial(2)
        return float(found[0]) / (student_t(_ENDS[1], df) * math.sqrt(covariance[0, 0]))

    def fitted(self, target: float, has_floor: bool) -> float:
        """The loss at a log compute by least squares of the log loss."""
        if not has_floor:
            return _exp(float(np.polyval(self.polynomial(1)[0], target)))
        floor, rest, rate = self.least_squares()
        return floor + rest * math.exp(-rate * target)

    def least_squares(self) -> tuple[float, float, float]:
        """Floor, rest and rate: the rate by ever finer grids, the other two by Gauss-Newton steps at each rate."""
        logs, rates, step = np.log(self.y), np.geomspace(0.01, 2, 65), 1.1
        for _ in range(4):
            basis = np.exp(-rates[:, None] * self.x)
            fit = np.broadcast_to(self.y, basis.shape)
            for _ in range(8):
                weights, seen = self.seeds / fit**2, fit * (1 + logs - np.log(fit))
                ones, power, square, seen_ones, seen_power = (
                    (weights * terms).sum(1, keepdims=True) for terms in (1, basis, basis**2, seen, seen * basis)
                )
                floor = (seen_ones * square - seen_power * power) / (ones * square - power**2)
                floor = np.clip(floor, 0, 0.999 * self.y.min())
                rest = np.maximum((seen_power - floor * power) / square, 1e-9)
                fit = floor + rest * basis
            best = int(np.argmin((self.seeds * (np.log(fit) - logs) ** 2).sum(1)))
            found = float(floor[best, 0]), float(rest[best, 0]), float(rates[best])
            rates, step = rates[best] * np.geomspace(1 / step, step, 17), step ** (1 / 8)
        return found

    def draws(self, rng: np.random.Generator) -> tuple[Array, Array, Array, Array]:
        """Draws of floor, rest, rate and the noise of a run from their posterior; (draws,) each.

        A grid has the floors, all below the lowest loss and alike likely, and the rates, log-normal around 0.2. The
        rest and the noise are integrated over in closed form; the noise has the prior of its degrees of freedom.
        """
        normal = np.linspace(-3, 3, _RATES)
        rates = 0.2 * np.exp(0.7 * normal)
        floors = (np.arange(_FLOORS) + 0.5) / _FLOORS * self.y.min()
        above, basis, weights = self.y - floors[:, None, None], np.exp(-rates[:, None] * self.x), self.seeds / self.y**2
        information = (weights * basis**2).sum(1)
        rest = (weights * basis * above).sum(2) / information
        squares = (weights * (above - rest[:, :, None] * basis) ** 2).sum(2)
        df = self.noise_df + len(self.y) - 1
        variance = (self.noise_df * self.noise**2 + squares) / df
        odds = -(normal**2 + df * np.log(variance) + np.log(information)) / 2 - np.log(rest)
        odds = np.exp(odds - odds.max())
        row, column = np.divmod(rng.choice(odds.size, _DRAWS, p=(odds / odds.sum()).ravel()), _RATES)
        sd = np.sqrt(variance[row, column] * df / rng.chisquare(df, _DRAWS))
        error = sd / np.sqrt(information[column]) * rng.standard_normal(_DRAWS)
        return floors[row], np.maximum(rest[row, column] + error, 1e-9), rates[column], sd

    def posterior_interval(self, target: float) -> tuple[float, float]:
        """Of the loss of one run at a log compute."""
        rng = np.random.default_rng(0)
        floor, rest, rate, sd = self.draws(rng)
        losses = (floor + rest * np.exp(-rate * target)) * np.exp(sd * rng.standard_normal(_DRAWS))
        low, high = np.quantile(losses, _ENDS)
        return float(low), float(high)

    def polynomial(self, degree: int, keep: slice = slice(None)) -> tuple[Array, Array, float, int]:
        """Least squares of the log loss: coefficients, the highest first, their covariance, a run's variance, its df.

        The variance is that of the residuals and of the noise.
        """
        terms, logs, weights = np.vander(self.x[keep], degree + 1), np.log(self.y[keep]), self.seeds[keep]
        inverse = np.asarray(np.linalg.inv(terms.T @ (weights[:, None] * terms)), np.float64)
        found: Array = inverse @ (terms.T @ (weights * logs))
        df = len(logs) - degree - 1 + self.noise_df
        variance = (float((weights * (logs - terms @ found) ** 2).sum()) + self.noise_df * self.noise**2) / df
        return found, inverse * variance, variance, df

    def polynomial_interval(self, degree: int, target: float) -> tuple[float, float]:
        """Of the loss of one run at a log compute, by a polynomial in log-log."""
        found, covariance, variance, df = self.polynomial(degree)
        terms = np.vander([target], degree + 1)[0]
        half = student_t(_ENDS[1], df) * math.sqrt(terms @ covariance @ terms + variance)
        return _exp(terms @ found - half), _exp(terms @ found + half)

    def local_slope(self, place: float) -> tuple[float, float, int]:
        """By which the log loss falls a unit of log compute around a place, its error, and the df of that."""
        first = int(np.argsort(np.abs(self.x - place))[:_LOCAL].min())
        found, covariance, _, df = self.polynomial(1, slice(first, first + _LOCAL))
        return -float(found[0]), math.sqrt(covariance[0, 0]), df


def _exp(log: float) -> float:
    return math.exp(max(min(log, 700.0), -700.0))  # of a target that is far off the rungs


def _check(flops: float, losses: Sequence[float]) -> None:
    for name, value in (("flops", flops), *(("loss", loss) for loss in losses)):
        if not 0 < value < math.inf:
            raise UsageError(f"{name}={value} of a run of {flops:.4g} FLOPs: give a positive number, or leave it out")
    if not losses:
        raise UsageError(f"a run of {flops:.4g} FLOPs without a loss: give one or more")
