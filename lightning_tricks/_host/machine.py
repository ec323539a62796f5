"""What this host can hold at most, by which a slip of the finger is told from a large run.

And the devices, callbacks and loggers that a Trainer's arguments name, whatever form a recipe gives them.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch

from lightning_tricks._core.errors import UsageError

_MOST_DEVICES = 1024  # of one host


def host_bytes() -> int:
    """Memory of this host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def most_processes() -> int:
    """Number of processes of one kind that this host can be asked for: eight a core, and 64 at least, for tests."""
    return max(64, 8 * (os.cpu_count() or 1))


def named_devices(settings: Any) -> int | None:
    """The number of devices of one host that a Trainer's arguments name, as 8, `8`, `0,1` or [0, 1].

    None for `auto`, -1 and nothing, which leave it to the machine.

    Raises:
        UsageError: anything else, such as `1e9`, 0 or 2.0, and more than any host has.
    """
    devices = settings.get("devices")
    if devices in (None, "auto", -1, "-1"):
        return None
    words = [word.strip() for word in devices.split(",")] if isinstance(devices, str) else []
    if words and all(word.isdecimal() for word in words if word) and any(words):
        devices = [int(word) for word in words if word] if "," in devices else int(words[0])
    if isinstance(devices, list | tuple) and devices and all(type(one) is int for one in devices):
        return len(devices)
    if type(devices) is int and 0 < devices <= max(_MOST_DEVICES, most_processes()):
        return devices
    raise UsageError(
        f"trainer.devices={devices}: give the number of devices of one host, from 1 to {_MOST_DEVICES}, a list of "
        "their numbers, or auto"
    )


def listed(settings: Any, name: str) -> list[Any]:
    """A Trainer's argument that is one object or several, such as `callbacks`, as a list; empty where none is given."""
    given = settings.get(name) or []
    return list(given) if isinstance(given, list | tuple) else [given]


def devices_here(settings: Mapping[str, Any]) -> int:
    """The number of devices that a run with these arguments takes on this machine where they name none."""
    if settings.get("accelerator") == "cpu" or not torch.accelerator.is_available():
        return 1
    return torch.accelerator.device_count()
