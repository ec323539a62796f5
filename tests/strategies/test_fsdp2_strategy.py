"""FSDP2 in one line: any module as one process would train it, and every wrong input told before anything waits."""

import functools

import lightning.pytorch as pl
import pytest
import torch
from foreign import CausalLM, rows, train
from harness import processes, runs
from harness.models import Small, batches
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lightning_tricks._core.errors import UsageError
from lightning_tricks.callbacks import GradNormMonitor, StepGuard
from lightning_tricks.optim import decay_groups
from lightning_tricks.parallel.dims import ParallelDims
from lightning_tricks.precision import BF16Mixed, BF16True
from lightning_tricks.strategies import FSDP2Strategy


class Encoder(pl.LightningModule):
    """torch's own transformer, with a parameter of the module's own and SGD, so that a wrong clip would show."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.scale = nn.Parameter(torch.ones(16))
        self.losses: list[float] = []

    def training_step(self, batch, batch_idx):
        x = batch.unsqueeze(-1).float() / 64 * self.scale
        loss = (self.encoder(x).mean((1, 2)) - batch.float().mean(1) / 8).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(decay_groups(self, weight_decay=0.1), lr=0.5)


class Image(Small):
    """A residual network with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.net = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(8, 1)
        self.stages = nn.Sequential(*(Residual(8) for _ in range(2)))

    def loss_of(self, batch):
        images = batch.float().view(len(batch), 1, 4, -1) / 64
        return (self.net(self.stages(self.stem(images)).mean((2, 3))) - 1).square().mean()


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x):
        return x + self.norm(self.conv(x)).relu()


def fit(model, strategy="auto", devices=1, data=None, *callbacks, **options):
    options = {"max_steps": 6, "log_every_n_steps": 1, "gradient_clip_val": 0.5, **options}
    torch.manual_seed(0)
    return runs.fit(
        model, *callbacks, data=data, devices=devices, strategy=strategy, use_distributed_sampler=False, **options
    )


def whole(model):
    """Every weight, gathered; also of checkpointed and compiled blocks, under the plain name."""
    return {name: runs.whole(p) for name, p in model.named_parameters()}


# One process, then two: what each trains, and with which options of the strategy.
OPTIONS = {
    "plain": {},
    "zero2": {"reshard_after_forward": False},
    "full": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "named_blocks": {"blocks": [r".*layers\.\d+\.(self_attn|mlp|linear\d)"]},
    "compiled": {"compile_blocks": True},
}


def foreign_in_two(rank: int, expected: dict) -> None:
    # traced and partitioned as by the default backend, whose C++ compiler takes most of a minute
    nn.Module.compile = functools.partialmethod(nn.Module.compile, backend="aot_eager")
    for kind, (losses, weights, norms) in expected.items():
        cls = {"llama": CausalLM, "encoder": Encoder, "image": Image}[kind]
        options = OPTIONS if kind == "llama" else {"plain": {}}
        for name, given in options.items():
            model = cls()
            # the image model sees the same rows on both ranks, as batch norm's statistics are a rank's own
            data = rows(0, 1) if kind == "image" else rows(rank, 2)
            run = fit(model, FSDP2Strategy(**given), 2, data, GradNormMonitor(), max_steps=3)
            mean = torch.tensor(model.losses)
            torch.distributed.all_reduce(mean)
            torch.testing.assert_close(mean / 2, torch.tensor(losses), rtol=1e-5, atol=1e-6, msg=f"{kind} {name}")
            for at, weight in whole(model).items():
                torch.testing.assert_close(weight, weights[at], rtol=1e-4, atol=1e-5, msg=f"{kind} {name} {at}")
            if rank == 0:
                found = run.of("train/grad_norm")
                assert found[0] == pytest.approx(norms[0], rel=1e-6), f"{kind} {name}"
                assert found == pytest.approx(norms, rel=1e-3), f"{kind} {name}"  # weights drift apart by digits
            held = sum(p.to_local().numel() for p in model.parameters())
            assert held <= 0.6 * sum(p.numel() for p in model.parameters()), "nothing was sharded"
            assert isinstance(model, FSDPModule)
            state = run.trainer.optimizers[0].state
            assert all(
                isinstance(s, DTensor) for v in state.values() for s in v.values() if torch.is_tensor(s) and s.ndim
            )

    the_norm_changes_no_clip(rank)


def the_norm_changes_no_clip(rank: int) -> None:
    """FSDP2's clip of bf16 gradients is the same to the bit whoever asks for the norm."""
    trained = []
    for callbacks in ([], [GradNormMonitor()], [StepGuard(), GradNormMonitor()]):
        model = Encoder()
        fit(
            model,
            FSDP2Strategy(),
            2,
            rows(rank, 2),
            *callbacks,
            plugins=[BF16True()],
            max_steps=3,
            gradient_clip_val=0.01,
        )
        trained.append(whole(model))
    for other in trained[1:]:
        assert all(torch.equal(weight, other[name]) for name, weight in trained[0].items())


@pytest.mark.long
def test_foreign_modules_train_as_in_one_process():
    expected = {}
    for kind, cls in (("llama", CausalLM), ("encoder", Encoder), ("image", Image)):
        model = cls()
        run = fit(model, "auto", 1, rows(), GradNormMonitor(), max_steps=3)
        expected[kind] = (model.losses, whole(model), run.of("train/grad_norm"))
    processes.run(foreign_in_two, expected)


def test_a_second_fit_and_a_validation_take_the_shards_as_they_are():
    model, strategy = CausalLM(), FSDP2Strategy()
    train(model, strategy=strategy, epochs=1)
    model.validation_step = model.training_step
    trainer = train(model, strategy=FSDP2Strategy(), epochs=1)
    assert len(model.losses) == 6
    assert trainer.strategy.model is model
    fresh = CausalLM()
    fresh.validation_step = fresh.training_step
    for validated in (fresh, model):
        validated.losses.clear()
        for strategy in (FSDP2Strategy(), FSDP2Strategy()):  # with shards of its own, and with those that are there
            trainer = runs.trainer_with(strategy=strategy)
            trainer.validate(validated, rows(), verbose=False)
            assert trainer.optimizers == []
        assert validated.losses[:3] == validated.losses[3:]
    alone = CausalLM()
    train(alone, epochs=1)
    assert fresh.losses[0] == pytest.approx(alone.losses[0], rel=1e-6)


def sharded_before(rank: int) -> None:
    model = CausalLM()
    model.validation_step = model.training_step
    fit(model, FSDP2Strategy(), 2, rows(rank, 2), max_steps=1)
    others = {
        "FSDP2Strategy.reshard_after_forward=False: .* with True,": {"reshard_after_forward": False},
        "FSDP2Strategy.activation_checkpointing=full: .* with none,": {"activation_checkpointing": "full"},
        "FSDP2Strategy.compile_blocks=True: .* with False,": {"compile_blocks": True},
        r"FSDP2Strategy.blocks=\('.*mlp',\): .* with None,": {"blocks": [".*mlp"]},
        "FSDP2Strategy.mesh=replicate 2 x shard 1 on cpu: .* with shard 2 on cpu,": {"mesh": ParallelDims(replicate=2)},
        "FSDP2Strategy.mesh=shard 1 x tensor 2 on cpu: .* with shard 2 on cpu,": {"mesh": ParallelDims(tensor=2)},
        r"trainer.plugins=MixedPrecisionPolicy\(param_dtype=torch.bfloat16.*param_dtype=None": {"plugins": BF16Mixed()},
    }
    for line, given in others.items():
        options = dict(given)
        precision = {"plugins": options.pop("plugins")} if "plugins" in options else {}
        with pytest.raises(UsageError, match=rf"^{line}.* and it stays so: give the same, or build a new module$"):
            fit(model, FSDP2Strategy(**options), 2, rows(rank, 2), max_steps=1, **precision)
    assert len(model.losses) == 1
    # what an earlier run has not settled, and what changes no result of an evaluation
    fit(model, FSDP2Strategy(reduce_gradients="step"), 2, rows(rank, 2), max_steps=1)
    strategy = FSDP2Strategy(reshard_after_forward=False)
    trainer = runs.trainer_with(strategy=strategy, devices=2, use_distributed_sampler=False)
    trainer.validate(model, rows(rank, 2), verbose=False)
    assert len(model.losses) == 5


@pytest.mark.long
def test_other_ways_to_shard_are_refused_where_an_earlier_run_has_sharded_the_module():
    processes.run(sharded_before)


def test_a_fit_may_follow_a_validation(monkeypatch):
    # as with NCCL; under gloo Lightning itself leaves inference mode out
    monkeypatch.setattr("lightning.pytorch.loops.utilities._distributed_is_initialized", lambda: False)
    alone, sharded = Small(4, 1, logs=True), Small(4, 1, logs=True)
    for model, strategy in ((alone, "auto"), (sharded, FSDP2Strategy())):
        trainer = runs.trainer_with(strategy=strategy, use_distributed_sampler=False)
        trainer.validate(model, batches(torch.ones(1, 2, 4)), verbose=False)
        assert trainer.validate_loop.inference_mode
        trainer.fit(model)
    assert sharded.losses == pytest.approx(alone.losses, rel=1e-6)


def test_a_hook_may_call_the_module_between_the_backward_pass_and_the_step():
    look = torch.no_grad()(lambda trainer, module, optimizer: module(torch.ones(1, 4)))
    plain, looked_at = Small(4, 1), Small(4, 1)
    fit(plain, FSDP2Strategy())
    fit(looked_at, FSDP2Strategy(), 1, None, runs.On(on_before_optimizer_step=look))
    assert looked_at.losses == plain.losses


class Normed(Image):
    """Notes the type of the weights and the input of a block's two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = set()
        for layer in (self.stages[0].conv, self.stages[0].norm):
            layer.register_forward_pre_hook(self.note)

    def note(self, layer, args):
        self.seen.add(("norm" if isinstance(layer, nn.BatchNorm2d) else "conv", layer.weight.dtype, args[0].dtype))


def test_batch_norm_keeps_fp32_weights_and_statistics_where_the_rest_is_gathered_in_bf16():
    blocks = [r"stages\.\d+\.norm", r"stages\.\d+"]
    model, alone, bf16 = Normed(), Image(), torch.bfloat16
    train(alone, epochs=1)
    train(model, BF16Mixed(), strategy=FSDP2Strategy(blocks=blocks), epochs=1)
    assert model.seen == {("conv", bf16, bf16), ("norm", torch.float32, bf16)}
    assert model.stages[0].norm.running_mean.dtype == torch.float32
    assert model.losses == pytest.approx(alone.losses, rel=0.02)


class ShardsItself(CausalLM):
    def configure_model(self):
        for layer in self.model.model.layers[:1]:
            fully_shard(layer, mesh=self.device_mesh["shard"])
        fully_shard(self.model, mesh=self.device_mesh["shard"])


def test_a_module_that_shards_itself_is_left_as_it_made_itself(capsys):
    model, alone = ShardsItself(), CausalLM()
    train(alone, epochs=1)
    train(model, strategy=FSDP2Strategy(), epochs=1)
    sharded = {name for name, part in model.named_modules() if isinstance(part, FSDPModule)}
    assert sharded == {"model", "model.model.layers.0"}
    assert model.losses == pytest.approx(alone.losses, rel=1e-6)


def test_the_start_is_told(caplog):
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        train(CausalLM(), strategy=FSDP2Strategy(), epochs=1)
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert "FSDP2 on shard 1\n" in text
    assert "context" not in text
    assert "2: model.model.layers.0, model.model.layers.1" in text
    count = sum(p.numel() for p in CausalLM().parameters())
    share = sum(p.numel() for p in CausalLM().model.model.layers[0].parameters()) / count
    assert f"parameters  {count:,}, of which at most {share:.1%} are gathered at a time" in text
    assert f"{4 * count / 2**20:.2f} MiB" in text


def test_a_module_without_repeated_blocks_is_gathered_at_once_and_says_so():
    flat = Small(32, 1, loss=lambda module, batch: module(batch.float()).square().mean())
    with pytest.warns(UserWarning, match="Small has no repeated blocks, so all of it is gathered at once: name parts"):
        train(flat, strategy=FSDP2Strategy(), epochs=1)


class Grows(CausalLM):
    def configure_optimizers(self):
        self.late = nn.Parameter(torch.ones(3))
        return super().configure_optimizers()


class Factored(CausalLM):
    def configure_optimizers(self):
        return torch.optim.Adafactor(self.parameters())


class OnMeta(CausalLM):
    def configure_model(self):
        self.model = self.model.to("meta")


class Searching(CausalLM):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Grows, {}, "parameter 'late' was made after sharding: make it in __init__ or configure_model"),
        (Factored, {}, "Adafactor does not work on sharded parameters: take AdamW"),
        (Searching, {}, "LBFGS searches along a line, for which each rank would take its own loss: take AdamW"),
        (OnMeta, {}, "OnMeta builds parameters on the meta device and has no method init_weights"),
        (CausalLM, {"blocks": ["layer"]}, "FSDP2Strategy.blocks: pattern 'layer' matches no submodule"),
        (CausalLM, {"mesh": {"tensor": 2}}, r"mesh={'tensor': 2}: give ParallelDims, such as ParallelDims\(tensor=2\)"),
        (CausalLM, {"mesh": ParallelDims(replicate=2)}, "mesh: replicate 2 does not divide the 1 devices"),
        (CausalLM, {"activation_checkpointing": "ful"}, "activation_checkpointing='ful': give one of none, cheap"),
        (CausalLM, {"reduce_gradients": "replicas"}, "reduce_gradients='replicas': give one of micro_batch, step"),
    ],
)
def test_what_fsdp2_cannot_train_or_does_not_know_is_one_line(model, options, message):
    with pytest.raises(UsageError, match=f"^{message}[^\n]*$"):
        train(model(), strategy=FSDP2Strategy(**options), epochs=1)


def test_files_elsewhere_are_read_and_options_of_a_store_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    whole, saved, resumed = CausalLM(), CausalLM(), CausalLM()
    train(whole)
    strategy = FSDP2Strategy(save_distributed_checkpoint=False)
    trainer = train(saved, strategy=strategy, epochs=1)
    trainer.save_checkpoint("memory://fsdp2/run.ckpt")
    train(resumed, strategy=FSDP2Strategy(), ckpt_path="memory://fsdp2/run.ckpt")
    assert resumed.losses == pytest.approx(whole.losses[3:], rel=1e-6)
    with pytest.raises(UsageError, match=r"^storage_options={'key': 1}: FSDP2Strategy writes to a file system and tak"):
        trainer.save_checkpoint(tmp_path / "run.ckpt", storage_options={"key": 1})
