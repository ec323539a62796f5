"""Gradients that wait for the last micro-batch of a step: none is lost, and none reaches another step."""

import pytest
import torch
from harness.models import Small, batches, rows
from harness.runs import fit, same
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lightning_tricks import FSDP2Strategy
from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.tensors import local
from lightning_tricks.commands.plan.fake_cluster import fake_world
from lightning_tricks.parallel.dims import Mesh, ParallelDims
from lightning_tricks.strategies.fsdp2.backward_passes import WaitingGradients, _groups


def train(module, **options):
    strategy = FSDP2Strategy(reduce_gradients="step")
    data = batches(rows(8, 2, 4))
    return fit(module, data=data, strategy=strategy, accumulate_grad_batches=2, max_steps=2, **options)


def end_in_the_second(module, batch):
    if len(module.losses) == 1:
        raise ZeroDivisionError


class NoLossInTheSecond(Small):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


def weights(module):
    return [local(parameter).detach().clone() for parameter in module.parameters()]


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="torch before 2.13 refuses the second fit")
def test_a_fit_after_one_that_failed_within_a_step_starts_without_its_gradients():
    clean, failed = Small(4, 1), Small(4, 1, act=end_in_the_second)
    train(clean)
    with pytest.raises(ZeroDivisionError):
        train(failed)
    failed.act = lambda module, batch: None
    failed.losses.clear()
    train(failed)
    assert same(weights(failed), weights(clean))


def test_a_step_whose_last_micro_batch_has_no_loss_is_refused():
    with pytest.raises(UsageError, match="reduce_gradients='step': training_step returned None for the last micro-ba"):
        train(NoLossInTheSecond(4, 1))


@pytest.mark.parametrize(
    ("reduction", "share", "reduce_dtype"),
    # this rank's part of the sum over all ranks; the whole gradient, also where weights are bf16
    [("micro_batch", 1 / 4, None), ("step", 1, None), ("step", 1, torch.float32)],
)
def test_between_micro_batches_a_rank_keeps_so_many_bytes_of_gradients(reduction, share, reduce_dtype):
    waiting = WaitingGradients(reduction)
    with fake_world(0, 8):
        module = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        mesh = Mesh.of(ParallelDims(replicate=2).of_world(8), "cpu").weights
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype) if reduce_dtype else MixedPrecisionPolicy()
        fully_shard(module, mesh=mesh, mp_policy=policy)
        for _ in range(2):
            waiting.before_backward(module, accumulates=True)
            module(torch.ones(1, 64)).float().sum().backward()
        (group,) = _groups(module)
        kept = [parameter.grad for parameter in module.parameters()]
        for parameter in group.fsdp_params:
            unsharded = getattr(parameter, "_unsharded_param", None)
            kept += [parameter.unsharded_accumulated_grad, None if unsharded is None else unsharded.grad]
        sizes = [local(tensor).nbytes for tensor in kept if tensor is not None]
        assert sum(sizes) == share * 4 * 2 * 64 * 64
