"""TextData.held_out and `validate --text`: every byte of a text counts once, in the bits per byte of a checkpoint."""

import gzip
import json
from math import log

import pytest
import torch
from cli.wrong_inputs import SMALL
from commands.exported import TEXT, VOCABULARY, checkpoint, save
from models.decoders import build

from lightning_tricks.cli import RecipeCLI
from lightning_tricks.data import TextData, corpus
from lightning_tricks.models import Llama

CONFIG = Llama(vocab_size=VOCABULARY, d_model=32, n_layers=1, n_heads=2, max_seq_len=32)
DOCUMENTS = ["def parse(text):\n\n    return []\n\n", "čtyři 🦎 words\n", "x"]


@pytest.fixture
def path(tmp_path):
    return save(checkpoint(CONFIG), tmp_path / "run.ckpt")


def rows_of(tmp_path, path, files, **options):
    """The data of a text, and its batches."""
    options = {"seq_len": 16, "micro_batch_size": 2, "cache_dir": str(tmp_path)} | options
    data = TextData.held_out(str(files), str(path), **options)
    data.setup()
    return data, list(data.val_dataloader())


@pytest.mark.parametrize("name", ["rows.jsonl", "text.txt", "text.txt.gz", "folder", "large.txt"])
def test_each_byte_counts_once_and_only_documents_end(name, path, tmp_path, monkeypatch):
    if name.startswith("large"):
        monkeypatch.setattr(corpus, "_LARGEST_DOCUMENT", 30)  # the text is of two documents then
    place, text = tmp_path / name, "".join(DOCUMENTS)
    if name == "folder":
        place.mkdir()
        for number, document in enumerate(DOCUMENTS):
            (place / f"{number}.txt").write_text(document)
    elif name == "rows.jsonl":
        place.write_text("".join(json.dumps({"text": document}) + "\n" for document in DOCUMENTS))
    else:
        (gzip.open if name.endswith("gz") else open)(place, "wt", encoding="utf-8").write(text)
    data, batches = rows_of(tmp_path, path, place)
    assert sum(int(batch["n_bytes"].sum()) for batch in batches) == len(text.encode()) == data.meta["val"]["bytes"]
    tokens = data.streams["val"].read(0, len(data.streams["val"]))
    assert int((tokens == data.eot_id).sum()) == 1 + {"t": 1, "l": 2}.get(name[0], 3)
    assert data.validation_text() == text.encode()
    assert int(batches[0]["input_ids"][0, 0]) == data.eot_id  # before the first token


def test_validate_gives_the_bits_per_byte_of_the_whole_text_whatever_the_recipe_leaves_out(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.txt").write_text(TEXT[:500] + "čtyři")
    recipe = SMALL.replace("vocab_size: 300", f"vocab_size: {VOCABULARY}")
    assert "limit_val_batches: 0" in recipe  # and no file text.txt is there
    (tmp_path / "recipe.yaml").write_text(recipe)
    args = ["validate", "--config", "recipe.yaml", "--ckpt_path", str(path), "--text", "other.txt"]
    cli = RecipeCLI(args=args)
    decoder = build(CONFIG)
    _, batches = rows_of(tmp_path, path, "other.txt", seq_len=32)
    with torch.no_grad():
        nats = sum(decoder(batch["input_ids"], labels=batch["labels"]).double().item() for batch in batches)
    bits = nats / log(2) / len((TEXT[:500] + "čtyři").encode())
    assert cli.trainer.callback_metrics["val/bits_per_byte"].item() == pytest.approx(bits, rel=1e-5)
