"""Each symptom is found in a log that has it, with its figures, and not in one that is the same without it."""

import math

import numpy as np
import pytest

from lightning_tricks.logs import loss_symptoms
from lightning_tricks.logs.run_log import (
    RunLog,
    Series,
    above_surroundings,
    bin_error,
    bins,
    kendall,
    noise,
    shown_steps,
)
from lightning_tricks.logs.symptoms import SYMPTOMS, findings

TUNED, HELD = (0, 1, 2), (3, 4, 5)  # seeds of noise: thresholds were chosen on the first ones alone
N = 300
STEPS = np.arange(N)
NOISE = 0.05 * np.random.default_rng(0).standard_normal(N)
FALLING = 3 + 3 * np.exp(-STEPS / 80) + NOISE  # a healthy loss
COSINE = 3e-3 * 0.5 * (1 + np.cos(math.pi * STEPS / N)) * np.minimum((STEPS + 1) / 20, 1)
VAL_STEPS = np.arange(29, N, 30)
SETTINGS = {"trainer.gradient_clip_val": 1.0, "trainer.max_steps": N, "model.optimizer.lr": 3e-3}


def log_of(settings=SETTINGS, restarts=(), batches=None, **metrics):
    """A log; a metric is its values, at every step or at ten validations, or a Series. Two _ stand for a slash."""
    series = {}
    for name, values in metrics.items():
        if not isinstance(values, Series):
            steps = STEPS if len(values) == N else VAL_STEPS
            values = Series(steps, np.asarray(values, dtype=np.float64))
        series[name.replace("__", "/")] = values
    return RunLog(series, {}, list(restarts), batches or {}, settings)


def healthy(**other):
    """A log of all metrics, nothing of which is wrong."""
    loss = {"train__loss": FALLING, "train__lr": COSINE, "val__loss": np.interp(VAL_STEPS, STEPS, FALLING - NOISE)}
    rest = {
        "train__grad_norm": 0.7 + np.abs(NOISE),
        "throughput__tokens_per_second": 1000 + 1000 * NOISE,
        "goodput__data": np.full(10, 0.02),
        "goodput__steps": np.full(10, 0.9),
        "precision__loss_scale": np.full(N, 65536.0),
        "precision__skipped_steps": np.zeros(N),
        "activations__a__zero_fraction": np.full(10, 0.5),
        "activations__a__rms": np.linspace(0.2, 3, 10),
        "attention__a__max_logit": np.linspace(3, 9, 10),
        "ranks__0__own_seconds": np.full(10, 0.1),
        "ranks__1__own_seconds": np.full(10, 0.11),
    }
    special = {name: other.pop(name) for name in ("settings", "restarts", "batches") if name in other}
    return log_of(**{**loss, **rest, **other}, **special)


def test_nothing_is_found_in_an_empty_log_and_each_symptom_bears_it():
    assert findings(RunLog()) == []
    for symptom in SYMPTOMS:
        assert list(symptom(log_of(train__loss=FALLING))) == [] or symptom is loss_symptoms.plateau


@pytest.mark.parametrize("length", [1, 2, 5, 20, 49])
def test_short_logs_give_no_finding_and_no_error(length):
    short = {name: Series(s.steps[:length], s.values[:length]) for name, s in healthy().metrics.items()}
    assert findings(RunLog(short, settings=SETTINGS)) == []


# ---- one symptom each


def spoilt(values, at, value):
    values = np.array(values, dtype=np.float64)
    values[at] = value
    return values


def sick(summary, *words, steps=None, **metrics):
    """What is found alone, words of its line, the marked steps; and the metrics that are not as in a healthy log."""
    return pytest.param(tuple(summary.split()), words, steps, metrics, id=summary)


NAN = math.nan
NORM = 0.7 + np.abs(NOISE)
LOST = spoilt(FALLING, slice(200, None), NAN)
VAL = np.interp(VAL_STEPS, STEPS, FALLING - NOISE)
OVERFIT = np.array([5, 4.5, 4.2, 4.0, 4.05, 4.1, 4.2, 4.3, 4.4, 4.5])
FLAT = {"train__loss": 6 + NOISE, "val__loss": np.full(10, 6.0)}
DIVERGED = np.where(STEPS < 100, FALLING, FALLING[100] + (STEPS - 100) / 120 + NOISE)
JUMPED = FALLING + 1.5 * np.exp(-np.maximum(STEPS - 150, 0) / 10) * (STEPS >= 150)
SLOWER = np.linspace(1000, 400, N) * (1 + NOISE)
GPU = {"settings": {**SETTINGS, "trainer.accelerator": "gpu"}}


def planned(steps):
    return {"settings": {**SETTINGS, "trainer.max_steps": steps}}


def each_step(batch):
    return {step: str(batch(step)) for step in range(N)}


@pytest.mark.parametrize(
    ("expected", "words", "steps", "metrics"),
    [
        sick("not_finite error hypothesis", "train/loss is nan at step 200, and at all 99 logged steps after it",
             steps=(200,), train__loss=LOST),
        sick("not_finite warning hypothesis", "one batch", "StepGuard", train__loss=spoilt(FALLING, 200, math.inf)),
        sick("not_finite error supported", "--model.optimizer.lr 0.0003 (it is 0.003)", train__loss=LOST,
             train__grad_norm=spoilt(NORM, slice(198, 200), [5.0, 20.0])),
        sick("not_finite error hypothesis", "warmup", train__loss=spoilt(FALLING, slice(5, None), NAN)),
        sick("not_finite warning hypothesis", "train/grad_norm is inf at steps 3, 4",
             train__grad_norm=spoilt(NORM, [3, 4], math.inf), precision__loss_scale=Series.of({})),
        sick("not_finite warning hypothesis", "val/loss is nan at step 149", val__loss=spoilt(VAL, 4, NAN)),
        sick("divergence error supported", "near step 90", train__loss=DIVERGED, settings={},
             train__grad_norm=np.where(STEPS < 100, 0.5, 2.0) * (1 + NOISE),
             val__loss=np.interp(VAL_STEPS, STEPS, DIVERGED)),
        sick("plateau error established", **FLAT, train__lr=np.zeros(N)),
        sick("plateau error hypothesis", **FLAT),
        sick("plateau warning hypothesis", train__loss=np.where(STEPS < 40, 6 - STEPS / 40, 5) + NOISE,
             val__loss=np.full(10, 5.0)),
        sick("never_decayed note established", train__lr=np.full(N, 1e-3)),
        sick("clip_pinned warning established", train__grad_norm=20 * (1 + NOISE)),
        sick("clip_pinned warning established", "--trainer.gradient_clip_val 20", train__grad_norm=np.full(N, 20.0)),
        sick("clip_pinned warning supported", "driven the norm up",
             train__grad_norm=np.where(STEPS < 60, 1, 60) * (1 + 3 * NOISE)),
        sick("gradients_add_up warning hypothesis", "in the second half with a noise of only", "the clip is 1",
             train__grad_norm=1.2 + NOISE / 2),
        sick("gradients_add_up warning hypothesis", "it began at 0.5", settings={},
             train__grad_norm=np.where(STEPS < 5, 0.5, 4 + NOISE)),
        sick("gradients_add_up warning supported", "`zero_grad` is missing", settings={},
             train__grad_norm=np.linspace(1, 60, N)),
        sick("clip_pinned note hypothesis", train__grad_norm=5 * (1 + NOISE)),
        sick("clip_unused note established", train__grad_norm=0.05 * (1 + NOISE)),
        sick("spike note hypothesis", steps=(150,), train__loss=spoilt(FALLING, 150, 7.0)),
        sick("spikes warning supported", steps=(100, 150, 200),  # two points in a row are one spike
             train__loss=spoilt(FALLING, [100, 150, 151, 200], 7.0),
             train__grad_norm=spoilt(NORM, [99, 149, 199], 9.0)),
        sick("steps_skipped note hypothesis", "1 of 300 steps, counted at step 150",
             guard__skipped_steps=np.where(STEPS >= 150, 1.0, 0.0)),
        sick("steps_skipped warning hypothesis", steps=(0, 100, 200), guard__skipped_steps=STEPS // 100 + 1.0),
        sick("overfitting warning supported", "come again too often", steps=(119,), val__loss=OVERFIT),
        sick("overfitting warning supported", "not shifted", val__loss=np.linspace(6, 11, 10)),
        sick("overfitting warning supported", train__loss=FALLING - 9, val__loss=OVERFIT - 9),
        sick("train_gap warning hypothesis", val__loss=np.linspace(9, 8.9, 10)),
        sick("validation_leak warning supported", "val/loss is 0.50 of", val__loss=VAL * np.linspace(1, 0.5, 10)),
        sick("restore error hypothesis", steps=(150,), train__loss=JUMPED, restarts=[150]),
        sick("restore error established", "counts 0 steps of 150", doctor__optimizer_step=Series.of({150: 0.0})),
        sick("restore warning established", "10 of the next batches were trained before", restarts=[150],
             batches=each_step(lambda step: step % 150)),
        # other programs may be the cause on a CPU
        sick("throughput_falls note hypothesis", throughput__tokens_per_second=SLOWER),
        sick("throughput_falls warning hypothesis", throughput__tokens_per_second=SLOWER, **GPU),
        sick("throughput_falls warning hypothesis", throughput__tokens_per_second=SLOWER**3),
        sick("throughput_falls warning supported", "18% of the steps' time", throughput__tokens_per_second=SLOWER,
             goodput__data=np.full(10, 0.2)),
        sick("loader_stalls warning established", "50% of the time", goodput__data=np.full(10, 0.45),
             goodput__steps=np.full(10, 0.45)),
        sick("low_mfu note hypothesis", throughput__mfu=np.full(N, 0.1), **GPU),
        sick("slow_rank warning supported", "rank 1 takes 0.2 s", ranks__1__own_seconds=np.full(10, 0.2)),
        sick("scaler_collapse error established", precision__loss_scale=65536.0 * 0.9**STEPS),
        sick("scaler_collapse error established", "100% of the steps", precision__skipped_steps=STEPS),
        sick("activations_grow warning hypothesis", "of a has grown from 0.5 to", "--model.optimizer.lr 0.0003",
             activations__a__rms=np.linspace(0.5, 900, 10)),
        sick("dead_units warning supported", "a 100.0%", activations__a__zero_fraction=np.full(10, 1.0)),
        sick("attention_logits warning supported", attention__a__max_logit=np.linspace(10, 300, 10)),
    ],
)  # fmt: skip
def test_a_symptom_is_found_with_its_severity_and_the_status_of_its_cause(expected, words, steps, metrics):
    (found,) = [each for each in findings(healthy(**metrics)) if each.severity != "note" or "note" in expected]
    assert (found.symptom, found.severity, found.status) == expected
    assert all(word in found.line() for word in words)
    assert steps in (None, found.steps)


@pytest.mark.parametrize(
    "metrics",
    [
        {},
        {"train__grad_norm": spoilt(NORM, [3, 4], math.inf)},  # a scaler's search under fp16
        {**FLAT, "train__lr": np.linspace(0, 1e-3, N), **planned(N + 1)},  # in a warmup
        {**FLAT, "val__loss": np.linspace(7, 5.5, 10)},  # the validation falls
        {**FLAT, **planned(10 * N + 1)},  # a run that has only begun
        {"train__lr": np.full(N, 1e-3), **planned(N + 1)},
        {"train__grad_norm": 0.5 * (1 + NOISE)},
        {"train__grad_norm": np.zeros(N)},  # frozen weights, or a batch without targets: there is no better clip
        {"train__grad_norm": np.full(N, 20.0), "settings": {**SETTINGS, "trainer.gradient_clip_algorithm": "value"}},
        {"train__loss": spoilt(FALLING, 150, FALLING[150] + 0.2)},  # four sigmas
        {"train__loss": spoilt(FALLING, 150, 7.0), "restarts": [150]},  # a restart's own first loss
        {"val__loss": np.where(VAL_STEPS > 119, 4 + (OVERFIT - 4) * 0.16, OVERFIT)},  # 2 %
        {
            "val__loss": np.where(VAL_STEPS[-1] == VAL_STEPS, 4.3, np.minimum(OVERFIT, 4.0))
        },  # level, then one high value
        {"val__loss": 0.9 * VAL},  # dropout
        {"val__loss": spoilt(VAL, -1, 2.0)},  # one validation is not all of them
        {"train__loss": FALLING - 9, "val__loss": VAL - 8.9},
        {"train__loss": FALLING - 9, "val__loss": VAL},  # below 0 and above it: no ratio
        {"restarts": [150]},
        {"doctor__optimizer_step": Series.of({150: 148.0})},  # StepGuard has skipped two
        {"restarts": [150], "batches": each_step(lambda step: step)},
        {"restarts": [150], "batches": each_step(lambda step: step % 75)},  # epochs
        {"throughput__tokens_per_second": np.linspace(1000, 800, N)},
        {"throughput__tokens_per_second": np.where((STEPS > 100) & (STEPS < 180), 300.0, 1000.0)},  # another program
        {"throughput__mfu": np.full(N, 0.1), "settings": {**SETTINGS, "trainer.accelerator": "cpu"}},
        {"ranks__1__own_seconds": np.where(np.arange(10) % 2, 0.4, 0.05)},  # they take turns
        {"precision__skipped_steps": np.minimum(STEPS, 15)},  # it has found its scale
        {"activations__a__zero_fraction": np.where(np.arange(10) == 7, 1.0, 0.5)},  # at one point
        {"attention__a__max_logit": np.full(10, 120.0)},  # large, but they do not grow
    ],
)
def test_nothing_is_found_in_a_log_that_is_well(metrics):
    assert findings(healthy(**metrics)) == []


def test_a_loss_above_its_start_has_diverged_and_a_bump_has_not():
    named = lambda loss: {each.symptom for each in findings(healthy(train__loss=loss))}  # noqa: E731
    assert "divergence" in named(FALLING[::-1].copy())
    assert "divergence" not in named(FALLING + 2 * ((STEPS > 140) & (STEPS < 160)))


@pytest.mark.parametrize("seed", [*TUNED, *HELD])
@pytest.mark.parametrize("part", [0.08, 0.04, 0.02])
def test_a_divergence_at_the_end_of_a_run_is_found_and_a_spike_that_comes_back_is_not(part, seed):
    steps, noise = np.arange(1000), 0.05 * np.random.default_rng(seed).standard_normal(1000)
    start = int(1000 * (1 - part))
    fine = 2.5 + 4 * np.exp(-steps / 200) + noise
    rising = fine + np.maximum(steps - start, 0) * (2 / (1000 - start))
    found = {each.symptom: each for each in findings(RunLog({"train/loss": Series(steps, rising)}))}
    assert abs(found["divergence"].steps[0] - start) <= 40
    back = fine + 3 * np.exp(-np.maximum(steps - start, 0) / 4) * (steps >= start)
    assert findings(RunLog({"train/loss": Series(steps, fine)})) == []
    assert "divergence" not in {each.symptom for each in findings(RunLog({"train/loss": Series(steps, back)}))}


def test_a_short_log_whose_loss_explodes_has_diverged():
    loss = np.concatenate([np.linspace(6, 5, 10), 5 * 3.0 ** np.arange(10)])
    (found,) = findings(RunLog({"train/loss": Series(np.arange(20), loss)}))
    assert "train/loss was 5 near step 9, and is 9.84e+04 at the end" in found.evidence
    assert found.symptom == "divergence"


def test_tokens_of_a_step_that_vary_hide_no_divergence():
    varied = {"data__tokens_per_step": 512 - np.random.default_rng(0).integers(0, 9, N)}
    log = healthy(train__loss=DIVERGED, val__loss=np.interp(VAL_STEPS, STEPS, DIVERGED), **varied)
    assert "divergence" in {each.symptom for each in findings(log)}


def test_a_loss_that_falls_only_when_the_rate_decays_has_a_peak_too_high():
    stalled = np.where(STEPS < 170, 5.3, 5.3 - (STEPS - 170) / 300) + 0.3 * NOISE
    stalled[:15] += np.linspace(1, 0, 15)
    lr = np.where(STEPS < 20, STEPS * 1e-3, np.where(STEPS < 170, 0.02, 0.02 * (300 - STEPS) / 300))
    found = [each for each in findings(healthy(train__loss=stalled, train__lr=lr)) if each.symptom == "stalled_at_peak"]
    assert found[0].steps == (20, 170)


# ---- speed


def of_speed(values, **settings):
    found = findings(healthy(throughput__tokens_per_second=values, settings={**SETTINGS, **settings}))
    return [(each.symptom, each.severity) for each in found]


@pytest.mark.parametrize("seed", [*TUNED, *HELD])
def test_a_sudden_lasting_fall_a_sawtooth_and_a_speed_of_0_are_found(seed):
    chance = np.random.default_rng(seed)
    speed = 1000 * (1 + 0.05 * chance.standard_normal(N))
    at = int(N * chance.uniform(0.3, 0.75))
    fallen = speed * np.where(at > STEPS, 1, 0.5)
    assert of_speed(speed) == []
    assert of_speed(fallen) == [("throughput_falls", "warning")]
    assert of_speed(fallen, **{"trainer.accelerator": "cpu"}) == [("throughput_falls", "note")]
    period = int(chance.integers(25, 60))
    assert of_speed(speed * (1 - 0.6 * (STEPS % period) / period)) == [("throughput_sawtooth", "warning")]
    assert of_speed(np.where(chance.random(N) < 0.3, speed * 0.4, speed)) == []  # slow steps here and there
    assert of_speed(np.where(STEPS == 40, 0.0, fallen)) == [("throughput_falls", "warning")]
    assert of_speed(np.zeros(N)) == [("throughput_zero", "warning")]


@pytest.mark.parametrize("seed", [*TUNED, *HELD])
def test_a_stall_is_found_and_a_validation_or_a_restart_is_none(seed):
    chance = np.random.default_rng(seed)
    seconds = chance.uniform(2, 6, N)

    def found(*long, gap=7200.0, restarts=()):
        log = healthy(restarts=list(restarts))
        log.times = Series(STEPS, np.cumsum(seconds + gap * np.isin(STEPS, long)))
        return [(each.symptom, each.steps) for each in findings(log)]

    at = 30 * int(chance.integers(1, 9)) + 10
    assert found() == []
    assert found(at + 1) == [("stall", (at,))]
    assert found(at + 1, restarts=[at + 1]) == []
    assert found(*(VAL_STEPS + 1)) == []
    assert found(at + 1, gap=300.0) == []


def test_a_learning_rate_that_jumps_at_a_resume_is_found():
    lr = np.where(STEPS < 150, COSINE, COSINE[np.maximum(STEPS - 150, 0)])  # the schedule begins anew
    found = findings(healthy(train__lr=lr, restarts=[150]))
    assert [(each.symptom, each.severity, each.status) for each in found] == [("restore", "warning", "established")]
    assert "train/lr is 0.0015" in found[0].evidence
    found = findings(healthy(train__lr=spoilt(lr, 150, 0.0), restarts=[150]))
    assert "before and 0 after" in found[0].evidence
    assert findings(healthy(train__lr=lr)) == []  # a schedule may have jumps of its own
    assert [findings(healthy(restarts=[at])) for at in (3, 10, 20, 295)] == [[]] * 4


# ---- runs of other kinds that are well


@pytest.mark.parametrize("seed", [*TUNED, *HELD])
@pytest.mark.parametrize("kind", ["fine-tuning", "init_from", "vocabulary", "batches", "lengths", "gan", "smoothing"])
def test_a_run_of_another_kind_is_well(kind, seed):
    chance = np.random.default_rng(seed)
    noise, grown = chance.standard_normal(N), np.minimum(1 + STEPS // 60, 4)
    settings, metrics, speed = dict(SETTINGS), {}, None
    loss = FALLING - NOISE + 0.05 * noise
    if kind in ("fine-tuning", "init_from", "vocabulary"):
        loss = 2.3 - 0.1 * (1 - np.exp(-STEPS / 5)) + 0.05 * noise
        metrics = {"train__lr": COSINE / 100 if kind == "fine-tuning" else COSINE, "val__loss": np.full(10, 2.2)}
        settings |= {"init_from": "a.ckpt"} if kind == "init_from" else {}
        settings |= {"data.vocab_size": 32000} if kind == "vocabulary" else {}
    elif kind == "batches":  # nothing but the times and the noise tells
        loss = FALLING - NOISE + 0.1 * noise / np.sqrt(grown)
        speed = Series(STEPS, 1 / (grown * (1 + 0.03 * chance.standard_normal(N))))
    elif kind == "lengths":
        loss = loss + 1.0 * (grown - 1)
        metrics = {"data__seq_len": 128.0 * grown}
    elif kind == "gan":
        loss = 0.7 + STEPS / 200 + 0.2 * noise
        metrics = {"train__d_loss": 1.4 - STEPS / 400 + 0.1 * noise}
    else:
        loss, metrics = loss + 0.9, {"val__loss": VAL}
    metrics.setdefault("val__loss", np.interp(VAL_STEPS, STEPS, loss))
    log = healthy(settings=settings, train__loss=loss, **metrics)
    if speed:
        log.metrics = {**log.metrics, "steps per second": speed}
        log.names["speed"] = "steps per second"
    assert [each.symptom for each in findings(log) if each.severity != "note"] == []


def test_a_frozen_run_from_scratch_is_no_fine_tuning():
    frozen = findings(healthy(**FLAT, settings={**SETTINGS, "data.vocab_size": 400}))
    assert [(each.symptom, each.severity) for each in frozen] == [("plateau", "error")]
    slow = findings(healthy(**FLAT, train__lr=COSINE / 1000))
    assert [(each.symptom, each.severity) for each in slow] == [("plateau", "error")]


# ---- remedies


def remedy_of(symptom, settings=SETTINGS, **metrics):
    (found,) = [each for each in findings(healthy(settings=settings, **metrics)) if each.symptom == symptom]
    return found


def test_a_remedy_never_proposes_what_the_run_has():
    ours = {**SETTINGS, "trainer.callbacks": "LRMonitor, StepGuard", "model.decoder.qk_norm": True}
    spike = spoilt(FALLING, 200, math.inf)
    assert "callbacks+=StepGuard" in remedy_of("not_finite", train__loss=spike).remedy
    assert remedy_of("not_finite", ours, train__loss=spike).remedy == "autopsy --step N ranks documents"
    logits = {"attention__a__max_logit": np.linspace(10, 300, 10)}
    assert "qk_norm true, or --model" in remedy_of("attention_logits", **logits).remedy
    assert remedy_of("attention_logits", ours, **logits).remedy == "--model.optimizer.lr 0.0003 (it is 0.003)"
    spikes = {"train__loss": spoilt(FALLING, [100, 150, 200], 7.0)}
    assert remedy_of("spikes", ours, **spikes).remedy == "--model.optimizer.lr 0.0003 (it is 0.003)"


def test_the_loss_that_exploded_before_a_nan_is_named_and_the_last_good_rate_proposed():
    loss = np.where(STEPS < 40, 6 - STEPS / 20, 4 * 2.0 ** np.minimum(STEPS - 40, 25))
    sick = {"train__loss": np.where(STEPS > 65, NAN, loss), "train__lr": np.minimum(STEPS / 200, 1) * 1.0}
    found = remedy_of("not_finite", {**SETTINGS, "model.optimizer.lr": 1.0}, **sick)
    assert "before that the loss had risen to 1.34e+08 at step 65, from 4" in found.evidence
    assert "--model.optimizer.lr 0.2 (it is 1; the loss was lowest at that rate, at step 40)" in found.remedy
    found = remedy_of("not_finite", {**SETTINGS, "model.optimizer.lr": 1e6}, train__loss=sick["train__loss"])
    assert "--model.optimizer.lr 0.0003 (it is 1e+06)" in found.remedy
    norm = {"train__grad_norm": spoilt(NORM, [60], math.inf), "precision__loss_scale": Series.of({})}
    assert "the learning rate is too high" in remedy_of("not_finite", train__loss=loss, **norm).cause


# ---- the ranking, and the figures


def test_findings_are_ranked_by_severity_and_certainty():
    found = findings(healthy(goodput__data=np.full(10, 0.9), train__loss=LOST))
    assert [(each.symptom, round(each.score, 2)) for each in found] == [("loader_stalls", 2.0), ("not_finite", 1.2)]


def test_noise_is_that_of_the_points_and_not_of_their_trend():
    values = np.random.default_rng(1).normal(0, 0.3, 5000)
    assert noise(values) == pytest.approx(0.3, rel=0.05)
    assert noise(values + np.arange(5000) / 100) == pytest.approx(0.3, rel=0.05)
    assert noise(np.array([1.0])) == 0.0
    assert bin_error(values, 50) == pytest.approx(1.2533 * noise(values) / 10)


def test_bins_trends_and_heights():
    assert bins(np.arange(9.0), 3).tolist() == [1, 4, 7]
    assert bins(np.arange(2.0), 5).tolist() == [0, 1]
    assert (kendall(np.arange(4.0)), kendall(-np.arange(4.0)), kendall(np.array([1.0, 3, 2]))) == (1, -1, 1 / 3)
    assert kendall(np.array([1.0])) == 0
    above = above_surroundings(np.array([1.0, 1, 5, 1, 1]), 2)
    assert above[2] == 4
    assert np.isnan(above[[0, 1, 3, 4]]).all()
    assert shown_steps([1, 2, 3]) == "steps 1, 2, 3"
    assert shown_steps([8]) == "step 8"
    assert shown_steps(range(6)) == "steps 0, 1, 2, 3 and 2 more"


def test_a_loss_that_rises_far_above_its_start_in_the_first_steps_is_an_early_spike():
    rising = FALLING + 8 * np.exp(-(((STEPS - 5) / 3) ** 2))
    first = findings(log_of(train__loss=rising, train__lr=COSINE))[0]
    assert (first.symptom, first.severity, first.status, first.steps) == ("early_spike", "warning", "hypothesis", (5,))
    assert findings(log_of(train__loss=rising, train__lr=COSINE[20:].repeat(2)[:N]))[0].cause == "no warmup"
    assert "early_spike" not in {each.symptom for each in findings(healthy())}


def test_a_loss_that_loses_most_of_its_first_fall_again_is_an_early_spike_unless_rows_became_longer():
    back = FALLING + 1.8 * np.exp(-(((STEPS - 45) / 10) ** 2))
    (found,) = findings(healthy(train__loss=back))
    assert (found.symptom, found.severity) == ("early_spike", "warning")
    assert found.evidence.startswith("train/loss rises from 5.179 at step 26")
    rows = np.where(STEPS < 45, 128.0, 256.0)
    assert findings(healthy(train__loss=back, data__seq_len=rows)) == []


def test_a_metric_that_was_never_finite_ends_no_rule():
    never = {name.replace("/", "__"): np.full(len(series), NAN) for name, series in healthy().metrics.items()}
    assert [each.symptom for each in findings(log_of(**never))] == ["not_finite"]


def test_noise_of_a_small_loss_of_another_kind_is_no_early_spike():
    toy = spoilt(0.05 * np.exp(-STEPS / 80), slice(1, 6), 0.3)
    assert "early_spike" not in {each.symptom for each in findings(log_of(train__loss=toy))}


def test_a_loss_that_falls_in_the_decay_as_it_did_at_the_peak_was_at_too_high_a_rate():
    slow = 6 - 0.3 * STEPS / N + NOISE / 5
    (found,) = findings(healthy(train__loss=slow, val__loss=np.interp(VAL_STEPS, STEPS, slow)))
    assert (found.symptom, found.status) == ("stalled_at_peak", "hypothesis")


def test_a_loss_of_few_different_values_is_a_note():
    found = {each.symptom: each for each in findings(healthy(train__loss=np.round(FALLING * 4) / 4))}
    assert found["quantized_loss"].severity == "note"
    assert found["quantized_loss"].evidence.endswith("0.25 apart or more")
    assert "quantized_loss" not in {each.symptom for each in findings(healthy())}
