"""GCControl: collections at its steps and at no others, and the collector as it was afterwards."""

import gc
import weakref

import lightning.pytorch as pl
import pytest
import torch
from harness.runs import On
from hung_run import Module, Stands, trainer_with
from torch.utils.data import DataLoader

from lightning_tricks.callbacks import GCControl


@pytest.fixture(autouse=True)
def collector():
    """The collector, as each test found it. All that the tests have imported is frozen, and quick to pass over."""
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.freeze()
    yield
    gc.unfreeze()
    if frozen:
        gc.freeze()
    (gc.enable if enabled else gc.disable)()


@pytest.fixture
def thawed(collector):
    """As in a program that has frozen nothing itself."""
    gc.unfreeze()


class Cycle:
    def __init__(self) -> None:
        self.own = self


class Looks(pl.Callback):
    """Makes a cycle each step, notes which of them are gone, and what the collector has been told."""

    def __init__(self, fail_at: int = -1) -> None:
        self.fail_at = fail_at
        self.cycles, self.gone, self.frozen, self.enabled = [], [], [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.gone.append(sum(cycle() is None for cycle in self.cycles))
        self.frozen.append(gc.get_freeze_count())
        self.enabled.append(gc.isenabled())
        if batch_idx == self.fail_at:
            raise ValueError("bad batch")
        self.cycles.append(weakref.ref(Cycle()))


def fit(*callbacks, **options):
    trainer = trainer_with(*callbacks, **{"max_steps": 9, "limit_val_batches": 0, **options})
    trainer.fit(Module(Stands("")), DataLoader([torch.ones(4)] * 40))
    return trainer


def test_with_accumulation_it_counts_optimizer_steps():
    looks = Looks()
    fit(looks, GCControl(every_n_steps=2), accumulate_grad_batches=2, max_steps=3)
    assert looks.gone == [0, 0, 2, 2, 4, 4]


def test_it_collects_after_the_first_and_every_nth_step_and_leaves_out_what_lives_until_then(thawed):
    looks = Looks()
    kept: list[object] = []

    compiles = On(on_train_batch_start=lambda *args: kept.extend([] for _ in range(5000 if args[-1] == 0 else 0)))
    fit(looks, compiles, GCControl(every_n_steps=4))
    assert looks.gone == [0, 1, 1, 1, 4, 4, 4, 4, 8]
    assert looks.frozen[0] > 1000
    assert looks.frozen[1] >= looks.frozen[0] + 5000
    assert max(looks.frozen[2:]) <= looks.frozen[1]  # of frozen objects, some are freed
    assert looks.enabled == [False] * 9
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, 0)


@pytest.mark.parametrize("was_enabled", [True, False])
def test_after_an_exception_the_collector_is_as_it_was(thawed, was_enabled):
    (gc.enable if was_enabled else gc.disable)()
    with pytest.raises(ValueError, match="bad batch"):
        fit(Looks(fail_at=3), GCControl())
    assert gc.isenabled() is was_enabled
    assert gc.get_freeze_count() == 0
    gc.freeze()
    fit(GCControl())
    assert gc.isenabled() is was_enabled


def test_what_the_program_has_frozen_itself_stays_frozen_and_nothing_is_added():
    frozen = gc.get_freeze_count()
    looks = Looks()
    fit(looks, GCControl())
    assert max(looks.frozen) <= frozen  # of frozen objects, some are freed
    assert 0 < gc.get_freeze_count() <= frozen


def test_training_is_the_same_to_the_bit():
    weights = []
    for callbacks in ([], [GCControl(2)]):
        torch.manual_seed(1)
        weights.append([*fit(*callbacks).model.parameters(), torch.get_rng_state()])
    assert all(map(torch.equal, *weights))
