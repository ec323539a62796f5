"""The dashboard: its charts, address, cards and result; and that training does not notice it."""

import re
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from harness import processes
from harness.runs import On
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from short_run import Model, Raise, events, fit, points, save_every, tensors
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2
from torch.optim import lr_scheduler

from lightning_tricks.callbacks import MetricBuffer, TensorBoardDashboard
from lightning_tricks.loggers import ResumingTensorBoardLogger
from lightning_tricks.monitors.tensorboard_dashboard import (
    OVERVIEW_METRICS,
    facts,
    flat,
    how_to_open,
    layout,
    planned_lrs,
    table,
)
from lightning_tricks.schedules import ScheduleLR, WarmupConstant, WarmupLinear

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning on resuming in mid-epoch


def charts(of: dict, names: list[str]) -> dict[str, list[str]]:
    """Which of `names` each chart shows; TensorBoard matches from the start of a name."""
    return {
        title: [name for name in names if any(re.compile(tag).match(name) for tag in tags)]
        for category in of.values()
        for title, (_, tags) in category.items()
    }


def test_what_is_recorded_of_the_inside_and_of_the_machine_gets_its_charts():
    names = ["updates/ratio", "updates/h.0/ratio", "activations/h.0/rms", "activations/h.1/rms", "activations/h.1/zero"]
    names += ["attention/h.0/max_logit", "train/loss", "xactivations/h.0/rms", "memory/peak_rss_gib", "memory/retries"]
    names += [f"precision/{name}" for name in ("loss_scale", "skipped_steps", "fp8_share", "other")]
    assert charts(layout(names), names) == {
        "activations: rms": ["activations/h.0/rms", "activations/h.1/rms"],
        "activations: zero": ["activations/h.1/zero"],
        "attention: max_logit": ["attention/h.0/max_logit"],
        "updates: ratio": ["updates/ratio", "updates/h.0/ratio"],
        "loss scale": ["precision/loss_scale"],
        "skipped steps": ["precision/skipped_steps"],
        "fp8: share": ["precision/fp8_share"],
        "memory, GiB": ["memory/peak_rss_gib"],
    }
    assert layout(["train/lr"]) == {}


def test_the_sources_of_a_mixture_stand_side_by_side_in_a_chart_of_each_kind():
    names = [f"sources/{name}/{kind}" for name in ("web", "code") for kind in ("train_loss", "epochs")]
    assert charts(layout(names), names) == {
        "epochs": ["sources/web/epochs", "sources/code/epochs"],
        "train loss": ["sources/web/train_loss", "sources/code/train_loss"],
    }


def test_the_overview_comes_before_every_name_of_ours():
    assert all(
        name.startswith("_overview/") for name in OVERVIEW_METRICS
    )  # TensorBoard sorts "_" and "/" before letters
    assert list(OVERVIEW_METRICS) == sorted(OVERVIEW_METRICS)


def test_a_table_keeps_its_two_columns():
    assert table({"a": "x|y", "b": "one\ntwo"}) == "| | |\n|---|---|\n| a | x\\|y |\n| b | one\\\\ntwo |"


def test_hyperparameters_are_flat_numbers_and_short_strings():
    given = {"a": {"b": {"c": 1}}, "d": 0.5, "e": True, "f": "x" * 100, "g": [1], "h": None, "i": "x"}
    assert flat(given) == {"a.b.c": 1, "d": 0.5, "e": True, "i": "x"}


def test_the_facts_count_parameters_that_have_a_size():
    trainer = pl.Trainer(accelerator="cpu", max_steps=7, gradient_clip_val=0.5, logger=False)
    model = Model()
    model.layer.bias.requires_grad_(False)
    model.lazy = torch.nn.LazyLinear(3)
    said = facts(trainer, model)
    assert (said["module"], said["parameters"], said["trainable parameters"]) == ("Model", "3", "2")
    assert (said["max_steps"], said["gradient_clip_val"], said["devices"]) == (7, 0.5, 1)
    expected = ("32-true", "SingleDeviceStrategy", pl.__version__)
    assert (said["precision"], said["strategy"], said["lightning"]) == expected


def optimizer() -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(3))]}, {"params": [torch.nn.Parameter(torch.ones(2))]}]
    return torch.optim.AdamW(groups, lr=0.2)


@pytest.mark.parametrize("done", [0, 7])
def test_the_planned_learning_rates_are_those_of_the_run(done):
    driven, own = optimizer(), WarmupConstant(warmup_steps=9)
    scheduler = ScheduleLR(driven, WarmupLinear(warmup_steps=5), 30, group_schedules=[own, None])
    scheduler.scale_by(lambda step: 2.0 if step < 10 else 1.0)
    used = []
    for step in range(30):
        if step == done:
            planned = planned_lrs(scheduler, 30)
        used.append((step, driven.param_groups[0]["lr"]))
        driven.step()
        scheduler.step()
    assert planned == [(step, pytest.approx(lr)) for step, lr in used]


def test_the_plan_of_a_long_run_has_chosen_steps_with_the_first_and_the_last_and_no_groups_scale():
    driven = optimizer()
    driven.param_groups[0].update(lr=0.8, lr_scale=4.0)
    planned = planned_lrs(ScheduleLR(driven, WarmupLinear(warmup_steps=1), 1001), 1001, points=5)
    assert planned == [(step, pytest.approx(0.2 * (1 - max(step - 1, 0) / 1000))) for step in range(0, 1001, 250)]
    assert planned_lrs(ScheduleLR(driven, WarmupLinear(warmup_steps=1), 5), 0) == []


class Scheduled(Model):
    curve = WarmupLinear(warmup_steps=2)

    def __init__(self, **options):
        super().__init__(**options)
        self.save_hyperparameters({"depth": 3, "data": {"name": "text"}})

    def configure_optimizers(self):
        driven = super().configure_optimizers()
        return [driven], [{"scheduler": ScheduleLR(driven, self.curve, 20), "interval": "step"}]


class Record(pl.Callback):
    def setup(self, trainer, pl_module, stage):
        self.buffer = MetricBuffer.of(trainer)

    def on_before_optimizer_step(self, *_):
        self.buffer.record("train/grad_norm", 2.0)
        self.buffer.record("activations/layer/rms", 1.0)


def logger(folder: Path, **options) -> ResumingTensorBoardLogger:
    return ResumingTensorBoardLogger(folder, name="run", version="", **options)


def train(folder: Path, steps: int, *callbacks: pl.Callback, **options) -> pl.Trainer:
    """`fit` with a dashboard, which writes into `folder`."""
    return fit(options.pop("logger", logger(folder)), steps, callbacks=(TensorBoardDashboard(), *callbacks), **options)


def stock(folder: Path) -> TensorBoardLogger:
    return TensorBoardLogger(folder, name="run", version="")


def texts(folder: Path) -> list[tuple[int, str]]:
    return [
        (event.step, event.tensor_proto.string_val[0].decode())
        for event in tensors(folder / "run").Tensors("recipe/text_summary")
    ]


def plan(folder: Path) -> list[tuple[int, float]]:
    return points(folder / "run/plan", "_overview/3_learning_rate")


def layouts(folder: Path) -> list[layout_pb2.Layout]:
    return [
        layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
        for event in tensors(folder / "run").Tensors("custom_scalars__config__")
    ]


def hparams(folder: Path) -> plugin_data_pb2.HParamsPluginData:
    content = events(folder / "run").SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    return plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams


@pytest.mark.parametrize("make", [logger, stock])
def test_a_run_gets_its_cards(tmp_path, make):
    options = {"logger": make(tmp_path), "model": Scheduled(), "gradient_clip_val": 0.5, "log_every_n_steps": 4}
    train(tmp_path, 12, Record(), **options)
    ((step, text),) = texts(tmp_path)
    assert step == 0
    for said in ("| module | Scheduled |", "| parameters | 3 |", "| max_steps | 12 |", "| depth | 3 |"):
        assert said in text
    assert plan(tmp_path) == [(step, pytest.approx(Scheduled.curve.lr(0.1, step, 20))) for step in range(12)]
    (drawn,) = layouts(tmp_path)
    assert [category.title for category in drawn.category] == ["Inside the model"]
    assert [chart.title for chart in drawn.category[0].chart] == ["activations: rms"]
    assert list(drawn.category[0].chart[0].multiline.tag) == ["^activations/(.*/)?rms$"]
    assert [step for step, _ in points(tmp_path / "run", "_overview/1_loss")] == list(range(12))
    assert points(tmp_path / "run", "_overview/2_gradient_norm") == [(step, 2.0) for step in range(12)]
    assert {value for _, value in points(tmp_path / "run/clip", "_overview/2_gradient_norm")} == {0.5}
    assert points(tmp_path / "run/validation", "_overview/1_loss")[-1] == (9, 1009.0)
    clip = points(tmp_path / "run", "train/clip_norm")
    assert {value for _, value in clip} == {0.5}
    assert (clip[0][0], clip[-1][0]) == (0, 11)
    assert points(tmp_path / "run", "hp/val_loss") == [(11, 1009.0)]
    assert points(tmp_path / "run", "hp_metric") == [(0, -1), (11, 1009.0)]
    assert {name: value.number_value for name, value in hparams(tmp_path).items()}["depth"] == 3


def test_without_hyperparameters_of_lightnings_the_module_is_named(tmp_path):
    train(tmp_path, 6)
    assert {name: value.string_value for name, value in hparams(tmp_path).items()} == {"module": "Model"}
    assert points(tmp_path / "run", "hp/val_loss") == [(5, 1004.0)]
    run = events(tmp_path / "run")
    assert "hp_metric" not in run.Tags()["scalars"]
    assert not (tmp_path / "run/plan").exists()  # no schedule
    assert "train/clip_norm" not in run.Tags()["scalars"]  # no clip
    metadata = run.SummaryMetadata("_hparams_/experiment").plugin_data.content
    shown = plugin_data_pb2.HParamsPluginData.FromString(metadata).experiment.metric_infos
    assert [info.name.tag for info in shown] == ["hp/val_loss"]


def test_without_lightnings_placeholder_there_is_no_hp_metric(tmp_path):
    train(tmp_path, 6, logger=logger(tmp_path, default_hp_metric=False), model=Scheduled())
    assert "hp_metric" not in events(tmp_path / "run").Tags()["scalars"]
    assert {name: value.string_value for name, value in hparams(tmp_path).items()}["data.name"] == "text"


@pytest.mark.parametrize("every", [1, 4])
def test_no_metric_stands_twice_at_a_step(tmp_path, every):
    options = {"gradient_clip_val": 0.5, "log_every_n_steps": every, "enable_checkpointing": True}
    train(tmp_path, 6, Record(), save_every(2, tmp_path), model=Scheduled(), **options)
    train(tmp_path, 9, Record(), model=Scheduled(), ckpt_path=tmp_path / "step=4.ckpt", **options)
    run = events(tmp_path / "run")
    clip = [step for step, _ in points(tmp_path / "run", "train/clip_norm")]
    assert {0, 4, 8} <= set(clip)
    for name in run.Tags()["scalars"]:
        steps = [step for step, _ in points(tmp_path / "run", name)]
        assert len(set(steps)) == len(steps) or name == "epoch", (name, steps)


def test_a_resumed_run_adds_its_cards_at_the_step_where_it_goes_on(tmp_path):
    saver, options = save_every(10, tmp_path), {"enable_checkpointing": True, "gradient_clip_val": 0.5}
    train(tmp_path, 20, saver, model=Scheduled(), **options)
    options = {"ckpt_path": tmp_path / "step=10.ckpt", "gradient_clip_val": 0.25, "log_every_n_steps": 4}
    train(tmp_path, 15, Record(), model=Scheduled(run=2), **options)
    assert [step for step, _ in texts(tmp_path)] == [0, 10]
    assert points(tmp_path / "run", "hp/val_loss") == [(14, 2014.0)]
    clip = points(tmp_path / "run", "train/clip_norm")
    # the loss of each step is a row, so that each of its logging intervals has the clip
    assert clip == [*((step, 0.5) for step in range(10)), (10, 0.25), (11, 0.25), (14, 0.25)]
    first, second = layouts(tmp_path)
    assert [category.title for category in first.category] == []
    assert [category.title for category in second.category] == ["Inside the model"]
    for place, name in (("run", "1_loss"), ("run/validation", "1_loss"), ("run/clip", "2_gradient_norm")):
        steps = [step for step, _ in points(tmp_path / place, f"_overview/{name}")]
        assert steps == sorted(set(steps))
        assert steps[-1] == 14
    # a fresh start in the same folder leaves its own only
    train(tmp_path, 6, model=Scheduled(run=3))
    assert [step for step, _ in texts(tmp_path)] == [0]
    assert len(layouts(tmp_path)) == 1
    assert points(tmp_path / "run", "hp/val_loss") == [(5, 3004.0)]
    assert points(tmp_path / "run", "hp_metric") == [(0, -1), (5, 3004.0)]


def ended_well(folder: Path) -> bool:
    return "_hparams_/session_end_info" in tensors(folder / "run").AllSummaryMetadata()


@pytest.mark.parametrize(("steps", "result"), [(8, [(7, 1004.0)]), (2, [])], ids=["behind a validation", "before any"])
def test_a_failed_run_still_has_the_result_of_its_last_validation(tmp_path, steps, result):
    with pytest.raises(RuntimeError, match="power cut"):
        train(tmp_path, 20, Raise(steps), num_sanity_val_steps=1)
    shown = events(tmp_path / "run").Tags()["scalars"]
    assert (points(tmp_path / "run", "hp/val_loss") if "hp/val_loss" in shown else []) == result
    assert len(texts(tmp_path)) == len(layouts(tmp_path)) == 1
    assert not ended_well(tmp_path)


def test_a_run_shorter_than_an_interval_has_its_layout_too_and_ends_well(tmp_path):
    train(tmp_path, 3, Record(), log_every_n_steps=50, gradient_clip_val=0.5, gradient_clip_algorithm="value")
    assert len(layouts(tmp_path)) == 1
    assert ended_well(tmp_path)
    assert "train/clip_norm" not in events(tmp_path / "run").Tags()["scalars"]  # a value is no line in a norm's chart


def test_a_logger_that_fails_in_the_failure_hides_nothing(tmp_path):
    class Broken(ResumingTensorBoardLogger):
        def log_metrics(self, metrics, step=None, wall_time=None):
            if "hp/val_loss" in metrics:
                raise OSError("disk full")
            super().log_metrics(metrics, step, wall_time)

    options = {"logger": Broken(tmp_path, name="run", version=""), "log_every_n_steps": 100}
    with pytest.raises(RuntimeError, match="power cut"):
        train(tmp_path, 20, Record(), Raise(8), **options)
    assert points(tmp_path / "run", "train/grad_norm")[-1] == (7, 2.0)  # the buffer's turn came


def test_a_failure_before_the_first_batch_writes_nothing(tmp_path):
    def fail(*_):
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        train(tmp_path, 20, On(on_train_start=fail))
    assert events(tmp_path / "run").Tags()["tensors"] == []


def test_the_layout_waits_for_the_first_interval_and_is_written_once(tmp_path):
    seen = []

    def look(trainer, *_):
        trainer.logger.save()
        seen.append("custom_scalars__config__" in events(tmp_path / "run").Tags()["tensors"])

    train(tmp_path, 8, On(on_train_batch_start=look), log_every_n_steps=3)
    assert seen == [False] * 3 + [True] * 5
    assert len(layouts(tmp_path)) == 1


def test_the_plan_of_a_resumed_run_takes_the_place_of_the_earlier_one(tmp_path):
    saver, options = save_every(10, tmp_path), {"enable_checkpointing": True}
    train(tmp_path, 12, saver, model=Scheduled(), **options)
    (file,) = (tmp_path / "run/plan").iterdir()
    other = Scheduled()
    other.curve = WarmupLinear(warmup_steps=4)
    time.sleep(max(0.0, int(file.name.split(".")[3]) + 1 - time.time()))  # TensorBoard sorts files by their second
    train(tmp_path, 12, saver, model=other, ckpt_path=tmp_path / "step=10.ckpt", **options)
    assert plan(tmp_path) == [(step, pytest.approx(other.curve.lr(0.1, step, 20))) for step in range(12)]


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda driven: lr_scheduler.StepLR(driven, 1), {"interval": "step"}),
        (lambda driven: ScheduleLR(driven, Scheduled.curve, 20), {"interval": "step", "frequency": 2}),
        (lambda driven: ScheduleLR(driven, Scheduled.curve, 20), {"interval": "epoch"}),
    ],
)
def test_a_curve_that_is_no_function_of_the_step_has_no_plan(tmp_path, make, options):
    class Other(Model):
        def configure_optimizers(self):
            driven = super().configure_optimizers()
            return [driven], [{"scheduler": make(driven), **options}]

    train(tmp_path, 3, model=Other())
    assert not (tmp_path / "run/plan").exists()


def test_losses_of_foreign_names_reach_the_overview_and_the_result(tmp_path, capsys):
    class Foreign(Model):
        def training_step(self, batch, batch_idx):
            loss = self.layer(batch).mean()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("eval.loss", 3.0)

    fit(logger(tmp_path), 6, model=Foreign(), log_every_n_steps=1, callbacks=(TensorBoardDashboard("eval.loss"),))
    assert points(tmp_path / "run", "hp/val_loss") == [(5, 3.0)]
    assert points(tmp_path / "run", "_overview/1_loss") == points(tmp_path / "run", "loss")
    assert points(tmp_path / "run/validation", "_overview/1_loss") == points(tmp_path / "run", "eval.loss")
    assert capsys.readouterr().out.splitlines()[0] == f"TensorBoard: {how_to_open(str(tmp_path / 'run'))}"


@pytest.mark.parametrize("loggers", [lambda _: False, lambda folder: CSVLogger(folder)], ids=["none", "CSV"])
def test_without_a_tensorboard_logger_one_line_says_so(tmp_path, capsys, loggers):
    train(tmp_path, 6, Record(), logger=loggers(tmp_path), gradient_clip_val=0.5)
    out = capsys.readouterr().out
    assert out.count("TensorBoardDashboard: the Trainer has no TensorBoardLogger, so there is no dashboard\n") == 1
    assert "tensorboard --logdir" not in out
    assert not list(tmp_path.rglob("*tfevents*"))
    assert not any("clip_norm" in file.read_text() for file in tmp_path.rglob("metrics.csv"))


def test_a_fast_dev_run_is_silent(tmp_path, capsys):
    train(tmp_path, -1, fast_dev_run=True)
    assert "ensor" not in capsys.readouterr().out.replace("`Tensor`", "")


def test_where_lightningcli_runs_the_recipe_is_on_its_card(tmp_path):
    args = {
        "fit": {
            "trainer": {
                "accelerator": "cpu", "max_steps": 3, "enable_progress_bar": False, "enable_model_summary": False,
                "enable_checkpointing": False,
                "logger": {
                    "class_path": "lightning_tricks.loggers.ResumingTensorBoardLogger",
                    "init_args": {"save_dir": str(tmp_path), "name": "run", "version": ""},
                },
                "callbacks": [{"class_path": "lightning_tricks.callbacks.TensorBoardDashboard"}],
            },
            "model": {"run": 4},
        },
        "subcommand": "fit",
    }  # fmt: skip

    class CLI(LightningCLI):
        def fit(self, model, **_):
            self.trainer.fit(model, torch.utils.data.DataLoader(torch.randn(8, 2)))

    CLI(Model, args=args)
    ((_, text),) = texts(tmp_path)
    yaml = text.split("```yaml\n")[1]
    assert "max_steps: 3" in yaml
    assert "ResumingTensorBoardLogger" in yaml
    assert "null" not in yaml
    assert hparams(tmp_path)["model.run"].number_value == 4
    assert hparams(tmp_path)["trainer.max_steps"].number_value == 3


def _ranks(rank: int, folder: str) -> None:
    if rank:
        import tensorboard.summary.writer.event_file_writer as module

        def forbidden(*_, **__):
            raise AssertionError("rank 1 writes")

        module.EventFileWriter.__init__ = forbidden
    options = {"devices": 2, "strategy": "ddp", "gradient_clip_val": 0.5, "log_every_n_steps": 2}
    trainer = train(Path(folder), 6, Record(), **options)
    # a value that ranks may monitor must be the same on all
    assert float(trainer.callback_metrics["train/clip_norm"]) == 0.5


@pytest.mark.long
def test_only_rank_0_writes(tmp_path):
    processes.run(_ranks, str(tmp_path))
    assert len(texts(tmp_path)) == 1
    assert points(tmp_path / "run", "hp/val_loss") == [(5, 1004.0)]
