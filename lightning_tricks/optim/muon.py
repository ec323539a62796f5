"""Muon: SGD whose momentum is orthogonalized, so that a weight matrix moves equally far in every direction."""

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_tricks._errors import UsageError
from lightning_tricks._tensors import local, sharded_like
from lightning_tricks.optim.matrix_layout import MatrixLayout
from lightning_tricks.optim.orthogonalize import SCALES, common_factor, orthogonalize_all
from lightning_tricks.optim.whole_matrices import on_whole_matrices

_FIRST_MOMENTUM = 0.85  # where the warmup of the momentum begins


class Muon(Optimizer):
    """SGD with momentum whose update is orthogonalized by Newton-Schulz; for hidden matrices.

    A 2-D weight gets the same bits as from `torch.optim.Muon`. In addition this class takes stacks of experts (each
    expert is a matrix), convolutions (flattened to (out, rest)), fused projections (each projection is a matrix) and
    weights sharded by FSDP2 (each rank orthogonalizes some of the whole matrices); it has a warmup of the momentum and
    cautious weight decay. MuonAdamW gives embeddings, heads, norms and biases to AdamW.

    Args:
        params: parameters, or groups; the keys `roles` and `layouts` of `decay_groups` tell the matrices in each.
        lr: learning rate.
        momentum: weight of the old average in the new one, from 0 on and below 1.
        nesterov: orthogonalize `momentum` * the new average + (1 - `momentum`) * the gradient, not the average alone.
        weight_decay: decoupled; a step multiplies the weight by 1 - lr * weight_decay.
        adjust_lr_fn: `match_rms_adamw`: an update as large as AdamW's, so that learning rate and decay of AdamW fit;
            `original`: a learning rate of its own, about 0.02.
        ns_steps: steps of Newton-Schulz.
        momentum_warmup_steps: steps over which the momentum rises from 0.85; 0 for none. 300 in the records.
        cautious_weight_decay: decay only where the update moves a weight towards 0.

    Raises:
        UsageError: an option out of its range; a Tensor as learning rate; a parameter of one dimension, or of three
            that is neither a stack of experts nor a convolution.

    Source: Keller Jordan 2024, https://kellerjordan.github.io/posts/muon/; Liu et al. 2025 (Moonlight),
        https://arxiv.org/abs/2502.16982; cautious decay: Chen et al. 2025, https://arxiv.org/abs/2510.12402; the warmup
        of the momentum: https://github.com/KellerJordan/modded-nanogpt.
    """

    skips_on_device = True
    """A step in which `self.found_inf`, a 0-dim tensor, is 1 changes nothing, and nothing is read on the host."""

    def __init__(
        self,
        params: Iterable,
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        adjust_lr_fn: Literal["match_rms_adamw", "original"] = "original",
        ns_steps: int = 5,
        momentum_warmup_steps: int = 0,
        cautious_weight_decay: bool = False,
    ) -> None:
        if isinstance(lr, Tensor):
            raise UsageError("Muon.lr is a Tensor: give a float, which the schedule sets at each step")
        if not (lr >= 0 and math.isfinite(lr)):
            raise UsageError(f"Muon.lr={lr!r}: give a finite number, 0 or more")
        if not 0 <= momentum < 1:
            raise UsageError(f"Muon.momentum={momentum!r}: give a number from 0 on and below 1")
        if adjust_lr_fn not in SCALES:
            raise UsageError(f"Muon.adjust_lr_fn={adjust_lr_fn!r}: give one of {', '.join(SCALES)}")
        if not 1 <= ns_steps < 100:
            raise UsageError(f"Muon.ns_steps={ns_steps!r}: give a whole number from 1 to 99")
        if momentum_warmup_steps < 0:
            raise UsageError(f"Muon.momentum_warmup_steps={momentum_warmup_steps!r}: give 0 or more steps")
        settings = {
            "lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay,
            "adjust_lr_fn": adjust_lr_fn, "ns_steps": ns_steps, "momentum_warmup_steps": momentum_warmup_steps,
            "cautious_weight_decay": cautious_weight_decay,
        }  # fmt: skip
        super().__init__(params, settings)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take a group; refuse parameters that are no matrices."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for index, param in enumerate(group["params"]):
            role = group["roles"][index] if "roles" in group else "matrix"
            if param.ndim < 2 or (param.ndim == 3 and "layouts" not in group) or role not in ("matrix", "expert"):
                name = f"'{group['param_names'][index]}'" if "param_names" in group else f"parameter {index} of a group"
                raise UsageError(
                    f"Muon: {name}, of shape {tuple(param.shape)} and role {role}, is no hidden matrix: give it to "
                    "AdamW, as MuonAdamW does, or make groups by decay_groups, which tells experts from convolutions"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step; under FSDP2 every rank must call."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        weights = [weight for weight in _weights(group) if weight.param.grad is not None]
        begin = 0
        while begin < len(weights):
            mesh = getattr(weights[begin].param, "device_mesh", None)
            batch = weights[begin : begin + (1 if mesh is None else mesh.size())]
            self._step_batch(batch, group)
            begin += len(batch)

    def _step_batch(self, weights: list["_Weight"], group: dict[str, Any]) -> None:
        """Step one weight, or as many sharded weights as there are ranks; only their updates are in memory at once."""
        skip = getattr(self, "found_inf", None)
        updates = [self._averaged(weight, group, skip) for weight in weights]
        factors = [common_factor(weight.layout, group["adjust_lr_fn"]) for weight in weights]

        def compute(number: int, whole: Tensor) -> Tensor:
            # of a stack that is sharded by experts, this rank has some
            layout = weights[number].layout._replace(shape=tuple(whole.shape))
            return orthogonalize_all(whole, layout, group["adjust_lr_fn"], group["ns_steps"])

        dtype = torch.float32 if None in factors else torch.bfloat16
        found = on_whole_matrices(updates, compute, dtype)
        for weight, update, factor in zip(weights, found, factors, strict=True):
            _apply(local(weight.param), update, 1.0 if factor is None else factor, group, skip)

    def _averaged(self, weight: "_Weight", group: dict[str, Any], skip: Tensor | None) -> Tensor:
        """The average of the gradients that this step orthogonalizes; a DTensor where ranks must exchange shards."""
        param = weight.param
        grad, state = cast(Tensor, param.grad), self.state[param]
        if grad.is_sparse or grad.is_complex():
            raise UsageError(f"Muon: a gradient of shape {tuple(grad.shape)} is sparse or complex: give it to AdamW")
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
        average, own = local(state["momentum_buffer"]), local(grad)
        momentum = self._momentum(state, group, own.device, skip)
        averaged = average.lerp(own, _lerp_weight(1 - momentum, average.dtype))
        update = own.lerp(averaged, _lerp_weight(momentum, own.dtype)) if group["nesterov"] else averaged
        average.copy_(averaged if skip is None else torch.where(skip > 0, average, averaged))
        if not isinstance(grad, DTensor) or weight.is_local():
            return update
        return sharded_like(grad, update)

    def _momentum(
        self, state: dict[str, Any], group: dict[str, Any], device: torch.device, skip: Tensor | None
    ) -> float | Tensor:
        """The momentum of this step; skipped steps do not count in its warmup."""
        target: float = group["momentum"]
        if not group["momentum_warmup_steps"]:
            return target
        step = state.get("step", torch.zeros((), device=device)).to(device)  # FSDP2 loads it to the host
        state["step"] = step
        first = min(_FIRST_MOMENTUM, target)
        momentum = first + (target - first) * (step / group["momentum_warmup_steps"]).clamp(max=1)
        step += 1 if skip is None else 1 - skip
        return momentum


class _Weight(NamedTuple):
    """A parameter and the matrices in it."""

    param: Tensor
    layout: MatrixLayout

    def is_local(self) -> bool:
        """Whether it is a stack of which each rank has whole experts: sharded by experts, or not at all."""
        placements = getattr(self.param, "placements", ())
        return self.layout.stacked and all(place.is_replicate() or place.is_shard(0) for place in placements)


def _weights(group: dict[str, Any]) -> list[_Weight]:
    """The parameters that a group has in this step: BF16True, DeepSpeed and FSDP1 put others in their place."""
    params = group["params"]
    if any(param.ndim < 2 for param in params):
        raise UsageError(
            "Muon: its parameters have become flat, as DeepSpeed's ZeRO and FSDP1 make them, so that no matrix is "
            "whole: take FSDP2Strategy, or AdamW"
        )
    layouts = group.get("layouts") or [None] * len(params)
    pairs = zip(params, layouts, strict=True)
    return [_Weight(param, MatrixLayout.from_plain(layout, param.shape)) for param, layout in pairs]


def _lerp_weight(number: float | Tensor, dtype: torch.dtype) -> Any:
    """`number` as `lerp` takes it: a float, or a tensor of the same dtype as its other arguments."""
    return number.to(dtype) if isinstance(number, Tensor) else number


def _apply(param: Tensor, update: Tensor, factor: float, group: dict[str, Any], skip: Tensor | None) -> None:
    """Decay a weight and add its update, in place; both are local tensors."""
    before = None if skip is None else param.clone()
    decay = group["lr"] * group["weight_decay"]
    if not group["cautious_weight_decay"]:
        param.mul_(1 - decay)
    else:
        param.sub_(param * (update * param >= 0), alpha=decay)
    param.add_(update, alpha=-group["lr"] * factor)
    if before is not None and skip is not None:
        param.copy_(torch.where(skip > 0, before, param))
