"""sync-audit: each planted wait is found with its hook, its line and its steps; what does not wait has none."""

import inspect
import json
import os
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from cli.parsers import one_parser  # noqa: F401, a fixture
from cli.wrong_inputs import SMALL
from harness.models import batches, rows
from harness.preloaded import python
from harness.runs import On
from jsonargparse import Namespace
from torch import nn

from lightning_tricks import MetricBuffer, __main__, sync_audit
from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import pl
from lightning_tricks.commands.sync_audit import SyncAudit, SyncReport, Wait


class Quiet(pl.LightningModule):
    """Waits for nothing."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def loss(self, batch):
        return self.net(batch).square().mean()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), fused=True)


class Waits(Quiet):
    """One wait in each of its hooks; those of a line are named by its comment."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train/loss", loss)
        if loss > 100:  # condition
            loss = loss * 2
        loss.register_hook(lambda gradient: (gradient.item(), None)[1])  # gradient hook
        return loss

    def on_before_optimizer_step(self, optimizer):
        gradient = self.net.weight.grad
        return gradient[gradient > 1]  # mask

    def validation_step(self, batch, batch_idx):
        return self.loss(batch).item()  # validation


class Careless(pl.Callback):
    """Waits in its hooks."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        outputs["loss"].item()  # item
        if trainer.global_step == 3:
            print(outputs["loss"])  # print
        if trainer.global_step == 1:
            outputs["loss"].tolist()  # first step
        thread = threading.Thread(target=outputs["loss"].item, name="writer")
        thread.start()
        thread.join()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step:
            float(trainer.callback_metrics["train/loss"])  # metrics


def line_of(cls, comment):
    lines, first = inspect.getsourcelines(cls)
    return next(first + number for number, line in enumerate(lines) if line.endswith(f"# {comment}\n"))


def audit(module, *callbacks, data=None, steps=8, **options):
    defaults = {
        "accelerator": "cpu", "devices": 1, "max_steps": 100, "log_every_n_steps": 4, "enable_model_summary": False,
        "enable_progress_bar": False, "callbacks": list(callbacks),
    }  # fmt: skip
    return sync_audit(module, data or Data(), {**defaults, **options}, steps)


class Data(pl.LightningDataModule):
    """Epochs of 6 batches, a validation after each."""

    def train_dataloader(self):
        return batches(rows(12, 4).view(6, 2, 4))

    val_dataloader = train_dataloader


@pytest.fixture(scope="module")
def careless(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audit")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        report = audit(Waits(), Careless())
    assert list(folder.iterdir()) == []
    return report


EACH, JUDGED = set(range(1, 9)), 5  # of the steps 1 to 8, 1 is the first, 4 and 8 are logged
PLANTED = {  # comment: call, hook, steps, how often, between log steps
    "condition": (Waits, "bool()", "Waits.training_step", EACH, "each step", JUDGED),
    "gradient hook": (Waits, ".item()", "SingleDeviceStrategy.backward", EACH, "each step", JUDGED),
    "mask": (Waits, "[mask]", "Waits.on_before_optimizer_step", EACH, "each step", JUDGED),
    "item": (Careless, ".item()", "Careless.on_train_batch_end", EACH, "each step", JUDGED),
    "print": (Careless, "repr()", "Careless.on_train_batch_end", {3}, "step 3", 1),
    "first step": (Careless, ".tolist()", "Careless.on_train_batch_end", {1}, "step 1", 0),
}


@pytest.mark.parametrize("comment", PLANTED)
def test_a_planted_wait_is_found_with_its_hook_line_and_steps(careless, comment):
    cls, call, hook, steps, how_often, between = PLANTED[comment]
    (wait,) = (wait for wait in careless.waits if wait.file.endswith(Path(__file__).name) and wait.during == "step"
               if wait.line == line_of(cls, comment))  # fmt: skip
    assert (wait.call, wait.hook, set(wait.steps), wait.thread) == (call, hook, steps, "")
    assert (careless.how_often(wait), careless.between(wait)) == (how_often, between)


def test_a_read_of_lightnings_metrics_is_that_of_the_line_which_asked_for_them(careless):
    found = [wait for wait in careless.waits if wait.line == line_of(Careless, "metrics")]
    assert {(wait.call, wait.hook) for wait in found} == {("float()", "Careless.on_train_batch_start")}  # fmt: skip


def test_a_validation_and_another_thread_hold_up_no_step(careless):
    (validation,) = (wait for wait in careless.waits if wait.line == line_of(Waits, "validation"))
    assert (validation.during, careless.how_often(validation)) == ("validation", "6 x validation")
    (writer,) = (wait for wait in careless.waits if wait.thread)
    assert (writer.thread, writer.call, writer.during) == ("writer", ".item()", "step")
    assert careless.between(validation) == careless.between(writer) == 0


def test_lightnings_own_log_lines_are_found_at_log_steps_only():
    report = audit(Waits())
    (logging,) = (wait for wait in report.waits if wait.hook == "Lightning, log_metrics" and wait.during == "step")
    assert (set(logging.steps), report.how_often(logging), report.between(logging)) == ({4, 8}, "log steps", 0)
    assert logging.file.endswith("logger_connector.py")  # not a helper that converts tensors


class Shows(Quiet):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss


class Asks(pl.Callback):
    def on_train_batch_end(self, trainer, *_):
        return trainer.progress_bar_metrics  # asks


def test_what_lightning_reads_for_a_hook_is_a_line_of_that_hook():
    found = [wait for wait in audit(Shows(), Asks()).waits if wait.hook == "Asks.on_train_batch_end"]
    assert [(wait.call, wait.line) for wait in found] == [(".item()", line_of(Asks, "asks"))]


def test_lightnings_progress_bar_waits_for_the_values_that_it_shows():
    report = audit(Shows(), pl.callbacks.TQDMProgressBar(refresh_rate=1), enable_progress_bar=True)
    found = [wait for wait in report.waits if wait.hook == "TQDMProgressBar.on_train_batch_end"]
    assert found
    assert all(report.between(wait) for wait in found)


def test_a_quiet_module_waits_for_nothing_between_log_steps_and_a_buffer_at_log_steps():
    def measure(trainer, module, *_):
        MetricBuffer.of(trainer).record("loss", module.net.weight.sum())

    report = audit(Quiet(), On(setup=lambda trainer, *_, **__: MetricBuffer.of(trainer)), On2(measure))
    assert report.between_log_steps == 0
    flushes = [wait for wait in report.waits if wait.hook == "MetricBuffer.on_train_batch_end"]
    assert flushes
    assert all(set(wait.steps) <= {4, 8} for wait in flushes)


class On2(pl.Callback):
    """Another class than `On`, of which a Trainer takes one."""

    def __init__(self, act):
        self.on_train_batch_end = act


class Looks(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        row = torch.ones(4) * index
        row.sum().item()  # host
        return row


class Transfers(Quiet):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        batch.sum().item()  # host
        return batch

    def on_after_batch_transfer(self, batch, dataloader_idx):
        batch.sum().item()  # device
        return batch


def test_data_are_on_the_host_until_their_transfer_which_belongs_to_their_step():
    report = audit(Transfers(), data=torch.utils.data.DataLoader(Looks(), batch_size=2))
    (wait,) = report.waits
    assert (wait.line, wait.hook) == (line_of(Transfers, "device"), "Transfers.on_after_batch_transfer")
    assert wait.steps == dict.fromkeys(range(1, 9), 1)


class ReadingLogger(pl.loggers.CSVLogger):
    def log_metrics(self, metrics, step=None):
        torch.ones(()).item()  # logger


def test_the_line_of_a_logger_that_lightning_calls_is_its_own(tmp_path):
    trainer_logs = ReadingLogger(tmp_path)

    def log(trainer, *_):
        trainer.loggers = [trainer_logs]

    report = audit(Waits(), On(setup=lambda trainer, *_, **__: log(trainer)))
    (wait,) = (wait for wait in report.waits if wait.line == line_of(ReadingLogger, "logger") and wait.during == "step")
    assert (wait.hook, set(wait.steps)) == ("Lightning, log_metrics", {4, 8})


def test_micro_batches_of_a_step_are_counted_together():
    report = audit(Waits(), accumulate_grad_batches=2, data=Data(), steps=4)
    (wait,) = (wait for wait in report.waits if wait.line == line_of(Waits, "condition"))
    assert wait.steps == dict.fromkeys(range(1, 5), 2)
    assert report.how_often(wait) == "2 x each step"


def test_a_run_that_ends_before_has_its_own_steps_and_its_last_one_is_a_log_step():
    def stop(trainer, *_):
        trainer.should_stop = trainer.global_step == 3

    for callbacks, length in (([], 3), ([On(on_train_batch_end=stop)], 50)):
        report = audit(Waits(), *callbacks, steps=8, max_steps=length)
        assert (report.steps, report.log_steps, report.steps_between) == ((1, 2, 3), {3}, {2})


def test_savers_are_left_out_and_a_least_length_does_not_prolong_the_audit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = []
    saver = pl.callbacks.ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1)
    end = On(on_train_end=lambda trainer, _: ended.append(trainer.global_step))
    audit(Quiet(), saver, end, steps=3, min_steps=50, min_epochs=5)
    assert ended == [4]  # one more than is watched, which so ends as any step does
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_replaced_also_after_an_error():
    before = dict(vars(torch.Tensor))

    def fail(*_):
        raise ValueError("planned")

    with pytest.raises(ValueError, match="planned"):
        audit(Quiet(), On(on_train_batch_end=fail))
    assert dict(vars(torch.Tensor)) == before


# ------------------------------------------------------------------------------------------------------------ the words


def wait(steps, call=".item()", hook="Mine.on_train_batch_end", during="step", thread=""):
    return Wait(call, hook, "mine.py", 7, during, thread, steps)


def report(*waits, every=4, log_steps=(4, 8), device="cuda"):
    return SyncReport(device, tuple(range(1, 9)), frozenset(log_steps), every, waits)


@pytest.mark.parametrize(
    ("found", "words", "between"),
    [
        (wait(dict.fromkeys(EACH, 1)), "each step", 5),
        (wait(dict.fromkeys(EACH, 3)), "3 x each step", 15),
        (wait({4: 1, 8: 1}), "log steps", 0),
        (wait({4: 2}), "2 x log steps", 0),
        (wait({5: 1}, hook="Bar.on_train_batch_start"), "log steps", 0),
        (wait({2: 1}, hook="Bar.on_train_batch_start"), "step 2", 0),
        (wait({5: 1}), "step 5", 1),
        (wait({6: 1}, hook="Bar.on_train_batch_start"), "step 6", 1),
        (wait(dict.fromkeys(EACH - {4, 8}, 1)), "each step but log steps", 5),
        (wait({2: 1, 3: 1, 4: 1}), "3 of 8 steps", 2),
        (wait({1: 2}), "2 x step 1", 0),
        (wait({6: 4}, during="validation"), "4 x validation", 0),
        (wait({6: 1}, during="epoch"), "epoch", 0),
        (wait({6: 1}, thread="writer"), "step 6", 0),
    ],
)
def test_how_often_a_wait_comes_and_how_often_it_holds_up_a_step(found, words, between):
    assert report(found).how_often(found) == words
    assert report(found).between(found) == report(found).between_log_steps == between


def test_the_verdict_counts_waits_and_steps():
    assert str(report(wait({2: 2, 4: 1}), wait({4: 1, 8: 1}, call=".cpu()"))) == (
        "how often         call     in                       at\n"
        "2 x 2 of 8 steps  .item()  Mine.on_train_batch_end  mine.py:7\n"
        "log steps         .cpu()   Mine.on_train_batch_end  mine.py:7\n"
        "sync-audit: 2 synchronizations between log steps, in 1 of 5 steps (steps 1 to 8 on cuda, log_every_n_steps=4)"
    )
    assert str(report(device="mps")).startswith("sync-audit: 0 synchronizations between log steps (steps 1 to 8 on mps")
    assert "CUDA names more" in str(report(device="mps"))
    assert "nothing to count" in str(report(every=1, log_steps=EACH))


# --------------------------------------------------------------------------------------------------------- the command

MONITORS = """\
  callbacks: [GradNormMonitor, MemoryMonitor, ActivationMonitor, UpdateMonitor, AttentionMonitor, GoodputMonitor,
    PrecisionMonitor, TensorBoardDashboard, RunLedger, StepGuard,
    {class_path: MFUMonitor, init_args: {peak_flops: 1.0e+12}},
    {class_path: SafeCheckpoint, init_args: {every_n_train_steps: 2}}]
  logger: {class_path: ResumingTensorBoardLogger, init_args: {save_dir: runs, name: small}}
  gradient_clip_val: 1.0
  log_every_n_steps: 4
  max_steps: 50
"""
FUSED = SMALL.replace("betas: [0.9, 0.95]", "fused: true")  # StepGuard reads what another AdamW shall skip
HEALTHY = FUSED[: FUSED.index("  max_steps")] + MONITORS


@pytest.fixture
def folder(tmp_path, monkeypatch, text_file):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_bytes(Path(text_file).read_bytes())
    Path("healthy.yaml").write_text(HEALTHY)
    return tmp_path


def command(capsys, *args):
    """Exit code and output of an audit of the recipe."""
    code = 0
    try:
        __main__.run(["sync-audit", "--config", "healthy.yaml", "--steps", "8", *args])
    except SystemExit as end:
        code = end.code
    return code, capsys.readouterr().out


@pytest.mark.usefixtures("one_parser")
def test_a_recipe_with_all_monitors_waits_for_nothing_between_log_steps_and_leaves_nothing(folder, capsys):
    before = sorted(folder.iterdir())
    code, out = command(capsys, "--json", "audit.json")
    assert code == 0, out
    assert "sync-audit: 0 synchronizations between log steps (steps 1 to 8 on cpu, log_every_n_steps=4)" in out
    assert "fit --config" not in out  # there is nothing to do next
    answer = json.loads(Path("audit.json").read_text())
    assert (answer["between_log_steps"], answer["log_steps"]) == (0, [4, 8])
    assert any(wait["hook"] == "MetricBuffer.on_train_batch_end" for wait in answer["waits"])
    assert sorted({*folder.iterdir()} - {*before}) == [folder / "audit.json", folder / "cache"]  # of the tokens


@pytest.mark.usefixtures("one_parser")
def test_a_recipe_that_waits_exits_with_1(folder, capsys):
    code, out = command(capsys, "--trainer.callbacks+", f"{__name__}.Careless")
    assert code == 1
    assert "Careless.on_train_batch_end" in out


def test_an_audit_begins_a_run_anew_where_its_recipe_resumes():
    given = Namespace(trainer=Namespace(logger=False), resume="auto")
    SyncAudit(8, None).change(given)
    assert given.resume == "none"


PROJECT = """\
import {package} as pl
import torch
from torch.utils.data import DataLoader
from lightning_tricks import sync_audit

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        self.log("loss", loss.item())
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

data = DataLoader(torch.ones(8, 4), batch_size=2)
options = {{"accelerator": "cpu", "devices": 1, "log_every_n_steps": 4, "max_steps": 20, "enable_progress_bar": False}}
print(sync_audit(Module(), data, options, steps=8))
"""


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_project_of_either_package_is_audited_by_a_line(tmp_path, package):
    (tmp_path / "project.py").write_text(PROJECT.format(package=package))
    program = python("pytorch_lightning") if package == "pytorch_lightning" else python()
    done = subprocess.run([program, "project.py"], cwd=tmp_path, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    (row,) = (line for line in done.stdout.splitlines() if "project.py:12" in line)
    assert row.split("  ")[0] == "each step"
    assert "Module.training_step" in row
    assert "5 synchronizations between log steps, in 5 of 5 steps" in done.stdout
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["project.py"]


def test_what_an_audit_cannot_judge_is_refused():
    with pytest.raises(UsageError, match=r"steps=1: give at least 2"):
        audit(Quiet(), steps=1)
    with pytest.raises(UsageError, match="ended before its first step"):
        audit(Quiet(), max_steps=0)
    with pytest.raises(UsageError, match="fast_dev_run=3"):
        audit(Quiet(), fast_dev_run=3)
    with pytest.raises(UsageError, match="trains in copies"):
        audit(Quiet(), strategy="ddp_fork", devices=2)
