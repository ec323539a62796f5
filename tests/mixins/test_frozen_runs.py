"""Frozen parameters in runs: on one device and on two, whole and in shards, saved and resumed."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness.processes import run
from harness.runs import trainer_with, whole
from torch import nn
from torch.utils.data import DataLoader

from lightning_tricks import (
    EMA,
    BF16True,
    ExactResume,
    Float8,
    FSDP2Strategy,
    LanguageModel,
    Llama,
    MuonAdamW,
    OptimizerMixin,
    ParallelDims,
    SafeCheckpoint,
)
from lightning_tricks._core.errors import UsageError

SIZES: dict[str, Any] = {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 2, "max_seq_len": 16}
MIXTURE = {"n_experts": 4, "experts_per_token": 2, "d_expert": 16}
EMBED = "decoder.embed.weight"


def rows(rank: int, world: int) -> DataLoader:
    ids = torch.randint(0, 64, (8, 17), generator=torch.Generator().manual_seed(3))[rank::world]
    return DataLoader([{"input_ids": ids[:, :-1], "labels": ids[:, 1:]}] * 4, batch_size=None)


def fit(freeze: list[str] | None, *callbacks: Any, rows_of: tuple[int, int] = (0, 1), **options: Any) -> Any:
    """A small decoder of ours, and its Trainer, after a few steps."""
    sizes, optimizer = options.pop("sizes", {}), options.pop("optimizer", None)
    ckpt_path = options.pop("ckpt_path", None)
    pl.seed_everything(0)
    model = LanguageModel(
        Llama(**{**SIZES, **sizes}), freeze=freeze, optimizer=optimizer or partial(torch.optim.SGD, lr=0.3)
    )
    given = {"max_steps": 2, "use_distributed_sampler": False, "accelerator": "cpu", "gradient_clip_val": 1.0}
    trainer = trainer_with(*callbacks, **(given | options))
    trainer.fit(model, rows(*rows_of), ckpt_path=ckpt_path)
    return model, trainer


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: whole(value) for name, value in model.state_dict().items()}


CASES: dict[str, tuple[list[str], dict[str, Any], list[str]]] = {
    "embedding": (["embed"], {}, ["ddp", "shard", "tensor", "pipeline"]),
    "norms and queries": (["role=norm", r"attn\.q"], {}, ["ddp", "shard", "tensor", "pipeline"]),
    "tied": (["head"], {"sizes": {"tie_embeddings": True}}, ["shard", "tensor", "pipeline"]),
    "bottom": (["embed", r"blocks\.0\."], {}, ["ddp", "shard", "tensor"]),
    "muon": (["embed", r"attn\.q"], {"optimizer": partial(MuonAdamW, lr=1e-2)}, ["ddp", "shard", "tensor"]),
    "experts": (["role=expert"], {"sizes": MIXTURE}, ["ddp", "shard", "expert", "pipeline"]),
    "routers": (["role=router", "embed"], {"sizes": MIXTURE}, ["shard", "expert"]),
    "bottom of a mixture": (["embed", r"blocks\.0\."], {"sizes": MIXTURE}, ["shard", "expert"]),
}


def on_two(rank: int, names: list[str]) -> dict[Any, dict[str, torch.Tensor]]:
    found = {}
    for name in names:
        freeze, options, meshes = CASES[name]
        for mesh in meshes:
            strategy = "ddp" if mesh == "ddp" else FSDP2Strategy(mesh=ParallelDims(**{mesh: 2}))
            rows_of = (0, 1) if mesh in ("tensor", "pipeline") else (rank, 2)
            model, _ = fit(freeze, rows_of=rows_of, strategy=strategy, devices=2, **options)
            left = [n for n, one in model.named_parameters() if not one.requires_grad and one.grad is not None]
            assert not left, (name, mesh, left)
            found[name, mesh] = weights(model)
    return found


@pytest.mark.long
@pytest.mark.parametrize("names", [list(CASES)[::2], list(CASES)[1::2]], ids=", ".join)
def test_two_processes_train_what_one_does_in_every_layout_and_leave_the_frozen_as_drawn(names):
    alone = {}
    for name in names:
        model, _ = fit(CASES[name][0], **CASES[name][1])
        drawn, alone[name] = weights(fit(None, max_steps=0, **CASES[name][1])[0]), weights(model)
        still = {each for each in drawn if torch.equal(drawn[each], alone[name][each])}
        frozen = {each for each, parameter in model.named_parameters() if not parameter.requires_grad}
        assert frozen
        assert still & dict(model.named_parameters()).keys() == frozen
    for found in run(on_two, names):
        for (name, mesh), end in found.items():
            for each, value in end.items():
                torch.testing.assert_close(value, alone[name][each], atol=1e-3, rtol=0, msg=f"{name}, {mesh}: {each}")


def refused_on_two(rank: int) -> str:
    with pytest.raises(UsageError) as error:
        fit(["embed", r"blocks\.0\."], strategy=FSDP2Strategy(mesh=ParallelDims(pipeline=2)), devices=2)
    return str(error.value)


@pytest.mark.long
def test_a_stage_without_anything_to_train_is_refused_on_every_rank():
    for line in run(refused_on_two):
        assert line.startswith("mesh.pipeline: all parameters of stage 0 are frozen")


def fp8_on_two(rank: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    def of(steps: int) -> dict[str, torch.Tensor]:
        sizes = {"d_model": 64, "d_ff": 128}
        plugins = [Float8(emulate=True, convert_small=True)]
        strategy = FSDP2Strategy()
        return weights(fit(["embed", r"attn\.q"], rows_of=(rank, 2), strategy=strategy, devices=2, plugins=plugins,
                           sizes=sizes, max_steps=steps)[0])  # fmt: skip

    return of(0), of(2)


@pytest.mark.long
def test_in_fp8_shards_the_frozen_stay():
    for before, after in run(fp8_on_two):
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert not any("embed" in name or "attn.q" in name for name in changed)
        assert "decoder.blocks.0.attn.k.weight" in changed


class Late(OptimizerMixin, pl.LightningModule):
    """A module of a user that builds its layers late, and may say so."""

    def __init__(self, says_so: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.says_so, self.first = says_so, nn.Linear(4, 4)

    def configure_model(self) -> None:
        if not self.says_so:
            super().configure_model()
        self.second = nn.Linear(4, 4)
        if self.says_so:
            super().configure_model()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.second(self.first(batch)).square().mean()


def test_a_module_of_a_user_freezes_its_layers_where_it_calls_the_mixin_after_them():
    data, options = DataLoader([torch.ones(2, 4)] * 2, batch_size=None), {"max_steps": 2, "accelerator": "cpu"}
    model = Late(True, freeze=["first", "role=bias"])
    drawn = model.first.weight.clone()
    trainer = trainer_with(**options)
    trainer.fit(model, data)
    assert torch.equal(model.first.weight, drawn)
    assert [group["param_names"] for group in trainer.optimizers[0].param_groups] == [["second.weight"]]
    with pytest.raises(UsageError, match=r"freeze=\['role=bias'\]: Late makes parameters after they were to be frozen"):
        trainer_with(**options).fit(Late(False, freeze=["role=bias"]), data)


def saved(folder: Path, freeze: list[str] | None, **options: Any) -> Path:
    fit(freeze, SafeCheckpoint(folder, every_n_train_steps=2), ExactResume(), EMA(0.5), **options)
    return next(folder.glob("*step=2*"))


@pytest.mark.parametrize("plugins", [None, [BF16True()]], ids=["fp32", "BF16True"])
def test_a_resumed_run_goes_on_with_the_frozen_as_they_were_and_their_average_is_the_weight(tmp_path, plugins):
    options = {"optimizer": partial(torch.optim.AdamW, lr=1e-2), "plugins": plugins}
    straight, _ = fit(["embed"], SafeCheckpoint(tmp_path / "a"), ExactResume(), max_steps=4, **options)
    checkpoint = saved(tmp_path / "b", ["embed"], **options)
    resumed, trainer = fit(["embed"], ExactResume(), EMA(0.5), max_steps=4, ckpt_path=checkpoint, **options)
    one, other = weights(straight), weights(resumed)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not any(state for parameter, state in trainer.optimizers[0].state.items() if not parameter.requires_grad)
    average = LanguageModel.load_from_checkpoint(checkpoint, average="ema").state_dict()
    assert torch.equal(average[EMBED], one[EMBED])
    assert not torch.equal(average["decoder.head.weight"], one["decoder.head.weight"])


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [(["embed"], None, "freeze=None: the checkpoint's run froze 'decoder.embed.weight', and this one does not"),
     (None, ["head"], r"freeze=\['head'\]: the checkpoint's run trained 'decoder.head.weight', and this one does not")],
)  # fmt: skip
def test_a_resume_that_freezes_others_is_refused_and_an_evaluation_is_not(tmp_path, before, after, line):
    checkpoint = saved(tmp_path, before)
    with pytest.raises(UsageError, match=line) as error:
        fit(after, max_steps=4, ckpt_path=checkpoint)
    assert "\n" not in str(error.value)
    trainer_with(accelerator="cpu").validate(
        LanguageModel(Llama(**SIZES), freeze=after), rows(0, 1), ckpt_path=checkpoint, verbose=False
    )
