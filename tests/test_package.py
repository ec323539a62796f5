"""The package: public names with their types, cheap import, and which of the two Lightnings it builds on."""

import inspect
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import llms_txt
import public_names
import pytest
from harness import preloaded

import lightning_tricks
from lightning_tricks import OptimizerMixin
from lightning_tricks._core.errors import UsageError
from lightning_tricks._trainer import lightning as _lightning
from lightning_tricks.commands import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
NAMES = [name for name in lightning_tricks.__all__ if name != "__version__"]


def python(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True)


@pytest.mark.long
def test_importing_the_package_imports_no_torch():
    code = "import sys, lightning_tricks; print(sorted({'torch', 'lightning', 'inspect'} & sys.modules.keys()))"
    assert python("-c", code).stdout.strip() == "[]"


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_there_and_documented(name):
    thing = getattr(lightning_tricks, name)
    assert thing.__name__ == name
    assert len(thing.__doc__.strip().splitlines()[0]) > 20


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'lightning_tricks' has no attribute 'no_such_trick'$"):
        _ = lightning_tricks.no_such_trick


def test_the_lists_of_public_names_are_what_the_modules_say():
    assert public_names.main(["--check"]) == 0, "run python docs/scripts/public_names.py"
    assert set(NAMES) == set(public_names.public_names())


def test_the_list_for_agents_in_the_wheel_has_each_command_recipe_and_name_and_leads_to_files():
    assert llms_txt.main(["--check"]) == 0, "run python docs/scripts/llms_txt.py"
    text = llms_txt.FILE.read_text(encoding="utf-8")
    links = re.findall(r"^- \[([^\]]+)\]\(([^)]+)\): \S", text, re.M)
    recipes = {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
    assert sorted(name for name, _ in links) == sorted([*COMMANDS, *recipes, *NAMES])
    places = [ROOT / link if link.startswith("recipes/") else ROOT / "lightning_tricks" / link for _, link in links]
    assert [place for place in places if not place.is_file()] == []
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    assert wheel["wheel"]["force-include"]["docs/llms_wheel.txt"] == "lightning_tricks/llms.txt"


def test_the_package_lists_its_names_before_they_are_imported():
    assert dir(lightning_tricks) == sorted(lightning_tricks.__all__)
    assert {"LanguageModel", "__version__"} <= set(dir(lightning_tricks))


# ---- types

USER = """
import lightning.pytorch as pl
import torch

import lightning_tricks as lt
from lightning_tricks.callbacks import MemoryMonitor


class Mine(lt.OptimizerMixin, pl.LightningModule):
    pass


schedule = lt.WarmupStableDecay(warmup_steps=10, decay_fraction=0.2, decay_shape="cosine")
shape: lt.DecoderConfig = lt.Llama(d_model=64, n_layers=2, n_heads=2)
model = lt.LanguageModel(shape, "full", schedule=schedule, weight_decay=0.1, param_rules=[lt.ParamRule("head")])
data = lt.TextData("book.txt", seq_len=64)
monitor = lt.MFUMonitor(peak_flops=1e12)
trainer = pl.Trainer(
    callbacks=[monitor, MemoryMonitor(), lt.TrainingProgressBar()], strategy=lt.FSDP2Strategy(compile_blocks=True),
    plugins=lt.BF16Mixed(), logger=lt.ResumingCSVLogger("runs"),
)
trainer.fit(model, data)
Mine(schedule=schedule, weight_decay=0.0)

lt.MFUMonitor(peak_flops="fast")  # wrong: arg-type
lt.FSDP2Strategy(replicate=2)  # wrong: call-arg
lt.WarmupStableDecay(warmup_steps=10, decay_shape="square")  # wrong: arg-type
lt.WarmupCosine()  # wrong: call-arg
Mine(weight_decay="much")  # wrong: arg-type
lt.LanguageModel(shape, schedule="cosine")  # wrong: arg-type
lt.LanguageModel(shape, lr=0.1)  # wrong: call-arg
lt.BF16True(update="nearest")  # wrong: call-arg
lt.TokenData(train=3)  # wrong: arg-type
lt.load_recipe(3)  # wrong: arg-type
lt.NoSuchName()  # wrong: attr-defined
pl.Trainer(callbacks=lt.FSDP2Strategy())  # wrong: arg-type
pl.Trainer(strategy=lt.MFUMonitor())  # wrong: arg-type
"""
SETTINGS = """
[mypy]
mypy_path = {path}
ignore_missing_imports = True
follow_imports = silent
[mypy-torch.*,torchmetrics.*,numpy.*,jsonargparse.*,tokenizers.*,matplotlib.*,rich.*,tensorboard.*,PIL.*,fsspec.*]
follow_imports = skip
follow_imports_for_stubs = True
[mypy-tqdm.*,yaml.*,lightning_utilities.*,multiprocessing.*,concurrent.*,docstring_parser.*,urllib.*,asyncio.*,http.*]
follow_imports = skip
follow_imports_for_stubs = True
[mypy-lightning.pytorch.loops.*,lightning.pytorch.tuner.*,lightning.pytorch.profilers.*]
follow_imports = skip
[mypy-lightning.pytorch.trainer.connectors.*,lightning.*.launchers.*,lightning.*.accelerators.*,lightning.fabric.fabric.*]
follow_imports = skip
[mypy-lightning.fabric.loggers.*,lightning.fabric.wrappers.*,lightning.pytorch.core.saving.*,lightning.*._graveyard.*]
follow_imports = skip
"""  # types of others than Lightning's public classes are not needed here, and reading torch's takes a minute


@pytest.mark.long
def test_a_type_checker_knows_every_public_name_and_finds_wrong_arguments(tmp_path):
    user = USER + "".join(f"reveal_type(lt.{name})\n" for name in NAMES)
    (tmp_path / "user.py").write_text(user)
    (tmp_path / "mypy.ini").write_text(SETTINGS.format(path=Path(lightning_tricks.__file__).parents[1]))
    options = ["--config-file", tmp_path / "mypy.ini", "--cache-dir", os.devnull, "--no-error-summary"]
    said = python("-m", "mypy", *map(str, options), str(tmp_path / "user.py"))
    assert not said.stderr
    found = re.findall(r"user\.py:(\d+): error: .*\[([a-z-]+)\]$", said.stdout, re.MULTILINE)
    lines = enumerate(user.splitlines(), start=1)
    wrong = [(str(number), line.partition("# wrong: ")[2]) for number, line in lines if "# wrong: " in line]
    assert found == wrong, said.stdout
    types = dict(zip(NAMES, re.findall(r'note: Revealed type is "(.*)"$', said.stdout, re.MULTILINE), strict=True))
    unknown = [name for name, known in types.items() if not known.startswith("def ")]
    assert unknown == ["generate", "clip_grad_norm"]  # decorated by torch.no_grad, and torch is skipped here
    options_of_mixin = inspect.signature(OptimizerMixin.__init__).parameters.keys() - {"self", "kwargs"}
    assert [name for name in options_of_mixin if f" {name}: " not in types["LanguageModel"]] == []


# ---- which Lightning


@pytest.mark.parametrize(
    ("imported", "forced", "package"),
    [
        ([], "", "lightning"),
        (["lightning.pytorch"], "", "lightning"),
        (["pytorch_lightning"], "", "pytorch_lightning"),
        (["pytorch_lightning", "lightning.pytorch"], "", "lightning"),
        (["lightning.pytorch"], "pytorch_lightning", "pytorch_lightning"),
        (["pytorch_lightning"], "lightning", "lightning"),
    ],
)
def test_builds_on_the_lightning_that_the_program_imported_unless_it_is_forced(imported, forced, package, monkeypatch):
    monkeypatch.setattr(_lightning, "sys", SimpleNamespace(modules=dict.fromkeys(imported)))
    monkeypatch.setenv("LIGHTNING_TRICKS_BACKEND", forced)
    assert _lightning._choose() == package


def test_a_wrong_choice_is_refused(monkeypatch):
    monkeypatch.setenv("LIGHTNING_TRICKS_BACKEND", "keras")
    with pytest.raises(UsageError, match="LIGHTNING_TRICKS_BACKEND='keras': give one of lightning, pytorch_lightning"):
        _lightning._choose()


@pytest.mark.parametrize(("name", "class_name"), _lightning.STRATEGY_NAMES.items())
def test_a_trainer_takes_our_strategies_by_name(name, class_name):
    trainer = _lightning.pl.Trainer(strategy=name, accelerator="cpu", devices=1, logger=False)
    assert type(trainer.strategy) is getattr(lightning_tricks, class_name)


@pytest.mark.long
def test_our_mixins_and_precision_run_under_a_pytorch_lightning_trainer():
    code = """
import pytorch_lightning as pl, torch
from lightning_tricks import AutoPrecision, LanguageModel, Llama, MuonAdamW
from lightning_tricks.callbacks import TrainingProgressBar
from torch.utils.data import DataLoader
assert TrainingProgressBar.__mro__[1].__module__.split('.')[0] == 'pytorch_lightning'
model = LanguageModel(Llama(vocab_size=32, d_model=16, n_layers=1, n_heads=2, max_seq_len=8), optimizer=MuonAdamW)
ids = torch.randint(0, 32, (4, 8))
data = DataLoader([{"input_ids": ids, "labels": ids}] * 3, batch_size=None)
trainer = pl.Trainer(accelerator="cpu", max_steps=3, plugins=AutoPrecision(), logger=False, enable_checkpointing=False)
trainer.fit(model, data)
assert trainer.global_step == 3
"""
    done = subprocess.run([preloaded.python("pytorch_lightning"), "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
