"""bf16 weights under any optimizer: stepped in fp32, no update lost, state in its type, nothing left behind."""

import copy
import sys
import warnings
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_tricks._core.errors import UsageError
from lightning_tricks.optim import bf16_step, one_kernel
from lightning_tricks.optim.bf16_step import BF16Step, copy_rounded_, random_bits, round_to_bf16, rounding_seed, seed_on

BF16 = torch.bfloat16
SPACING = 2.0**-7  # of bf16 numbers just above 1


def weight(*shape, dtype=BF16):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    return nn.Parameter(values.to(BF16).to(dtype))


def give_gradients(params, step):
    """Gradients of a number's worth in bf16, the same for each type of parameter."""
    for place, param in enumerate(params):
        values = torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * step + place))
        param.grad = values.to(BF16).to(param.dtype)


def train(optimizer, steps, start=0):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(start, start + steps):
        give_gradients(params, step)
        optimizer.step()


def spied(optimizer):
    """Note what each call of the optimizer's own step holds."""
    calls, own = [], optimizer.step

    def step(*args):
        calls.append([p for group in optimizer.param_groups for p in group["params"]])
        return own(*args)

    optimizer.step = step
    return calls


class ForeignSGD(torch.optim.SGD):
    pass


# rounding


def seeded(seed=0):
    return seed_on(torch.device("cpu"), seed)


def from_bits(*bits):
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def test_every_bf16_number_stays_what_it_is():
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    rounded = round_to_bf16(every.float(), seeded())
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded.isnan(), every.isnan())
    numbers = ~every.isnan()
    assert torch.equal(rounded[numbers].view(torch.int16), every[numbers].view(torch.int16))


@pytest.mark.parametrize(("low", "high"), [(1.0, 1 + 2**-7), (-1.0, -1 - 2**-7), (3.0, 3 + 2**-6), (0.0, 2.0**-133)])
@pytest.mark.parametrize("share", [0.001, 0.3, 0.5, 0.9])
def test_a_value_between_two_goes_up_as_often_as_it_is_near_the_upper(low, high, share):
    n = 200_000
    value = low + share * (high - low)
    rounded = round_to_bf16(torch.full((n,), value), seeded()).double()
    exact = torch.full((n,), value).double()[0].item()
    up = (exact - low) / (high - low)
    assert set(rounded.unique().tolist()) == {low, high}
    found = (rounded == high).double().mean().item()
    assert abs(found - up) < 4 * (up * (1 - up) / n) ** 0.5 + 1e-9


def test_nan_of_any_bits_stays_nan_and_infinity_infinity():
    odd = from_bits(0x7F800001, 0x7FFFFFFF, -1, 0x7FC00000, 0xFF80FFFF - (1 << 32))
    for seed in range(100):
        assert round_to_bf16(odd, seeded(seed)).isnan().all()
        infinite = torch.tensor([float("inf"), -float("inf")])
        assert torch.equal(round_to_bf16(infinite, seeded(seed)), infinite.bfloat16())


@pytest.mark.parametrize("shape", [(), (0,), (7,), (5, 3)])
def test_writes_in_place_piece_by_piece(monkeypatch, shape):
    monkeypatch.setattr(one_kernel, "CHUNK_ON_CPU", 4)
    source = torch.ones(shape) + 2**-8
    target = torch.zeros(shape, dtype=torch.bfloat16)
    copy_rounded_(target, source, 0)
    assert torch.equal(target, round_to_bf16(source, seeded()))


@pytest.mark.parametrize("seed", [0, -(1 << 31), (1 << 31) - 5])
def test_the_random_bits_are_those_of_murmurhash3(seed):
    expected = []
    for place in range(9):
        x = (place + seed) % 2**32
        x = ((x ^ x >> 16) * 0x85EBCA6B) % 2**32
        x = ((x ^ x >> 13) * 0xC2B2AE35) % 2**32
        expected.append(x >> 16)
    assert random_bits(torch.empty(3, 3), seeded(seed)).flatten().tolist() == expected


def test_the_random_bits_are_even_and_neighbours_do_not_follow_one_another():
    n = 1 << 18
    bits = random_bits(torch.empty(n), seeded(11)).double() / 65535 - 0.5
    assert abs(bits.mean()) < 4 * (1 / 12 / n) ** 0.5
    for lag in (1, 2, 3, 16, 256, 4096):
        assert abs((bits[lag:] * bits[:-lag]).mean()) * 12 < 4 / n**0.5, lag
    other = random_bits(torch.empty(n), seeded(12345)).double() / 65535 - 0.5
    assert abs((bits * other).mean()) * 12 < 4 / n**0.5


@pytest.mark.long  # starts a C compiler
@pytest.mark.parametrize("shape", [(7,), (33, 20), (1,)])
def test_compiled_it_rounds_to_the_same_values(shape):
    source, seed = torch.randn(shape, generator=torch.Generator().manual_seed(1)), seeded((1 << 31) - 3)
    target = torch.zeros(shape, dtype=BF16)
    torch.compile(bf16_step._write_rounded, dynamic=True)(target, source, seed)
    assert torch.equal(target, round_to_bf16(source, seed))


@pytest.mark.parametrize("shape", [(), (0,), (9,), (3, 5), (2, 3, 4)])
def test_where_it_compiles_pieces_are_no_views_and_the_change_shows_on_the_weight(monkeypatch, shape):
    seen = []

    def write(target, source, seed):
        seen.append(target)
        bf16_step._write_rounded(target, source, seed)

    source, target, expected = torch.randn(shape), torch.zeros(shape, dtype=BF16), torch.zeros(shape, dtype=BF16)
    copy_rounded_(expected, source, 7)
    monkeypatch.setattr(one_kernel, "_kernel", lambda *_: write)
    monkeypatch.setattr(one_kernel, "CHUNK_ON_CPU", 4)
    version = target._version
    copy_rounded_(target, source, 7)
    assert torch.equal(target, expected)
    assert all(piece.dim() == 1 and piece.numel() <= 4 for piece in seen)
    assert target._version > version


def test_where_compiling_fails_it_says_so_once_and_goes_on(monkeypatch):
    tried = []

    def fail(*args, **kwargs):
        tried.append(args)
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(torch, "compile", lambda function, **options: fail)
    monkeypatch.setattr(one_kernel, "_found", {})
    with FakeTensorMode():  # tensors on a GPU that is not there
        arguments = bf16_step._write_rounded, [torch.zeros(5, device="cuda")], lambda start: (), "BF16True"
        with pytest.warns(UserWarning, match=r"^BF16True: torch.compile fails here, .* no C compiler$"):
            assert one_kernel._kernel(*arguments) is bf16_step._write_rounded
        assert one_kernel._kernel(*arguments) is bf16_step._write_rounded
    assert len(tried) == 1


def test_each_run_step_and_parameter_has_its_own_seed():
    weight = torch.zeros(2)
    seeds = {rounding_seed(a, b, c, weight) for a in range(5) for b in range(5) for c in range(5)}
    assert len(seeds) == 125
    assert rounding_seed(1, 2, 3, weight) == rounding_seed(1, 2, 3, torch.ones(5))


# what the step is for


def test_an_update_of_a_thousandth_of_a_spacing_moves_weights_as_in_fp32():
    param = nn.Parameter(torch.ones(1 << 16, dtype=BF16))
    optimizer = torch.optim.SGD([param], lr=1e-3)
    BF16Step(optimizer)
    for _ in range(200):
        param.grad = torch.full_like(param, -SPACING)
        optimizer.step()
    assert (param.double() - 1).mean().item() == pytest.approx(0.2 * SPACING, rel=0.05)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, weight_decay=0.1, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "AdamW, lr a tensor": lambda p: torch.optim.AdamW(p, torch.tensor(0.01)),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, 0.01, t0=1),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
    "Muon": lambda p: torch.optim.Muon(p, 0.01),
    "foreign": lambda p: ForeignSGD(p, 0.01, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bucket_bytes", [1, 256 << 20])
def test_the_state_is_that_of_fp32_weights_and_a_weight_one_of_the_neighbours_of_theirs(name, bucket_bytes):
    """Weights that start a step at values of bf16 have the gradients and states of fp32 ones."""
    shapes = [(3, 4), (4, 2), (2, 2)] if name == "Muon" else [(3, 4), (4,), (), (2, 2)]
    ours, plain = [weight(*s) for s in shapes], [weight(*s, dtype=torch.float32) for s in shapes]
    optimizer, reference = OPTIMIZERS[name](ours), OPTIMIZERS[name](plain)
    BF16Step(optimizer, bucket_bytes=bucket_bytes)
    for step in range(4):
        with torch.no_grad():
            for own, expected in zip(ours, plain, strict=True):
                expected.copy_(own)
        train(optimizer, 1, step)
        train(reference, 1, step)
        for own, expected in zip(ours, plain, strict=True):
            assert own.dtype == BF16
            assert ((own.float() - expected).abs() <= SPACING * expected.abs()).all()
            state = optimizer.state[own]
            assert state.keys() == reference.state[expected].keys()
            for key, value in reference.state[expected].items():
                if isinstance(value, torch.Tensor):
                    assert state[key].dtype == value.dtype
                    assert torch.equal(state[key], value), key


# buckets


def test_no_more_than_a_bucket_is_copied_at_once():
    params = [weight(10), weight(10), nn.Parameter(torch.ones(50)), weight(10), weight(30)]
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.2}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    calls = spied(optimizer)
    BF16Step(optimizer, bucket_bytes=8 * 25)
    train(optimizer, 1)
    assert [[p.numel() for p in call] for call in calls] == [[10, 10, 50], [10], [30]]
    assert {p.dtype for call in calls for p in call} == {torch.float32}
    assert [p for group in optimizer.param_groups for p in group["params"]] == params


def test_an_optimizer_that_may_mix_its_parameters_gets_them_at_once():
    optimizer = ForeignSGD([weight(10), weight(20)], lr=0.1)
    calls = spied(optimizer)
    BF16Step(optimizer, bucket_bytes=1)
    train(optimizer, 1)
    assert [[p.numel() for p in call] for call in calls] == [[10, 20]]


def test_the_rounding_does_not_depend_on_the_buckets():
    results = []
    for bucket_bytes in (1, 100, 256 << 20):
        params = [weight(5, 3), weight(7), weight(2, 2)]
        optimizer = torch.optim.AdamW(params, lr=0.01)
        BF16Step(optimizer, bucket_bytes=bucket_bytes)
        train(optimizer, 3)
        results.append([t.clone() for p in params for t in (p.detach(), *optimizer.state[p].values())])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# what rides along


def test_fp32_parameters_are_stepped_as_they_are_and_those_without_gradient_not_at_all():
    fp32, plain, idle = weight(4, dtype=torch.float32), weight(4, dtype=torch.float32), weight(5)
    before = idle.detach().clone()
    optimizer, reference = torch.optim.AdamW([weight(4), fp32, idle], lr=0.1), torch.optim.AdamW([plain], lr=0.1)
    BF16Step(optimizer)
    for param in (fp32, plain, optimizer.param_groups[0]["params"][0]):
        param.grad = torch.full_like(param, 0.3)
    optimizer.step()
    reference.step()
    assert torch.equal(fp32, plain)
    assert torch.equal(idle, before)
    assert idle not in optimizer.state
    assert optimizer.state[fp32].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_what_is_noted_on_a_parameter_is_seen_by_the_optimizer():
    param = weight(4)
    param.role = "embedding"
    optimizer = torch.optim.SGD([param], lr=0.1)
    calls = spied(optimizer)
    BF16Step(optimizer)
    train(optimizer, 1)
    assert calls[0][0].role == "embedding"
    assert calls[0][0].requires_grad


# what torch does around a step


def test_the_closure_runs_once_first_and_with_gradients():
    param, seen = weight(4), []
    optimizer = torch.optim.SGD([param], lr=0.1)
    BF16Step(optimizer, bucket_bytes=1)

    def closure():
        seen.append(optimizer.param_groups[0]["params"][0])
        loss = param.float().square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert len(seen) == 1
    assert seen[0] is param
    assert loss.requires_grad
    before = param.detach().clone()
    optimizer.step()
    assert not torch.equal(param, before)


def test_hooks_fire_once_a_step_and_see_the_optimizers_own_parameters():
    params, seen = [weight(4), weight(5)], []
    optimizer = torch.optim.SGD(params, lr=0.1)
    BF16Step(optimizer, bucket_bytes=1)
    own = [
        optimizer.register_step_pre_hook(lambda o, a, k: seen.append(("pre", list(o.param_groups[0]["params"])))),
        optimizer.register_step_post_hook(lambda o, a, k: seen.append(("post", list(o.param_groups[0]["params"])))),
        register_optimizer_step_pre_hook(lambda o, a, k: seen.append(("any pre", list(o.param_groups[0]["params"])))),
        register_optimizer_step_post_hook(lambda o, a, k: seen.append(("any post", list(o.param_groups[0]["params"])))),
    ]
    train(optimizer, 2)
    for handle in own:
        handle.remove()
    train(optimizer, 1)
    assert [name for name, _ in seen] == ["any pre", "pre", "post", "any post"] * 2
    assert all(held == params for _, held in seen)


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_a_scheduler_sees_the_steps(scheduler_first):
    optimizer = torch.optim.SGD([weight(4)], lr=1.0)
    make = [lambda: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), lambda: BF16Step(optimizer)]
    made = [build() for build in (make if scheduler_first else reversed(make))]
    scheduler = made[0 if scheduler_first else 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(optimizer, 1)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_wrapping_twice_is_wrapping_once():
    results = []
    for times in (1, 2):
        optimizer = torch.optim.AdamW([weight(40)], lr=0.01)
        calls = spied(optimizer)
        for _ in range(times):
            step = BF16Step(optimizer)
        train(optimizer, 3)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(optimizer, 1, 3)
        assert len(calls) == step.steps == 4
        results.append(optimizer.param_groups[0]["params"][0])
    assert torch.equal(*results)


@pytest.mark.parametrize("own", ["the class's", "a user's", "a scheduler's"])
def test_removed_it_leaves_the_step_and_the_loading_that_were_there(own):
    optimizer = torch.optim.SGD([weight(4)], lr=0.1, momentum=0.9)
    if own == "a user's":
        spied(optimizer)
    if own == "a scheduler's":
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = vars(optimizer).get("step")
    first = BF16Step(optimizer)
    train(optimizer, 1)
    first.remove()
    assert vars(optimizer).get("step") is before
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"].dtype == BF16
    train(optimizer, 1)
    assert first.steps == 1


# randomness


def test_seed_and_count_are_all_that_the_rounding_depends_on():
    def run(seed=0, count=0):
        optimizer = torch.optim.SGD([weight(300)], lr=1e-3)
        BF16Step(optimizer, seed=seed).steps = count
        train(optimizer, 1)
        return optimizer.param_groups[0]["params"][0]

    state = torch.get_rng_state()
    first = run()
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    assert torch.equal(first, run())
    assert not torch.equal(first, run(seed=1))
    assert not torch.equal(first, run(count=1))


# loading


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "AdamW fused", "Adafactor"])
def test_a_run_that_was_saved_and_loaded_goes_on_bitwise(name):
    def build():
        optimizer = OPTIMIZERS[name]([weight(3, 4), weight(4), weight(5, dtype=torch.float32)])
        return optimizer, BF16Step(optimizer, seed=3)

    whole, _ = build()
    train(whole, 5)
    first, first_step = build()
    train(first, 3)
    second, second_step = build()
    for to, own in zip(second.param_groups[0]["params"], first.param_groups[0]["params"], strict=True):
        to.data.copy_(own)
    saved = copy.deepcopy(first.state_dict())
    saved["state"] = {i: OrderedDict(reversed(s.items())) for i, s in saved["state"].items()}  # order must not matter
    second.load_state_dict(saved)
    second_step.steps = first_step.steps
    train(second, 2, 3)
    for a, b in zip(whole.param_groups[0]["params"], second.param_groups[0]["params"], strict=True):
        assert torch.equal(a, b)
        assert whole.state[a].keys() == second.state[b].keys()
        for key, value in whole.state[a].items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == second.state[b][key].dtype
                assert torch.equal(value, second.state[b][key])


def test_state_saved_in_bf16_is_loaded_as_fp32():
    param = weight(4)
    plain = torch.optim.AdamW([param], lr=0.01)
    train(plain, 1)
    saved = plain.state_dict()
    assert saved["state"][0]["exp_avg"].dtype == BF16
    saved["state"][0]["step"] = torch.tensor(1.0, dtype=torch.float64)
    optimizer = torch.optim.AdamW([weight(4)], lr=0.01)
    BF16Step(optimizer)
    optimizer.load_state_dict(copy.deepcopy(saved))
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    assert state["exp_avg"].dtype == torch.float32
    assert torch.equal(state["exp_avg"], plain.state[param]["exp_avg"].float())
    assert state["step"].dtype == torch.float64  # a count is torch's own affair


class NestedState(torch.optim.SGD):
    """Keeps tensors in a dict and a list, as some optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("inner", {"factors": [param.detach() + 1.2345e-4]})
        return super().step(closure)


def test_nested_state_survives_loading_in_fp32():
    first, second = (NestedState([weight(3)], lr=0.1) for _ in range(2))
    for optimizer in (first, second):
        BF16Step(optimizer)
    train(first, 1)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    (own,), (loaded,) = first.state.values(), second.state.values()
    assert loaded["inner"]["factors"][0].dtype == torch.float32
    assert torch.equal(own["inner"]["factors"][0], loaded["inner"]["factors"][0])


# errors


class Twice(torch.optim.SGD):
    def step(self, closure):
        closure()
        super().step()
        return closure()


class Sharpness(torch.optim.SGD):
    """Climbs before it computes the gradient, as SAM does."""

    def step(self, closure):
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                param.add_(0.1)
        return super().step(closure)


@pytest.mark.parametrize("cls", [Twice, Sharpness])
def test_an_optimizer_that_computes_the_gradient_within_its_step_is_refused_when_it_does(cls):
    param = weight(4)
    optimizer = cls([param], lr=0.1)
    BF16Step(optimizer)
    param.grad = torch.ones_like(param)
    with pytest.raises(UsageError, match=rf"^BF16True cannot drive the optimizer {cls.__name__}, .* BF16Mixed$"):
        optimizer.step(lambda: torch.zeros(()))
    assert optimizer.param_groups[0]["params"] == [param]
    with pytest.raises(UsageError, match=r"^BF16True cannot drive the optimizer LBFGS"):  # at once
        BF16Step(torch.optim.LBFGS([param]))


@pytest.mark.parametrize("bucket_bytes", [1, 256 << 20])
def test_a_step_that_fails_leaves_groups_state_and_hooks_as_they_were(monkeypatch, bucket_bytes):
    params = [weight(4), weight(5, dtype=torch.float32), weight(6)]
    optimizer = torch.optim.AdamW(params, lr=0.1)
    step = BF16Step(optimizer, bucket_bytes=bucket_bytes)
    fired = []
    optimizer.register_step_post_hook(lambda *_: fired.append(1))
    train(optimizer, 1)
    states = {p: set(optimizer.state[p]) for p in params}

    def fail(*_, **__):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["torch.optim.adam"], "adam", fail)  # torch.optim hides the module
        with pytest.raises(MemoryError):
            train(optimizer, 1, 1)
    assert optimizer.param_groups[0]["params"] == params
    assert {p: set(s) for p, s in optimizer.state.items()} == states
    assert step.steps == 1
    train(optimizer, 1, 1)
    assert fired == [1, 1]
