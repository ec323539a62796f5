"""AdamWCautiousDecay: the formula of its docstring, AdamW's step where nothing decays, skips, scales and resumes."""

import copy
import math

import pytest
import torch
from torch import nn

from lightning_tricks.optim import AdamWCautiousDecay, MuonAdamW, build_optimizer, one_kernel, skips_on_device
from lightning_tricks.optim.adamw_cautious_decay import _decay_adamw_
from lightning_tricks.optim.mup import rule_of

SHAPES = [(5, 7), (9,), (), (2, 3, 4)]


def drawn(shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def train(weights, make, steps=5, before_step=None, scale=1.0):
    """The parameters after some steps on drawn gradients, and their optimizer."""
    params = [nn.Parameter(weight.clone()) for weight in weights]
    optimizer = make(params)
    for step in range(steps):
        for param, grad in zip(params, drawn([p.shape for p in params], seed=step + 1), strict=True):
            param.grad = grad * scale
        if before_step is not None:
            before_step(optimizer, step)
        optimizer.step()
    return params, optimizer


def by_formula(weights, lr, betas, eps, weight_decay, steps=5):
    """The formula of the paper, each operation written out, in fp64."""
    weights = [weight.double() for weight in weights]
    averages = [(torch.zeros_like(weight), torch.zeros_like(weight)) for weight in weights]
    for step in range(1, steps + 1):
        grads = drawn([weight.shape for weight in weights], seed=step)
        for index, grad in enumerate(grads):
            m, v = averages[index]
            m = betas[0] * m + (1 - betas[0]) * grad.double()
            v = betas[1] * v + (1 - betas[1]) * grad.double() ** 2
            averages[index] = m, v
            u = (m / (1 - betas[0] ** step)) / ((v / (1 - betas[1] ** step)).sqrt() + eps)
            w = weights[index]
            weights[index] = w - lr * u - lr * weight_decay * w * (u * w >= 0)
    return [weight.float() for weight in weights]


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("chunk", [4, 1 << 16])
def test_the_weights_are_those_of_the_formula(monkeypatch, fused, chunk):
    monkeypatch.setattr(one_kernel, "CHUNK_ON_CPU", chunk)
    settings = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.5}
    found, optimizer = train(drawn(), lambda params: AdamWCautiousDecay(params, **settings, fused=fused))
    expected = by_formula(drawn(), **settings)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.detach(), other)
    plain, _ = train(drawn(), lambda params: torch.optim.AdamW(params, **settings, fused=fused))
    assert not torch.allclose(found[0], plain[0], atol=1e-3)
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


def test_without_decay_it_is_adamw_to_the_bit_and_a_tensor_may_be_the_learning_rate():
    for lr in (0.1, torch.tensor(0.1)):
        plain = {"lr": lr, "betas": (0.9, 0.95), "weight_decay": 0.0, "fused": True}
        ours, _ = train(drawn(), lambda params, plain=plain: AdamWCautiousDecay(params, **plain))
        torchs, _ = train(drawn(), lambda params, plain=plain: torch.optim.AdamW(params, **plain))
        assert equal(ours, torchs)
    as_float, as_tensor = (train(drawn(), lambda p, lr=lr: AdamWCautiousDecay(p, lr=lr))[0] for lr in (0.1, lr))
    for one, other in zip(as_float, as_tensor, strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_of_another_layout_and_complex_weights_are_as_their_real_parts():
    def make(params):
        return AdamWCautiousDecay(params, lr=0.1, weight_decay=0.5, fused=False)  # the fused kernel takes one layout

    weight = drawn([(4, 6)])[0]
    ours, _ = train([weight], make)
    turned, _ = train([weight.T.contiguous().T], make)
    assert equal(ours, turned)
    pairs = drawn([(3, 2)])[0]
    real, complex_ = nn.Parameter(pairs.clone()), nn.Parameter(torch.view_as_complex(pairs.clone()))
    for param in (real, complex_):
        optimizer = make([param])
        for grad in drawn([(3, 2)] * 3, seed=5):
            param.grad = torch.view_as_complex(grad) if param.is_complex() else grad
            optimizer.step()
    torch.testing.assert_close(torch.view_as_real(complex_.detach()), real.detach())


def test_a_step_is_skipped_on_the_device():
    def skip(optimizer, step):
        optimizer.found_inf = torch.tensor(float(step == 2))
        for param in optimizer.param_groups[0]["params"] if step == 2 else ():
            param.grad.fill_(math.inf).view(-1)[:1] = math.nan

    def leave_out(optimizer, step):
        for param in optimizer.param_groups[0]["params"] if step == 2 else ():
            param.grad = None

    def make(params):
        return AdamWCautiousDecay(params, lr=0.1, weight_decay=0.5)

    skipped, one = train(drawn(), make, before_step=skip)
    without, other = train(drawn(), make, before_step=leave_out)
    assert equal(skipped, without)
    for mine, theirs in zip(one.state.values(), other.state.values(), strict=True):
        assert equal(mine.values(), theirs.values())
    assert skips_on_device(one)
    assert not skips_on_device(AdamWCautiousDecay(skipped, fused=False))


def test_gradients_of_a_scaled_loss_are_unscaled_as_adamws_kernel_does():
    def tell_scale(optimizer, step):
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0), torch.zeros(())

    plain, _ = train(drawn(), lambda p: AdamWCautiousDecay(p, lr=0.1, weight_decay=0.5))
    scaled, _ = train(
        drawn(), lambda p: AdamWCautiousDecay(p, lr=0.1, weight_decay=0.5), before_step=tell_scale, scale=1024.0
    )
    assert equal(plain, scaled)


def test_closure_and_hooks_run_once_a_step_and_the_decay_comes_back_after_an_error():
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # from then on, AdamW.step calls the hooks
    weight, calls = nn.Parameter(torch.ones(2)), []
    optimizer = AdamWCautiousDecay([weight], weight_decay=0.5)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure():
        calls.append("closure")
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert calls == ["before", "closure", "after"]
    assert weight.detach().tolist() == pytest.approx([1 - 3e-4 * 1.5] * 2)
    weight.grad = torch.ones(2).to_sparse()
    with pytest.raises((RuntimeError, NotImplementedError)):
        optimizer.step()
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


def test_a_resume_is_bitwise_also_from_a_checkpoint_of_adamw():
    def make(params):
        return AdamWCautiousDecay(params, lr=0.1, weight_decay=0.5)

    whole, _ = train(drawn(), make, steps=5)
    half, saved = train(drawn(), make, steps=3)
    resumed = make(half)
    resumed.load_state_dict(copy.deepcopy(saved.state_dict()))
    for step in (3, 4):
        for param, grad in zip(half, drawn([p.shape for p in half], seed=step + 1), strict=True):
            param.grad = grad
        resumed.step()
    assert equal(whole, half)
    params, adamw = train(drawn(), lambda p: torch.optim.AdamW(p, fused=True), steps=3)
    other = make(params)
    other.load_state_dict(adamw.state_dict())
    assert [list(entry) for entry in other.state.values()] == [["step", "exp_avg", "exp_avg_sq"]] * len(SHAPES)


@pytest.mark.long  # starts a C compiler
@pytest.mark.parametrize("shape", [(7,), (33, 20)])
def test_compiled_it_decays_the_same_weights(shape):
    weight, average, grad = drawn([shape] * 3)
    numbers = torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64), torch.tensor(2.0)
    expected, compiled = weight.clone(), torch.compile(_decay_adamw_, dynamic=True)
    _decay_adamw_(expected, average, grad, *numbers)
    compiled(weight, average, grad, *numbers)
    assert torch.equal(weight, expected)


def test_both_optimizers_of_muon_adamw_decay_cautiously():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 5))
    start = model[0].weight.detach().clone()
    made = lambda groups: MuonAdamW(groups, lr=0.1, cautious_weight_decay=True)  # noqa: E731
    optimizer = build_optimizer(model, made, weight_decay=0.5)
    assert type(optimizer.optimizers["adamw"]) is AdamWCautiousDecay
    assert rule_of(optimizer.optimizers["adamw"]) == "adam"
    assert skips_on_device(optimizer)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    grad = model[0].weight.grad
    u = grad / (grad.abs() + 1e-8)
    torch.testing.assert_close(model[0].weight.detach(), start - 0.1 * u - 0.1 * 0.5 * start * (u * start >= 0))
