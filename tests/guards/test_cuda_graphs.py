"""CUDAGraphs: training by replays is training without, to the bit; what cannot be captured is refused in one line.

`tests/gpu/test_cuda_graphs_cuda.py` has real graphs; here functions are recorded, see `harness/graphs.py`.
"""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from harness.graphs import Replays
from harness.models import Decoding, Small, adamw, batches
from harness.runs import On, decoding, fit, same, same_training, trainer_with, warned
from torch import Tensor, nn

from lightning_tricks._core.errors import UsageError
from lightning_tricks.callbacks import (
    EMA,
    ActivationMonitor,
    AttentionMonitor,
    BatchSizeWarmup,
    CUDAGraphs,
    ExactResume,
    SpikeRollback,
    StepGuard,
    UpdateMonitor,
)
from lightning_tricks.guards import cuda_graphs
from lightning_tricks.language_model import LanguageModel
from lightning_tricks.models import Llama
from lightning_tricks.precision import Float8, FP16Mixed
from lightning_tricks.schedules import WarmupCosine

SHAPE = {"vocab_size": 32, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 8}


@pytest.fixture
def replays(monkeypatch):
    """Let graphs be recorded functions, on a CPU."""
    return Replays.take_over(monkeypatch)


def make(**options) -> LanguageModel:
    torch.manual_seed(0)
    decoder = options.pop("decoder", Llama(**SHAPE))
    return LanguageModel(decoder, **{"optimizer": adamw, **options})


def tokens(number: int = 24, size: int = 2, short: bool = False, documents: bool = False) -> list[dict[str, Tensor]]:
    """Micro-batches in which a varying number of labels counts; the last one has one row if it is `short`."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for step in range(number):
        ids = torch.randint(0, 32, (1 if short and step % 6 == 5 else size, 9), generator=generator)
        batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].clone()}
        batch["labels"][0, 1 + step % 7 :] = -100
        if documents:
            batch["document_ids"] = (torch.arange(8) >= 2 + step % 5).long().expand(len(ids), 8).contiguous()
        found.append(batch)
    return found


def both(build, *callbacks, **options):
    """The same run without graphs and with them: `callbacks` are functions that make them."""
    plain = fit(build(), *[make_one() for make_one in callbacks], **options)
    return plain, fit(build(), *[make_one() for make_one in callbacks], CUDAGraphs(), **options)


def the_same(plain, graphed) -> bool:
    """Whether two runs have logged the same values, but for those of the clock, and trained the same."""

    def of_steps(run):
        return [
            (step, name, value)
            for step, row in run.rows
            for name, value in row.items()
            if not name.startswith(("throughput", "memory"))
        ]

    return same_training(plain, graphed) and repr(of_steps(plain)) == repr(of_steps(graphed))


class Poisoned(LanguageModel):
    """Its loss is not finite in one step."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (math.nan if batch_idx == 9 else 1.0)


LOGS = {"log_every_n_steps": 3, "max_steps": 12}
WATCHERS = (lambda: ActivationMonitor(), lambda: AttentionMonitor(), lambda: UpdateMonitor())


@pytest.mark.parametrize(
    ("model", "callbacks", "options"),
    [
        ({}, (), {}),
        ({}, WATCHERS, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
        ({}, (lambda: EMA(decay=0.9),), {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}),
        ({}, (lambda: BatchSizeWarmup(stages={0: 1, 5: 2}),), {"max_steps": 9, "accumulate_grad_batches": 2}),
        ({"freeze": ["embed", "blocks.0"]}, WATCHERS, {"accumulate_grad_batches": 2}),
        ({"activation_checkpointing": "full"}, WATCHERS, {}),
        ({"activation_checkpointing": "selective"}, (), {"accumulate_grad_batches": 2}),
        ({"schedule": WarmupCosine(warmup_steps=3)}, (lambda: ExactResume(),), {}),
        ({"decoder": Llama(**SHAPE, tie_embeddings=True)}, (), {"precision": "bf16-mixed"}),
    ],
    ids=["plain", "watched", "ema", "growing", "frozen", "full", "selective", "exact", "tied bf16"],
)
def test_a_run_by_graphs_is_the_run_without(model, callbacks, options, replays):
    plain, graphed = both(lambda: make(**model), *callbacks, data=batches(tokens()), **{**LOGS, **options})
    assert replays.replayed >= 2 * 4
    assert the_same(plain, graphed)


@pytest.mark.parametrize("fused", [True, False], ids=["on the device", "by the host"])
def test_a_skipped_step_leaves_no_trace(fused, replays):
    def build():
        torch.manual_seed(0)
        return Poisoned(Llama(**SHAPE), optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2, fused=fused))

    plain, graphed = both(build, lambda: StepGuard(), data=batches(tokens()), **LOGS)
    assert graphed.of("guard/skipped_steps") == plain.of("guard/skipped_steps") != []
    assert all(weight.isfinite().all() for weight in graphed.weights)
    assert the_same(plain, graphed)
    assert replays.replayed


def test_each_form_of_a_batch_has_its_own_graphs(replays):
    data = tokens(30, short=True)
    plain, graphed = both(make, data=batches(data), **{**LOGS, "max_steps": 30})
    assert replays.captured == 4
    assert replays.replayed == 2 * (30 - 2 * cuda_graphs.EAGER_FIRST)
    assert the_same(plain, graphed)


def test_more_forms_than_are_kept_run_as_before(replays, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "MOST_FORMS", 1)
    plain, graphed = both(make, data=batches(tokens(30, short=True)), **{**LOGS, "max_steps": 30})
    assert replays.captured == 2
    assert the_same(plain, graphed)


def test_documents_lie_elsewhere_in_each_batch(replays):
    plain, graphed = both(make, data=batches(tokens(documents=True)), **LOGS)
    assert replays.replayed == 2 * 9
    assert the_same(plain, graphed)


def test_a_resumed_run_is_the_one_that_was_not_stopped(replays, tmp_path):
    def options():
        saver = pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=6, save_top_k=-1)
        return {"data": batches(tokens()), **LOGS, "accumulate_grad_batches": 2, "logger": False}, saver

    settings, saver = options()
    whole = fit(make(), ExactResume(), CUDAGraphs(), saver, **settings)
    settings, _ = options()
    again = fit(make(), ExactResume(), CUDAGraphs(), **settings, ckpt_path=tmp_path / "step=6.ckpt")
    assert same(whole.weights, again.weights)


def test_monitors_see_the_forward_pass_that_trains(replays):
    """On log steps the pass they measure is run without graphs, and no other."""
    plain, graphed = both(make, *WATCHERS, data=batches(tokens()), **LOGS)
    assert replays.replayed == 2 * (12 - 3 - 3)  # log steps 6, 9 and 12, as 3 is among the first three
    assert graphed.of("activations/decoder.blocks.1/rms") == plain.of("activations/decoder.blocks.1/rms")
    assert len(graphed.of("activations/decoder.blocks.1/rms")) == 4


def test_callbacks_get_the_losses_of_single_tokens(replays):
    class KeepLosses(pl.Callback):
        def __init__(self):
            self.seen = []

        def on_token_losses(self, trainer, pl_module, losses, batch):
            assert not losses.requires_grad
            self.seen.append(losses)

    kept = KeepLosses(), KeepLosses()
    fit(make(), kept[0], data=batches(tokens()), **LOGS)
    model = make()
    replays.clear = lambda: (model.decoder.head.token_losses or []).clear()
    fit(model, kept[1], CUDAGraphs(), data=batches(tokens()), **LOGS)
    assert replays.replayed
    assert len(kept[0].seen) == 12
    assert same(kept[0].seen, kept[1].seen)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_experts_count_their_loads_in_each_replay(accumulate, replays):
    config = Llama(**SHAPE, n_experts=4, experts_per_token=2, d_expert=16)
    options = {"data": batches(tokens()), **LOGS, "accumulate_grad_batches": accumulate}
    plain = fit(make(decoder=config), **options)
    model = make(decoder=config)
    replays.lists = lambda: [router.backward_loads for router in model.decoder.routers().values()]
    graphed = fit(model, CUDAGraphs(), **options)
    assert replays.replayed
    assert len(plain.of("experts/decoder.blocks.1/max_load")) == 4
    assert the_same(plain, graphed)


@pytest.mark.parametrize("compiled", ["no", "in_place", "wrapped", "whole"])
def test_compiled_modules_of_others(compiled, replays):
    runs = [
        decoding(*callbacks, compiled=compiled, backend="eager", max_steps=7) for callbacks in ((), (CUDAGraphs(),))
    ]
    assert replays.replayed == 2 * 4
    assert the_same(*runs)


def test_a_model_compiled_in_place_runs_its_compiled_code(replays):
    def build():
        model = Decoding()
        model.model.compile(backend="eager")
        return model

    plain, graphed = both(build, max_steps=7)
    assert replays.replayed == 2 * 4
    assert the_same(plain, graphed)
    assert graphed.model.model._compiled_call_impl.__name__ != "_call"


def test_gradients_are_scaled_as_without(replays):
    build = lambda: Small(4, 8, 2, optimizer=adamw)  # noqa: E731
    plain = fit(build(), plugins=FP16Mixed(), max_steps=8)
    graphed = fit(build(), CUDAGraphs(), plugins=FP16Mixed(), max_steps=8)
    assert replays.replayed == 2 * 5
    assert same_training(plain, graphed)


def test_outputs_may_be_kept(replays):
    kept: dict[bool, list[Tensor]] = {False: [], True: []}

    def loss(module, batch):
        out = module.net(batch)
        kept[any(isinstance(one, CUDAGraphs) for one in module.trainer.callbacks)].append(out.detach())
        return out.square().mean()

    both(lambda: Small(4, 8, 2, loss=loss), max_steps=8)
    assert replays.replayed
    assert same(kept[True], kept[False])


class NotesAutocast(torch.autograd.Function):
    seen: list[bool]

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        NotesAutocast.seen.append(torch.is_autocast_enabled("cpu"))
        return gradient


def test_a_backward_pass_is_captured_without_autocast(replays):
    class Net(nn.Linear):
        def forward(self, x):
            return NotesAutocast.apply(super().forward(x))

    NotesAutocast.seen = []
    fit(Small(net=Net(4, 2)), CUDAGraphs(), max_steps=6, precision="bf16-mixed")
    assert replays.replayed
    assert not any(NotesAutocast.seen)


class Branches(nn.Module):
    """Of two branches, an argument chooses one; the last layer is used by nobody."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 1) for _ in range(3))

    def forward(self, x, *, branch):
        return {"out": self.layers[branch](x), "branch": branch}


def of_branch(module, batch):
    return module.net(batch, branch=module.trainer.global_step % 2)["out"].square().mean()


def test_what_has_no_gradient_gets_none(replays):
    plain, graphed = both(lambda: Small(net=Branches(), optimizer=adamw, loss=of_branch), max_steps=16)
    assert replays.captured == 4
    assert same_training(plain, graphed)
    first, second, unused = (layer.weight.grad for layer in graphed.model.net.layers)
    assert unused is first is None  # the last step was of the second branch
    assert second is not None


def test_a_head_outside_of_the_module_is_trained_as_before(replays):
    def build():
        model = Small(4, 8, optimizer=adamw, loss=lambda module, batch: module.head(module.net(batch)).square().mean())
        model.head = nn.Linear(8, 1)
        return model

    plain = fit(build(), max_steps=8)
    graphed = fit(build(), CUDAGraphs("net"), max_steps=8)
    assert replays.replayed == 2 * 5
    assert same_training(plain, graphed)


def test_a_second_call_in_a_micro_batch_is_as_it_was(replays):
    def twice(module, batch):
        return (module.net(batch) - module.net(-batch)).square().mean()

    plain, graphed = both(lambda: Small(4, 8, 2, loss=twice), max_steps=8)
    assert replays.replayed == 2 * 5
    assert same_training(plain, graphed)


def test_an_optimizer_may_ask_for_several_passes(replays):
    lbfgs = lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)  # noqa: E731
    plain, graphed = both(lambda: Small(4, 8, 2, optimizer=lbfgs), max_steps=8)
    assert replays.replayed
    assert same_training(plain, graphed)


def test_weights_that_lie_elsewhere_are_captured_anew(replays):
    def move(trainer, module, *_):
        if trainer.global_step == 6:
            module.net[0].weight.data = module.net[0].weight.data.clone()

    plain, graphed = both(lambda: Small(4, 8, 2), lambda: On(on_train_batch_end=move), max_steps=12)
    assert replays.captured == 4
    assert same_training(plain, graphed)


def test_a_rollback_brings_earlier_weights_back(replays):
    class Spiking(LanguageModel):
        def token_sums(self, batch):
            nats, count = super().token_sums(batch)
            return nats * (1e3 if self.trainer.fit_loop.batch_idx in (16, 17) else 1.0), count

    def build():
        torch.manual_seed(0)
        return Spiking(Llama(**SHAPE), optimizer=adamw)

    guard = lambda: SpikeRollback(1, sigmas=60.0, window_steps=8, snapshot_every_n_steps=4)  # noqa: E731
    with warned("weights and optimizer are those of step 12 again") as lines:
        plain, graphed = both(build, guard, data=batches(tokens(30)), **{**LOGS, "max_steps": 24})
    assert len(lines) == 2
    assert the_same(plain, graphed)


def test_the_module_is_left_as_it_was(replays):
    def fail(trainer, *_):
        if trainer.global_step == 5:
            raise RuntimeError("power cut")

    model, graphs = make(), CUDAGraphs()
    with pytest.raises(RuntimeError, match="power cut"):
        fit(model, On(on_train_batch_end=fail), graphs, data=batches(tokens()), **LOGS)
    assert "forward" not in vars(model.decoder)
    assert graphs._calls is None
    fit(model, graphs, data=batches(tokens()), **LOGS)
    assert "forward" not in vars(model.decoder)


# ---- refused


def refused(words, model=None, *callbacks, **options):
    with pytest.raises(UsageError, match=words) as found:
        fit(model or Small(4, 8, 2), *callbacks, **{"max_steps": 6, **options})
    assert "\n" not in str(found.value)


def test_no_cuda_is_refused_before_launch():
    refused(r"^CUDAGraphs: CPUAccelerator has no CUDA graphs: leave it out$", None, CUDAGraphs())
    trainer = trainer_with(CUDAGraphs())
    CUDAGraphs().check_run(trainer, None, "validate")


@pytest.mark.parametrize("strategy", ["DDPStrategy", "FSDP2Strategy", "DeepSpeedStrategy"])
def test_several_devices_are_refused(strategy):
    class CUDAAccelerator:
        pass

    trainer = SimpleNamespace(world_size=1, accelerator=CUDAAccelerator(), strategy=type(strategy, (), {})())
    with pytest.raises(UsageError, match=rf"^CUDAGraphs: {strategy} joins ranks in hooks that a graph does not call"):
        CUDAGraphs().check_run(trainer, None, "fit")


@pytest.mark.parametrize("scaling", ["dynamic", "delayed"])
def test_delayed_scales_are_refused(scaling):
    class CUDAAccelerator:
        pass

    class SingleDeviceStrategy:
        pass

    own = {"accelerator": CUDAAccelerator(), "strategy": SingleDeviceStrategy()}
    trainer = SimpleNamespace(world_size=1, precision_plugin=Float8(scaling=scaling, emulate=True), **own)
    line = r"^CUDAGraphs: Float8.scaling=delayed takes .*: set scaling: dynamic, or leave CUDAGraphs out$"
    with nullcontext() if scaling == "dynamic" else pytest.raises(UsageError, match=line):
        CUDAGraphs().check_run(trainer, None, "fit")


def test_what_no_graph_can_hold_is_refused(replays):
    refused("steps its optimizer itself, or is compiled as a whole", Small(4, 8, manual=True), CUDAGraphs())
    refused(r"^CUDAGraphs.module=nets: there is no such submodule: name one, such as net$", None, CUDAGraphs("nets"))
    two = Small(4, 8)
    two.head = nn.Linear(8, 1)
    refused(
        r"^CUDAGraphs.module=None: no child has all trained parameters: name one, such as net, head$", two, CUDAGraphs()
    )
    hooked = Small(4, 8)
    hooked.net[0].weight.register_post_accumulate_grad_hook(lambda _: None)
    refused(r"^CUDAGraphs: '0.weight' has a hook on its gradient", hooked, CUDAGraphs())
    inner = Small(4, 8, 2)
    refused(r"^CUDAGraphs.module: its input needs a gradient: name a module that", inner, CUDAGraphs("net.2"))


def test_a_second_backward_pass_is_refused(replays):
    class Twice(Small):
        def backward(self, loss):
            loss.backward(retain_graph=True)
            loss.backward()

    refused("a micro-batch has a second backward pass: leave CUDAGraphs out", Twice(4, 8), CUDAGraphs())


def test_a_pass_that_cannot_be_captured_ends_in_one_line(replays, monkeypatch):
    def fails(run, pool):
        try:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore lines")
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    monkeypatch.setattr(cuda_graphs, "capture", fails)
    words = (
        r"^CUDAGraphs: Sequential cannot be captured, .*test_cuda_graphs.py:\d+: CUDA error: operation not permitted"
    )
    refused(words, None, CUDAGraphs())


def test_it_says_if_the_module_is_not_called(replays):
    unseen = lambda module, batch: F.linear(batch, module.net[0].weight).square().mean()  # noqa: E731
    with warned("CUDAGraphs") as lines:
        fit(Small(4, 8, loss=unseen), CUDAGraphs())
    assert lines == ["CUDAGraphs captured nothing: no training_step calls Sequential"]
