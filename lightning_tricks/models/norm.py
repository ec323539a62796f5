"""The decoder's two norms, and the dtype in which the linear layers after them work."""

import torch
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
        # Under autocast the scale is fp32 and queries are bf16: mixed, torch would leave its fused kernel and warn.
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def block_norm(config: DecoderConfig) -> nn.Module:
    """The norm of the residual stream that the config's family uses."""
    if config.norm == "rms":
        return RMSNorm(config.d_model, config.norm_eps)
    return nn.LayerNorm(config.d_model, config.norm_eps, bias=config.bias)


def matmul_dtype(x: Tensor) -> torch.dtype:
    """The dtype that a linear layer gives for `x`: its own, or autocast's.

    A result used by several layers is cast to it once; left alone, autocast casts it for each of them, forward and
    backward (2 to 5 % of a training step on a CPU).
    """
    device = x.device.type
    return torch.get_autocast_dtype(device) if autocasts(device) else x.dtype


def autocasts(device: str) -> bool:
    """Whether autocast is on for a type of device, such as "cuda".

    Traced by `torch.compile` into a constant. `torch.amp.is_autocast_available` would not be in torch 2.11.
    """
    # The meta device, where a model is planned and not run, knows no autocast and would raise.
    return device != "meta" and torch.is_autocast_enabled(device)
