"""For every test: one torch thread a worker, no network, no process group of an earlier test, and a little text."""

import argparse
import gc
import inspect
import logging
import os
import pathlib
import signal
import sys
import typing
from collections.abc import Iterator
from typing import Any

# before anything imports torch or a tokenizer
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# of a shell, of pytest-xdist's workers or of a CI: tests say how wide a terminal is, and whether it shows colours
os.environ.pop("COLUMNS", None)
os.environ.pop("FORCE_COLOR", None)
os.environ.pop("NO_COLOR", None)

import pytest
from harness import preloaded

# What a Trainer leaves behind; a process that a later test starts would take up the port and the seed.
LEFT_BEHIND = (
    "GROUP_RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "PL_GLOBAL_SEED", "PL_SEED_WORKERS", "RANK",
    "WORLD_SIZE",
)  # fmt: skip


# A shell that starts a command in the background has it ignore Ctrl-C, nohup has it ignore SIGHUP, and so would
# each process that a test starts.
for _signal, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGTERM, signal.SIG_DFL),
):
    if signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, _handler)

STARTS = ("subprocess.Popen", "os.fork", "os.posix_spawn")
may_start = True  # whether the running test may start processes


def _refuse_starts(event: str, args: tuple[Any, ...]) -> None:
    """Have a test that starts a process fail unless it is marked: such tests take most of the time of all."""
    asks_a_server = event == "socket.connect" and isinstance(args[1], str | bytes)
    if not may_start and (event in STARTS or asks_a_server):
        raise AssertionError("this test starts a process: mark it `long`")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """Only a test that is marked `long` or `pages` starts processes; on a GPU the compiler does, in any test."""
    global may_start
    may_start = any(map(item.get_closest_marker, ("long", "pages", "gpu")))
    try:
        return (yield)
    finally:
        may_start = True


def pytest_configure(config: pytest.Config) -> None:
    """Set up a process that runs tests; one that has workers for it needs nothing of what takes long to import."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    import hypothesis
    import torch

    sys.addaudithook(_refuse_starts)
    torch.set_num_threads(1)
    preloaded.remember_entry_points()
    hypothesis.settings.register_profile("any machine", deadline=None)  # a busy one may take a second for any example
    hypothesis.settings.load_profile("any machine")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[Any]:
    """What was imported to collect the tests is imported in the processes that they start, and is no garbage."""
    if not session.config.pluginmanager.has_plugin("dsession"):  # which runs no tests, but has them run
        import torch
        from harness import processes

        gc.collect()
        gc.freeze()
        if not torch.cuda.is_available():  # CUDA, once asked, cannot be used in a fork
            capture = session.config.pluginmanager.getplugin("capturemanager")
            preloaded.measure_the_cpu()
            capture.resume_global_capture()  # as in a test: what the processes print is no part of the report
            processes.start_server()
            capture.suspend_global_capture()
    return (yield)


@pytest.fixture(autouse=True)
def _nothing_distributed_left() -> Iterator[None]:
    for name in LEFT_BEHIND:  # of what a whole file shares, too
        os.environ.pop(name, None)
    if lightning := sys.modules.get("lightning.pytorch.utilities.rank_zero"):
        lightning.rank_zero_only.rank = 0  # a strategy sets it for good
        lightning.rank_zero_module.log = logging.getLogger(lightning.__name__)  # pytorch_lightning puts its own there
    yield
    torch = sys.modules["torch"]
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name in LEFT_BEHIND:
        os.environ.pop(name, None)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Any]:
    """A server for `harness.s3_server.prepare`, which skips where a library of it is missing."""
    from harness.s3_server import Server

    server = Server()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Some 200 kB of Python source as one text file."""
    path = tmp_path_factory.mktemp("text") / "source.txt"
    path.write_text("\n\n".join(inspect.getsource(module) for module in (argparse, pathlib, typing)))
    return str(path)
