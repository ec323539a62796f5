"""One run from its folder: how far it came, its validations, its speed, its settings. Imports neither torch nor numpy.

It reads whatever is there: our loggers' files or Lightning's, of this collection's runs or of another project's.
"""

import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.foreign_files import read_settings, why
from lightning_tricks.logs.scalars import ROLES, Scalars, event_files, read_scalars

BITS = "val/bits_per_byte"
_GOODPUT, _SECONDS, _MFU, _BATCH = "goodput/steps", "goodput/wall_seconds", "throughput/mfu", "train/batch_tokens"
_WANTED = frozenset({BITS, _GOODPUT, _SECONDS, _MFU, _BATCH, *ROLES["val_loss"], *ROLES["loss"]})
_OF_A_SOURCE = re.compile(r"sources/(.+)/(val_loss|bits_per_byte)")
ACTIVE_SECONDS = 600.0  # since the last write to a log, after which a run that has not ended counts as stopped
_DIVERGED = 1.5  # times the first training loss, of the last three: no noise of batches is as large
_SETTINGS = ("config.yaml", "hparams.yaml")
# Settings that name the run or its place, or are options of `validate`, and not how it trains.
_NO_SETTINGS = re.compile(
    r"trainer\.(logger|default_root_dir)|ckpt_path|resume|config|weights_only|(json|text|verbose)$"
)
Names = Mapping[str, str]  # of metrics, by their roles in `ROLES`


@dataclass(frozen=True)
class Run:
    """One run; None stands for what its folder does not tell.

    Args:
        name: path of its folder below the one that was looked through.
        state: `finished`; `failed`, where the last training loss is no number; `diverged`, where the last three are
            above 1.5 times the first; `active`, where its log was written to within the last ten minutes; `stopped`;
            `empty`, without any step; `unreadable`, a folder that cannot be entered.
        steps: optimizer steps done.
        val_loss: of the last validation.
        best_val_loss: the smallest one.
        best_step: optimizer steps done at that validation.
        bits_per_byte: of the last validation.
        best_bits_per_byte: the smallest one.
        sources: of a mixture, bits per byte of each source in the last validation, or else nats a token.
        tokens: of all steps and processes.
        hours: from the first start to the last write, as GoodputMonitor measures it, else by the times in the logs.
        goodput: share of that time that made progress, the last one of GoodputMonitor.
        mfu: the last one of MFUMonitor.
        settings: of config.yaml, else of hparams.yaml, by their dotted names.
        unread: a line for each file, or part of one, that could not be read.
        folder: of it.
        scalars: its log, of the metrics above or of all.
    """

    name: str
    state: str
    steps: int | None = None
    val_loss: float | None = None
    best_val_loss: float | None = None
    best_step: int | None = None
    bits_per_byte: float | None = None
    best_bits_per_byte: float | None = None
    sources: Mapping[str, float] | None = None
    tokens: int | None = None
    hours: float | None = None
    goodput: float | None = None
    mfu: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    unread: Sequence[str] = ()
    folder: Path = Path()
    scalars: Scalars = field(default_factory=Scalars, repr=False)


COLUMNS = tuple(each.name for each in fields(Run) if each.name not in ("settings", "unread", "folder", "scalars"))


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run: it has a log, checkpoints or settings, or is one of Lightning's versions."""
    if any((folder / name).is_file() for name in ("metrics.csv", "hparams.yaml")) or (folder / "checkpoints").is_dir():
        return True
    return bool(_VERSION.fullmatch(folder.name) or event_files(folder))


def read_run(
    folder: Path, name: str = "", names: Names | None = None, now: float | None = None, all_metrics: bool = False
) -> Run:
    """The run in a folder.

    Args:
        folder: of the run.
        name: for the result.
        names: of the losses by their roles; without, the first of the usual ones that was logged.
        now: seconds since 1970; None for the present.
        all_metrics: whether `scalars` is to have all metrics.
    """
    losses, training = ((names[role],) if names and role in names else ROLES[role] for role in ("val_loss", "loss"))
    scalars = read_scalars(folder, None if all_metrics else _Wanted(_WANTED.union(losses, training)))
    document, unread = settings_of(folder)
    saved = _saved_steps(folder)
    steps = max((each for each in (scalars.steps, saved) if each is not None), default=None)
    loss = next((found for name in losses if (found := scalars.series(name))), {})
    bits = scalars.series(BITS)
    best, best_bits = _best(loss), _best(bits)
    seconds = _seconds(scalars)
    return Run(
        name=name or folder.name,
        state=_state(folder, scalars, training, steps, document, time.time() if now is None else now),
        steps=steps,
        val_loss=scalars.metrics[next(each for each in losses if each in scalars.metrics)].values[-1] if loss else None,
        best_val_loss=None if best is None else loss[best],
        best_step=None if best is None else best + 1,
        bits_per_byte=scalars.last(BITS),
        best_bits_per_byte=None if best_bits is None else bits[best_bits],
        sources=_of_sources(scalars),
        tokens=_tokens(document, scalars, steps),
        hours=seconds / 3600 if seconds is not None else None,
        goodput=scalars.last(_GOODPUT),
        mfu=scalars.last(_MFU),
        settings={key: value for key, value in flat(document).items() if not _NO_SETTINGS.match(key)},
        unread=(*scalars.facts.unread, *unread),
        folder=folder,
        scalars=scalars,
    )


_VERSION = re.compile(r"version_\d+")
_EVALUATIONS = ("validate", "test", "predict")  # folders that these commands write beside the runs of a logger


class _Wanted(frozenset[str]):
    """Names of metrics, and those of all sources."""

    def __contains__(self, tag: object) -> bool:
        return super().__contains__(tag) or _OF_A_SOURCE.fullmatch(str(tag)) is not None


def _of_sources(scalars: Scalars) -> dict[str, float] | None:
    """The last value of each source's validation, by its name."""
    found = [match for tag in sorted(scalars.metrics) if (match := _OF_A_SOURCE.fullmatch(tag))]
    kind = "bits_per_byte" if any(match[2] == "bits_per_byte" for match in found) else "val_loss"
    values = {match[1]: scalars.last(match[0]) for match in found if match[2] == kind}
    return {name: value for name, value in values.items() if value is not None} or None


def run_folders(folder: Path, command: str, unreadable: list[tuple[str, str]]) -> Iterator[Path]:
    """The folders of runs in a folder and below it; a run's own subfolders are not looked through.

    Args:
        folder: of runs, or of one run.
        command: that asks, for its error lines.
        unreadable: gets path and reason of each folder that cannot be entered.

    Raises:
        UsageError: there is no such folder.
    """
    if not folder.is_dir():
        what = "this is a file" if folder.exists() else "no such folder"
        raise UsageError(f"{command}: {folder}: {what}: give the folder in which a logger writes its runs")

    def note(error: OSError) -> None:
        unreadable.append((str(error.filename), why(error)))

    for place, folders, _ in os.walk(folder, onerror=note):
        try:
            if is_run(Path(place)):
                folders.clear()
                yield Path(place)
        except OSError as error:  # one that may be listed, but not entered
            unreadable.append((place, why(error)))
            folders.clear()
        beside_runs = any(map(_VERSION.fullmatch, folders))
        skipped = _EVALUATIONS if beside_runs else ()
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in skipped)


def find_runs(folder: Path, names: Names | None = None, command: str = "runs", all_metrics: bool = False) -> list[Run]:
    """The runs in a folder and below it, named by their paths from there.

    Args:
        folder: of runs, or of one run.
        names: see `read_run`.
        command: that asks, for its error lines.
        all_metrics: see `read_run`.

    Raises:
        UsageError: there is no such folder, or no run in it.
    """
    unreadable: list[tuple[str, str]] = []

    def name_of(path: Path) -> str:
        return str(path.relative_to(folder)) if path != folder else folder.name

    found = [
        read_run(path, name_of(path), names, all_metrics=all_metrics)
        for path in run_folders(folder, command, unreadable)
    ]
    found += [
        Run(name_of(Path(path)), "unreadable", unread=(reason,), folder=Path(path)) for path, reason in unreadable
    ]
    if not found:
        raise UsageError(
            f"{command}: {folder}: there is no run below it (no metrics.csv, event file, checkpoints or hparams.yaml): "
            "give the folder in which a logger writes its runs"
        )
    return found


def _best(points: Mapping[int, float]) -> int | None:
    """The step of the smallest finite value, the first of several."""
    finite = [step for step, value in points.items() if math.isfinite(value)]
    return min(finite, key=points.__getitem__, default=None)


def _saved_steps(folder: Path) -> int | None:
    """Optimizer steps of the newest checkpoint, by its name: `step=200.ckpt`, or Lightning's `epoch=0-step=200`."""
    names = (re.search(r"step=(\d{1,15})(?!\d)", path.name) for path in (folder / "checkpoints").glob("*.ckpt"))
    return max((int(found[1]) for found in names if found), default=None)


def _seconds(scalars: Scalars) -> float | None:
    """Wall time: GoodputMonitor's, else that of the records."""
    if (logged := scalars.last(_SECONDS)) is not None:
        return logged
    first, last = scalars.facts.first_time, scalars.facts.last_time
    return None if first is None or last is None else max(last - first, 0.0)


def _state(folder: Path, scalars: Scalars, losses: Sequence[str], steps: int | None, document: Any, now: float) -> str:
    if not steps:
        return "empty"
    series = [list(found.values()) for name in losses if (found := scalars.series(name))]
    if any(not math.isfinite(values[-1]) for values in series):
        return "failed"
    if any(min(values[-3:]) > _DIVERGED * abs(values[0]) for values in series):
        return "diverged"
    planned = entry_at(document, "trainer", "max_steps")
    if scalars.facts.ended or (isinstance(planned, int) and 0 < planned <= steps):
        return "finished"
    return "active" if now - last_written(folder, "metrics.csv", "goodput.json") < ACTIVE_SECONDS else "stopped"


def last_written(folder: Path, *names: str) -> float:
    """When event files and those of these names were last written to; 0 without any, or where none can be looked at."""
    try:
        files = [*event_files(folder), *(folder / name for name in names)]
        return max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)
    except OSError:
        return 0.0


def find_run(folder: Path) -> Path:
    """The folder itself if it has a log, else the newest run below it.

    Raises:
        UsageError: no such folder, or no log in it.
    """
    folders = [folder] if last_written(folder, "metrics.csv") else run_folders(folder, "doctor", [])
    if not (runs := {path: time for path in folders if (time := last_written(path, "metrics.csv"))}):
        raise UsageError(
            f"doctor: {folder}: there is no log in it (no metrics.csv, no event file): give the folder in which a "
            "logger writes"
        )
    return max(runs, key=runs.__getitem__)


# ---- settings


def settings_of(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The settings of a run, of config.yaml or else of hparams.yaml, and a line for each that cannot be read."""
    unread: list[str] = []
    for file in (folder / name for name in _SETTINGS):
        try:
            if file.exists() and (found := read_settings(file)):
                return found, unread
        except (OSError, ValueError) as error:
            unread.append(f"{file.name}: {why(error)}")
    return {}, unread


def entry_at(document: Any, *names: str) -> Any:
    """An entry of nested settings; None where there is none."""
    for name in names:
        document = document.get(name) if isinstance(document, dict) else None
    return document


def _tokens(document: Any, scalars: Scalars, steps: int | None) -> int | None:
    """Tokens of all steps: rows, length, accumulation and processes by the settings; None where one is not known."""
    trainer, data = entry_at(document, "trainer"), entry_at(document, "data", "init_args")
    accumulated, callbacks = entry_at(trainer, "accumulate_grad_batches") or 1, _list(entry_at(trainer, "callbacks"))
    sizes = [entry_at(data, "micro_batch_size"), entry_at(data, "seq_len"), accumulated]
    if steps is None or not all(map(_is_count, sizes)):
        return None
    if any("BatchSizeWarmup" in str(entry_at(callback, "class_path")) for callback in callbacks):
        batches = scalars.series(_BATCH)
        if len(batches) < steps or not set(range(steps)) <= batches.keys():
            return None
        tokens = sum(batches[step] for step in range(steps))
        return round(tokens) if math.isfinite(tokens) else None
    # an elastic run keeps the rows of the full run that its recipe describes, on however many processes
    processes = _data_ranks(trainer, None if entry_at(document, "elastic") else scalars.facts.devices)
    return None if processes is None else math.prod(sizes) * processes * steps


def _data_ranks(trainer: Any, world: int | None) -> int | None:
    """Number of processes with rows of their own, of `world` processes, or of those that the settings name."""
    if world is None:
        devices, nodes = entry_at(trainer, "devices"), entry_at(trainer, "num_nodes") or 1
        if isinstance(devices, list):
            devices = len(devices)
        if entry_at(trainer, "accelerator") == "cpu" and devices == "auto":
            devices = 1
        if not _is_count(devices) or not _is_count(nodes):
            return None
        world = devices * nodes
    mesh = entry_at(trainer, "strategy", "init_args", "mesh")
    same_rows = mesh.keys() - {"replicate", "shard", "expert"} if isinstance(mesh, dict) else ()
    return world // math.prod(mesh[axis] for axis in same_rows if _is_count(mesh[axis]))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def flat(document: Any, before: str = "") -> dict[str, Any]:
    """Nested settings by dotted names, without `class_path` and `init_args`: a class is the value of its place.

    Example:
        >>> flat({"model": {"class_path": "a.Llama", "init_args": {"d_model": 8}}, "trainer": {"callbacks": ["b.EMA"]}})
        {'model': 'Llama', 'model.d_model': 8, 'trainer.callbacks': ['b.EMA']}
    """
    if isinstance(document, dict) and "class_path" in document:
        name = str(document["class_path"]).rpartition(".")[2]
        inner = flat(document.get("init_args") or {}, before)
        return {before.removesuffix("."): name, **inner}
    if isinstance(document, dict):
        return {
            key: value for name, inner in document.items() for key, value in flat(inner, f"{before}{name}.").items()
        }
    if isinstance(document, list) and document and all(entry_at(one, "class_path") for one in document):
        names = [str(one["class_path"]).rpartition(".")[2] for one in document]
        found: dict[str, Any] = {before.removesuffix("."): ", ".join(names)}
        for name, one in zip(names, document, strict=True):
            found |= flat(one.get("init_args") or {}, f"{before}{name}.")
        return found
    return {before.removesuffix("."): document}


def differing(runs: Sequence[Run]) -> dict[str, str]:
    """The settings in which runs differ: the shortest name that tells them apart, and the whole dotted name.

    A run without any settings on file does not count. A setting that a run lacks counts as one of its own, unless it is
    one of a callback: the list of callbacks tells that.
    """
    known = [run for run in runs if run.settings]
    names = sorted({name for run in known for name in run.settings})
    different = [
        name
        for name in names
        if len({repr(run.settings.get(name)) for run in known}) > 1
        and not (name.startswith("trainer.callbacks.") and any(name not in run.settings for run in known))
    ]
    owners = Counter(end for name in different for end in _ends(name))
    return {
        next((end for end in _ends(name) if end not in COLUMNS and owners[end] == 1), name): name for name in different
    }


def _ends(name: str) -> list[str]:
    """The ends of a dotted name, the shortest first.

    Example:
        >>> _ends("data.seed")
        ['seed', 'data.seed']
    """
    parts = name.split(".")
    return [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]
