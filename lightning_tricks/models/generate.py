"""Continue rows of tokens greedily or by sampling: by a decoder with its cache, or by any model without one."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_tricks._core.errors import UsageError
from lightning_tricks.models.attention import KVCache
from lightning_tricks.models.decoder import Decoder

__all__ = ["Sampling", "generate"]

ROW_MULTIPLE = 16  # fp8 products on CUDA take rows of a multiple of 16 tokens


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Filters apply in the order of the arguments, as in transformers' `generate`.

    Args:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: draw among the k most likely tokens only; None: among all.
        top_p: draw among the most likely tokens that together reach this probability; 1: among all.

    Raises:
        UsageError: a value out of its range.

    Source: top-k in Fan et al. 2018, https://arxiv.org/abs/1805.04833; top-p in Holtzman et al. 2019,
        https://arxiv.org/abs/1904.09751.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature={self.temperature}: give 0 (the most likely token) or a positive number")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top_k={self.top_k}: give a whole number of at least 1, or leave it out")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p={self.top_p}: give a number above 0, at most 1")

    def choose(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """One token for each row of `logits`, (batch, vocabulary) -> (batch,) int64.

        Args:
            logits: of the next token.
            generator: source of randomness on the logits' device. Default: torch's.
        """
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        return torch.multinomial(self.probabilities(logits), 1, generator=generator).squeeze(-1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution that a token is drawn from, (batch, vocabulary), fp32; temperature above 0."""
        logits = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        chances = logits.softmax(dim=-1)
        if self.top_p < 1:
            ordered, order = chances.sort(dim=-1, descending=True)
            before = ordered.cumsum(dim=-1) - ordered  # a token stays where those before it do not reach top_p
            dropped = (before >= self.top_p).scatter(-1, order, before >= self.top_p)
            chances = chances.masked_fill(dropped, 0.0)
        return chances / chances.sum(dim=-1, keepdim=True)


@torch.no_grad()
def generate(
    decoder: Decoder,
    input_ids: Tensor,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Yield the next token of each row, one position at a time, with a cache of keys and values.

    Args:
        decoder: in the mode (train or eval) and precision in which to run it.
        input_ids: (batch, length) int64, at least one token; rows of one length.
        max_new_tokens: number of tokens to yield; stop earlier by leaving the loop.
        sampling: how a token is chosen; None: the most likely one.
        generator: source of randomness on the decoder's device. Default: torch's.

    Yields:
        (batch,) int64.

    Raises:
        UsageError: an empty prompt, or more tokens in all than `max_seq_len`.
    """
    sampling = sampling or Sampling(temperature=0.0)
    length, longest = input_ids.shape[1], decoder.config.max_seq_len
    if length == 0:
        raise UsageError("the prompt holds no token: give at least one, such as the end-of-text token")
    if length + max_new_tokens > longest:
        raise UsageError(
            f"max_new_tokens={max_new_tokens} after a prompt of {length} tokens is more than the decoder's "
            f"max_seq_len={longest}: give at most {max(longest - length, 0)}"
        )
    cache = KVCache(decoder.config.n_layers, length + max_new_tokens)
    new = input_ids
    for _ in range(max_new_tokens):
        # Compiled blocks would be compiled again for each other length of the rows.
        with torch.compiler.set_stance("force_eager"):
            logits = decoder.head(decoder.features(new, cache=cache)[:, -1])
        chosen = sampling.choose(logits, generator)
        yield chosen
        new = chosen.unsqueeze(1)


def continue_rows(
    logits_of: Callable[[Tensor], Tensor],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator,
    max_seq_len: int | None = None,
    ended: Callable[[list[list[int]]], bool] | None = None,
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
        ended: asked after each step with all new token ids, for which it waits; True stops.
    """
    lengths = [len(prompt) for prompt in prompts]
    width = -(-(max(lengths) + max_new_tokens) // ROW_MULTIPLE) * ROW_MULTIPLE
    width = width if max_seq_len is None else min(width, max_seq_len)
    rows = torch.zeros(len(prompts), width, dtype=torch.int64)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    rows, ends = rows.to(generator.device), torch.tensor(lengths, device=generator.device)
    index = torch.arange(len(prompts), device=generator.device)
    done = 0
    for done in range(1, max_new_tokens + 1):
        rows[index, ends + done - 1] = sampling.choose(logits_of(rows)[index, ends + done - 2], generator)
        if ended is not None and ended(_after(rows, lengths, done)):
            break
    return _after(rows, lengths, done)


def _after(rows: Tensor, lengths: Sequence[int], count: int) -> list[list[int]]:
    """The `count` tokens of each row after its first `length`."""
    return [row[length : length + count] for row, length in zip(rows.tolist(), lengths, strict=True)]
