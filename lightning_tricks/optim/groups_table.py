"""The parameter groups as a table to read before training: who decays, and at what learning rate."""

from collections.abc import Iterable
from typing import Any


def groups_table(groups: Iterable[dict[str, Any]], lr: float) -> str:
    """A plain text table of parameter groups: name, tensors, parameters, lr, decay, and the totals.

    Args:
        groups: from `decay_groups`, or an optimizer's `param_groups`.
        lr: learning rate of the groups that do not hold one of their own, before their `lr_scale`.
    """
    rows = [("group", "tensors", "parameters", "lr", "decay")]
    tensors = parameters = 0
    for place, group in enumerate(groups):
        numel = sum(param.numel() for param in group["params"])
        own_lr = group["lr"] if "lr" in group else lr * group.get("lr_scale", 1.0)
        name = group.get("name", f"group {place}")
        decay = f"{float(group.get('weight_decay', 0.0)):g}"
        rows.append((name, str(len(group["params"])), f"{numel:,}", f"{float(own_lr):g}", decay))
        tensors, parameters = tensors + len(group["params"]), parameters + numel
    rows.append(("total", str(tensors), f"{parameters:,}", "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows)
    return "\n".join(lines)
