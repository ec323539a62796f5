"""The shape of a decoder in a checkpoint, in plain types, and whether another one is the same."""

import dataclasses
import inspect
from collections.abc import Collection
from typing import Any

from lightning_tricks._errors import UsageError
from lightning_tricks.models import DecoderConfig


def architecture(config: DecoderConfig) -> dict[str, Any]:
    """Name of the family and all settings."""
    return {"class": type(config).__name__, **dataclasses.asdict(config)}  # type: ignore[call-overload]


def check_architecture(config: DecoderConfig, checkpoint: dict[str, Any], may_differ: Collection[str]) -> None:
    """Refuse a checkpoint whose decoder has other settings than this one; one without a decoder passes.

    Args:
        config: of the recipe.
        checkpoint: with `decoder_config`.
        may_differ: names of settings that do not count.

    Raises:
        UsageError: naming the first difference.
    """
    here, there = architecture(config), checkpoint.get("decoder_config")
    if there is None:
        return
    for name in ["class", *sorted((here.keys() | there.keys()) - {"class", *may_differ})]:
        if here.get(name) != there.get(name):
            raise UsageError(
                f"the checkpoint's decoder has {name}={there.get(name)!r}, the recipe's {here.get(name)!r}: "
                "make them equal, or start without the checkpoint"
            )


def takes_decoder(cls: type, settings: dict[str, Any]) -> bool:
    """Whether to pass the decoder to a constructor: a subclass without saved settings may build its own."""
    parameters = inspect.signature(cls).parameters
    passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return "decoder" in parameters or (passes_on and not settings)
