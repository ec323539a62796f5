"""Run a function in two gloo processes, as the tests of distributed code do."""

import contextlib
import os
import random
import socket
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp


def free_port() -> int:
    """A port that nobody listens on, below those that a system hands out by itself: none takes it in the meantime."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


def _enter(rank: int, function: Callable[..., None], world: int, port: int, args: tuple[Any, ...]) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank), NODE_RANK="0", RANK=str(rank),
        WORLD_SIZE=str(world), OMP_NUM_THREADS="1",
    )  # fmt: skip
    os.environ.pop("PL_GLOBAL_SEED", None)  # of an earlier test: strategies would seed anew from it
    import torch

    torch.set_num_threads(1)
    function(rank, *args)
    # some torch versions abort in their own teardown after all work is done
    os._exit(0)


def run(function: Callable[..., None], *args: Any, world: int = 2) -> None:
    """Call `function(rank, *args)` in `world` processes; a failure in one is raised here."""
    mp.start_processes(_enter, args=(function, world, free_port(), args), nprocs=world, start_method="spawn")
