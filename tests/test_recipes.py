"""Every recipe parses, builds whole on the meta device, fits its own schedule, and says what it is."""

import copy
import functools
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cli.parsers import no_hyper_parameters, one_parser  # noqa: F401, fixtures
from harness.preloaded import python
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_tricks.cli import load_recipe
from lightning_tricks.commands import recipes_folder
from lightning_tricks.commands.check.checks import Checked, layout
from lightning_tricks.data import ShardWriter
from lightning_tricks.parallel.dims import Mesh
from lightning_tricks.parallel.parallelize import ParallelOptions, parallelize
from lightning_tricks.parallel.shard import local_bytes
from lightning_tricks.strategies import DeepSpeedZeROStrategy, FSDP2Strategy

pytestmark = pytest.mark.usefixtures("one_parser", "no_hyper_parameters")
RECIPES = sorted(recipes_folder().glob("*.yaml"))
PARAMETERS = {
    "tiny": 5_245_696,
    "moe_tiny": 11_414_272,
    "gpt2_124m": 124_373_760,  # 50304 rows and no biases: nanoGPT prints 123.59M without the 786,432 of its positions
    "speedrun_124m": 162_223_872,  # an untied head; the blocks' 84,934,656 are GPT-2's
    "llama1b": 1_100_048_384,
    "llama7b": 6_738_415_616,
    "llama7b_1gpu": 6_738_415_616,
    "llama7b_deepspeed": 6_738_415_616,
    "llama70b": 70_553_706_496,
    "llama405b": 405_853_388_800,
    "llama405b_3d": 405_853_388_800,
    "mixtral_8x7b": 46_702_792_704,
    "moe_671b": 666_776_728_576,
}
TOKENS_A_STEP = {
    "gpt2_124m": 524_288, "speedrun_124m": 524_288, "llama1b": 2_097_152, "llama7b": 4_194_304, "llama7b_1gpu": 524_288,
    "llama7b_deepspeed": 4_194_304, "llama70b": 16_777_216, "llama405b": 16_777_216,
    "llama405b_3d": 16_777_216, "mixtral_8x7b": 4_194_304, "moe_671b": 62_914_560,
}  # fmt: skip


PARTS = {"1x8": (1, 8), "2x8": (2, 8), "8x8": (8, 8)}  # hosts, devices of each
# but for the one whose optimizer keeps less
LAID_OUT = [(name, None) for name in TOKENS_A_STEP if name != "speedrun_124m"] + [("llama7b", part) for part in PARTS]


def configs(name, part=None):
    """The options that name a recipe and a part of recipes/parts/ over it."""
    files = [recipes_folder() / f"{name}.yaml"] + ([recipes_folder() / "parts" / f"{part}.yaml"] if part else [])
    return [text for file in files for text in ("--config", str(file))]


@functools.cache
def built(name, part=None):
    """A recipe's module on the meta device, its data and the Trainer's arguments, for all tests that only read them."""
    model, data, trainer = load_recipe(*configs(name, part))
    with torch.device("meta"):
        model.configure_model()
    return model, data, trainer


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_builds_whole_on_meta_and_fits_its_schedule(recipe):
    model, data, trainer = built(recipe.stem)
    count = sum(p.numel() for p in model.parameters())
    print(f"{recipe.stem}: {count:,} parameters")
    if recipe.stem in PARAMETERS:
        assert count == PARAMETERS[recipe.stem]
    assert all(p.is_meta for p in model.parameters())
    model.schedule.check(trainer["max_steps"])
    assert data.seq_len <= model.config.max_seq_len
    assert data.vocab_size <= model.config.vocab_size
    assert trainer["gradient_clip_val"] == 1.0


def processes(trainer):
    """Number of processes of a recipe's run."""
    devices = trainer["devices"] if isinstance(trainer["devices"], int) else 1
    return devices * (trainer["num_nodes"] or 1)


def data_ranks(trainer):
    """Number of a recipe's processes that have rows of their own."""
    strategy = trainer["strategy"]
    sharded = isinstance(strategy, FSDP2Strategy)
    return strategy.dims_of(processes(trainer)).data_ranks if sharded else processes(trainer)


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r.stem in TOKENS_A_STEP], ids=lambda path: path.stem)
def test_the_batch_is_what_the_header_says(recipe):
    _, data, trainer = built(recipe.stem)
    rows = data.micro_batch_size * trainer["accumulate_grad_batches"] * data_ranks(trainer)
    assert rows * data.seq_len == TOKENS_A_STEP[recipe.stem]
    assert f"{TOKENS_A_STEP[recipe.stem]:,} tokens" in recipe.read_text()


@pytest.mark.parametrize("part", PARTS)
def test_every_part_keeps_the_tokens_of_a_step_and_the_interval_of_validation(part):
    assert {path.stem for path in (recipes_folder() / "parts").glob("*.yaml")} == PARTS.keys()
    _, data, trainer = built("llama7b", part)
    assert (trainer["num_nodes"], trainer["devices"]) == PARTS[part]
    replicas = trainer["strategy"].dims_of(processes(trainer)).replicate
    assert replicas == trainer["num_nodes"], "sharded within a host, copied between them"
    rows = data.micro_batch_size * trainer["accumulate_grad_batches"] * trainer["devices"] * trainer["num_nodes"]
    assert rows * data.seq_len == TOKENS_A_STEP["llama7b"]
    assert trainer["val_check_interval"] == 1000 * trainer["accumulate_grad_batches"]
    text = (recipes_folder() / "parts" / f"{part}.yaml").read_text()
    assert f"{rows // data.micro_batch_size} micro-batches a step" in text
    assert f"--nproc-per-node {trainer['devices']} " in text
    assert part == "1x8" or f"--nnodes {trainer['num_nodes']} " in text


@pytest.fixture
def world():
    """Starts a process group of any size in which this process is rank 0 and nothing is ever sent."""
    return lambda size: dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())


def bytes_on_a_device(model, trainer, world):
    """Weights, gradients and AdamW's state of rank 0, by sharding the whole model on the meta device as a run would."""
    strategy = trainer["strategy"]
    elements = sum(parameter.numel() for parameter in model.parameters())
    if isinstance(strategy, DeepSpeedZeROStrategy):  # docs/deepspeed.md has this measured, stage 3 in bf16
        return 18 * elements / trainer["devices"]
    if not isinstance(strategy, FSDP2Strategy):
        return 16 * elements
    world(processes(trainer))
    dims = strategy.dims_of(processes(trainer))
    cut = strategy.cut_stages(model, dims, dims.pipeline // 2 * dims.stride("pipeline"))  # a stage in the middle
    parallelize(model, Mesh.of(dims, "cpu"), ParallelOptions(), list(cut.stages.values()) if cut else None)
    return 4 * local_bytes(model)


@pytest.mark.parametrize(("name", "part"), LAID_OUT)
def test_a_device_holds_what_the_header_says(name, part, world, capsys):
    model, _, trainer = built(name, part)
    model, trainer = copy.deepcopy(model), {**trainer, "num_nodes": trainer["num_nodes"] or 1}
    held = bytes_on_a_device(model, trainer, world) / 2**30
    layout = f"{trainer['num_nodes']} x {trainer['devices']}"
    with capsys.disabled():
        print(f"\n{name}{f' + {part}' if part else ''}: {held:.1f} GiB a device on {layout}, before activations")
    said = re.search(r"AdamW's state are ([\d.]+) GiB|16 bytes a parameter and device, ([\d.]+) GiB", header(name))
    assert said, "the header says how much a device holds"
    assert f"{held:.1f}" == next(figure for figure in said.groups() if figure)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama405b", "llama405b_3d", "mixtral_8x7b", "moe_671b"])
def test_the_ranks_of_a_cluster_send_the_same(name):
    model, data, trainer = load_recipe(*configs(name))
    assert re.search(r"send the same \d+ collectives", layout(Checked(model, data, trainer)))


def header(name):
    return "".join(line for line in (recipes_folder() / f"{name}.yaml").open() if line.startswith("#"))


def test_gpt2_is_nanogpts():
    model, _, trainer = built("gpt2_124m")
    lr = [model.schedule.lr(6e-4, step, trainer["max_steps"]) for step in (0, 714, 142_999, 143_000)]
    assert lr[0] == 6e-4 / 715
    assert lr[1] == 6e-4
    assert lr[2] == pytest.approx(6e-5, rel=1e-6)
    assert lr[3] == 6e-5
    assert model.config.vocab_size == 50304
    assert model.weight_decay == 0.1


def test_the_speedrun_validates_on_the_tokens_of_the_track_and_counts_all_labels():
    model, data, trainer = built("speedrun_124m")
    assert trainer["limit_val_batches"] * data.micro_batch_size * data.seq_len == 20 * 524_288
    assert data.eot_id is None  # else labels of that token would not count
    curve = [model.schedule.lr(1.0, step, trainer["max_steps"]) for step in (0, 974, 2112, 3249)]
    assert curve == pytest.approx([1.0, 1.0, (3250 - 2112) / (0.7 * 3250), 1 / (0.7 * 3250)])


@pytest.mark.long
def test_the_speedrun_learns_in_small_with_the_settings_of_its_groups(tmp_path):
    (tmp_path / "data" / "fineweb10B").mkdir(parents=True)
    cycle = np.array([(17 * number) % 64 for number in range(64)])  # each token tells the next one
    for name in ("fineweb_train", "fineweb_val"):
        with ShardWriter(tmp_path / "data" / "fineweb10B", name, vocab_size=64) as writer:
            writer.append(np.tile(cycle, 40))
    sizes = {"n_layers": 2, "d_model": 32, "n_heads": 2, "vocab_size": 64}
    done = subprocess.run(
        [
            python(), "-m", "lightning_tricks", "fit", *configs("speedrun_124m"),
            *[f"--model.decoder.{name}={size}" for name, size in sizes.items()], "--model.compile_blocks=false",
            "--data.vocab_size=64", "--data.seq_len=32", "--data.micro_batch_size=4", "--data.num_workers=0",
            "--trainer.accelerator=cpu", "--trainer.max_steps=40", "--trainer.accumulate_grad_batches=1",
            "--trainer.val_check_interval=40", "--trainer.limit_val_batches=4",
        ],
        capture_output=True, text=True, cwd=tmp_path, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (loss,) = re.findall(r"validation  loss ([\d.]+)", done.stdout)
    assert float(loss) < 2  # 4.16 is that of a guess
    groups = re.findall(r"^(muon|adamw):\S*?(?:role=(\w+))?  .* ([\d.]+) +([\d.]+)$", done.stderr, re.M)
    assert groups == [  # learning rate and decay of the track's baseline, but for the embedding's rate
        ("muon", "", "0.025", "0.05"),
        ("adamw", "embedding", "0.1", "0.001"),
        ("adamw", "norm", "0.015", "0.001"),
        ("adamw", "head", "0.004", "0.001"),
    ]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_is_short_and_its_header_gives_title_and_command(recipe):
    lines = recipe.read_text().splitlines()
    assert len(lines) < 60
    header = [line for line in lines if line.startswith("#")]
    assert any("lightning_tricks fit --config" in line for line in header)
    assert any(line.startswith("# Change first: ") for line in header)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    for name in ("train", "val"):
        with ShardWriter(folder, name, vocab_size=64) as writer:
            writer.append(torch.randint(0, 64, (4000,), generator=generator).numpy())
    return tmp_path


needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
REPLICAS = "--trainer.strategy.init_args.mesh={replicate: 2}"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "part", "options"),
    [
        ("llama1b", None, []),
        ("llama7b", "2x8", [REPLICAS]),  # the other parts differ from it in what two processes cannot have
        pytest.param("llama7b_deepspeed", None, [], marks=needs_deepspeed),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_trains_at_toy_width_on_two_processes(name, part, options, shards):
    decoder = {"n_layers": 2, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "d_ff": 64}
    decoder |= {"max_seq_len": 32, "vocab_size": 64}
    toy = [f"--model.init_args.decoder.init_args.{key}={value}" for key, value in decoder.items()]
    done = subprocess.run(
        [
            python(), "-m", "lightning_tricks", "fit", *configs(name, part), *toy, *options,
            "--model.init_args.compile_blocks=false",
            "--model.init_args.schedule.init_args.warmup_steps=2", "--data.init_args.vocab_size=64",
            "--data.init_args.seq_len=32", "--data.init_args.num_workers=0", "--data.init_args.micro_batch_size=2",
            "--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.num_nodes=1", "--trainer.max_steps=4",
            "--trainer.accumulate_grad_batches=2", "--trainer.log_every_n_steps=2",
            "--trainer.val_check_interval=8", "--trainer.limit_val_batches=2",
        ],
        capture_output=True, text=True, cwd=shards, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step 4/4" in done.stdout, done.stdout
    assert "validation  loss" in done.stdout
    if "deepspeed" not in name and name != "llama1b":
        assert (
            f"FSDP2 on {'replicate 2 x shard 1' if options else 'replicate 1 x shard 2'}" in done.stderr + done.stdout
        )
