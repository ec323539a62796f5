"""Memory of training as a formula: weights, gradients, optimizer state and activations, before anything is built.

`parallel.memory_trace` traces the real step in its place; the command `plan` shows both where they differ.
"""

from dataclasses import dataclass

from lightning_tricks._core.errors import UsageError
from lightning_tricks.accounting.flops import Checkpointing


@dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes of one device.

    Attributes:
        weights: of the parameters.
        gradients: of the parameters.
        optimizer: state of the optimizer.
        activations: what the forward pass keeps for the backward pass.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """The sum."""
        return self.weights + self.gradients + self.optimizer + self.activations


def training_memory(
    N: int,  # noqa: N803, the field's letters
    B: int,  # noqa: N803
    S: int,  # noqa: N803
    L: int,  # noqa: N803
    D: int,  # noqa: N803
    activation_checkpointing: Checkpointing = "none",
) -> MemoryBreakdown:
    """Memory to train a transformer with AdamW in mixed precision on one device, from five numbers.

    Weights, gradients and AdamW's two averages in fp32 take 16 bytes a parameter. A layer keeps 34 bytes a token and
    unit of width in 16 bits, with fused attention and an MLP of width 4 D; with `full` checkpointing its input alone,
    2 bytes, and one layer at a time all of it.

    Args:
        N: parameters.
        B: rows of a micro-batch.
        S: tokens in a row.
        L: layers.
        D: width of the residual stream.
        activation_checkpointing: `none` or `full`.

    Raises:
        UsageError: a number below 1; another mode.

    Source: Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198, equation 2 without the attention scores, which
        fused attention does not keep.
    """
    for name, value in {"N": N, "B": B, "S": S, "L": L, "D": D}.items():
        if value < 1:
            raise UsageError(f"training_memory: {name}={value}: give a number of at least 1")
    if activation_checkpointing not in ("none", "full"):
        raise UsageError(f"activation_checkpointing={activation_checkpointing!r}: this formula knows none and full")
    unit = B * S * D
    kept = 34 * L * unit if activation_checkpointing == "none" else 2 * L * unit + 34 * unit
    return MemoryBreakdown(4 * N, 4 * N, 8 * N, kept)


def training_memory_gb(N: int, B: int, S: int, L: int, D: int) -> float:  # noqa: N803
    """`training_memory` without checkpointing, in 10^9 bytes.

    Example:
        >>> round(training_memory_gb(7 * 10**9, B=1, S=4096, L=32, D=4096))  # 112 of them without activations
        130
    """
    return training_memory(N, B, S, L, D).total / 1e9
