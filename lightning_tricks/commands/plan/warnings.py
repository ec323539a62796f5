"""Settings of a recipe that look wrong before a run: each a line that names the option."""

import itertools
import math
from typing import TYPE_CHECKING, Any

from lightning_tricks._trainer import is_a
from lightning_tricks.optim.build_optimizer import check_settings

if TYPE_CHECKING:
    from lightning_tricks.commands.plan.plan import Plan

LONGEST_WARMUP = 0.1  # share of the run
# Peak learning rates of AdamW by parameters, from the models' papers: GPT-3 (https://arxiv.org/abs/2005.14165, table
# 2.1) and Llama 3 (https://arxiv.org/abs/2407.21783, table 3). Between two of them the line on a log-log scale counts.
PUBLISHED_LR = ((125e6, 6e-4), (1.3e9, 2e-4), (8e9, 3e-4), (70e9, 1.5e-4), (405e9, 8e-5))
FAR = 5.0  # times above or below what was published
DENSE_MASK_TOKENS = 8192  # a dense mask of so many tokens takes 64 MiB a row
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, https://arxiv.org/abs/2203.15556
VOCABULARY_MULTIPLE = 64


def warnings_of(plan: "Plan") -> tuple[str, ...]:
    """Lines on what looks wrong; none where nothing does."""
    setup = plan.setup
    lines: list[str] = []
    total = sum(plan.parameters.values())
    schedule, steps = getattr(setup.module, "schedule", None), setup.trainer.get("max_steps")
    warmup = getattr(schedule, "warmup_steps", None)
    if isinstance(warmup, int) and isinstance(steps, int) and steps > 0 and warmup > LONGEST_WARMUP * steps:
        lines.append(
            f"model.schedule.warmup_steps={warmup} is {warmup / steps:.0%} of the run: 0.1 to 2 % is usual, at most "
            f"{LONGEST_WARMUP:.0%}"
        )
    if (lr := _adamw_lr(setup.module)) is not None and getattr(setup.module, "mup", None) is None:
        usual = published_lr(total)
        if not usual / FAR <= lr <= usual * FAR and total > PUBLISHED_LR[0][0] / FAR:
            lines.append(f"model.optimizer.lr={lr:g}: models of {total / 1e9:.2g}B were trained with about {usual:.1g}")
    if setup.is_ours:
        lines += _of_decoder(plan)
    if plan.tokens and total:
        ratio = plan.tokens / total
        if ratio < TOKENS_PER_PARAMETER / 4 and plan.tokens > 1e8:
            lines.append(
                f"{ratio:.1f} tokens a parameter: about {TOKENS_PER_PARAMETER} make the best of the same FLOPs, in a "
                "smaller model"
            )
    return tuple(lines)


def _of_decoder(plan: "Plan") -> list[str]:
    setup, config = plan.setup, plan.setup.module.config
    lines = []
    if setup.on_gpu and config.vocab_size % VOCABULARY_MULTIPLE:
        padded = -(-config.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        lines.append(
            f"model.decoder.vocab_size={config.vocab_size} is no multiple of {VOCABULARY_MULTIPLE}: {padded} is faster"
        )
    if setup.fp8 is not None:
        if setup.tokens % 16:
            lines.append(f"data: {setup.tokens} tokens of a micro-batch are no multiple of 16, which fp8 needs")
        for name in ("d_model", "ffn_width"):
            if (size := getattr(config, name) // setup.dims.tensor) % 16:
                lines.append(f"model.decoder.{name}: parts of {size} are no multiple of 16, which fp8 needs")
    if getattr(setup.datamodule, "document_ids", False) and setup.length >= DENSE_MASK_TOKENS:
        size = setup.rows * setup.length**2 / 2**30
        lines.append(
            f"data.document_ids with rows of {setup.length} tokens: the mask is dense and takes {size:.2g} GiB a "
            "micro-batch"
        )
    return lines


def _adamw_lr(module: Any) -> float | None:
    """The learning rate of an AdamW, None for other optimizers."""
    if not hasattr(module, "optimizer"):
        return None
    made = check_settings(module.optimizer)
    return float(made.defaults["lr"]) if made is not None and is_a(made, "AdamW") else None


def published_lr(parameters: float) -> float:
    """The peak learning rate of published models of that size, on a line between the two nearest."""
    points = [(math.log(size), math.log(lr)) for size, lr in PUBLISHED_LR]
    x = min(max(math.log(parameters), points[0][0]), points[-1][0])
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x <= x1:
            return math.exp(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
    return PUBLISHED_LR[-1][1]
