"""Float8 under FSDP2: what is gathered in fp8, with which scales, and what is in the checkpoints (two processes)."""

import dataclasses
import functools
import io
import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import processes
from harness.runs import CountsFlops, fit, same
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

from lightning_tricks import BF16Mixed, Float8, LanguageModel, Llama
from lightning_tricks._core.errors import UsageError
from lightning_tricks.accounting import training_flops_per_token
from lightning_tricks.models import Decoder
from lightning_tricks.precision import float8_kept, float8_torchao  # noqa: F401, the second takes long: here once
from lightning_tricks.strategies import FSDP2Strategy

pytestmark = pytest.mark.long

SMALL = Llama(vocab_size=61, d_model=32, n_layers=2, n_heads=4, max_seq_len=16)
ONE_LAYER = ["mlp", r"attn\.[kvo]"]  # to exclude, where each product that is traced takes long
adamw = functools.partial(torch.optim.AdamW, lr=1e-2)


def plugin(recipe="tensorwise", **options):
    return Float8(recipe=recipe, convert_small=True, emulate=True, **options)


class Model(LanguageModel):
    def __init__(self, **options) -> None:
        torch.manual_seed(0)
        super().__init__(SMALL, optimizer=adamw, **options)
        self.losses: list[torch.Tensor] = []
        self.scales: list[torch.Tensor | None] = []

    def configure_callbacks(self):
        return []

    def training_step(self, batch, batch_idx):
        self.scales.append(scale_of(first_layer(self)))
        batch = batch_of(self.global_step, self.global_rank)
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss["loss"].detach() if isinstance(loss, dict) else loss.detach())
        return loss


class Foreign(pl.LightningModule):
    """Shards by itself, and knows nothing of the plugin but its policy."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.decoder = Decoder(SMALL)

    def configure_model(self) -> None:
        options = {"mesh": self.device_mesh["shard"], "mp_policy": self.trainer.precision_plugin.fsdp2_policy}
        for block in self.decoder.blocks:
            fully_shard(block, **options)
        fully_shard(self.decoder, **options)

    def training_step(self, batch, batch_idx):
        batch = batch_of(batch_idx, self.global_rank)
        labels = batch["labels"]
        return self.decoder(batch["input_ids"], labels=labels) / labels.numel()

    def configure_optimizers(self):
        return adamw(self.parameters())


def first_layer(model: Any) -> Any:
    return model.decoder.blocks[0].attn.q


def scale_of(layer: Any) -> torch.Tensor | None:
    local = getattr(layer.weight, "_local_tensor", None)
    return getattr(local, "_precomputed_scale", None)


def batch_of(step: int, rank: int) -> dict[str, torch.Tensor]:
    """Of a step rather than from a loader, so that a resumed run sees what the uninterrupted one does."""
    ids = (torch.arange(2 * 17).view(2, 17) + 34 * (2 * step + rank)) * 7 % 61
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def sharding(**options):
    return {"devices": 2, "strategy": FSDP2Strategy(**options)}


def train(model, own_plugin, steps, ckpt_path=None, folder=None, **options):
    saves = [ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)] if folder else []
    callbacks, options = [*options.pop("callbacks", []), *saves], options or sharding()
    data = DataLoader(range(32))
    fit(model, *callbacks, data=data, ckpt_path=ckpt_path, plugins=own_plugin, max_steps=steps, logger=False, **options)


def weights(model) -> list[torch.Tensor]:
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]


class ByTorchao(Model):
    """The same model, converted with torchao's own functions."""

    def configure_model(self) -> None:
        if self.decoder is None:
            self.trainer.precision_plugin.convert_before_sharding = self.convert
            super().configure_model()

    def convert(self, module) -> None:
        config = Float8LinearConfig.from_recipe_name(self.recipe)
        gathers = self.recipe == "tensorwise"
        config = dataclasses.replace(config, emulate=True, enable_fsdp_float8_all_gather=gathers)
        convert_to_float8_training(module, config=config, module_filter_fn=lambda _, name: name != "decoder.head")

    def on_train_batch_end(self, *_) -> None:
        precompute_float8_dynamic_scale_for_fsdp(self)


def which_is_gathered_how(rank: int) -> None:
    log = io.StringIO()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(logging.StreamHandler(log))

    def table() -> str:
        """The lines since it was last asked for, on rank 0."""
        text = log.getvalue()
        log.truncate(0)
        return text

    def trained(recipe: str, gathered: int, steps: int = 2, **options: Any) -> Model:
        own, model = plugin(recipe, **options), Model()
        train(model, own, steps=steps)
        found = [hasattr(layer.weight.to_local(), "fsdp_pre_all_gather") for layer in own.fp8_layers.values()]
        assert found == [gathered == 14] * 14
        assert rank or f"{gathered} of 14 weights gathered in fp8" in table()
        return model

    # converted before sharding it trains as torchao does
    for recipe, gathered in (("tensorwise", 14), ("rowwise", 0), ("rowwise_with_gw_hp", 0)):
        theirs = ByTorchao()
        theirs.recipe = recipe
        train(theirs, BF16Mixed(), steps=2)
        ours = trained(recipe, gathered)
        assert len(ours.losses) == 2
        assert same(ours.losses, theirs.losses), recipe
        assert same(weights(ours), weights(theirs)), recipe
    trained("tensorwise", 0, steps=1, evaluate_in_bf16=True)

    # a module that shards by itself: converted after that; in bf16, as the table says
    own = plugin(exclude=ONE_LAYER)
    train(Foreign(), own, steps=1)
    assert not any(hasattr(layer.weight.to_local(), "fsdp_pre_all_gather") for layer in own.fp8_layers.values())
    assert rank or "0 of 2 weights gathered in fp8" in table()

    # replicas: the wrapped weights of a module that is not sharded after all become plain again
    model = Model()
    train(model, plugin(), steps=1, devices=2, strategy=DDPStrategy(process_group_backend="gloo"))
    assert {type(parameter) for parameter in model.parameters()} == {torch.nn.Parameter}


def test_weights_are_gathered_in_fp8_where_that_is_valid_as_the_table_says_and_train_as_torchaos_do():
    processes.run(which_is_gathered_how)


class Averaged(Model):
    """Validates with weights ten times as large as it trains, in the middle of a step's micro-batches too."""

    factor = 10.0

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[tuple[Any, ...]] = []

    def training_step(self, batch, batch_idx):
        expected = 448 / whole_amax(first_layer(self).weight)
        assert torch.allclose(scale_of(first_layer(self)), expected)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.validated.append((scale_of(first_layer(self)).clone(), self.expected))
        super().validation_step(batch_of(0, self.global_rank), batch_idx)

    @torch.no_grad()
    def on_validation_start(self) -> None:
        first_layer(self).weight.mul_(self.factor)
        self.expected = 448 / whole_amax(first_layer(self).weight)

    @torch.no_grad()
    def on_validation_end(self) -> None:
        first_layer(self).weight.div_(self.factor)


class Manual(Foreign):
    """Steps and goes forward again within one training step: the second pass must not use the first one's scales."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.seen: list[tuple[Any, ...]] = []

    def configure_model(self) -> None:
        self.trainer.precision_plugin.convert_before_sharding(self.decoder)
        super().configure_model()

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        first = scale_of(first_layer(self)).clone()
        expected = 448 / whole_amax(first_layer(self).weight)
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        optimizer.zero_grad()
        self.seen.append((first, expected, scale_of(first_layer(self))))


def whole_amax(weight: DTensor) -> torch.Tensor:
    return weight.detach().abs().amax().full_tensor().float()


def scales_are_those_of_the_weights(rank: int, folder: str) -> None:
    model, counts = Model(), CountsFlops()
    train(model, plugin(exclude=ONE_LAYER), steps=2, callbacks=[counts], **sharding())
    assert counts.found[0] / 32 == pytest.approx(training_flops_per_token(SMALL, 16, "full"), rel=0.01)
    assert all(scale is not None for scale in model.scales), "found one by one, at each gathering"
    assert len({scale.item() for scale in model.scales}) == 2, "a stale scale would repeat"
    assert scale_of(first_layer(model)) is None, "a scale outlived the run"

    model = Averaged()
    fit(
        model, data=DataLoader(range(32)), val=DataLoader(range(2)), max_steps=2, accumulate_grad_batches=2,
        plugins=plugin(), val_check_interval=1, limit_val_batches=1, logger=False, **sharding(),
    )  # fmt: skip
    assert len(model.validated) == 5  # one of them before training
    assert all(torch.allclose(found, expected) for found, expected in model.validated)
    assert model.scales[0] == model.scales[1] != model.scales[2] == model.scales[3]
    plain = Model()
    train(plain, plugin(), steps=2, accumulate_grad_batches=2, **sharding())
    torch.testing.assert_close(torch.stack(model.losses), torch.stack(plain.losses), rtol=1e-3, atol=0)

    manual = Manual()
    train(manual, plugin(), steps=-1, max_epochs=1, limit_train_batches=2, **sharding())  # the Trainer counts no steps
    assert len(manual.seen) == 2
    for before, expected, after in manual.seen:
        assert torch.allclose(before, expected)
        assert after is None


def test_scales_are_those_of_the_weights_as_they_are(tmp_path):
    processes.run(scales_are_those_of_the_weights, str(tmp_path))


def checkpoints(rank: int, folder: str) -> None:
    for dcp in (False, True):
        place = Path(folder) / f"fp8-{dcp}"
        straight = Model()
        train(straight, plugin(), steps=3, folder=place, **sharding(save_distributed_checkpoint=dcp))
        saved = place / "step=2.ckpt"
        torch.distributed.barrier()
        for file in [saved] if saved.is_file() else saved.iterdir():
            assert b"torchao" not in file.read_bytes(), file
        resumed = Model()
        train(resumed, plugin(), steps=3, ckpt_path=saved, **sharding(save_distributed_checkpoint=dcp))
        assert same(resumed.losses, straight.losses[2:])
        assert same(weights(resumed), weights(straight))

    # an fp8 checkpoint opens in bf16, and the other way round; loaded, the weights are those that were saved
    ours, theirs = Path(folder) / "fp8-False" / "step=2.ckpt", Path(folder) / "bf16"
    train(Model(), BF16Mixed(), steps=2, folder=theirs, **sharding(save_distributed_checkpoint=False))
    for own_plugin, saved in ((BF16Mixed(), ours), (plugin(), theirs / "step=2.ckpt")):
        reader = Model()
        train(reader, own_plugin, ckpt_path=saved, steps=3)
        torch.testing.assert_close(reader.losses[0], straight.losses[2], rtol=0.02, atol=0)
    if rank == 0:
        names = [list(torch.load(path, weights_only=False)["state_dict"]) for path in (ours, theirs / "step=2.ckpt")]
        assert names[0] == names[1]


def test_checkpoints_are_those_of_the_model_without_fp8(tmp_path):
    processes.run(checkpoints, str(tmp_path))


class Delayed(Model):
    """Keeps the scales of each micro-batch, and what the plugin would save after it."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[dict[str, Any]] = []
        self.all_scales: list[Any] = []

    def training_step(self, batch, batch_idx):
        scales = getattr(first_layer(self), "scales", None)
        self.all_scales.append(None if scales is None else scales.tolist())
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_) -> None:
        self.states.append(self.trainer.precision_plugin.state_dict())


def delayed(rank: int, folder: str) -> None:
    float8_kept.WINDOW = 2
    options = {"exclude": ONE_LAYER, "scaling": "delayed"}
    straight, resumed, silent = Delayed(), Delayed(), Model()
    steps = {"steps": 4, "accumulate_grad_batches": 2}
    train(straight, plugin(**options), folder=folder, **steps, **sharding())
    assert straight.all_scales[:4] == [None] * 4
    assert None is not straight.all_scales[4] == straight.all_scales[5] != straight.all_scales[6]
    gathered: list[Any] = [None, None]
    torch.distributed.all_gather_object(gathered, straight.states)
    assert gathered[0] == gathered[1], "in the middle of a step, too"
    assert straight.states[2]["amax_history"]["recorded"]

    train(resumed, plugin(**options), ckpt_path=Path(folder) / "step=2.ckpt", **steps, **sharding())
    assert resumed.states == straight.states[4:]
    assert same(resumed.losses, straight.losses[4:])
    assert same(weights(resumed), weights(straight))
    train(silent, plugin(**options), **steps, **sharding())
    assert same(weights(silent), weights(straight)), "to save changes nothing"

    with pytest.raises(
        UsageError, match=r"^plugins: Float8.keep_fp8_weights needs whole weights, of which a rank of FS"
    ):
        train(Model(), plugin(keep_fp8_weights=True), steps=1, **sharding())


def test_delayed_scales_are_the_same_on_all_ranks_and_resume_bitwise(tmp_path):
    processes.run(delayed, str(tmp_path))


class FusedFeedForward(Model):
    """Its blocks multiply with `gate` and `up` together, or one by one."""

    together = True

    def configure_model(self) -> None:
        super().configure_model()
        for block in self.decoder.blocks:
            block.mlp.forward = functools.partial(self.feed_forward, block.mlp)

    def feed_forward(self, mlp: Any, x: torch.Tensor) -> torch.Tensor:
        layers = (mlp.gate, mlp.up)
        gate, up = layers[0].multiply_together(x, layers) if self.together else (layer(x) for layer in layers)
        return mlp.down(torch.nn.functional.silu(gate) * up)


def together(rank: int) -> None:
    found = []
    for FusedFeedForward.together in (True, False):
        model = FusedFeedForward()
        train(model, plugin(exclude=["attn"]), steps=2, **sharding())
        found.append(model)
    assert same(found[0].losses, found[1].losses)
    assert same(weights(found[0]), weights(found[1]))


def test_weights_that_are_gathered_in_fp8_have_scales_of_their_own_when_layers_multiply_together():
    processes.run(together)
