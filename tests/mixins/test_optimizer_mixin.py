"""The optimizer of any LightningModule: what it trains with, what a resume follows, what is refused."""

import dataclasses
import functools
import logging

import pytest
import torch
from harness import processes, runs
from harness.models import Small, batches
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from lightning_tricks._core.errors import UsageError
from lightning_tricks.mixins import OptimizerMixin
from lightning_tricks.optim import MuonAdamW, ParamRule
from lightning_tricks.schedules import Schedule, WarmupConstant, WarmupCosine, WarmupLinear, WarmupStableDecay

DATA = batches(torch.ones(100, 1, 2))


class Plain(Small):
    """A LightningModule that knows nothing of ours, with an optimizer of its own that must lose."""

    def __init__(self, width: int = 2):
        super().__init__(net=torch.nn.Sequential(torch.nn.Linear(width, 2), torch.nn.LayerNorm(2)))
        self.decays = []

    def configure_optimizers(self):
        raise AssertionError("the mixin owns this method")

    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        self.decays.append([group["weight_decay"] for group in optimizer.param_groups])


class Model(OptimizerMixin, Plain):
    pass


def adamw(lr=1.0, **settings):
    return lambda groups: torch.optim.AdamW(groups, lr=lr, **settings)


def fit(model, max_steps, resume=None, **options):
    return runs.fit(model, data=DATA, ckpt_path=resume, max_steps=max_steps, **options).trainer


def lrs(model):
    return [groups[0] for groups in model.lrs]


def test_every_step_trains_with_the_schedules_learning_rate():
    model = Model(optimizer=adamw(0.5), schedule=WarmupLinear(warmup_steps=2))
    fit(model, 6)
    assert lrs(model) == [0.25, 0.5, 0.5, 0.375, 0.25, 0.125]


def test_without_settings_it_is_adamw_with_a_constant_learning_rate():
    model = Model()
    run = fit(model, 3)
    assert type(run.optimizers[0]) is torch.optim.AdamW
    assert (model.lrs, model.decays) == ([[3e-4, 3e-4]] * 3, [[0.1, 0.0]] * 3)
    assert run.lr_scheduler_configs == []


def test_settings_reach_the_groups():
    model = Model(
        optimizer=adamw(0.5), weight_decay=0.2, decay_embeddings=False, param_rules=[ParamRule("bias", lr_scale=0.5)]
    )
    model.embed = torch.nn.Embedding(2, 2)
    run = runs.trainer_with()
    run.strategy.connect(model)
    model.trainer = run
    groups = model.configure_optimizers()["optimizer"].param_groups
    found = {name: (group["lr"], group["weight_decay"]) for group in groups for name in group["param_names"]}
    assert found == {
        "net.0.weight": (0.5, 0.2),
        "net.0.bias": (0.25, 0.0),
        "net.1.weight": (0.5, 0.0),
        "net.1.bias": (0.25, 0.0),
        "embed.weight": (0.5, 0.0),
    }


def test_the_groups_are_logged_once_at_start(caplog):
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        fit(Model(optimizer=adamw(0.5)), 3)
    tables = [record.message for record in caplog.records if record.message.startswith("AdamW\n")]
    assert len(tables) == 1
    assert tables[0].splitlines()[2].split() == ["decay", "1", "4", "0.5", "0.1"]
    assert tables[0].splitlines()[-1].split() == ["total", "4", "10"]


# ---- a resume follows the recipe


@pytest.fixture
def checkpoint(tmp_path):
    """A run of 4 of 10 steps, stopped."""
    model = Model(optimizer=adamw(1.0, betas=(0.5, 0.6)), schedule=WarmupLinear(warmup_steps=2), weight_decay=0.3)

    run = fit(model, 10, limit_train_batches=4, max_epochs=1)
    assert run.global_step == 4
    run.save_checkpoint(tmp_path / "run.ckpt")
    return tmp_path / "run.ckpt"


LINEAR = WarmupLinear(warmup_steps=2)
BRANCH = WarmupStableDecay(warmup_steps=2, decay_start=4, decay_shape="linear")


@pytest.mark.parametrize(
    ("lr", "schedule", "steps", "expected"),
    [
        (1.0, LINEAR, 10, [0.75, 0.625, 0.5, 0.375, 0.25, 0.125]),  # as it was saved
        (0.5, LINEAR, 10, [0.375, 0.3125, 0.25, 0.1875, 0.125, 0.0625]),
        (1.0, LINEAR, 6, [0.5, 0.25]),
        (1.0, BRANCH, 6, [1.0, 0.5]),
        (0.25, None, 6, [0.25, 0.25]),
    ],
)
def test_a_resume_follows_the_recipes_learning_rate_shape_and_length(checkpoint, lr, schedule, steps, expected):
    model = Model(optimizer=adamw(lr), schedule=schedule)
    run = fit(model, steps, resume=checkpoint)
    assert lrs(model) == expected
    assert {state["step"].item() for state in run.optimizers[0].state.values()} == {steps}


# ---- an own configure_optimizers


class Leaves(Model):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Calls(Model):
    def configure_optimizers(self):
        return super().configure_optimizers()


class Makes(Model):
    def configure_optimizers(self):
        return self.make_optimizer(self.net)


def said_of(model, recwarn):
    fit(model, 1)
    return [str(one.message) for one in recwarn.list if "OptimizerMixin" in str(one.message)]


def test_an_own_method_that_leaves_the_settings_out_is_said_in_one_line(recwarn):
    (line,) = said_of(Leaves(schedule=LINEAR), recwarn)
    assert line.startswith("Leaves.configure_optimizers takes the place of OptimizerMixin's")
    assert line.endswith("let it call super().configure_optimizers() or self.make_optimizer()")
    assert "\n" not in line


@pytest.mark.parametrize("own", [Model, Calls, Makes])  # Model hides the method of Plain, as it should
def test_a_method_that_asks_the_mixin_is_no_warning_and_resumes_with_the_same_optimizer_alone(own, recwarn, tmp_path):
    model = own(optimizer=adamw(0.5), schedule=WarmupConstant(warmup_steps=0))
    assert said_of(model, recwarn) == []
    model.trainer.save_checkpoint(tmp_path / "run.ckpt")
    other = own(optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))
    with pytest.raises(UsageError, match="the checkpoint holds the state of AdamW, which SGD cannot take up"):
        fit(other, 2, resume=tmp_path / "run.ckpt")


# ---- refusals


def test_a_mixin_behind_the_lightning_module_is_refused():
    with pytest.raises(UsageError, match=r"class Late: put OptimizerMixin before the LightningModule"):

        class Late(Plain, OptimizerMixin):
            pass


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optimizer": "AdamW"}, "optimizer='AdamW': give a function that makes it from the parameter groups"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, "optimizer=SGD .*: give a function that makes it from"),
        ({"schedule": WarmupCosine}, "schedule=<class .*: give a Schedule object, such as "),
        ({"schedule": 0.1}, "schedule=0.1: give a Schedule object, such as "),
        (
            {"param_rules": ParamRule("net")},
            r"param_rules=ParamRule\(.*: give a list of ParamRule and LayerwiseLRDecay",
        ),
        ({"param_rules": [{"pattern": "net"}]}, r"param_rules={'pattern': 'net'}: give a list of ParamRule and"),
        ({"mup": 256}, "mup=256: give a MuP object"),
    ],
)
def test_a_setting_of_another_kind_is_refused_in_one_line_when_the_module_is_built(settings, words):
    with pytest.raises(UsageError, match=rf"^{words}[^\n]*$"):
        Model(**settings)


def test_a_callback_that_adds_parameters_during_training_is_refused():
    class Whole(Model):
        @property
        def backbone(self):
            return self.net[0]

    with pytest.raises(UsageError, match="BackboneFinetuning adds parameters to the optimizer during training"):
        runs.fit(Whole(), BackboneFinetuning(), data=DATA, max_steps=1)


def test_fast_dev_run_trains_with_a_constant_learning_rate_whatever_the_schedule():
    model = Model(optimizer=adamw(0.5), schedule=WarmupCosine(warmup_steps=715))
    fit(model, 1000, fast_dev_run=2)
    assert lrs(model) == [0.5, 0.5]


# ---- from a recipe


class Recipe(OptimizerMixin, LightningModule):
    """A model.

    Args:
        width: of the layer.
    """

    def __init__(self, width: int = 2, **kwargs):
        super().__init__(**kwargs)
        self.net = torch.nn.Linear(width, 2)


@pytest.fixture
def parser():
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_lightning_class_args(Recipe, "model")
    return parser


def test_a_recipe_sets_optimizer_schedule_and_rules(parser):
    settings = {
        "width": 3,
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.5, "betas": [0.9, 0.8], "fused": True}},
        "schedule": {"class_path": "WarmupCosine", "init_args": {"warmup_steps": 7}},
        "weight_decay": 0.2,
        "param_rules": [
            {"pattern": "bias", "lr_scale": 0.5},
            {"role": "matrix", "schedule": {"class_path": "WarmupLinear", "init_args": {"warmup_steps": 2}}},
        ],
    }
    model = parser.instantiate(parser.parse_object({"model": settings})).model
    assert model.net.in_features == 3
    assert model.schedule == WarmupCosine(warmup_steps=7)
    own = ParamRule(role="matrix", schedule=WarmupLinear(warmup_steps=2))
    assert model.param_rules == [ParamRule("bias", lr_scale=0.5), own]
    model.trainer = runs.trainer_with(max_steps=100)
    optimizer = model.configure_optimizers()["optimizer"]
    assert type(optimizer) is torch.optim.AdamW
    assert [(g["betas"], g["fused"], g["weight_decay"]) for g in optimizer.param_groups] == [
        ((0.9, 0.8), True, 0.2),
        ((0.9, 0.8), True, 0.0),
    ]


def test_a_resume_with_an_optimizer_of_another_class_is_refused_and_an_evaluation_is_not(checkpoint):
    other = Model(optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    with pytest.raises(UsageError, match="holds the state of AdamW, which SGD cannot take up: set the optimizer to"):
        fit(other, 10, resume=checkpoint)
    other.validation_step = other.training_step
    runs.trainer_with().validate(other, DATA, ckpt_path=checkpoint, verbose=False)


def test_the_optimizer_of_an_earlier_fit_is_not_taken_for_that_of_a_later_one(checkpoint):
    model = Model(optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    fit(model, 1)
    model.optimizer = adamw(1.0)
    assert fit(model, 6, resume=checkpoint).global_step == 6


# ---- save_hyperparameters


class Saving(OptimizerMixin, LightningModule):
    """A module as Lightning's documentation writes them."""

    def __init__(self, width: int = 2, betas=(0.9, 0.95), **kwargs):
        super().__init__(**kwargs)
        self.save_hyperparameters()
        self.net = torch.nn.Linear(2, width)

    def training_step(self, batch, _):
        return self.net(batch).square().sum()

    validation_step = training_step


SETTINGS = {
    "width": 3,
    "schedule": WarmupStableDecay(warmup_steps=1, decay_start=1, decay_shape="linear"),
    "param_rules": [
        ParamRule("bias", lr_scale=0.5, decay_schedule=WarmupCosine(warmup_steps=1)),
        ParamRule(role="matrix", schedule=WarmupCosine(warmup_steps=1)),
    ],
    "weight_decay": 0.2,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of a module that keeps its hyper-parameters, one of them a function."""
    path = tmp_path_factory.mktemp("saving") / "run.ckpt"
    run = fit(Saving(optimizer=adamw(0.5), **SETTINGS), 2)
    run.save_checkpoint(path)
    return path


def test_hyper_parameters_are_plain_types_as_a_recipe_writes_them(saved):
    found = torch.load(saved, weights_only=True)["hyper_parameters"]
    assert "optimizer" not in found
    assert found["schedule"]["class_path"] == "WarmupStableDecay"
    assert found["schedule"]["init_args"]["decay_start"] == 1
    first, second = (rule["init_args"] for rule in found["param_rules"])
    assert [rule["class_path"] for rule in found["param_rules"]] == ["ParamRule", "ParamRule"]
    assert (first["pattern"], first["lr_scale"], first["role"], first["schedule"]) == ("bias", 0.5, None, None)
    assert second["schedule"] == {"class_path": "WarmupCosine", "init_args": {"warmup_steps": 1, "min_ratio": 0.1}}
    assert (found["width"], found["betas"]) == (3, (0.9, 0.95))


def test_the_module_is_built_again_from_its_checkpoint_alone(saved, tmp_path):
    model = Saving.load_from_checkpoint(saved)
    assert model.schedule == SETTINGS["schedule"]
    assert model.param_rules == SETTINGS["param_rules"]
    assert (model.net.out_features, model.weight_decay) == (3, 0.2)
    runs.trainer_with().validate(model, DATA, verbose=False)


@dataclasses.dataclass(frozen=True)
class Largest(Schedule):
    """A curve of one's own, which is made of others."""

    curves: tuple[Schedule, ...] | list[Schedule]

    def lr(self, peak, step, total_steps):
        return max(curve.lr(peak, step, total_steps) for curve in self.curves)


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_schedule_made_of_others_comes_back_from_the_checkpoint(tmp_path, kind):
    schedule = Largest(kind([WarmupConstant(warmup_steps=2), WarmupCosine(warmup_steps=1)]))
    fit(Saving(schedule=schedule), 3).save_checkpoint(tmp_path / "run.ckpt")
    model = Saving.load_from_checkpoint(tmp_path / "run.ckpt")
    assert model.schedule == schedule
    assert fit(model, 4, resume=tmp_path / "run.ckpt").global_step == 4


def test_to_train_it_needs_the_function_that_no_checkpoint_holds(saved, tmp_path):
    with pytest.raises(
        UsageError, match=r"^optimizer: the checkpoint was trained with <function adamw.*pass optimizer="
    ):
        fit(Saving.load_from_checkpoint(saved), 4)
    model = Saving.load_from_checkpoint(saved, optimizer=adamw(0.25))
    fit(model, 4).save_checkpoint(tmp_path / "again.ckpt")
    again = Saving.load_from_checkpoint(tmp_path / "again.ckpt")  # plain types stay plain types
    assert again.schedule == SETTINGS["schedule"]


def test_a_class_that_is_not_imported_is_refused_by_name():
    unknown = {"class_path": "MyOwnCurve", "init_args": {}}
    with pytest.raises(UsageError, match=r"^schedule: the checkpoint names MyOwnCurve, and 0 subclasses of Schedule"):
        Saving(schedule=unknown)
    with pytest.raises(UsageError, match=r"this version's WarmupCosine does not take .*'warmup'"):
        Saving(schedule={"class_path": "WarmupCosine", "init_args": {"warmup": 1}})


def test_weights_alone_are_refused_by_fit_in_one_line_and_taken_by_the_others(tmp_path):
    path = tmp_path / "weights.ckpt"
    fit(Saving(), 2).save_checkpoint(path, weights_only=True)
    with pytest.raises(
        UsageError, match=rf"^ckpt_path={path}: it holds weights only .* a complete checkpoint; [^\n]*$"
    ):
        fit(Saving(), 4, resume=path)
    for stage in ("validate", "test", "predict"):
        model = Saving()
        model.test_step = model.predict_step = model.validation_step
        getattr(runs.trainer_with(), stage)(model, DATA, ckpt_path=path)


class WithMuon(OptimizerMixin, Small):
    pass


def sharing(rank, automatic=True, strategy="auto", devices=1):
    """Whether Muon shares its work with the processes of a run, and the weights after it."""
    net = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    model = WithMuon(net=net, manual=not automatic, optimizer=lambda groups: MuonAdamW(groups, lr=0.1))
    fit(model, 2, strategy=strategy, devices=devices, use_distributed_sampler=False)
    group = model.optimizers().optimizer.optimizers["muon"].replicas
    return None if group is None else group.size(), model.state_dict()


def sharing_in_two(rank):
    hooked = DDPStrategy(ddp_comm_hook=bf16_compress_hook)
    cases = {"ddp": (True, "ddp"), "manual": (False, "ddp"), "hook": (True, hooked)}
    return {name: sharing(rank, *case, devices=2) for name, case in cases.items()}


@pytest.mark.long
def test_muon_shares_its_work_where_weights_and_gradients_are_equal_on_all_ranks():
    assert sharing(0)[0] is None
    ranks = processes.run(sharing_in_two)
    assert [{name: size for name, (size, _) in found.items()} for found in ranks] == 2 * [
        {"ddp": 2, "manual": None, "hook": None}
    ]
    for name, (_, weights) in ranks[0].items():
        assert all(torch.equal(weight, ranks[1][name][1][key]) for key, weight in weights.items()), name
