"""BatchSizeWarmup: each step has its number of micro-batches, and a resume from anywhere is the unbroken run."""

import copy
import os
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import processes, runs
from harness.models import Small
from harness.runs import same, weights_of
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.utils.data import DataLoader

from lightning_tricks import FSDP2Strategy, LanguageModel, ParamRule
from lightning_tricks._core.errors import UsageError
from lightning_tricks._trainer.run_length import run_length
from lightning_tricks.callbacks import BatchSizeWarmup, ExactResume, LRScalingRule
from lightning_tricks.data import ShardWriter, TokenData
from lightning_tricks.guards.batch_size_warmup import LearningRates, doubling, first_steps
from lightning_tricks.mixins import OptimizerMixin
from lightning_tricks.models import Llama
from lightning_tricks.schedules import WarmupCosine

SIZES = [1, 1, 1, 2, 2, 4, 4, 4]  # of the steps under STAGES
STAGES = {0: 1, 3: 2, 5: 4}
RATES = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}


class Foreign(Small):
    """Notes for each step the batches of its micro-batches, and lr of each group; dropout draws random numbers."""

    def __init__(self, dropout: float = 0.3, manual: bool = False) -> None:
        optimizer = partial(torch.optim.AdamW, lr=0.05)
        super().__init__(4, 4, 1, dropout=dropout, optimizer=optimizer, manual=manual, seed=3)
        self.steps: dict[int, list[Any]] = {}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        assert self.trainer.fit_loop.epoch_loop.batch_progress.current.ready == batch_idx + 1

    def loss_of(self, batch: Any) -> torch.Tensor:
        rows = batch["input_ids"] if isinstance(batch, dict) else batch
        self.steps.setdefault(self.trainer.global_step, []).append(rows.tolist())
        return self.net(rows.float()[:, :4] / 64 if isinstance(batch, dict) else rows).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.steps[self.trainer.global_step].append([group["lr"] for group in optimizer.param_groups])


class WithGroups(OptimizerMixin, Foreign):
    def __init__(self, **options: Any) -> None:
        super().__init__(
            optimizer=partial(torch.optim.AdamW, lr=0.05),
            schedule=WarmupCosine(warmup_steps=2, min_ratio=0.1),
            param_rules=[ParamRule("net.0.*", lr_scale=0.25)],
            **options,
        )


def save_each(folder: Path) -> runs.On:
    """Saves after each micro-batch, also within a step, into `folder`/MICRO_BATCHES.ckpt."""

    def save(trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(folder / f"{trainer.fit_loop.epoch_loop.batch_progress.total.ready}.ckpt")

    return runs.On(on_train_batch_end=save)


OPTIONS = {"max_steps": 8, "accumulate_grad_batches": 4, "limit_val_batches": 0, "log_every_n_steps": 50}


def rows(number: int = 40) -> DataLoader:
    return DataLoader(torch.randn(number, 4, generator=torch.Generator().manual_seed(1)), batch_size=2)


def fit(module: Any, *callbacks: Any, data: Any = None, **options: Any) -> runs.Run:
    torch.manual_seed(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return runs.fit(module, *callbacks, data=data or rows(), **{**OPTIONS, **options})


def sizes(module: Foreign) -> list[int]:
    return [len(said) - 1 for said in module.steps.values()]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    with ShardWriter(folder, "train", 64) as writer:
        writer.append(torch.randint(64, (900,), generator=torch.Generator().manual_seed(1)).numpy())
    return folder


def tokens(folder: Path, **options: Any) -> TokenData:
    train = str(next(folder.glob("train*.bin")))
    return TokenData(train=train, val=None, **{"seq_len": 8, "micro_batch_size": 2, "seed": 3, **options})


# ---- the number of micro-batches


def test_stages_by_hand():
    assert doubling(1, 6, 100) == {0: 1, 100: 2, 200: 4, 300: 6}
    assert doubling(4, 4, 100) == {0: 4}
    # 16 tokens a micro-batch: 7 steps of one are 112 tokens, 9 of two make 400
    assert first_steps({0: 1, 100: 2, 400: 4}, 16) == {0: 1, 7: 2, 16: 4}
    assert first_steps({0: 1, 112: 2, 113: 4}, 16) == {0: 1, 7: 2, 8: 4}


def test_each_step_is_the_mean_over_its_own_micro_batches_as_in_a_plain_loop():
    module = Foreign(dropout=0.0)
    fit(module, BatchSizeWarmup(STAGES))
    assert sizes(module) == SIZES
    plain, batches = Foreign(dropout=0.0), iter(rows())
    optimizer = plain.configure_optimizers()
    for size in SIZES:
        optimizer.zero_grad()
        for _ in range(size):
            (plain.net(next(batches)).square().mean() / size).backward()
        optimizer.step()
    assert same(weights_of(module), weights_of(plain))


def test_an_epochs_last_step_is_short_and_the_next_epoch_begins_a_step():
    module = Foreign()
    trainer = fit(module, BatchSizeWarmup({0: 1, 2: 2, 4: 4}), data=rows(14), max_steps=-1, max_epochs=3).trainer
    assert sizes(module) == [1, 1, 2, 2, 1, 4, 3, 4, 3]
    assert run_length(trainer) == 9 == trainer.global_step


def test_a_micro_batch_of_none_moves_no_step_boundary():
    batches = [*rows(60)]
    batches[3] = None  # the first of the first step with two
    module = Foreign()
    fit(module, BatchSizeWarmup(STAGES), data=DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch))
    assert sizes(module)[3:] == SIZES[3:]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"double_every": 3}, [1, 1, 1, 2, 2, 2, 4, 4]),
        ({"double_every": 2, "start": 2}, [2, 2, 4, 4, 4, 4, 4, 4]),
        ({"stages": {0: 1, 48: 2, 100: 4}, "unit": "tokens"}, [1, 1, 1, 2, 2, 4, 4, 4]),
        ({"double_every": 40, "unit": "tokens"}, [1, 1, 1, 2, 4, 4, 4, 4]),
    ],
)
def test_the_ramp_by_steps_and_by_tokens(shards, options, expected):
    run = fit(Foreign(), BatchSizeWarmup(**options), data=tokens(shards))
    assert sizes(run.model) == expected
    assert run.of("train/batch_tokens") == [size * 16 for size in expected]


def test_data_that_tell_no_tokens_log_micro_batches():
    assert fit(Foreign(), BatchSizeWarmup(STAGES)).of("train/batch_micro_batches") == SIZES


def test_a_validation_has_no_batch_that_grows():
    warmup, module = BatchSizeWarmup(STAGES), Foreign()
    trainer = runs.trainer_with(warmup, limit_val_batches=1, accumulate_grad_batches=3)
    trainer.validate(module, rows(), verbose=False)  # a fit of this recipe is refused: the last stage is 4
    assert trainer.accumulate_grad_batches == 3
    assert warmup.state_dict() == {}


# ---- the learning rate


@pytest.mark.parametrize("rule", ["none", "linear", "sqrt"])
def test_the_rule_multiplies_the_schedule_of_every_group(rule):
    module = WithGroups()
    fit(module, BatchSizeWarmup(STAGES, lr_rule=rule))
    groups = [group.get("lr_scale") or 1.0 for group in module.trainer.optimizers[0].param_groups]
    assert len(set(groups)) == 2
    for step, said in module.steps.items():
        factor = (SIZES[step] / 4) ** RATES[rule]
        assert said[-1] == [module.schedule.lr(0.05 * scale, step, 8) * factor for scale in groups]


def test_the_rate_of_an_optimizer_inside_deepspeeds_is_that_of_its_groups():
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    trainer = SimpleNamespace(optimizers=[SimpleNamespace(optimizer=inner)], lr_scheduler_configs=[])
    LearningRates(trainer, "BatchSizeWarmup", lambda step: 0.25).refresh()
    assert inner.param_groups[0]["lr"] == 0.125


def test_steps_that_a_scheduler_has_not_counted_have_their_own_factor():
    class Held(WithGroups):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            if self.trainer.global_step != 3:  # as after an overflow of fp16 in the third step
                super().lr_scheduler_step(scheduler, metric)

    module = Held()
    fit(module, BatchSizeWarmup(STAGES, lr_rule="linear"))
    counted = [0, 1, 2, 2, 3, 4, 5, 6]
    rates = [module.schedule.lr(0.05, step, 8) * size / 4 for step, size in zip(counted, SIZES, strict=True)]
    assert [max(said[-1]) for said in module.steps.values()] == rates


# ---- a resume


@pytest.mark.parametrize("kind", ["tokens", "foreign", "foreign with dropout"])
def test_a_resume_from_any_micro_batch_is_the_unbroken_run(tmp_path, shards, kind):
    exact = (ExactResume(),) if kind != "tokens" else ()

    def module() -> Any:
        # a save within a step has the random state from there, and the step begins anew
        return WithGroups(dropout=0.3 if "dropout" in kind else 0.0)

    def run(made: Any, *callbacks: Any, **options: Any) -> Any:
        # 9 batches an epoch: the steps of 4 are cut short by its end
        data = tokens(shards) if kind == "tokens" else DataLoader(rows(18).dataset, batch_size=2, shuffle=True)
        warmup = BatchSizeWarmup(STAGES, lr_rule="sqrt")
        trainer = fit(made, *exact, warmup, *callbacks, data=data, **options).trainer
        return trainer.fit_loop.epoch_loop.batch_progress.total.ready

    whole = module()
    count = run(whole, save_each(tmp_path))
    taken = sizes(whole)
    assert taken == (SIZES if kind == "tokens" else [1, 1, 1, 2, 2, 2, 4, 4])
    starts = [sum(taken[:step]) for step in range(1, 8)]
    for done in starts[1::2] if "dropout" in kind else (1, 2, 4, 5, 7, 10, 11, 12):
        resumed = module()
        assert run(resumed, ckpt_path=tmp_path / f"{done}.ckpt") == count, done
        assert same(weights_of(whole), weights_of(resumed)), done
        assert resumed.steps == {step: whole.steps[step] for step in resumed.steps}, done


def test_a_checkpoint_tells_the_samples_of_every_step_and_of_those_to_come(tmp_path, shards):
    class Asks(Foreign):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            asked.append(data.step_samples())

    asked: list[Any] = []
    data = tokens(shards)
    fit(Asks(), BatchSizeWarmup(STAGES), save_each(tmp_path), data=data)
    for done in (2, 5, 7, 19):
        state = torch.load(tmp_path / f"{done}.ckpt", weights_only=True)["TokenData"]
        samples = [data.samples_of_step(step, state) for step in range(8)]
        first = [sum(SIZES[:step]) * 2 for step in range(9)]
        assert samples == asked == [[(first[step], first[step + 1] - 1)] for step in range(8)]


def test_passes_over_the_data_end_with_a_whole_step(shards):
    module = Foreign()  # 111 rows: 55 micro-batches a pass, of which the first one can use 7 + 12 * 4
    trainer = fit(module, BatchSizeWarmup(STAGES), data=tokens(shards), max_steps=-1, max_epochs=2).trainer
    assert trainer.global_step == 5 + 12 + 13
    assert sizes(module) == [1, 1, 1, 2, 2] + [4] * 25


@pytest.mark.parametrize("kind", ["rows", "tokens"])
def test_the_schedule_of_a_run_in_epochs_ends_with_its_last_step(tmp_path, shards, kind):
    def train(*callbacks: Any, **options: Any) -> tuple[Any, Any]:
        # 7 micro-batches a pass, and 11 of windows of 40 tokens
        module, data = WithGroups(), rows(14) if kind == "rows" else tokens(shards, seq_len=40)
        warmup = BatchSizeWarmup({0: 1, 2: 2, 4: 4})
        return module, fit(module, warmup, *callbacks, data=data, max_steps=-1, max_epochs=3, **options).trainer

    whole, trainer = train(save_each(tmp_path))
    (config,) = trainer.lr_scheduler_configs
    assert config.scheduler.total_steps == trainer.global_step
    saved_ones = sorted(tmp_path.glob("*.ckpt"), key=lambda path: int(path.stem))
    for saved in saved_ones[:: max(len(saved_ones) // 6, 5)]:
        resumed, trainer = train(*([ExactResume()] if kind == "rows" else []), ckpt_path=saved)
        assert trainer.lr_scheduler_configs[0].scheduler.total_steps == trainer.global_step, saved
        rates = {step: said[-1] for step, said in resumed.steps.items()}
        assert rates == {step: said[-1] for step, said in whole.steps.items() if step >= min(rates, default=99)}


# ---- several processes


def _in_two(rank: int, folder: Path, shards: Path) -> None:
    """Whole runs of two processes, and one that goes on from a checkpoint of one process."""

    def run(name: str, strategy: Any, *callbacks: Any, ckpt_path: Any = None) -> None:
        os.environ.pop("PL_GLOBAL_SEED", None)
        module = WithGroups(dropout=0.0)
        warmup = BatchSizeWarmup({0: 2, 3: 4, 5: 8}, lr_rule="sqrt")
        options = {"strategy": strategy, "devices": 2, "enable_checkpointing": bool(callbacks)}
        fit(module, warmup, *callbacks, data=tokens(shards), ckpt_path=ckpt_path, **options)
        whole = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in module.parameters()]
        torch.save((module.steps, whole), folder / f"{name}.{rank}")

    with pytest.raises(UsageError, match=r"2 processes cannot share 1 micro-batches evenly[^\n]*$"):
        fit(Foreign(), BatchSizeWarmup({0: 1, 3: 4}), strategy="ddp", devices=2, accumulate_grad_batches=2)
    module, rule = Foreign(), LRScalingRule(16, rule="linear")  # a step of both has 64 tokens
    fit(module, rule, data=tokens(shards), strategy="ddp", devices=2, accumulate_grad_batches=2, max_steps=1)
    assert module.steps[0][-1] == [0.2]
    saves = pl.callbacks.ModelCheckpoint(folder / "two", "{step}", every_n_train_steps=1, save_top_k=-1)
    run("whole", "ddp", saves)
    run("resumed", "ddp", ckpt_path=folder / "two" / "step=4.ckpt")
    run("from one", "ddp", ckpt_path=folder / "one" / "step=4.ckpt")
    sharded = pl.callbacks.ModelCheckpoint(folder / "fsdp2", "{step}", every_n_train_steps=4, save_top_k=-1)
    run("sharded", FSDP2Strategy(), sharded)
    run("sharded, resumed", FSDP2Strategy(), ckpt_path=folder / "fsdp2" / "step=4.ckpt")


@pytest.mark.long
def test_two_processes_resume_to_the_bit_and_keep_the_global_batch_of_one(tmp_path, shards):
    def alone(*callbacks: Any, **options: Any) -> WithGroups:
        module = WithGroups(dropout=0.0)
        warmup = BatchSizeWarmup({0: 2, 3: 4, 5: 8}, lr_rule="sqrt")
        fit(module, warmup, *callbacks, data=tokens(shards), accumulate_grad_batches=8, **options)
        return module

    saves = pl.callbacks.ModelCheckpoint(tmp_path / "one", "{step}", every_n_train_steps=1, save_top_k=-1)
    one = alone(saves, enable_checkpointing=True)
    processes.run(_in_two, tmp_path, shards)
    names = ("whole", "resumed", "from one", "sharded", "sharded, resumed")
    runs = {name: [torch.load(tmp_path / f"{name}.{rank}") for rank in (0, 1)] for name in names}
    for name, ((steps, end), (others, _)) in runs.items():
        for step, (*said, lr) in steps.items():
            taken = [rows for pair in zip(said, others[step][:-1], strict=True) for rows in pair]
            assert [*taken, lr] == one.steps[step], (name, step)
        assert min(steps) == (0 if name in ("whole", "sharded") else 4)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(end, weights_of(one), strict=True)), name
    for whole, resumed in (("whole", "resumed"), ("sharded", "sharded, resumed")):
        assert same(runs[whole][0][1], runs[resumed][0][1])
    back = alone(ckpt_path=tmp_path / "two" / "step=4.ckpt")
    assert back.steps == {step: one.steps[step] for step in range(4, 8)}


# ---- with the others


class Ragged(DataLoader):
    """Batches of a language model, some of whose labels are ignored."""

    def __init__(self) -> None:
        draws = torch.Generator().manual_seed(1)
        batches = []
        for number in range(20):
            ids = torch.randint(64, (2, 9), generator=draws)
            labels = ids[:, 1:].clone()
            labels[:, : number % 6] = -100
            batches.append({"input_ids": ids[:, :-1], "labels": labels})
        super().__init__(batches, batch_size=None)


def language_model(**options: Any) -> LanguageModel:
    torch.manual_seed(5)
    decoder = Llama(vocab_size=64, d_model=16, n_layers=1, n_heads=2, max_seq_len=8)
    return LanguageModel(decoder=decoder, **options)


def test_the_loss_is_the_mean_over_the_tokens_of_each_steps_batch():
    module = language_model(optimizer=lambda groups: torch.optim.SGD(groups, lr=0.5), weight_decay=0.0)
    module.configure_model()
    plain = copy.deepcopy(module)
    fit(module, BatchSizeWarmup(STAGES), data=Ragged())
    optimizer, batches = torch.optim.SGD(plain.parameters(), lr=0.5), iter(Ragged())
    for size in SIZES:
        sums = [plain.token_sums(next(batches)) for _ in range(size)]
        optimizer.zero_grad()
        (sum(nats for nats, _ in sums) / sum(count for _, count in sums)).backward()
        optimizer.step()
    for one, other in zip(weights_of(module), weights_of(plain), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


# ---- wrong inputs


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"stages": {1: 1, 5: 4}}, "give a first stage at 0"),
        ({"stages": {0: 2, 5: 1}}, "a larger batch in each later one"),
        ({"stages": {0: 1, 5: 2}}, r"the last stage must be the recipe's batch, 4 micro-batches \(1 process"),
        ({"double_every": 30, "unit": "tokens"}, "unit=tokens: the data module has no micro_batch_size and seq_len"),
    ],
)
def test_stages_that_cannot_be_are_refused_in_one_line(options, line):
    with pytest.raises(UsageError, match=f"^BatchSizeWarmup.*{line}[^\n]*$"):
        fit(Foreign(), BatchSizeWarmup(**options))


class Stepped(Foreign):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3)}


def test_runs_that_it_cannot_change_are_refused_in_one_line():
    warmup = BatchSizeWarmup(STAGES, lr_rule="sqrt")
    with pytest.raises(UsageError, match=r"^BatchSizeWarmup: Foreign optimizes manually[^\n]*$"):
        fit(Foreign(manual=True), BatchSizeWarmup({0: 1}), accumulate_grad_batches=1)
    with pytest.raises(UsageError, match=r"^BatchSizeWarmup: with GradientAccumulationScheduler the batch [^\n]*$"):
        fit(Foreign(), warmup, GradientAccumulationScheduler({0: 4}))
    with pytest.raises(UsageError, match=r"^BatchSizeWarmup: StepLR sets the learning rate \(interval epoch[^\n]*$"):
        fit(Stepped(), warmup)

    class Engine(pl.strategies.SingleDeviceStrategy):
        handles_gradient_accumulation = True

    with pytest.raises(UsageError, match=r"^BatchSizeWarmup: Engine has a fixed number of micro-batches[^\n]*$"):
        fit(Foreign(), warmup, strategy=Engine(torch.device("cpu")), accelerator="auto", devices="auto")
