"""ExactResume: kill -9 anywhere, resume, and every loss, lr, norm, batch and weight is that of the unbroken run."""

import multiprocessing
import signal
import warnings
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from exact_run import Rows, Stream, loaders, run, run_all, said
from harness.models import Small
from harness.processes import free_port, processes
from harness.runs import On, trainer_with
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_tricks import ExactResume, SafeCheckpoint
from lightning_tricks.data import ShardWriter, TokenData

UNTRUE = "ended before the epoch ended"  # a warning of Lightning's
BY_STEPS = {"max_steps": 20, "max_epochs": -1}
NEVER = {"limit_val_batches": 0}
BY_METRIC = {"every_n_train_steps": 0, "every_n_epochs": 1, "monitor": "val", "save_top_k": 1}
SAFE = partial(SafeCheckpoint, every_n_train_steps=2)
ALWAYS = {"every_n_train_steps": 0, "train_time_interval": timedelta(0)}
# Each kind of loader at every batch: test_exact_resume_parts.py. Here, name: (loaders, options of the run, the
# micro-batches at which it is killed, one after the other; -N is the validation after step N). 12 are an epoch.
CASES = {
    "the first batch, mid-epoch, the epoch's last batch, the next one's first, mid-epoch": (
        "shuffle", {}, [1, 5, 12, 13, 15]
    ),
    "2 workers, a window of 4": ("shuffle/2", {"accumulate_grad_batches": 4, "num_sanity_val_steps": 1}, [7, 16]),
    "a stream with a state in a window of 4": ("stateful", {"accumulate_grad_batches": 4, "saver": ALWAYS}, [7]),
    "a StatefulDataLoader": ("torchdata/2", {}, [5]),
    "max_steps, no validation": ("shuffle", BY_STEPS | NEVER, [13, 15]),
    "validation in mid-window": ("shuffle", {"val_check_interval": 3, "accumulate_grad_batches": 2}, [5]),
    "SafeCheckpoint, in a validation": ("shuffle", {"val_check_interval": 6, "saver": SAFE}, [5, -6]),
    "saves by a metric": ("shuffle", {"val_check_interval": 0.5, "saver": BY_METRIC}, [7, 15]),
}  # fmt: skip


def launch(function, *args, world=1, **options):
    """Exit code of a function in processes of its own, which are killed together if at all."""
    group = {"world": world, "port": free_port()} if world > 1 else {}
    ranks = [group | {"rank": rank} if group else {} for rank in range(world)]
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=function, args=args, kwargs=options | own) for own in ranks]
    for process in started:
        process.start()
    for process in started:
        process.join()
    return min(process.exitcode for process in started)


# What is done in the folder of a test, by a process that starts the runs as its own children.


def unbroken_runs(folder):
    run_all(folder, {name: case[:2] for name, case in CASES.items()})


def killed_and_resumed(folder, kind, options, kills):
    for kill_at in kills:
        assert launch(run, folder / "run", kind, kill_at=kill_at, **options) == -signal.SIGKILL
    assert launch(run, folder / "run", kind, **options) == 0


def other_workers(folder):
    assert launch(run, folder / "run", "shuffle", kill_at=8) == -signal.SIGKILL
    assert launch(run, folder / "run", "shuffle/2") == 0


def more_steps(folder):
    for steps in (7, 15, 20):
        assert launch(run, folder / "run", "shuffle", **BY_STEPS | NEVER | {"max_steps": steps}) == 0


def two_resume(folder, kind, options):
    assert launch(run, folder / "whole", kind, world=2, **options) == 0
    # three or four micro-batches an epoch, or six
    kill_at = 5 if kind == "stream/2" else 9
    assert launch(run, folder / "run", kind, kill_at=kill_at, world=2, **options) == -signal.SIGKILL
    assert launch(run, folder / "run", kind, world=2, **options) == 0


def two_then_one(folder):
    assert launch(run, folder / "two", "numbers", world=2) == 0
    assert launch(run, folder / "run", "numbers", kill_at=5, world=2) == -signal.SIGKILL
    assert launch(run, folder / "run", "numbers", accumulate_grad_batches=2) == 0


OF_TWO = [("stream/2", {"accumulate_grad_batches": 4}), ("shuffle", {"strategy": "fsdp2"})]
RUNS = {
    "unbroken": (unbroken_runs,),
    **{name: (killed_and_resumed, *case) for name, case in CASES.items()},
    "other workers": (other_workers,),
    "more steps": (more_steps,),
    **{f"two, {kind} {options}": (two_resume, kind, options) for kind, options in OF_TWO},
    "two, then one": (two_then_one,),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A function that waits for the runs of that name, and gives their folder."""
    folders = {name: tmp_path_factory.mktemp("exact") for name in RUNS}
    with processes({name: (what, folders[name], *args) for name, (what, *args) in RUNS.items()}) as wait:
        yield lambda name: (wait(name), folders[name])[1]


def differences(folder: Path, reference: Path, rank: int = 0) -> list:
    got, expected = said(folder, rank), said(reference, rank)
    return [(expected.get(key), got.get(key)) for key in expected | got if got.get(key) != expected.get(key)]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_killed_and_resumed_a_run_is_the_unbroken_one_to_the_bit(ended, case):
    folder, unbroken = ended(case), ended("unbroken")
    assert differences(folder / "run", unbroken / case) == []
    steps = [key for key in said(unbroken / case) if key[0] == "step"]
    assert len(steps) >= 6
    assert sum(key[0] == "weights" for key in said(folder / "run")) == 1


@pytest.mark.long
def test_rows_may_be_made_by_another_number_of_workers(ended):
    folder = ended("other workers")
    assert differences(folder / "run", ended("unbroken") / next(iter(CASES))) == []


@pytest.mark.long
def test_a_finished_run_is_carried_on_with_more_steps(ended):
    got, expected = said(ended("more steps") / "run"), said(ended("unbroken") / "max_steps, no validation")
    assert {key: got[key] for key in expected if key[0] in ("batch", "step")} == {
        key: expected[key] for key in expected if key[0] in ("batch", "step")
    }
    assert got["weights", 0] == expected["weights", 0]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "options"), OF_TWO)
def test_two_processes_resume_each_with_its_own_state(ended, kind, options):
    folder = ended(f"two, {kind} {options}")
    for rank in range(2):
        assert differences(folder / "run", folder / "whole", rank) == []
    assert said(folder / "run", 0)["batch", 1]["data"] != said(folder / "run", 1)["batch", 1]["data"]


@pytest.mark.long
def test_one_process_takes_the_rows_of_two(ended):
    folder = ended("two, then one")
    of_two = [said(folder / "two", rank) for rank in range(2)]
    of_one = said(folder / "run", 0)
    for step in range(6, 13):  # batches of two rows: those of step s are 2s-1 and 2s of the one process
        rows = sorted(row for rank in of_two for row in rank["batch", step]["rows"])
        assert rows == sorted(row for batch in (2 * step - 1, 2 * step) for row in of_one["batch", batch]["rows"])


# From here on in this process.


class StopError(Exception):
    pass


class Note(pl.Callback):
    """Writes the batches down, and raises at one."""

    def __init__(self, stop_at=None):
        self.seen, self.stop_at = [], stop_at

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        total = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if total == self.stop_at:
            raise StopError
        self.seen.append((total, str(batch), torch.rand(()).item()))


def quiet():
    return Small(loss=lambda module, batch: sum(p.square().sum() for p in module.parameters()))


def reads():
    """Reads a value of the Trainer for which Lightning sets up the loaders, before it loads the checkpoint."""
    module = quiet()
    module.setup = lambda stage: module.trainer.estimated_stepping_batches
    return module


class Counts:
    """A loader that says where it is."""

    def __init__(self):
        self.at = 0

    def __iter__(self):  # no length: Lightning fetches one batch ahead
        while self.at < 6:
            self.at += 1
            yield torch.full((1, 4), float(self.at))

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


EPOCHS = {"max_epochs": 1, "max_steps": -1, "logger": False}


def fit(tmp_path, data, stop_at=None, ckpt_path=None, module=None, callbacks=(), **options):
    note = Note(stop_at)
    if ckpt_path is None:
        pl.seed_everything(1, verbose=False)
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, filename="{step}", save_top_k=-1)
    trainer = trainer_with(note, ExactResume(), saver, *callbacks, **EPOCHS | options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        filters = list(warnings.filters)
        with suppress(StopError):
            trainer.fit(module or quiet(), data, ckpt_path=ckpt_path)
        assert list(warnings.filters) == filters
    return note.seen, [line for line in (str(w.message) for w in caught) if "ExactResume" in line or UNTRUE in line]


def test_an_iterable_that_does_not_say_where_it_is_is_named_in_one_line(tmp_path):
    class Any:
        def __iter__(self):
            return iter(torch.ones(4, 1, 4))

    _, (line,) = fit(tmp_path, Any())
    assert line.startswith("ExactResume: training loader 1 (Any): it cannot be resumed in mid-epoch")
    assert "\n" not in line


def token_data(folder):
    """Our own data, which find their place themselves."""
    if not list(folder.glob("train*.bin")):
        with ShardWriter(folder, "train", 64) as writer:
            writer.append(torch.randint(64, (900,), generator=torch.Generator().manual_seed(1)).numpy())
    return TokenData(train=str(next(folder.glob("train*.bin"))), val=None, seq_len=8, micro_batch_size=2, seed=3)


@pytest.mark.parametrize(
    ("data", "make", "options"),
    [
        (lambda _: Counts(), quiet, {}),
        (lambda _: loaders("shuffle"), reads, {}),
        (token_data, quiet, {"max_steps": 6, "max_epochs": -1, "accumulate_grad_batches": 2}),
    ],
    ids=["a loader with a state", "loaders are made early", "TokenData"],
)
def test_stopped_after_three_steps_a_run_goes_on_with_the_next_batch(tmp_path, data, make, options):
    whole, _ = fit(tmp_path / "whole", data(tmp_path), module=make(), **options)
    done = 3 * options.get("accumulate_grad_batches", 1)
    first, _ = fit(tmp_path, data(tmp_path), stop_at=done + 2, module=make(), **options)
    checkpoint = tmp_path / "step=3.ckpt"
    rest, lines = fit(tmp_path, data(tmp_path), ckpt_path=checkpoint, module=make(), **options)
    assert first[:done] + rest == whole
    assert lines == []


def test_passing_over_rows_loads_none_of_them(tmp_path):
    class Counted(Rows):
        loaded = 0

        def __getitem__(self, row):
            type(self).loaded += 1
            return super().__getitem__(row)

    fit(tmp_path, DataLoader(Counted(100), shuffle=True), stop_at=91)
    Counted.loaded = 0
    seen, lines = fit(tmp_path, DataLoader(Counted(100), shuffle=True), ckpt_path=tmp_path / "step=90.ckpt")
    assert len(seen) == Counted.loaded == 10
    assert lines == []


@pytest.mark.parametrize(
    ("before", "after", "options", "line"),
    [
        (None, "shuffle", {"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs=1: ExactResume"),
        ("stream", "stream/2", {}, r"num_workers=2: training loader 1 .* has an IterableDataset.*had num_workers=0"),
        ("two", "shuffle", {}, "training loaders: the checkpoint's run had 2, this one has 1"),
        ("stream", "stream", {"module": reads}, r"estimated_stepping_batches: reading it has begun training loader 1 "),
    ],
)
def test_what_would_give_other_data_is_refused_in_one_line(tmp_path, before, after, options, line):
    if before:
        fit(tmp_path, loaders(before), stop_at=3)
    options = {name: value() if name == "module" else value for name, value in options.items()}
    with pytest.raises(ValueError, match=line):
        fit(tmp_path, loaders(after), ckpt_path=tmp_path / "step=2.ckpt" if before else None, **options)


def test_other_data_start_again_with_one_line(tmp_path):
    fit(tmp_path, DataLoader(Rows(8)), stop_at=3)
    _, lines = fit(tmp_path, DataLoader(Rows(9)), ckpt_path=tmp_path / "step=2.ckpt")
    assert lines == [
        "ExactResume: training loader 1 (DataLoader): its data had 8 rows and now have 9: they start again"
    ]
    _, lines = fit(tmp_path, Counts(), ckpt_path=tmp_path / "step=2.ckpt")
    assert lines == [
        "ExactResume: training loader 1 (Counts): the checkpoint has no place for it: its data start again"
    ]


def test_a_validation_has_no_place_to_keep(tmp_path):
    guard = ExactResume()
    assert guard.state_dict() == {}
    trainer = trainer_with(guard)
    trainer.validate(quiet(), DataLoader(torch.ones(2, 4)), verbose=False)
    assert "process_dataloader" not in vars(trainer.strategy)
    assert guard.state_dict() == {}


def test_a_checkpoint_of_the_run_is_evaluated_after_the_fit(tmp_path):
    trainer = trainer_with(ExactResume(), ModelCheckpoint(tmp_path), note := Note(), **EPOCHS)
    module, loader = quiet(), DataLoader(list(range(6)), shuffle=True)
    trainer.fit(module, loader)
    trainer.validate(module, DataLoader(torch.ones(2, 4)), ckpt_path="best", verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader)
    assert [n for n, _, _ in note.seen] == list(range(1, 13))


def test_another_batch_size_goes_on_with_the_next_row(tmp_path):
    rows = list(range(24))
    whole, _ = fit(tmp_path / "whole", DataLoader(rows, batch_size=2, shuffle=True))
    fit(tmp_path, DataLoader(rows, batch_size=4, shuffle=True), stop_at=4)
    rest, _ = fit(tmp_path, DataLoader(rows, batch_size=2, shuffle=True), ckpt_path=tmp_path / "step=3.ckpt")
    assert [batch for _, batch, _ in rest] == [batch for _, batch, _ in whole[6:]]


class BeginsAgain(Counts):
    """A loader that says where it is, and begins anew after its end."""

    def __iter__(self):
        while self.at < 3:
            self.at += 1
            yield torch.full((1, 4), float(self.at))
        self.at = 0


TWO_LOADERS = {  # the short one is at its end before the other one is asked for a batch; or ends before the other one
    "min_size": lambda: [
        DataLoader(Stream(4), batch_size=2),
        DataLoader(list(range(9)), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(5)),
    ],
    "max_size": lambda: [BeginsAgain(), DataLoader(Rows(9), batch_size=2, shuffle=True)],
    "max_size_cycle": lambda: [BeginsAgain(), DataLoader(Rows(9), batch_size=2, shuffle=True)],
}


@pytest.mark.parametrize("mode", TWO_LOADERS)
def test_two_loaders_of_different_lengths_go_on_from_any_batch(tmp_path, mode):
    def data():
        return CombinedLoader(TWO_LOADERS[mode](), mode)

    whole, _ = fit(tmp_path, data(), max_epochs=2)
    for done in range(1, len(whole)):
        rest, lines = fit(tmp_path / "rest", data(), ckpt_path=tmp_path / f"step={done}.ckpt", max_epochs=2)
        assert (done, rest, lines) == (done, whole[done:], [])


@pytest.mark.parametrize("mode", ["max_size", "max_size_cycle"])
def test_another_batch_size_of_two_loaders_counts_the_batches_of_the_longer_one(tmp_path, mode):
    def data(size):
        return CombinedLoader([DataLoader(list(range(rows)), batch_size=size) for rows in (16, 8)], mode)

    fit(tmp_path, data(4))
    rest, _ = fit(tmp_path, data(2), ckpt_path=tmp_path / "step=3.ckpt", accumulate_grad_batches=2)
    second = ["None", "None"] if mode == "max_size" else ["tensor([4, 5])", "tensor([6, 7])"]
    rows = [f"[tensor({pair}), {other}]" for pair, other in zip(([12, 13], [14, 15]), second, strict=True)]
    assert [(number, batch) for number, batch, _ in rest] == [(7, rows[0]), (8, rows[1])]


def test_another_batch_size_of_a_stream_without_a_state_is_refused_in_one_line(tmp_path):
    fit(tmp_path, DataLoader(Stream(24), batch_size=4))
    with pytest.raises(ValueError, match=r"batch_size=2: training loader 1 .* the checkpoint's run had batch_size=4: "):
        fit(tmp_path, DataLoader(Stream(24), batch_size=2), ckpt_path=tmp_path / "step=3.ckpt")


def test_a_save_within_a_step_brings_the_rows_of_the_step_again(tmp_path):
    def save(trainer, *_):
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready == 7:
            trainer.save_checkpoint(tmp_path / "within.ckpt")

    def loader():
        return DataLoader(list(range(24)), shuffle=True)

    fours = {"accumulate_grad_batches": 4}
    whole, _ = fit(tmp_path, loader(), callbacks=[On(on_train_batch_end=save)], **fours)
    rest, _ = fit(tmp_path, loader(), ckpt_path=tmp_path / "within.ckpt", **fours)
    assert [(n, batch) for n, batch, _ in rest] == [(n, batch) for n, batch, _ in whole[4:]]


def test_a_checkpoint_that_is_saved_after_the_fit_knows_the_batch_fetched_ahead(tmp_path):
    def stream():
        return DataLoader(Stream(24), batch_size=2)

    whole, _ = fit(tmp_path / "whole", stream(), max_steps=9)
    pl.seed_everything(1, verbose=False)
    trainer = trainer_with(ExactResume(), note := Note())
    trainer.fit(quiet(), stream())
    torch.rand(3)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    rest, _ = fit(tmp_path, stream(), ckpt_path=tmp_path / "after.ckpt", max_steps=9)
    assert note.seen + rest == whole


def test_the_users_own_loader_and_the_trainer_are_left_as_they_were(tmp_path):
    loader = DataLoader(Rows(6), shuffle=True)
    before = dict(vars(loader))
    saver = ModelCheckpoint(tmp_path)
    trainer = trainer_with(ExactResume(), saver, **EPOCHS)
    trainer.fit(quiet(), loader)
    assert vars(loader) == before
    assert isinstance(trainer.train_dataloader, DataLoader)
    assert "process_dataloader" not in vars(trainer.strategy)
    assert not {"on_train_batch_end", "on_validation_end", "on_train_epoch_end"} & set(vars(saver))
