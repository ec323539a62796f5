"""Each symptom is found in a log that has it, with its figures, and not in one that is the same without it."""

import math
from pathlib import Path

import numpy as np
import pytest

from lightning_tricks._errors import UsageError
from lightning_tricks.logs.run_log import (
    RunLog,
    Series,
    above_surroundings,
    bin_error,
    bins,
    check_roles,
    kendall,
    noise,
    shown_steps,
)
from lightning_tricks.logs.symptoms import SYMPTOMS, findings, loss_symptoms, other_symptoms
from lightning_tricks.logs.symptoms.finding import Finding

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
        "attention__a__max_logit": np.linspace(3, 9, 10),
        "ranks__0__own_seconds": np.full(10, 0.1),
        "ranks__1__own_seconds": np.full(10, 0.11),
    }
    special = {name: other.pop(name) for name in ("settings", "restarts", "batches") if name in other}
    return log_of(**{**loss, **rest, **other}, **special)


def only(log) -> Finding:
    """The one finding of a log, or of those above a note."""
    (found,) = [each for each in findings(log) if each.severity != "note"]
    return found


def summary(found):
    return found.symptom, found.severity, found.status


def test_nothing_is_found_in_a_healthy_log():
    assert findings(healthy()) == []


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


def test_nan_to_the_end_is_an_error_and_one_nan_a_warning():
    found = only(healthy(train__loss=spoilt(FALLING, slice(200, None), math.nan)))
    assert summary(found) == ("not_finite", "error", "hypothesis")
    assert found.evidence == "train/loss is nan at step 200, and at all 99 logged steps after it"
    assert found.steps == (200,)
    found = only(healthy(train__loss=spoilt(FALLING, 200, math.inf)))
    assert summary(found) == ("not_finite", "warning", "hypothesis")
    assert "one batch" in found.cause
    assert "StepGuard" in found.remedy


def test_a_norm_that_grows_before_a_nan_speaks_for_the_learning_rate():
    norm = spoilt(0.7 + np.abs(NOISE), slice(198, 200), [5.0, 20.0])
    found = only(healthy(train__loss=spoilt(FALLING, slice(200, None), math.nan), train__grad_norm=norm))
    assert summary(found) == ("not_finite", "error", "supported")
    assert "--model.optimizer.lr 0.0003 (it is 0.003)" in found.remedy


def test_nan_in_the_first_steps_speaks_for_the_start():
    assert "warmup" in only(healthy(train__loss=spoilt(FALLING, slice(5, None), math.nan))).remedy


def test_overflows_of_the_norm_are_a_scalers_search_under_fp16_alone():
    norm = spoilt(0.7 + np.abs(NOISE), [3, 4], math.inf)
    assert findings(healthy(train__grad_norm=norm)) == []
    log = healthy(train__grad_norm=norm)
    del log.metrics["precision/loss_scale"], log.names["loss_scale"]
    assert "train/grad_norm is inf at step 3, 4" in only(log).evidence


def test_nan_in_the_validation_alone_is_a_finding():
    val = spoilt(healthy()["val_loss"].values, 4, math.nan)
    assert "val/loss is nan at step 149" in only(healthy(val__loss=val)).evidence


def test_a_loss_that_rises_and_stays_has_diverged():
    rising = np.where(STEPS < 100, FALLING, FALLING[100] + (STEPS - 100) / 120 + NOISE)
    norm = np.where(STEPS < 100, 0.5, 2.0) * (1 + NOISE)
    val = np.interp(VAL_STEPS, STEPS, rising)
    found = only(healthy(train__loss=rising, train__grad_norm=norm, val__loss=val, settings={}))
    assert summary(found) == ("divergence", "error", "supported")
    assert "near step 90" in found.evidence
    assert [each for each in findings(healthy(train__loss=FALLING[::-1].copy())) if each.symptom == "divergence"]
    bump = FALLING + 2 * ((STEPS > 140) & (STEPS < 160))
    assert [each for each in findings(healthy(train__loss=bump)) if each.symptom == "divergence"] == []


def test_a_loss_that_falls_only_when_the_rate_decays_has_a_peak_too_high():
    stalled = np.where(STEPS < 170, 5.3, 5.3 - (STEPS - 170) / 300) + 0.3 * NOISE
    stalled[:15] += np.linspace(1, 0, 15)
    lr = np.where(STEPS < 20, STEPS * 1e-3, np.where(STEPS < 170, 0.02, 0.02 * (300 - STEPS) / 300))
    found = [each for each in findings(healthy(train__loss=stalled, train__lr=lr)) if each.symptom == "stalled_at_peak"]
    assert found[0].steps == (20, 170)
    assert list(loss_symptoms.stalled_at_peak(healthy())) == []


def test_a_flat_loss_is_a_plateau_with_the_cause_that_the_rate_tells():
    flat = 6 + NOISE
    found = only(healthy(train__loss=flat, train__lr=np.zeros(N), val__loss=np.full(10, 6.0)))
    assert summary(found) == ("plateau", "error", "established")
    found = only(healthy(train__loss=flat, val__loss=np.full(10, 6.0)))
    assert summary(found) == ("plateau", "error", "hypothesis")
    early = np.where(STEPS < 40, 6 - STEPS / 40, 5) + NOISE
    found = only(healthy(train__loss=early, val__loss=np.full(10, 5.0)))
    assert summary(found) == ("plateau", "warning", "hypothesis")


def test_a_flat_loss_is_none_in_a_warmup_nor_where_validation_falls():
    flat = 6 + NOISE
    warmup = {"train__lr": np.linspace(0, 1e-3, N), "settings": {**SETTINGS, "trainer.max_steps": N + 1}}
    assert findings(healthy(train__loss=flat, val__loss=np.full(10, 6.0), **warmup)) == []
    assert findings(healthy(train__loss=flat, val__loss=np.linspace(7, 5.5, 10))) == []
    long = {**SETTINGS, "trainer.max_steps": 10 * N + 1}
    assert findings(healthy(train__loss=flat, val__loss=np.full(10, 6.0), settings=long)) == []


def test_a_rate_at_its_peak_at_the_end_is_a_note():
    (found,) = findings(healthy(train__lr=np.full(N, 1e-3)))
    assert summary(found) == ("never_decayed", "note", "established")
    assert findings(healthy(train__lr=np.full(N, 1e-3), settings={"trainer.max_steps": N + 1})) == []


@pytest.mark.parametrize(
    ("middle", "expected"),
    [
        (20.0, ("clip_pinned", "warning", "established")),
        (5.0, ("clip_pinned", "note", "hypothesis")),
        (0.5, None),
        (0.05, ("clip_unused", "note", "established")),
        (0.0, None),  # frozen weights, or a batch without targets: there is no better clip
    ],
)
def test_the_clip_is_judged_by_the_norm(middle, expected):
    found = findings(healthy(train__grad_norm=middle * (1 + NOISE)))
    assert [summary(each) for each in found] == ([expected] if expected else [])


def test_the_clips_remedy_is_a_round_number_above_the_norm_and_a_clip_by_value_is_not_judged():
    assert "--trainer.gradient_clip_val 20 " in only(healthy(train__grad_norm=np.full(N, 20.0))).remedy.replace(
        ";", " "
    )
    by_value = {**SETTINGS, "trainer.gradient_clip_algorithm": "value"}
    assert findings(healthy(train__grad_norm=np.full(N, 20.0), settings=by_value)) == []


def test_one_spike_is_a_note_and_several_are_a_warning():
    (found,) = findings(healthy(train__loss=spoilt(FALLING, 150, 7.0)))
    assert summary(found) == ("spike", "note", "hypothesis")
    assert found.steps == (150,)
    at = [100, 150, 151, 200]
    norm = spoilt(0.7 + np.abs(NOISE), [99, 149, 199], 9.0)
    found = only(healthy(train__loss=spoilt(FALLING, at, 7.0), train__grad_norm=norm))
    assert summary(found) == ("spikes", "warning", "supported")
    assert found.steps == (100, 150, 200)  # two points in a row are one spike
    assert findings(healthy(train__loss=spoilt(FALLING, 150, FALLING[150] + 0.2))) == []  # four sigmas
    assert findings(healthy(train__loss=spoilt(FALLING, 150, 7.0), restarts=[150])) == []  # a restart's own first loss


def test_steps_that_step_guard_has_skipped_are_a_note_and_many_a_warning():
    (found,) = findings(healthy(guard__skipped_steps=np.where(STEPS >= 150, 1.0, 0.0)))
    assert summary(found) == ("steps_skipped", "note", "established")
    assert "1 of 300 steps, counted at steps 150" in found.evidence
    assert only(healthy(guard__skipped_steps=(STEPS // 100).astype(float) + 1)).steps == (0, 100, 200)


def test_validation_that_rises_while_training_falls_is_overfitting():
    val = np.array([5, 4.5, 4.2, 4.0, 4.05, 4.1, 4.2, 4.3, 4.4, 4.5])
    found = only(healthy(val__loss=val))
    assert summary(found) == ("overfitting", "warning", "supported")
    assert found.steps == (119,)
    assert "come again too often" in found.cause
    assert findings(healthy(val__loss=np.where(VAL_STEPS > 119, 4 + (val - 4) * 0.16, val))) == []  # 2 %
    jumps = np.where(VAL_STEPS[-1] == VAL_STEPS, 4.3, np.minimum(val, 4.0))  # level, then one high value
    assert findings(healthy(val__loss=jumps)) == []
    rising_from_the_start = np.linspace(6, 11, 10)
    assert "not shifted" in only(healthy(val__loss=rising_from_the_start)).cause


def test_training_far_below_validation_is_a_gap_and_validation_far_below_training_a_leak():
    found = only(healthy(val__loss=np.linspace(9, 8.9, 10)))
    assert summary(found) == ("train_gap", "warning", "hypothesis")
    val = healthy()["val_loss"].values
    assert summary(only(healthy(val__loss=val * np.linspace(1, 0.5, 10)))) == (
        "validation_leak",
        "warning",
        "supported",
    )
    assert findings(healthy(val__loss=0.9 * val)) == []  # dropout
    assert findings(healthy(val__loss=spoilt(val, -1, 2.0))) == []  # one validation is not all of them


def test_a_loss_below_zero_is_judged_by_its_changes():
    loss, val = FALLING - 9, healthy()["val_loss"].values - 9
    assert findings(healthy(train__loss=loss, val__loss=val + 0.1)) == []
    assert findings(healthy(train__loss=loss, val__loss=val + 9)) == []  # below 0 and above it: no ratio
    rising = np.array([5, 4.5, 4.2, 4.0, 4.05, 4.1, 4.2, 4.3, 4.4, 4.5]) - 9
    assert summary(only(healthy(train__loss=loss, val__loss=rising))) == ("overfitting", "warning", "supported")


def test_a_restore_is_judged_by_loss_optimizer_and_batches():
    jumped = FALLING + 1.5 * np.exp(-np.maximum(STEPS - 150, 0) / 10) * (STEPS >= 150)
    found = only(healthy(train__loss=jumped, restarts=[150]))
    assert summary(found) == ("restore", "error", "hypothesis")
    assert found.steps == (150,)
    assert findings(healthy(restarts=[150])) == []
    counted = Series.of({150: 0.0})
    found = only(healthy(doctor__optimizer_step=counted))
    assert summary(found) == ("restore", "error", "established")
    assert "counts 0 steps of 150" in found.evidence
    assert findings(healthy(doctor__optimizer_step=Series.of({150: 148.0}))) == []  # StepGuard has skipped two
    again = {step: str(step % 150) for step in range(N)}
    found = only(healthy(restarts=[150], batches=again))
    assert summary(found) == ("restore", "warning", "established")
    assert "10 of the next batches were trained before" in found.evidence
    assert findings(healthy(restarts=[150], batches={step: str(step) for step in range(N)})) == []
    epochs = {step: str(step % 75) for step in range(N)}
    assert findings(healthy(restarts=[150], batches=epochs)) == []


def test_a_speed_that_falls_is_the_loaders_where_waits_have_grown():
    falling = np.linspace(1000, 400, N) * (1 + NOISE)
    (found,) = findings(healthy(throughput__tokens_per_second=falling))
    assert summary(found) == ("throughput_falls", "note", "hypothesis")  # other programs may be the cause on a CPU
    on_gpu = {"settings": {**SETTINGS, "trainer.accelerator": "gpu"}}
    for log in (
        healthy(throughput__tokens_per_second=falling, **on_gpu),
        healthy(throughput__tokens_per_second=falling**3),
    ):
        assert summary(only(log)) == ("throughput_falls", "warning", "hypothesis")
    found = only(healthy(throughput__tokens_per_second=falling, goodput__data=np.full(10, 0.2)))
    assert summary(found) == ("throughput_falls", "warning", "supported")
    assert "18% of the steps' time" in found.evidence
    assert findings(healthy(throughput__tokens_per_second=np.linspace(1000, 800, N))) == []
    busy = np.where((STEPS > 100) & (STEPS < 180), 300.0, 1000.0)  # another program for a while
    assert findings(healthy(throughput__tokens_per_second=busy)) == []


def test_waits_for_data_are_a_share_of_the_steps():
    found = only(healthy(goodput__data=np.full(10, 0.45), goodput__steps=np.full(10, 0.45)))
    assert summary(found) == ("loader_stalls", "warning", "established")
    assert found.evidence.startswith("50%")


def test_a_low_mfu_is_a_note_on_a_gpu_alone():
    settings = {**SETTINGS, "trainer.accelerator": "gpu"}
    (found,) = findings(healthy(throughput__mfu=np.full(N, 0.1), settings=settings))
    assert summary(found) == ("low_mfu", "note", "hypothesis")
    assert findings(healthy(throughput__mfu=np.full(N, 0.1), settings={**SETTINGS, "trainer.accelerator": "cpu"})) == []


def test_a_slow_rank_is_named():
    found = only(healthy(ranks__1__own_seconds=np.full(10, 0.2)))
    assert summary(found) == ("slow_rank", "warning", "supported")
    assert found.evidence.startswith("rank 1 takes 0.2 s")
    taking_turns = np.where(np.arange(10) % 2, 0.4, 0.05)
    assert findings(healthy(ranks__1__own_seconds=taking_turns)) == []


def test_a_scale_that_collapses_or_steps_that_are_skipped():
    scale = 65536.0 * 0.9**STEPS
    assert summary(only(healthy(precision__loss_scale=scale))) == ("scaler_collapse", "error", "established")
    assert "100% of the steps" in only(healthy(precision__skipped_steps=STEPS)).evidence
    assert findings(healthy(precision__skipped_steps=np.minimum(STEPS, 15))) == []  # it has found its scale


def test_dead_units_and_growing_logits_are_named_by_their_block():
    found = only(healthy(activations__a__zero_fraction=np.full(10, 1.0)))
    assert summary(found) == ("dead_units", "warning", "supported")
    assert "a 100.0%" in found.evidence
    assert findings(healthy(activations__a__zero_fraction=np.where(np.arange(10) == 7, 1.0, 0.5))) == []  # at one point
    found = only(healthy(attention__a__max_logit=np.linspace(10, 300, 10)))
    assert summary(found) == ("attention_logits", "warning", "supported")
    assert findings(healthy(attention__a__max_logit=np.full(10, 120.0))) == []  # large, but they do not grow


# ---- the ranking, and the figures


def test_findings_are_ranked_by_severity_and_certainty():
    found = findings(healthy(goodput__data=np.full(10, 0.9), train__loss=spoilt(FALLING, slice(200, None), math.nan)))
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
    assert shown_steps([1, 2, 3]) == "1, 2, 3"
    assert shown_steps(range(6)) == "0, 1, 2, 3 and 2 more"


def test_a_role_that_is_none_is_one_line():
    with pytest.raises(UsageError, match=r"names: los=x; did you mean loss\?: the roles are loss, val_loss"):
        check_roles({"los": "x"})


def test_every_threshold_is_used():
    for module in (loss_symptoms, other_symptoms):
        names = [name for name in vars(module) if name.isupper() and isinstance(vars(module)[name], int | float)]
        source = Path(module.__file__).read_text(encoding="utf-8")
        assert [name for name in names if source.count(name) < 2] == []
