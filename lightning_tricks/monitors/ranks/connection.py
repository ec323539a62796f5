"""A rank's connection to the hub of its run, and the messages that go over it.

Each rank holds one TCP connection to rank 0. The operating system closes the connections of a process that dies, for
whatever reason, and keeps those of a process that is slow, stopped or stuck. So a connection that is closed without a
goodbye means that the process has died, on any host, and no heartbeats are needed. A connection that breaks because of
the network, or because a host does not answer, says nothing about the process behind it.

torch's TCPStore does not report that a client has died. It would need heartbeats, which cannot tell a killed process
from a stopped one.
"""

import itertools
import json
import os
import socket
import sys
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

CONNECT_SECONDS = 60.0  # how long a rank tries to reach rank 0
LONGEST = 65536  # bytes; a longer message is not from a rank of this run
LOOPBACK = "127.0.0.1"
SOCKETS: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()  # a process forked from this one closes them


def _close_in_child() -> None:
    for sock in list(SOCKETS):
        if (number := sock.detach()) >= 0:  # `close` would wait for the stream that is made of it
            os.close(number)


if hasattr(os, "register_at_fork"):  # a data worker would hold the connection open after its parent's death
    os.register_at_fork(after_in_child=_close_in_child)


@dataclass(frozen=True)
class Member:
    """A process of a run."""

    rank: int
    world: int
    host: str
    pid: int

    def gone(self) -> str:
        """The line that says that it has died without a goodbye."""
        return (
            f"rank {self.rank} of {self.world} on {self.host} is gone without a word (process {self.pid}): "
            "killed, or out of memory (dmesg tells)"
        )

    def unwatched(self, error: OSError) -> str:
        """The line that says that the network broke its connection."""
        return f"RankMonitor: the connection of rank {self.rank} on {self.host} broke ({error}): it is not watched now"

    def failed(self, error: BaseException) -> str:
        """The line that says that it failed with an exception."""
        first = (str(error).strip().splitlines() or [""])[0][:300]
        message = f"{type(error).__name__}: {first}" if first else type(error).__name__
        return f"rank {self.rank} of {self.world} on {self.host} failed first: {message}"


@dataclass(frozen=True)
class Address:
    """The address of rank 0: names of its host, its port, and a token that only the ranks of this run know."""

    hosts: tuple[str, ...]
    port: int
    token: str


class Connection:
    """The connection of `member`, this process, to the hub at `address`, which runs in the process `rank_0`.

    One thread connects and listens. Another thread may call `fail` and `close` at any time: before the hub has
    answered, the message is kept, and sent after the greeting.
    """

    def __init__(self, member: Member, address: Address, rank_0: Member) -> None:
        self.member, self.address, self.rank_0 = member, address, rank_0
        self._lock = threading.Lock()  # held while `_sock` is set or a message is sent
        self._sock: socket.socket | None = None
        self._stream: Any = None
        self._first: dict[str, Any] = {}
        self._failed: dict[str, Any] = {}
        self._closed = threading.Event()

    def connect(self) -> bool:
        """Reach the hub within `CONNECT_SECONDS`; False if that fails, or if `close` is called meanwhile."""
        hosts = self.address.hosts if self.member.rank else (LOOPBACK, *self.address.hosts)
        deadline = time.monotonic() + CONNECT_SECONDS
        while time.monotonic() < deadline and not self._closed.is_set():
            for host in hosts:
                with suppress(OSError):
                    if self._greet(socket.create_connection((host, self.address.port), timeout=20.0)):
                        return True
            self._closed.wait(0.5)
        return False

    def _greet(self, sock: socket.socket) -> bool:
        """Greet the server behind `sock`; returns whether it is the hub."""
        keep_alive(sock)
        with self._lock:
            if self._closed.is_set():
                sock.close()
                return False
            self._sock = sock  # from here on the hub may know of this process, and `close` must say goodbye to it
            send(sock, {"token": self.address.token, **vars(self.member)})
            if self._failed:
                send(sock, self._failed)
        stream = sock.makefile("rb")
        with suppress(OSError):
            self._first = parse(stream.readline(LONGEST))
        if self._first.keys() & {"welcome", "failed", "bye"}:
            sock.settimeout(None)
            self._stream = stream
            return True
        with self._lock:
            self._sock = None
            send(sock, {"bye": True})  # so that a hub which is only slow does not take this for a death
            sock.close()
        return False

    def listen(self) -> str | None:
        """Wait for the first failure of the run, and return its line; None if all ended in order, or after `close`."""
        try:
            for message in itertools.chain([self._first], map(parse, self._stream)):
                if "failed" in message:
                    return str(message["failed"])
                if "bye" in message:
                    return None
        except (OSError, ValueError) as error:  # ValueError: closed while it is read
            if isinstance(error, OSError) and not self._closed.is_set():
                say(self.member.unwatched(error))
            return None
        return None if self._closed.is_set() else self.rank_0.gone()

    def fail(self, error: BaseException) -> None:
        """Tell the hub that this process has failed; the hub decides which rank was first."""
        with self._lock:
            self._failed = {"failed": self.member.failed(error)}
            if self._sock is not None:
                send(self._sock, self._failed)

    def close(self) -> None:
        """Say goodbye. Idempotent."""
        with self._lock:
            self._closed.set()
            if self._sock is not None:
                send(self._sock, {"bye": True})
                with suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)


def say(line: str) -> None:
    """Print a line to stderr, at once and in one piece, because all ranks may print at the same moment."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def open_server(one_host: bool) -> socket.socket:
    """A server socket on a free port: on the loopback interface for one host, else on all, as torch's own store."""
    server = None
    with suppress(OSError):
        if one_host:
            server = socket.create_server((LOOPBACK, 0), backlog=4096)
        elif socket.has_dualstack_ipv6():
            server = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
    server = server or socket.create_server(("", 0), backlog=4096)
    SOCKETS.add(server)
    return server


def keep_alive(sock: socket.socket) -> None:
    """Turn on TCP keep-alive packets, so that no router in between forgets an idle connection."""
    SOCKETS.add(sock)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 9)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def send(sock: socket.socket, message: dict[str, Any]) -> None:
    """Send a message; it is no error if the peer is gone."""
    with suppress(OSError):  # the thread that reads from the peer notices its death
        sock.sendall(json.dumps(message).encode() + b"\n")


def parse(line: bytes) -> dict[str, Any]:
    """The message in a line; empty if the line is no message of ours."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}
