"""The recipe, the ledger, the dashboard and goodput lie in the folder of their run, whatever the logger."""

import re
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.loggers import Logger
from test_run_folder import SAVER, command_line


@pytest.fixture(autouse=True)
def _in_a_new_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class Service(Logger):
    """Stands for the loggers of W&B, MLflow, Comet and Neptune: its runs share `save_dir`, and an id comes late."""

    def __init__(self, ids: str, save_dir: str | None = None):
        super().__init__()
        self.ids, self._dir, self._id = ids, save_dir, None

    @property
    def save_dir(self):
        return self._dir

    name = "project"

    @property
    def version(self):
        return self._id

    @property
    def experiment(self):
        if self._id is None:
            *ids, last = self.ids.split()
            self._id = next((one for one in ids if not Path(self._dir or ".", "project", one).exists()), last)

    def log_metrics(self, metrics, step=None):
        pass

    def log_hyperparams(self, params, *args, **kwargs):
        pass


def service(ids, save_dir="null"):
    return f"--trainer.logger={{class_path: {__name__}.Service, init_args: {{ids: {ids}, save_dir: {save_dir}}}}}"


CSV = "{class_path: ResumingCSVLogger, init_args: {save_dir: runs, name: toy}}"
TENSORBOARD = "{class_path: ResumingTensorBoardLogger, init_args: {save_dir: tb, name: toy}}"
SERVICE = service("a b", "runs").removeprefix("--trainer.logger=")
WATCHED = f"{SAVER[:-1]}, RunLedger, TensorBoardDashboard, GoodputMonitor]"
LOGGERS = {
    "a service": (service("a b", "runs"), "runs/project/a", "runs/project/b"),
    "csv": (f"--trainer.logger={CSV}", "runs/toy/version_0", "runs/toy/version_1"),
    "a service and TensorBoard": (f"--trainer.logger=[{SERVICE}, {TENSORBOARD}]", "runs/project/a", "runs/project/b"),
}


def configs(folder):
    """The number of steps of each recipe in a folder, by its file."""
    return {path.name: yaml.safe_load(path.read_text())["trainer"]["max_steps"] for path in folder.glob("config*.yaml")}


def named_in(lines):
    """The recipe in the line "Go on" of a command."""
    (line,) = [line for line in lines.splitlines() if line.startswith("Go on")]
    return re.search(r"--config (\S+)", line)[1]


@pytest.mark.parametrize("logger", LOGGERS)
def test_recipe_ledger_dashboard_and_goodput_lie_beside_the_checkpoints_of_each_run(logger, capsys):
    option, *places = LOGGERS[logger]
    for steps, place in zip((4, 6), places, strict=True):
        command_line("fit", option, f"--trainer.max_steps={steps}", "--trainer.log_every_n_steps=1", saver=WATCHED)
        files = {"checkpoints", "config.yaml", "ledger.jsonl", "goodput.json"}
        assert {path.name for path in Path(place).iterdir()} >= files
        assert named_in(capsys.readouterr().out) == f"{place}/config.yaml"
    assert [configs(Path(place)) for place in places] == [{"config.yaml": 4}, {"config.yaml": 6}]


@pytest.mark.parametrize(
    ("option", "place"),
    [("--trainer.logger=false", "."), (service("a", "s"), "s/project/a")],
    ids=["none", "a service"],
)
def test_a_run_in_the_folder_of_another_one_leaves_its_recipe(option, place, capsys):
    place, names = Path(place), []
    for steps in (4, 6, 4):
        command_line("fit", option, f"--trainer.max_steps={steps}")
        names.append(Path(named_in(capsys.readouterr().out)).name)
    assert names == ["config.yaml", "config-v1.yaml", "config-v2.yaml"]
    last = f"--ckpt_path={place}/checkpoints/last.ckpt"
    command_line("validate", option, last)
    command_line("fit", option, "--trainer.max_steps=8", last)
    assert configs(place) == {"config.yaml": 4, "config-v1.yaml": 6, "config-v2.yaml": 4, "config-v3.yaml": 8}


def test_a_fit_that_goes_on_writes_its_own_recipe_anew(capsys):
    for more in ((), ("--trainer.max_steps=6", "--ckpt_path=checkpoints/last.ckpt")):
        command_line("fit", "--trainer.logger=false", *more)
    assert configs(Path()) == {"config.yaml": 6}
