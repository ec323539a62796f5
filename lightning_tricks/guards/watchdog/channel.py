"""The channel between the ranks of a run: one TCP connection of each rank to rank 0, for RankMonitor and HangWatchdog.

The operating system closes the connections of a process that dies, for whatever reason, and keeps those of a process
that is slow, stopped or stuck. So a connection that is closed without a goodbye means that the process has died, on any
host, and no heartbeats are needed. A connection that breaks because of the network, or because a host does not answer,
says nothing about the process behind it. torch's TCPStore neither reports that a client has died nor asks who it is.

Rank 0 serves: it tells all ranks of the first failure. Every rank publishes its place again and again, all ranks
together at most `PUBLISHED_PER_SECOND` times. When one is overdue, rank 0 waits until each has published once more,
judges once, and tells the verdict. So a rank sends and hears as much in a large run as in a small one.
"""

import asyncio
import hmac
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NamedTuple

from lightning_tricks._core.quote import printable_lines
from lightning_tricks._host.exit import end_now, end_within
from lightning_tricks._host.process import Process, this_process
from lightning_tricks._trainer.running import RunningCall

CONNECT_SECONDS = 60.0  # how long a rank tries to reach rank 0
ANSWER_SECONDS = 5.0  # how long rank 0 waits for the places of the others, which publish in their next look
PUBLISHED_PER_SECOND = 100  # places, by all ranks together
LONGEST = 65536  # bytes; a longer message is not from a rank of this run
LOOPBACK = "127.0.0.1"
_SOCKETS: set[Any] = set()  # a data worker would hold the connections open after its parent's death


def _close_in_child() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for sock in list(_SOCKETS):
        if sock.fileno() >= 0:
            os.dup2(null, sock.fileno())  # the number stays taken: the socket's owner may close it as well


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


class Address(NamedTuple):
    """The address of rank 0: its host, its port, and a token that only the ranks of this run know."""

    host: str
    port: int
    token: str


class Verdict(NamedTuple):
    """Rank 0's answer when a rank is overdue: which rank is behind."""

    line: str
    silent: list[Process]  # processes of this host that published no place
    wait: float  # seconds that the rank behind may still stay where it is: no hang before


def answer_seconds(world: int) -> float:
    """How long it takes at most until one of so many ranks has told that it is overdue, and each other its place."""
    return ANSWER_SECONDS + 2 * (world // PUBLISHED_PER_SECOND)


class Connection(threading.Thread):
    """The connection of this process to the hub on rank 0. This thread connects and listens; others may call anything.

    On rank 0 the hub starts and ends with it.
    """

    def __init__(self, process: Process, address: Address, rank_0: Process, hub: "Hub | None" = None) -> None:
        super().__init__(daemon=True, name="watchdog-connection")
        self.process, self.address, self.rank_0, self.hub = process, address, rank_0, hub
        self.call, self.users = RunningCall(), 0
        self.failure: str | None = None  # the line of the run's first one
        self.verdict: Verdict | None = None  # the latest
        self.rank_0_left = False  # in order
        self.is_open = self.was_open = False  # whether the hub can be reached, and ever could
        self._lock = threading.RLock()  # around the attributes, and while something is sent
        self._listeners: list[Callable[[str], None]] = []
        self._sock: socket.socket | None = None
        self._unsent: list[dict[str, Any]] = []
        self._next_publish = 0.0
        self._closed = threading.Event()

    def run(self) -> None:
        """Connect, and hear the hub until either side ends."""
        if self.hub is not None:
            self.hub.start()
        deadline = time.monotonic() + CONNECT_SECONDS
        while time.monotonic() < deadline and not self._closed.is_set():
            with suppress(OSError):
                if self._connect():
                    return
            self._closed.wait(0.5)
        if not self._closed.is_set():
            host, port, _ = self.address
            say(f"{self.process.name} cannot reach rank 0 at {host}, port {port}: it is not watched")

    def _connect(self) -> bool:
        """Greet the server at rank 0's address, and hear it to the end; False if it is not the hub."""
        address = (self.address.host if self.process.rank else LOOPBACK, self.address.port)
        with socket.create_connection(address, timeout=20.0) as sock, sock.makefile("rb") as stream:
            _prepare(sock)
            with self._lock:
                if self._closed.is_set():
                    return False
                self._sock = sock  # from here on the hub may know of this process, and `close` must say goodbye to it
                for message in ({"token": self.address.token, "process": asdict(self.process)}, *self._unsent):
                    send(sock, message)
            try:
                if "welcome" not in parse(stream.readline(LONGEST)):
                    return False
                sock.settimeout(None)
                self.was_open, self.is_open = True, not self._closed.is_set()
                self._listen(stream)
                return True
            finally:
                with self._lock:
                    send(sock, {"bye": True})  # a hub that is only slow must not take this for a death
                    self._sock, self.is_open = None, False
                    _SOCKETS.discard(sock)

    def _listen(self, stream: Iterable[bytes]) -> None:
        try:
            for message in map(parse, stream):
                self._hear(message)
                if "bye" in message:
                    return
            self._hear({"failed": gone(self.rank_0)})
        except OSError as error:
            if died_by(error, self.rank_0):
                self._hear({"failed": gone(self.rank_0)})
            elif not self._closed.is_set():
                say(_unwatched(self.process, error))

    def _hear(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            self.rank_0_left |= "bye" in message
            if "verdict" in message:
                silent = [Process(**each) for each in message["silent"]]
                self.verdict = Verdict(message["verdict"], silent, message["wait"])
            if "failed" not in message or self.failure is not None or self._closed.is_set():
                return
            self.failure = str(message["failed"])
        for listener in self._listeners:
            listener(self.failure)

    def when_failed(self, listener: Callable[[str], None]) -> None:
        """Have a function called with the line of the run's first failure: at once if there is one, else later."""
        with self._lock:
            self._listeners.append(listener)
            if self.failure is None:
                return
        listener(self.failure)

    def fail(self, error: BaseException) -> None:
        """Tell the hub that this process has failed; the hub decides which rank was first."""
        self._send({"failed": f"{self.process.name} failed first: {first_line(error)}"}, keep=True)

    def publish(self, place: Mapping[str, Any], overdue: bool = False, last: bool = False) -> bool:
        """Tell the hub the place of this rank, unless it is too early for another; returns whether it was told.

        Args:
            overdue: whether the rank has been there for longer than it may be: the hub then finds out who is behind.
            last: the rank leaves its fit; that is told at any time, and nobody waits for its place from then on.
        """
        now = time.monotonic()
        if not last and (not self.is_open or now < self._next_publish):
            return False
        self._next_publish = now + self.process.world / PUBLISHED_PER_SECOND
        self._send({"place": place, "overdue": overdue, "last": last}, keep=last)
        return True

    def _send(self, message: dict[str, Any], keep: bool) -> None:
        with self._lock:
            if self._sock is not None:
                send(self._sock, message)
            elif keep:
                self._unsent.append(message)

    def leave(self) -> None:
        """One user less; the last one closes."""
        self.users -= 1
        if self.users <= 0:
            self.close()

    def close(self) -> None:
        """Say goodbye. Idempotent; in any thread."""
        with suppress(ValueError):
            _OPEN.remove(self)
        with self._lock:
            self._closed.set()
            self.is_open = False
            if self._sock is not None:
                send(self._sock, {"bye": True})
                with suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
        if self.hub is not None:
            self.hub.close()
        for thread, seconds in ((self, 1.0), (self.hub, 5.0)):  # its goodbyes must be out before this process ends
            if thread is not None and thread.is_alive() and thread is not threading.current_thread():
                thread.join(seconds)


class Hub(threading.Thread):
    """A thread on rank 0 that serves the connections of all ranks, its own too.

    Where all ranks run on one host, no other host can connect. `judge` makes the verdict, and says which ranks the
    others wait for: see `hang_watchdog.judge`.
    """

    def __init__(self, host: str) -> None:
        super().__init__(daemon=True, name="watchdog-hub")
        self._server = _open_server(host)
        self.address = Address(host, self._server.getsockname()[1], secrets.token_hex(16))
        self.judge: Callable[[dict[int, Process], dict[int, Any], set[int]], tuple[str, Iterable[int]]]
        self.judge = lambda *_: ("", ())
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop, self._closing = self._runner.get_loop(), asyncio.Event()
        self._peers: dict[asyncio.StreamWriter, Process] = {}
        self._processes: dict[int, Process] = {}
        self._places: dict[int, Any] = {}  # as published last
        self._until: dict[int, float] = {}  # how long each may stay there
        self._left: set[int] = set()
        self._heard: set[int] = set()  # since one was overdue
        self._due: asyncio.TimerHandle | None = None  # the end of the wait for the others; None if none is overdue
        self._failure: str | None = None

    def close(self) -> None:
        """Say goodbye to all, and end."""
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._closing.set)

    def run(self) -> None:
        """Serve until `close`."""
        with self._runner:
            self._runner.run(self._serve_all())
        _SOCKETS.discard(self._server)

    async def _serve_all(self) -> None:
        async with await asyncio.start_server(self._serve, sock=self._server, limit=LONGEST, backlog=4096):
            await self._closing.wait()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hear one connection until it ends."""
        process, sock = None, writer.get_extra_info("socket")
        try:
            _prepare(sock)
            greeting = parse(await reader.readline())
            if not hmac.compare_digest(str(greeting.get("token")).encode(), self.address.token.encode()):
                return
            process = self._processes[greeting["process"]["rank"]] = Process(**greeting["process"])
            self._peers[writer] = process
            _write(writer, {"welcome": True})
            if self._failure:
                _write(writer, {"failed": self._failure})
            async for line in reader:
                message = parse(line)
                self._hear(process, message)
                if "bye" in message:
                    return
            self._fail(gone(process))
        except asyncio.CancelledError:  # the hub ends
            pass
        except (OSError, ValueError) as error:  # ValueError: a line that is too long
            if process is not None and died_by(error, process):
                self._fail(gone(process))
            elif process is not None:
                say(_unwatched(process, error))
        finally:
            if self._peers.pop(writer, None) is not None:
                _write(writer, {"bye": True})  # also if this code fails: that is no death of rank 0
            _SOCKETS.discard(sock)
            writer.close()

    def _hear(self, process: Process, message: dict[str, Any]) -> None:
        """Act on the message of one rank."""
        rank = process.rank
        if "failed" in message:
            self._fail(message["failed"])
        if "bye" in message or message.get("last"):
            self._left.add(rank)
        if "place" in message:
            self._places[rank] = message["place"]
            self._until[rank] = time.monotonic() + message["place"].get("left", 0.0)
            self._heard.add(rank)
            if message["overdue"] and self._due is None:
                self._heard = {rank}
                self._due = self._loop.call_later(answer_seconds(process.world), self._conclude, process.world)
        if self._due is not None and len(self._heard | self._left) == process.world:
            self._conclude(process.world)

    def _conclude(self, world: int) -> None:
        """Tell the verdict: all have published their places, or have had the time for it."""
        if self._due is not None:
            self._due.cancel()
        self._due = None
        silent = set(range(world)) - self._heard - self._left
        line, behind = self.judge(self._processes, self._places, silent)
        now = time.monotonic()
        wait = max(0.0, min((self._until.get(rank, now) - now for rank in behind), default=0.0))
        known = [self._processes[rank] for rank in sorted(silent & self._processes.keys())]
        for writer, process in self._peers.items():
            here = [asdict(each) for each in known if each.host == process.host]
            _write(writer, {"verdict": line, "silent": here, "wait": wait})

    def _fail(self, line: str) -> None:
        if self._failure is None:
            self._failure = line
            for writer in self._peers:
                _write(writer, {"failed": line})


_OPEN: list[Connection] = []


def connect(trainer: Any) -> Connection | None:
    """The connection of this process in the Trainer's running call; None with one process. All ranks must call.

    The callbacks of one call share it; each one calls `leave` in the end.
    """
    if trainer.world_size == 1:
        return None
    connection = next((each for each in _OPEN[:] if each.call.is_current()), None)
    if connection is None:
        me = this_process(trainer.global_rank, trainer.world_size)
        host = LOOPBACK if trainer.num_nodes == 1 else os.environ.get("MASTER_ADDR", me.host)
        hub = Hub(host) if me.rank == 0 else None
        address, rank_0 = trainer.strategy.broadcast((hub.address, me) if hub is not None else None)
        connection = Connection(me, address, rank_0, hub)
        connection.start()
        _OPEN.append(connection)
    connection.users += 1
    return connection


def end_process(children: Sequence[subprocess.Popen]) -> None:
    """`end_now` with exit code 1, after the goodbyes: the other ranks must not take the exit for a death."""
    end_within(10.0)  # if a peer reads nothing
    for connection in list(_OPEN):
        with suppress(Exception):
            connection.close()
    end_now(1, children)


def first_line(error: BaseException) -> str:
    """The class of an exception and the first line of its message, at most 300 characters."""
    first = (str(error).strip().splitlines() or [""])[0][:300]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def gone(process: Process) -> str:
    """The line that says that a process has died without a goodbye."""
    return f"{process.name} is gone without a word (process {process.pid}): killed, or out of memory (dmesg tells)"


def died_by(error: Exception, process: Process) -> bool:
    """Whether an error of its connection says that a process has died: one of this host, with messages unread."""
    return isinstance(error, ConnectionResetError) and process.host == socket.gethostname()


def say(text: str) -> None:
    """Print where errors go, at once and in one piece, because all ranks may print at the same moment."""
    with suppress(OSError, ValueError):
        sys.stderr.write(printable_lines(text) + "\n")
        sys.stderr.flush()


def send(sock: socket.socket, message: dict[str, Any]) -> None:
    """Send a message without waiting; it is no error if the peer is gone, or has read nothing for very long."""
    with suppress(OSError):  # the thread that reads from the peer notices its death
        sock.send(json.dumps(message).encode() + b"\n", getattr(socket, "MSG_DONTWAIT", 0))


def _write(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")


def parse(line: bytes) -> dict[str, Any]:
    """The message in a line; empty if the line is no message of ours."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}


def _unwatched(process: Process, error: Exception) -> str:
    """The line that says that the network broke a connection."""
    return f"the connection of {process.name} broke ({error}): it is not watched now"


def _open_server(host: str) -> socket.socket:
    """A server socket on a free port: on the loopback interface for one host, else on all, as torch's own store."""
    if host != LOOPBACK and socket.has_dualstack_ipv6():
        server = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        server = socket.create_server((host if host == LOOPBACK else "", 0))
    _SOCKETS.add(server)
    return server


def _prepare(sock: Any) -> None:
    """Turn on TCP keep-alive packets, so that no router in between forgets an idle connection."""
    _SOCKETS.add(sock)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 9)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
