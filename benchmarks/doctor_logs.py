"""Does `doctor` name faults in logs that its author did not look at, and is it silent on healthy ones?

    python -m benchmarks.doctor_logs                    # tuned seeds: rules may be changed by what they show
    python -m benchmarks.doctor_logs --held --out FILE  # and the held seeds, for the figures that are published

Thirty faults and thirty healthy kinds of runs, written as event files with the names and habits of real loggers: noise
with heavy tails, another interval and length for each seed, restarts, other tools' names. `doctor` gets the folder.
`doctor_trials` has the real runs.
"""

import argparse
import json
import math
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary

from benchmarks import machine
from lightning_tricks.logs.run_log import read_log
from lightning_tricks.logs.symptoms import findings

TUNED, HELD = (0, 1, 2), (6, 7, 8)
START = 1.7e9  # seconds since 1970
Floats = NDArray[np.float64]


@dataclass
class Made:
    """A log before it is written: a healthy run of a language model, which a kind of run changes.

    Args:
        rng: of this kind and seed.
    """

    rng: np.random.Generator
    points: int = 0
    every: int = 0
    extra: dict[str, tuple[Floats, Floats]] = field(default_factory=dict)
    restart: int = 0
    unordered: bool = False
    later: bool = False
    without: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        rng = self.rng
        self.points = self.points or int(rng.integers(200, 500))
        self.every = self.every or int(rng.choice([1, 5, 10]))
        self.foreign = bool(rng.random() < 0.4)
        n, self.end = self.points, self.points * self.every
        self.steps = np.arange(n) * self.every
        self.t = np.arange(n) / n
        self.vocabulary = int(rng.choice([512, 4096, 32000]))
        first = math.log(self.vocabulary)
        floor = first * rng.uniform(0.35, 0.55)
        self.trend = floor + (first - floor) * (0.8 * np.exp(-self.t / rng.uniform(0.03, 0.1)) + 0.2 * np.exp(-self.t))
        self.sigma = rng.uniform(0.01, 0.03) * floor
        self.noise = self.sigma * rng.standard_t(6, n)
        self.peak = float(10 ** rng.uniform(-3.7, -2.3))
        warm = rng.uniform(0.01, 0.05)
        self.lr = (
            self.peak * np.minimum((self.t + 1 / n) / warm, 1) * (0.05 + 0.95 * 0.5 * (1 + np.cos(np.pi * self.t)))
        )
        self.norm = rng.uniform(0.2, 0.8) * (1 + 4 * np.exp(-self.t / 0.03)) * np.exp(0.15 * rng.standard_normal(n))
        self.speed = rng.uniform(1e4, 1e5) * (1 + 0.03 * rng.standard_normal(n))
        self.speed[0] *= 0.3
        self.val_at = np.linspace(0, n - 1, int(rng.integers(9, 25))).astype(int)[1:]
        self.gap = rng.uniform(0.0, 0.03)
        self.val: Floats | None = None
        self.clip: float | None = 1.0
        self.accelerator = "gpu"
        self.seconds = np.full(n, rng.uniform(0.2, 2.0) * self.every)
        self.settings: dict[str, Any] = {}
        self.batches: dict[int, str] = {}

    @property
    def loss(self) -> Floats:
        """The training loss."""
        return self.trend + self.noise

    def at(self, low: float, high: float) -> int:
        """A point between two parts of the run."""
        return int(self.points * self.rng.uniform(low, high))

    def add(self, name: str, values: Floats, at: Floats | None = None) -> None:
        """Another metric."""
        self.extra[name] = (
            np.asarray(self.steps if at is None else at, dtype=np.float64),
            np.asarray(values, dtype=np.float64),
        )

    def shares(self, data: float) -> None:
        """GoodputMonitor's shares of the time."""
        at = self.steps[self.val_at]
        self.add("goodput/data", data * (1 + 0.05 * self.rng.standard_normal(len(at))), at)
        self.add("goodput/steps", np.full(len(at), 0.97 - data), at)

    def write(self, folder: Path) -> None:
        """Write event files and the settings."""
        folder.mkdir(parents=True, exist_ok=True)
        val = self.trend[self.val_at] * (1 + self.gap) if self.val is None else self.val
        val = val + 0.1 * self.sigma * self.rng.standard_normal(len(val))
        names = (
            {"loss": "train_loss", "val": "val_loss", "lr": "lr-AdamW", "norm": "grad_2.0_norm_total"}
            if self.foreign
            else {"loss": "train/loss", "val": "val/loss", "lr": "train/lr", "norm": "train/grad_norm"}
        )
        names["speed"] = "throughput/tokens_per_second"
        tables = {"loss": (self.steps, self.loss), "lr": (self.steps, self.lr), "norm": (self.steps, self.norm),
                  "speed": (self.steps, self.speed), "val": (self.steps[self.val_at], val)}  # fmt: skip
        rows = {names[key]: table for key, table in tables.items() if key not in self.without} | self.extra
        clock = START + np.cumsum(self.seconds)
        events = [
            (float(np.interp(step, self.steps, clock)), int(step), name, float(value))
            for name, (steps, values) in rows.items()
            for step, value in zip(steps, values, strict=True)
        ]
        events.sort(key=lambda event: event[0])
        if self.unordered:
            places = np.arange(len(events)) + self.rng.uniform(0, 12, len(events))
            events = [events[place] for place in np.argsort(places)]
        cut = int(self.steps[self.restart])
        lost = 7 * self.every
        files = [events]
        if self.restart:
            files = [[e for e in events if e[1] < cut + lost], [(e[0] + 60, *e[1:]) for e in events if e[1] >= cut]]
        if self.later:
            last = events[-1]
            files.append([(last[0] + 900, 0, names["val"], float(val[-1])), (last[0] + 900, 0, "test/loss", 2.5)])
        for number, one in enumerate(files):
            (folder / f"events.out.tfevents.{number + 1}.a").write_bytes(b"".join(record(*event) for event in one))
        settings = {
            "data": {"vocab_size": self.vocabulary},
            "model": {"optimizer": {"lr": self.peak}},
            "trainer": {"max_steps": self.end, "gradient_clip_val": self.clip, "accelerator": self.accelerator},
            **self.settings,
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")


def record(seconds: float, step: int, name: str, value: float) -> bytes:
    """A record of an event file."""
    event = Event(wall_time=seconds, step=step, summary=Summary(value=[Summary.Value(tag=name, simple_value=value)]))
    data = event.SerializeToString()
    return struct.pack("<Q", len(data)) + bytes(4) + data + bytes(4)


# ---- faults


def lr_diverges_above_the_start(m: Made) -> None:
    """The loss leaves its way soon after the warmup and ends above its start."""
    at = m.at(0.03, 0.1)
    m.trend[at:] = m.trend[0] * m.rng.uniform(1.1, 1.6) - (m.trend[0] - m.trend[at]) * np.exp(
        -(m.t[at:] - m.t[at]) / 0.05
    )
    m.norm[at:] *= 8


def lr_explodes_then_flat(m: Made) -> None:
    """The loss rises to a multiple of its start in the first steps, then stays near the entropy of tokens."""
    k = np.arange(m.points)
    top, tau = m.trend[0] * m.rng.uniform(1.5, 3.5), m.rng.uniform(4, 9)
    flat = m.trend[0] * m.rng.uniform(0.75, 0.9)
    m.trend = np.where(k < 8, m.trend[0] + (top - m.trend[0]) * k / 8, flat + (top - flat) * np.exp(-(k - 8) / tau))


def lr_high_stalled(m: Made) -> None:
    """The loss hardly falls while the learning rate is high, and falls with it."""
    high = m.trend[0] * m.rng.uniform(0.7, 0.8)
    fall = np.clip((m.t - m.rng.uniform(0.5, 0.6)) / 0.45, 0, 1)
    m.trend = high + (m.trend[0] - high) * np.exp(-m.t / 0.02) - m.trend[0] * 0.25 * fall


def lr_zero(m: Made) -> None:
    """A learning rate of zero."""
    m.lr *= 0
    m.trend[:] = m.trend[0]


def late_divergence(m: Made) -> None:
    """The loss rises in the last hundredths of the run."""
    at = m.at(0.93, 0.955)
    m.trend[at:] += m.trend[at] * np.linspace(0.05, m.rng.uniform(0.5, 1.2), m.points - at)
    m.norm[at:] *= 5


def middle_divergence(m: Made) -> None:
    """The loss rises in the middle and does not come back."""
    at = m.at(0.35, 0.6)
    m.trend[at:] += m.trend[at] * m.rng.uniform(0.4, 0.9) * (1 - np.exp(-(m.t[at:] - m.t[at]) / 0.02))
    m.norm[at:] *= 6


def nan_to_the_end(m: Made) -> None:
    """NaN from some step on."""
    at = m.at(0.2, 0.8)
    m.trend[at:], m.norm[at:] = math.nan, math.nan


def one_spike(m: Made) -> None:
    """One bad batch."""
    at = m.at(0.3, 0.8)
    m.trend[at] += m.trend[at] * m.rng.uniform(0.5, 1)
    m.norm[at] *= 8


def many_spikes(m: Made) -> None:
    """Spikes of some steps each, again and again."""
    for at in m.rng.choice(np.arange(m.points // 6, m.points - 12), 7, replace=False):
        m.trend[at : at + 3] += m.trend[at] * m.rng.uniform(0.4, 0.8) * np.array([1, 0.5, 0.2])
        m.norm[max(at - 1, 0) : at + 2] *= 10


def early_spike(m: Made) -> None:
    """Without a warmup the loss rises to twice its start in the first steps, then recovers."""
    m.lr = m.peak * 0.5 * (1 + np.cos(np.pi * m.t))
    k = np.arange(m.points)
    m.trend = m.trend + m.trend[0] * m.rng.uniform(0.8, 2) * np.clip(k / 3, 0, 1) * np.exp(-np.clip(k - 3, 0, None) / 3)
    m.norm[:8] *= 10


def clip_pinned(m: Made) -> None:
    """A clip far below every norm."""
    m.clip = 0.003


def overfitting(m: Made) -> None:
    """The validation loss rises while the training loss falls on."""
    at = m.at(0.25, 0.45)
    m.trend[at:] -= m.trend[at] * 0.6 * (m.t[at:] - m.t[at])
    rise = np.clip(m.t[m.val_at] - m.t[at], 0, None)
    m.val = np.maximum(m.trend[m.val_at], m.trend[at - 1]) * 1.03 + m.trend[0] * m.rng.uniform(0.15, 0.4) * rise


def labels_not_shifted(m: Made) -> None:
    """The training loss goes to nothing, the validation loss stays where it was."""
    m.trend = m.trend[0] * np.exp(-m.t / 0.06) + 0.02
    m.noise = m.noise * np.maximum(m.trend / m.trend[0], 0.01)
    m.val = m.vocabulary**0 * math.log(m.vocabulary) * (1.1 + 0.4 * m.t[m.val_at])


def validation_leak(m: Made) -> None:
    """Validation far below training, more and more."""
    m.val = m.trend[m.val_at] * (0.85 - m.rng.uniform(0.3, 0.5) * m.t[m.val_at])


def lost_optimizer(m: Made) -> None:
    """After a restart the loss stands far above its level, and comes back slowly."""
    m.restart = m.at(0.3, 0.7)
    after = m.t[m.restart :] - m.t[m.restart]
    m.trend[m.restart :] += m.trend[m.restart] * m.rng.uniform(0.2, 0.5) * np.exp(-after / 0.1)


def lr_jumps_at_a_restart(m: Made) -> None:
    """The schedule begins again after a restart."""
    m.restart = m.at(0.5, 0.7)
    m.lr[m.restart :] = m.lr[m.points // 20 : m.points // 20 + m.points - m.restart]


def speed_falls_slowly(m: Made) -> None:
    """A GPU's speed falls to a half and less."""
    m.speed *= np.linspace(1, m.rng.uniform(0.3, 0.55), m.points)


def speed_falls_at_once(m: Made) -> None:
    """The speed falls at some step and stays there."""
    m.speed[m.at(0.3, 0.85) :] *= m.rng.uniform(0.35, 0.6)


def speed_sawtooth(m: Made) -> None:
    """The speed falls in each epoch, and returns at its end."""
    m.speed *= 1 - m.rng.uniform(0.45, 0.7) * ((m.t * int(m.rng.integers(4, 9))) % 1)


def speed_zero(m: Made) -> None:
    """No tokens are counted."""
    m.speed *= 0


def stall(m: Made) -> None:
    """Two hours without a step."""
    m.seconds[m.at(0.2, 0.9)] += m.rng.uniform(5e3, 9e3)


def loader_stalls(m: Made) -> None:
    """A third and more of the time is spent in waits for data."""
    m.shares(m.rng.uniform(0.3, 0.6))


def slow_rank(m: Made) -> None:
    """One of eight ranks needs twice as long."""
    slow = int(m.rng.integers(8))
    for rank in range(8):
        m.add(
            f"ranks/{rank}/own_seconds", (0.2 if rank == slow else 0.1) * (1 + 0.05 * m.rng.standard_normal(m.points))
        )


def scaler_collapses(m: Made) -> None:
    """The loss scale of fp16 halves until it is below 1."""
    m.add("precision/loss_scale", np.maximum(65536.0 * 0.5 ** np.floor(np.arange(m.points) / 8), 2.0**-14))
    m.add("precision/skipped_steps", np.floor(m.steps * 0.8))


def dead_units(m: Made) -> None:
    """The ReLUs of one block give only zeros."""
    for block in range(3):
        share = np.full(m.points, 0.999) if block == 1 else 0.5 + 0.02 * m.rng.standard_normal(m.points)
        m.add(f"activations/blocks.{block}/zero_fraction", share)


def attention_logits(m: Made) -> None:
    """The logits of a block grow without a bound."""
    m.add("attention/blocks.2/max_logit", 5 * np.exp(4.5 * m.t) * (1 + 0.05 * m.rng.standard_normal(m.points)))


def zero_grad_forgotten(m: Made) -> None:
    """Gradients add up over all steps: their norm grows with the number of steps, and the loss stays noisy and high."""
    norm = m.norm[-1]
    m.norm = norm * (1 + m.steps) ** m.rng.uniform(0.6, 0.9) * np.exp(0.1 * m.rng.standard_normal(m.points))
    m.trend = m.trend + 0.1 * m.trend[0] * np.minimum(m.t / 0.2, 1)
    m.noise = m.noise * 2


def all_frozen_but_a_bias(m: Made) -> None:
    """Only the output's bias learns: the loss comes to the entropy of tokens, and stays."""
    flat = m.trend[0] * m.rng.uniform(0.75, 0.88)
    m.trend = flat + (m.trend[0] - flat) * np.exp(-m.t / 0.05)
    m.norm *= 0.05
    for block in range(3):
        m.add(f"updates/blocks.{block}/ratio", np.zeros(m.points))
    m.add("updates/ratio", 1e-6 * np.exp(0.1 * m.rng.standard_normal(m.points)))


def shuffled_labels(m: Made) -> None:
    """Labels of other rows: the loss comes to the entropy of tokens, and stays."""
    flat = m.trend[0] * m.rng.uniform(0.72, 0.85)
    m.trend = flat + (m.trend[0] - flat) * np.exp(-m.t / 0.03)


def quantized_loss(m: Made) -> None:
    """A loss with three bits after its first: as fp8 or a rounded print has them."""
    scale = 2.0 ** np.floor(np.log2(m.trend))
    m.trend = np.round(m.loss / scale * 8) / 8 * scale
    m.noise = np.zeros(m.points)


# ---- healthy runs


def cosine(m: Made) -> None:
    """Nothing special."""


def constant_lr(m: Made) -> None:
    """A constant learning rate."""
    m.lr[:] = m.peak


def stable_and_decay(m: Made) -> None:
    """The loss falls once more in the decay."""
    decay = np.clip((m.t - 0.8) / 0.2, 0, 1)
    m.lr = m.peak * np.minimum((m.t + 0.01) / 0.02, 1) * (1 - 0.98 * decay)
    m.trend -= 0.05 * m.trend[-1] * decay


def inverse_sqrt(m: Made) -> None:
    """An inverse square root."""
    m.lr = m.peak * np.minimum((m.t + 0.001) / 0.05, np.sqrt(0.05 / (m.t + 0.001)))


def long_warmup(m: Made) -> None:
    """A warmup of a third of the run, in which the loss falls slowly."""
    m.lr = m.peak * np.minimum(m.t / 0.35, 1)
    m.trend = m.trend[-1] + (m.trend[0] - m.trend[-1]) * np.exp(-((m.t / 0.2) ** 1.5))


def noisy(m: Made) -> None:
    """Small batches."""
    m.noise *= 4


def hard_batches(m: Made) -> None:
    """Now and then a batch that is harder."""
    m.noise += 5 * m.sigma * (m.rng.random(m.points) < 0.02)


def fine_tuning(m: Made) -> None:
    """A trained model on other data: falls by a tenth, then hardly."""
    m.settings = {"init_from": "model.ckpt"}
    m.peak = 2e-5
    m.lr *= m.peak / m.lr.max()
    level = 0.3 * m.trend[0]
    m.trend = level * (0.9 + 0.1 * np.exp(-m.t / 0.03))


def continued_pretraining(m: Made) -> None:
    """A trained model on the same data: the loss stays."""
    m.settings = {"init_from": "model.ckpt"}
    m.peak = 3e-5
    m.lr *= m.peak / m.lr.max()
    m.trend = np.full(m.points, 0.3 * m.trend[0]) - 0.004 * m.t


def batch_warmup(m: Made) -> None:
    """Batches grow eightfold in three steps: fewer steps a second, less noise."""
    factor = 2.0 ** np.minimum(np.floor(m.t * 8), 3)
    m.noise /= np.sqrt(factor)
    m.seconds *= factor
    m.without = ("speed",)


def gan(m: Made) -> None:
    """Two losses that play against each other."""
    m.foreign, m.without = True, ("val",)
    wave = 0.3 * np.sin(2 * np.pi * m.t * m.rng.uniform(2, 5))
    m.trend = 1.2 + wave + 0.5 * m.t
    m.add("train/d_loss", 0.6 - 0.3 * wave + 0.1 * m.rng.standard_normal(m.points))


def label_smoothing(m: Made) -> None:
    """Label smoothing in training alone."""
    m.val = m.trend[m.val_at] - 0.1 * math.log(m.vocabulary) * 0.9
    m.trend = m.trend.copy()


def curriculum(m: Made) -> None:
    """Rows become longer: the speed in tokens falls in steps, the loss rises a little at each."""
    part = np.floor(m.t * 4)
    m.add("data/seq_len", 256 * 2**part)
    m.speed *= 0.8**part
    m.trend += 0.02 * m.trend[-1] * part


def resumed(m: Made) -> None:
    """A restart that loses nothing."""
    m.restart = m.at(0.3, 0.7)


def steps_out_of_order(m: Made) -> None:
    """A logger that writes from several threads."""
    m.unordered = True


def later_validation(m: Made) -> None:
    """A `validate` afterwards, in an event file of its own."""
    m.later = True


def half_clipped(m: Made) -> None:
    """Half of the steps are clipped."""
    m.clip = float(np.median(m.norm))


def classifier(m: Made) -> None:
    """Small losses in the end."""
    m.trend, m.sigma = 2.3 * np.exp(-m.t / 0.15) + 0.05, 0.005
    m.noise = 0.15 * m.trend * m.rng.standard_normal(m.points)
    m.settings = {"data": {}}


def negative_loss(m: Made) -> None:
    """The likelihood of a flow: below zero."""
    m.trend = 3 - 5 * (1 - np.exp(-m.t / 0.2))
    m.val = m.trend[m.val_at] + 0.03
    m.settings = {"data": {}}


def diffusion(m: Made) -> None:
    """Falls within the first steps, then slowly, under large noise."""
    m.trend, m.sigma = 0.06 + 0.9 * np.exp(-m.t / 0.01) + 0.03 * np.exp(-m.t / 0.4), 0.003
    m.noise = 0.15 * m.trend * m.rng.standard_normal(m.points)
    m.settings = {"data": {}}


def warm_restarts(m: Made) -> None:
    """The learning rate returns to its peak three times, and the loss rises a little each time."""
    phase = (m.t * 3) % 1
    m.lr = m.peak * 0.5 * (1 + np.cos(np.pi * phase))
    m.trend += 0.04 * m.trend[-1] * (1 - phase) * (m.t > 0.33)


def epochs(m: Made) -> None:
    """The training loss falls at each new epoch, the validation loss does not rise."""
    m.trend = m.trend - 0.03 * m.trend[-1] * np.floor(m.t * 4)
    m.val = m.trend[m.val_at] + 0.03 * m.trend[-1] * np.floor(m.t[m.val_at] * 4) * 0.9


def slow_validations(m: Made) -> None:
    """Validations and saves of some minutes, in the speed too."""
    m.seconds[m.val_at] += 240
    m.speed[m.val_at] *= 0.2


def busy_cpu(m: Made) -> None:
    """Other programs take the processor for parts of the run."""
    m.accelerator = "cpu"
    at = m.at(0.2, 0.5)
    m.speed[at : at + m.points // 4] *= 0.5


def lengths_vary(m: Made) -> None:
    """Batches of very different numbers of tokens."""
    m.speed *= np.exp(0.3 * m.rng.standard_normal(m.points))


def short(m: Made) -> None:
    """Sixty points."""
    Made.__init__(m, m.rng, points=60)


def norm_grows(m: Made) -> None:
    """The gradient norm doubles over the run, as it does in long ones of a language model."""
    m.norm *= 1 + 1.2 * m.t


def dropout(m: Made) -> None:
    """Validation a few hundredths below training."""
    m.gap = -0.06


def bf16_loss(m: Made) -> None:
    """A loss with the 8 bits of bf16."""
    scale = 2.0 ** np.floor(np.log2(m.trend))
    m.trend = np.round(m.loss / scale * 128) / 128 * scale
    m.noise = np.zeros(m.points)


def frozen_parts(m: Made) -> None:
    """A head on a frozen trunk, whose blocks are not in the optimizer."""
    m.add("updates/head/ratio", 1e-3 * np.exp(0.1 * m.rng.standard_normal(m.points)))
    m.add("updates/ratio", 1e-3 * np.exp(0.1 * m.rng.standard_normal(m.points)))
    m.norm *= 0.2


class Fault(NamedTuple):
    """A fault, and the symptoms of which one must come first.

    Args:
        note: a note is what is expected.
    """

    make: Callable[[Made], None]
    expected: tuple[str, ...]
    note: bool = False


LR = ("divergence", "stalled_at_peak", "plateau", "early_spike")
FAULTS = [
    Fault(lr_diverges_above_the_start, LR),
    Fault(lr_explodes_then_flat, LR),
    Fault(lr_high_stalled, LR),
    Fault(lr_zero, ("plateau",)),
    Fault(late_divergence, ("divergence",)),
    Fault(middle_divergence, ("divergence",)),
    Fault(nan_to_the_end, ("not_finite",)),
    Fault(one_spike, ("spike",), note=True),
    Fault(many_spikes, ("spikes",)),
    Fault(early_spike, ("early_spike",)),
    Fault(clip_pinned, ("clip_pinned",)),
    Fault(overfitting, ("overfitting",)),
    Fault(labels_not_shifted, ("overfitting", "train_gap")),
    Fault(validation_leak, ("validation_leak",)),
    Fault(lost_optimizer, ("restore",)),
    Fault(lr_jumps_at_a_restart, ("restore",)),
    Fault(speed_falls_slowly, ("throughput_falls",)),
    Fault(speed_falls_at_once, ("throughput_falls",)),
    Fault(speed_sawtooth, ("throughput_sawtooth",)),
    Fault(speed_zero, ("throughput_zero",)),
    Fault(stall, ("stall",)),
    Fault(loader_stalls, ("loader_stalls",)),
    Fault(slow_rank, ("slow_rank",)),
    Fault(scaler_collapses, ("scaler_collapse",)),
    Fault(dead_units, ("dead_units",)),
    Fault(attention_logits, ("attention_logits",)),
    Fault(zero_grad_forgotten, ("gradients_add_up",)),
    Fault(all_frozen_but_a_bias, ("frozen", "plateau")),
    Fault(shuffled_labels, ("plateau",)),
    Fault(quantized_loss, ("quantized_loss",), note=True),
]
HEALTHY = [
    cosine, constant_lr, stable_and_decay, inverse_sqrt, long_warmup, noisy, hard_batches, fine_tuning,
    continued_pretraining, batch_warmup, gan, label_smoothing, curriculum, resumed, steps_out_of_order,
    later_validation, half_clipped, classifier, negative_loss, diffusion, warm_restarts, epochs,
    slow_validations, busy_cpu, lengths_vary, short, norm_grows, dropout, bf16_loss, frozen_parts,
]  # fmt: skip


# ---- the judgement


def judge(make: Callable[[Made], None], seed: int, expected: Sequence[str], note: bool, folder: Path) -> dict[str, Any]:
    """Write the log of a kind and seed, read it, and say what was found."""
    made = Made(np.random.default_rng([zlib.crc32(make.__name__.encode()), seed]))
    make(made)
    made.write(folder)
    found = findings(read_log(folder)[0])
    above = [each for each in found if note or each.severity != "note"]
    names = [each.symptom for each in above]
    first = bool(names) and names[0] in expected
    return {
        "seed": seed, "found": names, "evidence": above[0].evidence if above else "",
        "result": ("first" if first else "named" if set(names) & set(expected) else "missed")
        if expected else ("false alarm" if names else "silent"),
    }  # fmt: skip


def kinds() -> list[tuple[str, Callable[[Made], None], tuple[str, ...], bool]]:
    """Name, maker, expected symptoms, and whether a note is enough."""
    faults = [(fault.make.__name__, fault.make, fault.expected, fault.note) for fault in FAULTS]
    return [*faults, *((make.__name__, make, (), False) for make in HEALTHY)]


def table(result: dict[str, Any]) -> str:
    """Counts of logs by outcome, and the kinds that went wrong, in Markdown."""
    lines = ["| seeds | faults | named first | named | missed | healthy | false alarms | not right |", "|" + "---|" * 8]
    for part, seeds in result["seeds"].items():
        rows = [(kind, row) for kind in result["kinds"] for row in kind["rows"] if row["seed"] in seeds]
        count = {name: sum(row["result"] == name for _, row in rows)
                 for name in ("first", "named", "missed", "silent", "false alarm")}  # fmt: skip
        wrong: dict[str, int] = {}
        for kind, row in rows:
            if row["result"] not in ("first", "silent"):
                wrong[kind["kind"].replace("_", " ")] = wrong.get(kind["kind"].replace("_", " "), 0) + 1
        faults, healthy = (sum(count[n] for n in names) for names in (("first", "named", "missed"),
                                                                      ("silent", "false alarm")))  # fmt: skip
        listed = ", ".join(f"{name} ({number})" for name, number in wrong.items()) or "none"
        lines.append(
            f"| {part} | {faults} | {count['first']} | {count['named']} | {count['missed']} | {healthy} | "
            f"{count['false alarm']} | {listed} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="default: all")
    parser.add_argument("--held", action="store_true", help="the held seeds too")
    parser.add_argument("--out", type=Path, help="JSON file; default: none")
    options = parser.parse_args(arguments)
    seeds = {"tuned": TUNED, **({"held": HELD} if options.held else {})}
    result: dict[str, Any] = {"benchmark": "doctor_logs", "machine": machine.describe(), "seeds": seeds, "kinds": []}
    with tempfile.TemporaryDirectory() as folder:
        for name, make, expected, note in kinds():
            if options.kinds and name not in options.kinds:
                continue
            rows = [
                judge(make, seed, expected, note, Path(folder) / name / str(seed))
                for part in seeds.values()
                for seed in part
            ]
            what = " ".join((make.__doc__ or "").split())
            result["kinds"].append({"kind": name, "what": what, "expected": expected, "rows": rows})
            wrong = [row for row in rows if row["seed"] in TUNED and row["result"] not in ("first", "silent")]
            for row in wrong:  # held ones are counted, not shown
                print(name, row["seed"], row["result"], row["found"], row["evidence"], flush=True)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
