"""The battery of the monitors: situations to play with a callback and without one, and a record of each playing.

`play(situation, make)` fits small models under a Trainer and returns a `Record`; `without(situation)` is the one that a
monitor must not change. See `test_battery.py`.
"""

import collections
import contextlib
import functools
import importlib
import io
import pathlib
import pkgutil
import random
import tempfile
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import torch
from harness.runs import Memory
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from portrait import Reads, is_users, portrait, process
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_tricks._trainer.loop import logging_step

Make = Callable[[], pl.Callback | list[pl.Callback] | None]
LOG_EVERY = 3  # steps; an epoch has as many


def monitors_in(package: Any) -> dict[str, type[pl.Callback]]:
    """Every public callback class that is defined in a module of `package`, however deep, by its name."""
    infos = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    public = [info.name for info in infos if not info.name.rpartition(".")[2].startswith("_")]
    modules = [importlib.import_module(name) for name in public]
    found = [value for module in modules for value in vars(module).values() if _is_callback_of(module, value)]
    return {cls.__name__: cls for cls in sorted(found, key=lambda cls: cls.__name__)}


def _is_callback_of(module: Any, value: Any) -> bool:
    own = isinstance(value, type) and value.__module__ == module.__name__ and not value.__name__.startswith("_")
    return own and issubclass(value, pl.Callback)


# ---------------------------------------------------------------------------------------------------------- the models


class Planned(Exception):  # noqa: N818
    """The failure that a situation wants."""


class Block(nn.Module):
    """A residual layer with dropout, so that a random number drawn elsewhere would show; knows its largest logit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.linear(x).tanh())

    def max_attention_logit(self, x: Tensor) -> Tensor:
        return self.linear(x).amax()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 32)
        self.recomputes, self.rounds = False, 1

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in [*self.blocks] * self.rounds:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(x)


def decreasing(step: int) -> float:
    return 1 / (1 + step)


class Model(pl.LightningModule):
    """A small language model with a schedule, a validation and predictions. Keeps the losses of all micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net()
        self.losses: list[Tensor] = []

    def forward(self, ids: Tensor) -> Tensor:
        return self.net(ids)

    def loss(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.detach().clone())
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log_dict(dict.fromkeys(("val/loss", "val/bits_per_byte"), self.loss(batch)))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).argmax(-1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, decreasing)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class ClipsItself(Model):
    """Clips in a hook, and has work that depends on a value."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if loss.item() > 1e-3 else loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.5)


class Adversaries(Model):
    """Two networks and two optimizers by hand, as a GAN has them; clips by norm and by value."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(32, 4), nn.Linear(4, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for index, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            loss = (-1) ** index * self.critic(self(batch)).tanh().mean()
            self.losses.append(loss.detach().clone())
            self.log("train/loss", loss)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.1, "value" if index else "norm")
            self.untoggle_optimizer(optimizer)
            self.between_clip_and_step()
            optimizer.step()

    def between_clip_and_step(self) -> None:
        pass

    def configure_optimizers(self) -> Any:
        parts = (self.net, self.critic)
        return [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in parts]


class CountsGraphs(Model):
    """For compiling, with the compiler's `backend`: a watcher must cause no graph more."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs = 0

    def backend(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


class LogsOutside(CountsGraphs):
    """For compiling as a whole: torch cannot compile Lightning's `self.log`, which stands outside of the step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.log("train/loss", outputs["loss"])


class Fails(ClipsItself):
    """Fails at another place in each fit, then no more."""

    def __init__(self) -> None:
        super().__init__()
        self.places = ["in the first step", "in a window", "in the clip"]

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 0:
            self.fail("in the first step")
        if batch_idx == 3:  # the second of two micro-batches
            self.fail("in a window")
        return loss

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(*args, **kwargs)
        if logging_step(self.trainer) == 1:
            self.fail("in the clip")

    def fail(self, place: str) -> None:
        if self.places and self.places[0] == place:
            self.places.pop(0)
            raise Planned(place)


class FailsByHand(Adversaries):
    """Fails between the clip and the step of the second optimizer, once."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 4  # times until the failure

    def between_clip_and_step(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Planned


class Tokenizer:
    eos_token_id = 0

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 32 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


class Data(pl.LightningDataModule):
    """Rows of 9 tokens in random order, with all that any monitor asks of a data module."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self.batches, self.tokenizer = batches, Tokenizer()

    def train_dataloader(self) -> DataLoader:
        ids = torch.arange(self.batches * 2 * 9).view(-1, 2, 9) * 7 % 32
        return DataLoader(list(ids), batch_size=None, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader([torch.arange(18).view(2, 9)], batch_size=None)

    predict_dataloader = val_dataloader

    def validation_text(self) -> bytes:
        return b"a text that is short"

    training_text = validation_text


class ScalesAndMultipliesInFp8(MixedPrecision):
    """A plugin of the user's with a loss scale, and with layers that it says are in fp8."""

    converted_share = 0.5

    def __init__(self) -> None:
        super().__init__("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2))

    def convert_module(self, module: nn.Module) -> nn.Module:
        self.fp8_layers = {name: part for name, part in module.named_modules() if type(part) is nn.Linear}
        return module


class NoGradThatClears(torch.autograd.no_grad):
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.clear_autocast_cache()


class CastsOnce(MixedPrecision):
    """`bf16-mixed` as of the release after Lightning 2.6.

    A weight is cast once in a step, and `torch.no_grad` is replaced in it by one that forgets the weights that were
    cast (https://github.com/Lightning-AI/pytorch-lightning/pull/21616).
    """

    def __init__(self) -> None:
        super().__init__("bf16-mixed", "cpu")

    @contextlib.contextmanager
    def forward_context(self) -> Any:
        with torch.autocast("cpu", torch.bfloat16), mock.patch.object(torch, "no_grad", NoGradThatClears):
            yield


# ---------------------------------------------------------------------------------------------------------- the record


class Record:
    """All that a situation left behind.

    Attributes:
        seen: of each fit the weights, optimizers, random states, objects, process and reads of tensors, one entry for
            each part; the same with a monitor and without it.
        logged: of each fit the rows (step, values) that only the callback logged.
        evidence: names that were logged, printed lines, written files and running threads.
    """

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}
        self.logged: list[list[tuple[int, dict[str, float]]]] = []
        self.evidence: set[str] = set()

    def differences(self, other: "Record") -> dict[str, tuple[Any, Any]]:
        """The entries in which two records of one situation differ, as (own, other's)."""
        names = dict.fromkeys([*self.seen, *other.seen])
        pairs = {name: (self.seen.get(name, "absent"), other.seen.get(name, "absent")) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


class Trial:
    """One playing of a situation: makes Trainers with the callback under test, fits, and keeps the record."""

    def __init__(self, make: Make, fresh: bool) -> None:
        self.record, self._number = Record(), 0
        self._make = make if fresh else functools.cache(make)

    def trainer(self, **options: Any) -> pl.Trainer:
        made, self._reads, self._memory = self._make(), Reads(LOG_EVERY), Memory()
        monitors = made if isinstance(made, list) else [] if made is None else [made]
        first, last = self._reads.callbacks
        defaults = {
            "max_epochs": 2, "log_every_n_steps": LOG_EVERY, "num_sanity_val_steps": 0, "accelerator": "cpu",
            "devices": 1, "check_val_every_n_epoch": 2, "enable_checkpointing": False, "enable_model_summary": False,
            "enable_progress_bar": any(isinstance(monitor, ProgressBar) for monitor in monitors),
            "logger": [self._memory, TensorBoardLogger("logs", name="run", version=f"{self._number}")],
            "callbacks": [first, *monitors, last],
        }  # fmt: skip
        return pl.Trainer(**{**defaults, **options})

    def fit(self, module: Any, trainer: Any = None, data: Any = None, **options: Any) -> pl.Trainer:
        """Fit, with the Trainer that is given or a new one with `options`, and note what came of it."""
        trainer = trainer or self.trainer(**options)
        data = data or Data(LOG_EVERY * trainer.accumulate_grad_batches)
        self.run(lambda: trainer.fit(module, data), trainer, module)
        return trainer

    def run(self, stage: Callable[[], Any], trainer: Any, module: Any) -> None:
        """Run one stage of a Trainer, such as `fit` or `validate`, and note what came of it."""
        self._number += 1
        self._memory.rows, failure, printed, before = [], None, io.StringIO(), process(self._reads.others)
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                stage()
            except Planned as error:
                failure = repr(error)
        self._reads.stop()
        self.note("failure", failure)
        self.note("reads between log steps", dict(self._reads.found))
        for name, value in process(self._reads.others).items():
            if value != before[name]:
                self.note(f"change of {name}", value)
        leave_out = [each for each in trainer.callbacks if each not in self._reads.callbacks]
        roots = {f"weight {name}": weight for name, weight in module.named_parameters()}
        roots |= {f"optimizer {index}": optimizer for index, optimizer in enumerate(trainer.optimizers)}
        for name, value in portrait({**roots, "module": module, "trainer": trainer}, leave_out).items():
            self.note(name, value)
        self._note_rows()
        files = {f"file {path}" for path in pathlib.Path().rglob("*") if "tfevents" not in path.name}
        lines = {f"printed {line}" for line in printed.getvalue().splitlines()}
        self.record.evidence |= files | lines | {f"thread {name}" for name in self._reads.threads}

    def note(self, name: str, value: Any) -> None:
        """Add an entry to the record."""
        self.record.seen[f"{name} of fit {self._number}"] = value

    def _note_rows(self) -> None:
        rows = self._memory.rows
        users, others = (
            [(step, {name: value for name, value in values.items() if is_users(name) is own}) for step, values in rows]
            for own in (True, False)
        )
        self.note("rows of the user's metrics", [row for row in users if row[1]])
        self.record.logged.append([row for row in others if row[1]])
        self.record.evidence |= {f"logged {name}" for _, values in others for name in values}


# ------------------------------------------------------------------------------------------------------ the situations


def clips_by_norm(trial: Trial) -> None:
    """Two fits with one Trainer, each of an epoch, and its other stages."""
    module = Model()
    options = {"max_epochs": 1, "num_sanity_val_steps": 1, "check_val_every_n_epoch": 1}
    trainer = trial.fit(module, gradient_clip_val=0.5, **options)
    trainer.fit_loop.max_epochs += 1
    trial.fit(module, trainer)
    for stage in (trainer.validate, trainer.predict):
        trial.run(lambda stage=stage: stage(module, Data(LOG_EVERY)), trainer, module)


def module_clips_itself(trial: Trial) -> None:
    trial.fit(ClipsItself(), gradient_clip_val=1.0)


def two_optimizers_by_hand(trial: Trial) -> None:
    trial.fit(Adversaries())


def accumulates_with_a_short_last_window(trial: Trial) -> None:
    trial.fit(Model(), data=Data(2 * LOG_EVERY - 1), accumulate_grad_batches=2, gradient_clip_val=0.5)


def clips_by_value(trial: Trial) -> None:
    trial.fit(Model(), gradient_clip_val=0.01, gradient_clip_algorithm="value")


def _counting(calls: Any, name: str, known: Callable[..., Any]) -> Callable[..., Any]:
    def mine(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return None if name == "save_checkpoint" else known(*args, **kwargs)

    return mine


def _own_methods(trial: Trial, module: Any, **options: Any) -> None:
    """The user has put methods on the objects; they are called, and stand there afterwards."""
    trainer, calls = trial.trainer(**options), collections.Counter()
    own = []
    for owner, names in (
        (module, ["configure_gradient_clipping", "clip_gradients", "on_before_optimizer_step", "backward"]),
        (trainer.precision_plugin, ["clip_gradients", "clip_grad_by_norm", "clip_grad_by_value", "optimizer_step"]),
        (trainer.strategy, ["training_step", "backward", "optimizer_step"]),
        (trainer, ["save_checkpoint"]),
        (trainer.logger, ["save"]),
    ):
        for name in names:
            mine = _counting(calls, name, getattr(owner, name))
            setattr(owner, name, mine)
            own.append((owner, name, mine))
    module.on_train_epoch_end = lambda: trainer.save_checkpoint("nowhere.ckpt")
    trial.fit(module, trainer)
    # a monitor makes the loggers write more often, and may clip through the user's method or through its own
    trial.note("calls of the user's methods", {name: count for name, count in calls.items() if name != "save"})
    replaced = [f"{type(owner).__name__}.{name}" for owner, name, mine in own if vars(owner).get(name) is not mine]
    trial.note("the user's methods that are gone", replaced)


def own_methods(trial: Trial) -> None:
    _own_methods(trial, ClipsItself(), gradient_clip_val=0.5)


def own_methods_by_hand(trial: Trial) -> None:
    _own_methods(trial, Adversaries())


def clips_in_bf16(trial: Trial) -> None:
    """Lightning's clip scales by a norm that is rounded to bf16, while the monitors record it in fp32."""
    trial.fit(Model(), precision="bf16-true", gradient_clip_val=0.5)


def recomputes_in_bf16(trial: Trial) -> None:
    module = Model()
    module.net.recomputes = True
    trial.fit(module, precision="bf16-mixed", gradient_clip_val=0.5)


def runs_blocks_twice_in_bf16(trial: Trial) -> None:
    """The gradients of a block's weight are added up in bf16 if both runs share one cast, else in fp32."""
    module = Model()
    module.net.rounds = 2
    trial.fit(module, plugins=[CastsOnce()], gradient_clip_val=0.5)


def never_logs(trial: Trial) -> None:
    trial.fit(Model(), log_every_n_steps=0, gradient_clip_val=0.5)


def compiled_blocks(trial: Trial) -> None:
    torch._dynamo.reset()
    module = CountsGraphs()
    module.net.blocks[0].compile(backend=module.backend)
    module.net.blocks[1] = torch.compile(module.net.blocks[1], backend=module.backend)
    trial.fit(module, gradient_clip_val=0.5, limit_val_batches=0)


def compiled_network(trial: Trial) -> None:
    torch._dynamo.reset()
    module = CountsGraphs()
    module.net = torch.compile(module.net, backend=module.backend)
    trial.fit(module, gradient_clip_val=0.5, limit_val_batches=0)


def compiled_module(trial: Trial) -> None:
    torch._dynamo.reset()
    module = LogsOutside()
    trial.fit(torch.compile(module, backend=module.backend), gradient_clip_val=0.5, limit_val_batches=0)


def scales_the_loss(trial: Trial) -> None:
    trial.fit(Model(), gradient_clip_val=0.5, plugins=[ScalesAndMultipliesInFp8()])


def fails_and_fits_again(trial: Trial) -> None:
    module = Fails()
    for _ in range(len(module.places) + 1):
        trial.fit(module, max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=0.5)


def fails_by_hand_and_fits_again(trial: Trial) -> None:
    module = FailsByHand()
    trial.fit(module, max_epochs=1)
    trial.fit(module, max_epochs=1)


def fits_three_times(trial: Trial) -> None:
    module = Model()
    trainer = trial.fit(module, max_epochs=1, check_val_every_n_epoch=1)
    trainer.fit_loop.max_epochs += 1
    trial.fit(module, trainer)
    trial.fit(module, max_epochs=1, check_val_every_n_epoch=1)


def two_processes(trial: Trial) -> None:
    data = Data(2 * 2 * LOG_EVERY)  # two ranks of two micro-batches a step
    trial.fit(Model(), data=data, strategy="ddp", devices=2, accumulate_grad_batches=2, gradient_clip_val=0.5)


# With each monitor alone. Of several that replace one method, the first may put back what the second leaves behind; and
# MFUMonitor brings the first step of a fit to the host at once, with the values of all others.
ALONE = [clips_by_norm, own_methods, fails_and_fits_again]
# With all monitors at once; with each alone only where these are seen to change something.
TOGETHER = [
    module_clips_itself, two_optimizers_by_hand, accumulates_with_a_short_last_window, clips_by_value,
    own_methods_by_hand, clips_in_bf16, recomputes_in_bf16, runs_blocks_twice_in_bf16, never_logs, compiled_blocks,
    compiled_network, compiled_module, scales_the_loss, fails_by_hand_and_fits_again,
]  # fmt: skip
SEVERAL_FITS = [fails_and_fits_again, fails_by_hand_and_fits_again, fits_three_times]


def groups_of(cases: dict[str, Make]) -> list[dict[str, Make]]:
    """The cases in groups, as large as a Trainer allows: it takes one callback of each class."""
    groups: list[dict[str, Make]] = []
    number_of: collections.Counter[type] = collections.Counter()
    for name, make in cases.items():
        number = number_of[type(make())]
        number_of[type(make())] += 1
        groups += [{}] if number == len(groups) else []
        groups[number][name] = make
    return groups


def all_of(group: dict[str, Make]) -> Make:
    """Makes all callbacks of a group."""
    return lambda: [make() for make in group.values()]


def differences_of(
    situation: Callable[[Trial], None], group: dict[str, Make], played: Record | None = None
) -> dict[str, Any]:
    """How the callbacks of a group change a situation: of each alone, or of all where none does it alone.

    `played` is the record of all, if the situation was played with them before.
    """
    plain = without(situation)
    together = plain.differences(played or play(situation, all_of(group)))
    if not together:
        return {}
    alone = {name: without(situation).differences(play(situation, make)) for name, make in group.items()}
    return {name: differences for name, differences in alone.items() if differences} or {" and ".join(group): together}


def play(situation: Callable[[Trial], None], make: Make = lambda: None, fresh: bool = False) -> Record:
    """Play a situation in a folder of its own.

    Args:
        situation: one of the above.
        make: makes the callback under test; None without one.
        fresh: each Trainer gets a callback of its own, in place of one for all fits.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        trial = Trial(make, fresh)
        situation(trial)
        return trial.record


@functools.cache
def without(situation: Callable[[Trial], None]) -> Record:
    """Play a situation without a callback; for the second time, as torch changes some of its classes at the first.

    To be called before a callback plays, or that one's record has the changes.
    """
    play(situation)
    return play(situation)


def changes_in_two_processes(rank: int, groups: list[dict[str, Make]]) -> dict[str, str]:
    """What each group changes on this rank; empty where it changes nothing."""
    plain = without(two_processes)
    return {" and ".join(group): str(plain.differences(play(two_processes, all_of(group))) or "") for group in groups}
