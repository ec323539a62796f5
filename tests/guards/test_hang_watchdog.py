"""HangWatchdog in one process: the place is named, the rank that is behind as well, and nothing changes."""

import multiprocessing
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from harness.runs import On
from hung_run import STEP, Module, Rows, Stands, fit, trainer_with
from torch.utils.data import DataLoader, Dataset

from lightning_tricks._host import exit as _exit
from lightning_tricks._host.process import Process, start_ticks, this_process
from lightning_tricks.callbacks import HangWatchdog
from lightning_tricks.guards.watchdog import hang_watchdog
from lightning_tricks.guards.watchdog.channel import Verdict
from lightning_tricks.guards.watchdog.hang_watchdog import FAILED, RunPosition, judge

LONG = 120.0  # seconds, for something that happens soon or never


class Reports:
    """What the watch says; `wait_for` returns when it has said something with a text."""

    def __init__(self, monkeypatch) -> None:
        self.said: list[str] = []
        self._new = threading.Condition()
        monkeypatch.setattr(hang_watchdog, "say", self._say)

    def _say(self, text: str) -> None:
        with self._new:
            self.said.append(text)
            self._new.notify_all()

    def wait_for(self, text: str) -> str:
        found = lambda: next((said for said in self.said if text in said.splitlines()[0]), None)  # noqa: E731
        with self._new:
            assert self._new.wait_for(found, LONG), self.said
        return found()


@pytest.fixture
def reports(monkeypatch):
    return Reports(monkeypatch)


def watchdog(limit: float = 0.2, **options) -> HangWatchdog:
    return HangWatchdog(limit_seconds=limit, first_step_seconds=60.0, checkpoint_seconds=limit, **options)


PLACES = {
    "training loader": "waiting for the training loader before step 4",
    "forward": "in the forward of step 4",
    "backward": "in the backward of step 4",
    "optimizer": "in the optimizer of step 3",
    "validation loader": "waiting for the validation loader, batch 1, after step 3",
    "validation": "in the validation after step 3, batch 2",
    "checkpoint": "in the checkpoint after step 3",
}


@pytest.mark.parametrize("place", PLACES)
def test_a_place_that_lasts_is_named_with_the_stacks_of_all_threads(tmp_path, reports, place):
    hung = []

    def hang() -> None:
        hung.append(reports.wait_for(PLACES[place]))

    stands = Stands(place, hang)
    if place == "optimizer":  # it comes within the third step
        original = stands.at
        stands.at = lambda at: (setattr(stands, "steps", stands.steps + (at == "optimizer")), original(at))[1]
    saver = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=STEP)
    trainer = fit(stands, watchdog(), saver, enable_checkpointing=True)
    assert trainer.global_step == 6
    (report,) = hung
    first, stacks = report.split("\n", 1)
    assert first.startswith("HangWatchdog: rank 0 of 1 on ")
    assert "(limit_seconds=0.2)" in first or (place == "checkpoint" and "(checkpoint_seconds=0.2)" in first)
    assert "<locals>.hang" in stacks
    assert "Thread MainThread (most recent call last):" in stacks


class Waits(Dataset):
    """The worker of the second row waits until it may go on."""

    def __init__(self) -> None:
        self.may_go_on = multiprocessing.get_context("fork").Event()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int):
        assert index != 1 or self.may_go_on.wait(LONG)
        return torch.ones(4)


@pytest.mark.long
def test_a_loader_with_workers_is_named_with_them_and_the_one_that_has_the_next_batch(reports):
    rows = Waits()

    def release() -> None:
        reports.wait_for("over Waits, 2 workers, 2 alive; worker 1 (process ")
        rows.may_go_on.set()

    thread = threading.Thread(target=release)
    thread.start()
    loaders = {"short": DataLoader([torch.ones(4)] * 4), "long": DataLoader(rows, num_workers=2)}
    loaders["long"].multiprocessing_context = "fork"
    module = Module(Stands(""))
    module.training_step = lambda batch, batch_idx: module(batch["long"])
    trainer_with(watchdog(), max_steps=4, limit_val_batches=0).fit(module, loaders)
    thread.join()
    report = next(said for said in reports.said if "over Waits" in said)
    assert "DataLoader (number 1 of 2, from 0) over Waits" in report.splitlines()[0]


FIRST, OTHER, SAVE, HOOK = "first_step_seconds", "limit_seconds", "checkpoint_seconds", "hook_seconds"


@pytest.mark.parametrize(
    ("values", "limit"),
    [
        ({"part": "forward", "step": 5}, FIRST),
        ({"part": "loader", "step": 6}, OTHER),
        ({"part": "", "step": 6}, OTHER),
        ({"part": "validation", "evaluating": True, "validation_batches": 1, "step": 6}, FIRST),
        ({"part": "loader", "evaluating": True, "validation_batches": 1, "step": 5}, OTHER),
        ({"part": "validation", "evaluating": True, "validation_batches": 2, "step": 5}, OTHER),
        ({"part": "validation", "evaluating": True, "validation_batches": 1, "validations": 1, "step": 6}, OTHER),
        ({"part": "checkpoint", "step": 5}, SAVE),
        ({"part": "checkpoint", "evaluating": True}, SAVE),
        ({"part": "forward", "step": 6, "compiling": True}, FIRST),
        ({"part": "hook", "step": 6}, HOOK),
        ({"part": "hook", "step": 5}, HOOK),
        ({"part": "hook", "step": 6, "evaluating": True, "validations": 1}, HOOK),
    ],
)
def test_the_first_step_the_first_batch_a_hook_and_a_checkpoint_have_limits_of_their_own(values, limit):
    limits = RunPosition(Process(0, 1, "here", 1), **values).limits(first_step=5)
    options = HangWatchdog()
    assert max(limits, key=lambda each: getattr(options, each)) == limit
    short = HangWatchdog(limit_seconds=10.0)
    assert (options.hook_seconds, short.hook_seconds) == (3000.0, 100.0)  # ten times that of a batch
    in_first = RunPosition(Process(0, 1, "here", 1), part="hook", step=5).limits(first_step=5)
    assert max(getattr(short, each) for each in in_first) == 1800.0


class Clock:
    """A time that the test sets, for the watch."""

    def __init__(self, monkeypatch) -> None:
        self.now = 1000.0
        self.timers: list[tuple[float, bool] | None] = []  # how faulthandler's was set: seconds, whether it ends
        monkeypatch.setattr(hang_watchdog, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(_exit, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(_exit, "faulthandler", self)
        monkeypatch.setattr(_exit, "_set", {})

    def dump_traceback_later(self, seconds, exit, file) -> None:
        self.timers.append((seconds, exit))

    def cancel_dump_traceback_later(self) -> None:
        self.timers.append(None)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


class Looks:
    """A watch of the thread that makes it, which looks when it is called, `seconds` later: what has it said then?"""

    def __init__(self, trainer, clock: Clock, reports: Reports, **options) -> None:
        self.watch = hang_watchdog._Watch(trainer, HangWatchdog(**options), None)
        self.watch.first_step = 0
        self.clock, self.reports = clock, reports

    def __call__(self, seconds: float = 0.0) -> list[str]:
        self.clock.now += seconds
        self.reports.said.clear()
        self.watch._look()
        return [said.splitlines()[0] for said in self.reports.said]


class Works(pl.loggers.CSVLogger):
    """A logger that uploads for long."""

    look = staticmethod(lambda: None)

    def log_metrics(self, metrics, step=None):
        self.look()


class Slow(torchmetrics.MeanMetric):
    look = staticmethod(lambda: None)

    def compute(self):
        self.look()
        return super().compute()


HOOKS = {
    "On.on_train_batch_end": lambda look: [On(on_train_batch_end=look)],
    "On.on_validation_epoch_end": lambda look: [On(on_validation_epoch_end=look)],
    "On.on_train_end": lambda look: [On(on_train_end=look)],
    "On.teardown": lambda look: [On(teardown=lambda *_, **__: look())],
    "On.on_before_optimizer_step": lambda look: [On(on_before_optimizer_step=look)],
}


@pytest.mark.parametrize("place", [*HOOKS, "Module.on_train_batch_end", "Works.log_metrics", "Slow.compute"])
def test_a_hook_a_logger_and_a_metric_are_places_of_their_own_for_ten_times_as_long(
    tmp_path, clock, reports, place, monkeypatch
):
    """A batch has 300 s; what works for longer at the end of a validation, as LMEval does, is no hang."""
    said = []

    def look(*_):
        if said or trainer.global_step < 2:
            return
        looks = Looks(trainer, clock, reports)
        looks()
        said.extend([looks(2990.0), looks(11.0)])

    logger = Works(tmp_path)
    monkeypatch.setattr(Works, "look", staticmethod(look if place == "Works.log_metrics" else lambda: None))
    monkeypatch.setattr(Slow, "look", staticmethod(look if place == "Slow.compute" else lambda: None))
    module = Module(Stands(""))
    module.metric = Slow()

    def validation_step(batch, batch_idx):
        module.metric.update(batch.sum())
        module.log("mean", module.metric, on_epoch=True)

    module.validation_step = validation_step
    if place == "Module.on_train_batch_end":
        module.on_train_batch_end = look
    trainer = trainer_with(*HOOKS.get(place, lambda _: [])(look), log_every_n_steps=1, max_steps=3)
    trainer._loggers = [logger]
    rows = DataLoader(Rows(Stands(""), ""))
    trainer.fit(module, rows, rows)
    before, after = said
    assert before == []
    assert after[0].startswith(
        f"HangWatchdog: rank 0 of 1 on {this_process(0, 1).host} has been in {place}, after step "
    )
    assert " for 3001 s (hook_seconds=3000): " in after[0]


class Told:
    """A connection over which rank 0 tells, when this rank is overdue, how long the one behind may stay where it is."""

    was_open, is_open, rank_0_left, verdict = True, True, False, None
    rank_0 = Process(0, 2, "node7", 1)

    def __init__(self, clock: Clock, *waits: float) -> None:
        self.clock, self.waits, self.asked_at = clock, list(waits), []

    def publish(self, place, overdue):
        if overdue and self.waits:
            self.asked_at.append(self.clock.now)
            self.verdict = Verdict("rank 0 of 2 on here is behind: ...", [], self.waits.pop(0))
        return True


def test_a_rank_that_waits_for_one_at_work_in_a_hook_asks_again_and_reports_when_that_is_too_long(clock, reports):
    """Rank 0 evaluates, where a hook has 3,000 s; the others wait in the forward, where they have 300."""
    said, told = [], Told(clock, 500.0, 200.0, 0.0)

    def step(_):
        if said:
            return
        looks = Looks(trainer, clock, reports)
        looks.watch._connection = told
        looks()
        for seconds in (299.0, 2.0, 298.0, 3.0, 198.0, 3.0):
            said.append(looks(seconds))

    module = Module(Stands(""))
    module.register_forward_pre_hook(lambda _, batch: step(batch) if trainer.global_step == 1 else None)
    trainer = trainer_with(max_steps=2, limit_val_batches=0)
    trainer.fit(module, DataLoader(Rows(Stands(""), "")))
    assert said[:5] == [[]] * 5
    assert [at - 1000.0 for at in told.asked_at] == [301.0, 602.0, 803.0]  # not later than a limit after the last time
    assert " has been in the forward of step 2 for 803 s (limit_seconds=300): " in said[5][0]
    assert said[5][1] == "HangWatchdog: rank 0 of 2 on here is behind: ..."


def test_a_watch_leaves_a_nearer_deadline_of_the_process_standing(clock, reports):
    """As one of RankMonitor, which promises to end a process that hangs after a failure."""

    def look(trainer, *_):
        looks = Looks(trainer, clock, reports)
        deadline = _exit.end_within(3.0)
        looks(1.0)
        deadline.cancel()
        looks.watch._deadline.cancel()

    fit(Stands(""), On(on_train_batch_end=look), max_steps=1)
    assert clock.timers == [(3.0, True), (2.0, True), (3006.0, False), None]


def test_a_first_step_that_takes_long_is_not_reported(reports):
    first = On(on_train_batch_start=lambda *args: args[-1] == 0 and time.sleep(1.0))  # five limits
    fit(Stands(""), HangWatchdog(0.2, 60.0), first)
    assert not [said for said in reports.said if "step 1" in said or "before the first step" in said]


def test_training_is_the_same_to_the_bit_and_nothing_is_left_over():
    weights = []
    for callbacks in ([], [HangWatchdog()]):
        torch.manual_seed(1)
        trainer = fit(Stands(""), *callbacks)
        weights.append([p.detach() for p in trainer.model.parameters()] + [torch.get_rng_state()])
    assert all(map(torch.equal, *weights))
    assert "hang-watchdog" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("twice", [False, True])
def test_after_a_fit_that_failed_the_watch_ends_also_where_no_hook_tells_it(reports, twice):
    """With `abort` it would end a program that has caught the exception."""
    callback, errors = watchdog(0.5, abort=True), [KeyError("in the hook"), ValueError("bad batch")]

    def fail(*_):
        raise errors.pop()

    hooks = {"on_train_batch_end": fail, **({"on_exception": fail} if twice else {})}
    with pytest.raises((ValueError, KeyError)):
        fit(Stands(""), On(**hooks), callback)
    thread = next((each for each in threading.enumerate() if each.name == "hang-watchdog"), None)
    assert twice or thread is None
    if thread is not None:
        thread.join(LONG)
        assert not thread.is_alive()
    assert fit(Stands(""), callback).global_step == 6  # the same callback watches the next fit
    assert reports.said == []


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("miss", [None, RuntimeError("changed size")])
def test_a_look_that_fails_is_repeated_and_the_third_in_a_row_ends_the_watch(monkeypatch, reports, ends, miss):
    real, looks = hang_watchdog.RunningCall.stack, []

    def stack(call):
        looks.append(call)
        if not ends and len(looks) % 3 == 0:
            return real(call)
        if miss is not None:
            raise miss
        return []

    monkeypatch.setattr(hang_watchdog.RunningCall, "stack", stack)
    stands = Stands("forward", lambda: time.sleep(1.0) if ends else reports.wait_for(PLACES["forward"]))
    fit(stands, watchdog())
    line = [said.partition(" is ")[2] for said in reports.said if "watched" in said]
    assert line == (["not watched now: RuntimeError: changed size"] if ends and miss is not None else [])
    assert (len(looks) == 3) is ends


@pytest.mark.parametrize("run", [{"fast_dev_run": 2}, {}], ids=["a trial run", "a test"])
def test_only_a_fit_and_a_validation_are_watched(run):
    watched = []

    def look(*_):
        watched.append("hang-watchdog" in [thread.name for thread in threading.enumerate()])

    looks = On(on_train_batch_start=look, on_validation_batch_start=look, on_test_batch_start=look)
    if run:
        fit(Stands(""), HangWatchdog(), looks, **run)
    else:
        module = Module(Stands(""))
        module.test_step = lambda batch, batch_idx: None
        trainer_with(HangWatchdog(), looks).test(module, DataLoader(torch.ones(2, 4)), verbose=False)
    assert watched == [False] * (4 if run else 2)


def place(rank: int, **values) -> RunPosition:
    return RunPosition(Process(rank, 3, "node7", 100 + rank), **{"step": 7, "micro_batches": 8, **values})


def named(*places: RunPosition, silent: tuple[int, ...] = ()) -> str:
    processes = {each.process.rank: each.process for each in places}
    return judge(processes, {each.process.rank: each.to_dict() for each in places}, silent)[0]


def test_the_rank_that_began_the_fewest_collectives_is_behind():
    waits = {"part": "backward", "collectives": {"0": 12}}
    behind = place(1, part="backward", collectives={"0": 11}, detail="hook.py:3 in slow")
    line = "rank 1 of 3 on node7 is behind: in the backward of step 8: hook.py:3 in slow"
    assert named(place(0, **waits), behind, place(2, **waits)) == line


def test_on_a_mesh_the_rank_that_no_neighbour_is_behind_of_is_behind():
    """Rank 1 stands still, which stops 0 in their row and 3 in their column; 3 stops 2, that has no group with 1.

    All have begun as many collectives with all ranks, and 1 is the last one in a group that 2 is not in.
    """
    counts = [
        {"all": 3, "row 0": 6, "column 0": 5},
        {"all": 3, "row 0": 5, "column 1": 5},
        {"all": 3, "row 2": 7, "column 0": 5},
        {"all": 3, "row 2": 6, "column 1": 6},
    ]
    ranks = [place(rank, part="forward", collectives=each) for rank, each in enumerate(counts)]
    assert named(*ranks) == "rank 1 of 3 on node7 is behind: in the forward of step 8"
    assert named(*reversed(ranks)) == named(*ranks)


def test_without_that_count_the_rank_that_has_fetched_the_fewest_batches_is_behind():
    ranks = [place(0, part="backward"), place(1, part="loader", micro_batches=7, step=6, detail="DataLoader")]
    line = "rank 1 of 3 on node7 is behind: waiting for the training loader before step 7: DataLoader"
    assert named(*ranks, place(2, part="forward")) == line
    inside = [place(rank, part="validation", evaluating=True) for rank in (0, 1)]
    assert named(*inside, place(2, part="")).startswith("rank 2 of 3")


def test_where_all_are_alike_no_rank_is_accused():
    line = "no rank is behind the others: waiting for the training loader before step 8"
    assert named(*(place(rank, part="loader", detail="DataLoader") for rank in range(3))) == line


def test_a_rank_in_a_hook_is_named_with_it_and_for_how_long():
    hook = {"part": "hook", "where": "On.on_validation_epoch_end", "evaluating": True, "validation_batches": 3}
    late = place(0, seconds=290.0, collectives={"0": 3}, **hook)
    saves = place(1, part="checkpoint", validations=1, validation_batches=3, collectives={"0": 4})
    assert named(late, saves) == "rank 0 of 3 on node7 is behind: in On.on_validation_epoch_end, after step 7 for 290 s"


def test_a_rank_that_gives_no_answer_is_named_with_the_place_it_told_last():
    line = named(place(0, part="backward"), place(1, part="forward"), silent=(1, 2))
    reason = "stopped, gone, or in C code that holds Python's lock"
    assert line == (
        f"rank 1 of 3 on node7 gives no sign of life, last seen in the forward of step 8: {reason}; "
        f"rank 2 of 3 gives no sign of life: {reason}"
    )


def test_a_rank_that_has_left_is_named_with_its_error():
    left = place(1, part=FAILED, detail="ValueError: bad batch")
    line = "rank 1 of 3 on node7 has left its run after step 7: ValueError: bad batch"
    assert named(place(0, part="backward"), left, place(2)) == line
    ended = place(2, part="ended")
    assert named(place(0, part="forward"), place(1), ended).startswith("rank 2 of 3 on node7 is at the end of its run")


def test_an_uneven_validation_is_told_from_one_that_is_slow():
    inside = {"part": "validation", "evaluating": True, "validations": 1}
    done = place(2, validations=2, validation_batches=3, collectives={"0": 20})
    ranks = [place(rank, validation_batches=4, collectives={"0": 30}, **inside) for rank in (0, 1)]
    assert named(*ranks, done) == (
        "uneven validation: rank 2 of 3 on node7 had 3 batches, ranks 0, 1 are at batch 4: give every rank the same "
        "number, such as by Trainer.limit_val_batches"
    )
    slow = [place(0, validations=2, validation_batches=3), place(1, validation_batches=2, **inside)]
    assert named(*slow) == "rank 1 of 3 on node7 is behind: in the validation after step 7, batch 2"


def test_many_silent_or_failed_ranks_are_one_short_line():
    processes = {rank: Process(rank, 2000, "node7", rank) for rank in range(2000)}
    line, _ = judge(processes, {}, set(range(1, 2000)))
    assert line.count("gives no sign of life") == 8
    assert line.endswith("; and 1991 more ranks")
    failed = {rank: {"part": FAILED, "detail": "ValueError: bad batch"} for rank in range(2000)}
    assert judge(processes, failed, set())[0].count("has left its run") == 8


@pytest.mark.parametrize(
    ("channel", "said"),
    [
        ({"was_open": False}, None),  # it could not connect, and has said so
        ({"is_open": False}, "rank 0 of 2 on node7 gives no sign of life: stopped, gone, or in C code that holds"),
        ({"is_open": True}, "rank 0 of 2 on node7 gives no sign of life: stopped, gone, or in C code that holds"),
        ({"is_open": False, "rank_0_left": True}, "rank 0 of 2 on node7 has ended its run: the others have more steps"),
    ],
)
def test_without_a_verdict_rank_0_is_named_unless_it_has_ended_in_order(clock, reports, channel, said):
    told, said_then = Told(clock), []
    vars(told).update(channel)

    def look(*_):
        looks = Looks(trainer, clock, reports, hook_seconds=300.0)
        looks.watch._connection = told
        looks()
        said_then.extend([looks(299.0), looks(1.0), looks(7.5), looks(1.0), looks(1.0)])

    trainer = trainer_with(On(on_validation_batch_start=look), max_steps=STEP, limit_val_batches=1)
    trainer.fit(Module(Stands("")), DataLoader(Rows(Stands(""), "")), DataLoader(Rows(Stands(""), "")))
    waits = told.is_open and told.was_open  # 8 s, for rank 0's answer
    assert [bool(lines) for lines in said_then] == [False, not waits, False, waits, False]
    place, *line = said_then[3 if waits else 1]
    assert " has been in On.on_validation_batch_start, after step 3 for 30" in place
    assert [each.startswith(f"HangWatchdog: {said}") for each in line] == ([] if said is None else [True])


@pytest.mark.long
def test_a_process_is_killed_only_if_it_is_the_same_on_this_host():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    own = Process(1, 2, this_process(0, 2).host, child.pid, start_ticks(child.pid))
    for other in (replace(own, host="elsewhere"), replace(own, started=own.started + 1), replace(own, started=None)):
        other.kill()
        assert child.poll() is None
    own.kill()
    assert child.wait(LONG) == -signal.SIGKILL
