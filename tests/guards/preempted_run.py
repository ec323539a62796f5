"""Runs that are told to stop at one place, for test_preemption.py: exit codes, checkpoints and losses of each."""

import logging
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_tricks import MetricBuffer, Preemption, ResumingCSVLogger, SafeCheckpoint
from lightning_tricks.data import TokenData
from lightning_tricks.data.batches import TrainBatches

STEPS = 7
SIGNALS = {"SIGTERM": signal.SIGTERM, "SIGUSR1": signal.SIGUSR1, "SIGINT": signal.SIGINT}


class Stop:
    """Tells the run to stop, once, when it comes to a place.

    Args:
        place: see the calls of `at`.
        how: a signal, or "deadline".
        ranks: that are told.
    """

    def __init__(self, place: str, how: str, ranks: tuple[int, ...], callback: Preemption) -> None:
        self.place, self.how, self.ranks, self.callback = place, how, ranks, callback
        self.rank = int(os.environ.get("RANK", 0))

    def at(self, place: str) -> None:
        if place != self.place:
            return
        self.place = ""
        if self.rank not in self.ranks:
            return
        if self.how == "deadline":
            self.callback.deadline = 0.0
        else:
            os.kill(os.getpid(), SIGNALS[self.how])


class Foreign(pl.LightningModule):
    """A model with moments and two logged values; it writes down the loss of each micro-batch, to the bit."""

    def __init__(self, stop: Stop, log: Path) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = torch.nn.Embedding(64, 64)
        self.stop, self.log_file, self.validations = stop, log, 0

    def setup(self, stage: str) -> None:
        self.buffer = MetricBuffer.of(self.trainer)
        self.stop.at("setup")

    def logits(self, ids: Any) -> Any:
        if self.stop.place != "compile" or self.trainer.sanity_checking:
            return self.embedding(ids)
        torch._dynamo.reset()

        def backend(graph: Any, _: Any) -> Any:
            self.stop.at("compile")
            return graph.forward

        return torch.compile(lambda ids: self.embedding(ids), backend=backend)(ids)

    def loss(self, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(
            self.logits(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        accumulate = self.trainer.accumulate_grad_batches
        micro, step = self.trainer.fit_loop.total_batch_idx % accumulate, self.trainer.global_step
        if step == 2:
            self.stop.at("window" if micro == 0 else "step")
        if step == 3:
            self.stop.at("validation is due")
        if step == STEPS - 1:
            self.stop.at("last step")
        loss = self.loss(batch)
        with self.log_file.open("a") as file:
            file.write(f"{step} {micro} {loss.item().hex()}\n")
        self.log("train/loss", loss)
        self.buffer.record("train/buffered", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.sanity_checking:
            self.stop.at("sanity check")
        elif self.trainer.global_step == 4:
            self.stop.at("validation")
        self.log("val/loss", self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        self.validations += not self.trainer.sanity_checking

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        checkpoint["validations"] = self.validations
        self.stop.at("save")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Tokens(TokenData):
    """The batch of the fifth step is slow to come."""

    stop: Any = None

    def train_dataloader(self) -> Any:
        loader, stop = super().train_dataloader(), self.stop

        class Waits(TrainBatches):
            def __getitem__(self, position: int) -> Any:
                if position >= 36:  # fetched in the fifth step, for its second micro-batch
                    stop.at("loader")
                return super().__getitem__(position)

        loader.batches.__class__ = Waits
        return loader


def fit(
    data: Path, folder: Path, stop: Stop, callback: Preemption, ckpt_path: Any = None, saver: str = "", world: int = 1
) -> Any:  # fmt: skip
    """Train to `STEPS` in `folder`; returns the exit code that the fit asked for, None if it came to its end."""
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    folder.mkdir(parents=True, exist_ok=True)
    tokens = Tokens(
        train=str(data / "train.bin"), val=str(data / "val.bin"), seq_len=8, micro_batch_size=4 // world, seed=3
    )  # fmt: skip
    tokens.stop = stop
    if saver == "SafeCheckpoint":
        savers: Any = SafeCheckpoint(folder / "checkpoints", every_n_train_steps=3)
    else:
        savers = ModelCheckpoint(folder / "checkpoints", save_top_k=0, every_n_train_steps=3, save_last=True)
    trainer = pl.Trainer(
        max_steps=STEPS, accumulate_grad_batches=2, val_check_interval=4, check_val_every_n_epoch=None,
        limit_val_batches=2, num_sanity_val_steps=1, log_every_n_steps=3, accelerator="cpu", devices=world,
        callbacks=[callback, savers],
        logger=ResumingCSVLogger(folder, name="", version="csv"), enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
        **({"strategy": "ddp"} if world > 1 else {}),
    )  # fmt: skip
    module = Foreign(stop, folder / f"losses{stop.rank}.txt")
    before = [signal.getsignal(number) for number in SIGNALS.values()]
    try:
        trainer.fit(module, tokens, ckpt_path=ckpt_path, weights_only=False)
        code = None
    except SystemExit as error:
        code = error.code
        assert [signal.getsignal(number) for number in SIGNALS.values()] != before  # not obeyed while it leaves
        os.kill(os.getpid(), signal.SIGTERM)
    assert [signal.getsignal(number) for number in SIGNALS.values()] == before
    return code


Todo = list[tuple[str, str, tuple[int, ...]]]


def cases(rank: int, world: int, saver: str, data: Path, folder: Path, todo: Todo) -> dict[str, Any]:
    """Stop a run at each (place, how, ranks), and go on to its end; the codes and the checkpoints of each."""
    results = {}
    options: Any = {"world": world, "saver": saver}
    fit(data, folder / "unbroken", Stop("", "", (), Preemption()), Preemption(), **options)
    for place, how, ranks in todo:
        case = folder / f"{place}-{how}-{'-'.join(map(str, ranks))}"
        callback = Preemption()
        code = fit(data, case, Stop(place, how, ranks, callback), callback, **options)
        found = sorted(path for path in case.rglob("*.ckpt") if not path.is_symlink())
        loaded = [torch.load(path, weights_only=True) for path in found]
        steps = [(checkpoint["global_step"], checkpoint["validations"]) for checkpoint in loaded]
        logged = (case / f"losses{rank}.txt").read_text() if (case / f"losses{rank}.txt").exists() else ""
        again = None
        if code is not None:
            torch.distributed.barrier() if torch.distributed.is_initialized() else None
            again = fit(data, case, Stop("", "", (), callback), Preemption(), ckpt_path="last", **options)
        result = {"code": code, "files": [path.name for path in found], "steps": steps, "lines": logged.count("\n")}
        results[case.name] = {**result, "again": again}
    return results
