"""The number formats that are compared, each as options of the command line, as a user would write them."""

import json
from typing import Any


def plugin(class_path: str, **init_args: Any) -> tuple[str, ...]:
    """Options that put one precision plugin in the place of the recipe's."""
    return "--trainer.plugins", json.dumps([{"class_path": class_path, "init_args": init_args}])


def lightning(precision: str) -> tuple[str, ...]:
    """Options that take Lightning's own precision instead."""
    return "--trainer.plugins", "null", "--trainer.precision", precision


def formats(emulate: bool) -> dict[str, tuple[str, ...]]:
    """Name of each format and its options.

    Args:
        emulate: whether fp8 products are emulated, as a device without them needs.
    """
    return {
        "fp32": lightning("32-true"),
        "fp32_another_seed": (*lightning("32-true"), "--seed_everything", "1"),
        "bf16_mixed": plugin("BF16Mixed"),
        "bf16_true_naive": lightning("bf16-true"),
        "bf16_true_stochastic": plugin("BF16True"),
        "fp16": plugin("FP16Mixed"),
        "fp16_unscaled": plugin("FP16Mixed", loss_scaling=False),
        "fp8_tensorwise": plugin("Float8", recipe="tensorwise", convert_small=True, emulate=emulate),
        # with kept weights the numbers are the same
        "fp8_delayed": plugin("Float8", recipe="tensorwise", scaling="delayed", convert_small=True, emulate=emulate),
        "fp8_rowwise": plugin("Float8", recipe="rowwise", convert_small=True, emulate=emulate),
        "fp8_rowwise_with_gw_hp": plugin("Float8", recipe="rowwise_with_gw_hp", convert_small=True, emulate=emulate),
        # only the newest GPUs multiply these blocks, so they are emulated everywhere
        "mxfp8": plugin("Float8", recipe="mxfp8", convert_small=True, emulate=True),
    }
