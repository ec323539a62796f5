"""Ways to train one recipe's decoder: a bare loop, stock Lightning, and ours. Only what is around it differs.

Each contender gets the same initial weights, batches, optimizer, schedule, clip, precision and compilation. It is
timed from outside, by the batches: `Meter` calls `mark` whenever one is fetched, and once more at their end.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ThroughputMonitor
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import grad_norm
from torch import Tensor

from benchmarks.feed import Batch, Mark, Meter
from lightning_tricks._trainer.lightning import pl
from lightning_tricks.callbacks import (
    ActivationMonitor,
    AttentionMonitor,
    MemoryMonitor,
    TensorBoardDashboard,
    UpdateMonitor,
)
from lightning_tricks.cli import RecipeCLI
from lightning_tricks.language_model import LanguageModel
from lightning_tricks.models import Decoder
from lightning_tricks.optim import build_optimizer
from lightning_tricks.optim.bf16_step import BF16Step
from lightning_tricks.precision import AutoPrecision, BF16True
from lightning_tricks.precision.bf16_true import to_bf16
from lightning_tricks.schedules import Schedule


@dataclasses.dataclass
class Setup:
    """What a contender that is not ours takes over from a recipe."""

    model: LanguageModel
    trainer: Any

    @property
    def device(self) -> torch.device:
        return self.trainer.strategy.root_device

    @property
    def schedule(self) -> Schedule:
        assert self.model.schedule is not None, "the recipe has no schedule"
        return self.model.schedule

    @property
    def clip(self) -> float:
        assert self.trainer.gradient_clip_val, "the recipe does not clip"
        return float(self.trainer.gradient_clip_val)

    @property
    def weights_in_bf16(self) -> bool:
        return isinstance(self.trainer.precision_plugin, BF16True)

    def decoder(self) -> Decoder:
        """The recipe's decoder with the recipe's initial weights, on the device, compiled if the recipe says so."""
        with torch.device("meta"):
            decoder = Decoder(self.model.config)
        if self.weights_in_bf16:
            to_bf16(decoder)
        decoder.set_activation_checkpointing(self.model.activation_checkpointing)
        if self.model.compile_blocks:
            decoder.compile_blocks()
        decoder.to_empty(device=self.device)
        decoder.init_weights(torch.Generator(self.device).manual_seed(torch.initial_seed()))
        return decoder.train()

    def optimizer(self, module: torch.nn.Module) -> torch.optim.Optimizer:
        return build_optimizer(module, self.model.optimizer, self.model.weight_decay, self.model.decay_embeddings)


def train_by_hand(
    setup: Setup,
    feed: tuple[Iterable[Batch], int, Mark],
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[Batch], Tensor],
) -> None:
    """A loop as one writes it by hand, with a printed line every `log_every_n_steps`.

    Args:
        setup: gives schedule, clip, accumulation and precision.
        feed: batches, their number, and what `Meter` calls.
        module: what is trained.
        optimizer: of its parameters.
        loss_of: mean nats of a token.
    """
    trainer, device, clip = setup.trainer, setup.device, setup.clip
    schedule, total, accumulate = setup.schedule, trainer.max_steps, trainer.accumulate_grad_batches
    parameters, peaks = list(module.parameters()), [group["lr"] for group in optimizer.param_groups]
    bf16, step, count = "bf16" in str(trainer.precision), 0, feed[1]
    for index, batch in enumerate(Meter(*feed), start=1):
        moved = {name: batch[name].to(device, non_blocking=True) for name in ("input_ids", "labels")}
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = loss_of(moved)
        (loss / accumulate).backward()
        if index % accumulate and index < count:  # the last batches make a step, full or not, as in Lightning
            continue
        norm = torch.nn.utils.clip_grad_norm_(parameters, clip)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = schedule.lr(peak, step, total)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % trainer.log_every_n_steps == 0:
            lr = optimizer.param_groups[0]["lr"]
            print(f"step {step}  loss {loss.item():.4f}  norm {norm.item():.3f}  lr {lr:.1e}")


def run_bare(cli: RecipeCLI, batches: Iterable[Batch], count: int, mark: Mark) -> Decoder:
    """The recipe's decoder in a loop by hand; weights in bf16 are stepped as BF16True steps them."""
    trainer: Any = cli.trainer
    setup = Setup(cli.model, trainer)
    decoder = setup.decoder()
    optimizer = setup.optimizer(decoder)
    if setup.weights_in_bf16:
        BF16Step(optimizer)

    def loss_of(batch: Batch) -> Tensor:
        return decoder(**batch) / batch["labels"].numel()

    train_by_hand(setup, (batches, count, mark), decoder, optimizer, loss_of)
    return decoder


class StockModule(pl.LightningModule):
    """What Lightning's documentation makes one write around a decoder."""

    def __init__(self, setup: Setup, watched: bool) -> None:
        super().__init__()
        self.recipe, self.watched = setup, watched
        self.decoder = setup.decoder()
        self.flops_per_batch = 1.0  # ThroughputMonitor wants some

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.decoder(batch["input_ids"], labels=batch["labels"]) / batch["labels"].numel()
        self.log("train/loss", loss, prog_bar=True)
        if self.watched:  # four more, as one logs a perplexity, a z-loss or a count
            for name in ("a", "b", "c", "d"):
                self.log(f"train/{name}", loss.detach())
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.watched:
            self.log_dict(grad_norm(self, norm_type=2))

    def configure_optimizers(self) -> Any:
        optimizer = self.recipe.optimizer(self)
        schedule, total = self.recipe.schedule, self.trainer.max_steps
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule.factor(step, total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def run_stock(cli: RecipeCLI, batches: Iterable[Batch], count: int, mark: Mark, watched: bool = False) -> Decoder:
    """Stock Lightning: its bar, its clip, its LearningRateMonitor; `watched` by what Lightning has for it.

    That is five values logged by `self.log`, `grad_norm` and ThroughputMonitor.

    The precision plugin is ours: Lightning's own refuses to clip for a fused optimizer under bf16-mixed, and another
    optimizer would make another comparison.
    """
    trainer: Any = cli.trainer
    logger: Any = False
    if trainer.logger is not None:
        logger = TensorBoardLogger(save_dir=trainer.default_root_dir, name="stock")
    stock = pl.Trainer(
        accelerator="gpu" if trainer.strategy.root_device.type == "cuda" else "cpu",
        devices=1,
        max_steps=trainer.max_steps,
        max_epochs=1,
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        gradient_clip_val=trainer.gradient_clip_val,
        log_every_n_steps=trainer.log_every_n_steps,
        plugins=[AutoPrecision()] if "bf16" in str(trainer.precision) else [],
        logger=logger,
        callbacks=[*([LearningRateMonitor("step")] if logger else []), *([_throughput()] if watched else [])],
        enable_checkpointing=False,
        enable_model_summary=False,
        limit_val_batches=0,
        default_root_dir=trainer.default_root_dir,
    )
    module = StockModule(Setup(cli.model, trainer), watched)
    stock.fit(module, train_dataloaders=Meter(batches, count, mark))
    return module.decoder


def _throughput() -> ThroughputMonitor:
    return ThroughputMonitor(
        batch_size_fn=lambda batch: batch["labels"].shape[0], length_fn=lambda batch: batch["labels"].numel()
    )


def run_stock_watched(cli: RecipeCLI, batches: Iterable[Batch], count: int, mark: Mark) -> Decoder:
    """Stock Lightning that logs what ours logs by default, as far as it can."""
    return run_stock(cli, batches, count, mark, watched=True)


def run_ours(cli: RecipeCLI, batches: Iterable[Batch] | None, count: int, mark: Mark) -> Decoder:
    """The recipe as `python -m lightning_tricks fit` runs it; without `batches`, with those that it loads by itself."""
    load = cli.datamodule.train_dataloader
    cli.datamodule.train_dataloader = lambda: Meter(load() if batches is None else batches, count, mark)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    decoder = cli.model.decoder
    assert decoder is not None
    return decoder


def run_ours_with_loader(cli: RecipeCLI, batches: Iterable[Batch], count: int, mark: Mark) -> Decoder:
    """The recipe with nothing of the benchmark's in it but the marks; `batches` are not used."""
    return run_ours(cli, None, count, mark)


def run_ours_watched(cli: RecipeCLI, batches: Iterable[Batch], count: int, mark: Mark) -> Decoder:
    """The recipe with every monitor there is and the dashboard."""
    monitors = (MemoryMonitor(), ActivationMonitor(), UpdateMonitor(), AttentionMonitor(), TensorBoardDashboard())
    trainer: Any = cli.trainer
    trainer.callbacks = [*trainer.callbacks, *monitors]
    return run_ours(cli, batches, count, mark)


CONTENDERS: dict[str, Callable[[RecipeCLI, Iterable[Batch], int, Mark], Decoder]] = {
    "bare": run_bare,
    "bare_again": run_bare,
    "stock": run_stock,
    "stock_watched": run_stock_watched,
    "ours": run_ours,
    "ours_watched": run_ours_watched,
    "ours_loader": run_ours_with_loader,
}
