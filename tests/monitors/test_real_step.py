"""FLOPs counted in the first real micro-batch, for modules that no copy can be run of: by hand, and to the last bit."""

import warnings

import lightning.pytorch as pl
import pytest
import torch
import two_processes
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_tricks import FSDP2Strategy
from lightning_tricks.callbacks import MFUMonitor

ROWS = torch.linspace(-1, 1, 64 * 8).reshape(64, 8)

# 4 rows through Linear(8, 16) and Linear(16, 8): 2 * 4 * 8 * 16 = 1024 each. Backward: each weight's gradient, and the
# second layer's input's.
ONE = 2 * 4 * 8 * 16
TOTAL = 5 * ONE


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def run(self, x):
        return self.second(self.first(x).relu())

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def loss(self, x):
        return self.run(x).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Branches(Net):
    """Its loss depends on a value."""

    def loss(self, x):
        loss = super().loss(x)
        return loss * 2 if loss.item() > 1e-3 else loss


class KeepsAMethod(Net):
    """A closure holds a method, as minGPT's callbacks do: a deep copy calls the original."""

    def __init__(self) -> None:
        super().__init__()
        run = self.run
        self.call = lambda x: run(x)

    def loss(self, x):
        return self.call(x).square().mean()


class Recomputes(Branches):
    def run(self, x):
        return checkpoint(super().run, x, use_reentrant=False)


class Masked(Net):
    """torch asks whether the mask is a causal one."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 1, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def run(self, x):
        return self.encoder(x[None], mask=nn.Transformer.generate_square_subsequent_mask(4))


class Policy(Net):
    """Steps two optimizers through three backward passes, and looks at values in between, as PPO does."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            if loss.item() > -1:
                optimizer.step()
        self.optimizers()[0].step(lambda: self.manual_backward(self.loss(batch)))

    def configure_optimizers(self):
        muon = torch.optim.Muon([self.first.weight], lr=0.1)  # multiplies matrices in its own step
        return [torch.optim.SGD(self.second.parameters(), lr=0.1), muon]


# Each layer of the encoder, 4 tokens of width 8: three projections, their output's, and 4 x 4 scores with values; the
# width 16 of its feed-forward layers. Backward twice of all, but for the input of the first projection.
_LAYER = 2 * 4 * 8 * (3 * 8 + 8 + 16 + 16) + 2 * 2 * 4 * 4 * 8
ENCODER = 2 * 3 * _LAYER - 2 * 4 * 8 * 3 * 8

COUNTED = {
    Branches: (TOTAL, 0),
    KeepsAMethod: (TOTAL, 0),
    Recomputes: (TOTAL, ONE),  # all that the backward pass needs: not the last product
    Masked: (ENCODER, 0),
    Policy: (3 * TOTAL, 0),
}


class Keep(pl.Callback):
    """The FLOPs that the monitor took, and every state after each step."""

    def __init__(self, monitor) -> None:
        self.monitor, self.states, self.found = monitor, [], None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        gradients = [p.grad for p in pl_module.parameters()]
        self.states.append([t.clone() for t in (*pl_module.state_dict().values(), *gradients) if t is not None])
        if getattr(self.monitor, "_batch_flops", None) is not None:
            self.found = self.monitor._batch_flops(self.monitor._contents)


def train(module, watched=True, **options):
    torch.manual_seed(0)
    net = module()
    monitor = MFUMonitor(peak_flops=1e12)
    keep = Keep(monitor)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = pl.Trainer(
            max_steps=3, log_every_n_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[*([monitor] if watched else []), keep],
            **({"accelerator": "cpu", "devices": 1} | options),
        )  # fmt: skip
        trainer.fit(net, DataLoader(ROWS, batch_size=4))
    keep.said = [str(w.message) for w in caught if "MFUMonitor" in str(w.message)]
    keep.trainer = trainer
    return keep


def same(keep, other):
    pairs = [pair for a, b in zip(keep.states, other.states, strict=True) for pair in zip(a, b, strict=True)]
    return bool(pairs) and all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("module", COUNTED, ids=lambda module: module.__name__)
def test_what_no_copy_can_run_is_counted_in_its_first_step_and_trains_the_same_to_the_last_bit(module):
    watched, alone = train(module), train(module, watched=False)
    assert watched.said == []
    assert watched.found == COUNTED[module]
    assert same(watched, alone)
    assert not {"training_step", "backward", "optimizer_step"} & vars(watched.trainer.strategy).keys()


def test_the_first_of_several_micro_batches_is_counted():
    assert train(Branches, accumulate_grad_batches=2).found == (TOTAL, 0)


def test_a_gradient_that_counting_would_change_is_left_uncounted():
    class Product(Branches):
        def loss(self, x):
            return (self.run(x) + 1.5).prod(1).mean() / 100 + super().loss(x)

    watched = train(Product)
    assert watched.found is None
    assert "counting would change the last bits of the gradient of prod" in watched.said[0]
    assert same(watched, train(Product, watched=False))


def twice(x):
    return x * 2 @ torch.eye(8)


COMPILED = torch.compile(twice, backend="eager")


def test_compiled_code_runs_compiled_and_is_not_counted_in_a_real_step():
    class Compiled(Branches):
        def run(self, x):
            return COMPILED(super().run(x))

    graphs = torch._dynamo.utils.counters["stats"]
    torch._dynamo.reset()
    before = graphs["unique_graphs"]
    for _ in range(2):  # also where it was compiled before
        watched = train(Compiled)
        assert watched.found is None
        (said,) = watched.said
        assert "Compiled is compiled, which hides its operators" in said
        assert said.endswith("give flops_per_token or flops_per_sample")
        assert "\n" not in said
    assert graphs["unique_graphs"] == before + 1
    assert same(watched, train(Compiled, watched=False))


def test_an_operator_of_another_package_is_named_with_the_part_that_ran_it(caplog):
    @torch.library.custom_op("flops_test::thirds", mutates_args=())
    def thirds(x: torch.Tensor) -> torch.Tensor:
        return x / 3

    thirds.register_fake(torch.empty_like)
    thirds.register_autograd(lambda ctx, grad: grad / 3)

    class Third(nn.Module):
        def forward(self, x):
            return thirds(x)

    for base in (Net, Branches):

        class Foreign(base):
            def __init__(self):
                super().__init__()
                self.inner = nn.Sequential(Third())

            def run(self, x):
                return self.inner(super().run(x))

        caplog.clear()
        with caplog.at_level("INFO"):
            train(Foreign)
        (said,) = [record.message for record in caplog.records if "MFUMonitor" in record.message]
        assert "without flops_test.thirds.default in inner.0" in said


def test_a_step_that_fails_leaves_the_strategy_as_it_was():
    class Fails(Branches):
        def run(self, x):
            if self._trainer is not None:
                assert "training_step" in vars(self.trainer.strategy)
            raise RuntimeError("lost")

    strategy = pl.strategies.SingleDeviceStrategy(torch.device("cpu"))
    own = strategy.training_step = lambda *args: type(strategy).training_step(strategy, *args)
    with pytest.raises(RuntimeError, match="lost"):
        train(Fails, strategy=strategy)
    assert strategy.training_step is own
    assert "backward" not in vars(strategy)


def count_on_two(rank: int) -> None:
    for strategy in ("ddp", FSDP2Strategy(activation_checkpointing="none")):
        found = train(Branches, strategy=strategy, devices=2)
        assert found.said == [], found.said
        assert found.found == (TOTAL, 0), (strategy, found.found)


def test_every_rank_counts_its_own_micro_batch_also_in_shards():
    two_processes.run(count_on_two)
