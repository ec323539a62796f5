"""RunLedger's sums on a CUDA device: those of the CPU, without a wait for the device."""

import pytest
import torch
from torch import nn

from lightning_tricks.monitors._bit_sums import WeightSum, batch_sums, torch_random_sum

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_the_sums_are_those_of_the_cpu_and_nothing_waits():
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    module, batch = nn.Linear(300, 70), {"x": torch.randn(4, 9), "ids": torch.randint(9, (4, 9))}
    expected = [WeightSum(module, 1, 0).of_part(0, cpu).item()]
    expected += [total.tolist() for total in batch_sums(batch)[0]]
    module, batch = module.to(cuda), {name: tensor.to(cuda) for name, tensor in batch.items()}
    weights = WeightSum(module, 1, 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        part, (totals, _) = weights.of_part(0, cuda), batch_sums(batch)
        before = torch_random_sum(cuda)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [part.item(), *(total.tolist() for total in totals)] == expected
    torch.rand(3, device=cuda)
    assert torch_random_sum(cuda) != before
