"""The tricks that do not work with every strategy, in one table: which, why, and what to do."""

from dataclasses import dataclass
from typing import Any

from lightning_tricks._core.errors import UsageError
from lightning_tricks._trainer.run_facts import WeightsLayout, weights_layout


@dataclass(frozen=True)
class Refusal:
    """One row of the table.

    Attributes:
        layouts: of the weights under which the trick cannot work, see `weights_layout`.
        line: for the user, after the name of the option; `{strategy}` is the class name of the strategy.
    """

    layouts: tuple[WeightsLayout, ...]
    line: str


_UNREADABLE: tuple[WeightsLayout, ...] = ("engine", "foreign engine", "flat")
_NOT_OURS: tuple[WeightsLayout, ...] = (*_UNREADABLE, "foreign shards")
_DDP_OR_FSDP2 = "train on one device, with ddp or with FSDP2Strategy"

REFUSALS = {
    "EMA, TailAverage": Refusal(
        _NOT_OURS, f"{{strategy}} keeps weights in a form that cannot be averaged and saved: {_DDP_OR_FSDP2}"
    ),
    "GradNormMonitor.per": Refusal(
        _UNREADABLE, "under {strategy}, which holds no parameter whole: leave it out, or use FSDP2Strategy"
    ),
    "the gradient norm": Refusal(
        ("flat",), "{strategy} holds flat parts of parameters, whose norm is not measured: shard with FSDP2Strategy"
    ),
    "a precision plugin": Refusal(
        _UNREADABLE,
        "does not work under {strategy}, which has a precision of its own: remove the plugin and set "
        "trainer.precision, or shard with FSDP2 (FSDP2Strategy)",
    ),
    "InitFrom": Refusal(_NOT_OURS, f"{{strategy}} takes no weights from it: {_DDP_OR_FSDP2}"),
    "SafeCheckpoint": Refusal(
        ("foreign engine", "flat", "foreign shards"),
        "{strategy} writes checkpoints by itself, and nobody sees whether they are whole: take FSDP2Strategy or "
        "DeepSpeedZeROStrategy, or save with ModelCheckpoint",
    ),
    "ScheduleFree": Refusal(
        _NOT_OURS, f"{{strategy}} keeps weights in a form that cannot be exchanged for their average: {_DDP_OR_FSDP2}"
    ),
    "SpikeRollback": Refusal(
        _UNREADABLE,
        "{strategy} keeps weights and optimizer state where they cannot be put back: take SpikeRollback out, or shard "
        "with FSDP2Strategy",
    ),
    "StepGuard": Refusal(
        ("foreign engine",),
        "{strategy} leaves clip and step to DeepSpeed's engine, which asks nobody in between: take "
        "DeepSpeedZeROStrategy, or leave StepGuard out",
    ),
    "TokenMeanMixin": Refusal(
        ("foreign engine",),
        "{strategy} leaves the gradients to DeepSpeed's engine, where nobody can scale them: take "
        "DeepSpeedZeROStrategy",
    ),
}


def refuse(trick: str, strategy: Any, option: str) -> None:
    """Refuse a strategy under which a trick does not work.

    Args:
        trick: its row of `REFUSALS`.
        strategy: of the Trainer.
        option: with which the line begins, such as `EMA:` or `init_from=...:`.

    Raises:
        UsageError: the table has the strategy's layout of weights.
    """
    row = REFUSALS[trick]
    if weights_layout(strategy) in row.layouts:
        raise UsageError(f"{option} {row.line.format(strategy=type(strategy).__name__)}")
