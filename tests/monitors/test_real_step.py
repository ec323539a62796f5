"""FLOPs are counted in the first real micro-batch: by hand, to the last bit, and with no effect of a step twice."""

import lightning.pytorch as pl
import pytest
import torch
from harness import processes
from harness.runs import fit, warned
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
        self.first, self.second, self.calls = nn.Linear(8, 16), nn.Linear(16, 8), 0

    def run(self, x):
        self.calls += 1
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
            self.found = self.monitor._batch_flops(self.monitor._contents, self.monitor._passes)


def train(module, watched=True, **options):
    torch.manual_seed(0)
    net, monitor = module(), MFUMonitor(peak_flops=1e12)
    keep = Keep(monitor)
    options = {"max_steps": 3, "log_every_n_steps": 1, "logger": False, **options}
    with warned("MFUMonitor") as keep.said:
        done = fit(net, *([monitor] if watched else []), keep, data=DataLoader(ROWS, batch_size=4), **options)
    keep.trainer = done.trainer
    return keep


def same(keep, other):
    pairs = [pair for a, b in zip(keep.states, other.states, strict=True) for pair in zip(a, b, strict=True)]
    return bool(pairs) and all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("module", COUNTED, ids=lambda module: module.__name__)
def test_a_step_is_counted_as_it_runs_and_trains_the_same_to_the_last_bit(module):
    watched, alone = train(module), train(module, watched=False)
    assert watched.said == []
    assert watched.found == COUNTED[module]
    assert same(watched, alone)
    assert watched.trainer.lightning_module.calls == alone.trainer.lightning_module.calls  # no effect of a step twice
    assert not {"training_step", "backward", "optimizer_step"} & vars(watched.trainer.strategy).keys()


def test_the_first_of_several_micro_batches_is_counted():
    assert train(Branches, accumulate_grad_batches=2).found == (TOTAL, 0)


@pytest.mark.parametrize("step", ["automatic", "by hand"])
def test_gradients_that_torch_computes_in_another_order_while_it_counts_stay_as_they_are(step):
    class Product(Branches):
        automatic_optimization = step == "automatic"

        def loss(self, x):
            x = self.run(x)
            filled = x.masked_fill(x > 0, self.second.bias.square().mean())
            return ((x + 1.5).prod(1) + (filled + 1.5).cumprod(1).sum(1)).mean() / 100

        def training_step(self, batch, batch_idx):
            if step == "automatic":
                return self.loss(batch)
            self.optimizers().zero_grad()
            self.loss(batch).backward()  # by no hook of Lightning
            self.optimizers().step()
            return None

    watched = train(Product)
    assert watched.said == []
    assert watched.found == (TOTAL, 0)
    assert same(watched, train(Product, watched=False))


def compiled(kind):
    class Compiled(Net):
        def __init__(self):
            super().__init__()
            self.block = nn.Sequential(self.first, nn.ReLU(), self.second)
            if kind == "in place":
                self.block.compile(backend="aot_eager")
            elif kind in ("block", "checkpoint"):
                self.block = torch.compile(self.block, backend="aot_eager")
            elif kind == "function":
                self.hidden = torch.compile(super().run, backend="aot_eager")

        def run(self, x):
            if kind == "function":
                return self.hidden(x)
            return checkpoint(self.block, x, use_reentrant=False) if kind == "checkpoint" else self.block(x)

    return torch.compile(Compiled(), backend="aot_eager") if kind == "step" else Compiled()


@pytest.mark.parametrize("kind", ["function", "block", "in place", "checkpoint", "step"])
def test_compiled_code_is_refused_in_a_line_with_the_remedy_and_trains_the_same(kind):
    torch._dynamo.reset()
    watched = train(lambda: compiled(kind))
    assert watched.found is None
    (said,) = watched.said
    reason = "it calls compiled code" if kind in ("function", "step") else "block is compiled"
    assert f"the FLOPs of Compiled cannot be counted ({reason}); give flops_per_token or flops_per_sample" in said
    torch._dynamo.reset()
    assert same(watched, train(lambda: compiled(kind), watched=False))


def test_batches_without_a_backward_pass_are_waited_for():
    class Late(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss if batch_idx > 1 else None

    assert train(Late, max_steps=3).found == (TOTAL, 0)


def test_scripted_and_traced_parts_are_seen():
    class Scripted(Net):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.jit.script(self.first), torch.jit.trace(self.second, torch.ones(4, 16))

    watched = train(Scripted)
    assert watched.said == []
    assert watched.found == (TOTAL, 0)


def test_an_operator_of_another_package_is_named(caplog):
    @torch.library.custom_op("flops_test::thirds", mutates_args=())
    def thirds(x: torch.Tensor) -> torch.Tensor:
        return x / 3

    thirds.register_fake(torch.empty_like)
    thirds.register_autograd(lambda ctx, grad: grad / 3)

    class Foreign(Net):
        def run(self, x):
            return thirds(super().run(x))

    with caplog.at_level("INFO"):
        train(Foreign)
    (said,) = [record.message for record in caplog.records if "MFUMonitor" in record.message]
    assert "full attention, without flops_test.thirds.default)" in said


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


@pytest.mark.long
def test_every_rank_counts_its_own_micro_batch_also_in_shards():
    processes.run(count_on_two)
