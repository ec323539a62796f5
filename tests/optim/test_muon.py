"""Muon: the bits of torch's on 2-D weights, and each matrix that another weight holds as torch would treat it alone."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_tricks._core.errors import UsageError
from lightning_tricks.accounting import device_speed
from lightning_tricks.optim import Muon, MuonAdamW, build_optimizer, decay_groups
from lightning_tricks.optim import muon as muon_module
from lightning_tricks.optim.matrix_layout import MatrixLayout
from lightning_tricks.optim.muon import COEFFICIENTS, orthogonalize


@pytest.fixture(autouse=True)
def bf16_is_fast(monkeypatch):
    """The iteration runs in bf16 on every machine; where it is set to False, in fp32."""

    def is_set(fast):
        monkeypatch.setattr(device_speed, "has_fast_bf16", lambda device: fast)

    is_set(True)
    return is_set


def steps(make, shapes, count=4, seed=0, before_step=None):
    """The weights after `count` steps on gradients that the seed draws."""
    torch.manual_seed(seed)
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = make(params)
    for step in range(count):
        for param in params:
            param.grad = torch.randn_like(param)
        if before_step is not None:
            before_step(optimizer, step)
        optimizer.step()
    return params, optimizer


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_2d_weights_have_the_bits_of_torchs_muon(adjust_lr_fn, nesterov):
    settings = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn}
    shapes = [(8, 16), (16, 8), (12, 12)]
    ours, _ = steps(lambda params: Muon(params, **settings), shapes)
    torchs, _ = steps(lambda params: torch.optim.Muon(params, **settings), shapes)
    assert equal(ours, torchs)


# An entry of an orthogonalized update is 1 at most, and each of its 15 bf16 products is off by 2**-9 of it. Another
# order of their sums, and fp32, give another last place in some of them, which the next steps of the iteration enlarge:
# up to 2.5 of 2**-8 were found for 24 matrices of 64 x 96.
LAST_PLACES = 4 * 2**-8


def test_equal_shapes_are_one_stack_of_few_operators_and_near_torchs_muon():
    settings = {"lr": 0.02, "weight_decay": 0.1}
    shapes = [(16, 24)] * 24
    ours, optimizer = steps(lambda params: Muon(params, **settings), shapes, count=3)
    torchs, _ = steps(lambda params: torch.optim.Muon(params, **settings), shapes, count=3)
    for one, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(one, other, atol=3 * 0.02 * LAST_PLACES, rtol=0)
    with Operators() as seen:
        optimizer.step()
    assert len(seen.names) < 128
    assert seen.names.count("aten.baddbmm.default") == 2 * 5, "two a step of Newton-Schulz, for all 24"


class Operators(TorchDispatchMode):
    """Counts the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names, self.dtypes = [], set()  # the types of products

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        result = func(*args, **(kwargs or {}))
        if "mm." in self.names[-1]:
            self.dtypes.add(result.dtype)
        return result


@pytest.mark.parametrize("in_skips", [False, True])
def test_a_stack_has_as_many_bytes_as_its_bound_and_a_larger_matrix_is_alone(monkeypatch, in_skips):
    sizes = []

    def seen(matrix, *args):
        sizes.append(2 * matrix.numel())
        return orthogonalize(matrix, *args)

    def not_skipped(optimizer, step):
        if in_skips:
            optimizer.found_inf = torch.zeros(())

    shapes = [(8, 8)] * 5 + [(16, 16)] + [(8, 4)] * 3
    whole, _ = steps(Muon, shapes, before_step=not_skipped)
    monkeypatch.setattr(muon_module, "orthogonalize", seen)
    monkeypatch.setattr(muon_module, "BATCH_BYTES_ON_CPU", 2 * 8 * 8 * 2)
    parts, _ = steps(Muon, shapes, before_step=not_skipped)
    # the last of five and the first of three share a batch, and are two stacks
    assert sizes == [512, 256, 256, 128, 64, 128] * 4
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, atol=4 * 0.02 * LAST_PLACES, rtol=0)


def test_where_bf16_is_slow_the_iteration_runs_in_fp32_and_stays_near_torchs_muon(bf16_is_fast):
    bf16_is_fast(False)
    settings = {"lr": 0.02, "weight_decay": 0.1}
    shapes = [(8, 16), (16, 8), (12, 12)]
    ours, optimizer = steps(lambda params: Muon(params, **settings), shapes)
    torchs, _ = steps(lambda params: torch.optim.Muon(params, **settings), shapes)
    assert optimizer.param_groups[0]["ns_dtype"] == "float32"
    assert not equal(ours, torchs)
    for one, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(one, other, atol=4 * 0.02 * LAST_PLACES, rtol=0)
    matrix = torch.randn(8, 16)
    exact = orthogonalize(matrix.bfloat16().double(), dtype=torch.float64)
    assert torch.equal(orthogonalize(matrix, dtype=torch.float32), exact)


def polar_express(matrix, steps):
    """Algorithm 1 of the paper, with its constants, in fp64."""
    published = [
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
        (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    ]
    x = matrix / (1.01 * torch.linalg.matrix_norm(matrix))
    for step in range(steps):
        a, b, c = 1.875, -1.25, 0.375
        if step < 7:
            a, b, c = (published[step][power] / 1.01 ** (2 * power + 1) for power in range(3))
        product = x @ x.T
        x = a * x + b * product @ x + c * product @ product @ x
    return x


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (16, 16)])
@pytest.mark.parametrize("steps", [1, 5, 7, 10])
def test_polar_express_is_the_papers_algorithm_also_for_other_numbers_of_steps(shape, steps):
    torch.manual_seed(steps)
    matrix = torch.randn(shape).bfloat16().double()
    found = orthogonalize(matrix, steps, torch.float64, "polar_express").double()
    torch.testing.assert_close(found, polar_express(matrix, steps), atol=2**-8, rtol=2**-8)


@pytest.mark.parametrize(("kind", "lowest", "highest"), [("keller_jordan", 0.68, 1.14), ("polar_express", 0.87, 1.13)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_singular_values_come_near_one_and_nearer_with_polar_express(kind, lowest, highest, dtype):
    torch.manual_seed(0)
    for shape in ((32, 48), (48, 32), (3, 64, 96)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape), 5, dtype, kind).double())
        assert lowest - 0.02 < values.min() < values.max() < highest + 0.02  # bf16 in the products
    x = torch.logspace(-3, 0, 10_000, dtype=torch.float64) / (1.01 if kind == "polar_express" else 1)
    polynomials = COEFFICIENTS[kind] * 5
    for a, b, c in polynomials[:5]:
        x = a * x + b * x**3 + c * x**5
    bounds = {"keller_jordan": (0.47, 1.2024), "polar_express": (0.84, 1.1236)}[kind]
    assert (x.min(), x.max()) == pytest.approx(bounds, abs=1e-3)


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
def test_muon_takes_the_coefficients_for_single_matrices_and_batches(adjust_lr_fn):
    settings = {"lr": 0.02, "momentum": 0.0, "nesterov": False, "adjust_lr_fn": adjust_lr_fn}
    shapes = [(24, 16), (16, 16), (16, 16), (16, 16)]
    before, _ = steps(lambda params: Muon(params, **settings), shapes, count=0)
    after, _ = steps(lambda params: Muon(params, **settings, coefficients="polar_express"), shapes, count=1)
    for old, new in zip(before, after, strict=True):
        factor = muon_module.SCALES[adjust_lr_fn](*new.shape)
        update = polar_express(new.grad.bfloat16().double(), 5).float()
        torch.testing.assert_close(
            new.detach(), old.detach() - 0.02 * factor * update, atol=0.02 * factor * 0.05, rtol=0
        )


@pytest.mark.parametrize("began_fast", [True, False])
def test_a_resume_computes_in_the_type_in_which_the_run_began(bf16_is_fast, began_fast):
    def made(model):
        return model, build_optimizer(model, lambda groups: MuonAdamW(groups, lr=1e-2))

    def train(model, optimizer, first, last):
        for step in range(first, last):
            batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    model, optimizer = made(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)))
    bf16_is_fast(began_fast)
    train(model, optimizer, 0, 2)
    other, resumed = made(copy.deepcopy(model))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    bf16_is_fast(not began_fast)
    train(model, optimizer, 2, 4)
    train(other, resumed, 2, 4)
    assert equal(model.parameters(), other.parameters())
    assert resumed.param_groups[0]["ns_dtype"] == ("bfloat16" if began_fast else "float32")


def test_other_devices_than_a_cpu_compute_in_bf16(bf16_is_fast):
    bf16_is_fast(False)
    weight = nn.Parameter(torch.empty(4, 6, device="meta"))  # in place of a GPU
    optimizer = Muon([weight])
    weight.grad, optimizer.param_groups[0]["ns_dtype"] = torch.empty_like(weight), "float32"  # of a run on a CPU
    with Operators() as seen:
        optimizer.step()
    assert seen.dtypes == {torch.bfloat16}


def group_of(param, role, **layout):
    layouts = [MatrixLayout(tuple(param.shape), **layout).plain]
    return [{"params": [param], "param_names": ["w"], "roles": [role], "layouts": layouts}]


def alone(parts, **settings):
    """Each part of a weight as a weight of its own, of torch's Muon."""
    optimizer = torch.optim.Muon([nn.Parameter(part.clone()) for part in parts], **settings)

    def step(grads):
        for param, grad in zip(optimizer.param_groups[0]["params"], grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        return optimizer.param_groups[0]["params"]

    return step


LAYOUTS = pytest.mark.parametrize(
    ("shape", "layout", "split"),
    [
        ((6, 3, 2, 2), {}, lambda w: [w.flatten(1)]),  # a convolution is one matrix of its filters
        ((4, 6, 10), {"stacked": True, "output_dim": 1}, lambda w: list(w.unbind())),
        ((4, 10, 24), {"stacked": True, "output_dim": 2}, lambda w: list(w.mT.unbind())),  # (experts, in, out)
        ((24, 8), {"parts": (16, 4, 4)}, lambda w: list(w.split([16, 4, 4]))),  # fewer heads of keys and values
        ((8, 24), {"parts": (8, 8, 8), "output_dim": 1}, lambda w: list(w.T.split(8))),  # transformers' Conv1D
        ((24, 8), {"parts": (12, 12), "interleaved": True}, lambda w: [w[::2], w[1::2]]),
        (  # experts of a gated MLP, as in Mixtral
            (2, 24, 8), {"stacked": True, "output_dim": 1, "parts": (12, 12)},
            lambda w: [part for expert in w.unbind() for part in expert.split(12)],
        ),
        (  # and as in GPT-OSS
            (2, 8, 24), {"stacked": True, "output_dim": 2, "parts": (12, 12), "interleaved": True},
            lambda w: [part for expert in w.unbind() for part in (expert.T[::2], expert.T[1::2])],
        ),
    ],
)  # fmt: skip


@LAYOUTS
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_each_matrix_in_a_weight_is_treated_as_if_alone(shape, layout, split, scale):
    torch.manual_seed(1)
    weight, grads = nn.Parameter(torch.randn(shape)), torch.randn(3, *shape)
    role = "expert" if layout.get("stacked") else "matrix"
    optimizer = Muon(group_of(weight, role, **layout), adjust_lr_fn=scale, weight_decay=0.1)
    step = alone(split(weight.detach()), lr=0.02, weight_decay=0.1, adjust_lr_fn=scale)
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
        expected = step(split(grad))
    found = split(weight.detach())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.detach(), atol=2e-3, rtol=0)  # products of a batch round otherwise


# ---- NorMuon


def normuon(update, average, beta, norm):
    """The formula of the paper for one matrix, whose update then has this Frobenius norm."""
    average = beta * average + (1 - beta) * update.square().mean(1, keepdim=True)
    divided = update / (average.sqrt() + 1e-8)
    return divided * norm / torch.linalg.matrix_norm(divided), average


@pytest.mark.parametrize("shape", [(8, 24), (24, 8)])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_normuon_is_the_papers_formula_and_keeps_the_size_of_an_update(shape, scale):
    torch.manual_seed(0)
    rows, columns = shape
    weight, average = nn.Parameter(torch.randn(shape)), torch.zeros(rows, 1)
    norm = 0.2 * math.sqrt(rows * columns)
    if scale == "original":
        norm = math.sqrt(min(shape)) * math.sqrt(max(1, rows / columns))
    optimizer = Muon([weight], lr=0.1, momentum=0.0, nesterov=False, adjust_lr_fn=scale, normuon_beta2=0.7)
    for _ in range(4):
        before = weight.detach().clone()
        # rows of very different sizes, which differ from step to step too
        weight.grad = torch.randn(shape) * torch.logspace(-3, 0, rows)[torch.randperm(rows), None]
        optimizer.step()
        update, average = normuon(orthogonalize(weight.grad).float(), average, 0.7, norm)
        torch.testing.assert_close(weight.detach(), before - 0.1 * update)
        torch.testing.assert_close(optimizer.state[weight]["second_moment"], average.flatten())
        assert (before - weight.detach()).norm() / 0.1 == pytest.approx(norm, rel=1e-4)
    assert optimizer.state[weight]["second_moment"].dtype == torch.float32


@LAYOUTS
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_normuon_treats_each_matrix_in_a_weight_as_if_alone(shape, layout, split, scale):
    torch.manual_seed(1)
    settings = {"adjust_lr_fn": scale, "weight_decay": 0.1, "normuon_beta2": 0.8}
    weight, grads = nn.Parameter(torch.randn(shape)), torch.randn(3, *shape)
    optimizer = Muon(group_of(weight, "expert" if layout.get("stacked") else "matrix", **layout), **settings)
    parts = [nn.Parameter(part.clone()) for part in split(weight.detach())]
    others = [Muon([part], **settings) for part in parts]
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
        for part, own, other in zip(parts, split(grad), others, strict=True):
            part.grad = own.clone()
            other.step()
    for one, other in zip(split(weight.detach()), parts, strict=True):
        torch.testing.assert_close(one, other.detach(), atol=3e-3, rtol=0)  # products of a batch round otherwise
    count = sum(part.shape[0] for part in parts)
    assert optimizer.state[weight]["second_moment"].shape == (count,), "a number for each output"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_a_gradient_stay_and_a_resume_is_bitwise(dtype):
    def made(params):
        return Muon(params, normuon_beta2=0.9)

    def train(weight, optimizer, first, last):
        for step in range(first, last):
            weight.grad = torch.randn(6, 8, generator=torch.Generator().manual_seed(step)).to(dtype)
            weight.grad[2] = 0
            optimizer.step()

    weight = nn.Parameter(torch.ones(6, 8, dtype=dtype))
    optimizer = made([weight])
    train(weight, optimizer, 0, 3)
    other = nn.Parameter(weight.detach().clone())
    resumed = made([other])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(weight, optimizer, 3, 5)
    train(other, resumed, 3, 5)
    assert weight[2].tolist() == [1.0] * 8
    assert weight.isfinite().all()
    assert resumed.state[other]["second_moment"].dtype == torch.float32
    if dtype == torch.float32:  # torch rounds a load to the dtype of the weight
        assert torch.equal(weight, other)


def test_cautious_decay_leaves_weights_that_move_away_from_zero():
    settings = {"lr": 0.1, "momentum": 0.0, "nesterov": False, "weight_decay": 0.5}
    (plain,), _ = steps(lambda params: Muon(params, **{**settings, "weight_decay": 0.0}), [(4, 4)], count=1)
    (cautious,), _ = steps(lambda params: Muon(params, cautious_weight_decay=True, **settings), [(4, 4)], count=1)
    torch.manual_seed(0)
    start = torch.randn(4, 4)
    towards_zero = (start - plain.detach()) * start >= 0
    assert 0 < towards_zero.sum() < 16
    torch.testing.assert_close(cautious.detach(), plain.detach() - 0.1 * 0.5 * start * towards_zero)


def test_the_momentum_rises_from_0_85():
    def by_hand(optimizer, step):
        optimizer.param_groups[0]["momentum"] = 0.85 + 0.1 * min(step / 4, 1)

    ours, optimizer = steps(lambda params: Muon(params, momentum_warmup_steps=4), [(4, 6)], count=6)
    torchs, _ = steps(
        lambda params: torch.optim.Muon(params, lr=0.02, weight_decay=0.0), [(4, 6)], count=6, before_step=by_hand
    )
    torch.testing.assert_close(ours[0], torchs[0], atol=1e-5, rtol=0)
    assert optimizer.state[ours[0]]["step"] == 6


def test_the_steps_of_the_warmup_are_on_the_device_of_the_weight_after_a_load():
    weight = nn.Parameter(torch.empty(4, 6, device="meta"))  # in place of a GPU
    optimizer = Muon([weight], momentum_warmup_steps=4)
    weight.grad, optimizer.found_inf = torch.empty_like(weight), torch.zeros((), device="meta")
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0]["step"] = torch.tensor(1.0)  # FSDP2's checkpoints are read on the host, and torch leaves it there
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert optimizer.state[weight]["step"].device == weight.device


@pytest.mark.parametrize(
    "options", [{}, {"momentum_warmup_steps": 3, "cautious_weight_decay": True, "normuon_beta2": 0.9}]
)
def test_a_step_is_skipped_on_the_device(options):
    def set_skip(optimizer, step):
        optimizer.found_inf = torch.tensor(float(step == 2))
        if step == 2:
            optimizer.param_groups[0]["params"][0].grad.fill_(math.nan)

    def skip_by_hand(optimizer, step):
        if step == 2:
            for param in optimizer.param_groups[0]["params"]:
                param.grad = None

    settings = {"weight_decay": 0.1, **options}
    skipped, one = steps(lambda params: Muon(params, **settings), [(4, 6)], count=5, before_step=set_skip)
    without, other = steps(lambda params: Muon(params, **settings), [(4, 6)], count=5, before_step=skip_by_hand)
    assert equal(skipped, without)
    for key, value in other.state[without[0]].items():
        assert torch.equal(one.state[skipped[0]][key], value)


@pytest.mark.parametrize(
    ("params", "options", "words"),
    [
        ([nn.Parameter(torch.zeros(3))], {}, "parameter 0 of a group, of shape .3,. and role matrix"),
        ([nn.Parameter(torch.zeros(2, 3, 4))], {}, "tells experts from convolutions"),
        (group_of(nn.Parameter(torch.zeros(3, 4)), "head"), {}, "'w', of shape .3, 4. and role head"),
        ([nn.Parameter(torch.zeros(3, 4))], {"lr": torch.tensor(0.1)}, "Muon.lr is a Tensor: give a float"),
        ([nn.Parameter(torch.zeros(3, 4))], {"lr": -1.0}, "Muon.lr=-1.0: give a finite number"),
        ([nn.Parameter(torch.zeros(3, 4))], {"momentum": 1.0}, "Muon.momentum=1.0"),
        ([nn.Parameter(torch.zeros(3, 4))], {"ns_steps": 0}, "Muon.ns_steps=0"),
        (
            [nn.Parameter(torch.zeros(3, 4))],
            {"coefficients": "quintic"},
            "Muon.coefficients='quintic': give one of",
        ),
        ([nn.Parameter(torch.zeros(3, 4))], {"normuon_beta2": 1.0}, "Muon.normuon_beta2=1.0: give a number from 0"),
        ([nn.Parameter(torch.zeros(3, 4))], {"momentum_warmup_steps": -1}, "momentum_warmup_steps=-1"),
    ],
)
def test_what_is_no_matrix_and_options_out_of_range_are_refused(params, options, words):
    with pytest.raises(UsageError, match=words):
        Muon(params, **options)


def test_flat_parameters_and_sparse_gradients_are_refused_in_the_step():
    weight = nn.Parameter(torch.zeros(3, 4))
    weight.grad = torch.eye(3, 4).to_sparse()
    with pytest.raises(UsageError, match="sparse or complex"):
        Muon([weight]).step()
    optimizer = Muon([weight])
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(12))  # as ZeRO puts its partition there
    with pytest.raises(UsageError, match="flat, as DeepSpeed's ZeRO"):
        optimizer.step()


# -------------------------------------------------------------------------------------------------------- Muon + AdamW


class Attention(nn.Module):
    def __init__(self, **layers):
        super().__init__()
        self.blocks = nn.ModuleList([copy.deepcopy(nn.ModuleDict(layers)) for _ in range(2)])
        self.head = nn.Linear(8, 4)


def who(model):
    """The optimizer of each parameter by its name, and the rows of matrices where a weight holds several."""
    optimizer = MuonAdamW(decay_groups(model))
    found = {}
    for group in optimizer.param_groups:
        for name, layout in zip(group["param_names"], group["layouts"], strict=True):
            found[name] = (group["optimizer"], layout and layout["parts"])
    return found


def test_fused_projections_are_split_and_unknown_ones_refused():
    found = who(Attention(qkv=nn.Linear(8, 24), proj=nn.Linear(8, 8)))
    assert found["blocks.0.qkv.weight"] == ("muon", (8, 8, 8))
    assert found["blocks.1.proj.weight"] == ("muon", ())
    assert found["blocks.0.qkv.bias"][0] == found["head.weight"][0] == "adamw"
    with pytest.raises(UsageError, match=r"'blocks.0.query_key_value.weight' seems to hold several projections"):
        who(Attention(query_key_value=nn.Linear(8, 24)))
    with pytest.raises(UsageError, match=r"'blocks.0.qkv_proj.weight' seems to hold"):
        who(Attention(qkv_proj=nn.Linear(8, 16)))
    told = Attention(qkv_proj=nn.Linear(8, 16))
    for block in told.blocks:
        block._matrices = {"qkv_proj.weight": [8, 4, 4]}
    assert who(told)["blocks.1.qkv_proj.weight"] == ("muon", (8, 4, 4))
    told.blocks[0]._matrices = {"qkv_proj.weight": [8, 4]}
    with pytest.raises(UsageError, match=r"qkv_proj.weight has 16 rows, and not 12"):
        who(told)
    told.blocks[0]._matrices = {"qvk_proj.weight": [8, 4, 4]}
    with pytest.raises(UsageError, match=r"^_matrices of module 'blocks.0' names 'qvk_proj.weight', which is no param"):
        who(told)


def test_one_learning_rate_makes_updates_of_one_size():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    before = copy.deepcopy(model)
    optimizer = MuonAdamW(decay_groups(model, weight_decay=0.0), lr=0.01)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    sizes = [
        (new - old).square().mean().sqrt().item()
        for new, old in zip(model.parameters(), before.parameters(), strict=True)
    ]
    assert sizes[0] == pytest.approx(0.2 * 0.01, rel=0.15)  # Muon, of the size that AdamW's have in mid-run
    assert sizes[2] == pytest.approx(0.01, rel=0.01)  # AdamW's first step, where all moments agree
    own = MuonAdamW(decay_groups(model), lr=0.01, muon_lr=0.05)
    assert {(group["optimizer"], group["lr"]) for group in own.param_groups} == {("muon", 0.05), ("adamw", 0.01)}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MuonAdamW(nn.Linear(4, 4).parameters()), "make them by decay_groups"),
        (lambda: MuonAdamW(decay_groups(nn.LayerNorm(4))), "no hidden matrix: take torch.optim.AdamW"),
        (lambda: MuonAdamW(decay_groups(nn.Linear(4, 4)), lr=torch.tensor(0.1)), "MuonAdamW.lr is a Tensor"),
    ],
)
def test_what_muon_adamw_refuses(make, words):
    with pytest.raises(UsageError, match=words):
        make()
