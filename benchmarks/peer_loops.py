"""The peers of `benchmarks.peers`: ways to train one Llama in one process, each around the same weights and batches.

A peer takes a `Job` and trains until its batches end, which they do not: `Job.batches` waits for orders from the
benchmark between two steps, and ends the process. Every peer appends the loss of each step to `Job.losses`.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.feed import Batch
from benchmarks.hand_written import HandWritten
from lightning_tricks._trainer.lightning import pl
from lightning_tricks.models import Decoder, DecoderConfig, Llama
from lightning_tricks.models.hf_adapter import hf_config, to_hf

LR, BETAS, DECAY, CLIP, LOG_EVERY = 1e-3, (0.9, 0.95), 0.1, 1.0, 5


@dataclasses.dataclass
class Job:
    """What a peer trains, and how.

    Args:
        shape: the architecture.
        length: tokens in a row.
        bf16: autocast to bf16; else fp32.
        compiled: torch.compile, in the way that this peer's users have.
        folder: for loggers.
        batches: without end; iterated once.
        losses: mean nats a token of each step, on the device.
    """

    shape: Llama
    length: int
    bf16: bool
    compiled: bool
    folder: Path
    batches: Iterator[Batch]
    losses: list[Tensor] = dataclasses.field(default_factory=list)

    def decoder(self) -> Decoder:
        """Our decoder with the initial weights of every peer."""
        torch.manual_seed(0)
        return Decoder(self.shape)

    def hf_state(self) -> dict[str, Tensor]:
        """These weights under the names of transformers."""
        return to_hf(self.decoder().state_dict(), self.shape)

    def hf_model(self) -> Any:
        """Transformers' Llama with these weights."""
        import transformers

        settings: dict[str, Any] = {**hf_config(self.shape), "attn_implementation": "sdpa", "use_cache": False}
        config = transformers.LlamaConfig(**settings)
        model = transformers.LlamaForCausalLM(config)
        model.load_state_dict(self.hf_state())
        return model.train()

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """Fused AdamW that decays matrices and embeddings, and no norm."""
        params = list(module.parameters())
        groups = [
            {"params": [p for p in params if p.ndim > 1], "weight_decay": DECAY},
            {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)

    def by_hand(self, module: nn.Module, loss_of: Callable[[Batch], Tensor]) -> None:
        """The loop that one writes without a framework: prints loss and norm every `LOG_EVERY` steps."""
        optimizer, params = self.optimizer(module), list(module.parameters())
        for step, batch in enumerate(self.batches, start=1):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                loss = loss_of(batch)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(params, CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            self.losses.append(loss.detach())
            if step % LOG_EVERY == 0:
                print(f"step {step}  loss {loss.item():.4f}  norm {norm.item():.3f}")

    def trainer(self, **options: Any) -> Any:
        """A Lightning Trainer for runs without validation and checkpoints."""
        from lightning_tricks.precision import BF16Mixed

        return pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            gradient_clip_val=CLIP,
            log_every_n_steps=LOG_EVERY,
            # Lightning's own plugin for bf16 refuses to clip for a fused optimizer.
            plugins=[BF16Mixed()] if self.bf16 else [],
            enable_checkpointing=False,
            enable_model_summary=False,
            default_root_dir=self.folder,
            **options,
        )


def shifted(batch: Batch) -> Batch:
    """The arguments of transformers' models: our labels are shifted already."""
    return {**batch, "shift_labels": batch["labels"]}


# Bare loops


def bare_ours(job: Job) -> None:
    """Our decoder, its loss in slices, compiled by blocks."""
    decoder = job.decoder()
    if job.compiled:
        decoder.compile_blocks()
    job.by_hand(decoder, lambda batch: decoder(**batch) / batch["labels"].numel())


def bare_hand(job: Job) -> None:
    """A hand-written model in the manner of nanoGPT, compiled as a whole."""
    model = HandWritten(job.shape, job.length)
    model.load(job.decoder().state_dict())
    called = torch.compile(model) if job.compiled else model
    job.by_hand(model, lambda batch: called(**batch))


def bare_hf(job: Job) -> None:
    """Transformers' model in a bare loop, compiled as a whole."""
    model = job.hf_model()
    called = torch.compile(model) if job.compiled else model
    job.by_hand(model, lambda batch: called(**shifted(batch)).loss)


# Frameworks


def lightning_hf(job: Job) -> None:
    """Transformers' model in a plain LightningModule: TensorBoard, the bar, LearningRateMonitor."""
    model = job.hf_model()
    called = torch.compile(model) if job.compiled else model

    class Plain(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            loss = called(**shifted(batch)).loss
            self.log("train/loss", loss, prog_bar=True)
            job.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            return job.optimizer(self.model)

    logger = pl.loggers.TensorBoardLogger(job.folder)
    trainer = job.trainer(logger=logger, callbacks=[pl.callbacks.LearningRateMonitor("step")])
    trainer.fit(Plain(), train_dataloaders=job.batches)


def hf_trainer(job: Job) -> None:
    """Transformers' model in transformers' Trainer, with TensorBoard and its bar."""
    import transformers

    class Fed(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return map(shifted, job.batches)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss: Any = super().compute_loss(*args, **kwargs)
            job.losses.append(loss.detach())
            return loss

    arguments = transformers.TrainingArguments(
        output_dir=str(job.folder),
        max_steps=10**6,
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=DECAY,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        max_grad_norm=CLIP,
        optim="adamw_torch_fused",
        logging_steps=LOG_EVERY,
        report_to=["tensorboard"],
        save_strategy="no",
        use_cpu=True,
        bf16=job.bf16,
        torch_compile=job.compiled,
    )
    Fed(model=job.hf_model(), args=arguments).train()


def litgpt_model(shape: DecoderConfig, length: int) -> Any:
    """Litgpt's model of a Llama's shape, with weights of its own."""
    from litgpt.model import GPT, Config

    config = Config(
        name="peer", block_size=length, vocab_size=shape.vocab_size, padded_vocab_size=shape.vocab_size,
        n_layer=shape.n_layers, n_head=shape.n_heads, n_query_groups=shape.kv_heads, n_embd=shape.d_model,
        intermediate_size=shape.ffn_width, rotary_percentage=1.0, parallel_residual=False, bias=False,
        norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", norm_eps=shape.norm_eps,
        rope_base=int(shape.rope_theta),
    )  # fmt: skip
    return GPT(config)


def litgpt(job: Job) -> None:
    """Litgpt's model and loss in the loop of `litgpt pretrain`: Fabric, compiled as a whole."""
    from lightning.fabric import Fabric
    from litgpt.utils import chunked_cross_entropy

    shape, state = job.shape, job.hf_state()
    names = {
        "norm_1": ("input_layernorm",),
        "norm_2": ("post_attention_layernorm",),
        "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attn.proj": ("self_attn.o_proj",),
        "mlp.fc_1": ("mlp.gate_proj",),
        "mlp.fc_2": ("mlp.up_proj",),
        "mlp.proj": ("mlp.down_proj",),
    }
    theirs = {
        f"transformer.h.{i}.{name}.weight": torch.cat([state[f"model.layers.{i}.{part}.weight"] for part in parts])
        for i in range(shape.n_layers)
        for name, parts in names.items()
    }
    theirs["transformer.wte.weight"] = state["model.embed_tokens.weight"]
    theirs["transformer.ln_f.weight"], theirs["lm_head.weight"] = state["model.norm.weight"], state["lm_head.weight"]
    model = litgpt_model(shape, job.length)
    model.load_state_dict(theirs)
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed" if job.bf16 else "32-true")
    optimizer: Any = job.optimizer(model)
    called: Any = torch.compile(model) if job.compiled else model
    model = fabric.setup(called)
    optimizer = fabric.setup_optimizers(optimizer)
    for step, batch in enumerate(job.batches, start=1):
        loss = chunked_cross_entropy(model(batch["input_ids"]), batch["labels"])
        fabric.backward(loss)
        if job.bf16:  # Fabric refuses to clip for a fused optimizer there
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        else:
            fabric.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad()
        job.losses.append(loss.detach())
        if step % LOG_EVERY == 0:
            fabric.print(f"step {step}: loss {loss.item():.4f}")


def ours(job: Job, callbacks: tuple[Any, ...] = ()) -> None:
    """LanguageModel in a Trainer as a recipe has it: TensorBoard and the monitors that every run has."""
    from lightning_tricks.language_model import LanguageModel
    from lightning_tricks.loggers import ResumingTensorBoardLogger

    class Kept(LanguageModel):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            job.losses.append(loss.detach())
            return loss

    def adamw(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=LR, betas=BETAS, fused=True)

    torch.manual_seed(0)
    model: Any = Kept(job.shape, "none", job.compiled, optimizer=adamw, weight_decay=DECAY, decay_embeddings=True)
    model.configure_model()
    model.decoder.load_state_dict(job.decoder().state_dict())
    logger = ResumingTensorBoardLogger(save_dir=str(job.folder), name="ours")
    trainer = job.trainer(logger=logger, callbacks=list(callbacks))
    trainer.fit(model, train_dataloaders=job.batches)


def ours_watched(job: Job) -> None:
    """The same with the callbacks of the recipe `tiny` that act in training steps."""
    from lightning_tricks import callbacks as ours_

    names = ("TensorBoardDashboard", "MemoryMonitor", "ActivationMonitor", "AttentionMonitor", "UpdateMonitor")
    ours(job, tuple(getattr(ours_, name)() for name in (*names, "StepGuard")))


PEERS: dict[str, Callable[[Job], None]] = {
    "bare_hand": bare_hand,
    "bare_ours": bare_ours,
    "bare_hf": bare_hf,
    "litgpt": litgpt,
    "lightning_hf": lightning_hf,
    "hf_trainer": hf_trainer,
    "ours": ours,
    "ours_watched": ours_watched,
}
