"""Contenders of gpu.py that share no model with ours: a decoder written by hand, litgpt's, and stock Lightning's way.

Each is called as those of `contenders.py` are, and takes from the recipe its shape, batches, learning rates, clip and
accumulation. Their weights are fp32 under autocast to bf16.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.contenders import Setup, run_ours, train_by_hand
from benchmarks.feed import Batch, Mark, Meter
from benchmarks.hand_written import HandWritten
from benchmarks.peer_loops import litgpt_model
from lightning_tricks._trainer.lightning import pl
from lightning_tricks.cli import RecipeCLI


def by_dimension(module: nn.Module, setup: Setup) -> list[dict[str, Any]]:
    """Groups as nanoGPT makes them: matrices and embeddings decay, everything else does not."""
    params = list(module.parameters())
    return [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": setup.model.weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]


def written_by_hand(setup: Setup, same_weights: bool = True) -> HandWritten:
    """The hand-written model on the device, with the recipe's initial weights or with torch's."""
    config = setup.model.config
    with setup.device:
        model = HandWritten(config, config.max_seq_len)
    if same_weights:
        model.load(setup.decoder().state_dict())
    return model.train()


def run_hand(cli: RecipeCLI, batches: Iterable[Batch], count: int, mark: Mark, whole: bool) -> nn.Module:
    """The model by hand in a loop by hand, with fused AdamW.

    Args:
        cli: the recipe.
        batches: see `contenders`.
        count: see `contenders`.
        mark: see `contenders`.
        whole: compiled as a whole, as in nanoGPT; else each block, and the head with its loss, as torchtitan does:
            deep models take minutes as a whole.
    """
    trainer: Any = cli.trainer
    setup = Setup(cli.model, trainer)
    model = written_by_hand(setup)
    if whole:
        loss: Callable[..., Tensor] = torch.compile(model) if setup.model.compile_blocks else model
    elif setup.model.compile_blocks:
        for block in model.blocks:
            block.compile()
        loss_of_features = torch.compile(model.loss)
        loss = lambda input_ids, labels: loss_of_features(model.features(input_ids), labels)  # noqa: E731
    else:
        loss = model
    factory: Any = setup.model.optimizer
    train_by_hand(setup, (batches, count, mark), model, factory(by_dimension(model, setup)), lambda b: loss(**b))
    return model


def run_litgpt(cli: RecipeCLI, batches: Iterable[Batch], count: int, mark: Mark) -> nn.Module:
    """Litgpt's model and loss as `litgpt pretrain` compiles them, in a loop by hand; the shape must be a Llama's."""
    from litgpt.utils import chunked_cross_entropy

    trainer: Any = cli.trainer
    setup = Setup(cli.model, trainer)
    with setup.device:
        model = litgpt_model(setup.model.config, setup.model.config.max_seq_len)
    called: Any = torch.compile(model) if setup.model.compile_blocks else model

    def loss_of(batch: Batch) -> Tensor:
        return chunked_cross_entropy(called(batch["input_ids"]), batch["labels"])

    factory: Any = setup.model.optimizer
    train_by_hand(setup, (batches, count, mark), model, factory(by_dimension(model, setup)), loss_of)
    return model


class StockModule(pl.LightningModule):
    """What one writes first: a model by hand whose blocks run again, its loss from whole logits, fused AdamW."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.recipe = setup
        self.decoder = written_by_hand(setup, same_weights=False)
        self.decoder.runs_again = True

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.decoder(batch["input_ids"], batch["labels"])
        self.log("train/loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip here, as Lightning's `bf16-mixed` refuses to do it for a fused optimizer."""
        torch.nn.utils.clip_grad_norm_(self.parameters(), self.recipe.clip)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(by_dimension(self, self.recipe), fused=True)


def run_stock_by_hand(cli: RecipeCLI, batches: Iterable[Batch], count: int, mark: Mark) -> nn.Module:
    """Stock Lightning with its own bf16-mixed and the model by hand, blocks run again, nothing compiled."""
    trainer: Any = cli.trainer
    stock = pl.Trainer(
        accelerator="gpu" if trainer.strategy.root_device.type == "cuda" else "cpu",
        devices=1,
        max_steps=trainer.max_steps,
        max_epochs=1,
        precision="bf16-mixed",
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        log_every_n_steps=trainer.log_every_n_steps,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        limit_val_batches=0,
        default_root_dir=trainer.default_root_dir,
    )
    module = StockModule(Setup(cli.model, trainer))
    stock.fit(module, train_dataloaders=Meter(batches, count, mark))
    return module.decoder


def run_documents_dense(cli: RecipeCLI, batches: Iterable[Batch], count: int, mark: Mark) -> nn.Module:
    """Ours without the places at which documents begin: attention within them takes a dense mask on a GPU."""
    without = ({name: value for name, value in batch.items() if name != "document_starts"} for batch in batches)
    return run_ours(cli, without, count, mark)


PEERS: dict[str, Callable[[RecipeCLI, Iterable[Batch], int, Mark], nn.Module]] = {
    "hand_whole": functools.partial(run_hand, whole=True),
    "hand_blocks": functools.partial(run_hand, whole=False),
    "litgpt": run_litgpt,
    "stock_hand": run_stock_by_hand,
    "documents_dense": run_documents_dense,
}
