"""One line at a resume, where an optimizer goes on with settings of the checkpoint that are not the recipe's.

torch restores lr, betas, T_max and so on with the state. OptimizerMixin puts the recipe's in their place. Of a module
with a `configure_optimizers` of its own it is not known whether a setting that differs was changed in the recipe or by
the run itself, which a resume must keep: the line names each of them, and nothing is changed.
"""

import inspect
from typing import Any

from lightning_tricks._lightning import pl, rank_zero_info

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
    for number, optimizer in enumerate(trainer.optimizers):
        for index, group in enumerate(optimizer.param_groups):
            where = "".join(f"[{one}]" for one, many in ((number, trainer.optimizers), (index, optimizer.param_groups))
                            if len(many) > 1)  # fmt: skip
            peak = {"lr": group["initial_lr"]} if "initial_lr" in group else {}  # a scheduler moves the lr itself
            found |= _plain(type(optimizer), {**group, **peak}, where)
    for number, config in enumerate(trainer.lr_scheduler_configs):
        where = f"[{number}]" if len(trainer.lr_scheduler_configs) > 1 else ""
        found |= _plain(type(config.scheduler), vars(config.scheduler), where)
    return found


def _plain(cls: type, values: Any, where: str) -> dict[str, Any]:
    names = inspect.signature(cls).parameters.keys() - _PARAMETERS
    plain = {name: values[name] for name in sorted(names & values.keys())}
    kinds = (bool, int, float, str, tuple, list)
    return {f"{cls.__name__}{where}.{name}": value for name, value in plain.items() if isinstance(value, kinds)}
