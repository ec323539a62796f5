"""Tensor, sequence and context parallelism give the gradients, losses, norms and figures of one process."""

import pytest
import torch
from harness.processes import end, run, start
from mesh_runs import Case, Found, resumed_by_one, saved_and_resumed, saved_by_one, table, table_of_one

from lightning_tricks.parallel.dims import ParallelDims

TENSOR, CONTEXT, REPLICAS = ParallelDims(tensor=2), ParallelDims(context=2), ParallelDims(replicate=2, tensor=2)

TWO = {
    "tensor": Case("llama", TENSOR, {"sequence_parallel": False}),
    "tensor and sequence": Case("llama", TENSOR, guarded=True),
    "tensor and sequence, tied, normed heads": Case("normed", TENSOR, {"activation_checkpointing": "full"}),
    "tensor and sequence, learned positions": Case("gpt2", TENSOR),
    "tensor, Hugging Face": Case("hugging face", TENSOR, guarded=True),
    "tensor, foreign": Case("foreign", TENSOR),
    "tensor, Muon": Case("muon", TENSOR),
    "tensor, a plan that forgets": Case("forgets", TENSOR),
    "context": Case("llama", CONTEXT, guarded=True),
    "context, documents": Case("gpt2", CONTEXT, documents=True),
    "context, ulysses, documents": Case("normed", CONTEXT, {"context_method": "ulysses"}, documents=True),
    "shards, one reduction": Case("llama", ParallelDims(), {"reduce_gradients": "step"}, accumulate=2),
}
FOUR = {
    "shards and tensor": Case("llama", TENSOR, accumulate=2),
    "shards and tensor, one reduction": Case("llama", TENSOR, {"reduce_gradients": "step"}, accumulate=2),
    "shards and tensor, Hugging Face": Case("hugging face", TENSOR),
    "shards and tensor, Muon": Case("muon", TENSOR),
    "shards and context": Case("llama", CONTEXT),
    "tensor and context": Case("normed", ParallelDims(tensor=2, context=2), documents=True, guarded=True),
    "replicas and tensor": Case(
        "llama", ParallelDims(replicate=2, tensor=2), {"reduce_gradients": "replicas"}, accumulate=2
    ),
}

# Sums of floats in another order: a few units in the last place of the largest entry of a gradient, of a loss, a norm.
GRADIENT, FIGURE, MOVED = 5e-6, 2e-6, 1e-3
MUON_MOVED = 0.2  # it multiplies in bf16, whose rounding a last place in fp32 may turn by 2**-8, five times in a row
SAME = ("train/loss", "train/grad_norm", "train/lr", "val/loss", "tokens_per_second", "model_flops_per_second")


def differences(here: Found, one: Found, moved: float) -> list[str]:
    """A line for each gradient and figure that is not that of one process.

    Args:
        moved: share by which a weight may have moved otherwise.
    """
    lines, figure = [], FIGURE * max(1.0, moved / MOVED)
    if here.gradients.keys() != one.gradients.keys():
        lines.append(f"gradients of other parameters: {here.gradients.keys() ^ one.gradients.keys()}")
    largest = max(float(gradient.abs().max()) for gradient in one.gradients.values())
    for name, gradient in one.gradients.items():
        # the gradient of a key's bias is 0 but for rounding, as a softmax does not change with it
        is_zero = name.endswith("attn.k.bias")
        gap = float((here.gradients[name] - gradient).abs().max() / (largest if is_zero else gradient.abs().max()))
        if not gap <= GRADIENT:
            lines.append(f"gradient of {name}: {gap:.1e}")
        gap = float((here.moved[name] - one.moved[name]).norm() / one.moved[name].norm())
        if not (is_zero or gap <= moved):
            lines.append(f"weight {name} moved otherwise by {gap:.1e}")
    if here.ledger != one.ledger:
        lines.append(f"the sum of the weights in the ledger is {here.ledger} in place of {one.ledger}")
    for name in [*SAME, *(name for name in one.logged if name.startswith("attention/"))]:
        mine, theirs = here.logged.get(name, []), one.logged.get(name, [])
        if len(mine) != len(theirs) or any(
            not abs(a - b) <= figure * max(1.0, abs(b)) for a, b in zip(mine, theirs, strict=True)
        ):
            lines.append(f"{name}: {mine} in place of {theirs}")
    return lines


@pytest.mark.parametrize(("cases", "world"), [(TWO, 2), (FOUR, 4)], ids=["two", "four"])
def test_every_layout_trains_as_one_process_does(cases, world):
    alone = start(table_of_one, cases, world=1)
    ranks = run(table, cases, world, world=world)
    (one,) = end(alone)
    lines = []
    for name in cases:
        said, moved = ranks[0][name], MUON_MOVED if cases[name].model == "muon" else MOVED
        if name.endswith("forgets"):
            lines += [] if "'blocks.0.scale.weight' has another gradient on each tensor rank" in said else [said]
        elif isinstance(said, str):
            lines.append(f"{name}: {said}")
        else:
            lines += [f"{name}: {line}" for line in differences(said, one[name], moved)]
            for rank in ranks[1:]:
                assert all(torch.equal(a, said.moved[key]) for key, a in rank[name].moved.items()), name
    assert not lines, "\n".join(lines)


def test_a_checkpoint_of_each_layout_goes_on_in_each_other(tmp_path):
    (one,) = run(saved_by_one, tmp_path, world=1)
    ranks = run(saved_and_resumed, tmp_path, world=2)
    (by_one,) = run(resumed_by_one, tmp_path, world=1)
    resumes = {pair: found for pair, found in ranks[0].items() if isinstance(pair, tuple)}
    assert len(resumes) == 12
    resumes |= {(saver, "one"): found for saver, found in by_one.items()}
    lines = []
    for (saver, opener), found in resumes.items():
        if isinstance(found, str):
            lines.append(f"{saver} -> {opener}: {found}")
            continue
        exact = saver == opener  # to the bit; other layouts sum in another order
        for name, weight in (ranks[0][saver] if exact else one).weights.items():
            # AdamW divides by the root of a gradient's square: where that is near 0, rounding turns an update
            bound = 0.0 if exact else 3e-4
            gap = float((found.weights[name] - weight).abs().max())
            if not gap <= bound:
                lines.append(f"{saver} -> {opener}: {name} differs by {gap:.1e}")
    assert not lines, "\n".join(lines)
