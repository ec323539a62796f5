"""AdamW's next update from a gradient, by the state that a checkpoint holds: the part that depends on the data."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tricks._find_modules import clean_name

_CLASSES = ("AdamW", "Adam")
_STATE = {"exp_avg", "exp_avg_sq", "step"}


@dataclass(frozen=True)
class Moments:
    """The state of one parameter.

    Args:
        mean: AdamW's `exp_avg`.
        square: AdamW's `exp_avg_sq`.
        steps: done.
        group: its betas, eps and `lr_scale`, the factor of its learning rate.
    """

    mean: Tensor
    square: Tensor
    steps: int
    group: Mapping[str, Any]

    def update(self, gradient: Tensor) -> Tensor:
        """The step that AdamW takes against a gradient, in units of the learning rate, which may be 0 just now.

        Without the weight decay, which no document changes.
        """
        (beta1, beta2), steps = self.group["betas"], self.steps + 1
        mean = self.mean.lerp(gradient, 1 - beta1) / (1 - beta1**steps)
        square = (beta2 * self.square + (1 - beta2) * gradient.square()) / (1 - beta2**steps)
        return self.group.get("lr_scale", 1.0) * mean / (square.sqrt() + self.group["eps"])


@dataclass(frozen=True)
class AdamUpdate:
    """The update of all parameters, after the clip of the recipe.

    Args:
        moments: of each parameter.
        clip_val: the Trainer's `gradient_clip_val`; None or 0 for no clip.
        clip_algorithm: the Trainer's `gradient_clip_algorithm`: `value`, or by norm.
    """

    moments: Sequence[Moments]
    clip_val: float | None
    clip_algorithm: str | None

    def __call__(self, gradient: Sequence[Tensor], norm: float) -> Iterator[Tensor]:
        """Each parameter's update, one after the other: all together would need the memory of a gradient.

        Args:
            gradient: of the mean over the batch's tokens.
            norm: of the gradient.
        """
        by_value = self.clip_algorithm == "value"
        factor = min(1.0, self.clip_val / (norm + 1e-6)) if self.clip_val and not by_value else 1.0
        for part, moments in zip(gradient, self.moments, strict=True):
            clipped = part.clamp(-self.clip_val, self.clip_val) if self.clip_val and by_value else part * factor
            yield moments.update(clipped)


def moments_of(checkpoint: Mapping[str, Any], module: nn.Module) -> list[Moments] | None:
    """The state of each trainable parameter, on its device in fp32.

    Returns:
        None where the checkpoint holds no plain state of AdamW or Adam for exactly these parameters.
    """
    states = checkpoint.get("optimizer_states") or []
    if len(states) != 1 or checkpoint.get("optimizer_class") not in _CLASSES:
        return None
    found: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
    for group in states[0]["param_groups"]:
        for name, number in zip(group.get("param_names", ()), group["params"], strict=False):
            found[clean_name(name)] = states[0]["state"].get(number, {}), group
    moments = []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        state, group = found.get(clean_name(name), ({"unknown": 0}, {}))
        if (state and set(state) != _STATE) or group.get("amsgrad") or group.get("maximize"):
            return None
        mean, square = (
            state[key].to(parameter.device, torch.float32) if state else torch.zeros_like(parameter.data)
            for key in ("exp_avg", "exp_avg_sq")
        )
        moments.append(Moments(mean, square, int(state.get("step", 0)), group))
    return moments
