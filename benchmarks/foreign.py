"""Try the monitors, the decay groups and FSDP2Strategy on models that we did not write: equal, refused, or wrong.

`python -m benchmarks.foreign` takes minutes on two CPU cores and needs transformers, timm, diffusers and peft;
docs/compatibility.md shows what it wrote. Each figure is held against torch's or the model's own library's.
"""

import argparse
import contextlib
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import machine
from benchmarks.foreign_models import GAN, MODELS, ROWS
from benchmarks.memory_logger import Memory
from benchmarks.stage_file import write
from benchmarks.strategy_runs import start
from lightning_tricks import FSDP2Strategy, GradNormMonitor, MFUMonitor
from lightning_tricks._core.errors import UsageError
from lightning_tricks._trainer.lightning import pl
from lightning_tricks.optim import decay_groups

STEPS = 4
PACKAGES = ("transformers", "timm", "diffusers", "peft")
BOUNDS = {"norm": 1e-6, "flops": 1e-6, "fsdp2": 1e-5}
_COUNTED_LATER = {"transformers Mixtral", "transformers Qwen3-MoE"}  # a loop over experts, which FlopCounterMode knows


class Reference(pl.Callback):
    """torch's norm of the gradients as each optimizer step finds them; a module that clips by hand did so before."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.norms.append(float(torch.nn.utils.get_total_norm(grads)))


def build(name: str, **options: Any) -> Any:
    """The model of a row, always with the same weights."""
    torch.manual_seed(0)
    return MODELS[name](**options)


def batches(module: Any, rank: int, world: int) -> list[dict[str, torch.Tensor]]:
    """This rank's rows of each step's batch."""
    generator = torch.Generator().manual_seed(1)
    whole = [module.batch_of(generator) for _ in range(STEPS)]
    return [{key: value[rank * ROWS // world : (rank + 1) * ROWS // world] for key, value in b.items()} for b in whole]


def train(module: Any, callbacks: Iterable[Any] = (), rank: int = 0, world: int = 1, **options: Any) -> Memory:
    """Fit `STEPS` batches; what was logged."""
    logger = Memory()
    manual = isinstance(module, GAN)
    trainer = pl.Trainer(
        max_steps=2 * STEPS if manual else STEPS, accelerator="cpu", devices=world, logger=logger, log_every_n_steps=1,
        gradient_clip_val=None if manual else 0.5, callbacks=list(callbacks), use_distributed_sampler=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    data: Any = batches(module, rank, world)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    return logger


def measure(name: str) -> dict[str, Any]:
    """One process: the losses, and norm, FLOPs and groups beside those of others."""
    module, reference = build(name), Reference()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        series = train(module, [reference, GradNormMonitor(), MFUMonitor(peak_flops=1e12)]).series
    said = [str(warning.message) for warning in caught if "MFUMonitor" in str(warning.message)]
    return {
        "losses": module.losses,
        "norm": norm_gap(series, reference, isinstance(module, GAN)),
        "flops": said[0] if said else flops_gap(name, series),
        "groups": other_groups(name),
    }


def norm_gap(series: dict[str, list[float]], reference: Reference, clips_by_hand: bool) -> float:
    """Largest relative difference from torch's norm."""
    if clips_by_hand:  # logged is the norm before the clip of 0.5, and the reference stands after it
        logged = [norm for pair in zip(*(series[f"train/grad_norm/{i}"] for i in (0, 1)), strict=True) for norm in pair]
        logged = [min(norm, 0.5) for norm in logged]
        return max(abs(a / b - 1) for a, b in zip(logged, reference.norms, strict=True))
    return max(abs(a / b - 1) for a, b in zip(series["train/grad_norm"], reference.norms, strict=True))


def flops_gap(name: str, series: dict[str, list[float]]) -> float:
    """Relative difference of a later step's FLOPs from those that torch's counter finds in a step with real data."""
    rates, seconds = series["throughput/model_flops_per_second"], series["throughput/step_seconds"]
    options = {"experts_implementation": "eager"} if name in _COUNTED_LATER else {}
    module = build(name, **options)
    batch = batches(module, 0, 1)[-1]
    if isinstance(module, GAN):
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.0) for part in (module.generator, module.discriminator)]
        by_hand = {
            "optimizers": lambda: optimizers,
            "toggle_optimizer": lambda optimizer: None,
            "untoggle_optimizer": lambda optimizer: None,
            "manual_backward": lambda loss: loss.backward(),
            "clip_gradients": lambda *args, **kwargs: None,
        }
        for method, stand_in in by_hand.items():  # there is no Trainer here
            setattr(module, method, stand_in)
    # the counter does not know every fused attention kernel, but it knows the products of the plain one
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss = module.training_step(batch, 0)
        if loss is not None:
            loss.backward()
    return abs(rates[-1] * seconds[-1] / counter.get_total_flops() - 1)


def other_groups(name: str) -> list[str]:
    """Parameters that our groups decay and the library's own rule does not, or the other way round."""
    module = build(name)
    parts = [module.generator, module.discriminator] if isinstance(module, GAN) else [module.model]
    found = []
    for part in parts:
        decaying = {id(p) for group in decay_groups(part, 0.1) if group["weight_decay"] for p in group["params"]}
        theirs = library_rule(part)
        for parameter_name, parameter in part.named_parameters():
            if parameter.requires_grad and (id(parameter) in decaying) != (parameter_name in theirs):
                found.append(f"{parameter_name} {'decays' if id(parameter) in decaying else 'does not decay'}")
    return found


def library_rule(model: Any) -> set[str]:
    """Names of what decays by the model's own library: transformers' Trainer, timm's helper; else matrices alone."""
    if hasattr(model, "config") and hasattr(model, "base_model_prefix"):
        from transformers import Trainer

        trainer: Any = None  # it reads nothing of itself
        return set(Trainer.get_decay_parameter_names(trainer, model))
    if hasattr(model, "no_weight_decay"):
        from timm.optim import param_groups_weight_decay

        groups = param_groups_weight_decay(model, 0.1, no_weight_decay_list=model.no_weight_decay())
        decaying = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
        return {name for name, p in model.named_parameters() if id(p) in decaying}
    return {
        name for name, p in model.named_parameters() if p.ndim > 1 and not name.rpartition(".")[2].startswith("bias")
    }


def shard(name: str) -> dict[str, Any]:
    """One of two processes under FSDP2Strategy: its losses, or why not."""
    import os

    module = build(name)
    try:
        train(module, rank=int(os.environ["RANK"]), world=2, strategy=FSDP2Strategy())
    except UsageError as error:
        return {"refused": str(error)}
    except Exception as error:  # a row of the table, and not the end of it
        return {"failed": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}
    return {"losses": module.losses}


def row(name: str, folder: Path) -> dict[str, Any]:
    """All that the table says of one model."""
    place = folder / name.replace(" ", "-")
    try:
        (found,) = start(measure, 1, place, name)
    except Exception as error:  # as above
        return {"model": name, "failed": str(error).strip().splitlines()[-1]}
    try:
        ranks = start(shard, 2, place, name)
    except Exception as error:
        ranks = [{"failed": str(error).strip().splitlines()[-1]}]
    losses, without = found.pop("losses"), next((rank for rank in ranks if "losses" not in rank), None)
    if without is not None:
        return {"model": name, **found, "fsdp2": "; ".join(f"{key}: {value}" for key, value in without.items())}
    means = [sum(pair) / 2 for pair in zip(*(rank["losses"] for rank in ranks), strict=True)]
    return {"model": name, **found, "fsdp2": max(abs(a - b) for a, b in zip(means, losses, strict=True))}


def verdict(value: Any, bound: float) -> str:
    """`equal`, the difference, or the line."""
    if isinstance(value, str):
        return value
    return "equal" if value <= bound else f"differs by {value:.0e}"


def cells(found: dict[str, Any]) -> list[str]:
    """A row of the table as text."""
    if "failed" in found:
        return [found["model"], found["failed"], "", "", ""]
    groups = found["groups"]
    some = f"{len(groups)} differ: {', '.join(groups[:2])}{', ...' if len(groups) > 2 else ''}" if groups else "equal"
    norm, flops, fsdp2 = (verdict(found[key], BOUNDS[key]) for key in ("norm", "flops", "fsdp2"))
    return [found["model"], norm, flops, some, fsdp2]


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [["model", "norm", "FLOPs", "decay groups", "FSDP2 on two processes"], ["---"] * 5, *map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def versions() -> dict[str, str]:
    """Of the packages that the models come from."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.foreign", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(map(repr, MODELS))}; default: all")
    parser.add_argument("--out", type=Path, help="JSON file; default: benchmarks/results, if all are tried")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in MODELS]:
        parser.exit(2, f"unknown model {', '.join(unknown)}: give some of {', '.join(MODELS)}\n")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.names or MODELS:
            rows.append(row(name, Path(folder)))
            print(" | ".join(cells(rows[-1])), flush=True)
    where = machine.describe()
    where["versions"] |= versions()
    out = options.out
    if out is None and not options.names:
        out = Path(__file__).parent / "results" / f"foreign-{machine.today()}-cpu.json"
    if out is not None:
        write(out, {"machine": where, "steps": STEPS, "rows": rows})


if __name__ == "__main__":
    main()
