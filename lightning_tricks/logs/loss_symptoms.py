"""Symptoms in the losses: one function each, with its thresholds and their reasons above it. No torch.

Levels are medians, noise is a median distance, trends are ranks: a few outliers move none of them.
"""

import math
from collections.abc import Iterator

import numpy as np

from lightning_tricks.logs.finding import BINS, MIN_POINTS, Finding, Severity, Status, logged_names, lower_lr
from lightning_tricks.logs.run_log import (
    TO_SIGMA,
    Floats,
    RunLog,
    Series,
    above_surroundings,
    bin_error,
    bins,
    kendall,
    noise,
    shown_steps,
)

# ---- numbers that are none

NORM_GROWTH = 10.0  # of the gradient norm right before a NaN, over the median before: noise of a batch stays below 3
EARLY = 0.05  # of a run: warmups take 0.1 to 2 % of it
EARLY_STEPS = 10  # without a warmup, NaN comes within the first ten steps


def not_finite(log: RunLog) -> Iterator[Finding]:
    """NaN or infinity in the loss, the validation loss or the gradient norm."""
    loss, norm, val = log["loss"], log["grad_norm"], log["val_loss"]
    bad = ~np.isfinite(loss.values)
    if bad.any():
        first = int(loss.steps[bad][0])
        after = bad[np.argmax(bad) :]
        lost = bool(after.all()) and len(after) > 1
        growth, risen = _growth_before(norm, first), _risen_before(log, first)
        rest = f"and at all {len(after) - 1} logged steps after it" if lost else f"at {int(bad.sum())} steps in all"
        evidence = f"{log.name('loss')} is {loss.values[bad][0]} at step {first}, {rest}"
        if growth > NORM_GROWTH or risen:
            status: Status = "supported"
            norms = f"; the gradient norm had grown {growth:.0f} fold in the three steps before"
            evidence += risen + (norms if growth > NORM_GROWTH else "")
            cause, remedy = "the learning rate is too high for this phase", lower_lr(log, first)
        elif first <= max(EARLY * log.steps(), EARLY_STEPS):
            status, cause = "hypothesis", "the learning rate is too high at the start, or the first data hold NaN"
            remedy = f"{lower_lr(log)}; a warmup of 500 to 2000 steps (--model.schedule.warmup_steps)"
        else:
            status, cause = "hypothesis", "one batch: values that are not finite, ids out of range, or a wrong mask"
            remedy = "--trainer.callbacks+=StepGuard skips and names such steps; autopsy --step N ranks documents"
        severity: Severity = "error" if lost else "warning"
        yield Finding(
            "not_finite", severity, status, evidence, cause, remedy, logged_names(log, "loss", "grad_norm"), (first,)
        )
    yield from _only_norm(log, norm, loss)
    bad = ~np.isfinite(val.values)
    if bad.any() and np.isfinite(loss.values).all():
        yield Finding(
            "not_finite", "warning", "hypothesis",
            f"{log.name('val_loss')} is {val.values[bad][0]} at {shown_steps(val.steps[bad])}; the training loss "
            "is finite", "validation rows without a target, ids out of range, or an overflow of the precision",
            "look at the first row of this validation; --trainer.precision 32-true for one validation",
            logged_names(log, "val_loss"), tuple(map(int, val.steps[bad][:4])),
        )  # fmt: skip


def _only_norm(log: RunLog, norm: Series, loss: Series) -> Iterator[Finding]:
    scaled = len(log["loss_scale"]) or str(log.setting("trainer.precision")) == "16-mixed"
    bad = ~np.isfinite(norm.values)
    if not bad.any() or scaled or not np.isfinite(loss.values).all():  # a scaler finds its scale by overflows
        return
    first = int(norm.steps[bad][0])
    risen = _risen_before(log, first + 1)
    yield Finding(
        "not_finite", "warning", "supported" if risen else "hypothesis",
        f"{log.name('grad_norm')} is {norm.values[bad][0]} at {shown_steps(norm.steps[bad])}; the loss is finite"
        f"{risen}", "the learning rate is too high for this phase" if risen else
        "the backward pass overflows, or divides by zero: sqrt or norm at 0, a mask with no place left in a row",
        lower_lr(log, first + 1) if risen else
        "--trainer.callbacks+=StepGuard; --trainer.detect_anomaly true names the operation",
        logged_names(log, "grad_norm"), tuple(map(int, norm.steps[bad][:4])),
    )  # fmt: skip


def _risen_before(log: RunLog, step: int) -> str:
    """Words on a loss that has exploded shortly before a step; none where it has not."""
    loss = log["loss"].between(0, step).finite()
    last = loss.values[-END_POINTS:]
    if len(loss) < 2 or loss.values.min() <= 0 or last.max() <= EXPLODED * max(loss.values[0], loss.values.min()):
        return ""
    at = loss.steps[len(loss) - len(last) + int(last.argmax())]
    return f"; before that the loss had risen to {last.max():.3g} at step {at}, from {loss.values.min():.3g}"


def _growth_before(norm: Series, step: int) -> float:
    """The largest norm of the three steps before, over the median before those."""
    before = norm.between(0, step).finite().values
    return float(before[-3:].max() / np.median(before[:-3])) if len(before) > 8 and np.median(before[:-3]) > 0 else 0.0


# ---- the learning rate

DIVERGED = 0.1  # of the best level: above what batches of other difficulty do to a median of a twentieth of a run
SIGMAS = 6.0  # of the standard error of a bin: once in 1e9 for normal noise, so once in 1e6 for tails of a batch's loss
FLAT = 0.01  # of the level: less in 70 % of a run is no learning that one would wait for
NEVER = 0.02  # of the first level; a language model falls by far more while it learns how frequent tokens are
STALLED = 0.04  # fall of the level while the learning rate is above half its peak, for a quarter of the run or longer
DECAY_GAIN, DECAY_SHARE = 0.02, 0.8  # of the level, and of the fall before (0.3 in healthy runs): what the decay brings
ENDS = (0.08, 0.04, 0.0)  # parts of a run at its end that are looked at by themselves, each of ten points or more
END_POINTS = 10
LOST = 1.5  # times the first loss: all levels above it are no noise of batches
EXPLODED = 3.0  # times the first losses: of so few points, noise makes less
TRAINED = 0.75  # of the logarithm of the vocabulary, with which a new model begins
FINE_LR, FINE_LOSS = 1e-4, 4.0  # at most, of a fine-tuning whose vocabulary is not known
TOO_LOW_LR = 1e-7  # below it, no weight near 0.01 moves by one rounding of fp32 in a step of AdamW


def divergence(log: RunLog) -> Iterator[Finding]:
    """The loss has risen from its best level, and stayed above it."""
    loss = log.since_change(log["loss"].finite())
    short = len(loss) < MIN_POINTS
    if short and (len(loss) < END_POINTS or loss.values[-3:].min() <= EXPLODED * np.abs(loss.values[:3]).max()):
        return
    levels = bins(loss.values, 2 * BINS)
    best = int(levels.argmin())
    margin = max(SIGMAS * bin_error(loss.values, 2 * BINS), DIVERGED * abs(levels[best]))
    first, end = float(np.median(loss.values[:3])), levels[-1]
    lowest = float(levels.min())
    never_back = bool(lowest > LOST * max(loss.values[0], 0.1))
    over_start = short or levels[-1] > first + margin or never_back
    at = len(loss) * best // len(levels)
    if not over_start and (best > len(levels) - 3 or levels[-2:].min() <= levels[best] + margin):
        if (points := _rising_end(loss.values)) == 0:
            return
        at, end = len(loss) - points, float(np.median(loss.values[-3:]))
    start = int(loss.steps[min(at, len(loss) - 1)])
    if any(start <= step for step in log.restarts):
        return  # a loss that stays high after a restore is a finding of its own
    peak = _peak_step(log)
    near_peak = peak is not None and abs(start - peak) <= max(2 * log.steps() / len(levels), 2)
    grew = _has_grown(log["grad_norm"], start)
    evidence = f"{log.name('loss')} was {levels[best]:.3g} near step {start}, and is {end:.3g} at the end"
    if never_back:
        evidence = f"{log.name('loss')} began at {loss.values[0]:.3g}, rose at once, and stayed above {lowest:.3g}"
    if near_peak:
        evidence += f"; the learning rate reaches its peak at step {peak}"
    if grew:
        evidence += "; the gradient norm has grown meanwhile"
    yield Finding(
        "divergence", "error", "supported" if near_peak or grew or over_start else "hypothesis", evidence,
        "the peak of the learning rate is too high, or reached too fast",
        f"{lower_lr(log, math.inf)}; a longer --model.schedule.warmup_steps",
        logged_names(log, "loss", "lr", "grad_norm"), (start,),
    )  # fmt: skip


def _rising_end(values: Floats) -> int:
    """Number of points at the end that lie above the part of the same length before them, and have not come back."""
    for part in ENDS:
        points = max(int(len(values) * part), END_POINTS)
        before, end = values[-3 * points : -points], values[-points:]
        level = float(np.median(before))
        margin = max(SIGMAS * 1.2533 * noise(before) / math.sqrt(points), DIVERGED * abs(level))
        if np.median(end) > level + margin and np.median(end[-3:]) > level + margin and end[-3:].min() > before.max():
            return points
    return 0


def _has_grown(norm: Series, start: int) -> bool:
    before, after = norm.between(0, max(start, 5)).finite().values, norm.between(start, math.inf).finite().values
    return len(before) > 4 and len(after) > 4 and bool(np.median(after) > 2 * np.median(before))


def stalled_at_peak(log: RunLog) -> Iterator[Finding]:
    """The loss stays where it is while the learning rate is near its peak, and falls when it decays."""
    loss, lr = log["loss"].finite(), log["lr"].finite()
    if len(loss) < MIN_POINTS or len(lr) < MIN_POINTS or lr.values.max() <= 0:
        return
    top = int(lr.values.argmax())
    low = top + int((lr.values[top:] < lr.values[top] / 2).argmax())
    if low == top:
        return  # it has not decayed
    peak, half = int(lr.steps[top]), int(lr.steps[low])
    high_lr, low_lr = loss.between(peak, half).values, loss.between(half, math.inf).values
    if len(high_lr) < max(MIN_POINTS, len(loss) / 4) or len(low_lr) < MIN_POINTS / 2:
        return
    levels, end = bins(high_lr, BINS), float(bins(low_lr, 5)[-1])
    early, late = levels[1] - levels[-1], levels[-1] - end
    needed = max(DECAY_SHARE * early, DECAY_GAIN * abs(levels[-1]), SIGMAS / 2 * bin_error(low_lr, 5))
    if early < STALLED * abs(levels[1]) and late > needed:
        yield Finding(
            "stalled_at_peak", "warning", "supported" if late > 2 * early else "hypothesis",
            f"{log.name('loss')} falls by {early:.2g} from step {peak} to {half}, while {log.name('lr')} is at least "
            f"half its peak of {lr.values[top]:.3g}, and by {late:.2g} after that",
            "the peak of the learning rate is too high", lower_lr(log), logged_names(log, "loss", "lr"), (peak, half),
        )  # fmt: skip


def plateau(log: RunLog) -> Iterator[Finding]:
    """The loss stops falling early, or never falls."""
    loss, lr = log["loss"].finite(), log["lr"].finite()
    if len(loss) < MIN_POINTS or _in_warmup(log):
        return
    late = loss.last_part(0.7)
    levels = bins(late.values, BINS)
    fall, first = levels[0] - levels[-1], float(np.median(loss.values[: max(3, len(loss) // 50)]))
    needed = max(3.0 * bin_error(late.values, BINS), FLAT * abs(levels[0]))
    if abs(fall) > needed or levels[-1] > first + DIVERGED * abs(first) or _validation_falls(log, int(late.steps[0])):
        return
    peak = float(lr.values.max()) if len(lr) else None
    evidence = (
        f"{log.name('loss')} {'falls' if fall > 0 else 'rises'} by {abs(fall):.2g} from step {late.steps[0]} to "
        f"{late.steps[-1]}, from {levels[0]:.4g}; "
        f"the noise of these levels is {bin_error(late.values, BINS):.2g}"
    )
    severity: Severity = "error"
    status: Status = "hypothesis"
    if peak is not None and peak <= TOO_LOW_LR:
        status, evidence = "established", f"{evidence}; the learning rate is at most {peak:.1g}"
        cause = "the learning rate is zero or next to it"
        remedy = "--model.optimizer.lr 3e-4, and the schedule by `schedule --config RECIPE`"
    elif first - levels[-1] < max(NEVER * abs(first), 2 * bin_error(late.values, BINS)):
        evidence += f"; the first losses are {first:.4g}"
        cause = (
            "nothing is learned: a learning rate too low or far too high, frozen weights, labels that do not belong to "
            "their inputs"
        )
        remedy = "--model.optimizer.lr times 10 or divided by 10 for 100 steps; look at a batch and its labels"
    else:
        severity = "warning"
        cause = "a learning rate too low or too high, the same batches again, or labels that cannot be foretold"
        remedy = "--model.optimizer.lr, the schedule, the data's seed; compare batches in a ledger (RunLedger)"
    if _was_trained(log, first, peak):
        severity = "note"
    yield Finding(
        "plateau", severity, status, evidence, cause, remedy, logged_names(log, "loss", "lr"), (int(late.steps[0]),)
    )


def _was_trained(log: RunLog, first: float, peak: float | None) -> bool:
    """Whether the run goes on with a trained model, of which a loss that hardly falls is to be expected."""
    if peak is not None and peak <= TOO_LOW_LR:
        return False
    vocabulary = log.setting("data.vocab_size", "model.decoder.vocab_size", "vocab_size")
    if isinstance(vocabulary, int) and vocabulary > 1:
        return first < TRAINED * math.log(vocabulary)
    return log.setting("init_from") is not None or (peak is not None and peak <= FINE_LR and first < FINE_LOSS)


def _in_warmup(log: RunLog) -> bool:
    """Whether the learning rate is still rising, or a run of known length has only begun."""
    lr, planned = log["lr"].finite().values, log.setting("trainer.max_steps")
    rising = len(lr) > 2 and bool(lr[-1] >= lr.max() > lr[len(lr) // 2])
    return rising or (isinstance(planned, int) and log.steps() < 2 * EARLY * planned)


def _validation_falls(log: RunLog, start: int) -> bool:
    val = log["val_loss"].finite().between(start, math.inf).values
    return len(val) >= 2 and bool(val[-1] < val[0] - FLAT * abs(val[0]))


def _peak_step(log: RunLog) -> int | None:
    lr = log["lr"].finite()
    return int(lr.steps[lr.values.argmax()]) if len(lr) and lr.values.max() > lr.values[0] else None


# ---- the first steps

RISE = 1.3  # times the first loss: batches differ by a few hundredths while the model is new
RISEN_POINTS = 3  # above it: one of them may be a batch
LEAST_RISE = 0.5  # nats: a small loss of another kind doubles from batch to batch
FIRST_PART, FIRST_POINTS = 0.1, 30  # of the points, and at most
STARTS_HIGH = 0.5  # of the peak of the learning rate, at the first point: there is no warmup
REBOUND_PART, REBOUND = 0.25, 0.5  # of the points, and of what the loss has fallen by until then


def early_spike(log: RunLog) -> Iterator[Finding]:
    """The loss rises far above its start in the first steps, or loses most of its first fall again."""
    loss, lr = log["loss"].finite(), log["lr"].finite().values
    if len(loss) < MIN_POINTS:
        return
    early = loss.values[: min(int(FIRST_PART * len(loss)), FIRST_POINTS)]
    least = max(LEAST_RISE, SIGMAS * 1.2533 * noise(loss.values[len(early) :]) / math.sqrt(5))  # of five points' level
    above = early > max(RISE * early[0], early[0] + least)
    low, top = _rebound(loss.values[: int(REBOUND_PART * len(loss))], least)
    if above.sum() >= RISEN_POINTS:
        low, top = 0, int(early.argmax())
    elif not top or len(log.since_change(loss)) < len(loss):
        return
    no_warmup = len(lr) > 0 and lr[0] >= STARTS_HIGH * lr.max() > 0
    yield Finding(
        "early_spike", "warning", "supported" if no_warmup else "hypothesis",
        f"{log.name('loss')} rises from {loss.values[low]:.4g} at step {loss.steps[low]} to {loss.values[top]:.4g} at "
        f"step {loss.steps[top]}"
        + (f"; {log.name('lr')} is {lr[0]:.3g} at the first point, its peak {lr.max():.3g}" if no_warmup else ""),
        "no warmup" if no_warmup else "the learning rate is too high, or its warmup too short",
        f"a longer --model.schedule.warmup_steps; {lower_lr(log)}", logged_names(log, "loss", "lr"),
        (int(loss.steps[top]),),
    )  # fmt: skip


def _rebound(values: Floats, least: float) -> tuple[int, int]:
    """The places of the lowest level and of the highest after it, where most of the fall before is lost; or zeros."""
    levels = np.median(np.lib.stride_tricks.sliding_window_view(values, 5), axis=1)  # of the two on each side too
    lowest = np.minimum.accumulate(levels)
    top = int((levels - lowest).argmax())
    rise = levels[top] - lowest[top]
    if rise < max(least, REBOUND * (values[0] - lowest[top])):
        return 0, 0
    return int(levels[: top + 1].argmin()) + 2, top + 2


# ---- precision of the loss

DISTINCT = 0.1  # of the points of the second half: a loss in bf16 had 0.15 and more


def quantized_loss(log: RunLog) -> Iterator[Finding]:
    """The loss has very few different values."""
    late = log["loss"].finite().last_part(0.5).values
    distinct = np.unique(late)
    if len(late) >= MIN_POINTS and 1 < len(distinct) <= DISTINCT * len(late):
        yield Finding(
            "quantized_loss", "note", "established",
            f"the last {len(late)} values of {log.name('loss')} are {len(distinct)} different ones, "
            f"{np.diff(distinct).min():.3g} apart or more",
            "the loss is computed, reduced or logged in too few bits", "compute and log the loss in fp32",
            logged_names(log, "loss"),
        )  # fmt: skip


# ---- spikes

SPIKE_HALF = 8  # points on each side: the median of 17 stays where it is for a spike of up to 8
SPIKE_SIGMAS = 10.0  # a hard batch reaches 5; StepGuard acts at 6 above a mean, which a spike itself moves
SPIKE_RISE = 0.1  # of the level: a run with next to no noise has no spikes of a thousandth
FREQUENT, FREQUENT_SHARE = 3, 0.002  # spikes in the run, and of its steps: PaLM's 540B had about 20 in all


def spikes(log: RunLog) -> Iterator[Finding]:
    """Losses far above those around them, which come back at once."""
    loss = log["loss"].finite()
    if len(loss) < 2 * MIN_POINTS:
        return
    above = above_surroundings(loss.values, SPIKE_HALF)
    sigma = _spread(above)
    high = above > np.maximum(SPIKE_SIGMAS * sigma, SPIKE_RISE * np.abs(loss.values - above))
    high &= loss.steps > EARLY * log.steps()  # the first fall is steep
    starts = loss.steps[high & ~np.concatenate([[False], high[:-1]])]
    starts = np.array([step for step in starts if step not in log.restarts])
    if not len(starts):
        return
    often = len(starts) >= FREQUENT and len(starts) >= FREQUENT_SHARE * len(loss)
    first = [step for step in starts if _norm_leads(log["grad_norm"], int(step))]
    led = f"; the gradient norm rose at or before {len(first)} of them" if first else ""
    yield Finding(
        "spikes" if often else "spike", "warning" if often else "note", "supported" if first else "hypothesis",
        f"{len(starts)} in {len(loss)} points, at {shown_steps(starts)}, up to {np.nanmax(above[high]):.3g} "
        f"above the losses around{led}",
        "the learning rate is too high for this phase" if often else "one bad batch",
        f"{lower_lr(log)}; --trainer.callbacks+=StepGuard" if often else "if more come, a lower learning rate; "
        "--trainer.callbacks+=StepGuard to name the data",
        logged_names(log, "loss", "grad_norm"), tuple(map(int, starts[:8])),
    )  # fmt: skip


def _spread(above: Floats, size: int = 64) -> Floats:
    """The standard deviation around each point: of the block of 64 points in which it lies, and those beside it."""
    around = np.abs(np.nan_to_num(above))
    starts = range(0, len(around), size)
    blocks = [TO_SIGMA * np.median(around[max(start - size, 0) : start + 2 * size]) for start in starts]
    return np.repeat(blocks, size)[: len(around)]


def _norm_leads(norm: Series, step: int) -> bool:
    near, before = norm.between(step - 2, step + 1).finite().values, norm.between(0, step - 2).finite().values[-64:]
    return len(near) > 0 and len(before) > 8 and bool(near.max() > 3 * np.median(before))


# ---- validation

MIN_VALIDATIONS = 4
OVERFIT_RISE = 0.03  # of the best validation: that of a fixed set has no sampling noise, and weights move it by less
LEAK = 0.8  # of the training loss: dropout and the delay of a falling loss make a few hundredths
SMOOTHED = 0.3  # of the training loss: rows of the training data come far below
SMOOTHING = 1.3, 1.25  # times the smallest gap, and nats: label smoothing of 0.1 in training alone adds as much
TRAIN_GAP = 0.5  # of the validation loss: text seen three times is a tenth below text not seen


def overfitting(log: RunLog) -> Iterator[Finding]:
    """The validation loss rises from its best while the training loss falls; or training is far below all the time."""
    val, loss = log["val_loss"].finite(), log["loss"].finite()
    if len(val) < MIN_VALIDATIONS or len(loss) < MIN_POINTS:
        return
    train, best = _train_at(val, loss), int(val.values.argmin())
    later = val.values[best:]
    rise = (later[-1] - later[0]) / abs(later[0]) if later[0] else 0.0
    falls = train[-1] < train[best] - FLAT * abs(train[best])
    far_below = (train < TRAIN_GAP * val.values) & (train > 0)  # a loss that falls below 0 has no ratio
    never_fell = best == 0 or far_below[0]
    metrics, at = logged_names(log, "loss", "val_loss"), int(val.steps[best])
    figures = (
        f"{log.name('val_loss')} {val.values[best]:.4g} at step {at}, {val.values[-1]:.4g} at step {val.steps[-1]}; "
        f"training {train[best]:.4g} and {train[-1]:.4g}"
    )
    rows = "the training rows come again too often for this model"
    leak = "labels that the inputs give away (not shifted by one), or far too few training rows"
    remedy = (
        "more data, --model.weight_decay 0.1, dropout, or the checkpoint of the best validation (SafeCheckpoint's "
        "monitor)"
    )
    look = "print one training batch: labels must be the next token; count the training rows"
    if len(later) >= 3 and falls and rise > OVERFIT_RISE and kendall(later) > 0.5:
        yield Finding(
            "overfitting", "warning", "hypothesis" if len(later) < 4 else "supported", figures,
            leak if never_fell else rows, look if never_fell else remedy, metrics, (at,),
        )  # fmt: skip
    elif far_below[-2:].all():
        yield Finding("train_gap", "warning", "hypothesis", figures, leak, look, metrics, (at,))


def validation_leak(log: RunLog) -> Iterator[Finding]:
    """The validation loss is far below the training loss."""
    val, loss = log["val_loss"].finite(), log["loss"].finite()
    if len(val) < MIN_VALIDATIONS or len(loss) < MIN_POINTS:
        return
    train = _train_at(val, loss)
    if (val.values <= 0).any() or (train <= 0).any():
        return
    ratio = (val.values / train)[len(val) // 2 :]
    gap = (train - val.values)[len(val) // 2 :]
    smoothed = ratio.min() > SMOOTHED and gap.max() < min(SMOOTHING[0] * gap.min(), SMOOTHING[1])
    if not (ratio < LEAK).all() or smoothed:
        return
    falling = len(ratio) > 2 and kendall(ratio) < -0.5
    yield Finding(
        "validation_leak", "warning", "supported" if falling else "hypothesis",
        f"{log.name('val_loss')} is {ratio[-1]:.2f} of {log.name('loss')} at step {val.steps[-1]}"
        + (f", and was {ratio[0]:.2f} at step {val.steps[len(val) // 2]}" if falling else ""),
        "validation rows are in the training data, or the validation measures something easier",
        "split by document before training; if it is dropout, validate training rows once to compare",
        logged_names(log, "loss", "val_loss"), (int(val.steps[len(val) // 2]),),
    )  # fmt: skip


def _train_at(val: Series, loss: Series) -> Floats:
    """The training level at each validation: the median of the points since the one before, at most 50 of them."""
    ends = np.searchsorted(loss.steps, val.steps, side="right")
    starts = np.maximum(np.concatenate([[0], ends[:-1]]), ends - MIN_POINTS)
    return np.array(
        [np.median(loss.values[min(a, max(b - 1, 0)) : max(b, 1)]) for a, b in zip(starts, ends, strict=True)]
    )


# ---- restores

RESTORE_POINTS = 20  # on each side: as many steps as AdamW's second moment with beta2 0.95 looks back
RESTORE_RISE = 0.05  # of the level before
LR_JUMP = 1.5  # times, either way, and five times its change from point to point
LOST_STEPS = 0.5  # StepGuard and a scaler skip steps of the optimizer, but not half of them


def restore(log: RunLog) -> Iterator[Finding]:
    """What a resume has lost: the loss's level, the optimizer's state, the place in the data."""
    counted = dict(zip(log["optimizer_step"].steps.tolist(), log["optimizer_step"].values.tolist(), strict=True))
    for step in sorted({*log.restarts, *map(int, counted)}):
        jump, again = _jump(log["loss"].finite(), step), _batches_again(log, step)
        lost = step in counted and counted[step] < LOST_STEPS * step
        said, causes, todo = [], [], []
        if jump:
            said.append(f"{log.name('loss')} is {jump[0]:.4g} before and {jump[1]:.4g} after")
            causes.append("optimizer or scaler state was lost, or other data came" if not (lost or again) else "")
            todo.append("--ckpt_path with the complete checkpoint, not only its weights")
        if lost:
            said.append(f"the optimizer counts {counted[step]:.0f} steps of {step}")
            causes.append("the optimizer's state was not restored")
            todo.append("--ckpt_path LAST.ckpt in place of --init_from, and no save_weights_only")
        rates = _rate_jump(log["lr"].finite(), step)
        if rates:
            said.append(f"{log.name('lr')} is {rates[0]:.3g} before and {rates[1]:.3g} after")
            causes.append("the schedule is not that of the run before")
            todo.append("--ckpt_path LAST.ckpt with the recipe and the max_steps of the run before")
        if again:
            said.append(f"{again} of the next batches were trained before")
            causes.append("the data start again")
            todo.append("--data TextData or --trainer.callbacks+=ExactResume, which find the place again")
        if said:
            yield Finding(
                "restore", "error" if jump or lost else "warning",
                "established" if lost or again or rates else "hypothesis",
                f"at the restart at step {step}: {'; '.join(said)}",
                "; ".join(filter(None, causes)), "; ".join(dict.fromkeys(todo)), logged_names(log, "loss", "grad_norm"),
                (step,),
            )  # fmt: skip


def _jump(loss: Series, step: int) -> tuple[float, float] | None:
    """The levels before and after a restart, where the second is far above the first."""
    before = loss.between(0, step).values[-RESTORE_POINTS:]
    after = loss.between(step, math.inf).values[:RESTORE_POINTS]
    if len(before) < 5 or len(after) < 5:
        return None
    level, highest = float(np.median(before)), float(bins(after, len(after) // 5).max())
    margin = max(SIGMAS * 1.2533 * noise(before) / math.sqrt(5), RESTORE_RISE * abs(level))
    return (level, highest) if highest > level + margin else None


def _rate_jump(lr: Series, step: int) -> tuple[float, float] | None:
    """The learning rates before and after a restart, where they are far apart."""
    before, after = lr.between(0, step).values[-6:], lr.between(step, math.inf).values[:1]
    if len(before) < 3 or not len(after) or before[-1] <= 0:
        return None
    jumps = abs(after[0] - before[-1]) > 5 * np.abs(np.diff(before)).max()
    return (before[-1], after[0]) if jumps and not 1 / LR_JUMP < after[0] / before[-1] < LR_JUMP else None


def _batches_again(log: RunLog, step: int) -> int:
    """Number of the next ten batches that were trained before, where none of those before came twice."""
    before = [log.batches[each] for each in log.batches if each < step]
    if len(set(before)) < len(before):
        return 0  # an epoch is over: all come again
    return len({log.batches.get(each) for each in range(step, step + 10)} & set(before))
