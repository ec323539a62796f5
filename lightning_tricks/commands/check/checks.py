"""The checks of a recipe, in the order in which they are made, and the list that they print.

Each is a function that returns its line, or a `Note` where nothing was to be checked or a person should look. One that
raises a UsageError has failed: its line says which option, which value and what to do. The others go on.
"""

import copy
import importlib.util
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import fsdp

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.replaced import replaced
from lightning_tricks._host.machine import listed, most_processes
from lightning_tricks._host.writable import check_folders_of_run, free_bytes
from lightning_tricks._trainer.lightning import pl
from lightning_tricks._trainer.objects import is_a, steps_between_saves_of
from lightning_tricks.callbacks import SafeCheckpoint
from lightning_tricks.commands.check.overlap import LARGEST_SHARE, SAMPLE, find_overlap
from lightning_tricks.commands.plan import PlanOptions
from lightning_tricks.commands.plan.changes import changes_that_fit
from lightning_tricks.commands.plan.fake_cluster import at_once, view_cluster
from lightning_tricks.commands.plan.memory import kernels_of_a_gpu, loss_of_step
from lightning_tricks.commands.plan.memory_trace import STEP
from lightning_tricks.commands.plan.plan import MemoryPlan, plan_recipe
from lightning_tricks.commands.plan.setup import NeedsValuesError, RunSetup, read_setup
from lightning_tricks.commands.plan.stages import loss_of_stages
from lightning_tricks.commands.schedule.plan import SchedulePlan, planned
from lightning_tricks.data.base import TokenDataModule
from lightning_tricks.logs.table import shows_unicode, size_text
from lightning_tricks.mixins import OptimizerMixin
from lightning_tricks.parallel.pipeline import Cut

_PASSED, _FAILED, _NOTE = "ok", "!!", "--"
_SIGNS = {_PASSED: "✓", _FAILED: "✗", _NOTE: "·"}
_BLOCKS = 2  # of a model whose collectives are traced: the others are like them
_DRIVER = Path("/proc/driver/nvidia/version")


class Note(NamedTuple):
    """A line on something that was not checked, or that a person should look at."""

    line: str


class Result(NamedTuple):
    """What a check found.

    Attributes:
        name: of the check.
        mark: `ok`, `!!` (it failed) or `--` (a note).
        line: for the list.
    """

    name: str
    mark: str
    line: str

    @property
    def failed(self) -> bool:
        """Whether a run would fail, or lose much."""
        return self.mark == _FAILED


@dataclass
class Checked:
    """A recipe under check, and what its checks have found for those that follow.

    Attributes:
        module: not built yet, as it stays.
        datamodule: or None.
        trainer: the Trainer's arguments, with classes as objects.
        gpu: a word for it; None as `plan` has it.
        parameters: elements of the model, once it was built.
        plan: of its memory, once it was traced.
        schedule: once it is known.
    """

    module: Any
    datamodule: Any
    trainer: Mapping[str, Any]
    gpu: str | None = None
    parameters: int | None = None
    plan: MemoryPlan | None = None
    schedule: SchedulePlan | None = field(default=None, repr=False)

    @cached_property
    def setup(self) -> RunSetup:
        """The recipe on its own devices."""
        return read_setup(self.module, self.datamodule, self.trainer, None, None, self.on_gpu)

    @property
    def on_gpu(self) -> bool:
        """Whether the recipe is for GPUs."""
        return self.trainer.get("accelerator") != "cpu"

    @property
    def known_layout(self) -> bool:
        """Whether the strategy is one of which `plan` knows how it divides."""
        try:
            return bool(self.setup.kind)
        except UsageError:
            return False

    @property
    def loggers(self) -> list[Any]:
        """The loggers, without the one that Lightning adds by itself."""
        return [one for one in listed(self.trainer, "logger") if not isinstance(one, bool)]

    @property
    def root(self) -> Path:
        """The folder of what has no other one."""
        return Path(self.trainer.get("default_root_dir") or Path.cwd())

    def stand_in(self) -> Any:
        """What the parts' own `check_run` ask of a Trainer."""
        setup = self.setup
        accelerator = SimpleNamespace() if self.on_gpu else pl.accelerators.CPUAccelerator()
        ios = [one for one in listed(self.trainer, "plugins") if isinstance(one, pl.plugins.CheckpointIO)]
        return SimpleNamespace(
            strategy=SimpleNamespace(
                handles_gradient_accumulation=False, checkpoint_io=[*ios, pl.plugins.TorchCheckpointIO()][0]
            )
            if isinstance(setup.strategy, str)
            else setup.strategy,
            precision_plugin=setup.plugin,
            accelerator=accelerator,
            lightning_module=self.module,
            num_nodes=setup.nodes,
            num_devices=setup.devices,
            world_size=setup.world,
            callbacks=listed(self.trainer, "callbacks"),
            accumulate_grad_batches=setup.micro_batches,
            max_steps=self.trainer.get("max_steps") or -1,
            max_epochs=self.trainer.get("max_epochs"),
            gradient_clip_val=self.trainer.get("gradient_clip_val"),
            gradient_clip_algorithm=self.trainer.get("gradient_clip_algorithm"),
            log_every_n_steps=50 if (every := self.trainer.get("log_every_n_steps")) is None else every,
            reload_dataloaders_every_n_epochs=self.trainer.get("reload_dataloaders_every_n_epochs"),
            checkpoint_callbacks=savers_of(self.trainer),
            optimizers=[],  # not made yet
            fast_dev_run=True,  # the length of the run is the business of the check of the schedule
        )


Check = Callable[[Checked], "str | Note"]


# ---- what the recipe says


def recipe(checked: Checked) -> str:
    """The parts of the recipe, which the command line has read and built."""
    setup = checked.setup
    strategy = setup.strategy if isinstance(setup.strategy, str) else type(setup.strategy).__name__
    data = "no data module" if checked.datamodule is None else type(checked.datamodule).__name__
    return f"{type(checked.module).__name__}, {data}, {strategy}, {setup.precision} on {setup.nodes} x {setup.devices}"


def model(checked: Checked) -> str:
    """The model builds, on the meta device: no weight is drawn."""
    (found,) = at_once([partial(_parameters, checked.setup)])
    checked.parameters, trained = found
    frozen = "" if trained == checked.parameters else f", {trained:,} of them trained"
    return f"{checked.parameters:,} parameters{frozen}"


def _parameters(setup: RunSetup) -> tuple[int, int]:
    parameters = list(setup.build().parameters())
    return sum(one.numel() for one in parameters), sum(one.numel() for one in parameters if one.requires_grad)


def settings(checked: Checked) -> str | Note:
    """The checks that module, strategy, precision and callbacks bring for themselves, which `fit` makes too."""
    parts = (checked.setup.strategy, checked.setup.plugin, checked.module)
    found = _own_checks(checked, [part for part in parts if hasattr(part, "check_run")], "optimizer and sizes")
    for callback in listed(checked.trainer, "callbacks"):
        if hasattr(callback, "check_run"):
            _own_checks(checked, [callback], "")
    return found


def _own_checks(checked: Checked, parts: Sequence[Any], words: str) -> str | Note:
    names = ", ".join(type(part).__name__ for part in parts)
    try:
        for part in parts:
            part.check_run(checked.stand_in(), checked.datamodule, "fit")
    except AttributeError as error:
        return Note(f"{names}: its own check needs a Trainer ({error}): fit makes it")
    return f"{words}, checked by {names}" if parts else Note("no part has a check of its own")


def data(checked: Checked) -> str | Note:
    """The files are there and can be read, fit the tokenizer and the model."""
    source, module = checked.datamodule, checked.module
    if source is None:
        if not pl.utilities.model_helpers.is_overridden("train_dataloader", module):
            raise UsageError(
                f"the recipe has no data, and {type(module).__name__} has no train_dataloader: add some, such as "
                "`data: TextData`"
            )
        return Note(f"{type(module).__name__} has loaders of its own, which are not run")
    if hasattr(source, "check_run") and isinstance(found := _own_checks(checked, [source], ""), Note):
        return found
    if not hasattr(source, "check_sample"):
        return Note(f"{type(source).__name__} has no check of its own, and is not run")
    return str(source.check_sample(getattr(getattr(module, "config", None), "vocab_size", None)))


def overlap(checked: Checked) -> str | Note:
    """Validation documents do not stand in the training data too."""
    source = checked.datamodule
    if not isinstance(source, TokenDataModule):
        return Note("only TextData and TokenData are compared")
    if not source.is_prepared():
        return Note("not known before the text is tokenized, which prepare does")
    source = copy.copy(source)
    source.setup("fit")
    train, val = (
        [each.streams[split] for each in source.sources if split in each.streams] for split in ("train", "val")
    )
    if not val:
        return Note("no validation data")
    found = find_overlap(train, val, source.eot_id)
    part = (
        "" if max(map(len, train)) <= SAMPLE["train"] // len(train) else f"a sample of {SAMPLE['train']:,} tokens of "
    )
    line = f"{found} stand in {part}the training data too"
    return Note(f"{line}: their loss says little of new text") if found.share > LARGEST_SHARE else line


def schedule(checked: Checked) -> str | Note:
    """The learning rate over the run, its length, and its validations."""
    trainer = checked.trainer
    try:
        plan = checked.schedule = planned(checked.module, checked.datamodule, trainer)
    except UsageError as error:
        by_epochs = (trainer.get("max_epochs") or -1) > 0 and (trainer.get("max_steps") or -1) < 1
        if by_epochs or not isinstance(checked.module, OptimizerMixin):
            return Note(str(error))
        raise
    peak, phases = plan.peak, [phase for phase in plan.phases if phase.name != "end"]
    curve = ", ".join(f"{phase.name} from {phase.step:,}" for phase in phases)
    tokens = "" if plan.total_tokens is None else f", {plan.total_tokens:,} tokens"
    line = f"{plan.total_steps:,} steps{tokens}: {curve}; peak {peak:.3g}, last {plan.phases[-1].lr:.3g}"
    interval = trainer.get("val_check_interval")
    if isinstance(interval, int) and interval > 1 and trainer.get("limit_val_batches") != 0 and not plan.validations:
        return Note(f"{line}; trainer.val_check_interval={interval}: the run ends before its first validation")
    return line


# ---- what the cluster would do


def layout(checked: Checked) -> str | Note:
    """The first, the middle and the last rank of the recipe's own world send the same, in the same order."""
    setup = checked.setup
    if not checked.known_layout:
        return Note("this strategy divides the model by itself: its layout is not known before the run")
    if setup.kind != "fsdp2":
        return "one device" if setup.world == 1 else f"{setup.world} processes, {setup.kind}"
    dims = setup.dims
    blocks = min(_BLOCKS, setup.module.config.n_layers) if setup.is_ours and setup.blocks_alike else None
    # the number of rows changes no collective, and each slice of the head takes time
    step = partial(_step, setup.changed(micro_batch_size=1)) if setup.is_ours and setup.rows else None
    if dims.pipeline > 1:
        blocks, step = None, step and partial(_step_of_stages, setup)
    with ExitStack() as stack:  # inherited by the ranks, for forward and backward pass
        for owner, name, value in kernels_of_a_gpu() if setup.on_gpu else ():
            stack.enter_context(replaced(owner, name, value))
        views = view_cluster(
            partial(setup.build, blocks), dims, setup.parallel_options(), step, cut=setup.strategy.cut_stages
        )
    ranks = ", ".join(str(view.rank) for view in views)
    sent = f"send the same {len(views[0].collectives)} collectives" if step else "divide it alike"
    return f"{dims} of {setup.world:,} devices: ranks {ranks} {sent}{f' in {blocks} blocks' if blocks else ''}"


def _step_of_stages(setup: RunSetup, cut: Cut, module: nn.Module) -> Tensor:
    with setup.forward_context():
        return loss_of_stages(setup, cut, module)


def _step(setup: RunSetup, module: nn.Module) -> Tensor:
    fsdp.register_fsdp_forward_method(module, "token_sums")
    with setup.forward_context():
        return loss_of_step(setup, module)(module)


def memory(checked: Checked) -> str | Note:
    """A step fits into the memory of a device."""
    setup = checked.setup
    if not checked.known_layout or not setup.is_ours:
        return Note("not known without running code or data of the recipe: the command plan traces it")
    options = PlanOptions(gpu=checked.gpu)
    plan = checked.plan = plan_recipe(checked.module, checked.datamodule, checked.trainer, options, suggest=False)
    if plan.memory is None or plan.peak_bytes is None:
        return Note(f"not known: {plan.why_no_memory}")
    share = f"{size_text(plan.peak_bytes)} of {size_text(plan.device.bytes)} of {plan.device.name}"
    if plan.fits:
        looks = f"; {plan.warnings[0]}" if plan.warnings else ""
        return Note(share + looks) if looks else f"{share}, largest in the {plan.memory.largest}"
    room = plan.device.bytes - plan.device.overhead
    changes = changes_that_fit(plan.setup, plan.memory, room, most=1)
    remedy = " ".join(changes[0].options) if changes else "a smaller model, or more memory"
    if plan.setup.compiles:
        return Note(f"{share}, counted as eager: compiled blocks need less; if that does not fit, give {remedy}")
    raise UsageError(f"{share}: does not fit; give {remedy} (the command plan says more)")


# ---- this machine


def libraries(checked: Checked) -> str:
    """A compiler is there, where blocks are compiled."""
    setup = checked.setup
    if setup.compiles and not checked.on_gpu:
        compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++")), None)
        if compiler is None or shutil.which(compiler.split()[0]) is None:
            raise UsageError(
                f"compile_blocks=True: torch.compile needs a C++ compiler on a CPU ({compiler or 'g++ or clang++'} is "
                "not there): install one, or leave compile_blocks out"
            )
    if setup.compiles and checked.on_gpu and torch.cuda.is_available() and importlib.util.find_spec("triton") is None:
        raise UsageError("compile_blocks=True: torch.compile needs triton on a GPU: pip install triton")
    return f"torch {torch.__version__}, lightning {pl.__version__}"


def devices(checked: Checked) -> str | Note:
    """The devices of the recipe are here, and torch can use them."""
    wanted = checked.setup.devices
    if not checked.on_gpu:
        if wanted > (most := most_processes()):
            raise UsageError(f"trainer.devices={wanted}: so many processes on this CPU: give at most {most}")
        return f"{wanted} on this CPU of {os.cpu_count()} cores"
    if not torch.cuda.is_available():
        if _DRIVER.exists():
            raise UsageError(
                f"trainer.accelerator={checked.trainer.get('accelerator')}: the machine has NVIDIA's driver, and torch "
                f"{torch.__version__}, built for CUDA {torch.version.cuda}, finds no GPU: repair that first"
            )
        planned_for = "" if checked.plan is None else f": planned for {checked.plan.device.name}"
        return Note(f"no GPU on this machine{planned_for}; ask again where the run will start")
    count, name = torch.cuda.device_count(), torch.cuda.get_device_name(0)
    if wanted > count:
        raise UsageError(
            f"trainer.devices={wanted}: this machine has {count} ({name}): give --trainer.devices {count}, or start on "
            f"a host with {wanted}"
        )
    return f"{count} x {name}, torch for CUDA {torch.version.cuda}"


def kept_checkpoints(saver: Any, saves: int | None, permanent: int) -> int:
    """The most checkpoints of one saver at once, with the one that is being written.

    Args:
        saver: a SafeCheckpoint or a ModelCheckpoint.
        saves: of the whole run, the last step's among them; None where they are not known.
        permanent: saves that SafeCheckpoint never deletes.
    """
    most = saves if saves is not None else 10**9
    if isinstance(saver, SafeCheckpoint):
        others = saver.keep_last + (saver.keep_best if saver.monitor is not None else 0)
        return min(permanent + others + 1, max(most, 1))
    if saver.save_top_k < 0:
        return (saves or 1) + bool(saver.save_last)
    return min(saver.save_top_k + bool(saver.save_last) + 1, max(most, 1) + bool(saver.save_last))


def savers_of(settings: Any) -> list[Any]:
    """The checkpoint callbacks of a Trainer's arguments; Lightning's own one where it adds it."""
    savers = [callback for callback in listed(settings, "callbacks") if is_a(callback, "ModelCheckpoint")]
    if not savers and settings.get("enable_checkpointing") is not False:
        savers = [pl.callbacks.ModelCheckpoint()]
    return savers


def saves_of_run(saver: Any, total_steps: int | None, validations: Sequence[int]) -> int | None:
    """Saves of a run, its last step among them; None where minutes or epochs decide."""
    every = steps_between_saves_of(saver)
    if total_steps is None or getattr(saver, "every_n_minutes", None) is not None:
        return None
    if every:
        return -(-total_steps // every)
    return len({*validations, total_steps}) if validations else None


def disk(checked: Checked) -> str | Note:
    """The checkpoints of the run fit on their disk."""
    savers = savers_of(checked.trainer)
    sizes = [checkpoint_bytes(checked, saver.save_weights_only) for saver in savers]
    if not savers or sizes[0] is None:
        return Note("the run saves no checkpoint" if not savers else "the size of a checkpoint is not known")
    words = "at least " if checked.plan is None or checked.plan.memory is None else ""  # without the optimizer's state
    steps = checked.schedule.total_steps if checked.schedule else None
    validations = checked.schedule.validations if checked.schedule else ()
    permanent = len(checked.schedule.permanent) if checked.schedule else 0
    counts = [kept_checkpoints(saver, saves_of_run(saver, steps, validations), permanent) for saver in savers]
    lines = []
    for folder in dict.fromkeys(_folder_of(saver, checked) for saver in savers):
        there = [n for n, saver in enumerate(savers) if _folder_of(saver, checked) == folder]
        if (free := free_bytes(folder)) is None:
            lines.append(f"{folder} is no disk of this machine")
            continue
        each = " and ".join(f"{counts[n]} checkpoints of {words}{size_text(sizes[n] or 0)}" for n in there)
        needed = sum(counts[n] * (sizes[n] or 0) for n in there)
        line = f"{each} at once: {size_text(needed)}, free {size_text(free)} in {folder}"
        if needed > free:
            raise UsageError(f"{line}: make room, keep fewer (keep_last), or save to another disk (dirpath)")
        lines.append(line)
    return "; ".join(lines)


def checkpoint_bytes(checked: Checked, weights_only: bool = False) -> int | None:
    """Bytes of a checkpoint of all ranks, without the optimizer's state where it is not known; None: nothing is."""
    plan = checked.plan
    if plan is None or plan.memory is None:
        return None if checked.parameters is None else 4 * checked.parameters
    setup = plan.setup
    weights = sum(plan.parameters.values()) * setup.weights_dtype.itemsize
    if weights_only:
        return weights
    parts = setup.world // setup.dims.replicate if setup.kind == "fsdp2" else 1
    lines = {**plan.memory.instants[STEP], **plan.memory.host}  # of one that keeps its shards on the host
    state = lines.get("optimizer state", 0) * (setup.world if setup.kind == "zero" else parts)
    return weights + state + lines.get("averages", 0) * parts


def _folder_of(saver: Any, checked: Checked) -> str | Path:
    """The folder, or the one in which it will be made."""
    roots = (logger.save_dir for logger in checked.loggers if getattr(logger, "save_dir", None))
    return getattr(saver, "dirpath", None) or next(roots, checked.root)


def folders(checked: Checked) -> str:
    """The folders of logs and checkpoints can be written."""
    savers = savers_of(checked.trainer)
    check_folders_of_run(checked.loggers, savers, checked.root)
    places = [_folder_of(saver, checked) for saver in savers] or [checked.root]
    return ", ".join(dict.fromkeys(map(str, places)))


CHECKS: tuple[Check, ...] = (
    recipe, model, settings, data, overlap, schedule, layout, memory, libraries, devices, disk, folders,
)  # fmt: skip


# ---- the list


def run_checks(checks: Sequence[Check], checked: Checked, show: Callable[[str], None]) -> list[Result]:
    """Make the checks one after the other, and show each line when it is known.

    A mistake that several checks meet is shown by the first of them.
    """
    results: list[Result] = []
    first_with: dict[str, str] = {}  # name of the first check with that line
    for check in checks:
        mark, line = _outcome(check, checked)
        if mark == _FAILED and line in first_with:
            mark, line = _NOTE, f"not known, see {first_with[line]}"
        elif mark == _FAILED:
            first_with[line] = check.__name__
        results.append(Result(check.__name__, mark, line))
        show(f"{_SIGNS[mark] if shows_unicode() else mark} {check.__name__:<10} {line}")
    return results


def _outcome(check: Check, checked: Checked) -> tuple[str, str]:
    try:
        found = check(checked)
    except NeedsValuesError as error:
        return _NOTE, str(error)
    except UsageError as error:
        return _FAILED, str(error)
    except Exception as error:  # of the user's own code, or of a library: its last line says what it was
        said = str(error).strip().splitlines() or [type(error).__name__]
        return _FAILED, f"{said[-1]}: the recipe's own code failed here; fit would fail likewise"
    return (_NOTE, found.line) if isinstance(found, Note) else (_PASSED, found)


def summary(results: Sequence[Result]) -> str:
    """The last line."""
    count = {mark: sum(result.mark == mark for result in results) for mark in (_PASSED, _FAILED, _NOTE)}
    notes = f", {count[_NOTE]} not checked or to look at" if count[_NOTE] else ""
    return f"{len(results)} checks: {count[_PASSED]} passed, {count[_FAILED]} failed{notes}"
