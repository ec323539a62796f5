"""Muon: SGD whose momentum is orthogonalized, so that a weight matrix moves equally far in every direction."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice, repeat
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_tricks._core.errors import UsageError, check_choice
from lightning_tricks._core.tensors import local, sharded_like
from lightning_tricks.accounting import device_speed
from lightning_tricks.optim.adamw_cautious_decay import decay_towards_zero_
from lightning_tricks.optim.map_unsharded import RankGroup, map_unsharded
from lightning_tricks.optim.matrix_layout import MatrixLayout
from lightning_tricks.optim.normuon import normalize_rows, shard_dims

__all__ = ["Muon"]

Coefficients = Literal["keller_jordan", "polar_express"]
_POLAR_EXPRESS = (  # as the paper's algorithm 1 has them, before the safety factor
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
SAFETY = 1.01  # a singular value that bf16 rounds above 1 would grow in the next step
# (a, b, c) of the polynomial a x + b x^3 + c x^5 of each step of the iteration; further steps repeat the last
COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "keller_jordan": ((3.4445, -4.775, 2.0315),),
    "polar_express": (
        *((a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in _POLAR_EXPRESS), (1.875, -1.25, 0.375),
    ),
}  # fmt: skip
EPS = 1e-7


def orthogonalize(
    matrix: Tensor,
    steps: int = 5,
    dtype: torch.dtype = torch.bfloat16,
    coefficients: Coefficients = "keller_jordan",
) -> Tensor:
    """U S V^T with singular values S near 1, of a matrix with the same singular vectors U and V.

    After five steps, singular values from 0.001 of the matrix's norm on are 0.47 to 1.20 with `keller_jordan`, and 0.84
    to 1.13 with `polar_express`; those from 0.01 on are 0.68 to 1.14, and 0.87 to 1.13.

    Args:
        matrix: (..., rows, columns); leading dimensions are a batch of matrices. It is rounded to bf16 first.
        steps: of the iteration.
        dtype: in which the iteration computes.
        coefficients: one polynomial for all steps, or one for each.

    Returns:
        bf16, of the same shape. A single matrix has the bits that `torch.optim.Muon` computes, if `dtype` is bf16 and
        the coefficients are `keller_jordan`; a batch, and fp32, round otherwise.

    Source: Keller Jordan 2024, https://kellerjordan.github.io/posts/muon/, and Amsel et al. 2025 (Polar Express),
        https://arxiv.org/abs/2505.16932, algorithm 1, which give the coefficients.
    """
    x = matrix.bfloat16().to(dtype)
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    norm = x.norm() if x.ndim == 2 else x.norm(dim=(-2, -1), keepdim=True)
    if coefficients == "polar_express":
        norm = norm * SAFETY
    x = x / norm.clamp(min=EPS)
    add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
    polynomials = COEFFICIENTS[coefficients]
    for a, b, c in islice(chain(polynomials, repeat(polynomials[-1])), steps):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    # a CPU adds a transposed update to its weight in ten times the time
    return (x.mT.contiguous() if is_tall else x).bfloat16()


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


def orthogonalize_all(weights: Sequence[Tensor], layout: MatrixLayout, scale: str, *settings: Any) -> list[Tensor]:
    """`orthogonalize`, with its settings, each matrix of weights of one layout, those of one shape in one batch.

    Returns:
        For each weight a tensor of its shape: bf16; fp32 and already scaled if `common_factor` is None.
    """
    if len(weights) > 1:  # the weights become a stack of matrices
        shape = (sum(len(w) for w in weights), *layout.shape[1:]) if layout.stacked else (len(weights), *layout.shape)
        stack = torch.empty(shape, dtype=torch.bfloat16, device=weights[0].device)
        parts: Sequence[Tensor] = stack.split([len(w) for w in weights]) if layout.stacked else stack.unbind()
        torch._foreach_copy_(list(parts), list(weights))
        output_dim = layout.output_dim + (0 if layout.stacked else 1)
        whole = layout._replace(shape=shape, stacked=True, output_dim=output_dim)
        (results,) = orthogonalize_all([stack], whole, scale, *settings)
        return list(results.split([len(w) for w in weights]) if layout.stacked else results.unbind())
    matrices = layout.split(weights[0])
    if len(matrices) == 1:
        each = [orthogonalize(matrices[0], *settings)]
    elif len({matrix.shape for matrix in matrices}) == 1:
        batch = torch.cat(matrices) if layout.stacked else torch.stack(matrices)
        found = orthogonalize(batch, *settings).chunk(len(matrices))
        each = [part.view(matrices[0].shape) for part in found]
    else:
        each = [orthogonalize(matrix, *settings) for matrix in matrices]
    if common_factor(layout, scale) is None:
        pairs = zip(each, layout.sizes, strict=True)
        each = [matrix.float() * SCALES[scale](*sizes) for matrix, sizes in pairs]
    return [layout.join(each)]


# bf16 bytes of the matrices that one rank orthogonalizes in one batch; a larger matrix is alone. A product of so many
# takes longer than its launch: 8 matrices of 1024 x 1024 are 17 GFLOP, 17 us at the 990 TFLOP/s of an H100's data
# sheet. The fp32 copies, the products and the update take about 6 times as much for the time of a batch.
BATCH_BYTES = 16 << 20
# on a CPU a batch pays where it stays in the cache of a core: one thread takes 0.6 of the time for 24 matrices of
# 64 x 64, 0.92 for 4 of 128 x 128 (128 KiB), but 1.2 for 8 of 256 x 256 (AVX2, torch 2.13)
BATCH_BYTES_ON_CPU = 128 << 10
# rows or columns, the fewer, from which ranks with copies share the work: for an element, Newton-Schulz has some 25
# operations for each of them, and sharing sends 2 bytes
SHARE_FROM = 128
_FIRST_MOMENTUM = 0.85  # where the warmup of the momentum begins


class Muon(Optimizer):
    """SGD with momentum whose update is orthogonalized by Newton-Schulz; for hidden matrices.

    A 2-D weight gets the same bits as from `torch.optim.Muon` where it is computed alone and in bf16. Weights of one
    layout are computed in batches of `BATCH_BYTES`, and on a CPU in fp32 where bf16 is slow, which rounds otherwise. In
    addition this class takes stacks of experts (each expert is a matrix), convolutions (flattened to (out, rest)),
    fused projections (each projection is a matrix) and weights sharded by FSDP2; ranks that have copies or shards
    orthogonalize some of the whole matrices each. It has a warmup of the momentum and cautious weight decay. MuonAdamW
    gives embeddings, heads, norms and biases to AdamW.

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
        coefficients: of Newton-Schulz: `keller_jordan`, the same ones in each step; `polar_express`, other ones in each
            step, with which singular values come nearer to 1.
        normuon_beta2: NorMuon: divide each row of an update by its root mean square, averaged with this beta; the size
            of the whole update stays. 0.95 in the source. None: Muon.

    Raises:
        UsageError: an option out of its range; a Tensor as learning rate; a parameter of one dimension, or of three
            that is neither a stack of experts nor a convolution.

    Source: Keller Jordan 2024, https://kellerjordan.github.io/posts/muon/; Liu et al. 2025 (Moonlight),
        https://arxiv.org/abs/2502.16982; cautious decay: Chen et al. 2025, https://arxiv.org/abs/2510.12402; the warmup
        of the momentum: https://github.com/KellerJordan/modded-nanogpt; Polar Express: see `orthogonalize`; NorMuon: Li
        et al. 2025, https://arxiv.org/abs/2510.05491, and contrib/_normuon.py of https://github.com/google-deepmind/optax.
    """

    skips_on_device = True
    """A step in which `self.found_inf`, a 0-dim tensor, is 1 changes nothing, and nothing is read on the host."""

    steps_in_batches = True
    """The temporary memory of a step is that of its largest batch, also where a model has more blocks."""

    replicas: dist.ProcessGroup | None = None
    """The ranks that have equal plain weights and equal gradients, as under DDP, and share the work. None: no other."""

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
        coefficients: Coefficients = "keller_jordan",
        normuon_beta2: float | None = None,
    ) -> None:
        check_choice("Muon.coefficients", coefficients, Coefficients)
        if isinstance(lr, Tensor):
            raise UsageError("Muon.lr is a Tensor: give a float, which the schedule sets at each step")
        for option, value, fits, words in (
            ("lr", lr, 0 <= lr < math.inf, "a finite number, 0 or more"),
            ("momentum", momentum, 0 <= momentum < 1, "a number from 0 on and below 1"),
            ("ns_steps", ns_steps, 1 <= ns_steps < 100, "a whole number from 1 to 99"),
            ("momentum_warmup_steps", momentum_warmup_steps, momentum_warmup_steps >= 0, "0 or more steps"),
            ("normuon_beta2", normuon_beta2, 0 <= (normuon_beta2 or 0) < 1, "a number from 0 on and below 1, or None"),
        ):
            if not fits:
                raise UsageError(f"Muon.{option}={value!r}: give {words}")
        settings = {
            "lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay,
            "adjust_lr_fn": adjust_lr_fn, "ns_steps": ns_steps, "momentum_warmup_steps": momentum_warmup_steps,
            "cautious_weight_decay": cautious_weight_decay, "coefficients": coefficients,
            "normuon_beta2": normuon_beta2, "ns_dtype": None,
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
        """Make a step; under FSDP2, and with `replicas`, every rank must call."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights = [weight for weight in _weights(group, self.replicas) if weight.param.grad is not None]
            for batch in _batches(weights):
                self._step_batch(batch, group)
        return loss

    def _step_batch(self, weights: Sequence["_Weight"], group: dict[str, Any]) -> None:
        """Step some weights of one kind; only their updates are in memory at once."""
        found_inf = getattr(self, "found_inf", None)
        skip = None if found_inf is None else found_inf > 0
        momenta = self._move_averages(weights, group, skip)
        scale, dtype = group["adjust_lr_fn"], self._iteration_dtype(weights[0], group)

        def make(numbers: Sequence[int]) -> list[Tensor]:
            return self._updates(
                [weights[number] for number in numbers], [momenta[number] for number in numbers], group
            )

        def compute(numbers: Sequence[int], wholes: list[Tensor]) -> list[Tensor]:
            of_layout: dict[MatrixLayout, list[int]] = {}
            for index, (number, whole) in enumerate(zip(numbers, wholes, strict=True)):
                # of a stack that is sharded by experts, this rank has some
                layout = weights[number].layout._replace(shape=tuple(whole.shape))
                of_layout.setdefault(layout, []).append(index)
            found: dict[int, Tensor] = {}
            for layout, own in of_layout.items():
                updates = [wholes[index] for index in own]
                settings = group["ns_steps"], dtype, group["coefficients"]
                found |= zip(own, orthogonalize_all(updates, layout, scale, *settings), strict=True)
            return [found[index] for index in range(len(wholes))]

        factors = [common_factor(weight.layout, scale) for weight in weights]
        sent_dtype = torch.float32 if None in factors else torch.bfloat16
        found = map_unsharded([weight.like for weight in weights], weights[0].rank_group, make, compute, sent_dtype)
        params = [local(weight.param) for weight in weights]
        scales = [1.0 if factor is None else factor for factor in factors]
        if group["normuon_beta2"] is not None:
            found, scales = self._normalize_rows(weights, found, group, skip), [1.0] * len(weights)
        if skip is None:
            _apply(params, found, scales, group)
            return
        for param, update, factor in zip(params, found, scales, strict=True):
            before = param.clone()
            _apply([param], [update], [factor], group)
            param.copy_(torch.where(skip, before, param))

    def _normalize_rows(
        self, weights: Sequence["_Weight"], updates: list[Tensor], group: dict[str, Any], skip: Tensor | None
    ) -> list[Tensor]:
        """The updates of NorMuon, with the size that a step of Muon has."""
        averages = list[Tensor]()
        for param, layout, _ in weights:
            count = layout.outputs * (layout.shape[0] if layout.stacked else 1)
            # flat: so it has the shape of no weight, and is saved as a whole; torch loads it in the weight's dtype
            average = self.state[param].get("second_moment", torch.zeros(count, device=param.device)).float()
            self.state[param]["second_moment"] = average
            averages.append(average)
        params, layouts, _ = zip(*weights, strict=True)
        scale = SCALES[group["adjust_lr_fn"]]
        return normalize_rows(updates, params, layouts, averages, group["normuon_beta2"], scale, skip)

    def _move_averages(
        self, weights: Sequence["_Weight"], group: dict[str, Any], skip: Tensor | None
    ) -> list[float | Tensor]:
        """Take the gradients into the averages; returns the momentum of each weight."""
        grads, averages, momenta = list[Tensor](), list[Tensor](), list[float | Tensor]()
        for weight in weights:
            grad, state = cast(Tensor, weight.param.grad), self.state[weight.param]
            if grad.is_sparse or grad.is_complex():
                shape = tuple(grad.shape)
                raise UsageError(f"Muon: a gradient of shape {shape} is sparse or complex: give it to AdamW")
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
            grads.append(local(grad))
            averages.append(local(state["momentum_buffer"]))
            momenta.append(self._momentum(state, group, grads[-1].device, skip))
        if skip is None and not isinstance(momenta[0], Tensor):
            torch._foreach_lerp_(averages, grads, 1 - momenta[0])
            return momenta
        for average, grad, momentum in zip(averages, grads, momenta, strict=True):
            averaged = average.lerp(grad, _lerp_weight(1 - momentum, average.dtype))
            average.copy_(averaged if skip is None else torch.where(skip, average, averaged))
        return momenta

    def _updates(
        self, weights: Sequence["_Weight"], momenta: Sequence[float | Tensor], group: dict[str, Any]
    ) -> list[Tensor]:
        """The averages that this step orthogonalizes; DTensors where ranks must exchange shards."""
        grads = [cast(Tensor, weight.param.grad) for weight in weights]
        updates = [local(self.state[weight.param]["momentum_buffer"]) for weight in weights]
        if group["nesterov"]:
            own = [local(grad) for grad in grads]
            if isinstance(momenta[0], Tensor):
                each = zip(own, updates, momenta, strict=True)
                updates = [grad.lerp(update, _lerp_weight(momentum, grad.dtype)) for grad, update, momentum in each]
            else:
                updates = list(torch._foreach_lerp(own, updates, momenta[0]))
        pairs = zip(weights, grads, updates, strict=True)
        return [update if weight.is_local() else sharded_like(grad, update) for weight, grad, update in pairs]

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
        step += 1 if skip is None else skip.logical_not()
        return momentum

    def _iteration_dtype(self, weight: "_Weight", group: dict[str, Any]) -> torch.dtype:
        """bf16; on a CPU the faster of bf16 and fp32 in the first step, which all ranks take, and a resume too."""
        if weight.param.device.type != "cpu":
            return torch.bfloat16
        if group["ns_dtype"] is None:
            group["ns_dtype"] = "bfloat16" if self._all_multiply_bf16_fast(weight.param) else "float32"
        return torch.float32 if group["ns_dtype"] == "float32" else torch.bfloat16

    def _all_multiply_bf16_fast(self, param: Tensor) -> bool:
        """Whether bf16 is fast on every rank that has this weight; true where they are unknown, and cannot be asked."""
        if isinstance(param, DTensor):
            together = param.device_mesh.get_all_groups()
        elif self.replicas is not None:
            together = [self.replicas]
        elif dist.is_available() and dist.is_initialized() and len(dist.get_process_group_ranks(None)) > 1:
            return True
        else:
            together = []
        fast = torch.tensor(float(device_speed.has_fast_bf16("cpu")))
        for ranks in together:
            dist.all_reduce(fast, dist.ReduceOp.MIN, ranks)
        return bool(fast)


class _Weight(NamedTuple):
    """A parameter and the matrices in it.

    Args:
        param: the parameter.
        layout: its matrices.
        rank_group: the ranks that orthogonalize it together.
    """

    param: Tensor
    layout: MatrixLayout
    rank_group: RankGroup

    @classmethod
    def of(cls, param: Tensor, layout: MatrixLayout, replicas: dist.ProcessGroup | None) -> "_Weight":
        """A parameter, and the `replicas` that have it too if it is plain."""
        weight = cls(param, layout, RankGroup.of(param, replicas))
        rank_group = weight.rank_group
        if weight.is_local():
            rank_group = rank_group._replace(mesh=None, shard_dim=None)
        if min(min(sizes) for sizes in layout.sizes) < SHARE_FROM:
            rank_group = rank_group._replace(copies=None)
        return weight._replace(rank_group=rank_group)

    def is_local(self) -> bool:
        """Whether it is a stack of which each rank has whole experts: sharded by experts, or not at all."""
        placements = getattr(self.param, "placements", ())
        return self.layout.stacked and all(
            placement.is_replicate() or placement.is_shard(0) for placement in placements
        )

    @property
    def like(self) -> Tensor:
        """A tensor that lies as the weight does where it is orthogonalized."""
        return local(self.param) if self.is_local() else self.param


def _weights(group: dict[str, Any], replicas: dist.ProcessGroup | None) -> list[_Weight]:
    """The parameters that a group has in this step: BF16True, DeepSpeed and FSDP1 put others in their place."""
    params = group["params"]
    if any(param.ndim < 2 for param in params):
        raise UsageError(
            "Muon: its parameters have become flat, as DeepSpeed's ZeRO and FSDP1 make them, so that no matrix is "
            "whole: take FSDP2Strategy, or AdamW"
        )
    layouts = group.get("layouts") or [None] * len(params)
    pairs = zip(params, layouts, strict=True)
    return [_Weight.of(param, MatrixLayout.from_plain(layout, param.shape), replicas) for param, layout in pairs]


def _batches(weights: Sequence[_Weight]) -> Iterator[list[_Weight]]:
    """The weights, larger ones and those of one layout beside each other, as many at once as `BATCH_BYTES` allows.

    Where ranks share the work, each of them has at least one matrix of a batch, if there are as many.
    """
    of_kind: dict[Any, list[_Weight]] = {}
    for weight in weights:
        kind = weight.rank_group, weight.param.device, weight.param.dtype, shard_dims(weight.param)
        of_kind.setdefault(kind, []).append(weight)
    for (rank_group, device, *_), some in of_kind.items():
        limit = BATCH_BYTES_ON_CPU if device.type == "cpu" else BATCH_BYTES
        own = sorted(some, key=lambda weight: (-weight.param.numel(), str(weight.layout)))
        copies = 1 if rank_group.copies is None else rank_group.copies.size()  # each of them gets the results of all
        begin = 0
        while begin < len(own):
            size = 2 * own[begin].param.numel() * copies
            end = begin + rank_group.ranks * max(1, limit // max(size, 1))
            yield own[begin:end]
            begin = end


def _lerp_weight(number: float | Tensor, dtype: torch.dtype) -> Any:
    """`number` as `lerp` takes it: a float, or a tensor of the same dtype as its other arguments."""
    return number.to(dtype) if isinstance(number, Tensor) else number


def _apply(params: list[Tensor], updates: list[Tensor], factors: Sequence[float], group: dict[str, Any]) -> None:
    """Decay weights and add their updates, in place; all are local tensors."""
    decay = group["lr"] * group["weight_decay"]
    if group["cautious_weight_decay"]:
        for param, update in zip(params, updates, strict=True):
            decay_towards_zero_(param, update, decay)
    else:
        torch._foreach_mul_(params, 1 - decay)
    for factor in dict.fromkeys(factors):
        own = [index for index, other in enumerate(factors) if other == factor]
        torch._foreach_add_(
            [params[index] for index in own], [updates[index] for index in own], alpha=-group["lr"] * factor
        )
