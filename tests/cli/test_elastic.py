"""`--elastic true`: what a start with other processes changes, and what it refuses, without starting any."""

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_tricks._core.errors import UsageError
from lightning_tricks.callbacks import BatchSizeWarmup
from lightning_tricks.cli.elastic import make_elastic, processes_of_torchrun, scaled, workable_counts
from lightning_tricks.parallel.dims import ParallelDims
from lightning_tricks.strategies import FSDP2Strategy

TENSOR = ParallelDims(tensor=2)
DATA = SimpleNamespace(rows_of_steps=None)


def started(hosts: int, local: int) -> dict[str, str]:
    """The variables of torchrun."""
    sizes = {"WORLD_SIZE": hosts * local, "GROUP_WORLD_SIZE": hosts, "LOCAL_WORLD_SIZE": local}
    return {name: str(size) for name, size in sizes.items()} | {"TORCHELASTIC_USE_AGENT_STORE": "False"}


def line(hosts: int, local: int = 1, **trainer: Any) -> tuple[str, dict[str, Any]]:
    """The line, and the Trainer's settings, of a run of two hosts with four processes each."""
    trainer = {"num_nodes": 2, "devices": 4, "accumulate_grad_batches": 2, **trainer}
    options = {"trainer": trainer, "resume": "auto", "ckpt_path": None}
    return make_elastic(options, object(), DATA, started(hosts, local)), trainer


def test_other_processes_take_other_micro_batches_each():
    said, trainer = line(1, 4, val_check_interval=10, limit_val_batches=3)
    assert said == (
        "elastic: 4 of 8 processes, accumulate_grad_batches 2 -> 4, val_check_interval 10 -> 20, "
        "limit_val_batches 3 -> 6"
    )
    assert trainer == {
        "num_nodes": 1, "devices": 4, "accumulate_grad_batches": 4, "val_check_interval": 20, "limit_val_batches": 6,
    }  # fmt: skip
    more = line(4, 4, val_check_interval=10)[1]
    assert (more["accumulate_grad_batches"], more["val_check_interval"]) == (1, 5)
    for hosts, local, devices in ((2, 4, 4), (2, 4, "0,1,2,3"), (8, 1, 4)):
        said, trainer = line(hosts, local, devices=devices)
        assert said == "elastic: 8 of 8 processes"
        assert trainer["accumulate_grad_batches"] == 2
        assert (trainer["num_nodes"], trainer["devices"]) == (hosts, local if hosts == 8 else devices)


def test_fractions_and_times_are_the_same_for_any_number_of_ranks():
    settings = {"accumulate_grad_batches": 1, "val_check_interval": "00:01:00:00", "limit_val_batches": 0.5}
    assert scaled(settings, 4, 2) == {"accumulate_grad_batches": 2}


def test_tensor_and_context_ranks_have_no_rows_of_their_own():
    strategy = FSDP2Strategy(mesh=ParallelDims(tensor=2, context=2))  # 8 processes: 2 with rows of their own
    assert line(4, 1, strategy=strategy)[1]["accumulate_grad_batches"] == 4
    refused(r"the 2 devices.*start 4 or 8 processes", hosts=2, strategy=strategy)
    refused(r"the 4 micro-batches of a step evenly.*start 4 or 8 processes", hosts=12, strategy=strategy)


def test_the_numbers_that_work_are_named():
    refused(
        r"elastic: 3 processes cannot share the 16 micro-batches of a step evenly \(trainer.num_nodes=2 x devices=4, "
        r"accumulate_grad_batches=2\): start 1, 2, 4 or 8 processes$",
        hosts=3,
    )
    refused("start 6 processes$", hosts=2, local=2, accumulate_grad_batches=3, devices=3, num_nodes=2, fixed=6)
    assert workable_counts(12, 8, 2, lambda count: count) == [2, 4, 6]


def refused(words: str, hosts: int = 1, local: int = 1, fixed: int | None = None, **trainer: Any) -> None:
    if fixed is not None:
        trainer["strategy"] = FSDP2Strategy(mesh=ParallelDims(shard=fixed))
    with pytest.raises(UsageError, match=words):
        line(hosts, local, **trainer)


def test_a_mesh_of_fixed_shards_or_replicas_names_its_numbers():
    refused("shard 8 does not make the 4 devices.*; start 8 processes", hosts=4, fixed=8)
    strategy = FSDP2Strategy(mesh=ParallelDims(replicate=2))
    assert line(2, strategy=strategy)[1]["accumulate_grad_batches"] == 8
    refused("mesh: replicate 2 does not divide the 1 devices.*; start 2, 4 or 8 processes", hosts=1, strategy=strategy)


def test_validation_that_cannot_be_shared_is_refused():
    refused("trainer.limit_val_batches=3 on 8 processes is 24 batches, which 16", hosts=4, local=4, limit_val_batches=3)
    refused("trainer.val_check_interval=5", hosts=4, local=4, val_check_interval=5)


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed_stage_2"])
def test_checkpoints_of_a_fixed_number_of_processes_are_refused(strategy):
    refused(f"trainer.strategy={strategy}: .*take FSDP2Strategy or ddp", hosts=1, strategy=strategy)


@pytest.mark.parametrize("devices", ["auto", -1, "0", None])
def test_the_full_run_must_be_told(devices):
    refused(f"trainer.devices={devices}: .*give the number of", devices=devices)


def test_batch_size_warmup_starts_with_the_batch_of_the_full_run():
    warmup = BatchSizeWarmup(double_every=10)
    line(1, 2, callbacks=[warmup])
    assert warmup.start == 8
    line(1, 2, callbacks=[shared := BatchSizeWarmup(double_every=10)], strategy=FSDP2Strategy(mesh=TENSOR))
    assert shared.start == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"resume": "none"}, "resume=none: .* give --resume auto"),
        ({"ckpt_path": "some.ckpt"}, "ckpt_path=some.ckpt: .* give --resume auto"),
        ({"data": None, "module": SimpleNamespace()}, "the rows that SimpleNamespace gives.* take TokenData"),
    ],
)
def test_what_would_give_other_rows_or_other_steps_is_refused(change, words):
    trainer = {"num_nodes": 2, "devices": 4}
    trainer |= {
        name: change.pop(name) for name in list(change) if name not in ("resume", "ckpt_path", "data", "module")
    }
    options = {"trainer": trainer, "resume": "auto", "ckpt_path": None, **change}
    module, data = options.pop("module", object()), options.pop("data", DATA)
    with pytest.raises(UsageError, match=words):
        make_elastic(options, module, data, started(2, 4))


def test_hosts_with_different_numbers_of_processes_are_refused():
    with pytest.raises(UsageError, match="3 processes on 2 hosts, 2 of them on this one: give every host the same"):
        processes_of_torchrun(started(2, 2) | {"WORLD_SIZE": "3"})


def test_a_store_that_outlives_the_processes_is_refused():
    with pytest.raises(UsageError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        processes_of_torchrun(started(2, 2) | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
