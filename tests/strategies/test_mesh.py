"""Tensor, sequence, context and expert parallelism give the gradients, losses, norms and figures of one process."""

from itertools import combinations
from typing import Any, NamedTuple

import pytest
import torch
from harness.processes import end, run, start
from mesh_runs import (
    LENGTH,
    ROWS,
    STEPS,
    Case,
    Found,
    experts_resumed_by_one,
    experts_saved_and_resumed,
    resumed_by_one,
    saved_and_resumed,
    saved_by_one,
    table,
    table_of_one,
)

from lightning_tricks.parallel.dims import ParallelDims

pytestmark = pytest.mark.long

TENSOR, CONTEXT, REPLICAS = ParallelDims(tensor=2), ParallelDims(context=2), ParallelDims(replicate=2, tensor=2)
EXPERT = ParallelDims(expert=2)

TWO = {
    "tensor": Case("llama", TENSOR, {"sequence_parallel": False}),
    "tensor and sequence": Case("llama", TENSOR, guarded=True),
    "tensor and sequence, tied, normed heads": Case("normed", TENSOR, {"activation_checkpointing": "full"}),
    "tensor and sequence, learned positions": Case("gpt2", TENSOR),
    "tensor, Hugging Face": Case("hugging face", TENSOR, guarded=True),
    "tensor, Phi-3": Case("phi 3", TENSOR),
    "tensor, OLMo-2": Case("olmo 2", TENSOR),
    "tensor, foreign": Case("foreign", TENSOR),
    "tensor, a plan that forgets": Case(
        "forgets", TENSOR, says="'blocks.0.scale.weight' has another gradient on each tensor rank"
    ),
    "tensor, a plan that forgets, behind a head of zeros": Case(
        "forgets, from zero", TENSOR, says="'blocks.0.scale.weight' has another gradient on each tensor rank"
    ),
    "tensor, rows of each process": Case("own rows", TENSOR, says="the ranks that share matrices have losses from "),
    "tensor, compiled": Case("llama", TENSOR, {"compile_blocks": True, "activation_checkpointing": "selective"}),
    "shards, fused": Case("fused", ParallelDims(), {"activation_checkpointing": "cheap"}),
    "tensor, fused": Case("fused gpt2", TENSOR, {"sequence_parallel": False, "activation_checkpointing": "full"}),
    "tensor and sequence, fused": Case("fused", TENSOR),
    "tensor, fused, compiled": Case("fused", TENSOR, {"compile_blocks": True, "activation_checkpointing": "selective"}),
    "expert ranks, fused": Case("fused experts", EXPERT, {"activation_checkpointing": "selective"}),
    "tensor, fp8 of small parts": Case(
        "llama", TENSOR, precision="fp8", says="leaves 8 of the out_features of decoder"
    ),
    "tensor, fp16 of Lightning": Case(
        "llama", TENSOR, precision="Lightning's fp16", says="its loss scaling does not work with mesh.tensor"
    ),
    "tensor, bf16": Case("wide", TENSOR, precision="bf16"),
    "tensor, fp8": Case("wide", TENSOR, precision="fp8"),
    "tensor, fp8 by rows": Case("wide", TENSOR, {"sequence_parallel": False}, precision="fp8 by rows"),
    "context": Case("llama", CONTEXT, guarded=True),
    "context, fp8": Case("wide", CONTEXT, precision="fp8"),
    "context, documents": Case("gpt2", CONTEXT, documents=True),
    "context, ulysses, documents": Case("normed", CONTEXT, {"context_method": "ulysses"}, documents=True),
    "experts": Case(
        "experts, balanced by rows", ParallelDims(), {"activation_checkpointing": "full"}, accumulate=2, guarded=True
    ),
    "experts, DDP": Case("experts, balanced by rows", ParallelDims(), {"ddp": True}, accumulate=2, guarded=True),
    "experts, context": Case("experts", CONTEXT),
    "experts, parts of balanced rows": Case(
        "experts, balanced by rows", CONTEXT, says="mesh.context: decoder.sequence_balance_weight=0.05 needs whole rows"
    ),
    "experts, tensor": Case("experts", TENSOR, says="mesh.tensor: decoder.n_experts=8 is not divided over ranks"),
    "expert ranks": Case(
        "experts, balanced by rows", EXPERT, {"activation_checkpointing": "full"}, accumulate=2, guarded=True
    ),
    "expert ranks, bf16": Case("all experts", EXPERT, precision="bf16"),
    "expert ranks, compiled": Case(
        "experts", EXPERT, {"compile_blocks": True, "activation_checkpointing": "selective"}
    ),
    "expert ranks, one without a row": Case("crowded experts", EXPERT, {"activation_checkpointing": "cheap"}),
    "expert ranks, none to share": Case("llama", EXPERT, says="the model has no mixture of experts to share out"),
    "expert ranks, too many": Case(
        "experts", ParallelDims(expert=4), says="mesh.expert=4 does not divide the 2 ranks of "
    ),
    "shards, one reduction": Case("llama", ParallelDims(), {"reduce_gradients": "step"}, accumulate=2),
}
FOUR = {
    "shards and tensor, fp8": Case("wide", TENSOR, precision="fp8"),
    "shards and tensor, one reduction": Case("llama", TENSOR, {"reduce_gradients": "step"}, accumulate=2),
    "shards and tensor, Hugging Face, from rank 0": Case("built late", TENSOR, {"init_on_rank_0": True}, accumulate=2),
    "shards and tensor, Muon": Case("muon", TENSOR),
    "shards and context": Case("llama", CONTEXT),
    "experts on replicas of shards": Case("experts, balanced by rows", ParallelDims(replicate=2)),
    "expert ranks with shards": Case(
        "experts, balanced by rows", EXPERT, {"activation_checkpointing": "cheap"}, accumulate=2, guarded=True
    ),
    "expert ranks in all shards": Case("experts, balanced by rows", ParallelDims(expert=4), guarded=True),
    "expert ranks with parts of experts": Case("all experts", EXPERT, {"activation_checkpointing": "selective"}),
    "expert ranks and context": Case(
        "experts", ParallelDims(context=2, expert=4), {"activation_checkpointing": "full"}
    ),
    "expert ranks on replicas": Case(
        "experts, balanced by rows", ParallelDims(replicate=2, expert=2), {"reduce_gradients": "step"}, accumulate=2
    ),
    "expert ranks, Muon": Case("experts, muon", EXPERT),
    "tensor and context": Case(
        "normed", ParallelDims(tensor=2, context=2), {"timeout_seconds": 1234.0}, documents=True, guarded=True
    ),
    "replicas and tensor": Case(
        "llama", ParallelDims(replicate=2, tensor=2), {"reduce_gradients": "step"}, accumulate=2
    ),
}


class Bounds(NamedTuple):
    """How far a gradient may be off, by its largest entry; a figure; and a weight's way, by its length."""

    gradient: float
    figure: float
    moved: float


BOUNDS = {
    # sums of floats in another order: a few units in the last place
    None: Bounds(5e-6, 2e-6, 1e-3),
    # a sum's rounding to bf16, 2**-9, goes through some ten products; that of a gradient to 2 bits of fp8 is 2**-3
    "bf16": Bounds(4e-2, 1e-2, 4e-2),
    "fp8": Bounds(0.25, 5e-2, 0.25),
    "fp8 by rows": Bounds(0.25, 5e-2, 0.25),
}
# five products in bf16, one after the other, may round otherwise by a last place of fp32
MUON = Bounds(5e-6, 4e-4, 0.2)
# FLOPs of the angles of transformers' rotary embedding: up to version 5.17 a product, which each process computes whole
ANGLES = 2 * 4 * LENGTH
# Those of attention where each tensor rank computes it whole: two products of two blocks, forward and twice backward.
ATTENTION = 3 * 2 * 2 * (2 * ROWS * LENGTH**2 * 32)
BOTH = ATTENTION + ANGLES
COUNTED_AGAIN = {"hugging face": ANGLES, "built late": ANGLES, "phi 3": BOTH, "olmo 2": BOTH}
FLOPS = ("model_flops_per_second", "flops_per_token")
SAME = ("train/loss", "late/loss", "train/grad_norm", "train/lr", "val/loss", "tokens_per_second", *FLOPS)


def differences(here: Found, one: Found, bounds: Bounds, flops: int = 0) -> list[str]:
    """A line for each gradient and figure that is not that of one process; so many FLOPs may be counted in addition."""
    lines = []
    if here.gradients.keys() != one.gradients.keys():
        lines.append(f"gradients of other parameters: {here.gradients.keys() ^ one.gradients.keys()}")
    largest = max(float(gradient.abs().max()) for gradient in one.gradients.values())
    for name, gradient in one.gradients.items():
        # the gradient of a key's bias is 0 but for rounding, as a softmax does not change with it
        is_zero = name.endswith("attn.k.bias")
        gap = float((here.gradients[name] - gradient).abs().max() / (largest if is_zero else gradient.abs().max()))
        if not gap <= bounds.gradient:
            lines.append(f"gradient of {name}: {gap:.1e}")
        way, rounding = one.moved[name].norm(), STEPS * 2**-24 * one.weights[name].norm()  # of the weight, at each step
        gap = float(((here.moved[name] - one.moved[name]).norm() - rounding) / way)
        if not (is_zero or gap <= bounds.moved):
            lines.append(f"weight {name} moved otherwise by {gap:.1e}")
    for name in one.moved.keys() - one.gradients.keys():  # the biases of experts: no gradient, but counts of tokens
        if not torch.equal(here.weights[name], one.weights[name]) or not one.moved[name].any():
            lines.append(f"{name} is {here.weights[name]} in place of {one.weights[name]}")
    if here.ledger != one.ledger:
        lines.append(f"the sum of the weights in the ledger is {here.ledger} in place of {one.ledger}")
    for name in [*SAME, *(name for name in one.logged if name.startswith(("attention/", "experts/")))]:
        mine, theirs = here.logged.get(name, []), one.logged.get(name, [])
        more = flops if name in FLOPS else 0
        if len(mine) != len(theirs) or any(
            not abs(a - b) <= bounds.figure * max(1.0, abs(b)) + more for a, b in zip(mine, theirs, strict=True)
        ):
            lines.append(f"{name}: {mine} in place of {theirs}")
    return lines


def joined(said: list[Any]) -> Any:
    """What all ranks found together, of which pipeline stages have some of the weights; figures are rank 0's."""
    if errors := [each for each in said if isinstance(each, str)]:
        return errors[0]
    for one, other in combinations(said, 2):
        for name in one.moved.keys() & other.moved.keys():
            if not torch.equal(one.moved[name], other.moved[name]):
                return f"{name} differs between ranks"
    gradients, moved, weights = (
        {name: value for each in said for name, value in getattr(each, part).items()}
        for part in ("gradients", "moved", "weights")
    )
    return Found(gradients, said[0].logged, moved, weights, said[0].ledger)


@pytest.mark.parametrize(("cases", "world"), [(TWO, 2), (FOUR, 4)], ids=["two", "four"])
def test_every_layout_trains_as_one_process_does(cases, world):
    alone = start(table_of_one, cases, world=1)
    ranks = run(table, cases, world, world=world)
    (one,) = end(alone)
    lines = []
    for name in cases:
        said, case = joined([rank[name] for rank in ranks]), cases[name]
        if case.says:
            lines += [] if isinstance(said, str) and case.says in said else [f"{name}: {said}"]
        elif isinstance(said, str):
            lines.append(f"{name}: {said}")
        else:
            bounds = MUON if case.model.endswith("muon") else BOUNDS[case.precision]
            flops = (world - 1) * case.accumulate * COUNTED_AGAIN.get(case.model, 0)
            lines += [f"{name}: {line}" for line in differences(said, one[name], bounds, flops)]
    assert not lines, "\n".join(lines)


def test_a_checkpoint_of_each_layout_goes_on_in_each_other(tmp_path):
    (one,) = run(saved_by_one, tmp_path, world=1)
    ranks = run(saved_and_resumed, tmp_path, world=2)
    (by_one,) = run(resumed_by_one, tmp_path, world=1)
    together = {key: joined([rank[key] for rank in ranks]) for key in ranks[0]}
    resumes = {pair: found for pair, found in together.items() if isinstance(pair, tuple)}
    assert len(resumes) == 20
    resumes |= {(saver, "one"): found for saver, found in by_one.items()}
    lines = []
    for (saver, opener), found in resumes.items():
        if isinstance(found, str):
            lines.append(f"{saver} -> {opener}: {found}")
            continue
        exact = saver == opener  # to the bit; other layouts sum in another order
        for name, weight in (together[saver] if exact else one).weights.items():
            # AdamW divides by the root of a gradient's square: where that is near 0, rounding turns an update
            bound = 0.0 if exact else 3e-4
            gap = float((found.weights[name] - weight).abs().max())
            if not gap <= bound:
                lines.append(f"{saver} -> {opener}: {name} differs by {gap:.1e}")
    assert not lines, "\n".join(lines)


def test_a_checkpoint_of_divided_experts_goes_on_in_each_layout(tmp_path):
    ranks = run(experts_saved_and_resumed, tmp_path, world=4)
    (alone,) = run(experts_resumed_by_one, tmp_path, world=1)
    together = {key: joined([rank[key] for rank in ranks]) for key in ranks[0]}
    resumes = {pair: found for pair, found in together.items() if isinstance(pair, tuple)}
    assert len(resumes) == 10
    lines = []
    for (saver, opener), found in {**resumes, ("one has half", "one"): alone}.items():
        exact = saver == opener  # to the bit, also the state of AdamW, without which it would take other steps
        for name, weight in together[saver if exact else "one has half"].weights.items():
            bound = 0.0 if exact or name.endswith("router.bias") else 3e-4  # as above
            gap = float((found.weights[name] - weight).abs().max())
            if not gap <= bound:
                lines.append(f"{saver} -> {opener}: {name} differs by {gap:.1e}")
    assert not lines, "\n".join(lines)
    biases = [weight for name, weight in alone.weights.items() if name.endswith("router.bias")]
    assert len(biases) == 1
    assert biases[0].abs().max() > 0.001  # of two steps, each 0.001
