"""`doctor` says what is wrong with a run and what is missing in its log, and exits with 1 where a run is sick."""

import contextlib
import json
import math
import os
import re
from pathlib import Path

import pytest
from made_logs import losses, scalar, written

from lightning_tricks import __main__ as door
from lightning_tricks.commands.doctor import CHECKS
from lightning_tricks.logs.finding import Finding, told_once
from lightning_tricks.logs.run import find_run

# ---- the command


def test_a_file_that_cannot_be_read_is_a_line_and_the_others_count(tmp_path, capsys):
    written(tmp_path, *losses(range(60)))
    (tmp_path / "events.out.tfevents.2.b").write_bytes(b"no event file at all, but some text")
    (tmp_path / "ledger.jsonl").write_text("no ledger\n")
    door.run(["doctor", str(tmp_path)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not read: ")]
    assert lines[0] == "not read: events.out.tfevents.2.b: no event file, or cut off in its first record"
    assert "holds no step of a ledger" in lines[1]


def sick(folder):
    return written(folder, *losses(range(60), lambda step: math.nan if step > 30 else 5.0 - step / 100))


def test_a_healthy_run_ends_in_order_and_says_what_was_not_looked_for(tmp_path, capsys):
    door.run(["doctor", str(written(tmp_path, *losses(range(60))))])
    *_, good, missing, last = capsys.readouterr().out.splitlines()
    assert last == "doctor: no fault found"
    assert good == "checked and good: NaN, divergence, plateau, speed"  # spikes need more than 60 points
    assert missing.startswith("not looked for, as the log lacks it: overfitting, label leak, validation leak, clip,")


def test_a_check_is_said_to_be_done_only_with_its_metrics_and_for_one_loss(tmp_path, capsys):
    def good(folder, *events, clip=None):
        written(folder, *events)
        if clip is not None:
            (folder / "config.yaml").write_text(f"trainer: {{gradient_clip_val: {clip}}}\n")
        with contextlib.suppress(SystemExit):
            door.run(["doctor", str(folder), "--html", str(folder / "page.html")])
        start = "checked and good: "
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(start))
        return line.removeprefix(start).split(", ")

    norms = [scalar("train/grad_norm", step, 0.5 + step % 2 / 9, 1e9 + step) for step in range(60)]
    assert "clip" not in good(tmp_path / "none", *losses(range(60)), *norms)
    assert "clip" in good(tmp_path / "a", *losses(range(60)), *norms, clip=1.0)
    assert ">clip 1</text>" in (tmp_path / "a" / "page.html").read_text()
    assert "clip" not in good(tmp_path / "b", *losses(range(60)), *norms, clip=0.001)
    assert good(tmp_path / "short", *losses(range(9))) == ["NaN"]
    two = good(tmp_path / "two", *losses(range(60)), *losses(range(60), tag="d_loss"))
    assert two == ["NaN", "speed"]


def test_a_run_that_one_step_destroyed_is_found_and_a_script_gets_no_options(tmp_path, capsys):
    def loss(step):
        return 4.3 if step == 0 else 13.7 + (step % 7) / 10

    rates = (scalar("train/lr", step, 1.0) for step in range(60))
    folder = written(tmp_path, *losses(range(60), loss), *rates)
    with pytest.raises(SystemExit):
        door.run(["doctor", str(folder), "--html", str(tmp_path / "page.html")])
    said = capsys.readouterr().out
    assert "1. error: divergence" in said
    assert "train/loss began at 4.3, rose at once, and stayed above 13" in said
    assert "remedy: the learning rate divided by 10; a longer warmup_steps" in said
    page = (tmp_path / "page.html").read_text()
    assert re.findall("<figcaption>([^ ]*)", page) == ["train/loss"]  # no rate that is constant
    door.run(["doctor", str(written(tmp_path / "fine", *losses(range(60)))), "--html", str(tmp_path / "fine.html")])
    page = (tmp_path / "fine.html").read_text()
    assert (page.count("<polyline"), "First remedy" in page) == (1, False)


def test_a_run_that_is_too_short_to_judge_is_said_to_be_so(tmp_path, capsys):
    door.run(["doctor", str(written(tmp_path / "a", *losses(range(49)))), "--json", str(tmp_path / "a.json")])
    end = capsys.readouterr().out.splitlines()[-1]
    assert end == "doctor: too short to judge (49 points of the training loss, 50 are needed)"
    assert json.loads((tmp_path / "a.json").read_text())["too_short_to_judge"] is True
    written(tmp_path / "b", *losses(range(9), lambda step: math.nan if step > 5 else 5.0))
    with pytest.raises(SystemExit):
        door.run(["doctor", str(tmp_path / "b")])
    end = capsys.readouterr().out.splitlines()[-1]
    assert end == "doctor: 1 finding, too short to judge the rest (9 points of the training loss, 50 are needed)"


def test_a_sick_run_exits_with_1_and_its_findings_are_text_a_page_and_json(tmp_path, capsys):
    sick(tmp_path / "run")
    with pytest.raises(SystemExit) as end:
        door.run(["doctor", str(tmp_path), "--html", str(tmp_path / "a.html"), "--json", str(tmp_path / "a.json")])
    assert end.value.code == 1
    text = capsys.readouterr().out
    assert "1. error: not finite\n   evidence: train/loss is nan at step 31" in text
    assert text.splitlines()[0].startswith(f"{tmp_path / 'run'}: 60 steps, training loss nan")
    record = json.loads((tmp_path / "a.json").read_text())
    assert [finding["symptom"] for finding in record["findings"]] == ["not_finite"]
    assert record["findings"][0]["score"] == 1.2
    page = (tmp_path / "a.html").read_text()
    assert page.count("<section") == page.count("<polyline") == 1
    assert '<section class="error" id="f1"><h2>1. <b class="error">error</b>: not finite</h2>' in page
    assert '<li><a href="#f1"><b class="error">error</b>: not finite</a></li></ol><p>First remedy: ' in page
    assert "“The loss is NaN” in docs/playbook.md" in page
    assert "train/loss is nan at step 31" in page
    assert "http" not in page  # it needs no other file


def test_a_remedy_is_told_once_and_a_metric_is_drawn_once_with_the_marks_of_all_its_findings(tmp_path, capsys):
    def loss(step):
        return (4.0 if step < 30 else 8.0) + step % 7 / 100 + (9.0 if step in (60, 80, 100) else 0.0)

    norms = (scalar("train/grad_norm", step, 0.5 + step / 9 + step % 2, 1e9 + step) for step in range(120))
    folder = written(tmp_path, *losses(range(120), loss), *norms)
    (folder / "config.yaml").write_text("trainer: {gradient_clip_val: 0.1}\nmodel: {optimizer: {lr: 0.5}}\n")
    with pytest.raises(SystemExit):
        door.run(["doctor", str(folder), "--html", str(tmp_path / "a.html"), "--json", str(tmp_path / "a.json")])
    found = json.loads((tmp_path / "a.json").read_text())["findings"]
    assert [finding["symptom"] for finding in found] == ["divergence", "gradients_add_up", "clip_pinned", "spikes"]
    assert found[3]["remedy"] == "--model.optimizer.lr 0.05 (it is 0.5); --trainer.callbacks+=StepGuard"  # JSON has all
    first, _, *later = re.findall(r"   remedy: (.*)", capsys.readouterr().out)
    assert first == "--model.optimizer.lr 0.05 (it is 0.5); a longer --model.schedule.warmup_steps"
    assert later == ["as for 1", "as for 1; --trainer.callbacks+=StepGuard"]
    page = (tmp_path / "a.html").read_text()
    assert re.findall("<figcaption>([^ ]*)", page) == ["train/loss", "train/grad_norm"]
    marks = {step for finding in found for step in finding["steps"] if "train/loss" in finding["metrics"]}
    assert page.partition("</figure>")[0].count('class="mark"') == len(marks) == 4  # where it diverged, three spikes


def test_a_slow_first_step_makes_no_logarithmic_axis(tmp_path):
    speeds = [10.0, *[1e6] * 59, *[2e5] * 60]
    speed = [scalar("throughput/tokens_per_second", step, each, 1e9 + step) for step, each in enumerate(speeds)]
    folder = written(tmp_path, *losses(range(120)), *speed)
    with pytest.raises(SystemExit):
        door.run(["doctor", str(folder), "--html", str(tmp_path / "a.html")])
    assert "<figcaption>throughput/tokens_per_second over steps<" in (tmp_path / "a.html").read_text()


def test_a_remedy_with_another_value_of_the_same_option_is_the_same_one():
    def told(*remedies):
        return list(told_once([Finding("a", "error", "supported", "", "", remedy) for remedy in remedies]))

    values = ("--a.lr 0.1 (it is 1; lowest; at 3); sleep", "--a.lr 0.2 (it is 1)", "sleep; --a.lr 3", "eat")
    assert told(*values) == [values[0], "as for 1", "as for 1", "eat"]
    callbacks = ("--trainer.callbacks+=A", "--trainer.callbacks+=B; --trainer.callbacks+=A to see")
    assert told(*callbacks) == [callbacks[0], "--trainer.callbacks+=B; as for 1"]


def test_what_a_run_has_printed_tells_how_it_ended(tmp_path, capsys):
    run, file = written(tmp_path / "run", *losses(range(9))), tmp_path / "slurm 1.out"

    def said(*lines, folder=run):
        file.write_text("Epoch 0: 10%\nINFO: an error: none\n" + "\n".join(lines) + "\n")
        with pytest.raises(SystemExit):
            door.run(["doctor", str(folder), "--stderr", str(file)])
        return capsys.readouterr().out

    behind = "HangWatchdog: rank 1 of 2 on node7 is behind: waiting for the training loader before step 4001"
    stands = "HangWatchdog: rank 0 of 2 on node7 has been in the backward of step 4001 for 300 s (limit_seconds=300)"
    hang = said(stands, "  a stack", behind, "RuntimeError: Timed out waiting 60000ms for recv operation to complete")
    assert f"1. error: hang\n   evidence: {stands}; {behind}\n" in hang
    assert "\ndoctor: 1 finding, too short to judge the rest" in hang
    assert "error: out of memory" in said(
        "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    )
    assert "evidence: error: data=no: no such folder" in said("error: data=no: no such folder")
    assert "evidence: [rank1]: ValueError: labels" in said("[rank1]: ValueError: labels", "x.errors.ChildFailedError: ")
    early = said("KeyError: 'ids'", folder=tmp_path / "none")  # before anything was logged
    assert ("no such folder" in early, "1. error: exception" in early) == (True, True)
    file.write_text("all is well\n")
    door.run(["doctor", str(run), "--stderr", str(file)])


def test_names_of_another_project_can_be_given(tmp_path, capsys):
    written(tmp_path, *losses(range(60), lambda step: math.nan if step > 30 else 1.0, "my/loss"))
    with pytest.raises(SystemExit):
        door.run(["doctor", str(tmp_path), "--names", "loss=my/loss"])
    assert "my/loss is nan at step 31" in capsys.readouterr().out


def test_of_several_runs_the_newest_is_taken_and_it_is_said(tmp_path, capsys):
    old = written(tmp_path / "version_0", *losses(range(9)))
    new = written(tmp_path / "version_1", *losses(range(9)))
    os.utime(old / "events.out.tfevents.1.a", (1e9, 1e9))
    assert find_run(tmp_path) == new
    assert find_run(old) == old
    written(new / "plan", scalar("_overview/3_learning_rate", 0, 0.1))  # which a copy made the newest
    os.utime(new / "events.out.tfevents.1.a", (1e9 + 1, 1e9 + 1))
    assert find_run(tmp_path) == new
    assert find_run(new / "plan") == new / "plan"  # as asked for
    for folder, said in ((tmp_path, ["newest of 2 runs: for another one, give its folder"]), (new, [])):
        door.run(["doctor", str(folder)])
        assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("newest")] == said


def test_every_section_is_one_of_the_playbook_and_every_symptom_is_one_of_the_rules():
    root = Path(__file__).resolve().parents[2]
    headings = re.findall(r"^## (.*)$", (root / "docs/playbook.md").read_text(), re.MULTILINE)
    assert {section for *_, section in CHECKS} <= set(headings)
    rules = "".join(path.read_text() for path in (root / "lightning_tricks/logs").glob("*symptoms.py"))
    assert [name for check in CHECKS for name in check[3].split() if f'"{name}"' not in rules] == []
