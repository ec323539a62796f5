"""What a user sees: a real TensorBoard of a short run that was killed and resumed, in a real browser."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import pytest
from harness.preloaded import python
from short_run import Model, Raise, fit, save_every

from lightning_tricks._trainer.lightning import pl
from lightning_tricks.callbacks import LRMonitor, MetricBuffer, TensorBoardDashboard
from lightning_tricks.loggers import ResumingTensorBoardLogger
from lightning_tricks.schedules import ScheduleLR, WarmupLinear

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for path in map(shutil.which, BROWSERS) if path), None)
WIDTH, HEIGHT = 1280, 800
STEPS = 30

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason=f"none of {', '.join(BROWSERS)} is installed"),
    pytest.mark.filterwarnings("ignore"),  # Lightning on resuming in mid-epoch
]


CURVE = WarmupLinear(warmup_steps=3)


class Scheduled(Model):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": ScheduleLR(optimizer, CURVE, STEPS), "interval": "step"}]


class Stand(pl.Callback):
    """Record a number under each name that a monitor would record."""

    NAMES = (
        "train/grad_norm",
        "throughput/tokens_per_second",
        "throughput/mfu",
        "memory/rss_gib",
        "activations/h.0/rms",
    )

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.buffer = MetricBuffer.of(trainer)

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        for name in self.NAMES:
            self.buffer.record(name, 0.5 + trainer.global_step % 3)


@pytest.fixture(scope="module")
def logdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that failed after 17 steps and went on from the checkpoint of step 10."""
    folder = tmp_path_factory.mktemp("runs")

    def run(*callbacks: Any, **options: Any) -> None:
        logger = ResumingTensorBoardLogger(folder, name="demo", version="")
        watchers = (TensorBoardDashboard(), LRMonitor(), Stand())
        fit(logger, STEPS, callbacks=(*watchers, *callbacks), gradient_clip_val=0.5, log_every_n_steps=1, **options)

    with pytest.raises(RuntimeError, match="power cut"):
        run(save_every(10, folder / "kept"), Raise(17), model=Scheduled(), enable_checkpointing=True)
    run(model=Scheduled(run=2), ckpt_path=folder / "kept" / "step=10.ckpt")
    return folder


@pytest.fixture(scope="module")
def address(logdir: Path) -> Iterator[str]:
    """The address of a TensorBoard that has read `logdir`, by its default reader: tests of loggers take the other."""
    command = [python(), "-m", "tensorboard.main", "--logdir", str(logdir), "--host", "127.0.0.1", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if found := re.search(r"http://[\w.:]+/", line):
                break
        else:
            pytest.fail(f"TensorBoard did not start: {said}")
        wanted = time.monotonic() + 60
        while "hp/val_loss" not in json.dumps(get(found[0], "data/plugin/scalars/tags")):
            assert time.monotonic() < wanted, "TensorBoard has not read the run"
            time.sleep(0.2)
        yield found[0]
    finally:
        process.kill()
        process.wait()


def get(address: str, path: str) -> Any:
    with urlopen(address + path) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def page(address: str) -> Iterator[Any]:
    """A function that opens an address of a TensorBoard in the browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        tab.set_default_timeout(60_000)

        def open_page(path: str) -> Any:
            tab.goto("about:blank")  # a change of the fragment alone loads nothing
            tab.goto(address + path)
            return tab

        yield open_page
        browser.close()


def test_each_step_stands_once(address):
    for tag in ("train/loss", "train/lr", "train/grad_norm"):
        shown = get(address, f"data/plugin/scalars/scalars?run=demo&tag={quote(tag, safe='')}")
        assert [step for _, step, _ in shown] == list(range(STEPS)), tag
    planned = get(address, "data/plugin/scalars/scalars?run=demo%2Fplan&tag=_overview%2F3_learning_rate")
    curve = [(step, pytest.approx(CURVE.lr(0.1, step, STEPS))) for step in range(STEPS)]
    assert [(step, lr) for _, step, lr in planned] == curve  # no resume purges it
    losses = get(address, "data/plugin/scalars/scalars?run=demo&tag=train%2Floss")
    assert [value for _, _, value in losses] == [1000 * (1 if step < 10 else 2) + step for step in range(STEPS)]


def test_the_overview_comes_first_and_its_curves_are_visible_in_their_colours(page):
    tab = page("#scalars&_smoothingWeight=0")
    charts = tab.locator("tf-scalar-card")
    charts.nth(4).wait_for()
    names = ["1_loss", "2_gradient_norm", "3_learning_rate", "4_tokens_per_second", "5_mfu"]
    for index, name in enumerate(names):
        charts.nth(index).get_by_text(f"_overview/{name}", exact=True).first.wait_for()
    wanted = time.monotonic() + 60
    # training and validation, the norm and the clip, the lr and its plan, tokens/s
    while [colors(charts.nth(index)) for index in range(4)] != [2, 2, 2, 1]:
        assert time.monotonic() < wanted, [colors(charts.nth(index)) for index in range(4)]
        time.sleep(0.2)
    places = [charts.nth(index).locator("vz-line-chart2").bounding_box() for index in range(4)]
    assert max(place["y"] + place["height"] for place in places) <= HEIGHT


def colors(chart: Any) -> int:
    """In how many colours lines are drawn in a chart."""
    script = "all => all.map(path => [path.getAttribute('d') || '', getComputedStyle(path).stroke])"
    found = chart.locator("vz-line-chart2 path").evaluate_all(script)
    return len({stroke for line, stroke in found if "L" in line and "Z" not in line and stroke != "none"})


def test_without_the_address_the_overview_comes_first_too(page):
    tab = page("")
    tab.locator("card-view").first.wait_for()
    assert tab.locator("card-view").first.inner_text().replace("\n", "").startswith("_overview/1_loss")


def test_the_charts_of_many_series_are_custom_scalars(page):
    tab = page("#custom_scalars")
    tab.locator("tf-custom-scalar-multi-line-chart-card").first.wait_for()
    tab.get_by_text("Inside the model").first.wait_for()
    tab.get_by_text("activations: rms", exact=True).first.wait_for()
