"""A folder of transformers starts a run: its weights, its decoder and its tokenizer, or one line that says why not."""

import json
import re

import pytest
import torch
import transformers
import yaml
from commands.exported import SIZES, tokenizer
from harness.runs import On, trainer_with
from models.decoders import build

from lightning_tricks import InitFrom, LanguageModel
from lightning_tricks import __main__ as door
from lightning_tricks._core.errors import UsageError
from lightning_tricks.checkpoints import load_weights, open_checkpoint
from lightning_tricks.checkpoints.hf_folder import read_config
from lightning_tricks.cli import load_recipe
from lightning_tricks.data.tokenizer import open_tokenizer
from lightning_tricks.models import GPT2, Decoder, Llama, hf_config, hf_family, to_hf

LLAMA = Llama(**SIZES, n_kv_heads=2, rope_theta=5000.0, d_ff=48)


def folder_of(config, folder, decoder=None, shard_size="5GB", **changed):
    """What `save_pretrained` writes of a model, with settings of its config.json changed."""
    settings = transformers.AutoConfig.for_model(hf_family(config).model_type, **hf_config(config))
    model = transformers.AutoModelForCausalLM.from_config(settings)
    if decoder is not None:
        model.load_state_dict(to_hf(decoder.state_dict(), config), strict=False)
    model.save_pretrained(folder, max_shard_size=shard_size)
    (folder / "tokenizer.json").write_text(tokenizer()["json"])
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    return folder


def logits(config, folder, ids):
    return transformers.AutoModelForCausalLM.from_pretrained(folder)(ids).logits


@pytest.mark.parametrize("config", [LLAMA, GPT2(**SIZES), GPT2(**SIZES, bias=False)], ids=["llama", "gpt2", "no bias"])
@torch.no_grad()
def test_weights_of_several_files_and_a_bare_decoder(config, tmp_path):
    folder = folder_of(config, tmp_path / "hf", build(config), shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    decoder, ids = Decoder(config).eval(), torch.arange(40).view(2, 20)
    said = load_weights(decoder, folder)
    count = len(decoder.state_dict())
    assert said == f"{folder}: {count} of its {count} weights loaded"
    torch.testing.assert_close(decoder(ids), logits(config, folder, ids), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_gpt2s_own_checkpoint_has_names_without_a_prefix(tmp_path):
    config = GPT2(**SIZES)
    folder = folder_of(config, tmp_path / "hf", build(config))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.transformer.save_pretrained(folder)
    decoder = Decoder(config)
    load_weights(decoder, folder)
    ids = torch.arange(20).view(1, 20)
    torch.testing.assert_close(decoder(ids), model(ids).logits, rtol=1e-5, atol=1e-5)


def test_the_recipe_that_is_written_trains_the_model_of_the_folder(tmp_path, monkeypatch, capsys, text_file):
    monkeypatch.chdir(tmp_path)
    folder_of(LLAMA, tmp_path / "hf", build(LLAMA))
    door.run(["import", "hf", "--output", "my own.yaml"])
    assert "Next: python -m lightning_tricks fit --config 'my own.yaml'" in capsys.readouterr().out
    options = ["--data.files", text_file, "--data.cache_dir", "cache", "--trainer.logger=false"]
    model, data, trainer = load_recipe("--config", "my own.yaml", *options, "--trainer.accelerator=cpu")
    assert model.config == LLAMA
    assert (data.vocab_size, data.seq_len) == (tokenizer_size(), 32)
    assert trainer["max_steps"] == 200
    assert yaml.safe_load((tmp_path / "my own.yaml").read_text())["init_from"] == "./hf"
    first = InitFrom("hf")
    first.check(model)
    model.schedule, kept = None, {}  # one step is shorter than its warmup
    look = On(
        on_train_start=lambda trainer, module: kept.update({k: v.clone() for k, v in module.state_dict().items()})
    )
    trainer_with(first, look, max_steps=1, limit_val_batches=0, use_distributed_sampler=False).fit(model, data)
    assert all(torch.equal(kept[f"decoder.{name}"], value) for name, value in build(LLAMA).state_dict().items())


def tokenizer_size():
    return len(json.loads(tokenizer()["json"])["model"]["vocab"])


def test_a_run_with_another_decoder_or_tokenizer_is_one_line(tmp_path, text_file):
    folder = folder_of(LLAMA, tmp_path / "hf")
    other = LanguageModel(Llama(**SIZES, n_kv_heads=1, rope_theta=7.0, d_ff=48))
    with pytest.raises(UsageError, match=r"^init_from=.*hf: the checkpoint's decoder has n_kv_heads=2, the recipe's 1"):
        InitFrom(folder).check(other)
    InitFrom(folder).check(LanguageModel(Llama(**SIZES, n_kv_heads=2, d_ff=48, init_std=0.1)))  # for longer rows
    plain = folder_of(Llama(**SIZES), tmp_path / "plain")
    InitFrom(plain).check(LanguageModel(Llama(**SIZES)))  # whose sizes are those of settings that were left out
    with pytest.raises(
        UsageError, match="is a folder of Hugging Face and no checkpoint: start a run from it with --init"
    ):
        open_checkpoint(folder)
    named, name = open_tokenizer(str(folder))
    assert (named.to_str(), name) == (tokenizer()["json"], str(folder))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda f: change(f, model_type="mamba"), "hf: model_type=mamba: the decoder is one of"),
        (lambda f: change(f, num_hidden_layers=3), "has no 'blocks.2.attn_norm.weight', which the model has"),
        (
            lambda f: change(f, hidden_size=64, head_dim=16),
            "'embed.weight' is (280, 32) in it and (280, 64) in the model",
        ),
        (
            lambda f: change(f, tie_word_embeddings=True),
            "tie_word_embeddings is true in config.json, and lm_head.weight is",
        ),
        (lambda f: (f / "model.safetensors").unlink(), "has no .safetensors"),
        (lambda f: index(f, "gone.safetensors"), "has no gone.safetensors, which its index names"),
        (lambda f: (f / "tokenizer.json").write_text(larger()), "its tokenizer has 400 tokens and its model 280"),
        (lambda f: (f / "config.json").unlink(), "has no config.json: give a folder"),
    ],
)
def test_a_folder_that_cannot_be_imported_is_one_line(spoil, says, tmp_path):
    folder = folder_of(LLAMA, tmp_path / "hf", build(LLAMA))
    spoil(folder)
    command = ["import", str(folder), "--output", str(tmp_path / "mine.yaml")]
    with pytest.raises(UsageError, match=re.escape(says)) as refused:
        door.run(command)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "mine.yaml").exists()


def change(folder, **changed):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


def index(folder, name):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))


def larger():
    content = json.loads(tokenizer()["json"])
    content["model"]["vocab"] |= {f"more{number}": number for number in range(len(content["model"]["vocab"]), 400)}
    return json.dumps(content)


def test_an_untied_model_without_a_head_is_refused(tmp_path):
    config = Llama(**SIZES, tie_embeddings=True)
    folder = folder_of(config, tmp_path / "hf", tie_word_embeddings=False)
    assert not read_config(folder).tie_embeddings
    with pytest.raises(UsageError, match=r"tie_word_embeddings is false in config\.json, and there is no lm_head"):
        load_weights(Decoder(Llama(**SIZES)), folder)


def test_a_gpt2_whose_biases_are_all_zero_is_one_without(tmp_path, capsys):
    config = GPT2(**SIZES, bias=False)
    folder_of(config, tmp_path / "hf", build(config))
    door.run(["import", str(tmp_path / "hf"), "--output", str(tmp_path / "mine.yaml")])
    assert "bias: false" in capsys.readouterr().out


def test_a_recipe_that_exists_is_not_replaced(tmp_path):
    folder = folder_of(LLAMA, tmp_path / "hf")
    (tmp_path / "there.yaml").write_text("model: {}\n")
    with pytest.raises(UsageError, match=r"there.yaml exists: name another file"):
        door.run(["import", str(folder), "--output", str(tmp_path / "there.yaml")])
