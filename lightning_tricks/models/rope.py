"""Rotary positions: rotate each query and key by an angle that grows with its position in the row."""

import torch
from torch import Tensor, nn


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
