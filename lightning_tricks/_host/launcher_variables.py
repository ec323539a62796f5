"""Check the environment variables by which torchrun, SLURM or a shell tells a process its place. Imports no torch.

Lightning reads the rank while it is imported, so this comes before.
"""

from collections.abc import Mapping

from lightning_tricks._core.errors import UsageError

_NUMBERS = (
    *("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "MASTER_PORT"),
    *("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
)
_BELOW = (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
_PORTS = 65536


def check_launcher_variables(environment: Mapping[str, str]) -> None:
    """Refuse values that no launcher sets: each would be a traceback, or a process that waits for others in vain.

    Raises:
        UsageError: a variable is no whole number, a rank lies beyond the number of processes, a port does not exist.
    """
    numbers: dict[str, int] = {}
    for name in _NUMBERS:
        if (value := environment.get(name)) is None:
            continue
        if not (value.isascii() and value.isdecimal()):
            raise UsageError(
                f"{name}={value!r}: this environment variable must be a whole number: start with torchrun, which sets "
                f"it, or `unset {name}`"
            )
        numbers[name] = int(value)
    for rank, size in _BELOW:
        if rank in numbers and size in numbers and numbers[rank] >= numbers[size]:
            raise UsageError(
                f"{rank}={numbers[rank]}, {size}={numbers[size]}: ranks count from 0 to {size} - 1: start with "
                f"torchrun, which sets these environment variables, or `unset {rank} {size}`"
            )
    if (port := numbers.get("MASTER_PORT", 0)) >= _PORTS:
        raise UsageError(
            f"MASTER_PORT={port}: ports go up to {_PORTS - 1}: set this environment variable to a free one"
        )
