"""`generate`: what a checkpoint's model writes, with its own tokenizer, and one line for what cannot be done."""

import json
from types import SimpleNamespace

import pytest
import torch
from checkpoints.shards import of_file
from harness.runs import fit

from lightning_tricks import EMA, LanguageModel, TextData
from lightning_tricks import __main__ as door
from lightning_tricks import generate as generate_tokens
from lightning_tricks._core.errors import UsageError
from lightning_tricks._trainer.lightning import pl
from lightning_tricks.commands.generate import _texts
from lightning_tricks.models import Llama

SHAPE = {"vocab_size": 300, "d_model": 32, "n_layers": 2, "n_heads": 2, "max_seq_len": 64}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text_file):
    """A short run's data, module and checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    pl.seed_everything(0, verbose=False)
    model = LanguageModel(Llama(**SHAPE, n_kv_heads=1), optimizer=lambda groups: torch.optim.AdamW(groups, lr=3e-3))
    data = TextData([text_file], vocab_size=300, seq_len=32, cache_dir=str(folder / "cache"), val_fraction=0.5)
    fit(model, EMA(decay=0.5), data=data, max_steps=5, limit_val_batches=0).trainer.save_checkpoint(folder / "run.ckpt")
    return data, model.eval(), folder / "run.ckpt"


def greedy(data, decoder, count) -> str:
    """What the most likely tokens after a prompt read."""
    prompt = data.tokenizer.encode("def parse").ids
    ids = [int(token) for token in generate_tokens(decoder, torch.tensor([prompt]), count)]
    ids = ids[: ids.index(data.eot_id)] if data.eot_id in ids else ids
    return data.tokenizer.decode([*prompt, *ids]) + "\n"


def run(capsys, *args):
    door.run(["generate", *map(str, args)])
    return capsys.readouterr().out


def test_greedy_text_is_that_of_the_trained_module(trained, capsys):
    data, model, path = trained
    printed = run(capsys, "--ckpt_path", path, "--prompt", "def parse", "--temperature", "0", "--max_new_tokens", 20)
    assert printed == greedy(data, model.decoder, 20)


def test_a_seed_repeats_what_is_drawn_and_each_sample_is_its_own(trained, capsys):
    _, _, path = trained
    once, again, other = (run(capsys, "--ckpt_path", path, "--prompt", "def ", "--seed", seed) for seed in (1, 1, 2))
    assert once == again != other
    assert once.startswith("def ")
    two = run(capsys, "--ckpt_path", path, "--prompt", "def ", "--samples", 2)
    first, second = two.split("--- sample 1\n")
    assert first.startswith("--- sample 0\ndef ")
    assert first.removeprefix("--- sample 0\n") != second


@pytest.mark.parametrize("count", [1, 2])
def test_as_json_it_is_the_text_that_is_printed(trained, tmp_path, capsys, count):
    options = ["--ckpt_path", trained[2], "--prompt", "def ", "--samples", count, "--max_new_tokens", 20]
    printed = run(capsys, *options, "--json", tmp_path / "texts.json")
    alone = json.loads(run(capsys, *options, "--json", "-"))
    assert alone == json.loads((tmp_path / "texts.json").read_text(encoding="utf-8"))
    assert (alone["prompt"], len(alone["samples"])) == ("def ", count)
    heads = [""] if count == 1 else ["--- sample 0\n", "--- sample 1\n"]
    assert printed == "".join(f"{head}{text}\n" for head, text in zip(heads, alone["samples"], strict=True))


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_the_average_writes_in_place_of_the_weights(trained, tmp_path, capsys, kind):
    data, model, path = trained
    checkpoint = torch.load(path, weights_only=True)
    if kind == "folder":
        path = of_file(path, tmp_path / "folder.ckpt", model)
    loaded = LanguageModel.load_from_checkpoint(path, average="ema")
    averages = checkpoint["averages"]["ema"]["weights"]["mean"]
    assert all(torch.equal(weight, averages[name]) for name, weight in loaded.named_parameters())
    assert any(not torch.equal(weight, averages[name]) for name, weight in model.named_parameters())
    options = ("--prompt", "def parse", "--temperature", "0", "--max_new_tokens", 8)
    printed = run(capsys, "--ckpt_path", path, "--average", "ema", *options)
    assert printed == greedy(data, loaded.eval().decoder, 8)
    with pytest.raises(UsageError, match=r"^average=tail_average: .* holds no such average.*: it holds ema$"):
        door.run(["generate", "--ckpt_path", str(path), "--average", "tail_average"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", "x " * 200], r"prompt: its \d+ tokens leave no room in the model's max_seq_len=64"),
        (["--prompt", "x", "--max_new_tokens", "64"], "max_new_tokens=64 after a prompt of 1 tokens"),
        (["--samples", "-1"], "samples=-1: give at least 1"),
        (["--seed", "-1"], "seed=-1: give a number"),
        (["--temperature", "-1"], "temperature=-1.0: give 0"),
    ],
)
def test_a_bad_option_is_one_line(trained, options, message):
    with pytest.raises(UsageError, match=message) as refused:
        door.run(["generate", "--ckpt_path", str(trained[2]), *options])
    assert "\n" not in str(refused.value)


def test_a_tokenizer_without_an_end_of_text_needs_a_prompt(trained, tmp_path, capsys):
    checkpoint = torch.load(trained[2], weights_only=True)
    checkpoint["TextData"]["tokenizer"]["eot_id"] = None
    torch.save(checkpoint, tmp_path / "endless.ckpt")
    options = ("--ckpt_path", tmp_path / "endless.ckpt", "--max_new_tokens", 2)
    with pytest.raises(UsageError, match=r"^generate: prompt='': the tokenizer has no end-of-text token to start from"):
        run(capsys, *options)
    assert run(capsys, *options, "--prompt", "def").startswith("def")


def test_each_sample_ends_at_its_own_end_of_text_and_the_rest_go_on():
    letters = SimpleNamespace(eot_id=0, decode=lambda ids: "".join("|abcdef"[token] for token in ids))
    drawn = (torch.tensor(pair) for pair in ([1, 2], [0, 3], [4, 4], [5, 0], [6, 6]))
    assert list(_texts(drawn, [3], 2, letters)) == [["ca", "cb"], ["ca", "cbc"], ["ca", "cbcd"], ["ca", "cbcd"]]
