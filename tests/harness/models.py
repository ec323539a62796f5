"""Modules of a user, none of them ours: `Small` for most tests, `Decoding` where blocks and attention matter."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_tricks._trainer.lightning import pl
from lightning_tricks.models import GPT2, Decoder, Llama

SHAPE = {"vocab_size": 61, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 16}
LLAMA = Llama(**SHAPE, n_kv_heads=2)
GPT = GPT2(**SHAPE)

sgd = partial(torch.optim.SGD, lr=0.1)
adamw = partial(torch.optim.AdamW, lr=0.01)


class Wrapper(torch.optim.Optimizer):
    """Wraps another optimizer as its attribute `optimizer`, as Lookahead does."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def rows(number: int, *shape: int, seed: int = 1) -> Tensor:
    """Fixed normal rows, without a draw from the global random state."""
    return torch.randn(number, *shape, generator=torch.Generator().manual_seed(seed))


def batches(of: Any) -> DataLoader:
    """Each item is a batch: of a tensor, each slice of its first axis."""
    return DataLoader(list(of), batch_size=None)


def nothing(module: Any, batch: Any) -> None:
    """What `Small` does before a loss, unless it is told to: a function that can be pickled with it."""


class Small(pl.LightningModule):
    """Linear layers on rows, whose loss is the mean square of the last one's output; subclass for another step.

    It notes `losses` of all micro-batches, `lrs` of the groups at each optimizer step and the steps `validated`.

    Args:
        *widths: of the layers: `4, 8, 1` are two of them, with a tanh between.
        net: a module in place of the layers.
        dropout: before each layer but the first.
        batch_norm: before each tanh.
        tied: the last layer has the weight of the first.
        optimizer: a function of the parameters.
        schedule: a function of the optimizer, for a scheduler that is stepped each step.
        optimizers: of several, stepped by hand, each has a layer, in turns; one may be stepped by hand as well.
        manual: step the optimizers by hand.
        loss: (module, batch) -> loss.
        act: (module, batch), called before the loss of each micro-batch: it may fail, kill or wait.
        logs: log `train/loss` and `val/loss`.
        data: for `train_dataloader`; 64 rows in batches of two otherwise.
        seed: of the first weights.
    """

    def __init__(
        self,
        *widths: int,
        net: nn.Module | None = None,
        dropout: float = 0.0,
        batch_norm: bool = False,
        tied: bool = False,
        optimizer: Callable[..., Any] = sgd,
        schedule: Callable[..., Any] | None = None,
        optimizers: int = 1,
        manual: bool | None = None,
        loss: Callable[..., Any] | None = None,
        act: Callable[..., Any] = nothing,
        logs: bool = False,
        data: Any = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.widths = widths or (4, 1)
        self.net = self._layers(dropout, batch_norm) if net is None else net
        if tied:
            self.net[-1].weight = self.net[0].weight
        self.optimizer, self.schedule, self.number = optimizer, schedule, optimizers
        self.automatic_optimization = not (optimizers > 1 if manual is None else manual)
        self.loss, self.act, self.logs, self.data = loss, act, logs, data
        self.losses: list[float] = []
        self.lrs: list[list[float]] = []
        self.validated: list[int] = []

    def _layers(self, dropout: float, batch_norm: bool) -> nn.Sequential:
        layers: list[nn.Module] = [nn.Linear(*self.widths[:2])]
        for width, after in zip(self.widths[1:], self.widths[2:], strict=False):
            layers += [nn.BatchNorm1d(width)] if batch_norm else []
            layers += [nn.Tanh(), *([nn.Dropout(dropout)] if dropout else []), nn.Linear(width, after)]
        return nn.Sequential(*layers)

    def forward(self, batch: Any) -> Any:
        return self.net(batch)

    def loss_of(self, batch: Any) -> Any:
        return self.loss(self, batch) if self.loss else self(batch).float().square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.act(self, batch)
        loss = self.loss_of(batch)
        self.losses.append(loss.item())
        if self.logs:
            self.log("train/loss", loss)
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        made = self.optimizers()
        for optimizer in made if isinstance(made, list) else [made]:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self.trainer.global_step)
        if self.logs:
            self.log("val/loss", self.loss_of(batch))

    test_step = predict_step = validation_step

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.lrs.append([float(group["lr"]) for group in optimizer.param_groups])

    def configure_optimizers(self) -> Any:
        made = [self.optimizer([p for p in part if p.requires_grad]) for part in self._parts()]
        if self.schedule is None:
            return made[0] if self.number == 1 else made
        return made, [{"scheduler": self.schedule(optimizer), "interval": "step"} for optimizer in made]

    def _parts(self) -> list[list[nn.Parameter]]:
        """The parameters of each optimizer."""
        if self.number == 1:
            return [[*self.parameters()]]
        layers = [own for child in self.net.children() if (own := [*child.parameters()])]
        return [[p for layer in layers[index :: self.number] for p in layer] for index in range(self.number)]

    def train_dataloader(self) -> Any:
        return DataLoader(rows(64, self.widths[0]), batch_size=2) if self.data is None else self.data


class Decoding(pl.LightningModule):
    """A decoder in a module that is not the collection's own; dropout, so that a drawn random number would show.

    The backend "eager" is enough for what depends on the graphs alone; "aot_eager" traces the backward pass as well.
    """

    def __init__(
        self, config: Any = LLAMA, checkpointing: Any = "none", compiled: str = "no", seed: int = 0,
        backend: str = "aot_eager",
    ) -> None:  # fmt: skip
        super().__init__()
        torch.manual_seed(seed)
        self.model = Decoder(config)
        self.dropout = nn.Dropout(0.1)
        self.model.set_activation_checkpointing(checkpointing)
        self.compiled, self.backend = compiled, backend
        for index, block in enumerate(self.model.blocks):
            if compiled == "in_place":
                block.compile(backend=backend)
            elif compiled == "wrapped":
                self.model.blocks[index] = torch.compile(block, backend=backend)
        if compiled == "whole":
            self.model = torch.compile(self.model, backend=backend)

    def on_train_start(self) -> None:
        if self.compiled == "in_place_late":  # after all callbacks' hooks of this name
            for block in self.model.blocks:
                block.compile(backend=self.backend)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.dropout(self.model(batch)).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader:
        return batches(torch.arange(2 * 16 * 16).view(-1, 2, 16) % 61)
