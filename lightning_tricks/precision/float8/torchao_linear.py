"""The converted layer of the float8 recipes. Importing this needs torchao."""

import dataclasses
from typing import Any

from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from lightning_tricks.precision.float8.linear import CheckedLinear

# torchao keeps its class to itself, but what its public function returns is one
_Base: Any = type(convert_to_float8_training(nn.Linear(16, 16, device="meta")))


class Float8Linear(CheckedLinear, _Base):
    """torchao's products and scales behind our checks."""


def torchao_config(recipe: str, emulate: bool, gather_in_fp8: bool = False) -> Float8LinearConfig:
    """What torchao calls the recipe."""
    config = Float8LinearConfig.from_recipe_name(recipe)
    return dataclasses.replace(config, emulate=emulate, enable_fsdp_float8_all_gather=gather_in_fp8)


def stand_in(recipe: str, emulate: bool) -> nn.Linear:
    """A converted layer for `_float8_linear.convert` to take class and settings from."""
    layer = convert_to_float8_training(nn.Linear(16, 16, device="meta"), config=torchao_config(recipe, emulate))
    layer.__class__ = Float8Linear
    return layer
