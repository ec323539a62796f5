"""Run a function in two or more gloo processes, as the tests of distributed code do.

The processes are forked from a server that has imported Lightning and the collection already: a start costs a tenth of
a second in place of eight seconds of importing.
"""

import contextlib
import multiprocessing
import os
import random
import socket
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

PRELOADED = ["lightning.pytorch", "torch.distributed.tensor", "torch.distributed.fsdp", "lightning_tricks.cli"]


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


def run(function: Callable[..., None], *args: Any, world: int = 2) -> None:
    """Call `function(rank, *args)` in `world` processes; a failure in one is raised here."""
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment.update(NODE_RANK="0", WORLD_SIZE=str(world), OMP_NUM_THREADS="1")
    environment.pop("PL_GLOBAL_SEED", None)  # of an earlier test: strategies would seed anew from it
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    mp.start_processes(_enter, args=(function, environment, args), nprocs=world, start_method="forkserver")
