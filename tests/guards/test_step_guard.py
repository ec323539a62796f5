"""StepGuard: exactly the bad step leaves weights and optimizer as they are, and its line names it and its data."""

import math
import warnings
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness.offloaded import on_device
from harness.processes import run
from harness.runs import On, Run, decoding, fit, same, same_training, trainer_with
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_tricks import BF16True, FP16Mixed, FSDP2Strategy, GradientClippingMixin, SpikeRollback, StepGuard
from lightning_tricks._core.errors import UsageError
from lightning_tricks.guards.step_guard import skipping
from lightning_tricks.optim import ComposedOptimizer, Muon

STEPS, BAD = 12, 7
EARLY = {"window_steps": 8, "active_after_steps": 4}
OPTIMIZERS: dict[str, Any] = {
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=0.05, fused=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.05, foreach=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, fused=True),
}


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.randn(count, 4, 8, generator=generator))


class Line(pl.LightningModule):
    """Fits a line; the batch of step BAD is spoilt: its data, its loss or its gradients."""

    def __init__(
        self, spoilt: str, optimizer: str = "fused AdamW", bad_rank: int | None = None, bad: Any = (BAD,)
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.spoilt, self.optimizer, self.bad_rank, self.bad = spoilt, optimizer, bad_rank, bad

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        here = self.global_step in self.bad and self.bad_rank in (None, self.global_rank)
        x = batch * math.nan if here and self.spoilt == "NaN batch" else batch
        loss = loss_of(self.net, x)
        if here and self.spoilt == "Inf loss":
            return loss * math.inf
        if here and self.spoilt == "loss x 100":
            return loss + 99 * loss.detach()
        if here and self.spoilt == "gradient x 1e4":
            loss = loss.detach() + 1e4 * (loss - loss.detach())
        if here and self.spoilt == "Inf gradient":
            loss.register_hook(lambda gradient: gradient * math.inf)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())

    def train_dataloader(self) -> DataLoader:
        return DataLoader(batches(STEPS * 4), batch_size=None)


class Clipping(GradientClippingMixin, Line):
    pass


def loss_of(net: nn.Module, x: Tensor) -> Tensor:
    return (net(x) - x.sum(1, keepdim=True)).square().mean()


def without_the_step(
    optimizer: str, accumulate: int = 1, clip: float | None = None, bad_step: int = BAD
) -> list[Tensor]:
    """The weights of a plain loop that never makes the update of one step."""
    module = Line("", optimizer)
    stepper = module.configure_optimizers()
    data = iter(batches(STEPS * 4))
    for step in range(STEPS):
        stepper.zero_grad()
        for _ in range(accumulate):
            (loss_of(module.net, next(data)) / accumulate).backward()
        if clip:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        if step != bad_step:
            stepper.step()
    return [parameter.detach() for parameter in module.parameters()]


def guarded(model: pl.LightningModule, *others: Any, **options: Any) -> tuple[Run, list[str]]:
    """A run under StepGuard, and its lines."""
    guard = StepGuard(**{**EARLY, **{k: options.pop(k) for k in list(options) if hasattr(StepGuard(), k)}})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fit(model, *others, guard, **{"max_steps": STEPS, **options})
    return result, [str(w.message) for w in caught if "StepGuard" in str(w.message)]


@pytest.mark.parametrize(
    ("spoilt", "optimizer", "bad"),
    [
        *(("NaN batch", name, bad) for name in OPTIMIZERS for bad in (0, BAD)),
        ("Inf loss", "fused AdamW", BAD),
        ("gradient x 1e4", "momentum", BAD),
    ],
)
def test_the_bad_step_leaves_the_weights_of_a_run_without_its_update(spoilt, optimizer, bad):
    result, (line,) = guarded(Line(spoilt, optimizer, bad=[bad]))
    assert same(result.weights, without_the_step(optimizer, bad_step=bad))
    assert line.startswith(f"StepGuard: step {bad} is skipped: ")
    assert line.endswith(f"; batch {bad} of epoch 0")
    assert result.of("guard/skipped_steps") == [step >= bad for step in range(1, STEPS, 2)]


@pytest.mark.parametrize("module", [Line, Clipping])
def test_accumulated_and_clipped_steps_are_judged_by_the_norm_before_the_clip(module):
    result, lines = guarded(module("gradient x 1e4"), accumulate_grad_batches=4, gradient_clip_val=0.5)
    assert same(result.weights, without_the_step("fused AdamW", 4, 0.5))
    assert "gradient norm" in lines[0]
    assert "loss" not in lines[0]
    assert len(lines) == 1


def test_a_line_names_values_and_limits():
    _, lines = guarded(Line("gradient x 1e4"))
    norm, limit = (float(word) for word in lines[0].partition("norm ")[2].split(";")[0].split(" above "))
    assert norm > 1e3 > limit > 0
    _, lines = guarded(Line("NaN batch"))
    assert "loss not finite and gradient norm not finite;" in lines[0]


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}])
def test_a_healthy_run_is_unchanged(options):
    assert same_training(decoding(StepGuard(**EARLY), **options), decoding(**options))


def test_without_logging_it_skips_all_the_same():
    result, lines = guarded(Line("NaN batch"), log_every_n_steps=0)
    assert same(result.weights, without_the_step("fused AdamW"))
    assert lines == []


def test_the_module_and_the_optimizer_keep_nothing_of_it():
    model = Line("NaN batch")
    result, _ = guarded(model)
    assert "configure_gradient_clipping" not in vars(model)
    assert not {"found_inf", "grad_scale"} & vars(result.trainer.optimizers[0]).keys()


def nan_at(*steps: int) -> Line:
    return Line("NaN batch", bad=steps)


def test_after_so_many_in_a_row_it_stops_and_names_them():
    with pytest.raises(
        UsageError,
        match=r"^StepGuard.max_skipped_steps=3: all steps from 2 to 5 were skipped, the last one for its loss not "
        r"finite and gradient norm not finite; batch 2 of epoch 0 to batch 5 of epoch 0\. The weights are those of "
        r"step 2: resume from an older checkpoint or start anew, with a lower lr, ",
    ):
        guarded(nan_at(*range(2, 99)), max_skipped_steps=3, log_every_n_steps=3)


@pytest.mark.parametrize("again", [[], [9]], ids=["accepted", "skipped at the end"])
def test_it_does_not_call_the_weights_those_of_a_step_after_which_others_were_accepted(again):
    with pytest.raises(
        UsageError,
        match=r"all steps from 2 to 4 were skipped, .*\. Later steps were accepted, so the weights are newer:",
    ):
        guarded(nan_at(2, 3, 4, *again), max_skipped_steps=3, log_every_n_steps=10)


def test_two_skipped_steps_that_are_not_in_a_row_do_not_stop_it():
    _, lines = guarded(nan_at(5, 6, 8, 9), max_skipped_steps=3)
    assert [line.partition(" is")[0] for line in lines] == [
        "StepGuard: step 5", "StepGuard: step 6", "StepGuard: step 8", "StepGuard: 1 more step skipped up to step 9"
    ]  # fmt: skip


def test_steps_after_the_first_one_of_an_interval_are_counted_in_one_line():
    _, lines = guarded(nan_at(*range(2, 9)), log_every_n_steps=10)
    assert [line.partition(" is")[0] for line in lines] == [
        "StepGuard: step 2", "StepGuard: 6 more steps skipped up to step 9"
    ]  # fmt: skip


def test_after_a_rollback_it_counts_and_names_only_later_steps():
    guard = StepGuard(**EARLY, max_skipped_steps=3)
    back = On(on_train_batch_start=lambda trainer, *_: guard.after_rollback() if trainer.global_step == 5 else None)
    with pytest.raises(UsageError, match=r"all steps from 5 to 9 were skipped, .*; batch 5 of epoch 0 to batch 9 of"):
        fit(nan_at(*range(2, 99)), guard, back, max_steps=STEPS, log_every_n_steps=5)


class ByHand(pl.LightningModule):
    """Two optimizers with a network each, in manual optimization; for the second one a batch is NaN."""

    def __init__(self, make: Any = lambda: nn.Linear(8, 1)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.one, self.two = make(), make()

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for index, (net, optimizer) in enumerate(zip((self.one, self.two), self.optimizers(), strict=True)):
            loss = loss_of(net, batch * (math.nan if index and batch_idx == BAD else 1.0))
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [OPTIMIZERS["fused AdamW"](net.parameters()) for net in (self.one, self.two)]

    train_dataloader = Line.train_dataloader


def test_by_hand_each_optimizer_is_judged_by_its_own_loss():
    result, (line,) = guarded(ByHand(), max_steps=2 * STEPS)
    assert line.startswith(f"StepGuard: step {BAD} is skipped: loss not finite")
    assert result.of("guard/skipped_steps")[-1] == 1
    reference = ByHand()
    optimizers = reference.configure_optimizers()
    for step, batch in enumerate(batches(STEPS)):
        for index, (net, optimizer) in enumerate(zip((reference.one, reference.two), optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            if not (index and step == BAD):
                optimizer.step()
    assert same(result.weights, [parameter.detach() for parameter in reference.parameters()])


class Critic(ByHand):
    """The first optimizer makes three steps in each batch, as a critic does; one loss among them is NaN."""

    def __init__(self, bad: int) -> None:
        super().__init__()
        self.bad = bad

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer, _ = self.optimizers()
        for number in range(3):
            loss = loss_of(self.one, batch) * (math.nan if (batch_idx, number) == (BAD, self.bad) else 1.0)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()


@pytest.mark.parametrize("bad", [0, 2])
def test_each_of_several_steps_of_an_optimizer_in_a_batch_counts_once(bad):
    result, lines = guarded(Critic(bad), max_skipped_steps=2, max_steps=3 * STEPS)
    assert [line.partition("; ")[0] for line in lines] == [
        f"StepGuard: step {BAD} is skipped: loss not finite and gradient norm not finite"
    ]
    assert result.of("guard/skipped_steps")[-1] == 1


@pytest.mark.parametrize("plugin", [BF16True, lambda: FP16Mixed(init_scale=1.0)], ids=["BF16True", "FP16Mixed"])
@pytest.mark.parametrize("optimizer", ["fused AdamW", "momentum"])
def test_under_other_precisions_the_bad_step_changes_no_weight(plugin, optimizer):
    seen: list[list[Tensor]] = []
    weights = On(
        on_train_batch_end=lambda _, module, *__: seen.append([own.detach().clone() for own in module.parameters()])
    )
    _, lines = guarded(Line("gradient x 1e4", optimizer), weights, plugins=[plugin()])
    assert len(lines) == 1
    changed = [not same(before, after) for before, after in pairwise(seen)]
    assert changed == [step != BAD for step in range(1, STEPS)]


@pytest.mark.parametrize("precision", ["32-true", "16-true"])
def test_a_gradient_that_is_not_finite_is_skipped_where_no_scaler_skips_it(precision):
    result, lines = guarded(Line("Inf gradient", "momentum"), precision=precision)
    assert all(weight.isfinite().all() for weight in result.weights)
    assert [line.partition(";")[0] for line in lines] == [f"StepGuard: step {BAD} is skipped: gradient norm not finite"]


class Normed(Line):
    """With running statistics, of the batch alone: a bad batch must not stay in them, nor change another rank's."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.norm = nn.BatchNorm1d(8, affine=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.norm(batch * (math.nan if self.global_step == BAD and self.spoilt and self.global_rank == 0 else 1.0))
        return super().training_step(batch, batch_idx)


def train_as_rank(rank: int, spoilt: str, strategy: Any) -> None:
    expected, model = without_the_step("fused AdamW"), Normed(spoilt, bad_rank=1)
    statistics = nn.BatchNorm1d(8, affine=False)
    for step, batch in enumerate(batches(STEPS)):
        if step != BAD:
            statistics(batch)
    strategy = FSDP2Strategy() if strategy == "fsdp2" else strategy
    result, lines = guarded(model, accelerator="cpu", devices=2, strategy=strategy, use_distributed_sampler=False)
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    # both ranks have the same batches, so their mean gradient is that of one process up to rounding
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(whole, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.norm.buffers(), statistics.buffers(), strict=True))
    assert result.of("guard/skipped_steps") == [0, 0, 0, 1, 1, 1]
    assert [line.split("; ")[0].endswith(" on rank 1") for line in lines] == ([True] if rank == 0 else [])


def train_as_ranks(rank: int) -> None:
    for spoilt, strategy in (("NaN batch", "ddp"), ("NaN batch", "fsdp2"), ("loss x 100", "fsdp2")):
        train_as_rank(rank, spoilt, strategy)


@pytest.mark.long
def test_a_step_that_one_rank_rejects_is_skipped_by_all():
    run(train_as_ranks)


ON_THE_HOST: dict[str, Any] = {
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "Muon": lambda params: Muon(params, lr=0.1),
    "fused AdamW of several": lambda params: ComposedOptimizer(
        [{"params": params}], {"adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1, fused=True)}, default="adamw"
    ),
}


@pytest.mark.parametrize("optimizer", ON_THE_HOST)
@pytest.mark.parametrize("skip", [0.0, 1.0])
def test_a_verdict_on_the_device_decides_about_gradients_on_the_host(optimizer, skip):
    """As under FSDP2 with cpu_offload."""
    weight = nn.Parameter(torch.ones(4, 4))
    weight.grad = torch.ones(4, 4)
    made = ON_THE_HOST[optimizer]([weight])
    with skipping(made, None, on_device(skip)):
        made.step()
    assert bool((weight == 1).all()) == bool(skip)
    assert bool(weight.isfinite().all())


def window_state(guard: StepGuard) -> Any:
    return guard.state_dict()["ranks"][0][0]


def test_its_windows_and_counts_go_on_from_a_checkpoint():
    whole = StepGuard(**EARLY)
    guarded_steps(whole, STEPS)
    first, second = StepGuard(**EARLY), StepGuard(**EARLY)
    trainer, model = guarded_steps(first, 9)
    second.load_state_dict(loaded := first.state_dict())
    assert second.state_dict() == loaded  # saved again before it has trained
    model.train_dataloader = lambda: DataLoader(batches(STEPS)[9:], batch_size=None)
    optimizer = trainer.optimizers[0]
    model.configure_optimizers = lambda: optimizer
    fit(model, second, On(setup=lambda *_, **__: second.load_state_dict(first.state_dict())), max_steps=STEPS - 9)
    expected, found = window_state(whole), window_state(second)
    assert torch.equal(expected.pop("values"), found.pop("values"))
    assert expected.pop("filled").tolist() == found.pop("filled").tolist() == [1] * 7 + [0]  # the eighth was skipped
    assert torch.equal(expected.pop("limits"), found.pop("limits"))
    assert expected == found == {"steps": STEPS, "counts": [0.0, 1.0]}


def test_a_run_that_begins_after_a_checkpoint_was_validated_does_not_go_on_with_its_state(tmp_path):
    guards = [StepGuard(**EARLY), SpikeRollback()]
    fit(Line(""), *guards).trainer.save_checkpoint(tmp_path / "first.ckpt")
    trainer, module = trainer_with(*guards, max_steps=2), Line("")
    trainer.validate(module, DataLoader(batches(1), batch_size=None), tmp_path / "first.ckpt", verbose=False)
    trainer.fit(module)
    assert window_state(guards[0])["steps"] == 2
    assert guards[1].state_dict()["detector"]["window"]["steps"] == 2


def test_a_state_that_is_loaded_after_the_fit_has_started_counts_too():
    """As strategies do that restore a checkpoint after their setup, FSDP2 among them."""
    first, second = StepGuard(**EARLY), StepGuard(**EARLY)
    guarded_steps(first, 9)
    late = On(on_fit_start=lambda *_: second.load_state_dict(first.state_dict()))
    fit(Line(""), second, late, max_steps=1)
    assert window_state(second)["steps"] == window_state(first)["steps"] + 1
    assert window_state(second)["counts"] == [0.0, 1.0]


def guarded_steps(guard: StepGuard, steps: int) -> tuple[pl.Trainer, Line]:
    model = Line("gradient x 1e4")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fit(model, guard, max_steps=steps).trainer, model


def test_runs_whose_steps_cannot_be_judged_are_refused():
    class LBFGS(Line):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(UsageError, match=r"^StepGuard: LBFGS computes several losses a step"):
        fit(LBFGS(""), StepGuard())
    lightnings = pl.plugins.MixedPrecision("16-mixed", "cpu")
    with pytest.raises(UsageError, match=r"^StepGuard: fused AdamW under fp16 .* set plugins to FP16Mixed"):
        fit(Line(""), StepGuard(), plugins=[lightnings])
    lightnings = {"__module__": "lightning.pytorch.strategies"}
    trainer: Any = SimpleNamespace(strategy=type("DeepSpeedStrategy", (), lightnings)(), optimizers=[])
    with pytest.raises(UsageError, match=r"^StepGuard: DeepSpeedStrategy leaves clip .*: take DeepSpeedZeROStrategy"):
        StepGuard().on_fit_start(trainer, Line(""))
    _, lines = guarded(Line("gradient x 1e4", "AdamW"), plugins=[pl.plugins.MixedPrecision("16-mixed", "cpu")])
    assert lines == []  # the overflow is the scaler's
