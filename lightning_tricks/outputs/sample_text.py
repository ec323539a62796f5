"""Show text that the model writes at each validation, in the log and in TensorBoard."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import Module, Trainer, pl
from lightning_tricks._trainer import data_rank, is_a
from lightning_tricks.data.bpe import end_of_text
from lightning_tricks.models import Sampling

_MULTIPLE = 16  # fp8 products on CUDA take rows of a multiple of 16 tokens


def continue_rows(
    logits_of: Callable[[Tensor], Tensor],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator,
    max_seq_len: int | None = None,
) -> list[list[int]]:
    """Continue prompts of different lengths by a causal model, without a cache; returns the new token ids of each.

    Every step computes all rows, at one width: sharded and compiled modules see one shape, and the same number of calls
    on every rank. The unused positions at the end of a row are harmless: later tokens do not change earlier logits.

    Args:
        logits_of: maps token ids (batch, width) to logits (batch, width, vocabulary).
        prompts: token ids, at least one each.
        max_new_tokens: number of tokens to add to each prompt.
        sampling: how the next token is chosen.
        generator: source of randomness; its device is where the rows are.
        max_seq_len: longest row that the model takes; None: not known.
    """
    lengths = [len(prompt) for prompt in prompts]
    width = -(-(max(lengths) + max_new_tokens) // _MULTIPLE) * _MULTIPLE
    width = width if max_seq_len is None else min(width, max_seq_len)
    rows = torch.zeros(len(prompts), width, dtype=torch.int64)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    rows, ends = rows.to(generator.device), torch.tensor(lengths, device=generator.device)
    index = torch.arange(len(prompts), device=generator.device)
    for step in range(max_new_tokens):
        rows[index, ends + step] = sampling.choose(logits_of(rows)[index, ends + step - 1], generator)
    return [row[length : length + max_new_tokens] for row, length in zip(rows.tolist(), lengths, strict=True)]


class SampleText(pl.Callback):
    """Print continuations of a few prompts at each validation, and show them in TensorBoard. Never changes training.

    Takes any module whose `forward(input_ids)` maps token ids (batch, length) to the logits of each next token, as a
    tensor (batch, length, vocabulary) or as an object with `logits`, as transformers' models do. The tokenizer is the
    attribute `tokenizer` of the data module or of the module, of the library `tokenizers` or `transformers`. Every
    validation draws with the same random numbers, so that samples differ by the weights alone.

    Cost: `max_new_tokens` forward passes of one row a prompt, on each rank.

    Args:
        prompts: texts to continue; the empty text continues from the end-of-text token, the start of a document.
        max_new_tokens: tokens to add to each prompt; a sample ends before them at an end-of-text token.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: draw among the k most likely tokens only; None: among all.
        top_p: draw among the most likely tokens that together reach this probability.
        seed: of the random numbers.

    Raises:
        UsageError: when the run starts: no tokenizer; a prompt that leaves no room in the model's longest row.
    """

    def __init__(
        self,
        prompts: Sequence[str] = ("",),
        max_new_tokens: int = 64,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> None:
        if not prompts or isinstance(prompts, str):
            raise UsageError(f"SampleText: prompts={prompts!r}: give a list of at least one text")
        if max_new_tokens < 1:
            raise UsageError(f"SampleText: max_new_tokens={max_new_tokens}: give at least 1")
        self.prompts, self.max_new_tokens, self.seed = list(prompts), max_new_tokens, seed
        self.sampling = Sampling(temperature, top_k, top_p)
        self._texts: list[str] = []

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Refuse settings with which the first validation would fail, and ranks that share rows."""
        if trainer.world_size != data_rank(trainer)[1]:
            raise UsageError(
                "SampleText: tensor and context ranks (mesh) divide the model's rows, whose lengths are fixed: leave "
                "the callback out, and sample from a checkpoint by the command generate"
            )
        self._tokens(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Write the samples, within the time that belongs to validation."""
        if trainer.sanity_checking:
            return
        tokenizer, prompts, end = self._tokens(trainer, pl_module)
        generator = torch.Generator(trainer.strategy.root_device).manual_seed(self.seed)
        plugin, broken = trainer.precision_plugin, []

        def logits_of(rows: Tensor) -> Tensor:
            # compiled blocks would be compiled again for rows of this width
            with plugin.forward_context(), torch.compiler.set_stance("force_eager"):
                found = pl_module(rows)
            logits = getattr(found, "logits", found)
            broken.append(logits.isnan().any())
            return logits.nan_to_num()  # drawing from NaN would end the run

        new = continue_rows(logits_of, prompts, self.max_new_tokens, self.sampling, generator, _max_seq_len(pl_module))
        ended = [ids[: ids.index(end)] if end in ids else ids for ids in new]
        self._texts = [tokenizer.decode(ids) for ids in ended]
        if torch.stack(broken).any():
            self._texts = [" (the model's logits are NaN)"] * len(prompts)

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Print them, and give them to TensorBoard."""
        texts, self._texts = self._texts, []
        if not trainer.is_global_zero:
            return
        bar: Any = trainer.progress_bar_callback
        step = f"step {trainer.global_step}  " if trainer.state.fn == "fit" else ""  # an evaluation counts no steps
        for number, (prompt, text) in enumerate(zip(self.prompts, texts, strict=False)):
            shown = "\n".join(f"    {line}" for line in f"{prompt}{text}".splitlines())
            (bar.print if bar is not None else print)(f"{step}sample {number}\n{shown}")
            loggers: list[Any] = [logger for logger in trainer.loggers if is_a(logger, "TensorBoardLogger")]
            for logger in loggers:
                logger.experiment.add_text(f"samples/{number}", shown, trainer.global_step)  # indented: verbatim

    def _tokens(self, trainer: Any, module: Any) -> tuple[Any, list[list[int]], int | None]:
        """The tokenizer, the prompts' token ids, and the end-of-text token."""
        owners = (getattr(trainer, "datamodule", None), module)
        tokenizer = next((found for owner in owners if (found := getattr(owner, "tokenizer", None))), None)
        if tokenizer is None:
            raise UsageError(
                "SampleText needs a tokenizer: give the data module or the module an attribute `tokenizer`, "
                "or leave the callback out"
            )
        end = getattr(owners[0], "eot_id", None)
        end = _end_of_text(tokenizer) if end is None else end
        prompts = [_encode(tokenizer, prompt) or ([] if end is None else [end]) for prompt in self.prompts]
        longest = _max_seq_len(module)
        for prompt, ids in zip(self.prompts, prompts, strict=True):
            if not ids:
                raise UsageError(f"SampleText: prompts: {prompt!r} holds no token and no end-of-text token is known")
            if longest is not None and len(ids) + self.max_new_tokens > longest:
                raise UsageError(
                    f"SampleText: max_new_tokens={self.max_new_tokens} after the {len(ids)} tokens of {prompt!r} is "
                    f"more than max_seq_len={longest}: give at most {max(longest - len(ids), 0)}"
                )
        return tokenizer, prompts, end


def _encode(tokenizer: Any, text: str) -> list[int]:
    found = tokenizer.encode(text)
    return list(getattr(found, "ids", found))  # `tokenizers` gives an object, transformers a list


def _end_of_text(tokenizer: Any) -> int | None:
    if not isinstance(tokenizer, Tokenizer):
        return getattr(tokenizer, "eos_token_id", None)
    try:
        return end_of_text(tokenizer)
    except UsageError:  # it has none: samples then end at max_new_tokens
        return None


def _max_seq_len(module: Any) -> int | None:
    """The longest row of our decoders, and of transformers' models that name it; else None."""
    configs = [getattr(part, "config", None) for part in (module, *module.children())]
    names = ("max_seq_len", "max_position_embeddings")
    return next((found for c in configs for name in names if isinstance(found := getattr(c, name, None), int)), None)
