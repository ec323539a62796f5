"""A decoder as one writes it without a library, in the manner of nanoGPT: the peer of loops by hand, on CPU and GPU."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_tricks.models import DecoderConfig

_PARTS = {"qkv": ("attn.q", "attn.k", "attn.v"), "out": ("attn.o",), "down": ("mlp.down",)}


def _norm(shape: DecoderConfig) -> nn.Module:
    if shape.norm == "rms":
        return nn.RMSNorm(shape.d_model, shape.norm_eps)
    return nn.LayerNorm(shape.d_model, shape.norm_eps, bias=shape.bias)


class HandBlock(nn.Module):
    """A block with fused queries, keys and values, and with a fused gate where it has one."""

    def __init__(self, shape: DecoderConfig) -> None:
        super().__init__()
        width, hidden, bias = shape.d_model, shape.ffn_width, shape.bias
        self.heads, self.kv_heads, self.gated = shape.n_heads, shape.kv_heads, shape.activation == "swiglu"
        self.norm1, self.norm2 = _norm(shape), _norm(shape)
        self.qkv = nn.Linear(width, (self.heads + 2 * self.kv_heads) * shape.head_dim, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.up = nn.Linear(width, (1 + self.gated) * hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        """Map (rows, length, width) to the same shape; the tables are (length, head_dim), None without a rotation."""
        rows, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(rows, length, -1, width // self.heads).transpose(1, 2)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), 1)
        if cos is not None and sin is not None:
            half = q.shape[-1] // 2
            q, k = (t * cos + torch.cat((-t[..., half:], t[..., :half]), -1) * sin for t in (q, k))
        grouped = self.heads != self.kv_heads
        mixed = F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True, enable_gqa=grouped)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        hidden = self.up(self.norm2(x))
        if self.gated:
            gate, up = hidden.chunk(2, -1)
            return x + self.down(F.silu(gate) * up)
        return x + self.down(F.gelu(hidden, approximate="tanh"))


class HandWritten(nn.Module):
    """A Llama or a GPT-2 by its shape, with whole logits.

    Args:
        shape: of a decoder with SwiGLU, or with GELU in its tanh form.
        length: tokens in a row.

    Attributes:
        runs_again: whether the backward pass computes each block again, of which only the input is kept.
    """

    cos: Tensor | None
    sin: Tensor | None

    def __init__(self, shape: DecoderConfig, length: int) -> None:
        super().__init__()
        if shape.qk_norm or shape.activation == "relu2":
            raise ValueError("qk_norm or relu2: not written by hand")
        self.runs_again = False
        self.embed = nn.Embedding(shape.vocab_size, shape.d_model)
        self.positions = nn.Embedding(shape.max_seq_len, shape.d_model) if shape.positions == "learned" else None
        self.blocks = nn.ModuleList(HandBlock(shape) for _ in range(shape.n_layers))
        self.norm, self.head = _norm(shape), nn.Linear(shape.d_model, shape.vocab_size, bias=False)
        if shape.tie_embeddings:
            self.head.weight = self.embed.weight
        cos = sin = None
        if shape.positions == "rope":
            inverse = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
            angles = torch.outer(torch.arange(length), inverse).repeat(1, 2)
            cos, sin = angles.cos(), angles.sin()
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take the weights of a `Decoder` of the same shape."""
        mine = {}
        for name in self.state_dict():
            first, _, rest = name.partition(".")
            if first != "blocks":
                mine[name] = state[name]
                continue
            number, layer, kind = rest.split(".")
            ups = ("mlp.gate", "mlp.up") if f"blocks.{number}.mlp.gate.weight" in state else ("mlp.up",)
            parts = {**_PARTS, "norm1": ("attn_norm",), "norm2": ("mlp_norm",), "up": ups}[layer]
            mine[name] = torch.cat([state[f"blocks.{number}.{part}.{kind}"] for part in parts])
        self.load_state_dict(mine)

    def features(self, input_ids: Tensor) -> Tensor:
        """What the head is applied to, (rows, length, width)."""
        x, length = self.embed(input_ids), input_ids.shape[1]
        if self.positions is not None:
            x = x + self.positions(torch.arange(length, device=input_ids.device))
        tables = [None if table is None else table[:length] for table in (self.cos, self.sin)]
        for block in self.blocks:
            x = checkpoint(block, x, *tables, use_reentrant=False) if self.runs_again else block(x, *tables)
        return self.norm(x)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Mean nats of a token."""
        return self.loss(self.features(input_ids), labels)

    def loss(self, features: Tensor, labels: Tensor) -> Tensor:
        """Mean nats of a token, of features."""
        return F.cross_entropy(self.head(features).flatten(0, 1).float(), labels.flatten())
