"""Who failed first, told among the processes of a run over one connection each to rank 0.

The system closes the connections of a process that dies, whatever it died of, and keeps those of one that is slow,
stopped or stuck. So an end without a goodbye is a death, on any host, and nothing needs to be asked for meanwhile. A
connection that breaks, for a network that fails or a host that is silent, says nothing of the process behind it.

The process group's own TCPStore cannot do this (measured with torch 2.13). It tells nobody that a client has died, so
that heartbeats would be needed, and a killed process could not be told from a stopped one. When the process that serves
the store is killed, torch prints 19 lines of C++ stack in every rank that waits for a key, before Python hears of it.
"""

import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

CONNECT_SECONDS = 60.0  # how long a rank tries to reach rank 0
_LOOPBACK = "127.0.0.1"
_LONGEST = 65536  # bytes of a message, above which it is none of ours
_SOCKETS: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def _close_in_child() -> None:
    for sock in list(_SOCKETS):
        if (number := sock.detach()) >= 0:  # `close` would wait for the stream that is made of it
            os.close(number)


if hasattr(os, "register_at_fork"):
    # A data worker would hold the connection open after the death of the process that it was forked from.
    os.register_at_fork(after_in_child=_close_in_child)


@dataclass(frozen=True)
class Member:
    """A process of a run."""

    rank: int
    world: int
    host: str
    pid: int

    def gone(self) -> str:
        """The line on its death without a word."""
        return (
            f"rank {self.rank} of {self.world} on {self.host} is gone without a word (process {self.pid}): "
            "killed, or out of memory (dmesg tells)"
        )

    def unwatched(self, error: OSError) -> str:
        """The line on its connection, which broke for a reason of the network's."""
        return f"RankMonitor: the connection of rank {self.rank} on {self.host} broke ({error}): it is not watched now"

    def failed(self, error: BaseException) -> str:
        """The line on its exception."""
        message = str(error).strip()
        first = message.splitlines()[0][:300] if message else ""
        kind = type(error).__name__
        return f"rank {self.rank} of {self.world} on {self.host} failed first: {kind}{': ' if first else ''}{first}"


@dataclass(frozen=True)
class Address:
    """Where rank 0 listens: names it may be reached by, and a word that only this run's ranks know."""

    hosts: tuple[str, ...]
    port: int
    token: str


class Hub(threading.Thread):
    """Rank 0's end of every rank's connection, its own among them: tells all of the first failure.

    Args:
        hosts: names of this host, the best first.
        one_host: whether all ranks run on this host: then no other host can connect.
    """

    def __init__(self, hosts: tuple[str, ...], one_host: bool = False) -> None:
        super().__init__(daemon=True, name="rank-monitor-hub")
        self._server = _listen(one_host)
        self.address = Address(hosts, self._server.getsockname()[1], secrets.token_hex(16))
        self._members: dict[socket.socket, Member | None] = {}
        self._received: dict[socket.socket, bytes] = {}
        self._failure: str | None = None
        self._woken, self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for sock in (self._server, self._woken):
            self._selector.register(sock, selectors.EVENT_READ)

    def close(self) -> None:
        """Say goodbye to all."""
        _send(self._wake, {})

    def run(self) -> None:
        """Serve until `close`."""
        try:
            while self._serve():
                pass
        finally:  # a goodbye also where this code fails: nobody shall take that for a death
            for sock in list(self._members):
                _send(sock, {"bye": True})
                self._drop(sock)
            for last in (self._selector, self._server, self._woken):
                last.close()

    def _serve(self) -> bool:
        for key, _ in self._selector.select():
            if key.fileobj is self._woken:
                return False
            if key.fileobj is self._server:
                self._accept()
            else:
                self._read(key.fileobj)  # type: ignore[arg-type]
        return True

    def _accept(self) -> None:
        try:
            sock, _ = self._server.accept()
        except OSError:  # such as too many open files
            time.sleep(0.1)
            return
        _keep(sock)
        self._members[sock], self._received[sock] = None, b""
        self._selector.register(sock, selectors.EVENT_READ)

    def _read(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(_LONGEST)
        except OSError as error:
            member = self._drop(sock)
            if member is not None:
                say(member.unwatched(error))
            return
        *lines, self._received[sock] = (self._received[sock] + data).split(b"\n")
        for line in lines:
            if self._hear(sock, _parse(line)):
                return
        if not data or len(self._received[sock]) > _LONGEST:
            member = self._drop(sock)
            if member is not None:
                self._tell(member.gone())

    def _hear(self, sock: socket.socket, message: dict[str, Any]) -> bool:
        """Act on what one end has said; True where that was goodbye."""
        if message.get("token") == self.address.token:
            self._members[sock] = Member(**{name: message[name] for name in ("rank", "world", "host", "pid")})
            _send(sock, {"failed": self._failure} if self._failure else {"welcome": True})
        elif self._members[sock] is not None and "failed" in message:
            self._tell(message["failed"])
        elif self._members[sock] is not None and "bye" in message:
            self._drop(sock)
            return True
        return False

    def _tell(self, line: str) -> None:
        if self._failure is None:
            self._failure = line
            for sock, member in list(self._members.items()):
                if member is not None:
                    _send(sock, {"failed": line})

    def _drop(self, sock: socket.socket) -> Member | None:
        del self._received[sock]
        self._selector.unregister(sock)
        sock.close()
        return self._members.pop(sock)


class Connection:
    """A rank's connection to the hub.

    One thread connects and listens; `fail` and `close` may be called from another at any time, also before the hub has
    answered: the message then follows the greeting.

    Args:
        member: this process.
        address: the hub's, as rank 0 has sent it round.
        rank_0: the process of the hub.
    """

    def __init__(self, member: Member, address: Address, rank_0: Member) -> None:
        self.member, self.address, self.rank_0 = member, address, rank_0
        self._lock = threading.Lock()  # held while the connection is made known or a message is sent
        self._sock: socket.socket | None = None
        self._stream: Any = None
        self._first: dict[str, Any] = {}
        self._failed: dict[str, Any] = {}
        self._closed = threading.Event()

    def connect(self) -> bool:
        """Reach the hub, in `CONNECT_SECONDS`; False where that does not succeed, or `close` is called meanwhile."""
        hosts = self.address.hosts if self.member.rank else (_LOOPBACK, *self.address.hosts)
        deadline = time.monotonic() + CONNECT_SECONDS
        while time.monotonic() < deadline and not self._closed.is_set():
            for host in hosts:
                with suppress(OSError):
                    if self._greet(socket.create_connection((host, self.address.port), timeout=20.0)):
                        return True
            self._closed.wait(0.5)
        return False

    def _greet(self, sock: socket.socket) -> bool:
        """Whether it is the hub that answers there."""
        _keep(sock)
        with self._lock:
            if self._closed.is_set():
                sock.close()
                return False
            self._sock = sock  # from here on the hub may know of this process, and `close` must say goodbye to it
            _send(sock, {"token": self.address.token, **vars(self.member)})
            if self._failed:
                _send(sock, self._failed)
        stream = sock.makefile("rb")
        with suppress(OSError):
            self._first = _parse(stream.readline(_LONGEST))
        if self._first.keys() & {"welcome", "failed", "bye"}:
            sock.settimeout(None)
            self._stream = stream
            return True
        with self._lock:
            self._sock = None
            _send(sock, {"bye": True})  # so that a hub which is only slow does not take this for a death
            sock.close()
        return False

    def listen(self) -> str | None:
        """Wait for the first failure of the run; None where all ended in order, or this end was closed."""
        try:
            for message in self._messages():
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
        """Say that this process has failed; who was first, the hub decides."""
        with self._lock:
            self._failed = {"failed": self.member.failed(error)}
            if self._sock is not None:
                _send(self._sock, self._failed)

    def close(self) -> None:
        """Say goodbye. Idempotent."""
        with self._lock:
            self._closed.set()
            if self._sock is not None:
                _send(self._sock, {"bye": True})
                with suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)

    def _messages(self) -> Iterator[dict[str, Any]]:
        yield self._first
        for line in self._stream:
            yield _parse(line)


def _listen(one_host: bool) -> socket.socket:
    """A server on a free port: on the loopback interface for one host, else on all, as torch's own store does."""
    server = None
    with suppress(OSError):
        if one_host:
            server = socket.create_server((_LOOPBACK, 0), backlog=4096)
        elif socket.has_dualstack_ipv6():
            server = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
    server = server or socket.create_server(("", 0), backlog=4096)
    _SOCKETS.add(server)
    return server


def say(line: str) -> None:
    """Print a line where errors go, at once and in one piece, as all ranks may do so at the same moment."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _keep(sock: socket.socket) -> None:
    """Have the system ask a silent peer's system now and then, so that nothing in between forgets the connection."""
    _SOCKETS.add(sock)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 9)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _send(sock: socket.socket, message: dict[str, Any]) -> None:
    with suppress(OSError):  # its death is noticed where it is listened to
        sock.sendall(json.dumps(message).encode() + b"\n")


def _parse(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}
