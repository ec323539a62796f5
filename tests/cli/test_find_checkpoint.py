"""The newest whole checkpoint is found, whatever a kill, a disk or another program has left beside it."""

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from cli.parsers import no_hyper_parameters, one_parser  # noqa: F401, fixtures
from cli.test_run_folder import Toy, command_line, folders, step_of
from cli.wrong_inputs import SMALL
from harness.preloaded import python
from harness.processes import run as run_processes
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_tricks._core.errors import UsageError
from lightning_tricks.checkpoints.find_checkpoint import candidates, newest_whole, restore_name
from lightning_tricks.checkpoints.write_file import save_with_record
from lightning_tricks.cli import RecipeCLI
from lightning_tricks.cli import choose_checkpoint as choosing
from lightning_tricks.cli.choose_checkpoint import SameCheckpoint, choose_checkpoint, identity
from lightning_tricks.commands.generate import newest_checkpoint

KEEP = "[{class_path: ModelCheckpoint, init_args: {every_n_train_steps: 1, save_top_k: -1, save_last: link}}]"
pytestmark = pytest.mark.usefixtures("one_parser", "no_hyper_parameters")

CHECKPOINTS = Path("runs/toy/version_0/checkpoints")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lightning-tricks"])
    caplog.set_level("INFO", logger="lightning.pytorch")


def save(path: Path, step: int, number: int | None, time: int, **record) -> Path:
    """A small file with a record, or without one where it has no number, last written at second `time`."""
    content = {"global_step": step, "state_dict": {"w": torch.full((64,), float(step))}, "lr_schedulers": []}
    if number is None:
        torch.save(content, path)
    else:
        save_with_record({**content, "lightning_tricks": {"record": {"number": number, **record}}}, path)
    os.utime(path, (time, time))
    return path


def names(folder: Path) -> list[str]:
    return [candidate.place.name for candidate in candidates(folder)]


def test_the_number_of_the_record_beats_the_time_of_writing_which_a_copy_changes(tmp_path):
    for number, time in ((1, 30), (2, 10), (3, 20)):
        save(tmp_path / f"step={number}.ckpt", number, number, time)
    assert names(tmp_path) == ["step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]
    save(tmp_path / "step=0.ckpt", 0, 4, 5)  # a rollback: a later save of an earlier step
    assert names(tmp_path)[-1] == "step=0.ckpt"


def test_without_records_the_time_of_writing_decides_and_both_kinds_are_compared_by_it(tmp_path):
    save(tmp_path / "a.ckpt", 1, None, 10)
    save(tmp_path / "b.ckpt", 9, 1, 20)
    save(tmp_path / "c.ckpt", 2, 2, 30)
    save(tmp_path / "d.ckpt", 3, None, 25)
    save(tmp_path / "e.ckpt", 3, None, 40)
    assert names(tmp_path) == ["a.ckpt", "b.ckpt", "d.ckpt", "c.ckpt", "e.ckpt"]


def test_a_link_is_the_file_that_it_leads_to(tmp_path):
    save(tmp_path / "step=2.ckpt", 2, 1, 10)
    (tmp_path / "last.ckpt").symlink_to("step=2.ckpt")
    (found,) = candidates(tmp_path)
    assert (found.place.name, found.link.name) == ("step=2.ckpt", "last.ckpt")


def test_what_is_still_being_written_is_no_checkpoint_and_what_was_being_replaced_is_one(tmp_path):
    save(tmp_path / ".new.ckpt.saving", 9, 9, 90)
    assert not names(tmp_path)
    save(tmp_path / ".last.ckpt.replaced", 1, 1, 10)
    found = newest_whole([tmp_path], lambda place: None)
    assert restore_name(found.chosen) == tmp_path / "last.ckpt"
    assert names(tmp_path) == ["last.ckpt"]
    assert restore_name(found.chosen) == tmp_path / "last.ckpt", "a rank that comes later finds the same"


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"finite": False}, ": its weights are not finite numbers"),
        (
            {"version": 99},
            " is of version 99, this lightning_tricks reads up to 1: update the clone",
        ),
    ],
)
def test_what_its_record_rules_out_is_passed_over_without_reading_it(tmp_path, record, said):
    save(tmp_path / "good.ckpt", 1, 1, 10, finite=True)
    save(tmp_path / "bad.ckpt", 2, 2, 20, **record)
    read = []
    found = newest_whole([tmp_path], lambda place: read.append(place.name))
    assert (found.chosen.place.name, read) == ("good.ckpt", ["good.ckpt"])
    assert found.passed_over == [f"{tmp_path}/bad.ckpt{said}"]


def test_of_several_folders_the_one_written_last_is_tried_first(tmp_path):
    for folder, time in (("a", 10), ("b", 30), ("c", 20)):
        (tmp_path / folder).mkdir()
        save(tmp_path / folder / "x.ckpt", 1, 1, time)

    def check(place: Path) -> None:
        if "/b/" in str(place):
            raise UsageError("no")

    found = newest_whole([tmp_path / name for name in "abcd"], check)
    assert found.chosen.place == tmp_path / "c" / "x.ckpt"


def fit(*options: str, steps: int = 4, saver: str = KEEP):
    """Of four steps, each of which is saved; `step` is that at which the run has begun."""
    return command_line("fit", f"--trainer.max_steps={steps}", *options, saver=saver).trainer


def started_at(caplog) -> int:
    """The step that the last run went on from, as it said itself; 0 for a new run."""
    said = [record.getMessage() for record in caplog.records]
    return next((int(line.split()[4]) for line in reversed(said) if line.startswith("Going on from step")), 0)


def lines(caplog, start: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith(start)]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x07\x08") - 3] ^= 1  # in the middle of the first entry's bytes
    path.write_bytes(content)


def newest_first() -> list[Path]:
    return sorted(CHECKPOINTS.glob("epoch*.ckpt"), key=lambda path: path.stat().st_mtime_ns, reverse=True)


LAST, AUTO = "--ckpt_path=last", "--resume=auto"


@pytest.mark.parametrize(("damage", "option"), [(flip, AUTO), (flip, LAST), (Path.unlink, AUTO)])
def test_a_damaged_newest_checkpoint_is_passed_over_and_the_run_goes_on_from_the_one_before(damage, option, caplog):
    fit()
    damage(newest_first()[0])  # and with it the link last.ckpt
    fit(option, steps=6)
    assert started_at(caplog) == 3
    (passed,) = lines(caplog, f"{option.lstrip('-')}: skipped: ")
    assert ("last.ckpt: a link to" if damage is Path.unlink else "step=4.ckpt") in passed
    (took,) = lines(caplog, f"{option.lstrip('-')}: runs/toy/version_0/checkpoints/")
    assert took.endswith("step=3.ckpt, the newest complete checkpoint in runs/toy")
    assert folders() == ["version_0"]
    assert step_of(CHECKPOINTS / "last.ckpt") == 6


@pytest.mark.parametrize("link", ["version_0", "version_0/checkpoints"])
def test_no_checkpoint_is_looked_for_through_a_link_out_of_the_folder_of_runs(tmp_path, link):
    fit()
    place = Path("runs/toy", link)
    elsewhere = tmp_path.with_name(f"{tmp_path.name}-elsewhere")
    place.rename(elsewhere)
    place.symlink_to(elsewhere)
    with pytest.raises(UsageError, match=r"elsewhere.*, which is outside of runs/toy: give the path"):
        fit(AUTO, steps=6)
    with pytest.raises(UsageError, match=r"elsewhere.*, which is outside of \."):
        newest_checkpoint()
    fit(f"--ckpt_path={CHECKPOINTS / 'last.ckpt'}", steps=6)  # which a user has named


def test_where_no_checkpoint_is_whole_a_run_is_refused_unless_told_to_start_afresh(caplog):
    fit()
    for path in reversed(newest_first()):
        flip(path)
    with pytest.raises(
        UsageError, match=r"none of 4 checkpoint\(s\) in runs/toy can be used \(the newest: .*step=4"
    ) as no:
        fit(AUTO)
    assert str(no.value).endswith("start a new run at step 0 with --ckpt_path none")
    assert folders() == ["version_0"]
    fit(AUTO, "--ckpt_path=none")
    assert folders() == ["version_0", "version_1"]


def test_auto_starts_where_there_is_nothing_and_then_goes_on_by_the_same_command(caplog):
    fit("--resume=auto", steps=2)
    assert lines(caplog, "resume=auto: there is no checkpoint in runs/toy: the run starts at step 0")
    Path("runs/toy/version_1/checkpoints").mkdir(parents=True)  # a start that was killed before its first save
    fit("--resume=auto", steps=4)
    assert started_at(caplog) == 2
    for more in (["--resume=auto"], [f"--ckpt_path={sorted(CHECKPOINTS.glob('*step=4.ckpt'))[0]}"]):
        with pytest.warns(
            match=r"^no step was left to train: \S+/checkpoints/\S+ is at step 4: give a larger max_steps, "
            "max_epochs or total_tokens to go on, or --ckpt_path none to start a new run$"
        ):
            fit(*more, steps=3)
    caplog.clear()
    fit("--resume=auto", "--trainer.fast_dev_run=true")
    assert not lines(caplog, "resume=auto")


def test_what_resume_says_in_a_recipe_holds_for_fit_alone_and_an_explicit_path_wins(caplog):
    Path("auto.yaml").write_text("resume: auto\n")
    fit()
    first = sorted(CHECKPOINTS.glob("*step=1.ckpt"))[0]
    fit("--config=auto.yaml", f"--ckpt_path={first}", steps=5)
    assert started_at(caplog) == 1
    fit("--config=auto.yaml", "--resume=none")
    assert folders() == ["version_0", "version_1"]
    command_line("validate", "--config=auto.yaml", "--ckpt_path=last", saver=KEEP)
    assert not lines(caplog, "resume=auto")


def test_checkpoints_of_another_recipe_are_not_taken_and_of_another_model_refused(caplog):
    fit()
    other = "--trainer.logger={class_path: ResumingTensorBoardLogger, init_args: {save_dir: runs, name: other}}"
    fit("--resume=auto", other)
    assert lines(caplog, "resume=auto: there is no checkpoint in runs/other")
    with pytest.raises(UsageError, match=r"another model than the recipe's Wide: size mismatch for layer\.weight"):
        command_line("fit", f"--model={__name__}.Wide", "--resume=auto", "--trainer.max_steps=6", saver=KEEP)


class Wide(Toy):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.layer = torch.nn.Linear(3, 1)


def test_a_checkpoint_that_the_disk_cannot_read_is_passed_over(caplog, monkeypatch):
    fit()
    newest, real = newest_first()[0], choosing.verify_checkpoint

    def verify(path, *args):
        if os.path.samefile(path, newest):
            raise OSError(5, "Input/output error", str(path))
        return real(path, *args)

    monkeypatch.setattr(choosing, "verify_checkpoint", verify)
    fit("--resume=auto", steps=6)
    (passed,) = lines(caplog, "resume=auto: skipped: ")
    assert passed.endswith("epoch=0-step=4.ckpt: cannot be read (Input/output error)")
    assert started_at(caplog) == 3


@pytest.mark.parametrize(
    ("options", "folder"),
    [
        (["--trainer.logger=false", "--trainer.default_root_dir=here"], "here"),
        (["--trainer.logger.version=mine"], "runs/toy/mine"),
    ],
)
def test_without_a_logger_or_with_a_version_of_ones_own_a_recipe_has_one_folder(options, folder, caplog):
    fit(*options, steps=2)
    fit()  # of another recipe, and newer
    fit(*options, "--resume=auto", steps=3)
    assert started_at(caplog) == 2
    assert lines(caplog, f"resume=auto: {folder}/checkpoints/last.ckpt, the newest checkpoint in ")
    assert step_of(Path(folder, "checkpoints", "last.ckpt")) == 3


@pytest.mark.parametrize("there", [False, True])
def test_without_a_logger_the_recipe_is_not_written_through_a_link(tmp_path, there):
    options = ["--trainer.logger=false", "--trainer.default_root_dir=here"]
    Path("here").mkdir()
    Path("here/config.yaml").symlink_to(tmp_path / "elsewhere")
    if there:
        (tmp_path / "elsewhere").write_text("mine")
    fit(*options, steps=2)
    fit(*options, "--resume=auto", steps=3)
    assert Path("here/config-v1.yaml").is_file()
    assert (tmp_path / "elsewhere").exists() == there
    assert not there or (tmp_path / "elsewhere").read_text() == "mine"


def test_under_deepspeed_a_folder_that_is_no_whole_one_of_deepspeed_is_passed_over(tmp_path, caplog):
    for step in (1, 2):
        (tmp_path / f"step={step}.ckpt" / "checkpoint").mkdir(parents=True)
        (tmp_path / f"step={step}.ckpt" / "checkpoint" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
        os.utime(tmp_path / f"step={step}.ckpt", (step, step))
    (tmp_path / "step=1.ckpt" / "latest").touch()  # written last
    os.utime(tmp_path / "step=1.ckpt", (1, 1))
    saver = SimpleNamespace(dirpath=tmp_path)
    strategy = type("DeepSpeedStrategy", (), {})()
    trainer = SimpleNamespace(strategy=strategy, checkpoint_callbacks=[saver], callbacks=[], max_steps=4, logger=None)
    trainer.default_root_dir, trainer.fast_dev_run = "runs", False
    assert choose_checkpoint("fit", "last", trainer) == str(tmp_path / "step=1.ckpt")
    (passed,) = lines(caplog, "ckpt_path=last: skipped: ")
    assert passed.endswith("the checkpoint step=2.ckpt was not written to its end: take an earlier one")


def test_a_file_of_weights_alone_is_passed_over_by_a_fit(caplog):
    fit()
    content = torch.load(newest_first()[0], weights_only=True)
    torch.save({"state_dict": content["state_dict"]}, CHECKPOINTS / "weights.ckpt")
    fit("--resume=auto", steps=5)
    assert "it holds weights only" in lines(caplog, "resume=auto: skipped: ")[0]
    assert started_at(caplog) == 4


class Replace(ModelCheckpoint):
    """Write to the checkpoint that the run is about to load, as another run would."""

    def setup(self, trainer, pl_module, stage):
        super().setup(trainer, pl_module, stage)
        path = newest_first()[0]
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def test_a_checkpoint_that_is_replaced_between_choice_and_load_is_refused():
    fit()
    with pytest.raises(UsageError, match=r"last\.ckpt: it was replaced while this run started"):
        fit("--resume=auto", steps=6, saver=f"[{__name__}.Replace]")


def test_a_rank_that_lightning_started_takes_the_choice_of_the_process_that_started_it(tmp_path, monkeypatch):
    path = save(tmp_path / "a.ckpt", 1, 1, 10)
    chosen = choosing.publish_choice(str(path))
    assert json.loads(os.environ["LIGHTNING_TRICKS_CHOICE"]) == [str(path), identity(str(path))]
    assert choosing.inherited_choice() is None, "rank 0 itself looks anew in its next command"
    monkeypatch.setenv("LOCAL_RANK", "1")
    save(path, 2, 2, 20)  # in the meantime
    handed = choosing.inherited_choice()
    assert (handed.path, handed.before) == (str(path), chosen.before)
    with pytest.raises(UsageError, match="it was replaced while this run started"):
        handed.on_load_checkpoint(None, None, {})
    choosing.clear_choice()
    assert choosing.inherited_choice() is None


def other_choices(rank: int, folder: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    from types import SimpleNamespace

    trainer = SimpleNamespace(world_size=2)
    SameCheckpoint("a.ckpt", []).setup(trainer, None, "fit")
    try:
        SameCheckpoint("a.ckpt" if rank == 0 else None, []).setup(trainer, None, "fit")
    except UsageError as error:
        Path(folder, f"{rank}.txt").write_text(str(error))
    dist.destroy_process_group()


@pytest.mark.long
def test_ranks_that_found_different_checkpoints_refuse_to_train_all_of_them(tmp_path):
    run_processes(other_choices, str(tmp_path))
    said = {(tmp_path / f"{rank}.txt").read_text() for rank in range(2)}
    assert len(said) == 1
    assert said.pop().startswith("ckpt_path: rank 0 found a.ckpt and rank 1 none: the checkpoints must lie where all")


def test_a_fine_tuning_that_is_killed_goes_on_by_the_same_command(caplog):
    fit(steps=2)
    os.rename("runs/toy", "base")
    base = next(Path("base/version_0/checkpoints").glob("*step=2.ckpt"))
    command = ["--resume=auto", f"--init_from={base}"]
    fit(*command, steps=1)
    assert lines(caplog, f"init_from={base}: 2 of its 2 weights loaded; left out: the optimizer's state")
    assert started_at(caplog) == 0
    own = torch.load(newest_first()[0], weights_only=True)
    base.unlink()
    fit(*command, steps=3)
    assert (own["global_step"], started_at(caplog)) == (1, 1)
    assert lines(
        caplog, f"init_from={base}: not read, as the run resumes from runs/toy/version_0/checkpoints/last.ckpt"
    )


def test_a_value_that_is_the_name_of_a_command_is_a_value():
    command_line("fit", "--trainer.logger.name", "test", "--resume", "auto", "--trainer.max_steps=1")
    assert folders(Path("runs/test")) == ["version_0"]


@pytest.mark.long
def test_two_processes_of_lightnings_launcher_go_on_from_the_same_whole_checkpoint(text_file, tmp_path):
    """A run of two steps, whose newest checkpoint is damaged, goes on."""
    recipe = yaml.safe_load(SMALL) | {"resume": "auto"}
    recipe["data"]["init_args"]["files"] = text_file
    logger = {"class_path": "ResumingTensorBoardLogger", "init_args": {"save_dir": "runs", "name": "small"}}
    saver = {"class_path": "ModelCheckpoint", "init_args": {"every_n_train_steps": 1, "save_top_k": -1}}
    recipe["trainer"] |= {"devices": 2, "strategy": "ddp", "logger": logger, "callbacks": [saver]}
    del recipe["trainer"]["enable_checkpointing"]
    Path("small.yaml").write_text(yaml.safe_dump(recipe))
    alone = ["--trainer.devices=1", "--trainer.strategy=auto", "--trainer.max_steps=2"]
    RecipeCLI(args=["fit", "--config=small.yaml", *alone])
    flip(max(tmp_path.glob("runs/small/*/checkpoints/epoch*.ckpt"), key=lambda path: path.stat().st_mtime_ns))
    command = [python(), "-m", "lightning_tricks", "fit", "--config=small.yaml", "--trainer.max_steps=4"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "resume=auto" in line or "Going on" in line]
    assert len(said) == 3, said
    assert "skipped: runs/small/version_0/checkpoints/epoch=0-step=2.ckpt" in said[0]
    assert said[1].endswith("epoch=0-step=1.ckpt, the newest complete checkpoint in runs/small")
    assert "Going on from step 1 of" in said[2]
