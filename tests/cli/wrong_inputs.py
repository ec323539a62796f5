"""Wrong inputs of a newcomer, and what the one line must say of each. Each row is a real start: a mistake whose line
one function makes is tested there.

A row is the arguments after `fit --config small.yaml` (or a whole command line, see `Row.whole`), and words that the
line must hold: the option, its value, the remedy. `{folder}` in the arguments is the folder of the test.
Options that have nothing to do with the model come after a recipe whose model has none: it is read much faster.
"""

import os
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
        recipe: after which the arguments come.
    """

    args: str | list[str]
    words: tuple[str, ...]
    whole: bool = False
    edit: tuple[str, str] | None = None
    files: dict[str, str | bytes] = field(default_factory=dict)
    prepare: Prepare | None = None
    lines: int = 1
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


def unreadable(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """A folder `secret` of texts, which cannot be listed: root may list every real one."""
    secret, real = folder / "secret", os.scandir
    secret.mkdir()
    (secret / "text.txt").write_text("text")

    def scandir(path: Any = ".") -> Any:
        if Path(str(path)).absolute().is_relative_to(secret):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    patch.setattr(os, "scandir", scandir)


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


TORCHRUN = environment(  # of the first of two processes
    RANK="0", LOCAL_RANK="0", GROUP_RANK="0", WORLD_SIZE="2", GROUP_WORLD_SIZE="1", LOCAL_WORLD_SIZE="2",
    TORCHELASTIC_RUN_ID="x", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500",
)  # fmt: skip


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
LOGGER = "--trainer.logger=ResumingTensorBoardLogger --trainer.logger.save_dir="
SAVER = "--trainer.enable_checkpointing=true --trainer.callbacks+=ModelCheckpoint --trainer.callbacks.dirpath="


ROWS = [
    # Words that are misspelt or come from another program.
    command("trian --config small.yaml", "'trian'", "--help"),
    command("train --config small.yaml", "'train'", "did you mean fit?"),
    command("fit", "no model", "--config RECIPE.yaml"),
    command("prepare --config small.yaml --rank 2 --world 2", "rank=2, world=2", "from 0 to world - 1"),
    command("fit small.yaml", "small.yaml", "--config small.yaml"),
    command("cp tinny", "tinny", "did you mean tiny?"),
    command("cp", "error: cp: ", "required: recipe", "cp --help"),
    plain("--trainer.max_step 3", "trainer.max_step", "did you mean trainer.max_steps?"),
    option("--model.learning_rate 1e-3", "LanguageModel", "learning_rate", "did you mean model.optimizer.lr?"),
    option("--model.optimizer.learning_rate 1e-3", "AdamW", "learning_rate", "did you mean lr?"),
    plain("--resume last", "resume=last", "give one of auto, none"),
    edited("seed", "init_from: a\nckpt_path: b\nseed", "init_from=a and ckpt_path=b", "give one of them"),
    option("--init_from no_such.ckpt", "init_from=no_such.ckpt", "no such file"),
    option("--init_from other.ckpt", "init_from=other.ckpt", "has no 'decoder.", lines=3),
    option("--model.schedule trapezoid", "model.schedule", "'trapezoid'", "did you mean WarmupStableDecay?"),
    plain("--trainer.strategy fsdp22", "trainer.strategy=fsdp22", "did you mean fsdp2?"),
    plain(f"{MESH}.tensor x", "trainer.strategy.mesh.tensor=x", "give a whole number"),
    plain(
        "--trainer.strategy FSDP2Strategy --trainer.strategy.layers_per_stage 2",
        "trainer.strategy.layers_per_stage=2",
        "give a list in brackets",
    ),
    plain("--trainer.strategy.timeout_seconds 9", "trainer.strategy.timeout_seconds", "--trainer.strategy CLASS"),
    plain("--trainer.plugins BF16Mixd", "trainer.plugins: no class", "did you mean BF16Mixed?"),
    plain("--trainer.callbacks+=CUDAGraphs", "CUDAGraphs: CPUAccelerator has no CUDA graphs", "leave it out"),
    plain("--trainer.callbacks [Xyzzy]", "trainer.callbacks", "'Xyzzy'", "my_module.MyClass"),
    option("--model no_such_module.Model", "model", "'no_such_module'", "install it"),
    option(
        ["--trainer.callbacks", "[{class_path: ModelCheckpoint, init_args: {every_n_steps: 3}}]"],
        "trainer.callbacks: ModelCheckpoint",
        "'every_n_steps'",
        "did you mean every_n_train_steps?",
    ),
    edited("d_model:", "d_modl:", "model.decoder: Llama", "did you mean d_model?"),
    edited("trainer:", "trainr:", "trainr.accelerator", "did you mean trainer.accelerator?"),
    # The form of a recipe.
    command("fit --config no_such.yaml", "--config", "no_such.yaml", "check the path"),
    command("fit --config b.yaml", "b.yaml", "UTF-8", files={"b.yaml": bytes(range(256))}),
    plain("--trainer.callbacks [EarlyStopping", "trainer.callbacks=[EarlyStopping", "a list in brackets"),
    plain("--trainer.callbacks [EarlyStopping]", "trainer.callbacks: EarlyStopping needs 'monitor'", "under init_args"),
    edited(TRAINER, "trainer:\n", "trainer=null", "trainer: {max_steps: 100}"),
    edited(MODEL, "model: [a]\n", "model: give a class", "class_path"),
    # Launchers and other machines.
    plain("", "trainer.devices=1", "torchrun has started 2", "--nproc-per-node", lines=3, prepare=TORCHRUN),
    plain("--trainer.num_nodes 2", "trainer.num_nodes=2", "MASTER_ADDR, MASTER_PORT", "torchrun --nnodes"),
    plain("--trainer.accelerator cuda", "trainer.accelerator=cuda: ", "--trainer.accelerator cpu", prepare=no_gpu),
    plain("--trainer.accelerator gpu", "trainer.accelerator=gpu: ", "nvidia-smi", prepare=no_gpu),
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
    # Other commands.
    command("generate --ckpt_path list.ckpt", "list.ckpt holds no state_dict"),
    command("validate --config small.yaml --ckpt_path right.ckpt --text no.txt", "'no.txt' matches no file"),
    command("check --config small.yaml --gpu h1000", "gpu=h1000", "did you mean h100"),
    # Values of the wrong type, or out of range.
    option("--model.optimizer.lr fast", "model.optimizer.lr=fast", "give a number"),
    option("--model.optimizer.betas 0.9", "model.optimizer.betas=0.9", "[0.9, 0.95]"),
    # Settings that do not fit each other: refused before a tokenizer is learned, or there would be more lines.
    option("--model.schedule.warmup_steps 4", "warmup_steps=4", "trainer.max_steps=3", "shorten the warmup"),
    option(["--model.freeze", "[embd]"], "freeze: pattern 'embd'", "near names are", "decoder.embed.weight"),
    option("--model.freeze embed", "model.freeze=embed", "give a list in brackets"),
    option("--model.activation_checkpointing 0.5", "activation_checkpointing=0.5", "full, or {budget: SHARE}"),
    option("--model.activation_checkpointing.budget half", "{'budget': 'half'}", "or {budget: SHARE}, the share of"),
    option(["--model.activation_checkpointing", "{bugdet: .5}"], "{'bugdet': 0.5}", "or {budget: SHARE}, the share of"),
    command("show-data --config small.yaml --rows 0", "show-data: rows=0", "at least 1"),
    plain("--total_tokens many", "total_tokens=many", "number"),
    # Files and folders.
    option("--data.files no_such.txt", "files", "no_such.txt", "check the path"),
    option("--data.files secret", "files='secret'", "Permission denied", prepare=unreadable),
    option(f"{LOGGER}runs", "save_dir=runs", "is a file", "another folder", files={"runs": "x"}),
    option(f"{SAVER}runs", "ModelCheckpoint.dirpath", "is a file", files={"runs": "x"}),
    # Checkpoints.
    option("--ckpt_path no_such.ckpt", "ckpt_path=no_such.ckpt", "no such file or folder"),
    option(["--ckpt_path", ""], "ckpt_path=''", "leave the option out"),
    plain("--ckpt_path small.yaml", "ckpt_path", "small.yaml", "no checkpoint"),
    command(
        "fit --config small.yaml --trainer.max_steps 5 --ckpt_path no_version.ckpt",
        "ckpt_path",
        "no_version.ckpt",
        "pytorch-lightning_version",
        "give the file",
        lines=3,
    ),
    # The machine.
    option([], "trainer: ", "--ntasks", prepare=environment(SLURM_NTASKS="4")),
]
