"""Pipeline stages: each rank keeps some layers of a model, and one call runs forward and backward pass over all ranks.

A call returns the loss of all its rows, on every rank. Its gradients exist by then: they are set aside until the
backward pass of the loss, which multiplies them. So a training_step, the zeroing of gradients between its forward and
backward pass, accumulation and the mean over tokens stay as they are.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import DTensor

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.find_modules import clean_name, parameters_by_name, repeated_blocks
from lightning_tricks._core.protocols import CountsInBackward, HasStages
from lightning_tricks._core.tensors import OverStages, refuse_second_derivative

PipelineSchedule = Literal["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
SPLITS_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")  # into gradients of inputs and of weights
_V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # the first rank has the first stage and the last one


def stages_of_ranks(schedule: PipelineSchedule, ranks: int) -> list[list[int]]:
    """The numbers of each rank's stages: one; or two, in a loop or in a V."""
    if schedule in _V_SHAPED:
        return [[rank, 2 * ranks - 1 - rank] for rank in range(ranks)]
    each = 1 if issubclass(get_schedule_class(schedule), PipelineScheduleSingle) else 2
    return [[rank + ranks * number for number in range(each)] for rank in range(ranks)]


def layers_of_stages(stages: int, layers: int, head: float = 0.0, given: Sequence[int] | None = None) -> list[range]:
    """The layers of each stage, such that the slowest one is as fast as can be.

    Args:
        stages: at most `layers`.
        layers: number of equal layers.
        head: what the last stage computes after its layers, as a number of layers. The first stage's embedding
            computes nothing.
        given: number of layers of each stage, which is then taken.

    Raises:
        UsageError: more stages than layers; `given` does not have `stages` numbers above 0 whose sum is `layers`.
    """
    if layers < stages:
        raise UsageError(f"mesh.pipeline: {stages} stages for {layers} layers: each needs one at least")
    if given is not None:
        if len(given) != stages or min(given) < 1 or sum(given) != layers:
            raise UsageError(
                f"layers_per_stage={list(given)}: give {stages} numbers of at least 1, one a stage, whose sum is "
                f"{layers}, the number of layers"
            )
        counts = list(given)
    elif stages == 1:
        counts = [layers]
    else:
        others = stages - 1
        last = min(range(1, layers - others + 1), key=lambda own: (max(-(-(layers - own) // others), own + head), -own))
        each, more = divmod(layers - last, others)
        # a stage keeps the activations of as many micro-batches as there are stages from it on: early ones get less
        counts = [each + (number >= others - more) for number in range(others)] + [last]
    ends = [sum(counts[:number]) for number in range(stages + 1)]
    return [range(begin, end) for begin, end in pairwise(ends)]


def find_pipelined(module: nn.Module) -> tuple[str, Any]:
    """Name and module of the outermost part that can be cut into stages, see `HasStages`.

    Raises:
        UsageError: there is none; a parameter lies outside of it.
    """
    found = [(clean_name(name), part) for name, part in module.named_modules() if isinstance(part, HasStages)]
    if not found:
        raise UsageError(
            f"mesh.pipeline: {type(module).__name__} cannot be cut into stages: give its model the methods "
            "pipeline_plan() and stage(), or leave mesh.pipeline at 1"
        )
    name, part = found[0]
    for other, _ in module.named_parameters():
        if name and not clean_name(other).startswith(f"{name}."):
            raise UsageError(
                f"mesh.pipeline: parameter '{other}' lies outside of '{name}', which is cut into stages: no stage "
                "would have it"
            )
    return name, part


def copy_on_meta(module: nn.Module, done: dict[int, Any] | None = None) -> nn.Module:
    """A copy with all names, classes and attributes of `module`, whose tensors have no values; tied ones stay tied."""
    done = {} if done is None else done
    made = object.__new__(type(module))  # not all classes let `copy` do it
    vars(made).update(vars(module))
    made._modules = {
        name: done[id(part)] if id(part) in done else None if part is None else copy_on_meta(part, done)
        for name, part in module._modules.items()
    }
    for kind in ("_parameters", "_buffers"):
        tensors = {}
        for name, tensor in getattr(module, kind).items():
            if tensor is not None and id(tensor) not in done:
                meta = tensor.detach().to("meta")
                done[id(tensor)] = nn.Parameter(meta, tensor.requires_grad) if kind == "_parameters" else meta
                vars(done[id(tensor)]).update(vars(tensor))
            tensors[name] = tensor if tensor is None else done[id(tensor)]
        setattr(made, kind, tensors)
    done[id(module)] = made
    return made


@dataclass(frozen=True)
class Cut:
    """What `cut` has made of a model.

    Attributes:
        model: what is left of it.
        stages: of this rank, by number.
        count: number of all stages.
        layers: of each stage, by number.
        tied: names of the parameters of which the first and the last stage each have a copy.
    """

    model: Any
    stages: Mapping[int, "Stage"]
    count: int
    layers: Sequence[range]
    tied: Sequence[str]


def cut(
    model: Any, rank: int, ranks: int, schedule: PipelineSchedule, layers_per_stage: Sequence[int] | None = None
) -> Cut:
    """Drop all parts of a model that belong to the stages of other ranks, in place. Names stay.

    Args:
        model: see `HasStages`; on any device.
        rank: of this process in its pipeline.
        ranks: of the pipeline.
        schedule: decides which stages a rank has.
        layers_per_stage: see `layers_of_stages`.

    Raises:
        UsageError: no blocks, or fewer than stages; a part with parameters that the plan does not name; a name of the
            plan that the model does not have.
    """
    plan, blocks, modules = model.pipeline_plan(), repeated_blocks(model), dict(model.named_modules())
    if not blocks:
        raise UsageError(
            f"mesh.pipeline: {type(model).__name__} has no two layers alike for stages to share out: add layers, or "
            "leave mesh.pipeline at 1"
        )
    for name, place in plan.items():
        if name not in modules or place not in ("first", "last"):
            raise UsageError(f"mesh.pipeline: pipeline_plan() says {place!r} of '{name}': give modules, first or last")
    of = {place: [name for name in plan if plan[name] == place] for place in ("first", "last")}
    for name, _ in model.named_parameters():
        if not name.startswith(tuple(f"{part}." for part in (*plan, *blocks))):
            raise UsageError(
                f"mesh.pipeline: pipeline_plan() does not say which stage has '{name}': name the module that has it, "
                "which cannot be the model itself"
            )
    owners: dict[nn.Parameter, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(parameter, set()).add(next(part for part in (*plan, *blocks) if name.startswith(f"{part}.")))
    shared = [found for found in owners.values() if {plan.get(part) for part in found} >= {"first", "last"}]
    copied = [name for name in of["first"] if any(name in found for found in shared)]  # also on the last stage
    if copied and schedule in _V_SHAPED:
        raise UsageError(
            f"pipeline_schedule={schedule}: its first rank has the first stage and the last one, which FSDP2 cannot "
            f"give one weight ('{copied[0]}' is tied): take 1F1B or Interleaved1F1B, or leave them untied"
        )
    mine = stages_of_ranks(schedule, ranks)[rank]
    count = ranks * len(mine)
    layers = layers_of_stages(count, len(blocks), _head_in_layers(modules, of["last"], blocks), layers_per_stage)
    names, stages, kept = list(blocks), {}, set[str]()
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    parts_of, layers_of = [], []
    for number in range(count):
        first, last = number == 0, number == count - 1
        parts_of.append([*(of["first"] if first else copied if last else ()), *(of["last"] if last else ())])
        layers_of.append([names[layer] for layer in layers[number]])
        if not any(name.startswith(tuple(f"{p}." for p in (*parts_of[-1], *layers_of[-1]))) for name in trained):
            raise UsageError(
                f"mesh.pipeline: all parameters of stage {number} are frozen: freeze less, or take fewer stages"
            )
    for number in mine:
        first, last = number == 0, number == count - 1
        parts, own = parts_of[number], layers_of[number]
        kept |= {*parts, *own}
        stages[number] = Stage(
            model, {name: modules[name] for name in parts}, {name: blocks[name] for name in own}, first, last
        )
    for name in (*plan, *blocks):
        parent, _, key = name.rpartition(".")
        if name not in kept:
            if name in blocks:
                del modules[parent]._modules[key]  # the others keep their numbers
            else:
                modules[parent]._modules[key] = None
    both = {0, count - 1} <= set(mine)
    tied = (
        [] if both else [name for name in parameters_by_name(model) if name.startswith(tuple(f"{p}." for p in copied))]
    )
    return Cut(model, dict(sorted(stages.items())), count, layers, tied if {0, count - 1} & set(mine) else [])


def _head_in_layers(modules: Mapping[str, nn.Module], last: Sequence[str], blocks: Mapping[str, nn.Module]) -> float:
    """The products of the last parts for a token, as a number of layers."""

    def products(part: nn.Module) -> int:
        return sum(parameter.numel() for parameter in part.parameters() if parameter.ndim == 2)

    layer = products(next(iter(blocks.values())))
    return sum(products(modules[name]) for name in last) / layer if layer else 0.0


class Stage(nn.Module):
    """The parts of a model that one stage computes with; FSDP2 takes it as the root of their shards.

    Args:
        whole: the model, of which this rank has kept the parts of its stages.
        parts: of `whole`, by name.
        blocks: the layers of the stage, by name.
        first: whether it takes the batch, and no hidden states.
        last: whether it gives the loss.
    """

    def __init__(
        self, whole: Any, parts: Mapping[str, nn.Module], blocks: Mapping[str, nn.Module], first: bool, last: bool
    ) -> None:
        super().__init__()
        self._whole = [whole]  # in a list, so that it is no part
        self.first, self.last = first, last
        self.autocast: Any = nullcontext  # of the call of the model, which a backward pass must not see
        self.parts = nn.ModuleList(parts.values())
        self.blocks = nn.ModuleList(blocks.values())

    def forward(self, x: Any, *more: Tensor, without_blocks: bool = False, **inputs: Any) -> Any:
        """Hidden states of those of the stage before; see `HasStages.stage`. With `without_blocks` only their form."""
        hidden = None if self.first else (x, *more) if more else x
        blocks = () if without_blocks else tuple(self.blocks)
        with self.autocast():
            return self._whole[0].stage(hidden, blocks, last=self.last and not without_blocks, **inputs)


class _HasGradients(torch.autograd.Function):
    """A loss whose gradients exist already: its backward pass multiplies them by its own gradient."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, anchor: Tensor, held: "SetAside") -> Tensor:
        ctx.held = held
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[None, Tensor, None]:
        refuse_second_derivative("the loss of a pipeline", "take one process, or tensor ranks")
        if ctx.held is None:
            raise RuntimeError("the loss of a pipeline has one backward pass: call the model again for another one")
        for parameter, gradient in ctx.held.gradients:
            gradient.mul_(factor.to(gradient.dtype))
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        for counts, made in ctx.held.counts:
            counts += made
        ctx.held = None
        return None, factor, None


class Pipeline:
    """Calls the stages of a model, on the ranks of one pipeline; all must call, with the same rows.

    Args:
        made: by `cut`, sharded by now.
        group: process group of the pipeline.
        schedule: torch's schedule.
        micro_batches: into how many parts the rows of a call are divided.
        ends: group of the first and the last rank of the pipeline, where tied parameters are on both.
        device: of the hidden states.

    Source: torch.distributed.pipelining; Huang et al. 2018 (GPipe), https://arxiv.org/abs/1811.06965; Narayanan et al.
        2021 (interleaved 1F1B), https://arxiv.org/abs/2104.04473; Qi et al. 2023 (zero bubble),
        https://arxiv.org/abs/2401.10241.
    """

    def __init__(
        self,
        made: Cut,
        group: Any,
        schedule: PipelineSchedule,
        micro_batches: int,
        ends: Any,
        device: torch.device,
    ) -> None:
        self.model, self.stages, self.count, self.tied, self.ends = made.model, made.stages, made.count, made.tied, ends
        self.group, self.schedule, self.micro_batches, self.device = group, schedule, micro_batches, device
        places = stages_of_ranks(schedule, group.size())
        self._rank_of = {stage: rank for rank, own in enumerate(places) for stage in own}
        self._signature = inspect.signature(type(made.model).forward)
        self._made: dict[Any, Any] = {}  # schedules, by the shapes of their inputs
        self._hidden: dict[Any, tuple[Tensor, ...]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """The sum that the last stage returns, over all rows; takes what the model's `forward` takes.

        Raises:
            UsageError: the number of rows is no multiple of `micro_batches`; a tensor of another number of rows.
        """
        inputs = self._inputs(args, kwargs)
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        rows = len(next(iter(tensors.values())))
        for name, value in tensors.items():
            if value.shape[:1] != (rows,):
                raise UsageError(
                    f"mesh.pipeline: '{name}' of shape {tuple(value.shape)} has not the {rows} rows of the batch, by "
                    "which a call is divided: compute it in stage(), or make it a buffer of a module"
                )
        if rows % self.micro_batches:
            raise UsageError(
                f"pipeline_micro_batches={self.micro_batches}: a batch of {rows} rows is no multiple of it: change one "
                "of the two"
            )
        some = {name: value[: rows // self.micro_batches] for name, value in tensors.items()}
        key = tuple((name, tuple(value.shape), value.dtype) for name, value in some.items())
        kind = self.device.type
        autocast: Any = nullcontext
        if torch.is_autocast_enabled(kind):
            autocast = partial(torch.autocast, kind, torch.get_autocast_dtype(kind))
        for stage in self.stages.values():
            stage.autocast = autocast
        with torch.autocast(kind, enabled=False):
            hidden = self._hidden_like(key, {**inputs, **some})
            if not torch.is_grad_enabled():
                return self._joined(self._forward_only(inputs, tensors, hidden))
            if key not in self._made:
                self._made[key] = self._schedule(next(iter(some.values())), hidden)
            rows_of = next(iter(tensors.values()))
            target = rows_of if self.count - 1 in self.stages else None
            losses: list[Tensor] = []
            with set_aside(self.model) as held:
                first = (rows_of,) if 0 in self.stages else ()  # of which the stage takes nothing
                self._made[key].step(*first, target=target, losses=losses, return_outputs=False, **inputs)
                self._sum_tied()  # in each call, so that accumulation adds nothing twice
        return _HasGradients.apply(self._joined(losses), torch.zeros((), requires_grad=True), held)

    def _inputs(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """What a call was given, by the names in the model's `forward`, without None."""
        bound = self._signature.bind(self.model, *args, **kwargs)
        inputs = dict([*bound.arguments.items()][1:])  # without self
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                inputs |= inputs.pop(name, {})
        return {name: value for name, value in inputs.items() if value is not None}

    def mark_parameters(self) -> None:
        """Let the norm of the gradients be that of all stages, in which a copy of a weight counts once."""
        copies = {self.model.get_parameter(name) for name in self.tied if 0 not in self.stages}
        for parameter in self.model.parameters():
            parameter.over_stages = OverStages(self.group, parameter not in copies)

    def _schedule(self, rows: Tensor, hidden: tuple[Tensor, ...]) -> Any:
        """Of static shapes: torch's dynamic ones would cost a forward and a backward pass."""
        between = tuple(torch.empty_like(one, device="meta").requires_grad_() for one in hidden)
        nats = torch.zeros((), device="meta", requires_grad=True)
        stages = [
            PipelineStage(
                stage, number, self.count, self.device, group=self.group,
                input_args=(rows.to("meta"),) if number == 0 else between,
                output_args=(nats,) if number == self.count - 1 else between,
            ) for number, stage in self.stages.items()
        ]  # fmt: skip
        kind: Any = get_schedule_class(self.schedule)
        single = issubclass(kind, PipelineScheduleSingle)
        return kind(
            stages[0] if single else stages, self.micro_batches, loss_fn=lambda loss, _: loss, scale_grads=False
        )

    @torch.no_grad()
    def _hidden_like(self, key: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Tensors like the hidden states of one micro-batch, from the first stage without its blocks."""
        if key not in self._hidden:
            found: list[Any] = [None]
            if 0 in self.stages:
                made = self.stages[0](None, without_blocks=True, **inputs)
                found = [[(tuple(one.shape), one.dtype) for one in (made if isinstance(made, tuple) else (made,))]]
                self._reshard()
            dist.broadcast_object_list(found, group=self.group, group_src=0)
            self._hidden[key] = tuple(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in found[0])
        return self._hidden[key]

    def _joined(self, losses: Sequence[Tensor]) -> Tensor:
        """The sum of the last stage's losses, on every rank."""
        total = torch.zeros((), dtype=torch.float32, device=self.device)  # whatever the default is on this rank
        if losses:
            total = torch.stack([loss.detach() for loss in losses]).sum().float()
        return self.take_from_last_stage(total)

    def take_from_last_stage(self, tensor: Tensor) -> Tensor:
        """Fill a tensor with that of the last stage's rank; every rank must call."""
        dist.broadcast(tensor, group=self.group, group_src=self._rank_of[self.count - 1])
        return tensor

    def _forward_only(
        self, inputs: Mapping[str, Any], tensors: Mapping[str, Tensor], hidden: tuple[Tensor, ...]
    ) -> list[Tensor]:
        """All micro-batches through a stage, then through the next one of this rank.

        torch 2.13's `schedule.eval` fails for V schedules, as it walks through the backward passes.
        """
        parts = [
            {**inputs, **{name: value.chunk(self.micro_batches)[number] for name, value in tensors.items()}}
            for number in range(self.micro_batches)
        ]
        flowing: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        sent: list[Any] = []
        losses = []
        rank = self.group.rank()
        for number, stage in self.stages.items():
            for index, part in enumerate(parts):
                x = flowing.pop((number, index), ())
                if number > 0 and not x:
                    x = tuple(torch.empty_like(one, device=self.device) for one in hidden)
                    for one in x:
                        dist.recv(one, group=self.group, group_src=self._rank_of[number - 1])
                out = stage(*(x or (None,)), **part)
                if number == self.count - 1:
                    losses.append(out)
                    continue
                out = tuple(one.contiguous() for one in (out if isinstance(out, tuple) else (out,)))
                if (to := self._rank_of[number + 1]) == rank:
                    flowing[number + 1, index] = out
                else:
                    sent += [(one, dist.isend(one, group=self.group, group_dst=to)) for one in out]
        for _, work in sent:
            work.wait()
        self._reshard()
        return losses

    def _reshard(self) -> None:
        """Have FSDP2 gather anew: what it keeps gathered are other parameters than the optimizer's."""
        for stage in self.stages.values():
            for part in stage.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()

    def _sum_tied(self) -> None:
        """Add up the gradients of the copies that the first and the last stage have of a weight."""
        for parameter in map(self.model.get_parameter, self.tied):
            if not parameter.requires_grad:
                continue
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            if isinstance(gradient, DTensor):  # of tensor ranks: an embedding's is whole, a head's is divided
                gradient = gradient.redistribute(placements=parameter.placements)
            dist.all_reduce(gradient.to_local() if isinstance(gradient, DTensor) else gradient, group=self.ends)
            parameter.grad = gradient


@dataclass(frozen=True)
class SetAside:
    """What backward passes made within `set_aside`: gradients by parameter, and items by the list they are added to."""

    gradients: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    counts: list[tuple[list[Any], list[Any]]] = field(default_factory=list)


@contextmanager
def set_aside(model: nn.Module) -> Iterator[SetAside]:
    """What backward passes make within the `with`, alone; gradients and counts from before are there again after it."""
    parameters = list(model.parameters())
    counts = [module.backward_loads for module in model.modules() if isinstance(module, CountsInBackward)]
    before, counted, held = [parameter.grad for parameter in parameters], [list(each) for each in counts], SetAside()
    for parameter in parameters:
        parameter.grad = None
    for each in counts:
        each.clear()
    yield held
    for parameter, gradient in zip(parameters, before, strict=True):
        if parameter.grad is not None:
            held.gradients.append((parameter, parameter.grad))
        parameter.grad = gradient
    for each, earlier in zip(counts, counted, strict=True):
        held.counts.append((each, list(each)))
        each[:] = earlier
