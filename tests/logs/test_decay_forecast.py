"""The end of a decay is that of the law on curves made by it, and refused where the logs do not tell it."""

import os

import numpy as np
import pytest

from lightning_tricks._core.errors import UsageError
from lightning_tricks.logs.branch_forecast import line_of_branch
from lightning_tricks.logs.decay_forecast import LossCurve, decay_forecast

WARMUP, STEPS, EVERY = 100, 4000, 20


def law(lrs, beta=0.6, gamma=0.65):
    """The losses after each step, by the formula of the paper; the peak of the learning rates is 1."""
    falls, sums = -np.diff(lrs, prepend=lrs[0]), np.cumsum(lrs)
    gains = np.zeros(len(lrs))
    for k in np.flatnonzero(falls > 0):
        since = sums[k:] - sums[k] + lrs[k]
        gains[k:] += 0.15 * falls[k] * (1 - (1 + 0.02 * max(lrs[k], 1e-6) ** -gamma * since) ** -beta)
    return 2.7 + 20 * sums**-0.45 - gains


def stable(steps=STEPS):
    return np.minimum(np.arange(1, steps + 1) / WARMUP, 1.0)


def decayed(start, steps, end=0.1):
    """The learning rates of a linear decay after a stable phase."""
    return np.append(stable(start), np.linspace(1, end, steps + 1)[1:])


def curve(lrs, peak=1.0, noise=0.0, **options):
    """A log of every 20th step."""
    steps = np.arange(EVERY, len(lrs) + 1, EVERY)
    losses = law(lrs, **options)[steps - 1] + noise * np.random.default_rng(0).standard_normal(len(steps))
    return LossCurve(steps, losses, peak * lrs[steps - 1])


AHEAD = decayed(STEPS, 800)[STEPS:]
EARLIER = decayed(2000, 400)


@pytest.mark.parametrize("peak", [1.0, 3e-4])
def test_the_end_of_a_decay_is_that_of_the_law(peak):
    found = decay_forecast(curve(stable(), peak), peak * AHEAD, [curve(EARLIER, peak)])
    end, now = law(decayed(STEPS, 800))[-1], law(stable())[-1]
    assert now - end > 0.09
    assert found.loss == pytest.approx(end, abs=0.04 * (now - end))
    assert found.gain == pytest.approx(now - end, rel=0.04)
    assert found.low < found.loss - 0.2 * found.gain
    assert found.high > found.loss + 0.2 * found.gain
    assert found.refusal is None


def test_other_lengths_and_shapes_and_other_exponents_are_told_within_the_interval():
    true = {"beta": 0.5, "gamma": 0.5}
    for lrs in (decayed(STEPS, 400, 0.0), np.append(stable(), np.geomspace(1, 0.05, 1600))):
        found = decay_forecast(curve(stable(), **true), lrs[STEPS:], [curve(EARLIER, **true)])
        assert found.low < law(lrs, **true)[-1] < found.high
        assert found.loss == pytest.approx(law(lrs, **true)[-1], abs=0.2 * found.gain)


def test_a_noisy_log_of_a_run_that_has_decayed_before_needs_no_other():
    lrs = np.concatenate([decayed(1500, 300, 0.2), np.ones(STEPS - 1800)])
    found = decay_forecast(curve(lrs, noise=0.003), AHEAD)
    assert found.low < law(np.append(lrs, AHEAD))[-1] < found.high
    assert found.refusal is None


@pytest.mark.parametrize(
    ("run", "others", "line"),
    [
        (curve(stable(460)), [curve(EARLIER)], "19 points after the warmup: a log needs 20 or more"),
        (curve(stable()), [], "the learning rate never fell: add the log of a short decay, as of a branch"),
        (curve(stable()), [curve(decayed(2000, 400, 0.95))], "the learning rate never fell"),
        (curve(stable(), noise=0.1), [curve(EARLIER, noise=0.1)], "the law is off by 0."),
        (
            curve(stable()),
            [LossCurve(curve(EARLIER).steps, 1.03 * curve(EARLIER).losses, EARLIER[EVERY - 1 :: EVERY])],
            "the law is off by 0.",
        ),
        (
            LossCurve(np.arange(1, 101), np.linspace(3, 4, 100), np.linspace(1, 0.1, 100)),
            [],
            "the losses do not fall with the steps and with the learning rate, as by the law",
        ),
    ],
)
def test_a_refusal_says_why(run, others, line):
    found = decay_forecast(run, AHEAD, others)
    assert found.refusal is not None
    assert found.refusal.startswith(line)


def test_the_noise_of_many_losses_averages_out():
    found = decay_forecast(curve(stable(), noise=0.02), AHEAD, [curve(EARLIER, noise=0.02)])
    assert found.refusal is None
    assert found.low < law(decayed(STEPS, 800))[-1] < found.high


def test_twenty_points_after_the_warmup_are_enough():
    assert decay_forecast(curve(stable(480)), AHEAD, [curve(EARLIER)]).refusal is None


def test_a_short_log_beside_a_longer_one_is_left_out():
    expected = decay_forecast(curve(stable()), AHEAD, [curve(EARLIER)])
    assert decay_forecast(curve(stable()), AHEAD, [curve(decayed(300, 100)), curve(EARLIER)]) == expected
    assert "never fell" in decay_forecast(curve(stable()), AHEAD, [curve(decayed(300, 100))]).refusal


def test_broken_logs_are_errors():
    steps = np.arange(1, 31)
    with pytest.raises(UsageError, match="a log needs equally many steps, losses and learning rates"):
        LossCurve(steps, np.ones(29), np.ones(30))
    for losses, of in ((np.full(30, np.nan), steps), (np.ones(30), steps[::-1])):
        with pytest.raises(UsageError, match="not finite, or with steps that fall: leave these points out"):
            LossCurve(of, losses, np.ones(30))


# ---- of the folders of a run and its branches


def logged(folder, lrs, start=0, metric="val/loss"):
    """The log of a run, in which a validation of every 20th step stands beside the learning rate."""
    folder.mkdir(parents=True)
    losses = law(lrs)
    rows = [
        f"{step - 1},{losses[step - 1]},{3e-4 * lrs[step - 1]}" for step in range(start + EVERY, len(lrs) + 1, EVERY)
    ]
    (folder / "metrics.csv").write_text("\n".join([f"step,{metric},train/lr", *rows, ""]))
    return folder


RECIPE = "model: {init_args: {optimizer: {init_args: {lr: %s}}}}"


def branched(folder, trunk, start, steps, lr=3e-4):
    """The log of a decay off a trunk, which says so in its recipe."""
    origin = f"{{trunk: {trunk}/checkpoints/step={start}.ckpt, trunk_step: {start}, decay_steps: {steps}}}"
    logged(folder, decayed(start, steps), start)
    callback = f"{{class_path: lightning_tricks.callbacks.BranchLineage, init_args: {origin}}}"
    (folder / "config.yaml").write_text(f"trainer: {{callbacks: [LearningRateMonitor, {callback}]}}\n{RECIPE % lr}")


def test_the_line_of_a_branch_is_made_of_the_logs_of_its_trunk_and_of_an_earlier_branch(tmp_path):
    trunk = logged(tmp_path / "version_0", stable(5000))
    line = line_of_branch(trunk, STEPS, AHEAD)
    assert line.startswith("No forecast of the validation loss at the end of this decay: the learning rate never fell")
    branched(tmp_path / "version_1", trunk, 2000, 400)
    branched(tmp_path / "version_2", tmp_path / "other", 2000, 400)  # of another trunk
    (tmp_path / "version_3").mkdir()
    (tmp_path / "version_3/config.yaml").write_text("trainer: {callbacks: [{init_args: 3}, BranchLineage]}")
    expected = decay_forecast(curve(stable(), 3e-4), 3e-4 * AHEAD, [curve(EARLIER, 3e-4)])
    assert line_of_branch(trunk, STEPS, AHEAD) == (
        f"Forecast: {expected.loss:.3f} ({expected.low:.3f} to {expected.high:.3f}) is the validation loss at the end "
        f"of this decay, lower by {expected.gain:.3f}, by the multi-power law"
    )


def test_a_decay_with_another_learning_rate_than_the_trunk_is_not_forecast_nor_read(tmp_path):
    trunk = logged(tmp_path / "version_0", stable(5000))
    (trunk / "config.yaml").write_text(RECIPE % 3e-4)
    branched(tmp_path / "version_1", trunk, 2000, 400, lr=1e-3)
    assert "the learning rate never fell" in line_of_branch(trunk, STEPS, AHEAD, 3e-4)
    branched(tmp_path / "version_2", trunk, 2000, 400)
    assert line_of_branch(trunk, STEPS, AHEAD, 3e-4).startswith("Forecast: ")
    assert line_of_branch(trunk, STEPS, AHEAD, 1e-3) == (
        "No forecast of the validation loss at the end of this decay: its learning rate is 0.001, that of the run "
        "before it 0.0003"
    )


def test_a_decay_starts_from_the_learning_rate_with_which_the_trunk_has_gone_on(tmp_path):
    lrs = np.append(stable(2000), np.full(2000, 0.25))
    line = line_of_branch(logged(tmp_path / "version_0", lrs), STEPS, AHEAD)
    assert float(line.split()[1]) == pytest.approx(law(np.append(lrs, 0.25 * AHEAD))[-1], abs=0.003)


def test_no_log_stops_a_branch(tmp_path, monkeypatch):
    """Losses of 0, learning rates of 0, a decay that has logged none, a folder that may not be listed."""
    trunk = logged(tmp_path / "version_0", stable())
    (whole := trunk / "metrics.csv").write_text(whole.read_text().replace(",0.0003\n", ",\n", 70))
    branched(tmp_path / "version_1", trunk, 1000, 400)
    log = tmp_path / "version_1/metrics.csv"
    log.write_text(log.read_text().replace("train/lr", "my/lr"))
    assert line_of_branch(trunk, STEPS, AHEAD).startswith("No forecast")
    for name, row in (("no_losses", "{},0,3e-4"), ("no_lrs", "{},2,0")):
        (tmp_path / name).mkdir()
        rows = [row.format(step) for step in range(0, 600, 20)]
        (tmp_path / name / "metrics.csv").write_text("\n".join(["step,val/loss,train/lr", *rows, ""]))
        assert line_of_branch(tmp_path / name, STEPS, AHEAD) is None
    names = {name: getattr(os, name) for name in ("listdir", "scandir")}

    def closed(name):
        def opened(path="."):
            if os.fspath(path).rstrip("/") == str(tmp_path):
                raise PermissionError(13, "Permission denied", str(path))
            return names[name](path)

        return opened

    for name in names:
        monkeypatch.setattr(os, name, closed(name))
    assert line_of_branch(trunk, STEPS, AHEAD).startswith("No forecast")


def test_a_trunk_that_has_decayed_itself_needs_no_earlier_branch(tmp_path):
    trunk = logged(tmp_path / "version_0", decayed(4000, 400), metric="train/loss")
    line = line_of_branch(trunk, 3000, AHEAD)
    end = law(np.append(stable(3000), AHEAD))[-1]
    low, high = map(float, line.partition("(")[2].partition(")")[0].split(" to "))
    assert low < end < high
    assert "is the training loss" in line


def test_there_is_no_line_without_a_log_of_enough_points(tmp_path):
    assert line_of_branch(tmp_path, STEPS, AHEAD) is None
    assert line_of_branch(logged(tmp_path / "version_0", stable(380)), 380, AHEAD) is None
