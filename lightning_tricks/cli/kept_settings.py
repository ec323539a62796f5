"""One line at a resume, where an optimizer goes on with settings of the checkpoint that are not the recipe's.

torch restores lr, betas, T_max and so on with the state. OptimizerMixin puts the recipe's in their place. Of a module
with a `configure_optimizers` of its own it is not known whether a setting that differs was changed in the recipe or by
the run itself, which a resume must keep: the line names each of them, and nothing is changed.
"""

import inspect
from collections import Counter
from collections.abc import Iterator
from typing import Any

from lightning_tricks._trainer.lightning import pl, rank_zero_info

_PARAMETERS = {"params", "optimizer", "last_epoch", "self"}


class KeptSettings(pl.Callback):
    """Compares the settings that `configure_optimizers` gives with those of the first step. Never changes training."""

    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Look at the optimizers: they are built, and the checkpoint is not loaded into them yet."""
        self._given = settings_of(trainer)

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Name what differs now that the checkpoint is loaded."""
        given, now = self._given, settings_of(trainer)
        kept = [f"{name} {now[name]} ({given[name]})" for name in given if name in now and given[name] != now[name]]
        if kept:
            rank_zero_info(
                f"{type(pl_module).__name__} goes on with settings of the checkpoint (the recipe's in brackets): "
                f"{', '.join(kept)}; with OptimizerMixin the recipe's would hold"
            )


def settings_of(trainer: Any) -> dict[str, Any]:
    """The numbers that a Trainer's optimizers and schedulers were built with, by the names of their arguments."""
    found: dict[str, Any] = {}
    schedulers = [one for config in trainer.lr_scheduler_configs for one in _with_parts(config.scheduler)]
    cycled = [id(one.optimizer) for one in schedulers if getattr(one, "cycle_momentum", False)]
    for number, optimizer in enumerate(trainer.optimizers):
        for index, group in enumerate(optimizer.param_groups):
            where = "".join(f"[{one}]" for one, many in ((number, trainer.optimizers), (index, optimizer.param_groups))
                            if len(many) > 1)  # fmt: skip
            peak = {"lr": group["initial_lr"]} if "initial_lr" in group else {}  # a scheduler moves the lr itself
            values = {**group, **peak}
            if id(optimizer) in cycled:  # these it moves as well
                values = {name: value for name, value in values.items() if name not in ("momentum", "betas")}
            found |= _plain(type(optimizer), values, where)
    for number, scheduler in enumerate(schedulers):
        where = f"[{number}]" if len(schedulers) > 1 else ""
        found |= _plain(type(scheduler), vars(scheduler), where)
    return found


def _with_parts(scheduler: Any) -> Iterator[Any]:
    """A scheduler, and those that a SequentialLR or a ChainedScheduler is made of."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _with_parts(part)


def _plain(cls: type, values: Any, where: str) -> dict[str, Any]:
    names = inspect.signature(cls).parameters.keys() - _PARAMETERS
    plain = {name: values[name] for name in sorted(names & values.keys())}
    plain |= {name: sorted(value.elements()) for name, value in plain.items() if isinstance(value, Counter)}
    kinds = (bool, int, float, str, tuple, list)
    return {f"{cls.__name__}{where}.{name}": value for name, value in plain.items() if isinstance(value, kinds)}
