"""`check`: a healthy recipe passes; each planted fault is one line with its remedy, and the rest goes on."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from harness.token_files import write_token_files

from lightning_tricks import FSDP2Strategy, LanguageModel, Llama, ParallelDims, TokenData
from lightning_tricks._core.errors import UsageError
from lightning_tricks._trainer.lightning import pl
from lightning_tricks.callbacks import (
    EMA,
    BatchSizeWarmup,
    ExactResume,
    GradNormMonitor,
    SafeCheckpoint,
    SampleText,
    SpikeRollback,
    StepGuard,
)
from lightning_tricks.commands.check import checks as listed
from lightning_tricks.commands.check import run
from lightning_tricks.commands.check.checks import CHECKS, Checked, kept_checkpoints, run_checks, saves_of_run, summary
from lightning_tricks.schedules import WarmupCosine

CONFIG = Llama(vocab_size=64, d_model=32, n_layers=2, n_heads=2, max_seq_len=32)
NAMES = [check.__name__ for check in CHECKS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_token_files(tmp_path_factory.mktemp("tokens"))


def adamw(groups, lr=1e-3):
    return torch.optim.AdamW(groups, lr=lr)


def module(config=CONFIG, **options):
    return LanguageModel(config, **{"optimizer": adamw, "schedule": WarmupCosine(warmup_steps=2), **options})


def tokens(folder, **options):
    given = {"train": str(folder / "train.bin"), "val": str(folder / "val.bin"), "seq_len": 16, "micro_batch_size": 2}
    return TokenData(**given | {"vocab_size": 64} | options)


def trainer(folder, **options):
    logger = pl.loggers.CSVLogger(str(folder / "runs"))
    return {"accelerator": "cpu", "devices": 1, "max_steps": 20, "logger": logger, "default_root_dir": str(folder),
            "callbacks": [SafeCheckpoint(every_n_train_steps=5)], **options}  # fmt: skip


def found(folder, model=None, data=None, checks=CHECKS, **options):
    """The results of the checks by their names."""
    checked = Checked(model or module(), data or tokens(folder), trainer(folder, **options))
    return {result.name: result for result in run_checks(checks, checked, lambda line: None)}


def only(*names):
    return [check for check in CHECKS if check.__name__ in names]


def failed(results):
    return [name for name, result in results.items() if result.failed]


# ---- the whole list


@pytest.mark.long
def test_a_healthy_recipe_passes_and_leaves_nothing_behind(folder, tmp_path, capsys):
    before = sorted(folder.rglob("*"))
    with pytest.raises(SystemExit) as end:
        run(module(), tokens(folder), trainer(folder), json=str(tmp_path / "check.json"))
    assert end.value.code == 0
    assert sorted(folder.rglob("*")) == before
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(CHECKS) + 1
    assert lines[-1] == f"{len(CHECKS)} checks: {len(CHECKS)} passed, 0 failed"
    assert not any(line.startswith(("!!", "✗")) for line in lines)
    written = json.loads((tmp_path / "check.json").read_text())
    assert written["passed"] is True
    assert [check["name"] for check in written["checks"]] == NAMES
    assert written["checks"][1]["line"] == f"{sum(p.numel() for p in _built().parameters()):,} parameters"


def _built():
    model = module()
    model.configure_model()
    return model


@pytest.mark.long
def test_faults_are_one_line_each_the_other_checks_go_on_and_the_exit_code_is_1(folder, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(SystemExit) as end:
        run(module(), tokens(folder, train="no/such*.bin"), trainer(folder, max_steps=1))
    assert end.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(CHECKS) + 1
    wrong = [line.split()[1] for line in lines if line.startswith(("!!", "✗"))]
    assert wrong == ["data", "schedule", "disk"]
    assert "train='no/such*.bin': matches no file; check the path" in lines[NAMES.index("data")]


def test_json_on_standard_output_stands_alone(monkeypatch, capsys):
    monkeypatch.setattr(listed, "CHECKS", [lambda checked: "well"])
    with pytest.raises(SystemExit):
        run(None, None, {}, json="-")
    assert json.loads(capsys.readouterr().out)["checks"][0]["line"] == "well"


def test_a_mistake_that_several_checks_meet_is_told_once_with_marks_that_standard_output_has(monkeypatch):
    def first(checked):
        raise UsageError("mesh=3: no")

    def second(checked):
        raise UsageError("mesh=3: no")

    lines = []
    monkeypatch.setattr("sys.stdout", SimpleNamespace(encoding="ascii"))
    results = run_checks([first, second], Checked(None, None, {}), lines.append)
    monkeypatch.undo()
    assert lines == ["!! first      mesh=3: no", "-- second     not known, see first"]
    assert [(result.mark, result.line) for result in results] == [("!!", "mesh=3: no"), ("--", "not known, see first")]
    assert summary(results) == "2 checks: 0 passed, 1 failed, 1 not checked or to look at"


def test_an_unknown_gpu_is_refused_before_anything_is_checked():
    with pytest.raises(UsageError, match="gpu=h1000: did you mean h100"):
        run(None, None, {}, gpu="h1000")


# ---- one fault for each check


class Broken(pl.LightningModule):
    def configure_model(self):
        raise RuntimeError("no such layer")

    def train_dataloader(self):
        return []


@pytest.mark.long
def test_a_model_that_does_not_build_is_told_with_its_reason(folder):
    results = found(folder, model=Broken(), checks=only("model", "folders"))
    assert failed(results) == ["model"]
    assert results["model"].line.startswith("RuntimeError: no such layer")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("settings", {"model": module(optimizer=lambda groups: adamw(groups, lr=-1.0))}, "learning rate"),
        (
            "settings",
            {"devices": 2, "strategy": FSDP2Strategy(mesh=ParallelDims(pipeline=2), pipeline_micro_batches=3)},
            "is no multiple of pipeline_micro_batches=3",
        ),
        (
            "settings",
            {"devices": 2, "strategy": FSDP2Strategy(mesh=ParallelDims(tensor=2)), "callbacks": [SampleText()]},
            "SampleText: tensor, context and pipeline ranks (mesh) share rows",
        ),
        ("settings", {"callbacks": [BatchSizeWarmup({0: 1, 9: 4})]}, "the last stage must be the recipe's batch, 1"),
        ("settings", {"plugins": [pl.plugins.AsyncCheckpointIO()]}, "plugins=AsyncCheckpointIO: SafeCheckpoint's prom"),
        ("settings", {"callbacks": [SafeCheckpoint(), SafeCheckpoint()]}, "dirpath=None: another SafeCheckpoint saves"),
        ("settings", {"callbacks": [SpikeRollback()], "log_every_n_steps": 0}, "trainer.log_every_n_steps=0: SpikeR"),
        ("schedule", {"max_steps": 2}, "warmup_steps=2"),
        ("libraries", {"model": module(compile_blocks=True)}, "torch.compile needs a C++ compiler on a CPU"),
        ("devices", {"devices": 1000}, "trainer.devices=1000: so many processes on this CPU: give at most"),
        ("data", {"train": "no.bin"}, "train='no.bin': matches no file; check the path"),
        ("data", {"val": "no.bin"}, "val='no.bin': matches no file; check the path"),
        ("data", {"vocab_size": 40}, "does not fit vocab_size, which has 40 tokens; raise vocab_size"),
        ("data", {"seq_len": 5000}, "seq_len=5000: the training data has 3900 tokens; shorten it"),
        ("data", {"shard_format": "nanogpt"}, "it begins with a header"),
    ],
)
def test_a_fault_is_named_by_its_check_alone(folder, monkeypatch, name, options, words):
    monkeypatch.setenv("CXX", "no-such-compiler")
    options = {"data": tokens(folder, **options)} if name == "data" else options
    results = found(folder, checks=only(name, "folders"), **options)
    assert failed(results) == [name]
    assert words in results[name].line


def test_callbacks_that_fit_together_pass_by_their_own_checks(folder):
    callbacks = [StepGuard(), SpikeRollback(), EMA(), ExactResume(), GradNormMonitor(), SafeCheckpoint(), SampleText()]
    assert not failed(found(folder, checks=only("settings"), callbacks=callbacks))


def test_ids_are_compared_with_the_models_vocabulary_and_validation_data_are_asked_for(folder):
    small = module(replace(CONFIG, vocab_size=32))
    line = found(folder, model=small, data=tokens(folder, vocab_size=None), checks=only("data"))["data"].line
    assert "does not fit the model, which has 32 tokens" in line
    assert "no validation data" in found(folder, data=tokens(folder, val=None), checks=only("data"))["data"].line


def test_a_run_without_validation_is_noted(folder):
    note = found(folder, checks=only("schedule"), val_check_interval=50)["schedule"]
    assert note.mark == "--"
    assert "val_check_interval=50: the run ends before its first validation" in note.line


@pytest.mark.long
def test_ranks_of_the_recipes_own_world_send_the_same(folder):
    strategy = FSDP2Strategy(mesh=ParallelDims(tensor=2))
    result = found(folder, checks=only("layout"), strategy=strategy, num_nodes=4, devices=8)["layout"]
    assert result.mark == "ok"
    assert "ranks 0, 16, 31 send the same" in result.line
    sent = int(result.line.split("the same ")[1].split()[0])
    assert sent >= 2 * 2 * 2  # each of two blocks gathers its weights twice, and its tensor ranks add up
    stages = FSDP2Strategy(mesh=ParallelDims(tensor=2, pipeline=2), pipeline_micro_batches=2)
    result = found(folder, checks=only("layout"), strategy=stages, num_nodes=4, devices=8)["layout"]
    assert "ranks 0, 8, 15 send the same" in result.line, "those of the first stage"
    assert result.line.endswith("collectives")
    assert 0 < int(result.line.split("the same ")[1].split()[0]) < sent, "of one block, gathered once"


def test_a_mesh_that_does_not_fit_the_devices_is_told_once(folder):
    strategy = FSDP2Strategy(mesh=ParallelDims(tensor=3))
    results = found(folder, checks=only("layout", "memory"), strategy=strategy, devices=8)
    assert failed(results) == ["layout"]
    assert "3" in results["layout"].line
    assert results["memory"].line == "not known, see layout"


@pytest.mark.long
def test_a_step_that_does_not_fit_is_refused_with_the_first_change_that_fits(folder, monkeypatch):
    wide = module(replace(CONFIG, d_model=128))
    data = tokens(folder, micro_batch_size=8)
    checked = Checked(wide, data, trainer(folder))
    assert not run_checks(only("memory"), checked, lambda line: None)[0].failed
    peak = checked.plan.peak_bytes
    monkeypatch.setattr("lightning_tricks.commands.plan.plan.host_bytes", lambda: int(0.95 * peak))
    results = found(folder, wide, data, only("memory"))
    assert failed(results) == ["memory"]
    assert "does not fit; give --data.micro_batch_size" in results["memory"].line
    compiled = found(folder, module(replace(CONFIG, d_model=128), compile_blocks=True), data, only("memory"))
    assert failed(compiled) == []
    assert "counted as eager: compiled blocks need less; if that does not fit, give" in compiled["memory"].line


def test_a_folder_that_cannot_be_written_is_refused(folder):
    (folder / "file").write_text("")
    saver = SafeCheckpoint(dirpath=str(folder / "file"))
    results = found(folder, checks=only("folders", "recipe"), callbacks=[saver])
    assert failed(results) == ["folders"]
    assert "is a file: name another folder" in results["folders"].line
    (folder / "file").unlink()


# ---- the disk


@pytest.mark.long
def test_the_disk_is_asked_for_weights_and_state_of_all_checkpoints_that_stay(folder, monkeypatch):
    count = sum(parameter.numel() for parameter in _built().parameters())
    # 4 saves of 20 steps; two newest stay and one is being written; AdamW keeps two averages
    needed = 3 * 12 * count
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(1.01 * needed)))
    checks = only("model", "schedule", "memory", "disk")
    assert not failed(found(folder, checks=checks))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(0.99 * needed)))
    results = found(folder, checks=checks)
    assert failed(results) == ["disk"]
    assert results["disk"].line.startswith("3 checkpoints of ")
    assert "make room, keep fewer (keep_last), or save to another disk (dirpath)" in results["disk"].line


@pytest.mark.long
def test_a_checkpoint_has_the_state_that_the_host_keeps(folder):
    options = {"strategy": FSDP2Strategy(cpu_offload=True), "accelerator": "gpu", "devices": 2}
    checked = Checked(module(), tokens(folder), trainer(folder, **options))
    run_checks(only("model", "memory"), checked, lambda line: None)
    assert listed.checkpoint_bytes(checked) == pytest.approx(12 * checked.parameters, rel=0.01)
    assert listed.checkpoint_bytes(checked, weights_only=True) == 4 * checked.parameters


def test_the_number_of_checkpoints_follows_from_the_savers_settings():
    assert kept_checkpoints(SafeCheckpoint(keep_last=2), 100, 0) == 3
    assert kept_checkpoints(SafeCheckpoint(keep_last=2, monitor="val/loss", keep_best=3), 100, 0) == 6
    assert kept_checkpoints(SafeCheckpoint(keep_last=2, permanent_steps=10), 100, 10) == 13
    assert kept_checkpoints(SafeCheckpoint(keep_last=5), 2, 0) == 2
    assert kept_checkpoints(pl.callbacks.ModelCheckpoint(save_top_k=-1), 7, 0) == 7
    assert kept_checkpoints(pl.callbacks.ModelCheckpoint(save_top_k=2, monitor="x", save_last=True), None, 0) == 4
    assert saves_of_run(SafeCheckpoint(every_n_train_steps=30), 100, ()) == 4  # 30, 60, 90 and the last step
    assert saves_of_run(SafeCheckpoint(), 100, (50, 100)) == 2
    assert saves_of_run(SafeCheckpoint(every_n_minutes=3), 100, (50,)) is None


# ---- GPUs


def test_the_gpus_here_are_counted_and_without_any_a_driver_is_a_fault(folder, monkeypatch, tmp_path):
    def line_of(number):
        return found(folder, checks=only("devices"), accelerator="gpu", devices=number)["devices"]

    monkeypatch.setattr(listed, "_DRIVER", tmp_path / "none")
    if not torch.cuda.is_available():
        assert line_of(1).mark == "--"
        monkeypatch.setattr(listed, "_DRIVER", tmp_path)
        assert (line_of(1).failed, "finds no GPU: repair that first" in line_of(1).line) == (True, True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "H100")
    assert line_of(4).line == f"4 x H100, torch for CUDA {torch.version.cuda}"
    assert line_of(8).failed
    assert "trainer.devices=8: this machine has 4 (H100): give --trainer.devices 4" in line_of(8).line
