"""ExactResume and a crash at any batch, of which a checkpoint is saved: each step has the rows of the unbroken run."""

import lightning.pytorch as pl
import pytest
import torch
from harness.runs import trainer_with
from lightning.pytorch.callbacks import GradientAccumulationScheduler, OnExceptionCheckpoint
from torch.utils.data import DataLoader, IterableDataset

from lightning_tricks import ExactResume

ROWS, EPOCHS = 6, 2


class CrashError(Exception):
    pass


class Stream(IterableDataset):
    """Rows in their order, without a length."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        yield from map(float, range(self.rows))


class StatefulStream(Stream):
    """Goes on from its state."""

    done = 0

    def __iter__(self):
        while self.done < self.rows:
            self.done += 1
            yield float(self.done - 1)
        self.done = 0

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


class Foreign(StatefulStream):
    """A loader that is not torch's, each pass of which begins anew when it is asked for an iterator."""

    passes, loaded = 0, False

    def __iter__(self):
        if not self.loaded:
            self.passes, self.done = self.passes + 1, 0
        self.loaded = False
        return self

    def __next__(self):
        if self.done == self.rows:
            raise StopIteration
        self.done += 1
        return torch.tensor([100.0 * self.passes + self.done - 1])

    def state_dict(self):
        return {"passes": self.passes, "done": self.done}

    def load_state_dict(self, state):
        self.passes, self.done, self.loaded = state["passes"], state["done"], True


class SizedForeign(Foreign):
    def __len__(self):
        return self.rows


class NoLength(torch.utils.data.Dataset):
    """Rows of which the sampler knows the number."""

    def __getitem__(self, row):
        return float(row)


LOADERS = {
    "rows": lambda: DataLoader(torch.arange(float(ROWS)), shuffle=True),
    "rows without a length": lambda: DataLoader(NoLength(), sampler=torch.randperm(ROWS).tolist()),
    "stream": lambda: DataLoader(Stream(ROWS)),
    "stream with a state": lambda: DataLoader(StatefulStream(ROWS)),
    "foreign loader": lambda: Foreign(ROWS),
    "foreign loader with a length": lambda: SizedForeign(ROWS),
    "three, two of which begin again": lambda: [Foreign(4), DataLoader(Stream(5)), DataLoader(Stream(ROWS))],
}


class Model(pl.LightningModule):
    """Writes down the rows of each step, and raises in the forward pass of one micro-batch."""

    def __init__(self, steps, crash_at):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.steps, self.crash_at, self.rows = steps, crash_at, []

    def training_step(self, batch, batch_idx):
        self.rows.append(str(batch))
        if self.trainer.fit_loop.epoch_loop.batch_progress.total.ready == self.crash_at:
            raise CrashError
        return self.weight

    def optimizer_step(self, *args):
        super().optimizer_step(*args)
        self.steps[self.trainer.global_step] = (self.trainer.current_epoch, self.rows)
        self.rows = []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(folder, kind, window, steps, crash_at=None):
    """Go on from the checkpoint of the last crash, if there is one; whether the run came to its end."""
    pl.seed_everything(1, verbose=False)
    callbacks = [ExactResume(), OnExceptionCheckpoint(folder, "crash")]
    if isinstance(window, dict):
        callbacks.append(GradientAccumulationScheduler(dict(window)))
    crash, window = folder / "crash.ckpt", 1 if isinstance(window, dict) else window
    options = {"max_epochs": EPOCHS, "max_steps": -1, "logger": False, "accumulate_grad_batches": window}
    trainer = trainer_with(*callbacks, **options)
    try:
        trainer.fit(Model(steps, crash_at), LOADERS[kind](), ckpt_path=crash if crash.exists() else None)
    except CrashError:
        return False
    return True


GROWING = {0: 2, 1: 5}  # of a GradientAccumulationScheduler
CASES = [*((kind, GROWING) for kind in LOADERS), *((kind, 1) for kind in list(LOADERS)[4:]), ("rows", 4)]


@pytest.mark.parametrize(("kind", "window"), CASES)
def test_after_a_crash_at_every_batch_each_step_has_the_rows_of_the_unbroken_run(tmp_path, kind, window):
    unbroken, crashed = {}, {}
    assert fit(tmp_path / "unbroken", kind, window, unbroken)
    crash_at = 1
    while crash_at < 40 and not fit(tmp_path, kind, window, crashed, crash_at):
        crash_at += 1
    assert crash_at == EPOCHS * ROWS + 1
    assert crashed == unbroken
