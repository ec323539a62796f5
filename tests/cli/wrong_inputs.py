"""Wrong inputs of a newcomer, and what the one line must say of each. Add a row where a mistake is not answered yet.

A row is a name, the arguments after `fit --config small.yaml` (or a whole command line, see `Row.whole`), and words
that the line must hold: the option, its value, the remedy. `{folder}` in the arguments is the folder of the test.
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

PLAIN = """\
seed_everything: 0
model: lightning.pytorch.demos.boring_classes.BoringModel
""" + SMALL[SMALL.index("trainer:") :]

RECIPES = Path(__file__).parents[2] / "recipes"
Prepare = Callable[[Path, pytest.MonkeyPatch], object]


@dataclass(frozen=True)
class Row:
    """One wrong input.

    Args:
        name: of the test.
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

    name: str
    args: str | list[str]
    words: tuple[str, ...]
    whole: bool = False
    edit: tuple[str, str] | None = None
    files: dict[str, str | bytes] = field(default_factory=dict)
    prepare: Prepare | None = None
    lines: int = 1
    warm: bool = False
    recipe: str = "small.yaml"


def recipe(name: str, right: str, wrong: str, *words: str) -> Row:
    """A row whose mistake is in the file."""
    return Row(name, [], words, edit=(right, wrong))


def command(name: str, args: str, *words: str) -> Row:
    """A row that is a whole command line."""
    return Row(name, args, words, whole=True)


def option(args: str, *words: str) -> Row:
    """A row that is an option on the command line."""
    return Row(args, args, words)


def plain(args: str, *words: str) -> Row:
    """A row that is an option on the command line and has nothing to do with the model."""
    return Row(args, args, words, recipe="plain.yaml")


def checkpoint(name: str, *words: str, command: str = "fit") -> Row:
    """A row that goes on from a wrong checkpoint, which the test writes."""
    args = f"{command} --config small.yaml --trainer.max_steps 5 --ckpt_path {name}.ckpt"
    return Row(f"{command} from {name}", args, ("ckpt_path", f"{name}.ckpt", *words), whole=True, lines=3)


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

ROWS = [
    # Words that are misspelt or come from another program.
    command("no such command", "trian --config small.yaml", "'trian'", "--help"),
    command("a command of another program", "train --config small.yaml", "'train'", "did you mean fit?"),
    command("no command", "--config small.yaml", "no command: write one of fit,validate,test,predict"),
    command("fit without a recipe", "fit", "no model", "--config RECIPE.yaml"),
    command("a recipe without --config", "fit small.yaml", "small.yaml", "--config small.yaml"),
    command("a misspelt --config", "fit --confg small.yaml", "--confg", "did you mean config?"),
    command("--config without a file", "fit --config", "--config", "VALUE"),
    command("cp of no recipe", "cp tinny", "tinny", "did you mean tiny?"),
    command("cp without a name", "cp", "error: cp: ", "required: recipe", "cp --help"),
    command("an option that ls lacks", "ls --nosuch", "error: ls: ", "--nosuch", "ls --help"),
    command("consolidate without a file", "consolidate folder", "error: consolidate: ", "required: file", "--help"),
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
    recipe("resume yes", "seed_everything: 0", "seed_everything: 0\nresume: yes", "resume=True", "give auto"),
    command("validate --resume", "validate --config small.yaml --resume auto", "--resume is an option of fit", "last"),
    command("prepare --init_from", "prepare --config small.yaml --init_from x", "--init_from is an option of fit"),
    plain("--init_from a.ckpt --ckpt_path b.ckpt", "init_from=a.ckpt", "ckpt_path=b.ckpt", "give one of them"),
    plain("--init_from=a.ckpt --ckpt_path=b.ckpt", "init_from=a.ckpt", "ckpt_path=b.ckpt", "give one of them"),
    plain("--resume auto --trainer.default_root_dir s3://bucket", "resume=auto: s3://bucket", "--ckpt_path ADDRESS"),
    command("prepare without data", "prepare --config plain.yaml", "prepare: the recipe has no data"),
    option("--init_from no_such.ckpt", "init_from=no_such.ckpt", "no such file"),
    option("--init_from small.yaml", "init_from=small.yaml", "no checkpoint"),
    Row("init_from another model", "--init_from other.ckpt", ("init_from=other.ckpt", "has no 'decoder."), lines=3),
    Row("init_from missing weights", "--init_from missing.ckpt", ("init_from=missing.ckpt", "embed.weight"), lines=3),
    Row("init_from a pickle", "--init_from pickle.ckpt", ("init_from=pickle.ckpt", "weights_only=True"), lines=3),
    command("verify-resume alone", "verify-resume", "--config RECIPE.yaml"),
    command("verify-resume --steps 3", "verify-resume --config small.yaml --steps 3", "steps=3", "at least 4"),
    command("verify-resume --steps x", "verify-resume --config small.yaml --steps x", "'x'", "verify-resume --help"),
    command("verify", "verify --config small.yaml", "unknown command 'verify'", "did you mean verify-resume?"),
    option("--model.optimizer.nosuch 1", "AdamW", "nosuch", "its options are lr, betas"),
    option("--model.schedule trapezoid", "model.schedule", "'trapezoid'", "did you mean WarmupStableDecay?"),
    option("--model.schedule cosine", "model.schedule", "'cosine'", "did you mean WarmupCosine?"),
    option("--model.schedule Linear", "model.schedule", "'Linear'", "did you mean WarmupLinear?"),
    option("--model.optimizer adam", "model.optimizer", "'adam'", "did you mean Adam?"),
    option("--model.optimizer adamw", "model.optimizer", "'adamw'", "did you mean AdamW?"),
    plain("--trainer.strategy fsdp2", "trainer.strategy=fsdp2", "did you mean FSDP2Strategy?"),
    plain("--trainer.strategy FSDP2Stratgy", "trainer.strategy=FSDP2Stratgy", "did you mean FSDP2Strategy?"),
    plain("--trainer.strategy.timeout_seconds 9", "trainer.strategy.timeout_seconds", "--trainer.strategy CLASS"),
    plain("--trainer.logger tensorboard", "trainer.logger", "did you mean ResumingTensorBoardLogger?"),
    plain("--trainer.callbacks [Xyzzy]", "trainer.callbacks", "'Xyzzy'", "my_module.MyClass"),
    option("--model no_such_module.Model", "model", "'no_such_module'", "install it"),
    Row(
        "every_n_steps",
        ["--trainer.callbacks", "[{class_path: ModelCheckpoint, init_args: {every_n_steps: 3}}]"],
        ("trainer.callbacks: ModelCheckpoint", "'every_n_steps'", "did you mean every_n_train_steps?"),
    ),
    recipe("max_stps", "max_steps:", "max_stps:", "trainer.max_stps", "did you mean trainer.max_steps?"),
    recipe("d_modl", "d_model:", "d_modl:", "model.decoder: Llama", "did you mean d_model?"),
    recipe("Lama", "class_path: Llama", "class_path: Lama", "model.decoder", "'Lama'", "did you mean Llama?"),
    recipe("WarmupCosin", "WarmupCosine", "WarmupCosin", "model.schedule", "did you mean WarmupCosine?"),
    recipe("warmup_step", "warmup_steps:", "warmup_step:", "model.schedule: WarmupCosine", "mean warmup_steps?"),
    recipe("lrr", "lr: 1", "lrr: 1", "model.optimizer: AdamW has no option 'lrr'", "did you mean lr?"),
    recipe("TextDat", "TextData", "TextDat", "data: no class named 'TextDat'", "did you mean TextData?"),
    recipe("seq_length", "seq_len: 32, micro", "seq_length: 32, micro", "data: TextData", "did you mean seq_len?"),
    recipe("trainr", "trainer:", "trainr:", "trainr.accelerator", "did you mean trainer.accelerator?"),
    recipe("shedule", "schedule:", "shedule:", "LanguageModel has no option 'shedule", "did you mean schedule?"),
    plain("--trainer.callbacks [MemoryMonitr]", "'MemoryMonitr'", "did you mean MemoryMonitor?"),
    option("--model.decoder.n_layer 2", "Llama has no option 'n_layer'", "did you mean n_layers?"),
    # The form of a recipe.
    command("no such file", "fit --config no_such.yaml", "--config", "no_such.yaml", "check the path"),
    command("a folder for a recipe", "fit --config {folder}", "--config", "check the path"),
    Row("a binary recipe", "fit --config b.yaml", ("b.yaml", "UTF-8"), True, files={"b.yaml": bytes(range(256))}),
    Row("an empty recipe", "fit --config e.yaml", ("e.yaml", "no settings"), True, files={"e.yaml": ""}),
    Row("a list for a recipe", "fit --config l.yaml", ("l.yaml", "no settings"), True, files={"l.yaml": "- a\n- b\n"}),
    Row("a tab", "fit --config t.yaml", ("t.yaml", "line 2"), True, files={"t.yaml": "trainer:\n\tmax_steps: 1\n"}),
    Row("an open bracket", "fit --config o.yaml", ("o.yaml", "line 2"), True, files={"o.yaml": "trainer: [\n"}),
    recipe(
        "a key twice", "  max_steps: 3\n", "  max_steps: 3\n  logger: true\n  max_steps: 4\n",
        "lines 13 and 15", "'trainer.max_steps'", "join the two",
    ),
    recipe("a group twice", "trainer:\n", "model: {}\ntrainer:\n", "lines 2 and 11", "'model'", "join the two"),
    Row(
        "a key twice on the command line",
        ["--trainer", "{max_steps: 3, max_steps: 4}"],
        ("--trainer", "'max_steps' stands twice", "join the two"),
    ),
    recipe(
        "a decoder without init_args", DECODER, "{class_path: Llama, vocab_size: 300, more: {",
        "line 5", "'model.decoder.vocab_size'", "settings of Llama under init_args",
    ),
    recipe(
        "a schedule without init_args", "WarmupCosine, init_args: {warmup_steps: 1}", "WarmupCosine, warmup_steps: 1",
        "line 7", "'model.schedule.warmup_steps'", "settings of WarmupCosine under init_args",
    ),
    Row(
        "a callback without init_args",
        ["--trainer.callbacks", "[{class_path: ModelCheckpoint, dirpath: x}]"],
        ("--trainer.callbacks", "'dirpath'", "ModelCheckpoint under init_args"),
    ),
    plain("--trainer.callbacks [EarlyStopping", "trainer.callbacks=[EarlyStopping", "a list in brackets"),
    plain("--trainer.callbacks [EarlyStopping]", "trainer.callbacks: EarlyStopping needs 'monitor'", "under init_args"),
    # What a recipe cannot be: each was a traceback, a hang or an abort.
    Row(
        "a recipe of null",
        "fit --config n.yaml",
        ("`null` is no recipe", "max_steps"),
        True,
        files={"n.yaml": "null\n"},
    ),
    command("null for a recipe", "fit --config null", "--config: `null` is no recipe"),
    recipe(
        "an empty trainer", SMALL[SMALL.index("trainer:") :], "trainer:\n", "trainer=null", "trainer: {max_steps: 100}"
    ),
    recipe(
        "a list for the trainer", SMALL[SMALL.index("trainer:") :], "trainer: [1, 2]\n", "trainer=[1, 2]", "settings"
    ),
    recipe(
        "a word for the trainer", SMALL[SMALL.index("trainer:") :], "trainer: hi\n", "trainer=hi", "file of settings"
    ),
    recipe("an empty model", SMALL[SMALL.index("model:") :], "model:\n", "no model", "--config RECIPE.yaml"),
    recipe("a list for the model", SMALL[SMALL.index("model:") :], "model: [a]\n", "model: give a class", "class_path"),
    recipe(
        "a number for the data",
        SMALL[SMALL.index("data:") : SMALL.index("trainer:")],
        "data: 5\n",
        "data: give a class",
    ),
    recipe(
        "data null", SMALL[SMALL.index("data:") : SMALL.index("trainer:")], "data: null\n", "no data", "data: TextData"
    ),
    recipe("no data at all", SMALL[SMALL.index("data:") : SMALL.index("trainer:")], "", "no data", "train_dataloader"),
    Row(
        "an anchor in itself",
        "fit --config r.yaml",
        ("r.yaml, line 1", "anchor holds itself"),
        True,
        files={"r.yaml": "trainer: &a\n  callbacks: *a\n"},
    ),
    Row(
        "an anchor in itself on the command line",
        ["--trainer.callbacks", "&a [*a]"],
        ("--trainer.callbacks", "anchor holds itself"),
        recipe="plain.yaml",
    ),
    Row(
        "anchors that multiply",
        "fit --config m.yaml",
        ("m.yaml", "more than 100,000 values"),
        True,
        files={"m.yaml": LAUGHS},
    ),
    Row(
        "brackets without end",
        "fit --config d.yaml",
        ("d.yaml", "too deep"),
        True,
        files={"d.yaml": "a: " + "[" * 900 + "]" * 900},
    ),
    # Classes in the wrong place.
    Row(
        "a callback as a key",
        ["--trainer.callbacks", "[{EMA: {decay: 0.9}}]"],
        ("trainer.callbacks: EMA is a class", "{class_path: EMA, init_args: {decay: ...}}"),
        recipe="plain.yaml",
    ),
    recipe(
        "an optimizer as a key",
        "{class_path: AdamW, init_args: {lr: 1.0e-3, betas: [0.9, 0.95]}}",
        "{AdamW: {lr: 1}}",
        "model.optimizer: AdamW is a class",
        "init_args: {lr: ...}",
    ),
    plain("--trainer.EMA.decay 0.9", "EMA is a class", "class_path: EMA"),
    plain("--trainer.callbacks+=AdamW", "trainer.callbacks: AdamW is a class of another kind"),
    option("--model.schedule AdamW", "model.schedule: AdamW is a class of another kind"),
    option("--model.optimizer Llama", "model.optimizer: Llama is a class of another kind"),
    Row(
        "StepGuard twice",
        "--trainer.callbacks+=StepGuard --trainer.callbacks+=StepGuard",
        ("trainer.callbacks: StepGuard stands twice", "take one out"),
        recipe="plain.yaml",
    ),
    Row(
        "SafeCheckpoint where nothing shall be saved",
        "--trainer.callbacks+=SafeCheckpoint",
        ("trainer.enable_checkpointing=False: SafeCheckpoint in trainer.callbacks", "leave enable_checkpointing out"),
        recipe="plain.yaml",
    ),
    Row(
        "two savers in one folder",
        "--trainer.enable_checkpointing true --trainer.callbacks+=SafeCheckpoint --trainer.callbacks+=ModelCheckpoint",
        ("SafeCheckpoint: dirpath=", "another ModelCheckpoint saves to this folder", "another dirpath"),
        recipe="plain.yaml",
    ),
    Row(
        "SafeCheckpoint twice",
        "--trainer.enable_checkpointing true --trainer.callbacks+=SafeCheckpoint --trainer.callbacks+=SafeCheckpoint",
        ("trainer.callbacks: SafeCheckpoint stands twice",),
        recipe="plain.yaml",
    ),
    Row(
        "EMA of a lazy module",
        "--model lazy.Lazy --trainer.callbacks+=EMA",
        ("EMA: layer.weight has no size yet", "configure_model"),
        recipe="plain.yaml",
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
    plain("--trainer.devices 10000000", "trainer.devices=10000000", "CPU cores", "give at most"),
    # Launchers and other machines.
    *(
        Row(
            f"{name}={value}",
            "",
            (f"{name}='{value}'", "a whole number", f"unset {name}"),
            recipe="plain.yaml",
            prepare=environment(**{name: value}),
        )
        for name, value in (
            ("WORLD_SIZE", "abc"),
            ("RANK", "abc"),
            ("LOCAL_RANK", "-1"),
            ("NODE_RANK", "1.5"),
            ("MASTER_PORT", ""),
            ("SLURM_NTASKS", "four"),
            ("LOCAL_WORLD_SIZE", "٤"),
        )
    ),
    Row(
        "a rank beyond the world",
        "",
        ("RANK=5, WORLD_SIZE=2", "from 0", "torchrun"),
        recipe="plain.yaml",
        prepare=environment(RANK="5", WORLD_SIZE="2"),
    ),
    Row(
        "a local rank beyond the host",
        "",
        ("LOCAL_RANK=2, LOCAL_WORLD_SIZE=2", "unset"),
        recipe="plain.yaml",
        prepare=environment(LOCAL_RANK="2", LOCAL_WORLD_SIZE="2"),
    ),
    Row(
        "a port that is none",
        "",
        ("MASTER_PORT=99999", "65535"),
        recipe="plain.yaml",
        prepare=environment(MASTER_PORT="99999"),
    ),
    Row(
        "torchrun of two processes for one device",
        "",
        ("trainer.devices=1", "torchrun has started 2", "--nproc-per-node"),
        recipe="plain.yaml",
        lines=3,
        prepare=environment(
            TORCHELASTIC_RUN_ID="x",
            RANK="0",
            WORLD_SIZE="2",
            LOCAL_RANK="0",
            LOCAL_WORLD_SIZE="2",
            GROUP_RANK="0",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="29500",
        ),
    ),
    plain("--trainer.num_nodes 2", "trainer.num_nodes=2", "MASTER_ADDR, MASTER_PORT", "torchrun --nnodes"),
    Row(
        "a host beyond the number of hosts",
        "--trainer.num_nodes 2",
        ("NODE_RANK=7", "trainer.num_nodes=2"),
        recipe="plain.yaml",
        prepare=environment(NODE_RANK="7", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500"),
    ),
    plain("--trainer.accelerator tpu", "trainer.accelerator=tpu", "give cpu or auto"),
    plain("--trainer.accelerator hpu", "trainer.accelerator=hpu", "no such accelerator"),
    Row(
        "cuda without a GPU",
        "--trainer.accelerator cuda",
        ("trainer.accelerator=cuda", "give cpu or auto"),
        prepare=no_gpu,
        recipe="plain.yaml",
    ),
    Row(
        "mps without a GPU",
        "--trainer.accelerator mps",
        ("trainer.accelerator=mps", "give cpu or auto"),
        prepare=no_gpu,
        recipe="plain.yaml",
    ),
    *(
        Row(f"{name} on a laptop", f"fit --config '{RECIPES}/{name}.yaml'", words, True, prepare=LAPTOP)
        for name, words in (
            ("llama7b", ("trainer.devices=8", "no GPU", "--trainer.devices 1")),
            ("llama7b_deepspeed", ("trainer.devices=8", "no GPU")),
            ("llama1b", ("trainer.devices=8", "no GPU")),
            ("gpt2_124m", ("train='data/train*.bin'", "check the path")),
        )
    ),
    Row(
        "a model larger than the machine",
        f"fit --config '{RECIPES}/llama7b.yaml' --trainer.devices 1 --trainer.strategy auto "
        "--data.train shard.bin --data.val null",
        ("model.decoder: n_layers=32", "25 GiB", "16 GiB", "more devices"),
        True,
        prepare=LAPTOP,
        files={"shard.bin": b"x"},
    ),
    Row(
        "DeepSpeed without its package",
        "--trainer.strategy DeepSpeedZeROStrategy",
        ("DeepSpeedZeROStrategy needs deepspeed",),
        prepare=without("deepspeed"),
    ),
    Row(
        "parquet without its package",
        "--data.files p.parquet",
        ("p.parquet needs", "lightning-tricks[parquet]"),
        prepare=without("pyarrow"),
        files={"p.parquet": "x"},
    ),
    Row(
        "a dataset without its package",
        "--data.files null --data.hf_dataset a/b",
        ("a/b", "lightning-tricks[datasets]"),
        prepare=without("datasets"),
    ),
    Row(
        "a tokenizer's file that is none",
        "--data.tokenizer t.json",
        ("t.json", "not a tokenizers JSON"),
        files={"t.json": "{}"},
    ),
    Row(
        "null among the texts",
        "--data.files n.jsonl",
        ("n.jsonl, line 2", "null", "text_field"),
        warm=True,
        lines=3,
        files={"n.jsonl": '{"text": "a b c"}\n{"text": null}\n'},
    ),
    Row(
        "another key than text",
        "--data.files k.jsonl",
        ("text_field='text'", "k.jsonl, line 1", "body"),
        warm=True,
        lines=3,
        files={"k.jsonl": '{"body": "a b c"}\n'},
    ),
    # Other commands.
    Row("cp below a file", "cp tiny text.txt/tiny.yaml", ("cp: to=text.txt", "is a file", "another folder"), True),
    command("cp to a place without files", "cp tiny /proc/tiny.yaml", "cp: to=/proc", "cannot be written"),
    command("cp over a file", "cp tiny small.yaml", "small.yaml exists", "remove it first"),
    command("consolidate to a folder that is not there", "consolidate x no/such.ckpt", "file=no/such.ckpt", "make it"),
    command("consolidate one file", "consolidate right.ckpt one.ckpt", "right.ckpt is one file already"),
    command("autopsy without a step", "autopsy --config small.yaml --ckpt_path right.ckpt", "autopsy needs --step"),
    command("autopsy without a checkpoint", "autopsy --config small.yaml --step 1", "--ckpt_path FILE"),
    command(
        "autopsy to a place without files",
        "autopsy --config small.yaml --ckpt_path right.ckpt --step 1 --json /proc/a",
        "json=/proc/a",
        "cannot be written",
    ),
    command(
        "autopsy to a folder",
        "autopsy --config small.yaml --ckpt_path right.ckpt --step 1 --json {folder}",
        "this is a folder",
        "name a file",
    ),
    command("coordinate-check to a folder", "coordinate-check --config small.yaml --json {folder}", "this is a folder"),
    command(
        "predict to a text file",
        "predict --config small.yaml --ckpt_path right.ckpt --output a.txt",
        "output='a.txt'",
        ".jsonl",
    ),
    command("generate of nothing", "generate --ckpt_path no.ckpt", "ckpt_path=no.ckpt", "no such file"),
    Row(
        "generate of text", "generate --ckpt_path t.ckpt", ("t.ckpt is no checkpoint",), True, files={"t.ckpt": "hello"}
    ),
    Row(
        "generate of bytes",
        "generate --ckpt_path b.ckpt",
        ("b.ckpt is no checkpoint",),
        True,
        files={"b.ckpt": bytes(range(128, 256))},
    ),
    Row(
        "generate of a pickle", "generate --ckpt_path p.ckpt", ("p.ckpt",), True, files={"p.ckpt": pickle.dumps([1, 2])}
    ),
    command("generate of a list", "generate --ckpt_path list.ckpt", "list.ckpt holds no state_dict"),
    command("generate of another model", "generate --ckpt_path other.ckpt", "other.ckpt holds no decoder_config"),
    command(
        "generate of nothing new",
        "generate --ckpt_path right.ckpt --max_new_tokens 0",
        "max_new_tokens=0",
        "at least 1",
    ),
    command("generate without a checkpoint", "generate --prompt x", "generate: ", "required: --ckpt_path", "--help"),
    command("fit from a list", "fit --config small.yaml --ckpt_path list.ckpt", "list.ckpt holds no state_dict"),
    command("validate a list", "validate --config small.yaml --ckpt_path list.ckpt", "list.ckpt holds no state_dict"),
    command("ledger of nothing", "ledger check no_such", "no_such"),
    command("branch without a length", "branch --config small.yaml --ckpt_path right.ckpt", "--decay_steps N"),
    command(
        "branch from last", "branch --config small.yaml --ckpt_path last --decay_steps 2", "ckpt_path=last", "FILE"
    ),
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
    plain("--trainer.devices 0", "trainer.devices=0", "1 or more"),
    plain("--trainer.num_nodes 0", "num_nodes", "positive integer", "0"),
    option("--trainer.gradient_clip_val -1", "gradient_clip_val=-1", "above 0"),
    plain("--trainer.gradient_clip_val .nan", "trainer.gradient_clip_val=nan", "above 0"),
    plain("--trainer.limit_train_batches -1", "-1", "limit_train_batches", "[0.0, 1.0]"),
    plain("--trainer.accelerator gpuu", "trainer.accelerator=gpuu", "did you mean gpu?"),
    Row(
        "gpu without a GPU", "--trainer.accelerator gpu", ("trainer.accelerator=gpu", "give cpu or auto"),
        prepare=no_gpu, recipe="plain.yaml",
    ),
    plain("--trainer.precision fp16", "trainer.precision=fp16", "did you mean 16-mixed?"),
    plain("--trainer.precision 8", "trainer.precision=8", "give one of 64, 32, 16"),
    option(
        "--trainer.precision 32 --trainer.plugins [AutoPrecision]", "trainer.precision=32-true", "AutoPrecision",
        "leave trainer.precision out", "--trainer.plugins null",
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
    Row(
        "a rule for no parameter", ["--model.param_rules", "[{pattern: nosuch, lr_scale: 2}]"],
        ("param_rules", "'nosuch'", "near names are"),
    ),
    *(
        Row(plugin, ["--trainer.plugins", f"[{plugin}]"], (word,), lines=3, warm=True)
        for plugin, word in (
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
        Row(f"param_rules: {rule}", ["--model.param_rules", f"[{{pattern: head, {rule}}}]"], words, lines=3)
        for rule, words in (
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
    Row(
        "AdamWBF16State", "--model.optimizer AdamWBF16State", ("AdamWBF16State", "bf16 on cpu", "take AdamW"), lines=3,
        warm=True,
    ),
    option("--model.optimizer schedulefree.AdamWScheduleFree", "schedule=WarmupCosine", "constant", "no schedule"),
    # Callbacks that change the batch, the schedule or the length of a run.
    *(
        Row(
            f"{name} {settings}", ["--trainer.callbacks", f"[{{class_path: {name}, init_args: {{{settings}}}}}]"],
            words, recipe="plain.yaml", lines=3,
        )
        for name, settings, words in (
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
    Row("an unreadable folder", "--data.files secret", ("files='secret'", "Permission denied"), prepare=unreadable),
    Row(
        "a file for the logs", f"{LOGGER}runs", ("save_dir=runs", "is a file", "another folder"), files={"runs": "x"},
    ),
    Row("a read-only folder", f"{LOGGER}readonly", ("save_dir=readonly", "Permission denied"), prepare=readonly),
    Row("a full disk", f"{LOGGER}full", ("save_dir=full", "No space left", "make room"), prepare=full_disk),
    Row("checkpoints to a file", f"{SAVER}runs", ("ModelCheckpoint.dirpath", "is a file"), files={"runs": "x"}),
    Row("checkpoints to a full disk", f"{SAVER}full", ("ModelCheckpoint.dirpath", "No space left"), prepare=full_disk),
    # Checkpoints.
    option("--ckpt_path no_such.ckpt", "ckpt_path=no_such.ckpt", "no such file or folder"),
    Row("an empty ckpt_path", ["--ckpt_path", ""], ("ckpt_path=''", "leave the option out")),
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
    # The machine.
    Row(
        "a leftover SLURM_NTASKS", [], ("SLURM_NTASKS=4", "srun", "unset SLURM_NTASKS"),
        prepare=lambda _, patch: patch.setenv("SLURM_NTASKS", "4"),
    ),
    Row(
        "a loader's worker killed", "--data killed.Killed --data.files=text.txt --data.cache_dir=cache "
        "--data.vocab_size=300 --data.seq_len=32", ("num_workers", "out of memory", "lower"),
        files={"killed.py": KILLED}, lines=3,
    ),
]  # fmt: skip
