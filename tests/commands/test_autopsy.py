"""autopsy: the batch of a step is the one that the run took, and a planted corrupt document is ranked first."""

import csv
import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml
from checkpoints.shards import of_file
from two_processes import run

from lightning_tricks import LanguageModel, Llama, TextData, TokenData
from lightning_tricks import __main__ as door
from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import pl
from lightning_tricks.commands.autopsy.autopsy import autopsy
from lightning_tricks.data.shards import HEADER_INTS

DECODER = {"vocab_size": 300, "d_model": 32, "n_layers": 2, "n_heads": 2, "max_seq_len": 64}
CLIP = 0.5
TWO, ALL = 20, 32  # steps of two processes, of 8 rows each; then steps of one process, of 12 rows each
SAVED = (12, 20, 26, 32)
CHECKPOINTS = "runs/test/version_0/checkpoints"


def text_data(folder: Path, **options: Any) -> TextData:
    settings = {"seq_len": 64, "micro_batch_size": 2, "vocab_size": 300, "val_fraction": 0.02, "seed": 3} | options
    return TextData(str(folder / "text"), cache_dir=str(folder / "cache"), **settings)


def model() -> LanguageModel:
    return LanguageModel(Llama(**DECODER), optimizer=partial(torch.optim.AdamW, lr=1e-2, betas=(0.9, 0.95)))


class Notes(pl.Callback):
    """Writes down the rows of each optimizer step, counted from 1, and saves checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        with (self.folder / f"rows_{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps([trainer.global_step + 1, batch["input_ids"].tolist()]) + "\n")

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        path = self.folder / CHECKPOINTS / f"step={trainer.global_step}.ckpt"
        if trainer.global_step in SAVED and not path.exists():
            trainer.save_checkpoint(path)


def train(folder: Path, steps: int, ckpt_path: Any = None, **options: Any) -> None:
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        max_steps=steps, accelerator="cpu", enable_checkpointing=False, enable_progress_bar=False, num_nodes=1,
        enable_model_summary=False, limit_val_batches=0, log_every_n_steps=4, gradient_clip_val=CLIP,
        logger=pl.loggers.CSVLogger(folder / "log", str(steps)), callbacks=[Notes(folder)], **options,
    )  # fmt: skip
    trainer.fit(model(), datamodule=text_data(folder), ckpt_path=ckpt_path)


def train_rank(rank: int, folder: Path) -> None:
    train(folder, TWO, devices=2, strategy="ddp", accumulate_grad_batches=2)


class Run(NamedTuple):
    folder: Path
    rows: dict[int, set[tuple[int, ...]]]  # input_ids of each step, of all ranks
    logged: dict[int, dict[str, float]]  # train/loss and train/grad_norm of each step

    def checkpoint(self, step: int) -> Path:
        return self.folder / CHECKPOINTS / f"step={step}.ckpt"

    def report(self, step: int, saved: int, **options: Any) -> Any:
        return autopsy(model(), text_data(self.folder), self.checkpoint(saved), step, clip_val=CLIP, **options)

    @property
    def shard(self) -> Path:
        (shard,) = self.folder.glob("cache/*/train_000000.bin")
        return shard


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text_file) -> Run:
    """A run of two processes that accumulate two micro-batches, resumed in one that accumulates six."""
    folder = tmp_path_factory.mktemp("autopsy")
    texts = [text for text in Path(text_file).read_text().split("\n\n") if len(text) > 20]
    (folder / "text").mkdir()
    for name, part in (("a", texts[::2]), ("b", texts[1::2])):
        (folder / "text" / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    text_data(folder).prepare_data()
    run(train_rank, folder)
    train(folder, ALL, folder / CHECKPOINTS / f"step={TWO}.ckpt", devices=1, accumulate_grad_batches=6)
    rows: dict[int, set[tuple[int, ...]]] = {}
    for file in folder.glob("rows_*.jsonl"):
        for line in file.read_text().splitlines():
            step, batch = json.loads(line)
            rows.setdefault(step, set()).update(map(tuple, batch))
    logged: dict[int, dict[str, float]] = {}
    for file in folder.glob("log/*/version_0/metrics.csv"):
        for line in csv.DictReader(file.open()):
            values = {name: float(value) for name, value in line.items() if value and name.startswith("train/")}
            logged.setdefault(int(line["step"]) + 1, {}).update(values)
    return Run(folder, rows, logged)


def samples(report: Any) -> list[int]:
    return [sample for first, last in report.samples for sample in range(first, last + 1)]


def test_the_batch_of_each_step_is_the_one_that_the_run_took(trained):
    data = text_data(trained.folder)
    data.setup()
    rows = data.training_rows()
    for saved in SAVED:
        state = torch.load(trained.checkpoint(saved), weights_only=True)["TextData"]
        for step in range(1, min(saved, TWO) + 1 if saved <= TWO else ALL + 1):
            taken = [s for first, last in data.samples_of_step(step, state) for s in range(first, last + 1)]
            assert len(taken) == (8 if step <= TWO else 12)
            assert {tuple(rows[sample]["input_ids"][0].tolist()) for sample in taken} == trained.rows[step]


@pytest.mark.parametrize("step", [13, 21, 27])  # of two processes; the first after the change; the seventh
def test_loss_and_gradient_norm_of_the_batch_are_those_that_the_run_logged(trained, step):
    report = trained.report(step, step - 1)
    assert report.loss == pytest.approx(trained.logged[step]["train/loss"], rel=1e-5)
    assert report.norm == pytest.approx(trained.logged[step]["train/grad_norm"], rel=1e-4)
    assert "those that the step began with" in report.table(0)


def noise(length: int, random: np.random.Generator) -> Any:
    return random.integers(1, 300, length)


def one_token(length: int, random: np.random.Generator) -> Any:
    return np.full(length, random.integers(1, 300))


def two_tokens(length: int, random: np.random.Generator) -> Any:
    return np.resize(random.integers(1, 300, 2), length)


def plant(run: Run, step: int, seed: int, garbage: Callable[..., Any]) -> tuple[int, int]:
    """Overwrite one document of a step's batch in the shard; returns its row's sample position and its first token."""
    random = np.random.default_rng(seed)
    clean = trained_documents(run, step)
    document = clean[random.integers(len(clean))]
    shard = np.memmap(run.shard, dtype="<u2", mode="r+", offset=4 * HEADER_INTS)
    end = document.token + document.tokens - int(document.ids[-1] == 0)  # its end-of-text token stays
    shard[document.token : end] = garbage(end - document.token, random)
    shard.flush()
    return document.sample, document.first


def trained_documents(run: Run, step: int) -> list[Any]:
    """The documents of a step's batch that have at least 8 tokens."""
    from lightning_tricks.commands.autopsy.documents import documents_of, rows_of

    data = text_data(run.folder)
    data.setup()
    state = torch.load(run.checkpoint(ALL), weights_only=True)["TextData"]
    rows = data.training_rows()
    positions, batches = rows_of(rows, data.samples_of_step(step, state))
    return [document for document in documents_of(rows, positions, batches, data.eot_id) if document.tokens > 8]


@pytest.fixture
def shard(trained, tmp_path):
    """Puts the shard back."""
    shutil.copyfile(trained.shard, tmp_path / "clean.bin")
    yield lambda: shutil.copyfile(tmp_path / "clean.bin", trained.shard)
    shutil.copyfile(tmp_path / "clean.bin", trained.shard)


def test_a_planted_corrupt_document_is_ranked_first_20_of_20_before_and_after_a_change_of_world_size(trained, shard):
    steps = [*range(2, TWO + 1, 2)] + [*range(TWO + 1, ALL)][:10]
    assert len(steps) == 20
    found = []
    for seed, step in enumerate(steps):
        garbage = (noise, one_token, two_tokens)[seed % 3]
        planted = plant(trained, step, seed, garbage)
        first = trained.report(step, (TWO, ALL)[seed % 2]).findings[0].document
        found.append((first.sample, first.first) == planted)
        shard()
    assert found == [True] * 20
