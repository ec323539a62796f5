"""The reference language model: token ids in, logits out; Llama or GPT-2 by its config, in plain PyTorch."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.find_modules import parameters_by_name, whole_of
from lightning_tricks._core.tensors import matmul_dtype
from lightning_tricks.accounting.recompute import Checkpointing, Mode, check_checkpointing, modes_of_blocks
from lightning_tricks.models.attention import (
    Attention,
    KVCache,
    LayerCache,
    Rope,
    RotaryPositions,
    block_norm,
    part_mask,
)
from lightning_tricks.models.decoder_config import DecoderConfig, Llama
from lightning_tricks.models.documents import Mask, packed_documents
from lightning_tricks.models.fused_linear import Fused, can_multiply_together, multiply
from lightning_tricks.models.linear_cross_entropy import linear_cross_entropy, softcapped
from lightning_tricks.models.moe import Experts, Mixture, Router, count_in_backward
from lightning_tricks.parallel.activation_checkpointing import checkpointed, mode_of
from lightning_tricks.parallel.context import ContextParallel
from lightning_tricks.parallel.tensor import local_rows, whole_logits

__all__ = ["Decoder"]

_EXPERT_OUTPUTS = ("experts.down", "shared.down")
_RESIDUAL_OUTPUTS = ("attn.o", "mlp.down", *_EXPERT_OUTPUTS)  # layers whose result is added to the residual stream


class MLP(nn.Module):
    """The feed-forward half of a block, which treats each position alone."""

    def __init__(self, config: DecoderConfig, width: int | None = None) -> None:
        super().__init__()
        self.activation, width = config.activation, width or config.ffn_width
        if config.activation == "swiglu":
            self.gate = nn.Linear(config.d_model, width, bias=config.bias)
        self.up = nn.Linear(config.d_model, width, bias=config.bias)
        self.down = nn.Linear(width, config.d_model, bias=config.bias)

    def forward(self, x: Tensor, fused: Fused = None) -> Tensor:
        """Map (..., d_model) to the same shape; `fused` is of `multiply`, for `gate` and `up`."""
        if self.activation == "swiglu":
            gate, up = multiply(x, (self.gate, self.up), fused)
            return self.down(F.silu(gate) * up)
        if self.activation == "gelu":
            return self.down(F.gelu(self.up(x), approximate="tanh"))
        return self.down(F.relu(self.up(x)).square())


class Block(nn.Module):
    """Attention and MLP, each of which reads the normalised residual stream and adds to it.

    With experts, block number `dense_layers` and all after it have a `Mixture` in place of the MLP, and return its loss
    and its loads beside the stream.
    """

    def __init__(self, config: DecoderConfig, base: DecoderConfig | None = None, number: int = 0) -> None:
        super().__init__()
        self.attn_norm = block_norm(config)
        self.attn = Attention(config, base)
        self.mlp_norm = block_norm(config)
        self.mlp: MLP | Mixture
        self.checkpointing: Mode = "none"
        self.fused = False
        if isinstance(config, Llama) and config.n_experts is not None and number >= config.dense_layers:
            shared = MLP(config, config.n_shared_experts * config.expert_width) if config.n_shared_experts else None
            self.mlp = Mixture(config, shared)
        else:
            self.mlp = MLP(config)

    def linear_numbers(self) -> dict[str, Any]:
        """For `checkpointed`. The router comes after attention, and is the last one without a shared expert."""
        (attention, gated), mlp = self._fused(), self._own_mlp()
        before = 2 if attention else 4
        router = before + 1 if isinstance(self.mlp, Mixture) else None
        linears = None if mlp is None else (router or before) + len(mlp._modules) - bool(gated)
        return {"linears": linears, "router": router, "fused": bool(attention)}

    def _own_mlp(self) -> MLP | None:
        return cast(MLP | None, self.mlp.shared) if isinstance(self.mlp, Mixture) else self.mlp

    def _fused(self) -> tuple[Fused, Fused]:
        """Of q, k and v, and of gate and up; in training alone, as a step of `generate` would copy all weights."""
        if not (self.fused and torch.is_grad_enabled()):
            return None, None
        attn, mlp, fused = self.attn, self._own_mlp(), cast(Fused, "once" if mode_of(self) == "none" else "run again")
        gated = mlp is not None and mlp.activation == "swiglu" and can_multiply_together((mlp.gate, mlp.up))
        return fused if can_multiply_together((attn.q, attn.k, attn.v)) else None, fused if gated else None

    @torch.enable_grad()
    def multiplied_together(self) -> list[tuple[nn.Linear, ...]]:
        """The layers for which one product takes the place of several in training; `Float8` keeps their weights so."""
        (attention, gated), attn, mlp = self._fused(), self.attn, self._own_mlp()
        groups: list[tuple[nn.Linear, ...]] = [(attn.q, attn.k, attn.v)] if attention else []
        return [*groups, (mlp.gate, mlp.up)] if gated and mlp is not None else groups

    def forward(self, x: Tensor, rope: Rope | None, mask: Mask | None, cache: LayerCache | None = None) -> Any:
        """Map the residual stream (batch, length, d_model) to the next one; arguments as in `Attention.forward`.

        Returns:
            the stream, or with a `Mixture` a tuple of the stream, the loss and the loads, as that has them.
        """
        if cache is not None:
            return self._layer(x, rope, mask, cache)
        # Inside forward: FSDP2 and torch.compile then treat the checkpoint as a part of the block.
        args = self._layer, x, rope, mask, None, *self._fused()
        return checkpointed(self.checkpointing, *args, **self.linear_numbers())

    def max_attention_logit(self, x: Tensor, rope: Rope | None, mask: Mask | None) -> Tensor:
        """The largest attention logit for the arguments of `forward`, a scalar: queries and keys are computed again."""
        x = self.attn_norm(x).to(matmul_dtype(x))
        gather_rows = getattr(self.attn, "gather_rows", None)  # of tensor ranks, in the hooks of a call otherwise
        return self.attn.max_attention_logit(x if gather_rows is None else gather_rows(x), rope, mask)

    def _layer(self, x: Tensor, rope: Rope | None, mask: Mask | None, cache: LayerCache | None, *fused: Fused) -> Any:
        dtype = matmul_dtype(x)
        # not None, which a module that somebody has put in their place need not take
        x = x + self.attn(self.attn_norm(x).to(dtype), rope, mask, cache, *filter(None, fused[:1]))
        found = self.mlp(self.mlp_norm(x).to(dtype), *filter(None, fused[1:]))
        return x + found if isinstance(found, Tensor) else (x + found[0], *found[1:])


class Head(nn.Linear):
    """The output head, without a bias: features to logits, or with labels to their loss.

    Tensor ranks may have parts of its vocabulary, see `vocabulary` in `parallel.tensor.plan_of`.

    Attributes:
        softcap: of the logits and of the loss, see `linear_cross_entropy`.
        z_loss: in the gradient of the loss alone, see there.
        compiled: whether the loss is compiled, where that pays; see there.
        token_losses: a list to which each call with labels adds the loss of each label, (batch, length) fp32 nats, 0
            where it does not count.
    """

    z_loss = 0.0
    compiled = False
    token_losses: list[Tensor] | None = None

    def __init__(self, d_model: int, vocab_size: int, softcap: float | None = None) -> None:
        super().__init__(d_model, vocab_size, bias=False)
        self.softcap = softcap

    def forward(self, features: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits (batch, length, vocab_size) of features (batch, length, d_model), or the sum of the labels' nats.

        With labels (batch, length), of which -100 does not count, the full logits never exist.
        """
        if labels is not None:
            each = None if self.token_losses is None else torch.empty(labels.numel(), device=labels.device)
            x, flat = features.flatten(0, 1), labels.flatten()
            how: Any = {"compiled": self.compiled, "each": each, "softcap": self.softcap, "z_loss": self.z_loss}
            nats = linear_cross_entropy(x, self.weight, flat, **how)
            if each is not None and self.token_losses is not None:
                self.token_losses.append(each.view(labels.shape))
            return nats
        weight, group, _ = local_rows(self.weight)
        logits = softcapped(F.linear(features, weight), self.softcap)
        return logits if group is None else whole_logits(logits, self.weight)


class Decoder(nn.Module):
    """A causal transformer: `forward(input_ids)` gives the logits of every next token.

    The constructor draws the weights from torch's random state. Under `torch.device("meta")` nothing is allocated:
    call `to_empty(device=...)` and `init_weights()` later, which give the same values as construction on that device.

    Args:
        config: `Llama(...)` or `GPT2(...)`.
        base: shape of a narrower model whose settings are to hold for this one (muP): see `features`, `init_weights`
            and `Attention`; `MuP.base_config` makes it. None, or the same shape: nothing changes.

    Raises:
        UsageError: more tokens in a row than `max_seq_len`.

    Source: Radford et al. 2019 (https://github.com/openai/gpt-2/blob/master/src/model.py); Touvron et al. 2023
    (https://github.com/meta-llama/llama/blob/main/llama/model.py).
    """

    def __init__(self, config: DecoderConfig, base: DecoderConfig | None = None) -> None:
        super().__init__()
        self.config, self.base = config, base or config
        self.context: ContextParallel | None = None
        self.logit_multiplier = self.base.d_model / config.d_model
        device = torch.empty(0).device
        # Built on meta first, because torch would draw its own initial weights, which `init_weights` draws again.
        with torch.device("meta"):
            self.embed = nn.Embedding(config.vocab_size, config.d_model)
            self.positions: nn.Module
            if config.positions == "learned":
                self.positions = nn.Embedding(config.max_seq_len, config.d_model)
            else:
                self.positions = RotaryPositions(config.head_dim, config.max_seq_len, config.rope_theta)
            self.blocks = nn.ModuleList(Block(config, base, number) for number in range(config.n_layers))
            self.norm = block_norm(config)
            self.head = Head(config.d_model, config.vocab_size, config.logit_softcap)
        self._tie()
        if device.type != "meta":
            self.to_empty(device=device)
            self.init_weights()

    def forward(
        self,
        input_ids: Tensor,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
        cache: KVCache | None = None,
        document_starts: Tensor | None = None,
    ) -> Tensor:
        """Logits of the token after each position, or with `labels` the sum of their cross-entropies.

        Args:
            input_ids: (batch, length) int64 in [0, vocab_size).
            document_ids: (batch, length) integers, a document's tokens side by side; a token sees tokens of its own
                document only. None: all before it.
            labels: (batch, length) int64, the token after each position; -100 does not count. The loss is computed
                in this call, a slice at a time: the full logits never exist, and shards of the head stay gathered.
            cache: keys and values of the tokens before these, to which theirs are added. Not with `document_ids`.
            document_starts: (batch, documents) int32: the position in its row at which each document of `document_ids`
                begins, then `length` as padding. CUDA needs them to attend without a dense mask.

        Returns:
            (batch, length, vocab_size), or a scalar in nats, in training with the losses of experts.
        """
        features, loss = self.features_and_loss(input_ids, document_ids, cache, document_starts)
        if labels is None:
            return self.head(features)
        nats = self.head(features, self.own_part(labels))
        return nats if loss is None else nats + loss

    def pipeline_plan(self) -> dict[str, str]:
        """The stages that have the parts beside the blocks, see `HasStages`."""
        learned = {"positions": "first"} if self.config.positions == "learned" else {}
        return {"embed": "first", **learned, "norm": "last", "head": "last"}

    def stage(
        self,
        hidden: Any,
        blocks: Sequence[nn.Module],
        *,
        last: bool,
        input_ids: Tensor,
        document_ids: Tensor | None = None,
        document_starts: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Any:
        """What one pipeline stage computes, see `HasStages`; the first one embeds, the last one needs `labels`.

        With experts their losses so far go from stage to stage beside the residual stream.
        """
        if hidden is None:
            x = self._embedded(input_ids, document_ids, begin=0)
            loss = None if self.config.n_experts is None else torch.zeros((), device=x.device)
        else:
            x, loss = hidden if isinstance(hidden, tuple) else (hidden, None)
        mask = self._mask(document_ids, document_starts, matmul_dtype(x))
        x, loss = self._through(blocks, x, loss, self._rope(x, input_ids.shape[1], 0), mask)
        if not last:
            return x if loss is None else (x, loss)
        if labels is None:
            raise UsageError("mesh.pipeline: stages give a loss, and no logits: take one process, or tensor ranks")
        nats = self.head(self._normed(x), self.own_part(labels))
        return nats if loss is None else nats + loss

    def own_part(self, rows: Tensor) -> Tensor:
        """The part of rows (batch, length, ...) that this rank has under context parallelism; without it, all."""
        return rows if self.context is None else self.context.own(rows)

    def set_context_parallel(self, context: ContextParallel) -> None:
        """Treat a part of each row: logits and loss are those of the part, `own_part` gives it. Inputs stay whole."""
        for part in self.modules():
            if isinstance(part, Decoder | Attention):
                part.context = context

    def check_context_parallel(self) -> None:
        """Refuse a loss that is made of whole rows."""
        if weight := getattr(self.config, "sequence_balance_weight", 0.0):
            raise UsageError(
                f"mesh.context: decoder.sequence_balance_weight={weight} needs whole rows: leave one of them out"
            )

    def parallel_plan(self) -> dict[str, str]:
        """How the layers are divided over tensor ranks, see `parallel.tensor.plan_of`.

        Raises:
            UsageError: experts, or a norm over the heads of all ranks.
        """
        config = self.config
        if config.n_experts is not None or config.qk_norm == "whole":
            option = "qk_norm=whole" if config.n_experts is None else f"n_experts={config.n_experts}"
            raise UsageError(f"mesh.tensor: decoder.{option} is not divided over ranks: leave mesh.tensor at 1")
        plan = {
            "embed": "embedding_rowwise", "norm": "sequence_parallel", "head": "vocabulary",
            "blocks.*.attn_norm": "sequence_parallel", "blocks.*.mlp_norm": "sequence_parallel",
            "blocks.*.attn": "gather_sequence", "blocks.*.attn.o": "rowwise",
            "blocks.*.attn.q": "colwise", "blocks.*.attn.k": "colwise", "blocks.*.attn.v": "colwise",
            "blocks.*.mlp": "gather_sequence", "blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise",
        }  # fmt: skip
        if self.config.activation == "swiglu":
            plan["blocks.*.mlp.gate"] = "colwise"
        if self.config.positions == "learned":
            plan["positions"] = "embedding_rowwise"
        if self.config.qk_norm:
            plan |= {f"blocks.*.attn.{name}_norm": "replicated_with_grad_allreduce" for name in "qk"}
        return plan

    def compile_blocks(self) -> None:
        """Compile each block in place with `torch.compile`: blocks of one mode share one compilation.

        On CUDA the loss of the head is compiled too.
        """
        for block in self.blocks:
            block.compile()
        self.head.compiled = True

    def fuse_projections(self, fused: bool = True) -> None:
        """Train with one product for queries, keys and values of a block, and one for gate and up; names stay.

        Call it before `set_activation_checkpointing`, where a budget depends on it.
        """
        for block in self.blocks:
            cast(Block, block).fused = fused

    def features(
        self,
        input_ids: Tensor,
        document_ids: Tensor | None = None,
        cache: KVCache | None = None,
        document_starts: Tensor | None = None,
    ) -> Tensor:
        """The input of `head`, (batch, length, d_model), for a loss that applies the head in slices.

        It is scaled by muP's multiplier of the logits, base width / width.
        """
        return self.features_and_loss(input_ids, document_ids, cache, document_starts)[0]

    def features_and_loss(
        self,
        input_ids: Tensor,
        document_ids: Tensor | None = None,
        cache: KVCache | None = None,
        document_starts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`features`, and the losses of experts, in nats summed over tokens, to add to that loss; None: no experts."""
        length, begin = input_ids.shape[1], 0 if cache is None else cache.length
        x = self._embedded(input_ids, document_ids, begin)
        mask = self._mask(document_ids, document_starts, matmul_dtype(x))
        x, loss = self._through(self.blocks, x, None, self._rope(x, length, begin), mask, cache)
        return self._normed(x), loss

    def _embedded(self, input_ids: Tensor, document_ids: Tensor | None, begin: int) -> Tensor:
        """The residual stream before the blocks, of this rank's part of the rows."""
        length = input_ids.shape[1]
        if begin + length > self.config.max_seq_len:
            longest = f"max_seq_len={self.config.max_seq_len}"
            raise UsageError(f"a row of {begin + length} tokens, but {longest}: shorten the rows or raise it")
        x = self.embed(self.own_part(input_ids))
        if isinstance(self.positions, RotaryPositions):
            return x
        positions = _positions_in_documents(input_ids, document_ids, begin)
        return x + self.positions(self.own_part(positions.view(-1, length)).view(*positions.shape[:-1], -1))

    def _through(
        self,
        blocks: Iterable[nn.Module],
        x: Tensor,
        loss: Tensor | None,
        rope: Rope | None,
        mask: Mask | None,
        cache: KVCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream after some blocks, and the losses of their experts added to `loss`."""
        loads: list[tuple[Router, Tensor]] = []  # those of blocks without a backward pass, which are frozen up to there
        for number, block in enumerate(blocks):
            found = block(x, rope, mask) if cache is None else block(x, rope, mask, cache.layers[number])
            if isinstance(found, Tensor):
                x = found
                continue
            x, own, load = found
            loads.append((cast(Mixture, block.mlp).router, load))
            if x.requires_grad:
                count_in_backward(x, loads)
                loads = []
            loss = own if loss is None else loss + own
        return x, loss

    def _rope(self, x: Tensor, length: int, begin: int) -> Rope | None:
        """The rotary tables of this rank's part of the rows."""
        if not isinstance(self.positions, RotaryPositions):
            return None
        rope = self.positions(length, matmul_dtype(x), begin)
        if self.context is None:
            return rope
        own = self.context.positions(length, x.device)
        return rope[0][own], rope[1][own]

    def _normed(self, x: Tensor) -> Tensor:
        """The input of the head."""
        normed = self.norm(x)
        if self.logit_multiplier != 1.0:
            normed = normed * self.logit_multiplier
        return normed.to(matmul_dtype(x))

    def routers(self) -> dict[str, Router]:
        """The routers of the blocks that have experts, by the names of the blocks."""
        blocks = {f"blocks.{number}": cast(Block, block).mlp for number, block in self.blocks.named_children()}
        return {name: mlp.router for name, mlp in blocks.items() if isinstance(mlp, Mixture)}

    def _mask(self, document_ids: Tensor | None, starts: Tensor | None, dtype: torch.dtype) -> Mask | None:
        """What each token sees, for all blocks. Graphs keep the dense mask on a CPU: lengths differ in each batch."""
        if document_ids is None:
            return None
        parts = self.blocks.modules() if document_ids.device.type == "cpu" else ()
        compiled = any(part._compiled_call_impl is not None or "_orig_mod" in part._modules for part in parts)
        if self.context is not None or compiled or torch.compiler.is_compiling():
            return part_mask(self.context, document_ids)
        packed = packed_documents(document_ids, starts, dtype, self.config.head_dim)
        return part_mask(None, document_ids) if packed is None else packed

    def set_activation_checkpointing(self, given: Checkpointing | None) -> None:
        """Choose the activations that the blocks keep for the backward pass. Gradients are the same.

        Args:
            given: a mode: `none` (all of them), `cheap` (without running a matrix product again), `selective` (about
                half of those) or `full` (each block's input only). Or `{"budget": 0.5}`, the share of the activations'
                bytes to keep, from 0 (`full`) to 1 (`none`): blocks then have different modes. None is `none`.

        Raises:
            UsageError: another mode, or another share.
        """
        fused = any(cast(Block, block).fused for block in self.blocks)
        modes = modes_of_blocks(self.config, check_checkpointing(given), self.config.max_seq_len, fused)
        for block, mode in zip(self.blocks, modes, strict=True):
            cast(Block, block).checkpointing = mode

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Draw every weight again, and fill the tables of positions; shards get the values of a run on one device.

        Matrices and embeddings are normal with `init_std`; those that write to the residual stream (`attn.o`,
        `mlp.down`, and `down` of experts), of which there are 2 n_layers, with `init_std / sqrt(2 n_layers)`, or zero
        with `zero_init_outputs`. Biases are zero, scales of norms one. Both families use this rule: Llama's own was not
        published. With a `base`, the standard deviation of matrices in blocks is divided by
        sqrt(inputs in this model / inputs in the base model).

        Args:
            generator: source of randomness on the weights' device, in the same state on every rank. Default: torch's.

        Source: GPT-2's "scale the weights of residual layers at initialization by 1/sqrt(N)", as in
        https://github.com/karpathy/nanoGPT/blob/master/model.py.
        """
        scaled = 0.0 if self.config.zero_init_outputs else self.config.init_std / (2 * self.config.n_layers) ** 0.5
        whole, here = whole_of(self), parameters_by_name(self)
        weights = {weight: here[name] for name, weight in parameters_by_name(whole).items() if name in here}
        modules, device = dict(self.named_modules()), next(self.parameters()).device
        for name, module in whole.named_modules():
            own = modules.get(name)
            if isinstance(module, (nn.Linear, nn.Embedding, Router, Experts)):
                for local, weight in module.named_parameters():
                    path = f"{name}.{local}".removesuffix(".weight")
                    # what other stages have is drawn all the same, so that the values are those of one process
                    mine = weights[weight] if weight in weights else torch.empty(weight.shape, device=device)
                    if local == "bias":
                        mine.zero_()
                        continue
                    std = scaled if path.endswith(_RESIDUAL_OUTPUTS) else self.config.init_std
                    _draw_normal(mine, std * self._growth(path) ** -0.5, generator)
                if isinstance(own, Router) and own.bias is not None:
                    own.bias.zero_()
            elif isinstance(own, (nn.LayerNorm, nn.RMSNorm, RotaryPositions)):
                own.reset_parameters()

    def _growth(self, name: str) -> float:
        """Inputs of a layer over its inputs in the base model; 1 outside the blocks."""
        if not name.startswith("blocks."):
            return 1.0
        here, base = self.config, self.base
        if name.endswith("mlp.down"):
            return here.ffn_width / base.ffn_width
        if name.endswith(_EXPERT_OUTPUTS):
            return cast(Llama, here).expert_width / cast(Llama, base).expert_width
        return here.d_model / base.d_model

    def _tie(self) -> None:
        if self.config.tie_embeddings and self.embed is not None and self.head is not None:  # None on other stages
            self.head.weight = self.embed.weight

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "Decoder":
        # `to_empty` replaces the parameters of the meta device name by name, which would untie the two.
        super()._apply(fn, recurse)
        self._tie()
        return self


def _positions_in_documents(input_ids: Tensor, document_ids: Tensor | None, begin: int) -> Tensor:
    """Position of each token in its document, counted from 0: (length,), or (batch, length) with documents."""
    positions = torch.arange(begin, begin + input_ids.shape[1], device=input_ids.device)
    if document_ids is None:
        return positions
    starts = F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True)
    return positions - torch.where(starts, positions, 0).cummax(dim=1).values


def _draw_normal(weight: Tensor, std: float, generator: torch.Generator | None) -> None:
    """Fill `weight`, which may be a DTensor, in place from a normal distribution of mean 0.

    The numbers are drawn in fp32, and rounded for a weight of 16 bits. For a shard every rank draws the whole weight
    and keeps its part, so the values do not depend on the number of devices. torch's own `normal_` gives each rank of a
    CPU mesh the same numbers for its shard.
    """
    dtype = torch.promote_types(weight.dtype, torch.float32)
    if not isinstance(weight, DTensor) and weight.dtype == dtype:
        weight.normal_(0.0, std, generator=generator)
        return
    whole = torch.empty(weight.shape, dtype=dtype, device=weight.device).normal_(0.0, std, generator=generator)
    if isinstance(weight, DTensor):
        whole = distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None)
    weight.copy_(whole)
