"""Norms of one optimizer's gradients, under every strategy and precision."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from lightning_tricks._find_modules import clean_name, find_blocks
from lightning_tricks._trainer import is_a, unwrapped
from lightning_tricks.optim import clip_grad_norm, clip_grad_norm_fsdp1, grad_norms_of


def clip_by_norm(trainer: Any, optimizer: Any, max_norm: float | None) -> Tensor:
    """Clip an optimizer's gradients so that their norm is at most `max_norm`; None measures only.

    Returns:
        The norm from before, without the scale of a scaled loss, a 0-dim tensor. Every rank must call.
    """
    if is_a(trainer.strategy, "FSDPStrategy"):
        norm = clip_grad_norm_fsdp1(trainer.strategy.model, max_norm)
    else:
        norm = clip_grad_norm(_parameters(optimizer), max_norm)
    return _unscaled(norm, trainer, optimizer)


def norms_by_part(trainer: Any, module: nn.Module, optimizer: Any, per: str) -> tuple[list[str], Tensor]:
    """Names and norms of the gradients of each block (`per="block"`) or else of each parameter group."""
    parts = parameters_by_block(module, _parameters(optimizer)) if per == "block" else _groups(optimizer)
    return list(parts), _unscaled(grad_norms_of(list(parts.values())), trainer, optimizer)


def parameters_by_block(module: nn.Module, parameters: Iterable[Tensor]) -> dict[str, list[Tensor]]:
    """Which of `parameters` are in which repeated block; those outside go by the largest module without a block."""
    wanted, blocks = {id(parameter) for parameter in parameters}, list(find_blocks(module))
    parts: dict[str, list[Tensor]] = {}
    for name, parameter in module.named_parameters():
        if id(parameter) not in wanted:
            continue
        words = clean_name(name).split(".")
        paths = [".".join(words[:end]) for end in range(1, len(words) + 1)]
        free = (path for path in paths if path in blocks or not any(block.startswith(f"{path}.") for block in blocks))
        parts.setdefault(next(free), []).append(parameter)
    return parts


def _parameters(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _groups(optimizer: Any) -> dict[str, list[Tensor]]:
    return {group.get("name", str(index)): group["params"] for index, group in enumerate(optimizer.param_groups)}


def _unscaled(norms: Tensor, trainer: Any, optimizer: Any) -> Tensor:
    """Divide by the scale of fp16's scaler where gradients still carry it.

    So it is with a fused optimizer, which unscales in its step, and in manual optimization before the step.
    """
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is None or not scaler.is_enabled():
        return norms
    stage = scaler._per_optimizer_states[id(unwrapped(optimizer))]["stage"]
    scale = scaler._get_scale_async()
    return norms if stage.name != "READY" or scale is None else norms / scale
