"""Newton-Schulz: the nearest matrix with orthonormal rows or columns, approximately, by a few products in bf16."""

import math

import torch
from torch import Tensor

from lightning_tricks.optim.matrix_layout import MatrixLayout

COEFFICIENTS = (3.4445, -4.775, 2.0315)
EPS = 1e-7


def orthogonalize(matrix: Tensor, steps: int = 5) -> Tensor:
    """U S V^T with singular values S of about 0.7 to 1.15, of a matrix with the same singular vectors U and V.

    Args:
        matrix: (..., rows, columns); leading dimensions are a batch of matrices.
        steps: of the iteration.

    Returns:
        bf16, of the same shape. A single matrix has the bits that `torch.optim.Muon` computes.

    Source: Keller Jordan 2024, https://kellerjordan.github.io/posts/muon/, which gives the coefficients.
    """
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    norm = x.norm() if x.ndim == 2 else x.norm(dim=(-2, -1), keepdim=True)
    x = x / norm.clamp(min=EPS)
    add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def scale_to_rms(rows: int, columns: int) -> float:
    """The factor that gives an orthogonalized update the root mean square of AdamW's updates, about 0.2.

    Source: Liu et al. 2025 (Moonlight), https://arxiv.org/abs/2502.16982, section 2.2.
    """
    return 0.2 * math.sqrt(max(rows, columns))


def scale_by_shape(rows: int, columns: int) -> float:
    """The factor of the first Muon, which lets tall matrices take larger steps: sqrt(max(1, rows / columns)).

    Source: `zeropower_via_newtonschulz5` and its use in https://github.com/KellerJordan/Muon/blob/master/muon.py.
    """
    return math.sqrt(max(1.0, rows / columns))


SCALES = {"match_rms_adamw": scale_to_rms, "original": scale_by_shape}


def common_factor(layout: MatrixLayout, scale: str) -> float | None:
    """The factor of all matrices of a weight, `match_rms_adamw` or `original`; None where they have different ones."""
    factors = {SCALES[scale](*sizes) for sizes in layout.sizes}
    return factors.pop() if len(factors) == 1 else None


def orthogonalize_all(weight: Tensor, layout: MatrixLayout, scale: str, steps: int) -> Tensor:
    """Orthogonalize each matrix of a weight. The result is bf16; fp32 and already scaled if `common_factor` is None."""
    matrices = layout.split(weight)
    if len(matrices) == 1:
        found = [orthogonalize(matrices[0], steps)]
    elif len({matrix.shape for matrix in matrices}) == 1:
        batch = torch.cat(matrices) if layout.stacked else torch.stack(matrices)
        found = [part.view(matrices[0].shape) for part in orthogonalize(batch, steps).chunk(len(matrices))]
    else:
        found = [orthogonalize(matrix, steps) for matrix in matrices]
    if common_factor(layout, scale) is None:
        pairs = zip(found, layout.sizes, strict=True)
        found = [matrix.float() * SCALES[scale](*sizes) for matrix, sizes in pairs]
    return layout.join(found)
