"""What must hold on a CUDA device: the same numbers as on the CPU, training that trains, and no waiting in between."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gpu.silence import Silence
from harness.runs import trainer_with
from torch.utils.data import DataLoader

from lightning_tricks.callbacks import (
    ActivationMonitor,
    AttentionMonitor,
    GradNormMonitor,
    MemoryMonitor,
    MFUMonitor,
    TensorBoardDashboard,
    TrainingProgressBar,
    UpdateMonitor,
)
from lightning_tricks.cli import RecipeCLI
from lightning_tricks.data import ShardWriter
from lightning_tricks.language_model import LanguageModel
from lightning_tricks.loggers import ResumingTensorBoardLogger
from lightning_tricks.models import GPT2, Decoder, Llama
from lightning_tricks.models.linear_cross_entropy import linear_cross_entropy, softcapped
from lightning_tricks.schedules import WarmupCosine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda")
RECIPES = Path(__file__).resolve().parents[2] / "recipes"
FAMILIES = [
    Llama(vocab_size=512, d_model=128, n_layers=2, n_heads=4, n_kv_heads=2, max_seq_len=128),
    GPT2(vocab_size=512, d_model=128, n_layers=2, n_heads=2, max_seq_len=128),
]
by_family = pytest.mark.parametrize("config", FAMILIES, ids=["llama", "gpt2"])


@pytest.fixture(autouse=True)
def _fresh_start():
    torch.manual_seed(0)
    torch._dynamo.reset()  # after eight compilations of one function torch goes on without compiling


def pair(config):
    """The same decoder on the CPU and on the GPU, and tokens for it."""
    here, there = Decoder(config), Decoder(config).to(DEVICE)
    there.load_state_dict(here.state_dict())
    return here, there, torch.randint(0, config.vocab_size, (2, 128))


def relative_error(value, reference):
    value, reference = value.detach().double().cpu(), reference.detach().double().cpu()
    return float((value - reference).norm() / reference.norm())


def gradients(decoder):
    return torch.cat([parameter.grad.flatten() for parameter in decoder.parameters()])


@by_family
def test_fp32_logits_and_gradients_are_those_of_the_cpu(config):
    here, there, tokens = pair(config)
    torch.testing.assert_close(there(tokens.to(DEVICE)).cpu(), here(tokens), atol=2e-4, rtol=2e-4)
    here(tokens, labels=tokens).backward()
    there(tokens.to(DEVICE), labels=tokens.to(DEVICE)).backward()
    assert relative_error(gradients(there), gradients(here)) < 1e-4


@pytest.mark.parametrize(
    ("config", "checkpointing"),
    [(FAMILIES[0], "none"), (FAMILIES[0], "full"), (FAMILIES[0], "selective"), (FAMILIES[1], "none")],
    ids=["llama-none", "llama-full", "llama-selective", "gpt2-none"],
)
def test_compiled_blocks_equal_eager_ones(config, checkpointing):
    _, eager, tokens = pair(config)
    compiled = Decoder(config).to(DEVICE)
    compiled.load_state_dict(eager.state_dict())
    compiled.set_activation_checkpointing(checkpointing)
    compiled.compile_blocks()
    tokens = tokens.to(DEVICE)
    losses = [decoder(tokens, labels=tokens) for decoder in (eager, compiled)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
    assert relative_error(gradients(compiled), gradients(eager)) < 1e-4


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("rows", [None, 100], ids=["one_slice", "slices"])
@pytest.mark.parametrize(("softcap", "z_loss"), [(None, 0.0), (2.0, 0.01)], ids=["plain", "cap and z-loss"])
def test_the_fused_loss_is_cross_entropy(softcap, z_loss, rows, compiled):
    x, weight = torch.randn(257, 64, device=DEVICE, requires_grad=True), torch.randn(999, 64, device=DEVICE)
    weight = (0.1 * weight).requires_grad_()
    labels = torch.randint(0, 999, (257,), device=DEVICE)
    labels[::7] = -100
    logits = softcapped(x @ weight.T, softcap)
    expected = F.cross_entropy(logits, labels, reduction="sum")
    penalty = z_loss * logits[labels != -100].logsumexp(1).square().sum()
    wanted = torch.autograd.grad(expected + penalty, (x, weight))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    options = {"rows": rows, "compiled": compiled, "softcap": softcap, "z_loss": z_loss}
    loss = linear_cross_entropy(x, weight, labels, **options)
    assert compiled == (torch._dynamo.utils.counters["stats"]["unique_graphs"] > graphs)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for got, want in zip(torch.autograd.grad(loss, (x, weight)), wanted, strict=True):
        assert relative_error(got, want) < 1e-5


def language_model(**kwargs):
    adamw = lambda groups: torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), fused=True)  # noqa: E731
    return LanguageModel(decoder=FAMILIES[0], optimizer=adamw, schedule=WarmupCosine(warmup_steps=4), **kwargs)


def pinned_batches(count):
    tokens = (5 * torch.arange(129) + torch.arange(4)[:, None]) % 16  # each token tells the next one
    batch = {"input_ids": tokens[:, :-1].contiguous().pin_memory(), "labels": tokens[:, 1:].contiguous().pin_memory()}
    return DataLoader([batch] * count, batch_size=None)


def fit(model, folder, *callbacks, steps=40, accumulate=1, **kwargs):
    options = {"logger": False, "precision": "bf16-mixed", "gradient_clip_val": 1.0, **kwargs}
    trainer = trainer_with(
        *callbacks, max_steps=steps, accumulate_grad_batches=accumulate, accelerator="gpu", log_every_n_steps=10,
        default_root_dir=folder, **options,
    )  # fmt: skip
    trainer.fit(model, pinned_batches(accumulate * steps))
    return trainer


def every_monitor():
    return [
        GradNormMonitor(per="block"), MFUMonitor(), MemoryMonitor(), ActivationMonitor(), UpdateMonitor(),
        AttentionMonitor(), TensorBoardDashboard(), TrainingProgressBar(),
    ]  # fmt: skip


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_with_every_monitor_nothing_waits_for_the_device_between_logged_steps(tmp_path, accumulate, compiled):
    # batches between the logged steps 20 and 30, from 0 on; the first logged steps compile the sampled graphs
    quiet = range(20 * accumulate + 1, 29 * accumulate)
    silence = Silence(lambda _, batch_idx: batch_idx in quiet)
    logger = ResumingTensorBoardLogger(tmp_path)
    trainer = fit(
        language_model(compile_blocks=compiled), tmp_path, silence, *every_monitor(), steps=32, accumulate=accumulate,
        logger=logger,
    )  # fmt: skip
    assert silence.batches == 9 * accumulate - 1
    logged = trainer.callback_metrics
    for name in ("train/loss", "train/grad_norm", "throughput/tokens_per_second", "memory/peak_allocated_gib"):
        assert torch.isfinite(logged[name]), name
        assert logged[name] > 0, name
    assert any(name.startswith("activations/") for name in logged)
    assert any(name.startswith("attention/") for name in logged)


def test_the_tiny_recipe_learns_on_cuda_in_bf16(tmp_path, monkeypatch):
    with ShardWriter(tmp_path, "train", 4096) as writer:
        writer.append(np.arange(60_000) * 7 % 97)
    options = {
        "data": "TokenData", "data.init_args.train": str(tmp_path / "train_*.bin"), "data.init_args.val": "null",
        "trainer.callbacks": "[]", "trainer.enable_checkpointing": "false", "trainer.limit_val_batches": "0",
        "trainer.logger": "false", "trainer.max_steps": "60", "trainer.default_root_dir": str(tmp_path),
    }  # fmt: skip
    arguments = [text for name, value in options.items() for text in (f"--{name}", value)]
    monkeypatch.setattr("sys.argv", ["fit"])  # LightningCLI warns where it has arguments, too
    cli = RecipeCLI(run=False, args=["--config", str(RECIPES / "tiny.yaml"), *arguments])
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    assert cli.trainer.precision == "bf16-mixed"
    assert next(cli.model.parameters()).dtype == torch.float32
    assert cli.trainer.callback_metrics["train/loss"] < 1.0  # from log(4096) = 8.3
