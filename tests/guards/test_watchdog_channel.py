"""The channel of RankMonitor and HangWatchdog: who is told what, who is waited for, and how often ranks publish."""

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace

import pytest

from lightning_tricks._host.process import Process
from lightning_tricks.guards.watchdog import channel
from lightning_tricks.guards.watchdog.channel import LOOPBACK, Address, Connection, Hub, first_line, gone
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
        self.hub = Hub(LOOPBACK)
        self.hub.judge = lambda processes, places, silent: (json.dumps([places, sorted(silent)]), ())
        self.world = world
        self.hub.start()
        self.connections = [self.joined(rank) for rank in range(world)]

    def joined(self, rank: int) -> Connection:
        connection = Connection(process(rank, self.world), self.hub.address, process(0, self.world))
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
        sock = self.connections[rank]._sock
        self.connections[rank]._sock = None
        sock.shutdown(socket.SHUT_RDWR)

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


def dial(hub: Hub, host: str = LOOPBACK) -> socket.socket:
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
    three.connections[0].close()
    three.hub.close()
    assert three.failures() == {None}
    assert all(each.rank_0_left for each in three.connections[1:])


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
    lines = [line.partition(" (")[0] for line in "".join(said).splitlines() if "broke" in line]
    assert lines == ["the connection of rank 1 of 2 on far broke"]


class Server:
    """A hub played by the test, to which rank 1 connects."""

    def __init__(self, host: str = "there") -> None:
        self.rank_0 = process(0, host=host)

    def __enter__(self):
        self.server = socket.create_server((LOOPBACK, 0))
        self.connection = Connection(process(1), Address(*self.server.getsockname(), "word"), self.rank_0)
        return self

    def accept(self) -> socket.socket:
        self.connection.start()
        hub, _ = self.server.accept()
        hub.settimeout(10)
        return hub

    def __exit__(self, *_):
        self.connection.close()
        self.server.close()
        self.connection.join(10)
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
    assert ("the connection of rank 1 of 2 on here broke" in capfd.readouterr().err) is (host == "there")


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
        server.connection.close()


def test_on_one_host_no_other_host_can_connect():
    hubs = [Hub(host) for host in (LOOPBACK, "node7")]
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
        two.connections[1].fail(ERROR)
        assert two.failures() == {"rank 1 of 2 on here failed first: ValueError: bad batch"}
        two.hub.close()
        assert heard.read() == b""  # and no word of the failure


def test_another_program_on_the_port_is_not_taken_for_rank_0(monkeypatch, capfd):
    monkeypatch.setattr(channel, "CONNECT_SECONDS", 1.0)
    with Server() as server:

        def answer():
            with suppress(OSError):
                while True:
                    sock, _ = server.server.accept()
                    sock.sendall(b"220 smtp\r\n")
                    sock.close()

        threading.Thread(target=answer, daemon=True).start()
        server.connection.run()
        assert not server.connection.was_open
        server.connection.close()
        server.connection.start()
    assert "rank 1 of 2 on here cannot reach rank 0 at 127.0.0.1, port " in capfd.readouterr().err


@pytest.mark.parametrize("ends", [False, True])
def test_a_rank_that_cannot_reach_rank_0_says_so_unless_it_has_ended_meanwhile(monkeypatch, capfd, ends):
    monkeypatch.setattr(channel, "CONNECT_SECONDS", 0.0)
    connection = Connection(process(1), Address("node0", 4321, "token"), process(0))
    if ends:
        connection.close()
    connection.run()
    line = "rank 1 of 2 on here cannot reach rank 0 at node0, port 4321: it is not watched\n"
    assert capfd.readouterr().err == ("" if ends else line)
    connection.close()


def test_when_one_is_overdue_all_are_told_the_same_verdict_once_each_has_told_its_place(ranks):
    three = ranks(3)
    assert three.connections[1].publish({"part": "forward"})
    until(lambda: 1 in three.hub._places)
    assert three.connections[0].publish({"part": "loader"}, overdue=True)
    until(lambda: three.hub._due is not None)
    assert [each.verdict for each in three.connections] == [None] * 3
    for connection in three.connections[1:]:
        until(lambda connection=connection: connection.publish({"part": "backward"}))
    until(lambda: all(each.verdict for each in three.connections))
    verdict = three.connections[0].verdict
    assert {each.verdict.line for each in three.connections} == {verdict.line}
    assert json.loads(verdict.line) == [
        {"0": {"part": "loader"}, "1": {"part": "backward"}, "2": {"part": "backward"}}, [],
    ]  # fmt: skip
    assert (verdict.silent, verdict.wait) == ([], 0.0)


@pytest.mark.parametrize("way", ["dead", "slow", "left"])
def test_who_tells_no_place_is_named_in_time_but_not_if_it_has_left(ranks, way, monkeypatch):
    monkeypatch.setattr(channel, "ANSWER_SECONDS", LONG if way == "left" else 0.5)
    two = ranks(2)
    assert two.connections[1].publish({"part": "forward"}, last=way == "left")
    until(lambda: 1 in two.hub._places)
    if way == "dead":
        two.die(1)
        two.failures(0)
    two.connections[0].publish({"part": "backward"}, overdue=True)
    until(lambda: two.connections[0].verdict)
    verdict = two.connections[0].verdict
    places, silent = json.loads(verdict.line)
    assert places == {"1": {"part": "forward"}, "0": {"part": "backward"}}  # the last one that it told
    assert silent == ([] if way == "left" else [1])
    assert verdict.silent == ([] if way == "left" else [process(1)])


@pytest.mark.parametrize(("world", "every"), [(64, 1), (1024, 6)])
def test_all_ranks_together_publish_no_more_often_in_a_larger_run(monkeypatch, world, every):
    now, sent = [0.0], []
    monkeypatch.setattr(channel, "time", SimpleNamespace(monotonic=lambda: now[0]))
    connection = Connection(process(3, world), Address(LOOPBACK, 1, "token"), process(0, world))
    connection.is_open, connection._sock = True, SimpleNamespace(send=lambda data, *_: sent.append(now[0]))
    for look in range(60):
        now[0] = 2.0 * look
        connection.publish({"part": "forward"})
    assert sent == [2.0 * look for look in range(0, 60, every)]
    assert world * len(sent) / 120 <= channel.PUBLISHED_PER_SECOND


def test_the_verdict_says_how_long_the_rank_behind_may_still_stay_where_it_is(ranks, monkeypatch):
    """Rank 1 works in a hook, which may take 3,000 s, and the others wait for it in the forward, beyond their limit."""
    monkeypatch.setattr(channel, "ANSWER_SECONDS", LONG)
    three = ranks(3)
    three.hub.judge = judge
    first, second, third = three.connections
    here = {"part": "hook", "where": "LMEval.on_validation_epoch_end", "step": 6, "seconds": 290.0, "left": 2710.0}
    waits = {"part": "forward", "step": 7, "micro_batches": 8, "left": -1.0}

    def verdict():
        before = first.verdict
        until(lambda: first.publish(waits, overdue=True))
        until(lambda: three.hub._due is not None)
        until(lambda: second.publish(here))
        until(lambda: third.publish(waits))
        until(lambda: first.verdict is not before)
        return first.verdict

    line = "rank 1 of 3 on here is behind: in LMEval.on_validation_epoch_end, after step 6 for 290 s"
    assert verdict().line == line
    assert 2710.0 - LONG < first.verdict.wait <= 2710.0
    here["left"] = -0.5
    assert verdict().wait == 0.0
