"""The ready LightningModule: a decoder, its loss per token, and the mixins that own optimizer and clipping."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor

from lightning_tricks._core.errors import UsageError
from lightning_tricks._host.machine import host_bytes
from lightning_tricks._trainer.lightning import pl, rank_zero_info
from lightning_tricks._trainer.objects import is_a, trainer_of
from lightning_tricks._trainer.run_facts import weights_layout
from lightning_tricks.accounting import Attention, recompute_flops_per_token, training_flops_per_token
from lightning_tricks.accounting.flops import matmul_parameters
from lightning_tricks.accounting.recompute import Checkpointing, check_checkpointing
from lightning_tricks.callbacks import (
    GradNormMonitor,
    LRMonitor,
    MetricBuffer,
    MFUMonitor,
    PrecisionMonitor,
    ScheduleFree,
)
from lightning_tricks.checkpoints.bucket import local_copy
from lightning_tricks.checkpoints.load_weights import architecture, check_architecture, takes_decoder
from lightning_tricks.checkpoints.open_checkpoint import WEIGHTS, as_file, open_checkpoint
from lightning_tricks.metrics import BitsPerByte, TokenLoss
from lightning_tricks.mixins import GradientClippingMixin, OptimizerMixin, TokenMeanMixin
from lightning_tricks.mixins._plain_settings import build, setting_of
from lightning_tricks.mixins.optimizer_mixin import MUP_KEY
from lightning_tricks.models import Decoder, DecoderConfig
from lightning_tricks.models.moe import Router, take_loads
from lightning_tricks.monitors.precision_monitor import has_figures
from lightning_tricks.optim import LayerwiseLRDecay, MuP, ParamRule, schedule_free_parts
from lightning_tricks.optim.build_optimizer import check_settings
from lightning_tricks.optim.freezing import freeze
from lightning_tricks.schedules import Schedule

__all__ = ["LanguageModel"]

Batch = dict[str, Tensor]
IGNORED = -100
TOKEN_LOSS_HOOK = "on_token_losses"
# Settings that a resumed run may change: for the first weights only, or for the balance of experts from now on.
_MAY_CHANGE_ON_RESUME = {"init_std", "zero_init_outputs", "balance_rate", "sequence_balance_weight", "router_z_weight"}
_MOST_DEVICE_BYTES = 2**40  # more than any device has; to ask it would start CUDA before processes are forked


class LanguageModel(GradientClippingMixin, TokenMeanMixin, OptimizerMixin, pl.LightningModule):
    """Pretrain a decoder on next-token prediction.

    Logs `train/loss` (mean over the tokens of the whole accumulated, global batch) of every step, through the buffer
    that the monitors share; `val/loss` and `val/bits_per_byte` over the whole validation set. Brings LRMonitor,
    GradNormMonitor and MFUMonitor, PrecisionMonitor where the precision plugin scales the loss or multiplies in fp8,
    and ScheduleFree where the optimizer is schedule-free, unless the Trainer has its own.
    A batch is a dict of `input_ids` and `labels`, both (B, T) int64, labels of -100 not counted; optional are
    `document_ids` (B, T), to attend within documents only, with `document_starts` (B, N), see `Decoder.forward`, and
    `n_bytes` (B,), the bytes that the labels stand for.
    The initial weights depend on the seed alone, not on earlier use of the random state.

    Of a mixture of data, it logs `sources/<name>/train_loss` of each step, `/val_loss` and `/bits_per_byte`, and on log
    steps `/tokens` and `/epochs` that the source has served.

    A callback with a method `on_token_losses(trainer, pl_module, losses, batch)` gets the loss of each label of each
    micro-batch, in training, validation and test: `losses` (B, T) fp32, in nats, 0 where a label does not count,
    without gradients; `batch` is the batch. Ranks that share rows (tensor, context, pipeline) all get the whole rows.

    With experts, it moves the biases of their routers after each optimizer step, by the tokens of all ranks, and logs
    on log steps for each block `experts/<block>/max_load` (tokens of the fullest expert over the mean), `/min_load`,
    `/dead` (experts without a token), `/entropy` (of the router's scores, in nats) and `/max_logit`, of the whole
    step. `train/loss` has the losses of experts in it, `val/loss` has not.

    Args:
        decoder: Architecture, such as `Llama` or `GPT2`. Its `vocab_size` and `max_seq_len` are those of the data
            module unless they are given.
        activation_checkpointing: What of each block is recomputed in the backward pass: `none`, `cheap` (all but
            attention and the matrix products), `selective` (also some of the matrix products) or `full` (everything).
            `{budget: 0.5}` keeps that share of the activations' bytes, from 0 (`full`) to 1 (`none`), by modes that
            differ from block to block. None is `none`.
        compile_blocks: Compile each block with `torch.compile`. `auto` does so on a GPU only.
        fused_projections: Train with one product for queries, keys and values, and one for gate and up.
        z_loss: Weight of log(Z)^2, added to the loss. Z is the sum of exp(logits) for each label that counts, and stays
            near 1, so that logits do not drift. The gradient has it in it; `train/loss` and all other losses that are
            logged are the cross-entropy alone. 1e-4 is OLMo's.
        **kwargs: The arguments of `OptimizerMixin`.

    Raises:
        UsageError: the data's sequences or vocabulary exceed the decoder's; a checkpoint is of another architecture.
    """

    config: DecoderConfig
    base_config: DecoderConfig
    activation_checkpointing: Checkpointing
    compile_blocks: bool | Literal["auto"]
    fused_projections: bool
    z_loss: float
    decoder: Decoder | None
    _metric_buffer: MetricBuffer | None = None  # of the fit
    _pipeline: Any = None  # of FSDP2Strategy with stages
    token_loss: TokenLoss
    bits_per_byte: BitsPerByte
    _of_sources: dict[str, tuple[TokenLoss, BitsPerByte]]  # of a mixture

    if TYPE_CHECKING:  # `**kwargs` spelt out, for type checkers and editors; the defaults stand in OptimizerMixin alone

        def __init__(
            self,
            decoder: DecoderConfig,
            activation_checkpointing: Checkpointing | None = "none",
            compile_blocks: bool | Literal["auto"] = False,
            fused_projections: bool = False,
            z_loss: float = 0.0,
            *,
            optimizer: Callable[[Iterable], torch.optim.Optimizer] | None = ...,
            schedule: Schedule | None = ...,
            weight_decay: float = ...,
            decay_embeddings: bool = ...,
            param_rules: list[ParamRule | LayerwiseLRDecay] | None = ...,
            mup: MuP | None = ...,
            freeze: list[str] | None = ...,
        ) -> None: ...

    else:

        def __init__(
            self,
            decoder: DecoderConfig,
            activation_checkpointing: Checkpointing | None = "none",
            compile_blocks: bool | Literal["auto"] = False,
            fused_projections: bool = False,
            z_loss: float = 0.0,
            **kwargs: Any,
        ) -> None:
            super().__init__(**kwargs)
            self.config = setting_of(decoder, DecoderConfig, "decoder")
            self.base_config = self.config if self.mup is None else self.mup.base_config(self.config)
            self.activation_checkpointing = check_checkpointing(activation_checkpointing)
            if compile_blocks not in (True, False, "auto"):
                raise UsageError(f"compile_blocks={compile_blocks!r}: give true, false or auto")
            if not 0 <= z_loss < float("inf"):
                raise UsageError(f"z_loss={z_loss}: give a number from 0 on, such as 1e-4")
            self.compile_blocks, self.fused_projections, self.z_loss = compile_blocks, fused_projections, z_loss
            self.decoder = None
            self.token_loss, self.bits_per_byte, self._of_sources = TokenLoss(), BitsPerByte(), {}

    def follow_data(self, data: Any) -> None:
        """Take the sizes of a data module for those that the decoder was not given, until it is built.

        The command line calls it when the recipe is read, the Trainer before the data are prepared: a vocabulary that
        is still to be learned counts as it was asked for.
        """
        if self.decoder is None:
            self.config = self.config.of_data(getattr(data, "vocab_size", None), getattr(data, "seq_len", None))
            self.base_config = self.config if self.mup is None else self.mup.base_config(self.config)
            if "decoder" in self.hparams:  # of `save_hyperparameters()`, for a checkpoint
                self.hparams["decoder"] = self.config

    def configure_callbacks(self) -> list["pl.Callback"]:
        """The monitors of every pretraining run, and what its optimizer needs, unless the Trainer has them already."""
        self.follow_data(self.trainer.datamodule)  # type: ignore[attr-defined]
        given: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        wanted: list[type[pl.Callback]] = [LRMonitor, GradNormMonitor, MFUMonitor]
        if has_figures(self.trainer.precision_plugin):
            wanted.append(PrecisionMonitor)
        optimizer = check_settings(self.optimizer) if self.trainer.state.fn == "fit" else None
        if optimizer is not None and schedule_free_parts(optimizer):
            wanted.append(ScheduleFree)
        return [callback() for callback in wanted if not any(isinstance(other, callback) for other in given)]

    def configure_model(self) -> None:
        """Build the decoder, once; on the meta device for a strategy that shards, which calls `init_weights` later."""
        if self.decoder is not None:
            return
        strategy: Any = getattr(trainer_of(self), "strategy", None)
        if strategy is not None:
            self._check_strategy(strategy)
        strategy_shards = weights_layout(strategy) == "shards"
        # The meta device draws no weights, so that the random state of training does not depend on the shape.
        with torch.device("meta"):
            decoder = self.decoder = Decoder(self.config, self.base_config)
        super().configure_model()
        products = [param for part in (decoder.blocks, decoder.head) for param in part.parameters() if param.ndim > 1]
        if not all(param.requires_grad for param in products):
            self.flops_per_token = None  # type: ignore[assignment]  # MFUMonitor counts: the formula trains all products
        decoder.head.z_loss = self.z_loss
        decoder.fuse_projections(self.fused_projections)
        decoder.set_activation_checkpointing(self.activation_checkpointing)
        plugin: Any = strategy.precision_plugin if strategy is not None else None
        if not strategy_shards and hasattr(plugin, "convert_before_sharding"):
            plugin.convert_before_sharding(decoder)
        on_cpu = strategy is None or strategy.root_device.type == "cpu"
        if self.compile_blocks is True or (self.compile_blocks == "auto" and not on_cpu):
            decoder.compile_blocks()
        device = torch.empty(0).device
        if not strategy_shards and device.type != "meta":
            decoder.to_empty(device=device)
            self.init_weights()

    def configure_optimizers(self) -> Any:
        """As OptimizerMixin; with experts, their routers follow the steps of the optimizer."""
        configured = super().configure_optimizers()
        if self._routers():
            configured["optimizer"].register_step_post_hook(self._after_step)
        return configured

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget the loads of a step that was not made, with its gradients."""
        super().on_before_zero_grad(optimizer)
        for router in self._routers().values():
            router.backward_loads.clear()

    def _routers(self) -> dict[str, Router]:
        found = {} if self.decoder is None or self.config.n_experts is None else self.decoder.routers()
        return {f"decoder.{name}": router for name, router in found.items()}

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Move the biases by the loads of the step, unless it was skipped, and record the loads on log steps."""
        routers, buffer = self._routers(), self._metric_buffer
        loads, logs = take_loads([*routers.values()]), buffer is not None and buffer.is_log_step()
        if loads is None or not (logs or getattr(self.config, "balance", None) == "bias"):
            return
        sums = self._over_ranks(loads[:, :-1])  # one collective of a few numbers
        counts, entropies = sums[:, :-1], sums[:, -1]
        if not getattr(optimizer, "skips_step", False):  # of StepGuard; it and loss scalers tell a fused optimizer so:
            skipped = getattr(optimizer, "found_inf", None)
            for router, count in zip(routers.values(), counts, strict=True):
                router.move_bias(count, 1.0 if skipped is None else (skipped == 0).float().to(count.device))
        if buffer is not None and logs:
            each = counts.sum(1)
            tokens = each / getattr(self.config, "experts_per_token", 1)
            mean = each / counts.shape[1]
            figures = {
                "max_load": counts.amax(1) / mean,
                "min_load": counts.amin(1) / mean,
                "dead": (counts == 0).sum(1),
                "entropy": entropies / tokens,
            }
            for kind, values in figures.items():
                buffer.record_all(tuple(f"experts/{name}/{kind}" for name in routers), values)
            largest = {f"experts/{name}/max_logit": value for name, value in zip(routers, loads[:, -1], strict=True)}
            buffer.record_largest([*largest], largest)

    def base_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters in the base model of `mup`, by name; without one, those of this model."""
        with torch.device("meta"):
            base = Decoder(self.base_config)
        return {f"decoder.{name}": tuple(param.shape) for name, param in base.named_parameters()}

    def init_weights(self) -> None:
        """Draw the decoder's weights from the seed, where they are; shards get what one device would have drawn."""
        assert self.decoder is not None
        device = next(self.decoder.parameters()).device
        self.decoder.init_weights(torch.Generator(device).manual_seed(torch.initial_seed()))

    def check_run(self, trainer: Any, datamodule: Any, stage: str) -> None:
        """Refuse a run that could not train, or data of other sizes, before the data are prepared."""
        super().check_run(trainer, datamodule, stage)
        self._check_strategy(trainer.strategy)
        self._check_sizes(datamodule)
        self._check_memory(trainer, stage)
        if stage != "fit":
            return
        with suppress(RuntimeError):  # a fused optimizer takes no parameters without data; a UsageError passes
            self.make_optimizer(self.without_data())

    def without_data(self) -> torch.nn.Module:
        """A module with the names and shapes of this one's weights, on the meta device."""
        with torch.device("meta"):
            module: Any = torch.nn.ModuleDict({"decoder": Decoder(self.config)})
        module.base_shapes = self.base_shapes  # for muP
        if self.freeze_patterns:
            freeze(module, self.freeze_patterns)
        return module

    def _check_strategy(self, strategy: Any) -> None:
        """Refuse one that leaves sharding to the module; experts where it steps itself, or hides shapes."""
        if weights_layout(strategy) == "foreign shards":
            raise UsageError(
                f"strategy={type(strategy).__name__} leaves the sharding to the module, and LanguageModel leaves it to "
                "the strategy: take FSDP2Strategy"
            )
        if self.config.n_experts is not None and weights_layout(strategy) not in ("whole", "shards"):
            raise UsageError(
                f"decoder.n_experts={self.config.n_experts}: {type(strategy).__name__} does not train experts: take "
                "FSDP2Strategy or ddp"
            )

    def _check_memory(self, trainer: Any, stage: str) -> None:
        """Refuse a model whose weights and gradients alone would not fit even in 16 bits."""
        count = matmul_parameters(self.config, active=False)
        needed = (4 if stage == "fit" else 2) * count
        there = trainer.num_nodes * host_bytes()
        if not is_a(trainer.accelerator, "CPUAccelerator"):
            there += trainer.world_size * _MOST_DEVICE_BYTES
        if needed > there:
            sizes = ", ".join(f"{name}={getattr(self.config, name)}" for name in ("n_layers", "d_model", "vocab_size"))
            raise UsageError(
                f"model.decoder: {sizes}: its {count:,} weights take at least {needed / 2**30:,.0f} GiB, and there are "
                f"{there / 2**30:,.0f} GiB: make it smaller, or take more devices"
            )

    def _check_sizes(self, data: Any) -> None:
        """Refuse data whose sequences or vocabulary are larger than the decoder's."""
        seq_len, vocab_size = getattr(data, "seq_len", 0), getattr(data, "vocab_size", None) or 0
        if seq_len > self.config.max_seq_len:
            raise UsageError(
                f"data.seq_len={seq_len} is longer than the decoder's max_seq_len={self.config.max_seq_len}: "
                "shorten the one or raise the other"
            )
        if vocab_size > self.config.vocab_size:
            raise UsageError(
                f"the data's vocabulary of {vocab_size} exceeds the decoder's vocab_size={self.config.vocab_size}: "
                "make them equal"
            )

    def setup(self, stage: str) -> None:
        """Refuse data that does not fit the decoder, before anything runs."""
        super().setup(stage)
        if stage == "fit":
            self._metric_buffer = MetricBuffer.of(self.trainer)
            self._metric_buffer.step_loss().log()
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        self._check_sizes(data)
        if hasattr(data, "check_ids"):
            data.check_ids(self.config.vocab_size)
        if hasattr(data, "data_summary") and stage == "fit":
            rank_zero_info(data.data_summary())

    def flops_per_token(self, seq_len: int, attention: Attention) -> tuple[int, int]:
        """FLOPs of one token's forward and backward pass, and the FLOPs that activation checkpointing adds."""
        how: Any = self.activation_checkpointing, self.fused_projections
        again = recompute_flops_per_token(self.config, seq_len, attention, *how)
        return training_flops_per_token(self.config, seq_len, attention), again

    def forward(
        self, input_ids: Tensor, document_ids: Tensor | None = None, document_starts: Tensor | None = None
    ) -> Tensor:
        """Logits (B, T, vocabulary) of token ids (B, T)."""
        assert self.decoder is not None, "call configure_model() first, or let a Trainer do it"
        return self.decoder(input_ids, document_ids, document_starts=document_starts)

    def token_sums(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Loss in nats, summed, and number of the labels that count, of this rank's part; scalars on the device."""
        _check_batch(batch)
        assert self.decoder is not None
        labels = batch["labels"]
        starts = batch.get("document_starts")
        with self._sharing_token_losses(batch):
            nats = self.decoder(batch["input_ids"], batch.get("document_ids"), labels=labels, document_starts=starts)
        return nats, (self.decoder.own_part(labels) != IGNORED).sum()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Loss of one micro-batch, scaled so that the step's gradient is that of the mean over all its tokens."""
        nats, tokens = self.token_sums(batch)
        return self.token_mean(nats, tokens, capacity=batch["labels"].numel())

    @contextmanager
    def _sharing_token_losses(self, batch: Batch) -> Iterator[None]:
        """Give the loss of each token in a forward pass to callbacks, and to the record of a mixture's sources."""
        assert self.decoder is not None
        trainer: Any = trainer_of(self)
        hooks = [
            call for callback in getattr(trainer, "callbacks", ()) if (call := getattr(callback, TOKEN_LOSS_HOOK, None))
        ]
        names = self._source_names() if self._metric_buffer is not None and self.training and "source" in batch else []
        head: Any = getattr(self.decoder, "head", None)  # other pipeline stages have none
        if not hooks and not names:
            yield
            return
        found: list[Tensor] = []
        try:
            if head is not None:
                head.token_losses = found
            yield
        finally:
            if head is not None:
                head.token_losses = None
        own_labels = self.decoder.own_part(batch["labels"])
        losses = torch.cat(found) if found else torch.empty(own_labels.shape, device=own_labels.device)
        if self._pipeline is not None:
            losses = self._pipeline.take_from_last_stage(losses)
        if names:
            self._record_sources(names, losses.sum(1), (own_labels != IGNORED).sum(1), batch["source"])
        if hooks and self.decoder.context is not None:
            losses = self.decoder.context.whole(losses)
        for call in hooks:
            call(trainer, self, losses, batch)

    def _record_sources(self, names: list[str], nats: Tensor, tokens: Tensor, source: Tensor) -> None:
        """Record the loss of each source, from sums (B,) of rows, and on log steps what the source has served."""
        buffer = self._metric_buffer
        assert buffer is not None
        is_of = source == torch.arange(len(names), device=source.device).unsqueeze(1)
        totals, counts = (torch.where(is_of, value, 0).sum(1).unbind() for value in (nats, tokens))
        for name, total, count in zip(names, totals, counts, strict=True):
            buffer.record_mean(f"sources/{name}/train_loss", total, count)
        if buffer.is_log_step():
            data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
            for name, (seen, epochs) in data.seen_sources(self.trainer).items():
                buffer.record(f"sources/{name}/tokens", seen)
                buffer.record(f"sources/{name}/epochs", epochs)

    def _source_names(self) -> list[str]:
        """The names of the sources of the Trainer's data, if they are a mixture."""
        data: Any = getattr(trainer_of(self), "datamodule", None)
        names = [source.name for source in getattr(data, "sources", ())]
        return names if len(names) > 1 else []

    def on_validation_epoch_start(self) -> None:
        """Empty the sums over the set: an exception may have left some."""
        for metric in (self.token_loss, self.bits_per_byte):
            metric.reset()
        self._of_sources = {
            name: (TokenLoss().to(self.device), BitsPerByte().to(self.device)) for name in self._source_names()
        }

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a batch to the sums."""
        nats, tokens = self.token_sums(batch)
        own_bytes = self._own_bytes(batch["n_bytes"]) if "n_bytes" in batch else None
        measured = [(self.token_loss, self.bits_per_byte)]
        if self._of_sources and "source" in batch:
            data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
            measured.append([*self._of_sources.values()][data.validation_source(batch_idx)])
        for loss, bits in measured:
            loss.update(nats, tokens)
            if own_bytes is not None:
                bits.update(nats, own_bytes)

    def _own_bytes(self, n_bytes: Tensor) -> Tensor:
        """The bytes of rows for this rank to count: of rows that several ranks share, the first has all."""
        assert self.decoder is not None
        context = self.decoder.context
        return n_bytes if context is None or context.rank == 0 else torch.zeros_like(n_bytes)

    def on_validation_epoch_end(self) -> None:
        """Log `val/loss` and `val/bits_per_byte`, or after a test `test/loss` and `test/bits_per_byte`."""
        stage = "test" if self.trainer.testing else "val"
        for name, metric in (("loss", self.token_loss), ("bits_per_byte", self.bits_per_byte)):
            if metric.update_called:
                self.log(f"{stage}/{name}", metric)
        for source, (loss, bits) in self._of_sources.items():
            for name, measured in ((f"{stage}_loss", loss), ("bits_per_byte", bits)):
                if measured.update_called:
                    self.log(f"sources/{source}/{name}", measured.compute(), sync_dist=True)  # else Lightning warns

    on_test_epoch_start, test_step = on_validation_epoch_start, validation_step
    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Log-probability of each label given the tokens before: (B, T) fp32, in nats, NaN where it does not count."""
        _check_batch(batch)
        logits = self(batch["input_ids"], batch.get("document_ids"), batch.get("document_starts")).float()
        assert self.decoder is not None
        labels = self.decoder.own_part(batch["labels"])
        chosen = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
        chosen = chosen.masked_fill(labels == IGNORED, float("nan"))
        return chosen if self.decoder.context is None else self.decoder.context.whole(chosen)

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        average: str | None = None,
        **kwargs: Any,
    ) -> Self:
        """The model of a checkpoint, with the decoder that the checkpoint describes; other arguments as in Lightning.

        Args:
            checkpoint_path: a file, or a folder of shards that `FSDP2Strategy` saved; its path or address.
            average: name of an average to take in place of the weights, such as `ema`.
            **kwargs: constructor arguments, such as `optimizer` and `schedule` to train the model.

        Raises:
            UsageError: the checkpoint is not complete, or not of a LanguageModel, or has no such average.
        """
        if isinstance(checkpoint_path, str | Path):
            checkpoint_path = path = local_copy(checkpoint_path)
            checkpoint = open_checkpoint(path, parts=WEIGHTS, weights_only=weights_only, average=average)
            if path.is_dir() or average is not None:
                checkpoint_path = as_file(checkpoint)
            settings = {**checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_KEY, {}), **kwargs}
            if "decoder" not in settings and takes_decoder(cls, settings):
                if "decoder_config" not in checkpoint:
                    raise UsageError(
                        "the checkpoint has no decoder_config, so it is not of a LanguageModel: pass decoder=..."
                    )
                shape = dict(checkpoint["decoder_config"])
                kwargs["decoder"] = build(shape.pop("class"), shape, DecoderConfig, "decoder")
            if MUP_KEY in checkpoint:
                kwargs.setdefault("mup", checkpoint[MUP_KEY])
        return super().load_from_checkpoint(checkpoint_path, map_location, hparams_file, strict, weights_only, **kwargs)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Write the architecture into the checkpoint, in plain types."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["decoder_config"] = architecture(self.config)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another architecture or tokenizer, before any tensor is loaded."""
        super().on_load_checkpoint(checkpoint)
        self._check_origin(checkpoint, _MAY_CHANGE_ON_RESUME)

    def check_weights(self, checkpoint: dict[str, Any]) -> None:
        """Refuse weights of another architecture or tokenizer for a new run; its sequences may be longer."""
        self.check_mup(checkpoint)
        self._check_origin(checkpoint, {*_MAY_CHANGE_ON_RESUME, "max_seq_len", "rope_theta"})

    def _check_origin(self, checkpoint: dict[str, Any], may_differ: set[str]) -> None:
        data: Any = getattr(trainer_of(self), "datamodule", None)
        if hasattr(data, "check_tokenizer"):  # its own state is restored later, and by the same class of data only
            data.check_tokenizer(checkpoint)
        check_architecture(self.config, checkpoint, may_differ)


def _check_batch(batch: Any) -> None:
    """Refuse batches of another form, which the data may give."""
    if not isinstance(batch, Mapping) or not {"input_ids", "labels"} <= batch.keys():
        keys = f" of {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
        raise UsageError(
            f"LanguageModel got a batch that is a {type(batch).__name__}{keys}: let the data give dicts with "
            "input_ids and labels"
        )
    ids, labels = batch["input_ids"], batch["labels"]
    if ids.ndim != 2 or ids.shape != labels.shape:
        raise UsageError(
            f"LanguageModel got input_ids of shape {tuple(ids.shape)} and labels of shape {tuple(labels.shape)}: let "
            "both be (rows, tokens)"
        )
