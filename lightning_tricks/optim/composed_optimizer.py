"""Several optimizers as one: what Lightning's automatic optimization, a schedule, a clip and a checkpoint expect."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.protocols import SkipsOnDevice
from lightning_tricks._core.replaced import replaced

__all__ = ["ComposedOptimizer"]

Factory = Callable[[Iterable], Optimizer]


class ComposedOptimizer(Optimizer):
    """One optimizer made of several, each with groups of its own; groups and state are shared with them.

    A schedule, a clip, a gradient scaler, a monitor and a checkpoint see one optimizer. A group goes to the optimizer
    that its key `optimizer` names (from `ParamRule.optimizer`), else to `default`.

    Args:
        params: groups, such as those of `decay_groups`.
        optimizers: by name, a function that makes an optimizer from groups.
        default: name of the optimizer for groups that name none. None: such groups are an error.

    Raises:
        UsageError: a group names an unknown optimizer, or none while there is no `default`; an optimizer gets no
            parameter; two groups hold the same parameter.

    Example:
        >>> matrix, bias = torch.nn.Parameter(torch.eye(2)), torch.nn.Parameter(torch.zeros(2))
        >>> groups = [{"params": [matrix], "optimizer": "sgd"}, {"params": [bias]}]
        >>> made = {"sgd": lambda g: torch.optim.SGD(g, lr=0.1), "adamw": lambda g: torch.optim.AdamW(g, lr=0.01)}
        >>> [group["lr"] for group in ComposedOptimizer(groups, made, default="adamw").param_groups]
        [0.1, 0.01]
    """

    optimizers: Mapping[str, Optimizer] = {}

    def __init__(self, params: Iterable, optimizers: Mapping[str, Factory], default: str | None = None) -> None:
        self._names, self._default = list(optimizers), default
        try:
            super().__init__(params, {})
        except ValueError as error:
            raise UsageError(f"optimizers: {error}: give each parameter to one of {', '.join(optimizers)}") from error
        made = {}
        for name, make in optimizers.items():
            own = [group for group in self.param_groups if group["optimizer"] == name]
            if not own:
                raise UsageError(
                    f"optimizers: {name!r} gets no parameter: write a rule with optimizer: {name}, or leave it out"
                )
            made[name] = make(own)
        self.optimizers = made
        for optimizer in made.values():
            self.state.update(optimizer.state)
        self._share()

    @property
    def skips_on_device(self) -> bool:
        """Whether each of the optimizers can skip a step by `found_inf`, without a look at it on the host."""
        return all(map(skips_on_device, self.optimizers.values()))

    def _share(self) -> None:
        """Let each optimizer use the groups that name it, and the state of this one."""
        for name, optimizer in self.optimizers.items():
            own = [group for group in self.param_groups if group["optimizer"] == name]
            optimizer.__setstate__({"state": self.state, "param_groups": own})

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copies: the optimizers too."""
        own = {name: getattr(self, name) for name in ("optimizers", "_names", "_default")}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by `load_state_dict`, with new groups and a new state."""
        super().__setstate__(state)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, to the optimizer that it names."""
        name = param_group["optimizer"] = param_group.get("optimizer") or self._default
        super().add_param_group(param_group)
        if name not in self._names:
            first = param_group.get("param_names", ["a parameter"])[0]
            what = "no optimizer" if name is None else f"optimizer {name!r}, which is not there"
            raise UsageError(
                f"optimizers: '{first}' of group {param_group.get('name', len(self.param_groups) - 1)!r} has {what}: "
                f"name one of {', '.join(self._names)} in the rule that fits it (ParamRule.optimizer)"
            )
        if name in self.optimizers:  # in the constructor there is none yet: it builds them from the finished groups
            self.optimizers[name].add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of each optimizer, in their order; the closure runs once, before the first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        skip = getattr(self, "found_inf", None)
        for optimizer in self.optimizers.values():
            if skip is None:
                optimizer.step()
                continue
            with replaced(optimizer, "found_inf", skip), replaced(optimizer, "grad_scale", None):
                optimizer.step()
        return loss


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether a step of the optimizer changes nothing where its attribute `found_inf`, a 0-dim tensor, is 1.

    Fused Adam and AdamW check it in their kernels; other optimizers declare it by an attribute `skips_on_device`. Fused
    SGD does not count: a skipped first step would leave its momentum without a value.
    """
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return all(group.get("fused") for group in optimizer.param_groups)
    return isinstance(optimizer, SkipsOnDevice) and optimizer.skips_on_device
