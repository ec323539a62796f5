"""ParallelDims: sizes that fill a world, the ranks that share something, and one line for sizes that do not fit."""

import pytest

from lightning_tricks._core.errors import UsageError
from lightning_tricks.parallel.dims import ParallelDims

CLUSTER = ParallelDims(replicate=2, context=2, tensor=4).of_world(64)


def test_the_shards_take_the_processes_that_are_left():
    assert ParallelDims(replicate=2, shard=4, context=2, tensor=4) == CLUSTER
    assert (CLUSTER.world, CLUSTER.data_ranks, CLUSTER.loss_ranks) == (64, 8, 16)
    assert str(CLUSTER) == "replicate 2 x shard 4 x context 2 x tensor 4"
    assert str(ParallelDims().of_world(1)) == "shard 1"


def test_expert_ranks_are_neighbours_among_the_shards_and_no_further_factor():
    dims = ParallelDims(pipeline=2, context=2, expert=4).of_world(16)
    assert (dims.world, dims.shard, str(dims)) == (16, 4, "pipeline 2 x shard 4 x context 2, expert 4")
    assert [dims.group(axis) for axis in ("shard", "rest", "expert")] == [(8, 1), (2, 4), (4, 1)]


def test_tensor_ranks_are_neighbours_and_share_their_rows_with_the_context_ranks():
    places = [(CLUSTER.data_rank(r), CLUSTER.place(r, "context"), CLUSTER.place(r, "tensor")) for r in range(64)]
    assert places[:9] == [*((0, 0, t) for t in range(4)), *((0, 1, t) for t in range(4)), (1, 0, 0)]
    assert places[-1] == (7, 1, 3)
    assert len(set(places)) == 64
    assert [CLUSTER.random_rank(r) for r in range(9)] == [0, 0, 0, 0, 4, 4, 4, 4, 8]


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ({"tensor": 3}, "mesh: tensor 3 does not divide the 8 devices: the sizes must multiply to num_nodes x devices"),
        ({"tensor": 16}, "mesh: tensor 16 does not divide the 8 devices"),
        ({"shard": 2, "context": 2}, "mesh: shard 2 x context 2 does not make the 8 devices"),
        ({"shard": 1}, "mesh: shard 1 does not make the 8 devices"),
        ({"tensor": 0}, "mesh.tensor=0: give a whole number of at least 1"),
        ({"context": -1}, "mesh.context=-1: give a whole number of at least 1"),
        ({"expert": 0}, "mesh.expert=0: give a whole number of at least 1"),
        ({"expert": 3}, "mesh.expert=3 does not divide the 8 ranks of shard 8 x context 1, among which experts are"),
        ({"replicate": 4, "expert": 4}, "mesh.expert=4 does not divide the 2 ranks of shard 2 x context 1"),
        ({"expert": 2, "tensor": 2}, "mesh.expert=2: experts are not divided over tensor ranks too"),
        ({"shard": -2}, "mesh.shard=-2: give a whole number of at least 1, or -1 for all processes that are left"),
        ({"pipeline": None}, "mesh.pipeline=None: give a whole number of at least 1"),
        ({"pipeline": "2"}, "mesh.pipeline='2': give a whole number of at least 1"),
        ({"expert": 2.5}, "mesh.expert=2.5: give a whole number of at least 1"),
        ({"tensor": True}, "mesh.tensor=True: give a whole number of at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_in_a_line(sizes, line):
    with pytest.raises(UsageError) as refused:
        ParallelDims(**sizes).of_world(8)
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)
