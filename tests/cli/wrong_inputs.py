"""Wrong inputs of a newcomer, and what the one line must say of each. Add a row where a mistake is not answered yet.

A row is a name, the arguments after `fit --config small.yaml` (or a whole command line, see `Row.whole`), and words
that the line must hold: the option, its value, the remedy. `{folder}` in the arguments is the folder of the test.
Options that have nothing to do with the model come after a recipe whose model has none: it is read much faster.
"""

import os
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
        cold: where the text has not been tokenized yet, and must not be: the recipe alone shows the mistake.
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
    cold: bool = False
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


def cold(args: str, *words: str) -> Row:
    """A row that is an option on the command line, and is refused before the text is tokenized."""
    return Row(args, args, words, cold=True)


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
    command("no command", "--config small.yaml", "no command", "fit, validate, test, predict, prepare or autopsy"),
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
    option("--model.schedule WSD", "model.schedule", "'WSD'", "did you mean WarmupStableDecay?"),
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
    # Values of the wrong type, or out of range.
    option("--model.optimizer.lr fast", "model.optimizer.lr=fast", "give a number"),
    option("--model.optimizer.lr inf", "model.optimizer.lr=inf", "give a number"),
    option("--model.optimizer.lr nan", "model.optimizer.lr=nan", "give a number"),
    option("--model.optimizer.lr .inf", "lr=inf", "give a finite number"),
    option("--model.optimizer.lr .nan", "optimizer.lr", "nan", "give another value"),
    cold("--model.optimizer.lr -1e-3", "optimizer.lr", "learning rate: -0.001", "give another value"),
    option("--model.optimizer.lr=-0.5", "optimizer.lr", "-0.5", "give another value"),
    option("--model.optimizer.betas 0.9", "model.optimizer.betas=0.9", "[0.9, 0.95]"),
    option("--model.optimizer.betas [0.9]", "model.optimizer.betas=[0.9]", "a list of 2 values"),
    cold("--model.optimizer.betas [0.9,2.0]", "optimizer.betas", "2.0", "give another value"),
    option("--model.optimizer.weight_decay 0.3", "weight_decay=0.3", "beside the optimizer"),
    cold("--model.weight_decay -1", "weight_decay=-1", "0 or more"),
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
        "leave trainer.precision out",
    ),
    plain("--seed_everything -1", "seed_everything=-1", "0 to 4294967295"),
    plain("--seed_everything 99999999999", "seed_everything=99999999999", "0 to 4294967295"),
    plain("--seed_everything x", "seed_everything=x", "give true or false or a whole number"),
    # Settings that do not fit each other: refused before a tokenizer is learned, or there would be more lines.
    cold("--model.schedule.warmup_steps 4", "warmup_steps=4", "trainer.max_steps=3", "shorten the warmup"),
    cold("--trainer.max_steps -1", "WarmupCosine", "set trainer.max_steps"),
    option("--model.decoder.n_heads 3", "d_model=32", "n_heads=3", "change one"),
    cold("--data.seq_len 64", "data.seq_len=64", "max_seq_len=32", "shorten the one"),
    cold("--data.vocab_size 400", "vocabulary of 400", "vocab_size=300", "make them equal"),
    Row(
        "a rule for no parameter", ["--model.param_rules", "[{pattern: nosuch, lr_scale: 2}]"],
        ("param_rules", "'nosuch'", "near names are"),
        cold=True,
    ),
    *(
        Row(plugin, ["--trainer.plugins", f"[{plugin}]"], (word,), lines=3)
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
            ("schedule: WSD", ("schedule", "'WSD'", "did you mean WarmupStableDecay?")),
            ("decay_schedule: cosine", ("decay_schedule", "'cosine'", "did you mean WarmupCosine?")),
        )
    ),
    cold("--model.schedule PowerDecay --model.schedule.power 0", "PowerDecay.power=0", "above 0"),
    cold("--model.schedule PowerDecay --model.schedule.decay_steps 3", "PowerDecay: the decay starts at step 0"),
    option("--model.optimizer lightning_tricks.Muon", "Muon", "no hidden matrix", "MuonAdamW"),
    option("--model.optimizer MuonAdamW --model.optimizer.momentum 2", "momentum=2", "below 1"),
    option("--model.optimizer AdamWBF16State", "AdamWBF16State", "bf16 on cpu", "take AdamW"),
    cold("--model.optimizer schedulefree.AdamWScheduleFree", "schedule=WarmupCosine", "constant", "no schedule"),
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
        cold=True,
    ),
    Row("a read-only folder", f"{LOGGER}readonly", ("save_dir=readonly", "Permission denied"), prepare=readonly),
    Row("a full disk", f"{LOGGER}full", ("save_dir=full", "No space left", "make room"), prepare=full_disk),
    Row("checkpoints to a file", f"{SAVER}runs", ("ModelCheckpoint.dirpath", "is a file"), files={"runs": "x"}),
    Row("checkpoints to a full disk", f"{SAVER}full", ("ModelCheckpoint.dirpath", "No space left"), prepare=full_disk),
    # Checkpoints.
    cold("--ckpt_path no_such.ckpt", "ckpt_path=no_such.ckpt", "no such file or folder"),
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
