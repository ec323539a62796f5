"""The memory of pipeline stages: one micro-batch of the schedule is traced through the stages of a rank.

The activations of the other micro-batches that the rank holds by the schedule are added. The first rank, one in the
middle and the last one stand for all.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_tricks.commands.plan.memory_trace import STEP, Lines, StepMemory
from lightning_tricks.commands.plan.setup import RunSetup
from lightning_tricks.data.batches import TOKENS_A_START
from lightning_tricks.parallel.pipeline import Cut
from lightning_tricks.parallel.stage_timeline import Act, most_held, timeline


def timeline_of(setup: RunSetup) -> list[list[Act]]:
    """What each pipeline rank does in a call of the model."""
    return timeline(setup.strategy.pipeline_schedule, setup.dims.pipeline, setup.strategy.pipeline_micro_batches)


def ranks_of_stages(setup: RunSetup) -> dict[str, int]:
    """The ranks of the world that are traced."""
    ranks = setup.dims.pipeline
    places = {"first": 0, **({"middle": ranks // 2} if ranks > 2 else {}), "last": ranks - 1}
    return {name: place * setup.dims.stride("pipeline") for name, place in places.items()}


def layers_held(setup: RunSetup, rank: int) -> tuple[int, int]:
    """Number of layers of a rank, and the most of which it holds activations. In a forked process: it builds."""
    cut = setup.strategy.cut_stages(setup.build(), setup.dims, rank)
    layers = {number: len(cut.layers[number]) for number in cut.stages}
    return sum(layers.values()), most_held(timeline_of(setup)[setup.dims.place(rank, "pipeline")], layers)


def of_fullest(setup: RunSetup, traces: Sequence[Any]) -> StepMemory:
    """The memory of the rank that takes most.

    Args:
        setup: see there.
        traces: for each of `ranks_of_stages` what `layers_held` returns, and its memory.
    """
    found = {}
    for name, (layers, held), memory in zip(ranks_of_stages(setup), traces[::2], traces[1::2], strict=True):
        own = max(lines.get("activations", 0) for lines in memory.instants.values())
        found[name] = memory.changed(partial(_with_others, int(own * (held / layers - 1))))
    fullest = max(found.values(), key=lambda memory: memory.peak)
    return replace(fullest, ranks={name: memory.peak for name, memory in found.items()})


def _with_others(activations: int, instant: str, lines: Lines) -> Lines:
    return lines if instant == STEP else {**lines, "activations": lines.get("activations", 0) + activations}


def loss_of_stages(setup: RunSetup, cut: Cut, _: Any) -> Tensor:
    """The sum of what a rank's stages make of one of the schedule's micro-batches of zeros."""
    ids = torch.zeros(max(1, setup.rows // setup.strategy.pipeline_micro_batches), setup.length, dtype=torch.long)
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids.clone()}
    if getattr(setup.datamodule, "document_ids", False):
        inputs["document_ids"] = torch.zeros_like(ids, dtype=torch.int32)
        inputs["document_starts"] = torch.zeros(len(ids), setup.length // TOKENS_A_START, dtype=torch.int32)
    config, length = setup.module.config, setup.length // setup.dims.context
    if setup.dims.tensor > 1 and setup.strategy.sequence_parallel:
        length //= setup.dims.tensor
    dtype = setup.policy().param_dtype or setup.weights_dtype
    total = torch.zeros(())
    for stage in cut.stages.values():
        hidden: list[Any] = [None]
        if not stage.first:
            hidden = [torch.zeros(len(ids), length, config.d_model, dtype=dtype, requires_grad=True)]
            hidden += [] if config.n_experts is None else [torch.zeros((), requires_grad=True)]
        out = stage(*hidden, **inputs)
        total = total + sum(one.float().sum() for one in (out if isinstance(out, tuple) else (out,)))
    return total
