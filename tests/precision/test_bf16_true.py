"""BF16True: bf16 weights that move as fp32 ones do, on one device, in replicas and in shards; a resume is bitwise."""

import lightning.pytorch as pl
import pytest
import torch
from harness import processes, runs
from harness.runs import same
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader

from lightning_tricks.optim.bf16_step import rounding_seed
from lightning_tricks.precision import BF16Mixed, BF16True, Float8


class Model(pl.LightningModule):
    """Not the collection's own; a number of rows that two ranks share unequally; dropout, to see the random state."""

    def __init__(self, optimizer="adamw", norm=nn.LayerNorm, lr=1e-2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.optimizer, self.lr = optimizer, lr
        self.layers = nn.Sequential(nn.Linear(6, 7), norm(7), nn.Dropout(0.1), nn.Linear(7, 3))
        self.register_buffer("table", torch.linspace(0, 1, 6))
        self.losses: list[float] = []

    def training_step(self, batch, batch_idx):
        loss = self.layers(torch.randn(2, 6) + self.table).float().square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        if self.optimizer == "sgd":
            optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, fused=self.optimizer == "fused")
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 8)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_train_batch_start(self, batch, batch_idx):
        torch.manual_seed(1000 * self.global_rank + batch_idx)  # a resume draws the same rows and the same dropout


def fit(model, plugin, *callbacks, seed=0, ckpt_path=None, **options):
    torch.manual_seed(seed)
    options = {"max_steps": 6, "use_distributed_sampler": False, "plugins": plugin, **options}
    return runs.fit(model, *callbacks, data=DataLoader(range(100)), ckpt_path=ckpt_path, **options).trainer


def all_tensors(model, own):
    state = own.optimizers[0].state
    return [*model.parameters(), *(v for p in model.parameters() for _, v in sorted(state[p].items()))]


# the plugin alone


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.plain_norm = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4)
        self.instance = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
        self.tied = self.linear
        self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.codes = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
        self.wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.register_buffer("table", torch.ones(2))


def test_only_parameters_are_converted_in_place_and_none_beside_running_statistics():
    module = Everything()
    before = dict(module.named_parameters())
    module.linear.weight.grad = torch.ones(4, 4)
    for _ in range(2):
        assert BF16True().convert_module(module) is module
        kinds = {name: tensor.dtype for name, tensor in module.state_dict().items()}
        sixteen = {"linear.weight", "linear.bias", "plain_norm.weight", "plain_norm.bias", "wide"}
        assert {name for name, kind in kinds.items() if kind == torch.bfloat16} - {
            "tied.weight",
            "tied.bias",
        } == sixteen
        assert kinds["table"] == kinds["norm.running_mean"] == kinds["norm.weight"] == torch.float32
        assert kinds["instance.running_var"] == kinds["instance.bias"] == torch.float32
        assert (kinds["phase"], kinds["codes"]) == (torch.complex64, torch.int8)
        assert all(module.get_parameter(name) is tensor for name, tensor in before.items())
        assert module.tied.weight is module.linear.weight
        assert module.linear.weight.grad.dtype == torch.bfloat16


def test_products_run_in_bf16_and_a_loss_in_fp32():
    plugin, module = BF16True(), nn.Linear(4, 4)
    plugin.convert_module(module)
    with plugin.forward_context():
        out = module(torch.ones(2, 4))  # an fp32 tensor does no harm
        assert out.dtype == torch.bfloat16
        assert nn.functional.mse_loss(out, torch.ones(2, 4)).dtype == torch.float32
    assert plugin.precision == "bf16-true"
    assert (plugin.fsdp2_policy.param_dtype, plugin.fsdp2_policy.reduce_dtype) == (torch.bfloat16, torch.float32)


# one device


def test_the_clip_holds_for_a_fused_optimizer():
    model = Model("fused")
    fit(model, BF16True(), max_steps=1, gradient_clip_val=1e-3)
    norm = sum(p.grad.float().square().sum() for p in model.parameters()).sqrt().item()
    assert norm == pytest.approx(1e-3, rel=0.02)


@pytest.mark.parametrize(("optimizer", "accumulate"), [("fused", 1), ("sgd", 2)])
def test_a_resume_is_bitwise(tmp_path, optimizer, accumulate):
    """Five steps at once against the last two from a checkpoint, by another plugin, model and optimizer."""
    whole, resumed, options = (
        Model(optimizer),
        Model(optimizer),
        {"accumulate_grad_batches": accumulate, "max_steps": 5},
    )
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1, save_on_train_epoch_end=False)
    whole_trainer = fit(whole, BF16True(), saves, **options)
    # another seed in the air: what counts is the seed that the run began with
    resumed_trainer = fit(resumed, BF16True(), seed=99, ckpt_path=tmp_path / "step=3.ckpt", **options)
    assert resumed_trainer.global_step == 5
    assert resumed.losses == whole.losses[-2 * len(whole.losses) // 5 :]
    assert same(all_tensors(whole, whole_trainer), all_tensors(resumed, resumed_trainer))


class Manual(Model):
    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for place, optimizer in enumerate(self.optimizers()):
            if place == 0 or batch_idx % 2:
                optimizer.zero_grad()
                self.manual_backward(self.layers(torch.randn(2, 6)).float().square().mean())
                optimizer.step()

    def configure_optimizers(self):
        first, second = self.layers[0].parameters(), self.layers[3].parameters()
        return torch.optim.SGD(first, self.lr), torch.optim.AdamW(second, self.lr)


def test_manual_optimization_with_two_optimizers_counts_each_and_resumes_bitwise(tmp_path):
    whole, half, resumed = Manual(), Manual(), Manual()
    fit(whole, BF16True(), max_steps=12)
    plugin = BF16True()
    own = fit(half, plugin, max_steps=6)
    assert plugin.state_dict()["steps"] == [4, 2]
    own.save_checkpoint(tmp_path / "half.ckpt")
    fit(resumed, BF16True(), ckpt_path=tmp_path / "half.ckpt", max_steps=12)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_a_checkpoint_of_fp32_weights_opens_with_its_optimizer_state_and_the_other_way_round(tmp_path):
    first, second, third = Model(), Model(), Model()
    own = fit(first, BF16Mixed(), max_steps=3)
    own.save_checkpoint(tmp_path / "fp32.ckpt")
    there = fit(second, BF16True(), ckpt_path=tmp_path / "fp32.ckpt", max_steps=3)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert b.dtype == torch.bfloat16
        assert torch.equal(a.bfloat16(), b)
        saved, loaded = own.optimizers[0].state[a], there.optimizers[0].state[b]
        assert torch.equal(saved["exp_avg"].to(loaded["exp_avg"].dtype), loaded["exp_avg"])
        assert saved["step"] == loaded["step"] == 3
        assert loaded["exp_avg"].dtype == torch.float32
    there.save_checkpoint(tmp_path / "bf16.ckpt")
    back = fit(third, BF16Mixed(), ckpt_path=tmp_path / "bf16.ckpt", max_steps=3)
    for a, b in zip(second.parameters(), third.parameters(), strict=True):
        assert b.dtype == torch.float32
        assert torch.equal(a.float(), b)
        saved, loaded = there.optimizers[0].state[a], back.optimizers[0].state[b]
        assert torch.equal(saved["exp_avg"].float(), loaded["exp_avg"])


def test_validation_needs_no_optimizer(tmp_path):
    fit(Model(), BF16True()).save_checkpoint(tmp_path / "a.ckpt")
    model = Model()
    model.validation_step = lambda batch, batch_idx: None
    runs.trainer_with(plugins=BF16True()).validate(
        model, DataLoader(range(4)), ckpt_path=tmp_path / "a.ckpt", verbose=False
    )
    assert model.layers[0].weight.dtype == torch.bfloat16


# two processes


def gathered(tensor):
    every = [torch.empty_like(tensor) for _ in range(2)]
    torch.distributed.all_gather(every, tensor)
    return every


def train_replicas(rank):
    model = Model()
    fit(model, BF16True(), seed=rank, devices=2, strategy=DDPStrategy())
    for param in model.parameters():
        assert param.dtype == torch.bfloat16
        assert torch.equal(*gathered(param.detach()))


class Equal(Model):
    """Every shard asks for the same, so that shards differ by their rounding alone; one parameter is not sharded."""

    def configure_model(self):
        if not hasattr(self, "whole"):
            self.layers = nn.Linear(64, 64, bias=False)
            nn.init.ones_(self.layers.weight)
            self.whole = nn.Parameter(torch.ones(500))
            fully_shard(
                self.layers,
                mesh=self.device_mesh["data_parallel"],
                mp_policy=self.trainer.precision_plugin.fsdp2_policy,
            )

    def training_step(self, batch, batch_idx):
        self.seen = self.layers(torch.ones(1, 64)).dtype, torch.is_autocast_enabled("cpu")
        return -self.layers(torch.ones(1, 64)).float().sum() - self.whole.float().sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=2.0**-9)


def shard_and_train(rank):
    model = Equal()
    fit(model, BF16True(), max_steps=3, devices=2, strategy=ModelParallelStrategy(2, 1))
    mesh = model.device_mesh["data_parallel"]
    for placement, alike in ((Replicate(), True), (Shard(0), False)):
        one, other = gathered(torch.tensor(rounding_seed(0, 0, 0, distribute_tensor(torch.ones(4), mesh, [placement]))))
        assert torch.equal(one, other) is alike
    weight = model.layers.weight
    assert weight.dtype == weight.grad.dtype == torch.bfloat16
    one, other = gathered(weight.to_local().detach())
    assert not torch.equal(one, other)
    assert torch.equal(*gathered(model.whole.detach()))
    assert set(weight.to_local().float().unique().tolist()) <= {1 + n * 2.0**-7 for n in range(4)}
    assert model.seen == (torch.bfloat16, True)  # the parameter beside the shards keeps autocast on


def train_in_two(rank):
    train_replicas(rank)
    shard_and_train(rank)


@pytest.mark.long
def test_replicas_stay_equal_and_shards_round_each_in_its_own_way_without_autocast():
    processes.run(train_in_two)


class BuiltLate(Model):
    """Notes the types in `configure_model`, where a batch norm and a direct parameter are built, too."""

    def __init__(self) -> None:
        super().__init__()
        del self.layers

    def configure_model(self):
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Dropout(0.1), nn.Linear(7, 3))
        self.types = [self.layers[0].weight.dtype, self.layers[1].weight.dtype, self.layers[3].bias.dtype]
        self.scale = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize("plugin", [BF16True, lambda: Float8(base="bf16-true", emulate=True)])
def test_layers_are_bf16_as_soon_as_configure_model_has_built_them_with_the_values_of_fp32(plugin):
    built, late = nn.Sequential(nn.Linear(6, 7)), BuiltLate()
    with plugin().tensor_init_context():
        late.configure_model()
        built.append(nn.Linear(2, 2))
    assert late.types == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert built[1].weight.dtype == torch.bfloat16
    assert built[0].weight.dtype == torch.float32, "it is older than the context"
    rounded = BuiltLate()
    rounded.configure_model()
    assert rounded.types == [torch.float32] * 3, "nothing stays behind"
    for name, weight in rounded.layers.named_parameters():
        assert torch.equal(late.layers.get_parameter(name), weight.to(late.layers.get_parameter(name).dtype)), name
    fitted = BuiltLate()
    fit(fitted, BF16True(), max_steps=2)
    assert fitted.types == late.types
    assert fitted.scale.dtype == torch.bfloat16


@pytest.mark.parametrize("wrap", [torch.nn.utils.spectral_norm, torch.nn.utils.parametrizations.spectral_norm])
def test_spectral_norm_keeps_its_type_as_its_vectors_do(wrap):
    model, alone = Model(), Model()
    for each in (model, alone):
        torch.manual_seed(1)  # of the vectors
        each.layers[3] = wrap(each.layers[3])
    fit(alone, None)
    fit(model, BF16True())
    types = {name: parameter.dtype for name, parameter in model.layers.named_parameters()}
    assert types.pop("0.weight") == types.pop("1.bias") == torch.bfloat16
    assert {types[name] for name in types if name.startswith("3.")} == {torch.float32}
    assert model.losses == pytest.approx(alone.losses, rel=0.02)
