"""Run a function in two or more gloo processes, as the tests of distributed code do.

They are forked from a server that has imported Lightning, the collection and the tests (`fork_server`): a start
costs a tenth of a second in place of eight seconds of importing.
"""

import contextlib
import multiprocessing
import os
import random
import socket
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp
from torch.multiprocessing import ProcessContext

PRELOADED = ["lightning.pytorch", "torch.distributed.tensor", "torch.distributed.fsdp", "lightning_tricks.cli"]


LAUNCHED = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "PL_GLOBAL_SEED")


def free_port() -> int:
    """A port that nobody listens on, below those that a system hands out by itself: none takes it in the meantime."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


def _enter(rank: int, function: Callable[..., None], environment: dict[str, str], args: tuple[Any, ...]) -> None:
    os.environ.clear()  # that of the server is the one in which the first test started it
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    import torch

    torch.set_num_threads(1)
    function(rank, *args)
    # some torch versions abort in their own teardown after all work is done
    os._exit(0)


def _enter_alone(_: int, function: Callable[..., None], environment: dict[str, str], args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment, OMP_NUM_THREADS="1")
    function(*args)
    os._exit(0)


def start(function: Callable[..., None], *args: Any, world: int = 2) -> ProcessContext:
    """Start `function(rank, *args)` in `world` processes, which `end` waits for: several may run beside each other."""
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment.update(NODE_RANK="0", WORLD_SIZE=str(world), OMP_NUM_THREADS="1")
    environment.pop("PL_GLOBAL_SEED", None)  # of an earlier test: strategies would seed anew from it
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    args = (function, environment, args)
    return mp.start_processes(_enter, args=args, nprocs=world, join=False, start_method="forkserver")


def end(started: ProcessContext) -> None:
    """Wait for processes that were started; a failure in one is raised here."""
    while not started.join():
        pass


def start_alone(function: Callable[..., None], *args: Any) -> ProcessContext:
    """Start `function(*args)` in one process that belongs to no group and may start others; `end` waits for it."""
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    return mp.start_processes(_enter_alone, args=(function, environment, args), join=False, start_method="forkserver")


def run(function: Callable[..., None], *args: Any, world: int = 2) -> None:
    """Call `function(rank, *args)` in `world` processes; a failure in one is raised here."""
    end(start(function, *args, world=world))
