"""How long each training stage of gpu.py trains each contender, and with which options of the command line."""

import dataclasses
import json

from benchmarks.formats import plugin

DECODER, DATA = "--model.init_args.decoder.init_args", "--data.init_args"
EOT, MEAN_DOCUMENT = 0, 512  # end of a document in the training data, and tokens of a document on average


@dataclasses.dataclass(frozen=True)
class Size:
    """One recipe at full size.

    Attributes:
        recipe: file in recipes/, without its ending.
        warmup: optimizer steps before the clock starts. At least two: the first one allocates the optimizer's state,
            and Lightning, which fetches one batch ahead, has the end of a step still to do when the clock starts.
        timed: optimizer steps that are timed at least; whole log intervals.
        seconds: that are timed at least: after some seconds at full load the power limit has set the clock.
        rounds: at most as often each contender runs; the stage's time limit may allow fewer.
        accumulate: micro-batches of one optimizer step.
        log_every: optimizer steps from one log step to the next. Monitors measure in log steps, so a stage that shows
            their cost times at least four of them and has two in the warm-up.
        base: precision of everything that is not fp8: weights in fp32 under autocast, or in bf16.
        overrides: further options.
        compile_first: whether each contender runs some steps before any is timed.
    """

    recipe: str
    warmup: int
    timed: int
    seconds: float
    rounds: int
    accumulate: int
    log_every: int
    base: str = "bf16-mixed"
    overrides: tuple[str, ...] = ()
    compile_first: bool = True

    @property
    def options(self) -> tuple[str, ...]:
        """All that differs from the recipe."""
        weights = plugin("BF16True") if self.base == "bf16-true" else ()
        steps = ("--trainer.accumulate_grad_batches", str(self.accumulate))
        log = ("--trainer.log_every_n_steps", str(self.log_every), "--trainer.logger", "false")
        return *weights, *self.overrides, *steps, *log


_KEEPS_ALL = ("--model.init_args.activation_checkpointing", "none")
# Llama-3-8B: 8,030,261,248 parameters, of which the embedding and the head of 128,256 tokens are 13 %.
_LLAMA_3 = (
    f"{DECODER}.vocab_size", "128256", f"{DECODER}.n_kv_heads", "8", f"{DECODER}.d_ff", "14336",
    f"{DECODER}.rope_theta", "500000",
)  # fmt: skip

# Rows of twice the length, half as many: 32,768 tokens a micro-batch, as in the recipe.
_LONG_ROWS = (
    f"{DECODER}.max_seq_len", "4096", f"{DATA}.seq_len", "4096", f"{DATA}.micro_batch_size", "8",
)  # fmt: skip

# One micro-batch a step where framework and monitors are compared, in place of the recipes' eight: what they cost shows
# eight times as large. The large sizes have steps of 131,072 tokens, so that the optimizer's step has the share that it
# has in a run, or a little more.
SIZES = {
    "gpt2_124m": Size("gpt2_124m", warmup=20, timed=40, seconds=10, rounds=5, accumulate=1, log_every=10),
    "llama1b": Size("llama1b", warmup=4, timed=16, seconds=10, rounds=5, accumulate=1, log_every=4,
                    overrides=_KEEPS_ALL),
    # Weights and gradients in bf16, AdamW's averages in fp32: 12 bytes a parameter, and nothing is computed twice.
    "llama7b": Size("llama7b_1gpu", warmup=2, timed=1, seconds=10, rounds=3, accumulate=16, log_every=1,
                    base="bf16-true", overrides=_KEEPS_ALL),
    # Forms of fp8 side by side; half the micro-batches a step, so that all of them fit into one call.
    "fp8_7b": Size("llama7b_1gpu", warmup=2, timed=1, seconds=10, rounds=3, accumulate=8, log_every=1,
                   base="bf16-true", overrides=_KEEPS_ALL),
    # 16,384 tokens a micro-batch, over which a cast of the weights is spread; with every activation kept bf16 would not
    # fit into 139.8 GiB, so what is no product runs again.
    "llama7b_16k": Size("llama7b_1gpu", warmup=2, timed=1, seconds=10, rounds=2, accumulate=4, log_every=1,
                        base="bf16-true", overrides=("--model.init_args.activation_checkpointing", "cheap",
                                                     f"{DATA}.micro_batch_size", "4")),
    "llama8b": Size("llama7b_1gpu", warmup=2, timed=1, seconds=10, rounds=3, accumulate=16, log_every=1,
                    base="bf16-true", overrides=(*_KEEPS_ALL, *_LLAMA_3)),
    # For the memory alone: one micro-batch a step, blocks run again.
    "memory_7b": Size("llama7b_1gpu", warmup=2, timed=1, seconds=0, rounds=1, accumulate=1, log_every=1,
                      compile_first=False),
    "rowwise_7b": Size("llama7b_1gpu", warmup=2, timed=1, seconds=10, rounds=3, accumulate=16, log_every=1,
                       base="bf16-true", overrides=_KEEPS_ALL),
    "litgpt_1b": Size("llama1b", warmup=8, timed=16, seconds=10, rounds=4, accumulate=1, log_every=4,
                      overrides=_KEEPS_ALL),
    "fsdp2_1b": Size("llama1b", warmup=2, timed=4, seconds=10, rounds=3, accumulate=4, log_every=2,
                     overrides=_KEEPS_ALL),
    "experts_1b": Size("llama1b", warmup=2, timed=4, seconds=10, rounds=3, accumulate=2, log_every=2,
                       overrides=(*_KEEPS_ALL, f"{DATA}.micro_batch_size", "8")),
    "documents_1b": Size("llama1b", warmup=4, timed=16, seconds=10, rounds=3, accumulate=1, log_every=4,
                         overrides=(*_KEEPS_ALL, *_LONG_ROWS)),
}  # fmt: skip


def variants(base: str, dry: bool, emulate: bool) -> dict[str, tuple[str, ...]]:
    """Contenders that are the recipe with other options: formats, and strategies.

    Args:
        base: of the size.
        dry: toy sizes, which are below what fp8 pays for.
        emulate: whether fp8 products are emulated, as a device without them needs.
    """
    fp8 = {"base": base, "convert_small": dry, "emulate": emulate}
    fused = ("--model.init_args.fused_projections", "true")
    documents = (f"{DATA}.document_ids", "true", f"{DATA}.eot_id", str(EOT))
    return {
        "ours": (),
        "ours_fused": fused,
        # half of the activations, by modes that differ from block to block
        "ours_budget": ("--model.init_args.activation_checkpointing", json.dumps({"budget": 0.5})),
        "ours_bf16": plugin("BF16True"),
        "fp8_tensorwise": plugin("Float8", recipe="tensorwise", **fp8),
        "fp8_tensorwise_fused": (*plugin("Float8", recipe="tensorwise", **fp8), *fused),
        "fp8_delayed": plugin("Float8", recipe="tensorwise", scaling="delayed", **fp8),
        "fp8_tensorwise_kept": plugin("Float8", recipe="tensorwise", keep_fp8_weights=True, **fp8),
        "fp8_delayed_kept_fused": (
            *plugin("Float8", recipe="tensorwise", scaling="delayed", keep_fp8_weights=True, **fp8),
            *fused,
        ),
        "fp8_rowwise": plugin("Float8", recipe="rowwise", **fp8),
        # one device as it is, and the same through FSDP2: what the strategy costs where there is nothing to shard
        "one_device": ("--trainer.strategy", "auto"),
        "ours_graphs": ("--trainer.callbacks+=CUDAGraphs",),
        "fsdp2": ("--trainer.strategy", json.dumps({"class_path": "FSDP2Strategy"})),
        # the MLP of llama1b cut into experts of which a token takes as many as make the whole MLP: the same FLOPs
        "experts": _experts(8, 2, dry),
        "experts_fine": _experts(32, 8, dry),
        "documents": documents,
        "documents_dense": documents,
    }


def _experts(number: int, of_token: int, dry: bool) -> tuple[str, ...]:
    sizes = {"n_experts": number, "experts_per_token": of_token, "d_expert": (64 if dry else 5632) // of_token}
    return tuple(text for name, value in sizes.items() for text in (f"{DECODER}.{name}", str(value)))


_DRY = (
    f"{DECODER}.d_model", "32", f"{DECODER}.n_layers", "2", f"{DECODER}.n_heads", "4", f"{DECODER}.vocab_size", "256",
    f"{DECODER}.d_ff", "64", f"{DECODER}.n_kv_heads", "2", f"{DECODER}.max_seq_len", "128",
    f"{DATA}.vocab_size", "256", f"{DATA}.seq_len", "128", f"{DATA}.micro_batch_size", "2", f"{DATA}.num_workers", "0",
)  # fmt: skip


def toy(size: Size, cuda: bool = False) -> Size:
    """The same in a second: two steps of two micro-batches are timed, and one round runs.

    Args:
        size: the real one.
        cuda: on a GPU, compiled as in the recipe; False: on a CPU and not compiled.
    """
    where = () if cuda else ("--trainer.accelerator", "cpu", "--model.init_args.compile_blocks", "false")
    overrides = (*size.overrides, *_DRY, *where)
    return dataclasses.replace(
        size, warmup=1, timed=2, seconds=0.0, rounds=1, accumulate=2, log_every=1, overrides=overrides
    )
