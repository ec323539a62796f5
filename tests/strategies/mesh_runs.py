"""What a process of test_mesh.py does: train small models on a mesh, beside the same training in one process."""

import dataclasses
import functools
import json
import logging
import shutil
import tempfile
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from harness.runs import Memory, trainer_with, whole
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, Olmo2Config, Phi3Config, PreTrainedConfig

from lightning_tricks import (
    EMA,
    GPT2,
    AttentionMonitor,
    BF16Mixed,
    Float8,
    FSDP2Strategy,
    GradNormMonitor,
    LanguageModel,
    Llama,
    MetricBuffer,
    MFUMonitor,
    RunLedger,
    StepGuard,
)
from lightning_tricks._trainer.lightning import pl
from lightning_tricks.checkpoints import AtomicCheckpointIO
from lightning_tricks.optim import MuonAdamW
from lightning_tricks.parallel.dims import ParallelDims

ROWS, LENGTH, VOCABULARY = 8, 32, 64
SIZES = {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "max_seq_len": LENGTH}
STEPS, SAVED_AT = 2, 1


class Ours(LanguageModel):
    """A decoder of ours, by SGD, whose step shows a wrong scale of the gradients."""

    def __init__(self, config: Any, optimizer: Any = None, **options: Any) -> None:
        optimizer = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.3))
        super().__init__(config, optimizer=optimizer, **options)


class Crowded(Ours):
    """All tokens choose the first two experts."""

    def on_train_start(self) -> None:
        super().on_train_start()
        for router in self.decoder.routers().values():
            router.bias[:2] += 1


class Fused(Ours):
    """One product for queries, keys and values, where a block's weights are gathered."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, fused_projections=True)

    def on_train_start(self) -> None:
        super().on_train_start()
        for block in self.decoder.blocks:
            if block._compiled_call_impl is None:
                block.attn.register_forward_pre_hook(functools.partial(self.look, block))

    @staticmethod
    def look(block: Any, *call: Any) -> None:
        assert not torch.is_grad_enabled() or all(block._fused()), block._fused()


class HuggingFace(pl.LightningModule):
    """A model of transformers, unchanged: its own tp_plan divides it.

    The plans of Phi-3 and OLMo-2 gather a fused layer's outputs, and split the inputs of the next one.
    """

    def __init__(self, family: type[PreTrainedConfig] = LlamaConfig) -> None:
        super().__init__()
        self.family = family
        self.build()

    def build(self) -> None:
        self.net = AutoModelForCausalLM.from_config(
            self.family(
                vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH, use_cache=False,
                pad_token_id=None if self.family is LlamaConfig else 0,
            )
        )  # fmt: skip

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.net(input_ids=batch["input_ids"]).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"].roll(-1, 1).flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


class BuiltLate(HuggingFace):
    """The same, built when the strategy asks for it, from random numbers of each rank's own."""

    def build(self) -> None:
        """Not yet."""

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            torch.manual_seed(self.global_rank)
            super().build()


class Mlp(nn.Module):
    """A block that is not ours."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.scale = nn.RMSNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x)).unflatten(-1, (-1, 32))
        return x + self.down(self.scale(hidden).flatten(-2).relu())


class Foreign(pl.LightningModule):
    """Blocks that are not ours, with a plan of a few lines."""

    def __init__(self, forgets: bool = False, zero_head: bool = False) -> None:
        super().__init__()
        self.forgets = forgets
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))
        self.head = nn.Linear(32, VOCABULARY)
        if zero_head:
            nn.init.zeros_(self.head.weight)

    def parallel_plan(self) -> dict[str, str]:
        plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise", "head": "colwise_gather_output"}
        return plan if self.forgets else {**plan, "blocks.*.scale": "replicated_with_grad_allreduce"}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = self.embed(batch["input_ids"])
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch["input_ids"].roll(-1, 1).flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


class OfThePage(pl.LightningModule):
    """The model of docs/pipeline.md, by that page's own code."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        page = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text()
        names: dict[str, Any] = {}
        exec(page.split("```python\n")[1].split("\nmodel = Model()")[0], names)
        self.model = names["Model"](depth=depth)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        tokens = batch["input_ids"]
        return self.model(tokens, tokens.roll(-1, 1)) / tokens.numel()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


class OwnRows(Foreign):
    """Each process reads rows of its own, as a loader does that is seeded by the process."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step({"input_ids": batch["input_ids"].roll(self.global_rank)}, batch_idx)


LLAMA = Llama(**SIZES, n_heads=4, n_kv_heads=2)
CAP = 0.2  # of logits that are this large at the start
NORMED = Llama(**SIZES, n_heads=8, n_kv_heads=4, qk_norm=True, tie_embeddings=True, logit_softcap=CAP)
DEEP = {**SIZES, "n_layers": 8}
WIDE = Llama(**(SIZES | {"d_model": 64}), n_heads=4, n_kv_heads=2)  # parts of two ranks are multiples of 16
EXPERTS = Llama(
    **SIZES, n_heads=4, d_ff=48, n_experts=8, experts_per_token=2, d_expert=16, n_shared_experts=1, dense_layers=1,
    balance_rate=0.001, router_z_weight=0.01,
)  # fmt: skip
OF_ROWS = dataclasses.replace(EXPERTS, sequence_balance_weight=0.05)
# each token has all, as a choice in bf16 turns on a last place
ALL_EXPERTS = dataclasses.replace(EXPERTS, n_experts=2, balance="none")
DEEP_EXPERTS = dataclasses.replace(OF_ROWS, n_layers=8, dense_layers=3)  # a stage has none, one has both kinds
PLUGINS: dict[str, Callable[[], Any]] = {
    "bf16": BF16Mixed,
    "Lightning's fp16": lambda: pl.plugins.MixedPrecision("16-mixed", "cpu"),
    "fp8": lambda: Float8(emulate=True, convert_small=True),
    "fp8 by rows": lambda: Float8("rowwise", emulate=True, convert_small=True),
}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: Ours(LLAMA),
    "normed": lambda: Ours(NORMED, z_loss=0.01),
    "wide": lambda: Ours(WIDE),
    "fused": lambda: Fused(LLAMA),
    "fused gpt2": lambda: Fused(GPT2(**SIZES, n_heads=4, activation="swiglu")),
    "fused experts": lambda: Fused(EXPERTS),
    "gpt2": lambda: Ours(GPT2(**SIZES, n_heads=4, logit_softcap=CAP), z_loss=0.01),
    "deep": lambda: Ours(Llama(**DEEP, n_heads=4, n_kv_heads=2)),
    "deep, fused": lambda: Ours(Llama(**DEEP, n_heads=4, n_kv_heads=2), fused_projections=True),
    "deep, fused, budget": lambda: Ours(
        Llama(**DEEP, n_heads=4, n_kv_heads=2), fused_projections=True, activation_checkpointing={"budget": 0.5}
    ),
    "deep gpt2": lambda: Ours(GPT2(**DEEP, n_heads=4, logit_softcap=CAP), z_loss=0.01),
    "deep muon": lambda: Ours(Llama(**DEEP, n_heads=4, n_kv_heads=2), lambda groups: MuonAdamW(groups, lr=0.01)),
    "muon": lambda: Ours(LLAMA, lambda groups: MuonAdamW(groups, lr=0.01)),
    "adamw": lambda: Ours(NORMED, lambda groups: torch.optim.AdamW(groups, lr=1e-3)),
    "experts": lambda: Ours(EXPERTS),
    "experts, balanced by rows": lambda: Ours(OF_ROWS),
    "crowded experts": lambda: Crowded(EXPERTS),
    "all experts": lambda: Ours(ALL_EXPERTS),
    "deep experts": lambda: Ours(DEEP_EXPERTS),
    "experts, adamw": lambda: Ours(OF_ROWS, lambda groups: torch.optim.AdamW(groups, lr=1e-3)),
    "experts, muon": lambda: Ours(OF_ROWS, lambda groups: MuonAdamW(groups, lr=0.01)),
    "hugging face": HuggingFace,
    "phi 3": lambda: HuggingFace(Phi3Config),
    "olmo 2": lambda: HuggingFace(Olmo2Config),
    "built late": BuiltLate,
    "foreign": Foreign,
    "forgets": lambda: Foreign(forgets=True),
    "forgets, from zero": lambda: Foreign(forgets=True, zero_head=True),
    "own rows": OwnRows,
    "of the page": OfThePage,
    "of the page, 5 layers": lambda: OfThePage(5),
}


class Case(NamedTuple):
    """One row of the table.

    Attributes:
        model: of `MODELS`.
        dims: the mesh.
        options: of FSDP2Strategy; with `ddp`, DDP in place of it.
        documents: rows hold several documents.
        accumulate: micro-batches of a step.
        guarded: StepGuard and EMA are in the run.
        precision: of `PLUGINS`; None: fp32.
        repeats: all micro-batches have the same rows.
        says: part of the line in which it must end, on the mesh.
    """

    model: str
    dims: ParallelDims
    options: dict[str, Any] = {}
    documents: bool = False
    accumulate: int = 1
    guarded: bool = False
    precision: str | None = None
    repeats: bool = False
    says: str | None = None


class Found(NamedTuple):
    """What a run left: the first gradients by name, figures, how far weights moved, to where, a sum of the first."""

    gradients: dict[str, Tensor]
    logged: dict[str, list[float]]
    moved: dict[str, Tensor]
    weights: dict[str, Tensor]
    ledger: str | None


def weights_of(module: Any) -> dict[str, Tensor]:
    """All parameters, whole, and the biases that balance experts."""
    biases = {name: buffer.clone() for name, buffer in module.named_buffers() if name.endswith("router.bias")}
    return {name: whole(p) for name, p in module.named_parameters()} | biases


class Look(pl.Callback):
    """Takes the first weights and gradients, whole, and the FLOPs in MFUMonitor's line; logs a loss of late tokens."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}
        self.flops: list[float] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.buffer = MetricBuffer.of(trainer)

    def on_token_losses(self, trainer: Any, pl_module: Any, losses: Tensor, batch: Any) -> None:
        if trainer.training:
            late = slice(LENGTH // 2, None)
            assert losses.shape == batch["labels"].shape
            self.buffer.record_mean("late/loss", losses[:, late].sum(), (batch["labels"] != -100)[:, late].sum())

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.weights = weights_of(pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == 0:
            self.gradients = {name: whole(p.grad) for name, p in pl_module.named_parameters() if p.grad is not None}

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        found = next(each for each in trainer.callbacks if isinstance(each, MFUMonitor))._batch_flops
        self.flops = [found.of_one(LENGTH)[0]] if found else []


class Save(pl.Callback):
    """Saves after `SAVED_AT` steps."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == SAVED_AT:
            trainer.save_checkpoint(self.path)


def batches(case: Case, rank: int, ranks: int, steps: int = STEPS) -> DataLoader:
    """This data rank's rows of each micro-batch; the first labels of a row do not count."""
    rows = torch.arange(ROWS)[:, None]
    found: list[Any] = []
    for number in range(steps * case.accumulate):
        number = 0 if case.repeats else number
        tokens = (5 * torch.arange(LENGTH + 1) ** 2 + 3 * rows + 7 * number) % VOCABULARY
        labels = tokens[:, 1:].masked_fill(torch.arange(LENGTH) < 2 * rows, -100)
        batch = {"input_ids": tokens[:, :-1], "labels": labels}
        if case.documents:
            batch["document_ids"] = torch.arange(LENGTH).expand(ROWS, -1) // 11
        found.append({name: value.chunk(ranks)[rank] for name, value in batch.items()})
    return DataLoader(found, batch_size=None)


def train(
    case: Case,
    strategy: Any,
    place: tuple[int, int] = (0, 1),
    devices: int = 1,
    save: Path | None = None,
    resume: Path | None = None,
) -> Found:
    """Train one case; `place` is (data rank, data ranks)."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    memory, look = Memory(), Look()
    callbacks: list[Any] = [look, GradNormMonitor(), MFUMonitor(peak_flops=1e12)]
    ledger = Path(tempfile.mkdtemp(), "ledger.jsonl")  # rank 0 writes
    if case.guarded:
        callbacks += [StepGuard(), EMA(decay=0.5), RunLedger(str(ledger)), AttentionMonitor()]
    if save is not None:
        callbacks.append(Save(save))
    plugins = [PLUGINS[case.precision]()] if case.precision else []
    trainer = trainer_with(
        *callbacks, max_steps=STEPS, devices=devices, strategy=strategy, logger=memory, log_every_n_steps=1,
        gradient_clip_val=0.3, use_distributed_sampler=False, accumulate_grad_batches=case.accumulate,
        num_sanity_val_steps=0,
        plugins=[*([AtomicCheckpointIO()] if strategy == "auto" else []), *plugins],
    )  # fmt: skip
    torch.manual_seed(0)
    module = MODELS[case.model]()
    validated = isinstance(module, LanguageModel | OfThePage)
    with patch.object(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager")):
        trainer.fit(module, batches(case, *place), batches(case, *place, 1) if validated else None, ckpt_path=resume)
    logged: dict[str, list[float]] = {}
    for _, values in memory.rows:
        for name, value in values.items():
            logged.setdefault(name, []).append(float(value))
    # rates depend on the clock, numbers of a step do not; FLOPs are those of one device
    seconds = logged.get("throughput/step_seconds", [])
    for name, times in (("tokens_per_second", 1), ("model_flops_per_second", devices)):
        rates = logged.get(f"throughput/{name}", [])
        logged[name] = [round(a * b) * times for a, b in zip(rates, seconds, strict=True)] if rates else []
    logged["flops_per_token"] = look.flops
    weights = weights_of(module)
    moved = {name: weight - look.weights[name] for name, weight in weights.items()}
    first_sum = json.loads(ledger.read_text().splitlines()[0])["weights"] if ledger.exists() else None
    shutil.rmtree(ledger.parent)
    return Found(look.gradients, logged, moved, weights, first_sum)


def on_the_mesh(case: Case, rank: int, world: int, **more: Any) -> Found:
    dims = case.dims.of_world(world)
    strategy: Any = "ddp" if "ddp" in case.options else FSDP2Strategy(mesh=case.dims, **case.options)
    found = train(case, strategy, (dims.data_rank(rank), dims.data_ranks), world, **more)
    if seconds := case.options.get("timeout_seconds"):
        mesh = strategy.groups
        groups: list[Any] = [*mesh.device_mesh.get_all_groups(), mesh.loss, mesh.context]
        waits = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
        assert waits == [seconds] * 5, "replicate, shard, tensor, loss and context"
    return found


def table(rank: int, cases: dict[str, Case], world: int) -> dict[str, Any]:
    """What each case finds on the mesh, or the error that it raises."""
    found: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            found[name] = on_the_mesh(case, rank, world)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def table_of_one(rank: int, cases: dict[str, Case]) -> dict[str, Found]:
    """What each case finds in one process; cases that differ on the mesh alone train once."""
    train_once = functools.cache(lambda settings: train(Case(**dict(settings), dims=ParallelDims()), "auto"))
    alone = {
        name: tuple((field, value) for field, value in case._asdict().items() if field not in ("dims", "options"))
        for name, case in cases.items()
        if not case.says
    }
    return {name: train_once(settings) for name, settings in alone.items()}


OF_EXPERTS = {
    "one has half": Case("experts, adamw", ParallelDims(expert=2), guarded=True, repeats=True),
    "one has a quarter": Case("experts, adamw", ParallelDims(expert=4), guarded=True, repeats=True),
    "shards": Case("experts, adamw", ParallelDims(), guarded=True, repeats=True),
    "stages": Case("experts, adamw", ParallelDims(pipeline=2), repeats=True),
}


def experts_saved_and_resumed(rank: int, folder: Path) -> dict[Any, Found]:
    """Each layout unbroken, going on from its own checkpoint, and between the first layout and each other one."""
    found: dict[Any, Found] = {}
    for saver, case in OF_EXPERTS.items():
        found[saver] = on_the_mesh(case, rank, 4, save=folder / saver)
    first = next(iter(OF_EXPERTS))
    pairs = [(a, b) for a in OF_EXPERTS for b in OF_EXPERTS if first in (a, b) or a == b]
    for saver, opener in pairs:
        found[saver, opener] = on_the_mesh(OF_EXPERTS[opener], rank, 4, resume=folder / saver)
    return found


def experts_resumed_by_one(rank: int, folder: Path) -> Found:
    return train(OF_EXPERTS["shards"], "auto", resume=folder / next(iter(OF_EXPERTS)))


LAYOUTS = {
    "shards": Case("adamw", ParallelDims(), guarded=True, repeats=True),
    "tensor": Case("adamw", ParallelDims(tensor=2), guarded=True, repeats=True),
    "context": Case("adamw", ParallelDims(context=2), guarded=True, repeats=True),
    "stages": Case("adamw", ParallelDims(pipeline=2), guarded=True, repeats=True),
}


def saved_and_resumed(rank: int, folder: Path) -> dict[str, Any]:
    """The unbroken run of each layout, and each resume from each one's checkpoint."""
    found: dict[str, Any] = {}
    for saver, case in LAYOUTS.items():
        found[saver] = on_the_mesh(case, rank, 2, save=folder / saver / "saved.ckpt")
    for saver in [*LAYOUTS, "one"]:
        for opener, case in LAYOUTS.items():
            resume = folder / saver / "saved.ckpt"
            try:
                found[saver, opener] = on_the_mesh(case, rank, 2, resume=resume)
            except Exception as error:
                found[saver, opener] = f"{type(error).__name__}: {error}"
    return found


def saved_by_one(rank: int, folder: Path) -> Found:
    """A checkpoint of one process, and its unbroken run."""
    return train(LAYOUTS["shards"], "auto", save=folder / "one" / "saved.ckpt")


def resumed_by_one(rank: int, folder: Path) -> dict[str, Found]:
    """Resumes of one process from each layout's checkpoint."""
    case = LAYOUTS["shards"]
    return {saver: train(case, "auto", resume=folder / saver / "saved.ckpt") for saver in LAYOUTS}
