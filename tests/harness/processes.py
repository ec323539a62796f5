"""Functions in processes of their own: two or more gloo ranks, or one process; several runs beside each other.

They are forked from a copy of pytest's own process, which has imported Lightning, the collection and the tests: a start
costs a tenth of a second in place of eight seconds of importing.
"""

import contextlib
import faulthandler
import math
import multiprocessing
import os
import random
import shutil
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from lightning_tricks.accounting import device_speed

PRELOADED = ["lightning.pytorch", "torch.distributed.tensor", "torch.distributed.fsdp", "lightning_tricks.cli"]


LAUNCHED = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "PL_GLOBAL_SEED")


AHEAD = 3  # runs that go on beside the one that is waited for


GIVEN: set[int] = set()  # ports that this process has been told


def free_port() -> int:
    """A port at which nobody listens, on any address, and which no other test of this session is told.

    It lies below those that a system hands out by itself, wherever these begin, so that none takes it in the meantime.
    """
    handed_out = Path("/proc/sys/net/ipv4/ip_local_port_range")
    above = int(handed_out.read_text().split()[0]) if handed_out.exists() else 32_768
    worker, workers = (
        int(os.environ.get(f"PYTEST_XDIST_{name}", "").lstrip("gw") or 0) for name in ("WORKER", "WORKER_COUNT")
    )
    while True:
        port = random.SystemRandom().randrange(15_000, max(above, 16_000))
        if port in GIVEN or (workers and port % workers != worker):
            continue
        with contextlib.suppress(OSError), socket.create_server(("", port), family=socket.AF_INET):
            GIVEN.add(port)
            return port


def _enter(
    rank: int,
    function: Callable[..., Any],
    environment: dict[str, str],
    fast_bf16: bool,
    args: tuple[Any, ...],
    folder: str | None,
) -> None:
    """Call the function as a rank of a group, which has a folder for what its ranks return, or alone."""
    os.environ.clear()  # that of the server is the one in which the first test started it
    os.environ.update(environment, OMP_NUM_THREADS="1")
    # where bf16 is about as fast as fp32, a measurement of its own could tell each process something else
    device_speed.bf16_time_ratio = lambda threads: 0.0 if fast_bf16 else math.inf
    if folder is None:
        function(*args)
    else:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        torch.set_num_threads(1)
        torch.save(function(rank, *args), os.path.join(folder, str(rank)))
    # some torch versions abort in their own teardown after all work is done
    os._exit(0)


def start(function: Callable[..., Any], *args: Any, world: int = 2) -> Any:
    """Start `function(rank, *args)` in `world` processes, which `end` waits for: several may run beside each other."""
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment.update(NODE_RANK="0", WORLD_SIZE=str(world))
    environment.pop("PL_GLOBAL_SEED", None)  # of an earlier test: strategies would seed anew from it
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    folder = tempfile.mkdtemp(prefix="returned-")
    own = (function, environment, device_speed.has_fast_bf16("cpu"), args, folder)
    started: Any = mp.start_processes(_enter, args=own, nprocs=world, join=False, start_method="forkserver")
    started.returned = folder
    return started


def start_alone(function: Callable[..., Any], *args: Any) -> Any:
    """Start `function(*args)` in one process that belongs to no group and may start others; `end` waits for it."""
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    own = (function, environment, device_speed.has_fast_bf16("cpu"), args, None)
    return mp.start_processes(_enter, args=own, join=False, start_method="forkserver")


def end(started: Any) -> list[Any]:
    """Wait for processes that were started; a failure in one is raised here. Returns what each rank returned."""
    folder = getattr(started, "returned", None)
    try:
        while not started.join():
            pass
        paths = [os.path.join(folder, str(rank)) for rank in range(len(started.processes))] if folder else []
        return [torch.load(path, weights_only=False) if os.path.exists(path) else None for path in paths]
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def run(function: Callable[..., Any], *args: Any, world: int = 2) -> list[Any]:
    """What `function(rank, *args)` returns in each of `world` processes; a failure in one is raised here."""
    return end(start(function, *args, world=world))


def ddp_pickled() -> Any:
    """Lightning's `ddp_spawn`, whose process is forked from the server where it can be: it gets a pickle as well."""
    from lightning_tricks._trainer.lightning import pl

    return pl.strategies.DDPStrategy(start_method="spawn" if torch.cuda.is_available() else "forkserver")


class Beside:
    """Waits for a run by its name, and gives what it returned or raised. It has started the next ones in order before.

    Args:
        runs: by name, in the order of the tests that ask for them: a function that starts the run.
        wait: waits for what the function returned.
    """

    def __init__(self, runs: dict[str, Callable[[], Any]], wait: Callable[[Any], Any]) -> None:
        self.runs, self.wait = runs, wait
        self.started: dict[str, Any] = {}
        self.ended: dict[str, Future] = {}

    def __call__(self, name: str) -> Any:
        names = list(self.runs)
        place = names.index(name)
        for each in names[place : place + 1 + AHEAD]:
            if each not in self.started:
                self.started[each] = self.runs[each]()
        if name not in self.ended:
            self.ended[name] = Future()
            try:
                self.ended[name].set_result(self.wait(self.started[name]))
            except Exception as error:
                self.ended[name].set_exception(error)
        return self.ended[name].result()


@contextlib.contextmanager
def _all_ended(beside: Beside) -> Iterator[Beside]:
    yield beside
    for name in beside.started.keys() - beside.ended.keys():  # which no test of this session has asked for
        with contextlib.suppress(Exception):
            beside.wait(beside.started[name])


@contextlib.contextmanager
def processes(runs: dict[str, tuple[Any, ...]]) -> Iterator[Beside]:
    """Runs of `start_alone`, by the function and its arguments."""
    with _all_ended(Beside({name: partial(start_alone, *run) for name, run in runs.items()}, end)) as beside:
        yield beside


@contextlib.contextmanager
def threads(runs: dict[str, tuple[Any, ...]]) -> Iterator[Beside]:
    """Calls of a function that waits for programs, by the function and its arguments."""
    with ThreadPoolExecutor(1 + AHEAD) as pool:
        starts = {name: partial(pool.submit, *run) for name, run in runs.items()}
        with _all_ended(Beside(starts, Future.result)) as beside:
            yield beside


def start_server() -> None:
    """Let `multiprocessing.get_context("forkserver")` fork from a copy of this process as it is now.

    Python starts its server as an interpreter that imports everything anew, and each process that it forks then imports
    the test file and what this needs. This one is forked when all tests are collected: nothing is imported twice. It
    does what `ForkServer.ensure_running` of CPython 3.11 to 3.13 does, with a fork in place of a new interpreter.
    """
    server = forkserver._forkserver
    if sys.platform != "linux" or sys.version_info >= (3, 14) or server._forkserver_pid is not None:
        return
    resource_tracker.ensure_running()
    address = connection.arbitrary_address("AF_UNIX")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        alive_r, alive_w = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of xdist's thread, which the copy has no use for
            pid = os.fork()
        if pid == 0:
            _serve(listener.fileno(), alive_r)
        os.close(alive_r)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, alive_w, pid


def _serve(listener: int, alive: int) -> None:
    """Be the server until the tests are done, without pytest's streams and files."""
    try:
        faulthandler.disable()
        sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2 and number not in (listener, alive, nowhere):
                # not closed: objects of pytest still write to these, and a number that is free would be given out again
                os.dup2(nowhere, number)
        forkserver.main(listener, alive, [])
    finally:
        os._exit(0)
