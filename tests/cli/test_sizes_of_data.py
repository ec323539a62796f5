"""vocab_size and seq_len are written once, with the data: a decoder follows them in each command."""

import copy
import dataclasses
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from cli.parsers import one_parser  # noqa: F401, a fixture
from harness.runs import trainer_with

from lightning_tricks import GPT2, LanguageModel, Llama, MuP, TextData, TokenData
from lightning_tricks import __main__ as door
from lightning_tricks._core.errors import UsageError
from lightning_tricks.cli import load_recipe

SMALL = {"d_model": 32, "n_layers": 1, "n_heads": 2}
RECIPE = """
seed_everything: 0
model:
  class_path: LanguageModel
  init_args:
    decoder: {class_path: Llama, init_args: {d_model: 32, n_layers: 1, n_heads: 2}}
data:
  class_path: TextData
  init_args: {files: text, vocab_size: 300, seq_len: 24, micro_batch_size: 2, cache_dir: cache}
trainer:
  accelerator: cpu
  max_steps: 2
  logger: {class_path: CSVLogger, init_args: {save_dir: runs, name: test}}
  callbacks: [{class_path: SafeCheckpoint, init_args: {every_n_train_steps: 2}}]
  enable_progress_bar: false
"""


def sizes(config):
    return config.vocab_size, config.max_seq_len


@pytest.mark.parametrize(("family", "published"), [(Llama, (32000, 4096)), (GPT2, (50257, 1024))])
def test_a_size_is_the_given_one_then_that_of_the_data_then_the_published_one(family, published):
    config = family(**SMALL)
    assert sizes(config) == sizes(config.of_data(None, None)) == published
    for one in (config, copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert one.of_data(300, 24) == family(**SMALL, vocab_size=300, max_seq_len=24)
    assert sizes(family(**SMALL, vocab_size=512).of_data(300, 24)) == (512, 24)
    assert sizes(family(**SMALL, max_seq_len=64).of_data(300, None)) == (300, 64)
    assert sizes(dataclasses.replace(config, n_layers=2).of_data(300, 24)) == published  # a copy is given all


def test_without_the_command_line_the_trainer_tells_the_data(text_file, tmp_path):
    class Saved(LanguageModel):
        def __init__(self, decoder, mup=None):
            super().__init__(decoder, mup=mup)
            self.save_hyperparameters()

    text = TextData(str(text_file), vocab_size=300, seq_len=24, micro_batch_size=2, cache_dir=str(tmp_path / "cache"))
    model = Saved(Llama(**SMALL), MuP(16))
    trainer = trainer_with(accelerator="cpu", max_steps=1)
    trainer.fit(model, text)
    assert sizes(model.config) == sizes(model.base_config) == (300, 24)
    assert model.decoder.embed.weight.shape == (300, 32)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = Saved.load_from_checkpoint(tmp_path / "a.ckpt")
    assert again.config == model.config
    built = model.decoder
    model.follow_data(SimpleNamespace(vocab_size=7, seq_len=9))
    assert sizes(model.config) == (300, 24)
    assert model.decoder is built
    with pytest.raises(UsageError, match="the data's vocabulary of 300 exceeds the decoder's vocab_size=299"):
        trainer_with(accelerator="cpu", max_steps=1).fit(LanguageModel(Llama(**SMALL, vocab_size=299)), text)


def test_data_that_do_not_know_their_vocabulary_leave_the_published_one(tmp_path):
    model = LanguageModel(Llama(**SMALL))
    model.follow_data(TokenData("train.bin", seq_len=128))
    assert sizes(model.config) == (32000, 128)


@pytest.mark.long
@pytest.mark.usefixtures("one_parser")
def test_each_command_sees_the_sizes_of_the_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text").mkdir()
    for number in range(30):
        Path("text", f"{number}.txt").write_text(f"text {number} with more of the same {number * number}\n" * 9)
    Path("recipe.yaml").write_text(RECIPE)

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["lightning_tricks", *words])
        try:
            door.main()
        except SystemExit as ended:  # plan tells by it whether the run fits
            if ended.code:
                raise
        return capsys.readouterr().out

    recipe = ["--config", "recipe.yaml"]
    assert sizes(load_recipe(*recipe)[0].config) == (300, 24)
    options = ["--data.seq_len", "32", "--model.decoder.vocab_size", "512"]
    assert sizes(load_recipe(*recipe, *options)[0].config) == (512, 32)
    assert sizes(load_recipe(*recipe, "--model.decoder", "GPT2")[0].config) == (300, 24)
    assert "embedding 9,600" in command("plan", *recipe)
    command("schedule", *recipe)
    command("fit", *recipe)
    saved = Path("runs/test/version_0/checkpoints/last.ckpt")
    content = torch.load(saved, weights_only=True)
    assert (content["decoder_config"]["vocab_size"], content["decoder_config"]["max_seq_len"]) == (300, 24)
    config = yaml.safe_load(Path("runs/test/version_0/config.yaml").read_text())
    assert config["model"]["init_args"]["decoder"]["init_args"]["vocab_size"] is None
    command("fit", "--config", "runs/test/version_0/config.yaml", "--trainer.max_steps", "3", "--ckpt_path", str(saved))
    command("validate", *recipe, "--ckpt_path", str(saved))
    options = ["--prompt", "text", "--max_new_tokens", "5"]
    assert command("generate", "--ckpt_path", str(saved), *options).startswith("text")
    command("export", "--ckpt_path", str(saved), "--output", "exported")
    exported = yaml.safe_load(Path("exported/config.json").read_text())
    assert (exported["vocab_size"], exported["max_position_embeddings"]) == (300, 24)
