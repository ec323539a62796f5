"""Split parameter groups between an optimizer for hidden matrices and AdamW for the rest, by role."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from lightning_tricks._errors import UsageError

_LISTS = ("params", "param_names", "roles", "layouts")  # of a group, one entry a parameter


def split_by_role(group: Any, first: str, takes: Callable[[str, Tensor], bool], owner: str) -> Iterator[dict[str, Any]]:
    """The parts of a group that go to the optimizer named `first` and to the one named `adamw`, without empty ones.

    Args:
        group: of `decay_groups`; the optimizer that its rule names has all of it.
        first: name of the optimizer for hidden matrices.
        takes: of (role, parameter), whether the first optimizer steps it.
        owner: name of the class, for errors.

    Raises:
        UsageError: a group without roles; a rule that names another optimizer.
    """
    if not isinstance(group, dict) or "roles" not in group:
        raise UsageError(f"{owner}: its groups do not tell the role of each parameter: make them by decay_groups")
    chosen, names = group.get("optimizer"), (first, "adamw")
    if chosen not in (None, *names):
        raise UsageError(f"param_rules: optimizer={chosen!r} of {group['name']}: {owner} has {' and '.join(names)}")
    pairs = zip(group["roles"], group["params"], strict=True)
    by_role = [first if takes(role, param) else "adamw" for role, param in pairs]
    goes_to = by_role if chosen is None else [chosen] * len(by_role)
    for name in names:
        entries = [index for index, optimizer in enumerate(goes_to) if optimizer == name]
        if entries:
            lists = {key: [group[key][index] for index in entries] for key in _LISTS}
            yield {**group, **lists, "optimizer": name, "name": f"{name}:{group['name']}"}
