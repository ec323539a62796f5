"""The rows of the table over strategies: the strategies, the modules, and the batches of each process.

The batches are the same in every row; a process takes its part of each, and the parts hold unequal numbers of labels.
"""

import shutil
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_tricks import (
    GPT2,
    DeepSpeedZeROStrategy,
    FSDP2Strategy,
    LanguageModel,
    Llama,
    ParallelDims,
    WarmupCosine,
)
from lightning_tricks._trainer.lightning import pl
from lightning_tricks.optim import groups_table

BATCH, LENGTH, VOCABULARY = 8, 32, 64
CONFIG = Llama(vocab_size=VOCABULARY, d_model=128, n_layers=4, n_heads=4, max_seq_len=LENGTH)
TIED = GPT2(vocab_size=VOCABULARY, d_model=128, n_layers=4, n_heads=4, max_seq_len=LENGTH, bias=False)
EXPERTS = Llama(
    vocab_size=VOCABULARY, d_model=128, n_layers=4, n_heads=4, max_seq_len=LENGTH, n_experts=8, d_expert=128,
    n_shared_experts=1, dense_layers=1, router_z_weight=0.01, sequence_balance_weight=0.01,
)  # fmt: skip


class Row(NamedTuple):
    """One line of the table.

    Attributes:
        processes: number of processes that train.
        strategy: makes the Trainer's argument of that name.
        trials: names of its training runs, see `TRIALS`; the first is the one that is saved and resumed.
        needs: a package, or a compiler, that it needs.
        mesh: its sizes, where not every process has rows of its own.
    """

    processes: int
    strategy: Callable[[], Any]
    trials: tuple[str, ...] = ("adamw", "sgd", "foreign")
    needs: str | None = None
    mesh: ParallelDims | None = None

    def data_rank(self, rank: int) -> tuple[int, int]:
        """(place, number) among the processes that have rows of their own."""
        if self.mesh is None:
            return rank, self.processes
        dims = self.mesh.of_world(self.processes)
        return dims.data_rank(rank), dims.data_ranks

    @property
    def missing(self) -> str | None:
        """The package or compiler that it needs, where this machine has not got it."""
        compilers = ("c++", "g++", "clang++")
        there = (
            any(map(shutil.which, compilers)) if self.needs == "a C++ compiler" else find_spec(self.needs or "torch")
        )
        return None if there else self.needs


def on_mesh(processes: int, mesh: ParallelDims, *trials: str, needs: str | None = None, **options: Any) -> Row:
    """A row of FSDP2Strategy on a mesh; the foreign module is one of transformers, which has a plan."""
    given = trials or ("adamw", "sgd", "hugging_face")
    return Row(processes, lambda: FSDP2Strategy(mesh=mesh, **options), given, needs, mesh)


_PLAIN = ("adamw", "sgd")  # of a mesh that a foreign module does not know
_STAGES = ParallelDims(pipeline=2)
ROWS = {
    "one": Row(
        1, lambda: "auto", ("adamw", "sgd", "foreign", "hugging_face", "tied", "tied_sgd", "experts", "experts_sgd")
    ),
    "ddp": Row(2, lambda: "ddp"),
    "fsdp2": Row(2, FSDP2Strategy),
    "fsdp2_compiled": Row(2, lambda: FSDP2Strategy(compile_blocks=True), needs="a C++ compiler"),
    "hsdp": Row(4, lambda: FSDP2Strategy(mesh=ParallelDims(replicate=2))),
    "tensor": on_mesh(2, ParallelDims(tensor=2), sequence_parallel=False),
    "tensor_sequence": on_mesh(2, ParallelDims(tensor=2)),
    "tensor_compiled": on_mesh(2, ParallelDims(tensor=2), *_PLAIN, needs="a C++ compiler", compile_blocks=True),
    "context_gather": on_mesh(2, ParallelDims(context=2), *_PLAIN),
    "context_ulysses": on_mesh(2, ParallelDims(context=2), *_PLAIN, context_method="ulysses"),
    "fsdp2_tensor": on_mesh(4, ParallelDims(tensor=2)),
    "fsdp2_context": on_mesh(4, ParallelDims(context=2), *_PLAIN),
    "tensor_context": on_mesh(4, ParallelDims(tensor=2, context=2), *_PLAIN),
    "hsdp_tensor": on_mesh(8, ParallelDims(replicate=2, tensor=2)),
    "pipeline_gpipe": on_mesh(2, _STAGES, *_PLAIN, pipeline_schedule="GPipe"),
    "pipeline_1f1b": on_mesh(2, _STAGES, *_PLAIN),
    "pipeline_interleaved": on_mesh(2, _STAGES, *_PLAIN, pipeline_schedule="Interleaved1F1B"),
    "pipeline_zbv": on_mesh(2, _STAGES, *_PLAIN, pipeline_schedule="ZBVZeroBubble"),
    "pipeline_tied": on_mesh(2, _STAGES, "tied", "tied_sgd"),
    "expert": on_mesh(2, ParallelDims(expert=2), "experts", "experts_sgd"),
    "fsdp2_expert": on_mesh(4, ParallelDims(expert=2), "experts", "experts_sgd"),
    "pipeline_tensor_fsdp2": on_mesh(8, ParallelDims(pipeline=2, tensor=2), *_PLAIN),
    "zero1": Row(2, lambda: DeepSpeedZeROStrategy(1), needs="deepspeed"),
    "zero2": Row(2, lambda: DeepSpeedZeROStrategy(2), needs="deepspeed"),
    "zero3": Row(2, lambda: DeepSpeedZeROStrategy(3), needs="deepspeed"),
}


class Ours(LanguageModel):
    """With decay groups and a schedule, as in the recipes."""

    def __init__(self, optimizer: Callable[[Any], torch.optim.Optimizer], config: Any = CONFIG) -> None:
        super().__init__(config, optimizer=optimizer, schedule=WarmupCosine(warmup_steps=2))
        self.groups = ""

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        self.groups = groups_table(made["optimizer"].param_groups, lr=0.0)
        return made


class Foreign(pl.LightningModule):
    """torch's own encoder in a module without anything of ours; the monitor alone gives the norm."""

    groups = ""

    def __init__(self, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.embedding = nn.Embedding(VOCABULARY, 64)
        layer = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(64, VOCABULARY)
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.head(self.encoder(self.embedding(batch["input_ids"])))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"].roll(-1, 1).flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


class HuggingFace(Foreign):
    """A Llama of transformers, unchanged; its own plan divides it over tensor ranks."""

    def __init__(self, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__(optimizer)
        del self.embedding, self.encoder, self.head
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=LENGTH, use_cache=False,
        )  # fmt: skip
        self.net = LlamaForCausalLM(config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.net(input_ids=batch["input_ids"]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"].roll(-1, 1).flatten())
        self.losses.append(loss.item())
        return loss


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3)


class Trial(NamedTuple):
    """One training run: its module, its optimizer, and the Trainer's clip."""

    module: Callable[[Callable[[Any], torch.optim.Optimizer]], Any]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    clip: float


# AdamW divides a wrong clip away, so there is SGD too, under a clip that always bites. That hides a wrong scale of the
# gradients, which shows in their norm from before it.
TRIALS = {
    "adamw": Trial(Ours, adamw, 1.0),
    "sgd": Trial(Ours, sgd, 0.3),
    "tied": Trial(partial(Ours, config=TIED), adamw, 1.0),
    "tied_sgd": Trial(partial(Ours, config=TIED), sgd, 0.3),
    "experts": Trial(partial(Ours, config=EXPERTS), adamw, 1.0),
    "experts_sgd": Trial(partial(Ours, config=EXPERTS), sgd, 0.3),
    "foreign": Trial(Foreign, sgd, 0.1),
    "hugging_face": Trial(HuggingFace, sgd, 0.1),
}


def batches(steps: int, start: int = 0, rank: int = 0, world: int = 1) -> DataLoader:
    """One batch a step from `start` on, this rank's rows of it; the first labels of a row do not count."""
    own: Any = []
    for step in range(start, steps):
        row = torch.arange(BATCH)[:, None]
        tokens = (5 * torch.arange(LENGTH + 1) + 3 * row + 7 * step) % VOCABULARY
        labels = tokens[:, 1:].masked_fill(torch.arange(LENGTH) < 2 * row, -100)
        own.append({"input_ids": tokens[:, :-1].chunk(world)[rank], "labels": labels.chunk(world)[rank]})
    return DataLoader(own, batch_size=None)
