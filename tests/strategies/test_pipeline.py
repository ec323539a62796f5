"""Pipeline stages give the losses, norms, gradients and weights of one process, under each schedule."""

import pytest
import torch
from harness.processes import end, run, start
from mesh_runs import Case, table, table_of_one
from test_mesh import BOUNDS, MUON, differences, joined

from lightning_tricks.parallel.dims import ParallelDims
from lightning_tricks.parallel.pipeline import SPLITS_BACKWARD

pytestmark = pytest.mark.long

STAGES = ParallelDims(pipeline=2)
TWO = {
    "1F1B": Case("deep, fused, budget", STAGES),
    "GPipe, accumulated": Case("deep", STAGES, {"pipeline_schedule": "GPipe"}, accumulate=2),
    "Interleaved1F1B, tied": Case("deep gpt2", STAGES, {"pipeline_schedule": "Interleaved1F1B"}, documents=True),
    "1F1B, tied": Case("deep gpt2", STAGES, accumulate=2),
    "InterleavedZeroBubble": Case("deep", STAGES, {"pipeline_schedule": "InterleavedZeroBubble"}),
    "ZBVZeroBubble": Case("deep, fused", STAGES, {"pipeline_schedule": "ZBVZeroBubble"}),
    "DualPipeV, checkpointed": Case(
        "deep", STAGES, {"pipeline_schedule": "DualPipeV", "activation_checkpointing": "full"}
    ),
    "watched": Case("deep", STAGES, {"pipeline_schedule": "GPipe", "pipeline_micro_batches": 1}, guarded=True),
    "1F1B, a model of the page": Case("of the page", STAGES),
    "Interleaved1F1B, 5 layers for 4 stages": Case(
        "of the page, 5 layers", STAGES, {"pipeline_schedule": "Interleaved1F1B"}, accumulate=2
    ),
    "1F1B, experts": Case("deep experts", STAGES, {"activation_checkpointing": "selective"}, accumulate=2),
    "Interleaved1F1B, experts": Case("deep experts", STAGES, {"pipeline_schedule": "Interleaved1F1B"}),
    "InterleavedZeroBubble, experts": Case("deep experts", STAGES, {"pipeline_schedule": "InterleavedZeroBubble"}),
    "ZBVZeroBubble, experts": Case("deep experts", STAGES, {"pipeline_schedule": "ZBVZeroBubble"}),
}
FOUR = {
    "4 stages": Case("deep", ParallelDims(pipeline=4)),
    "4 x 2 stages, tied": Case("deep gpt2", ParallelDims(pipeline=4), {"pipeline_schedule": "Interleaved1F1B"}),
    "stages and shards, tied": Case("deep gpt2", STAGES, {"pipeline_micro_batches": 2}, accumulate=2, documents=True),
    "stages, shards and experts": Case("deep experts", STAGES, {"pipeline_micro_batches": 2}, accumulate=2),
    "stages and expert ranks": Case(
        "deep experts", ParallelDims(pipeline=2, expert=2), {"activation_checkpointing": "full"}, accumulate=2
    ),
    "ZBV and expert ranks": Case(
        "deep experts", ParallelDims(pipeline=2, expert=2), {"pipeline_schedule": "ZBVZeroBubble"}
    ),
    "ZBV and shards": Case("deep", STAGES, {"pipeline_schedule": "ZBVZeroBubble"}),
    "stages and tensor, tied": Case("deep gpt2", ParallelDims(pipeline=2, tensor=2)),
    "stages and tensor, Muon": Case("deep muon", ParallelDims(pipeline=2, tensor=2)),
    "stages and context": Case("deep", ParallelDims(pipeline=2, context=2)),
    "stages and replicas": Case("deep", ParallelDims(pipeline=2, replicate=2), {"pipeline_micro_batches": 2}),
}
for _cases in (TWO, FOUR):
    for _name in [name for name, case in _cases.items() if case.options.get("pipeline_schedule") in SPLITS_BACKWARD]:
        if torch.__version__ < "2.13":  # refused there
            del _cases[_name]


@pytest.mark.parametrize(("cases", "world"), [(TWO, 2), (FOUR, 4)], ids=["two", "four"])
def test_every_schedule_trains_as_one_process_does(cases, world):
    alone = start(table_of_one, cases, world=1)
    ranks = run(table, cases, world, world=world)
    (one,) = end(alone)
    lines = []
    for name, case in cases.items():
        found = joined([rank[name] for rank in ranks])
        if isinstance(found, str):
            lines.append(f"{name}: {found}")
        else:
            bounds = MUON if case.model.endswith("muon") else BOUNDS[case.precision]
            lines += [f"{name}: {line}" for line in differences(found, one[name], bounds)]
    assert not lines, "\n".join(lines)
