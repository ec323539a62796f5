"""ladder: rungs on the recipe's own curve, trained by fit and kept; a forecast before the run, and its miss."""

import contextlib
import dataclasses
import io
import json
import math
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from cli.parsers import one_parser  # noqa: F401, a fixture
from harness.preloaded import python

from lightning_tricks import GPT2, LanguageModel, Llama, MuP
from lightning_tricks import __main__ as door
from lightning_tricks._core.errors import UsageError
from lightning_tricks.commands import ladder as command
from lightning_tricks.commands.ladder import rungs, sizes
from lightning_tricks.commands.ladder.rungs import Ladder, RungRun
from lightning_tricks.commands.ladder.sizes import Size, base_of, ladders, sizes_below
from lightning_tricks.language_model import LanguageModel as Module
from lightning_tricks.logs import forecast_file
from lightning_tricks.logs.compared_run import read_runs
from lightning_tricks.logs.run import read_run

RECIPE = """
seed_everything: 7
model:
  class_path: LanguageModel
  init_args:
    decoder: {class_path: Llama, init_args: {d_model: 64, n_layers: 1, n_heads: 4, activation: relu2}}
    optimizer: {class_path: AdamW, init_args: {lr: 1.0e-2}}
    schedule: {class_path: WarmupStableDecay, init_args: {warmup_steps: 12, decay_steps: 24}}
data:
  class_path: TextData
  init_args: {files: text.txt, vocab_size: 300, seq_len: 16, micro_batch_size: 8, cache_dir: cache, val_fraction: 0.3}
trainer:
  accelerator: cpu
  max_steps: 120
  log_every_n_steps: 20
  val_check_interval: 60
  limit_val_batches: 4
  num_sanity_val_steps: 0
  enable_progress_bar: false
  logger: {class_path: ResumingCSVLogger, init_args: {save_dir: runs, name: toy}}
  callbacks:
    - StepGuard
    - MemoryMonitor
    - {class_path: SampleText, init_args: {prompts: [a], max_new_tokens: 4}}
    - {class_path: SafeCheckpoint, init_args: {every_n_train_steps: 60}}
"""
OPTIONS = ["--config", "toy.yaml", "--rungs", "4", "--seeds", "1", "--out", "out"]
NAMES = ["rung-1", "rung-2", "rung-2-lr-0.5", "rung-2-lr-2", "rung-3", "rung-4"]


def call(*more: str) -> int:
    """The exit code of the command."""
    with pytest.raises(SystemExit) as stop:
        door.run(["ladder", *OPTIONS, *more])
    return int(stop.value.code or 0)


JUDGED: list[list[str]] = []  # runs by which learning rates were judged


def fit_here(words, file, lock):
    """In place of a process."""
    door.run(words)


def few_steps(patch, folder):
    """In this folder, rungs may have few steps, and are trained in this process."""
    patch.chdir(folder)
    patch.setattr(sizes, "LEAST_STEPS", 8)
    patch.setattr(rungs, "_fit", fit_here)
    patch.setattr(command, "_commit", lambda: "a commit")  # without a process
    patch.setattr(command, "_check_lr", lambda ladder, runs, losses: JUDGED.append([run.name for run in runs]))
    patch.setattr(Ladder, "seconds", lambda ladder, size, lock: (2.0, size.flops / size.steps * 1e-9))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, text_file, one_parser):  # noqa: F811
    """A recipe and its text, tokenized."""
    folder = tmp_path_factory.mktemp("ladder")
    (folder / "text.txt").write_text(Path(text_file).read_text()[:60_000])
    (folder / "toy.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        door.run(["prepare", "--config", "toy.yaml"])
    return folder


@pytest.fixture
def toy(tmp_path, prepared, monkeypatch):
    """The same in the current folder."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    few_steps(monkeypatch, tmp_path)
    return tmp_path


GPT = Size(GPT2(vocab_size=50304, d_model=768, n_layers=12, n_heads=12), 20000, 32, 4, 1, 1024)


@pytest.mark.parametrize(
    "recipe",
    [
        GPT,
        Size(Llama(vocab_size=4096, d_model=256, n_layers=4, n_heads=4, activation="relu2"), 5000, 8, 1, 1, 256),
        Size(Llama(vocab_size=32000, d_model=4096, n_layers=32, n_heads=32, n_kv_heads=8), 100000, 4, 8, 8, 4096),
    ],
)
def test_every_ladder_lies_on_the_recipes_curve_and_within_half_its_span(recipe):
    found = ladders(recipe, sizes_below(recipe, base_of(recipe.config, None), 2), 5)
    assert found
    for ladder in found:
        flops = [size.flops for size in ladder]
        assert flops == sorted(set(flops))
        assert 10 <= flops[-1] / flops[0] <= 160
        assert 1 < recipe.flops / flops[-1] <= math.sqrt(flops[-1] / flops[0])
        for size in ladder:
            assert size.steps >= 400
            assert size.steps % 2 == 0, "the last of two validations comes at the end"
            ratio = size.tokens / size.parameters * recipe.parameters / recipe.tokens
            assert ratio == pytest.approx(1, rel=0.01)
            shape, own = size.config, recipe.config
            assert (shape.n_layers, shape.vocab_size) == (own.n_layers, own.vocab_size)
            assert shape.ffn_width / shape.d_model == pytest.approx(own.ffn_width / own.d_model, rel=0.1)
            assert shape.head_dim <= own.head_dim
            assert shape.n_heads >= 4
            assert shape.n_heads % shape.kv_heads == 0
    distances = [recipe.flops / ladder[-1].flops for ladder in found]
    assert distances == sorted(distances), "the nearest first"


def test_flops_of_a_size_are_those_of_the_formula_by_hand():
    shape = Llama(vocab_size=10, d_model=8, n_layers=1, n_heads=2, n_kv_heads=2, d_ff=32, activation="relu2")
    size = Size(shape, steps=5, rows=2, accumulate=3, ranks=1, seq_len=4)
    body = 4 * 8 * 8 + 2 * 8 * 32
    assert (size.parameters, size.tokens) == (body + 80, 5 * 2 * 3 * 4)
    assert size.flops == 120 * (6 * (body + 80) + 12 * 8 * 4 / 2)
    assert size.has_small_head


def test_a_run_of_few_steps_gets_rungs_with_fewer_rows_and_one_that_is_too_short_is_refused():
    tiny = Size(Llama(vocab_size=4096, d_model=256, n_layers=4, n_heads=4, activation="relu2"), 400, 8, 2, 1, 256)
    base = base_of(tiny.config, None)
    below = sizes_below(tiny, base, 1)
    assert {size.rows * size.accumulate for size in below} == {1, 2, 4, 8}
    assert all(size.steps >= 400 for size in below)
    short = dataclasses.replace(tiny, steps=50)
    with pytest.raises(UsageError, match=r"no room for 5 rungs .* lengthen the run, --trainer.max_steps") as error:
        ladders(short, sizes_below(short, base, 1), 5)
    longer = dataclasses.replace(tiny, steps=int(str(error.value).split("max_steps ")[1].split(",")[0]))
    assert ladders(longer, sizes_below(longer, base, 1), 5), "the remedy helps"


def test_the_recipe_itself_is_unchanged_under_the_parametrization_of_its_rungs():
    shape = Llama(vocab_size=64, d_model=64, n_layers=1, n_heads=2, max_seq_len=8)
    mup = base_of(shape, None)
    assert mup.base_config(shape) == shape
    assert base_of(shape, MuP(32)) == MuP(32, 32), "heads of the recipe's width in the base model"
    for size in sizes_below(Size(shape, 10**6, 8, 1, 1, 8), mup, 1):
        model = LanguageModel(size.config, mup=mup)
        assert model.base_config.d_model == 64


def made(settings=RECIPE, validations=2):
    recipe = Size(Llama(vocab_size=300, d_model=64, n_layers=1, n_heads=4, activation="relu2"), 120, 8, 1, 1, 16)
    document = yaml.safe_load(settings)
    return Ladder(Path("out"), document, recipe, base_of(recipe.config, None), validations)


def test_a_rungs_recipe_has_its_sizes_its_schedule_its_seed_and_only_callbacks_that_change_training(monkeypatch):
    average = "{class_path: lightning_tricks.TailAverage, init_args: {horizon_steps: 40}}"
    text = RECIPE.replace("- StepGuard", f"- {{class_path: lightning_tricks.StepGuard}}\n    - {average}")
    for name in ("MemoryMonitor", "SampleText", "SafeCheckpoint"):
        text = text.replace(f"class_path: {name}", f"class_path: lightning_tricks.{name}")
    text = text.replace("- MemoryMonitor", "- {class_path: lightning_tricks.MemoryMonitor}")
    text = text.replace("{lr: 1.0e-2}", "{lr: 1.0e-2, momentum_warmup_steps: 8, ns_steps: 5}")  # as Muon has them
    text = text.replace("val_fraction: 0.3}", "weights: [{weights: {a: 1}, at_tokens: 7680}, {weights: {a: 0}}]}")
    ladder = made(text)
    shape = dataclasses.replace(ladder.recipe.config, d_model=16, n_heads=4, d_ff=64)
    size = dataclasses.replace(ladder.recipe, config=shape, steps=30, rows=4)
    run = RungRun(2, size, seed=1, lr_scale=2.0)
    found = ladder.settings_of(run)
    model, trainer = found["model"]["init_args"], found["trainer"]
    assert run.name == "rung-2-seed-1-lr-2"
    assert model["decoder"]["init_args"]["d_model"] == 16
    assert model["mup"] == {"base_width": 64, "base_head_dim": 16}
    assert model["schedule"]["init_args"] == {"warmup_steps": 3, "decay_steps": 6}
    assert model["optimizer"]["init_args"] == {"lr": 2e-2, "momentum_warmup_steps": 2, "ns_steps": 5}
    assert (trainer["max_steps"], trainer["val_check_interval"], trainer["log_every_n_steps"]) == (30, 15, 5)
    assert trainer["limit_val_batches"] == 8, "the same validation rows"
    changes = [{"weights": {"a": 1}, "at_tokens": 960}, {"weights": {"a": 0}}]
    assert found["data"]["init_args"]["weights"] == changes, "at half of its tokens, as in the recipe"
    assert (found["seed_everything"], found["resume"]) == (8, "auto")
    names = [each["class_path"].rpartition(".")[2] for each in trainer["callbacks"]]
    assert names == ["StepGuard", "TailAverage", "SafeCheckpoint"]
    assert trainer["callbacks"][1]["init_args"] == {"horizon_steps": 10}
    assert ladder.settings == yaml.safe_load(text), "the recipe's own settings stay"


@pytest.fixture(scope="module")
def trained(tmp_path_factory, prepared):
    """The commands were printed, and run one by one, as on a cluster."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(prepared, folder, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        few_steps(patch, folder)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert call("--print-commands") == 0
        assert not list(Path("out").glob("rung-*/metrics.csv"))
        lines = printed.getvalue().splitlines()
        for line in lines:
            words = shlex.split(line)
            assert words[:3] == ["python", "-m", "lightning_tricks"]
            door.run(words[3:])
    assert [Path(line.split()[-1]).stem for line in lines] == NAMES
    return folder


@pytest.fixture
def finished(tmp_path, trained, monkeypatch):
    """The folder in which they were run, as the current one."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    few_steps(monkeypatch, tmp_path)


def test_commands_are_printed_and_run_elsewhere_and_a_later_call_reads_what_is_finished(finished, monkeypatch, capsys):
    monkeypatch.setattr(rungs, "_fit", None)  # nothing is trained
    JUDGED.clear()
    code = call("--json", "answer.json")
    assert [NAMES[:4]] == JUDGED, "before larger rungs are trained"
    record = forecast_file.read_forecast("x", "out")
    assert [each["losses"] for each in record["rungs"]] == [
        [read_run(Path("out", name)).val_loss] for name in NAMES if "lr" not in name
    ]
    assert record["other_learning_rates"].keys() == {"0.5", "2"}
    assert code == (1 if record["forecast"]["refusal"] else 0)
    assert record["target"]["steps"] == 120
    assert record["target"]["flops"] > record["rungs"][-1]["flops"]
    assert json.loads(Path("answer.json").read_text())["forecast"] == record["forecast"]
    page = Path("out/forecast.html").read_text()
    assert page.count("<polyline") == 4
    assert "written to out/forecast.json" in capsys.readouterr().out
    assert call() == code
    assert forecast_file.read_forecast("x", "out")["date"] == record["date"], "it is written once"
    with pytest.raises(UsageError, match=r"another recipe \(model.optimizer.lr\): give the same options, or another"):
        door.run(["ladder", *OPTIONS, "--model.optimizer.lr", "3e-3"])


def test_the_run_of_the_recipe_is_told_beside_its_forecast(finished, capsys):
    call()
    door.run(["fit", "--config", "toy.yaml"])
    door.run(["fit", "--config", "toy.yaml", "--model.weight_decay", "0.3"])
    capsys.readouterr()
    door.run(["compare", "--forecast", "out/forecast.json", "runs/toy", "--html", "page.html"])
    lines = capsys.readouterr().out.splitlines()
    assert "version_0: got" in lines[1]
    assert "last validation" not in lines[1]
    assert "90 % interval" in lines[1]
    assert lines[2] == "compare: version_1: not the run of the forecast: model.weight_decay differ"
    assert Path("page.html").read_text().count("version_0") >= 2
    door.run(["runs", "runs/toy", "--forecast", "out", "--json", "-"])
    one, other = sorted(json.loads(capsys.readouterr().out), key=lambda each: each["name"])
    found = forecast_file.read_forecast("x", "out")["forecast"]
    assert one["forecast"]["miss"] == pytest.approx(one["val_loss"] / found["loss"] - 1)
    assert one["forecast"]["is_inside"] == (found["low"] <= one["val_loss"] <= found["high"])
    assert other["forecast"]["loss"] is None
    early = read_run(Path("runs/toy/version_0"))
    early.scalars.metrics["val/loss"].steps.pop()
    early.scalars.metrics["val/loss"].values.pop()
    line = forecast_file.outcome(forecast_file.read_forecast("x", "out"), early)["line"]
    assert "; its last validation was at step 60, and not at the end" in line
    door.run(["compare", "--speedup", "out", "runs/toy/version_0", "runs/toy/version_1", "--json", "-"])
    factor = json.loads(capsys.readouterr().out)
    assert factor["method"] in ("floor", "local slope")
    assert factor["low"] <= factor["factor"]


def test_a_speedup_of_runs_on_other_text_is_refused(finished, capsys):
    call()
    for option, value in (("seq_len", "16"), ("seq_len", "8"), ("shuffle", "documents")):
        door.run(["fit", "--config", "toy.yaml", f"--data.{option}", value])
    runs, _ = read_runs([f"runs/toy/version_{number}" for number in range(3)], {})
    record = forecast_file.read_forecast("x", "out")
    with pytest.raises(UsageError, match=r"version_1: data.seq_len is not that of the ladder"):
        forecast_file.speedup_of(record, [[runs[0]], [runs[1]]])
    assert forecast_file.speedup_of(record, [[runs[0]], [runs[2]]]).method in ("floor", "local slope")


def test_a_ladder_that_was_cut_goes_on_in_the_middle_of_its_rung_to_the_bit(finished, monkeypatch):
    step = Module.training_step

    def power_cut(self, batch, batch_idx):
        if self.config.d_model == cut_width and self.trainer.global_step == 9:
            raise RuntimeError("power cut")
        return step(self, batch, batch_idx)

    call()
    whole = {name: Path("out", name, "metrics.csv").read_text() for name in NAMES}
    plan = json.loads(Path("out/ladder.json").read_text())
    cut_width = plan["rungs"][2]["width"]
    options = [*OPTIONS[:-1], "cut"]
    with monkeypatch.context() as patch:
        patch.setattr(Module, "training_step", power_cut)
        with pytest.raises(RuntimeError, match="power cut"):
            door.run(["ladder", *options])
    assert not Path("cut/rung-4").exists()
    before = Path("cut/rung-1/metrics.csv").stat().st_mtime_ns
    with pytest.raises(SystemExit):
        door.run(["ladder", *options])
    assert Path("cut/rung-1/metrics.csv").stat().st_mtime_ns == before, "what is finished is kept"
    one, other = (forecast_file.read_forecast("x", out) for out in ("out", "cut"))
    assert one["rungs"] == other["rungs"]
    losses = [[line.split(",")[0] for line in whole["rung-3"].splitlines()]]
    losses.append([line.split(",")[0] for line in Path("cut/rung-3/metrics.csv").read_text().splitlines()])
    assert losses[0] == losses[1], "each step once"


def test_a_budget_takes_the_nearest_ladder_that_fits_and_one_that_is_too_small_is_told_which_would_do(toy, capsys):
    with pytest.raises(UsageError, match=r"budget=1s: the cheapest ladder takes .* here: give --budget") as error:
        door.run(["ladder", *OPTIONS, "--budget", "1s"])
    minutes = str(error.value).split("--budget ")[1].split("m")[0]
    assert call("--budget", f"{minutes}m") in (0, 1)
    assert call() in (0, 1), "the plan on file"
    with pytest.raises(UsageError, match=r"its rungs are of another recipe \(budget\): give the same options"):
        door.run(["ladder", *OPTIONS, "--budget", "9h"])
    with pytest.raises(UsageError, match="budget=20: give a time such as 90s, 20m or 1h30m"):
        door.run(["ladder", *OPTIONS, "--budget", "20"])
    assert command._seconds("1h30m") == 5400
    assert "expected:" in capsys.readouterr().out


def test_a_learning_rate_that_is_a_step_off_is_refused_with_the_one_to_take():
    ladder = made()
    four = [dataclasses.replace(ladder.recipe, steps=100 * number) for number in range(1, 5)]
    runs = [run for run in command._runs(four, 2) if run.rung <= 2]
    losses = {run.name: 4.0 + 0.01 * run.seed for run in runs}
    command._check_lr(ladder, runs, losses | {"rung-2-lr-2": 4.0, "rung-2-lr-0.5": math.nan})
    with pytest.raises(UsageError, match=r"rung 2 ends at 3.9000 with 2 times .* take --model.optimizer.lr 0.02, and"):
        command._check_lr(ladder, runs, losses | {"rung-2-lr-2": 3.9})
    muon = made(RECIPE.replace("AdamW, init_args: {lr: 1.0e-2}", "MuonAdamW, init_args: {lr: 4.0e-3, muon_lr: 1.0e-2}"))
    with pytest.raises(UsageError, match=r"take --model.optimizer.lr 0.008 --model.optimizer.muon_lr 0.02, and"):
        command._check_lr(muon, runs, losses | {"rung-2-lr-2": 3.9})


def test_what_no_ladder_can_be_made_of_is_refused_in_a_line(toy, monkeypatch):
    def refused(line, *words):
        with pytest.raises(UsageError, match=line):
            door.run(["ladder", *OPTIONS, *words])

    with pytest.raises(UsageError, match="ladder: give a recipe with --config"):
        door.run(["ladder"])
    refused("rungs=3: a forecast needs 4 or more", "--rungs", "3")
    refused("seeds=0: give 1 or more", "--seeds", "0")
    refused("budget=20m: --print-commands runs no trial", "--budget", "20m", "--print-commands")
    refused(
        "model=BoringModel: rungs need a LanguageModel", "--model", "lightning.pytorch.demos.boring_classes.BoringModel"
    )
    refused("limit_val_batches=0, .* a forecast needs some", "--trainer.limit_val_batches", "0")
    refused("ladder: trainer.max_steps=-1", "--trainer.max_steps", "-1")
    refused("init_from=x.ckpt: other sizes cannot start from it", "--init_from", "x.ckpt")
    refused("the largest rung would read its .* tokens more than once", "--trainer.max_steps", "12000")
    with monkeypatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")
        refused("ladder starts the processes of its rungs itself: give the command without torchrun")
    with command._locked(Path("out")):
        refused("another call, or its rung, is at work")
    Path("broken").mkdir()
    for text in ("{}", "no"):
        Path("broken/forecast.json").write_text(text)
        with pytest.raises(UsageError, match=r"compare: forecast=broken: it holds no forecast: give the forecast.json"):
            door.run(["compare", "--forecast", "broken", "out"])


@pytest.mark.long
def test_rungs_are_processes_whose_trial_tells_the_time(toy, monkeypatch, capsys):
    monkeypatch.undo()
    monkeypatch.chdir(toy)
    monkeypatch.setattr(sizes, "LEAST_STEPS", 8)
    monkeypatch.setattr(command, "_check_lr", lambda *_: None)
    monkeypatch.setattr(sys, "executable", python())
    assert call() in (0, 1)
    text = capsys.readouterr().out
    assert "expected:" in text
    assert not list(Path("out").glob("trial-*"))
    assert "max_steps" in Path("out/rung-4.txt").read_text()
    plan = json.loads(Path("out/ladder.json").read_text())
    assert all(each > 0 for each in plan["seconds"])
    Path("out/rung-4/metrics.csv").unlink()
    monkeypatch.setattr(Ladder, "command", lambda ladder, run: ["fit", "--config", "out/no_such.yaml"])
    with pytest.raises(UsageError, match=r"ladder: rung-4 failed with exit code 2: .*no_such"):
        door.run(["ladder", *OPTIONS])
