"""The layout of a run as a table: the mesh, what a rank holds, what it sends."""

from torch import nn

from lightning_tricks.parallel.dims import ParallelDims
from lightning_tricks.parallel.parallelize import Parallelized
from lightning_tricks.parallel.shard import local_bytes


def summary(dims: ParallelDims, made: Parallelized, module: nn.Module) -> str:
    """The lines that tell how `module` was divided."""
    names, scalars = list(made.blocks), [name for name, parameter in module.named_parameters() if parameter.ndim == 0]
    few = names if len(names) < 3 else [names[0], "...", names[-1]]
    return "\n".join(
        [
            f"FSDP2 on {dims}",
            f"  blocks      {len(names):,}: {', '.join(few)}" if names else "  blocks      none",
            f"  parameters  {made.elements:,}, of which at most {made.gathered / max(made.elements, 1):.1%} "
            "are gathered at a time",
            f"  on rank 0   {local_bytes(module) / 2**20:,.2f} MiB of weights",
            *([f"  scalars     {len(scalars):,}, whole on every rank: {', '.join(scalars[:3])}"] if scalars else []),
        ]
    )
