"""Refuse strategies under which a trick cannot work: a trick has its `Refusal` in its own file."""

from dataclasses import dataclass
from typing import Any

from lightning_tricks._core.errors import UsageError
from lightning_tricks._trainer.run_facts import WeightsLayout, weights_layout


@dataclass(frozen=True)
class Refusal:
    """Strategies under which a trick does not work, why, and what to do.

    Args:
        layouts: of the weights under which the trick cannot work, see `weights_layout`.
        line: for the user, after the name of the option; `{strategy}` is the class name of the strategy.
    """

    layouts: tuple[WeightsLayout, ...]
    line: str

    def check(self, strategy: Any, option: str) -> None:
        """Refuse the strategy of a Trainer.

        Args:
            strategy: of the Trainer.
            option: with which the line begins, such as `EMA:` or `init_from=...:`.

        Raises:
            UsageError: its layout of weights is one of those that are refused.
        """
        if weights_layout(strategy) in self.layouts:
            raise UsageError(f"{option} {self.line.format(strategy=type(strategy).__name__)}")


UNREADABLE: tuple[WeightsLayout, ...] = ("engine", "foreign engine", "flat")
NOT_OURS: tuple[WeightsLayout, ...] = (*UNREADABLE, "foreign shards")
DDP_OR_FSDP2 = "train on one device, with ddp or with FSDP2Strategy"

GRADIENT_NORM = Refusal(
    ("flat",), "{strategy} holds flat parts of parameters, whose norm is not measured: shard with FSDP2Strategy"
)
PRECISION_PLUGIN = Refusal(
    UNREADABLE,
    "does not work under {strategy}, which has a precision of its own: remove the plugin and set "
    "trainer.precision, or shard with FSDP2 (FSDP2Strategy)",
)
