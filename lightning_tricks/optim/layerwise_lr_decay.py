"""Layer-wise learning-rate decay: rules by which lower blocks learn more slowly than upper ones."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from torch import nn

from lightning_tricks._errors import UsageError
from lightning_tricks._find_modules import clean_name, repeated_blocks
from lightning_tricks.optim.param_roles import param_roles
from lightning_tricks.optim.param_rule import ParamRule, tied_names


@dataclass(frozen=True)
class LayerwiseLRDecay:
    """Stands in a list of rules for one rule a block: each block learns `decay` times as fast as the one above it.

    Of n repeated blocks, block i (from 0) has lr_scale `decay ** (n - i)`. Parameters before the blocks, such as
    embeddings, have `decay ** (n + 1)`; parameters after them, such as the last norm and the head, keep their learning
    rate. For fine-tuning. Rules before it in the list take precedence.

    Args:
        decay: factor from a block to the one below it, above 0 and up to 1. 0.65 to 0.8 for fine-tuning in the sources.

    Raises:
        UsageError: a decay out of range; a model without repeated blocks, or one in which all parameters of
            the blocks, and those before them, are frozen or fit an earlier rule.

    Source: Clark et al. 2020 (ELECTRA), https://arxiv.org/abs/2003.10555, appendix A; Bao et al. 2021 (BEiT),
        https://arxiv.org/abs/2106.08254.
    """

    decay: float = 0.75

    def __post_init__(self) -> None:
        if not (0 < self.decay <= 1 and math.isfinite(self.decay)):
            raise UsageError(f"LayerwiseLRDecay.decay={self.decay!r}: give a number above 0 and up to 1")

    def rules(self, module: nn.Module, earlier: Sequence[ParamRule] = ()) -> list[ParamRule]:
        """One rule for the parameters before the blocks, and one for each block, in their order.

        A rule that would get no parameter, because all are frozen or fit a rule of `earlier`, is left out.
        """
        blocks = list(repeated_blocks(module))
        if not blocks:
            raise UsageError(
                f"LayerwiseLRDecay: {type(module).__name__} has no repeated blocks: write a rule for each layer"
            )
        tied = tied_names(module)
        free = [param.name for param in param_roles(module) if not any(rule.fits(param, tied) for rule in earlier)]
        names = [clean_name(name) for name, _ in module.named_parameters()]
        prefixes = tuple(f"{block}." for block in blocks)
        before = set(takewhile(lambda name: not name.startswith(prefixes), names))
        found = [
            ParamRule(f"^{re.escape(block)}\\.", lr_scale=self.decay ** (len(blocks) - index))
            for index, block in enumerate(blocks)
            if any(name.startswith(f"{block}.") for name in free)
        ]
        if first := [name for name in free if name in before]:
            pattern = f"^({'|'.join(map(re.escape, first))})$"
            found.insert(0, ParamRule(pattern, lr_scale=self.decay ** (len(blocks) + 1)))
        if not found:
            raise UsageError(
                f"LayerwiseLRDecay: all parameters of the {len(blocks)} blocks, and those before them, are frozen or "
                "fit an earlier rule: move it up or remove it"
            )
        return found
