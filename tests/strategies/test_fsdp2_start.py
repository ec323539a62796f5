"""Every rank starts with rank 0's values, whatever its own seed was and wherever the module was built."""

import lightning.pytorch as pl
import pytest
import torch
from harness import processes, runs
from harness.models import batches
from harness.runs import whole
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_tricks import LanguageModel, Llama, ParallelDims
from lightning_tricks._core.errors import UsageError
from lightning_tricks.models import GPT2
from lightning_tricks.strategies import FSDP2Strategy

pytestmark = pytest.mark.long

SEED = 7  # of rank 0; rank r has SEED + r


class Start(pl.Callback):
    """What training starts with, whole, and this rank's next random number."""

    def on_train_start(self, trainer, pl_module):
        tensors = [*pl_module.named_parameters(), *pl_module.named_buffers()]
        self.found = {name: whole(tensor) for name, tensor in tensors}
        self.local = {name: own(tensor) for name, tensor in tensors}
        self.drawn = torch.rand(2)


def own(tensor):
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


class Decoding(LanguageModel):
    def configure_callbacks(self):
        return []

    def training_step(self, batch, batch_idx):
        return super().training_step({"input_ids": batch[:, :-1], "labels": batch[:, 1:]}, batch_idx)


def ours(tied=False):
    shape = GPT2 if tied else Llama
    return Decoding(shape(vocab_size=64, d_model=32, n_layers=2, n_heads=2, max_seq_len=16))


class Tied(pl.LightningModule):
    """GPT-2 of transformers, whose head is its embedding; built in `configure_model`."""

    def configure_model(self):
        if not hasattr(self, "model"):
            shape = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 64}
            self.model = GPT2LMHeadModel(GPT2Config(**shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))

    def training_step(self, batch, batch_idx):
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class FilledLate(pl.LightningModule):
    """Builds on the meta device, with a buffer and a scalar, and fills them with numbers of torch's random state."""

    def configure_model(self):
        if not hasattr(self, "layers"):
            with torch.device("meta"):
                self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
                self.layers.scale = nn.Parameter(torch.empty(()))
                self.layers.register_buffer("shift", torch.empty(8))

    def init_weights(self):
        for parameter in self.layers.parameters():
            nn.init.constant_(parameter, torch.rand(()).item())
        self.layers.shift.copy_(torch.rand(8))

    def training_step(self, batch, batch_idx):
        return (self.layers(batch[:, :8].float()) * self.layers.scale + self.layers.shift).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class TiedAndSharded(Tied):
    """Shards itself, too."""

    def configure_model(self):
        super().configure_model()
        fully_shard(self.model, mesh=self.device_mesh["shard"])


class Other(Tied):
    """Another module on each rank."""

    def configure_model(self):
        self.layer = nn.Linear(16, 1, bias=torch.distributed.get_rank() == 0)


def start_of(model, rank=0, seed=None, **options):
    torch.manual_seed(SEED + rank if seed is None else seed)
    start = Start()
    data = DataLoader(torch.arange(64).view(4, 16), batch_size=4)
    runs.fit(model, start, data=data, max_steps=1, use_distributed_sampler=False, **options)
    return start


def assert_same(found, expected, case):
    assert found.keys() == expected.keys(), case
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different, (case, different)


def starting_in_four(rank, expected, drawn):
    for name, make in MODELS.items():
        model, strategy = make(), FSDP2Strategy(mesh=ParallelDims(replicate=2))
        start = start_of(model, rank, devices=4, strategy=strategy)
        assert_same(start.found, expected[name], name)
        sharded = [parameter for parameter in model.parameters() if parameter.ndim == 2]
        assert {parameter.placements for parameter in sharded} == {(Replicate(), Shard(0))}
        assert strategy.device_mesh.mesh_dim_names == ("replicate", "shard")
        assert strategy.distributed_sampler_kwargs == {"num_replicas": 4, "rank": rank}
        group = [None] * 4
        torch.distributed.all_gather_object(group, start.local)
        assert_same(group[rank], group[(rank + 2) % 4], f"{name}: the replicas")
        if rank == 0:
            assert torch.equal(start.drawn, drawn[name])
        torch.distributed.all_gather_object(group, start.drawn.tolist())
        assert len({tuple(numbers) for numbers in group}) == 4, f"{name}: each rank keeps random numbers of its own"


MODELS = {"ours": ours, "tied": lambda: ours(tied=True), "filled late": FilledLate}


def starting_in_two(rank, expected, drawn):
    for name, make in MODELS.items():
        for strategy in (FSDP2Strategy(), "ddp"):
            if name == "filled late" and strategy == "ddp":
                continue  # nothing fills what is on the meta device
            start = start_of(make(), rank, devices=2, strategy=strategy)
            assert_same(start.found, expected[name], f"{name}, {strategy}")
    for options in ({"init_on_rank_0": True}, {}):
        model = Tied()
        start = start_of(model, rank, devices=2, strategy=FSDP2Strategy(**options))
        assert_same(start.found, expected["transformers"], options)
        assert not options or torch.equal(start.drawn, drawn["transformers"]), (
            "ranks that drew no weights draw the same"
        )
        assert model.model.lm_head.weight is model.model.transformer.wte.weight
        alike = start_of(FilledLate(), seed=SEED, devices=2, strategy=FSDP2Strategy())
        assert torch.equal(alike.drawn, drawn["filled late"]), "ranks of one seed go on as one process does"
    start = start_of(ours(), rank, devices=2, strategy=FSDP2Strategy(init_on_rank_0=True))
    assert_same(start.found, expected["ours"], "it builds on the meta device itself")
    with pytest.raises(UsageError, match=r"^TiedAndSharded shards itself in configure_model, where rank 0's values"):
        start_of(TiedAndSharded(), rank, devices=2, strategy=FSDP2Strategy(init_on_rank_0=True))
    with pytest.raises(UsageError, match=r"another module than rank 0: it has nothing more in place of 'layer\.bias'"):
        start_of(Other(), rank, devices=2, strategy=FSDP2Strategy())


@pytest.fixture(scope="module")
def alone():
    """One process with rank 0's seed."""
    starts = {name: start_of(make(), strategy=FSDP2Strategy()) for name, make in MODELS.items()}
    starts["transformers"] = start_of(Tied())
    return {name: start.found for name, start in starts.items()}, {name: s.drawn for name, s in starts.items()}


def test_ranks_of_other_seeds_start_with_the_values_of_one_process(alone):
    processes.run(starting_in_two, *alone)


def test_hsdp_shards_over_two_and_copies_over_two_which_start_alike_where_ranks_have_other_seeds(alone):
    processes.run(starting_in_four, *alone, world=4)


class Normalized(pl.LightningModule):
    """Batch norm, whose statistics follow each rank's own rows, and a table."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.register_buffer("table", torch.arange(1000.0))
        self.seen = {}

    def mean_of_both(self):
        return self.trainer.strategy.reduce(self.norm.running_mean.clone(), reduce_op="mean")

    def training_step(self, batch, batch_idx):
        return self.head(self.norm(batch)).square().mean()

    def on_train_start(self):
        self.seen["writes"] = self.table._version

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1:
            self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/saved")
        self.seen["saved" if batch_idx == 1 else "trained"] = self.norm.running_mean.clone(), self.mean_of_both()

    def validation_step(self, batch, batch_idx):
        self.seen["validated"] = (self.norm.running_mean.clone(), self.mean_of_both())

    test_step = predict_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def with_statistics(rank, folder):
    torch.manual_seed(rank)
    model = Normalized()
    data = torch.randn(3, 8, 4) + rank
    run = runs.fit(
        model, data=batches(data), val=batches(data[:1]), devices=2, strategy=FSDP2Strategy(), default_root_dir=folder,
        max_epochs=1, use_distributed_sampler=False, num_sanity_val_steps=0, val_check_interval=3,
    )  # fmt: skip
    assert not torch.equal(*model.seen["trained"])  # each rank has its own
    assert torch.equal(*model.seen["saved"])
    assert torch.equal(*model.seen["validated"])
    assert model.table._version == model.seen["writes"], "StepGuard copies, from then on, a buffer that is written"
    for evaluate in (run.trainer.test, run.trainer.predict):
        model.norm.running_mean += rank  # as more training would leave them
        evaluate(model, batches(data[:1]))
        assert torch.equal(*model.seen["validated"])


def test_a_checkpoint_a_validation_a_test_and_a_prediction_have_rank_0s_running_statistics(tmp_path):
    processes.run(with_statistics, tmp_path)
