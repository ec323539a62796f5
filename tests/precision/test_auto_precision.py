"""bf16 exactly where this machine multiplies it faster; all ranks and every resume of a run on a CPU choose alike."""

from functools import partial

import pytest
import torch
from harness import processes, runs
from harness.models import Small
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader

from lightning_tricks.accounting import device_speed
from lightning_tricks.callbacks import MFUMonitor
from lightning_tricks.precision import AutoPrecision, has_fast_bf16
from lightning_tricks.strategies import FSDP2Strategy

FAST, SLOW = 0.25, 1.57  # measured on an EPYC and on a Xeon, both with AVX512-BF16 and without AMX
BF16, FP32 = ("bf16-mixed", torch.bfloat16), ("32-true", torch.float32)


@pytest.fixture
def ratio(monkeypatch):
    """Set the ratio that is measured; not set, a measurement is an error."""

    def measures(value):
        monkeypatch.setattr(device_speed, "bf16_time_ratio", lambda threads: value)

    def fails(threads):
        raise AssertionError("measured before training starts")

    monkeypatch.setattr(device_speed, "bf16_time_ratio", fails)
    return measures


@pytest.mark.parametrize(("found", "fast"), [(0.05, True), (FAST, True), (0.95, False), (SLOW, False), (40.0, False)])
def test_a_cpu_is_fast_where_bf16_products_take_clearly_less_time(ratio, found, fast):
    ratio(found)
    assert has_fast_bf16("cpu") is fast


@pytest.mark.parametrize(("capability", "fast"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_a_gpu_is_fast_from_ampere_on_and_is_not_measured(monkeypatch, ratio, capability, fast):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert has_fast_bf16("cuda") is fast
    plugin = AutoPrecision()
    expected = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if fast else MixedPrecisionPolicy()
    assert plugin.fsdp2_policy == expected
    assert (plugin.choice, plugin.state_dict()) == (None, {})


class Clock:
    """Seconds of each product by its type and the number of threads; the first of each is ten times as long."""

    def __init__(self, seconds):
        self.seconds, self.seen = seconds, []

    def __call__(self, act):
        out = act()
        key = (out.dtype, torch.get_num_threads(), len(out))
        self.seen.append(key)
        return self.seconds[key[:2]] * (10 if self.seen.count(key) < 7 else 1)


@pytest.mark.parametrize(
    ("of_two_threads", "expected"),
    [((1.0, 0.2), 0.2), ((1.0, 5.0), 1.5), ((1.9, 0.1), 1.5)],
    ids=["free cores", "bf16 waits for a busy core", "fp32 waits for a busy core"],
)
def test_the_fastest_warm_products_of_both_types_are_compared(monkeypatch, of_two_threads, expected):
    one = {(torch.float32, 1): 2.0, (torch.bfloat16, 1): 3.0}
    two = {(dtype, 2): seconds for (dtype, _), seconds in zip(one, of_two_threads, strict=True)}
    monkeypatch.setattr(device_speed, "wall_seconds", clock := Clock(one | two))
    monkeypatch.setattr(torch, "get_num_threads", lambda: clock.threads)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: setattr(clock, "threads", threads))
    assert device_speed.bf16_time_ratio.__wrapped__(2) == pytest.approx(expected)
    assert clock.threads == 2, "the run has its own number again"
    assert clock.seen.index((torch.bfloat16, 1, 512)) < 2 * 3 * 3 < len(clock.seen), "the types take turns"


def test_emulated_products_are_told_by_small_ones_which_take_little_time(monkeypatch):
    clock = Clock({(torch.float32, 1): 1.0, (torch.bfloat16, 1): 40.0})
    monkeypatch.setattr(device_speed, "wall_seconds", clock)
    assert device_speed.bf16_time_ratio.__wrapped__(torch.get_num_threads()) == pytest.approx(40.0)
    assert {size for _, _, size in clock.seen} == {256}


def test_this_cpu_is_measured():
    state = torch.get_rng_state()
    assert 0.01 < device_speed.bf16_time_ratio(torch.get_num_threads()) < 1000
    assert torch.equal(torch.get_rng_state(), state)


def fit(folder=None, ckpt_path=None, **options):
    """Its Trainer, the model, and the types of its outputs."""
    seen, callbacks = set(), [MFUMonitor(flops_per_sample=1.0, peak_flops=1e9)]
    callbacks += [ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2)] if folder else []
    model = Small(4, 4, optimizer=partial(torch.optim.AdamW, lr=0.1, fused=True))
    model.net.register_forward_hook(lambda *args: seen.add(args[-1].dtype))
    run = runs.fit(
        model, *callbacks, data=DataLoader(torch.ones(8, 4), batch_size=4), ckpt_path=ckpt_path, logger=False,
        plugins=AutoPrecision(), gradient_clip_val=1e-3, use_distributed_sampler=False, **{"max_steps": 2, **options},
    )  # fmt: skip
    return run.trainer, model, seen


@pytest.mark.parametrize(("found", "chosen"), [(FAST, BF16), (SLOW, FP32)])
def test_products_run_in_the_chosen_type_and_weights_stay_fp32(ratio, capsys, found, chosen):
    AutoPrecision()  # measures nothing yet
    ratio(found)
    trainer, model, seen = fit()
    assert (trainer.precision, seen) == (chosen[0], {chosen[1]})
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert sum(p.grad.square().sum() for p in model.parameters()).sqrt().item() == pytest.approx(1e-3, rel=1e-3)


def lines(caplog):
    found = [record.getMessage() for record in caplog.records if "AutoPrecision" in record.getMessage()]
    caplog.clear()
    return found


@pytest.mark.parametrize(("first", "second", "began", "other"), [(FAST, SLOW, BF16, FP32), (SLOW, FAST, FP32, BF16)])
def test_a_resume_goes_on_as_the_run_began_and_says_what_it_would_choose_now(
    ratio, tmp_path, caplog, first, second, began, other
):
    caplog.set_level("INFO")
    ratio(first)
    fit(tmp_path)
    (line,) = lines(caplog)
    assert line.startswith("MFUMonitor: ")
    assert len(line) <= 160, "two lines of a terminal"
    assert line.endswith(f"; AutoPrecision: {began[0]}, as bf16 takes {first} of fp32's time")
    ratio(second)
    trainer, _, seen = fit(ckpt_path=tmp_path / "step=2.ckpt", max_steps=4)
    assert (trainer.precision, seen) == (began[0], {began[1]})
    told, line = lines(caplog)
    assert told == (
        f"AutoPrecision: the run goes on in {began[0]}, in which it began; a run that starts here would choose "
        f"{other[0]}, as bf16 takes {second} of fp32's time"
    )
    assert line.endswith(f"; AutoPrecision: {began[0]}, in which the run began")
    assert trainer.precision_plugin.state_dict() == {"precision": began[0]}, "and so does the next resume"
    ratio(first)
    fit(ckpt_path=tmp_path / "step=2.ckpt", max_steps=4)
    assert len(lines(caplog)) == 1, "where nothing differs, nothing is told"


def in_two(rank, folder):
    for measured, chosen in ((FAST, BF16), (SLOW, FP32)):
        other = FAST + SLOW - measured
        for number, strategy in enumerate((lambda: "ddp", FSDP2Strategy)):
            at = folder / f"{chosen[0]}-{number}"
            device_speed.bf16_time_ratio = partial(dict.get, {1: (measured, other)[rank]})
            trainer, _, seen = fit(at, strategy=strategy(), devices=2)
            assert (trainer.precision, seen) == (chosen[0], {chosen[1]})
            device_speed.bf16_time_ratio = partial(dict.get, {1: other})
            assert fit(ckpt_path=at / "step=2.ckpt", max_steps=4, strategy=strategy(), devices=2)[2] == {chosen[1]}


@pytest.mark.long
def test_all_ranks_take_what_rank_0_measured_and_resume_in_it(tmp_path):
    processes.run(in_two, tmp_path)
