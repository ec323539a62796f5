"""Float8: which layers are converted, what they compute, what they refuse, and that nothing else changes."""

import copy
import dataclasses
import importlib
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness.models import GPT, SHAPE, Decoding
from harness.runs import CountsFlops, decoding, fit, same
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from lightning_tricks import BF16Mixed, Float8, Llama, MFUMonitor
from lightning_tricks._core.errors import UsageError
from lightning_tricks.models import Decoder
from lightning_tricks.optim import param_roles
from lightning_tricks.precision import float8 as float8_module
from lightning_tricks.precision.float8 import choose_layers
from lightning_tricks.precision.float8_linear import pays

RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"]
WIDE = Llama(vocab_size=61, d_model=32, n_layers=1, n_heads=1, max_seq_len=16)  # all dimensions multiples of 32
ONE_BLOCK = Llama(**{**SHAPE, "n_layers": 1})


def plugin(recipe="tensorwise", **options) -> Float8:
    return Float8(**{"recipe": recipe, "convert_small": True, "emulate": True, **options})


def converted(module: nn.Module, recipe="tensorwise", **options) -> nn.Module:
    plugin(recipe, **options).convert_before_sharding(
        holder := nn.ModuleDict({"part": module, "tail": nn.Linear(16, 16)})
    )
    own = plugin(recipe, **options)
    own.convert_module(holder)
    return module


def linear(out_features: int, in_features: int, seed=0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(in_features, out_features)


# --- which layers ---


def reasons(module: nn.Module, recipe="tensorwise", convert_small=True, exclude=()) -> dict[str, str]:
    return choose_layers(module, recipe, exclude, None if convert_small else pays(recipe))


@pytest.mark.parametrize(
    ("recipe", "out_features", "in_features", "large"),
    [
        ("tensorwise", 1024, 4096, False), ("tensorwise", 1040, 4096, True), ("rowwise", 4096, 2048, False),
        ("rowwise", 4096, 2064, True), ("rowwise_with_gw_hp", 2048, 8192, False), ("mxfp8", 4128, 1056, True),
    ],
)  # fmt: skip
def test_what_pays_follows_torchaos_filter(recipe, out_features, in_features, large):
    model = nn.Sequential(nn.Linear(in_features, out_features, device="meta"), nn.Linear(8, 8), nn.Linear(8, 8))
    assert reasons(model, recipe, convert_small=False)["0"] == ("" if large else "too small to pay")


class Special(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def test_each_reason_to_leave_a_layer_alone():
    blocks = [
        nn.ModuleDict({"good": nn.Linear(32, 32), "odd": nn.Linear(32, 24), "special": Special(32, 32)})
        for _ in range(2)
    ]
    model = nn.ModuleDict({"embed": nn.Embedding(64, 32), "blocks": nn.ModuleList(blocks), "head": nn.Linear(32, 64)})
    blocks[1]["special"].weight = blocks[1]["good"].weight
    own = "has a forward or a weight of its own"
    assert reasons(model, convert_small=True, exclude=[r"1\.odd"]) == {
        "blocks.0.good": "", "blocks.0.odd": "dimensions no multiples of 16", "blocks.0.special": own,
        "blocks.1.good": "weight shared with a layer that stays", "blocks.1.odd": "exclude", "blocks.1.special": own,
        "head": "output head",
    }  # fmt: skip
    assert reasons(model, convert_small=False)["blocks.0.good"] == "too small to pay"
    blocks[0]["good"].forward = lambda input: input
    assert reasons(model, convert_small=True)["blocks.0.good"] == own
    model = nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 16), nn.Linear(16, 16))
    found = reasons(model, convert_small=True)
    assert found == {"0": "dimensions no multiples of 16", "1": "dimensions no multiples of 16", "2": "output head"}
    model = nn.Sequential(nn.Linear(48, 48), nn.Linear(48, 48))
    assert reasons(model, convert_small=True)["0"] == ""
    assert reasons(model, "mxfp8", convert_small=True)["0"] == "dimensions no multiples of 32"


@pytest.mark.parametrize("module", ["value head", "tied decoder", "no head"])
def test_the_heads_are_those_that_the_optimizer_finds(module):
    layers = nn.ModuleList(nn.ModuleDict({"q": nn.Linear(32, 32)}) for _ in range(2))
    model = {
        "value head": nn.ModuleDict({"layers": layers, "lm_head": nn.Linear(32, 48), "v_head": nn.Linear(32, 16)}),
        # GPT-2 medium's positions: as many as the model is wide; the layers inside the blocks are no heads for that
        "tied decoder": Decoder(type(GPT)(**{**SHAPE, "max_seq_len": 32})),
        "no head": nn.Sequential(nn.Linear(16, 16)),
    }[module]
    found = {name for name, reason in reasons(model, convert_small=True).items() if reason == "output head"}
    assert found == {"value head": {"lm_head", "v_head"}, "tied decoder": {"head"}, "no head": set()}[module]
    if module == "value head":
        assert {p.name for p in param_roles(model) if p.role == "head"} == {"lm_head.weight", "v_head.weight"}


def test_choosing_layers_does_not_compute_a_weight():
    """To read the weight of a layer with spectral norm makes a step of its power iteration."""
    for norm in (nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm):
        model = nn.Sequential(norm(nn.Linear(32, 32)), nn.Linear(32, 32), nn.Linear(32, 16))
        before = copy.deepcopy(model.state_dict())
        plugin().convert_module(model)
        assert model.state_dict().keys() == before.keys()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# --- what a layer computes ---


def e4m3(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (values * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale


def test_an_emulated_tensorwise_product_is_the_rounded_one_made_by_hand():
    layer, rows = linear(32, 48), torch.randn(16, 48)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    output = converted(layer)(rows.requires_grad_())
    by_hand = e4m3(rows, 448 / rows.abs().max()) @ e4m3(weight, 448 / weight.abs().max()).T + bias
    torch.testing.assert_close(output, by_hand)
    assert not torch.allclose(output, F.linear(rows, weight, bias), atol=1e-4)
    gradient = torch.randn(16, 32)
    output.backward(gradient)
    scale = 57344 / gradient.abs().max()
    rounded = (gradient * scale).to(torch.float8_e5m2).float() / scale
    torch.testing.assert_close(rows.grad, rounded @ e4m3(weight, 448 / weight.abs().max()))
    torch.testing.assert_close(layer.weight.grad, rounded.T @ e4m3(rows.detach(), 448 / rows.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("emulate", [True, False])
def test_a_tensorwise_product_is_torchaos_to_the_bit(emulate, dtype):
    theirs = nn.Sequential(linear(48, 64))
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=emulate)
    convert_to_float8_training(theirs, config=config)
    ours, found = converted(linear(48, 64), emulate=emulate, allow_eager=True), []
    rows, gradient = torch.randn(32, 64).to(dtype), 1e-3 * torch.randn(32, 48).to(dtype)
    for layer in (ours, theirs[0]):
        inputs = rows.clone().requires_grad_()
        output = layer(inputs)
        output.backward(gradient)
        found.append([output.detach(), inputs.grad, layer.weight.grad, layer.bias.grad])
    assert same(*found)


def test_an_mxfp8_product_scales_each_block_of_32():
    layer, rows = linear(32, 64), torch.randn(32, 64) * torch.tensor([1.0, 1000.0]).repeat_interleave(32)
    weight = layer.weight.detach().clone()
    output = converted(layer, "mxfp8")(rows)

    def rounded(values: torch.Tensor) -> torch.Tensor:
        amax = values.unflatten(1, (2, 32)).abs().amax(2)
        return e4m3(values, torch.exp2(-torch.ceil(torch.log2(amax / 448))).repeat_interleave(32, 1))

    torch.testing.assert_close(output, rounded(rows) @ rounded(weight).T + layer.bias, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("recipe", RECIPES)
def test_under_autocast_the_output_is_bf16_and_every_gradient_has_its_tensors_type(recipe, monkeypatch):
    layer = converted(linear(32, 64), recipe)
    rows = torch.randn(2, 64, 32).transpose(1, 2)  # not contiguous, three dimensions
    rows.requires_grad_()
    inside, base = [], type(layer).__mro__[2]
    forward = base.forward
    monkeypatch.setattr(
        base,
        "forward",
        lambda self, x: (inside.append((torch.is_autocast_enabled("cpu"), x.dtype)), forward(self, x))[1],
    )
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(rows)
        assert torch.is_autocast_enabled("cpu")
    assert inside == [(False, torch.bfloat16)]
    assert output.dtype == torch.bfloat16
    assert output.shape == (2, 32, 32)
    output.float().square().mean().backward()
    assert rows.grad.dtype == layer.weight.grad.dtype == layer.bias.grad.dtype == torch.float32
    plain = F.linear(rows, layer.weight, layer.bias)
    torch.testing.assert_close(output.float(), plain, atol=0.15, rtol=0.1)


def test_the_object_its_hooks_and_its_weight_stay():
    layer = linear(32, 32)
    weight, seen = layer.weight, []
    layer.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    reference, keys = layer, list(layer.state_dict())
    before = copy.deepcopy(layer.state_dict())
    converted(layer)
    reference(torch.randn(16, 32))
    assert layer.weight is weight
    assert seen == [(16, 32)]
    assert list(layer.state_dict()) == keys
    assert all(torch.equal(layer.state_dict()[key], before[key]) for key in keys)
    assert isinstance(layer, nn.Linear)
    assert repr(layer) == "Float8Linear(in_features=32, out_features=32, bias=True, fp8=tensorwise)"
    assert repr(plugin("rowwise")) == "Float8(recipe='rowwise', base=BF16Mixed())"


@pytest.mark.parametrize(("recipe", "tokens", "multiple"), [("tensorwise", 24, 16), ("mxfp8", 48, 32)])
def test_tokens_that_are_no_multiple_are_refused_by_name(recipe, tokens, multiple):
    layer = converted(linear(32, 32), recipe)
    message = rf"^Float8: part got {tokens} tokens, no multiple of {multiple}, .*drop_last.*evaluate_in_bf16$"
    with pytest.raises(UsageError, match=message):
        layer(torch.randn(2, tokens // 2, 32))
    with pytest.raises(UsageError, match=message):
        layer.eval()(torch.randn(tokens, 32))


def test_evaluation_in_bf16_is_plain_and_takes_any_number_of_tokens():
    layer, rows = linear(32, 32), torch.randn(7, 32)
    expected = layer(rows)
    converted(layer, evaluate_in_bf16=True)
    assert torch.equal(layer.eval()(rows), expected)
    with pytest.raises(UsageError, match="7 tokens"):
        layer.train()(rows)


# --- training ---


def test_one_table_says_what_was_converted_and_why_the_rest_was_not(caplog):
    caplog.set_level("INFO")
    decoding(plugins=plugin(exclude=["attn.o"]), max_steps=1)
    (text,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Float8: ")]
    table = text.splitlines()[:9]
    assert table[0] == "Float8: 93.0% of the linear layers' multiply-adds in fp8 (tensorwise; BF16Mixed(); emulated)"
    assert [re.split(r"  +", line) for line in table[1:]] == [
        ["linear layers", "count", "shape", "products"],
        ["model.blocks.*.attn.q", "2", "32 x 32", "fp8"],
        ["model.blocks.*.attn.k", "2", "16 x 32", "fp8"],
        ["model.blocks.*.attn.v", "2", "16 x 32", "fp8"],
        ["model.blocks.*.attn.o", "2", "32 x 32", "not fp8: exclude"],
        ["model.blocks.*.mlp.gate", "2", "256 x 32", "fp8"],
        ["model.blocks.*.mlp.up", "2", "256 x 32", "fp8"],
        ["model.blocks.*.mlp.down", "2", "32 x 256", "fp8"],
    ]


class Learning(Decoding):
    """Next-token prediction of a fixed sequence, which a small decoder begins to learn in a few steps."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.losses: list[float] = []

    def training_step(self, batch, batch_idx):
        ids = (torch.arange(4 * 17).view(4, 17) * 7 + 68 * batch_idx) % 61
        loss = F.cross_entropy(self.model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss


def learn(own: Any, steps: int = 8, **options: Any) -> list[float]:
    model = Learning(config=WIDE, **options)
    fit(model, plugins=own, max_steps=steps)
    return model.losses


@pytest.fixture(scope="module")
def in_bf16():
    losses = learn(BF16Mixed())
    assert losses[-1] < 0.6 * losses[0]
    return losses


# of bf16 weights one recipe of torchao's layer, and the one that casts the weight itself
@pytest.mark.parametrize(
    ("recipe", "base"),
    [*((recipe, "bf16-mixed") for recipe in RECIPES), ("rowwise", "bf16-true"), ("mxfp8", "bf16-true")],
)
def test_every_step_has_nearly_bf16s_loss(recipe, base, in_bf16):
    losses = learn(plugin(recipe, base=base))
    assert losses == pytest.approx(in_bf16, rel=0.02)
    assert losses != in_bf16


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])  # a layer of torchao's, and ours
def test_activation_checkpointing_changes_nothing(recipe):
    plain, *others = (learn(plugin(recipe), 2, checkpointing=kind) for kind in ("none", "full", "selective"))
    assert others == [plain, plain]


@pytest.mark.parametrize(
    ("recipe", "checkpointing", "backend"),
    [*((recipe, "none", "eager") for recipe in RECIPES), ("tensorwise", "selective", "aot_eager")],
)
def test_blocks_compile_once_for_all_without_graph_breaks_and_train_as_in_eager(recipe, checkpointing, backend):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    torch.manual_seed(0)
    config = Llama(**{**SHAPE, "n_heads": 1})
    # each op of the emulation is traced: of one layer of the attention and one of the MLP, or of the first alone
    own = plugin(recipe, exclude=[r"attn\.[kvo]", "mlp" if backend == "aot_eager" else r"mlp\.(gate|up)"])
    model, ids = Decoder(config), torch.arange(64).view(4, 16) % 61
    model.set_activation_checkpointing(checkpointing)
    own.convert_before_sharding(model)
    start, found = copy.deepcopy(model.state_dict()), []
    for compiled in (False, True):
        model.load_state_dict(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for block in model.blocks if compiled else []:
            block.compile(backend=counter, fullgraph=True)
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                loss = model(ids, labels=ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    assert found[3:] == pytest.approx(found[:3], rel=1e-3)
    assert found[0] > found[1] > found[2]
    assert counter.frame_count == 1


def test_a_compiled_module_is_seen_through():
    torch._dynamo.reset()
    model, own, ids = Decoder(ONE_BLOCK), plugin(), torch.arange(32).view(2, 16) % 61
    plain = copy.deepcopy(model)
    model = torch.compile(model, backend="eager")
    for module, its_plugin in ((model, own), (plain, plugin())):
        its_plugin.convert_module(nn.ModuleDict({"model": module}))
    assert len(own.fp8_layers) == 7
    assert not any("_orig_mod" in name for name in own.fp8_layers)
    torch.testing.assert_close(model(ids), plain(ids))


def test_flops_are_counted_as_without_fp8_and_mfu_goes_by_the_fp8_peak_unless_it_is_emulated():
    counts = [CountsFlops(), CountsFlops()]
    for counter, own in zip(counts, (BF16Mixed(), plugin()), strict=True):
        decoding(counter, plugins=own, max_steps=1, config=ONE_BLOCK)
    assert counts[0].found == counts[1].found
    assert counts[0].found[0] > 0
    assert Float8().peak_dtype == "fp8"
    assert plugin().peak_dtype is None
    for emulate in (True, False):
        assert converted(linear(32, 32), emulate=emulate).fp8.emulate is emulate
        assert converted(linear(32, 32), "rowwise", emulate=emulate).linear_mm_config.output.emulate is emulate
    run = decoding(MFUMonitor(), plugins=plugin(), config=ONE_BLOCK)
    assert run.of("throughput/tokens_per_second")


def test_weights_that_are_not_sharded_stay_plain_parameters():
    model = decoding(plugins=plugin(), max_steps=1, config=ONE_BLOCK).model
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    model[1].weight = model[0].weight
    weight, own = model[0].weight, plugin()
    own.convert_before_sharding(model)
    assert model[1].weight is model[0].weight is not weight
    own.convert_before_sharding(model)
    assert model[1].weight is model[0].weight
    own.convert_module(model)
    assert model[1].weight is model[0].weight is weight


def test_another_plugin_takes_a_converted_module_over():
    model = nn.Sequential(linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    plugin().convert_module(model)
    second = plugin("rowwise", exclude=["1"])
    second.convert_module(model)
    assert list(second.fp8_layers) == ["0"]
    assert type(model[1]) is nn.Linear
    assert set(vars(model[1])) == set(vars(nn.Linear(1, 1)))
    assert "fp8=rowwise" in repr(model[0])


def test_a_name_in_the_whole_module_may_be_excluded_too():
    part = nn.Sequential(linear(32, 32), linear(32, 32), nn.Linear(32, 32))
    own = plugin(exclude=[r"^inner\.0"])
    own.convert_before_sharding(part)
    own.convert_module(nn.ModuleDict({"inner": part}))
    assert list(own.fp8_layers) == ["inner.1"]


# --- bad input ---


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Float8(recipe="delayed"), "Float8.recipe='delayed': give one of tensorwise, rowwise, .*mxfp8$"),
        (lambda: Float8(base="fp16"), "Float8.base='fp16': give one of bf16-mixed, bf16-true$"),
        (lambda: Float8(exclude=["("]), r"Float8.exclude: pattern '\(' is no regular expression: "),
        (lambda: Float8(exclude="head"), "Float8.exclude='head': give a list of patterns$"),
        (lambda: decoding(plugins=Float8()), "plugins: Float8 multiplies on CUDA, not on cpu: set emulate: true"),
    ],
)
def test_an_option_that_cannot_be_is_refused(call, words):
    with pytest.raises(UsageError, match=f"^{words}"):
        call()


@pytest.mark.parametrize(
    ("recipe", "capability", "works"),
    [("tensorwise", (8, 6), False), ("tensorwise", (8, 9), True), ("mxfp8", (9, 0), False), ("mxfp8", (10, 0), True)],
)
def test_a_gpu_without_fp8_is_refused(monkeypatch, recipe, capability, works):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU X")
    module = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    module._trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cuda", 0)))
    own = Float8(recipe, convert_small=True)
    if works:
        own.convert_module(module)
    else:
        needed = "10.0" if recipe == "mxfp8" else "8.9"
        with pytest.raises(UsageError, match=rf"^plugins: .* needs compute capability {needed} or later, GPU X has"):
            own.convert_module(module)
        plugin(recipe).convert_module(module)


@pytest.mark.parametrize("below_fsdp2", [False, True])
def test_layers_that_a_module_divides_itself_are_refused(tmp_path, below_fsdp2):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel()})
    if below_fsdp2:
        fully_shard(model, mesh=mesh["data"])
    with pytest.raises(UsageError, match=r"^plugins: Float8 does not work with tensor parallelism, .* BF16Mixed$"):
        plugin().convert_module(model)


class OnCuda(torch.Tensor):
    """A tensor of the CPU that says it is CUDA's."""

    is_cuda = True


def test_training_without_compile_on_cuda_is_refused(monkeypatch):
    layer, rows = converted(linear(32, 32), emulate=False), torch.randn(16, 32).as_subclass(OnCuda)
    with pytest.raises(UsageError, match=r"^Float8: part runs outside torch.compile, .* allow_eager: true$"):
        layer._refuse_eager(rows)
    layer._refuse_eager(torch.randn(16, 32))
    with torch.no_grad():
        layer._refuse_eager(rows)
    layer.eval()._refuse_eager(rows)
    converted(linear(32, 32), emulate=False, allow_eager=True)._refuse_eager(rows)
    emulated, called = converted(linear(32, 32)), []
    emulated._refuse_eager(rows)
    monkeypatch.setattr(type(emulated), "_refuse_eager", lambda self, input: called.append(input.shape))
    emulated(torch.randn(16, 32))
    assert called == [(16, 32)], "the forward pass asks"


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (nn.Sequential(nn.ReLU()), {}, r"^plugins: Float8 found no nn.Linear in the module: use BF16Mixed instead$"),
        (
            nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))), {"convert_small": False},
            r"converts none of 3 layers \(2 too small to pay, 1 output head\): set convert_small: true",
        ),
        (nn.Sequential(nn.Linear(8, 8)), {}, r"converts none of 1 layers \(1 dimensions no .*\): use BF16Mixed$"),
        (nn.Sequential(nn.Linear(32, 32)), {"exclude": ["x"]}, r"^Float8.exclude: pattern 'x' matches no linear layer"),
    ],
)  # fmt: skip
def test_nothing_to_convert_and_patterns_that_match_nothing(module, options, message):
    with pytest.raises(UsageError, match=message) as caught:
        plugin(**options).convert_module(module)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("found", "recipe", "message"),
    [
        (
            None,
            "rowwise",
            r"^plugins: Float8\(recipe='rowwise'\) needs torchao: pip install -e '.\[fp8\]' in the clone$",
        ),
        ("0.16.1", "rowwise", r"^plugins: Float8\(recipe='rowwise'\) needs torchao 0.17 or later, found 0.16.1: pip"),
        ("0.17.0+cu128", "mxfp8", r"needs torchao 0.18 or later, found 0.17.0\+cu128: pip install -U torchao"),
    ],
)
def test_torchao_missing_or_too_old(monkeypatch, found, recipe, message):
    def version(name):
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(float8_module, "version", version)
    with pytest.raises(UsageError, match=message):
        Float8(recipe)


def test_tensorwise_needs_no_torchao(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(float8_module, "version", version)
    monkeypatch.setattr(float8_module, "import_module", lambda name: pytest.fail(f"imports {name}"))
    monkeypatch.delitem(sys.modules, float8_module._TORCHAO, raising=False)
    assert len(decoding(plugins=plugin(), max_steps=1, config=ONE_BLOCK).trainer.precision_plugin.fp8_layers) == 7
