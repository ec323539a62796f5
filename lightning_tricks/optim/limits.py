"""What known optimizers cannot do, in a table by class, so that a run is refused before its first step."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch.optim import Optimizer

from lightning_tricks._core.errors import UsageError
from lightning_tricks.optim.keep_settings_on_load import parts_of

Where = Literal["shards", "flat parameters", "BF16True", "a Tensor lr", "first derivatives"]


class Limit(NamedTuple):
    """One line of the table.

    Attributes:
        where: situation in which these optimizers fail, or train wrongly without a message.
        optimizers: `package.Class` and its subclasses, `package.*` for all of a package's, `Class` for any package's.
        why: what the message says after the name of the optimizer.
        remedy: what to do.
        holds: whether the limit holds for a group, given its options; None: for every group.
    """

    where: Where
    optimizers: tuple[str, ...]
    why: str
    remedy: str
    holds: Callable[[dict[str, Any]], Any] | None = None


_FLAT = "needs the shapes of the parameters, which DeepSpeed and FSDP1 flatten"
_SECOND = "needs second derivatives, which sharding does not give"
_SHARDED = "does not work on sharded parameters"
_NO_FOREACH_LERP = torch.__version__ < "2.13"  # torch._foreach_lerp_ of DTensors; tried with 2.11 and 2.13

# As tried with torch 2.13, torchao 0.18, pytorch_optimizer 4.1 and heavyball 3.2 by `python -m benchmarks.optimizers`.
LIMITS = [
    Limit("shards", ("Adafactor", "NorMuon", "SOAP", "Shampoo"), _SHARDED, "take AdamW or MuonAdamW, or strategy: ddp"),
    Limit("shards", ("AdamWFp8", "AdamFp8"), _SHARDED, "take AdamW8bit, or strategy: ddp"),
    Limit("shards", ("torch.SGD",), "with fused=True does not work on sharded parameters", "leave out fused",
          lambda group: group.get("fused")),
    Limit("shards", ("torch.LBFGS",), "searches along a line, for which each rank would take its own loss",
          "take AdamW, or one device"),
    Limit("shards", ("pytorch_optimizer.Lion",), f"{_SHARDED} with torch {torch.__version__}", "set foreach to false",
          lambda group: _NO_FOREACH_LERP and group.get("foreach") is not False),
    Limit("shards", ("SophiaH",), _SECOND, "take AdamW or MuonAdamW, or one device"),
    Limit("flat parameters", ("SophiaH",), _SECOND, "take AdamW or MuonAdamW, or one device"),
    Limit("flat parameters", ("Adafactor", "LBFGS", "Muon", "NorMuon", "SOAP", "Shampoo"), _FLAT,
          "take AdamW, or FSDP2Strategy"),
    Limit("BF16True", ("heavyball.*",), "keeps every fp32 copy that BF16True makes for a step, until memory is full",
          "take one of another package, or the plugin BF16Mixed"),
    Limit("BF16True", ("SophiaH",), "needs second derivatives, which the fp32 copies of BF16True do not have",
          "take the plugin BF16Mixed"),
    Limit("a Tensor lr", ("pytorch_optimizer.SOAP",), "changes a Tensor lr in its step",
          "give a float, which the schedule sets at each step"),
    Limit("first derivatives", ("SophiaH",), "needs second derivatives, and the module's backward() gives first ones",
          "override it with `loss.backward(create_graph=True)`, in a model that is differentiable twice"),
]  # fmt: skip


def refuse_limits(optimizer: Optimizer, *where: Where) -> None:
    """Refuse an optimizer that is known not to work in one of these situations, or that contains such an optimizer.

    Raises:
        UsageError: with the first limit that fits.
    """
    for part in parts_of(optimizer):
        names = set(_names(part))
        for limit in LIMITS:
            chosen = limit.holds is None or any(map(limit.holds, part.param_groups))
            if limit.where in where and chosen and not names.isdisjoint(limit.optimizers):
                raise UsageError(f"{type(part).__name__} {limit.why}: {limit.remedy}")


def refuse_tensor_lr(optimizer: Optimizer) -> None:
    """Refuse a Tensor that the user gave as learning rate to an optimizer that does not take one.

    torchao's optimizers turn a number into a Tensor by themselves, in their groups; that is allowed.
    """
    for part in parts_of(optimizer):
        if isinstance(part.defaults.get("lr"), torch.Tensor):
            refuse_limits(part, "a Tensor lr")


def _names(optimizer: Optimizer) -> Iterator[str]:
    for cls in type(optimizer).__mro__:
        package = cls.__module__.partition(".")[0]
        yield from (cls.__name__, f"{package}.{cls.__name__}", f"{package}.*")
