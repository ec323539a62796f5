"""bf16 products over fp32 weights: clips fused optimizers, casts once, and leaves the casting to FSDP2."""

from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from harness import processes
from harness.models import Decoding, Small
from harness.runs import fit, same_training
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_tricks.precision import BF16Mixed, FP16Mixed


class Two(Small):
    """Two layers, the second after a softmax, which autocast computes in fp32."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__(4, 4, optimizer=partial(torch.optim.AdamW, lr=0.1, fused=fused))
        self.second, self.seen = nn.Linear(4, 4), []

    def loss_of(self, batch):
        hidden = self.net(batch)
        out = self.second(hidden.softmax(-1))
        self.seen += [hidden.dtype, out.dtype]
        return out.float().square().mean()

    def validation_step(self, batch, batch_idx):
        self.loss_of(batch)

    def val_dataloader(self):
        return self.train_dataloader()


@pytest.mark.parametrize("fused", [False, True])
def test_products_are_bf16_over_fp32_weights_and_fused_optimizers_are_clipped(fused):
    model = Two(fused)
    run = fit(model, plugins=BF16Mixed(), gradient_clip_val=1e-3, max_steps=2)
    assert run.trainer.precision == "bf16-mixed"
    assert run.trainer.precision_plugin.device == "cpu"  # as Lightning's plugin says it
    assert set(model.seen) == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}
    state = run.trainer.optimizers[0].state[model.second.weight]
    assert state["exp_avg"].dtype == torch.float32
    assert sum(p.grad.square().sum() for p in model.parameters()).sqrt().item() == pytest.approx(1e-3, rel=1e-3)


def test_a_module_without_a_trainer_is_cast_on_this_machines_device():
    plugin, layer = BF16Mixed(), nn.Linear(4, 4)
    assert plugin.convert_module(layer) is layer
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with plugin.forward_context():
        assert layer.to(device)(torch.ones(1, 4, device=device)).dtype == torch.bfloat16
    assert layer.weight.dtype == torch.float32


def test_it_trains_as_lightnings_own_does_to_the_bit():
    ours = fit(Two(), plugins=BF16Mixed(), gradient_clip_val=0.5, max_steps=6)
    stock = fit(Two(), precision="bf16-mixed", gradient_clip_val=0.5, max_steps=6)
    assert same_training(ours, stock)
    assert not same_training(ours, fit(Two(), gradient_clip_val=0.5, max_steps=6))


class Twice(Decoding):
    """Our decoder, called twice in a step; checkpointing runs its blocks again in the backward pass."""

    def training_step(self, batch, batch_idx):
        return self.model(batch).float().square().mean() + self.model(batch.flip(0)).float().abs().mean()


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_a_block_that_is_run_again_casts_again(checkpointing):
    plain, again = (fit(Twice(checkpointing=mode), plugins=BF16Mixed()) for mode in ("none", checkpointing))
    assert same_training(plain, again)


def test_the_policy_gathers_in_bf16_and_reduces_in_fp32():
    assert BF16Mixed().fsdp2_policy == MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    assert FP16Mixed().fsdp2_policy == MixedPrecisionPolicy(torch.float16, torch.float32)


def test_a_precision_beside_the_plugin_is_refused_with_both_names():
    with pytest.raises(ValueError, match=r"precision=16-true.*plugins=BF16Mixed\(\)"):
        pl.Trainer(accelerator="cpu", precision="16-true", plugins=BF16Mixed())


class Sharded(Two):
    """Shards itself: `policy` casts or does not, `whole` leaves no parameter out."""

    def __init__(self, policy: MixedPrecisionPolicy, whole: bool = True) -> None:
        super().__init__()
        self.policy, self.whole = policy, whole

    def configure_model(self):
        for part in (self.net, self.second) if self.whole else (self.net,):
            fully_shard(part, mesh=self.device_mesh["data_parallel"], mp_policy=self.policy)


def under_fsdp2(rank: int) -> None:
    casts, plain = BF16Mixed().fsdp2_policy, MixedPrecisionPolicy()
    cases = [(casts, True, False), (plain, True, True), (casts, False, True)]
    for policy, whole, autocasts in cases:
        model, plugin = Sharded(policy, whole), BF16Mixed()
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        run = fit(model, plugins=plugin, strategy=strategy, devices=2, max_steps=2, limit_val_batches=1)
        assert plugin._autocasts is autocasts
        assert set(model.seen) == {torch.bfloat16}, "no product may run in fp32"
        assert {weight.dtype for weight in run.weights} == {torch.float32}


@pytest.mark.long
def test_under_fsdp2_nothing_is_cast_twice_and_nothing_is_left_uncast():
    processes.run(under_fsdp2)
