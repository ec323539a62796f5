"""The correctness stage of gpu.py: does each part train on this GPU at all, and do the losses come out as they should?

Small fits of one model on the same batches. Each check is on disk when it ends, and one that fails costs no other.
Bounds: fp32 on the GPU, compiled, or through FSDP2 at world size 1 follows fp32 on the CPU within 0.1 % at each step,
as only the order of sums differs. The first loss of a 16-bit format lies within 1 % of fp32's, of an fp8 format within
3 %, as only products are rounded; later losses belong to other weights, so they must only have fallen as far.
"""

import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks import machine
from benchmarks.gpu_checks import clean_up
from benchmarks.stage_file import resume, write
from lightning_tricks._trainer.lightning import pl
from lightning_tricks.callbacks import (
    ActivationMonitor,
    AttentionMonitor,
    GradNormMonitor,
    MemoryMonitor,
    MFUMonitor,
    UpdateMonitor,
)
from lightning_tricks.language_model import LanguageModel
from lightning_tricks.models import Llama
from lightning_tricks.precision import BF16Mixed, BF16True, Float8, FP16Mixed
from lightning_tricks.strategies import FSDP2Strategy

STEPS, LOG_EVERY = 22, 10
_DRY = ("fp32_follows_the_cpu", "attention_is_cudnns_on_hopper", "bf16_mixed_with_every_monitor_waits_for_nothing",
        "fsdp2_fp32", "compiled_selective", "fp8_tensorwise_compiled")  # fmt: skip
SAME = 1e-3  # relative difference of two losses that only the order of sums may tell apart
FALL = 0.8  # a run learns if its last loss is below this share of its first one


class Model(LanguageModel):
    """Keeps the loss of each step on the device, and can start from given weights."""

    def __init__(self, start: dict[str, Tensor] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.start = start
        self.losses: list[Tensor] = []

    def init_weights(self) -> None:
        super().init_weights()
        if self.start is not None:
            assert self.decoder is not None
            self.decoder.load_state_dict(self.start)

    def on_train_start(self) -> None:
        super().on_train_start()
        assert self.decoder is not None
        weights = self.decoder.state_dict()
        self.first_weights = {name: value.detach().to("cpu", copy=True) for name, value in weights.items()}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss


class Silence(pl.Callback):
    """Makes any wait for the device an error between the first two log steps and the third one."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == LOG_EVERY + 1:
            torch.cuda.set_sync_debug_mode("error")
        if batch_idx == 2 * LOG_EVERY - 1:
            torch.cuda.set_sync_debug_mode("default")


class Smoke:
    """The checks, on one device; each returns its figures and raises where a promise is broken.

    Args:
        cuda: whether there is a GPU; without one a dry run takes the CPU in its place, and compiles nothing.
    """

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.reference: list[float] = []
        self.first_weights: dict[str, Tensor] = {}

    def fit(self, plugin: Any = None, *, on_cpu: bool = False, strategy: Any = "auto", compiled: bool = False,
            callbacks: Sequence[pl.Callback] = (), **options: Any) -> tuple[list[float], Any]:  # fmt: skip
        """Losses of all steps, and the Trainer."""
        torch.manual_seed(0)
        decoder = Llama(vocab_size=512, d_model=128, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=256, max_seq_len=128)
        adamw = lambda groups: torch.optim.AdamW(groups, lr=3e-3, fused=True)  # noqa: E731
        model = Model(decoder=decoder, optimizer=adamw, compile_blocks=compiled and self.cuda, **options)
        trainer = pl.Trainer(
            max_steps=STEPS, max_epochs=-1, accelerator="gpu" if self.cuda and not on_cpu else "cpu", devices=1,
            plugins=plugin, strategy=strategy, gradient_clip_val=1.0, log_every_n_steps=LOG_EVERY, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False, callbacks=list(callbacks),
        )  # fmt: skip
        length = 128 if self.cuda else 16
        tokens = (5 * torch.arange(length + 1) + torch.arange(8 * 4)[:, None]) % 64
        rows: Any = [
            {"input_ids": row[:, :-1].contiguous(), "labels": row[:, 1:].contiguous()} for row in tokens.split(4)
        ]
        data: Any = DataLoader(rows * (STEPS // 8 + 1), batch_size=None, pin_memory=self.cuda)
        trainer.fit(model, data)
        if not self.first_weights:
            self.first_weights = model.first_weights
        return torch.stack(model.losses).tolist(), trainer

    def compare(self, losses: list[float], first: float, each: float | None = None) -> dict[str, Any]:
        """Raise where a loss is further from fp32's than promised, relatively."""
        if not self.reference:  # where the process was started again
            self.reference, _ = self.fit()
        away = [abs(here - there) / max(abs(there), 1e-9) for here, there in zip(losses, self.reference, strict=True)]
        figures = {"losses": losses, "first_away": away[0], "most_away": max(away)}
        assert away[0] <= first, f"the first loss is {away[0]:.2e} from fp32's, bound {first}"
        if each is not None:
            assert max(away) <= each, f"a loss is {max(away):.2e} from fp32's, bound {each}"
        assert losses[-1] < FALL * losses[0], f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f}"
        return figures

    def fp32(self) -> dict[str, Any]:
        self.reference, _ = self.fit()
        start = {name: value.float() for name, value in self.first_weights.items()}
        on_cpu, _ = self.fit(on_cpu=True, start=start)
        return self.compare(on_cpu, SAME, SAME)

    def compiled(self, checkpointing: str) -> dict[str, Any]:
        counters = torch._dynamo.utils.counters
        torch._dynamo.reset()
        before = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
        losses, _ = self.fit(compiled=True, activation_checkpointing=checkpointing)
        graphs, breaks = (
            counters["stats"]["unique_graphs"] - before[0], sum(counters["graph_break"].values()) - before[1],
        )  # fmt: skip
        assert not self.cuda or (graphs and not breaks), f"{graphs} graphs, {breaks} graph breaks"
        return {"graphs": graphs, **self.compare(losses, SAME, SAME)}

    def in_format(self, plugin: Any, first: float, compiled: bool = False) -> dict[str, Any]:
        torch._dynamo.reset()
        return self.compare(self.fit(plugin, compiled=compiled)[0], first)

    def float8(self, recipe: Any) -> dict[str, Any]:
        return self.in_format(Float8(recipe, convert_small=True, emulate=not self.cuda), 0.03, compiled=True)

    def fsdp2(
        self, plugin: Any = None, first: float = SAME, each: float | None = SAME, **options: Any
    ) -> dict[str, Any]:
        return self.compare(self.fit(plugin, strategy=FSDP2Strategy(**options))[0], first, each)

    def monitors(self) -> dict[str, Any]:
        watched = [GradNormMonitor(per="block"), MFUMonitor(), MemoryMonitor(), ActivationMonitor(), UpdateMonitor(),
                   AttentionMonitor()]  # fmt: skip
        losses, trainer = self.fit(BF16Mixed(), callbacks=[*([Silence()] if self.cuda else []), *watched])
        logged = sorted({name.split("/")[0] for name in trainer.callback_metrics})
        assert {"activations", "attention", "memory", "throughput", "updates"} <= set(logged), logged
        return {"logged": logged, **self.compare(losses, 0.01)}

    def attention(self) -> dict[str, Any]:
        """From torch 2.11 on it is the default there; a second cuDNN on the library path costs a factor of two."""
        shapes = {"gpt2_124m": (12, 12, 1024, 64), "llama1b": (32, 4, 2048, 64), "llama8b": (32, 8, 4096, 128)}
        hopper = self.cuda and torch.cuda.get_device_capability()[0] == 9
        chosen = {name: machine.attention_backend(*shape, torch.bfloat16) for name, shape in shapes.items() if hopper}
        assert set(chosen.values()) <= {"CUDNN_ATTENTION"}, f"{chosen}, cuDNN {torch.backends.cudnn.version()}"
        return {"attention": chosen}

    def checks(self) -> dict[str, Callable[[], dict[str, Any]]]:
        """Name and function, what matters most first; without a GPU those that differ there."""
        every: dict[str, Callable[[], dict[str, Any]]] = {
            "fp32_follows_the_cpu": self.fp32,
            "attention_is_cudnns_on_hopper": self.attention,
            "bf16_mixed": lambda: self.in_format(BF16Mixed(), 0.01),
            "bf16_mixed_with_every_monitor_waits_for_nothing": self.monitors,
            "fsdp2_fp32": self.fsdp2,
            "compiled_selective": lambda: self.compiled("selective"),
            "compiled_full": lambda: self.compiled("full"),
            "fp8_tensorwise_compiled": lambda: self.float8("tensorwise"),
            "bf16_true": lambda: self.in_format(BF16True(), 0.01),
            "fp16_mixed": lambda: self.in_format(FP16Mixed(), 0.01),
            "fsdp2_bf16": lambda: self.fsdp2(BF16Mixed(), 0.01, None),
            "fsdp2_offloaded": lambda: self.fsdp2(cpu_offload=True),
            "fp8_rowwise_compiled": lambda: self.float8("rowwise"),
            "compiled_none": lambda: self.compiled("none"),
        }
        return every if self.cuda else {name: every[name] for name in _DRY}


def run_checks(out: Path, dry: bool, seconds: float) -> None:
    """Run the checks one by one, and end with an error if one failed; checks that `out` holds are not run again."""
    suite, end = Smoke(torch.cuda.is_available()), time.monotonic() + seconds
    fresh = {"stage": "smoke", "machine": machine.describe(), "dry": dry, "checks": [], "running": None}
    result: dict[str, Any] = resume(out, fresh)
    if result["running"]:
        result["checks"].append({"check": result["running"], "ok": False, "error": "ended the process"})
        result["running"] = None
        write(out, result)
    done = [check["check"] for check in result["checks"]]
    for name, check in suite.checks().items():
        if name in done or time.monotonic() > end:
            continue
        result["running"], start = name, time.monotonic()
        write(out, result)
        try:
            said = {"ok": True, **check()}
        except Exception as error:
            traceback.print_exc()
            traceback.clear_frames(error.__traceback__)
            said = {"ok": False, "error": f"{type(error).__name__}: {error}"[:2000]}
        result["checks"].append({"check": name, "seconds": round(time.monotonic() - start, 1), **said})
        result["running"] = None
        write(out, result)
        print(f"{name}: {'ok' if said['ok'] else said['error']}", flush=True)
        clean_up()
    if not all(check["ok"] for check in result["checks"]):
        raise SystemExit(1)
