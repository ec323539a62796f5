"""What this host can hold at most, by which a slip of the finger is told from a large run; the devices of a recipe."""

import os
from collections.abc import Mapping
from typing import Any

import torch


def host_bytes() -> int:
    """Memory of this host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def most_processes() -> int:
    """Number of processes of one kind that this host can be asked for: eight a core, and 64 at least, for tests."""
    return max(64, 8 * (os.cpu_count() or 1))


def named_devices(settings: Mapping[str, Any]) -> int | None:
    """The number of devices of one host that a Trainer's arguments name, as 8, `8`, `0,1` or [0, 1].

    None for `auto`, -1 and nothing, which leave it to the machine.
    """
    devices = settings.get("devices")
    if isinstance(devices, str):
        words = [word for word in devices.split(",") if word.strip()]
        devices = words if "," in devices else int(devices) if devices.isdecimal() else None
    if isinstance(devices, list | tuple):
        return len(devices)
    return devices if isinstance(devices, int) and devices > 0 else None


def devices_here(settings: Mapping[str, Any]) -> int:
    """The number of devices that a run with these arguments takes on this machine where they name none."""
    if settings.get("accelerator") == "cpu" or not torch.accelerator.is_available():
        return 1
    return torch.accelerator.device_count()
