"""Muon on several ranks: each orthogonalizes some of the whole matrices. `test_libraries.py` trains it under FSDP2."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import processes
from harness.runs import whole
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_tricks.accounting import device_speed
from lightning_tricks.optim import Muon, muon
from lightning_tricks.optim.map_unsharded import RankGroup, map_unsharded
from lightning_tricks.optim.matrix_layout import MatrixLayout

pytestmark = pytest.mark.long


def mapped(matrices: list[torch.Tensor], compute: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """`map_unsharded` of matrices that lie alike; `compute` is of (number, whole matrix)."""

    def each(numbers: Any, wholes: list[torch.Tensor]) -> list[torch.Tensor]:
        return [compute(*pair) for pair in zip(numbers, wholes, strict=True)]

    (rank_group,) = {RankGroup.of(matrix) for matrix in matrices}
    return map_unsharded(matrices, rank_group, lambda numbers: [matrices[number] for number in numbers], each, dtype)


LAST_PLACES = 4 * 2**-8  # see test_muon
SHAPES = [(7, 4), (2, 5), (5, 8), (6, 3, 2), (8, 5), (9, 9), (3, 3)]
DIMS = [0, 0, 1, 0, 1, 1, 0]  # that are sharded


def shards_of(rank: int) -> None:
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 3
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    matrices = [torch.randn(*shape).bfloat16() for shape in SHAPES]
    computed: list[int] = []

    def compute(number: int, matrix: torch.Tensor) -> torch.Tensor:
        computed.append(number)
        assert torch.equal(matrix, matrices[number])
        return matrix.float() * (number + 1)

    for count, runs in ((7, [[0, 1, 2], [3, 4, 5], [6]]), (2, [[0], [1], []])):
        placed = [*zip(matrices, DIMS, strict=True)][:count]
        sharded = [distribute_tensor(matrix, mesh, [Shard(dim)]) for matrix, dim in placed]
        found = mapped(sharded, compute, torch.float32)
        for number, (matrix, dim) in enumerate(placed):
            expected = distribute_tensor(matrix.float() * (number + 1), mesh, [Shard(dim)]).to_local()
            assert torch.equal(found[number], expected), number
        assert computed == runs[rank]
        computed.clear()
        copied = [distribute_tensor(matrix, mesh, [Replicate()]) for matrix in matrices[:count]]
        found = mapped(copied, compute, torch.float32)
        assert all(torch.equal(found[number], matrices[number].float() * (number + 1)) for number in range(count))
        assert computed == runs[rank]
        computed.clear()


def test_each_rank_computes_some_of_the_matrices_and_gets_its_shards_of_all():
    processes.run(shards_of, world=3)


def hsdp(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(0)
    matrices = [torch.randn(4, 6).bfloat16() for _ in range(5)]
    computed: list[int] = []

    def compute(number: int, matrix: torch.Tensor) -> torch.Tensor:
        computed.append(number)
        return matrix.cumsum(0)

    for placements, own in (
        ([Replicate(), Shard(0)], [[0, 1], [2], [3], [4]]),  # each matrix on one of the four ranks
        ([Shard(1), Replicate()], [[0, 1], [3], [2], [4]]),
        ([Shard(0), Shard(1)], [[0, 1, 2, 3, 4]] * 4),
    ):
        placed = [distribute_tensor(matrix, mesh, placements) for matrix in matrices]
        found = mapped(placed, compute, torch.bfloat16)
        for one, matrix in zip(found, matrices, strict=True):
            assert torch.equal(one, distribute_tensor(matrix.cumsum(0), mesh, placements).to_local())
        assert computed == own[rank]
        computed.clear()


def test_copies_and_two_sharded_dimensions():
    processes.run(hsdp, world=4)


# ---- NorMuon: rows, or columns, that are cut over ranks

# shape, layout and the dimension that is sharded; two dimensions for a mesh of two
CUT = [
    ((7, 4), {}, (0, 1)),
    ((5, 8), {}, (1, 0)),
    ((6, 3, 2), {}, (0, 1)),
    ((12, 4), {"parts": (8, 2, 2)}, (0, 1)),
    ((4, 12), {"parts": (6, 6), "output_dim": 1, "interleaved": True}, (1, 0)),
    ((4, 4, 10), {"stacked": True, "output_dim": 2}, (0, 0)),
    ((2, 4, 6), {"stacked": True, "output_dim": 1}, (1, 2)),
]


def by_normuon(place: Any) -> list[Any]:
    """Weights and averages of NorMuon after three steps; `place` makes a tensor of a whole one and its number."""
    torch.manual_seed(0)
    groups: dict[str, Any] = {"params": [], "roles": [], "layouts": []}
    for number, (shape, layout, _) in enumerate(CUT):
        groups["params"].append(nn.Parameter(place(torch.randn(shape), number)))
        groups["roles"].append("expert" if layout.get("stacked") else "matrix")
        groups["layouts"].append(MatrixLayout(shape, **layout).plain)
    optimizer = Muon([groups], weight_decay=0.1, normuon_beta2=0.8, cautious_weight_decay=True)
    optimizer.param_groups[0]["ns_dtype"] = "float32"  # as on each machine
    for _ in range(3):
        for number, param in enumerate(groups["params"]):
            param.grad = place(torch.randn(CUT[number][0]), number)
        optimizer.step()
    averages = [optimizer.state[param]["second_moment"] for param in groups["params"]]
    return [*(whole(param).detach() for param in groups["params"]), *averages]


def cut(rank: int, expected: list[Any]) -> None:
    for names, sizes in ((1, (4,)), (2, (2, 2))):
        mesh = init_device_mesh("cpu", sizes)

        def place(tensor: torch.Tensor, number: int, mesh: Any = mesh, names: int = names) -> torch.Tensor:
            return distribute_tensor(tensor, mesh, [Shard(dim) for dim in CUT[number][2][:names]])

        for number, (found, one) in enumerate(zip(by_normuon(place), expected, strict=True)):
            torch.testing.assert_close(
                found, one, atol=3 * 0.02 * LAST_PLACES, rtol=LAST_PLACES, msg=f"{names} {number}"
            )


def test_normuon_of_cut_rows_and_columns_is_that_of_one_process():
    processes.run(cut, by_normuon(lambda tensor, _: tensor), world=4)


# ---- replicas

WIDTH = muon.SHARE_FROM


def replicas(rank: int, in_bf16: bool, steps: int = 3) -> tuple[dict[str, torch.Tensor], list[torch.Size]]:
    """The weights after some steps of plain replicas, and the shapes of what this rank orthogonalized in the first."""
    seen: list[torch.Size] = []

    def orthogonalize(matrix: torch.Tensor, *args: Any) -> torch.Tensor:
        assert args[1] == (torch.bfloat16 if in_bf16 else torch.float32)
        seen.extend([matrix.shape[-2:]] * (matrix[..., 0, 0].numel()))
        return original(matrix, *args)

    original = muon.orthogonalize
    torch.manual_seed(0)
    shapes = [(WIDTH, WIDTH)] * 3 + [(2 * WIDTH, WIDTH), (8, WIDTH), (8, WIDTH)]
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = Muon(params, weight_decay=0.1, momentum_warmup_steps=2)
    world = [1] if rank < 0 else [0, 1]
    if rank >= 0:
        distributed.init_process_group("gloo")
        optimizer.replicas = distributed.group.WORLD
    # the ranks measure different figures, and take bf16 only if it is fast on all
    fast = in_bf16 or rank == 0
    with (
        patch.object(muon, "orthogonalize", orthogonalize),
        patch.object(device_speed, "has_fast_bf16", lambda _: fast),
    ):
        first = 0
        for step in range(steps):
            for param in params:
                param.grad = torch.randn_like(param)
            optimizer.found_inf = torch.tensor(float(step == 1))  # type: ignore[attr-defined]
            optimizer.step()
            first = first or len(seen)
    assert len(world) == 1 or optimizer.param_groups[0]["ns_dtype"] == ("bfloat16" if in_bf16 else "float32")
    return dict(enumerate(param.detach() for param in params)), seen[:first]


def test_replicas_share_the_matrices_and_stay_equal_to_the_bit():
    square, tall, flat = torch.Size((WIDTH, WIDTH)), torch.Size((2 * WIDTH, WIDTH)), torch.Size((8, WIDTH))
    for in_bf16 in (False, True):
        alone, all_of_them = replicas(-1, in_bf16)
        assert sorted(all_of_them) == [flat, flat, square, square, square, tall]
        (one, own), (two, other) = processes.run(replicas, in_bf16)
        # four to share, the largest first; matrices of 8 rows cost more to send than to compute
        assert sorted(own) == [flat, flat, square, tall]
        assert sorted(other) == [flat, flat, square, square]
        for number, weight in one.items():
            assert torch.equal(weight, two[number]), number
            # 3 steps of lr 0.02 (factor sqrt(2) for the tall one), each of 4 last places of bf16 at most, see test_muon
            torch.testing.assert_close(weight, alone[number], atol=3 * 0.02 * 2**0.5 * 4 * 2**-8, rtol=0)
