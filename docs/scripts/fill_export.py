"""The families of docs/export.md, and what `import` and `average` print, for `fill.py`: small models, no training."""

import contextlib
import dataclasses
import io
import json
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filler import Filler

from lightning_tricks import __main__ as door
from lightning_tricks.checkpoints.load_weights import architecture
from lightning_tricks.commands.export.folder_files import Entry, write_weights
from lightning_tricks.data.tokenizer import train_bpe
from lightning_tricks.models import GPT2, Decoder, DecoderConfig, Llama, hf_config, hf_family, hf_weights

SIZES: dict[str, Any] = {"vocab_size": 280, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}
ROWS: dict[str, DecoderConfig] = {
    "`Llama`": Llama(**SIZES),
    "`Llama` with `qk_norm`": Llama(**SIZES, qk_norm=True),
    "`Llama`, `activation: relu2` or `gelu`": Llama(**SIZES, activation="relu2"),
    "the same with `qk_norm`, as in `recipes/tiny.yaml`": Llama(**SIZES, activation="relu2", qk_norm=True),
    "`Llama` with `n_experts` and `balance: none`": Llama(**SIZES, n_experts=4, balance="none"),
    "the same with `qk_norm`": Llama(**SIZES, n_experts=4, balance="none", qk_norm=True),
    "the same with `qk_norm: whole`": Llama(**SIZES, n_experts=4, balance="none", qk_norm="whole"),
    "`Llama` with `n_experts`, `n_shared_experts`, `router: sigmoid` and `qk_norm`": Llama(
        **SIZES, n_experts=4, n_shared_experts=1, router="sigmoid", qk_norm=True
    ),
    "`GPT2`, `activation: gelu` or `relu2`": GPT2(**SIZES),
}


def families(_: Any) -> dict[str, str]:
    """The class of each decoder, and what `import` prints."""
    rows = ["| decoder | class | `model_type` |", "|---|---|---|"]
    for name, config in ROWS.items():
        family = hf_family(config)
        rows.append(f"| {name} | `{family.class_name}` | `{family.model_type}` |")
    return {"families": "\n".join(rows), "import": _block(_imported)}


def average(_: Any) -> dict[str, str]:
    """What `average` prints."""
    return {"average": _block(_averaged)}


def _block(print_lines: Any) -> str:
    """What a function prints, in a folder of its own."""
    before, printed = Path.cwd(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            with contextlib.redirect_stdout(printed):
                print_lines()
        finally:
            os.chdir(before)
    return f"```text\n{printed.getvalue().strip()}\n```"


def _imported() -> None:
    config, folder = ROWS["`Llama`"], Path("tiny-hf")
    state = Decoder(config).state_dict()
    folder.mkdir()
    entries = [
        Entry(weight.name, weight.shape, torch.float32, partial(weight.build, state.__getitem__))
        for weight in hf_weights(config)
    ]
    write_weights(entries, folder, 2**30)
    settings = {"model_type": hf_family(config).model_type, **hf_config(config)}
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "tokenizer.json").write_text(train_bpe(["a small text"], 280).to_str(), encoding="utf-8")
    door.run(["import", "tiny-hf", "--output", "mine.yaml"])


def _averaged() -> None:
    config = dataclasses.replace(ROWS["`Llama`"], n_layers=1)  # type: ignore[type-var]
    weights = {f"decoder.{name}": value for name, value in Decoder(config).state_dict().items()}
    paths = ["step=600.ckpt", "step=800.ckpt", "step=1000.ckpt"]
    for step, path in zip((600, 800, 1000), paths, strict=True):
        content = {"state_dict": weights, "decoder_config": architecture(config), "global_step": step}
        torch.save(content | {"pytorch-lightning_version": "2.6.6"}, path)
    door.run(["average", *paths, "--output", "mean.ckpt", "--weights", "1,1,2"])


FILLERS = {
    "average": Filler("averages.md", average, measured=False),
    "export": Filler("export.md", families, measured=False),
}
