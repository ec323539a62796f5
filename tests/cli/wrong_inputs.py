"""Wrong inputs of a newcomer, and what the one line must say of each. Add a row where a mistake is not answered yet.

A row is the arguments after `fit --config small.yaml` (or a whole command line, see `Row.whole`), and words that the
line must hold: the option, its value, the remedy. `{folder}` in the arguments is the folder of the test.
Options that have nothing to do with the model come after a recipe whose model has none: it is read much faster.
"""

import importlib.util
import itertools
import os
import pickle
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import accelerators

SMALL = """\
seed_everything: 0
model:
  class_path: LanguageModel
  init_args:
    decoder: {class_path: Llama, init_args: {vocab_size: 300, d_model: 32, n_layers: 1, n_heads: 2, max_seq_len: 32}}
    optimizer: {class_path: AdamW, init_args: {lr: 1.0e-3, betas: [0.9, 0.95]}}
    schedule: {class_path: WarmupCosine, init_args: {warmup_steps: 1}}
data:
  class_path: TextData
  init_args: {files: text.txt, cache_dir: cache, vocab_size: 300, seq_len: 32, micro_batch_size: 2}
trainer:
  accelerator: cpu
  max_steps: 3
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  limit_val_batches: 0
"""

TRAINER = SMALL[SMALL.index("trainer:") :]
MODEL = SMALL[SMALL.index("model:") :]
DATA = SMALL[SMALL.index("data:") : SMALL.index("trainer:")]

PLAIN = (
    """\
seed_everything: 0
model: lightning.pytorch.demos.boring_classes.BoringModel
"""
    + TRAINER
)

RECIPES = Path(__file__).parents[2] / "recipes"
Prepare = Callable[[Path, pytest.MonkeyPatch], object]


@dataclass(frozen=True)
class Row:
    """One wrong input.

    Args:
        args: after `fit --config small.yaml`; with `whole`, the whole command line.
        words: that the line must hold.
        whole: see `args`.
        edit: replaces the first text by the second in small.yaml, in a file of its own.
        files: written before the run, by their names.
        prepare: called with the folder before the run, for what files cannot say.
        lines: at most so many on stderr; more than one where the data had to be tokenized first.
        warm: where the text may be tokenized before the mistake shows: it is in a file that the run writes or reads.
        recipe: after which the arguments come.
    """

    args: str | list[str]
    words: tuple[str, ...]
    whole: bool = False
    edit: tuple[str, str] | None = None
    files: dict[str, str | bytes] = field(default_factory=dict)
    prepare: Prepare | None = None
    lines: int = 1
    warm: bool = False
    recipe: str = "small.yaml"


def edited(right: str, wrong: str, *words: str) -> Row:
    """A row whose mistake is in the file."""
    return Row([], words, edit=(right, wrong))


def command(args: str, *words: str, **settings: Any) -> Row:
    """A row that is a whole command line."""
    return Row(args, words, whole=True, **settings)


MESH = "--trainer.strategy FSDP2Strategy --trainer.strategy.init_args.mesh"


def option(args: str | list[str], *words: str, **settings: Any) -> Row:
    """A row that is an option on the command line."""
    return Row(args, words, **settings)


def plain(args: str | list[str], *words: str, **settings: Any) -> Row:
    """A row that is an option on the command line and has nothing to do with the model."""
    return Row(args, words, recipe="plain.yaml", **settings)


def checkpoint(name: str, *words: str, command: str = "fit") -> Row:
    """A row that goes on from a wrong checkpoint, which the test writes."""
    args = f"{command} --config small.yaml --trainer.max_steps 5 --ckpt_path {name}.ckpt"
    return Row(args, ("ckpt_path", f"{name}.ckpt", *words), whole=True, lines=3)


def fails(folder: Path, patch: pytest.MonkeyPatch, function: str, error: int) -> None:
    """Have a function of `os` fail for what lies below a folder: root may write everywhere, and disks are not full."""
    real = getattr(os, function)

    def failing(path: object, *args: object, **kwargs: object) -> object:
        if Path(str(path)).absolute().is_relative_to(folder):
            raise OSError(error, os.strerror(error), str(path))
        return real(path, *args, **kwargs)

    patch.setattr(os, function, failing)


def readonly(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """A folder `readonly`, in which no file can be made."""
    (folder / "readonly").mkdir(exist_ok=True)
    fails(folder / "readonly", patch, "open", 13)


def full_disk(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """A folder `full`, on a disk without room."""
    (folder / "full").mkdir(exist_ok=True)
    fails(folder / "full", patch, "open", 28)


def unreadable(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """A folder `secret` of texts, which cannot be listed."""
    (folder / "secret").mkdir(exist_ok=True)
    (folder / "secret" / "text.txt").write_text("text")
    fails(folder / "secret", patch, "scandir", 13)


def no_gpu(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU, wherever the tests run."""
    for accelerator in (accelerators.CUDAAccelerator, accelerators.MPSAccelerator):
        patch.setattr(accelerator, "is_available", staticmethod(lambda: False))


def environment(**variables: str) -> Prepare:
    """Variables that a launcher or a shell has set."""

    def prepare(folder: Path, patch: pytest.MonkeyPatch) -> None:
        for name, value in variables.items():
            patch.setenv(name, value)

    return prepare


def torchrun(world: str, hosts: str, local: str) -> Prepare:
    """What torchrun sets for its first process."""
    return environment(
        **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0"),
        **{"WORLD_SIZE": world, "GROUP_WORLD_SIZE": hosts, "LOCAL_WORLD_SIZE": local},
        **{"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
    )


def without(package: str) -> Prepare:
    """A Python in which a package is not installed."""

    def prepare(folder: Path, patch: pytest.MonkeyPatch) -> None:
        real = importlib.util.find_spec
        patch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else real(name, *rest))

    return prepare


def machine(bytes_of_host: int, cores: int) -> Prepare:
    """A machine without a GPU, of this size."""

    def prepare(folder: Path, patch: pytest.MonkeyPatch) -> None:
        no_gpu(folder, patch)
        patch.setattr(os, "cpu_count", lambda: cores)
        real = os.sysconf
        pages = bytes_of_host // real("SC_PAGE_SIZE")
        patch.setattr(os, "sysconf", lambda name: pages if name == "SC_PHYS_PAGES" else real(name))

    return prepare


LAPTOP = machine(16 << 30, cores=4)
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in itertools.pairwise("abcdefghij")
)
LAZY = """
import torch
from lightning.pytorch.demos.boring_classes import BoringModel


class Lazy(BoringModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.LazyLinear(2)
"""

KILLED = f"""
import os

import torch

from lightning_tricks import TextData


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, row):
        if torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), {int(signal.SIGKILL)})
        return {{"input_ids": torch.zeros(32, dtype=torch.long), "labels": torch.zeros(32, dtype=torch.long)}}


class Killed(TextData):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(Rows(), 2, num_workers=1)
"""
LOGGER = "--trainer.logger=ResumingTensorBoardLogger --trainer.logger.save_dir="
SAVER = "--trainer.enable_checkpointing=true --trainer.callbacks+=ModelCheckpoint --trainer.callbacks.dirpath="
DECODER = "{class_path: Llama, init_args: {vocab_size: 300,"

LOSSES = "step,train/loss\n0,1.0\n"

ROWS = [
    # Words that are misspelt or come from another program.
    command("trian --config small.yaml", "'trian'", "--help"),
    command("train --config small.yaml", "'train'", "did you mean fit?"),
    command("--config small.yaml", "no command: write one of fit,validate,test,predict"),
    command("fit", "no model", "--config RECIPE.yaml"),
    command("coordinate-check", "no model", "--config RECIPE.yaml"),
    command("fit small.yaml", "small.yaml", "--config small.yaml"),
    command("fit --confg small.yaml", "--confg", "did you mean config?"),
    command("fit --config", "--config", "VALUE"),
    command("cp tinny", "tinny", "did you mean tiny?"),
    command("cp", "error: cp: ", "required: recipe", "cp --help"),
    command("ls --nosuch", "error: ls: ", "--nosuch", "ls --help"),
    command("consolidate folder", "error: consolidate: ", "required: file", "--help"),
    plain("--trainer.max_step 3", "trainer.max_step", "did you mean trainer.max_steps?"),
    plain("--trainer.max_iters 3", "trainer.max_iters", "did you mean trainer.max_steps?"),
    option("--max_iters 3", "--max_iters", "did you mean trainer.max_steps?"),
    option("--epochs 3", "--epochs", "did you mean trainer.max_epochs?"),
    option("--learning_rate 1e-3", "--learning_rate", "did you mean model.optimizer.lr?"),
    option("--lr 1e-3", "--lr", "did you mean model.optimizer.lr?"),
    option("--model.learning_rate 1e-3", "LanguageModel", "learning_rate", "did you mean model.optimizer.lr?"),
    option("--model.lr 1e-3", "LanguageModel", "'lr'", "did you mean model.optimizer.lr?"),
    option("--model.optimizer.learning_rate 1e-3", "AdamW", "learning_rate", "did you mean lr?"),
    plain("--trainer.grad_clip 1", "trainer.grad_clip", "did you mean trainer.gradient_clip_val?"),
    option("--max_grad_norm 1", "--max_grad_norm", "did you mean trainer.gradient_clip_val?"),
    option("--gradient_accumulation_steps 4", "did you mean trainer.accumulate_grad_batches?"),
    option("--batch_size 4", "--batch_size", "did you mean data.micro_batch_size?"),
    option("--data.batch_size 4", "TextData", "batch_size", "did you mean micro_batch_size?"),
    option("--data.block_size 4", "TextData", "block_size", "did you mean seq_len?"),
    option("--model.decoder.hidden_size 4", "Llama", "hidden_size", "did you mean d_model?"),
    option("--model.decoder.num_hidden_layers 4", "Llama", "num_hidden_layers", "did you mean n_layers?"),
    option("--model.warmup 4", "LanguageModel", "warmup", "did you mean model.schedule.warmup_steps?"),
    option("--seed 1", "--seed", "did you mean seed_everything?"),
    plain("--resume last", "resume=last", "give auto", "--ckpt_path last"),
    option("--resume_from x.ckpt", "--resume_from", "did you mean ckpt_path?"),
    option("--finetune x.ckpt", "--finetune", "did you mean init_from?"),
    edited("seed_everything: 0", "seed_everything: 0\nresume: yes", "resume=True", "give auto"),
    command("validate --config small.yaml --resume auto", "--resume is an option of fit", "last"),
    command("prepare --config small.yaml --init_from x", "--init_from is an option of fit"),
    plain("--init_from a.ckpt --ckpt_path b.ckpt", "init_from=a.ckpt", "ckpt_path=b.ckpt", "give one of them"),
    plain("--init_from=a.ckpt --ckpt_path=b.ckpt", "init_from=a.ckpt", "ckpt_path=b.ckpt", "give one of them"),
    edited(
        "seed_everything: 0",
        "seed_everything: 0\ninit_from: a.ckpt\nckpt_path: b.ckpt",
        "init_from=a.ckpt and ckpt_path=b.ckpt",
        "give one of them",
    ),
    command(
        "fit --config plain.yaml --config from.yaml --config on.yaml",
        "init_from=a.ckpt and ckpt_path=b.ckpt",
        "give one of them",
        files={"from.yaml": "init_from: a.ckpt\n", "on.yaml": "ckpt_path: b.ckpt\n"},
    ),
    command(
        "fit --config plain.yaml --config on.yaml --init_from a.ckpt",
        "init_from=a.ckpt and ckpt_path=b.ckpt",
        files={"on.yaml": "ckpt_path: b.ckpt\n"},
    ),
    command(
        "fit --config plain.yaml --config from.yaml --ckpt_path b.ckpt",
        "ckpt_path=b.ckpt: there is no such file",
        files={"from.yaml": "init_from: a.ckpt\n"},
    ),
    plain("--resume auto --trainer.default_root_dir s3://bucket", "resume=auto: s3://bucket", "--ckpt_path ADDRESS"),
    command("prepare --config plain.yaml", "prepare: the recipe has no data"),
    option("--init_from no_such.ckpt", "init_from=no_such.ckpt", "no such file"),
    option("--init_from small.yaml", "init_from=small.yaml", "no checkpoint"),
    option("--init_from other.ckpt", "init_from=other.ckpt", "has no 'decoder.", lines=3),
    option("--init_from missing.ckpt", "init_from=missing.ckpt", "embed.weight", lines=3),
    option("--init_from pickle.ckpt", "init_from=pickle.ckpt", "weights_only=True", lines=3),
    command("verify-resume", "--config RECIPE.yaml"),
    command("verify-resume --config small.yaml --steps 3", "steps=3", "at least 4"),
    command("verify-resume --config small.yaml --steps x", "'x'", "verify-resume --help"),
    command("sync-audit", "no model", "--config RECIPE.yaml"),
    command("sync-audit --config plain.yaml --steps 1", "steps=1", "at least 2"),
    command("sync-audit --config plain.yaml --steps x", "'x'", "sync-audit --help"),
    command("sync-audit --config plain.yaml --json no/such.json", "json=no/such.json", "no such folder"),
    command("sync-audit --config plain.yaml --trainer.fast_dev_run 3", "fast_dev_run=3", "leave it out"),
    command("sync-audit --config plain.yaml --trainer.devices 2 --trainer.strategy ddp_fork", "strategy", "give ddp"),
    command("sync_audits --config plain.yaml", "unknown command 'sync_audits'", "did you mean sync-audit?"),
    command("verify --config small.yaml", "unknown command 'verify'", "did you mean verify-resume?"),
    option("--model.optimizer.nosuch 1", "AdamW", "nosuch", "its options are lr, betas"),
    option("--model.schedule trapezoid", "model.schedule", "'trapezoid'", "did you mean WarmupStableDecay?"),
    option("--model.schedule cosine", "model.schedule", "'cosine'", "did you mean WarmupCosine?"),
    option("--model.schedule Linear", "model.schedule", "'Linear'", "did you mean WarmupLinear?"),
    option("--model.optimizer adam", "model.optimizer", "'adam'", "did you mean Adam?"),
    option("--model.optimizer adamw", "model.optimizer", "'adamw'", "did you mean AdamW?"),
    plain("--trainer.strategy fsdp2", "trainer.strategy=fsdp2", "did you mean FSDP2Strategy?"),
    plain("--trainer.strategy FSDP2Stratgy", "trainer.strategy=FSDP2Stratgy", "did you mean FSDP2Strategy?"),
    plain(f"{MESH}.tensor 2", "mesh: tensor 2 does not divide the 1 devices", "num_nodes x devices"),
    plain(f"{MESH}.tensor 0", "mesh.tensor=0", "a whole number of at least 1"),
    plain(f"{MESH}.tensor x", "trainer.strategy.mesh.tensor=x", "give a whole number"),
    plain(f"{MESH}.pipeline 2", "mesh.pipeline=2", "not supported"),
    plain(f"{MESH}.tensr 2", "trainer.strategy.mesh: ParallelDims has no option 'tensr'"),
    plain(f"{MESH.removesuffix('.mesh')}.context_method ring", "context_method=ring", "gather, ulysses"),
    plain("--trainer.strategy.timeout_seconds 9", "trainer.strategy.timeout_seconds", "--trainer.strategy CLASS"),
    plain("--trainer.logger tensorboard", "trainer.logger", "did you mean ResumingTensorBoardLogger?"),
    plain("--trainer.callbacks [Xyzzy]", "trainer.callbacks", "'Xyzzy'", "my_module.MyClass"),
    option("--model no_such_module.Model", "model", "'no_such_module'", "install it"),
    option(
        ["--trainer.callbacks", "[{class_path: ModelCheckpoint, init_args: {every_n_steps: 3}}]"],
        "trainer.callbacks: ModelCheckpoint",
        "'every_n_steps'",
        "did you mean every_n_train_steps?",
    ),
    edited("max_steps:", "max_stps:", "trainer.max_stps", "did you mean trainer.max_steps?"),
    edited("d_model:", "d_modl:", "model.decoder: Llama", "did you mean d_model?"),
    edited("class_path: Llama", "class_path: Lama", "model.decoder", "'Lama'", "did you mean Llama?"),
    edited("WarmupCosine", "WarmupCosin", "model.schedule", "did you mean WarmupCosine?"),
    edited("warmup_steps:", "warmup_step:", "model.schedule: WarmupCosine", "mean warmup_steps?"),
    edited("lr: 1", "lrr: 1", "model.optimizer: AdamW has no option 'lrr'", "did you mean lr?"),
    edited("TextData", "TextDat", "data: no class named 'TextDat'", "did you mean TextData?"),
    edited("seq_len: 32, micro", "seq_length: 32, micro", "data: TextData", "did you mean seq_len?"),
    edited("trainer:", "trainr:", "trainr.accelerator", "did you mean trainer.accelerator?"),
    edited("schedule:", "shedule:", "LanguageModel has no option 'shedule", "did you mean schedule?"),
    plain("--trainer.callbacks [MemoryMonitr]", "'MemoryMonitr'", "did you mean MemoryMonitor?"),
    option("--model.decoder.n_layer 2", "Llama has no option 'n_layer'", "did you mean n_layers?"),
    # The form of a recipe.
    command("fit --config no_such.yaml", "--config", "no_such.yaml", "check the path"),
    command("fit --config {folder}", "--config", "check the path"),
    command("fit --config b.yaml", "b.yaml", "UTF-8", files={"b.yaml": bytes(range(256))}),
    command("fit --config e.yaml", "e.yaml", "no settings", files={"e.yaml": ""}),
    command("fit --config l.yaml", "l.yaml", "no settings", files={"l.yaml": "- a\n- b\n"}),
    command("fit --config t.yaml", "t.yaml", "line 2", files={"t.yaml": "trainer:\n\tmax_steps: 1\n"}),
    command("fit --config o.yaml", "o.yaml", "line 2", files={"o.yaml": "trainer: [\n"}),
    edited(
        "  max_steps: 3\n",
        "  max_steps: 3\n  logger: true\n  max_steps: 4\n",
        "lines 13 and 15",
        "'trainer.max_steps'",
        "join the two",
    ),
    edited("trainer:\n", "model: {}\ntrainer:\n", "lines 2 and 11", "'model'", "join the two"),
    option(["--trainer", "{max_steps: 3, max_steps: 4}"], "--trainer", "'max_steps' stands twice", "join the two"),
    edited(
        DECODER,
        "{class_path: Llama, vocab_size: 300, more: {",
        "line 5",
        "'model.decoder.vocab_size'",
        "settings of Llama under init_args",
    ),
    edited(
        "WarmupCosine, init_args: {warmup_steps: 1}",
        "WarmupCosine, warmup_steps: 1",
        "line 7",
        "'model.schedule.warmup_steps'",
        "settings of WarmupCosine under init_args",
    ),
    option(
        ["--trainer.callbacks", "[{class_path: ModelCheckpoint, dirpath: x}]"],
        "--trainer.callbacks",
        "'dirpath'",
        "ModelCheckpoint under init_args",
    ),
    option(
        ["--trainer.callbacks", "[{class_path: ShadowGradient, init_args: {every_n_steps: 0}}]"],
        "ShadowGradient.every_n_steps=0",
        "give 1 or more",
    ),
    option(
        ["--trainer.callbacks", "[{class_path: ShadowGradient, init_args: {min_cosine: 90}}]"],
        "ShadowGradient.min_cosine=90",
        "from -1 to 1",
    ),
    option(
        ["--trainer.callbacks", "[{class_path: ShadowGradient, init_args: {max_norm_ratio: 1}}]"],
        "ShadowGradient.max_norm_ratio=1",
        "a factor above 1",
    ),
    option(
        ["--trainer.callbacks", "[{class_path: ShadowGradient, init_args: {differentiate: ['(']}}]"],
        "ShadowGradient.differentiate: '('",
        "no regular expression",
    ),
    plain("--trainer.callbacks [EarlyStopping", "trainer.callbacks=[EarlyStopping", "a list in brackets"),
    plain("--trainer.callbacks [EarlyStopping]", "trainer.callbacks: EarlyStopping needs 'monitor'", "under init_args"),
    # What a recipe cannot be: each was a traceback, a hang or an abort.
    command("fit --config n.yaml", "`null` is no recipe", "max_steps", files={"n.yaml": "null\n"}),
    command("fit --config null", "--config: `null` is no recipe"),
    edited(TRAINER, "trainer:\n", "trainer=null", "trainer: {max_steps: 100}"),
    edited(TRAINER, "trainer: [1, 2]\n", "trainer=[1, 2]", "settings"),
    edited(TRAINER, "trainer: hi\n", "trainer=hi", "file of settings"),
    edited(MODEL, "model:\n", "no model", "--config RECIPE.yaml"),
    edited(MODEL, "model: [a]\n", "model: give a class", "class_path"),
    edited(DATA, "data: 5\n", "data: give a class"),
    edited(DATA, "data: null\n", "no data", "data: TextData"),
    edited(DATA, "", "no data", "train_dataloader"),
    command(
        "fit --config r.yaml",
        "r.yaml, line 1",
        "anchor holds itself",
        files={"r.yaml": "trainer: &a\n  callbacks: *a\n"},
    ),
    plain(["--trainer.callbacks", "&a [*a]"], "--trainer.callbacks", "anchor holds itself"),
    command("fit --config m.yaml", "m.yaml", "more than 100,000 values", files={"m.yaml": LAUGHS}),
    command("fit --config d.yaml", "d.yaml", "too deep", files={"d.yaml": "a: " + "[" * 9000 + "]" * 9000}),
    # Classes in the wrong place.
    plain(
        ["--trainer.callbacks", "[{EMA: {decay: 0.9}}]"],
        "trainer.callbacks: EMA is a class",
        "{class_path: EMA, init_args: {decay: ...}}",
    ),
    edited(
        "{class_path: AdamW, init_args: {lr: 1.0e-3, betas: [0.9, 0.95]}}",
        "{AdamW: {lr: 1}}",
        "model.optimizer: AdamW is a class",
        "init_args: {lr: ...}",
    ),
    plain("--trainer.EMA.decay 0.9", "EMA is a class", "class_path: EMA"),
    plain("--trainer.callbacks+=AdamW", "trainer.callbacks: AdamW is a class of another kind"),
    option("--model.schedule AdamW", "model.schedule: AdamW is a class of another kind"),
    option("--model.optimizer Llama", "model.optimizer: Llama is a class of another kind"),
    plain(
        "--trainer.callbacks+=StepGuard --trainer.callbacks+=StepGuard",
        "trainer.callbacks: StepGuard stands twice",
        "take one out",
    ),
    plain(
        "--trainer.callbacks+=SafeCheckpoint",
        "trainer.enable_checkpointing=False: SafeCheckpoint in trainer.callbacks",
        "leave enable_checkpointing out",
    ),
    plain(
        "--trainer.enable_checkpointing true --trainer.callbacks+=SafeCheckpoint --trainer.callbacks+=ModelCheckpoint",
        "SafeCheckpoint: dirpath=",
        "another ModelCheckpoint saves to this folder",
        "another dirpath",
    ),
    plain(
        "--trainer.enable_checkpointing true --trainer.callbacks+=SafeCheckpoint --trainer.callbacks+=SafeCheckpoint",
        "trainer.callbacks: SafeCheckpoint stands twice",
    ),
    plain(
        "--model lazy.Lazy --trainer.callbacks+=EMA",
        "EMA: layer.weight has no size yet",
        "configure_model",
        files={"lazy.py": LAZY},
        lines=3,
    ),
    # Sizes that no machine has.
    option("--model.decoder.d_model 1000000000000", "d_model=1000000000000", "GiB", "make it smaller"),
    option("--model.decoder.n_layers 1000000000", "n_layers=1000000000", "GiB", "make it smaller"),
    option("--model.decoder.vocab_size 1000000000000", "vocab_size=1000000000000", "GiB", "make it smaller"),
    option("--data.vocab_size 1000000000000", "vocab_size=1000000000000", "at most 16777216"),
    option("--data.micro_batch_size 1000000000", "data.micro_batch_size=1000000000", "GiB", "make it smaller"),
    option("--data.seq_len 1000000000000 --model.decoder.max_seq_len 1000000000000", "seq_len=1000000000000", "GiB"),
    option("--data.num_workers 10000000", "data.num_workers=10000000", "give at most"),
    option("--data.num_workers -1", "num_workers=-1", "at least 0"),
    plain("--trainer.devices 10000000", "trainer.devices=10000000", "from 1 to 1024", "auto"),
    plain("--trainer.devices 1000", "trainer.devices=1000", "CPU cores", "give at most"),
    *(
        command(f"{name} --config small.yaml --trainer.devices {value}", f"trainer.devices={value}", "from 1 to 1024")
        for name, value in (("plan", "1e9"), ("check", "1e9"), ("schedule", "2.0"), ("fit", "[]"), ("check", "true"))
    ),
    *(
        plain(f"--trainer.{name} {value}", f"trainer.{name}={value}", *words)
        for name, value, *words in (
            ("max_steps", 10**24, "64 bits"),
            ("accumulate_grad_batches", 10**24, "64 bits"),
            ("reload_dataloaders_every_n_epochs", 10**24, "64 bits"),
            ("limit_train_batches", 0, "above 0", "validate"),
            ("log_every_n_steps", -1, "0 for no log"),
            ("num_sanity_val_steps", -7, "-1 for a whole one"),
            ("min_steps", -5, "or null"),
        )
    ),
    option(f"--data.num_workers {10**24}", "data.num_workers=1000", "64 bits"),
    plain(
        "--trainer.val_check_interval 1000000 --trainer.limit_val_batches 1",
        "val_check_interval",
        "(1000000)",
        "number of the training batches",
    ),
    # Launchers and other machines.
    *(
        plain("", f"{name}='{value}'", "a whole number", f"unset {name}", prepare=environment(**{name: value}))
        for (name, value) in (
            ("WORLD_SIZE", "abc"),
            ("RANK", "abc"),
            ("LOCAL_RANK", "-1"),
            ("NODE_RANK", "1.5"),
            ("MASTER_PORT", ""),
            ("SLURM_NTASKS", "four"),
            ("LOCAL_WORLD_SIZE", "٤"),
        )
    ),
    plain("", "RANK=5, WORLD_SIZE=2", "from 0", "torchrun", prepare=environment(RANK="5", WORLD_SIZE="2")),
    plain("", "LOCAL_RANK=2, LOCAL_WORLD_SIZE=2", "unset", prepare=environment(LOCAL_RANK="2", LOCAL_WORLD_SIZE="2")),
    plain("", "MASTER_PORT=99999", "65535", prepare=environment(MASTER_PORT="99999")),
    plain(
        "",
        "trainer.devices=1",
        "torchrun has started 2",
        "--nproc-per-node",
        lines=3,
        prepare=environment(
            **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0"),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2"),
            **{"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
        ),
    ),
    *(
        Row(f"--elastic true {args}", words, recipe=recipe, lines=2, prepare=torchrun(world, hosts, local))
        for (world, hosts, local, recipe, args, words) in (
            (
                "3",
                "3",
                "1",
                "small.yaml",
                "--resume auto --trainer.num_nodes 2 --trainer.devices 2",
                ("elastic: 3 processes", "4 micro-batches", "start 1, 2 or 4 processes"),
            ),
            (
                "3",
                "2",
                "2",
                "small.yaml",
                "--resume auto --trainer.devices 4",
                ("3 processes on 2 hosts", "--nproc-per-node"),
            ),
            ("2", "2", "1", "small.yaml", "--resume auto", ("trainer.devices=auto", "on one host of the full run")),
            ("2", "2", "1", "small.yaml", "--trainer.devices 2", ("resume=none", "--resume auto")),
            (
                "2",
                "2",
                "1",
                "plain.yaml",
                "--resume auto --trainer.devices 2",
                ("BoringModel", "number of processes", "TokenData"),
            ),
        )
    ),
    plain("--elastic maybe", "elastic=maybe", "true or false"),
    command("validate --config small.yaml --ckpt_path right.ckpt --elastic true", "--elastic is an option of fit"),
    plain("--trainer.num_nodes 2", "trainer.num_nodes=2", "MASTER_ADDR, MASTER_PORT", "torchrun --nnodes"),
    plain(
        "--trainer.num_nodes 2",
        "NODE_RANK=7",
        "trainer.num_nodes=2",
        prepare=environment(NODE_RANK="7", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500"),
    ),
    plain("--trainer.accelerator tpu", "trainer.accelerator=tpu", "give cpu or auto"),
    plain("--trainer.accelerator hpu", "trainer.accelerator=hpu", "no such accelerator"),
    plain("--trainer.accelerator cuda", "trainer.accelerator=cuda", "give cpu or auto", prepare=no_gpu),
    plain("--trainer.accelerator mps", "trainer.accelerator=mps", "give cpu or auto", prepare=no_gpu),
    *(
        command(f"fit --config '{RECIPES}/{name}.yaml'", *words, prepare=LAPTOP)
        for (name, words) in (
            ("llama7b", ("trainer.devices=8", "no GPU", "--trainer.devices 1")),
            ("llama7b_deepspeed", ("trainer.devices=8", "no GPU")),
            ("llama1b", ("trainer.devices=8", "no GPU")),
            ("gpt2_124m", ("train='data/train*.bin'", "check the path")),
        )
    ),
    command(
        f"fit --config '{RECIPES}/llama7b.yaml' --trainer.devices 1 --trainer.strategy auto "
        "--data.train shard.bin --data.val null",
        "model.decoder: n_layers=32",
        "25 GiB",
        "16 GiB",
        "more devices",
        prepare=LAPTOP,
        files={"shard.bin": b"x"},
    ),
    option(
        "--trainer.strategy DeepSpeedZeROStrategy",
        "DeepSpeedZeROStrategy needs deepspeed",
        prepare=without("deepspeed"),
    ),
    option(
        "--data.files p.parquet",
        "p.parquet needs",
        "lightning-tricks[parquet]",
        prepare=without("pyarrow"),
        files={"p.parquet": "x"},
    ),
    option("--data.files null --data.hf_dataset a/b", "a/b", "lightning-tricks[datasets]", prepare=without("datasets")),
    option("--data.tokenizer t.json", "t.json", "not a tokenizers JSON", files={"t.json": "{}"}),
    option(
        "--data.files n.jsonl",
        "n.jsonl, line 2",
        "3 there",
        "text_field",
        warm=True,
        lines=3,
        files={"n.jsonl": '{"text": "a b c"}\n{"text": 3}\n'},
    ),
    option(
        "--data.files k.jsonl",
        "text_field='text'",
        "k.jsonl, line 1",
        "body",
        warm=True,
        lines=3,
        files={"k.jsonl": '{"body": "a b c"}\n'},
    ),
    # Other commands.
    command("cp tiny text.txt/tiny.yaml", "cp: to=text.txt", "is a file", "another folder"),
    command("cp tiny /proc/tiny.yaml", "cp: to=/proc", "cannot be written"),
    command("cp tiny small.yaml", "small.yaml exists", "remove it first"),
    command("consolidate x no/such.ckpt", "file=no/such.ckpt", "make it"),
    command("consolidate right.ckpt one.ckpt", "right.ckpt is one file already"),
    command("export --ckpt_path right.ckpt", "error: export: ", "required: --output", "--help"),
    command("export --ckpt_path right.ckpt --output {folder}", "export: output=", "exists: name another folder"),
    command("export --ckpt_path no.ckpt --output out", "no.ckpt", "no such file"),
    command("export --ckpt_path right.ckpt --output out --format onnx", "export: format=onnx", "hf or gguf"),
    command(
        "export --ckpt_path right.ckpt --output out --format gguf --shard_size_gib 2",
        "export: shard_size_gib=2",
        "llama-gguf-split",
    ),
    command("import . --output mine.yaml", "has no config.json"),
    command("average right.ckpt --output mean.ckpt", "right.ckpt: give at least two checkpoints"),
    command("average right.ckpt right.ckpt --output mean.ckpt --weights 1", "weights=1: give 2 numbers"),
    command("average right.ckpt ./right.ckpt --output mean.ckpt", "right.ckpt: given twice", "--weights"),
    command("autopsy --config small.yaml --ckpt_path right.ckpt", "autopsy needs --step"),
    command("autopsy --config small.yaml --step 1", "--ckpt_path FILE"),
    command(
        "autopsy --config small.yaml --ckpt_path right.ckpt --step 1 --json /proc/a",
        "json=/proc/a",
        "cannot be written",
    ),
    command(
        "autopsy --config small.yaml --ckpt_path right.ckpt --step 1 --json {folder}", "this is a folder", "name a file"
    ),
    command("coordinate-check --config small.yaml --json {folder}", "this is a folder"),
    command("predict --config small.yaml --ckpt_path right.ckpt --output a.txt", "output='a.txt'", ".jsonl"),
    command("generate --ckpt_path no.ckpt", "ckpt_path=no.ckpt", "no such file"),
    command("generate --ckpt_path t.ckpt", "t.ckpt is no checkpoint", files={"t.ckpt": "hello"}),
    command("generate --ckpt_path b.ckpt", "b.ckpt is no checkpoint", files={"b.ckpt": bytes(range(128, 256))}),
    command("generate --ckpt_path p.ckpt", "p.ckpt", files={"p.ckpt": pickle.dumps([1, 2])}),
    command("generate --ckpt_path list.ckpt", "list.ckpt holds no state_dict"),
    command("generate --ckpt_path other.ckpt", "other.ckpt holds no decoder_config"),
    command("generate --ckpt_path right.ckpt --max_new_tokens 0", "max_new_tokens=0", "at least 1"),
    command("generate --prompt x", "generate: ", "required: --ckpt_path", "--help"),
    command("fit --config small.yaml --ckpt_path list.ckpt", "list.ckpt holds no state_dict"),
    command("validate --config small.yaml --ckpt_path list.ckpt", "list.ckpt holds no state_dict"),
    command("validate --config small.yaml --ckpt_path none --text text.txt", "text='text.txt'", "needs --ckpt_path"),
    command("validate --config small.yaml --ckpt_path right.ckpt --text no.txt", "'no.txt' matches no file"),
    command("validate --config plain.yaml --ckpt_path right.ckpt --text text.txt", "text='text.txt'", "TextData"),
    command("eval --ckpt_path right.ckpt --tasks a", "lightning-tricks[eval]", prepare=without("lm_eval")),
    command("eval --ckpt_path right.ckpt", "eval: ", "required: --tasks", "--help"),
    command("eval --ckpt_path right.ckpt --tasks a --batch_size 0", "batch_size=0", "at least 1"),
    command("eval --ckpt_path right.ckpt --tasks a --limit 0", "limit=0", "number of questions"),
    command("eval --ckpt_path right.ckpt --tasks a --output small.yaml", "output='small.yaml' exists", "another file"),
    command("ledger check no_such", "no_such"),
    command("schedule --config small.yaml --output a.pdf", "output=a.pdf", ".png or .svg"),
    command("schedule --config small.yaml --output c.svg,no_such/c.png", "output=no_such/c.png", "no such folder"),
    command("schedule --config small.yaml --trainer.max_steps -1", "max_steps=-1", "--trainer.max_steps N"),
    command("schedule --config small.yaml --trainer.max_steps 1", "warmup_steps=1", "max_steps=1", "lengthen the run"),
    command("schedule --config small.yaml --against no.yaml", "against=no.yaml", "no such file"),
    command("schedule --config small.yaml --ckpt_path no.ckpt", "ckpt_path=no.ckpt", "no such file", "last"),
    command("schedule --config small.yaml --ckpt_path last", "ckpt_path=last", "names no logger"),
    command("schedule --config small.yaml --resume auto", "--resume is an option of fit"),
    command("schedule --config small.yaml --x token", "x=token", "did you mean tokens?"),
    command("check --config small.yaml --gpu h1000", "gpu=h1000", "did you mean h100"),
    command("check --config small.yaml --json no_such/a.json", "json=no_such/a.json", "no such folder"),
    command("check --config small.yaml --model.schedule WarmupCosin", "model.schedule", "did you mean WarmupCosine?"),
    command("doctor no_such", "doctor: no_such: no such folder", "a logger writes"),
    command("doctor {folder}", "there is no log in it", "a logger writes"),
    command("doctor {folder} --names los=x", "los=x; did you mean loss?", files={"metrics.csv": LOSSES}),
    command("doctor {folder} --names loss=x", "loss=x", "was not logged", files={"metrics.csv": LOSSES}),
    command("doctor {folder} --json {folder}", "json=", "this is a folder", files={"metrics.csv": LOSSES}),
    command("doctor {folder}", "no training loss", "--names loss=", files={"metrics.csv": "step,a\n0,1\n"}),
    command("doctor {folder}", "no scalars", "no event file", files={"events.out.tfevents.1.a": "another tool's text"}),
    command("doctor", "error: doctor: ", "required: LOGDIR", "doctor --help"),
    command("compare no_such", "compare: no_such: no such folder", "a logger writes"),
    command("compare {folder}", "compare: ", "there is no run below it"),
    command("compare {folder}", "one run alone", "name another", files={"metrics.csv": LOSSES}),
    command("compare {folder} {folder}", "named twice", "name another run", files={"metrics.csv": LOSSES}),
    command(
        "compare {folder}", "no scalars", "no event file", files={"events.out.tfevents.1.a": "another tool's text"}
    ),
    command("compare {folder}", "no validation loss or training loss", files={"metrics.csv": "step,a\n0,1\n"}),
    command("compare {folder} --names val_los=x", "did you mean val_loss?", files={"metrics.csv": LOSSES}),
    command("compare {folder} --html {folder}", "html=", "this is a folder", files={"metrics.csv": LOSSES}),
    command("compare {folder} --seed_noise -1", "seed_noise=-1", "above 0", files={"metrics.csv": LOSSES}),
    command("compare", "error: compare: ", "required: DIR", "compare --help"),
    command("runs no_such", "runs: no_such: no such folder", "a logger writes"),
    command("runs {folder}", "there is no run below it", "a logger writes"),
    command("runs {folder} --sort step", "sort=step; did you mean steps?", files={"metrics.csv": "step\n"}),
    command("runs {folder} --csv {folder}", "csv=", "this is a folder", files={"metrics.csv": "step\n"}),
    command("branch --config small.yaml --ckpt_path right.ckpt", "--decay_steps N"),
    command("branch --config small.yaml --ckpt_path last --decay_steps 2", "ckpt_path=last", "FILE"),
    # Values of the wrong type, or out of range.
    option("--model.optimizer.lr fast", "model.optimizer.lr=fast", "give a number"),
    option("--model.optimizer.lr inf", "model.optimizer.lr=inf", "give a number"),
    option("--model.optimizer.lr nan", "model.optimizer.lr=nan", "give a number"),
    option("--model.optimizer.lr .inf", "lr=inf", "give a finite number"),
    option("--model.optimizer.lr .nan", "optimizer.lr", "nan", "give another value"),
    option("--model.optimizer.lr -1e-3", "optimizer.lr", "learning rate: -0.001", "give another value"),
    option("--model.optimizer.lr=-0.5", "optimizer.lr", "-0.5", "give another value"),
    option("--model.optimizer.betas 0.9", "model.optimizer.betas=0.9", "[0.9, 0.95]"),
    option("--model.optimizer.betas [0.9]", "model.optimizer.betas=[0.9]", "a list of 2 values"),
    option("--model.optimizer.betas [0.9,2.0]", "optimizer.betas", "2.0", "give another value"),
    option("--model.optimizer.weight_decay 0.3", "weight_decay=0.3", "beside the optimizer"),
    option("--model.weight_decay -1", "weight_decay=-1", "0 or more"),
    option("--model.activation_checkpointing ful", "activation_checkpointing=ful", "did you mean full?"),
    option("--model.decoder.n_heads three", "model.decoder.n_heads=three", "give a whole number"),
    option("--model.decoder [1]", "model.decoder=[1]", "class_path"),
    option("--data.seq_len 1.5", "data.seq_len=1.5", "give a whole number"),
    option("--data.micro_batch_size 0", "micro_batch_size=0", "at least 1"),
    option("--data.val_fraction 1.5", "val_fraction=1.5", "between 0 and 1"),
    plain("--trainer.max_steps soon", "trainer.max_steps=soon", "give a whole number"),
    plain("--trainer.max_steps", "--trainer.max_steps", "VALUE"),
    plain("--trainer.enable_checkpointing ja", "trainer.enable_checkpointing=ja", "true or false"),
    plain("--trainer.accumulate_grad_batches 0", "trainer.accumulate_grad_batches=0", "1 or more"),
    plain("--trainer.val_check_interval 0", "trainer.val_check_interval=0", "limit_val_batches: 0"),
    plain("--trainer.check_val_every_n_epoch 0", "trainer.check_val_every_n_epoch=0", "1 or more"),
    plain("--trainer.devices 0", "trainer.devices=0", "from 1 to 1024"),
    plain("--trainer.num_nodes 0", "trainer.num_nodes=0", "the number of hosts"),
    option("--trainer.gradient_clip_val -1", "gradient_clip_val=-1", "above 0"),
    plain("--trainer.gradient_clip_val .nan", "trainer.gradient_clip_val=nan", "above 0"),
    plain("--trainer.limit_train_batches -1", "trainer.limit_train_batches=-1", "above 0"),
    plain("--trainer.accelerator gpuu", "trainer.accelerator=gpuu", "did you mean gpu?"),
    plain("--trainer.accelerator gpu", "trainer.accelerator=gpu", "give cpu or auto", prepare=no_gpu),
    plain("--trainer.precision fp16", "trainer.precision=fp16", "did you mean 16-mixed?"),
    plain("--trainer.precision 8", "trainer.precision=8", "give one of 64, 32, 16"),
    option(
        "--trainer.precision 32 --trainer.plugins [AutoPrecision]",
        "trainer.precision=32-true",
        "AutoPrecision",
        "leave trainer.precision out",
        "--trainer.plugins null",
    ),
    plain("--seed_everything -1", "seed_everything=-1", "0 to 4294967295"),
    plain("--seed_everything 99999999999", "seed_everything=99999999999", "0 to 4294967295"),
    plain("--seed_everything x", "seed_everything=x", "give true or false or a whole number"),
    # Settings that do not fit each other: refused before a tokenizer is learned, or there would be more lines.
    option("--model.schedule.warmup_steps 4", "warmup_steps=4", "trainer.max_steps=3", "shorten the warmup"),
    option("--trainer.max_steps -1", "WarmupCosine", "set trainer.max_steps"),
    option("--model.decoder.n_heads 3", "d_model=32", "n_heads=3", "change one"),
    option("--data.seq_len 64", "data.seq_len=64", "max_seq_len=32", "shorten the one"),
    option("--data.vocab_size 400", "vocabulary of 400", "vocab_size=300", "make them equal"),
    option(["--model.param_rules", "[{pattern: nosuch, lr_scale: 2}]"], "param_rules", "'nosuch'", "near names are"),
    *(
        option(["--trainer.plugins", f"[{plugin}]"], word, lines=3, warm=True)
        for (plugin, word) in (
            ("Float8", "emulate"),
            ("{class_path: Float8, init_args: {recipe: rowise}}", "rowise"),
            ("{class_path: Float8, init_args: {emulate: true}}", "convert_small"),
            ("{class_path: Float8, init_args: {emulate: true, exclude: [nosuch]}}", "nosuch"),
            ("{class_path: FP16Mixed, init_args: {init_scale: -1}}", "init_scale=-1"),
            ("{class_path: BF16True, init_args: {update: nearest}}", "nearest"),
        )
    ),
    # Rules, optimizers and schedules.
    *(
        option(["--model.param_rules", f"[{{pattern: head, {rule}}}]"], *words, lines=3)
        for (rule, words) in (
            ("role: hed", ("model.param_rules.role=hed", "did you mean head?")),
            ("optimizer: muon", ("optimizer='muon'", "AdamW", "MuonAdamW")),
            ("optimiser: muon", ("model.param_rules", "no option 'optimiser'")),
            ("schedule: wsd", ("schedule", "'wsd'", "did you mean WarmupStableDecay?")),
            ("decay_schedule: cosine", ("decay_schedule", "'cosine'", "did you mean WarmupCosine?")),
        )
    ),
    option("--model.schedule PowerDecay --model.schedule.power 0", "PowerDecay.power=0", "above 0"),
    option("--model.schedule PowerDecay --model.schedule.decay_steps 3", "PowerDecay: the decay starts at step 0"),
    option("--model.optimizer lightning_tricks.Muon", "Muon", "no hidden matrix", "MuonAdamW"),
    option("--model.optimizer MuonAdamW --model.optimizer.momentum 2", "momentum=2", "below 1"),
    option("--model.optimizer AdamWBF16State", "AdamWBF16State", "bf16 on cpu", "take AdamW", lines=3, warm=True),
    option("--model.optimizer schedulefree.AdamWScheduleFree", "schedule=WarmupCosine", "constant", "no schedule"),
    # Callbacks that change the batch, the schedule or the length of a run.
    *(
        plain(["--trainer.callbacks", f"[{{class_path: {name}, init_args: {{{settings}}}}}]"], *words, lines=3)
        for (name, settings, words) in (
            ("BatchSizeWarmup", "", ("BatchSizeWarmup", "give one of the two")),
            ("BatchSizeWarmup", "double_every: 2, unit: epochs", ("unit", "epochs", "steps")),
            ("BatchSizeWarmup", "stages: {0: 1, 9: 4}", ("the last stage must be the recipe's batch",)),
            ("DecayOnDemand", "decay_steps: 0", ("DecayOnDemand.decay_steps=0", "1 or more")),
            ("DecayOnDemand", "", ("DecayOnDemand: the schedule is StepLR", "WarmupStableDecay")),
        )
    ),
    plain("--total_tokens many", "total_tokens=many", "number"),
    # Files and folders.
    option("--data.files no_such.txt", "files", "no_such.txt", "check the path"),
    option("--data.tokenizer no_such.json", "tokenizer='no_such.json'", "check the path"),
    option("--data.files secret", "files='secret'", "Permission denied", prepare=unreadable),
    option(f"{LOGGER}runs", "save_dir=runs", "is a file", "another folder", files={"runs": "x"}),
    option(f"{LOGGER}readonly", "save_dir=readonly", "Permission denied", prepare=readonly),
    option(f"{LOGGER}full", "save_dir=full", "No space left", "make room", prepare=full_disk),
    option(f"{SAVER}runs", "ModelCheckpoint.dirpath", "is a file", files={"runs": "x"}),
    option(f"{SAVER}full", "ModelCheckpoint.dirpath", "No space left", prepare=full_disk),
    # Checkpoints.
    option("--ckpt_path no_such.ckpt", "ckpt_path=no_such.ckpt", "no such file or folder"),
    option(["--ckpt_path", ""], "ckpt_path=''", "leave the option out"),
    plain("--ckpt_path best", "ckpt_path=best", "give that file"),
    plain("--ckpt_path http://127.0.0.1:9/x.ckpt", "ckpt_path=http://127.0.0.1:9/x.ckpt", "download"),
    plain("--ckpt_path s3://bucket/x.ckpt", "ckpt_path=s3://bucket/x.ckpt", "download"),
    plain("--ckpt_path nosuch://bucket/x.ckpt", "ckpt_path=nosuch://bucket/x.ckpt", "download"),
    plain("--ckpt_path small.yaml", "ckpt_path", "small.yaml", "no checkpoint"),
    checkpoint("missing", "lacks", "decoder.embed.weight", "give the recipe that wrote it"),
    checkpoint("missing", "lacks", "decoder.embed.weight", "give the recipe that wrote it", command="validate"),
    checkpoint("extra", "has besides", "more.weight", "give the recipe that wrote it"),
    checkpoint("shapes", "decoder.embed.weight", "[2, 2]", "[300, 32]", "give the recipe that wrote it"),
    checkpoint("other", "of another model", "and 11 more", "give the recipe that wrote it"),
    checkpoint("weights", "no optimizer state", "save_weights_only", "give a checkpoint that was saved whole"),
    checkpoint("pickle", "print", "weights_only", "if you trust it"),
    checkpoint("no_version", "pytorch-lightning_version", "give the file"),
    # A plan.
    command("plan --config small.yaml --gpu h1000", "gpu=h1000", "did you mean h100?", "--gpu_memory_gb"),
    command("plan --config small.yaml --price -1", "price=-1", "0 or more"),
    command("plan --config small.yaml --mfu 40", "mfu=40", "such as 0.4"),
    command("plan --config small.yaml --json {folder}", "this is a folder"),
    # The machine.
    option([], "SLURM_NTASKS=4", "srun", "unset SLURM_NTASKS", prepare=environment(SLURM_NTASKS="4")),
    option(
        "--data killed.Killed --data.files=text.txt --data.cache_dir=cache --data.vocab_size=300 --data.seq_len=32",
        "num_workers",
        "out of memory",
        "lower",
        files={"killed.py": KILLED},
        lines=3,
    ),
]
