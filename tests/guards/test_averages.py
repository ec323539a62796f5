"""EMA and TailAverage: values by hand, training as without them, the weights back after every validation, resumes."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from checkpoints.saved import assert_same
from checkpoints.shards import of_file
from harness.models import Small
from harness.runs import On, trainer_with
from torch import nn
from torch.utils.data import DataLoader

from lightning_tricks._core.errors import UsageError
from lightning_tricks.callbacks import EMA, ExactResume, InitFrom, SafeCheckpoint, TailAverage
from lightning_tricks.checkpoints import AtomicCheckpointIO, load_weights
from lightning_tricks.checkpoints.load_weights import stream_weights
from lightning_tricks.guards.averages import AveragedWeights, Swap, decay_at
from lightning_tricks.precision import BF16True


class Counter(pl.LightningModule):
    """Its weight is the number of optimizer steps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.seen: dict[int, float] = {}  # the weight in validation, by step

    def training_step(self, batch, batch_idx):
        return -self.weight.sum()

    def validation_step(self, batch, batch_idx):
        self.seen[self.trainer.global_step] = self.weight[0].item()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Net(Small):
    """Dropout, batch norm, tied weights and a frozen parameter; what is seen in validation, test and predict."""

    def __init__(self) -> None:
        adamw = partial(torch.optim.AdamW, lr=0.05)
        super().__init__(4, 4, 4, dropout=0.1, batch_norm=True, tied=True, optimizer=adamw)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.seen: list[Any] = []
        self.in_validation: Any = lambda: None

    def forward(self, batch):
        return self.net(batch) * self.frozen

    def loss_of(self, batch):
        return (self(batch.float()) - batch.roll(1, 1)).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.seen.append(copy_of(self))
        self.log("val/loss", self(batch).pow(2).mean())
        self.in_validation()

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        self.seen.append(copy_of(self))


def copy_of(module):
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def data(count=24):
    rows = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(rows, batch_size=4)


def trainer_of(*callbacks, steps=10, plugin=None, **options):
    options = {"val_check_interval": 2, "num_sanity_val_steps": 1, "limit_val_batches": 1, **options}
    plugins = [AtomicCheckpointIO(), *([plugin()] if plugin else [])]
    return trainer_with(*callbacks, max_steps=steps, logger=False, plugins=plugins, **options)


def fit(module, *callbacks, ckpt_path=None, **options):
    trainer = trainer_of(*callbacks, **options)
    torch.manual_seed(1)
    trainer.fit(module, data(), data(), ckpt_path=ckpt_path)
    return trainer


def average_of(callback):
    """The first weight's average, term by term."""
    return {term: average[0].clone() for term, average in callback.terms.items()}


# ---- the values


def test_an_ema_moves_by_its_decay_after_each_step():
    module = Counter()
    fit(module, EMA(decay=0.5, warmup=False), steps=4, val_check_interval=1)
    # 0, then half of the way to 1, 2, 3, 4
    assert module.seen == {0: 0.0, 1: 0.5, 2: 1.25, 3: 2.125, 4: 3.0625}
    assert module.weight.tolist() == [4.0] * 3


def test_the_decay_grows_from_a_tenth_to_its_value():
    assert [decay_at(update, 0.999, True) for update in (0, 1, 8)] == [1 / 10, 2 / 11, 9 / 18]
    assert decay_at(8989, 0.999, True) < 0.999
    assert decay_at(8990, 0.999, True) == decay_at(0, 0.999, False) == 0.999
    module = Counter()
    fit(module, EMA(), steps=2, val_check_interval=1)
    assert module.seen[1] == pytest.approx(0.9)
    assert module.seen[2] == pytest.approx(0.9 * 2 / 11 + 2 * 9 / 11)


def test_a_tail_average_ends_as_the_mean_over_the_last_steps():
    module = Counter()
    fit(module, TailAverage(horizon_steps=4), steps=10, val_check_interval=1)
    # windows end at 2, 6 and 10; until 2 the mean since the start
    means = {0: 0, 1: 1, 2: 1.5, 5: 1.5, 6: 4.5, 7: 4.5, 8: 4.5, 10: 8.5}
    assert {step: module.seen[step] for step in means} == pytest.approx(means)


@pytest.mark.parametrize(
    ("max_steps", "means"),
    [
        (13, {8: 4.5, 9: 8, 10: 8, 13: 11.5}),  # the window of 7 to 10 ends at 9, then 13
        (11, {8: 4.5, 9: 4.5, 11: 9}),  # it would end at 7 or 11: it is one and a quarter
        (8, {8: 7.5}),
        (14, {8: 4.5, 10: 8.5, 14: 12.5}),
    ],
)
def test_the_windows_of_a_tail_average_end_with_the_run_where_its_end_moves(max_steps, means, tmp_path):
    average, other, module = TailAverage(horizon_steps=4), TailAverage(horizon_steps=4), Counter()
    fit(Counter(), average, SafeCheckpoint(tmp_path, every_n_train_steps=7), steps=10, val_check_interval=1)
    fit(module, other, steps=max_steps, val_check_interval=1, ckpt_path=tmp_path / "step=7.ckpt")
    assert {step: module.seen[step] for step in means} == pytest.approx(means)


def test_a_window_without_nan_does_not_hear_of_an_earlier_one():
    module = nn.Linear(2, 2)
    weights = AveragedWeights(module)
    average = weights.copies()
    average[0].fill_(torch.nan)
    weights.move(average, 1.0)
    assert torch.equal(average[0], module.weight)


@pytest.mark.parametrize(
    ("average", "mean", "rollback_first"),
    [(EMA(decay=0.5, warmup=False), 2.5, True), (TailAverage(horizon_steps=4), 3.0, False)],
)
def test_after_a_rollback_it_begins_anew_with_the_weights_that_came_back(average, mean, rollback_first):
    class Destroys(pl.Callback):
        """Its NaN enters the average at step 4; at step 6 the weights of step 2 come back."""

        def on_train_batch_end(self, trainer, pl_module, *_):
            if trainer.global_step == 4:
                pl_module.weight.data.fill_(torch.nan)
            if trainer.global_step == 6:
                pl_module.weight.data.fill_(2.0)
                average.after_rollback()

    callbacks = [Destroys(), average]
    fit(Counter(), *(callbacks if rollback_first else reversed(callbacks)), steps=7)
    first, *_ = average_of(average).values()
    assert first.tolist() == [mean] * 3  # of 2 and 3; in a tail average 2 counts until 3 is taken in


def test_the_average_of_bf16_weights_is_kept_in_fp32_and_moves():
    module = nn.Linear(8, 8).bfloat16()
    nn.init.ones_(module.weight)
    weights = AveragedWeights(module)
    average = weights.copies()
    nn.init.constant_(module.weight, 1.5)
    for _ in range(1000):
        weights.move(average, 0.001)
    assert average[0].dtype == torch.float32
    assert average[0][0, 0].item() == pytest.approx(1.5 - 0.5 * 0.999**1000, rel=1e-5)


# ---- training goes on as without it

PRECISIONS = pytest.mark.parametrize("plugin", [None, BF16True], ids=["fp32", "bf16"])
KINDS = {
    "ema": lambda: EMA(decay=0.9),
    "tail": lambda: TailAverage(horizon_steps=3),
    "only_saved": lambda: EMA(decay=0.9, validate=False),
    "blend": lambda: EMA(decay=0.9, blend=0.6),
}


@PRECISIONS
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_that_without_it_to_the_bit_and_validation_is_not(kind, plugin):
    plain, averaged = Net(), Net()
    fit(plain, plugin=plugin)
    numbers = torch.rand(4)
    trainer = fit(averaged, KINDS[kind](), plugin=plugin)
    assert averaged.losses == plain.losses
    assert same(copy_of(averaged), copy_of(plain))
    assert torch.equal(torch.rand(4), numbers)
    assert [same(a, b) for a, b in zip(averaged.seen[1:], plain.seen[1:], strict=True)] == [kind == "only_saved"] * 5
    name = "tail_average" if kind == "tail" else "ema"
    share = trainer.callback_metrics.get(f"val/{name}_share")
    assert share == {"only_saved": None, "blend": pytest.approx(0.6)}.get(kind, 1.0)


@PRECISIONS
@pytest.mark.parametrize("kind", ["ema", "blend"])
def test_a_validation_leaves_the_average_as_it_was_to_the_bit(kind, plugin):
    used, kept = KINDS[kind](), EMA(decay=0.9, validate=False)
    for ema in (used, kept):
        fit(Net(), ema, steps=5, plugin=plugin)
    assert all(torch.equal(a, b) for a, b in zip(used.terms["mean"], kept.terms["mean"], strict=True))


def test_what_is_averaged_are_trained_weights_and_running_statistics_under_all_of_their_names():
    weights = AveragedWeights(Net())
    assert sorted(weights.names) == [
        ["net.0.bias"], ["net.0.weight", "net.4.weight"], ["net.1.bias"], ["net.1.running_mean"],
        ["net.1.running_var"], ["net.1.weight"], ["net.4.bias"],
    ]  # fmt: skip


class Unfreezes(pl.callbacks.BaseFinetuning):
    """Trains the first layer from the second epoch on."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.1)


def test_weights_that_a_finetuning_unfreezes_are_averaged_from_then_on_and_after_a_resume(tmp_path):
    module, ema = Small(4, 8, 1), EMA(decay=0.5, warmup=False)
    before, weights = module.net[0].weight.detach().clone(), []
    note = On(on_train_batch_end=lambda *_: weights.append(module.net[0].weight.detach().clone()))
    train = {"steps": -1, "max_epochs": 2, "limit_train_batches": 2, "limit_val_batches": 0}
    fit(module, ema, Unfreezes(), note, SafeCheckpoint(tmp_path), **train)
    assert torch.equal(weights[1], before)  # frozen in the first epoch
    average = {name: ema.terms["mean"][index] for index, (name,) in enumerate(ema.weights.names)}
    assert average.keys() == dict(module.named_parameters()).keys()
    assert torch.equal(average["net.0.weight"], before.lerp(weights[2], 0.5).lerp(weights[3], 0.5))

    frozen, other = Small(4, 8, 1), EMA(decay=0.5, warmup=False)
    frozen.net[0].requires_grad_(False)
    trainer_of(other).validate(frozen, data(), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert {name for names in other.weights.names for name in names} == average.keys()


def test_test_predict_and_a_later_validation_use_the_average_and_leave_the_weights():
    module, ema = Net(), EMA(decay=0.9)
    trainer = fit(module, ema)
    before, average = copy_of(module), average_of(ema)["mean"]
    for run in (trainer.validate, trainer.test, trainer.predict):
        module.seen.clear()
        run(module, data(), **({} if run == trainer.predict else {"verbose": False}))
        assert all(torch.equal(seen["net.0.weight"], average) for seen in module.seen)
        assert module.seen
        assert same(copy_of(module), before)
        assert torch.equal(average_of(ema)["mean"], average)
    other = Net()
    trainer.validate(other, data(), verbose=False)  # has no average
    assert same(other.seen[0], copy_of(other))
    assert trainer.callback_metrics["val/ema_share"] == 0


@pytest.mark.parametrize(("kind", "error"), [("ema", RuntimeError), ("tail", KeyboardInterrupt), ("blend", IndexError)])
def test_the_weights_are_back_after_an_exception_in_validation(kind, error):
    module, callback = Net(), KINDS[kind]()

    def fail():
        if module.trainer.global_step == 4:
            raise error("in validation")

    module.in_validation = fail
    with pytest.raises((error, SystemExit)):
        fit(module, callback)
    plain = Net()
    fit(plain, steps=4)
    assert same(copy_of(module), copy_of(plain))
    unbroken = KINDS[kind]()
    fit(Net(), unbroken, steps=4)
    assert torch.equal(average_of(callback)["mean"], average_of(unbroken)["mean"])
    assert "save_checkpoint" not in vars(module.trainer)


def test_a_broken_device_does_not_hide_the_users_error(monkeypatch, recwarn):
    def broken(*args):
        raise RuntimeError("CUDA error: device-side assert triggered")

    def fail():
        if module.trainer.global_step == 4:
            monkeypatch.setattr(Swap, "leave", broken)
            raise IndexError("the user's own")

    module = Net()
    module.in_validation = fail
    with pytest.raises(IndexError, match="the user's own"):
        fit(module, EMA())
    assert "save_checkpoint" not in vars(module.trainer)
    assert any(str(w.message).startswith("EMA: the weights were not put back: RuntimeError") for w in recwarn)


# ---- checkpoints


@pytest.mark.parametrize("kind", ["ema", "tail", "blend"])
def test_a_checkpoint_holds_the_weights_and_the_average_beside_them_whenever_it_is_saved(kind, tmp_path):
    module, plain = Net(), Net()
    during = []

    def save():
        if module.trainer.global_step == 4:
            during.append(copy_of(module))
            module.trainer.save_checkpoint(tmp_path / "in_validation.ckpt")
            during.append(copy_of(module))

    module.in_validation = save
    fit(module, KINDS[kind](), SafeCheckpoint(tmp_path, every_n_train_steps=4), steps=8)
    fit(plain, steps=4)
    for name in ("in_validation.ckpt", "step=4.ckpt"):
        assert same(torch.load(tmp_path / name)["state_dict"], copy_of(plain))
        loaded = Net()
        average = "tail_average" if kind == "tail" else "ema"
        line = load_weights(loaded, tmp_path / name, average=average)
        assert f"10 of its 10 weights loaded, of their average {average}; left out: the optimizer's state" in line
        assert same(copy_of(loaded), during[0])
    assert same(*during)


@PRECISIONS
@pytest.mark.parametrize("kind", ["ema", "tail", "blend"])
def test_a_resumed_run_has_the_average_of_the_unbroken_one_to_the_bit(kind, plugin, tmp_path):
    unbroken, whole, saver = Net(), KINDS[kind](), SafeCheckpoint(tmp_path, every_n_train_steps=5)
    early = tmp_path / "early.ckpt"  # in front of the callbacks behind it
    saves = On(on_train_batch_end=lambda trainer, *_: trainer.global_step == 5 and trainer.save_checkpoint(early))
    fit(unbroken, saves, ExactResume(), whole, saver, plugin=plugin)
    one, other = (torch.load(tmp_path / name)["averages"] for name in ("early.ckpt", "step=5.ckpt"))
    assert_same(one, other)
    module, resumed = Net(), KINDS[kind]()
    fit(module, ExactResume(), resumed, ckpt_path=tmp_path / "step=5.ckpt", plugin=plugin)
    assert same(copy_of(module), copy_of(unbroken))
    assert resumed.progress() == whole.progress()
    for term, average in whole.terms.items():
        assert all(torch.equal(a, b) for a, b in zip(average, resumed.terms[term], strict=True)), term
    assert all(same(a, b) for a, b in zip(module.seen, unbroken.seen[-3:], strict=True))


def test_a_validation_of_a_checkpoint_uses_its_average(tmp_path):
    module, ema = Net(), EMA(decay=0.9)
    fit(module, ema, SafeCheckpoint(tmp_path))
    other = Net()
    trainer_of(EMA()).validate(other, data(), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert torch.equal(other.seen[0]["net.0.weight"], average_of(ema)["mean"])
    assert same(copy_of(other), copy_of(module))


def test_a_run_that_was_done_keeps_the_average_of_its_checkpoint(tmp_path):
    fit(Net(), EMA(decay=0.9), SafeCheckpoint(tmp_path), steps=2)
    trainer = fit(Net(), EMA(decay=0.9), ckpt_path=tmp_path / "last.ckpt", steps=2)
    trainer.save_checkpoint(tmp_path / "again.ckpt")
    assert_same(*(torch.load(tmp_path / name)["averages"] for name in ("last.ckpt", "again.ckpt")))


def test_a_new_run_may_begin_with_the_average(tmp_path):
    module, ema = Net(), EMA(decay=0.9)
    fit(module, ema, SafeCheckpoint(tmp_path))
    started = Net()
    fit(started, InitFrom(tmp_path / "last.ckpt", average="ema"), EMA(), steps=1, val_check_interval=1)
    expected = Net()
    load_weights(expected, tmp_path / "last.ckpt", "ema")
    fit(expected, steps=1)
    assert same(copy_of(started), copy_of(expected))
    assert started.losses == expected.losses


def test_a_checkpoint_without_an_average_begins_one_and_says_so(tmp_path):
    fit(Net(), SafeCheckpoint(tmp_path), steps=4)
    ema = EMA(decay=0.9)
    with pytest.warns(UserWarning, match=r"EMA: the checkpoint .*last.ckpt holds no average: it begins with the weigh"):
        fit(Net(), ema, ckpt_path=tmp_path / "last.ckpt", steps=6)
    assert ema._updates == 2
    with pytest.raises(UsageError, match=r"^average=ema: .*last.ckpt holds no such .*: it was saved without one$"):
        load_weights(Net(), tmp_path / "last.ckpt", average="ema")


@pytest.mark.parametrize("callback", [partial(EMA, decay=0.5, warmup=False), partial(TailAverage, horizon_steps=4)])
def test_a_blend_of_weights_and_average_is_what_validates_and_what_is_read(callback, tmp_path):
    module, blend = Counter(), 0.75
    trainer = fit(module, callback(blend=blend), SafeCheckpoint(tmp_path), steps=4, val_check_interval=1)
    averages = [0, 0.5, 1.25, 2.125, 3.0625] if callback.func is EMA else [0, 1, 1.5, 2, 2.5]
    expected = {step: 0.25 * step + blend * average for step, average in enumerate(averages)}
    assert module.seen == expected
    name = trainer.callbacks[0].NAME
    assert trainer.callback_metrics[f"val/{name}_share"] == blend
    last = tmp_path / "last.ckpt"
    checkpoint = torch.load(last)
    assert checkpoint["state_dict"]["weight"].tolist() == module.weight.tolist() == [4.0] * 3
    assert checkpoint["averages"][name]["weights"]["mean"]["weight"][0] == averages[4]  # whatever the blend
    loaded = Counter()
    load_weights(loaded, last, average=name)
    folder = of_file(last, tmp_path / "folder.ckpt", module)
    streamed = [stream_weights(path, name).read("weight") for path in (last, folder)]
    assert all(found.tolist() == [expected[4]] * 3 for found in (loaded.weight, *streamed))

    later, resumed, alone = Counter(), callback(blend=0.5), callback()  # the recipe may change it, also after the run
    trainer_of(callback(blend=0.5)).validate(later, data(), ckpt_path=last, verbose=False)
    assert [*later.seen.values()] == [0.5 * 4 + 0.5 * averages[4]]
    for other in (resumed, alone):
        fit(Counter(), other, ckpt_path=last, steps=6)
    assert torch.equal(average_of(resumed)["mean"], average_of(alone)["mean"])


# ---- refusals


@pytest.mark.parametrize("blend", [0.0, 1.5, float("nan")])
def test_a_blend_that_is_no_share_is_refused(blend):
    with pytest.raises(UsageError, match=rf"^TailAverage: blend={blend}: give a share of the average above 0, at mo"):
        TailAverage(blend=blend)


def test_two_that_would_have_one_name_or_both_validate_are_refused():
    with pytest.raises(UsageError, match=r"^EMA: the Trainer has two, whose averages would have one name: remove one$"):
        fit(Net(), EMA(), EMA(decay=0.9, validate=False))
    with pytest.raises(UsageError, match=r"^EMA: validate=True, and TailAverage would validate with its average too"):
        fit(Net(), EMA(), TailAverage())
    fit(Net(), EMA(), TailAverage(validate=False), steps=2)


def test_a_complex_weight_is_refused_in_one_line():
    module = Counter()
    module.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(UsageError, match=r"^EMA: phase is complex: hold its two parts in real parameters$"):
        fit(module, EMA())


@pytest.mark.parametrize("name", ["DeepSpeedStrategy", "FSDPStrategy", "ModelParallelStrategy"])
def test_a_strategy_with_weights_in_another_form_is_refused(name):
    strategy = type(f"My{name}", (type(name, (), {}),), {})()
    with pytest.raises(UsageError, match=rf"^EMA: My{name} keeps weights in a form that cannot be averaged and saved"):
        EMA().setup(SimpleNamespace(strategy=strategy, callbacks=[]), Net(), "fit")


def test_an_average_of_other_weights_is_refused_by_name(tmp_path):
    fit(Net(), EMA(), SafeCheckpoint(tmp_path), steps=2)
    checkpoint = torch.load(tmp_path / "last.ckpt")
    checkpoint["averages"]["ema"]["weights"]["mean"]["net.4.bias"] = torch.ones(2)
    torch.save(checkpoint, tmp_path / "other.ckpt")
    line = rf"^ckpt_path={tmp_path}/other.ckpt: it should have an average of 'net.4.bias' \(4,\), .* has one of shape"
    with pytest.raises(UsageError, match=line):
        fit(Net(), EMA(), ckpt_path=tmp_path / "other.ckpt", steps=4)
    with pytest.raises(UsageError, match=r"^average=emma: .* holds no such average of the weights: it holds ema$"):
        load_weights(Net(), tmp_path / "last.ckpt", average="emma")
