"""A Hugging Face Llama in a LightningModule that knows nothing of us, and each precision plugin to train it under."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from harness import runs
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_tricks.language_model import LanguageModel
from lightning_tricks.models import Llama
from lightning_tricks.precision import BF16Mixed, BF16True, Float8, FP16Mixed
from lightning_tricks.schedules import WarmupCosine

LENGTH, ROWS = 32, 8


def float8(recipe: str, **options: Any) -> Float8:
    return Float8(recipe, emulate=True, convert_small=True, **options)


PLUGINS: dict[str, Callable[[], Any]] = {
    "bf16_mixed": BF16Mixed,
    "fp16_mixed": lambda: FP16Mixed(init_scale=1024.0),
    "bf16_true": BF16True,
    "fp8_tensorwise": lambda: float8("tensorwise"),
    "fp8_delayed_kept": lambda: float8("tensorwise", scaling="delayed", keep_fp8_weights=True),
    "fp8_rowwise": lambda: float8("rowwise"),
    "fp8_rowwise_with_gw_hp": lambda: float8("rowwise_with_gw_hp"),
    "fp8_over_bf16_true": lambda: float8("tensorwise", base="bf16-true"),
    "mxfp8": lambda: float8("mxfp8"),
}


class CausalLM(pl.LightningModule):
    """The module of a user who fine-tunes a model of transformers, on rows such as 5, 8, 11, ..."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=LENGTH, use_cache=False,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)
        self.losses: list[float] = []

    def training_step(self, batch, batch_idx):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.1, fused=True)


class ShardedCausalLM(CausalLM):
    """The same by a user of FSDP2, who shards in `configure_model` as its documentation says."""

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


def rows(rank: int = 0, world: int = 1, batches: int = 3) -> DataLoader:
    """`batches` batches, an epoch; on a rank of several, its part of each."""
    generator = torch.Generator().manual_seed(0)
    start, step = (torch.randint(1, 60, (batches * ROWS, 1), generator=generator) for _ in range(2))
    ids = ((start + step % 4 * torch.arange(LENGTH)) % 64).view(batches, ROWS, LENGTH)
    return DataLoader(ids.chunk(world, dim=1)[rank].flatten(0, 1), batch_size=ROWS // world)


def language_model(config: Any = None, lr: float = 1e-2, **options: Any) -> LanguageModel:
    """The collection's own model, which logs losses, norms and learning rates."""
    config = config or Llama(vocab_size=64, d_model=32, n_layers=3, n_heads=2, max_seq_len=32)
    optimizer = partial(torch.optim.AdamW, lr=lr)
    return LanguageModel(decoder=config, schedule=WarmupCosine(warmup_steps=1), optimizer=optimizer, **options)


def token_batches(rank: int = 0, world: int = 1, count: int = 10) -> DataLoader:
    """Batches for it: eight rows each, of which a rank has its part."""
    tokens = (5 * torch.arange(33) + 3 * torch.arange(count * 8)[:, None]) % 64
    own = [batch.chunk(world)[rank] for batch in tokens.split(8)]
    data = [{"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()} for ids in own]
    return DataLoader(data, batch_size=None)


def train(
    model: pl.LightningModule,
    plugin: Any = None,
    *,
    epochs: int = 2,
    folder: Path | None = None,
    ckpt_path: Any = None,
    data: Any = None,
    **options: Any,
) -> pl.Trainer:
    """Train for epochs of three steps, with a checkpoint `folder/step=N.ckpt` after each where a folder is given."""
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1) if folder else None
    options = {"gradient_clip_val": 1.0, "use_distributed_sampler": False, "max_steps": -1, "logger": False, **options}
    data, callbacks = rows() if data is None else data, [saver] if saver else []
    run = runs.fit(model, *callbacks, data=data, ckpt_path=ckpt_path, max_epochs=epochs, plugins=plugin, **options)
    return run.trainer


def tensors(trainer: pl.Trainer, model: pl.LightningModule) -> dict[str, torch.Tensor]:
    """Every weight and all of the optimizer's state, of this rank, by name."""
    found = {f"weight {name}": parameter for name, parameter in model.named_parameters()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, state in trainer.optimizers[0].state.items():
        found |= {f"{key} {names[parameter]}": value for key, value in state.items() if torch.is_tensor(value)}
    return {
        name: (value.to_local() if hasattr(value, "to_local") else value).detach().clone()
        for name, value in found.items()
    }


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that are not the same to the bit, in value or type."""
    if one.keys() != other.keys():
        return sorted(one.keys() ^ other.keys())
    return [name for name in one if one[name].dtype != other[name].dtype or not torch.equal(one[name], other[name])]
