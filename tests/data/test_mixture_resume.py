"""A mixture of three sources in three formats, ended at twenty moments and resumed with other splits and weights."""

import contextlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import processes, shard_formats
from harness.models import Small
from harness.runs import trainer_with
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_tricks.data import MixtureData, MixtureSource, ShardWriter, TokenData, WeightChange

T, ROWS, STEPS = 8, 8, 60
SPLITS = [  # processes, rows of a micro-batch, micro-batches, workers
    (1, 8, 1, 0), (2, 2, 2, 0), (4, 1, 2, 0), (2, 4, 1, 2), (1, 2, 4, 2), (4, 2, 1, 0), (1, 4, 2, 0),
]  # fmt: skip
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]


class EndedError(Exception):
    """The run ends here."""


@pytest.fixture
def files(tmp_path):
    """Tokens of three sources, each in documents of its own."""
    draw = np.random.default_rng(0)
    for number, name in enumerate(("web", "code", "books")):
        lengths = draw.integers(3, 40, 60)
        documents = [np.append(draw.integers(1, 21, length) + 20 * number, 0) for length in lengths]
        (folder := tmp_path / name).mkdir()
        if name == "web":
            with ShardWriter(folder, "train", 61) as writer:
                writer.append(np.concatenate(documents))
        elif name == "code":
            shard_formats.megatron(folder, documents, code=8, dtype="<u2")
        else:
            shard_formats.datatrove(folder, documents)
    return tmp_path


def mixture(files: Path, changed: bool, **options: Any) -> MixtureData:
    places = {"web": "web/train_*.bin", "code": "code/m.bin", "books": "books/*.ds"}
    weights = {"web": 5.0, "code": 3.0, "books": 2.0}
    if changed:
        weights = {"web": 1.0, "code": 1.0, "books": 6.0}
    given = [
        MixtureSource(
            TokenData(str(files / place), eot_id=0, packing="best_fit" if name == "code" else "cut",
                      shuffle="documents" if name == "books" else "rows", cache_dir=str(files / "cache")),
            weights[name], name, 6 if name == "books" else None,
        )
        for name, place in places.items()
    ]  # fmt: skip
    annealing = [WeightChange({"web": 1, "code": 4, "books": 1}, at_fraction=0.75)]
    return MixtureData(given, annealing, seq_len=T, document_ids=True, **options)


def leg(rank: int, files: Path, folder: Path, ends_at: Any, split: tuple[int, int, int, int], changed: bool) -> Any:
    """Train from the folder's last checkpoint; the rows of each step that this rank had, and the weights."""
    world, size, accumulate, num_workers = split
    rows: dict[int, list[tuple[int, ...]]] = {}

    def see(module, batch):
        step, micro = module.trainer.global_step, len(rows.setdefault(module.trainer.global_step, [])) // size
        rows[step] += map(tuple, torch.cat([batch["source"][:, None], batch["labels"]], 1).tolist())
        if ends_at == (step, micro):
            raise EndedError

    saver = ModelCheckpoint(folder, save_last=True, every_n_train_steps=2)
    options: dict[str, Any] = {"devices": world, "strategy": "ddp"} if world > 1 else {}
    options |= {"logger": False, "limit_val_batches": 0, "accumulate_grad_batches": accumulate}
    trainer = trainer_with(saver, max_steps=STEPS, **options)
    net = torch.nn.Embedding.from_pretrained(torch.linspace(-1, 1, 64).unsqueeze(1), freeze=False)
    module = Small(net=net, loss=lambda module, batch: module(batch["input_ids"]).square().mean(), act=see)
    data = mixture(files, changed, micro_batch_size=size, num_workers=num_workers)
    last = folder / "last.ckpt"
    with contextlib.suppress(EndedError):
        trainer.fit(module, data, ckpt_path=last if last.exists() else None)
    return rows, [p.detach().clone() for p in module.parameters()], trainer.global_step


def run(files: Path, folder: Path, ends_at: Any, split: tuple[int, int, int, int], changed: bool) -> Any:
    args = (files, folder, ends_at, split, changed)
    found = [leg(0, *args)] if split[0] == 1 else processes.run(leg, *args, world=split[0])
    rows = {step: sorted(row for own, *_ in found for row in own[step]) for step in found[0][0]}
    return {step: each for step, each in rows.items() if len(each) == ROWS}, found[0][1], found[0][2]


def killed(files: Path, folder: Path, splits: Any, moments: int) -> tuple[Any, Any, int]:
    """Rows by step and weights of a run that ended so often; its weights of the mixture change at half of the ends."""
    draw, rows, step, change_at = random.Random(0), {}, 0, 0
    for moment in range(moments):
        split, changed = splits[moment % len(splits)], moment >= moments // 2
        if moment == moments // 2:
            change_at = step
        at = (min(step + draw.randrange(1, 100 // moments), STEPS - 1), draw.randrange(split[2]))
        rows |= run(files, folder, at, split, changed)[0]
        last = folder / "last.ckpt"
        step = torch.load(last, weights_only=False)["global_step"] if last.exists() else 0
    seen, weights, done = run(files, folder, None, splits[0], True)
    assert done == STEPS
    return rows | seen, weights, change_at


def test_ended_at_twenty_moments_rows_are_those_of_the_pure_function_and_weights_of_the_unbroken_run(files):
    rows, weights, change_at = killed(files, files / "run", SPLITS, 20)
    assert sorted(rows) == list(range(STEPS))
    state = torch.load(files / "run" / "last.ckpt", weights_only=False)["MixtureData"]
    assert len(state["mixture"]["segments"]) >= 4  # the changed weights, the end of the books, the annealing
    data = mixture(files, True, micro_batch_size=1)
    data.setup()
    assert data.samples_of_step(STEPS - 1, state) == [((STEPS - 1) * ROWS, STEPS * ROWS - 1)]
    batches = data.training_rows()
    for step in range(STEPS):
        found = [batches[step * ROWS + row] for row in range(ROWS)]
        assert rows[step] == sorted((int(b["source"]), *b["labels"][0].tolist()) for b in found), step
    whole = files / "unbroken"
    before, *_ = run(files, whole, (change_at, 0), SPLITS[0], False)
    after, expected, _ = run(files, whole, None, SPLITS[0], True)
    assert before | after == rows
    # sums over ranks and micro-batches are rounded in another order
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(weights, expected, strict=True))


def test_with_the_same_split_the_weights_are_equal_to_the_bit(files):
    rows, weights, change_at = killed(files, files / "run", SPLITS[:1], 4)
    before, *_ = run(files, files / "unbroken", (change_at, 0), SPLITS[0], False)
    after, expected, _ = run(files, files / "unbroken", None, SPLITS[0], True)
    assert before | after == rows
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
