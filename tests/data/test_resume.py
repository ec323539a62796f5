"""A run that ends anywhere and goes on has the batches of the run that never ended."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from harness import processes
from harness.models import Small
from harness.runs import On, trainer_with
from harness.token_files import write_token_files
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_tricks.data import TokenData

STEPS = 8
ONCE_AN_EPOCH = {"val_check_interval": 1.0, "check_val_every_n_epoch": 1}
pytestmark = pytest.mark.filterwarnings("ignore")


class EndedError(Exception):
    """The run ends here."""


class Seen(NamedTuple):
    """What runs in one folder saw, one after the other."""

    batches: list[tuple[int, int, tuple]]  # step, micro-batch in it, rows
    validations: list[tuple[int, int]]  # step and epoch
    validated: list[tuple]  # labels of rows

    def last(self) -> dict[tuple[int, int], tuple]:
        """The rows of each micro-batch, as the last run that came there had them."""
        return {(step, micro): rows for step, micro, rows in self.batches}

    def by_step(self) -> dict[int, set[tuple]]:
        """The rows of each step."""
        found: dict[int, set[tuple]] = {}
        for step, _, rows in self.batches:
            found.setdefault(step, set()).update(rows)
        return found


def run(
    folder: Path,
    seen: Seen,
    ends_at: Any = None,
    steps: int = STEPS,
    size: int = 2,
    num_workers: int = 0,
    **options: Any,
) -> None:
    """Train on the token files of a folder from its last checkpoint, if there is one."""
    micro_batches: Counter[int] = Counter()

    def see(module, batch):
        step = module.trainer.global_step
        seen.batches.append((step, micro_batches[step], tuple(map(tuple, batch["input_ids"].tolist()))))
        if ends_at == (step, micro_batches[step]):
            raise EndedError
        micro_batches[step] += 1

    def validated(trainer, module, outputs, batch, *_):
        if not trainer.sanity_checking:
            seen.validated.extend(tuple(row) for row in batch["labels"].tolist() if max(row) >= 0)

    def ends(trainer, module):
        if not trainer.sanity_checking:
            seen.validations.append((trainer.global_step, trainer.current_epoch))

    files = {"train": str(folder / "train.bin"), "val": str(folder / "val.bin")}
    data = TokenData(**files, seq_len=8, micro_batch_size=size, num_workers=num_workers, seed=3)
    accumulate = options.setdefault("accumulate_grad_batches", 1)
    options = {"val_check_interval": 2 * accumulate, "check_val_every_n_epoch": None} | options
    saver = ModelCheckpoint(folder / "run", save_last=True, every_n_train_steps=2)
    trainer = trainer_with(saver, On(on_validation_batch_end=validated, on_validation_epoch_end=ends), max_steps=steps,
                           logger=False, **options)  # fmt: skip
    module = Small(net=torch.nn.Embedding(64, 1), loss=lambda module, batch: module(batch["input_ids"]).mean(), act=see)
    trainer.fit(module, data, ckpt_path="last" if (folder / "run" / "last.ckpt").exists() else None)


def ended(folder: Path, seen: Seen, at: tuple[int, int], **options: Any) -> None:
    with pytest.raises(EndedError):
        run(folder, seen, at, **options)


@pytest.fixture
def seen():
    return Seen([], [], [])


@pytest.fixture
def folder(tmp_path):
    return write_token_files(tmp_path / "run", train=3600, tokens=3700)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Runs that nobody ended, by accumulation."""
    found = {}
    for accumulate in (1, 4):
        folder = write_token_files(tmp_path_factory.mktemp("unbroken"), train=3600, tokens=3700)
        run(folder, seen := Seen([], [], []), accumulate_grad_batches=accumulate)
        found[accumulate] = seen
    return found


def test_the_unbroken_run_sees_each_batch_once(unbroken):
    for accumulate, seen in unbroken.items():
        assert list(seen.last()) == [(step, micro) for step in range(STEPS) for micro in range(accumulate)]
        rows = [row for _, _, rows in seen.batches for row in rows]
        assert len(set(rows)) == len(rows) == STEPS * accumulate * 2
        assert seen.validations == [(step, 0) for step in (2, 4, 6, 8)]


@pytest.mark.parametrize(("accumulate", "num_workers"), [(1, 0), pytest.param(4, 2, marks=pytest.mark.long)])
def test_ended_thrice_and_resumed_the_batches_are_the_unbroken_ones(unbroken, folder, seen, accumulate, num_workers):
    options = {"accumulate_grad_batches": accumulate, "num_workers": num_workers}
    middle = accumulate // 2
    # the second run ends in the window in which its ModelCheckpoint has saved again, in mid-window
    for at in ((3, middle), (4, middle), (5, accumulate - 1)):
        ended(folder, seen, at, **options)
    run(folder, seen, **options)
    assert seen.last() == unbroken[accumulate].last()
    # and in the same order: each run goes on where a checkpoint was, and then batch by batch
    order = list(unbroken[accumulate].last())
    came = [(step, micro) for step, micro, _ in seen.batches]
    jumps = [(a, b) for a, b in pairwise(came) if order.index(b) != order.index(a) + 1]
    assert len(jumps) == 3
    assert all(micro == 0 and step % 2 == 0 for _, (step, micro) in jumps)
    assert list(dict.fromkeys(seen.validations)) == unbroken[accumulate].validations


def test_a_finished_run_is_carried_on_with_more_steps(unbroken, folder, seen):
    for steps in (4, STEPS):
        run(folder, seen, steps=steps, accumulate_grad_batches=4, **ONCE_AN_EPOCH)
    assert seen.batches == unbroken[4].batches
    assert seen.validations == [(4, 0), (8, 0)]  # still in its only epoch, as if it had never stopped


def test_a_resume_may_split_the_global_batch_in_another_way_or_make_it_smaller(unbroken, tmp_path):
    for split in (4, 1):
        folder = write_token_files(tmp_path / f"{split}", train=3600, tokens=3700)
        ended(folder, Seen([], [], []), (5, 0), size=8)
        run(folder, after := Seen([], [], []), accumulate_grad_batches=split)
        assert list(after.by_step()) == [4, 5, 6, 7]
        if split == 4:
            assert after.by_step() == {step: rows for step, rows in unbroken[4].by_step().items() if step >= 4}
        else:  # four steps of 2 rows are the fifth step of 8 rows
            assert set().union(*after.by_step().values()) == unbroken[4].by_step()[4]


def test_without_max_steps_an_epoch_is_a_pass_over_the_data(folder, seen):
    epochs = {"steps": -1, "max_epochs": 2, "accumulate_grad_batches": 4, "size": 20, **ONCE_AN_EPOCH}
    ended(folder, seen, (7, 1), **epochs)
    run(folder, seen, **epochs)
    # 3600 // 8 - 1 = 449 windows, 80 a step: 5 steps a pass
    assert list(seen.last()) == [(step, micro) for step in range(10) for micro in range(4)]
    assert seen.validations == [(5, 0), (10, 1)]


def test_overfitting_takes_the_same_batches_every_epoch(folder, seen):
    run(folder, seen, steps=6, overfit_batches=2, **ONCE_AN_EPOCH)
    rows = [rows for _, _, rows in seen.batches]
    assert rows == rows[:2] * 3
    assert rows[0] != rows[1]


def on_two_ranks(rank: int, folder: Path) -> Seen:
    run(folder, seen := Seen([], [], []), accumulate_grad_batches=2, devices=2, strategy="ddp")
    return seen


@pytest.mark.long
def test_two_processes_see_per_step_what_one_sees(unbroken, folder):
    first, second = processes.run(on_two_ranks, folder)
    both = {step: rows | second.by_step()[step] for step, rows in first.by_step().items()}
    assert both == unbroken[4].by_step()
    # 100 validation tokens: 13 windows of 8, each once on one of the two, four times
    assert sorted(Counter([*first.validated, *second.validated]).values()) == [4] * 13
