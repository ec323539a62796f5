"""The identity of a process, when it started, and the place that a launcher gives it. Imports no torch."""

import hashlib
import os
import re
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_tricks._core.errors import UsageError

_PROC = Path("/proc")
_imported = time.monotonic()


def start_ticks(process: int | None = None) -> int | None:
    """The start of a process in clock ticks since the system's start; None where the system does not tell it.

    Some sandboxes give every process the start 0, which is none.

    Args:
        process: its id; None for this process.

    Source: `starttime` in https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html.
    """
    try:
        text = (_PROC / str(process or "self") / "stat").read_text()
        ticks = int(text.rpartition(")")[2].split()[19])  # the 22nd field; the program's name may hold spaces
    except (OSError, ValueError, IndexError):  # another system
        return None
    return ticks if ticks > 0 else None


def process_age() -> float:
    """Seconds since this process started, exact to a clock tick (10 ms); where not known, since this file's import."""
    ticks = start_ticks()
    if ticks is not None and hasattr(time, "CLOCK_BOOTTIME"):
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        if age >= 0:
            return age
    return time.monotonic() - _imported


@dataclass(frozen=True)
class Process:
    """A process of a run; by the time of its start, in clock ticks, it is told from a later one with its id."""

    rank: int
    world: int
    host: str
    pid: int
    started: int | None = None

    @property
    def name(self) -> str:
        """The rank, for a line."""
        return f"rank {self.rank} of {self.world} on {self.host}"

    def kill(self) -> None:
        """Kill it if it runs on this host and is still the same."""
        if self.host == socket.gethostname() and self.started and start_ticks(self.pid) == self.started:
            with suppress(OSError):
                os.kill(self.pid, 9)


def this_process(rank: int, world: int) -> Process:
    """The identity of this process."""
    return Process(rank, world, socket.gethostname(), os.getpid(), start_ticks())


def process_tag() -> str | None:
    """This process in a file's name, such as `3f1c2a-171-8812`: the system it runs on, its id and its start.

    None where the system does not tell who it is, as outside Linux.
    """
    system = _system()
    return None if system is None else f"{system}-{os.getpid()}-{start_ticks() or 0}"


def has_ended(name: str) -> bool:
    """Whether a file's name ends in `.<tag>.<anything>` of a process that certainly runs no more.

    Never of one on another host, in another container or before a restart of this host: nothing is known of these.
    """
    found = re.search(r"\.([0-9a-f]+)-(\d+)-(\d+)\.\w+$", name)
    if found is None or found[1] != _system():
        return False
    process, started = int(found[2]), int(found[3])
    try:
        os.kill(process, 0)  # asks only whether it is there
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False  # of another user, so it is there
    now = start_ticks(process)
    return bool(started and now) and started != now  # a later process got its id


def _system() -> str | None:
    """The running kernel and its namespace of process ids, in which an id and a start name one process."""
    try:
        kernel = (_PROC / "sys/kernel/random/boot_id").read_text()
        namespace = os.readlink(_PROC / "self/ns/pid")
    except OSError:
        return None
    return hashlib.sha256(f"{kernel}{namespace}".encode()).hexdigest()[:12]


# ---- the environment variables by which torchrun, SLURM or a shell tells a process its place. Lightning reads the rank
# while it is imported, so they are checked before.

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
