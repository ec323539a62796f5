"""The examples run as they stand, and what they promise to show is there."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from harness import preloaded
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = pytest.mark.pages

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
LINE = (
    r"step {last}/{last} \(100%\)  loss [\d.]+  norm [\d.e-]+  lr {lr}  [\d.]+k? {unit}/s  MFU [\d.]+%  [\d.]+ GiB  "
    r"ETA 0:00:00"
)


@pytest.mark.parametrize(
    ("script", "last", "lr", "speed", "first_loss", "last_loss"),
    [
        ("image_classifier.py", 128, "1.0e-03", "samples", 2.079, 0.6),  # ln 8
        ("hugging_face.py", 100, "3.0e-03", "tokens", 4.159, 1.0),  # ln 64
    ],
)
def test_example(script, last, lr, speed, first_loss, last_loss, tmp_path):
    run = subprocess.run(
        [preloaded.python(), EXAMPLES / script], cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stdout.splitlines() if line.startswith("step ")]
    assert re.fullmatch(LINE.format(last=last, lr=re.escape(lr), unit=speed), [x for x in lines if "ETA" in x][-1])
    assert f"step {last}  validation  loss" in run.stdout

    events = EventAccumulator(str(tmp_path / "lightning_logs/version_0"), size_guidance={"scalars": 0}).Reload()
    points = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    every_step = {tag for tag, scalars in points.items() if [point.step for point in scalars] == list(range(last))}
    assert {"train/grad_norm", "train/lr"} <= every_step
    assert {"throughput/mfu", "throughput/samples_per_second", "memory/rss_gib", "val_loss"} <= points.keys()
    assert ("throughput/tokens_per_second" in points) == (speed == "tokens")
    assert points["train_loss"][0].value == pytest.approx(first_loss, rel=0.5)
    assert points["val_loss"][-1].value < last_loss
    assert all(point.value > 0 for point in points["throughput/mfu"])


@pytest.mark.parametrize("script", ["hugging_face.py", "image_classifier.py"])
def test_three_lines_are_added(script):
    text = (EXAMPLES / script).read_text(encoding="utf-8")
    ours = [line for line in text.splitlines() if re.search(r"\blt\b|lightning_tricks", line)]
    assert len(ours) == 3
    assert all(line.rstrip().endswith(end) for line, end in zip(ours, ("# added: 1 of 3", "# 2", "# 3"), strict=True))


def ray_train(folder: Path, epochs: int, storage: str) -> str:
    """The last line of the example with two workers of Ray on this machine, without the checkpoint's path."""
    command = [sys.executable, EXAMPLES / "ray_train.py", "--epochs", str(epochs), "--storage", storage]
    path = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    env["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "600"  # 60 by default, too short on a busy machine
    run = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-5000:]
    (line,) = re.findall("^(step .*), .*checkpoint", run.stdout, re.M)
    return line


@pytest.mark.long
@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")
def test_under_ray_a_run_goes_on_from_the_checkpoint_that_it_reported(tmp_path):
    assert ray_train(tmp_path, 2, "one").startswith("step 8, loss ")
    resumed = ray_train(tmp_path, 4, "one")
    assert resumed.startswith("step 16, loss ")
    assert resumed == ray_train(tmp_path, 4, "unbroken")


def test_the_page_shows_the_trainer_of_the_ray_example():
    (shown,) = re.findall("```text\n( {8}devices=.*?)```", (EXAMPLES.parent / "docs/launching.md").read_text(), re.S)
    assert shown in (EXAMPLES / "ray_train.py").read_text()


@pytest.mark.long
def test_the_whole_way_in_plain_python_trains_resumes_and_writes(tmp_path):
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [preloaded.python(), EXAMPLES / "train_in_python.py"]
    first, second = (
        subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False) for _ in range(2)
    )
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    (bits,) = re.findall(r"([\d.]+) bits/byte$", first.stdout, re.M)
    assert float(bits) < 3.2  # 3.5 for a model that knows how often each token comes
    assert "step 200/200 (100%)" in first.stdout
    assert "step " not in second.stdout  # it was at its end already
    assert first.stdout.partition("validation: ")[2] == second.stdout.partition("validation: ")[2]
    assert "The " in second.stdout


def test_the_page_shows_the_whole_script_in_plain_python():
    script = (EXAMPLES / "train_in_python.py").read_text().partition('"""\n\n')[2]
    page = (EXAMPLES.parent / "docs/language_model.md").read_text(encoding="utf-8")
    assert f"```python\n{script}```" in page
