"""The channel between the ranks of a run: one TCP connection of each rank to rank 0, for RankMonitor and HangWatchdog.

The operating system closes the connections of a process that dies, for whatever reason, and keeps those of a process
that is slow, stopped or stuck. So a connection that is closed without a goodbye means that the process has died, on any
host, and no heartbeats are needed. A connection that breaks because of the network, or because a host does not answer,
says nothing about the process behind it.

Rank 0 serves: it tells all ranks of the first failure. When one rank asks, it asks all for their places, judges once,
and tells the verdict. So a rank sends and hears as much in a large run as in a small one, and between questions all
ranks together publish at most `PUBLISHED_PER_SECOND` places.

torch's TCPStore does not report that a client has died, and a rank that asks it for the places of all others makes as
many calls as there are ranks.
"""

import itertools
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_tricks._exit import call_before_exit
from lightning_tricks._process import Process, this_process
from lightning_tricks._quote import printable_lines
from lightning_tricks._trainer import RunningCall

CONNECT_SECONDS = 60.0  # how long a rank tries to reach rank 0
ANSWER_SECONDS = 5.0  # how long rank 0 waits for the places of the others, which answer in their next look
VERDICT_SECONDS = ANSWER_SECONDS + 3.0  # how long a rank waits for rank 0
PUBLISHED_PER_SECOND = 100  # places, by all ranks together
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
class Address:
    """The address of rank 0: names of its host, its port, and a token that only the ranks of this run know."""

    hosts: tuple[str, ...]
    port: int
    token: str


@dataclass(frozen=True)
class Verdict:
    """Rank 0's answer to a question: which rank is behind."""

    number: int = 0  # of the question
    line: str = ""
    silent: tuple[Process, ...] = ()  # processes of this host that gave no answer
    wait: float = 0.0  # seconds that the rank behind may still stay where it is: no hang before


class Connection(threading.Thread):
    """The connection of this process to the hub on rank 0. This thread connects and listens; others may call anything.

    On rank 0 the hub starts and ends with it. `user` is the class name of the callback that has made it, for messages.
    """

    def __init__(
        self, process: Process, address: Address, rank_0: Process, hub: "Hub | None" = None, user: str = "RankMonitor"
    ) -> None:
        super().__init__(daemon=True, name="watchdog-connection")
        self.process, self.address, self.rank_0, self.hub, self._user = process, address, rank_0, hub, user
        self.call, self.users = RunningCall(), 0
        self.failure: str | None = None  # the line of the run's first one
        self.asked, self.verdict = 0, Verdict()  # number of the latest question, and the latest answer
        self.last_words: str | None = None  # of a hub that has ended in order: a verdict, or nothing
        self.is_open = self.was_open = False  # whether the hub can be reached, and ever could
        self._news = threading.Condition()  # of the attributes above; held also while something is sent
        self._listeners: list[Callable[[str], None]] = []
        self._sock: socket.socket | None = None
        self._stream: Any = None
        self._first: dict[str, Any] = {}
        self._kept: dict[str, Any] = {}  # sent after the greeting
        self._next_publish = 0.0
        self._closed = threading.Event()
        self._stay_alive = call_before_exit(self.close)  # the other ranks must not take the exit for a death

    def run(self) -> None:
        """Connect, and hear the hub until either side ends."""
        if self.hub is not None:
            self.hub.start()
        if self.connect():
            self.listen()
        elif not self._closed.is_set():
            at = f"{' or '.join(self.address.hosts)}, port {self.address.port}"
            say(f"{self._user}: rank {self.process.rank} cannot reach rank 0 at {at}: it is not watched")

    def connect(self) -> bool:
        """Reach the hub within `CONNECT_SECONDS`; False if that fails, or if `close` is called meanwhile."""
        hosts = self.address.hosts if self.process.rank else (LOOPBACK, *self.address.hosts)
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
        _keep_alive(sock)
        with self._news:
            if self._closed.is_set():
                sock.close()
                return False
            self._sock = sock  # from here on the hub may know of this process, and `close` must say goodbye to it
            send(sock, {"token": self.address.token, "process": asdict(self.process)})
            if self._kept:
                send(sock, self._kept)
        stream = sock.makefile("rb")
        with suppress(OSError):
            self._first = parse(stream.readline(LONGEST))
        with self._news:
            if self._first.keys() & {"welcome", "failed", "bye"}:
                sock.settimeout(None)
                self._stream, self.was_open = stream, True
                self.is_open = not self._closed.is_set()
                return True
            self._sock = None
            send(sock, {"bye": True})  # so that a hub which is only slow does not take this for a death
            sock.close()
        return False

    def listen(self) -> None:
        """Hear the hub until either side ends."""
        try:
            for message in itertools.chain([self._first], map(parse, self._stream)):
                self._hear(message)
                if "bye" in message:
                    return
            if not self._closed.is_set():
                self._hear({"failed": gone(self.rank_0)})
        except (OSError, ValueError) as error:  # ValueError: closed while it is read
            if died_by(error, self.rank_0):
                self._hear({"failed": gone(self.rank_0)})
            elif isinstance(error, OSError) and not self._closed.is_set():
                say(_unwatched(self._user, self.process, error))
        finally:
            with self._news:
                self.is_open = False
                self._news.notify_all()

    def _hear(self, message: Mapping[str, Any]) -> None:
        listeners = []
        with self._news:
            if "failed" in message and self.failure is None and not self._closed.is_set():
                self.failure, listeners = str(message["failed"]), self._listeners
            self.asked = message.get("asked", self.asked)
            self.last_words = message.get("bye", self.last_words)
            if "verdict" in message:
                silent = tuple(Process(**each) for each in message["silent"])
                self.verdict = Verdict(message["number"], message["verdict"], silent, message["wait"])
            self._news.notify_all()
        for listener in listeners:
            listener(self.failure or "")

    def when_failed(self, listener: Callable[[str], None]) -> None:
        """Have a function called with the line of the run's first failure: at once if there is one, else later."""
        with self._news:
            self._listeners.append(listener)
            if self.failure is None:
                return
        listener(self.failure)

    def fail(self, error: BaseException) -> None:
        """Tell the hub that this process has failed; the hub decides which rank was first."""
        self._send({"failed": f"{self.process.name} failed first: {first_line(error)}"}, keep=True)

    def publish(self, place: Mapping[str, Any], last: bool = False) -> bool:
        """Tell the hub the place of this rank, unless it is too early for another; returns whether it was told.

        The last one, of a rank that leaves its fit, is told at any time, and no question is for it from then on.
        """
        now = time.monotonic()
        if not last and (not self.is_open or now < self._next_publish):
            return False
        self._next_publish = now + self.process.world / PUBLISHED_PER_SECOND
        self._send({"place": place, "last": last}, keep=last)
        return True

    def answer(self, place: Mapping[str, Any], number: int) -> None:
        """Answer a question."""
        self._send({"place": place, "answer": number})

    def ask_all(self, place: Mapping[str, Any], number: int = 0) -> Verdict | None:
        """Tell this rank's place, have all others tell theirs, and wait for rank 0's verdict; None if none comes.

        With the number of a question, this is the answer to it.
        """
        with self._news:
            wanted = number or max(self.asked, self.verdict.number) + 1
            self._send({"place": place, "answer": number} if number else {"place": place, "ask": True})
            self._news.wait_for(lambda: self.verdict.number >= wanted or not self.is_open, VERDICT_SECONDS)
            return self.verdict if self.verdict.number >= wanted else None

    def _send(self, message: dict[str, Any], keep: bool = False) -> None:
        with self._news:
            if keep:
                self._kept |= message
            if self._sock is not None:
                send(self._sock, message)

    def leave(self) -> None:
        """One user less; the last one closes."""
        self.users -= 1
        if self.users <= 0:
            self.close()

    def close(self) -> None:
        """Say goodbye. Idempotent; in any thread."""
        self._stay_alive()
        with suppress(ValueError):
            _OPEN.remove(self)
        with self._news:
            self._closed.set()
            self.is_open = False
            if self._sock is not None:
                send(self._sock, {"bye": True})
                with suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
            self._news.notify_all()
        if self.hub is not None:
            self.hub.close()
        for thread, seconds in (
            (self, 1.0),
            (self.hub, 5.0),
        ):  # the hub's goodbyes must be out before this process ends
            if thread is not None and thread.is_alive() and thread is not threading.current_thread():
                thread.join(seconds)


@dataclass
class _Peer:
    process: Process | None = None  # when it has greeted
    received: bytes = b""


@dataclass
class _Question:
    number: int = 0
    waits_for: set[int] = field(default_factory=set)  # ranks
    silent: set[int] = field(default_factory=set)  # not connected
    deadline: float | None = None  # None when it is answered


class Hub(threading.Thread):
    """A thread on rank 0 that serves the connections of all ranks, its own too.

    Where all ranks run on one host, no other host can connect. `judge` makes the verdict, and says which ranks the
    others wait for: see `hang_watchdog.judge`.
    """

    def __init__(self, hosts: tuple[str, ...], one_host: bool = False, user: str = "RankMonitor") -> None:
        super().__init__(daemon=True, name="watchdog-hub")
        self._server = _open_server(one_host)
        self.address = Address(hosts, self._server.getsockname()[1], secrets.token_hex(16))
        self.judge: Callable[[dict[int, Process], dict[int, Any], set[int]], tuple[str, Iterable[int]]]
        self.judge = lambda *_: ("", ())
        self._user = user
        self._peers: dict[socket.socket, _Peer] = {}
        self._processes: dict[int, Process] = {}
        self._places: dict[int, Any] = {}  # as published last
        self._until: dict[int, float] = {}  # how long each may stay there
        self._left: set[int] = set()
        self._question = _Question()
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
            words = self.judge(self._processes, self._places, set())[0] if self._left else ""
            for sock in list(self._peers):
                send(sock, {"bye": words})
                self._drop(sock)
            for last in (self._selector, self._server, self._woken, self._wake):
                last.close()

    def _serve(self) -> bool:
        deadline = self._question.deadline
        ready = [key.fileobj for key, _ in self._selector.select(deadline and max(0.0, deadline - time.monotonic()))]
        for sock in ready:
            if sock is self._server:
                self._accept()
            elif sock is not self._woken:
                self._read(sock)  # type: ignore[arg-type]
        self._conclude_if_due()
        return self._woken not in ready

    def _accept(self) -> None:
        try:
            sock, _ = self._server.accept()
        except OSError:  # such as too many open files
            time.sleep(0.1)
            return
        _keep_alive(sock)
        self._peers[sock] = _Peer()
        self._selector.register(sock, selectors.EVENT_READ)

    def _read(self, sock: socket.socket) -> None:
        peer = self._peers[sock]
        try:
            data = sock.recv(LONGEST)
        except OSError as error:
            self._drop(sock)
            if peer.process is not None and died_by(error, peer.process):
                self._fail(gone(peer.process))
            elif peer.process is not None:
                say(_unwatched(self._user, peer.process, error))
            return
        *lines, peer.received = (peer.received + data).split(b"\n")
        for line in lines:
            self._hear(sock, peer, parse(line))
            if sock not in self._peers:  # after its goodbye
                return
        if not data or len(peer.received) > LONGEST:
            self._drop(sock)
            if peer.process is not None:
                self._fail(gone(peer.process))

    def _hear(self, sock: socket.socket, peer: _Peer, message: dict[str, Any]) -> None:
        """Act on the message of one rank."""
        if message.get("token") == self.address.token:
            peer.process = Process(**message["process"])
            self._processes[peer.process.rank] = peer.process
            send(sock, {"failed": self._failure} if self._failure else {"welcome": True})
        if peer.process is None:
            return
        rank, question = peer.process.rank, self._question
        if "place" in message:
            self._places[rank] = message["place"]
            self._until[rank] = time.monotonic() + message["place"].get("left", 0.0)
        if "failed" in message:
            self._fail(message["failed"])
        if message.get("last") or "bye" in message:
            self._left.add(rank)
            question.waits_for.discard(rank)
        if "ask" in message and question.deadline is None:
            question = self._question = self._ask()
        if "ask" in message or message.get("answer") == question.number:
            question.waits_for.discard(rank)
        if "bye" in message:
            self._drop(sock)

    def _ask(self) -> _Question:
        """Ask all ranks for their places, but those that have left their fit."""
        number, connected, world = self._question.number + 1, set(), 0
        for sock, peer in self._peers.items():
            if peer.process is not None:
                send(sock, {"asked": number})
                connected.add(peer.process.rank)
                world = peer.process.world
        silent = set(range(world)) - connected - self._left
        return _Question(number, connected - self._left, silent, time.monotonic() + ANSWER_SECONDS)

    def _conclude_if_due(self) -> None:
        """Tell the verdict when all have answered, or have had the time for it."""
        question = self._question
        if question.deadline is None or (question.waits_for and time.monotonic() < question.deadline):
            return
        self._question = _Question(question.number)
        silent = question.silent | question.waits_for
        line, behind = self.judge(self._processes, self._places, silent)
        now = time.monotonic()
        wait = max(0.0, min((self._until.get(rank, now) - now for rank in behind), default=0.0))
        by_host: dict[str, list[dict[str, Any]]] = {}
        for rank in silent & self._processes.keys():
            by_host.setdefault(self._processes[rank].host, []).append(asdict(self._processes[rank]))
        for sock, peer in self._peers.items():
            if peer.process is not None:
                here = by_host.get(peer.process.host, [])
                send(sock, {"verdict": line, "number": question.number, "silent": here, "wait": wait})

    def _fail(self, line: str) -> None:
        if self._failure is None:
            self._failure = line
            for sock, peer in self._peers.items():
                if peer.process is not None:
                    send(sock, {"failed": line})

    def _drop(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        sock.close()
        process = self._peers.pop(sock).process
        if process is not None and process.rank in self._question.waits_for:
            self._question.waits_for.discard(process.rank)
            self._question.silent.add(process.rank)


_OPEN: list[Connection] = []


def connect(trainer: Any, user: str) -> Connection | None:
    """The connection of this process in the Trainer's running call; None with one process. All ranks must call.

    The callbacks of one call share it; each one calls `leave` in the end.
    """
    if trainer.world_size == 1:
        return None
    connection = next((each for each in _OPEN[:] if each.call.is_current()), None)
    if connection is None:
        me = this_process(trainer.global_rank, trainer.world_size)
        hub = Hub(_names_of_this_host(), trainer.num_nodes == 1, user) if me.rank == 0 else None
        address, rank_0 = trainer.strategy.broadcast((hub.address, me) if hub is not None else None)
        connection = Connection(me, address, rank_0, hub, user)
        connection.start()
        _OPEN.append(connection)
    connection.users += 1
    return connection


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


def parse(line: bytes) -> dict[str, Any]:
    """The message in a line; empty if the line is no message of ours."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}


def _unwatched(user: str, process: Process, error: OSError) -> str:
    """The line that says that the network broke a connection."""
    return f"{user}: the connection of rank {process.rank} on {process.host} broke ({error}): it is not watched now"


def _open_server(one_host: bool) -> socket.socket:
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


def _keep_alive(sock: socket.socket) -> None:
    """Turn on TCP keep-alive packets, so that no router in between forgets an idle connection."""
    SOCKETS.add(sock)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 9)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _names_of_this_host() -> tuple[str, ...]:
    names = [os.environ.get("MASTER_ADDR", ""), socket.gethostname()]
    with suppress(OSError):
        names.append(socket.gethostbyname(names[1]))
    return tuple(dict.fromkeys(filter(None, names)))
