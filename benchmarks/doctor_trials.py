"""Does `doctor` name planted faults, and is it silent on healthy runs?

    python -m benchmarks.doctor_trials                     # all, about 6 minutes
    python -m benchmarks.doctor_trials nan leak --healthy 0

Each fault is a real run of a small model on Python's own sources, with one thing made wrong; its log is read as any
run's, without a word on what was done. The healthy runs differ in seed, width, depth, optimizer, schedule, precision,
clip, accumulation, logger, and three resume. DoctorMonitor is in each run, too: what it finds at the end is written
beside.
"""

import argparse
import json
import math
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks import machine
from lightning_tricks import (
    GPT2,
    ActivationMonitor,
    AttentionMonitor,
    BF16Mixed,
    DoctorMonitor,
    FP16Mixed,
    GoodputMonitor,
    Llama,
    MFUMonitor,
    MuonAdamW,
    ResumingCSVLogger,
    ResumingTensorBoardLogger,
    RunLedger,
    TextData,
    WarmupConstant,
    WarmupCosine,
    WarmupInverseSqrt,
    WarmupLinear,
    WarmupStableDecay,
)
from lightning_tricks._trainer.lightning import pl
from lightning_tricks.language_model import LanguageModel
from lightning_tricks.logs.run import find_run
from lightning_tricks.logs.run_log import read_log
from lightning_tricks.logs.symptoms import findings

LR = 3e-3
COSINE = WarmupCosine(warmup_steps=20)
VOCABULARY, LENGTH, ROWS = 512, 64, 8


@dataclass(frozen=True)
class Trial:
    """One run.

    Args:
        model: options of the decoder.
        lr: peak of the learning rate.
        expected: symptoms of which one must be found first, above a note; empty for a healthy run.
        note: a note is what is expected.
        spoil: makes the module's class another one.
        resume: at this step the run ends and goes on from its checkpoint, which this function changes.
    """

    name: str
    what: str
    expected: tuple[str, ...] = ()
    note: bool = False
    seed: int = 0
    steps: int = 300
    model: dict[str, Any] = field(default_factory=dict)
    lr: float = LR
    optimizer: Callable[..., Any] = lambda groups, lr: torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))
    schedule: Any = COSINE
    module: type[Any] = LanguageModel
    data: type[Any] = TextData
    plugins: Callable[[], Any] = lambda: None
    logger: type[Any] = ResumingTensorBoardLogger
    trainer: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Any]] = list
    resume: int = 0
    change: Callable[[dict[str, Any]], None] | None = None


# ---- what is made wrong


class Leaks(LanguageModel):
    """Labels that are not shifted: each token is its own answer, in training only."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The step on labels that the inputs give away."""
        return super().training_step({**batch, "labels": batch["input_ids"].clone()}, batch_idx)


class NaNOnce(LanguageModel):
    """One batch has a weight that is NaN."""

    def token_sums(self, batch: Any) -> Any:
        """The sums, of one batch with NaN."""
        nats, tokens = super().token_sums(batch)
        return (nats * float("nan"), tokens) if self.training and self.trainer.global_step == 150 else (nats, tokens)


class OneBadBatch(LanguageModel):
    """One batch whose labels are those of another row."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The step, once on labels that do not belong to the inputs."""
        if self.trainer.global_step == 220:
            batch = {**batch, "labels": batch["labels"].flip(1)}
        return super().training_step(batch, batch_idx)


class Overflows(LanguageModel):
    """A loss of a scale that fp16 cannot hold."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The step with a loss that is far too large."""
        return super().training_step(batch, batch_idx) * 1e9


class DropsWords(LanguageModel):
    """A third of the input tokens are replaced in training, as strong a dropout as there is."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The step on spoilt inputs."""
        ids = batch["input_ids"]
        other = torch.randint_like(ids, VOCABULARY)
        return super().training_step({**batch, "input_ids": torch.where(torch.rand(ids.shape) < 0.33, other, ids)}, 0)


class KeepsGradients(LanguageModel):
    """Gradients are never set to zero."""

    def optimizer_zero_grad(self, *_: Any) -> None:
        """Do nothing."""


class OnlyNorms(LanguageModel):
    """All weights are frozen but the scales of the norms."""

    def configure_optimizers(self) -> Any:
        """Those of the scales."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("norm" in name)
        return super().configure_optimizers()


class OtherRows(LanguageModel):
    """Each row has the labels of another one."""

    def token_sums(self, batch: Any) -> Any:
        """The sums over labels that do not belong to the inputs, in training and validation."""
        return super().token_sums({**batch, "labels": batch["labels"].roll(1, 0)})


class SleepyData(TextData):
    """A loader that needs 50 ms a batch."""

    def train_dataloader(self) -> Any:
        """The loader, slowed down."""
        return Sleepy(super().train_dataloader(), 0.05, 0.0)


class LaggingData(TextData):
    """A loader that needs 1 ms more for each batch."""

    def train_dataloader(self) -> Any:
        """The loader, slower and slower."""
        return Sleepy(super().train_dataloader(), 0.0, 0.001)


class Sleepy:
    """A loader around another, with a wait before each batch that grows.

    Args:
        seconds: before the first batch.
        more: seconds, for each batch after it.
    """

    def __init__(self, loader: Any, seconds: float, more: float) -> None:
        self.loader, self.seconds, self.more = loader, seconds, more

    def __iter__(self) -> Any:
        for number, batch in enumerate(self.loader):
            time.sleep(self.seconds + number * self.more)
            yield batch

    def __len__(self) -> int:
        return len(self.loader)


class FewRows(TextData):
    """Three training rows, again and again."""

    repeats = 400

    def train_dataloader(self) -> Any:
        """The rows of one batch."""
        first = next(iter(super().train_dataloader()))
        rows: Any = [{name: values[:3] for name, values in first.items()}] * self.repeats
        return DataLoader(rows, batch_size=None)


class SameRows(FewRows):
    """Three training rows, which are the validation rows too."""

    def val_dataloader(self) -> Any:
        """The training rows."""
        rows: Any = list(self.train_dataloader())[:1]
        return DataLoader(rows, batch_size=None)


class Foreign(pl.LightningModule):
    """A module of another project: a ReLU network on the last eight tokens, with names and logging of its own."""

    def __init__(self, bias: float = 0.0, lr: float = 1e-3) -> None:
        super().__init__()
        self.embed, self.hidden, self.act = nn.Embedding(VOCABULARY, 16), nn.Linear(8 * 16, 64), nn.ReLU()
        self.out, self.lr, self.dropout = nn.Linear(64, VOCABULARY), lr, nn.Dropout(0.1)
        nn.init.constant_(self.hidden.bias, bias)

    def _loss(self, batch: Any) -> Tensor:
        ids, labels = batch["input_ids"], batch["labels"]
        windows = ids.unfold(1, 8, 1)
        hidden = self.dropout(self.act(self.hidden(self.embed(windows).flatten(2))))
        return F.cross_entropy(self.out(hidden).flatten(0, 1), labels[:, 7:].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of a batch."""
        loss = self._loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss."""
        self.log("val_loss", self._loss(batch))

    def configure_optimizers(self) -> Any:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Dead(Foreign):
    """The bias is so low that no unit is ever above zero."""

    def __init__(self) -> None:
        super().__init__(bias=-50.0)


def forget_optimizer(checkpoint: dict[str, Any]) -> None:
    """Empty the optimizer's state, as a restore of weights alone leaves it."""
    for state in checkpoint["optimizer_states"]:
        state["state"] = {}


def watch_relu() -> list[Any]:
    """The ReLU's output."""
    return [ActivationMonitor(blocks=["act"])]


FAULTS = [
    Trial("lr", "learning rate x 30", ("stalled_at_peak", "divergence", "plateau", "not_finite"), lr=30 * LR),
    Trial("lr3", "learning rate x 300, no warmup", ("early_spike", "divergence", "plateau", "not_finite"), lr=300 * LR,
          schedule=WarmupCosine(warmup_steps=0)),
    Trial("zero", "gradients never set to zero", ("gradients_add_up", "clip_pinned"), module=KeepsGradients),
    Trial("sums", "gradients never set to zero, no clip", ("gradients_add_up",), module=KeepsGradients,
          trainer={"gradient_clip_val": None}),
    Trial("frozen", "all weights frozen but the norms' scales", ("frozen", "plateau"), module=OnlyNorms),
    Trial("labels", "labels of other rows", ("plateau",), module=OtherRows),
    Trial("clip", "clip at 0.001", ("clip_pinned",), trainer={"gradient_clip_val": 1e-3}),
    Trial("lr0", "learning rate 0", ("plateau",), lr=0.0),
    Trial("leak", "training labels not shifted", ("train_gap", "overfitting"), module=Leaks),
    Trial("nan", "NaN in the batch of step 150", ("not_finite",), module=NaNOnce),
    Trial("loader", "a loader that needs 50 ms a batch", ("loader_stalls",), data=SleepyData),
    Trial("restore", "restored at step 150 without the optimizer's state", ("restore",), resume=150,
          change=forget_optimizer, schedule=WarmupConstant(warmup_steps=20)),
    Trial("rows", "three training rows", ("overfitting", "train_gap"), data=FewRows),
    Trial("same", "validation rows are the training rows, under strong dropout", ("validation_leak",), data=SameRows,
          module=DropsWords, steps=400),
    Trial("fp16", "a loss that overflows in fp16", ("scaler_collapse",), module=Overflows, plugins=FP16Mixed),
    Trial("lags", "a loader that needs 1 ms more for each batch", ("throughput_falls", "loader_stalls"),
          data=LaggingData),
    Trial("spike", "one batch with labels in reversed order, at step 220", ("spike",), note=True, module=OneBadBatch,
          trainer={"log_every_n_steps": 1}),
    Trial("dead", "bias -50 before a ReLU, in a module of another project", ("dead_units",), module=Dead,
          logger=pl.loggers.CSVLogger, callbacks=watch_relu),
]  # fmt: skip


def healthy() -> list[Trial]:
    """Thirty runs of which nothing is wrong."""
    sgd = lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9)  # noqa: E731
    slow_adam = lambda groups, lr: torch.optim.AdamW(groups, lr=lr)  # noqa: E731
    muon = lambda groups, lr: MuonAdamW(groups, lr=lr)  # noqa: E731
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("AdamW, cosine", {}),
        ("AdamW, cosine, width 16", {"model": {"d_model": 16}}),
        ("AdamW, cosine, width 64", {"model": {"d_model": 64}}),
        ("AdamW, 4 layers", {"model": {"n_layers": 4}}),
        ("AdamW, QK-norm, zero outputs", {"model": {"qk_norm": True, "zero_init_outputs": True}}),
        ("AdamW, stable and decay", {"schedule": WarmupStableDecay(warmup_steps=20, decay_fraction=0.3)}),
        ("AdamW, linear", {"schedule": WarmupLinear(warmup_steps=20)}),
        ("AdamW, constant", {"schedule": WarmupConstant(warmup_steps=20)}),
        ("AdamW, inverse square root", {"schedule": WarmupInverseSqrt(warmup_steps=20)}),
        ("AdamW, long warmup", {"schedule": WarmupCosine(warmup_steps=150)}),
        ("AdamW, betas 0.9 and 0.999", {"optimizer": slow_adam}),
        ("AdamW, lr / 3", {"lr": LR / 3}),
        ("AdamW, lr x 3", {"lr": 3 * LR}),
        ("Muon and AdamW", {"optimizer": muon}),
        ("SGD with momentum", {"optimizer": sgd, "lr": 0.1}),
        ("AdamW, no clip", {"trainer": {"gradient_clip_val": None}}),
        ("AdamW, clip 0.5", {"trainer": {"gradient_clip_val": 0.5}}),
        ("bf16", {"plugins": BF16Mixed}),
        ("fp16", {"plugins": FP16Mixed}),
        ("fp16, scale 2**24", {"plugins": lambda: FP16Mixed(init_scale=2.0**24)}),
        ("accumulation of 2", {"trainer": {"accumulate_grad_batches": 2}}),
        ("logged every step", {"trainer": {"log_every_n_steps": 1}}),
        ("metrics.csv", {"logger": ResumingCSVLogger}),
        ("resumed at step 150", {"resume": 150}),
        ("resumed at step 40", {"resume": 40}),
        ("resumed, metrics.csv", {"resume": 150, "logger": ResumingCSVLogger}),
        ("another project's module", {"module": Foreign, "logger": pl.loggers.CSVLogger, "callbacks": watch_relu}),
        ("another project's, TensorBoard", {"module": Foreign, "logger": pl.loggers.TensorBoardLogger}),
        ("GPT-2's parts", {"model": {"gpt2": True}}),
        ("600 steps", {"steps": 600}),
    ]
    mixed = [kind for start in range(3) for kind in kinds[start::3]]  # so that the first ones have every kind
    return [Trial(f"healthy {i}", what, seed=i, **options) for i, (what, options) in enumerate(mixed)]


# ---- one run


def text(folder: Path) -> Path:
    """Two megabytes of the standard library."""
    file, size = folder / "text.txt", 0
    with file.open("w", encoding="utf-8") as out:
        for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            size += out.write(source.read_text(encoding="utf-8", errors="replace"))
            if size > 2_000_000:
                break
    return file


def train(trial: Trial, folder: Path, source: Path) -> DoctorMonitor:
    """Make the run, with its log in a folder; DoctorMonitor has what it found."""
    checkpoint: Path | None = None
    while True:
        pl.seed_everything(trial.seed, verbose=False)
        doctor = DoctorMonitor()
        options = {"gradient_clip_val": 1.0, "log_every_n_steps": 10, **trial.trainer}
        logger = trial.logger(str(folder), name="", version="run")
        watching = [] if issubclass(trial.module, Foreign) else [MFUMonitor(peak_flops=1e12), AttentionMonitor()]
        dies = trial.resume and checkpoint is None
        if dies:
            saver = pl.callbacks.ModelCheckpoint(folder, filename="saved", every_n_train_steps=trial.resume)
            watching += [saver, KillAt(trial.resume + 7)]
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, max_steps=trial.steps, logger=logger, plugins=trial.plugins(),
            callbacks=[GoodputMonitor(), RunLedger(), *watching, *trial.callbacks(), doctor], limit_val_batches=8,
            val_check_interval=trial.steps // 10 * options.get("accumulate_grad_batches", 1),
            enable_checkpointing=bool(dies), enable_progress_bar=False, enable_model_summary=False,
            num_sanity_val_steps=0, check_val_every_n_epoch=None, **options,
        )  # fmt: skip
        try:
            trainer.fit(module_of(trial), datamodule=data_of(trial, source), ckpt_path=checkpoint)
            break
        except KilledError:
            checkpoint = folder / "saved.ckpt"
            if trial.change is not None:
                state = torch.load(checkpoint, weights_only=False)
                trial.change(state)
                torch.save(state, checkpoint)
    settings = {
        "model": {"optimizer": {"lr": trial.lr}},
        "trainer": {"accelerator": "cpu", "max_steps": trial.steps, **options},
    }
    (folder / "run" / "config.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    return doctor


class KilledError(Exception):
    """The end of a run that resumes."""


class KillAt(pl.Callback):
    """End a run in the middle of its work, some steps after its checkpoint."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Fail."""
        if trainer.global_step >= self.step:
            raise KilledError


def module_of(trial: Trial) -> Any:
    """The module of a trial."""
    if issubclass(trial.module, Foreign):
        return trial.module()
    shape = {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 2, "max_seq_len": LENGTH, **trial.model}
    decoder = GPT2 if shape.pop("gpt2", False) else Llama
    return trial.module(
        decoder=decoder(**shape), optimizer=lambda groups: trial.optimizer(groups, trial.lr), schedule=trial.schedule
    )


def data_of(trial: Trial, source: Path) -> Any:
    """The data of a trial."""
    return trial.data(
        files=str(source), cache_dir=str(source.parent / "cache"), vocab_size=VOCABULARY, seq_len=LENGTH,
        micro_batch_size=ROWS, seed=trial.seed,
    )  # fmt: skip


def judge(trial: Trial, folder: Path, source: Path) -> dict[str, Any]:
    """Make a run, read its log, and say what was found."""
    begun = time.perf_counter()
    doctor = train(trial, folder, source)
    log, unread = read_log(find_run(folder))
    found = findings(log)
    above = [each for each in found if trial.note or each.severity != "note"]
    level = float(log["loss"].values[-10:].mean())
    row = {
        "name": trial.name, "what": trial.what, "expected": trial.expected, "steps": log.steps(),
        "found": [[each.symptom, each.severity, each.status] for each in found],
        "first_evidence": found[0].evidence if found else "",
        "monitor": sorted({each.symptom for each in doctor.found}),
        "right": bool(above) and above[0].symptom in trial.expected if trial.expected else not above,
        "monitor_right": any(each.symptom in trial.expected for each in doctor.found)
        if trial.expected else not doctor.found,
        "unread": unread, "last_loss": round(level, 3) if math.isfinite(level) else None,
        "seconds": round(time.perf_counter() - begun, 1),
    }  # fmt: skip
    return {**row, "expected": list(trial.expected)}


def tables(result: dict[str, Any]) -> dict[str, str]:
    """Both tables, in Markdown."""
    faults = [
        "| planted | found first | status | also, above a note | by DoctorMonitor, at the end |",
        "|---|---|---|---|---|",
    ]
    for row in result["faults"]:
        above = [each for each in row["found"] if each[1] != "note"]
        first = (above or row["found"] or [["**nothing**", "", ""]])[0]
        others = ", ".join(f"`{each[0]}`" for each in above[1:])
        monitor = ", ".join(f"`{name}`" for name in row["monitor"]) or "nothing"
        faults.append(f"| {row['what']} | `{first[0]}` ({first[1]}) | {first[2]} | {others} | {monitor} |")
    lines = [
        "| healthy runs | runs | findings above a note | of DoctorMonitor, at the end | notes |",
        "|---|---|---|---|---|",
    ]
    rows = result["healthy"]
    spurious = sum(each[1] != "note" for row in rows for each in row["found"])
    notes = sorted({each[0] for row in rows for each in row["found"] if each[1] == "note"})
    having = {name: sum(any(each[0] == name for each in row["found"]) for row in rows) for name in notes}
    by_note = ", ".join(f"`{name}` in {number}" for name, number in having.items()) or "none"
    warned, kinds = sum(len(row["monitor"]) for row in rows), "; ".join(row["what"] for row in rows)
    lines.append(f"| {kinds} | {len(rows)} | {spurious} | {warned} | {by_note} |")
    return {"faults": "\n".join(faults), "healthy": "\n".join(lines)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [trial.name for trial in FAULTS]
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"default: all of {', '.join(names)}")
    parser.add_argument(
        "--healthy", type=int, default=len(healthy()), help="number of healthy runs; default %(default)s"
    )
    parser.add_argument("--keep", type=Path, help="folder for the logs; default: they are removed")
    parser.add_argument("--out", type=Path, help="JSON file; default benchmarks/results/doctor-trials-DATE-cpu.json")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.faults if name not in names]:
        parser.error(f"unknown fault {unknown[0]}: give some of {', '.join(names)}")
    torch.set_num_threads(1)
    out = options.out or Path(__file__).parent / "results" / f"doctor-trials-{machine.today()}-cpu.json"
    result: dict[str, Any] = {"benchmark": "doctor_trials", "machine": machine.describe(), "faults": [], "healthy": []}
    trials = [trial for trial in FAULTS if not options.faults or trial.name in options.faults]
    with tempfile.TemporaryDirectory() as made, machine.quiet():
        source = text(Path(made))
        for kind, several in (("faults", trials), ("healthy", healthy()[: options.healthy])):
            for trial in several:
                folder = (options.keep or Path(made)) / trial.name.replace(" ", "_")
                folder.mkdir(parents=True, exist_ok=True)
                row = judge(trial, folder, source)
                result[kind].append(row)
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")  # a run cut short keeps its rows
                print("right" if row["right"] else "WRONG", json.dumps(row), flush=True)
    print(*tables(result).values(), str(out), sep="\n\n")
    return int(not all(row["right"] for row in [*result["faults"], *result["healthy"]]))


if __name__ == "__main__":
    sys.exit(main())
