"""Divide the matrices of a module over the tensor ranks, by a plan of names in Hugging Face's words."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.tensors import local

# How each word of a plan divides the layer's weight: by rows, by columns, or not at all. None: it stays a plain tensor.
_WORDS: dict[str, Placement | None] = {
    "colwise": Shard(0),
    "colwise_gather_output": Shard(0),
    "rowwise": Shard(1),
    "rowwise_split_input": Shard(1),
    "embedding_rowwise": Shard(0),
    "embedding_colwise": Shard(1),
    "vocabulary": Shard(0),
    "gather_sequence": None,
    "sequence_parallel": Replicate(),
    "replicated_with_grad_allreduce": Replicate(),
}
TENSOR_AXIS = "tensor"  # its name in a `Mesh`
_OF_SEQUENCES = ("gather_sequence", "sequence_parallel")
# the fields by which configurations of transformers, and ours, tell the number of heads
_HEADS = ("num_attention_heads", "num_key_value_heads", "n_heads", "kv_heads")


def plan_of(module: nn.Module) -> dict[str, str]:
    """The plan of a module: those that its parts give, with their place in the names.

    A part gives one by a method `parallel_plan()`, or as a model of Hugging Face's transformers by its `tp_plan`. It
    names the layers below the part, with `*` for any part of a name, and says how each is divided:

    - `colwise`: a linear layer by its outputs, so that the result is this rank's part; `colwise_gather_output` gives
      the whole result.
    - `rowwise`: a linear layer by its inputs, of which this rank has a part; gives the whole result.
    - `rowwise_split_input`: the same of a whole input, from which each rank takes its part.
    - `embedding_rowwise`: an embedding by its entries; `embedding_colwise` by its width.
    - `vocabulary`: an output head by its outputs that divides its input and gradient itself, as `models.Head` does.
    - `replicated_with_grad_allreduce`: not at all, but it sees only this rank's part of its input (norms of heads).
    - `gather_sequence`: a module that needs the whole rows; with sequence parallelism it gets them. Give it the modules
      that hold several `colwise` layers of one input: the gradient of that input is then reduced once.
    - `sequence_parallel`: not at all; with sequence parallelism it sees a part of each row (norms of the residual
      stream).

    Empty for a module without a plan.

    Source: https://huggingface.co/docs/transformers/perf_infer_gpu_multi.
    """
    plan: dict[str, str] = {}
    above: list[str] = []  # names of parts that gave a plan, which holds for all below them
    for name, part in module.named_modules():
        if any(not other or name.startswith(f"{other}.") for other in above):
            continue
        given = _given_by(part)
        if given:
            above.append(name)
            plan |= {f"{name}.{pattern}".strip("."): word for pattern, word in given.items()}
    return plan


def _given_by(part: nn.Module) -> Mapping[str, str]:
    if callable(getattr(part, "parallel_plan", None)):
        return part.parallel_plan()  # type: ignore[operator]
    return getattr(part, "tp_plan", None) or getattr(part, "_tp_plan", None) or {}


def divides_sequences(plan: Mapping[str, str]) -> bool:
    """Whether a plan says how rows are divided between the matrices: that sequence parallelism is possible."""
    return any(word in _OF_SEQUENCES for word in plan.values())


def named_by(plan: Mapping[str, str], module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Each module that a plan names, with its word.

    Raises:
        UsageError: no plan; a name that no module has; an unknown word.
    """
    if not plan:
        raise UsageError(
            f"mesh.tensor: {type(module).__name__} says nowhere how its layers are divided: give it a method "
            "parallel_plan, a dict of names such as {'blocks.*.mlp.up': 'colwise', 'blocks.*.mlp.down': 'rowwise'}"
        )
    modules = dict(module.named_modules())
    found: dict[str, tuple[nn.Module, str]] = {}
    for pattern, word in plan.items():
        if word not in _WORDS:
            raise UsageError(f"mesh.tensor: the plan says {word!r} of '{pattern}': known are {', '.join(_WORDS)}")
        names = _matches(pattern, modules)
        if not names:
            raise UsageError(
                f"mesh.tensor: the plan names '{pattern}', and {type(module).__name__} has no such module: "
                f"names are such as '{next(reversed(modules))}'"
            )
        found |= {name: (modules[name], word) for name in names}
    return found


def has_named(pattern: str, module: nn.Module) -> bool:
    """Whether a module has a part that a name of a plan means: a pipeline stage may not."""
    return bool(_matches(pattern, dict(module.named_modules())))


def _matches(pattern: str, modules: Mapping[str, nn.Module]) -> list[str]:
    regex = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
    return [name for name in modules if regex.fullmatch(name)]


def check_divisible(named: Mapping[str, tuple[nn.Module, str]], module: nn.Module, parts: int) -> None:
    """Refuse sizes that `parts` ranks cannot share evenly: heads, widths, the vocabulary.

    Raises:
        UsageError: naming the layer or the setting, and its size.
    """
    for part in module.modules():
        config = getattr(part, "config", None)
        for field in _HEADS:
            heads = getattr(config, field, None)
            if isinstance(heads, int) and heads % parts:
                raise UsageError(f"mesh.tensor={parts} does not divide {field}={heads}: take a divisor of it")
    for name, (part, word) in named.items():
        if isinstance(part, nn.Linear):
            sizes = {"out_features": part.out_features, "in_features": part.in_features}
        elif isinstance(part, nn.Embedding):
            sizes = {"num_embeddings": part.num_embeddings, "embedding_dim": part.embedding_dim}
        elif isinstance(_WORDS[word], Shard):
            raise UsageError(
                f"mesh.tensor: the plan says {word} of '{name}', a {type(part).__name__}: only nn.Linear and "
                "nn.Embedding can be divided"
            )
        else:
            continue
        placement = _WORDS[word]
        field, size = list(sizes.items())[placement.dim] if isinstance(placement, Shard) else ("", 0)
        if size % parts:
            hint = "pad the vocabulary, or " if word in ("embedding_rowwise", "vocabulary") else ""
            raise UsageError(f"mesh.tensor={parts} does not divide {field}={size} of '{name}': {hint}take another size")


def divide(module: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Replace the parameters that a plan names by this rank's parts, DTensors on `mesh`, and send what must be sent.

    Values must be equal on all ranks of `mesh`; meta tensors stay meta. Tied parameters stay tied.

    Args:
        module: any for which `check_plan` has raised nothing; its layers keep their names and classes.
        plan: of `plan_of`.
        mesh: of one axis, `Mesh.tensor`.
        sequence_parallel: divide also the rows between the matrices, where the plan says how.

    Source: Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053; Korthikanti et al. 2022 (sequence parallelism),
        https://arxiv.org/abs/2205.05198.
    """
    ties = _ties(module)
    for part, word in named_by(plan, module).values():
        if style := _style(word, sequence_parallel):
            parallelize_module(part, mesh, style, src_data_rank=None)
    for owners in ties:
        first, name = owners[0]
        for part, other in owners[1:]:
            part._parameters[other] = first._parameters[name]


def check_plan(module: nn.Module, plan: Mapping[str, str], parts: int, sequence_parallel: bool) -> None:
    """Refuse what `divide` cannot do, while the module is as it was: the user may try again with other options.

    Raises:
        UsageError: see `named_by` and `check_divisible`; tied parameters that the plan divides differently; with
            sequence parallelism, a parameter that the plan does not name, whose gradient would be that of a part.
    """
    named = named_by(plan, module)
    check_divisible(named, module, parts)
    words = dict(named.values())
    for owners in _ties(module):
        if len({_placement_by(words.get(part), sequence_parallel) for part, _ in owners}) > 1:
            kinds = ", ".join(type(part).__name__ for part, _ in owners)
            raise UsageError(
                f"mesh.tensor: one parameter of {kinds} is divided in different ways by the plan: give both layers "
                "words that divide it alike, such as embedding_rowwise and vocabulary"
            )
    if sequence_parallel:
        inside = tuple(f"{name}." for name, (_, word) in named.items() if word != "gather_sequence")
        for name, _ in module.named_parameters():
            if not name.startswith(inside):
                raise UsageError(
                    f"sequence_parallel: the plan does not name the module of '{name}', which would see a part of each "
                    "row: name it, or set sequence_parallel to false"
                )


def _placement_by(word: str | None, sequence_parallel: bool) -> Placement | None:
    """How a word divides a weight; None where it stays a plain tensor."""
    if word is None or (word == "sequence_parallel" and not sequence_parallel):
        return None
    return _WORDS[word]


def _style(word: str, sequence_parallel: bool) -> ParallelStyle | None:
    whole: Placement = Replicate()
    rows: Placement = Shard(1) if sequence_parallel else whole
    rows_of_ids: Placement = Shard(-2) if sequence_parallel else whole  # of (batch, length) or (length,)
    return {
        "colwise": ColwiseParallel(),
        "colwise_gather_output": ColwiseParallel(input_layouts=rows, output_layouts=whole),
        "rowwise": RowwiseParallel(output_layouts=rows),
        "rowwise_split_input": RowwiseParallel(input_layouts=whole, output_layouts=rows),
        "embedding_rowwise": _Embedding(input_layouts=whole, output_layouts=rows_of_ids),
        "embedding_colwise": ColwiseParallel(output_layouts=whole),
        "vocabulary": _Vocabulary(rows),
        "gather_sequence": _GatherSequence(rows),
        "sequence_parallel": SequenceParallel() if sequence_parallel else None,
        "replicated_with_grad_allreduce": _OnAPart(),
    }[word]


class _Embedding(RowwiseParallel):
    """torch's style, but its result has arrived when it is returned.

    A compiled block that gets a result still on its way computes a wrong gradient of the embedding, in silence.
    """

    def _prepare_input_fn(  # type: ignore[override]
        self, input_layouts: Any, desired: Any, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        (placement,), length = self.output_layouts, inputs[0].shape[-1]
        # refused here: from the look-up on torch keeps a mask, on which the next run in this process would fail
        if placement.is_shard() and length % device_mesh.size():
            raise UsageError(
                f"sequence_parallel: {length} tokens of a row are no multiple of mesh.tensor={device_mesh.size()}: "
                "take another length, or set sequence_parallel to false"
            )
        return RowwiseParallel._prepare_input_fn(input_layouts, desired, mod, inputs, device_mesh)

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        return outputs.redistribute(placements=output_layouts).to_local()


class _GatherSequence(ParallelStyle):
    """The module's first input becomes whole, a DTensor, so that the layers inside reduce its gradient together.

    The module gets an attribute `gather_rows`, for who calls another method than `forward`.
    """

    def __init__(self, rows: Placement) -> None:
        super().__init__()
        self.rows = rows

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        gather_rows = partial(_whole, mesh=device_mesh, rows=self.rows)
        module.register_forward_pre_hook(lambda part, args: (gather_rows(args[0]), *args[1:]))
        module.gather_rows = gather_rows  # type: ignore[assignment]
        return module


def _whole(x: Tensor, mesh: DeviceMesh, rows: Placement) -> Tensor:
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [rows], run_check=False)
    return x.redistribute(placements=[Replicate()])


class _Vocabulary(ParallelStyle):
    """The weight is divided by rows; the input becomes whole, and each rank's gradient of it is a part of the sum."""

    def __init__(self, rows: Placement) -> None:
        super().__init__()
        self.rows = rows

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute(module, device_mesh, Shard(0))

        def enter(part: nn.Module, args: Any) -> Any:
            whole: Any = _whole(args[0], device_mesh, self.rows)
            return whole.to_local(grad_placements=[Partial()]), *args[1:]

        module.register_forward_pre_hook(enter)
        return module


class _OnAPart(ParallelStyle):
    """The parameters are whole; each rank applies them to a part of the input, so their gradients are summed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(part: nn.Module, args: Any, mesh: DeviceMesh) -> Any:
            # it treats each vector along the last dimension alone, so any other one may be called the divided one
            return DTensor.from_local(args[0], mesh, [Shard(0)], run_check=False), *args[1:]

        def leave(part: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local()

        distribute(module, device_mesh, Replicate())
        return distribute_module(module, device_mesh, None, enter, leave)


def distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Leave a module this rank's part of each of its own parameters, which are equal on all ranks."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        shard = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(shard, parameter.requires_grad))


_Owner = tuple[nn.Module, str]


def _ties(module: nn.Module) -> list[list[_Owner]]:
    """The owners of each parameter that has several."""
    owners: dict[nn.Parameter, list[_Owner]] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                owners.setdefault(parameter, []).append((part, name))
    return [found for found in owners.values() if len(found) > 1]


def activations_sent(module: nn.Module, plan: Mapping[str, str]) -> int:
    """Elements of activations and their gradients that the tensor ranks send for a token of a micro-batch, in theory.

    A gather of a whole row, or a reduction that leaves each rank a part of it, counts once, and a reduction of which
    each rank gets the whole twice: so the number is the same with sequence parallelism and without. Checkpointing sends
    what belongs to the forward pass once more.

    Args:
        module: any, before `divide` or after it.
        plan: of `plan_of`.
    """
    named = named_by(plan, module)
    shared = [name for name, (_, word) in named.items() if word == "gather_sequence"]  # one input for several layers
    sent, seen = 0, set()
    layers: dict[str, tuple[Any, str]] = dict(named)
    for name, (part, word) in layers.items():
        if isinstance(part, nn.Embedding):
            sent += (2 if word == "embedding_rowwise" else 1) * part.embedding_dim
        elif word in ("rowwise", "rowwise_split_input"):  # the gradient of a whole input is gathered
            sent += 2 * part.out_features + (part.in_features if word == "rowwise_split_input" else 0)
        elif word in ("colwise", "colwise_gather_output", "vocabulary"):
            owner = next((other for other in shared if name.startswith(f"{other}.")), name)
            sent += 0 if owner in seen else 2 * part.in_features
            sent += part.out_features if word == "colwise_gather_output" else 0
            seen.add(owner)
    return sent


def refuse_other_losses(loss: Tensor, mesh: DeviceMesh) -> None:
    """Refuse tensor ranks that have different losses, as of different rows: their gradients would be nobody's.

    Every rank must call.

    Args:
        loss: a number.
        mesh: the tensor ranks.

    Raises:
        UsageError: on all ranks.
    """
    least, most = _extremes(local(loss.detach()).double(), mesh)
    if most - least > 1e-5 * most.abs():  # the same sums on the same numbers
        raise UsageError(
            f"mesh.tensor: the ranks that share matrices have losses from {least:.6g} to {most:.6g} in one step: give "
            "them the same rows (FSDP2Strategy.distributed_sampler_kwargs) and the same random numbers"
        )


class PartialGradients:
    """Refuses a plan under which a parameter that it leaves whole gets a gradient of a part of its work.

    Each tensor rank then has another gradient, and trains another value. A gradient that is zero says nothing: behind
    an output projection that starts at zero all are, in the first step. So a parameter is compared until its gradient
    was once not zero: after the 1st, 2nd, 4th, 8th ... call, so that one that is never used costs nothing in the end.
    Each comparison waits for the device.

    Args:
        module: divided.
        mesh: the tensor ranks.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self._module, self._mesh, self._calls = module, mesh, 0
        self._unseen = [
            name
            for name, parameter in module.named_parameters()
            if TENSOR_AXIS not in (getattr(getattr(parameter, "device_mesh", None), "mesh_dim_names", None) or ())
        ]

    def refuse(self) -> None:
        """Called after each backward pass that ends a step, by every rank.

        Raises:
            UsageError: on all ranks, naming the first such parameter.
        """
        self._calls += 1
        if not self._unseen or self._calls & (self._calls - 1):  # not a power of two
            return
        parameters = dict(self._module.named_parameters())
        norms = [_norm_of_gradient(parameters[name]) for name in self._unseen]
        least, most = _extremes(torch.stack(norms), self._mesh)
        differ, seen = torch.stack([(most - least) > 1e-3 * most, most > 0]).tolist()
        for name, is_partial in zip(self._unseen, differ, strict=True):
            if is_partial:
                raise UsageError(
                    f"mesh.tensor: '{name}' has another gradient on each tensor rank: it is applied to a part of its "
                    f"input and the plan does not say so (add '{name.rpartition('.')[0]}': "
                    "'replicated_with_grad_allreduce'), or a hook seeds each of these ranks differently (take the same "
                    "seed)"
                )
        self._unseen = [name for name, was_seen in zip(self._unseen, seen, strict=True) if not was_seen]


def _norm_of_gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        return torch.zeros((), dtype=torch.float64, device=parameter.device)
    return torch.linalg.vector_norm(local(parameter.grad).double())


def _extremes(own: Tensor, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """The least and the most of each number over the ranks."""
    least, most = own.clone(), own.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN, group=mesh.get_group())
    dist.all_reduce(most, dist.ReduceOp.MAX, group=mesh.get_group())
    return least, most


def is_sharded(parameter: Tensor) -> bool:
    """Whether FSDP2 has divided a parameter; a gathered one may still be divided over the tensor or expert ranks."""
    return isinstance(parameter, DTensor) and parameter.device_mesh.mesh_dim_names not in ((TENSOR_AXIS,), ("expert",))


def local_rows(weight: Tensor) -> tuple[Tensor, Any, int]:
    """This rank's rows of a weight that `vocabulary` divides, the group that has the others, the first row's number.

    A weight that is not divided comes back as it is, with None and 0.

    Raises:
        UsageError: a shard that FSDP2 has not gathered, whose ranks have different inputs.
    """
    if not isinstance(weight, DTensor):
        return weight, None, 0
    if is_sharded(weight):
        raise UsageError(
            "the weight of an output head is a shard: use it in the forward of the module that holds it, where FSDP2 "
            "gathers it"
        )
    own, mesh = weight.to_local(), weight.device_mesh
    return own, mesh.get_group(), mesh.get_local_rank() * len(own)


def whole_logits(logits: Tensor, weight: Tensor) -> Tensor:
    """The logits of all of a divided weight's rows, of those of this rank's."""
    if not isinstance(weight, DTensor):
        return logits
    return DTensor.from_local(logits, weight.device_mesh, [Shard(-1)], run_check=False).full_tensor()
