"""LanguageModel: its loss is the mean over tokens whatever the split, its figures are those worked out by hand."""

import inspect
import math
import re
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from harness import runs
from harness.models import batches
from harness.runs import trainer_with
from torch.utils.data import DataLoader

from lightning_tricks._core.errors import UsageError
from lightning_tricks.accounting import recompute_flops_per_token
from lightning_tricks.accounting.flop_counting import count_flops
from lightning_tricks.callbacks import StepGuard
from lightning_tricks.language_model import LanguageModel
from lightning_tricks.mixins import OptimizerMixin
from lightning_tricks.models import GPT2, Llama
from lightning_tricks.schedules import WarmupLinear

SHAPE = {"vocab_size": 32, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 8}


def sgd(params):
    return torch.optim.SGD(params, lr=0.5)


def make(**kwargs) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(Llama(**SHAPE), optimizer=sgd, weight_decay=0.0, **kwargs)


def built() -> LanguageModel:
    model = make()
    model.configure_model()
    return model


def ragged(rows: int, seed: int = 1) -> dict[str, torch.Tensor]:
    """Rows of 8 tokens of which a varying number count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 32, (rows, 9), generator=generator)
    labels = ids[:, 1:].clone()
    for row in range(rows):
        labels[row, 1 + (row * 3) % 8 :] = -100
    return {"input_ids": ids[:, :-1].contiguous(), "labels": labels}


def split(whole: dict[str, torch.Tensor], rows: int) -> DataLoader:
    """Micro-batches of so many rows."""
    numbers = range(0, len(whole["labels"]), rows)
    return batches([{name: value[row : row + rows] for name, value in whole.items()} for row in numbers])


def fit(model: LanguageModel, data, **options) -> pl.Trainer:
    return runs.fit(model, data=data, **{"max_steps": 1, "log_every_n_steps": 1, **options}).trainer


def evaluate(command: str, model: LanguageModel, data) -> dict[str, float]:
    return getattr(trainer_with(logger=False), command)(model, data, verbose=False)[0]


def same_weights(one: LanguageModel, other: LanguageModel) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def plain_step(whole: dict[str, torch.Tensor], z_loss: float = 0.0) -> tuple[float, list[torch.Tensor]]:
    """Loss and weights after one SGD step on the mean over all counted tokens, without Lightning."""
    model = built()
    logits, labels = model(whole["input_ids"]).flatten(0, 1), whole["labels"].flatten()
    loss = F.cross_entropy(logits, labels, ignore_index=-100)
    (loss + z_loss * logits[labels != -100].logsumexp(1).square().mean()).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.5 * parameter.grad
    return loss.item(), [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_a_step_over_ragged_micro_batches_is_the_step_of_the_mean_over_all_tokens(micro_batches, z_loss):
    whole = ragged(8)
    whole["labels"][6:] = -100  # of the last of four micro-batches no label counts
    loss, expected = plain_step(whole, z_loss)
    model = make(z_loss=z_loss)
    trainer = fit(model, split(whole, 8 // micro_batches), accumulate_grad_batches=micro_batches)
    assert trainer.callback_metrics["train/loss"].item() == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close([p.detach() for p in model.parameters()], expected, rtol=1e-5, atol=1e-6)


def test_the_logged_norm_is_that_of_the_mean_gradient_before_the_clip():
    whole = ragged(8)
    model = built()
    F.cross_entropy(model(whole["input_ids"]).flatten(0, 1), whole["labels"].flatten(), ignore_index=-100).backward()
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))
    trainer = fit(make(), split(whole, 2), accumulate_grad_batches=4, gradient_clip_val=norm / 10)
    assert trainer.callback_metrics["train/grad_norm"].item() == pytest.approx(norm, rel=1e-5)


def test_validation_figures_are_sums_over_the_set_not_means_of_batches():
    whole = ragged(6)
    whole["n_bytes"] = torch.tensor([3, 1, 4, 1, 5, 9])
    model = built()
    nats = F.cross_entropy(
        model(whole["input_ids"]).flatten(0, 1), whole["labels"].flatten(), ignore_index=-100, reduction="sum"
    ).item()
    tokens = (whole["labels"] != -100).sum().item()
    metrics = evaluate("validate", model, split(whole, 2))
    assert metrics["val/loss"] == pytest.approx(nats / tokens, rel=1e-6)
    assert metrics["val/bits_per_byte"] == pytest.approx(nats / math.log(2) / 23, rel=1e-6)
    assert evaluate("test", model, split(whole, 3))["test/loss"] == pytest.approx(nats / tokens, rel=1e-6)


class Told(pl.Callback):
    """The losses of the labels of the last batch."""

    def on_token_losses(self, trainer, pl_module, losses, batch):
        self.losses = losses


def test_z_loss_changes_the_weights_and_no_loss_that_is_told():
    data, found = split(ragged(4), 4), []
    for z_loss in (0.0, 0.1):
        model, told = make(z_loss=z_loss), Told()
        trainer = runs.fit(model, told, data=data, max_steps=1, log_every_n_steps=1).trainer
        validated = evaluate("validate", make(z_loss=z_loss), data)
        found.append((model, told.losses, trainer.callback_metrics["train/loss"], validated))
    (plain, *of_plain), (other, *of_other) = found
    assert not same_weights(plain, other)
    torch.testing.assert_close(of_plain, of_other, rtol=0, atol=0)


@pytest.mark.parametrize("z_loss", [-1e-4, float("inf"), float("nan")])
def test_a_z_loss_that_is_no_weight_is_refused(z_loss):
    with pytest.raises(UsageError, match=rf"^z_loss={z_loss}: give a number from 0 on, such as 1e-4$"):
        make(z_loss=z_loss)


def test_bits_per_byte_is_left_out_where_bytes_are_not_known():
    assert evaluate("validate", make(), split(ragged(4), 2)).keys() == {"val/loss"}


def test_predictions_are_the_log_probabilities_of_the_labels():
    whole = ragged(2)
    model = built()
    found = model.predict_step(whole, 0)
    logp = F.log_softmax(model(whole["input_ids"]), -1)
    assert found[0, 0].item() == pytest.approx(logp[0, 0, whole["labels"][0, 0]].item(), abs=1e-6)
    assert found[whole["labels"] == -100].isnan().all()


def test_the_first_weights_depend_on_the_seed_alone():
    first = built()
    torch.manual_seed(0)
    second = LanguageModel(Llama(**SHAPE))
    torch.rand(100)  # other use of the random state in between
    second.configure_model()
    assert same_weights(first, second)
    torch.manual_seed(1)
    third = LanguageModel(Llama(**SHAPE))
    third.configure_model()
    assert not same_weights(first, third)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((torch.zeros(2, 8).long(),) * 2, "a batch that is a tuple: let the data give dicts with input_ids and labels"),
        ({"input_ids": torch.zeros(2, 8).long()}, "a batch that is a dict of input_ids: let the data give dicts with"),
        ({"input_ids": torch.zeros(8).long(), "labels": torch.zeros(8).long()}, r"input_ids of shape \(8,\) and"),
        ({"input_ids": torch.zeros(2, 8).long(), "labels": torch.zeros(2, 7).long()}, r"labels of shape \(2, 7\): let"),
    ],
)
def test_batches_of_another_form_are_refused_in_one_line(batch, words):
    with pytest.raises(UsageError, match=rf"^LanguageModel got [^\n]*{words}"):
        make().token_sums(batch)


def test_a_decoder_that_is_no_config_is_refused():
    with pytest.raises(UsageError, match=r"^decoder={'vocab_size': 32.*: give a DecoderConfig object, such as Llama"):
        LanguageModel(SHAPE)


def test_a_checkpoint_of_another_shape_is_refused_in_one_line(tmp_path):
    fit(make(), split(ragged(4), 2)).save_checkpoint(tmp_path / "a.ckpt")
    other = LanguageModel(Llama(**{**SHAPE, "d_model": 32}))
    with pytest.raises(UsageError, match=r"d_model=16, the recipe's 32"):
        trainer_with().validate(other, split(ragged(4), 2), ckpt_path=str(tmp_path / "a.ckpt"))
    gpt = LanguageModel(GPT2(**SHAPE))
    with pytest.raises(UsageError, match="class='Llama'"):
        gpt.on_load_checkpoint(torch.load(tmp_path / "a.ckpt", weights_only=True))


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_checkpointing_and_compiling_leave_the_step_as_it_was(mode, monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: compiled.append(self))
    compiled: list[torch.nn.Module] = []
    _, expected = plain_step(ragged(4))
    model = make(activation_checkpointing=mode, compile_blocks=True, fused_projections=mode == "selective")
    fit(model, split(ragged(4), 4))
    assert compiled == list(model.decoder.blocks)
    assert {block.fused for block in model.decoder.blocks} == {mode == "selective"}
    again = recompute_flops_per_token(model.config, 8, "full", mode, fused=mode == "selective")
    assert model.flops_per_token(8, "full")[1] == again
    torch.testing.assert_close([p.detach() for p in model.parameters()], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("device", "number"), [("cpu", 0), ("cuda", SHAPE["n_layers"])])
def test_auto_compiles_on_a_gpu_only(device, number, monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: compiled.append(self))
    compiled: list[torch.nn.Module] = []
    model = make(compile_blocks="auto")
    model._trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(device), precision_plugin=None))
    model.configure_model()
    assert compiled == list(model.decoder.blocks)[:number]
    with pytest.raises(UsageError, match="compile_blocks='yes': give true, false or auto"):
        make(compile_blocks="yes")


def test_a_strategy_that_leaves_the_sharding_to_the_module_is_refused():
    strategy = pl.strategies.ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)
    with pytest.raises(UsageError, match=r"^strategy=ModelParallelStrategy leaves .*: take FSDP2Strategy$"):
        fit(make(), batches([ragged(2)]), strategy=strategy)


# ---- out of a checkpoint


class Subclass(LanguageModel):
    """Passes its settings on, as the mixins do."""

    def __init__(self, width: int = 1, **kwargs) -> None:
        super().__init__(**kwargs)
        self.width = width


class Keeping(LanguageModel):
    """Keeps its settings, the decoder among them."""

    def __init__(self, decoder, **kwargs) -> None:
        super().__init__(decoder, **kwargs)
        self.save_hyperparameters()


class OwnDecoder(LanguageModel):
    """Makes the decoder from a setting of its own."""

    def __init__(self, width: int, **kwargs) -> None:
        super().__init__(Llama(**{**SHAPE, "d_model": width}), **kwargs)
        self.save_hyperparameters()


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (LanguageModel, {"decoder": GPT2(**SHAPE)}),
        (Subclass, {"decoder": Llama(**SHAPE)}),
        (Keeping, {"decoder": Llama(**SHAPE)}),
        (OwnDecoder, {"width": 24}),
    ],
)
def test_a_checkpoint_alone_gives_the_model_back(cls, settings, tmp_path):
    model = cls(**settings, schedule=WarmupLinear(warmup_steps=1))
    fit(model, split(ragged(4), 2), max_steps=2).save_checkpoint(tmp_path / "a.ckpt")
    again = cls.load_from_checkpoint(tmp_path / "a.ckpt")
    assert type(again) is cls
    assert again.config == model.config
    assert same_weights(model, again)
    fit(cls(**settings), split(ragged(4), 2), max_steps=3, ckpt_path=tmp_path / "a.ckpt")  # opens under weights_only


def test_what_the_caller_gives_beats_the_checkpoint(tmp_path):
    fit(make(), split(ragged(4), 2)).save_checkpoint(tmp_path / "a.ckpt")
    again = LanguageModel.load_from_checkpoint(tmp_path / "a.ckpt", optimizer=sgd, activation_checkpointing="full")
    assert (again.optimizer, again.activation_checkpointing) == (sgd, "full")
    with pytest.raises(UsageError, match=r"d_model=16, the recipe's 32"):
        LanguageModel.load_from_checkpoint(tmp_path / "a.ckpt", decoder=Llama(**{**SHAPE, "d_model": 32}))


def test_weights_alone_and_a_folder_of_shards_give_the_model_back_as_well(tmp_path):
    model = make()
    run = fit(model, split(ragged(4), 2))
    run.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    rest = torch.load(tmp_path / "weights.ckpt", weights_only=True)
    weights = {"state_dict": rest.pop("state_dict")}
    torch.distributed.checkpoint.save(weights, checkpoint_id=tmp_path / "shards.ckpt", no_dist=True)
    torch.save(rest, tmp_path / "shards.ckpt" / "meta.pt")
    for name in ("weights.ckpt", "shards.ckpt"):
        again = LanguageModel.load_from_checkpoint(str(tmp_path / name))
        assert same_weights(model, again)


def test_the_flops_of_its_loss_are_those_by_hand():
    model = built()
    by_hand, again = model.flops_per_token(seq_len=8, attention="full")
    with count_flops(model) as counter:
        model.token_sums(ragged(4))[0].backward()
    assert counter.flops == (4 * 8 * by_hand, 4 * 8 * again)


def test_a_checkpoint_of_another_module_is_refused_in_one_line(tmp_path):
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.6.0"}, tmp_path / "other.ckpt")
    with pytest.raises(UsageError, match=r"^the checkpoint has no decoder_config"):
        LanguageModel.load_from_checkpoint(tmp_path / "other.ckpt")
    with pytest.raises(UsageError, match=r"there is no such file or folder"):
        LanguageModel.load_from_checkpoint(tmp_path / "none.ckpt")
    with pytest.raises(UsageError, match=r"^memory://b/a\.ckpt: it is not there; check the path$"):
        LanguageModel.load_from_checkpoint("memory://b/a.ckpt", average="ema")


# ---- experts

EXPERTS = Llama(
    **SHAPE, n_experts=4, experts_per_token=2, d_expert=8, dense_layers=1, d_ff=16, sequence_balance_weight=0.1
)  # fmt: skip
BLOCK = "experts/decoder.blocks.1"


def of_experts(optimizer=sgd, **kwargs) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(EXPERTS, optimizer=optimizer, weight_decay=0.0, **kwargs)


def router(model):
    return model.decoder.blocks[1].mlp.router


@pytest.mark.parametrize(("rows", "mode"), [(8, "none"), (2, "full")])
def test_the_bias_of_experts_follows_the_counts_of_a_step_once_whatever_its_split(rows, mode):
    model, whole = of_experts(activation_checkpointing=mode), ragged(8)
    twin = of_experts()
    twin.configure_model()
    with torch.no_grad():
        _, chosen, _, _ = router_inputs(twin, whole["input_ids"])
    counts = torch.bincount(chosen.flatten(), minlength=4).float()
    # validated in the middle of the step, and before it
    trainer = runs.fit(
        model, data=split(whole, rows), val=split(ragged(4, 5), 2), max_steps=1, accumulate_grad_batches=8 // rows,
        log_every_n_steps=1, val_check_interval=1, num_sanity_val_steps=2,
    )  # fmt: skip
    assert counts.sum() == 8 * 8 * 2
    assert counts.min() < counts.max()
    assert torch.equal(router(model).bias, 0.001 * (counts.mean() - counts).sign())
    (logged,) = [values for _, values in trainer.rows if f"{BLOCK}/dead" in values]
    assert logged[f"{BLOCK}/max_load"] == pytest.approx((counts.max() / counts.mean()).item())
    assert logged[f"{BLOCK}/min_load"] == pytest.approx((counts.min() / counts.mean()).item())
    assert logged[f"{BLOCK}/dead"] == (counts == 0).sum()
    assert 0 < logged[f"{BLOCK}/entropy"] <= math.log(4) + 1e-6
    assert "experts/decoder.blocks.0/dead" not in logged


def router_inputs(model, input_ids):
    """What the router gives for tokens."""
    found = []
    hook = router(model).register_forward_hook(lambda *call: found.append(call[2]))
    model.decoder(input_ids)
    hook.remove()
    return found[0]


def test_losses_of_experts_are_in_the_training_loss_and_not_in_that_of_a_validation():
    model, plain = of_experts(), ragged(8)
    model.configure_model()
    nats, tokens = model.token_sums(plain)
    cross_entropy, _ = model.eval().token_sums(plain)
    found = runs.fit(of_experts(), data=split(plain, 2), max_steps=1, accumulate_grad_batches=4, log_every_n_steps=1)
    assert found.of("train/loss") == [pytest.approx((nats / tokens).item(), rel=1e-6)]
    assert nats - cross_entropy > 0.1 * 64 * 0.9  # at even loads it is 1 a token, of those too that do not count
    validated = evaluate("validate", of_experts(), split(plain, 2))["val/loss"]
    assert validated == pytest.approx((cross_entropy / tokens).item(), rel=1e-6)


@pytest.mark.parametrize("fused", [True, False])
def test_a_skipped_step_leaves_the_biases_of_experts_alone(fused):
    class Spoilt(LanguageModel):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (math.nan if batch_idx == 1 else 1.0)

    biases = []
    torch.manual_seed(0)
    model = Spoilt(EXPERTS, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3, fused=fused))
    look = runs.On(on_train_batch_end=lambda *_: biases.append(router(model).bias.clone()))
    runs.fit(model, StepGuard(), look, data=split(ragged(24), 8), max_steps=3, log_every_n_steps=3)
    assert biases[0].any()
    assert torch.equal(biases[0], biases[1])
    assert not torch.equal(biases[1], biases[2])


def test_experts_need_a_strategy_that_shows_the_step():
    model = of_experts()
    with pytest.raises(UsageError, match=r"^decoder.n_experts=4: SimpleNamespace does not train experts: take FSDP2"):
        model._check_strategy(SimpleNamespace(weights_layout="engine"))


class KeepLosses(pl.Callback):
    """Keeps the loss of each token that the module hands out, and the stage."""

    def __init__(self):
        self.seen: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def on_token_losses(self, trainer, pl_module, losses, batch):
        assert not losses.requires_grad
        assert losses.dtype == torch.float32
        self.seen.append((str(trainer.state.stage.value), losses.clone(), batch["labels"].clone()))


def test_callbacks_get_the_loss_of_each_token_and_change_nothing():
    whole, callback = ragged(4), KeepLosses()
    options = {"max_steps": 1, "log_every_n_steps": 1, "accumulate_grad_batches": 2}
    trainer = runs.fit(model := make(), callback, data=split(whole, 2), **options).trainer
    fit(without := make(), split(whole, 2), **options)
    assert same_weights(model, without)
    assert [stage for stage, *_ in callback.seen] == ["train", "train"]
    losses, labels = (torch.cat([seen[n] for seen in callback.seen]) for n in (1, 2))
    assert torch.equal(labels, whole["labels"])
    logits = built()(whole["input_ids"])
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none").view(4, 8)
    torch.testing.assert_close(losses, expected)
    assert torch.equal(losses == 0, labels == -100)
    mean = losses.sum() / (labels != -100).sum()
    assert trainer.callback_metrics["train/loss"].item() == pytest.approx(mean.item(), rel=1e-6)


def test_callbacks_get_the_losses_of_validation_batches():
    whole, callback = ragged(4), KeepLosses()
    found = trainer_with(callback, logger=False).validate(make(), split(whole, 2), verbose=False)[0]
    assert {stage for stage, *_ in callback.seen} == {"validate"}
    total = sum(losses.sum().item() for _, losses, _ in callback.seen)
    assert found["val/loss"] == pytest.approx(total / (whole["labels"] != -100).sum().item(), rel=1e-6)


# ---- docs/language_model.md


@pytest.mark.pages
def test_the_page_has_each_option_with_its_default():
    page = (Path(__file__).resolve().parent.parent / "docs/language_model.md").read_text(encoding="utf-8")
    table = page.partition("| option | default |")[2].partition("\n\n")[0]
    shown = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", table, re.M))
    own = inspect.signature(LanguageModel).parameters
    options = {**own, **inspect.signature(OptimizerMixin).parameters}
    given = {name: "required" if one.default is one.empty else f"`{one.default!r}`" for name, one in options.items()}
    assert [*shown] == [name for name in given if name != "kwargs"]
    assert shown == {name: default for name, default in given.items() if name != "kwargs"}
