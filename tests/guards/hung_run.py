"""A run that stands still at one place, for the tests of HangWatchdog. As a program: `hung_run.py JSON`."""

import ctypes
import json
import os
import signal
import sys
import threading
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_tricks._trainer.lightning import pl
from lightning_tricks.callbacks import HangWatchdog, RankMonitor

STEP = 3  # optimizer steps done before the run stands still
NEVER = threading.Event()


class Stands:
    """Stands still, once, when the run comes to a place.

    Args:
        place: see the calls of `at`.
        hang: what it does there.
    """

    def __init__(self, place: str, hang: Any = NEVER.wait) -> None:
        self.place, self.hang, self.steps = place, hang, 0

    def at(self, place: str) -> None:
        if place and place == self.place and self.steps == STEP:
            self.place = ""
            self.hang()


class Rows(Dataset):
    def __init__(self, stands: Any, place: str) -> None:
        self.stands, self.place = stands, place

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        import torch

        if index == STEP:
            self.stands.steps = STEP  # in a worker, nobody counts
        self.stands.at(self.place)
        return torch.ones(4)


class Uneven(IterableDataset):
    """Five batches on rank 0, three on the others, and no length."""

    def __iter__(self) -> Any:
        import torch

        return iter([torch.ones(4)] * (3 if int(os.environ.get("LOCAL_RANK", "0")) else 5))


class Module(pl.LightningModule):
    def __init__(self, stands: Stands) -> None:
        import torch

        super().__init__()
        self.stands = stands
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.stands.steps = self.trainer.global_step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.stands.at("forward")
        loss = self(batch)
        loss.register_hook(lambda _: self.stands.at("backward"))
        return loss

    def on_validation_start(self) -> None:
        self.stands.steps = self.trainer.global_step

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch)
        if batch_idx == 1:
            self.stands.at("validation")

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        self.stands.steps = self.trainer.global_step
        self.stands.at("checkpoint")

    def configure_optimizers(self) -> Any:
        import torch

        stands = self.stands

        class SGD(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                found = super().step(closure)
                stands.at("optimizer")
                return found

        return SGD(self.parameters(), lr=0.1)


def trainer_with(*callbacks: Any, **options: Any) -> Any:
    defaults: dict[str, Any] = {"max_steps": 6, "val_check_interval": STEP, "limit_val_batches": 3, "devices": 1}
    return pl.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[*callbacks],
        **{"enable_checkpointing": False, "num_sanity_val_steps": 0, **defaults, **options},
    )  # fmt: skip


def fit(stands: Stands, *callbacks: Any, workers: int = 0, **options: Any) -> Any:
    """Train six steps, with a validation of three batches after the third."""
    trainer = trainer_with(*callbacks, **options)
    train = DataLoader(Rows(stands, "training loader"), num_workers=workers)
    trainer.fit(Module(stands), train, DataLoader(Rows(stands, "validation loader")))
    return trainer


def hang(how: str, place: str, watchdog: HangWatchdog) -> Any:
    """`wait` in Python; be stopped or in C with Python's lock, after the watch has told the others this place."""

    def when_told() -> None:
        watch = watchdog._watch
        assert watch is not None
        while (watch._published.step, watch._published.part) != (STEP, place):
            NEVER.wait(0.05)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            ctypes.PyDLL(None).sleep(100_000)

    return NEVER.wait if how == "wait" else when_told


def main(place: str, how: str, rank: int, devices: int, strategy: str, workers: int) -> None:
    watchdog = HangWatchdog(limit_seconds=3.0, first_step_seconds=60.0, abort=True)
    options: dict[str, Any] = {"devices": devices, "use_distributed_sampler": False, "strategy": strategy}
    if strategy == "fsdp2":
        from lightning_tricks.strategies import FSDP2Strategy

        options["strategy"] = FSDP2Strategy()
    here = int(os.environ.get("LOCAL_RANK", "0")) == rank
    stands = Stands(place if here else "", hang(how, place, watchdog))
    if place == "uneven validation":
        trainer = trainer_with(RankMonitor(), watchdog, **{**options, "limit_val_batches": 1.0})
        trainer.fit(Module(stands), DataLoader(Rows(stands, "")), DataLoader(Uneven(), batch_size=None))
    else:
        fit(stands, RankMonitor(), watchdog, workers=workers, **options)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
