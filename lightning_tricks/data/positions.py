"""Which sample positions belong to which micro-batch of which process: arithmetic only.

A step takes the next global batch of positions, however that is split.
"""

ENDLESS = 1 << 48  # steps: more than any run takes, and a range of them costs nothing


def micro_batch_positions(
    start: int, steps: int, micro_batches: int, micro_batch_size: int, rank: int = 0, world: int = 1
) -> range:
    """Position of the first row of each of this process's micro-batches.

    A step takes `world * micro_batches * micro_batch_size` consecutive positions, of which micro-batch m of rank r
    takes `micro_batch_size` from `(m * world + r) * micro_batch_size` on. So a step sees the same rows for every split
    of the same global batch into processes and micro-batches.

    Args:
        start: first position of the first step.
        steps: how many steps.
        micro_batches: accumulated for one step, in each process.
        micro_batch_size: rows in one.
        rank: this process.
        world: number of processes.

    Returns:
        `steps * micro_batches` positions, `world * micro_batch_size` apart.
    """
    first, stride = start + rank * micro_batch_size, world * micro_batch_size
    return range(first, first + steps * micro_batches * stride, stride)
