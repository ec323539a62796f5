"""Context parallelism without processes: which positions a rank has, and that all ranks have the same work."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lightning_tricks import FSDP2Strategy
from lightning_tricks._core.errors import UsageError
from lightning_tricks.models.attention import attention_of_parts, causal_attention, part_mask
from lightning_tricks.parallel.context import ContextParallel, own_positions

LENGTH = 16


class Part(ContextParallel):
    """A rank that has the other parts at hand, so that nothing is sent."""

    def __init__(self, ranks: int, rank: int, rows: list[torch.Tensor]) -> None:
        self.ranks, self.rank, self.method, self.rows = ranks, rank, "gather", rows
        self._positions = {}

    def whole(self, part: torch.Tensor, dim: int = 1) -> torch.Tensor:
        found = [row for row in self.rows if torch.equal(self.taken(row), part)]
        return found[0]

    def taken(self, row: torch.Tensor) -> torch.Tensor:
        return row[:, :, own_positions(LENGTH, self.ranks, self.rank)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_ranks_have_each_position_once_and_equally_many_to_look_back_at(ranks):
    positions = [own_positions(LENGTH, ranks, rank) for rank in range(ranks)]
    assert sorted(torch.cat(positions).tolist()) == list(range(LENGTH))
    assert len({int((own + 1).sum()) for own in positions}) == 1
    assert all(own.tolist() == sorted(own.tolist()) for own in positions)


@pytest.mark.parametrize("documents", [False, True])
def test_each_part_of_attention_is_that_of_the_whole(documents):
    q, k, v = torch.randn(3, 2, 4, LENGTH, 8, dtype=torch.float64)
    k, v = k[:, :2], v[:, :2]  # grouped heads
    ids = torch.arange(LENGTH).expand(2, -1) // 5
    whole = causal_attention(q, k, v, part_mask(None, ids) if documents else None)
    for rank in range(2):
        part = Part(2, rank, [k, v])
        mask = part_mask(part, ids) if documents else None
        found = attention_of_parts(part, *map(part.taken, (q, k, v)), mask)
        torch.testing.assert_close(found, part.taken(whole))


def test_the_products_of_all_ranks_are_equally_many():
    q, k, v = torch.randn(3, 1, 2, 64, 8)
    counts = []
    for rank in range(4):
        part = Part(4, rank, [k, v])
        part.taken = lambda row, rank=rank: row[:, :, own_positions(64, 4, rank)]
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # whose products are counted
            attention_of_parts(part, *map(part.taken, (q, k, v)), None)
        counts.append(counter.get_total_flops())
    assert max(counts) <= 1.05 * min(counts)
    assert min(counts) > 0


def test_rows_that_cannot_be_divided_are_refused_in_a_line():
    with pytest.raises(UsageError, match=r"mesh\.context=2: rows of 18 tokens are no multiple of 4"):
        Part(2, 0, []).positions(18, torch.device("cpu"))
    with pytest.raises(UsageError, match="context_method='ring': give one of gather, ulysses"):
        FSDP2Strategy(context_method="ring")
