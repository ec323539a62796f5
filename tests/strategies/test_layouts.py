"""A checkpoint of any layout opens in any other, to the bit, and training goes on as where it was saved."""

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from foreign import PLUGINS, CausalLM, rows
from harness.processes import end, run, start
from harness.runs import On, trainer_with, whole
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_tricks import LanguageModel, Llama, ParallelDims, WarmupCosine
from lightning_tricks._core.errors import UsageError
from lightning_tricks.checkpoints import AtomicCheckpointIO
from lightning_tricks.strategies import FSDP2Strategy

pytestmark = pytest.mark.long


class Ours(LanguageModel):
    """Decay groups with their names and a schedule by the step; the foreign module's batches."""

    def __init__(self) -> None:
        config = Llama(vocab_size=64, d_model=32, n_layers=2, n_heads=2, max_seq_len=32)
        super().__init__(config, schedule=WarmupCosine(warmup_steps=2))
        self.losses: list[float] = []

    def configure_callbacks(self):
        return []

    def training_step(self, batch, batch_idx):
        loss = super().training_step({"input_ids": batch[:, :-1], "labels": batch[:, 1:]}, batch_idx)
        self.losses.append(loss.item())
        return loss


class Odd(CausalLM):
    """A parameter that no loss reaches, one that is frozen, tied weights, buffers of each rank's own, and SGD."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Linear(4, 4)
        self.model.model.norm.weight.requires_grad_(False)
        self.model.lm_head.weight = self.model.model.embed_tokens.weight
        for place in range(4):  # several, as torch would share them out among the ranks
            self.register_buffer(f"seen_{place}", torch.zeros(500))

    def on_train_batch_start(self, *args):
        for place in range(4):
            getattr(self, f"seen_{place}").add_(1.0 + self.global_rank)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Stateless(CausalLM):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


MODELS = {"foreign": CausalLM, "ours": Ours, "odd": Odd, "stateless": Stateless}
WRITTEN = [(kind, dcp) for kind in MODELS for dcp in (True, False)]  # by two; as shards or in one file
WRITTEN.remove(("stateless", False))  # which is saved over shards below


def everything(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, torch.Tensor]:
    """Weights, buffers and optimizer state, whole, by name."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    found = {name: whole(tensor) for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    for optimizer in trainer.optimizers:
        for parameter, state in optimizer.state.items():
            entries = {key: value for key, value in state.items() if torch.is_tensor(value)}
            found |= {f"{names[parameter]} {key}": whole(value) for key, value in entries.items()}
    return found


def fit(kind: str, rank: int = 0, plugin: str | None = None, folder: Path | None = None, **options: Any) -> list[Any]:
    """Train to step five, from a checkpoint or with one at step three: what was there at step three; losses and lr."""
    world = dist.get_world_size() if dist.is_initialized() else int(options.get("devices", 1))
    ckpt_path = options.pop("ckpt_path", None)
    plugins: list[Any] = [PLUGINS[plugin]()] if plugin else []
    model, found, lr = {**MODELS, **CHANGED}[kind](), {}, []

    def look(trainer: Any, module: Any, *_: Any) -> None:
        """What is there after three steps, before the next one."""
        lr.append(trainer.optimizers[0].param_groups[0]["lr"])
        if trainer.global_step == 3:
            found.update(everything(trainer, module) | {"scaler": trainer.precision_plugin.state_dict()})

    saver = ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=3, save_top_k=-1, enable_version_counter=False
    )
    plugins = plugins if "strategy" in options else [*plugins, AtomicCheckpointIO()]
    given = {"gradient_clip_val": 1.0, "use_distributed_sampler": False, "plugins": plugins, "max_steps": 5}
    options = {**given, **options}
    trainer = trainer_with(On(on_train_batch_start=look), *([saver] if folder else []), **options)
    pl.seed_everything(0)
    trainer.fit(model, rows(rank, world), ckpt_path=ckpt_path)
    losses = torch.tensor(model.losses[-2:], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(losses)
    return [found, (losses / world).tolist(), lr[-2:]]


def write(rank: int, folder: Path, name: str, kind: str, **options: Any) -> None:
    expected = fit(kind, rank, folder=folder / name, **options)
    if rank == 0:
        torch.save(expected, folder / name / "expected.pt")


def read(folder: Path, name: str, kind: str, rank: int = 0, within: float = 1e-5, **options: Any) -> None:
    """Open it here: all is as it was saved, and two more steps are what they were there."""
    saved, losses, lr = torch.load(folder / name / "expected.pt", weights_only=True)
    found, here, own_lr = fit(kind, rank, ckpt_path=folder / name / "step=3.ckpt", **options)
    assert found.keys() == saved.keys(), (name, found.keys() ^ saved.keys())
    assert found.pop("scaler") == saved.pop("scaler")
    different = [key for key in saved if not torch.equal(found[key], saved[key])]
    different += [key for key in saved if found[key].dtype != saved[key].dtype]
    assert not different, (name, different)
    assert here == pytest.approx(losses, abs=within), name
    assert own_lr == lr, name


def sharded(world: int, dcp: bool = True, replicate: int = 1) -> dict[str, Any]:
    strategy = FSDP2Strategy(mesh=ParallelDims(replicate=replicate), save_distributed_checkpoint=dcp)
    return {"strategy": strategy, "devices": world}


def written_by_two(rank: int, folder: Path) -> None:
    for kind, dcp in WRITTEN:
        write(rank, folder, f"{kind}, 2, {dcp}", kind, **sharded(2, dcp))
    for plugin in ("bf16_true", "fp16_mixed"):
        write(rank, folder, plugin, "foreign", plugin=plugin, **sharded(2))


def with_part(path: str, part: Any) -> CausalLM:
    model = CausalLM()
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, part)
    return model


def with_groups(make: Any, manual: bool = False) -> CausalLM:
    """Its optimizers are made of the matrices and the vectors."""
    model = CausalLM()
    model.automatic_optimization = not manual
    model.configure_optimizers = lambda: make([[p for p in model.parameters() if p.ndim == dim] for dim in (2, 1)])
    return model


sgd = partial(torch.optim.SGD, lr=0.1)
CHANGED = {
    "Wider": lambda: with_part("model.lm_head", torch.nn.Linear(32, 72, bias=False)),
    "Deeper": lambda: with_part("extra", torch.nn.Linear(4, 4)),
    "Regrouped": lambda: with_groups(lambda groups: torch.optim.AdamW([{"params": group} for group in groups])),
    "TwoOptimizers": lambda: with_groups(lambda groups: [sgd(group) for group in groups], manual=True),
    "Foreigner": lambda: with_groups(lambda groups: sgd([*groups[0], *groups[1], torch.nn.Parameter(torch.ones(3))])),
}
REFUSED = {
    "Regrouped": r"the checkpoint's optimizer has '[\w.]+' in group 0 where this one has '[\w.]+' in group 0",
    "TwoOptimizers": "the checkpoint has the state of 1 optimizers where there are 2 here",
    "Wider": "size mismatch for model.lm_head.weight",
    "Deeper": 'Missing key.* in state_dict: "extra.weight"',
}


def refuse(message: str, kind: str, rank: int, **options: Any) -> None:
    """A line, or torch's own error of another model."""
    with pytest.raises((UsageError, RuntimeError), match=message) as caught:
        fit(kind, rank, **options)
    assert isinstance(caught.value, RuntimeError) or "\n" not in str(caught.value)


def refused_by_two(rank: int, folder: Path) -> None:
    path = folder / "foreign, 2, True" / "step=3.ckpt"
    for bad, message in {
        "no.ckpt": "there is no such file or folder",
        "incomplete.ckpt": "incomplete: ",
        "text.ckpt": "is no checkpoint",
        "deepspeed.ckpt": "is a checkpoint of DeepSpeed",
    }.items():
        refuse(message, "foreign", rank, ckpt_path=folder / bad, **sharded(2))
    seen_by_rank_0 = path if rank == 0 else folder / "no.ckpt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDP2Strategy, "broadcast", lambda self, value, src=0: value)
        refuse(r"there is no such file .*on rank 1:", "foreign", rank, ckpt_path=seen_by_rank_0, **sharded(2))
    refuse("holds no state_dict", "foreign", rank, ckpt_path=folder / "bare.ckpt", **sharded(2))
    for kind, message in REFUSED.items():
        for at in (path, folder / "foreign, 2, False" / "step=3.ckpt"):
            if kind != "Regrouped" or at == path:  # a file has no names
                clip = None if kind == "TwoOptimizers" else 1.0  # Lightning clips no manual optimization
                refuse(message, kind, rank, ckpt_path=at, gradient_clip_val=clip, **sharded(2))
    line = r"SGD has a parameter of shape \(3,\) that is none of the module's"
    refuse(line, "Foreigner", rank, folder=folder / "x", **sharded(2))
    refuse("save shards by SafeCheckpoint", "foreign", rank, folder="memory://x", **sharded(2))


def opened_and_saved_over_by_one(rank: int, folder: Path, over: Path) -> None:
    for kind, dcp in (("odd", True), ("stateless", True), ("foreign", False)):  # four open the other shards
        read(folder, f"{kind}, 2, {dcp}", kind, **sharded(1, not dcp))
    for name, dcp in (("over True", True), ("over False", True), ("over True", False)):
        write(rank, over, name, "stateless", **sharded(1, dcp))
        path = over / name / "step=3.ckpt"
        assert path.is_dir() is dcp
        if dcp:
            assert {entry.name for entry in path.iterdir()} == {".metadata", "meta.pt", "record.json", "__0_0.distcp"}
        read(over, name, "stateless", **sharded(1))


def read_and_written_by_four(rank: int, folder: Path) -> None:
    for kind, dcp, replicate in (("foreign", True, 1), ("foreign", False, 2), ("ours", True, 2)):
        read(folder, f"{kind}, 2, {dcp}", kind, rank, **sharded(4, replicate=replicate))
    for dcp in (True, False):
        write(rank, folder, f"hsdp, {dcp}", "foreign", **sharded(4, dcp, replicate=2))


def read_by_two(rank: int, folder: Path) -> None:
    for kind in MODELS:
        read(folder, f"{kind}, 1", kind, rank, **sharded(2))
    for dcp in (True, False):
        read(folder, f"hsdp, {dcp}", "foreign", rank, **sharded(2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    for kind in MODELS:
        write(0, folder, f"{kind}, 1", kind)
    os.environ.pop("PL_GLOBAL_SEED", None)
    run(written_by_two, folder)
    return folder


@pytest.fixture(scope="module")
def started(folder, tmp_path_factory):
    """The runs that open what is in `folder`, or a copy of it: they go on while this process opens it, too."""
    make_what_is_refused(folder)
    over = tmp_path_factory.mktemp("over")
    for dcp in (True, False):
        shutil.copytree(folder / f"foreign, 2, {dcp}", over / f"over {dcp}")
    return {
        "four": start(read_and_written_by_four, folder, world=4),
        "one": start(opened_and_saved_over_by_one, folder, over, world=1),
        "refused": start(refused_by_two, folder),
    }


def make_what_is_refused(folder: Path) -> None:
    shutil.copytree(folder / "foreign, 2, True" / "step=3.ckpt", folder / "incomplete.ckpt")
    (folder / "incomplete.ckpt" / ".metadata").unlink()
    (folder / "text.ckpt").write_text("hello")
    (folder / "deepspeed.ckpt").mkdir()
    (folder / "deepspeed.ckpt" / "zero_to_fp32.py").touch()
    torch.save(CausalLM().state_dict(), folder / "bare.ckpt")


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize(("kind", "dcp"), WRITTEN)
def test_shards_open_in_a_trainer_without_a_strategy(kind, dcp, folder):
    read(folder, f"{kind}, 2, {dcp}", kind)


@pytest.mark.parametrize("plugin", ["bf16_true", "fp16_mixed"])
def test_the_state_of_a_precision_goes_with_it(plugin, folder):
    read(folder, plugin, "foreign", plugin=plugin, within=1e-3)  # 16-bit sums depend on how the rows are split


def test_shards_of_two_open_on_four_and_those_of_hsdp_and_plain_files_on_two(started, folder):
    end(started["four"])
    run(read_by_two, folder)


def test_shards_open_on_one_sharded_device_and_a_save_over_another_layout_leaves_no_mixture(started):
    end(started["one"])


def test_what_cannot_be_opened_or_saved_is_said_on_every_rank(started):
    end(started["refused"])
