"""The ready LightningModule: a decoder, its loss per token, and the mixins that own optimizer and clipping."""

import dataclasses
import inspect
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from lightning_tricks._activation_checkpointing import Mode, check_mode
from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import pl, pl_import
from lightning_tricks.accounting import Attention, recompute_flops_per_token, training_flops_per_token
from lightning_tricks.callbacks import GradNormMonitor, LRMonitor, MetricBuffer, MFUMonitor, PrecisionMonitor
from lightning_tricks.checkpoints.folder_checkpoint_io import read_without_optimizers
from lightning_tricks.metrics import BitsPerByte, TokenLoss
from lightning_tricks.mixins import GradientClippingMixin, OptimizerMixin, TokenMeanMixin
from lightning_tricks.mixins._plain_settings import build, from_plain
from lightning_tricks.models import Decoder, DecoderConfig
from lightning_tricks.monitors.precision.precision_monitor import has_figures
from lightning_tricks.optim import decay_groups

rank_zero_info = pl_import("utilities.rank_zero").rank_zero_info
Batch = dict[str, Tensor]
IGNORED = -100


def _takes_decoder(cls: type, settings: dict[str, Any]) -> bool:
    """Whether a constructor wants the decoder; a subclass whose saved settings lack it makes its own."""
    parameters = inspect.signature(cls).parameters
    passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return "decoder" in parameters or (passes_on and not settings)


def _decoder_of(checkpoint: dict[str, Any]) -> DecoderConfig:
    """The shape of the decoder in a checkpoint of LanguageModel.

    Raises:
        UsageError: the checkpoint is of another module.
    """
    if "decoder_config" not in checkpoint:
        raise UsageError("the checkpoint has no decoder_config, so it is not of a LanguageModel: pass decoder=...")
    settings = dict(checkpoint["decoder_config"])
    return build(settings.pop("class"), settings, DecoderConfig, "decoder")


class LanguageModel(GradientClippingMixin, TokenMeanMixin, OptimizerMixin, pl.LightningModule):
    """Pretrain a decoder on next-token prediction.

    Logs `train/loss` (mean over the tokens of the whole accumulated, global batch) of every step, through the buffer
    that the monitors share; `val/loss` and `val/bits_per_byte` over the whole validation set. Brings LRMonitor,
    GradNormMonitor and MFUMonitor, and PrecisionMonitor where the precision plugin scales the loss or multiplies in
    fp8, unless the Trainer has its own.
    A batch is a dict of `input_ids` and `labels`, both (B, T) int64, labels of -100 not counted; optional are
    `document_ids` (B, T), to attend within documents only, and `n_bytes` (B,), the bytes that the labels stand for.
    The initial weights depend on the seed alone, not on what ran before they were made.

    Args:
        decoder: Architecture, such as `Llama` or `GPT2`.
        activation_checkpointing: What of each block is recomputed in the backward pass: `none`, `full` (everything) or
            `selective` (all but attention and some of the matrix products, about half of the memory). None is `none`.
        compile_blocks: Compile each block with `torch.compile`.
        **kwargs: Those of `OptimizerMixin`.

    Raises:
        UsageError: the data has longer sequences or a larger vocabulary than the decoder, or a checkpoint holds
            another architecture.
    """

    def __init__(
        self,
        decoder: DecoderConfig,
        activation_checkpointing: Mode | None = "none",
        compile_blocks: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.config: DecoderConfig = from_plain(decoder, DecoderConfig, "decoder")
        self.activation_checkpointing = check_mode(activation_checkpointing)
        self.compile_blocks = compile_blocks
        self.decoder: Decoder | None = None
        self.token_loss, self.bits_per_byte = TokenLoss(), BitsPerByte()
        self._buffer: MetricBuffer | None = None

    def configure_callbacks(self) -> list["pl.Callback"]:
        """What a pretraining run is watched by in any case."""
        given: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        monitors: list[type[pl.Callback]] = [LRMonitor, GradNormMonitor, MFUMonitor]
        if has_figures(self.trainer.precision_plugin):
            monitors.append(PrecisionMonitor)
        return [monitor() for monitor in monitors if not any(isinstance(callback, monitor) for callback in given)]

    def configure_model(self) -> None:
        """Build the decoder, once. Where the strategy shards, on the meta device: it calls `init_weights` after."""
        if self.decoder is not None:
            return
        strategy: Any = self._trainer.strategy if self._trainer is not None else None
        strategy_shards = getattr(strategy, "shards_modules", False)
        if self.device_mesh is not None and not strategy_shards:
            raise UsageError(
                f"strategy={type(strategy).__name__} leaves the sharding to the module, and LanguageModel leaves it to "
                "the strategy: take FSDP2Strategy"
            )
        # On the meta device no weights are drawn, so the random state that training sees does not depend on the shape.
        with torch.device("meta"):
            decoder = self.decoder = Decoder(self.config)
        decoder.set_activation_checkpointing(self.activation_checkpointing)
        plugin: Any = strategy.precision_plugin if strategy is not None else None
        if not strategy_shards and hasattr(plugin, "convert_before_sharding"):
            plugin.convert_before_sharding(decoder)
        if self.compile_blocks:
            decoder.compile_blocks()
        device = torch.empty(0).device
        if not strategy_shards and device.type != "meta":
            decoder.to_empty(device=device)
            self.init_weights()

    def init_weights(self) -> None:
        """Draw the decoder's weights from the seed, where they are; shards get what one device would have drawn."""
        assert self.decoder is not None
        device = self.decoder.head.weight.device
        self.decoder.init_weights(torch.Generator(device).manual_seed(torch.initial_seed()))

    def check_run(self, trainer: Any, datamodule: Any, stage: str) -> None:
        """Refuse a run that could not train, or data of other sizes, before the data are prepared."""
        super().check_run(trainer, datamodule, stage)
        self._check_sizes(datamodule)
        if stage == "fit":
            with torch.device("meta"):
                shape = torch.nn.ModuleDict({"decoder": Decoder(self.config)})
            decay_groups(shape, self.weight_decay, self.decay_embeddings, self.param_rules)

    def _check_sizes(self, data: Any) -> None:
        """Refuse sequences or a vocabulary that the decoder cannot take."""
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
        self._buffer = MetricBuffer.of(self.trainer) if stage == "fit" else None
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        self._check_sizes(data)
        if hasattr(data, "check_ids"):
            data.check_ids(self.config.vocab_size)
        if hasattr(data, "data_summary") and stage == "fit":
            rank_zero_info(data.data_summary())

    def flops_per_token(self, seq_len: int, attention: Attention) -> tuple[int, int]:
        """FLOPs of forward and backward pass for one token, and those that activation checkpointing spends again."""
        again = recompute_flops_per_token(self.config, seq_len, attention, self.activation_checkpointing)
        return training_flops_per_token(self.config, seq_len, attention), again

    def forward(self, input_ids: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Logits (B, T, vocabulary) of token ids (B, T)."""
        assert self.decoder is not None, "call configure_model() first, or let a Trainer do it"
        return self.decoder(input_ids, document_ids)

    def _sums(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Nats and number of the labels that count, both scalars on the device."""
        assert self.decoder is not None
        labels = batch["labels"]
        nats = self.decoder(batch["input_ids"], batch.get("document_ids"), labels=labels)
        return nats, (labels != IGNORED).sum()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Loss of one micro-batch, so scaled that the accumulated gradient is that of the mean over tokens."""
        nats, tokens = self._sums(batch)
        if self._buffer is not None:
            self._buffer.record_mean("train/loss", nats, tokens)
        return self.token_mean(nats, tokens, capacity=batch["labels"].numel())

    def on_validation_epoch_start(self) -> None:
        """Start the sums over the validation set; an exception may have left some."""
        self._reset_evaluation()

    def on_test_epoch_start(self) -> None:
        """Start the sums over the test set; an exception may have left some."""
        self._reset_evaluation()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a batch to the sums."""
        self._evaluate(batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a batch to the sums."""
        self._evaluate(batch)

    def on_validation_epoch_end(self) -> None:
        """Log `val/loss` and `val/bits_per_byte`."""
        self._log_evaluation("val")

    def on_test_epoch_end(self) -> None:
        """Log `test/loss` and `test/bits_per_byte`."""
        self._log_evaluation("test")

    def _reset_evaluation(self) -> None:
        self.token_loss.reset()
        self.bits_per_byte.reset()

    def _evaluate(self, batch: Batch) -> None:
        nats, tokens = self._sums(batch)
        self.token_loss.update(nats, tokens)
        if "n_bytes" in batch:
            self.bits_per_byte.update(nats, batch["n_bytes"])

    def _log_evaluation(self, stage: str) -> None:
        for name, metric in (("loss", self.token_loss), ("bits_per_byte", self.bits_per_byte)):
            if metric.update_called:
                self.log(f"{stage}/{name}", metric)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Log-probability of each label given the tokens before it: (B, T) fp32, in nats, 0 where it does not count."""
        logits = self(batch["input_ids"], batch.get("document_ids")).float()
        labels = batch["labels"]
        chosen = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
        return torch.where(labels == IGNORED, 0.0, chosen)

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """The model of a checkpoint; the checkpoint says what its decoder is.

        Args:
            checkpoint_path: a file, or a folder of shards that `FSDP2Strategy` saved.
            map_location: as Lightning's method has it, like those below.
            hparams_file: see Lightning.
            strict: see Lightning.
            weights_only: see Lightning.
            **kwargs: constructor arguments; `optimizer`, `schedule` and the like where the model is to be trained.

        Raises:
            UsageError: no whole checkpoint, or none of a LanguageModel.
        """
        if isinstance(checkpoint_path, str | Path) and "://" not in str(checkpoint_path):
            checkpoint, checkpoint_path = read_without_optimizers(Path(checkpoint_path), weights_only)
            settings = {**checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_KEY, {}), **kwargs}
            if "decoder" not in settings and _takes_decoder(cls, settings):
                kwargs["decoder"] = _decoder_of(checkpoint)
        return super().load_from_checkpoint(checkpoint_path, map_location, hparams_file, strict, weights_only, **kwargs)

    def _architecture(self) -> dict[str, Any]:
        return {"class": type(self.config).__name__, **dataclasses.asdict(self.config)}  # type: ignore[call-overload]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Write the architecture into the checkpoint, in plain types."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["decoder_config"] = self._architecture()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Say in one line where the checkpoint's architecture or tokenizer is another, before any tensor is loaded."""
        super().on_load_checkpoint(checkpoint)
        data: Any = getattr(self._trainer, "datamodule", None)
        if hasattr(data, "check_tokenizer"):  # its own state is restored later, and by the same class of data only
            data.check_tokenizer(checkpoint)
        here, there = self._architecture(), checkpoint.get("decoder_config")
        if there is None:
            return
        of_the_first_weights_only = {"init_std", "zero_init_outputs"}
        names = ["class", *sorted((here.keys() | there.keys()) - {"class"} - of_the_first_weights_only)]
        for name in names:
            if here.get(name) != there.get(name):
                raise UsageError(
                    f"the checkpoint's decoder has {name}={there.get(name)!r}, the recipe's {here.get(name)!r}: "
                    "make them equal, or start without the checkpoint"
                )
