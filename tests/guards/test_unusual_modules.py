"""Modules with parameters and buffers of every kind are saved, guarded and watched: only their numbers count."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness.models import batches
from harness.runs import trainer_with
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from lightning_tricks import SafeCheckpoint, SpikeRollback, StepGuard
from lightning_tricks.callbacks import ActivationMonitor, GradNormMonitor, UpdateMonitor
from lightning_tricks.checkpoints.record import read_record
from lightning_tricks.guards.checkpoint_content import not_finite
from lightning_tricks.guards.earlier_states import TrainingState

NAN = float("nan")


def scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))


def buffer(value: Tensor) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        net = nn.Linear(4, 4)
        net.register_buffer("more", value)
        return net

    return make


def parameter(value: Tensor) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        net = nn.Linear(4, 4)
        net.more = nn.Parameter(value, requires_grad=False)
        return net

    return make


NETS: dict[str, Callable[[], nn.Module]] = {
    "ScriptModule": scripted,
    "traced": lambda: torch.jit.trace(nn.Linear(4, 4), torch.ones(2, 4)),
    "sparse": buffer(torch.eye(4).to_sparse()),
    "a sparse parameter": parameter(torch.eye(4).to_sparse()),
    "complex": parameter(torch.ones(4, dtype=torch.complex64)),
    "int8": parameter(torch.ones(4, dtype=torch.int8)),
    "bool": buffer(torch.tensor(True)),
    "fp8": buffer(torch.ones(4).to(torch.float8_e4m3fn)),
    "expanded": buffer(torch.ones(1).expand(4)),
    "empty": parameter(torch.empty(0, 3)),
    "a subclass": parameter(TwoTensor(torch.ones(4), torch.ones(4))),
    "lazy": lambda: nn.ModuleList([nn.Linear(4, 4), nn.LazyLinear(3), nn.LazyBatchNorm1d()]),
}


class Model(pl.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        net: Any = self.net[0] if isinstance(self.net, nn.ModuleList) else self.net
        return net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad and not nn.parameter.is_lazy(p)]
        return torch.optim.AdamW(trained, lr=0.1)


@pytest.mark.filterwarnings("ignore")  # what torch says of its prototypes
@pytest.mark.parametrize("kind", NETS)
def test_a_module_of_any_kind_is_saved_guarded_and_watched(kind, tmp_path):
    torch.manual_seed(0)
    model = Model(NETS[kind]())
    callbacks = [
        SafeCheckpoint(tmp_path, every_n_train_steps=2), StepGuard(), SpikeRollback(snapshot_every_n_steps=2),
        UpdateMonitor(), GradNormMonitor(per="block"), ActivationMonitor(),
    ]  # fmt: skip
    trainer = trainer_with(*callbacks)
    trainer.fit(model, batches(torch.randn(4, 2, 4)))
    assert read_record(tmp_path / "last.ckpt").finite is True
    weights = [p for p in model.parameters() if p.requires_grad and not nn.parameter.is_lazy(p)]
    before = [weight.detach().clone() for weight in weights]
    state = TrainingState(trainer, model)
    with torch.no_grad():
        for weight in weights:
            weight.zero_()
    state.restore(trainer, model)
    assert all(torch.equal(weight, then) for weight, then in zip(weights, before, strict=True))


def test_one_bad_number_is_found_in_a_part_of_a_subclass():
    assert not_finite([torch.ones(2), TwoTensor(torch.tensor([1.0, NAN]), torch.ones(2))]) == 1
