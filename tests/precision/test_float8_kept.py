"""Float8 with scales of earlier steps, with kept weights, and with layers that are multiplied together."""

import copy
import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness.models import Decoding
from harness.runs import On, fit, same
from lightning.pytorch.callbacks import ModelCheckpoint
from test_float8 import WIDE, converted, e4m3, learn, linear, plugin
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.data import DataLoader

from lightning_tricks import EMA, BF16Mixed, Float8
from lightning_tricks._core.errors import UsageError
from lightning_tricks.models import Decoder, Llama
from lightning_tricks.parallel.dims import ParallelDims
from lightning_tricks.precision import float8_kept
from lightning_tricks.precision.float8_kept import AmaxHistory, KeptWeights
from lightning_tricks.strategies import FSDP2Strategy

CPU = torch.device("cpu")
DELAYED = {"scaling": "delayed"}
KEPT = {"keep_fp8_weights": True}


@pytest.fixture
def _window_of_two(monkeypatch):
    monkeypatch.setattr(float8_kept, "WINDOW", 2)


def e5m2(values: Tensor, scale: Tensor) -> Tensor:
    return (values * scale).clamp(-57344, 57344).to(torch.float8_e5m2).float() / scale


def with_history(*layers: nn.Linear) -> AmaxHistory:
    return AmaxHistory({str(number): layer for number, layer in enumerate(layers)}, CPU)


def step(history: AmaxHistory, layer: nn.Linear, rows: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """One optimizer step's passes: output, gradient of the rows, gradient of the weight."""
    rows, layer.weight.grad = rows.clone().requires_grad_(), None
    output = layer(rows)
    output.backward(gradient)
    history.end_step()
    return output.detach(), rows.grad, layer.weight.grad


# --- scales of earlier steps ---


@pytest.mark.usefixtures("_window_of_two")
def test_scales_are_of_the_largest_magnitudes_of_the_steps_before():
    layer, weight = converted(linear(32, 48)), linear(32, 48).weight.detach()
    bias, history = linear(32, 48).bias.detach(), with_history(layer)
    torch.manual_seed(1)
    sizes = (1.0, 3.0, 2.0, 30.0)  # of inputs; of gradients a thousandth
    inputs = [size * torch.randn(16, 48) for size in sizes]
    gradients = [size * 1e-3 * torch.randn(16, 32) for size in sizes]
    weight_scale = 448 / weight.abs().max()
    for number, (rows, gradient) in enumerate(zip(inputs, gradients, strict=True)):
        window = slice(number, number + 1) if number < 2 else slice(number - 2, number)
        x_scale = 448 / max(rows.abs().max() for rows in inputs[window])
        grad_scale = 57344 / max(gradient.abs().max() for gradient in gradients[window])
        x8, g8, w8 = e4m3(rows, x_scale), e5m2(gradient, grad_scale), e4m3(weight, weight_scale)
        output, grad_rows, grad_weight = step(history, layer, rows, gradient)
        torch.testing.assert_close(output, x8 @ w8.T + bias)
        torch.testing.assert_close(grad_rows, g8 @ w8)
        torch.testing.assert_close(grad_weight, g8.T @ x8)
    largest = max(rows.abs().max().item() for rows in inputs[1:3])
    assert x8.abs().max().item() == pytest.approx(largest, rel=1e-6), "saturated"


@pytest.mark.usefixtures("_window_of_two")
def test_what_is_not_finite_stays_so_and_leaves_no_trace():
    layer = converted(linear(32, 32))
    history = with_history(layer)
    rows, gradient = torch.randn(16, 32), torch.randn(16, 32)
    for _ in range(2):
        step(history, layer, rows, gradient)
    scales = layer.scales.clone()
    for bad in (math.inf, math.nan):
        spoiled = rows.clone()
        spoiled[0, 0] = bad
        output, grad_rows, grad_weight = step(history, layer, spoiled, gradient)
        assert output[0].isnan().all()
        assert output[1:].isfinite().all()
        assert grad_weight[:, 0].isnan().all()
        grad_rows = step(history, layer, rows, spoiled)[1]
        assert grad_rows[0].isnan().all()
        assert torch.equal(layer.scales, scales)


@pytest.mark.usefixtures("_window_of_two")
def test_a_layer_of_which_nothing_is_known_has_the_scale_of_the_largest_magnitude():
    used, larger, unused = (converted(linear(32, 32)) for _ in range(3))
    history = with_history(used, larger, unused)
    for _ in range(2):
        larger(4 * torch.eye(32).requires_grad_()).backward(8 * torch.eye(32))
        step(history, used, torch.eye(32), torch.eye(32))
    assert used.scales.tolist() == [448, 57344]
    assert larger.scales.tolist() == unused.scales.tolist() == [112, 7168]


@pytest.mark.usefixtures("_window_of_two")
def test_who_has_no_gradient_or_evaluates_is_scaled_by_its_own_tensors():
    layer, plain, rows = converted(linear(32, 32)), converted(linear(32, 32)), torch.eye(32)
    history = with_history(layer)
    for _ in range(2):
        step(history, layer, rows, rows)
    large = 100 * torch.randn(32, 32)
    assert not torch.equal(layer(large), plain(large))
    with torch.no_grad():
        assert not torch.equal(layer(large), plain(large)), "as the pass that is run again has gradients"
    layer.eval()
    assert torch.equal(layer(large), plain(large))
    layer.train().requires_grad_(False)
    assert torch.equal(layer(large), plain(large))
    assert not layer(large).requires_grad, "a frozen layer gets no backward pass"


@pytest.mark.usefixtures("_window_of_two")
def test_a_layer_that_is_called_twice_counts_both_and_micro_batches_count_their_largest():
    layer = converted(linear(32, 32))
    history = with_history(layer)
    rows = torch.eye(32)
    for _ in range(2):
        (layer(3 * rows) + layer(rows)).sum().backward()
        history.record()
        layer(2 * rows).sum().backward()
        history.record()
        history.end_step()
    assert layer.scales[0] == 448 / 4


class Batches(Decoding):
    """Batches by their number in the run, in steps of some micro-batches; keeps losses and scales."""

    def __init__(self, **options: Any) -> None:
        super().__init__(config=WIDE, **options)
        self.losses: list[float] = []
        self.scales: list[Any] = []

    def training_step(self, batch, batch_idx):
        ids = (torch.arange(4 * 17).view(4, 17) * 7 + 68 * batch_idx) % 61
        loss = F.cross_entropy(self.model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())
        self.losses.append(loss.item())
        scales = getattr(self.model.blocks[0].mlp.down, "scales", None)
        self.scales.append(None if scales is None else scales.tolist())
        return loss

    def validation_step(self, batch, batch_idx):
        self.model(torch.arange(16).view(1, 16))


def train(own: Any, *callbacks: Any, steps: int = 4, **options: Any) -> Batches:
    model = Batches()
    fit(model, *callbacks, data=DataLoader(range(64)), plugins=own, max_steps=steps, **options)
    return model


@pytest.mark.usefixtures("_window_of_two")
def test_scales_change_with_a_step_and_not_within_it():
    model = train(plugin(**DELAYED), accumulate_grad_batches=2)
    assert model.scales[:4] == [None] * 4
    assert None is not model.scales[4] == model.scales[5] != model.scales[6] == model.scales[7]
    assert model.model.blocks[0].mlp.down.amaxes is None, "nothing outlives the run"


@pytest.mark.usefixtures("_window_of_two")
def test_a_resume_is_bitwise_in_the_middle_of_a_step_too(tmp_path):
    saves = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "steps": 5}
    own = plugin(**DELAYED)
    straight = train(own, saves, **options)
    for at in (1, 3):  # before and after the window is full
        again = plugin(**DELAYED)
        resumed = train(again, ckpt_path=tmp_path / f"step={at}.ckpt", **options)
        assert resumed.scales == straight.scales[2 * at :]
        assert resumed.losses == straight.losses[2 * at :]
        assert same(list(resumed.parameters()), list(straight.parameters()))
        assert again.state_dict() == own.state_dict()


@pytest.mark.usefixtures("_window_of_two")
def test_checkpoints_open_with_and_without_a_history(tmp_path):
    saves = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    train(plugin(**DELAYED), saves, steps=3)
    for own in (BF16Mixed(), plugin(), plugin("rowwise")):
        train(own, ckpt_path=tmp_path / "step=3.ckpt")
    other = train(plugin(exclude=["attn"], **DELAYED), ckpt_path=tmp_path / "step=3.ckpt")
    assert other.scales == [None], "the history is of other layers"
    train(BF16Mixed(), ModelCheckpoint(tmp_path / "bf16", filename="{step}", every_n_train_steps=3), steps=3)
    assert train(plugin(**DELAYED), ckpt_path=tmp_path / "bf16" / "step=3.ckpt").scales == [None]


@pytest.mark.usefixtures("_window_of_two")
def test_an_evaluation_after_a_fit_leaves_the_history_to_the_next_checkpoint():
    own, model = plugin(**DELAYED), Batches()
    trainer = fit(model, data=DataLoader(range(64)), plugins=own).trainer
    recorded = own.state_dict()
    trainer.validate(model, DataLoader(range(2)), verbose=False)
    assert own.state_dict() == recorded
    assert recorded["amax_history"]["steps"] == 4


# --- kept weights ---


def check_kept(trainer: Any, module: Any, *_: Any) -> None:
    """Each kept weight is the current one in fp8."""
    for layer in trainer.precision_plugin.fp8_layers.values():
        weight = layer.weight.detach()
        scale = (448 / weight.abs().max().double()).float()
        assert layer.kept.scale == scale
        assert torch.equal(layer.kept.rows.float(), (weight * scale).to(torch.float8_e4m3fn).float())
        assert torch.equal(layer.kept.columns.float(), layer.kept.rows.float().T)


class Checked(Batches):
    def training_step(self, batch, batch_idx):
        check_kept(self.trainer, self)
        return super().training_step(batch, batch_idx)


@torch.no_grad()
def halve(trainer: Any, module: Any, *_: Any) -> None:
    for parameter in module.parameters():
        parameter.mul_(0.5)


def load(trainer: Any, module: Any, *_: Any) -> None:
    module.load_state_dict({name: value * 0.9 for name, value in module.state_dict().items()})


@pytest.mark.parametrize(
    "callbacks",
    [
        (),
        (On(on_train_batch_start=halve),),
        (On(on_train_batch_end=load),),
        (EMA(0.5),),
    ],
    ids=["steps", "written in place", "loaded", "averages in validation"],
)
@pytest.mark.parametrize("fused", [True, False])
def test_kept_weights_are_the_current_ones_in_every_micro_batch(callbacks, fused, monkeypatch):
    monkeypatch.setattr(
        Batches, "configure_optimizers", lambda self: torch.optim.AdamW(self.parameters(), lr=1e-2, fused=fused)
    )
    losses = []
    for own, kind in ((plugin(), Batches), (plugin(**KEPT), Checked)):
        model = kind()
        fit(
            model, *copy.deepcopy(callbacks), data=DataLoader(range(64)), val=DataLoader(range(2)), plugins=own,
            max_steps=3, accumulate_grad_batches=2, val_check_interval=1, limit_val_batches=1,
        )  # fmt: skip
        losses.append(model.losses)
    assert losses[0] == losses[1]
    assert model.model.blocks[0].attn.q.kept is None, "nothing outlives the run"


def test_after_a_step_in_the_same_pass_no_old_weight_is_used():
    layer, plain = converted(linear(32, 32)), converted(linear(32, 32))
    rows = torch.randn(16, 32)
    kept = KeptWeights(layer, [layer], emulate=True, compiles=False)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (layer, plain)]
    optimizers[0].register_step_post_hook(kept.forget)
    kept.refresh()
    for _ in range(2):
        outputs = [part(rows) for part in (layer, plain)]
        assert torch.equal(*outputs)
        for output, optimizer in zip(outputs, optimizers, strict=True):
            output.square().mean().backward()
            optimizer.step()


# --- together ---


class Together(nn.Module):
    """Three layers of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([linear(32, 48, 0), linear(16, 48, 1), linear(16, 48, 2)])

    def multiplied_together(self):
        return [list(self.parts)]

    def forward(self, rows: Tensor) -> Tensor:
        return torch.cat(self.parts[0].multiply_together(rows, list(self.parts)), -1)


@pytest.mark.parametrize("options", [{}, DELAYED, KEPT, {**DELAYED, **KEPT}], ids=str)
@pytest.mark.usefixtures("_window_of_two")
def test_layers_together_have_one_scale_of_the_input_of_the_weights_and_of_the_gradients(options):
    module = Together()
    weights, biases = (
        torch.cat([getattr(part, name).detach() for part in module.parts]) for name in ("weight", "bias")
    )
    holder = nn.ModuleDict({"own": module, "tail": nn.Linear(16, 16)})
    own = plugin(**options)
    own.convert_module(holder)
    torch.manual_seed(3)
    for number in range(3):
        rows, gradient = torch.randn(2, 8, 48), torch.randn(2, 8, 64)
        if number == 0:
            amaxes = [rows.abs().max(), gradient.abs().max()]
        elif number == 1:
            amaxes = [max(amaxes[0], rows.abs().max()), max(amaxes[1], gradient.abs().max())]
        with own.train_step_context():
            rows.requires_grad_()
            module.zero_grad()
            with torch.autocast("cpu", enabled=False):
                output = module(rows)
        output.backward(gradient)
        if own._history is not None:
            own._history.end_step()
        x, g = rows.detach().flatten(0, 1), gradient.flatten(0, 1)
        delayed = number == 2 and bool(own._history)
        x_amax, g_amax = amaxes if delayed else (x.abs().max(), g.abs().max())
        x8, g8 = e4m3(x, 448 / x_amax), e5m2(g, 57344 / g_amax)
        w8 = e4m3(weights, 448 / weights.abs().max())
        torch.testing.assert_close(output.flatten(0, 1), x8 @ w8.T + biases)
        torch.testing.assert_close(rows.grad.flatten(0, 1), g8 @ w8)
        torch.testing.assert_close(torch.cat([part.weight.grad for part in module.parts]), g8.T @ x8)
        torch.testing.assert_close(torch.cat([part.bias.grad for part in module.parts]), g.sum(0))


def test_together_with_a_layer_that_stays_each_multiplies_alone():
    module = Together()
    holder = nn.ModuleDict({"own": module, "tail": nn.Linear(16, 16)})
    plugin(exclude=[r"parts\.2"]).convert_module(holder)
    rows = torch.randn(16, 48)
    assert torch.equal(module(rows), torch.cat([part(rows) for part in module.parts], -1))
    own = plugin(evaluate_in_bf16=True)
    own.convert_module(holder)
    assert torch.equal(module.eval()(rows[:7]), torch.cat([part(rows[:7]) for part in module.parts], -1))


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_a_fused_decoder_keeps_the_weights_of_its_products_together_and_computes_the_same(mode):
    def found(fused, **options):
        torch.manual_seed(0)
        decoder = Decoder(Llama(vocab_size=64, d_model=32, n_layers=2, n_heads=2, max_seq_len=16, d_ff=64))
        decoder.fuse_projections(fused)
        decoder.set_activation_checkpointing(mode)
        own = plugin(convert_small=True, **options)
        own.convert_module(nn.ModuleDict({"own": decoder}))
        ids = torch.randint(64, (2, 16))
        for _ in range(2):  # micro-batches
            with own.train_step_context():
                loss = decoder(ids).square().mean()
            loss.backward()
        blocks = [block.attn.q.kept_together is not None for block in decoder.blocks]
        return blocks, [parameter.grad for parameter in decoder.parameters()]

    apart, _ = found(False, **KEPT)
    together, kept = found(True, **KEPT)
    assert not any(apart)
    assert all(together)
    assert same(kept, found(True)[1])


def test_a_layer_of_a_fused_product_that_a_hook_takes_out_has_its_own_scale_with_kept_weights_too():
    found = []
    for options in ({}, KEPT):
        torch.manual_seed(0)
        decoder = Decoder(Llama(vocab_size=64, d_model=32, n_layers=2, n_heads=2, max_seq_len=16, d_ff=64))
        decoder.fuse_projections()
        own = plugin(convert_small=True, **options)
        own.convert_module(nn.ModuleDict({"own": decoder}))
        hook = decoder.blocks[0].attn.q.register_forward_hook(lambda *_: None)
        for _ in range(2):  # with the hook, then without it
            with own.train_step_context():
                decoder(torch.arange(32).view(2, 16)).square().mean().backward()
            hook.remove()
        found.append([parameter.grad for parameter in decoder.parameters()])
    assert same(*found)


# --- compiled ---


@pytest.mark.usefixtures("_window_of_two")
@pytest.mark.parametrize(("options", "graphs"), [(DELAYED, 2), (KEPT, 1), ({**DELAYED, **KEPT}, 2)])
def test_blocks_compile_without_graph_breaks_and_not_again_in_each_step(options, graphs):
    """The second graph is the one with scales of earlier steps."""
    torch._dynamo.reset()
    counter, found = CompileCounterWithBackend("aot_eager"), []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Together() for _ in range(2)))
        holder = nn.ModuleDict({"model": model, "tail": nn.Linear(16, 16)})
        for block in model:
            block.last = linear(48, 64)
        own = plugin(**options)
        own.convert_module(holder)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)  # of losses of 0.01
        own.connect(None, [optimizer], [])
        calls = [torch.compile(TwoLayers(block), backend=counter, fullgraph=True) for block in model]
        rows = torch.randn(16, 48, generator=torch.Generator().manual_seed(0))
        for _ in range(5):
            with own.train_step_context():
                x = rows
                for block, call in zip(model, calls, strict=True):
                    x = call(x) if compiled else TwoLayers(block)(x)
            loss = x.float().square().mean()
            loss.backward()
            if own._history is not None:
                own._history.record()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    assert found[5:] == pytest.approx(found[:5], rel=0.05)
    assert found[0] > found[2] > found[4]
    assert counter.frame_count == 2 * graphs  # the second block gets an input with a gradient


class TwoLayers(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block.last(self.block(x))


# --- training ---


@pytest.mark.parametrize("options", [DELAYED, KEPT, {**DELAYED, **KEPT}], ids=str)
def test_every_step_has_nearly_bf16s_loss(options):
    steps = 20  # four of them with scales of earlier ones
    losses, in_bf16 = learn(plugin(**options), steps), learn(BF16Mixed(), steps)
    assert losses == pytest.approx(in_bf16, rel=0.02)
    dynamic = learn(plugin(), steps)
    assert (losses == dynamic) == (options == KEPT)
    assert losses[:16] == dynamic[:16]


@pytest.mark.usefixtures("_window_of_two")
def test_activation_checkpointing_changes_nothing():
    options = {**DELAYED, **KEPT}
    plain, *others = (learn(plugin(**options), 5, checkpointing=kind) for kind in ("none", "full", "selective"))
    assert others == [plain, plain]


# --- refused ---


@pytest.mark.parametrize(
    ("options", "mesh", "line"),
    [
        (DELAYED, {"tensor": 2}, r"Float8.scaling=delayed needs the same layers on all ranks, not mesh.tensor=2, mesh"),
        (DELAYED, {"pipeline": 2}, r"Float8.scaling=delayed needs .*, mesh.pipeline=2: set scaling: dynamic, or leave"),
        (DELAYED, {}, ""),
        (
            KEPT,
            {},
            r"Float8.keep_fp8_weights needs whole weights, of which a rank of FSDP2Strategy has parts: leave it",
        ),
    ],
)
def test_strategies_are_refused_before_launch(options, mesh, line):
    trainer = SimpleNamespace(strategy=FSDP2Strategy(mesh=ParallelDims(**mesh)), num_nodes=1, num_devices=2)
    with pytest.raises(UsageError, match=f"^plugins: {line}") if line else nullcontext():
        plugin(**options).check_run(trainer, None, "fit")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"scaling": "static"}, "Float8.scaling='static': give one of dynamic, delayed"),
        ({"recipe": "rowwise", **DELAYED}, "Float8.scaling=delayed is for recipe=tensorwise, not rowwise: change one"),
        ({"recipe": "mxfp8", **KEPT}, "Float8.keep_fp8_weights is for recipe=tensorwise, not mxfp8: change one"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, line):
    with pytest.raises(UsageError, match=f"^{line}"):
        Float8(**options)
