"""The notebook's cells run one after the other, as in a kernel, and show what their text promises.

A line that begins with `!` runs as a command line, `{...}` in it as IPython replaces it; `%` lines are for Colab alone.
The first run is made short by the two variables that the notebook gives its readers.
"""

import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from harness.preloaded import python

pytestmark = pytest.mark.pages

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples/lightning_tricks.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
STEPS = 6
SMALL = {
    "data.cache_dir": "cache", "data.files": "{text_file}", "data.vocab_size": 300, "data.seq_len": 64,
    "model.decoder.d_model": 32, "model.decoder.n_layers": 1, "model.schedule.warmup_steps": 2,
    "trainer.val_check_interval": STEPS,
}  # fmt: skip


def as_python(cell: str) -> str:
    """The cell with its command lines and magics as calls of `shell` and `magic`."""
    cell = re.sub(r"^( *)!(.*)$", lambda line: f"{line[1]}shell(f{line[2]!r})", cell, flags=re.M)
    return re.sub(r"^( *)%(.*)$", lambda line: f"{line[1]}magic({line[2]!r})", cell, flags=re.M)


class Shell:
    """Runs command lines, and keeps what they print. As IPython, it goes on where a command fails; `failed` says so."""

    def __init__(self) -> None:
        self.printed: dict[str, str] = {}  # by the command and its arguments, without the interpreter
        self.failed: list[str] = []

    def __call__(self, line: str) -> None:
        """Run one line."""
        interpreter, *words = shlex.split(line)
        assert interpreter == sys.executable
        done = subprocess.run([python(), *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        command = " ".join(words).removeprefix("-m lightning_tricks ")
        self.printed[command] = done.stdout
        if done.returncode:
            self.failed.append(f"{done.returncode}: {command}")

    def of(self, command: str) -> str:
        """What a command has printed."""
        (printed,) = (text for line, text in self.printed.items() if line.startswith(command))
        return printed


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, text_file: str) -> SimpleNamespace:
    """What all cells, run in their order, have left: `shell`, `curves` by name, `shown` pages, and the names."""
    import matplotlib.pyplot as plt

    options = shlex.join(f"--{name}={str(value).format(text_file=text_file)}" for name, value in SMALL.items())
    shorter = {"STEPS = 400": f"STEPS = {STEPS}", 'OPTIONS = ""': f"OPTIONS = {options!r}"}
    shell, curves, shown = Shell(), {}, []
    kernel: Any = ModuleType("IPython")
    kernel.get_ipython, kernel.version_info = lambda: None, (9, 0)
    kernel.display = ModuleType("IPython.display")
    kernel.display.HTML, kernel.display.display = str, shown.append

    def keep_curves() -> None:
        for place in plt.gcf().axes:
            (curve,) = place.get_lines()
            curves.setdefault(place.get_title(), []).append(curve.get_ydata().tolist())
        plt.close()

    python()  # its server, whose folder is not this test's
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("notebook")
        patch.chdir(folder)
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setitem(sys.modules, "IPython", kernel)
        patch.setitem(sys.modules, "IPython.display", kernel.display)
        patch.setattr(plt, "show", keep_curves)
        plt.switch_backend("agg")
        names: dict[str, Any] = {"__name__": "__main__", "shell": shell}
        for number, cell in enumerate(CODE):
            for old in [old for old in shorter if old in cell]:
                cell = cell.replace(old, shorter.pop(old))
            exec(compile(as_python(cell), f"{NOTEBOOK.name}, code cell {number}", "exec"), names)
    assert not shorter, "the notebook has lost a variable that makes it short"
    return SimpleNamespace(shell=shell, curves=curves, shown=shown, names=names)


def test_commands_succeed_but_for_the_doctor_of_the_broken_run(ran):
    assert ran.shell.failed == ["1: doctor runs/broken --html doctor.html"]


def test_the_first_part_trains_and_writes(ran):
    assert f"step {STEPS}/{STEPS} (100%)" in ran.shell.of("fit")
    assert re.search(r"this model +[\d.]+  at step 6\n  zlib -9 ", ran.shell.of("fit"))
    assert len(ran.curves["train/lr"][0]) == STEPS
    assert "\ndef " in ran.shell.of("generate")


def test_one_callback_records_every_norm_of_a_module_that_learns(ran):
    (_, norms), (losses,) = ran.curves["train/grad_norm"], ran.curves["train_loss"]
    assert len(norms) == len(losses) == 300
    assert losses[0] == pytest.approx(5.545, abs=0.3)  # ln 256
    assert torch.tensor(losses[-50:]).mean() < 3.0
    (module,) = (cell for cell in CODE if "class NextByte" in cell)
    assert not re.search(r"\blt\b|import lightning_tricks", module)


def test_the_doctor_names_the_learning_rate_of_the_broken_run_alone(ran):
    first = r"^1\. (error|warning): .*\n   evidence: .*\n   cause \(\w+\): .*learning rate"
    assert re.search(first, ran.shell.of("doctor runs/broken"), re.M)
    (page,) = ran.shown
    assert page.startswith("<div><iframe srcdoc=")
    assert "&lt;svg" in page
    assert ran.shell.of("doctor runs/mine").splitlines()[-1].startswith("doctor: nothing found above a note")


def test_the_file_holds_no_outputs_and_has_the_form_of_a_notebook():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CELLS if "outputs" in cell)
    assert all(("outputs" in cell) == (cell["cell_type"] == "code") for cell in CELLS)
    long = [line for cell in CELLS if cell["cell_type"] == "markdown" for line in cell["source"] if len(line) > 121]
    assert long == []
