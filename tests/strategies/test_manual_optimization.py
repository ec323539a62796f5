"""FSDP2 under manual optimization: several backward passes and steps in a training step, as in one process."""

import lightning.pytorch as pl
import pytest
import torch
from harness import processes, runs
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_tricks._core.errors import UsageError
from lightning_tricks.parallel.dims import ParallelDims
from lightning_tricks.strategies import FSDP2Strategy

WIDTH = 8


def mlp(width_in: int, width_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width_in, 16), nn.LeakyReLU(0.2), nn.LayerNorm(16), nn.Linear(16, width_out))


class Manual(pl.LightningModule):
    """What the modules below share: one Adam for each of their networks, which shows gradients added twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.automatic_optimization = False
        self.losses: list[float] = []

    def step(self, optimizer, loss):
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.1)
        optimizer.step()
        optimizer.zero_grad()  # after the step: what another phase adds to a frozen network would stay
        self.losses.append(loss.item())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        sharded = {isinstance(p, DTensor) for p in self.parameters()}
        assert sharded == {self.device_mesh is not None}, "what a step gathered is dropped after it"

    def configure_optimizers(self):
        return [torch.optim.Adam(net.parameters(), lr=1e-2) for net in self.children()]


def is_real(logits: torch.Tensor, label: float) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, label))


class GAN(Manual):
    """Lightning's example: `self(z)`, then the discriminator after the generator's backward pass and step."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = mlp(4, WIDTH), mlp(WIDTH, 1)

    def parallel_plan(self):
        return {"*.0": "colwise_gather_output"}

    def forward(self, z):
        return self.generator(z)

    def training_step(self, batch, batch_idx):
        images, z = batch
        for_generator, for_discriminator = self.optimizers()
        self.toggle_optimizer(for_generator)
        self.generated = self(z)
        self.step(for_generator, is_real(self.discriminator(self(z)), 1.0))
        self.untoggle_optimizer(for_generator)
        self.toggle_optimizer(for_discriminator)
        losses = is_real(self.discriminator(images), 1.0), is_real(self.discriminator(self(z).detach()), 0.0)
        self.step(for_discriminator, sum(losses) / 2)
        self.untoggle_optimizer(for_discriminator)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.layers(x)


class BlocksGAN(GAN):
    """Both networks have blocks, and are frozen when they are gathered already, by the optimizer or by the user."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, WIDTH), nn.Sequential(Block(), Block()))
        self.discriminator = nn.Sequential(nn.Sequential(Block(), Block()), nn.Linear(WIDTH, 1))

    def training_step(self, batch, batch_idx):
        images, z = batch
        for_generator, for_discriminator = self.optimizers()
        self.discriminator(self(z))
        self.toggle_optimizer(for_generator)
        self.step(for_generator, is_real(self.discriminator(self(z)), 1.0))
        self.untoggle_optimizer(for_generator)
        fake = self(z)
        self.generator.requires_grad_(False)
        losses = is_real(self.discriminator(images), 1.0), is_real(self.discriminator(self(z)), 0.0)
        self.step(for_discriminator, sum(losses) / 2 + 0 * fake.detach().mean())
        self.generator.requires_grad_(True)


class TwoPasses(Manual):
    """Two backward passes, of which the first reaches the input of `forward`, before one step; another module after."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"first": nn.Linear(WIDTH, WIDTH), "second": mlp(WIDTH, 1)})
        self.net.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.net.second(x * self.net.scale)

    def training_step(self, batch, batch_idx):
        hidden = self.net.first(batch[0] * self.net.scale)
        self.manual_backward(self(hidden).square().mean())
        self.manual_backward((self(self.net.first(batch[0])) - 1).square().mean())
        self.losses.append(self(batch[0]).mean().item())  # gathers the weights before the step
        self.optimizers().step()
        self.optimizers().zero_grad()
        self.losses.append(self(batch[0]).mean().item())  # of the weights after the step

    def validation_step(self, batch, batch_idx):
        self.losses.append(self(batch[0]).mean().item())

    def on_train_epoch_end(self):
        self.losses.append(self.net.second(torch.ones(2, WIDTH)).mean().item())


def batches(rank: int = 0, world: int = 1) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    images, noise = torch.randn(4, 8, WIDTH, generator=generator), torch.randn(4, 8, 4, generator=generator)
    return DataLoader(
        list(zip(images.chunk(world, 1)[rank], noise.chunk(world, 1)[rank], strict=True)), batch_size=None
    )


def fit(model, strategy="auto", devices=1, data=None, *callbacks):
    data = data or batches()
    options = {"max_epochs": 2, "max_steps": -1, "use_distributed_sampler": False, "num_sanity_val_steps": 0}
    return runs.fit(model, *callbacks, data=data, val=data, devices=devices, strategy=strategy, **options).model


def weights(model):
    return {name: p.full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in model.named_parameters()}


CASES = [
    (GAN, {}), (GAN, {"init_on_rank_0": True}), (GAN, {"mesh": ParallelDims(tensor=2)}),
    (BlocksGAN, {}), (BlocksGAN, {"reshard_after_forward": False}),
    (TwoPasses, {}),
]  # fmt: skip


def in_two(rank: int, expected: dict) -> None:
    for cls, options in CASES:
        losses, values = expected[cls.__name__]
        data = batches() if "mesh" in options else batches(rank, 2)  # tensor ranks have the same rows
        model = fit(cls(), FSDP2Strategy(**options), 2, data)
        mean = torch.tensor(model.losses)
        torch.distributed.all_reduce(mean)
        message = f"{cls.__name__} {options}"
        torch.testing.assert_close(mean / 2, torch.tensor(losses), rtol=1e-5, atol=1e-6, msg=message)
        for name, weight in weights(model).items():
            torch.testing.assert_close(weight, values[name], rtol=1e-5, atol=1e-5, msg=f"{message} {name}")


@pytest.mark.long
def test_two_processes_train_as_one():
    expected = {}
    for cls in {cls for cls, _ in CASES}:
        model = fit(cls())
        expected[cls.__name__] = (model.losses, weights(model))
    processes.run(in_two, expected)


def test_a_second_fit_and_the_count_of_flops_find_what_the_first_has_made():
    model, alone, counts = GAN(), GAN(), [runs.CountsFlops(), runs.CountsFlops()]
    for _ in range(2):
        fit(alone, "auto", 1, None, counts[0])
        fit(model, FSDP2Strategy(), 1, None, counts[1])
    assert model.losses == pytest.approx(alone.losses, rel=1e-5)
    assert counts[0].found == counts[1].found


def refused(cls, message):
    with pytest.raises(UsageError, match=message) as caught:
        fit(cls(), FSDP2Strategy())
    assert "\n" not in str(caught.value)


def test_a_parameter_used_without_a_call_after_a_step_is_refused():
    class Direct(GAN):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            (batch[0] @ self.discriminator[0].weight.T).sum()

    refused(Direct, r"^Direct.training_step uses a sharded parameter: .* put the computation into the forward of a")


def test_another_error_of_a_step_is_its_own():
    class Fails(GAN):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("out of reach")

    with pytest.raises(RuntimeError, match=r"^out of reach$"):
        fit(Fails(), FSDP2Strategy())


def test_a_backward_pass_behind_lightnings_back_is_refused():
    class Behind(GAN):
        def manual_backward(self, loss):
            loss.backward()

    refused(
        Behind, r"^the gradient of 'generator\.0\.weight' was not reduced over the devices: call self.manual_backward"
    )
