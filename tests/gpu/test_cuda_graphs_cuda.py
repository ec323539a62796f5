"""CUDAGraphs on a CUDA device: the run is that without graphs to the bit, nothing waits, dropout goes on drawing."""

from functools import partial

import pytest
import torch
from gpu.silence import Silence
from harness.models import Small, batches, rows
from harness.runs import On, fit, same

from lightning_tricks._core.errors import UsageError
from lightning_tricks.callbacks import ActivationMonitor, CUDAGraphs, StepGuard, UpdateMonitor
from lightning_tricks.language_model import LanguageModel
from lightning_tricks.models import Llama

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPE = {"vocab_size": 512, "d_model": 128, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "max_seq_len": 128}
fused = partial(torch.optim.AdamW, lr=1e-3, fused=True)


def tokens(number, documents=False):
    generator = torch.Generator().manual_seed(1)
    found = []
    for step in range(number):
        ids = torch.randint(0, 512, (4, 129), generator=generator)
        batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
        if documents:
            begin = 32 + step
            batch["document_ids"] = (torch.arange(128) >= begin).long().expand(4, 128).contiguous()
            batch["document_starts"] = torch.tensor([[0, begin]] * 4, dtype=torch.int32)
        found.append({name: value.pin_memory() for name, value in batch.items()})
    return found


def train(*callbacks, data, config=None, **options):
    own = {name: options.pop(name) for name in ("compile_blocks", "activation_checkpointing") if name in options}
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = LanguageModel(Llama(**SHAPE, **(config or {})), optimizer=fused, **own)
    defaults = {"accelerator": "gpu", "max_steps": 12, "log_every_n_steps": 4, "gradient_clip_val": 1.0}
    return fit(model, *callbacks, data=batches(data), **{**defaults, **options})


@pytest.mark.usefixtures("_same_order_of_sums")
@pytest.mark.parametrize(
    ("options", "documents"),
    [
        ({}, False),
        ({"precision": "bf16-mixed", "accumulate_grad_batches": 2}, False),
        ({"precision": "bf16-mixed", "compile_blocks": True}, False),
        ({"precision": "bf16-mixed", "activation_checkpointing": "selective"}, False),
        ({"precision": "bf16-mixed"}, True),
    ],
    ids=["fp32", "accumulated", "compiled", "checkpointed", "documents"],
)
def test_losses_and_weights_are_those_without_graphs(options, documents):
    data = tokens(12 * options.get("accumulate_grad_batches", 1), documents)
    watchers = lambda: (ActivationMonitor(), UpdateMonitor(), StepGuard())  # noqa: E731
    plain = train(*watchers(), data=data, **options)
    graphed = train(*watchers(), CUDAGraphs(), data=data, **options)
    assert len(plain.of("train/loss")) == 12
    for name in ("train/loss", "train/grad_norm", "activations/decoder.blocks.1/rms"):
        assert graphed.of(name) == plain.of(name)
    assert same(graphed.weights, plain.weights)


@pytest.mark.parametrize("compiled", [False, True])
def test_between_logged_steps_nothing_waits(compiled):
    quiet = Silence(lambda trainer, batch_idx: 11 <= batch_idx < 19)
    options = {"precision": "bf16-mixed", "max_steps": 22, "log_every_n_steps": 10, "compile_blocks": compiled}
    train(quiet, CUDAGraphs(), data=tokens(22), **options)
    assert quiet.batches == 8


def test_the_model_runs_no_python_once_it_is_captured():
    calls = []
    note = On(on_fit_start=lambda _, module: module.net[0].register_forward_hook(lambda *_: calls.append(1)))
    fit(Small(4, 8, 2, optimizer=fused), note, CUDAGraphs(), accelerator="gpu", max_steps=12)
    assert len(calls) == 4  # three calls and the capture


def test_dropout_goes_on_drawing():
    def losses():
        data = batches([rows(1, 64, 32)[0]] * 10)  # the same rows in each step, and no learning
        still = partial(torch.optim.SGD, lr=0.0)
        model = Small(32, 32, 2, dropout=0.5, optimizer=still, data=data)
        return fit(model, CUDAGraphs(), accelerator="gpu", max_steps=10).model.losses

    first = losses()
    assert len(set(first)) == len(first)
    assert losses() == first


def test_experts_are_captured():
    experts = {"n_experts": 4, "experts_per_token": 2, "d_expert": 64}
    options = {"data": tokens(12), "precision": "bf16-mixed", "config": experts}
    plain, graphed = train(**options), train(CUDAGraphs(), **options)
    assert graphed.of("train/loss") == pytest.approx(plain.of("train/loss"), rel=1e-2)
    name = "experts/decoder.blocks.1/max_load"
    assert graphed.of(name) == pytest.approx(plain.of(name), rel=0.1)


def test_a_wait_in_the_model_ends_in_one_line():
    class Waits(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * (2.0 if x.sum().item() > 0 else 1.0)

    with pytest.raises(
        UsageError, match=r"^CUDAGraphs: Waits cannot be captured, .*test_cuda_graphs_cuda.py:\d+: "
    ) as line:
        fit(Small(net=Waits(4, 1), optimizer=fused), CUDAGraphs(), accelerator="gpu", max_steps=6)
    assert "\n" not in str(line.value)
