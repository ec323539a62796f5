"""How long each training stage of gpu.py trains each contender, and with which options of the command line."""

import dataclasses
import json

DECODER, DATA = "--model.init_args.decoder.init_args", "--data.init_args"


@dataclasses.dataclass(frozen=True)
class Size:
    """One recipe at full size.

    Attributes:
        recipe: file in recipes/, without its ending.
        warmup: optimizer steps before the clock starts. At least two: the first one allocates the optimizer's state,
            and Lightning, which fetches one batch ahead, has the end of a step still to do when the clock starts.
        timed: optimizer steps that are timed.
        rounds: at most as often each contender runs; the stage's time limit may allow fewer.
        accumulate: micro-batches of one optimizer step.
        log_every: optimizer steps from one log step to the next. Monitors measure in log steps, so a stage that shows
            their cost times at least four of them and has two in the warm-up.
        overrides: further options.
    """

    recipe: str
    warmup: int
    timed: int
    rounds: int
    accumulate: int
    log_every: int
    overrides: tuple[str, ...] = ()

    @property
    def options(self) -> tuple[str, ...]:
        """All that differs from the recipe."""
        steps = ("--trainer.accumulate_grad_batches", str(self.accumulate))
        return *self.overrides, *steps, "--trainer.log_every_n_steps", str(self.log_every)


# One micro-batch a step, where the recipes have eight: four log steps fit into the clock, and what a framework and its
# monitors cost a step shows eight times as large as in the recipe. Several micro-batches where only products matter.
SIZES = {
    "gpt2_124m": Size("gpt2_124m", warmup=20, timed=40, rounds=5, accumulate=1, log_every=10),
    "llama1b": Size("llama1b", warmup=8, timed=16, rounds=4, accumulate=1, log_every=4),
    # Two such models do not fit, so gpu.py gives each contender a process. The recipe accumulates 64 micro-batches.
    "llama7b_1gpu": Size("llama7b_1gpu", warmup=2, timed=4, rounds=1, accumulate=4, log_every=1),
    "precision_124m": Size("gpt2_124m", warmup=2, timed=8, rounds=4, accumulate=4, log_every=2),
    "precision_1b": Size("llama1b", warmup=2, timed=4, rounds=3, accumulate=4, log_every=2),
    # The layers of the 7B model, eight of its 32, so that several formats fit on 80 GB; 16,384 tokens a micro-batch.
    "precision_7b": Size("llama7b_1gpu", warmup=2, timed=4, rounds=3, accumulate=4, log_every=2, overrides=(
        f"{DECODER}.n_layers", "8", f"{DATA}.micro_batch_size", "4",
        "--model.init_args.activation_checkpointing", "none",
    )),
    "fsdp2_124m": Size("gpt2_124m", warmup=2, timed=8, rounds=4, accumulate=4, log_every=2),
    "fsdp2_1b": Size("llama1b", warmup=2, timed=4, rounds=3, accumulate=4, log_every=2),
}  # fmt: skip
# One device as it is, and the same through FSDP2: what the strategy costs where there is nothing to shard.
STRATEGIES = {
    "one_device": ("--trainer.strategy", "auto"),
    "fsdp2": ("--trainer.strategy", json.dumps({"class_path": "FSDP2Strategy"})),
}
_DRY = (
    f"{DECODER}.d_model", "32", f"{DECODER}.n_layers", "2", f"{DECODER}.n_heads", "4", f"{DECODER}.vocab_size", "256",
    f"{DECODER}.d_ff", "64", f"{DECODER}.n_kv_heads", "2", f"{DECODER}.max_seq_len", "32",
    f"{DATA}.vocab_size", "256", f"{DATA}.seq_len", "32", f"{DATA}.micro_batch_size", "2", f"{DATA}.num_workers", "0",
)  # fmt: skip


def toy(size: Size, cuda: bool = False) -> Size:
    """The same in a second: two steps of two micro-batches are timed, and one round runs.

    Args:
        size: the real one.
        cuda: on a GPU, compiled as in the recipe; False: on a CPU and not compiled.
    """
    where = () if cuda else ("--trainer.accelerator", "cpu", "--model.init_args.compile_blocks", "false")
    overrides = (*size.overrides, *_DRY, *where)
    return dataclasses.replace(size, warmup=1, timed=2, rounds=1, accumulate=2, log_every=1, overrides=overrides)
