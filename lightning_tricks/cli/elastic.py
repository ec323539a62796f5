"""`fit --elastic true`: a run that loses hosts, or gets them back, trains on the same rows in each step.

torchrun says how many processes there are, from one restart to the next. The recipe describes the full run, and each
start with another number changes the settings that count micro-batches of one process. The recipe itself stays as it
is, also in the run's `config.yaml`, so that every restart scales from the same values.
"""

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from lightning_tricks._core.errors import UsageError
from lightning_tricks._host.machine import listed, named_devices
from lightning_tricks._trainer.run_facts import opens_on_any_number, planned_data_ranks
from lightning_tricks.callbacks import BatchSizeWarmup

_SCALED = (  # in micro-batches of one process, so that fewer processes need more of them
    ("accumulate_grad_batches", 1),
    ("val_check_interval", 1.0),
    ("limit_train_batches", 1.0),
    ("limit_val_batches", 1.0),
)  # option and Lightning's default


def processes_of_torchrun(environment: Mapping[str, str]) -> tuple[int, int]:
    """(hosts, processes on each) that torchrun has started.

    A store that torchrun shares with its processes outlives them: in it a restart finds the addresses of the processes
    before it, and fails to connect.

    Raises:
        UsageError: hosts with different numbers of processes; a shared store.

    Source: https://github.com/pytorch/pytorch/issues/135712.
    """
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise UsageError(
            "elastic: TORCHELASTIC_USE_AGENT_STORE=True: processes would find the addresses of those before a restart: "
            "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun is started"
        )
    world, hosts, local = (int(environment[f"{name}WORLD_SIZE"]) for name in ("", "GROUP_", "LOCAL_"))
    if world != hosts * local:
        raise UsageError(
            f"elastic: torchrun has started {world} processes on {hosts} hosts, {local} of them on this one: give "
            "every host the same --nproc-per-node"
        )
    return hosts, local


def workable_counts(micro_batches: int, most: int, each: int, ranks_of: Callable[[int], int]) -> list[int]:
    """The numbers of processes, up to `most`, that can share the micro-batches of one step evenly.

    Args:
        micro_batches: of one step, over all processes with data of their own.
        most: largest number to look at.
        each: processes on one host: only multiples of it can be started.
        ranks_of: the number of processes with data of their own among so many; refuses sizes that do not fit.
    """

    def works(count: int) -> bool:
        try:
            return micro_batches % ranks_of(count) == 0
        except UsageError:
            return False

    return [count for count in range(each, most + 1, each) if works(count)]


def scaled(settings: Mapping[str, Any], full: int, now: int) -> dict[str, int]:
    """The settings of the Trainer that count micro-batches of one process, for other ranks; those that change.

    A fraction of an epoch, or a time, is the same for any number of ranks.

    Args:
        settings: the recipe's `trainer`.
        full: ranks with data of their own in the full run.
        now: those of this start.

    Raises:
        UsageError: a number would not be whole.
    """
    found, ratio = {}, Fraction(full, now)
    for name, default in _SCALED:
        value = settings.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        new = value * ratio
        if new.denominator != 1:
            raise UsageError(
                f"elastic: trainer.{name}={value} on {full} processes is {value * full} batches, which {now} cannot "
                f"share: give a multiple of {ratio.denominator}"
            )
        if new != value:
            found[name] = int(new)
    return found


def make_elastic(options: Mapping[str, Any], module: Any, data: Any, environment: Mapping[str, str]) -> str:
    """Give a run the processes that torchrun has started, and keep the rows of its steps; returns a line that says so.

    Args:
        options: those of `fit`, with built objects; `trainer` in it is changed.
        module: the LightningModule.
        data: the data module; None for loaders of the module.
        environment: the variables that torchrun sets.

    Raises:
        UsageError: the processes cannot share the micro-batches of a step evenly, or sizes of the mesh do not fit; the
            rows of a step would depend on the number of processes; a restart would begin at step 0.
    """
    trainer = options["trainer"]
    _check_resume(options)
    if not hasattr(data, "rows_of_steps"):
        whose = type(module if data is None else data).__name__
        raise UsageError(
            f"elastic: the rows that {whose} gives to a step depend on the number of processes: take TokenData or "
            "TextData"
        )
    strategy, hosts_of_recipe = trainer.get("strategy") or "auto", trainer.get("num_nodes") or 1
    if (per_host := named_devices(trainer)) is None:
        raise UsageError(
            f"elastic: trainer.devices={trainer.get('devices')}: the rows of a step follow from num_nodes x devices: "
            "give the number of processes on one host of the full run"
        )
    hosts, local = processes_of_torchrun(environment)
    full, now = hosts_of_recipe * per_host, hosts * local
    accumulated = trainer.get("accumulate_grad_batches") or 1

    if not opens_on_any_number(strategy):
        name = strategy if isinstance(strategy, str) else type(strategy).__name__
        raise UsageError(
            f"elastic: trainer.strategy={name}: its checkpoints do not open on another number of processes: take "
            "FSDP2Strategy or ddp"
        )

    def ranks_of(count: int, remedy: str = "") -> int:
        try:
            return planned_data_ranks(strategy, count, 1)
        except UsageError as error:
            raise UsageError(f"elastic: {error}" + (f"; {remedy}" if remedy else "")) from error

    full_ranks = ranks_of(full)
    micro_batches = full_ranks * accumulated
    counts = workable_counts(micro_batches, max(full, now), local, ranks_of)
    if now not in counts:
        remedy = f"start {_listed(counts)} processes" if counts else "change accumulate_grad_batches"
        ranks_of(now, remedy)
        raise UsageError(
            f"elastic: {now} processes cannot share the {micro_batches} micro-batches of a step evenly (trainer."
            f"num_nodes={hosts_of_recipe} x devices={per_host}, accumulate_grad_batches={accumulated}): {remedy}"
        )
    changes = scaled(trainer, full_ranks, ranks_of(now))
    shown = [f"{name} {trainer.get(name) or 1} -> {value}" for name, value in changes.items()]
    for callback in listed(trainer, "callbacks"):
        if isinstance(callback, BatchSizeWarmup) and callback.double_every and callback.start is None:
            callback.start = full_ranks  # its default would be one micro-batch on each process of this start
    if (hosts, local) != (hosts_of_recipe, per_host):
        changes |= {"num_nodes": hosts, "devices": local}
    for name, value in changes.items():
        trainer[name] = value
    return ", ".join([f"elastic: {now} of {full} processes", *shown])


def _check_resume(options: Mapping[str, Any]) -> None:
    """Refuse a start that torchrun would repeat from the same place each time."""
    given, resume = options.get("ckpt_path"), options.get("resume")
    if given == "last" or (given is None and resume == "auto"):
        return
    value = f"ckpt_path={given}" if given is not None else f"resume={resume or 'none'}"
    raise UsageError(
        f"elastic: {value}: torchrun repeats the command at each change of the hosts, and the run would begin there "
        "again: give --resume auto"
    )


def _listed(counts: list[int]) -> str:
    """Such as `1, 2 or 4`."""
    *others, last = map(str, counts)
    return f"{', '.join(others)} or {last}" if others else last
