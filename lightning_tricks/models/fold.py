"""Multiply muP's multipliers into the weights, for programs that know only the plain Llama or GPT-2."""

import torch
from torch import Tensor

from lightning_tricks._errors import UsageError
from lightning_tricks.models.attention import Attention
from lightning_tricks.models.decoder import Decoder


@torch.no_grad()
def folded_state(decoder: Decoder) -> dict[str, Tensor]:
    """The state dict of `Decoder(decoder.config)`, without a base, that gives the same logits as `decoder`.

    The multiplier of the logits goes into the head, that of the attention logits into the queries, or into the norm of
    the queries if there is one. To continue training, use the unfolded weights: muP's learning rates fit only those.

    Args:
        decoder: with weights, not sharded.

    Raises:
        UsageError: the head is tied to the embedding, which the multiplier would change as well.
    """
    state = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    if decoder.logit_multiplier != 1.0:
        if decoder.config.tie_embeddings:
            raise UsageError(
                "tie_embeddings=True: muP's multiplier of the logits cannot be folded into a head that is the "
                f"embedding too: multiply the logits by {decoder.logit_multiplier:g} in the other program, or untie"
            )
        state["head.weight"] *= decoder.logit_multiplier
    for name, module in decoder.named_modules():
        if isinstance(module, Attention) and module.scale is not None:
            target = f"{name}.q_norm." if decoder.config.qk_norm else f"{name}.q."
            for key in state:
                if key.startswith(target):
                    state[key] *= module.scale * module.head_dim**0.5
    return state
