"""The current folder, which may be a stranger's, never stands before the standard library and installed packages."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_tricks import __main__ as door
from lightning_tricks._host.import_path import find_modules_of_recipe, name_modules, without_current_folder

LIBRARY = os.path.dirname(os.__file__)
# `python -m` itself imports these from the current folder, before the first line of any package: see SECURITY.md
OF_PYTHON = {"collections", "contextlib", "functools", "importlib", "itertools", "keyword", "operator", "reprlib",
             "runpy", "types", "warnings"}  # fmt: skip
PACKAGES = ("yaml", "torch", "numpy", "lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning",
            "jsonargparse", "tensorboard", "tokenizers", "safetensors", "transformers", "fsspec", "tqdm", "packaging",
            "torchmetrics", "sitecustomize", "usercustomize")  # fmt: skip


def test_entries_of_the_current_folder_before_the_library_go(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    here, path = str(tmp_path), [str(tmp_path), "", "/mine", str(tmp_path / "link"), LIBRARY, "/packages"]
    assert without_current_folder(path[:1] + path[2:], here) == ["/mine", LIBRARY, "/packages"]
    assert without_current_folder([here, LIBRARY, here], here) == [LIBRARY, here]  # as an installed project has it


def test_the_empty_entry_is_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert without_current_folder(["", ".", LIBRARY], str(tmp_path)) == [LIBRARY]


def test_an_absolute_path_in_pythonpath_is_the_users_own_choice(tmp_path):
    path = [str(tmp_path), LIBRARY]
    assert without_current_folder(path, str(tmp_path), f"/other{os.pathsep}{tmp_path}") == path
    assert without_current_folder(path, str(tmp_path), f"{os.pathsep}.") == [LIBRARY]


def test_the_library_stays_where_it_is_the_current_folder():
    assert without_current_folder([LIBRARY, LIBRARY, "/packages"], LIBRARY) == [LIBRARY, LIBRARY, "/packages"]


def test_a_recipes_folder_is_found_last_and_once_and_for_what_it_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [LIBRARY, "/packages"])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = len(sys.meta_path)
    find_modules_of_recipe()
    find_modules_of_recipe()
    assert len(sys.meta_path) == before + 1
    for name in ("named_by_recipe", "not_named_by_it"):
        (tmp_path / f"{name}.py").touch()
    name_modules(
        "model: {class_path: named_by_recipe.Model, init_args: {file: a/not_named_by_it, x: .not_named_by_it}}"
    )
    assert importlib.util.find_spec("not_named_by_it") is None
    assert importlib.util.find_spec("named_by_recipe").origin == str(tmp_path / "named_by_recipe.py")
    assert sys.path == [LIBRARY, "/packages", str(tmp_path)]
    assert importlib.util.find_spec("not_named_by_it") is not None, "a neighbour of a module that was named"


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["ls"]])
def test_commands_without_a_recipe_leave_the_current_folder_out(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), LIBRARY, "/packages"])
    monkeypatch.setattr(sys, "argv", ["lightning-tricks", *words])
    door.main()
    assert sys.path == [LIBRARY, "/packages"]


@pytest.fixture
def stranger(tmp_path: Path) -> Path:
    """A folder with two runs, a ledger and a module for each name of the library, which writes a file when it runs."""
    folder = tmp_path / "logs"
    for run in ("a", "b"):
        (folder / run).mkdir(parents=True)
        lines = [f"{step},{4 / (step + 1)},{4 / (step + 2)}" for step in range(60)]
        (folder / run / "metrics.csv").write_text("\n".join(["step,train/loss,val/loss", *lines]) + "\n")
        (folder / run / "config.yaml").write_text(f"seed_everything: {ord(run)}\n")
    names = (sys.stdlib_module_names - OF_PYTHON) | set(PACKAGES)
    code = f"open({str(tmp_path / 'written')!r}, 'a').write(__name__ + chr(10))\n"
    for name in names:
        (folder / f"{name}.py").write_text(code)
    return folder


def environment(**more: str) -> dict[str, str]:
    """This process's, with the collection of this checkout by its absolute path."""
    root = str(Path(__file__).resolve().parents[1])
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**kept, "PYTHONPATH": root, "PYTHONDONTWRITEBYTECODE": "1", **more}


CONSOLE = "import sys; from lightning_tricks.__main__ import main; main()"  # in a file, as pip writes it


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [["-m", "doctor", "a"], ["doctor", "a"], ["-m", "runs", "."], ["-m", "compare", "a", "b"],
     ["-m", "ledger", "check", "."]],
)  # fmt: skip
def test_a_command_that_reads_logs_runs_no_module_of_their_folder(stranger, tmp_path, words):
    script = tmp_path / "bin" / "lightning-tricks"
    script.parent.mkdir()
    script.write_text(CONSOLE)
    start = ["-m", "lightning_tricks", *words[1:]] if words[0] == "-m" else [str(script), *words]
    done = subprocess.run(
        [sys.executable, *start], cwd=stranger, env=environment(), capture_output=True, text=True, check=False
    )
    assert not (tmp_path / "written").exists(), (tmp_path / "written").read_text()
    assert "Traceback" not in done.stderr, done.stderr


def recipe_of(model: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """`fit --print_config` with this model, in a folder."""
    command = [sys.executable, "-m", "lightning_tricks", "fit", "--model", model, "--print_config"]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)


@pytest.mark.long
def test_a_recipe_runs_no_module_of_the_current_folder_that_it_does_not_name(stranger, tmp_path):
    for name in ("matplotlib", "ruamel", "pynvml", "triton"):
        if importlib.util.find_spec(name) is None:
            shutil.copy(stranger / "yaml.py", stranger / f"{name}.py")
    done = recipe_of("LanguageModel", stranger)
    assert "class_path: lightning_tricks.LanguageModel" in done.stdout, done.stderr
    assert not (tmp_path / "written").exists(), (tmp_path / "written").read_text()


@pytest.mark.long
def test_a_recipe_finds_a_class_of_the_current_folder_behind_the_packages(stranger, tmp_path):
    for module in stranger.glob("*.py"):  # what is not installed is found here, once a module has been named
        if module.stem in sys.stdlib_module_names and importlib.util.find_spec(module.stem) is None:
            module.unlink()
    (stranger / "mine.py").write_text(
        "from lightning.pytorch import LightningModule\nclass Mine(LightningModule): ...\n"
    )
    done = recipe_of("mine.Mine", stranger)
    assert "class_path: mine.Mine" in done.stdout, done.stderr
    assert not (tmp_path / "written").exists(), (tmp_path / "written").read_text()
