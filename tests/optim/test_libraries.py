"""Optimizers of torch and of libraries, by one line: what the library itself would do, resumed, sharded, or refused."""

import importlib
import json
import math
import os
import sys
from typing import Any

import heavyball
import lightning.pytorch as pl
import pytest
import torch
from cli.parsers import one_parser  # noqa: F401, a fixture
from harness import processes, runs
from harness.models import batches
from torch import nn

from lightning_tricks._core.errors import UsageError
from lightning_tricks.accounting import device_speed
from lightning_tricks.cli import load_recipe
from lightning_tricks.mixins import GradientClippingMixin, OptimizerMixin
from lightning_tricks.monitors.grad_norm_monitor import GradNormMonitor
from lightning_tricks.monitors.update_monitor import UpdateMonitor
from lightning_tricks.optim import MatrixAdamW, MuonAdamW, ParamRule, build_optimizer
from lightning_tricks.precision import BF16True
from lightning_tricks.schedules import WarmupLinear
from lightning_tricks.strategies import DeepSpeedZeROStrategy, FSDP2Strategy


def matrices(class_path: str, **init_args: Any) -> dict[str, Any]:
    return {"class_path": "MatrixAdamW", "init_args": {
        "lr": 0.01, "matrices": {"class_path": class_path, "init_args": {"lr": 0.01} | init_args}}}  # fmt: skip


def plain(class_path: str, **init_args: Any) -> dict[str, Any]:
    return {"class_path": class_path, "init_args": {"lr": 0.01, **init_args}}


CHOSEN = {
    "SGD": plain("SGD", momentum=0.9),
    "AdamW": plain("AdamW", fused=True),
    "Adafactor": plain("Adafactor"),
    "MuonAdamW": plain("MuonAdamW"),
    "Lion": plain("pytorch_optimizer.Lion"),
    "AdamW8bit": plain("torchao.optim.AdamW8bit"),
    "heavyball AdamW": plain("heavyball.AdamW"),
    "NorMuon": matrices("pytorch_optimizer.NorMuon"),
    "SOAP": matrices("pytorch_optimizer.SOAP", precondition_frequency=2),
    "Shampoo": matrices("pytorch_optimizer.Shampoo", momentum=0.9),
}


@pytest.fixture(scope="module", autouse=True)
def nothing_is_compiled():
    """What torchao and heavyball compute is the same without a compiler, which would take minutes."""
    with pytest.MonkeyPatch.context() as patch, torch.compiler.set_stance("force_eager"):
        patch.setattr(heavyball.utils, "compile_mode", None)
        yield


def net(width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.Linear(64, width), nn.Linear(width, 4))


MATRICES, HEAD = ("0.weight", "2.weight"), "3.weight"


def imported(class_path: str) -> Any:
    package, _, name = class_path.rpartition(".")
    return getattr(importlib.import_module(package or "torch.optim"), name)


def factory(chosen: dict[str, Any], **others: Any) -> Any:
    """What a recipe makes of it."""
    arguments = {**chosen["init_args"], **others}
    if "matrices" in arguments:
        matrices = factory(arguments.pop("matrices"), **others)
        return lambda groups: MatrixAdamW(groups, matrices, **arguments)
    if chosen["class_path"] == "MuonAdamW":
        return lambda groups: MuonAdamW(groups, **arguments)
    return lambda groups: imported(chosen["class_path"])(groups, **arguments)


def by_hand(name: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    """The library's optimizer on groups that nobody of ours has made, and AdamW for what is no hidden matrix."""
    named = dict(model.named_parameters())
    vectors = {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0}
    head = {"params": [named[HEAD]], "weight_decay": 0.1}
    hidden = {"params": [named[key] for key in MATRICES], "weight_decay": 0.1}
    arguments = dict(CHOSEN[name]["init_args"])
    adamw = {"lr": 0.01, "betas": (0.9, 0.95), "fused": True}
    if name == "MuonAdamW":
        muon = torch.optim.Muon([hidden], lr=0.01, adjust_lr_fn="match_rms_adamw")
        return [muon, torch.optim.AdamW([head, vectors], **adamw)]
    if "matrices" in arguments:
        inner = arguments["matrices"]
        own = imported(inner["class_path"])([{**hidden, "use_muon": True}], **inner["init_args"])
        return [own, torch.optim.AdamW([head, vectors], **adamw)]
    decaying = {"params": [*hidden["params"], *head["params"]], "weight_decay": 0.1}
    return [imported(CHOSEN[name]["class_path"])([decaying, vectors], **arguments)]


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], first: int, last: int) -> None:
    for step in range(first, last):
        torch.manual_seed(step)
        model.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("name", CHOSEN)
def test_three_steps_are_those_of_the_library_called_by_hand(name, monkeypatch):
    monkeypatch.setattr(device_speed, "has_fast_bf16", lambda device: True)  # as torch.optim.Muon computes
    model, reference = net(), net()
    train(model, [build_optimizer(model, factory(CHOSEN[name]))], 0, 3)
    train(reference, by_hand(name, reference), 0, 3)
    assert same(model, reference)
    assert not same(model, net())


@pytest.mark.parametrize("name", CHOSEN)
def test_a_resume_is_bitwise_and_its_file_holds_plain_types(name, tmp_path):
    model = net()
    optimizer = build_optimizer(model, factory(CHOSEN[name]))
    train(model, [optimizer], 0, 3)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    train(model, [optimizer], 3, 7)
    resumed, saved = net(), torch.load(tmp_path / "saved.pt", weights_only=True)
    resumed.load_state_dict(saved["model"])
    optimizer = build_optimizer(resumed, factory(CHOSEN[name]))
    optimizer.load_state_dict(saved["optimizer"])
    train(resumed, [optimizer], 3, 7)
    assert same(resumed, model)


# ---- in a recipe


RECIPE = """
model:
  class_path: LanguageModel
  init_args:
    decoder: {class_path: Llama, init_args: {vocab_size: 64, d_model: 16, n_layers: 1, n_heads: 2, max_seq_len: 8}}
data: {class_path: TokenData, init_args: {train: nothing.bin, seq_len: 8}}
"""


@pytest.fixture
def chosen(tmp_path, one_parser):  # noqa: F811
    """The function that a recipe gives to the module for an optimizer written in one line."""

    def load(line: str, *options: str) -> Any:
        text = RECIPE.replace("data:", f"    optimizer: {line}\ndata:")
        (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
        return load_recipe("--config", str(tmp_path / "recipe.yaml"), *options)[0].optimizer

    return load


BY_STUBS = ("AdamW8bit", "heavyball AdamW")  # jsonargparse asks a Python process where their stubs are


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in BY_STUBS else name for name in CHOSEN]
)
def test_a_recipe_names_it_in_one_line(name, chosen):
    model, reference = net(), net()
    train(model, [build_optimizer(model, chosen(json.dumps(CHOSEN[name])))], 0, 1)
    train(reference, [build_optimizer(reference, factory(CHOSEN[name]))], 0, 1)
    assert same(model, reference)


def test_a_short_name_is_torchs_or_ours_though_an_imported_library_has_it_too(chosen):
    groups = [nn.Parameter(torch.eye(2))]
    assert heavyball.SGD.__mro__[-2] is torch.optim.SGD.__mro__[-2]  # both are there, of one base class
    assert type(chosen("SGD")(groups)) is torch.optim.SGD
    assert type(chosen("SGD", "--model.optimizer", "heavyball.AdamW")(groups)) is heavyball.AdamW
    assert type(chosen("heavyball.SGD", "--model.optimizer", "AdamW")(groups)) is torch.optim.AdamW


def test_a_short_name_of_two_libraries_alone_is_refused_and_both_paths_are_named(chosen):
    pytest.importorskip("pytorch_optimizer")
    with pytest.raises(
        UsageError, match=r"with name SOAP\. Give the full .*: heavyball\.SOAP, pytorch_optimizer\.SOAP"
    ):
        chosen("SOAP")


class NotInstalled:
    """Finds no module of some packages, as where they are not installed."""

    packages = ("pytorch_optimizer", "heavyball", "torchao")

    def find_spec(self, name: str, *_: Any) -> None:
        if name.partition(".")[0] in self.packages:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize(
    "line",
    ["pytorch_optimizer.Lion", "heavyball.SOAP", "torchao.optim.AdamW8bit", "{class_path: pytorch_optimizer.Lion}"],
)
def test_a_package_that_is_missing_is_one_line_with_the_command_that_installs_it(line, chosen, monkeypatch):
    for module in [module for module in sys.modules if module.partition(".")[0] in NotInstalled.packages]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [NotInstalled(), *sys.meta_path])
    with pytest.raises(UsageError) as error:
        chosen(line)
    package = next(package for package in NotInstalled.packages if package in line)
    assert str(error.value) == (
        f"model.optimizer: {package} is not installed: pip install -e '.[optimizers]' in the clone"
    )


@pytest.mark.parametrize("line", ["nobodys.AdamW8bit", "{class_path: nobodys.AdamW8bit}"])
def test_a_package_that_we_do_not_know_is_one_line_too(line, chosen):
    with pytest.raises(UsageError) as error:
        chosen(line)
    assert str(error.value) == (
        "model.optimizer: no module named 'nobodys': start the command in the folder that holds it, or install it"
    )


# ---- in a Trainer


class Model(GradientClippingMixin, OptimizerMixin, pl.LightningModule):
    """Learns nothing in particular, and writes down what its hooks see."""

    def __init__(self, width: int = 64, **options: Any) -> None:
        super().__init__(**options)
        self.net = net(width)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.lrs: list[Any] = []
        self.left: list[Any] = []

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer):
        grads = [parameter.grad.clone() for parameter in self.parameters()]
        self.norms.append(float(torch.nn.utils.get_total_norm(grads)) if self.trainer.world_size == 1 else 0.0)
        self.lrs.append([lr.clone() if isinstance(lr := group["lr"], torch.Tensor) else lr
                         for group in optimizer.param_groups])  # fmt: skip

    def on_train_batch_end(self, *args):
        self.left.append([parameter.grad for parameter in self.parameters()])


def fit(
    chosen: Any,
    *callbacks: Any,
    steps: int = 6,
    resume: Any = None,
    schedule: Any = None,
    width: int = 64,
    **options: Any,
) -> Any:
    """Train on fixed data, two micro-batches a step: one for each of two ranks, or both by accumulation in one process.

    Returns:
        The model and the Trainer.
    """
    model = Model(width, optimizer=chosen, schedule=schedule)
    rank, world = int(os.environ.get("RANK", 0)), options.get("devices", 1)
    data = torch.randn(steps, 2, 6, 8, generator=torch.Generator().manual_seed(1))
    data = data[3 if resume else 0 :]
    data = data[:, rank] if world > 1 else data.flatten(0, 1)
    run = runs.fit(
        model, *callbacks, data=batches(data), ckpt_path=resume, max_steps=steps, log_every_n_steps=1,
        accumulate_grad_batches=2 // world, use_distributed_sampler=False, **{"gradient_clip_val": 0.05, **options},
    )  # fmt: skip
    return model, run.trainer


def test_monitors_read_the_gradients_that_heavyball_clears():
    model, trainer = fit(factory(CHOSEN["heavyball AdamW"]), GradNormMonitor(per="block"), UpdateMonitor())
    assert all(grad is None for grads in model.left[1::2] for grad in grads)  # after each second micro-batch
    logged = [row for _, row in trainer.logger.rows]
    assert [row["train/grad_norm"] for row in logged if "train/grad_norm" in row] == pytest.approx(model.norms)
    blocks = [name for name in logged[-1] if name.startswith("grad_norms/")]
    assert math.hypot(*(logged[-1][name] for name in blocks)) == pytest.approx(model.norms[-1], rel=1e-5)
    assert all(row["updates/ratio"] > 0 for row in logged if "updates/ratio" in row)


@pytest.mark.parametrize("name", CHOSEN)
def test_the_schedule_sets_each_learning_rate_and_a_tensor_stays_one(name):
    model, _ = fit(factory(CHOSEN[name]), schedule=WarmupLinear(warmup_steps=2))
    expected = [0.005, 0.01, 0.01, 0.0075, 0.005, 0.0025]
    for step, lr in zip(model.lrs, expected, strict=True):
        assert [float(each) for each in step] == pytest.approx([lr] * len(step))
        assert all(isinstance(each, torch.Tensor) == (name == "AdamW8bit") for each in step)


# ---- in shards


SHARDED = {name: CHOSEN[name] for name in ("SGD", "AdamW", "MuonAdamW", "Lion", "AdamW8bit")}
if torch.__version__ < "2.13":
    SHARDED["Lion"] = plain("pytorch_optimizer.Lion", foreach=False)


# torchao has state in 8 bits from 4096 numbers on, which each of two shards has of the second matrix; a clip would add
# the squares of a norm in another order
AS_IN_ONE = {"schedule": WarmupLinear(warmup_steps=2), "gradient_clip_val": None, "width": 128}


def whole(model: nn.Module) -> list[torch.Tensor]:
    return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]


def in_shards(rank: int, expected: dict[str, list[torch.Tensor]], folder: Any) -> None:
    with torch.compiler.set_stance("force_eager"):
        for name, weights in expected.items():
            saver = pl.callbacks.ModelCheckpoint(folder / name, filename="{step}", every_n_train_steps=3, save_top_k=-1)
            options = {"devices": 2, **AS_IN_ONE}
            model, _ = fit(factory(SHARDED[name]), saver, strategy=FSDP2Strategy(blocks=[r"net\.\d"]), **options)
            for found, one in zip(whole(model), weights, strict=True):
                assert torch.equal(found, one), name
            saved = folder / name / "step=3.ckpt"
            strategy = FSDP2Strategy(blocks=[r"net\.\d"])
            resumed, _ = fit(factory(SHARDED[name]), resume=saved, strategy=strategy, **options)
            for found, one in zip(whole(resumed), whole(model), strict=True):
                assert torch.equal(found, one), name


@pytest.mark.long
def test_two_shards_train_as_one_process_and_resume_to_the_bit(tmp_path):
    """Both add the gradients of the same two micro-batches, so that no CPU's rounding is between them.

    Newton-Schulz in bf16, a sign and a code of 8 bits would enlarge one rounding to any size.
    """
    expected = {name: whole(fit(factory(chosen), **AS_IN_ONE)[0]) for name, chosen in SHARDED.items()}
    processes.run(in_shards, expected, tmp_path)


# ---- refused


def trainer_with(**options: Any) -> Any:
    return pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, **options)


SOPHIA = plain("pytorch_optimizer.SophiaH")
SHAPES = "needs the shapes of the parameters, which DeepSpeed and FSDP1 flatten: take AdamW, or FSDP2Strategy"
REFUSED = {
    "Adafactor, shards": (CHOSEN["Adafactor"], {"strategy": FSDP2Strategy}, "Adafactor does not work on sharded"),
    "NorMuon, shards": (CHOSEN["NorMuon"], {"strategy": FSDP2Strategy}, "NorMuon does not work on sharded parameters"),
    "SOAP, shards": (CHOSEN["SOAP"], {"strategy": FSDP2Strategy}, "SOAP does not work on sharded parameters"),
    "Shampoo, shards": (CHOSEN["Shampoo"], {"strategy": FSDP2Strategy}, "Shampoo does not work on sharded parameters"),
    "AdamWFp8, shards": (plain("torchao.optim.AdamWFp8"), {"strategy": FSDP2Strategy}, "take AdamW8bit"),
    "Muon, flat": (CHOSEN["MuonAdamW"], {"strategy": DeepSpeedZeROStrategy}, f"Muon {SHAPES}"),
    "NorMuon, flat": (CHOSEN["NorMuon"], {"strategy": DeepSpeedZeROStrategy}, f"NorMuon {SHAPES}"),
    "heavyball, bf16": (CHOSEN["heavyball AdamW"], {"plugins": BF16True}, "AdamW keeps every fp32 copy"),
    "Sophia, bf16": (SOPHIA, {"plugins": BF16True}, "SophiaH needs second derivatives, which the fp32 copies"),
    "fused SGD, shards": (
        plain("SGD", fused=True),
        {"strategy": FSDP2Strategy},
        "SGD with fused=True does not work on sharded parameters: leave out fused",
    ),
    "Sophia": (SOPHIA, {}, "SophiaH needs second derivatives, and the module's backward() gives first ones"),
}
if torch.__version__ < "2.13":
    REFUSED["Lion, shards"] = (CHOSEN["Lion"], {"strategy": FSDP2Strategy}, "set foreach to false")


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_one_line_when_it_is_chosen(case):
    chosen, options, line = REFUSED[case]
    trainer, model = (
        trainer_with(**{option: make() for option, make in options.items()}),
        Model(optimizer=factory(chosen)),
    )
    with pytest.raises(UsageError) as error:
        model.check_run(trainer, None, "fit")
    assert line in str(error.value)
    assert "\n" not in str(error.value)
    model.trainer = trainer
    with pytest.raises(UsageError) as again:
        model.configure_optimizers()
    assert str(again.value) == str(error.value)


def test_a_module_that_gives_second_derivatives_may_have_sophia():
    class Twice(Model):
        def backward(self, loss, *args, **kwargs):
            loss.backward(create_graph=True)

    Twice(optimizer=factory(SOPHIA)).check_run(trainer_with(), None, "fit")


def test_a_tensor_as_learning_rate_is_refused_where_a_step_would_change_it():
    soap = matrices("pytorch_optimizer.SOAP", lr=torch.tensor(0.01))
    with pytest.raises(UsageError, match=r"Tensor lr[^\n]*: give a float, which the schedule sets at each step$"):
        build_optimizer(net(), factory(soap))


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        (CHOSEN["AdamW"], CHOSEN["heavyball AdamW"], ("AdamW", "heavyball.AdamW")),
        (
            CHOSEN["SOAP"],
            CHOSEN["NorMuon"],
            ("MatrixAdamW(matrices=pytorch_optimizer.SOAP", "MatrixAdamW(matrices=pytorch_optimizer.NorMuon"),
        ),
    ],
)
def test_a_resume_with_an_optimizer_of_another_package_is_refused(first, second, names, tmp_path):
    saver = pl.callbacks.ModelCheckpoint(tmp_path, filename="saved", every_n_train_steps=3)
    fit(factory(first), saver, steps=3)
    with pytest.raises(UsageError) as error:
        fit(factory(second), resume=tmp_path / "saved.ckpt")
    assert f"the checkpoint holds the state of {names[0]}" in str(error.value)
    assert f"which {names[1]}" in str(error.value)
    assert "\n" not in str(error.value)
    fit(factory(first), resume=tmp_path / "saved.ckpt")


# ---- MatrixAdamW


def test_matrices_go_to_the_chosen_optimizer_and_the_rest_to_adamw():
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Conv1d(8, 8, 3), nn.Linear(8, 10))
    optimizer = build_optimizer(model, lambda groups: MatrixAdamW(groups, lambda own: torch.optim.SGD(own, lr=0.1)))
    names = {group["name"]: group["param_names"] for group in optimizer.param_groups}
    assert names["matrices:decay"] == ["1.weight", "3.weight"]
    assert names["adamw:decay"] == ["0.weight", "4.weight"]
    assert {group["name"]: group["lr"] for group in optimizer.param_groups}["adamw:no_decay"] == 3e-4
    rules = [ParamRule("1.weight", optimizer="adamw")]
    optimizer = build_optimizer(model, lambda groups: MatrixAdamW(groups, torch.optim.SGD), rules=rules)
    names = {group["name"]: group["param_names"] for group in optimizer.param_groups}
    assert names["matrices:decay"] == ["3.weight"]


def test_what_matrix_adamw_cannot_split_is_one_line():
    made = lambda groups: MatrixAdamW(groups, torch.optim.SGD)  # noqa: E731
    with pytest.raises(UsageError, match=r"MatrixAdamW: the model has no hidden matrix: take torch\.optim\.AdamW"):
        build_optimizer(nn.LayerNorm(4), made)
    with pytest.raises(UsageError, match=r"optimizer='muon' of [^\n]*: MatrixAdamW has matrices and adamw"):
        build_optimizer(net(), made, rules=[ParamRule("0.weight", optimizer="muon")])
    with pytest.raises(UsageError, match=r"MatrixAdamW: its groups do not tell the role of each parameter"):
        made([{"params": [nn.Parameter(torch.eye(2))]}])
