"""A run's module as a model of text: logits of rows, a tokenizer and the longest row, for callbacks that need text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from tokenizers import Tokenizer
from torch import Tensor

from lightning_tricks._core.errors import UsageError
from lightning_tricks._trainer.run_facts import planned_data_ranks
from lightning_tricks.data.tokenizer import end_of_text


def refuse_shared_rows(trainer: Any, who: str, command: str) -> None:
    """Refuse ranks that share rows, also of a run that has not begun; the arguments are those of `TextModel.of_run`.

    Raises:
        UsageError: names the command.
    """
    ranks = trainer.num_devices * trainer.num_nodes
    if planned_data_ranks(trainer.strategy, trainer.num_devices, trainer.num_nodes) < ranks:
        raise UsageError(
            f"{who}: tensor, context and pipeline ranks (mesh) share rows, whose lengths are fixed: leave "
            f"the callback out, and take a checkpoint and the command {command}"
        )


@dataclass(frozen=True)
class TextModel:
    """A causal model of any class, and its tokenizer.

    Args:
        logits_of: maps token ids (batch, length) to the logits of each next token, (batch, length, vocabulary).
        tokenizer: of the library `tokenizers` or `transformers`, or with the same `encode` and `decode`.
        device: where the rows are.
        end: the end-of-text token, which also stands before a text; None: not known.
        max_length: tokens in the longest row; None: not known.
    """

    logits_of: Callable[[Tensor], Tensor]
    tokenizer: Any
    device: torch.device
    end: int | None
    max_length: int | None

    @classmethod
    def of_run(cls, trainer: Any, module: Any, who: str, command: str) -> Self:
        """The module of a run, at a validation or before one.

        Its `forward(input_ids)` gives the logits, or an object with `logits`, as transformers' models do. The tokenizer
        is the attribute `tokenizer` of the data module or of the module.

        Args:
            trainer: of the run.
            module: the LightningModule.
            who: the callback that asks, for messages.
            command: that does the same with a checkpoint, for messages.

        Raises:
            UsageError: no tokenizer; ranks that share rows.
        """
        refuse_shared_rows(trainer, who, command)
        data = getattr(trainer, "datamodule", None)
        tokenizer = next((found for owner in (data, module) if (found := getattr(owner, "tokenizer", None))), None)
        if tokenizer is None:
            raise UsageError(
                f"{who} needs a tokenizer: give the data module or the module an attribute `tokenizer`, "
                "or leave the callback out"
            )
        end = getattr(data, "eot_id", None)
        plugin = trainer.precision_plugin

        def logits_of(rows: Tensor) -> Tensor:
            # compiled blocks would be compiled again for rows of this width
            with plugin.forward_context(), torch.compiler.set_stance("force_eager"):
                found = module(rows)
            return getattr(found, "logits", found)

        return cls(
            logits_of,
            tokenizer,
            trainer.strategy.root_device,
            _end_of_text(tokenizer) if end is None else end,
            _max_length(module),
        )

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: any.
            special: with the tokens that a tokenizer of transformers is set up to add. One of `tokenizers` never adds
                any: TextData has none either.
        """
        if isinstance(self.tokenizer, Tokenizer):
            return self.tokenizer.encode(text, add_special_tokens=False).ids
        options = {} if special else {"add_special_tokens": False}
        return list(self.tokenizer.encode(text, **options))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return self.tokenizer.decode(list(ids))


def _end_of_text(tokenizer: Any) -> int | None:
    if not isinstance(tokenizer, Tokenizer):
        return getattr(tokenizer, "eos_token_id", None)
    try:
        return end_of_text(tokenizer)
    except UsageError:  # it has none: samples then end at max_new_tokens
        return None


def _max_length(module: Any) -> int | None:
    """The longest row of our decoders, and of transformers' models that name it; else None."""
    configs = [getattr(part, "config", None) for part in (module, *module.children())]
    names = ("max_seq_len", "max_position_embeddings")
    return next((found for c in configs for name in names if isinstance(found := getattr(c, name, None), int)), None)
