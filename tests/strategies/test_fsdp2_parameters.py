"""Parameters that FSDP2 does not take as they are: scalars stay whole, memory becomes contiguous, others: refused."""

import lightning.pytorch as pl
import pytest
import torch
from foreign import float8, train
from harness import processes, runs
from harness.runs import whole
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader

from lightning_tricks._core.errors import UsageError
from lightning_tricks.callbacks import GradNormMonitor
from lightning_tricks.checkpoints import AtomicCheckpointIO
from lightning_tricks.precision import BF16True, FP16Mixed
from lightning_tricks.strategies import FSDP2Strategy

PLUGINS = {
    "fp32": pl.plugins.Precision,
    "bf16-true": BF16True,
    "fp16-mixed": lambda: FP16Mixed(init_scale=256.0),
    "fp8": lambda: float8("tensorwise"),
}
CLOSE = {"fp32": 1e-5, "bf16-true": 0.02, "fp16-mixed": 0.01, "fp8": 0.05}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(32, 32), nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return x + self.gain * self.linear(x).relu()


class Mixture(pl.LightningModule):
    """Scalars in the blocks and the root, channels_last weights, tied weights, a buffer, spectral norm, and marks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight
        self.embed.weight._no_weight_decay = True
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.normed = spectral_norm(nn.Linear(32, 32))
        self.logit_scale = nn.Parameter(torch.tensor(0.1))
        self.unused = nn.Parameter(torch.tensor(3.0))
        self.register_buffer("shift", torch.linspace(-1, 1, 32))
        self.losses: list[float] = []

    def training_step(self, batch, batch_idx):
        image = batch.float().view(len(batch), 1, 4, 8) / 64
        x = self.embed(batch) + self.stem(image).mean((1, 2, 3))[:, None, None] + self.shift
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.normed(x)) * self.logit_scale.exp()
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.1, foreach=True)


def rows(rank=0, world=1, batches=4):
    ids = ((3 + 5 * torch.arange(32) + 7 * torch.arange(batches * 8)[:, None]) % 64).view(batches, 8, 32)
    return DataLoader(list(ids.chunk(world, dim=1)[rank].contiguous()), batch_size=None)


def fit(plugin, rank=0, world=1, folder=None, ckpt_path=None, **options):
    saver = [ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)] if folder else []
    plugins = [PLUGINS[plugin]()] if "strategy" in options else [PLUGINS[plugin](), AtomicCheckpointIO()]
    run = runs.fit(
        Mixture(), GradNormMonitor(), *saver, data=rows(rank, world), ckpt_path=ckpt_path, devices=world,
        plugins=plugins, log_every_n_steps=1, use_distributed_sampler=False, gradient_clip_val=0.5,
        accumulate_grad_batches=2, **options,
    )  # fmt: skip
    model = run.model
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {name: whole(parameter) for name, parameter in model.named_parameters()}
    for parameter, state in run.trainer.optimizers[0].state.items():
        found |= {f"{names[parameter]} {key}": whole(value) for key, value in state.items()}
    return model, found, run.of("train/grad_norm")


def in_two(rank, folder, expected):
    for plugin, (losses, found, norms) in expected.items():
        for dcp in (True, False) if plugin == "fp32" else (True,):
            at = folder / f"{plugin}-{dcp}"
            strategy = FSDP2Strategy(save_distributed_checkpoint=dcp)
            model, here, own_norms = fit(plugin, rank, 2, folder=at, strategy=strategy)
            mean = torch.tensor(model.losses, dtype=torch.float64)
            torch.distributed.all_reduce(mean)
            close = CLOSE[plugin]
            assert (mean / 2).tolist() == pytest.approx(losses, rel=close), plugin
            assert here.keys() == found.keys(), plugin
            for name, weight in found.items():  # in 16 bits Adam moves a weight of little gradient either way
                assert plugin != "fp32" or (here[name] - weight).abs().max() <= close, (plugin, name)
            if rank == 0:
                assert own_norms[0] == pytest.approx(norms[0], rel=close), "a scalar counts once"
            assert model.head.weight is model.embed.weight
            assert model.embed.weight._no_weight_decay
            assert not isinstance(model.logit_scale, DTensor)
            assert model.unused.grad is None
            alike = [None, None]
            torch.distributed.all_gather_object(alike, [here["logit_scale"].item(), here["blocks.1.gain"].item()])
            assert alike[0] == alike[1]
            resumed = fit(plugin, rank, 2, ckpt_path=at / "step=2.ckpt", strategy=FSDP2Strategy())[1]
            different = [name for name in here if not torch.equal(here[name], resumed[name])]
            assert not different, (plugin, dcp, different)


@pytest.mark.long
def test_scalars_channels_last_and_tied_weights_train_and_resume_as_in_one_process(tmp_path):
    expected = {}
    for plugin in PLUGINS:
        model, found, norms = fit(plugin)
        expected[plugin] = (model.losses, found, norms)
        assert abs(found["logit_scale"].item() - 0.1) > 1e-3, "it learns"
    processes.run(in_two, tmp_path, expected)
    for dcp in (True, False):  # and their checkpoints open where nothing is sharded
        resumed = fit("fp32", ckpt_path=tmp_path / f"fp32-{dcp}" / "step=2.ckpt")[1]
        for name, value in expected["fp32"][1].items():
            torch.testing.assert_close(resumed[name], value, rtol=0, atol=1e-5, msg=name)


class Plain(pl.LightningModule):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.layer = layer

    def training_step(self, batch, batch_idx):
        return self.layers(batch[:, :8].float()).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))


class Shared(nn.Module):
    """Two blocks with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.blocks[1].linear.weight = self.blocks[0].linear.weight


REFUSED = {
    "complex": (Complex, r"'layer.phase' of Complex is complex, which FSDP2 cannot train: keep it as two real"),
    "sparse": (lambda: nn.Embedding(8, 4, sparse=True), r"'layer.weight' of Embedding has sparse gradients, which FSD"),
    "shared": (
        Shared,
        r"'layer.blocks.1.linear.weight' and 'layer.blocks.0.linear.weight' are one parameter, of which",
    ),
}


def refused(kind, model=None, **options):
    make, message = REFUSED[kind]
    model = model or Plain(make())
    with pytest.raises(UsageError, match=f"^FSDP2Strategy: {message}") as caught:
        train(model, strategy=FSDP2Strategy(), epochs=1, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_fsdp2_cannot_train_is_refused_by_name(kind):
    refused(kind)


def test_lightnings_fp16_is_refused_beside_a_scalar_whose_gradient_its_scaler_cannot_take():
    plugin = pl.plugins.MixedPrecision("16-mixed", "cpu")
    with pytest.raises(UsageError, match=r"^trainer.precision=16-mixed: .* with 'logit_scale', which is not sharded: "):
        train(Mixture(), plugin, strategy=FSDP2Strategy(), epochs=1)


def refused_by_one_rank(rank):
    refused("sparse", Plain(REFUSED["sparse"][0]() if rank == 1 else nn.Linear(4, 4)), devices=2)
    model = Plain(nn.Linear(2, 2))
    model.gains = nn.ParameterList(torch.tensor(1.0) for _ in range(2))
    model.training_step = lambda batch, batch_idx: model.layers(batch[:, :8].float()).mean() + model.gains[rank] * 4
    grads = []
    model.on_after_backward = lambda: grads.append([float(gain.grad) for gain in model.gains])
    train(model, strategy=FSDP2Strategy(), devices=2, data=rows(rank, 2), epochs=1, gradient_clip_val=None)
    assert grads[0] == [2.0, 2.0], "the mean over both ranks, of which one has no gradient, before any hook"


@pytest.mark.long
def test_a_refusal_by_one_rank_is_one_on_all_and_a_scalar_that_one_rank_uses_has_a_gradient_on_all():
    processes.run(refused_by_one_rank)
