"""DecayOnDemand: a decay that a file or a signal starts is the branch off that step, alone and in several processes."""

import os
import re
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import branching_run as small
import pytest
import torch
from harness import runs
from harness.models import Small
from harness.processes import run

from lightning_tricks import LanguageModel, Llama, SafeCheckpoint, TokenData, WarmupCosine, WarmupStableDecay
from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import pl
from lightning_tricks.callbacks import (
    BatchSizeWarmup,
    DecayOnDemand,
    MFUMonitor,
    Preemption,
    TotalTokens,
    TrainingProgressBar,
)
from lightning_tricks.guards.decay_on_demand import Decay, DecayFile, DecaySignal
from lightning_tricks.schedules import Schedule
from lightning_tricks.strategies import FSDP2Strategy

DECODER = {"vocab_size": 64, "d_model": 16, "n_layers": 1, "n_heads": 2, "max_seq_len": 8}
WSD = WarmupStableDecay(warmup_steps=2, decay_steps=3)


class Asks(pl.Callback):
    """Calls `ask` in the step with a number, counted from 0; notes learning rate and length of the run of each step."""

    def __init__(self, step: int = -1, ask: Any = None) -> None:
        self.step, self.ask = step, ask
        self.seen: list[tuple[int, float, int]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == self.step:
            self.ask()
        self.seen.append((trainer.global_step, optimizer.param_groups[0]["lr"], trainer.max_steps))


def write(folder: Path, text: str) -> Any:
    return lambda: (folder / "decay").write_text(text)


def usr2() -> None:
    os.kill(os.getpid(), signal.SIGUSR2)


def fit(
    folder: Path,
    *callbacks: Any,
    schedule: Schedule | None = WSD,
    max_steps: int = 40,
    ckpt_path: Any = None,
    save_every: int = 2,
    **options: Any,
) -> Any:
    """Train on the data in `folder.parent`; the run's folder is `folder`."""
    pl.seed_everything(0, verbose=False)
    data = TokenData(str(folder.parent / "train.bin"), vocab_size=64, seq_len=8, micro_batch_size=2)
    model = LanguageModel(Llama(**DECODER), optimizer=partial(torch.optim.AdamW, lr=1e-2), schedule=schedule)
    saver = SafeCheckpoint(folder / "checkpoints", every_n_train_steps=save_every, keep_last=50)
    callbacks = [*callbacks, MFUMonitor(peak_flops=1e15), saver]
    defaults = {"max_steps": max_steps, "default_root_dir": folder, "limit_val_batches": 0, "logger": False}
    return runs.fit(model, *callbacks, data=data, ckpt_path=ckpt_path, **{**defaults, **options}).trainer


def state(folder: Path, step: int) -> dict[str, Any]:
    return torch.load(folder / f"checkpoints/step={step}.ckpt", weights_only=True)


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["global_step"] == other["global_step"]
    for name, value in one["state_dict"].items():
        assert torch.equal(value, other["state_dict"][name]), name
    assert str(one["optimizer_states"]) == str(other["optimizer_states"])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with data; `whole` in it is the run in one piece whose decay is steps 6 to 9."""
    place = tmp_path_factory.mktemp("demand") / "data"
    small.prepare(place)
    fit(place / "whole", schedule=WarmupStableDecay(warmup_steps=2, decay_start=6), max_steps=10)
    return place


LRS = [5e-3] + 6 * [1e-2] + [WSD.decaying_from(6).lr(1e-2, step, 10) for step in (7, 8, 9)]


@pytest.mark.parametrize(
    ("step", "ask", "guard"),
    [
        (5, "4\n", DecayOnDemand()),
        (3, "", DecayOnDemand(decay_steps=4)),  # empty: it counts at the second log step
        (4, usr2, DecayOnDemand(decay_steps=4)),
        (0, "4", DecayOnDemand()),  # asked in the warmup, which would end at a log step before
    ],
    ids=["file", "empty file", "signal", "in the warmup"],
)
def test_a_request_starts_the_decay_at_a_log_step_and_the_run_is_the_one_in_one_piece(
    place, tmp_path_factory, step, ask, guard, request
):
    folder = place / re.sub(r"\W", "_", request.node.name)
    folder.mkdir()
    asks = Asks(step, usr2 if ask is usr2 else write(folder, ask))
    start = 6
    if step == 0:
        start, guard = 2, DecayOnDemand()
        fit(place / "early", schedule=WarmupStableDecay(warmup_steps=2, decay_start=2), max_steps=6)
    trainer = fit(folder, guard, asks, Preemption())  # which leaves the signals to us that Lightning would put back
    whole = place / ("whole" if start == 6 else "early")
    assert [length for _, _, length in asks.seen] == [40] * start + [start + 4] * 4
    if start == 6:
        assert [lr for _, lr, _ in asks.seen] == LRS
    assert_same(state(folder, start + 4), state(whole, start + 4))
    assert (folder / "decay").read_text() == f"4 from step {start}\n"
    assert trainer.max_steps == 40  # a second fit of this Trainer has its own length again
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_a_decay_without_a_length_is_as_long_as_that_of_the_schedule_and_is_told_in_one_line(place, caplog):
    folder = place / "default"
    folder.mkdir()
    with caplog.at_level("INFO"):
        trainer = fit(folder, DecayOnDemand(), Asks(5, usr2))
    assert trainer.global_step == 9
    said = [record.message for record in caplog.records if "DecayOnDemand" in record.message]
    assert said == ["DecayOnDemand: step 6: the decay starts and takes 3 steps: the run ends at step 9 in place of 40"]


def test_a_request_in_the_warmup_waits_for_its_end_and_that_is_told_once(place, caplog):
    folder = place / "waits"
    folder.mkdir()
    asks = Asks(1, usr2)
    with caplog.at_level("INFO"):
        trainer = fit(folder, DecayOnDemand(), asks, schedule=WarmupStableDecay(warmup_steps=5, decay_steps=3))
    assert trainer.global_step == 9
    assert [length for _, _, length in asks.seen] == [40] * 6 + [9] * 3
    said = [record.message for record in caplog.records if "DecayOnDemand" in record.message]
    assert said == [
        "DecayOnDemand: the decay waits for the end of the warmup, step 5",
        "DecayOnDemand: step 6: the decay starts and takes 3 steps: the run ends at step 9 in place of 40",
    ]


def test_a_trial_run_is_no_run_that_decays_and_leaves_file_and_signal_alone(place):
    handlers = []
    folder = place / "trial"
    folder.mkdir()
    (folder / "decay").write_text("3")  # any other run is refused beside it
    look = Asks(5, lambda: handlers.append(signal.getsignal(signal.SIGUSR2)))
    before = place / "whole/checkpoints/step=4.ckpt"
    trainer = fit(folder, DecayOnDemand(), look, fast_dev_run=7, ckpt_path=before)
    assert [(step, length) for step, _, length in look.seen] == [(4, 7), (5, 7), (6, 7)]
    assert handlers == [signal.SIG_DFL]
    assert trainer.callbacks[0].state_dict() == {}
    assert (folder / "decay").read_text() == "3"


def test_with_a_logger_that_has_no_folder_the_file_is_in_that_of_the_trainer(place):
    class Nowhere(pl.loggers.logger.DummyLogger):
        save_dir = None

    folder = place / "nowhere"
    folder.mkdir()
    trainer = fit(folder, DecayOnDemand(), Asks(3, write(folder, "2")), logger=Nowhere())
    assert trainer.global_step == 6
    assert (folder / "decay").read_text() == "2 from step 4\n"


def test_a_decay_may_be_longer_than_the_rest_of_the_run(place):
    """Then the loader, whose end was known when it began, goes on."""
    folder = place / "longer"
    folder.mkdir()
    asks = Asks(5, write(folder, "4"))
    trainer = fit(folder, DecayOnDemand(), asks, schedule=WarmupStableDecay(warmup_steps=2, decay_steps=1), max_steps=8)
    assert_same(state(folder, 10), state(place / "whole", 10))
    assert trainer.current_epoch == 0 or trainer.global_step == 10


@pytest.mark.parametrize("workers", [0, 2])
def test_the_last_step_is_followed_by_the_validation_as_in_the_run_in_one_piece(place, workers):
    seen, folder = [], place / f"validated{workers}"
    folder.mkdir()
    paths, sizes = (str(place / "train.bin"), str(place / "val.bin")), {"seq_len": 8, "micro_batch_size": 2}
    data = TokenData(*paths, vocab_size=64, num_workers=workers, **sizes)
    validated = runs.On(on_validation_end=lambda trainer, _: seen.append(trainer.global_step))
    callbacks = DecayOnDemand(), Asks(3, write(folder, "1")), validated
    options = {"num_sanity_val_steps": 0, "limit_val_batches": 1, "logger": False, "default_root_dir": folder}
    runs.fit(LanguageModel(Llama(**DECODER), schedule=WSD), *callbacks, data=data, max_steps=60, **options)
    assert seen == [5]


LENGTHS = {
    "epochs": ({"max_steps": -1, "max_epochs": 9}, lambda: []),
    "tokens": ({"max_steps": -1, "max_epochs": -1}, lambda: [TotalTokens(40 * 16)]),
    "a batch that grows": (
        {"accumulate_grad_batches": 2},
        lambda: [BatchSizeWarmup(stages={0: 1, 4: 2}, lr_rule="sqrt")],
    ),
}


@pytest.mark.parametrize("given", LENGTHS)
def test_it_ends_runs_of_every_length_and_a_resume_too(place, given):
    folder, (options, callbacks) = place / f"length {given}", LENGTHS[given]
    folder.mkdir()
    asks, expected = Asks(5, write(folder, "4")), "whole"
    if given == "a batch that grows":
        expected, wsd = "grown", WarmupStableDecay(warmup_steps=2, decay_start=6)
        fit(place / expected, *callbacks(), schedule=wsd, max_steps=10, **options)
    trainer = fit(folder, *callbacks(), DecayOnDemand(), asks, **options)
    assert trainer.global_step == 10
    assert [step for step, *_ in asks.seen] == list(range(10))
    assert_same(state(folder, 10), state(place / expected, 10))
    for step in (4, 8):
        (folder / "checkpoints/step=10.ckpt").unlink()
        resumed = fit(
            folder, *callbacks(), DecayOnDemand(), ckpt_path=folder / f"checkpoints/step={step}.ckpt", **options
        )
        assert resumed.global_step == 10
        assert_same(state(folder, 10), state(place / expected, 10))


def test_progress_bar_and_time_left_follow(place, capsys):
    folder = place / "bar"
    folder.mkdir()
    fit(folder, DecayOnDemand(), Asks(5, write(folder, "4")), TrainingProgressBar())
    shown = re.findall(r"^step (\d+/\d+) ", capsys.readouterr().out, re.M)
    assert shown == ["2/40", "4/40", "6/10", "8/10", "10/10"]


def test_a_resume_in_the_decay_and_one_from_before_it_are_the_same_run(place):
    folder = place / "resumed"
    folder.mkdir()
    options = {"accumulate_grad_batches": 2}
    fit(folder, DecayOnDemand(), Asks(5, write(folder, "4")), **options)
    done = state(folder, 10)
    for step, content in ((8, True), (6, True), (4, True), (8, False)):
        if not content:
            (folder / "decay").unlink()
        asks = Asks()
        trainer = fit(
            folder, DecayOnDemand(), asks, max_steps=7, ckpt_path=folder / f"checkpoints/step={step}.ckpt", **options
        )
        assert trainer.global_step == 10
        assert [length for _, _, length in asks.seen] == [10] * (10 - step)
        assert_same(state(folder, 10), done)
    asks = Asks()
    fit(folder, DecayOnDemand(), asks, max_steps=9, ckpt_path=folder / "checkpoints/step=4.ckpt", **options)
    assert [length for _, _, length in asks.seen] == [9] * 5  # without the file, the stable part goes on


def ranks(rank: int, place: Path) -> None:
    """Rank 1 alone gets the signal: under DDP, and under FSDP2, where a resume loads its checkpoint late."""
    two = {"devices": 2, "strategy": "ddp", "save_every": 7}
    asks = Asks(4, usr2 if rank == 1 else lambda: None)
    fit(place / "ddp", DecayOnDemand(decay_steps=4), asks, **two)
    assert [length for _, _, length in asks.seen] == [40] * 6 + [10] * 4

    asks = Asks(4, usr2 if rank == 1 else lambda: None)
    fit(place / "fsdp2", DecayOnDemand(decay_steps=4), asks, **{**two, "strategy": FSDP2Strategy()})
    assert [length for _, _, length in asks.seen] == [40] * 6 + [10] * 4
    wsd = WarmupStableDecay(warmup_steps=2, decay_start=6)
    whole = fit(place / "whole_fsdp2", schedule=wsd, max_steps=10, **{**two, "strategy": FSDP2Strategy()})
    asks = Asks()
    path = place / "fsdp2/checkpoints/step=7.ckpt"
    options = {**two, "strategy": FSDP2Strategy(), "max_steps": 7}  # the recipe's end is the step of the checkpoint
    resumed = fit(place / "fsdp2", DecayOnDemand(), asks, ckpt_path=path, **options)
    assert [length for _, _, length in asks.seen] == [10] * 3
    shards = [[p.to_local() for p in trainer.lightning_module.parameters()] for trainer in (resumed, whole)]
    assert all(torch.equal(one, other) for one, other in zip(*shards, strict=True))


def test_all_ranks_start_at_the_same_step_when_one_is_asked(place):
    run(ranks, place)


# ---- refusals


def refused(folder: Path, *callbacks: Any, **options: Any) -> str:
    folder.mkdir(exist_ok=True)
    with pytest.raises(UsageError) as error:
        fit(folder, *callbacks, **options)
    assert "\n" not in str(error.value)
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    return str(error.value)


def test_wrong_runs_are_refused_in_one_line(place):
    folder = place / "refused"
    assert "schedule is WarmupCosine" in refused(folder, DecayOnDemand(), schedule=WarmupCosine(warmup_steps=2))
    assert "there is no schedule" in refused(folder, DecayOnDemand(), schedule=None)
    assert "log_every_n_steps=0" in refused(folder, DecayOnDemand(), log_every_n_steps=0)
    (folder / "decay").write_text("3")
    assert "was there before this run: delete it" in refused(folder, DecayOnDemand())
    with pytest.raises(UsageError, match="decay_steps=0: give 1 or more"):
        DecayOnDemand(decay_steps=0)


def test_a_request_of_a_step_that_fails_starts_no_decay(place):
    folder = place / "fails"
    folder.mkdir()

    def fails(trainer, *_):
        if trainer.global_step == 3:
            write(folder, "4")()
        if trainer.global_step == 4:  # a log step, at whose end the decay would start
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fit(folder, DecayOnDemand(), runs.On(on_train_batch_end=fails))
    assert (folder / "decay").read_text() == "4"


def test_manual_optimization_is_refused(tmp_path):
    with pytest.raises(UsageError, match="under manual optimization the module steps its schedule itself"):
        runs.fit(Small(manual=True), DecayOnDemand(), default_root_dir=tmp_path, logger=False)


def test_a_file_that_is_older_than_a_checkpoint_without_decay_is_refused(place):
    folder = place / "older"
    fit(folder, DecayOnDemand(), max_steps=8)
    (folder / "decay").write_text("4 from step 2\n")
    said = refused(folder, DecayOnDemand(), ckpt_path=folder / "checkpoints/step=4.ckpt")
    assert "it is of step 4 and has not decayed" in said
    assert f"{folder}/decay tells of a decay from step 2" in said


def test_a_request_in_the_schedule_s_own_decay_changes_nothing(place, caplog):
    folder = place / "late"
    folder.mkdir()
    asks = Asks(9, usr2)
    with caplog.at_level("INFO"):
        fit(folder, DecayOnDemand(), asks, max_steps=12, schedule=WarmupStableDecay(warmup_steps=2, decay_start=6))
    assert [length for _, _, length in asks.seen] == [12] * 12
    assert "the decay has started already, at step 6" in caplog.text


def test_a_handler_of_the_program_stays(place, caplog):
    got = []
    before = signal.signal(signal.SIGUSR2, lambda *_: got.append(1))
    try:
        with caplog.at_level("INFO"):
            trainer = fit(place / "handler", DecayOnDemand(), Asks(3, usr2), max_steps=7)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert got == [1]
    assert trainer.global_step == 7
    assert "SIGUSR2 is in use already" in caplog.text


# ---- the file


def test_what_the_file_says(tmp_path, recwarn):
    file = DecayFile(str(tmp_path))
    assert not file.exists()
    assert file.asks(9) == 0
    file.path.write_text("\n")
    assert (file.asks(9), file.asks(9)) == (0, 9)
    file.path.write_text(" 20\n")
    assert file.asks(9) == 20
    for wrong in ("0", "soon", "-3", "20 from step 7", "1e3"):
        file.path.write_text(wrong)
        assert (file.asks(9), file.asks(9)) == (0, 0)
    said = [str(warning.message) for warning in recwarn if "DecayOnDemand" in str(warning.message)]
    assert len(said) == 5  # each once
    assert f"{tmp_path}/decay holds '0'" in said[0]
    bucket = DecayFile("s3://bucket/run")
    bucket.write(Decay(7, 20))
    assert bucket.path is None


def test_a_file_that_cannot_be_written_costs_a_line_and_not_the_run(tmp_path, recwarn):
    (tmp_path / "run").write_text("no folder")
    DecayFile(str(tmp_path / "run/version_0")).write(Decay(7, 20))
    assert [str(warning.message) for warning in recwarn] == [
        f"DecayOnDemand: {tmp_path}/run/version_0/decay cannot be written (Not a directory): a resume from a "
        "checkpoint before step 7 will not decay by itself"
    ]


def test_outside_the_main_thread_the_signal_is_left_alone():
    def train() -> None:
        asked = DecaySignal()
        asked.install(None)
        asked.restore()
        handlers.append(signal.getsignal(signal.SIGUSR2))

    handlers: list[Any] = []
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert handlers == [signal.SIG_DFL]
