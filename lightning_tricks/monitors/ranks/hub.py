"""The server of RankMonitor on rank 0: every rank connects to it, and it tells all of them of the first failure."""

import secrets
import selectors
import socket
import threading
import time
from typing import Any

from lightning_tricks.monitors.ranks.connection import (
    LONGEST,
    Address,
    Member,
    keep_alive,
    open_server,
    parse,
    say,
    send,
)


class Hub(threading.Thread):
    """A thread on rank 0 that serves the connections of all ranks, its own too: it tells them of the first failure.

    Args:
        hosts: names of this host, the best first.
        one_host: whether all ranks run on this host; then no other host can connect.
    """

    def __init__(self, hosts: tuple[str, ...], one_host: bool = False) -> None:
        super().__init__(daemon=True, name="rank-monitor-hub")
        self._server = open_server(one_host)
        self.address = Address(hosts, self._server.getsockname()[1], secrets.token_hex(16))
        self._members: dict[socket.socket, Member | None] = {}
        self._received: dict[socket.socket, bytes] = {}
        self._failure: str | None = None
        self._woken, self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for sock in (self._server, self._woken):
            self._selector.register(sock, selectors.EVENT_READ)

    def close(self) -> None:
        """Say goodbye to all, and end."""
        send(self._wake, {})

    def run(self) -> None:
        """Serve until `close`."""
        try:
            while self._serve():
                pass
        finally:  # a goodbye also if this code fails: no rank must take that for a death
            for sock in list(self._members):
                send(sock, {"bye": True})
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
        keep_alive(sock)
        self._members[sock], self._received[sock] = None, b""
        self._selector.register(sock, selectors.EVENT_READ)

    def _read(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(LONGEST)
        except OSError as error:
            member = self._drop(sock)
            if member is not None:
                say(member.unwatched(error))
            return
        *lines, self._received[sock] = (self._received[sock] + data).split(b"\n")
        for line in lines:
            if self._hear(sock, parse(line)):
                return
        if not data or len(self._received[sock]) > LONGEST:
            member = self._drop(sock)
            if member is not None:
                self._tell(member.gone())

    def _hear(self, sock: socket.socket, message: dict[str, Any]) -> bool:
        """Act on the message of one rank; returns whether it was a goodbye."""
        if message.get("token") == self.address.token:
            self._members[sock] = Member(**{name: message[name] for name in ("rank", "world", "host", "pid")})
            send(sock, {"failed": self._failure} if self._failure else {"welcome": True})
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
                    send(sock, {"failed": line})

    def _drop(self, sock: socket.socket) -> Member | None:
        del self._received[sock]
        self._selector.unregister(sock)
        sock.close()
        return self._members.pop(sock)
