"""State that torchao's AdamW keeps in 8 bits goes through every checkpoint, and comes back in 8 bits."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import processes, runs
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.utils.data import DataLoader
from torchao.optim import AdamW8bit
from torchao.optim.subclass_8bit import OptimState8bit

from lightning_tricks import BF16True
from lightning_tricks._core.tensors import local
from lightning_tricks.checkpoints import AtomicCheckpointIO
from lightning_tricks.optim import build_optimizer
from lightning_tricks.strategies import FSDP2Strategy
from lightning_tricks.strategies.fsdp2 import sharded_checkpoint

pytestmark = pytest.mark.long

STEPS, SAVED = 6, 4  # the loader has as many batches as the whole run
# 256 rows of 48 values: shards of two and of one have whole blocks of 256 values, those of three cut them
ROWS, WIDTH = 256, 48


class Net(pl.LightningModule):
    """Two matrices whose shards are large enough for 8 bits, and biases that are not; every rank has the same data."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, ROWS), nn.Linear(ROWS, WIDTH)
        self.losses: list[float] = []

    def training_step(self, x, batch_idx):
        loss = (self.down(self.up(x).relu()) - x.flip(-1)).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return build_optimizer(self, lambda groups: AdamW8bit(groups, lr=1e-2))


class TorchaosOwn(Net):
    """Its optimizer is made without us."""

    def configure_optimizers(self):
        return AdamW8bit(self.parameters(), lr=1e-2)


def fit(folder: Path, resume: Path | None = None, module: type[Net] = Net, **options: Any) -> dict[str, Any]:
    """Losses, the kinds of state at the start of the first step, and this process's weights and state at the end."""
    net, kinds = module(), Kinds()
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)
    batches = torch.randn(STEPS, 8, WIDTH, generator=torch.Generator().manual_seed(1))
    options = {"max_steps": STEPS, "use_distributed_sampler": False, **options}
    data = DataLoader(batches[SAVED:] if resume else batches, batch_size=None)
    with torch.compiler.set_stance("force_eager"):  # torchao compiles a kernel for each shape
        trainer = runs.fit(net, kinds, saver, data=data, ckpt_path=resume, **options).trainer
    state = {name: trainer.optimizers[0].state[parameter] for name, parameter in net.named_parameters()}
    values = {f"{name} {key}": bits(value) for name, entry in state.items() for key, value in entry.items()}
    values |= {name: local(parameter).detach().clone() for name, parameter in net.named_parameters()}
    return {"losses": net.losses, "kinds": kinds.found, "values": values}


class Kinds(pl.Callback):
    """Finds which averages are in 8 bits when training starts and when it ends."""

    def __init__(self) -> None:
        self.found: list[set[str]] = []

    def look(self, trainer: Any, module: Any) -> None:
        names = {parameter: name for name, parameter in module.named_parameters()}
        states = trainer.optimizers[0].state.items()
        pairs = [(names[parameter], value) for parameter, state in states for value in state.values()]
        self.found.append({name for name, value in pairs if isinstance(local(value), OptimState8bit)})

    on_train_start = on_train_end = look


def bits(value: Any) -> Any:
    shard = local(value)
    return torch.cat([shard.codes.flatten().float(), shard.scale]) if isinstance(shard, OptimState8bit) else shard


def sharded(world: int = 2, **options: Any) -> dict[str, Any]:
    return {"strategy": FSDP2Strategy(**options), "devices": world}


def go_on(folder: Path, within: float | None, whole: dict[str, Any], **options: Any) -> None:
    """From a checkpoint: in 8 bits at once, and as the run that was not interrupted, to the bit or `within` of it."""
    found = fit(folder / "again", folder / f"step={SAVED}.ckpt", **options)
    assert found["kinds"] == [{"up.weight", "down.weight"}] * 2
    if within is not None:
        assert found["losses"] == pytest.approx(whole["losses"][SAVED:], rel=within)
        return
    assert found["losses"] == whole["losses"][SAVED:]
    different = [name for name, value in found["values"].items() if not torch.equal(value, whole["values"][name])]
    assert not different


def two_ranks(rank: int, folder: Path) -> None:
    shards = fit(folder / "shards", **sharded())
    go_on(folder / "shards", None, shards, **sharded())
    go_on(folder / "one", 1e-3, shards, **sharded())
    weights_in_bf16 = fit(folder / "bf16", plugins=[BF16True()], **sharded())
    go_on(folder / "bf16", None, weights_in_bf16, plugins=[BF16True()], **sharded())
    for dim, cuts in ((0, False), (1, True)):  # columns of a matrix are parts of many blocks
        like = distribute_tensor(torch.zeros(ROWS, WIDTH), init_device_mesh("cpu", (2,)), [Shard(dim)])
        chunk = ChunkStorageMetadata(torch.Size([0, 0]), like.shape)
        saved = TensorStorageMetadata(TensorProperties(torch.float32), like.shape, [chunk])
        assert sharded_checkpoint._cuts_a_block(like, saved, 256) == cuts
    to_file = {"save_distributed_checkpoint": False}
    whole = fit(folder / "whole", module=TorchaosOwn, **sharded(**to_file))
    go_on(folder / "whole", 1e-3, whole, module=TorchaosOwn, **sharded(**to_file))


def three_ranks(rank: int, folder: Path, losses: list[float]) -> None:
    found = fit(folder / "again", folder / "shards" / f"step={SAVED}.ckpt", **sharded(3))
    assert found["losses"] == pytest.approx(losses[SAVED:], rel=1e-3)


def test_it_resumes_to_the_bit_on_the_same_shards_and_in_8_bits_from_every_layout(tmp_path):
    io = {"plugins": [AtomicCheckpointIO()]}
    one = fit(tmp_path / "one", **io)
    go_on(tmp_path / "one", None, one, **io)
    processes.run(two_ranks, tmp_path)
    go_on(tmp_path / "shards", 1e-3, one, **io)
    processes.run(three_ranks, tmp_path, one["losses"], world=3)
