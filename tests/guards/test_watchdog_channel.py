"""The channel of RankMonitor and HangWatchdog: who is told what, who is asked, and how many messages that takes."""

import json
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace

import pytest

from lightning_tricks._process import Process
from lightning_tricks.guards.watchdog import channel
from lightning_tricks.guards.watchdog.channel import Address, Connection, Hub, first_line, gone, parse
from lightning_tricks.guards.watchdog.hang_watchdog import judge

LONG = 60.0  # seconds, for something that happens at once or never
ERROR = ValueError("bad batch")


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def process(rank: int, world: int = 2, host: str = "here") -> Process:
    return Process(rank, world, host, os.getpid())


def test_the_lines_name_rank_host_and_reason():
    assert first_line(ValueError("bad batch\nmore of it")) == "ValueError: bad batch"
    assert first_line(StopIteration()) == "StopIteration"
    line = "rank 2 of 4 on node7 is gone without a word (process 1234): killed, or out of memory (dmesg tells)"
    assert gone(Process(2, 4, "node7", 1234)) == line


class Ranks:
    """The connections of `world` ranks to one hub, all in this process."""

    def __init__(self, world: int) -> None:
        self.hub = Hub(("127.0.0.1",))
        self.hub.judge = lambda processes, places, silent: (json.dumps([places, sorted(silent)]), ())
        self.world = world
        self.hub.start()
        self.connections = [self.joined(rank) for rank in range(world)]

    def joined(self, rank: int, **options) -> Connection:
        connection = Connection(process(rank, self.world), self.hub.address, process(0, self.world), **options)
        connection.start()
        until(lambda: connection.was_open)
        return connection

    def failures(self, *ranks: int) -> set[str | None]:
        """What each has heard of the run's first failure, or of its end."""
        heard = [self.connections[rank] for rank in ranks or range(self.world)]
        until(lambda: all(each.failure or not each.is_alive() for each in heard))
        return {each.failure for each in heard}

    def die(self, rank: int) -> None:
        """What the system does for a process that dies."""
        self.connections[rank]._sock.shutdown(socket.SHUT_RDWR)
        self.connections[rank]._sock.close()

    def end(self) -> None:
        for connection in self.connections:
            connection.close()
        self.hub.close()
        self.hub.join(10)
        assert not self.hub.is_alive()


@pytest.fixture
def ranks():
    made: list[Ranks] = []

    def make(world: int) -> Ranks:
        made.append(Ranks(world))
        return made[-1]

    yield make
    for each in made:
        each.end()


def dial(hub: Hub, host: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection((host, hub.address.port), timeout=10)


def reset(sock: socket.socket) -> None:
    """What a network does that forgets a connection: the other end hears that there is none."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def test_all_hear_of_the_first_failure_and_of_no_other_also_who_comes_late(ranks):
    three = ranks(3)
    three.connections[1].fail(ERROR)
    three.failures(1)
    three.connections[2].fail(KeyError("later"))
    three.die(0)
    line = "rank 1 of 3 on here failed first: ValueError: bad batch"
    assert three.failures() == {line}
    late, heard = three.joined(2), []
    late.when_failed(heard.append)
    until(lambda: heard == [line])
    late.close()


def test_a_failure_before_the_connection_is_there_is_told_when_it_is(ranks):
    two = ranks(2)
    early = Connection(process(1), two.hub.address, process(0))
    early.fail(ERROR)
    early.start()
    assert two.failures() == {"rank 1 of 2 on here failed first: ValueError: bad batch"}
    early.close()


def test_a_death_without_a_word_is_told_to_the_others(ranks):
    three = ranks(3)
    three.die(2)
    assert three.failures(0, 1) == {gone(process(2, 3))}


def test_an_end_in_order_is_no_failure_of_any_rank(ranks):
    three = ranks(3)
    three.connections[2].close()
    three.connections[1].close()
    assert not any(three.connections[rank].is_alive() for rank in (1, 2))
    assert three.connections[0].is_alive()
    three.connections[0].close()
    assert three.failures() == {None}


def test_when_rank_0_ends_in_order_the_others_stop_listening(ranks):
    three = ranks(3)
    three.connections[0].publish({"part": "ended"}, last=True)
    three.connections[0].close()
    three.hub.close()
    assert three.failures() == {None}
    assert {each.last_words for each in three.connections[1:]} == {'[{"0": {"part": "ended"}}, []]'}


def greeted(hub: Hub, host: str) -> socket.socket:
    sock = dial(hub)
    sock.sendall(json.dumps({"token": hub.address.token, "process": vars(process(1, host=host))}).encode() + b"\n")
    assert b"welcome" in sock.recv(100)
    return sock


def test_a_connection_that_is_reset_on_this_host_is_a_death(ranks):
    two = ranks(2)
    reset(greeted(two.hub, socket.gethostname()))
    assert two.failures() == {gone(process(1, host=socket.gethostname()))}


def test_a_broken_connection_is_no_death(ranks, capfd):
    two = ranks(2)
    reset(dial(two.hub))  # a stranger's is nobody's
    reset(greeted(two.hub, "far"))
    said: list[str] = []
    until(lambda: said.append(capfd.readouterr().err) or "broke" in said[-1])
    two.connections[1].fail(ERROR)  # the hub has gone on
    assert two.failures() == {"rank 1 of 2 on here failed first: ValueError: bad batch"}
    lines = [line.partition(" (")[0] for line in "".join(said).splitlines() if line.startswith("RankMonitor")]
    assert lines == ["RankMonitor: the connection of rank 1 on far broke"]


class Server:
    """A hub played by the test, to which rank 1 connects."""

    def __init__(self, host: str = "there") -> None:
        self.rank_0 = process(0, host=host)

    def __enter__(self):
        self.server = socket.create_server(("127.0.0.1", 0))
        address = Address(("127.0.0.1",), self.server.getsockname()[1], "word")
        self.connection = Connection(process(1), address, self.rank_0)
        return self

    def accept(self) -> socket.socket:
        self.connection.start()
        hub, _ = self.server.accept()
        hub.settimeout(10)
        return hub

    def __exit__(self, *_):
        self.connection.close()
        self.server.close()
        assert not self.connection.is_alive()


@pytest.mark.parametrize("host", ["there", socket.gethostname()])
def test_a_broken_connection_to_rank_0_is_its_death_only_on_this_host(capfd, host):
    """Where no network is between, a process that dies with messages unread resets its connections."""
    with Server(host) as server, server.accept() as hub:
        assert b"word" in hub.recv(1000)
        hub.sendall(b'{"welcome": true}\n')
        until(lambda: server.connection.was_open)
        reset(hub)
        server.connection.join(10)
        assert server.connection.failure == (None if host == "there" else gone(server.rank_0))
    assert ("the connection of rank 1 on here broke" in capfd.readouterr().err) is (host == "there")


@pytest.mark.parametrize(
    ("say", "expected"),
    [
        (Connection.close, {"bye": True}),
        (
            lambda connection: connection.fail(ERROR),
            {"failed": "rank 1 of 2 on here failed first: ValueError: bad batch"},
        ),
    ],
)
def test_what_is_said_before_the_hub_has_answered_the_greeting_reaches_it(say, expected):
    """A goodbye that is lost then would be taken for a death."""
    with Server() as server, server.accept() as hub, hub.makefile("rb") as heard:
        assert b"word" in heard.readline()
        say(server.connection)
        assert json.loads(heard.readline()) == expected


def test_a_connection_that_is_closed_before_it_is_made_is_not_made():
    with Server() as server:
        sock = socket.create_connection(server.server.getsockname())
        server.connection.close()
        assert not server.connection._greet(sock)
        hub, _ = server.server.accept()
        with hub:
            assert hub.recv(100) == b""  # the hub would take an end after a greeting for a death


def test_a_hub_that_ends_before_it_greets_says_goodbye():
    hub = Hub(("127.0.0.1",))
    late = Connection(process(1), hub.address, process(0))
    sock = dial(hub)
    hub._accept()
    hub.close()
    hub.start()
    hub.join(10)
    assert late._greet(sock)
    late.listen()
    assert late.failure is None
    late.close()


def test_a_hub_that_cannot_accept_a_connection_now_accepts_it_later(monkeypatch):
    hub, pauses = Hub(("127.0.0.1",)), []

    def accept():
        raise OSError(24, "Too many open files")

    with dial(hub) as sock, sock.makefile("rb") as heard:
        with monkeypatch.context() as now:
            now.setattr(hub, "_server", SimpleNamespace(accept=accept))
            now.setattr(channel, "time", SimpleNamespace(sleep=pauses.append))
            hub._accept()
        assert (pauses, hub._peers) == ([0.1], {})
        hub._accept()
        assert len(hub._peers) == 1
        hub.close()
        hub.start()
        assert heard.read() == b'{"bye": ""}\n'
        hub.join(10)


def test_on_one_host_no_other_host_can_connect():
    hubs = [Hub(("127.0.0.1",), one_host=one_host) for one_host in (True, False)]
    for hub in hubs:
        hub.start()
        dial(hub).close()
    with pytest.raises(ConnectionRefusedError):  # another address of this host
        dial(hubs[0], "127.0.0.2")
    dial(hubs[1], "127.0.0.2").close()
    for hub in hubs:
        hub.close()
        hub.join(10)


def test_what_has_nothing_to_do_with_the_run_is_not_heard(ranks):
    two = ranks(2)
    forged = json.dumps({"token": "x", "process": vars(process(1))}).encode()
    for sent in (b"", b"GET / HTTP/1.1\r\n\r\n", b'{"failed": "not so"}\n', b"[]\n", forged + b"\n"):
        with dial(two.hub) as stranger, suppress(ConnectionResetError):
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(100) == b""  # no answer, and the hub has closed it
    with dial(two.hub) as stranger, suppress(ConnectionError):
        for _ in range(40):
            stranger.sendall(b"x" * 65536)
        assert stranger.recv(100) == b""
    with dial(two.hub) as silent, silent.makefile("rb") as heard:
        until(lambda: len(two.hub._peers) == 3)
        two.connections[1].fail(ERROR)
        assert two.failures() == {"rank 1 of 2 on here failed first: ValueError: bad batch"}
        two.hub.close()
        assert heard.read() == b'{"bye": ""}\n'  # and no word of the failure


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_hub_that_cannot_go_on_says_goodbye_and_is_taken_for_no_death(ranks, monkeypatch):
    two = ranks(2)
    monkeypatch.setattr(two.hub, "_fail", lambda line: 1 / 0)
    two.connections[1].fail(ERROR)
    assert two.failures() == {None}


def test_another_program_on_the_port_is_not_taken_for_rank_0(monkeypatch):
    monkeypatch.setattr(channel, "CONNECT_SECONDS", 1.0)
    with Server() as server:

        def answer():
            with suppress(OSError):
                while True:
                    sock, _ = server.server.accept()
                    sock.sendall(b"220 smtp\r\n")
                    sock.close()

        threading.Thread(target=answer, daemon=True).start()
        assert not server.connection.connect()


@pytest.mark.parametrize("ends", [False, True])
def test_a_rank_that_cannot_reach_rank_0_says_so_unless_it_has_ended_meanwhile(monkeypatch, capfd, ends):
    monkeypatch.setattr(channel, "CONNECT_SECONDS", 0.0)
    address = Address(("node0", "10.0.0.1"), 4321, "token")
    connection = Connection(process(1), address, process(0), user="HangWatchdog")
    if ends:
        connection.close()
    connection.run()
    line = "HangWatchdog: rank 1 cannot reach rank 0 at node0 or 10.0.0.1, port 4321: it is not watched\n"
    assert capfd.readouterr().err == ("" if ends else line)
    connection.close()


def answers(connection: Connection, place: str) -> threading.Thread:
    """A rank that answers the next question."""

    def run() -> None:
        until(lambda: connection.asked > 0)
        connection.answer({"part": place}, connection.asked)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_when_one_asks_all_are_asked_and_told_the_same_verdict(ranks):
    three = ranks(3)
    answering = [answers(each, "backward") for each in three.connections[1:]]
    verdict = three.connections[0].ask_all({"part": "loader"})
    assert json.loads(verdict.line) == [
        {"0": {"part": "loader"}, "1": {"part": "backward"}, "2": {"part": "backward"}}, [],
    ]  # fmt: skip
    assert (verdict.number, verdict.silent) == (1, ())
    until(lambda: all(each.verdict == verdict for each in three.connections))
    for thread in answering:
        thread.join()


def test_two_that_ask_at_once_have_one_question(ranks):
    two = ranks(2)
    asking = threading.Thread(target=two.connections[1].ask_all, args=({},))
    asking.start()
    until(lambda: two.connections[0].asked == 1)
    two.connections[0].asked = 0  # it asks before it has heard
    assert two.connections[0].ask_all({}).number == 1
    asking.join()
    assert two.connections[1].verdict.number == 1


@pytest.mark.parametrize("way", ["dead", "slow", "left"])
def test_who_does_not_answer_is_named_at_once_if_dead_in_time_if_slow_and_not_if_it_has_left(ranks, way, monkeypatch):
    monkeypatch.setattr(channel, "ANSWER_SECONDS", 0.5 if way == "slow" else LONG)
    monkeypatch.setattr(channel, "VERDICT_SECONDS", LONG)
    two = ranks(2)
    assert two.connections[1].publish({"part": "forward"}, last=way == "left")
    if way == "dead":
        two.die(1)
        two.failures(0)
    else:
        until(lambda: 1 in two.hub._places)
    verdict = two.connections[0].ask_all({"part": "backward"})
    places, silent = json.loads(verdict.line)
    assert places == {"1": {"part": "forward"}, "0": {"part": "backward"}}  # the last one that it told
    assert silent == ([] if way == "left" else [1])
    assert verdict.silent == (() if way == "left" else (process(1),))


def test_where_rank_0_does_not_answer_there_is_no_verdict_and_its_death_is_told(monkeypatch):
    monkeypatch.setattr(channel, "VERDICT_SECONDS", 0.1)
    with Server() as server, server.accept() as hub:
        hub.sendall(b'{"welcome": true}\n')
        until(lambda: server.connection.was_open)
        assert server.connection.ask_all({}) is None
        hub.shutdown(socket.SHUT_RDWR)  # now it is dead
        until(lambda: not server.connection.is_open)
        assert server.connection.ask_all({}) is None
        assert (server.connection.last_words, server.connection.failure) == (None, gone(server.rank_0))


class Wires:
    """As many ranks as one likes, without sockets: what one end sends, the other hears; the messages are counted."""

    def __init__(self, world: int) -> None:
        self.hub, self.count, self.waiting = Hub(("127.0.0.1",)), Counter(), []
        self.hub.judge = judge
        self.places = [{"part": "backward", "step": 7, "collectives": {"0": 12}} for _ in range(world)]
        self.connections = [self.wire(rank, world) for rank in range(world)]

    def wire(self, rank: int, world: int) -> Connection:
        connection = Connection(process(rank, world), self.hub.address, process(0, world))
        connection.is_open = connection.was_open = True
        peer = channel._Peer(connection.process)
        self.hub._processes[rank] = connection.process

        def to_rank(data: bytes, *_: int) -> None:
            self.count[rank] += 1
            connection._hear(message := parse(data))
            if "asked" in message:
                connection.answer(self.places[rank], message["asked"])

        def to_hub(data: bytes, *_: int) -> None:
            self.count[rank] += 1
            self.waiting.append((end, peer, parse(data)))
            if len(self.waiting) == 1:  # else it is at work
                while self.waiting:
                    self.hub._hear(*self.waiting[0])
                    self.hub._conclude_if_due()
                    self.waiting.pop(0)

        end = End(to_rank)
        connection._sock, self.hub._peers[end] = End(to_hub), peer
        return connection


class End:
    """A socket, as far as `send` goes."""

    def __init__(self, send: Callable[..., None]) -> None:
        self.send = send


@pytest.mark.parametrize("world", [64, 1024, 2048])
def test_messages_do_not_grow_with_the_number_of_ranks_and_the_rank_behind_is_named(world, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(channel, "time", SimpleNamespace(monotonic=lambda: now[0]))
    wires = Wires(world)
    wires.count.clear()
    for _ in range(60):  # two minutes in which each look finds another place
        now[0] += 2.0
        for connection, place in zip(wires.connections, wires.places, strict=True):
            connection.publish(place)
    per_second = sum(wires.count.values()) / 120
    assert per_second <= 1.1 * channel.PUBLISHED_PER_SECOND
    assert max(wires.count.values()) / 120 <= 0.5
    wires.count.clear()
    wires.places[17] = {"part": "loader", "step": 7, "collectives": {"0": 11}, "detail": "DataLoader over Rows"}
    verdict = wires.connections[3].ask_all(wires.places[3])
    named = f"rank 17 of {world} on here is behind: waiting for the training loader before step 8: DataLoader over Rows"
    assert verdict.line == named
    assert {each.verdict for each in wires.connections} == {verdict}
    assert max(wires.count.values()) <= 4  # asked, its answer, the verdict; of the one that asks, its question
    for connection in wires.connections:
        connection._stay_alive()


def test_the_verdict_says_how_long_the_rank_behind_may_still_stay_where_it_is(monkeypatch):
    """Rank 1 works in a hook, which may take 3,000 s, and the others wait for it in the forward, beyond their limit."""
    now = [0.0]
    monkeypatch.setattr(channel, "time", SimpleNamespace(monotonic=lambda: now[0]))
    wires = Wires(3)
    here = {"part": "hook", "where": "LMEval.on_validation_epoch_end", "step": 6, "seconds": 290.0, "left": 2710.0}
    waits = {"part": "forward", "step": 7, "micro_batches": 8, "left": -1.0}
    wires.places = [waits, here, waits]
    verdict = wires.connections[0].ask_all(wires.places[0])
    line = "rank 1 of 3 on here is behind: in LMEval.on_validation_epoch_end, after step 6 for 290 s"
    assert (verdict.line, verdict.wait) == (line, 2710.0)
    here["left"] = -0.5
    assert wires.connections[0].ask_all(wires.places[0]).wait == 0.0
    for connection in wires.connections:
        connection._stay_alive()
