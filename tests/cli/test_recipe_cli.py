"""The command line: help and lists answer without torch; includes, overrides, checkpoints. Mistakes are in cli/."""

import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import jsonargparse
import lightning.pytorch as pl
import pytest
import torch
import yaml
from cli.parsers import no_hyper_parameters, shared_parser  # noqa: F401, fixtures
from cli.test_entries import MODEL
from cli.wrong_inputs import SMALL

from lightning_tricks._core.errors import UsageError
from lightning_tricks.cli import RecipeCLI, load_recipe, recipe_cli
from lightning_tricks.commands import cp, prepare, recipes_folder
from lightning_tricks.language_model import LanguageModel
from lightning_tricks.models import GPT2, Llama

TINY = recipes_folder() / "tiny.yaml"


@pytest.fixture(autouse=True)
def _lines(caplog):
    caplog.set_level("INFO", logger="lightning.pytorch")


def test_prepare_takes_any_data_module_and_prints_a_summary_where_there_is_one(capsys):
    class Data(pl.LightningDataModule):
        def prepare_data(self):
            print("prepared")

        def setup(self, stage):
            print("set up for", stage)

    prepare.run(pl.LightningModule(), Data(), {})
    assert capsys.readouterr().out == "prepared\nset up for fit\n"
    Data.data_summary = lambda self: "two rows"
    prepare.run(pl.LightningModule(), Data(), {})
    assert capsys.readouterr().out == "prepared\nset up for fit\ntwo rows\n"


@pytest.mark.long
@pytest.mark.parametrize("args", ["--help", "--version", "ls", "ls --help", "cp tiny copy.yaml", "completion"])
def test_help_and_lists_answer_without_importing_torch(args, tmp_path):
    code = (
        "import sys, runpy; sys.argv=['lightning_tricks', *sys.argv[1:]]\n"
        "try: runpy.run_module('lightning_tricks', run_name='__main__')\n"
        "except SystemExit as stop: assert not stop.code\n"
        "print([m for m in ('torch', 'lightning', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, *args.split()], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr == ""
    assert done.stdout.strip().splitlines()[-1] == "[]"
    assert len(done.stdout.splitlines()) > 1


def test_cp_writes_all_files_or_none_and_leaves_a_part_that_is_there_already(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cp.run(["llama7b", "a.yaml"])
    assert Path("a.yaml").read_text() == (TINY.parent / "llama7b.yaml").read_text()
    parts = sorted(path.name for path in Path("parts").iterdir())
    assert parts
    capsys.readouterr()
    cp.run(["llama7b", "b.yaml"])
    assert capsys.readouterr().out == "b.yaml\n"
    Path("parts", parts[-1]).write_text("mine")
    with pytest.raises(UsageError, match=rf"^parts/{parts[-1]} exists: name another place, or remove it first$"):
        cp.run(["llama7b", "c.yaml"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.yaml", "b.yaml", "parts"]
    assert Path("parts", parts[-1]).read_text() == "mine"


@pytest.mark.parametrize("command", ["schedule", "show-data"])
def test_the_config_of_a_run_is_a_recipe_of_each_command_but_an_option_of_fit_is_none_of_theirs(
    command, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(" ".join(str(number**3) for number in range(2000)))
    Path("config.yaml").write_text(f"{SMALL}\nckpt_path: old.ckpt\nweights_only: null\n")
    words = [command, "--config", "config.yaml"]
    RecipeCLI(args=words)
    for option in ("ckpt_path", "weights_only"):
        with pytest.raises(UsageError, match=f"^{command} has no option '{option}'; --help lists the options$"):
            RecipeCLI(args=[*words, f"--{option}", "last"])


@pytest.mark.parametrize(("command", "says"), [("schedule", False), ("show-data", False), ("fit", True)])
def test_fit_alone_says_the_seed(command, says, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(" ".join(str(number**3) for number in range(2000)))
    Path("small.yaml").write_text(SMALL)
    for logger in ("lightning.fabric.utilities.seed", "lightning.pytorch.utilities.rank_zero"):
        caplog.set_level("INFO", logger=logger)
    args = [command, "--config", "small.yaml", "--seed_everything", "7"]
    if says:  # and not where the run is refused
        with pytest.raises(UsageError, match="num_nodes=2: "):
            RecipeCLI(args=[*args, "--trainer.num_nodes", "2"])
        assert not [message for message in caplog.messages if "Seed" in message]
    RecipeCLI(args=args)
    assert torch.initial_seed() == 7
    assert ("Seed set to 7" in caplog.messages) == says


def test_sigterm_ends_an_evaluation_with_143_with_every_lightning(tmp_path, monkeypatch):
    """Lightning 2.6 ends it with 0, which a scheduler takes for a finished one."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(" ".join(str(number**3) for number in range(2000)))
    Path("small.yaml").write_text(SMALL)
    stop = lambda self, *_: signal.raise_signal(signal.SIGTERM)  # noqa: E731
    monkeypatch.setattr(LanguageModel, "on_validation_batch_end", stop)
    with pytest.raises(SystemExit) as stopped:
        RecipeCLI(
            args=["validate", "--config", "small.yaml", "--ckpt_path", "none", "--trainer.limit_val_batches", "2"]
        )
    assert (type(stopped.value).__name__, stopped.value.code) == ("SIGTERMException", 143)


@pytest.mark.usefixtures("shared_parser", "no_hyper_parameters")
def test_an_included_file_is_found_beside_the_recipe_and_the_command_line_wins(tmp_path):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "short.yaml").write_text("max_steps: 7\ngradient_clip_val: 0.5\n")
    recipe = yaml.safe_load(TINY.read_text())
    recipe["trainer"] = "parts/short.yaml"
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe))
    trainer = load_recipe("--config", str(tmp_path / "mine.yaml"), "--trainer.max_steps", "9")[2]
    assert (trainer["max_steps"], trainer["gradient_clip_val"]) == (9, 0.5)


SIZES = {"vocab_size": 4096, "d_model": 256, "n_layers": 4, "n_heads": 4, "max_seq_len": 256}
DROPPED = (
    "GPT2 instead of Llama; kept: d_model=256, n_layers=4, n_heads=4; "
    "dropped: activation=relu2, qk_norm=True, zero_init_outputs=True"
)


def decoder(*options: str) -> Any:
    """The decoder that tiny.yaml and these options describe."""
    return load_recipe("--config", str(TINY), *options)[0].config


@pytest.mark.usefixtures("shared_parser", "no_hyper_parameters")
def test_another_decoder_brings_its_own_architecture_and_one_line_says_what_was_dropped(tmp_path, caplog):
    later = tmp_path / "later.yaml"
    later.write_text("model: {init_args: {decoder: {class_path: GPT2}}}")
    for options in (["--model.decoder", "GPT2"], ["--config", str(later)], ["--model.decoder={class_path: GPT2}"]):
        caplog.clear()
        assert decoder(*options) == GPT2(**SIZES)
        assert [record.message for record in caplog.records if "instead of" in record.message] == [DROPPED]


@pytest.mark.usefixtures("shared_parser", "no_hyper_parameters")
def test_what_is_given_for_the_new_decoder_counts():
    assert decoder("--model.decoder", "GPT2", "--model.decoder.qk_norm", "true") == GPT2(**SIZES, qk_norm=True)
    text = "{class_path: GPT2, init_args: {activation: swiglu, d_model: 128}}"
    assert decoder("--model.decoder", text) == GPT2(**(SIZES | {"d_model": 128}), activation="swiglu")
    tiny = Llama(**SIZES, activation="relu2", qk_norm=True, zero_init_outputs=True)
    assert decoder("--model.decoder", "Llama") == decoder() == tiny, "it is no other decoder"


@pytest.mark.usefixtures("shared_parser", "no_hyper_parameters")
@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--model.optimizer", "SGD"], "SGD instead of AdamW; kept: lr=0.002, fused=True; "
         "dropped: betas=(0.9, 0.95)"),
        (["--model.schedule", "WarmupCosine"], "WarmupCosine instead of WarmupLinear; "
         "kept: warmup_steps=40"),
        (["--trainer.logger", "ResumingCSVLogger"], "ResumingCSVLogger instead of "
         "ResumingTensorBoardLogger; kept: save_dir=runs, name=tiny"),
    ],
)  # fmt: skip
def test_another_class_says_which_settings_of_the_one_before_stay(options, line, caplog):
    load_recipe("--config", str(TINY), *options)
    assert [record.message for record in caplog.records if "instead of" in record.message] == [line]


@pytest.mark.usefixtures("shared_parser", "no_hyper_parameters")
def test_a_list_of_callbacks_takes_nothing_over_from_the_list_before(caplog):
    before = "[{class_path: ModelCheckpoint, init_args: {monitor: val/loss, verbose: true}}]"
    after = "[{class_path: EarlyStopping, init_args: {monitor: train/loss}}]"
    trainer = load_recipe("--config", str(TINY), "--trainer.callbacks", before, "--trainer.callbacks", after)[2]
    assert (trainer["callbacks"][0].monitor, trainer["callbacks"][0].verbose) == ("train/loss", False)
    assert not any("in place of" in record.message for record in caplog.records)


@pytest.mark.usefixtures("shared_parser", "no_hyper_parameters")
def test_a_source_of_a_mixture_is_named_by_its_path_whatever_the_file_holds(tmp_path):
    for name, text in (("words.txt", "only words"), ("rows.jsonl", '{"text": "one row"}'), ("no.txt", "- {a")):
        (tmp_path / name).write_text(text)
        mixture = f"{{class_path: MixtureData, init_args: {{sources: [{{data: {tmp_path / name}}}]}}}}"
        data = load_recipe("--config", str(TINY), "--data", mixture)[1]
        assert [part.files for part in data._parts.values()] == [[str(tmp_path / name)]]


def test_jsonargparse_is_left_as_it_was():
    original = jsonargparse._typehints.discard_init_args_on_class_path_change
    decoder("--model.decoder", "GPT2")
    with pytest.raises(UsageError):
        decoder("--model.decoder", "GPT3")
    assert jsonargparse._typehints.discard_init_args_on_class_path_change is original


@pytest.mark.parametrize("kind", [dict, jsonargparse.Namespace])
def test_from_python_settings_may_be_a_mapping_in_place_of_a_command_line(kind, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program"])
    fit = yaml.safe_load(SMALL)
    fit["data"]["init_args"] |= {"files": text_file, "cache_dir": str(tmp_path)}
    assert RecipeCLI(args=kind(subcommand="fit", fit=fit), save_config_callback=None).trainer.global_step == 3


def test_a_checkpoints_hyper_parameters_do_not_override_the_users(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-tricks"])
    (tmp_path / "foreign_module.py").write_text(MODEL)
    common = ["fit", "--model=foreign_module.Mine", "--trainer.accelerator=cpu", "--trainer.logger=false"]
    RecipeCLI(args=[*common, "--model.init_args.momentum=0.5", "--trainer.max_steps=2"])
    checkpoint = next(tmp_path.rglob("*.ckpt"))
    again = [*common, "--trainer.max_steps=4", f"--ckpt_path={checkpoint}"]
    assert RecipeCLI(args=[*again, "--model.init_args.momentum=0.25"]).model.hparams.momentum == 0.25


def test_torchs_advice_on_sharded_embeddings_is_left_out_and_on_other_layers_it_is_not(monkeypatch):
    def give(args, change):
        for name in ("FSDPEmbedding", "FSDPLinear"):
            warnings.warn(f"FSDP2-wrapped module ({name}) returned a view tensor. An in-place op", stacklevel=1)

    monkeypatch.setattr(recipe_cli, "RecipeCLI", give)
    monkeypatch.setattr(sys, "argv", ["lightning-tricks"])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        recipe_cli.main(["fit"])
    assert [str(one.message)[:33] for one in told] == ["FSDP2-wrapped module (FSDPLinear)"]
