"""Averages of the weights in a checkpoint: their layout there, and the weights that one of them gives.

`checkpoint[AVERAGES][name]["weights"]` holds tensors by the kind of average and by the parameter's name, such as
`["mean"]["decoder.head.weight"]`. MEAN takes the weights' place; others are what a resume needs.
"""

from collections.abc import Mapping
from typing import Any

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.find_modules import clean_name

AVERAGES = "averages"
MEAN = "mean"


def with_average(checkpoint: Mapping[str, Any], name: str, path: Any) -> dict[str, Any]:
    """A checkpoint in whose `state_dict` an average has taken the place of the weights that were trained.

    A weight that is not averaged, because it was not trained, stays as it is. The average has the dtype of the weight.

    Args:
        checkpoint: with all of its tensors, whole or in shards.
        name: of the average, such as `ema`.
        path: of the checkpoint, for the message.

    Raises:
        UsageError: the checkpoint has no such average.
    """
    means = average_entry(checkpoint, name, path)["weights"][MEAN]
    state_dict = {
        key: means[clean_name(key)].to(value.dtype) if clean_name(key) in means else value
        for key, value in checkpoint["state_dict"].items()
    }
    return {**checkpoint, "state_dict": state_dict}


def average_entry(checkpoint: Mapping[str, Any], name: str, path: Any) -> Mapping[str, Any]:
    """The entry of an average in a checkpoint, see above.

    Raises:
        UsageError: the checkpoint has no such average.
    """
    found = checkpoint.get(AVERAGES) or {}
    if name not in found:
        held = f"it holds {', '.join(found)}" if found else "it was saved without one"
        raise UsageError(f"average={name}: {path} holds no such average of the weights: {held}")
    entry: Mapping[str, Any] = found[name]
    return entry
