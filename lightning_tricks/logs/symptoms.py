"""Symptoms in what was printed, the schedule, the clip, the speed and the model, as in `loss_symptoms`. No torch."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from lightning_tricks.logs import loss_symptoms
from lightning_tricks.logs.finding import BINS, MIN_POINTS, Finding, Status, logged_names, lower_lr, without_present
from lightning_tricks.logs.loss_symptoms import FREQUENT, FREQUENT_SHARE
from lightning_tricks.logs.run_log import Floats, RunLog, bins, kendall, noise, shown_steps

# ---- what the run has printed

PRINTED: tuple[tuple[str, str, Status, str, str], ...] = (  # symptom, its lines, status of the cause, cause, remedy
    (
        "hang", r"HangWatchdog: (?!.* goes on)(?!.* is not watched)", "established",
        "the rank or the loader that these lines name", "look at the stacks below them; --data.num_workers for a "
        "loader that lags; the same validation batches on all ranks",
    ),
    (
        "collective_timeout", r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for",
        "established", "one rank did not come to a collective of the others",
        "--trainer.callbacks+=HangWatchdog to name that rank",
    ),
    (
        "out_of_memory", r"OutOfMemoryError|CUDA out of memory|can't allocate memory", "established",
        "weights, optimizer and activations together are larger than the device's memory",
        "plan --config RECIPE lists what makes it fit, such as a smaller --data.micro_batch_size",
    ),
    (
        "steps_all_skipped", r"StepGuard\.max_skipped_steps=", "hypothesis",
        "the learning rate is too high, or the data are broken",
        "a lower peak of the learning rate; autopsy --step N ranks the documents of such a step",
    ),
    ("refused", r"^error: ", "established", "an option of the command line or the recipe", "as the line says"),
)  # fmt: skip
RAISED = re.compile(
    r"^(\[rank\d+\]:\s*)?([a-z_]\w*\.)*[A-Z]\w*(?<!ChildFailed)(Error|Exception)\b"
)  # without a launcher's
TELLING = re.compile("|".join([*(pattern for _, pattern, *_ in PRINTED), RAISED.pattern]))
SHOWN_LINES = 2  # of a symptom, in its evidence: HangWatchdog says where a rank stands, then who is behind


def printed(log: RunLog) -> Iterator[Finding]:
    """How the run ended, by what it has printed."""
    left = list(log.printed)
    for symptom, pattern, status, cause, remedy in PRINTED:
        lines = [line for line in left if re.search(pattern, line)]
        if lines:
            yield Finding(symptom, "error", status, "; ".join(lines[:SHOWN_LINES]), cause, remedy)
            left = []  # what is raised beside it is a consequence
    if lines := [line for line in left if RAISED.search(line)]:
        yield Finding(
            "exception", "error", "established", lines[0], "the code in the last line of its traceback",
            "fix it; --trainer.callbacks+=SafeCheckpoint; --resume auto resumes from the last checkpoint",
        )  # fmt: skip


def guarded_steps(log: RunLog) -> Iterator[Finding]:
    """StepGuard has skipped steps."""
    skipped = log["guarded_steps"].finite()
    if not len(skipped) or skipped.values[-1] < 1:
        return
    number, at = int(skipped.values[-1]), skipped.steps[np.diff(skipped.values, prepend=0.0) > 0]
    often = number >= FREQUENT and number >= FREQUENT_SHARE * log.steps()
    yield Finding(
        "steps_skipped", "warning" if often else "note", "hypothesis",
        f"StepGuard has skipped {number} of {log.steps():,} steps, counted at {shown_steps(at)}",
        "loss or gradient norm not finite or far above the steps before: a learning rate too high, or single batches",
        f"{lower_lr(log)}; autopsy --step N ranks the documents of such a step",
        logged_names(log, "guarded_steps", "loss"), tuple(map(int, at[:8])),
    )  # fmt: skip


# ---- the schedule and the clip

DECAYED = 0.9  # of the peak: every schedule that decays at all ends below it
PINNED = 0.95  # of the steps: a clip is for the rare ones
PINNED_RATIO = 10.0  # norm over clip: a spike of this height is then a step like any other, and the clip has no effect
GROWN = 3.0  # times the norm of the first tenth: a healthy norm falls, or doubles at most
UNUSED_RATIO = 0.1  # a norm that has never come to a tenth of the clip would be a spike of 10 before it is clipped


def never_decayed(log: RunLog) -> Iterator[Finding]:
    """A run at its end, with the learning rate still at its peak."""
    lr, planned = log["lr"].finite(), log.setting("trainer.max_steps")
    if not isinstance(planned, int) or not 0 < planned <= log.steps() or len(lr) < MIN_POINTS:
        return
    if lr.values[-1] >= DECAYED * lr.values.max() > 0:
        yield Finding(
            "never_decayed", "note", "established",
            f"{log.name('lr')} is {lr.values[-1]:.3g} at the last of {planned} steps, its peak {lr.values.max():.3g}",
            "the schedule does not decay within this run: the decay brings a part of the gain",
            "--model.schedule WarmupStableDecay, or `branch` a decay from a checkpoint", logged_names(log, "lr"),
        )  # fmt: skip


def clip(log: RunLog) -> Iterator[Finding]:
    """Each step is clipped, or none would ever be."""
    norm = log["grad_norm"].finite()
    limit = log.clip_norm()
    if limit <= 0 or len(norm) < MIN_POINTS:
        return
    late = norm.last_part(0.5).values
    share, middle = float((late > limit).mean()), float(np.median(late))
    evidence = f"{share:.0%} of the steps in the second half are clipped to {limit:g}; the median norm is {middle:.3g}"
    metrics = logged_names(log, "grad_norm", "clip_norm")
    start = float(np.median(norm.values[: max(len(norm) // 10, 5)]))
    if share >= PINNED and middle > PINNED_RATIO * limit and middle > GROWN * start:
        yield Finding(
            "clip_pinned", "warning", "supported", f"{evidence}, that of the first steps {start:.3g}",
            "the learning rate has driven the norm up", lower_lr(log), metrics,
        )  # fmt: skip
    elif share >= PINNED and middle > PINNED_RATIO * limit:
        yield Finding(
            "clip_pinned", "warning", "established", evidence, "the clip is far below the ordinary norm",
            f"--trainer.gradient_clip_val {_round_up(middle)}", metrics,
        )  # fmt: skip
    elif share >= PINNED:
        yield Finding(
            "clip_pinned", "note", "hypothesis", evidence, "the learning rate is high for this phase",
            "a lower peak or a longer warmup, if the loss is noisy", metrics,
        )  # fmt: skip
    elif middle > 0 and norm.values.max() < UNUSED_RATIO * limit:
        yield Finding(
            "clip_unused", "note", "established",
            f"the largest norm is {norm.values.max():.3g}, the clip {limit:g}", "the clip is set far above the norm",
            f"--trainer.gradient_clip_val {_round_up(3 * middle)}", metrics,
        )  # fmt: skip


QUIET = 0.06  # noise of a norm over the norm: 0.03 to 0.05 where gradients added up, 0.058 and more in healthy runs
SUM_GROWTH = 3.0  # times from the second tenth of a run to its last, and more in each tenth than in that before
SUM_LEVEL = 3.0  # times the norm of the first steps, from the first tenth on
KEPT_RATIO = 1.6  # norm over clip at most, and 1 at least, in each tenth of a run: what was clipped, and a gradient


def gradients_add_up(log: RunLog) -> Iterator[Finding]:
    """The norm is that of a sum over steps: it grows in each tenth of a run, or stands high with little noise."""
    norm, limit = log["grad_norm"].finite(), log.clip_norm()
    if len(norm) < MIN_POINTS:
        return
    late, levels, start = norm.last_part(0.5).values, bins(norm.values, BINS), float(np.median(norm.values[:3]))
    middle = float(np.median(late))
    grows = kendall(levels) == 1.0 and levels[-1] > SUM_GROWTH * levels[1] > 0
    kept = 0 < limit < levels.min() and levels.max() < KEPT_RATIO * limit
    if grows or (noise(late) < QUIET * middle and (kept or min(levels[0], middle) > SUM_LEVEL * start)):
        evidence = f"from {levels[1]:.3g} in the second tenth of the run to {levels[-1]:.3g}, more in each"
        if not grows:
            evidence = f"{middle:.3g} in the second half with a noise of only {noise(late) / middle:.1%}; it began at "
            evidence += f"{start:.3g}" + f", the clip is {limit:g}" * (limit > 0)
        yield Finding(
            "gradients_add_up", "warning", "supported" if grows else "hypothesis",
            f"{log.name('grad_norm')} is {evidence}", "`zero_grad` is missing: each step adds to the gradients before",
            "in a loop or an `optimizer_zero_grad` of your own, `zero_grad` before each step's first backward pass",
            logged_names(log, "grad_norm", "clip_norm"),
        )  # fmt: skip


def _round_up(value: float) -> str:
    scale = 10.0 ** math.floor(math.log10(value))
    return f"{next(step for step in (1, 2, 5, 10) if step * scale >= value * 0.999) * scale:g}"


# ---- speed

SLOWER = 0.7  # of the speed at the start: less than what a GPU loses when it gets warm, and than growing documents cost
CROWDED = 0.2  # on a CPU: with four other busy programs on two cores, healthy runs fell to 0.36 of their speed
FALLING = -0.7  # Kendall's tau of ten levels: less in 1 of 500 orders of equal ones
DATA_WAIT = 0.2  # of the time of steps and waits: a loader that keeps up took 0.01 of it, in this process too
PER_STEP = re.compile(r"steps per second|batches_per_sec|steps_per_sec|it/s")  # larger batches make such a speed fall
QUIETER = (1.5, 0.75)  # times the root of the speed's fall, and at most: the noise of a loss over so many more tokens
RESETS = 3  # returns to the full speed within one point, after falls of many
STALL_SECONDS, STALL_RATIO = 600.0, 20.0  # between two points, and over the median of such times
GPU = ("gpu", "cuda", "auto")  # settings with which a device is rarely shared
LOW_MFU = 0.2  # tuned runs of large models reach 0.4 to 0.55


def throughput(log: RunLog) -> Iterator[Finding]:
    """The speed falls over the run, at once and for good, or again and again; or it is 0."""
    speed = log.since_change(log["speed"].finite())
    if len(speed) < BINS + 2:
        return
    values = speed.values[max(len(speed) // 20, 1) :]
    levels = bins(values, BINS)
    start, end = float(np.median(levels[:3])), float(np.median(levels[-2:]))
    zeros, resets = int((values <= 0).sum()), _resets(values)
    if zeros > len(values) / 20:
        yield Finding(
            "throughput_zero", "warning", "hypothesis", f"{log.name('speed')} is 0 at {zeros} of {len(values)} points",
            "what it counts is not there: no tokens with a label, or a batch of another form; or nothing is trained",
            "look at a batch and its labels", logged_names(log, "speed"),
        )  # fmt: skip
    elif resets >= RESETS:
        yield Finding(
            "throughput_sawtooth", "note" if log.setting("trainer.accelerator") == "cpu" else "warning", "hypothesis",
            f"{log.name('speed')} falls from {values.max():.4g} to "
            f"{values.min():.4g} bit by bit, and comes back at once, {resets} times", "something grows and is emptied "
            "at each epoch, validation or save: a cache, a list of outputs, the workers' memory",
            "compare memory before and after such a return", logged_names(log, "speed"),
        )  # fmt: skip
    shifts = any(levels[k:].max() <= SLOWER * levels[:k].min() for k in range(2, len(levels) - 1))
    if start <= 0 or (not shifts and (end > SLOWER * start or kendall(levels) > FALLING)):
        return
    if PER_STEP.search(log.name("speed")) and _grows_quieter(log["loss"].finite().values, end / start):
        return
    waits = _data_wait(log)
    loader = waits is not None and waits > DATA_WAIT / 2
    wait = f"; {waits:.0%} of the steps' time went into waits for data" if loader else ""
    alone = log.setting("trainer.accelerator") in GPU or (shifts and log.setting("trainer.accelerator") != "cpu")
    yield Finding(
        "throughput_falls", "warning" if loader or alone or end < CROWDED * start else "note",
        "supported" if loader else "hypothesis",
        f"{log.name('speed')} falls from {start:.4g} to {end:.4g}{wait}",
        "the loader lags" if loader else "the loader lags, memory grows until it is swapped, the device throttles, or "
        "other programs share the machine",
        "--data.num_workers, tokenized data in memory maps (prepare)" + ("" if loader else "; GoodputMonitor tells"),
        logged_names(log, "speed", "data_share"),
    )  # fmt: skip


def _grows_quieter(loss: Floats, fall: float) -> bool:
    """Whether the noise of the loss falls as it does where a step has 1 / `fall` times the rows or tokens."""
    first, _, last = [np.abs(np.diff(part)).sum() for part in np.array_split(loss, 3)]
    return bool(last < min(QUIETER[0] * math.sqrt(fall), QUIETER[1]) * first)


def _resets(values: Floats) -> int:
    """Number of sudden returns to a high speed, where it falls little by little between them."""
    smooth = np.median(np.lib.stride_tricks.sliding_window_view(values, 3), axis=1)
    low, high = np.quantile(smooth, (0.1, 0.9))
    ups, downs = ((sign * np.diff(smooth) > (high - low) / 2).sum() for sign in (1, -1))
    return int(ups) if low <= SLOWER * high and downs < ups / 2 else 0


def stall(log: RunLog) -> Iterator[Finding]:
    """No step for a long time, without a restart in between; validations are compared with validations."""
    steps, gaps = log.times.steps, np.diff(log.times.values)
    validated = np.diff(np.searchsorted(log["val_loss"].steps, steps)) > 0
    restarted = np.diff(np.searchsorted(log.restarts, steps, side="right")) > 0
    for kind in (~validated & ~restarted, validated & ~restarted):
        usual = float(np.median(gaps[kind])) if kind.sum() > 5 else math.inf
        long = kind & (gaps > max(STALL_SECONDS, STALL_RATIO * usual))
        if long.any():
            yield Finding(
                "stall", "warning", "hypothesis", f"{gaps[long].max() / 60:.0f} minutes without a logged step after "
                f"{shown_steps(steps[:-1][long])}; usually {usual:.3g} s",
                "a rank or loader that hung, storage that did not answer, or a machine that was suspended",
                "--trainer.callbacks+=HangWatchdog to name the rank; the job's own log of that time",
                logged_names(log, "speed"), tuple(map(int, steps[:-1][long][:8])),
            )  # fmt: skip


def loader_stalls(log: RunLog) -> Iterator[Finding]:
    """The device waits for data."""
    waits = _data_wait(log)
    if waits is not None and waits > DATA_WAIT:
        yield Finding(
            "loader_stalls", "warning", "established",
            f"{waits:.0%} of the time of steps went into waits for data ({log.name('data_share')})",
            "the loader is slower than the step", "--data.num_workers, tokenized data in memory maps (prepare)",
            logged_names(log, "data_share", "speed"),
        )  # fmt: skip


def _data_wait(log: RunLog) -> float | None:
    data, steps = log["data_share"].finite().values, log["step_share"].finite().values
    return float(data[-1] / (data[-1] + steps[-1])) if len(data) and len(steps) and data[-1] + steps[-1] > 0 else None


def low_mfu(log: RunLog) -> Iterator[Finding]:
    """A GPU that does little of what it could."""
    mfu = log["mfu"].finite().last_part(0.5).values
    if len(mfu) >= 5 and 0 < np.median(mfu) < LOW_MFU and log.setting("trainer.accelerator") in GPU:
        yield Finding(
            "low_mfu", "note", "hypothesis", f"the median of {log.name('mfu')} is {np.median(mfu):.1%}",
            "steps too small for the device, no compilation, waits between kernels, or fp32 products",
            "a larger --data.micro_batch_size, --model.compile_blocks auto, --trainer.plugins AutoPrecision; "
            "torch.cuda.set_sync_debug_mode names waits", logged_names(log, "mfu"),
        )  # fmt: skip


SLOW_RANK = 1.5  # times the median of the other ranks' own seconds
SLOW_POINTS = 0.9  # of the points at which it is the slowest


def slow_rank(log: RunLog) -> Iterator[Finding]:
    """One rank needs longer than the others, which wait for it in each step."""
    ranks = {rank: series.finite() for rank, series in log.like("ranks/", "/own_seconds").items()}
    size = min(map(len, ranks.values()), default=0)
    if len(ranks) < 2 or size < 5:
        return
    names = list(ranks)
    table = np.stack([ranks[rank].values[-size:] for rank in names])[:, size // 2 :]
    middles = np.median(table, axis=1)
    slowest = int(middles.argmax())
    others = float(np.median(np.delete(middles, slowest)))
    if middles[slowest] > SLOW_RANK * others and (table.argmax(axis=0) == slowest).mean() >= SLOW_POINTS:
        yield Finding(
            "slow_rank", "warning", "supported",
            f"rank {names[slowest]} takes {middles[slowest]:.3g} s from a step's start to its backward pass, the "
            f"others {others:.3g} s", "its loader or its host is slower: all ranks wait for it in each step",
            "look at that host's CPU load and disk; --data.num_workers", (f"ranks/{names[slowest]}/own_seconds",),
        )  # fmt: skip


# ---- inside the model

COLLAPSED = 1.0  # a loss scale below it makes gradients smaller than no scaling would
SKIPPED = 0.25  # of the second half's steps: a scaler that has found its scale skips one in 2,000
DEAD = 0.99  # zeros in an output: squared ReLUs have up to 0.95 of them in health
LOGIT = 87.0  # exp(-87) is the smallest normal number of fp32: the other tokens get no weight and no gradient
LOGIT_GROWTH = 2.0


def scaler(log: RunLog) -> Iterator[Finding]:
    """fp16's loss scale collapses, or most steps overflow."""
    scale, skipped = log["loss_scale"].finite(), log["skipped_steps"].finite().last_part(0.5)
    if not len(scale):
        return
    share = 0.0
    if len(skipped) > 10 and skipped.steps[-1] > skipped.steps[0]:
        share = float((skipped.values[-1] - skipped.values[0]) / (skipped.steps[-1] - skipped.steps[0]))
    if scale.values[-1] < COLLAPSED or share > SKIPPED:
        yield Finding(
            "scaler_collapse", "error", "established",
            f"{log.name('loss_scale')} is {scale.values[-1]:.3g} after {scale.values.max():.3g}; {share:.0%} of the "
            "steps in the second half were skipped", "gradients or activations exceed 65504 at any scale",
            f"--trainer.plugins BF16Mixed, or {lower_lr(log)}", logged_names(log, "loss_scale", "skipped_steps"),
        )  # fmt: skip


def dead_units(log: RunLog) -> Iterator[Finding]:
    """Outputs that are all zero."""
    late = {name: s.finite().last_part(0.5).values for name, s in log.like("activations/", "/zero_fraction").items()}
    dead = {name: float(np.median(values)) for name, values in late.items() if len(values) >= 3}
    dead = {name: share for name, share in dead.items() if share >= DEAD}
    if dead:
        listed = ", ".join(f"{name} {share:.1%}" for name, share in list(dead.items())[:4])
        yield Finding(
            "dead_units", "warning", "supported", f"zeros in the outputs in the second half: {listed}",
            "biases or a step too large have driven the units below zero for every input: they learn no more",
            f"{lower_lr(log)}; smaller initial biases, or an activation with a slope on both sides",
            tuple(f"activations/{name}/zero_fraction" for name in list(dead)[:4]),
        )  # fmt: skip


GROWN_ACTIVATIONS = 100.0  # times their first root mean square, and at least: healthy blocks stayed below 10 times


def activations_grow(log: RunLog) -> Iterator[Finding]:
    """The outputs of a block have grown out of all proportion."""
    for name, series in log.like("activations/", "/rms").items():
        values = series.finite().values
        if len(values) < 3:
            continue
        late = float(np.median(values[len(values) // 2 :]))
        if late > GROWN_ACTIVATIONS * max(values[0], 1.0):
            yield Finding(
                "activations_grow", "warning", "hypothesis",
                f"the root mean square of {name} has grown from {values[0]:.3g} to {late:.3g}",
                "the learning rate is too high: steps this large have thrown the weights far from their start",
                f"{lower_lr(log)}; a longer --model.schedule.warmup_steps", (f"activations/{name}/rms",),
            )  # fmt: skip
            return


def attention_logits(log: RunLog) -> Iterator[Finding]:
    """Attention logits that grow until one token gets all the weight."""
    for name, series in log.like("attention/", "/max_logit").items():
        values = series.finite().values
        if len(values) < 8:
            continue
        levels = bins(values, 4)
        if levels[-1] > LOGIT and levels[-1] > LOGIT_GROWTH * levels[0] and kendall(bins(values, 8)) > 0.5:
            yield Finding(
                "attention_logits", "warning", "supported",
                f"the largest logit of {name} has grown from {levels[0]:.3g} to {levels[-1]:.3g}",
                "queries and keys grow: attention closes in on single tokens, and training may diverge",
                f"--model.decoder.qk_norm true, or {lower_lr(log)}", (f"attention/{name}/max_logit",),
            )  # fmt: skip
            return


# ---- all of them, those of the losses too: causes before their consequences

SYMPTOMS: tuple[Callable[[RunLog], Iterator[Finding]], ...] = (
    printed,
    scaler,
    loss_symptoms.not_finite,
    loss_symptoms.restore,
    loss_symptoms.divergence,
    loss_symptoms.stalled_at_peak,
    loss_symptoms.plateau,
    loss_symptoms.overfitting,
    loss_symptoms.validation_leak,
    gradients_add_up,
    clip,
    loss_symptoms.early_spike,
    loss_symptoms.quantized_loss,
    loss_symptoms.spikes,
    guarded_steps,
    dead_units,
    activations_grow,
    attention_logits,
    throughput,
    stall,
    loader_stalls,
    slow_rank,
    never_decayed,
    low_mfu,
)


ADVERSARIAL = re.compile(r"(^|[/_])(d|disc|discriminator|critic)_?loss")  # two losses that play against each other
OF_ONE_LOSS = (
    "early_spike", "divergence", "plateau", "stalled_at_peak", "overfitting", "train_gap", "validation_leak", "spikes",
)  # fmt: skip


def findings(log: RunLog) -> list[Finding]:
    """All findings of a run, the highest score first."""
    all_found = (finding for symptom in SYMPTOMS for finding in symptom(log))
    found = [replace(each, remedy=without_present(log, each.remedy)) for each in all_found]
    if any(map(ADVERSARIAL.search, log.metrics)):
        found = [each for each in found if each.symptom not in OF_ONE_LOSS]
    return sorted(found, key=lambda finding: -finding.score)
