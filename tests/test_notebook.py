"""The notebook's cells run one after the other, as in a kernel, and print what is stored under them.

`%%bash` cells run as a command line, with the Python of the tests. A `!` line stands in the branch that installs alone.
`docs/scripts/run_notebook.py` stores the outputs.
"""

import contextlib
import io
import json
import logging
import re
import shlex
import subprocess
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness.preloaded import python

pytestmark = pytest.mark.pages

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples/lightning_tricks.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
CODE = {cell["id"]: cell for cell in CELLS if cell["cell_type"] == "code"}
NUMBER = r"-?\d[\d.,]*(?:e[-+]\d+)?"
# Lines that the machine or the time decides.
VARIES = re.compile(r"^(GPU available|TPU available|at [\d.]+ (?:hours|minutes|seconds)|[│┌└]|100 +200 +300)")

# Sums of fp32 come in another order on another CPU, and the text differs between versions of Python. Training grows
# such differences up to those between seeds: 0.026 of 2.69 in the stored output of compare, and four times that is 4 %.
TOLERANCE = 0.04


def stored(name: str) -> str:
    """What the file holds as printed by a cell, without colours."""
    streams = ["".join(output["text"]) for output in CODE[name]["outputs"] if output["output_type"] == "stream"]
    return re.sub(r"\x1b\[\d*m", "", "".join(streams))


def lines(printed: str) -> list[str]:
    """The lines that every machine prints, without numbers, hashes and the width of columns."""
    kept = [line for line in printed.splitlines() if line.strip() and not VARIES.match(line)]
    text = re.sub(r"text-[0-9a-f]{16}", "text-HASH", " ".join("\n".join(kept).split(" ")))
    return [" ".join(re.sub(NUMBER, "#", line).split()) for line in text.split("\n")]


def run_cell(cell: str, names: dict[str, object]) -> None:
    """Run a cell as IPython does; what it prints goes to standard output."""
    magic, _, body = cell.partition("\n")
    if magic == "%%bash":
        command = f'python() {{ {shlex.quote(python())} "$@"; }}\n{body}'
        done = subprocess.run(["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print(done.stdout, end="")
        assert done.returncode == 0, done.stdout
    elif magic.startswith("%%writefile "):
        name = magic.removeprefix("%%writefile ")
        Path(name).write_text(body + "\n", encoding="utf-8")
        print(f"Writing {name}")
    else:
        exec(compile(re.sub(r"^( +)!.*$", r"\1raise AssertionError", cell, flags=re.M), "cell", "exec"), names)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """What all cells, run in their order, have left: `printed` by cell, and `titles` of the plots by cell."""
    import matplotlib.pyplot as plt

    printed, titles = {}, {}
    python()  # its server, whose folder is not this test's
    lightning = logging.getLogger("lightning.pytorch")
    level = lightning.level
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        plt.close("all")  # of other tests
        folder = tmp_path_factory.mktemp("notebook")
        patch.chdir(folder)
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setenv("PATH", "/usr/bin:/bin")  # these two are set by a cell, and restored at the end
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(plt, "show", lambda: None)
        plt.switch_backend("agg")
        names: dict[str, object] = {"__name__": "__main__"}
        for name, cell in CODE.items():
            with contextlib.redirect_stdout(io.StringIO()) as out:
                run_cell("".join(cell["source"]), names)
            printed[name] = out.getvalue()
            titles[name] = [place.get_title() for figure in map(plt.figure, plt.get_fignums()) for place in figure.axes]
            plt.close("all")
    lightning.setLevel(level)
    return SimpleNamespace(printed=printed, titles=titles)


@pytest.mark.parametrize("name", [name for name in CODE if name not in ("named", "generate")])
def test_a_cell_prints_the_lines_that_are_stored(ran, name):
    assert lines(ran.printed[name]) == lines(stored(name))


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("first", r"^val_loss +(\S+)$"),
        ("compare", r"^last +(\S+) +(\S+)"),
        ("fit", r"step 200  validation  loss (\S+)  bits/byte (\S+)"),
        ("fit", r"zlib -9 +(\S+)"),
    ],
)
def test_figures_at_the_end_of_a_run_are_those_stored(ran, name, figures):
    (new,), (old,) = (re.findall(figures, text, re.M) for text in (ran.printed[name], stored(name)))
    new, old = ([float(figure) for figure in ([found] if isinstance(found, str) else found)] for found in (new, old))
    assert new == pytest.approx(old, rel=TOLERANCE)


def test_the_doctor_names_the_learning_rate_of_the_broken_run_alone(ran):
    first = r"^1\. .*(error|warning): .*\n   evidence: (?:.*\n)+?   cause \(\w+\): .*learning rate"
    for text in (ran.printed["named"], stored("named")):
        assert re.search(first, text, re.M)
    assert ran.printed["healthy"].splitlines()[-1] == "doctor: no fault found"


def test_compare_is_sure_which_learning_rate_is_better(ran):
    assert "compare: B is better than A: val_loss" in ran.printed["compare"]


def test_the_model_writes(ran):
    for text in (ran.printed["generate"], stored("generate")):
        assert len(text.partition("\nThe ")[2]) > 20


@pytest.mark.parametrize("name", CODE)
def test_a_picture_is_stored_where_a_cell_plots(ran, name):
    pictures = [output for output in CODE[name]["outputs"] if "image/png" in output.get("data", {})]
    assert len(pictures) == bool(ran.titles[name])
    assert bool(pictures) == ("show(" in "".join(CODE[name]["source"]))


def test_the_file_has_the_form_of_a_notebook_and_no_noise():
    text = NOTEBOOK.read_text(encoding="utf-8")
    notebook = json.loads(text)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)
    assert all(("outputs" in cell) == (cell["cell_type"] == "code") for cell in CELLS)
    assert [cell["execution_count"] for cell in CODE.values()] == list(range(1, len(CODE) + 1))
    printed = [
        output for cell in CODE.values() for output in cell["outputs"] if output["output_type"] != "display_data"
    ]
    assert {output.get("name") for output in printed} == {"stdout"}  # neither warnings nor values
    assert not re.search(r"site-packages|/home/|/root/|/tmp/|Warning", "".join(map(stored, CODE)))
    assert len(text) < 500_000
    long = [line for cell in CELLS if cell["cell_type"] == "markdown" for line in cell["source"] if len(line) > 121]
    assert long == []
