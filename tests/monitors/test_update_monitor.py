"""Updates: ratios worked out by hand, of which parameters, from how large a sample, and the same in shards."""

import lightning.pytorch as pl
import pytest
import torch
from harness import processes
from harness.models import GPT, Decoding
from harness.runs import decoding, fit, same_training, warned
from torch import nn
from torch.utils.data import DataLoader

from lightning_tricks.callbacks import UpdateMonitor
from lightning_tricks.monitors.update_monitor import sample_stride, square_sums


class Moving(pl.LightningModule):
    """Each gradient is known: SGD at lr 0.1 moves every element of a matrix by -0.1 and of a bias by -0.1."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.head = nn.Linear(2, 1, bias=False)
        self.norm = nn.LayerNorm(2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        for block, value in zip(self.blocks, (1.0, 5.0), strict=True):
            nn.init.constant_(block.weight, value)
        self.head.weight.data.copy_(torch.tensor([[3.0, 4.0]]))

    def training_step(self, batch, batch_idx):
        return sum(p.sum() for p in self.parameters() if p.requires_grad)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(torch.zeros(40))


def test_ratios_and_sizes_by_hand():
    run = fit(Moving(), UpdateMonitor(), max_steps=1, log_every_n_steps=1)
    assert run.rows[0][0] == 0
    # moved by 0.1 everywhere; weights of 1, of 5, and (3, 4) with rms 5 / sqrt 2; over all 4 + 4 + 2 elements:
    # squares 10 * 0.01 over 4 * 1 + 4 * 25 + 25 = 129
    assert run.rows[0][1] == pytest.approx(
        {
            "updates/blocks.0/ratio": 0.1,
            "updates/blocks.1/ratio": 0.02,
            "updates/head/ratio": 0.1 * 2**0.5 / 5,
            "updates/blocks.0/weight_rms": 1.0,
            "updates/blocks.1/weight_rms": 5.0,
            "updates/head/weight_rms": 5 / 2**0.5,
            "updates/ratio": (0.1 / 129) ** 0.5,
        },
        rel=1e-5,
    )


def test_a_target_network_that_no_optimizer_trains_does_not_count():
    model = Moving()
    trained = [*model.parameters()]
    model.target = nn.Linear(2, 2, bias=False)  # requires a gradient, as a copy of a network does
    model.configure_optimizers = lambda: torch.optim.SGD(trained, lr=0.1)
    run = fit(model, UpdateMonitor(), max_steps=1, log_every_n_steps=1)
    assert run.of("updates/ratio") == pytest.approx([(0.1 / 129) ** 0.5], rel=1e-5)
    assert not [name for name in run.names() if "target" in name]


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_a_layer_with_spectral_norm_trains_as_without_the_monitor(norm):
    """To read the weight of such a layer makes a step of its power iteration, which goes into the next weights."""

    class Normed(Moving):
        def __init__(self):
            torch.manual_seed(0)
            super().__init__()
            self.last = norm(nn.Linear(32, 32))

        def training_step(self, batch, batch_idx):
            return self.last(torch.ones(1, 32)).square().sum()

    runs = [fit(Normed(), *monitors, log_every_n_steps=1) for monitors in ([], [UpdateMonitor()])]
    assert same_training(*runs)
    assert any(name.startswith("updates/last") for name in runs[1].names())


@pytest.mark.parametrize("group", ["from the start", "added"])
def test_weights_unfrozen_later_count_from_then_on(group):
    class Unfreezing(Moving):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 2:
                nn.init.constant_(self.frozen.weight, 10.0)
                self.frozen.requires_grad_(True)
                if group == "added":
                    self.optimizers().optimizer.add_param_group({"params": list(self.frozen.parameters())})

        def configure_optimizers(self):
            params = [p for p in self.parameters() if p.requires_grad or group == "from the start"]
            return torch.optim.SGD(params, lr=0.1)

    run = fit(Unfreezing(), UpdateMonitor(), max_steps=4, log_every_n_steps=1)
    ratios = [(step, row["updates/frozen/ratio"]) for step, row in run.rows if "updates/frozen/ratio" in row]
    assert ratios == [(2, pytest.approx(0.01, rel=1e-4)), (3, pytest.approx(0.1 / 9.9, rel=1e-4))]


def test_real_and_complex_weights_together_by_hand():
    class Complex(Moving):
        def __init__(self):
            super().__init__()
            self.wave = nn.Parameter(torch.full((2, 2), 3 + 4j))

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx).real  # of z, the gradient is 1 + 0j

    run = fit(Complex(), UpdateMonitor(), max_steps=1, log_every_n_steps=1)
    assert run.of("updates/wave/weight_rms") == pytest.approx([5.0])
    assert run.of("updates/wave/ratio") == pytest.approx([0.1 / 5])


def test_only_log_steps_are_measured_each_from_its_own_weights():
    run = fit(Moving(), UpdateMonitor(), accumulate_grad_batches=2, max_steps=4)
    # two micro-batches of which each counts half: still 0.1 a step; before the second and the fourth
    assert [step for step, _ in run.rows] == [1, 3]
    assert run.of("updates/blocks.0/weight_rms") == pytest.approx([0.9, 0.7])
    assert run.of("updates/blocks.0/ratio") == pytest.approx([0.1 / 0.9, 0.1 / 0.7])


def test_nothing_is_copied_between_log_steps(monkeypatch):
    import lightning_tricks.monitors.update_monitor as module

    copies = []
    sample = module._Watched.sample
    monkeypatch.setattr(module._Watched, "sample", lambda self: copies.append(self) or sample(self))
    monitor = UpdateMonitor()
    fit(Moving(), monitor, max_steps=7, log_every_n_steps=3)
    assert len(copies) == 3 * 3 * 2  # steps 3, 6 and 7; three matrices; before and after
    assert monitor._before == []


def test_square_sums_of_mixed_types_are_in_fp32():
    tensors = [torch.full((1024,), 3.0, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64)]
    assert square_sums([*tensors, torch.empty(0)]).tolist() == pytest.approx([9216.0, 9216.0, 9216.0, 0.0])
    # in bf16 the norm of a thousand ones is 31.625, and fp16 cannot hold one of 80,000
    assert square_sums([torch.ones(1000, dtype=torch.bfloat16)]).tolist() == pytest.approx([1000.0], rel=1e-6)
    assert square_sums([torch.full((4,), 4e4, dtype=torch.float16)]).tolist() == pytest.approx([6.4e9], rel=1e-3)


def test_the_eleventh_block_is_not_a_part_of_the_second():
    model = Moving()
    model.blocks = nn.ModuleList(nn.Linear(1, 1) for _ in range(11))
    for index, block in enumerate(model.blocks):
        nn.init.constant_(block.weight, index)
    run = fit(model, UpdateMonitor(), max_steps=1, log_every_n_steps=1)
    assert [run.of(f"updates/blocks.{index}/weight_rms") for index in (1, 10)] == [[1.0], [10.0]]


def test_an_embedding_counts_once_where_it_is_tied_to_the_head():
    names = decoding(UpdateMonitor(), config=GPT).names()
    places = ("embed", "positions", "blocks.0", "blocks.1")
    assert names == {f"updates/model.{p}/{v}" for p in places for v in ("ratio", "weight_rms")} | {"updates/ratio"}


def test_a_parameter_of_the_module_itself_stands_under_its_own_name():
    model = Moving()
    model.table = nn.Parameter(torch.full((2, 2), 2.0))
    assert fit(model, UpdateMonitor(), max_steps=2).of("updates/table/weight_rms") == pytest.approx([1.9])


def test_a_step_that_changes_nothing_is_zero_and_zero_weights_have_no_ratio():
    model = Moving()
    model.blocks[0].weight.data.zero_()
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=0.0)
    run = fit(model, UpdateMonitor(), max_steps=2)
    assert run.of("updates/blocks.1/ratio") == run.of("updates/ratio") == [0.0]
    assert run.of("updates/blocks.0/weight_rms") == [0.0]
    assert "updates/blocks.0/ratio" not in run.names()


@pytest.mark.parametrize(("numel", "row", "most", "stride"), [
    (10, 5, None, 1), (10, 5, 10, 1), (10, 5, 9, 2), (10, 5, 4, 3), (4096 * 4096, 4096, 65536, 257), (100, 10, 10, 11),
    (7, 7, 1, 8),
])  # fmt: skip
def test_the_stride_keeps_to_the_number_and_meets_every_column(numel, row, most, stride):
    assert sample_stride(numel, row, most) == stride
    sampled = range(0, numel, stride)
    assert most is None or len(sampled) <= most
    assert len({index % row for index in sampled}) == min(row, len(sampled))


def test_a_sample_is_scaled_back_to_its_tensor():
    """Every third of 10 elements: the sample stands for all of them, so a large tensor weighs what it should."""
    model = Moving()
    model.blocks = nn.ModuleList(nn.Linear(5, 2, bias=False) for _ in range(2))
    for block, weight in zip(model.blocks, (torch.full((2, 5), 2.0), torch.arange(10.0).view(2, 5)), strict=True):
        block.weight.data.copy_(weight)
    run = fit(model, UpdateMonitor(max_elements=4), max_steps=1, log_every_n_steps=1)
    assert run.of("updates/blocks.0/weight_rms") == pytest.approx([2.0])
    # elements 0, 3, 6, 9: mean square 126 / 4
    assert run.of("updates/blocks.1/weight_rms") == pytest.approx([31.5**0.5])
    # the head's two elements are all looked at
    squares = 10 * 4 + 10 * 31.5 + 25
    assert run.of("updates/ratio") == pytest.approx([(22 * 0.01 / squares) ** 0.5], rel=1e-5)


def test_a_model_whose_parameters_cannot_be_told_trains_without_figures():
    class Lazy(Moving):
        def __init__(self):
            super().__init__()
            self.late = nn.LazyLinear(2)

        def training_step(self, batch, batch_idx):
            return self.late(torch.ones(1, 3)).sum()

    with warned("UpdateMonitor") as lines:
        assert fit(Lazy(), UpdateMonitor()).names() == set()
    (line,) = lines
    assert line.startswith("UpdateMonitor records nothing: parameter 'late.weight' has no shape yet")


def test_several_optimizers_and_steps_are_measured_over_the_whole_batch():
    class Manual(Moving):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            one, other = self.optimizers()
            for optimizer in (one, one, other):
                optimizer.zero_grad()
                self.manual_backward(super().training_step(batch, batch_idx))
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.blocks[0], self.head)]

    run = fit(Manual(), UpdateMonitor(), max_steps=3, log_every_n_steps=1)
    assert run.of("updates/blocks.0/ratio") == pytest.approx([0.2])
    assert run.of("updates/blocks.1/ratio") == []  # no optimizer trains it
    assert run.of("updates/head/ratio") == pytest.approx([0.1 * 2**0.5 / 5])


class Sharded(Decoding):
    """Under a mesh all is sharded but the first block's attention and the head, which stay whole on each rank."""

    def configure_model(self):
        if self.device_mesh is None:
            return
        from torch.distributed.fsdp import fully_shard

        mesh = self.device_mesh["data_parallel"]
        whole = {*self.model.blocks[0].attn.parameters(), *self.model.head.parameters()}
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh, ignored_params=whole)
        fully_shard(self.model, mesh=mesh, ignored_params=whole)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0, foreach=False)

    def train_dataloader(self):
        return DataLoader([torch.arange(32).view(2, 16)] * 8, batch_size=None)  # the same batch on every rank


def shards(rank, alone):
    from lightning.pytorch.strategies import ModelParallelStrategy

    fsdp2 = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    for strategy in ("ddp", fsdp2):
        run = fit(Sharded(), UpdateMonitor(None), devices=2, strategy=strategy, use_distributed_sampler=False)
        for (_, found), (_, expected) in zip(run.rows, alone, strict=True):
            assert found == pytest.approx(expected, rel=1e-4), strategy


@pytest.mark.long
def test_ddp_and_fsdp2_give_the_figures_of_one_process():
    processes.run(shards, fit(Sharded(), UpdateMonitor(None)).rows)
