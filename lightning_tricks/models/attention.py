"""Causal self-attention with rotary positions, norms, a cache of keys and values, and the largest attention logit."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_tricks.models.decoder_config import DecoderConfig
from lightning_tricks.models.documents import Documents, Mask, varlen
from lightning_tricks.models.fused_linear import Fused, multiply
from lightning_tricks.parallel.context import ContextParallel, Method

OWN_NORM_FROM = 2**16  # numbers: below, torch's own form is faster


class _RMSNormOnCPU(torch.autograd.Function):
    """torch's `rms_norm` on a CPU, in fp32: torch's own backward pass reads and writes each row many times.

    Keeps its input and a number for each row; torch keeps three more tensors as large as the input.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        width = x.shape[-1]
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).pow(2).div_(width).add_(eps).rsqrt_()
        return (x * scale).mul_(weight), scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
        x, weight, ctx.eps = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, weight, output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        width = x.shape[-1]
        if torch.is_grad_enabled():  # somebody takes a second derivative: the same in operations that have one
            scale = x.square().mean(-1, keepdim=True).add(ctx.eps).rsqrt()
            normed, scaled = x * scale, grad * weight
            grad_x = scale * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
            return grad_x, (grad * normed).reshape(-1, width).sum(0), None
        rows, grad, scale = x.reshape(-1, width), grad.reshape(-1, width), scale.reshape(-1)
        grad_rows = grad * rows
        grad_weight = grad_rows.mT.mv(scale)  # autocast leaves `mv` in fp32
        along = grad_rows.mv(weight).mul_(scale.pow(3).div_(-width))
        grad_rows.copy_(grad).mul_(weight).mul_(scale.unsqueeze(1)).addcmul_(rows, along.unsqueeze(1))
        return grad_rows.view(x.shape), grad_weight, None


class RMSNorm(nn.RMSNorm):
    """Divide by the root mean square of the last dimension and scale; the result keeps the input's dtype.

    Args:
        width: size of the last dimension.
        eps: added to the mean square.

    Source: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """`x` of shape (..., width), normalised."""
        is_plain = not isinstance(x, DTensor) and not isinstance(self.weight, DTensor)
        is_plain = is_plain and x.dtype != torch.float64 and not torch.compiler.is_compiling()
        if is_plain and x.device.type == "cpu" and x.numel() >= OWN_NORM_FROM:
            return _RMSNormOnCPU.apply(x.float(), self.weight.float(), self.eps)[0].to(x.dtype)
        # Under autocast the scale is fp32 and queries are bf16, a mixture for which torch has no fused kernel.
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def block_norm(config: DecoderConfig) -> nn.Module:
    """The norm of the residual stream in the config's family."""
    if config.norm == "rms":
        return RMSNorm(config.d_model, config.norm_eps)
    return nn.LayerNorm(config.d_model, config.norm_eps, bias=config.bias)


class RotaryPositions(nn.Module):
    """Tables of cosines and sines, computed in fp32 and never saved.

    Dimension i of a head is rotated together with dimension i + head_dim / 2, as in Hugging Face's checkpoints (Meta's
    own files pair neighbours). The product of a rotated query and key depends on the distance between
    their positions alone, so documents packed into a row need no positions of their own.

    Args:
        head_dim: width of a head; even.
        max_seq_len: number of positions.
        theta: base of the wavelengths: pair i rotates by theta ** (-2 i / head_dim) radians a token.

    Source: Su et al. 2021, https://arxiv.org/abs/2104.09864.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_seq_len: int, theta: float) -> None:
        super().__init__()
        self.theta = theta
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(max_seq_len, head_dim, dtype=torch.float32), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill the tables; call it again after `to_empty`."""
        positions, head_dim = self.cos.shape
        # fp32 whatever the default dtype: bf16 cannot tell position 256 from 257.
        pair = torch.arange(0, head_dim, 2, dtype=torch.float32, device=self.cos.device)
        frequencies = 1.0 / self.theta ** (pair / head_dim)
        angles = torch.outer(torch.arange(positions, dtype=torch.float32, device=self.cos.device), frequencies)
        self.cos.copy_(angles.cos().repeat(1, 2))
        # The table contains the minus sign of the rotation, so that `rotate` needs no negated copy.
        self.sin.copy_(torch.cat((-angles.sin(), angles.sin()), dim=1))

    def forward(self, length: int, dtype: torch.dtype, begin: int = 0) -> tuple[Tensor, Tensor]:
        """`length` rows of both tables from `begin`, (length, head_dim), in the dtype of queries and keys."""
        rows = slice(begin, begin + length)
        return self.cos[rows].to(dtype), self.sin[rows].to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x`, (..., length, head_dim), by the tables of `RotaryPositions`."""
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin


class LayerCache:
    """Keys and values of one block; the first `append` allocates the memory for `max_length` tokens."""

    def __init__(self, max_length: int) -> None:
        self.max_length, self.length = max_length, 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values, (batch, kv_heads, new, head_dim); return those of all tokens so far, as views."""
        if self._keys is None or self._values is None:
            shape = (*k.shape[:2], self.max_length, k.shape[3])
            self._keys, self._values = torch.empty(shape, dtype=k.dtype, device=k.device), v.new_empty(shape)
        begin, self.length = self.length, self.length + k.shape[2]
        self._keys[:, :, begin : self.length] = k
        self._values[:, :, begin : self.length] = v
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]


class KVCache:
    """The caches of all blocks; `Decoder.forward(..., cache=cache)` reads them and adds the new tokens.

    Args:
        n_layers: number of blocks.
        max_length: tokens of a row, prompt and continuation together. Memory: 2 * n_layers * batch * kv_heads *
            max_length * head_dim numbers.
    """

    def __init__(self, n_layers: int, max_length: int) -> None:
        self.layers = [LayerCache(max_length) for _ in range(n_layers)]

    @property
    def length(self) -> int:
        """Number of tokens that the decoder has read."""
        return self.layers[0].length


Rope = tuple[Tensor, Tensor]

# Longest row for `_attention_by_products`. torch's fused CPU kernel takes about twice as long at 256 and 512 tokens
# (bf16, forward and backward, torch 2.13, one core of an AMD EPYC with avx512_bf16); in fp32, no longer.
PRODUCTS_MAX_LENGTH = 512
# Products that `max_logit` computes at once: 64 MiB in fp32, and in bf16 no more than the L2 cache of an H100 holds.
LOGITS_IN_A_SLICE = 2**24
# Queries of a row in such a slice: enough for an efficient product, and few products are of keys that are not seen.
QUERIES_IN_A_SLICE = 256


def document_mask(document_ids: Tensor) -> Tensor:
    """The tokens that each token may see: itself and the earlier ones of its own document.

    The mask is dense: a row of T tokens costs T^2 bytes, and on CUDA the memory-efficient kernel replaces flash.
    `packed_documents` does without it.

    Args:
        document_ids: (batch, length) integers, equal for tokens of the same document.

    Returns:
        (batch, 1, length, length) bool, True where query (third) may see key (fourth).
    """
    return (document_ids[:, None, :, None] == document_ids[:, None, None, :]).tril()


def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, scale: float | None = None) -> Tensor:
    """Softmax-weighted mean of the values at the own and all earlier positions.

    Args:
        q: (batch, heads, length, head_dim).
        k: (batch, kv_heads, length, head_dim); each serves heads / kv_heads neighbouring query heads.
        v: as `k`.
        mask: from `document_mask`, already causal, or from `packed_documents`. None: every earlier position.
        scale: of the products of queries and keys. None: 1 / sqrt(head_dim).

    Returns:
        (batch, heads, length, head_dim).
    """
    if isinstance(mask, Documents):
        return _attention_by_documents(q, k, v, mask, scale)
    by_products = q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.shape[2] <= PRODUCTS_MAX_LENGTH
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1 and (by_products or mask is not None):
        # With a mask CUDA's fused kernels refuse grouped heads, and the fallback is slow and large.
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        repeats = 1
    if by_products:
        return _attention_by_products(q, k, v, mask, scale)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=repeats > 1
    )


def _attention_by_documents(q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float | None) -> Tensor:
    batch, heads, length, _ = q.shape
    # tokens first, all rows one after the other: as the projections leave them, so that nothing is copied
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    if documents.lengths is None:
        out = varlen(q, k, v, documents, length, scale)
    else:
        queries, keys, values = (
            [x.transpose(0, 1)[None] for x in whole.split(documents.lengths)] for whole in (q, k, v)
        )
        alone = [causal_attention(*own, None, scale) for own in zip(queries, keys, values, strict=True)]
        out = torch.cat([x[0].transpose(0, 1) for x in alone])
    result: Tensor = out.view(batch, length, heads, -1).transpose(1, 2)
    return result


def _attention_by_products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """The textbook form, faster than torch's fused kernel for short rows.

    The first half of the queries leaves out the second half of the keys, which it does not see. Scores are rounded to
    bf16 before the softmax, as in any bf16 model without a fused kernel. The backward pass needs the attention weights:
    3/4 of heads * length^2 numbers a row.
    """
    batch, heads, length, head_dim = q.shape
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, float("-inf"))
    if bias.dim() == 4:
        bias = bias.expand(batch, heads, length, length).flatten(0, 1)
    alpha = head_dim**-0.5 if scale is None else scale
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    half, parts = -(-length // 2), []
    for begin in range(0, length, half):
        end = min(begin + half, length)
        scores = torch.baddbmm(bias[..., begin:end, :end], q[:, begin:end], k[:, :end].mT, alpha=alpha)
        parts.append(torch.bmm(scores.softmax(dim=-1), v[:, :end]))
    return torch.cat(parts, dim=1).view(batch, heads, length, head_dim)


def attention_of_parts(
    context: ContextParallel, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None = None
) -> Tensor:
    """`causal_attention` where each rank has a part of the rows, in head-tail order; every rank must call.

    Args:
        context: tells the part, and exchanges it.
        q: (batch, heads, part, head_dim).
        k: (batch, kv_heads, part, head_dim).
        v: as `k`.
        mask: of `part_mask`, or None.
        scale: as in `causal_attention`.

    Returns:
        (batch, heads, part, head_dim).
    """
    if context.method == "ulysses":
        repeats = 1 if k.shape[1] % context.ranks == 0 else q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(repeats, dim=1) if repeats > 1 else x for x in (k, v))
        q, k, v = (context.to_heads(x) for x in (q, k, v))
        return context.to_positions(causal_attention(q, k, v, mask, scale))
    k, v = context.whole(k, dim=2), context.whole(v, dim=2)
    if mask is not None:
        return causal_attention(q, k, v, mask, scale)
    # the piece of the head, then that of the tail: each sees the keys up to its own end, so ranks do the same work
    piece = q.shape[2] // 2
    ends = ((context.rank + 1) * piece, (2 * context.ranks - context.rank) * piece)
    parts = zip(q.split(piece, dim=2), ends, strict=True)
    return torch.cat([continued_attention(some, k[:, :, :end], v[:, :, :end], scale) for some, end in parts], dim=2)


def part_mask(context: ContextParallel | None, document_ids: Tensor) -> Tensor:
    """`document_mask` of the queries that this rank has, (batch, 1, queries, length); with ulysses, of all queries."""
    if context is None or context.method == "ulysses":
        return document_mask(document_ids)
    own = context.positions(document_ids.shape[1], document_ids.device)
    earlier = own[:, None] >= torch.arange(document_ids.shape[1], device=own.device)
    return ((document_ids[:, own, None] == document_ids[:, None, :]) & earlier)[:, None]


def continued_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """`causal_attention` for the last tokens of a row, given the keys and values of the whole row.

    Args:
        q: (batch, heads, new, head_dim), of the last `new` of `length` tokens.
        k: (batch, kv_heads, length, head_dim).
        v: as `k`.
        scale: as in `causal_attention`.

    Returns:
        (batch, heads, new, head_dim).
    """
    repeats, new, length = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    mask = torch.ones(new, length, dtype=torch.bool, device=q.device).tril(length - new)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def max_logit(q: Tensor, k: Tensor, mask: Mask | None = None, scale: float | None = None) -> Tensor:
    """The largest number that enters the softmax of `causal_attention`: query times key, times its scale.

    The products are computed for some queries of some rows at a time. Arguments as in `causal_attention`.

    Returns:
        Scalar tensor in the dtype of `q`; NaN if a product is.
    """
    batch, heads, length, head_dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    queries = max(1, min(length, QUERIES_IN_A_SLICE, LOGITS_IN_A_SLICE // (heads * keys)))
    later = torch.ones(queries, queries, dtype=torch.bool, device=q.device).triu(1)
    mask = document_mask(mask.ids) if isinstance(mask, Documents) else mask
    mask = None if mask is None else mask.expand(batch, -1, -1, -1)
    largest = []
    for begin in range(0, length, queries):
        end = min(begin + queries, length)
        last = end if keys == length else keys  # queries of a part of the row may see keys after `end`
        rows = max(1, LOGITS_IN_A_SLICE // (heads * (end - begin) * last))
        for first in range(0, batch, rows):
            some = slice(first, first + rows)
            # neighbouring query heads share a key head: their queries are one matrix, so no key is copied
            of_key_heads = q[some, :, begin:end].unflatten(1, (kv_heads, -1)).flatten(2, 3)
            logits = (of_key_heads @ k[some, :, :last].mT).view(-1, heads, end - begin, last)
            if mask is None:  # all of them see the keys before `begin`
                logits[..., begin:].masked_fill_(later[: end - begin, : end - begin], float("-inf"))
            else:
                logits.masked_fill_(~mask[some, :, begin:end, :last], float("-inf"))
            largest.append(logits.amax())
    return torch.stack(largest).amax() * (head_dim**-0.5 if scale is None else scale)


class Attention(nn.Module):
    """Multi-head attention, optionally with grouped keys and values, rotary positions and normalised queries.

    Queries, keys and values have a matrix each: Muon treats them as three, and tensor parallelism splits each by heads.
    `forward` may multiply with all three at once.

    Args:
        config: of the decoder.
        base: of the model whose settings are transferred, see `Decoder`. Where its heads have another width, products
            are multiplied by sqrt(the base model's head_dim) / head_dim in place of 1 / sqrt(head_dim).

    Attributes:
        context: tells which part of each row this rank has; None: all of it.
    """

    context: ContextParallel | None = None

    def __init__(self, config: DecoderConfig, base: DecoderConfig | None = None) -> None:
        super().__init__()
        kv_width = config.kv_heads * config.head_dim
        self.head_dim = config.head_dim
        base_dim = config.head_dim if base is None else base.head_dim
        self.scale = None if base_dim == config.head_dim else base_dim**0.5 / config.head_dim
        self.q = nn.Linear(config.d_model, config.d_model, bias=config.bias)
        self.k = nn.Linear(config.d_model, kv_width, bias=config.bias)
        self.v = nn.Linear(config.d_model, kv_width, bias=config.bias)
        self.o = nn.Linear(config.d_model, config.d_model, bias=config.bias)
        self.norms_all_heads = config.qk_norm == "whole"
        widths = (config.d_model, kv_width) if self.norms_all_heads else (config.head_dim, config.head_dim)
        self.q_norm, self.k_norm = (
            RMSNorm(width, config.norm_eps) if config.qk_norm else nn.Identity() for width in widths
        )

    def forward(
        self, x: Tensor, rope: Rope | None, mask: Mask | None, cache: LayerCache | None = None, fused: Fused = None
    ) -> Tensor:
        """Map (batch, length, d_model) to the same shape.

        Args:
            x: normalised residual stream.
            rope: tables of `RotaryPositions` for these positions; None: the embedding has added the positions.
            mask: from `document_mask` or `packed_documents`, or None; with a `context` from `part_mask`.
            cache: keys and values of the tokens before these, to which theirs are added; without a mask.
            fused: of `multiply`, for `q`, `k` and `v`.
        """
        q, k, v = multiply(x, (self.q, self.k, self.v), fused)
        if rope is not None and isinstance(self.q_norm, nn.Identity):
            v = v.contiguous()  # a fused product would be kept whole for its part
        q, k = self._queries_and_keys(q, k, rope)
        v = self._heads(v).transpose(1, 2)
        if self.context is not None:
            assert not isinstance(mask, Documents)  # the ranks have parts of documents
            heads = attention_of_parts(self.context, q, k, v, mask, self.scale)
        elif cache is None:
            heads = causal_attention(q, k, v, mask, self.scale)
        else:
            heads = continued_attention(q, *cache.append(k, v), self.scale)
        return self.o(heads.transpose(1, 2).flatten(2))

    def max_attention_logit(self, x: Tensor, rope: Rope | None, mask: Mask | None) -> Tensor:
        """`max_logit` of the queries and keys of `forward`, a scalar; arguments as there."""
        q, k = self._queries_and_keys(self.q(x), self.k(x), rope)
        if self.context is None:
            return max_logit(q, k, mask, self.scale)
        if self.context.method == "ulysses":
            q, k = self.context.to_heads(q), self.context.whole(k, dim=2)
            k = k.repeat_interleave(q.shape[1] * self.context.ranks // k.shape[1], dim=1)
            return max_logit(q, k.chunk(self.context.ranks, dim=1)[self.context.rank], mask, self.scale)
        k = self.context.whole(k, dim=2)
        if mask is None:
            own = self.context.positions(k.shape[2], k.device)
            mask = (own[:, None] >= torch.arange(k.shape[2], device=own.device))[None, None]
        return max_logit(q, k, mask, self.scale)

    def sent_between_context_ranks(self, method: Method, ranks: int, tensor_ranks: int = 1) -> int:
        """Elements that the collectives of a forward pass make for each token of a rank; a backward pass makes as many.

        Args:
            method: see `ContextParallel`.
            ranks: that have parts of the same rows.
            tensor_ranks: that share the heads.
        """
        queries, keys = self.q.out_features // tensor_ranks, self.k.out_features // tensor_ranks
        if method == "gather":
            return 2 * ranks * keys
        repeated = keys if keys // self.head_dim % ranks == 0 else queries  # see `attention_of_parts`
        return 2 * queries + 2 * repeated

    def _queries_and_keys(self, q: Tensor, k: Tensor, rope: Rope | None) -> tuple[Tensor, Tensor]:
        # normalised while a token's heads are side by side: a norm would copy them otherwise
        if self.norms_all_heads:
            q, k = self._heads(self.q_norm(q)), self._heads(self.k_norm(k))
        else:
            q, k = self.q_norm(self._heads(q)), self.k_norm(self._heads(k))
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        return (q, k) if rope is None else (rotate(q, *rope), rotate(k, *rope))

    def _heads(self, x: Tensor) -> Tensor:
        # -1, not n_heads: under tensor parallelism a rank holds some of the heads.
        return x.unflatten(-1, (-1, self.head_dim))
