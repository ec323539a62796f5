"""The decoder's two norms."""

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_tricks.models.decoder_config import DecoderConfig


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
        # Under autocast the scale is fp32 and queries are bf16, a mixture for which torch has no fused kernel.
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def block_norm(config: DecoderConfig) -> nn.Module:
    """The norm of the residual stream in the config's family."""
    if config.norm == "rms":
        return RMSNorm(config.d_model, config.norm_eps)
    return nn.LayerNorm(config.d_model, config.norm_eps, bias=config.bias)
