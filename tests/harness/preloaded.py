"""A `python` for the tests of command lines: it starts at once, with torch, Lightning and the collection imported.

`python()` is a program that takes the place of `sys.executable`: a small proxy that asks a server, which has imported
everything, to fork a process for its command line. The process has the proxy's arguments, environment, folder, network
namespace and standard streams, and `sys.executable` leads to the proxy again, so that launchers start their children in
the same way. The proxy hands signals on and ends as the process does; when the proxy is killed, so is the process.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import importlib.metadata
import json
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

# for a path with a blank, which the first line of a script cannot name, a line that both the shell and Python read
PROXY = """#!/bin/sh
'''exec' {quoted} -IS "$0" "$@"
' '''
import os, signal, socket, sys

args = sys.argv[2:] if sys.argv[1] in ("-u", "-P") else sys.argv[1:]
if args[0] not in ("-m", "-c") and not os.path.isfile(args[0]):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])  # not a command line of ours
import json
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = json.dumps([args, dict(os.environ), os.getcwd()]).encode()
network = os.open("/proc/self/ns/net", os.O_RDONLY)
socket.send_fds(server, [b"%08d" % len(request)], [0, 1, 2, network])
server.sendall(request)
pid = int(server.recv(8))
def hand_on(number, _):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it has ended, and its status is on the way
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, hand_on)
status = int(server.recv(8) or 9)
if os.WIFSIGNALED(status):
    if os.WTERMSIG(status) != signal.SIGKILL:
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
    os.kill(os.getpid(), os.WTERMSIG(status))
os._exit(os.waitstatus_to_exitcode(status))
"""


COLLECTION = ("torch.distributed.run", "torch.distributed.tensor", "lightning_tricks.cli")


FAILED = "failed"  # in a server's folder: the error that ended it


@functools.cache
def python(*imported: str) -> str:
    """Path of the program. Its server starts with the first call, and ends with this process.

    Args:
        *imported: modules that the server imports in place of `COLLECTION`. With "pytorch_lightning" alone, a program
            decides for itself whether it imports the collection before or after it.
    """
    own = Path(tempfile.mkdtemp(prefix="preloaded-"))
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    program, quoted = own / "python", shlex.quote(sys.executable)
    program.write_text(PROXY.format(quoted=quoted, python=sys.executable, address=str(own / "socket")))
    program.chmod(0o700)
    wanted = json.dumps([str(own), imported or COLLECTION])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.Popen([sys.executable, __file__, wanted], stdin=subprocess.PIPE, env=environment)
    while not (own / "socket").exists():
        if (own / FAILED).exists():
            raise ImportError((own / FAILED).read_text())
        select.select([], [], [], 0.02)
    return str(program)


def import_all(own: Path, modules: list[str]) -> None:
    """Import what a server is asked for; its folder tells why it could not."""
    for module in modules:
        try:
            importlib.import_module(module)
        except BaseException as error:
            new = own / f"{FAILED}.part"
            new.write_text(f"a server of {' '.join(modules)} ended: {error!r}")
            new.rename(own / FAILED)
            raise


def left_over(folder: Path) -> list[int]:
    """The processes whose working folder is `folder`: those of a run in it that have not ended."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/cwd") == str(folder):
                found.append(int(pid))
    return found


def serve(address: str) -> list[str]:
    """Fork a process for each proxy; returns only there, with the arguments of its command line."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    proxies: dict[int, socket.socket] = {}  # by the process
    while True:
        ready = select.select([listener, sys.stdin, *proxies.values()], [], [], 0.02 if proxies else None)[0]
        for pid, proxy in list(proxies.items()):
            if proxy in ready or sys.stdin in ready:  # the proxy is gone, or the tests are
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with contextlib.suppress(OSError):
                    proxy.sendall(b"%08d" % status)
                proxies.pop(pid).close()
        if sys.stdin in ready:
            os._exit(0)
        if listener not in ready:
            continue
        proxy = listener.accept()[0]
        request, fds = receive(proxy)
        if not request:  # it was killed before it had asked for anything
            proxy.close()
            for fd in fds:
                os.close(fd)
            continue
        pid = os.fork()
        if pid == 0:
            for other in (listener, proxy, *proxies.values()):
                other.close()
            return become(json.loads(request), fds)
        for fd in fds:
            os.close(fd)
        proxies[pid] = proxy
        with contextlib.suppress(OSError):  # it was killed meanwhile, which the loop will see
            proxy.sendall(b"%08d" % pid)


def receive(proxy: socket.socket) -> tuple[bytes, list[int]]:
    """The request of a proxy and its descriptors; empty if the proxy ends before all is sent."""
    length, fds, *_ = socket.recv_fds(proxy, 8, 4)
    request = b""
    while len(request) < int(length or 0):
        part = proxy.recv(int(length) - len(request))
        if not part:
            return b"", fds
        request += part
    return request, fds


def remember_entry_points() -> None:
    """Each Trainer asks every installed package for callbacks, which takes longer than the rest of its constructor.

    To be called before Lightning is imported, which keeps the function itself.
    """
    importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)


def measure_the_cpu() -> None:
    """Once for all processes that are forked from this one; MFUMonitor would have each of them do so."""
    import torch

    from lightning_tricks.accounting.device_speed import device_peak

    device_peak(torch.device("cpu"), "32-true")


def build_a_recipe() -> None:
    """Once for all processes: what jsonargparse finds out about classes, which takes long, it keeps."""
    from lightning_tricks.cli import load_recipe

    recipe = Path(__file__).parents[2] / "recipes/tiny.yaml"
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        load_recipe("--config", str(recipe), "--seed_everything=false")


def name_no_methods() -> None:
    """Have torchrun record its rendezvous without the names of methods: for each it goes through all modules.

    With as many as here that takes 0.2 s, in which another host changes the state of the rendezvous. On a busy machine
    a host then never joins.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    dynamic_rendezvous.get_method_name = lambda depth=2: ""


def become(request: Any, fds: list[int]) -> list[str]:
    """Take over the standard streams, the network, the environment and the folder of a proxy."""
    import ctypes

    args, environment, folder = request
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
    ctypes.CDLL(None).setns(fds[3], 0)  # without the rights to it, the namespace is the same
    for fd in fds:
        os.close(fd)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.executable = PYTHON
    first = folder if args[0] in ("-m", "-c") else str(Path(args[0]).resolve().parent)
    sys.path[:1] = [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=True)
    for name in ("lightning.fabric.utilities.rank_zero", "lightning_fabric.utilities.rank_zero"):
        if rank_zero := sys.modules.get(name):
            rank_zero.rank_zero_only.rank = rank_zero._get_rank() or 0  # read when Lightning is imported
    return args


def run(args: list[str]) -> int:
    """Carry out a command line as Python does, and give its exit code."""
    sys.argv = {"-m": args[1:], "-c": ["-c", *args[2:]]}.get(args[0], args)
    try:
        if args[0] == "-m":
            runpy.run_module(args[1], run_name="__main__", alter_sys=True)
        elif args[0] == "-c":
            exec(compile(args[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_path(args[0], run_name="__main__")
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


if __name__ == "__main__":
    remember_entry_points()
    sys.path.insert(1, str(Path(__file__).parents[2]))  # the collection beside these tests, as in pytest's own process
    folder, modules = json.loads(sys.argv[1])
    own = Path(folder)
    PYTHON = str(own / "python")
    import_all(own, modules)
    if "lightning_tricks.cli" in sys.modules:
        measure_the_cpu()
        build_a_recipe()
        name_no_methods()
    gc.freeze()
    code = run(serve(str(own / "socket")))
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)  # the rest of Python's way out, which takes every module apart, takes longer than a short run
