"""The sizes of a ladder: narrower models of a recipe, with its depth and its ratio of tokens to parameters.

All rungs lie on the curve that the recipe itself is on, or their losses would not lead to its loss.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_tricks._core.errors import UsageError
from lightning_tricks.accounting import training_flops_per_token
from lightning_tricks.accounting.flops import matmul_parameters
from lightning_tricks.logs.scaling_law import LEAST_SPAN
from lightning_tricks.optim.mup import MuP, at_width

LEAST_STEPS = 400  # of a rung: with fewer, the warmup and the first steps decide its loss
_SPAN = 100.0  # FLOPs of the largest rung over those of the smallest, where there is room
_NEAREST = 3.0  # FLOPs of the recipe over those of the largest rung: a nearer one costs as much as the run
_HEAD_BOUND = 10**1.5  # the span that the bound on the head must leave
_UNIT, _LEAST_HEADS = 8, 4  # widths are multiples; below so many heads, heads become narrower


@dataclass(frozen=True)
class Size:
    """A model of the recipe's kind, and its run.

    Args:
        config: of the decoder.
        steps: optimizer steps.
        rows: in a micro-batch of one process.
        accumulate: micro-batches of a step and process.
        ranks: processes with rows of their own.
        seq_len: tokens in a row.
    """

    config: Any
    steps: int
    rows: int
    accumulate: int
    ranks: int
    seq_len: int

    @property
    def parameters(self) -> int:
        """Of body and head, those that the FLOPs of a token count."""
        return matmul_parameters(self.config)

    @property
    def step_tokens(self) -> int:
        """Tokens of one step of all processes."""
        return self.rows * self.accumulate * self.ranks * self.seq_len

    @property
    def tokens(self) -> int:
        """Tokens of the run."""
        return self.steps * self.step_tokens

    @property
    def flops(self) -> float:
        """Of the run, with causal attention."""
        return float(self.tokens * training_flops_per_token(self.config, self.seq_len, "causal"))

    @property
    def has_small_head(self) -> bool:
        """Whether the head is no larger than the body."""
        return 2 * self.config.vocab_size * self.config.d_model <= self.parameters


def base_of(config: Any, mup: MuP | None) -> MuP:
    """The parametrization of the rungs, under which the recipe's own width is what it was, to the bit."""
    base = MuP(config.d_model) if mup is None else mup
    return MuP(base.base_width, base.base_head_dim or config.head_dim)


def sizes_below(recipe: Size, mup: MuP, validations: int) -> list[Size]:
    """All narrower sizes that have at least `LEAST_STEPS` steps, the smallest first.

    Args:
        recipe: of the recipe itself.
        mup: see `base_of`.
        validations: the steps of each are a multiple of their number, so that the last one comes at the end.
    """
    widths = range(_UNIT, recipe.config.d_model, _UNIT)
    shapes = (_narrower(recipe.config, width, mup) for width in widths)
    sizes = (_trained(recipe, shape, validations) for shape in shapes if shape is not None)
    return [size for size in sizes if size is not None]


def _narrower(config: Any, width: int, mup: MuP) -> Any:
    """The decoder at a width; None where heads do not fit. Heads stay as wide until few are left."""
    head_dim, least = config.head_dim, min(_LEAST_HEADS, config.n_heads)
    if width % head_dim or width // head_dim < least:
        if width % (2 * least) or width // least > head_dim:
            return None
        head_dim = width // least
    if width == mup.base_width and head_dim != mup.base_head_dim:
        return None
    try:
        shape = at_width(dataclasses.replace(config, d_ff=config.ffn_width), width, head_dim)
    except UsageError:  # experts that would be no multiple of 8 wide
        return None
    return dataclasses.replace(shape, d_ff=_UNIT * max(1, round(shape.d_ff / _UNIT)))


def _trained(recipe: Size, config: Any, validations: int) -> Size | None:
    """The run of a decoder, with as many tokens a parameter as the recipe; None where it has too few steps.

    It takes the recipe's rows a step, or fewer where that makes enough steps: first fewer micro-batches.
    """
    tokens = recipe.tokens * matmul_parameters(config) / recipe.parameters
    batches = [(rows, times) for rows in _divisors(recipe.rows) for times in _divisors(recipe.accumulate)]
    for rows, accumulate in sorted(batches, key=lambda each: (math.prod(each), each[0]), reverse=True):
        size = dataclasses.replace(recipe, config=config, rows=rows, accumulate=accumulate)
        steps = validations * round(tokens / size.step_tokens / validations)
        if steps >= LEAST_STEPS:
            return dataclasses.replace(size, steps=steps)
    return None


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def ladders(recipe: Size, sizes: Sequence[Size], count: int) -> list[list[Size]]:
    """Ladders of `count` rungs from which a forecast of the recipe is allowed, the nearest to it first.

    Two decades of compute where the sizes allow it, and a head that is no larger than the body where that leaves one
    and a half.

    Raises:
        UsageError: no ladder fits below the recipe; says what would.
    """
    found: list[list[Size]] = []
    for usable in ([size for size in sizes if size.has_small_head], sizes):
        distances = (_NEAREST * 1.05**power for power in range(26))  # to ten times
        tried = [_ladder(recipe.flops, usable, count, distance) for distance in distances] if usable else []
        found = [each for number, each in enumerate(tried) if each and each not in tried[:number]]
        if found and max(each[-1].flops / each[0].flops for each in found) >= _HEAD_BOUND:
            break
    if found:
        return found
    # the smallest rung lies LEAST_SPAN ** 1.5 below the recipe, and tokens grow with the root of the FLOPs
    row_tokens = recipe.ranks * recipe.seq_len
    needed = math.ceil(1.2 * LEAST_SPAN**0.75 * LEAST_STEPS * row_tokens / recipe.step_tokens)
    ways = f"lengthen the run, --trainer.max_steps {needed}, or" if needed > recipe.steps else "take"
    raise UsageError(
        f"ladder: below {recipe.steps:,} steps of {recipe.step_tokens:,} tokens at d_model={recipe.config.d_model} "
        f"there is no room for {count} rungs over a decade of FLOPs with {LEAST_STEPS} steps each: {ways} a wider "
        "model, or fewer --rungs"
    )


def _ladder(target: float, sizes: Sequence[Size], count: int, distance: float) -> list[Size] | None:
    """The sizes nearest to equal steps up to `distance` below the target; None where they are no ladder for it."""
    top = target / distance
    low = max(sizes[0].flops, top / _SPAN)
    wanted = [low * (top / low) ** (number / (count - 1)) for number in range(count)]
    chosen = [min(sizes, key=lambda size: abs(math.log(size.flops / each))) for each in wanted]
    rises = all(one.flops < other.flops for one, other in itertools.pairwise(chosen))
    span = chosen[-1].flops / chosen[0].flops
    is_near = target / chosen[-1].flops <= math.sqrt(span)  # half of the span: further out it is a guess
    return chosen if rises and span >= LEAST_SPAN and is_near else None
