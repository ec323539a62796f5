"""Muon: SGD whose momentum is orthogonalized, so that a weight matrix moves equally far in every direction."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from lightning_tricks._errors import UsageError
from lightning_tricks._tensors import local, sharded_like
from lightning_tricks.optim.matrix_layout import MatrixLayout

Compute = Callable[[int, Tensor], Tensor]  # (index of a matrix, the matrix) -> a matrix of the same shape


def map_unsharded(matrices: Sequence[Tensor], compute: Compute, dtype: torch.dtype) -> list[Tensor]:
    """`compute` of each matrix; every rank must call, with the same matrices in the same order.

    Matrices that are sharded along one mesh dimension, as by FSDP2, are exchanged in batches, one matrix for each rank:
    each rank gathers one of them, so that no matrix is computed twice. Every other DTensor is gathered on every rank.

    Args:
        matrices: plain tensors or DTensors; the sharded ones are sent in bf16.
        compute: of (index in `matrices`, matrix).
        dtype: of the result of `compute`.

    Returns:
        Local tensors: the result for each matrix, or this rank's shard of it.
    """
    results: dict[int, Tensor] = {}
    sharded: dict[tuple[Any, int], list[int]] = {}
    for number, matrix in enumerate(matrices):
        if not isinstance(matrix, DTensor):
            results[number] = compute(number, matrix)
        elif (mesh_dim := _sharded_dim(matrix)) is not None:
            sharded.setdefault((matrix.device_mesh, mesh_dim), []).append(number)
        else:
            whole = compute(number, matrix.full_tensor())
            shards = distribute_tensor(whole, matrix.device_mesh, matrix.placements, src_data_rank=None)
            results[number] = shards.to_local()
    for (mesh, mesh_dim), numbers in sharded.items():
        group = mesh.get_group(mesh_dim)
        for begin in range(0, len(numbers), group.size()):
            batch = numbers[begin : begin + group.size()]
            found = _exchange([_Sharded(matrices[number], mesh_dim) for number in batch], batch, compute, dtype, group)
            results |= zip(batch, found, strict=True)
    return [results[number] for number in range(len(matrices))]


def _sharded_dim(matrix: DTensor) -> int | None:
    """The one mesh dimension over which a matrix is sharded, if all others hold copies; else None."""
    shards = [dim for dim, placement in enumerate(matrix.placements) if type(placement) is Shard]
    copies = [placement for placement in matrix.placements if type(placement) is Replicate]
    return shards[0] if len(shards) == 1 and len(copies) == len(matrix.placements) - 1 else None


class _Sharded:
    """A matrix of which each rank of a mesh dimension has some rows, or columns."""

    def __init__(self, matrix: Any, mesh_dim: int) -> None:
        self.local: Tensor = matrix.to_local()
        self.dim: int = matrix.placements[mesh_dim].dim
        self.shape, world = matrix.shape, matrix.device_mesh.size(mesh_dim)
        chunk = -(-self.shape[self.dim] // world)
        left = [self.shape[self.dim] - rank * chunk for rank in range(world)]
        self.lengths = [max(0, min(chunk, length)) for length in left]  # of each rank's shard, in the sharded dimension
        self._slice_numel = self.shape.numel() // max(self.shape[self.dim], 1)

    def numels(self) -> list[int]:
        """Number of elements in each rank's shard."""
        return [length * self._slice_numel for length in self.lengths]

    def shard(self, flat: Tensor, length: int) -> Tensor:
        """The flat elements of a shard in its shape."""
        return flat.view([length if dim == self.dim else size for dim, size in enumerate(self.shape)])


def _exchange(
    batch: list[_Sharded], numbers: list[int], compute: Compute, dtype: torch.dtype, group: dist.ProcessGroup
) -> list[Tensor]:
    """This rank's shards of the results; rank j of the group computes the j-th matrix."""
    rank, world = group.rank(), group.size()
    device = batch[0].local.device
    own = batch[rank] if rank < len(batch) else None
    # elements of this rank's shard of every matrix, and of every rank's shard of the matrix that this rank computes
    shard_sizes = [matrix.local.numel() for matrix in batch] + [0] * (world - len(batch))
    own_sizes = own.numels() if own else [0] * world
    received = torch.empty(sum(own_sizes), dtype=torch.bfloat16, device=device)
    dist.all_to_all_single(
        received, torch.cat([matrix.local.bfloat16().flatten() for matrix in batch]), own_sizes, shard_sizes, group
    )
    back = torch.empty(0, dtype=dtype, device=device)
    if own is not None:
        shards = [own.shard(*pair) for pair in zip(received.split(own_sizes), own.lengths, strict=True)]
        whole = compute(numbers[rank], torch.cat(shards, own.dim)).to(dtype)
        back = torch.cat([shard.flatten() for shard in whole.split(own.lengths, own.dim)])
    result = torch.empty(sum(shard_sizes), dtype=dtype, device=device)
    dist.all_to_all_single(result, back, shard_sizes, own_sizes, group)
    return [
        matrix.shard(flat, matrix.local.shape[matrix.dim])
        for matrix, flat in zip(batch, result.split(shard_sizes)[: len(batch)], strict=True)
    ]


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
        found = map_unsharded(updates, compute, dtype)
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
