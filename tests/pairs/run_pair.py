"""One row of settings as a small run that is killed and goes on: the differences from the run that nobody killed.

The model has what conditions meet in: running statistics, dropout, an embedding, hidden matrices, a head, biases. Its
loss is NaN in one step where a guard must skip it, and far too high in two steps.
"""

import logging
import math
import os
import re
import shutil
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import schedulefree
import torch
from harness.runs import trainer_with, whole
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_tricks import (
    EMA,
    BatchSizeWarmup,
    BF16True,
    ExactResume,
    FP16Mixed,
    FSDP2Strategy,
    GradientClippingMixin,
    GradNormMonitor,
    Llama,
    MFUMonitor,
    MixtureData,
    MixtureSource,
    MuonAdamW,
    OptimizerMixin,
    ParallelDims,
    ParamRule,
    Preemption,
    RunLedger,
    SafeCheckpoint,
    ScheduleFree,
    SpikeRollback,
    StepGuard,
    TailAverage,
    TokenData,
    TokenMeanMixin,
    TotalTokens,
    WarmupConstant,
    WarmupStableDecay,
)
from lightning_tricks._core.random_state import gather
from lightning_tricks._trainer.run_facts import data_rank
from lightning_tricks.checkpoints import AtomicCheckpointIO
from lightning_tricks.guards.preemption import Preempted
from lightning_tricks.logs.ledger_diff import compare
from lightning_tricks.logs.ledger_file import read_ledger
from lightning_tricks.metrics.metric_buffer import MetricBuffer
from lightning_tricks.metrics.step_loss import LOSS
from lightning_tricks.models.decoder import Head
from lightning_tricks.models.moe import Mixture

ROWS, LENGTH, STEPS = 4, 8, 10
NOT_FINITE, TOO_HIGH = 2, (5, 6)  # steps
COPY_EVERY = 2  # steps between the copies of SpikeRollback
# and between saves, by the step of the kill: in the spike, what a lost copy held must be in a checkpoint as well
SAVE_EVERY = {3: 2, 6: COPY_EVERY, 8: 4}


class Layout(NamedTuple):
    """A mesh of one or two processes.

    Attributes:
        dims: its sizes.
        experts: the model has a mixture of experts.
        seed: of the rows of two processes, of which there are at most 15.
        refused: levels of other factors.
    """

    dims: ParallelDims
    experts: bool = False
    seed: int = 1
    refused: tuple[tuple[str, Any], ...] = ()


LAYOUTS = {
    "one process": Layout(ParallelDims().of_world(1)),
    "two shards": Layout(ParallelDims().of_world(2), seed=3),
    "two expert ranks": Layout(ParallelDims(expert=2).of_world(2), experts=True, seed=7),
    "two tensor ranks": Layout(ParallelDims(tensor=2).of_world(2), seed=4),
    "two stages": Layout(ParallelDims(pipeline=2).of_world(2), seed=9, refused=(("precision", "FP16Mixed"),)),
}
EXPERTS = Llama(
    vocab_size=64, d_model=16, n_layers=2, n_heads=2, max_seq_len=LENGTH,
    n_experts=4, experts_per_token=2, d_expert=16, balance="none", router_z_weight=0.01,
)  # fmt: skip
MICRO_BATCHES = 2  # of the rows of a micro-batch, which stages compute one after the other


class EmbeddingNorm(nn.Linear):
    """A hidden matrix, whatever its class is called."""


class Model(GradientClippingMixin, TokenMeanMixin, OptimizerMixin, pl.LightningModule):
    """A next-token model of a user, with a convolution and BatchNorm.

    Args:
        tokens: that count. `all`: it returns the mean loss of its rows. `ragged`: the mean of the labels that count is
            TokenMeanMixin's; `none on one rank`: of a third of the steps, the last rank has none.
        parts: of a micro-batch, each with running statistics and dropout of its own, as stages compute them. What the
            second stage drops is not what one process would: the first block alone drops.
        experts: it has a mixture of them.
    """

    def __init__(self, dropout: float, poisoned: bool, tokens: str, parts: int, experts: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.poisoned, self.tokens, self.parts = poisoned, tokens, parts
        self.sums: list[tuple[int, float, float]] = []  # of each micro-batch: step, sum of the losses, their number
        self.embedding = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                EmbeddingNorm(16, 32, bias=False),
                nn.BatchNorm1d(LENGTH),
                nn.ReLU(),
                nn.Dropout(dropout if first else 0.0),
                nn.Linear(32, 16, bias=False),
            )
            for first in (True, False)
        )
        self.convolution, self.norm = nn.Conv1d(16, 16, 3, padding=1), nn.LayerNorm(16)
        self.mixture = Mixture(EXPERTS, None) if experts else None
        for weight in self.mixture.parameters() if self.mixture else ():
            nn.init.normal_(weight, std=0.2)
        self.lm_head = Head(16, 64, softcap=4.0)
        self.lm_head.z_loss = 0.01
        self.losses: list[tuple[int, float]] = []
        self.validated: list[tuple[int, float]] = []
        self.learning_rates: list[tuple[int, list[float]]] = []

    def parallel_plan(self) -> dict[str, str]:
        # between the matrices each rank has whole activations, as BatchNorm, Dropout and the convolution need
        divided = dict.fromkeys(("blocks.*.0", "blocks.*.4"), "colwise_gather_output")
        return {**divided, "embedding": "embedding_rowwise", "lm_head": "vocabulary"}

    def pipeline_plan(self) -> dict[str, str]:
        return {"embedding": "first", "convolution": "last", "norm": "last", "lm_head": "last"}

    def stage(self, x: Any, blocks: Any, *, last: bool, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embedding(ids) if x is None else x
        for block in blocks:
            hidden = hidden + block(hidden)
        if not last:
            return hidden
        hidden, of_experts = self.convolution(hidden.mT).mT, 0.0
        if self.mixture is not None:
            out, of_experts, _ = self.mixture(hidden)
            hidden = hidden + out
        return self.lm_head(self.norm(hidden), labels) + of_experts

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        parts = zip(ids.chunk(self.parts), labels.chunk(self.parts), strict=True)
        return torch.stack([self.stage(None, self.blocks, last=True, ids=a, labels=b) for a, b in parts]).sum()

    def _nats(self, batch: Any, step: int | None = None) -> tuple[Tensor, Tensor, int]:
        """Summed loss and number of the labels that count, all of them without a step; and of all labels."""
        ids, labels = (batch["input_ids"], batch["labels"]) if isinstance(batch, dict) else batch.unbind(1)
        last = self.trainer.strategy.dims.data_ranks - 1 if self.trainer.world_size > 1 else 0
        kept = (labels % 3 > 0) & (labels >= 0) if step is not None else torch.ones_like(labels, dtype=torch.bool)
        if step is not None and step % 3 == 1 and self.tokens == "none on one rank":
            kept = kept & (data_rank(self.trainer)[0] != last)
        return self(ids, labels.masked_fill(~kept, -100)), kept.sum(), labels.numel()

    def _loss(self, batch: Any) -> Tensor:
        nats, _, count = self._nats(batch)
        return nats / count

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        step = self.trainer.global_step
        factor = 30.0 if step in TOO_HIGH else 1.0
        factor = float("nan") if step == NOT_FINITE and self.poisoned else factor
        if self.tokens == "all":
            loss = self._loss(batch) * factor
            rows = len(batch["labels"] if isinstance(batch, dict) else batch)
            self.sums.append((step, loss.item() * rows, rows))
        else:
            nats, counted, capacity = self._nats(batch, step)
            loss = self.token_mean(nats * factor, counted, capacity)
            self.sums.append((step, nats.item() * factor, counted.item()))
        self.losses.append((step, loss.item()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self._loss(batch)
        self.validated.append((self.trainer.global_step, loss.item()))
        self.log("val/loss", loss, sync_dist=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.learning_rates.append((self.trainer.global_step, [float(group["lr"]) for group in optimizer.param_groups]))


class Poison(pl.Callback):
    """Has the running statistics of one step be NaN, as activations that are not finite leave them."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == NOT_FINITE and pl_module.poisoned and "0" in dict(pl_module.blocks.named_children()):
            block = pl_module.blocks[0]
            self._hook = block[1].register_forward_pre_hook(lambda _, args: (args[0] * float("nan"),))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if hook := self.__dict__.pop("_hook", None):
            hook.remove()


class Kill(pl.Callback):
    """Keep what a kill after `step` steps would leave on the disk; or ask the run to stop there, by SIGTERM."""

    def __init__(self, step: int, folder: Path, kept: Path | None) -> None:
        self.step, self.folder, self.kept = step, folder, kept

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        # several processes agree on a signal one step later
        early = trainer.world_size - 1 if self.kept is None else 0
        if trainer.global_step != self.step - early:
            return
        trainer.strategy.barrier()
        if self.kept is None and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.kept is not None and trainer.is_global_zero and not self.kept.exists():
            shutil.copytree(self.folder, self.kept, symlinks=True)
        trainer.strategy.barrier()


class LossesByHand(pl.Callback):
    """What `StepLoss` has for each step, beside the value from the sums that each rank's module has noted."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.read: dict[int, float] = {}
        buffer = MetricBuffer.of(trainer)
        buffer.step_loss()
        buffer.at_flush(self._keep)

    def _keep(self, rows: list[Any]) -> dict[str, float]:
        self.read |= {row.step: row.values[LOSS] for row in rows if LOSS in row.values}
        return {}

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.by_hand: dict[int, float] = {}
        everyones = gather(pl_module.sums)
        for step in sorted({step for step, _, _ in everyones[0]}):
            own = [part for ranks in everyones for part in ranks if part[0] == step]
            if count := sum(number for _, _, number in own):
                self.by_hand[step] = sum(total for _, total, _ in own) / count

    def differences(self) -> list[str]:
        """fp32 rounds each of a handful of numbers, and so does the division by the number of micro-batches."""
        steps = self.read.keys() & self.by_hand.keys()
        if missing := self.by_hand.keys() - steps:
            return [f"loss: none at steps {sorted(missing)}"]
        return [
            f"loss of step {step}: {self.read[step]} and by hand {self.by_hand[step]}"
            for step in sorted(steps)
            if not math.isclose(self.read[step], self.by_hand[step], rel_tol=1e-5)
            and not (math.isnan(self.read[step]) and math.isnan(self.by_hand[step]))
        ]


class Ends(pl.Callback):
    """The step and the weights with which a run begins, and the random state with which it ends."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.first_step, self.first_weights = trainer.global_step, whole_state(pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.random = torch.get_rng_state()


def optimizer_of(row: dict[str, Any]) -> Any:
    if row["ScheduleFree"]:
        if row["optimizer"] == "MuonAdamW":
            return lambda groups: MuonAdamW(groups, lr=5e-3)
        if row["optimizer"] == "SGD":
            return lambda groups: schedulefree.SGDScheduleFree(groups, lr=0.1)
        return lambda groups: schedulefree.AdamWScheduleFree(groups, lr=5e-3)
    return {
        "AdamW": lambda groups: torch.optim.AdamW(groups, lr=5e-3, fused=True),
        "MuonAdamW": lambda groups: MuonAdamW(
            groups, lr=5e-3, cautious_weight_decay=True, coefficients="polar_express", normuon_beta2=0.9
        ),
        "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    }[row["optimizer"]]


def callbacks_of(row: dict[str, Any], folder: Path) -> list[pl.Callback]:
    micro_batch_tokens, ranks = ROWS * LENGTH, LAYOUTS[row["layout"]].dims.data_ranks
    smaller = {"start": ranks, "double_every": 3}
    step_tokens = row["accumulation"] * ranks * micro_batch_tokens
    warm_up = 3 * micro_batch_tokens * ranks if row["BatchSizeWarmup"] and row["accumulation"] == 2 else 0
    makers = {
        "StepGuard": lambda: StepGuard(),
        "SpikeRollback": lambda: SpikeRollback(
            patience_steps=2, window_steps=4, snapshot_every_n_steps=COPY_EVERY, keep_snapshots=2
        ),
        "EMA": lambda: EMA(decay=0.5, blend=0.6 if row["accumulation"] == 2 else 1.0),
        "TailAverage": lambda: TailAverage(horizon_steps=4, validate=False),
        "ScheduleFree": ScheduleFree,
        "BatchSizeWarmup": lambda: BatchSizeWarmup(**smaller),
        "TotalTokens": lambda: TotalTokens(
            STEPS * step_tokens - warm_up, micro_batch_tokens if row["ExactResume"] else None
        ),
        "ExactResume": ExactResume,
        "Preemption": Preemption,
        "RunLedger": lambda: RunLedger(str(folder / "ledger.jsonl"), cover_weights_in_steps=2),
        "MFUMonitor": lambda: MFUMonitor(peak_flops=1e12),  # else each process measures that of its CPU
        "GradNormMonitor": GradNormMonitor,
    }
    saving = {"dirpath": folder / "checkpoints", "every_n_train_steps": SAVE_EVERY[row["killed"]]}
    saver = (
        SafeCheckpoint(**saving, keep_last=3)
        if row["SafeCheckpoint"]
        else pl.callbacks.ModelCheckpoint(**saving, filename="{step}", save_top_k=-1, save_last="link")
    )
    ours = [make() for name, make in makers.items() if row[name]]
    return [*ours, saver, Poison(), LossesByHand(), Ends()]


def data_of(row: dict[str, Any], tokens: Path, as_ranks: bool) -> dict[str, Any]:
    """Batches that know their position; or, for ExactResume, a loader that does not.

    With `as_ranks` the loader has the order which Lightning gives to ranks that all have the same rows.
    """
    if not row["ExactResume"]:
        options = {"train": str(tokens / "train.bin"), "val": str(tokens / "val.bin"), "vocab_size": 64}
        options |= {"eot_id": 0, "cache_dir": str(tokens / "cache")}
        sizes = {"seq_len": LENGTH, "micro_batch_size": ROWS}
        if row["rows"] != "mixture":
            return {"datamodule": TokenData(**options, packing=row["rows"], **sizes)}
        kinds: dict[str, dict[str, Any]] = {
            "cut": {}, "best_fit": {"packing": "best_fit"}, "documents": {"shuffle": "documents"},
        }  # fmt: skip
        sources = [MixtureSource(TokenData(**options, **kind), 1.0 + (not kind), name) for name, kind in kinds.items()]
        return {"datamodule": MixtureData(sources, **sizes)}
    generator = torch.Generator().manual_seed(5)
    # an epoch of 16 micro-batches, or of 15: the last window of two is short
    ranks = 1 if as_ranks else LAYOUTS[row["layout"]].dims.data_ranks
    batches = 15 if row["windows"] == "short last one" else 16
    ids = torch.randint(0, 64, (batches * ROWS * ranks, 2, LENGTH), generator=generator)
    order: Any = {"sampler": DistributedSampler(ids, 1, 0)} if as_ranks else {"shuffle": True}
    return {
        "train_dataloaders": DataLoader(ids, batch_size=ROWS, **order),
        "val_dataloaders": DataLoader(ids[:ROWS], batch_size=ROWS),
    }


def fit(
    row: dict[str, Any],
    folder: Path,
    tokens: Path,
    kill: Kill | None = None,
    resume: Any = None,
    as_ranks: bool = False,
    in_parts: bool = False,
) -> Any:
    """One run of the row in `folder`; module, Trainer and the exception that ended it.

    One process computes `as_ranks` what ranks with the same rows do, and `in_parts` what stages do.
    """
    rank = int(os.environ.get("RANK", 0))
    torch.manual_seed(7 + 100 * rank)  # a user's program may seed each process by itself
    schedule = (
        WarmupConstant(warmup_steps=2) if row["ScheduleFree"] else WarmupStableDecay(warmup_steps=2, decay_fraction=0.2)
    )
    remembers = row["SafeCheckpoint"] or row["ExactResume"]  # the random state
    layout = LAYOUTS[row["layout"]]
    parts = MICRO_BATCHES if in_parts else 1
    options = {"tokens": row["tokens"], "parts": parts, "experts": layout.experts, "schedule": schedule}
    options["freeze"] = list(map(re.escape, FROZEN)) if row["freeze"] else None
    options["param_rules"] = [EMBEDDING_RULE] if row["optimizer"] != "SGD" else None
    model = Model(0.1 if remembers else 0.0, row["StepGuard"], **options, optimizer=optimizer_of(row))
    plugins: list[Any] = {"fp32": [], "BF16True": [BF16True()], "FP16Mixed": [FP16Mixed(init_scale=1024.0)]}[
        row["precision"]
    ]
    if not row["SafeCheckpoint"] and row["layout"] == "one process":
        plugins = [*plugins, AtomicCheckpointIO()]
    length = {"max_epochs": -1} if row["TotalTokens"] else {"max_steps": STEPS, "max_epochs": -1}
    strategy: dict[str, Any] = {"devices": layout.dims.world}
    if layout.dims.world > 1:
        strategy["strategy"] = FSDP2Strategy(mesh=layout.dims, pipeline_micro_batches=MICRO_BATCHES)
    trainer = trainer_with(
        *callbacks_of(row, folder), *([kill] if kill else []), default_root_dir=folder, log_every_n_steps=1,
        gradient_clip_val=1.0, accumulate_grad_batches=row["accumulation"], plugins=plugins, limit_val_batches=1,
        val_check_interval=4 * row["accumulation"], check_val_every_n_epoch=None, num_sanity_val_steps=0,
        **{"max_steps": -1, **length}, **strategy,
    )  # fmt: skip
    model.built_with = whole_state(model)
    try:
        trainer.fit(model, **data_of(row, tokens, as_ranks), ckpt_path=resume)
    except Preempted as stopped:
        return model, trainer, stopped.with_traceback(None)
    return model, trainer, None


def newest(folder: Path) -> Path:
    """The newest checkpoint in a run's folder."""
    found = [path for path in (folder / "checkpoints").glob("*.ckpt") if not path.is_symlink()]
    return max(found, key=lambda path: int(path.stem.rpartition("=")[2]))


def whole_state(module: Any) -> dict[str, Tensor]:
    """Parameters and buffers, those in shards as a whole; every rank must call."""
    return {name: whole(value) for name, value in module.state_dict().items()}


MATRICES = [f"blocks.{block}.{layer}.weight" for block in range(2) for layer in (0, 4)] + ["convolution.weight"]
MATRICES += [f"mixture.experts.{name}" for name in ("gate", "up", "down")]
FROZEN = ["embedding.weight", "blocks.1.4.weight"]
EMBEDDING_RULE = ParamRule(role="embedding", betas=(0.9, 0.99), eps=1e-6)
DECAYING = [*MATRICES, "embedding.weight", "lm_head.weight", "mixture.router.weight"]


def groups_of(optimizer: Any) -> dict[str, Any]:
    """Group and decay of each parameter, by its name."""
    groups = optimizer.param_groups
    return {name: (group["name"], group["weight_decay"]) for group in groups for name in group["param_names"]}


def groups_by_hand(names: Any, optimizer: str) -> dict[str, Any]:
    """The same, from a list of the hidden matrices and of what decays."""
    prefix = dict.fromkeys(names, "")
    if optimizer == "MuonAdamW":
        prefix = {name: "muon:" if name in MATRICES else "adamw:" for name in names}
    decays = {name: ("decay", 0.1) if name in DECAYING else ("no_decay", 0.0) for name in names}
    if optimizer != "SGD":
        decays["embedding.weight"] = (f"decay:{EMBEDDING_RULE.label}", 0.1)
    return {name: (prefix[name] + decays[name][0], decays[name][1]) for name in names}


def ends_of(trainer: Any) -> Any:
    return next(one for one in trainer.callbacks if isinstance(one, Ends))


def state_of(model: Any, trainer: Any) -> dict[str, Any]:
    """What two equal runs have in common at their end."""

    def counts(name: str) -> bool:
        # a checkpoint has the running statistics of the first data rank
        return data_rank(trainer)[0] == 0 or "running" not in name

    optimizer = trainer.optimizers[0].state_dict()
    weights = {name: value for name, value in whole_state(model).items() if counts(name)}
    averages = {
        f"{type(one).__name__}.{kind}.{names[0]}": term.clone()
        for one in trainer.callbacks if isinstance(one, EMA | TailAverage)
        for kind, terms in one.terms.items() for names, term in zip(one.weights.names, terms, strict=True)
        if counts(names[0])
    }  # fmt: skip
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer["param_groups"]]
    state = {"weights": weights, "optimizer": optimizer["state"], "groups": groups, "averages": averages,
             "step": trainer.global_step}  # fmt: skip
    if any(isinstance(one, ExactResume | SafeCheckpoint) for one in trainer.callbacks):
        state["random state"] = ends_of(trainer).random
    return state


def different(path: str, one: Any, other: Any) -> list[str]:
    """Where two nested states differ in a bit."""
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [f"{path}: {sorted(map(str, one.keys() ^ other.keys()))}"]
        return [line for key in one for line in different(f"{path}.{key}", one[key], other[key])]
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return [f"{path}: {one} and {other}"]
        return [
            line
            for number, pair in enumerate(zip(one, other, strict=True))
            for line in different(f"{path}.{number}", *pair)
        ]
    if isinstance(one, Tensor):
        one, other = (getattr(value, "_local_tensor", value) for value in (one, other))
        same = one.shape == other.shape and one.dtype == other.dtype
        return [] if same and torch.equal(one.view(-1).nan_to_num(7e7), other.view(-1).nan_to_num(7e7)) else [path]
    return [] if one == other or (one != one and other != other) else [f"{path}: {one!r} and {other!r}"]


def not_finite(path: str, state: Any) -> list[str]:
    if isinstance(state, dict):
        return [line for key, value in state.items() for line in not_finite(f"{path}.{key}", value)]
    if isinstance(state, list | tuple):
        return [line for number, value in enumerate(state) for line in not_finite(f"{path}.{number}", value)]
    return [f"{path} is not finite"] if isinstance(state, Tensor) and not state.isfinite().all() else []


def curves_from(step: int, model: Any, trainer: Any) -> dict[str, Any]:
    """What was logged and seen from a step on."""
    named = ("train/grad_norm", "val/loss", "train/lr", "guard/skipped_steps", "guard/rollbacks", "train/batch_tokens")
    logged = [(at, name, row[name]) for at, row in trainer.logger.rows for name in named if name in row and at >= step]
    return {
        "losses": [one for one in model.losses if one[0] >= step],
        "learning rates": [one for one in model.learning_rates if one[0] >= step],
        "validated": [one for one in model.validated if one[0] > step],
        "logged": sorted(logged, key=lambda one: one[:2]),
    }


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@_quiet()
def curves_of(row: dict[str, Any], folder: Path, tokens: Path, **options: Any) -> dict[str, Any]:
    """What one run of the row logs and sees; `options` are those of `fit`."""
    model, trainer, _ = fit(row, folder, tokens, **options)
    return curves_from(ends_of(trainer).first_step, model, trainer)


@_quiet()
def run_row(row: dict[str, Any], folder: Path, tokens: Path) -> tuple[list[str], dict[str, Any]]:
    """Train, kill, go on: each difference between the two runs' ends, and each value that should be finite.

    Returns also the curves of the run that nobody killed.
    """
    kept = folder / "killed"
    kill = None if row["Preemption"] else Kill(row["killed"], folder / "whole", kept)
    model, trainer, _ = fit(row, folder / "whole", tokens, kill)
    if row["Preemption"]:
        stopped = folder / "stopped"
        _, _, error = fit(row, stopped, tokens, Kill(row["killed"], stopped, None))
        if error is None:
            return ["SIGTERM did not stop the run"], {}
        kept, checkpoint = stopped, Path(error.checkpoint)
    else:
        checkpoint = newest(kept)
    resumed, again, _ = fit(row, kept, tokens, resume=checkpoint)
    step = ends_of(again).first_step
    found = different("end", state_of(model, trainer), state_of(resumed, again))
    found += different("curves", curves_from(step, model, trainer), curves_from(step, resumed, again))
    for each in (trainer, again):
        found += next(one for one in each.callbacks if isinstance(one, LossesByHand)).differences()
    found += not_finite("end", state_of(model, trainer)) if row["StepGuard"] else []
    trained = [name for name, one in model.named_parameters() if one.requires_grad]
    by_hand = groups_by_hand(trained, row["optimizer"])
    found += [f"{name} is trained" for name in trained if row["freeze"] and name in FROZEN]
    found += different("groups", by_hand, groups_of(trainer.optimizers[0]))
    if trainer.is_global_zero:
        begun = ends_of(trainer).first_weights
        built = {name: model.built_with[name].to(value.dtype) for name, value in begun.items()}
        found += different("first weights of rank 0", built, begun)
    if row["RunLedger"] and trainer.is_global_zero:
        comparison = compare(*(read_ledger(place / "ledger.jsonl") for place in (folder / "whole", kept)), 0.0)
        found += list(comparison.lines()) if comparison.differs else []
    return found, curves_from(0, model, trainer)
