"""The checkpoint that a command starts from: a file, the newest whole one (`last`, `resume: auto`), or none.

Rank 0 hands its choice on to the ranks that it starts, and every rank compares it when it is loaded.
"""

import itertools
import json
import os
import re
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.foreign_files import check_run_folder
from lightning_tricks._host.address import ask, is_address
from lightning_tricks._trainer.lightning import Module, Trainer, pl, rank_zero_info
from lightning_tricks._trainer.loop import take_loops_step
from lightning_tricks._trainer.objects import chosen_version
from lightning_tricks._trainer.processes import store_before_the_run
from lightning_tricks._trainer.run_facts import weights_layout
from lightning_tricks.checkpoints import AtomicCheckpointIO, check_checkpoint
from lightning_tricks.checkpoints.bucket import fetch
from lightning_tricks.checkpoints.check_checkpoint import check_bytes, check_names_weights, identity, verify_checkpoint
from lightning_tricks.checkpoints.find_checkpoint import Candidate, Found, candidates, newest_whole, restore_name
from lightning_tricks.strategies.consolidate_deepspeed import read_layout

_calls = itertools.count()
_CHOICE = "LIGHTNING_TRICKS_CHOICE"  # environment variable: the choice of rank 0, for ranks that Lightning starts


def choose_checkpoint(command: str, given: Any, trainer: Any, resume: str = "none") -> str | None:
    """The checkpoint that a command starts from, None for the weights that the module starts with.

    A checkpoint that cannot be opened is refused here: later the ranks of a distributed run would be up and waiting.
    `last` and `auto` mean the newest checkpoint that can be used: every byte of it is read and compared with its
    checksums. Lines say which one that is, and which newer ones were passed over and why.

    Args:
        command: `fit`, `validate`, `test`, `predict` or `autopsy`.
        given: value of `--ckpt_path`: None, `none`, `last`, or anything else, which is returned as it is.
        trainer: its first logger and its `ModelCheckpoint` callbacks say where checkpoints are.
        resume: `auto` starts a fit without `given` from the newest checkpoint, or afresh where there is none at all.

    Raises:
        UsageError: an evaluation names no checkpoint; there is none for `last`; there are some for `last` or `auto`,
            but none is whole; the value is empty, or an incomplete checkpoint.
    """
    if given is None and command != "fit":
        last = "--ckpt_path last for the newest checkpoint of this recipe"
        start = f"{last}, or --ckpt_path none for the weights that the module starts with"
        ways = f"or {last}" if command == "autopsy" else start
        raise UsageError(f"{command} needs a checkpoint: give --ckpt_path FILE, {ways}")
    if given is None and resume == "auto" and not trainer.fast_dev_run:
        return _newest("resume=auto", command, trainer)
    if given is None or str(given) == "none":
        return None
    path = str(given)
    if path == "last":
        return _newest("ckpt_path=last", command, trainer)
    if path == "best":
        raise UsageError(
            "ckpt_path=best: only the program that has trained knows it: give the file, such as "
            "checkpoints/step=N.ckpt with the best step that `runs` prints"
        )
    return _check(path, trainer, resumes=command == "fit")


def looks_for_newest(command: str, given: Any, resume: str) -> bool:
    """Whether `choose_checkpoint` looks for the newest checkpoint."""
    return str(given) == "last" or (given is None and command == "fit" and resume == "auto")


def newest_checkpoint(folder: Any) -> Candidate | None:
    """The newest checkpoint in a folder, as far as its name and its record tell; None where there is none."""
    return next((found for found in reversed(candidates(Path(folder))) if found.problem is None), None)


def folder_name(version: Any) -> str:
    """Name of the folder of a logger's version, a number or a name."""
    return version if isinstance(version, str) else f"version_{version}"


def number(folder: Path) -> int:
    """Number of a folder `version_N`; -1 for any other folder."""
    match = re.fullmatch(r"version_(\d+)", folder.name)
    return int(match[1]) if match else -1


def relative_to_cwd(path: Any) -> str:
    """The path from the working folder, where it lies below that."""
    return str(path).removeprefix(os.getcwd() + os.sep)


def _newest(option: str, command: str, trainer: Any) -> str | None:
    """The checkpoint that `last` or `auto` means; None where there is none for `auto`."""
    folders, where = _places(trainer)
    found = newest_whole(folders, partial(_verify, trainer, command == "fit"))
    found.passed_over = [line.replace(os.getcwd() + os.sep, "") for line in found.passed_over]
    for line in found.passed_over:
        rank_zero_info(f"{option}: skipped: {line}")
    if found.chosen is None:
        _none_found(option, command, found, where)
        return None
    # A fit names the link, by which ModelCheckpoint knows that it may delete the file later. An evaluation beside a
    # running fit, which moves the link, names the file.
    path = (found.chosen.link if command == "fit" else None) or restore_name(found.chosen)
    kind = "the newest complete checkpoint" if found.passed_over else "the newest checkpoint"
    rank_zero_info(f"{option}: {found.chosen.address or relative_to_cwd(path)}, {kind} in {where}")
    return str(path)


def _none_found(option: str, command: str, found: Found, where: str) -> None:
    """Refuse, unless `auto` may start afresh because there is no checkpoint at all."""
    instead = "start a new run at step 0 with --ckpt_path none" if command == "fit" else "give the path of a checkpoint"
    if found.passed_over:
        raise UsageError(
            f"{option}: none of {len(found.passed_over)} checkpoint(s) in {where} can be used (the newest: "
            f"{found.passed_over[0]}): restore one from a copy, or {instead}"
        )
    if option != "resume=auto":
        raise UsageError(f"{option}: there is no checkpoint in {where}: {instead}")
    rank_zero_info(f"{option}: there is no checkpoint in {where}: the run starts at step 0")


def _is_of_deepspeed(trainer: Any) -> bool:
    return weights_layout(trainer.strategy) in ("engine", "foreign engine")


def _verify(trainer: Any, resumes: bool, path: Path) -> None:
    """Refuse a checkpoint that cannot be used."""
    if _is_of_deepspeed(trainer) and path.is_dir():
        read_layout(path)
        check_bytes(path)
    else:
        verify_checkpoint(path, resumes)


def _places(trainer: Any) -> tuple[list[Path | str], str]:
    """The folders to look in: those of the savers, and that of the newest run with checkpoints; and words for both."""
    savers = [saver for saver in trainer.checkpoint_callbacks if getattr(saver, "dirpath", None)]
    given = [getattr(saver, "address", None) or str(saver.dirpath) for saver in savers]
    folders: list[Path | str] = [folder if is_address(folder) else Path(folder) for folder in given]
    searched = [relative_to_cwd(folder) for folder in given]
    if len(given) < len(trainer.checkpoint_callbacks) or not given:
        root = _folder_of_runs(trainer)
        for run in _run_folders(trainer, root):
            folder = f"{run}/checkpoints" if is_address(root) else Path(run, "checkpoints")
            if isinstance(folder, Path):
                check_run_folder(Path(root), folder)
            if candidates(folder):
                folders.append(folder)
                break
        searched.append(relative_to_cwd(root))
    return list(dict.fromkeys(folders)), " or ".join(dict.fromkeys(searched))


def _folder_of_runs(trainer: Any) -> str:
    """The folder in which each run of the recipe has its own."""
    logger = trainer.logger
    if logger is None:
        return str(trainer.default_root_dir)
    return os.path.join(str(logger.save_dir or trainer.default_root_dir), str(logger.name))


def _run_folders(trainer: Any, root: str) -> list[str]:
    """The folders of the recipe's runs, the newest first: one, where the logger has a fixed version or is missing."""
    logger = trainer.logger
    if logger is None:
        return [root]
    if (fixed := chosen_version(logger)) is not None:
        return [f"{root}/{folder_name(fixed)}"]
    if is_address(root):
        names = ask(root, lambda fs, path: [name.split("/")[-2] for name in fs.glob(f"{path}/*/checkpoints")])
        return sorted((f"{root}/{name}" for name in names), key=lambda run: number(Path(run)), reverse=True)
    folders = [path.parent for path in Path(root).glob("*/checkpoints")]
    return [str(run) for run in sorted(folders, key=lambda path: (number(path), path.stat().st_mtime_ns), reverse=True)]


def _check(path: str, trainer: Any, resumes: bool) -> str:
    """Refuse a checkpoint that cannot be opened; its path on this host, where our plugin opens it."""
    if path in ("last", "best", "hpc") or path.startswith("registry"):
        return path
    if not path:
        raise UsageError("ckpt_path='': give a checkpoint's file or folder, or last, or leave the option out")
    ours = isinstance(trainer.strategy.checkpoint_io, AtomicCheckpointIO)
    if ours and is_address(path):
        path = str(fetch(path))
    if ours and not _is_of_deepspeed(trainer):
        check_names_weights(check_checkpoint(path, resumes))
    return path


# ---- one choice on all ranks


class SameCheckpoint(pl.Callback):
    """Refuses to train where ranks chose different checkpoints, or another one lies at the path when it is loaded.

    Args:
        path: the checkpoint, None for none.
        before: its `identity` when it was chosen.
    """

    def __init__(self, path: str | None, before: list[int]) -> None:
        self.path = path
        self.before = before
        self.store: Any = None  # kept until all processes have their answers

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Compare the choices of all ranks, before anything is loaded."""
        if trainer.world_size == 1 or not (dist.is_available() and dist.is_initialized()):
            return
        choices: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(choices, self.path)
        for rank, other in enumerate(choices):
            if other != choices[0]:
                raise UsageError(
                    f"ckpt_path: rank 0 found {choices[0] or 'no checkpoint'} and rank {rank} {other or 'none'}: the "
                    "checkpoints must lie where all ranks see them, and no other run may write there; or give "
                    "--ckpt_path FILE"
                )

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        """Compare the file with the one that was chosen, now that it is loaded."""
        if identity(self.path) != self.before:
            raise UsageError(
                f"ckpt_path={relative_to_cwd(self.path)}: it was replaced while this run started, so another run "
                "writes to the same folder: end one of them"
            )


class EvaluatedStep(pl.Callback):
    """Log what `validate`, `test` and `predict` log at the step of their checkpoint; Lightning logs it at step 0."""

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        """Take the step over."""
        take_loops_step(trainer, checkpoint)


def choose_once(command: str, options: Mapping[str, Any], trainer: Any) -> str | None:
    """The checkpoint that a command starts from. One that was looked for is compared again when the Trainer loads it.

    Args:
        command: see `choose_checkpoint`.
        options: the command's, with `ckpt_path` and `resume`.
        trainer: gets a SameCheckpoint.

    Raises:
        UsageError: see `choose_checkpoint`.
    """
    asked, resume = options.get("ckpt_path"), options.get("resume") or "none"
    if not looks_for_newest(command, asked, resume):
        return choose_checkpoint(command, asked, trainer)
    same = inherited_choice()
    if same is None:
        store = store_before_the_run(trainer)
        choose = partial(choose_checkpoint, command, asked, trainer, resume)
        same = publish_choice(choose() if store is None else _choose_on_host(choose, trainer, store))
        same.store = store
    trainer.callbacks.insert(0, same)
    plugin = trainer.strategy.checkpoint_io
    if isinstance(plugin, AtomicCheckpointIO):
        plugin.remember_verified(same.before)
    return same.path


def _choose_on_host(choose: Callable[[], str | None], trainer: Any, store: Any) -> str | None:
    """The choice of the first process of a host, which reads the bytes; the others take its answer from the store."""
    key = f"lightning_tricks/choice/{socket.gethostname()}/{next(_calls)}"
    if trainer.strategy.cluster_environment.local_rank() == 0:
        answer = ""  # none: every process refuses by itself
        try:
            answer = json.dumps(path := choose())
        finally:
            store.set(key, answer)
        return path
    with suppress(RuntimeError):  # the process that holds the store has refused, and ended
        store.wait([key], timedelta(days=1))  # a launcher ends all processes if the one that reads dies
        if told := store.get(key):
            return json.loads(told)
    return choose()


def publish_choice(path: str | None) -> SameCheckpoint:
    """Keep a choice for the processes that Lightning's launcher will start, which inherit the environment."""
    before = identity(path)
    os.environ[_CHOICE] = json.dumps([path, before])
    return SameCheckpoint(path, before)


def inherited_choice() -> SameCheckpoint | None:
    """The choice of the process that started this one; None in the first process of a host, and under torchrun."""
    if os.environ.get("LOCAL_RANK", "0") == "0" or _CHOICE not in os.environ:
        return None
    return SameCheckpoint(*json.loads(os.environ[_CHOICE]))


def clear_choice() -> None:
    """Take the choice out of the environment, when the command has ended."""
    os.environ.pop(_CHOICE, None)
