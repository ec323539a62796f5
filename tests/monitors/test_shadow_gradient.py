"""Figures worked out by hand; each planted fault named with its block; healthy runs silent; and no trace of the second
run, whatever the user's step writes to."""

import dataclasses
import math
import random
import warnings
from collections import Counter, deque
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import processes
from harness.models import LLAMA, Decoding, Small, batches, rows
from harness.runs import CountsFlops, Memory, On, decoding, fit, same, same_training
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_tricks import LanguageModel
from lightning_tricks._errors import UsageError
from lightning_tricks.callbacks import MetricBuffer, ShadowGradient
from lightning_tricks.monitors._module_calls import after_calls
from lightning_tricks.monitors.shadow_gradient.kept_state import LARGEST_BYTES, KeptState
from lightning_tricks.monitors.shadow_gradient.plain_run import OwnBackward, plain_run
from lightning_tricks.monitors.shadow_gradient.shadow_gradient import compare, differing, products, warning
from lightning_tricks.parallel.dims import ParallelDims
from lightning_tricks.precision import BF16Mixed, BF16True, Float8, FP16Mixed
from lightning_tricks.strategies import FSDP2Strategy

COSINE, RATIO = "shadow/worst_cosine", "shadow/worst_norm_ratio"
Every = partial(ShadowGradient, every_n_steps=1)
every_step = partial(fit, log_every_n_steps=1)
EMULATED = {"emulate": True, "convert_small": True}


def told(run):
    """The result of a run, and the lines of ShadowGradient in it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run()
    return result, [str(w.message) for w in caught if str(w.message).startswith("ShadowGradient")]


def blocks_of(values, prefix="shadow/cosine/"):
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


class Residual(nn.Module):
    """x + b(tanh(a(x * gain))); a gain for each row."""

    def __init__(self, gain=None):
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("gain", torch.ones(16, 1) if gain is None else gain)

    def forward(self, x):
        return x + self.b(self.a(x * self.gain).tanh())


def residuals(gain=None, at=1):
    """Three blocks and a head; one block has the gain."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Sequential(*[Residual(gain if i == at else None) for i in range(3)]), nn.Linear(16, 4))


# --------------------------------------------------------------------------------------------------------- the figures


def test_cosine_and_ratio_are_those_of_the_joined_gradients_of_a_block():
    run, shadow = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])], [torch.tensor([0.0, 6.0]), torch.tensor([[8.0]])]
    like = torch.zeros(())
    sums = sum(products(a, b, like) for a, b in zip(run, shadow, strict=True))
    assert sums.tolist() == [32.0, 25.0, 100.0]
    cosine, ratio = compare(sums[None], scale=4.0)
    assert cosine.item() == pytest.approx(32 / (5 * 10))
    assert ratio.item() == pytest.approx(5 / 4 / 10)


def test_sums_are_exact_where_squares_leave_the_range_of_fp32_and_for_other_layouts():
    like = torch.zeros(())
    large = torch.full((4,), 1e30)
    assert products(large, None, like).tolist() == [0.0, pytest.approx(4e60), 0.0]
    sparse = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,))
    assert products(sparse, torch.tensor([1.0, 5.0, 5.0]), like).tolist() == pytest.approx([3.0, 9.0, 51.0])
    turned = torch.tensor([1 + 2j]), torch.tensor([3 - 1j])
    assert products(*turned, like).tolist() == pytest.approx([1.0, 5.0, 10.0])
    assert products(torch.ones(300, dtype=torch.bfloat16), torch.ones(300), like).tolist() == pytest.approx([300.0] * 3)


NONE = -math.inf
EXTREMES = {  # run², shadow² of a block beside one of norm 1: cosine, ratio
    "both are zero": (0.0, 0.0, 1.0, 1.0),
    "the run's is zero": (0.0, 1.0, 0.0, 0.0),
    "the other is zero": (1.0, 0.0, 0.0, NONE),
    "both are rounding": (1e-16, 1e-14, NONE, NONE),
    "the run's is infinite": (math.inf, 1.0, 0.0, NONE),
    "the run's is NaN": (math.nan, 1.0, 0.0, NONE),
    "the other is NaN": (1.0, math.nan, NONE, NONE),
}


@pytest.mark.parametrize(("run", "shadow", "cosine", "ratio"), EXTREMES.values(), ids=EXTREMES)
def test_gradients_of_zero_of_rounding_and_without_a_number_have_their_own_answers(run, shadow, cosine, ratio):
    sums = torch.tensor([[1.0, 1.0, 1.0], [0.0, run, shadow]], dtype=torch.float64)
    cosines, ratios = compare(sums)
    assert (cosines.tolist(), ratios.tolist()) == ([1.0, cosine], [1.0, ratio])


def test_an_overflow_under_a_scaler_is_no_fault():
    cosine, ratio = compare(torch.tensor([[0.0, math.inf, 1.0]]), may_overflow=True)
    assert (cosine.item(), ratio.item()) == (NONE, NONE)


def test_a_block_differs_by_its_cosine_or_by_its_norm():
    cosines = {"a": 0.95, "b": 0.5, "c": 0.2, "d": 1.0, "e": 1.0}
    ratios = {"a": 1.0, "b": 1.0, "d": 1.3, "e": 0.75}
    assert differing(cosines, ratios, 0.9, 1.25) == ["c", "b", "d", "e"]
    assert differing({"a": 0.9}, {"a": 1.25}, 0.9, 1.25) == []
    assert differing({"a": 0.9}, {"a": 0.8}, 0.9, 1.25) == []


def test_the_line_names_the_worst_block_and_the_remedy():
    cosines, ratios = {"net.3": 0.4, "net.30": 0.5, "head": 1.0}, {"net.3": 0.75}
    line = warning(7, ["net.3", "net.30"], cosines, ratios, ["net.3.a", "net.30.b"])
    assert "step 7: the gradient of net.3 differs" in line
    assert "(cosine 0.4000, norm x 0.75); so do net.30:" in line
    assert r"Float8.exclude: ['net\.3']" in line
    assert "torch.compile" in warning(7, ["net.3"], cosines, ratios, ["net.30.b"])
    assert "all blocks do" in warning(7, ["net.3", "net.30", "head"], cosines, ratios, ["net.3.a"])
    many = dict.fromkeys("abcdefgh", 0.1)
    assert "so do b, c, d and 2 more" in warning(1, list("abcdef"), many, {}, [])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every_n_steps": 0}, r"ShadowGradient.every_n_steps=0: give 1 or more"),
        ({"min_cosine": 1.5}, r"ShadowGradient.min_cosine=1.5: give a number from -1 to 1"),
        ({"max_norm_ratio": 1.0}, r"ShadowGradient.max_norm_ratio=1.0: give a factor above 1"),
        ({"differentiate": "Loss"}, r"ShadowGradient.differentiate='Loss': give a list"),
        ({"differentiate": ["("]}, r"ShadowGradient.differentiate: '\(' is no regular expression"),
    ],
)
def test_an_option_out_of_its_range_is_refused(options, words):
    with pytest.raises(UsageError, match=words):
        ShadowGradient(**options)


# -------------------------------------------------------------------------------------------------- when, and of which


def test_the_first_log_step_is_compared_and_then_those_at_least_n_steps_later():
    run = fit(Small(4, 8, 8, 1), ShadowGradient(every_n_steps=5), max_steps=12, log_every_n_steps=2)
    assert list(run.at(COSINE)) == [1, 7]  # of 1, 3, 5, 7, 9 and 11, which are logged
    assert run.rows[0][1].keys() == {
        f"shadow/{kind}/net.{i}" for kind in ("cosine", "norm_ratio") for i in (0, 2, 4)
    } | {COSINE, RATIO}


def test_in_fp32_on_one_device_the_gradients_are_equal():
    run = every_step(Small(4, 8, 8, 1), Every())
    assert run.of(COSINE) == pytest.approx([1.0] * 4, abs=1e-12)
    assert run.of(RATIO) == pytest.approx([1.0] * 4, abs=1e-6)


def test_the_first_micro_batch_is_compared_whatever_gradients_are_there():
    """Also where the module clears its gradients by zeros, or not at all."""

    class Keeps(Small):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            optimizer.zero_grad(set_to_none=False) if self.global_step == 1 else None

    run = every_step(Keeps(4, 8, 1), Every(), accumulate_grad_batches=3)
    assert run.of(COSINE) == pytest.approx([1.0] * 4, abs=1e-6)  # a difference of sums in fp32
    assert run.of(RATIO) == pytest.approx([1.0] * 4, abs=1e-5)


def test_nothing_is_recorded_without_logging_or_under_manual_optimization():
    assert fit(Small(4, 1), Every(), log_every_n_steps=0).rows == []
    run, lines = told(lambda: every_step(Small(4, 1, manual=True), Every()))
    assert run.of(COSINE) == []
    assert len(lines) == 1
    assert "manual optimization" in lines[0]


# ------------------------------------------------------------------------------------------------------ planted faults


def fp8_run(recipe, exclude=()):
    """The first row of a batch is loud in one block, and no part of the loss: with one scale, fp8 loses all others."""
    gain = torch.ones(16, 1)
    gain[0] = 1e8
    model = Small(16, net=residuals(gain), data=batches(rows(64, 16, 16)), loss=lambda m, x: m(x)[1:].square().mean())
    plugin = Float8(recipe=recipe, base="bf16-true", exclude=exclude, **EMULATED)
    return told(lambda: every_step(model, Every(), plugins=[plugin], max_steps=2))


def test_the_layer_whose_outliers_fp8_cannot_hold_is_named():
    run, lines = fp8_run("tensorwise")
    cosines = blocks_of(run.rows[0][1])
    assert min(cosines, key=cosines.get) == "net.0.1"
    assert lines[0].startswith("ShadowGradient, step 0: the gradient of net.0.1 differs")
    assert r"Float8.exclude: ['net\.0\.1']" in lines[0]
    assert len([line for line in lines if "net.0.1 differs" in line]) == 1  # once, of two steps


@pytest.mark.parametrize(
    "options", [{"recipe": "rowwise_with_gw_hp"}, {"recipe": "tensorwise", "exclude": [r"net\.0\.1"]}]
)
def test_and_its_remedies_help(options):
    run, lines = fp8_run(**options)
    assert lines == []
    assert min(run.of(COSINE)) > 0.99


class IgnoresNoLabel(torch.autograd.Function):
    """A cross-entropy whose backward pass takes ignored labels for label 0."""

    @staticmethod
    def forward(ctx, logits, labels):
        ctx.save_for_backward(logits, labels)
        return F.cross_entropy(logits, labels, ignore_index=-100)

    @staticmethod
    def backward(ctx, grad):
        logits, labels = ctx.saved_tensors
        right = F.one_hot(labels.clamp(min=0), logits.shape[1])
        return grad * (logits.softmax(1) - right) / (labels >= 0).sum(), None


class IgnoresNoLabelInTwoParts(IgnoresNoLabel):
    """The same, with a context of its own."""

    @staticmethod
    def forward(logits, labels):
        return F.cross_entropy(logits, labels, ignore_index=-100)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)


class Opaque(IgnoresNoLabel):
    """The same, computed where autograd sees nothing, as in a kernel."""

    @staticmethod
    def forward(ctx, logits, labels):
        ctx.save_for_backward(logits, labels)
        with torch.no_grad():
            return F.cross_entropy(logits, labels, ignore_index=-100)


kept_early = IgnoresNoLabel.apply  # as many a program does when it is imported


def labelled(function, *patterns):
    labels = torch.tensor([1, 2, -100, 3] * 4)
    model = Small(16, net=residuals(), data=batches(rows(64, 16, 16)), loss=lambda m, x: function(m(x), labels))
    return told(lambda: every_step(model, Every(differentiate=patterns), max_steps=2))


@pytest.mark.parametrize("function", [kept_early, IgnoresNoLabelInTwoParts.apply], ids=["ctx", "setup_context"])
def test_a_backward_pass_that_forgets_the_ignored_labels_is_found(function):
    run, lines = labelled(function, "IgnoresNoLabel.*")
    assert max(blocks_of(run.rows[0][1]).values()) < 0.9
    assert len(lines) == 1
    assert "all blocks do: look at the loss" in lines[0]


def test_a_right_one_is_not():
    right = lambda logits, labels: F.cross_entropy(logits, labels)  # noqa: E731
    run, lines = labelled(right)
    assert lines == []
    assert run.of(COSINE) == pytest.approx([1.0, 1.0])


def test_both_runs_have_its_backward_pass_unless_it_is_named_and_a_line_says_so(caplog):
    with caplog.at_level("INFO"):
        run, lines = labelled(kept_early)
    assert lines == []
    assert run.of(COSINE) == pytest.approx([1.0, 1.0])
    assert "both runs have the backward passes of test_shadow_gradient.IgnoresNoLabel;" in caplog.text


def test_a_pattern_that_names_nothing_and_a_forward_without_a_derivative_are_told():
    _, lines = labelled(kept_early, "NoSuchLoss")
    assert len(lines) == 1
    assert "'NoSuchLoss' names no function behind the loss, which are: test_shadow" in lines[0]
    run, lines = labelled(Opaque.apply, "Opaque")
    assert len(lines) == 1
    assert "autograd cannot see into the forward of test_shadow_gradient.Opaque" in lines[0]
    assert run.of(COSINE) == pytest.approx([1.0, 1.0])
    assert "backward" in vars(IgnoresNoLabel)
    assert "backward" not in vars(Opaque)


def test_a_compiler_that_is_wrong_about_one_block_is_found():
    torch._dynamo.reset()

    def wrong(graph, inputs):
        return lambda *args: tuple(out * 1.5 for out in graph.forward(*args))

    model = Small(16, net=residuals(), data=batches(rows(64, 16, 16)))
    model.net[0][1].compile(backend=wrong)
    _, lines = told(lambda: every_step(model, Every(), max_steps=2))
    assert len(lines) == 1
    assert "differs from that in fp32" in lines[0]


def in_two(rank, strategy, plugins, fault=None, accumulate=1):
    """Two processes with different rows; what is logged and told."""
    torch.manual_seed(0)
    strategy = FSDP2Strategy() if strategy == "fsdp2" else strategy
    hooks = On(on_train_batch_start=fault) if fault else On()
    model = Small(16, net=residuals(), data=batches(rows(64, 16, 16, seed=rank) * (1 + 4 * rank)))
    run, lines = told(
        lambda: every_step(
            model, Every(), hooks, strategy=strategy, devices=2, plugins=[make() for make in plugins], max_steps=2,
            accumulate_grad_batches=accumulate,
        )
    )  # fmt: skip
    return run.of(COSINE), run.of(RATIO), lines


def drops_the_all_reduce(trainer, *_):
    trainer.strategy.model.require_backward_grad_sync = False


def test_an_all_reduce_that_is_left_out_is_found():
    """The rows of one rank are five times as long, so no rank's own gradient has the length of the mean."""
    (_, ratios, lines), _ = processes.run(in_two, "ddp", (), drops_the_all_reduce)
    assert min(ratios) > 1.5
    assert len(lines) == 1
    assert "all blocks do: look at the loss, at the sums over ranks" in lines[0]


# -------------------------------------------------------------------------------------------------------- healthy runs

HEALTHY = {
    **{f"{precision} {mode}": {"precision": precision, "checkpointing": mode}
       for precision in ("32-true", "bf16-mixed", "bf16-true") for mode in ("none", "selective", "full")},
    **{f"compiled {how}": {"precision": "bf16-mixed", "compiled": how} for how in ("in_place", "wrapped", "whole")},
    "compiled full": {"compiled": "in_place", "checkpointing": "full"},
    "accumulates": {"precision": "bf16-mixed", "accumulate_grad_batches": 2},
    "BF16Mixed": {"plugins": BF16Mixed},
    "BF16True": {"plugins": BF16True},
    "FP16Mixed": {"plugins": partial(FP16Mixed, init_scale=1024.0)},
    "tensorwise": {"plugins": partial(Float8, **EMULATED)},
    "rowwise": {"plugins": partial(Float8, recipe="rowwise", base="bf16-true", **EMULATED), "checkpointing": "full"},
    "mxfp8": {"plugins": partial(Float8, recipe="mxfp8", **EMULATED), "accumulate_grad_batches": 2},
}  # fmt: skip


@pytest.mark.parametrize("options", HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_run_is_silent(options):
    torch._dynamo.reset()
    options = dict(options)
    plugins = [options.pop("plugins")()] if "plugins" in options else None
    run, lines = told(lambda: decoding(Every(), plugins=plugins, log_every_n_steps=1, **options))
    assert lines == []
    assert len(run.of(COSINE)) == 4


FP8 = partial(Float8, **EMULATED)


def each_in_two(rank, cases):
    return [in_two(rank, strategy, plugins, None, accumulate) for strategy, plugins, accumulate in cases]


def test_healthy_runs_of_two_processes_are_silent_and_both_agree():
    """In bf16 with accumulation too, for each way in which gradients are averaged."""
    cases = [("ddp", (), 1), ("ddp", (BF16Mixed,), 2), ("fsdp2", (), 1), ("fsdp2", (BF16True,), 2)]
    cases += [("ddp", (FP8,), 1), ("fsdp2", (FP8,), 1)]  # under FSDP2 weights are gathered in fp8
    for case, one, other in zip(cases, *processes.run(each_in_two, cases), strict=True):
        assert one[:2] == other[:2], case
        assert len(one[0]) == 2, case
        assert one[2] == [], case
        if not case[1]:
            assert one[0] == pytest.approx([1.0, 1.0])
            assert one[1] == pytest.approx([1.0, 1.0], abs=1e-5)


# ------------------------------------------------------------------------------------------------------------ no trace


class Tracker:
    counts = Counter()  # of the class
    name = "none"

    def __init__(self):
        self.seen, self.order, self.last = {}, deque(maxlen=3), None


SEEN_BY_THE_FILE = []
steps_of_the_file = 0


class WritesEverywhere(Small):
    """Its step writes to all places that a module can reach, and its loss depends on most of them."""

    calls = 0

    def __init__(self):
        super().__init__(4, 8, 1, batch_norm=True, dropout=0.2, logs=True)
        self.tracker, self.history, self.table = Tracker(), [[]], {"a": set()}
        self.average = torch.zeros(())  # no buffer
        self.array = np.zeros(2)
        self.dice = random.Random(1)
        self.noise = torch.Generator().manual_seed(2)
        self.register_buffer("steps_seen", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch, batch_idx):
        global steps_of_the_file
        steps_of_the_file += 1
        WritesEverywhere.calls += 1
        SEEN_BY_THE_FILE.append(steps_of_the_file)
        self.steps_seen += 1
        self.array += self.dice.random()
        self.history[0].append(batch.mean())
        self.history.append([])
        self.table["a"].add(WritesEverywhere.calls)
        self.table[str(WritesEverywhere.calls)] = Tracker()
        self.tracker.seen[WritesEverywhere.calls] = None
        self.tracker.order.append(self.steps_seen.item())
        self.tracker.last = batch
        Tracker.counts["steps"] += 1
        Tracker.name = str(WritesEverywhere.calls)
        Tracker.added = True
        with torch.no_grad():
            self.average.mul_(0.5).add_(batch.mean())
            self.net[0].weight.clamp_(-0.3, 0.3)
        batch *= 1 + self.array.sum() / 10  # in the user's own tensor
        factor = 1 + WritesEverywhere.calls / 10 + random.random() + np.random.rand() + self.average
        loss = (self(batch) + torch.rand((), generator=self.noise)).square().mean() * factor
        self.log("train/loss", loss)
        self.log("train/steps", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
        self.logger.experiment.anything_at_all(loss)
        return loss

    def state(self):
        return (
            steps_of_the_file, WritesEverywhere.calls, list(SEEN_BY_THE_FILE), self.steps_seen.item(),
            self.array.tolist(), self.history, self.table["a"], list(self.table), self.tracker.seen,
            list(self.tracker.order),
            self.tracker.last.tolist(), Tracker.counts, Tracker.name, self.average.item(), self.dice.getstate(),
            self.noise.get_state().tolist(), random.getstate(), np.random.get_state()[1].tolist(),
            [buffer.tolist() for buffer in self.buffers()],
        )  # fmt: skip


class Experiment:
    calls = 0

    def anything_at_all(self, loss):
        Experiment.calls += 1


def run_that_writes(*callbacks):
    global steps_of_the_file
    steps_of_the_file, WritesEverywhere.calls, Tracker.name, Experiment.calls = 0, 0, "none", 0
    SEEN_BY_THE_FILE.clear()
    Tracker.counts.clear()
    random.seed(1)
    np.random.seed(1)
    logger = Memory()
    logger.experiment = Experiment()
    run = every_step(WritesEverywhere(), *callbacks, logger=logger)
    return run, run.model.state(), Experiment.calls


def test_the_second_run_leaves_no_trace_and_sees_what_the_first_one_saw():
    plain, before, calls = run_that_writes()
    (watched, after, calls_with), lines = told(lambda: run_that_writes(Every()))
    assert same_training(plain, watched)
    assert after == before
    assert calls_with == calls == 4
    assert watched.of("train/loss") == plain.of("train/loss")
    assert watched.of("train/steps") == plain.of("train/steps") == [4.0]
    assert lines == []
    assert watched.of(COSINE) == pytest.approx([1.0] * 4, abs=1e-6)


def test_a_step_that_fails_the_second_time_is_told_once_and_changes_nothing():
    class Fails(Small):
        def training_step(self, batch, batch_idx):
            if not torch.is_autocast_enabled("cpu"):
                self.losses.append(math.nan)
                raise ValueError("only in bf16\nfor a reason")
            return super().training_step(batch, batch_idx)

    plain, (watched, lines) = (
        every_step(Fails(4, 1), plugins=[BF16Mixed()]),
        told(lambda: every_step(Fails(4, 1), Every(), plugins=[BF16Mixed()])),
    )
    assert same_training(plain, watched)
    assert watched.model.losses == plain.model.losses
    assert lines == [
        "ShadowGradient compares nothing any more: training_step does not run again in fp32 (ValueError: only in bf16"
    ]


def test_a_step_without_a_loss_and_gradients_that_are_gone_are_passed_over():
    class HasNoLoss(Small):
        def training_step(self, batch, batch_idx):
            return None

    run, lines = told(lambda: every_step(HasNoLoss(4, 1), Every(), max_steps=-1, max_epochs=1))
    assert lines == []
    assert run.of(COSINE) == []

    def drop(module, *_):
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

    _, lines = told(lambda: every_step(Small(4, 1), Every(), On(on_fit_start=lambda _, m: drop(m))))
    assert len(lines) == 1
    assert "no parameter has its gradient after the first backward pass" in lines[0]


def test_what_other_watchers_count_is_that_of_one_run():
    counter = CountsFlops()
    every_step(Small(4, 8, 1), counter, max_steps=1)
    with_shadow = CountsFlops()
    every_step(Small(4, 8, 1), with_shadow, Every(), max_steps=1)
    assert counter.found == with_shadow.found


def test_a_users_hook_belongs_to_the_second_run_and_one_of_a_watcher_does_not():
    module, seen = nn.Linear(2, 2), []

    def theirs(*_):
        seen.append("theirs")

    def ours(*_):
        seen.append("ours")

    ours.__module__ = "lightning_tricks.monitors.activation_monitor"
    module.register_forward_hook(theirs)
    module.register_forward_hook(ours)
    hooks = module._forward_hooks
    with plain_run(module):
        module(torch.ones(2))
    assert seen == ["theirs"]
    assert module._forward_hooks is hooks
    assert len(hooks) == 2


def test_a_watcher_around_compiled_code_sees_the_first_run_only():
    module, seen = nn.Linear(2, 2), []
    module.compile(backend="eager")
    with after_calls(module, seen.append):
        with plain_run(module):
            module(torch.ones(2))
        assert seen == []
        module(torch.ones(2))
    assert len(seen) == 1


def test_a_plain_run_has_no_autocast_no_recomputation_and_no_fp8():
    calls, layer = [], nn.Linear(2, 2)

    def block(x):
        calls.append(1)
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x)

    layer.forward = lambda x: x * math.nan  # as if in fp8
    x = torch.ones(2, requires_grad=True)
    with plain_run(layer, [layer]), torch.autocast("cpu", torch.bfloat16):
        for reentrant in (False, True):
            out = checkpoint(block, x, use_reentrant=reentrant)
            assert out.dtype == torch.float32
            assert torch.equal(out, F.linear(x, layer.weight, layer.bias))
            out.sum().backward()
    assert len(calls) == 2
    assert layer(x).isnan().all()


def test_tf32_is_off_inside_and_as_it_was_afterwards():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        with plain_run(nn.Linear(1, 1)):
            assert torch.get_float32_matmul_precision() == "highest"
            assert not torch.backends.cudnn.allow_tf32
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before)


def test_large_tensors_that_are_no_buffers_are_taken_for_data():
    module = nn.Linear(1, 1)
    module.data_set = torch.zeros(LARGEST_BYTES // 4 + 1)
    module.small = torch.zeros(1)
    module.register_buffer("cache", torch.zeros(LARGEST_BYTES // 4 + 1))
    large, small, cache = module.data_set, module.small, module.cache
    state = KeptState(module, copies=True)
    state.put_back(on_copies=True)
    assert module.data_set is large
    assert module.small is not small
    assert module.cache is not cache
    KeptState.put_back(state)
    assert module.small is small
    assert module.cache is cache


def test_functions_are_what_they_were_after_their_backward_was_replaced():
    own = OwnBackward(["IgnoresNoLabel"])
    forward, backward = vars(IgnoresNoLabel)["forward"], vars(IgnoresNoLabel)["backward"]
    with own.replaced_by_autograd():
        assert vars(IgnoresNoLabel)["backward"] is not backward
    assert vars(IgnoresNoLabel)["forward"] is forward
    assert vars(IgnoresNoLabel)["backward"] is backward


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("strategy", [FSDPStrategy, ModelParallelStrategy])
def test_a_strategy_that_hides_gradients_is_refused(strategy):
    class Stands:
        pass

    trainer = Stands()
    trainer.strategy = strategy()
    with pytest.raises(UsageError, match=f"ShadowGradient: {strategy.__name__} gives no gradient of a micro-batch"):
        ShadowGradient().on_fit_start(trainer, Small())


def on_tensor_ranks(rank):
    model = LanguageModel(dataclasses.replace(LLAMA, vocab_size=64), optimizer=partial(torch.optim.SGD, lr=0.1))
    every_step(model, Every(), strategy=FSDP2Strategy(mesh=ParallelDims(tensor=2)), devices=2)


def test_ranks_that_share_rows_are_refused():
    with pytest.raises(Exception, match=r"ShadowGradient: mesh.tensor and mesh.context let ranks share rows"):
        processes.run(on_tensor_ranks)


def test_a_step_that_fetches_its_own_batches_is_refused():
    class Fetches(Small):
        def training_step(self, dataloader_iter):
            return self.loss_of(next(dataloader_iter)[0])

    with pytest.raises(UsageError, match=r"ShadowGradient: training_step takes dataloader_iter"):
        every_step(Fetches(4, 1), Every())


def test_the_language_model_is_compared_and_its_own_metrics_are_kept():
    ids = torch.arange(6 * 2 * 17).view(6, 2, 17) % 61
    data = [{"input_ids": row[:, :-1].contiguous(), "labels": row[:, 1:].contiguous()} for row in ids]
    make = lambda: LanguageModel(LLAMA, optimizer=partial(torch.optim.SGD, lr=0.1))  # noqa: E731
    plain, watched = (  # in bf16, so that a loss of the second run would be another one
        every_step(make(), *shadow, data=batches(data), max_steps=3, plugins=[BF16Mixed()])
        for shadow in ((), (Every(),))
    )
    assert watched.of("train/loss") == plain.of("train/loss")
    assert same(plain.weights, watched.weights)
    assert watched.of(COSINE) == pytest.approx([1.0] * 3, abs=0.01)


def test_values_that_code_records_again_are_dropped():
    buffer = MetricBuffer()
    buffer._every = 1
    buffer.record("a", 1.0)
    with buffer.discarding():
        buffer.record("a", 2.0)
        buffer.record("b", 2.0)
    assert buffer._current.values == {"a": 1.0}


def test_dropout_is_that_of_the_first_run():
    """Otherwise the cosines would be far from 1."""
    run = every_step(Decoding(), Every())
    assert run.of(COSINE) == pytest.approx([1.0] * 4)
