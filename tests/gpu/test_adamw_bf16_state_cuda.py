"""AdamWBF16State on a GPU: it trains beside AdamW, takes half of its state, and goes on to the bit."""

import copy

import pytest
import torch
from torch import nn

from lightning_tricks import AdamWBF16State

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def trained(make, steps=200, optimizer=None, model=None, first=0):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).cuda()
    optimizer = optimizer or make(model.parameters())
    losses = []
    for step in range(first, steps):
        batch = torch.randn(32, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
        loss = (model(batch) - batch.flip(1)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses


def test_it_learns_as_adamw_does_with_half_of_its_state():
    _, plain, expected = trained(lambda params: torch.optim.AdamW(params, lr=1e-2, betas=(0.9, 0.95), fused=True))
    _, optimizer, losses = trained(lambda params: AdamWBF16State(params, lr=1e-2))
    assert losses[-1] == pytest.approx(expected[-1], rel=0.1)
    assert losses[-1] < 0.5 * losses[0]

    def size(one):
        return sum(s[name].nbytes for s in one.state.values() for name in ("exp_avg", "exp_avg_sq"))

    assert size(plain) == 2 * size(optimizer)


def test_a_resume_is_bitwise():
    make = lambda params: AdamWBF16State(params, lr=1e-2)  # noqa: E731
    model, optimizer, _ = trained(make, steps=10)
    resumed = copy.deepcopy(model)
    other = make(resumed.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    _, _, expected = trained(make, 20, optimizer, model, first=10)
    _, _, losses = trained(make, 20, other, resumed, first=10)
    assert losses == expected
