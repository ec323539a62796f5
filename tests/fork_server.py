"""The fork server of `multiprocessing` as a copy of the process that runs the tests.

Python starts it as an interpreter that imports everything anew, and each process that it forks then imports the test
file and what this needs. Here it is forked when all tests are collected: nothing is imported twice.
"""

import faulthandler
import os
import socket
import sys
import warnings
from multiprocessing import connection, forkserver, resource_tracker


def start() -> None:
    """Let `multiprocessing.get_context("forkserver")` fork from a copy of this process as it is now.

    It does what `ForkServer.ensure_running` of CPython 3.11 to 3.13 does, with a fork in place of a new interpreter.
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
