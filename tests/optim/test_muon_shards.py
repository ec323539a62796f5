"""Muon + AdamW under FSDP2: whole matrices are orthogonalized, and checkpoints go between world sizes."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from foreign import CausalLM, rows
from harness import processes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader

from lightning_tricks.callbacks import SafeCheckpoint, StepGuard
from lightning_tricks.checkpoints import AtomicCheckpointIO
from lightning_tricks.optim import MuonAdamW, build_optimizer
from lightning_tricks.optim.muon import map_unsharded
from lightning_tricks.strategies import FSDP2Strategy

STEPS, SAVED = 20, 12  # four epochs of the data


class Model(CausalLM):
    def configure_optimizers(self):
        return build_optimizer(self, lambda groups: MuonAdamW(groups, lr=5e-3, momentum_warmup_steps=16))

    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.global_step == SAVED and not hasattr(self, "kept"):
            self.kept = deepcopy([self.state_dict(), self.optimizers().optimizer.state_dict()["state"]])


def fit(rank: int = 0, world: int = 1, steps: int = STEPS, folder: Path | None = None, **options: Any):
    model = Model()
    saver = [SafeCheckpoint(folder, every_n_train_steps=SAVED, keep_last=5)] if folder else []
    trainer = pl.Trainer(
        accelerator="cpu", devices=world, max_steps=steps, max_epochs=-1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, accumulate_grad_batches=2 // world,
        callbacks=[*saver, StepGuard()], enable_checkpointing=bool(saver),
        **({"strategy": FSDP2Strategy()} if world > 1 else {"plugins": [AtomicCheckpointIO()]}),
    )  # fmt: skip
    trainer.fit(model, rows(rank, 2) if world > 1 else micro_batches(), **options)
    return model


def micro_batches() -> DataLoader:
    """The rows of both ranks, one after the other: a micro-batch of each in every step."""
    ids = [torch.stack(list(rows(rank, 2))) for rank in range(2)]
    return DataLoader(torch.stack(ids, dim=1).flatten(0, 1), batch_size=None)


def whole(model):
    return {
        name: getattr(param, "full_tensor", lambda param=param: param)().detach().clone()
        for name, param in model.named_parameters()
    }


def in_two(rank: int, expected: list[float], folder: Path) -> None:
    unbroken = fit(rank, 2, folder=folder)
    assert unbroken.losses == expected[rank::2]
    (saved,) = folder.glob(f"*step={SAVED}*.ckpt")
    resumed = fit(rank, 2, ckpt_path=saved)
    assert resumed.losses == unbroken.losses[SAVED:]
    for name, weight in whole(unbroken).items():
        assert torch.equal(weight, whole(resumed)[name]), name


def test_two_shards_train_as_one_process_resume_to_the_bit_and_open_in_one(tmp_path, monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    one = fit()
    processes.run(in_two, one.losses, tmp_path)
    (saved,) = tmp_path.glob(f"*step={SAVED}*.ckpt")
    opened = fit(ckpt_path=saved, steps=SAVED + 1)
    torch.testing.assert_close(opened.kept, one.kept, rtol=0, atol=0)


def shards_of(rank: int) -> None:
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 3
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    matrices = [torch.randn(*shape).bfloat16() for shape in ((7, 4), (2, 5), (4, 4), (6, 3, 2), (5, 8))]
    placements = [Shard(0), Shard(0), Replicate(), Shard(0), Shard(1)]
    computed: list[int] = []

    def compute(number: int, matrix: torch.Tensor) -> torch.Tensor:
        computed.append(number)
        assert torch.equal(matrix, matrices[number])
        return matrix.float() * (number + 1)

    sharded = [distribute_tensor(matrix, mesh, [place]) for matrix, place in zip(matrices, placements, strict=True)]
    found = map_unsharded(sharded, compute, torch.float32)
    for number, (matrix, place) in enumerate(zip(matrices, placements, strict=True)):
        expected = distribute_tensor(matrix.float() * (number + 1), mesh, [place]).to_local()
        assert torch.equal(found[number], expected), number
    assert sorted(computed) == sorted({2} | {[0, 1, 3][rank]} | ({4} if rank == 0 else set()))


def test_each_rank_computes_some_of_the_matrices_and_gets_its_shards_of_all():
    processes.run(shards_of, world=3)


def hsdp(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(0)
    matrix = torch.randn(4, 6).bfloat16()
    sharded = distribute_tensor(matrix, mesh, [Replicate(), Shard(0)])
    both = distribute_tensor(matrix, mesh, [Shard(0), Shard(1)])
    found = map_unsharded([sharded, both], lambda _, whole: whole.cumsum(0), torch.bfloat16)
    assert torch.equal(found[0], distribute_tensor(matrix.cumsum(0), mesh, [Replicate(), Shard(0)]).to_local())
    assert torch.equal(found[1], distribute_tensor(matrix.cumsum(0), mesh, [Shard(0), Shard(1)]).to_local())


def test_copies_and_two_sharded_dimensions():
    processes.run(hsdp, world=4)
