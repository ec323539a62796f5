"""ScheduleFree: the average is evaluated and saved, training is the library's by hand, a resume goes on to the bit."""

import copy
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from foreign import CausalLM, rows
from harness import processes, runs
from harness.models import Small
from harness.runs import On, same, weights_of
from schedulefree import AdamWScheduleFree, RAdamScheduleFree, SGDScheduleFree
from torch import nn
from torch.utils.data import DataLoader

from lightning_tricks import LanguageModel, Llama, ParamRule, WarmupConstant, WarmupCosine
from lightning_tricks._core.errors import UsageError
from lightning_tricks.callbacks import EMA, SafeCheckpoint, ScheduleFree, StepGuard
from lightning_tricks.checkpoints import AtomicCheckpointIO, load_weights, open_checkpoint
from lightning_tricks.guards.step_guard import skipping
from lightning_tricks.mixins import OptimizerMixin
from lightning_tricks.optim import ComposedOptimizer, Muon
from lightning_tricks.optim.schedule_free import TRAINED
from lightning_tricks.parallel.shard import drop_gathered
from lightning_tricks.precision import BF16True
from lightning_tricks.strategies import FSDP2Strategy

OPTIMIZERS = {
    "adamw": lambda params: AdamWScheduleFree(params, lr=0.05, warmup_steps=3, weight_decay=0.1),
    "sgd": lambda params: SGDScheduleFree(params, lr=0.2),
    "radam": lambda params: RAdamScheduleFree(params, lr=0.1),
}


def adamw(params: Any) -> Any:
    return OPTIMIZERS["adamw"](params)


class Net(Small):
    """Two layers; its losses, the weights that each validation sees, and whether each step trains what it should."""

    def __init__(self, make: Any = adamw) -> None:
        super().__init__(4, 8, 4, optimizer=make)
        self.seen: dict[int, list[torch.Tensor]] = {}
        self.in_validation: Any = lambda module: None

    def loss_of(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.net(batch) - batch.roll(1, 1)).pow(2).mean()

    def training_step(self, batch, batch_idx):
        assert self.trainer.optimizers[0].param_groups[-1]["train_mode"]
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.seen[self.trainer.global_step] = weights_of(self)
        self.in_validation(self)

    test_step = predict_step = validation_step


ROWS = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))


def data(batches: torch.Tensor = ROWS) -> DataLoader:
    return DataLoader(batches, batch_size=4)


def fit(module: Any, *callbacks: Any, steps: int = 12, ckpt_path: Any = None, train: Any = None, **options: Any) -> Any:
    options = {"val_check_interval": 2, "num_sanity_val_steps": 1, "limit_val_batches": 1, "plugins": [], **options}
    options = {"max_steps": steps, "logger": False, "ckpt_path": ckpt_path, **options}
    return runs.fit(module, *callbacks, data=train or data(), val=data(), **options).trainer


def by_hand(make: Any = adamw, steps: int = 12, micro: int = 1) -> tuple[list[float], dict[int, list[torch.Tensor]]]:
    """The library called by hand: the losses, and the average after each step, of a copy of model and optimizer."""
    module, losses, averages = Net(make), [], {}
    optimizer = make(module.parameters())
    averages[0] = weights_of(module)
    optimizer.train()
    batches = [batch for _ in range(micro * steps) for batch in data()]
    for step in range(steps):
        for batch in batches[step * micro : (step + 1) * micro]:
            loss = module.loss_of(batch)
            losses.append(loss.item())
            (loss / micro).backward()
        optimizer.step()
        optimizer.zero_grad()
        evaluated, switched = copy.deepcopy((module, optimizer))
        switched.eval()
        averages[step + 1] = weights_of(evaluated)
    return losses, averages


# ---- the weights


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_losses_and_averages_are_those_of_the_library_by_hand_whatever_is_validated(kind):
    losses, averages = by_hand(OPTIMIZERS[kind])
    for options in ({}, {"val_check_interval": 3}, {"limit_val_batches": 0}):
        module = Net(OPTIMIZERS[kind])
        trainer = fit(module, ScheduleFree(), **options)
        assert module.losses == losses
        assert all(same(seen, averages[step]) for step, seen in module.seen.items())
        assert same(weights_of(module), averages[12]), "after the fit the module is the average"
        assert "save_checkpoint" not in vars(trainer)
    assert not module.seen
    module = Net(OPTIMIZERS[kind])
    fit(module, ScheduleFree())
    assert sorted(module.seen) == [0, 2, 4, 6, 8, 10, 12]


def test_a_validation_within_an_accumulation_window_changes_nothing():
    losses, averages = by_hand(steps=8, micro=2)
    module = Net()
    fit(module, ScheduleFree(), steps=8, accumulate_grad_batches=2, val_check_interval=3)
    assert module.losses == losses
    assert same(weights_of(module), averages[8])
    assert same(module.seen[5], averages[5])  # after micro-batch 11, with the gradient of half a step


def test_a_parameter_without_a_gradient_gets_no_state():
    """The package's own switches leave an empty one, which a checkpoint of shards would miss."""

    class Unused(Net):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.ones(2))

    module = Unused()
    trainer = fit(module, ScheduleFree(), steps=4)
    assert module.unused not in trainer.optimizers[0].state
    assert module.unused.tolist() == [1.0, 1.0]


# ---- checkpoints


def saves(folder: Path) -> On:
    """Saves by hand, in the middle of a step, in a validation and after the last step."""

    def in_step(trainer: Any, *_: Any) -> None:
        if trainer.global_step == 5:
            trainer.save_checkpoint(folder / "step=5.ckpt")

    return On(
        on_before_zero_grad=in_step,
        on_validation_start=lambda trainer, _: trainer.save_checkpoint(
            folder / f"validation={trainer.global_step}.ckpt"
        ),
        on_train_end=lambda trainer, _: trainer.save_checkpoint(folder / "end.ckpt"),
    )


def test_every_checkpoint_holds_the_average_and_a_resume_is_the_unbroken_run_to_the_bit(tmp_path):
    losses, averages = by_hand()
    weights_only = pl.callbacks.ModelCheckpoint(
        tmp_path / "classic", filename="{step}", every_n_train_steps=3, save_top_k=-1, save_weights_only=True
    )
    savers = [SafeCheckpoint(tmp_path / "safe", every_n_train_steps=3, keep_last=9), weights_only]
    background = SafeCheckpoint(tmp_path / "background", every_n_train_steps=3, keep_last=9, asynchronous=True)
    for callbacks in ([background, ScheduleFree()], [saves(tmp_path), ScheduleFree(), *savers]):
        module = Net()
        trainer = fit(module, *callbacks, plugins=[AtomicCheckpointIO()])
        assert module.losses == losses
        assert same(weights_of(module), averages[12])
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    end = torch.load(tmp_path / "end.ckpt", weights_only=True)
    found = dict(places(tmp_path))
    assert len(found) == 4 + 4 + 4 + 7 + 3
    for path, step in found.items():
        saved = torch.load(path, weights_only=True)
        assert same(list(saved["state_dict"].values()), averages[step]), path
    for name in ("safe/step=3.ckpt", "background/step=9.ckpt", "step=5.ckpt", "validation=4.ckpt", "validation=8.ckpt"):
        module, step = Net(), found[tmp_path / name]
        trainer = fit(module, ScheduleFree(), ckpt_path=tmp_path / name, train=data_from(step))
        assert module.losses == losses[step:], name
        assert all(same(seen, averages[step]) for step, seen in module.seen.items()), name
        state = trainer.optimizers[0].state_dict()
        assert str(state) == str(end["optimizer_states"][0]), name
    plain = Net()
    load_weights(plain, tmp_path / "safe/step=9.ckpt")
    assert same(weights_of(plain), averages[9])


def places(folder: Path) -> list[tuple[Path, int]]:
    """Each checkpoint, and its step."""
    named = [path for path in folder.rglob("*.ckpt") if not path.is_symlink()]
    return [(path, int(path.stem.split("=")[1]) if "=" in path.stem else 12) for path in named]


def data_from(step: int) -> Any:
    """What the loader of a resumed run gives: torch's own begins anew."""
    return DataLoader((list(data()) * 4)[step:], batch_size=None)


def test_a_checkpoint_of_the_library_by_hand_and_one_of_a_run_without_us_go_on(tmp_path):
    _, averages = by_hand()

    def after_batch(trainer: Any, *_: Any) -> None:
        if trainer.global_step in (4, 6):
            if trainer.global_step == 6:
                trainer.optimizers[0].eval()
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")
            trainer.optimizers[0].train()

    # what the library's README asks for
    hand = On(on_train_start=lambda trainer, _: trainer.optimizers[0].train(), on_train_batch_end=after_batch)
    fit(Net(), hand, limit_val_batches=0, steps=7)
    for step in (4, 6):  # saved in train mode; in eval mode, from which the weights that are trained come back rounded
        module = Net()
        fit(module, ScheduleFree(), ckpt_path=tmp_path / f"{step}.ckpt", train=data_from(step))
        assert step == 6 or same(weights_of(module), averages[12])
        torch.testing.assert_close(weights_of(module), averages[12], rtol=1e-4, atol=1e-6)


def test_after_an_exception_the_module_is_the_average_and_the_trainer_has_its_own_save(tmp_path):
    _, averages = by_hand()

    def fails(trainer: Any, *_: Any) -> None:
        if trainer.global_step == 5:
            raise RuntimeError("power cut")

    for saves_first in (True, False):
        folder = tmp_path / str(saves_first)
        module, callbacks = Net(), [ScheduleFree(), pl.callbacks.OnExceptionCheckpoint(folder)]
        with pytest.raises(RuntimeError, match="power cut"):
            fit(module, On(on_train_batch_end=fails), *(reversed(callbacks) if saves_first else callbacks))
        assert same(weights_of(module), averages[5])
        saved = torch.load(folder / "on_exception.ckpt", weights_only=True)
        assert same(list(saved["state_dict"].values()), averages[5])
    module = Net()
    module.in_validation = lambda module: 1 / 0 if module.trainer.global_step == 4 else None
    with pytest.raises(ZeroDivisionError):
        fit(module, ScheduleFree())
    assert same(weights_of(module), averages[4])


# ---- beside other guards


def test_a_step_that_is_skipped_is_as_if_it_had_not_been(tmp_path):
    losses, averages = by_hand(steps=11)
    batches = list(data()) * 4
    spoilt = [*batches[:5], torch.full((4, 4), torch.nan), *batches[5:]]
    module, guard, saver = Net(), StepGuard(), SafeCheckpoint(tmp_path, every_n_train_steps=1, keep_last=20)
    trainer = fit(module, guard, ScheduleFree(), saver, train=DataLoader(spoilt, batch_size=None))
    assert [loss for loss in module.losses if loss == loss] == losses
    assert same(weights_of(module), averages[11])
    assert trainer.optimizers[0].param_groups[0]["k"] == 11
    after = Net()
    fit(after, ScheduleFree(), ckpt_path=tmp_path / "step=6.ckpt", train=DataLoader(spoilt[6:], batch_size=None))
    assert same(weights_of(after), averages[11])


def test_of_two_steps_in_a_batch_only_the_skipped_one_is_undone():
    weight = nn.Parameter(torch.ones(2))
    optimizer = AdamWScheduleFree([weight], lr=0.1)
    optimizer.train()
    with ExitStack() as batch:  # what StepGuard replaces ends with the batch
        for skip in (1.0, 0.0):
            weight.grad = torch.ones(2)
            batch.enter_context(skipping(optimizer, None, torch.tensor(skip)))
            optimizer.step()
    assert optimizer.param_groups[0]["k"] == 1


def test_a_part_of_a_composed_optimizer_is_exchanged_alone(tmp_path):
    class Composed(Net):
        def configure_optimizers(self):
            matrices, rest = [self.net[0].weight, self.net[2].weight], [self.net[0].bias, self.net[2].bias]
            groups = [{"params": matrices, "optimizer": "muon"}, {"params": rest, "optimizer": "free"}]
            return ComposedOptimizer(groups, {"muon": lambda own: Muon(own, lr=0.02), "free": adamw})

    module, saver = Composed(), SafeCheckpoint(tmp_path, every_n_train_steps=4)
    trainer = fit(module, ScheduleFree(), saver, steps=8, plugins=[AtomicCheckpointIO()])
    state = trainer.optimizers[0].state
    assert [TRAINED in state[parameter] for parameter in module.parameters()] == [False, True, False, True]
    resumed = Composed()
    fit(resumed, ScheduleFree(), steps=8, ckpt_path=tmp_path / "step=4.ckpt", train=data_from(4))
    assert resumed.losses == module.losses[4:]
    assert same(weights_of(resumed), weights_of(module))


# ---- with our modules


DECODER = Llama(vocab_size=32, d_model=16, n_layers=1, n_heads=2, max_seq_len=8)
DRAWN = torch.randint(0, 32, (6, 2, 2, 8), generator=torch.Generator().manual_seed(2))
TOKENS = [{"input_ids": inputs, "labels": labels} for inputs, labels in DRAWN]


def language_model(steps: int = 4, callbacks: tuple[Any, ...] = (), **options: Any) -> Any:
    torch.manual_seed(0)
    module = LanguageModel(DECODER, **{"optimizer": lambda groups: AdamWScheduleFree(groups, lr=1e-2), **options})
    loader = DataLoader(TOKENS, batch_size=None)
    return fit(module, *callbacks, steps=steps, train=loader, limit_val_batches=0)


def test_a_language_model_brings_it_along_once_and_takes_a_warmup_from_the_schedule():
    trainer = language_model(schedule=WarmupConstant(warmup_steps=2))
    given = language_model(
        schedule=None, optimizer=lambda g: AdamWScheduleFree(g, lr=1e-2, warmup_steps=2), callbacks=(ScheduleFree(),)
    )
    for one in (trainer, given):
        assert sum(isinstance(callback, ScheduleFree) for callback in one.callbacks) == 1
    torch.testing.assert_close(*(weights_of(one.lightning_module) for one in (trainer, given)), rtol=1e-6, atol=1e-8)
    plain = language_model(optimizer=None)
    assert not any(isinstance(callback, ScheduleFree) for callback in plain.callbacks)


class Mixed(OptimizerMixin, Net):
    pass


def test_wrong_runs_are_refused_in_one_line():
    def line(run: Any) -> str:
        with pytest.raises(UsageError) as error:
            run()
        assert "\n" not in str(error.value)
        return str(error.value)

    cosine = line(lambda: language_model(schedule=WarmupCosine(warmup_steps=1)))
    assert cosine.startswith("schedule=WarmupCosine: AdamWScheduleFree wants a constant learning rate")
    rule = ParamRule(role="head", schedule=WarmupCosine(warmup_steps=1))
    assert "WarmupCosine" in line(lambda: language_model(schedule=WarmupConstant(warmup_steps=0), param_rules=[rule]))
    twice = lambda groups: AdamWScheduleFree(groups, warmup_steps=5)  # noqa: E731
    found = line(lambda: language_model(schedule=WarmupConstant(warmup_steps=2), optimizer=twice))
    assert "WarmupConstant.warmup_steps=2 and AdamWScheduleFree.warmup_steps=5 would multiply" in found
    settings = {"optimizer": AdamWScheduleFree}
    assert "AdamWScheduleFree trains one set of weights" in line(lambda: fit(Mixed(**settings)))
    assert "ScheduleFree: the optimizer is SGD: take" in line(
        lambda: fit(Net(lambda params: torch.optim.SGD(params, lr=0.1)), ScheduleFree())
    )
    trainer = runs.trainer_with(ScheduleFree(), max_steps=2)
    mixed = Mixed(optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))
    assert "ScheduleFree: the optimizer is SGD: take" in line(lambda: mixed.check_run(trainer, None, "fit"))
    Mixed(optimizer=SGDScheduleFree).check_run(trainer, None, "fit")
    assert line(lambda: fit(Net(), ScheduleFree(), EMA())).startswith("EMA: a schedule-free optimizer averages")
    assert "is bfloat16, in which an average" in line(lambda: fit(Net(), ScheduleFree(), plugins=[BF16True()]))
    for name in ("DeepSpeedStrategy", "FSDPStrategy", "ModelParallelStrategy"):
        trainer: Any = SimpleNamespace(strategy=type(name, (), {"__module__": "lightning.pytorch.strategies"})())
        assert name in line(lambda trainer=trainer: ScheduleFree().setup(trainer, Net(), "fit"))


def test_batch_norm_and_a_scheduler_of_torch_are_warned_of(recwarn):
    class Normed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def configure_optimizers(self):
            optimizer = adamw(self.net.parameters())
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    fit(Normed(), ScheduleFree(), steps=1, limit_val_batches=0)
    said = [str(warning.message) for warning in recwarn if str(warning.message).startswith("ScheduleFree")]
    assert ["batch norm" in line for line in said] == [False, True]
    assert "StepLR sets the learning rate" in said[0]


def test_a_validation_alone_needs_no_schedule_free_optimizer_and_leaves_the_weights():
    module = Net()
    before = weights_of(module)
    # a fit with both averages is refused
    runs.trainer_with(ScheduleFree(), EMA(), logger=False).validate(module, data(), verbose=False)
    assert same(module.seen[0], before)


# ---- several processes


class Model(CausalLM):
    def __init__(self) -> None:
        super().__init__()
        self.validated: list[float] = []

    def validation_step(self, batch, batch_idx):
        loss = self.model(input_ids=batch, labels=batch).loss
        if dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        self.validated.append(loss.item())

    def configure_optimizers(self):
        return AdamWScheduleFree(self.parameters(), lr=5e-3, warmup_steps=2)


def fit_two(folder: Path | None = None, world: int = 1, rank: int = 0, strategy: Any = "auto", **options: Any) -> Any:
    model = Model()
    saver = [SafeCheckpoint(folder, every_n_train_steps=3, keep_last=9)] if folder else []
    runs.fit(
        model, ScheduleFree(), *saver, data=rows(rank, world), val=rows(rank, world), devices=world, max_steps=6,
        logger=False, strategy=strategy, limit_val_batches=1, use_distributed_sampler=False,
        plugins=[] if strategy != "auto" else [AtomicCheckpointIO()], **options,
    )  # fmt: skip
    drop_gathered(model)  # by the last validation
    return model


def local(model: Any) -> list[torch.Tensor]:
    return [getattr(p, "to_local", lambda p=p: p)().detach().clone() for p in model.parameters()]


def ranks(rank: int, folder: Path, expected: tuple[list[float], list[float]]) -> None:
    for name, make in (("fsdp2", FSDP2Strategy), ("ddp", lambda: "ddp")):
        whole = fit_two(folder / name, 2, rank, make())
        assert whole.validated == pytest.approx(expected[0], rel=1e-4), name
        losses = torch.tensor(whole.losses)
        dist.all_reduce(losses)
        assert (losses / 2).tolist() == pytest.approx(expected[1], rel=1e-5), name
        assert fit_two(None, 2, rank, make()).losses == whole.losses, "a save has put gathered weights right"
        resumed = fit_two(None, 2, rank, make(), ckpt_path=folder / name / "step=3.ckpt")
        assert resumed.losses == whole.losses[3:], name
        assert resumed.validated == whole.validated[2:], name
        assert same(local(resumed), local(whole)), name


@pytest.mark.long
def test_two_ranks_train_as_one_process_and_resume_to_the_bit_in_shards_and_without(tmp_path):
    one = fit_two(tmp_path / "one")
    processes.run(ranks, tmp_path, (one.validated, one.losses))
    alone = torch.load(tmp_path / "one/step=6.ckpt", weights_only=True)["state_dict"]
    folder = open_checkpoint(tmp_path / "fsdp2/step=6.ckpt")["state_dict"]
    for name, value in alone.items():
        torch.testing.assert_close(folder[name], value, rtol=1e-3, atol=1e-4)
    gone_on = fit_two(ckpt_path=tmp_path / "fsdp2/step=3.ckpt")
    assert gone_on.validated == pytest.approx(one.validated[2:], rel=1e-4)
