"""Loss scale and skipped steps worked out by hand; fp8 layers measured in eager and compiled alike; no trace left."""

import math
import warnings
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from harness import processes, runs
from harness.models import LLAMA, SHAPE, Decoding, Small, adamw, batches
from harness.runs import Memory, fit, same_training
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from test_no_sync import Counts
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_tricks.callbacks import ActivationMonitor, AttentionMonitor, PrecisionMonitor
from lightning_tricks.models import GPT2, Decoder, Llama
from lightning_tricks.precision import BF16Mixed, FP16Mixed
from lightning_tricks.strategies import FSDP2Strategy

ONE_BLOCK = Llama(**{**SHAPE, "n_layers": 1})
SCALE, SKIPPED = "precision/loss_scale", "precision/skipped_steps"
SHARE, WORST = "precision/fp8_share", "precision/fp8_underflow_max"
STATS = ["input_amax", "input_underflow", "weight_amax", "weight_underflow"]


def lines_of(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run()
    return result, [str(w.message) for w in caught if "PrecisionMonitor" in str(w.message)]


def graphs_of(run):
    """What the run returns, and the number of graphs that it compiles, none of them twice."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        return run(), torch._dynamo.utils.counters["stats"]["unique_graphs"]


# ----------------------------------------------------------------------------------------------------- the loss's scale


class Overflowing(pl.LightningModule):
    """One weight; the micro-batches named in `bad` have an infinite gradient."""

    def __init__(self, bad=(), fused=False, manual=False) -> None:
        super().__init__()
        torch.manual_seed(0)  # its loader draws a seed
        self.weight = nn.Parameter(torch.zeros(2))
        self.bad, self.fused = bad, fused
        self.automatic_optimization = not manual

    def training_step(self, batch, batch_idx):
        loss = (self.weight * (math.inf if batch_idx in self.bad else 1.0)).sum()
        if self.automatic_optimization:
            return loss
        for index, optimizer in enumerate(self.optimizers()):
            factor = math.inf if (batch_idx, index) in self.bad else 1.0
            optimizer.zero_grad()
            self.manual_backward((self.weight * factor).sum())
            optimizer.step()
        return None

    def configure_optimizers(self):
        if self.automatic_optimization:
            return torch.optim.AdamW(self.parameters(), lr=0.1, fused=self.fused)
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]

    def train_dataloader(self):
        return DataLoader(torch.zeros(64, 1), batch_size=1)


def scaling(**options):
    scaler = torch.amp.GradScaler("cpu", **{"init_scale": 8.0, "growth_interval": 2, **options})
    return MixedPrecision("16-mixed", "cpu", scaler=scaler)


class Counting(MixedPrecision):
    """Says by itself how many steps it skipped."""

    def __init__(self):
        super().__init__("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
        self.skipped_steps = 40

    def optimizer_step(self, *args, **kwargs):
        result = super().optimizer_step(*args, **kwargs)
        self.skipped_steps += 1
        return result


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("plugin", [scaling, lambda: FP16Mixed(init_scale=8.0, growth_interval=2)])
def test_each_step_has_the_scale_that_it_used_and_the_steps_skipped_so_far(plugin, fused):
    # it doubles after two good steps in a row, halves after a bad one: 8 8 | 16 bad | 8 8 | 16 bad | 8 bad | 4
    options = {"max_steps": 8, "log_every_n_steps": 3}
    run = fit(Overflowing((2, 5, 6), fused), PrecisionMonitor(), plugins=[plugin()], **options)
    assert [step for step, _ in run.rows] == list(range(8))
    assert run.of(SCALE) == [8, 8, 16, 8, 8, 16, 8, 4]
    assert run.of(SKIPPED) == [0, 0, 1, 1, 1, 2, 3, 3]
    assert run.names() == {SCALE, SKIPPED}
    assert same_training(fit(Overflowing((2, 5, 6), fused), plugins=[plugin()], **options), run)


def test_with_accumulation_there_is_one_figure_a_step():
    # micro-batch 3 is in the second step of two
    options = {"plugins": [scaling()], "max_steps": 3, "accumulate_grad_batches": 2, "log_every_n_steps": 1}
    run = fit(Overflowing((3,)), PrecisionMonitor(), **options)
    assert (run.of(SCALE), run.of(SKIPPED)) == ([8, 8, 4], [0, 1, 1])


@pytest.mark.parametrize("plugin", [scaling, lambda: FP16Mixed(init_scale=8.0, growth_interval=2)])
def test_two_optimizers_in_one_batch_are_two_steps(plugin):
    # batch 0: 8 good, 8 good; batch 1: 16 bad, 8 good; batch 2: 8 good, 16 bad; batch 3: 8, 8
    model = Overflowing(((1, 0), (2, 1)), manual=True)
    run = fit(model, PrecisionMonitor(), plugins=[plugin()], max_steps=8, log_every_n_steps=1)
    assert (run.of(SCALE), run.of(SKIPPED)) == ([8, 8, 16, 8], [0, 1, 2, 2])


def test_a_plugin_that_counts_by_itself_is_believed():
    run = fit(Overflowing((1,)), PrecisionMonitor(), plugins=[Counting()], max_steps=3, log_every_n_steps=1)
    assert (run.of(SCALE), run.of(SKIPPED)) == ([8, 8, 4], [41, 42, 43])
    assert PrecisionMonitor().state_dict() == {}


def test_a_resumed_run_goes_on_counting(tmp_path):
    def resuming(last, ckpt_path=None):
        saving = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
        model, options = Overflowing((0, 2, 4, 7)), {"plugins": [scaling()], "log_every_n_steps": 1}
        trainer = fit(model, PrecisionMonitor(), saving, max_steps=last, ckpt_path=ckpt_path, **options).trainer
        return trainer.callback_metrics[SKIPPED].item()

    assert resuming(6) == 3
    assert resuming(9, tmp_path / "step=3.ckpt") == 4  # 0 and 2 before, 4 and 7 after
    saved = torch.load(tmp_path / "step=9.ckpt", weights_only=True)["callbacks"]["PrecisionMonitor"]
    assert saved == {"skipped_steps": 4}
    assert resuming(1) == 1  # a new run starts anew
    stepless = PrecisionMonitor()
    stepless.load_state_dict(saved)
    assert stepless.state_dict() == saved


def test_a_second_fit_counts_anew():
    monitor = PrecisionMonitor()
    runs = [fit(Overflowing((0,)), monitor, plugins=[scaling()], max_steps=2, log_every_n_steps=1) for _ in range(2)]
    assert runs[0].of(SKIPPED) == runs[1].of(SKIPPED) == [1, 1]
    monitor.setup(runs[1].trainer, runs[1].model, "validate")  # and the checkpoint that is saved afterwards has it
    assert monitor.state_dict() == {"skipped_steps": 1}


@pytest.mark.parametrize(
    "plugin", [None, MixedPrecision("bf16-mixed", "cpu"), scaling(enabled=False)], ids=["none", "bf16", "disabled"]
)
def test_a_plugin_without_anything_to_say_gets_one_line(plugin):
    run, lines = lines_of(lambda: fit(Overflowing(), PrecisionMonitor(), plugins=[plugin] if plugin else None))
    name = "Precision" if plugin is None else "MixedPrecision"
    assert lines == [f"PrecisionMonitor records nothing: {name} neither scales the loss nor multiplies in fp8"]
    assert run.names() == set()


# ------------------------------------------------------------------------------------------------------------- in fp8


class InFp8(Precision):
    """Says that a model's linear layers are in fp8; their figures are simple sums over what it is shown."""

    converted_share = 0.75

    def __init__(self, prefix="", pattern=""):
        self.prefix, self.pattern = prefix, pattern
        self.asked = []

    def convert_module(self, module):
        root = module.get_submodule(self.prefix) if self.prefix else module
        names = ((name.replace("_orig_mod.", ""), part) for name, part in root.named_modules())
        self.fp8_layers = {n: x for n, x in names if type(x) is nn.Linear and self.pattern in n}
        return module

    def layer_stats(self, layer, x):
        assert not torch.is_grad_enabled()
        assert layer.training  # else it may compute something else than in training
        self.asked.append(layer)
        small = ((x != 0) & (x.abs() < 0.1)).sum() / (x != 0).sum()
        light = ((layer.weight != 0) & (layer.weight.abs() < 0.01)).sum() / layer.weight.numel()
        return {
            "input_amax": x.abs().amax(), "input_underflow": small, "weight_amax": layer.weight.abs().amax(),
            "weight_underflow": light,
        }  # fmt: skip


class Doubling(pl.LightningModule):
    """Two layers, named in their list; batch b holds b, and 0.05 b, of which the first doubles each."""

    def __init__(self, again=False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
        for block, factor in zip(self.blocks, (2.0, -1.0), strict=True):
            nn.init.eye_(block.weight)
            block.weight.data.mul_(factor)
        self.again = again

    def training_step(self, batch, batch_idx):
        x = self.blocks[0](batch)
        if self.again:
            self.blocks[0](100 * batch)
        return self.blocks[1](input=x).sum()

    def validation_step(self, batch, batch_idx):
        self.blocks[0](1000 * batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def train_dataloader(self):
        b = torch.arange(1.0, 13.0)
        return DataLoader(list(torch.stack([b, 0.05 * b], 1)[:, None]), batch_size=None)

    val_dataloader = train_dataloader


@pytest.mark.parametrize("again", [False, True])
def test_log_steps_show_the_last_micro_batch_and_the_first_run_of_a_layer(again):
    # micro-batches hold 1, 0.05; 2, 0.1; 3, 0.15: of three to a step the last of each second step is looked at.
    # weights 2 and 0 (of 4 numbers two are 0, none small)
    options = {"accumulate_grad_batches": 3, "val_check_interval": 6, "limit_val_batches": 1}
    plugin = InFp8()
    run = fit(Doubling(again), PrecisionMonitor(), plugins=[plugin], **options)
    assert [step for step, _ in run.rows] == [1, 3]
    assert run.of("fp8/blocks.0/input_amax") == [6, 12]
    assert run.of("fp8/blocks.1/input_amax") == [12, 24]
    assert run.of("fp8/blocks.1/weight_amax") == [1, 1]
    assert run.of("fp8/blocks.0/input_underflow") == [0, 0]  # 0.3 and 0.6
    assert run.of(SHARE) == [0.75, 0.75]
    assert run.names() == {SHARE, WORST, *(f"fp8/blocks.{i}/{stat}" for i in (0, 1) for stat in STATS)}
    assert len(plugin.asked) == 4


def test_the_worst_underflow_is_that_of_an_input():
    model = Doubling()
    model.blocks[0].weight.data.copy_(torch.tensor([[2.0, 0.005], [0.005, 0.005]]))  # light: three of four
    run = fit(model, PrecisionMonitor(), plugins=[InFp8()], max_steps=1)
    # input 1 and 0.05: one of two; then 2.00025 and 0.00525: one of two
    assert run.of("fp8/blocks.0/weight_underflow") == [0.75]
    assert run.of("fp8/blocks.0/input_underflow") == [0.5]
    assert run.of(WORST) == [0.5]
    model.blocks[0].weight.data.mul_(0.01)  # then all that comes to the second is small
    run = fit(model, PrecisionMonitor(), plugins=[InFp8()], max_steps=1)
    assert run.of(WORST) == run.of("fp8/blocks.1/input_underflow") == [1.0]


def test_layers_have_their_names_in_the_module_whatever_the_plugin_calls_them():
    plugins = [InFp8(prefix="model.blocks.1", pattern="attn.q")]
    run = fit(Decoding(), PrecisionMonitor(), plugins=plugins, max_steps=1)
    assert run.names() == {SHARE, WORST, *(f"fp8/model.blocks.1.attn.q/{stat}" for stat in STATS)}


def test_without_layers_only_the_share_is_left():
    plugin = InFp8()
    run = decoding(PrecisionMonitor(per_layer=False), plugin=plugin, max_steps=2)
    assert run.names() == {SHARE}
    assert plugin.asked == []
    run = fit(Decoding(), PrecisionMonitor(), plugins=[InFp8(pattern="none such")])
    assert run.names() == {SHARE}


def test_a_layer_that_did_not_run_or_got_nothing_has_no_figures():
    class Skipping(Doubling):
        def training_step(self, batch, batch_idx):
            self.blocks[0](batch[:0])
            return self.blocks[1](batch).sum()

    names = fit(Skipping(), PrecisionMonitor(), plugins=[InFp8()]).names()
    assert names == {SHARE, WORST, *(f"fp8/blocks.1/{stat}" for stat in STATS)}


def test_layers_are_watched_on_log_steps_alone():
    class Peeking(Doubling):
        def training_step(self, batch, batch_idx):
            hooked.append(any(block._forward_pre_hooks for block in self.blocks))
            return super().training_step(batch, batch_idx)

    hooked = []
    options = {"max_steps": 4, "log_every_n_steps": 2, "accumulate_grad_batches": 2}
    fit(Peeking(), PrecisionMonitor(), plugins=[InFp8()], **options)
    assert hooked == [False, False, False, True] * 2


def decoding(*callbacks, plugin=None, **options):
    options = {"backend": "eager", "plugins": [plugin or InFp8(pattern="attn")], **options}
    return runs.decoding(*callbacks, **options)


@pytest.mark.parametrize("options", [
    {}, {"accumulate_grad_batches": 3}, {"checkpointing": "full"}, {"checkpointing": "selective"},
    {"checkpointing": "selective", "compiled": "in_place", "backend": "aot_eager"},
    {"checkpointing": "full", "compiled": "wrapped"}, {"compiled": "whole"}, {"log_every_n_steps": 0},
], ids=str)  # fmt: skip
def test_training_is_the_same_with_it(options):
    torch.compiler.reset()
    # aot_eager traces a block's backward pass as well: GPT-2's is the shorter one
    block = GPT2(**{**SHAPE, "n_layers": 1}) if "backend" in options else ONE_BLOCK
    plain = decoding(config=block, **options)
    watched = decoding(PrecisionMonitor(), config=block, **options)
    assert same_training(plain, watched)
    assert len(watched.names()) == (0 if "log_every_n_steps" in options else 2 + 4 * 4)


@pytest.mark.parametrize("compiled", ["in_place", "in_place_late", "wrapped", "whole"])
def test_compiled_modules_tell_what_eager_ones_do_and_compile_once(compiled):
    monitors = (
        [PrecisionMonitor()] if compiled == "whole" else [AttentionMonitor(), PrecisionMonitor(), ActivationMonitor()]
    )
    options = {"config": ONE_BLOCK if compiled == "whole" else LLAMA}
    (run, graphs), lines = lines_of(lambda: graphs_of(lambda: decoding(*monitors, compiled=compiled, **options)))
    assert (graphs, lines) == (1, [])
    eager = decoding(*monitors, **options)
    assert len(run.rows) == 2
    for (_, found), (_, expected) in zip(run.rows, eager.rows, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
        assert len(found) >= (18 if compiled == "whole" else 34)


seen_modes = []  # of Restless outside of its graph: gradients, training, the layer's training


class Restless(nn.Module):
    """A block that draws random numbers, keeps statistics, counts its calls in buffers, and knows its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.frozen = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4)
        self.linear = nn.Linear(4, 4)
        self.frozen.eval()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("nothing", None)

    def forward(self, x, *, noise=0.1):
        if not torch.compiler.is_compiling():
            seen_modes.append((torch.is_grad_enabled(), self.drop.training, self.linear.training))
        self.calls.add_(1)
        self.total = self.total + x.detach().sum()
        x = x + noise * nn.functional.dropout(torch.randn_like(x), 0.3, training=True)
        return self.linear(self.drop(self.norm(self.frozen(x))))


def resting(block, compiled="in_place", loss=lambda module, batch: module(batch).square().mean()):
    """The block, compiled, in a module of its own."""
    if compiled == "in_place":
        block.compile(backend="eager")
    else:
        block = torch.compile(block, backend="eager")
    return Small(net=block, data=DataLoader(torch.arange(256.0).view(64, 4) / 256, batch_size=8), loss=loss)


def twice(module, batch):
    first = module.net(batch, noise=0.2)  # the one that is looked at
    return (first + module.net(batch, noise=0.2)).square().mean()


@pytest.mark.parametrize("compiled", ["in_place", "wrapped"])
def test_random_numbers_statistics_counters_and_modes_are_those_of_a_run_without_it(compiled):
    found = []
    seen_modes.clear()
    torch.compiler.reset()
    for monitors in ([], [PrecisionMonitor()]):
        torch.manual_seed(0)
        model, plugin = resting(Restless(), compiled, twice), InFp8(pattern="linear")
        run = fit(model, *monitors, plugins=[plugin], log_every_n_steps=1)
        assert len(plugin.asked) == len(seen_modes) == 4 * len(monitors)
        modes = [part.training for part in model.modules()]
        assert False in modes
        assert True in modes
        found.append((run, [*model.buffers()], modes))
    assert set(seen_modes) == {(False, False, True)}
    (plain, buffers, modes), (watched, same_buffers, same_modes) = found
    assert same_training(plain, watched)
    assert all(torch.equal(a, b) for a, b in zip(buffers, same_buffers, strict=True))
    assert modes == same_modes


def test_what_is_compiled_inside_stays_out_of_its_graph_and_runs_once():
    class Twice(Decoding):
        def __init__(self):
            super().__init__(compiled="in_place", config=ONE_BLOCK, backend="eager")
            self.model = torch.compile(self.model, backend="eager")

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + super().training_step((batch + 1) % 61, batch_idx)

    graphs, runs = [], []
    for monitors in ([], [PrecisionMonitor()]):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        plugin = InFp8(pattern="attn")
        runs.append(fit(Twice(), *monitors, plugins=[plugin], max_steps=2))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert len(plugin.asked) == 4 * len(monitors)
    assert graphs[0] == graphs[1]
    assert same_training(*runs)


def test_a_compiled_layer_is_measured_from_its_own_call():
    torch.compiler.reset()
    for wrapped in (False, True):
        model = Doubling()
        if wrapped:
            model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
        else:
            model.blocks[0].compile(backend="eager")
        run = fit(model, PrecisionMonitor(), plugins=[InFp8()], max_steps=2)
        assert run.of("fp8/blocks.0/input_amax") == [2]
        assert run.of("fp8/blocks.1/input_amax") == [4]


def test_a_module_that_does_not_run_without_its_graph_gets_one_line_and_trains_on():
    class Graphic(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            if not torch.compiler.is_compiling():
                raise RuntimeError("graphs only\nand a second line")
            return self.linear(x)

    def run(*monitors):
        torch.compiler.reset()
        torch.manual_seed(0)
        return fit(resting(Graphic()), *monitors, plugins=[InFp8()])

    plain, (watched, lines) = run(), lines_of(lambda: run(PrecisionMonitor()))
    assert lines == [
        "PrecisionMonitor does not measure every fp8 layer: Graphic does not run without its graph (RuntimeError: "
        "graphs only); if you use torch.compile, compile each block"
    ]
    assert same_training(plain, watched)
    assert watched.names() == {SHARE}


def test_a_lightning_module_compiled_as_a_whole_gets_one_line_and_its_share():
    def run(*monitors):
        torch.compiler.reset()
        model = torch.compile(Doubling(), backend="eager")
        return fit(model, *monitors, plugins=[InFp8()], max_steps=6)

    plain = run()
    with torch._dynamo.config.patch(error_on_recompile=True):
        watched, lines = lines_of(lambda: run(PrecisionMonitor()))
    assert lines == [
        "PrecisionMonitor does not measure every fp8 layer: 2 of 2 fp8 layers are inside a model that is compiled as a "
        "whole; if you use torch.compile, compile each block"
    ]
    assert same_training(plain, watched)
    assert watched.names() == {SHARE}


def test_layers_inside_a_compiled_function_give_one_line_and_no_second_graph():
    class Hidden(Doubling):
        def __init__(self):
            super().__init__()
            self.both = torch.compile(lambda x: self.blocks[1](self.blocks[0](x)), backend="eager")

        def training_step(self, batch, batch_idx):
            return self.both(batch).sum()

    torch.compiler.reset()
    plain = fit(Hidden(), plugins=[InFp8()], max_steps=6)
    for every in (1, 2):
        watch = partial(fit, plugins=[InFp8()], max_steps=6, log_every_n_steps=every)
        (watched, graphs), lines = lines_of(lambda: graphs_of(lambda: watch(Hidden(), PrecisionMonitor())))  # noqa: B023
        assert graphs == len(lines) == 1
        assert same_training(plain, watched)
        assert "none ran where it can be seen; if you use torch.compile, compile each block" in lines[0]
        assert watched.names() == {SHARE}


@pytest.mark.parametrize("compiled", ["no", "in_place", "wrapped"])
def test_the_model_is_left_as_it_was_after_a_fit_and_after_a_failure(compiled):
    class Failing(Decoding):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            raise RuntimeError("out of paper")

    torch.compiler.reset()
    model, failing = (kind(compiled=compiled, backend="eager") for kind in (Decoding, Failing))
    before = [block._compiled_call_impl for block in model.model.blocks]
    fit(model, PrecisionMonitor(), plugins=[InFp8()], max_steps=2)
    with pytest.raises(RuntimeError, match="out of paper"):
        fit(failing, PrecisionMonitor(), plugins=[InFp8()], log_every_n_steps=1)
    assert not any(part._forward_pre_hooks for m in (model, failing) for part in m.modules())
    assert [block._compiled_call_impl for block in model.model.blocks] == before


def test_a_second_fit_logs_each_figure_once_more():
    monitor, model = PrecisionMonitor(), Decoding()
    first = fit(model, monitor, plugins=[InFp8()])
    second = fit(model, monitor, plugins=[InFp8()])
    assert len(first.rows) == len(second.rows) == 2
    assert first.names() == second.names()


def test_measuring_waits_for_nothing_between_logged_steps():
    counts, model = Counts(5, 9), Doubling()  # the fifth and the tenth step are logged
    torch.compiler.reset()
    model.blocks[0].compile(backend="eager")
    plugin = InFp8()
    fit(model, PrecisionMonitor(), counts, plugins=[plugin], max_steps=10, log_every_n_steps=5)
    assert counts.steps == len(plugin.asked) == 4
    assert counts.reads == []


# -------------------------------------------------------------------------------------------------------- in our model


def test_our_model_brings_it_where_the_plugin_has_something_to_say():
    from lightning_tricks.language_model import LanguageModel

    def brought(*plugins, callbacks=()):
        trainer = pl.Trainer(accelerator="cpu", logger=False, plugins=[*plugins], callbacks=[*callbacks])
        model = LanguageModel(LLAMA)
        model._trainer = trainer
        return [type(callback).__name__ for callback in model.configure_callbacks()].count("PrecisionMonitor")

    plugin = InFp8()
    plugin.fp8_layers = {}
    assert brought(plugin) == brought(FP16Mixed()) == brought(scaling()) == 1
    assert brought() == brought(BF16Mixed()) == brought(FP16Mixed(loss_scaling=False)) == 0
    assert brought(FP16Mixed(), callbacks=[PrecisionMonitor(per_layer=False)]) == 0


# -------------------------------------------------------------------------------------------------------- with Float8

Q = "model.blocks.1.attn.q"
BUT_Q = ["mlp", r"attn\.[kvo]"]  # to exclude: one layer of a block is soon traced


def float8(**options):
    pytest.importorskip("torchao")
    from lightning_tricks.precision import Float8

    return Float8(emulate=True, convert_small=True, **options)


class Shown(pl.Callback):
    """Keeps what one layer is given in training, of every micro-batch, and its weight."""

    def __init__(self):
        self.given = []

    def on_fit_start(self, trainer, pl_module):
        see = lambda layer, args: self.given.append((args[0].detach().bfloat16(), layer.weight.detach().clone()))  # noqa: E731
        self.handle = pl_module.get_submodule(Q).register_forward_pre_hook(see)

    def on_fit_end(self, trainer, pl_module):
        self.handle.remove()


def lost(values):
    scaled = values.float() * 448 / values.float().abs().max()
    return ((scaled.to(torch.float8_e4m3fn).float() == 0) & (values != 0)).sum().item() / (values != 0).sum().item()


def test_float8_layers_show_what_training_multiplies():
    class Peaked(Decoding):
        """Its second norm makes one feature a million times as large as the others."""

        def __init__(self):
            super().__init__()
            self.model.blocks[1].attn_norm.weight.data[0] = 1e6

    shown = Shown()
    run = fit(Peaked(), PrecisionMonitor(), shown, plugins=[float8()], accumulate_grad_batches=2, log_every_n_steps=1)
    assert len(run.rows) == 4
    for (_, row), (given, weight) in zip(run.rows, shown.given[1::2], strict=True):
        assert row[f"fp8/{Q}/input_amax"] == given.abs().max().item()
        assert row[f"fp8/{Q}/weight_amax"] == weight.abs().max().item()
        assert row[f"fp8/{Q}/input_underflow"] == pytest.approx(lost(given))
        assert row[f"fp8/{Q}/input_underflow"] > 0.2
        assert row[f"fp8/{Q}/weight_underflow"] == pytest.approx(lost(weight), abs=1e-3)
        assert row[WORST] == max(value for name, value in row.items() if name.endswith("input_underflow"))
        assert row[SHARE] == pytest.approx(1 - 61 * 32 / sum(p.numel() for p in shapes_of_linears()))


def shapes_of_linears():
    return [part.weight for part in Decoding().modules() if isinstance(part, nn.Linear)]


def test_float8_is_measured_in_graphs_as_outside_and_trains_the_same():
    """Blocks compiled in place; which other ways there are to compile is nothing to a layer."""

    def run(*monitors, compiled):
        # evaluation in bf16 would show the last layer of the attention another input than training has
        plugin = float8(evaluate_in_bf16=True, exclude=["mlp"])
        options = {"accumulate_grad_batches": 2, "checkpointing": "selective", "config": ONE_BLOCK}
        found, lines = lines_of(
            lambda: graphs_of(lambda: decoding(*monitors, plugin=plugin, compiled=compiled, **options))
        )
        assert lines == []
        return found

    (plain, _), (eager, _) = run(compiled="no"), run(PrecisionMonitor(), compiled="no")
    watched, graphs = run(PrecisionMonitor(), compiled="in_place")
    assert same_training(plain, watched)
    assert graphs == 1
    assert len(watched.rows) == 2
    for (_, found), (_, expected) in zip(watched.rows, eager.rows, strict=True):
        assert len(found) == 2 + 4 * 4
        assert found == pytest.approx(expected, rel=0.02, abs=1e-3)


# --------------------------------------------------------------------------------------------------------- many ranks


class Ranks(Doubling):
    """Rank r sees (1 + r) times the batch; the second layer runs on rank 1 alone."""

    def training_step(self, batch, batch_idx):
        x = self.blocks[0]((1 + self.global_rank) * batch)
        return (self.blocks[1](x) if self.global_rank else 0 * self.blocks[1].weight.sum() + x).sum()


def joined_over_ranks(rank):
    options = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False, "log_every_n_steps": 1}
    run = fit(Ranks(), PrecisionMonitor(), plugins=[InFp8()], max_steps=2, **options)
    names = {name for name in run.names() if "fp8" in name}
    return {name: run.of(name) for name in names}, float(run.trainer.callback_metrics["fp8/blocks.0/input_amax"])


def test_ranks_give_their_largest_and_their_mean():
    # batches 1, 0.05 and 2, 0.1: small is 0.05 on rank 0, and nothing on rank 1, whose numbers are twice as large
    (found, latest), (_, of_rank_1) = processes.run(joined_over_ranks)
    expected = {"0/input_amax": [2, 4], "0/input_underflow": [0.25, 0], "0/weight_amax": [2, 2]}
    expected |= {"1/input_amax": [4, 8], "1/input_underflow": [0, 0]}
    assert {name: found[f"fp8/blocks.{name}"] for name in expected} == expected
    assert found[WORST] == [0.25, 0]
    assert latest == of_rank_1 == 4


class TwoLayers(nn.Module):
    """A block that is traced in a moment: a decoder's would not be measured in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.mlp(self.attn(x).tanh())


class Sharded(Small):
    """Shards its blocks by itself, with the plugin's policy, compiled or not; embedding and head stay whole."""

    def __init__(self, compiled, casting=False, nested=False) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(32, 8), TwoLayers(), TwoLayers(), nn.Linear(8, 4))
        super().__init__(net=net, optimizer=adamw, data=batches([torch.arange(32).view(2, 16)] * 8))
        self.compiled, self.casting, self.nested = compiled, casting, nested

    def configure_model(self):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        # what comes out is fp32: the next block's input is not what it multiplies in
        bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        policy = bf16 if self.casting else MixedPrecisionPolicy()
        for place in (1, 2):
            block = self.net[place]
            if self.nested:
                fully_shard(block.mlp, mesh=self.device_mesh["data_parallel"], mp_policy=policy)
            fully_shard(block, mesh=self.device_mesh["data_parallel"], mp_policy=policy)
            if self.compiled == "in_place":
                block.compile(backend="eager")
            elif self.compiled == "wrapped":
                self.net[place] = torch.compile(block, backend="eager")


class Whole(InFp8):
    """Must be shown whole weights, in the type that they are multiplied in."""

    def layer_stats(self, layer, x):
        assert not isinstance(layer.weight, DTensor)
        assert x.dtype == layer.weight.dtype
        return {name: value.float() for name, value in super().layer_stats(layer, x).items()}


def local(run):
    return [p.to_local() if isinstance(p, DTensor) else p for p in run.weights]


def sharded(rank, alone):
    def run(monitors, *args, **kwargs):
        torch.compiler.reset()
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        options = {"devices": 2, "strategy": strategy, "plugins": [Whole(pattern="attn")], "log_every_n_steps": 1}
        return fit(Sharded(*args, **kwargs), *monitors, max_steps=2, use_distributed_sampler=False, **options)

    rows = {}
    plain = {casting: run([], "no", casting) for casting in (False, True)}
    for casting, compiled in ((False, "no"), (False, "in_place"), (True, "wrapped")):
        watched = run([PrecisionMonitor()], compiled, casting)
        assert all(torch.equal(a, b) for a, b in zip(local(plain[casting]), local(watched), strict=True)), compiled
        rows[casting, compiled] = watched.rows
        assert len(watched.rows) == 2
    for (casting, _), found in rows.items():
        for (_, row), (_, expected) in zip(found, alone, strict=True):
            assert len(row) == 2 + 2 * 4
            assert row == pytest.approx(expected, rel=0.05 if casting else 1e-4, abs=0.02 if casting else 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        nested = run([PrecisionMonitor()], "in_place", nested=True)
    assert nested.names() == {SHARE}
    if rank == 0:
        assert sum("2 of 2 fp8 layers are inside a model" in str(w.message) for w in caught) == 1


def test_shards_tell_what_one_process_tells_eager_and_compiled_and_train_the_same():
    model = Sharded("no")
    model.configure_model = lambda: None
    options = {"plugins": [Whole(pattern="attn")], "max_steps": 2, "log_every_n_steps": 1}
    processes.run(sharded, fit(model, PrecisionMonitor(), **options).rows)


def ours_in_float8(**options):
    from lightning_tricks.language_model import LanguageModel

    ids = torch.arange(2 * 16).view(2, 16)
    torch.manual_seed(0)
    # a small lr: AdamW's first steps follow the sign of a gradient, which may be rounding alone
    model = LanguageModel(LLAMA, optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-4), **options)
    model.configure_callbacks = lambda: []  # MFUMonitor's count of FLOPs takes longer than the training
    return model, DataLoader([{"input_ids": ids, "labels": ids}] * 3, batch_size=None)


def with_float8(rank, alone):
    runs = {}
    Decoder.compile_blocks = lambda self: [block.compile(backend="eager") for block in self.blocks]
    for compiled, watched in ((False, False), (False, True), (True, True)):
        torch.compiler.reset()
        model, loader = ours_in_float8(compile_blocks=compiled)
        monitors = [PrecisionMonitor()] if watched else []
        options = {"devices": 2, "strategy": FSDP2Strategy(), "plugins": [float8(exclude=BUT_Q)], "logger": Memory()}
        run = fit(model, *monitors, data=loader, max_steps=2, log_every_n_steps=1, **options)
        runs[compiled, watched] = (run.trainer.loggers[0].rows, local(run))
    for compiled in (False, True):
        assert all(torch.equal(a, b) for a, b in zip(runs[False, False][1], runs[compiled, True][1], strict=True))
    for compiled in (False, True):
        rows = runs[compiled, True][0]
        assert len(rows) == 2
        for (_, row), (_, expected) in zip(rows, alone, strict=True):
            own = {name: value for name, value in row.items() if name.startswith(("fp8/", "precision/"))}
            far = {n: (own[n], v) for n, v in expected.items() if own[n] != pytest.approx(v, rel=0.04, abs=1e-3)}
            assert not far, (compiled, far)
            assert len(own) == 2 + 4 * 2


def test_float8_gathered_in_fp8_shows_what_one_process_shows():
    model, loader = ours_in_float8()
    run = fit(model, PrecisionMonitor(), data=loader, plugins=[float8(exclude=BUT_Q)], max_steps=2, log_every_n_steps=1)
    own = [(step, {n: v for n, v in row.items() if n.startswith(("fp8/", "precision/"))}) for step, row in run.rows]
    processes.run(with_float8, own)
