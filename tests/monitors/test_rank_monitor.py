"""RankMonitor's parts: who is told what, what is a failure and what is none, and when a process is ended.

How whole runs end is in test_launching.py.
"""

import gc
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import beside
import lightning.pytorch as pl
import pytest
import torch
import two_processes
from preloaded import python
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError
from torch.distributed.checkpoint import CheckpointException

from lightning_tricks._errors import UsageError
from lightning_tricks.callbacks import RankMonitor
from lightning_tricks.monitors.ranks import failed_fit
from lightning_tricks.monitors.ranks import hub as hub_file
from lightning_tricks.monitors.ranks.connection import Address, Connection, Member
from lightning_tricks.monitors.ranks.failed_fit import is_consequence
from lightning_tricks.monitors.ranks.hub import Hub
from lightning_tricks.monitors.ranks.rank_monitor import _Watch

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:552] Connection closed by peer [127.0.0.1]:6001"
LONG = 60.0  # seconds, for something that happens at once or never
NCCL = "NCCL communicator was aborted on rank 3."


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GLOO),
        RuntimeError(NCCL),
        RuntimeError("Broken pipe"),
        RuntimeError("Timed out waiting 30000ms for recv operation to complete"),
        DistBackendError("ncclRemoteError: A call failed, possibly as a remote process exited"),
        DistNetworkError("Failed to recv, got 0 bytes"),
        DistStoreError("wait timeout after 600000ms"),
        CheckpointException("write", {0: (RuntimeError(GLOO), None)}),
        raised(RuntimeError("could not save"), RuntimeError(GLOO)),
    ],
)
def test_what_a_dead_neighbour_causes_is_a_consequence(error):
    assert is_consequence(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad batch"),
        ValueError(GLOO),  # nothing that torch.distributed raises
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."),
        ConnectionResetError(104, "Connection reset by peer"),  # of a bucket that data come from
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        CheckpointException("write", {0: (OSError("No space left on device"), None)}),
        KeyboardInterrupt(),
    ],
)
def test_what_went_wrong_in_this_process_is_none(error):
    assert not is_consequence(error)


def test_an_error_that_came_while_another_was_handled_is_its_consequence_and_a_ring_of_them_ends():
    first, second = RuntimeError(GLOO), KeyError("x")
    second.__context__, first.__context__ = first, second
    assert is_consequence(second)


def test_the_lines_name_rank_host_and_reason():
    member = Member(2, 4, "node7", 1234)
    assert (
        member.failed(ValueError("bad batch\nmore of it")) == "rank 2 of 4 on node7 failed first: ValueError: bad batch"
    )
    assert member.failed(StopIteration()) == "rank 2 of 4 on node7 failed first: StopIteration"
    gone = "rank 2 of 4 on node7 is gone without a word (process 1234): killed, or out of memory (dmesg tells)"
    assert member.gone() == gone


class Ranks:
    """The connections of `world` ranks to one hub, all in this process; what each hears is kept."""

    def __init__(self, world: int) -> None:
        self.hub = Hub(("127.0.0.1",))
        self.hub.start()
        members = [Member(rank, world, "here", os.getpid()) for rank in range(world)]
        self.connections = [Connection(member, self.hub.address, members[0]) for member in members]
        self.heard: dict[int, str | None] = {}
        self.threads = [threading.Thread(target=self.listen, args=(rank,), daemon=True) for rank in range(world)]
        for connection, thread in zip(self.connections, self.threads, strict=True):
            assert connection.connect()
            thread.start()

    def listen(self, rank: int) -> None:
        self.heard[rank] = self.connections[rank].listen()

    def wait(self, *ranks: int) -> dict[int, str | None]:
        for rank in ranks or range(len(self.connections)):
            self.threads[rank].join(10)
        return dict(sorted(self.heard.items()))

    def die(self, rank: int) -> None:
        """What the system does for a process that dies."""
        self.connections[rank]._sock.shutdown(socket.SHUT_RDWR)
        self.connections[rank]._sock.close()


@pytest.fixture
def ranks():
    made: list[Ranks] = []

    def make(world: int) -> Ranks:
        made.append(Ranks(world))
        return made[-1]

    yield make
    for each in made:
        for connection in each.connections:
            connection.close()
        each.hub.close()
        each.hub.join(10)


def reset(sock: socket.socket) -> None:
    """What a network does that forgets a connection: the other end hears that there is none."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def test_a_broken_connection_is_no_death(ranks, capfd):
    two = ranks(2)
    member = Member(2, 3, "far", 1)
    reset(socket.create_connection(("127.0.0.1", two.hub.address.port)))  # a stranger's is nobody's
    far = socket.create_connection(("127.0.0.1", two.hub.address.port))
    far.sendall(json.dumps({"token": two.hub.address.token, **vars(member)}).encode() + b"\n")
    assert b"welcome" in far.recv(100)
    reset(far)
    said: list[str] = []
    until(lambda: said.append(capfd.readouterr().err) or "broke" in said[-1])
    two.connections[1].fail(ValueError("later"))  # the hub has gone on
    assert set(two.wait().values()) == {"rank 1 of 2 on here failed first: ValueError: later"}
    lines = [line for line in "".join(said).splitlines() if line.startswith("RankMonitor")]
    assert [line.partition(" (")[0] for line in lines] == ["RankMonitor: the connection of rank 2 on far broke"]


def test_a_broken_connection_to_rank_0_is_no_death_of_it(capfd):
    with socket.create_server(("127.0.0.1", 0)) as server:
        rank_0, member = Member(0, 2, "there", 1), Member(1, 2, "here", 2)
        connection = Connection(member, Address(("127.0.0.1",), server.getsockname()[1], "word"), rank_0)
        connecting = threading.Thread(target=connection.connect)
        connecting.start()
        hub, _ = server.accept()
        assert b"word" in hub.recv(1000)
        hub.sendall(b'{"welcome": true}\n')
        connecting.join()
        reset(hub)
        assert connection.listen() is None
    connection.close()
    assert "the connection of rank 1 on here broke" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("say", "expected"),
    [
        (Connection.close, {"bye": True}),
        (
            lambda connection: connection.fail(ValueError("early")),
            {"failed": "rank 1 of 2 on here failed first: ValueError: early"},
        ),
    ],
)
def test_what_is_said_before_the_hub_has_answered_the_greeting_reaches_it(say, expected):
    """A goodbye that is lost then would be taken for a death."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        rank_0, address = Member(0, 2, "there", 1), Address(("127.0.0.1",), server.getsockname()[1], "word")
        connection = Connection(Member(1, 2, "here", 2), address, rank_0)
        connecting = threading.Thread(target=connection.connect, daemon=True)
        connecting.start()
        hub, _ = server.accept()
        hub.settimeout(10)
        with hub, hub.makefile("rb") as heard:
            assert b"word" in heard.readline()
            say(connection)
            assert json.loads(heard.readline()) == expected
            connection.close()
        connecting.join(10)
        assert not connecting.is_alive()


def test_a_connection_that_is_closed_before_it_is_made_is_not_made():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address(("127.0.0.1",), server.getsockname()[1], "word")
        connection = Connection(Member(1, 2, "here", 2), address, Member(0, 2, "there", 1))
        sock = socket.create_connection(server.getsockname())
        connection.close()
        assert not connection._greet(sock)
        hub, _ = server.accept()
        with hub:
            assert hub.recv(100) == b""  # the hub would take an end after a greeting for a death


def test_a_hub_that_ends_before_it_greets_says_goodbye():
    hub = Hub(("127.0.0.1",))
    late = Connection(Member(1, 2, "here", 2), hub.address, Member(0, 2, "here", 1))
    sock = socket.create_connection(("127.0.0.1", hub.address.port))
    hub._accept()
    hub.close()
    hub.start()
    hub.join(10)
    assert late._greet(sock)
    assert late.listen() is None
    late.close()


def test_a_hub_that_cannot_accept_a_connection_now_accepts_it_later(monkeypatch):
    hub, pauses = Hub(("127.0.0.1",)), []

    def accept():
        raise OSError(24, "Too many open files")

    with socket.create_connection(("127.0.0.1", hub.address.port)) as sock, sock.makefile("rb") as heard:
        with monkeypatch.context() as now:
            now.setattr(hub, "_server", SimpleNamespace(accept=accept))
            now.setattr(hub_file.time, "sleep", pauses.append)
            hub._accept()
        assert (pauses, hub._members) == ([0.1], {})
        hub._accept()
        assert len(hub._members) == 1
        hub.close()
        hub.start()
        assert heard.read() == b'{"bye": true}\n'
        hub.join(10)


def test_on_one_host_no_other_host_can_connect():
    hubs = [Hub(("127.0.0.1",), one_host=one_host) for one_host in (True, False)]
    for hub in hubs:
        hub.start()
        socket.create_connection(("127.0.0.1", hub.address.port)).close()
    with pytest.raises(ConnectionRefusedError):  # another address of this host
        socket.create_connection(("127.0.0.2", hubs[0].address.port))
    socket.create_connection(("127.0.0.2", hubs[1].address.port)).close()
    for hub in hubs:
        hub.close()
        hub.join(10)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_all_hear_of_the_first_failure_and_of_no_other_also_who_comes_late(ranks):
    three = ranks(3)
    three.connections[1].fail(ValueError("bad batch"))
    three.wait(1)
    three.connections[2].fail(KeyError("later"))
    three.die(0)
    line = "rank 1 of 3 on here failed first: ValueError: bad batch"
    assert set(three.wait().values()) == {line}
    late = Connection(Member(3, 4, "here", os.getpid()), three.hub.address, three.connections[0].member)
    assert late.connect()
    assert late.listen() == line
    late.close()


def test_a_failure_before_the_connection_is_there_is_told_when_it_is(ranks):
    two = ranks(2)
    early = Connection(Member(2, 3, "here", os.getpid()), two.hub.address, two.connections[0].member)
    early.fail(ValueError("at once"))
    assert early.connect()
    assert set(two.wait().values()) == {"rank 2 of 3 on here failed first: ValueError: at once"}
    early.close()


def test_a_death_without_a_word_is_told_to_the_others(ranks):
    three = ranks(3)
    three.die(2)
    heard = three.wait(0, 1)
    assert heard[0] == heard[1] == Member(2, 3, "here", os.getpid()).gone()


def test_an_end_in_order_is_no_failure_of_any_rank(ranks):
    three = ranks(3)
    three.connections[2].close()
    three.connections[1].close()
    assert three.wait(1, 2) == {1: None, 2: None}
    assert three.threads[0].is_alive()
    three.connections[0].close()
    assert three.wait(0)[0] is None
    three.hub.close()
    three.hub.join(10)
    assert not three.hub.is_alive()


def test_when_rank_0_ends_in_order_the_others_stop_listening(ranks):
    three = ranks(3)
    three.connections[0].close()
    three.hub.close()
    assert three.wait() == {0: None, 1: None, 2: None}


def test_what_has_nothing_to_do_with_the_run_is_not_heard(ranks):
    two = ranks(2)
    port = two.hub.address.port
    forged = {"token": "x", "rank": 1, "world": 2, "host": "there", "pid": 1}
    for sent in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"failed": "not so"}\n',
        b"[]\n",
        json.dumps(forged).encode() + b"\n",
    ):
        with socket.create_connection(("127.0.0.1", port)) as stranger, suppress(ConnectionResetError):
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(100) == b""  # no answer, and the hub has closed it
    with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger, suppress(ConnectionError):
        for _ in range(40):
            stranger.sendall(b"x" * 65536)
        assert stranger.recv(100) == b""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as silent, silent.makefile("rb") as heard:
        until(lambda: len(two.hub._members) == 3)
        two.connections[1].fail(ValueError("so"))
        assert set(two.wait().values()) == {"rank 1 of 2 on here failed first: ValueError: so"}
        two.hub.close()
        assert heard.read() == b'{"bye": true}\n'  # and no word of the failure


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_hub_that_cannot_go_on_says_goodbye_and_is_taken_for_no_death(ranks, monkeypatch):
    two = ranks(2)
    monkeypatch.setattr(two.hub, "_tell", lambda line: 1 / 0)
    two.connections[1].fail(ValueError("bad batch"))
    assert two.wait() == {0: None, 1: None}


def test_another_program_on_the_port_is_not_taken_for_rank_0(monkeypatch):
    monkeypatch.setattr("lightning_tricks.monitors.ranks.connection.CONNECT_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            with suppress(OSError):
                while True:
                    sock, _ = server.accept()
                    sock.sendall(b"220 smtp\r\n")
                    sock.close()

        threading.Thread(target=answer, daemon=True).start()
        rank_0 = Member(0, 2, "there", 1)
        address = Address(("127.0.0.1",), server.getsockname()[1], "token")
        assert not Connection(Member(1, 2, "here", 2), address, rank_0).connect()


def test_a_rank_that_cannot_reach_rank_0_says_so_unless_it_has_ended_meanwhile(monkeypatch, capfd):
    monkeypatch.setattr("lightning_tricks.monitors.ranks.connection.CONNECT_SECONDS", 0.0)
    address = Address(("node0", "10.0.0.1"), 4321, "token")
    for ends in (False, True):
        watch = _Watch(Connection(Member(1, 2, "here", 2), address, Member(0, 2, "node0", 1)), None, 0.0)
        if ends:
            watch.close()
        watch.run()
        line = "RankMonitor: rank 1 cannot reach rank 0 at node0 or 10.0.0.1, port 4321: it is not watched\n"
        assert capfd.readouterr().err == ("" if ends else line)


class SIGTERMException(SystemExit):
    """Named as Lightning's, which it raises in the fit when the signal comes."""


@pytest.mark.parametrize(
    ("error", "waited"), [(SIGTERMException(), [1.0]), (SystemExit(), []), (KeyboardInterrupt(), [])]
)
def test_a_rank_that_is_told_to_end_leaves_and_waits_a_second_for_the_reason_of_a_launchers_signal(error, waited):
    monitor, seconds, left = RankMonitor(), [], []
    monitor._watch = SimpleNamespace(
        known=SimpleNamespace(wait=seconds.append), close=lambda: left.append("close"), join=left.append, hub=None
    )
    monitor.on_exception(None, None, error)
    assert (seconds, left, monitor._watch) == (waited, ["close", 1.0], None)


def test_a_negative_grace_is_refused():
    with pytest.raises(UsageError, match=r"RankMonitor.grace_seconds=-1: give 0 or more"):
        RankMonitor(grace_seconds=-1)


class Program:
    """A program that a fit has failed in; what is shown of an exception that nobody catches, and what ends then."""

    def __init__(self, monkeypatch) -> None:
        self.shown: list[BaseException] = []
        self.limits: list[float] = []
        monkeypatch.setattr(failed_fit, "end_within", self.limits.append)
        monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: self.shown.append(error))

    def fit(self, error: BaseException, hide: bool, children: tuple[subprocess.Popen, ...] = (), then=None) -> None:
        _call_and_handle_interrupt(lambda: None, error, hide, children, then)

    def uncaught(self, error: BaseException) -> tuple[list[BaseException], list[float]]:
        """Python's end of a program; what was shown, and the limits that were set."""
        sys.excepthook(type(error), error, error.__traceback__)
        shown, limits = list(self.shown), list(self.limits)
        self.shown.clear(), self.limits.clear()
        return shown, limits


def _call_and_handle_interrupt(trainer_fn, error, hide, children, then):
    """Lightning's function of that name, with its parameter's, when a fit raises."""
    fit = failed_fit.RunningFit()
    assert any(f"in {_call_and_handle_interrupt.__name__}" in line for line in fit.stack())
    try:
        raise error
    except BaseException:
        failed_fit.ExceptHook(fit, hide, 2.0, list(children)).install()
        if then is not None:
            raise then  # noqa: B904 - as a teardown does
        raise


def caught(function: Callable[..., None], *args, **kwargs) -> BaseException:
    try:
        function(*args, **kwargs)
    except BaseException as error:
        return error


def test_on_the_way_out_a_consequence_is_hidden_and_children_are_waited_for_and_ended(monkeypatch):
    program = Program(monkeypatch)
    children = tuple(
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({time_})"]) for time_ in (0, 1000)
    )
    error = caught(program.fit, RuntimeError(GLOO), True, children)
    assert program.uncaught(error) == ([], [7.0])  # a little later than what the children are given
    assert [child.wait(10) for child in children] == [0, -signal.SIGKILL]


def test_on_the_way_out_a_teardown_that_breaks_on_a_consequence_is_hidden_as_well(monkeypatch):
    program = Program(monkeypatch)
    error = caught(program.fit, RuntimeError(GLOO), True, then=RuntimeError("teardown"))
    assert str(error) == "teardown"
    assert program.uncaught(error) == ([], [7.0])


def test_a_rank_that_failed_by_itself_shows_its_traceback_and_ends_in_time(monkeypatch):
    program = Program(monkeypatch)
    error = caught(program.fit, ValueError("mine"), False)
    assert program.uncaught(error) == ([error], [7.0])


def test_what_the_program_raises_from_a_failed_fit_is_shown_and_ends_in_time(monkeypatch):
    program = Program(monkeypatch)
    error = raised(ValueError("the run failed"), caught(program.fit, RuntimeError(GLOO), True))
    assert program.uncaught(error) == ([error], [7.0])


def test_a_later_exception_of_a_program_that_goes_on_is_as_without(monkeypatch):
    """Also one that is raised while the fit's is handled: a consequence that the program has caught hides nothing."""
    program = Program(monkeypatch)
    first = caught(program.fit, RuntimeError(GLOO), True)
    own = ValueError("own")
    own.__context__ = first
    assert program.uncaught(raised(own)) == ([own], [])
    second = caught(program.fit, KeyError("second"), False, then=None)
    second.__context__ = first  # the second fit is a part of the first one's handling
    assert program.uncaught(second) == ([second], [7.0])


def test_the_hook_for_uncaught_exceptions_is_gone_when_the_program_has_dropped_the_exception(monkeypatch):
    program = Program(monkeypatch)
    before = sys.excepthook
    first = caught(program.fit, ValueError("first"), False)
    second = caught(program.fit, ValueError("second"), False)
    del first
    gc.collect()
    assert sys.excepthook is not before  # the second fit's is still needed
    del second
    gc.collect()
    assert sys.excepthook is before
    kept = caught(program.fit, ValueError("third"), False)
    users = sys.excepthook = lambda *_: None  # a hook that the user sets meanwhile
    del kept
    gc.collect()
    assert sys.excepthook is users


def test_of_a_failed_fit_nothing_is_kept(monkeypatch):
    """A program may go on with a smaller batch: the memory of the first must be free."""

    class Large:
        def fit(self):
            pass

    Program(monkeypatch)
    large = Large()
    alive = weakref.ref(large)
    error = caught(_call_and_handle_interrupt, large.fit, ValueError("out of memory"), False, (), None)
    hook = sys.excepthook
    del error, large
    gc.collect()
    assert alive() is None
    assert sys.excepthook is not hook


def test_a_process_that_hangs_on_its_way_out_is_ended():
    code = "import time; from lightning_tricks._exit import end_within; end_within(0.2); time.sleep(100)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, stderr=subprocess.DEVNULL).returncode == 1


def threads_of_ours() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rank-monitor")]


QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def test_one_process_has_nothing_to_watch():
    seen: list[list[str]] = []

    class Look(pl.Callback):
        def on_train_start(self, *_):
            seen.append(threads_of_ours())

    trainer = pl.Trainer(accelerator="cpu", devices=1, max_steps=1, callbacks=[RankMonitor(), Look()], **QUIET)
    trainer.fit(OneLayer(), data())
    assert seen == [[]]


class OneLayer(pl.LightningModule):
    def __init__(self, sleep: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.sleep = torch.nn.Linear(2, 1), sleep

    def training_step(self, batch, batch_idx):
        time.sleep(self.sleep)
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data(rows: int = 8):
    return torch.utils.data.DataLoader(torch.randn(rows, 2, generator=torch.Generator().manual_seed(0)))


def fit(*callbacks, steps: int = 3, rows: int = 8, **options):
    model = OneLayer()
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=steps, callbacks=list(callbacks), **QUIET, **options
    )
    trainer.fit(model, data(rows))
    return model.layer.weight.detach().clone()


class Stopped(pl.Callback):
    """Rank 1 stops in mid-run, as under a debugger, and is told to go on by rank 0."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 1 and trainer.global_rank == 1:
            Path("pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        elif batch_idx == 1:
            while not Path("pid").exists() or not Path("pid").read_text():
                time.sleep(0.05)
            pid = Path("pid").read_text()
            while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                time.sleep(0.05)
            time.sleep(1.0)  # what a false alarm with a grace of 0 would not survive
            os.kill(int(pid), signal.SIGCONT)


def in_two(rank: int, folder: str) -> None:
    os.environ.pop("PL_GLOBAL_SEED", None)
    os.chdir(folder)
    monitor = RankMonitor(grace_seconds=0.0)
    plain = fit()
    watched = fit(monitor)
    assert torch.equal(plain, watched)
    assert threads_of_ours() == []
    forked = fit(monitor, Stopped(), Leaves())  # the same monitor, a second fit
    assert torch.equal(plain, forked)

    before = sys.excepthook
    for go_on in (  # the program has caught it: it is not ended, nor is its next fit, whatever watches that
        lambda monitor, old: old.join(LONG),
        lambda monitor, old: fit(monitor, Outlast(old)),
        lambda monitor, old: fit(RankMonitor(grace_seconds=0.0), Outlast(old)),
        lambda monitor, old: fit(Outlast(old)),
    ):
        go_on(*both_fail())
    monitor = RankMonitor(grace_seconds=1.0)
    try:
        fit(monitor, Everywhere())
    except ValueError:
        assert torch.equal(plain, fit(Outlast(monitor._watch)))  # also while the exception is handled
    gc.collect()
    assert sys.excepthook is before
    until(lambda: not threads_of_ours())
    assert torch.equal(plain, fit(monitor))
    (Path(folder) / f"done{rank}").touch()


class Leaves(pl.Callback):
    """Rank 1 is slow to end, when rank 0 has ended."""

    def teardown(self, trainer, module, stage):
        time.sleep(0.5 * trainer.global_rank)


def both_fail() -> tuple[RankMonitor, threading.Thread]:
    """A fit that fails on both ranks, and is caught: its monitor, and the thread that watches it for the grace."""
    monitor = RankMonitor(grace_seconds=1.0)
    with pytest.raises(ValueError, match="everywhere"):
        fit(monitor, Everywhere())
    return monitor, monitor._watch


class Outlast(pl.Callback):
    """The fit goes on for longer than the watch of an earlier one."""

    def __init__(self, old: threading.Thread) -> None:
        self.old = old

    def on_train_start(self, *_):
        self.old.join(LONG)
        assert not self.old.is_alive()


class Everywhere(pl.Callback):
    def on_train_batch_start(self, *_):
        raise ValueError("everywhere")


SCRIPT = """
import os, signal
import pytorch_lightning as pl
import torch
from lightning_tricks.callbacks import RankMonitor

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts its background jobs with SIGINT ignored

class OneLayer(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        {step}
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    data = torch.utils.data.DataLoader(torch.randn(100, 2), num_workers={workers})
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=20, callbacks=[RankMonitor(2.0)],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(OneLayer(), data)
"""


def script(folder: Path, step: str, workers: int = 0) -> tuple[int, str]:
    """Run a pytorch_lightning program in two processes; its exit code and what it printed."""
    (folder / "train.py").write_text(SCRIPT.format(step=step, workers=workers))
    env = {name: value for name, value in os.environ.items() if name not in ("PL_GLOBAL_SEED", "MASTER_PORT")}
    done = subprocess.run(
        [python("pytorch_lightning"), "train.py"], cwd=folder, env={**env, "OMP_NUM_THREADS": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout


KILLED = "batch_idx == 3 and self.global_rank == 1 and os.kill(os.getpid(), signal.SIGKILL)"
INTERRUPTED = "batch_idx == 3 and self.global_rank == 0 and os.kill(os.getpid(), signal.SIGINT)"


@pytest.fixture(scope="module")
def beside_each_other(tmp_path_factory):
    """The processes of `in_two` with their folder, and a function that waits for the program of a step."""
    folders = {name: tmp_path_factory.mktemp("ranks") for name in ("two", KILLED, INTERRUPTED)}
    python("pytorch_lightning")
    two = two_processes.start(in_two, str(folders["two"]))
    programs = {KILLED: (script, folders[KILLED], KILLED, 1), INTERRUPTED: (script, folders[INTERRUPTED], INTERRUPTED)}
    with beside.threads(programs) as wait:
        yield two, folders["two"], wait


@pytest.mark.slow
def test_under_pytorch_lightning_and_with_data_workers_a_killed_rank_is_named(beside_each_other):
    code, out = beside_each_other[2](KILLED)
    assert code
    assert out.count("rank 1 of 2 on") == 1
    assert "is gone without a word" in out
    assert "Traceback" not in out


@pytest.mark.slow
def test_an_interrupt_is_as_without(beside_each_other):
    """Lightning's own words, its exit code, and none of ours."""
    code, out = beside_each_other[2](INTERRUPTED)
    assert code == 1
    assert "Detected KeyboardInterrupt" in out
    assert "rank 0 of 2" not in out


@pytest.mark.slow
def test_what_is_no_failure_ends_nothing_and_changes_nothing(beside_each_other):
    processes, folder, _ = beside_each_other
    two_processes.end(processes)
    assert {path.name for path in folder.glob("done*")} == {"done0", "done1"}
