"""Averages of the weights in a checkpoint: their layout there, and the weights that one of them gives.

`checkpoint[AVERAGES][name]` has two entries. `weights` holds tensors by their term and by the parameter's name, such as
`weights["mean"]["decoder.head.weight"]`. `shares` tells how much of each term, and of `raw`, the weights in
`state_dict`, make up the average.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_tricks._errors import UsageError
from lightning_tricks._find_modules import clean_name

AVERAGES = "averages"
RAW = "raw"  # the term of the weights that are trained


@torch.no_grad()
def mixed(raw: Tensor, terms: Mapping[str, Tensor], shares: Mapping[str, float]) -> Tensor:
    """The sum of terms, each times its share; a term whose share is 1 is returned as it is, without a copy.

    Args:
        raw: one weight as it is trained.
        terms: averages of it, of one dtype, in which the sum is computed.
        shares: of `raw` and of the terms; they add up to 1.
    """
    parts = [(raw if name == RAW else terms[name], share) for name, share in shares.items() if share != 0]
    if len(parts) == 1:
        return parts[0][0]
    dtype = next(iter(terms.values())).dtype
    total = torch.zeros_like(raw, dtype=dtype)
    for tensor, share in parts:
        total.add_(tensor.to(dtype), alpha=share)
    return total


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
    entry = average_entry(checkpoint, name, path)
    terms, shares = entry["weights"], entry["shares"]
    averaged = next(iter(terms.values())).keys()
    state_dict = {
        key: mixed(value, {term: terms[term][clean_name(key)] for term in terms}, shares).to(value.dtype)
        if clean_name(key) in averaged
        else value
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
